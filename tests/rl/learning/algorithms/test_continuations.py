"""Continuations of a group's samples: which ones are made, that no others pass, and the advantages that they give each token."""

import asyncio
import dataclasses

import numpy as np
import pytest

from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl.learning.algorithms import continuations
from rl.learning.batch import credit
from rl.protocol import noise_seed
from tests.support import tiny

OPTIONS = {"num_continuations": 2, "step_tokens": 2, "max_states": 2, "token_ratio": 4.0}
SAMPLING = {"n": 3, "max_tokens": 8, "temperature": 1.0, "seed": 9}
PROMPT = [1, 2, 3]


def root(sample, tokens, reward):
    rng = np.random.default_rng(sample)
    T = len(PROMPT) + len(tokens)
    mask = np.arange(T) >= len(PROMPT)
    arrays = {"tokens": np.int32([*PROMPT, *tokens]), "logprobs": np.float32(np.where(mask, -rng.random(T), 0))}
    return tiny.rollout(mask, **arrays, sample=sample, reward=reward, rewards={"reward": reward}, seed=9 + sample)


ROOTS = [root(0, b"abcdef", 1.0), root(1, b"ghij", 0.0), root(2, b"k", 0.0)]


def score(texts):
    """The number of letters in a text over 8."""
    return [{"reward": len(text) / 8} for text in texts]


async def generate(prompt, asked):
    assert asked["n"] == 1 and asked["max_tokens"] == 8 - (len(prompt) - len(PROMPT))
    tokens = list(b"zy")[: 1 + asked["seed"] % 2]
    return [completion_lib.Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), 0, "length", b"")]


def group(roots=ROOTS):
    own = generate, score, tokenizer_lib.byte_chatml(), roots, SAMPLING, 9, OPTIONS
    return asyncio.run(continuations.sample(*own))


def error(rollouts):
    episodes = rollout_lib.episodes(rollouts)
    return continuations.error([own[0] for own in episodes], [own[1:] for own in episodes], OPTIONS, 8)


def test_a_group_has_the_continuations_of_its_plan():
    """Each is a valid branch with the prescribed seed, and is scored with the tokens of its sample before it."""
    rollouts = group()
    assert error(rollouts) is None and [*map(rollout_lib.validate, rollouts)] == [None] * len(rollouts)
    wanted = continuations.expected(ROOTS, OPTIONS)
    assert sum(map(len, wanted)) == len(rollouts) - 3 > 2 and wanted[2] == []
    for episode, own in zip(rollout_lib.episodes(rollouts), wanted, strict=True):
        assert [one.trains for one in episode] == [True, *[False] * len(own)]
        for branch, (s, draw) in zip(episode[1:], own, strict=True):
            prompt = branch.tokens[: branch.prompt_length]
            assert prompt.tolist() == episode[0].tokens[: 3 + s].tolist()
            assert branch.seed == noise_seed.stream_seed(9, branch.sample, branch.branch, prompt, draw)
            assert branch.reward == (s + branch.sampled_mask.sum()) / 8
    same = [dataclasses.replace(one, reward=1.0) for one in ROOTS]
    assert len(group(same)) == 3  # nothing to learn, so nothing to continue


@pytest.mark.parametrize(
    "change",
    [
        {"trains": True},
        {"draw": 5},
        {"call_limits": np.int32([8])},
        {"call_limits": None},
        {"versions": np.int32([1] * 20)},
        {"tokens": np.int32([7] * 20)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_other_continuations_pass(change):
    rollouts = group()
    number = next(i for i, one in enumerate(rollouts) if one.branch)
    T = len(rollouts[number].tokens)
    change = {name: x[:T] if name in ("versions", "tokens") else x for name, x in change.items()}
    changed = [dataclasses.replace(one, **change) if i == number else one for i, one in enumerate(rollouts)]
    assert error(changed) is not None
    assert error([one for i, one in enumerate(rollouts) if i != number]) is not None  # fewer
    idle = [dataclasses.replace(one, trains=False) for one in rollouts]
    assert error(idle) is not None  # a sample that would not train


def test_the_tokens_of_a_step_get_the_difference_of_values():
    """A worker's continuations have no other effect: they are in no tree, and the steps of a sample add up to its advantage."""
    rollouts = group()
    trees, flat = credit.Credit(advantage="rloo", credit="vine", share_prompts=False).assign([rollouts])
    assert flat == 0 and sum(len(tree.branches) for tree in trees) == 3
    for tree, episode in zip(trees, rollout_lib.episodes(rollouts), strict=True):
        one, (branch,) = episode[0], tree.branches
        others = np.mean([other.reward for other in ROOTS if other.sample != one.sample])
        states = sorted({b.prompt_length for b in episode[1:]})
        values = [np.mean([b.reward for b in episode[1:] if b.prompt_length == s]) for s in states]
        bounds, ends = [3, *states, len(one.tokens)], [others, *values, one.reward]
        expected = np.concatenate([np.zeros(3), np.repeat(np.diff(ends), np.diff(bounds))])
        np.testing.assert_allclose(branch.advantage, expected, atol=1e-6)  # float32
    plain, _ = credit.Credit(advantage="rloo", credit="vine", share_prompts=False).assign([ROOTS])
    base, _ = credit.Credit(advantage="rloo", share_prompts=False).assign([ROOTS])
    for one, other in zip(plain, base, strict=True):  # without continuations it is leave-one-out
        np.testing.assert_allclose(one.branches[0].advantage, other.branches[0].advantage, atol=1e-7)
