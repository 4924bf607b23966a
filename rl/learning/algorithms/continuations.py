"""Continuations of the states inside a group's samples, from which VinePPO takes their values (rl/learning/algorithms/vine.py).

A continuation is a further branch of its sample's episode that does not train: its prompt is the task's prompt and the first tokens of
the sample, its seed that of a branch with this prompt, and its reward that of both texts together. So it has proofs, a signature, and a
replay as every rollout; and `expected` states which ones a group must have, no more and no less.

No jax here: a worker starts in a second.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl.learning.algorithms import vine
from rl.protocol import noise_seed

Score = Callable[[Sequence[str]], Sequence[Mapping[str, float]]]
Generate = Callable[[list[int], dict], Awaitable[list[completion_lib.Completion]]]


def expected(roots: Sequence[rollout_lib.Rollout], options: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    """Returns, per sample, the (number of completion tokens before it, draw) of its continuations, in order; `options` as of `vine.plan`."""
    logprobs = [root.logprobs[root.prompt_length :] for root in roots]
    names = ("num_continuations", "step_tokens", "max_states", "token_ratio")
    states = vine.plan([root.reward for root in roots], logprobs, **{name: options[name] for name in names})
    return [[(s, draw) for s in own for draw in range(options["num_continuations"])] for own in states]


def error(
    roots: Sequence[rollout_lib.Rollout], branches: Sequence[Sequence[rollout_lib.Rollout]], options, most: int
) -> str | None:
    """Returns why the continuations of a group (`branches`, per sample of `roots`) are not those prescribed, or None. A completion has `most` tokens."""
    for root, own, wanted in zip(roots, branches, expected(roots, options), strict=True):
        found = [(branch.prompt_length - root.prompt_length, branch.draw) for branch in own]
        if found != wanted:
            return f"sample {root.sample} has continuations (tokens before, draw) {found[:8]}, and {wanted[:8]} are prescribed"
        for branch, (s, _) in zip(own, wanted, strict=True):
            is_prefix = np.array_equal(branch.tokens[: branch.prompt_length], root.tokens[: branch.prompt_length])
            limits = [most] if branch.call_limits is None else branch.call_limits.tolist()
            is_one = len({*branch.versions.tolist(), *root.versions.tolist()}) == 1
            if not (is_prefix and limits == [most - s] and is_one and root.trains and not branch.trains):
                return f"continuation {branch.branch} of sample {root.sample} does not keep the sample's tokens, limit, and policy version"
    return None


async def sample(
    generate: Generate,
    score: Score,
    tokenizer: tokenizer_lib.Tokenizer,
    roots: Sequence[rollout_lib.Rollout],
    sampling: Mapping,
    group_seed: int,
    options: Mapping[str, Any],
) -> list[rollout_lib.Rollout]:
    """Samples and scores the continuations of a group's scored samples. Returns all rollouts, unsigned, episode by episode."""
    wanted = [(root, s, draw) for root, own in zip(roots, expected(roots, options), strict=True) for s, draw in own]

    async def one(root: rollout_lib.Rollout, s: int, draw: int) -> completion_lib.Completion:
        prefix = root.tokens[: root.prompt_length + s]
        seed = noise_seed.stream_seed(group_seed, root.sample, 1, prefix, draw)
        asked = {**sampling, "n": 1, "seed": seed, "max_tokens": sampling["max_tokens"] - s}
        return (await generate(prefix.tolist(), asked))[0]

    samples = await asyncio.gather(*(one(*place) for place in wanted))
    texts = []
    for (root, s, _), found in zip(wanted, samples, strict=True):
        P = root.prompt_length
        texts.append(tokenizer.scored_text(root.tokens[:P].tolist(), [*root.tokens[P : P + s].tolist(), *found.tokens]))
    scores = await asyncio.to_thread(score, texts) if texts else []
    episodes = {root.sample: [root] for root in roots}
    for (root, s, draw), found, own in zip(wanted, samples, scores, strict=True):
        P, episode = root.prompt_length + s, episodes[root.sample]
        tokens = np.array([*root.tokens[:P], *found.tokens], np.int32)
        branch = dataclasses.replace(
            root,
            **completion_lib.of_calls(tokens, [(P, len(tokens), found)]),
            seed=noise_seed.stream_seed(group_seed, root.sample, 1, root.tokens[:P], draw),
            reward=own["reward"],
            rewards=dict(own),
            branch=len(episode),
            call_limits=np.array([sampling["max_tokens"] - s], np.int32),
            draw=draw,
            trains=False,
        )
        episode.append(branch)
    numbered = (dataclasses.replace(one, num_branches=len(episode)) for episode in episodes.values() for one in episode)
    return list(numbered)
