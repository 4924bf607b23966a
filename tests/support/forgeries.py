"""Workers that cheat with more care: doubles that live in tolerances, choose among honest results, or have no model.

Like those of tests/support/doubles.py, each returns the signed rollouts of one batch. `redrawn` lets a cheat with the weights choose every
token itself; log-probabilities and proofs are then made to fit.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from inference.engine import sampler
from inference.rollouts import kept_sets
from inference.rollouts import rollout as rollout_lib
from models import transformer
from tests.support import doubles, forger

Rollouts = list[rollout_lib.Rollout]
Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (log-probabilities, noise) [G, V] -> tokens [G]
DELTA_E = 9e-4  # nats: within every tolerance that bfloat16 leaves


@functools.partial(jax.jit, static_argnums=0)
def _next_logp(model, params, tokens_GT, at_G):
    hidden_GTD = transformer.apply(params, model, tokens_GT)[0]
    hidden_G1D = jnp.take_along_axis(hidden_GTD, at_G[:, None, None], axis=1)
    return jax.nn.log_softmax(transformer.logits(params, model, hidden_G1D)[:, 0])


def redrawn(double: doubles.Double, rollouts: Rollouts, choose: Choose, *, keep=None, params=None) -> Rollouts:
    """Texts that `choose` draws with their prescribed noise, after the first `keep` [G] tokens of each; not proved yet."""
    exp, params = double.experiment, doubles.weights(double.version) if params is None else params
    prompts = np.array([r.prompt_length for r in rollouts])
    keep = prompts.copy() if keep is None else np.maximum(prompts, keep)
    tokens_GT = np.zeros((len(rollouts), exp.config.inference.max_model_len), np.int32)
    for row, rollout in enumerate(rollouts):
        tokens_GT[row, : keep[row]] = rollout.tokens[: keep[row]]
    seeds, end, stops = np.array([r.seed for r in rollouts], np.uint32), keep.copy(), exp.tokenizer.stop_ids
    alive = end - prompts < doubles.MAX_TOKENS
    while alive.any():
        logp_GV = np.asarray(_next_logp(exp.model, params, tokens_GT, end - 1))
        noise_GV = np.asarray(sampler.noise(seeds, end, logp_GV.shape[-1]))
        chosen_G = choose(logp_GV, noise_GV)
        tokens_GT[alive, end[alive]] = chosen_G[alive]
        end = end + alive
        alive = alive & ~np.isin(chosen_G, stops) & (end - prompts < doubles.MAX_TOKENS)
    texts = [tokens_GT[row, : end[row]] for row in range(len(rollouts))]
    endings = ["stop" if text[-1] in stops else "length" for text in texts]
    return [
        doubles.rewritten(double, rollout, text, finish_reason=ending)
        for rollout, text, ending in zip(rollouts, texts, endings, strict=True)
    ]


def own_draw(logp_GV, noise_GV):
    """Returns the tokens that the policy draws."""
    return (logp_GV + noise_GV).argmax(-1)


def logit_bias(value, double, logp_GV, noise_GV):
    """Three tokens made likelier than they are."""
    return (logp_GV + noise_GV + value * np.isin(np.arange(logp_GV.shape[1]), (101, 116, 32))[None]).argmax(-1)


def runner_up(gap, double, logp_GV, noise_GV):
    """The second-best token wherever it is nearly as good: with it a worker searches many streams for a reward."""
    order_GV = np.argsort(-(logp_GV + noise_GV), axis=-1)[:, :2]
    two_G2 = np.take_along_axis(logp_GV + noise_GV, order_GV, axis=-1)
    return np.where(two_G2[:, 0] - two_G2[:, 1] <= gap, order_GV[:, 1], order_GV[:, 0])


def speculation(least, double, logp_GV, noise_GV):
    """Drafts of a model that is a little off, kept where the policy gives them a probability of `least`."""
    off_GV = np.random.default_rng(double.step).normal(0, 0.3, logp_GV.shape)
    draft_G, own_G = (logp_GV + off_GV + noise_GV).argmax(-1), (logp_GV + noise_GV).argmax(-1)
    kept_G = np.take_along_axis(logp_GV, draft_G[:, None], axis=-1)[:, 0] >= np.log(least)
    return np.where(kept_G, draft_G, own_G)


def drawn_by(rule: Callable, *arguments) -> Callable:
    """Every token by a rule of the cheat's own; the rest is made to fit."""

    def cheat(double: doubles.Double) -> Rollouts:
        choose = functools.partial(rule, *arguments, double)
        return doubles.prove_again(double, redrawn(double, double.generate(), choose))

    return cheat


def old_tail(count: int, double: doubles.Double) -> Rollouts:
    """The last tokens by the version before."""
    rollouts, old = double.generate(), doubles.weights(double.version - 1)
    keep = np.array([len(r.tokens) - count for r in rollouts])
    return doubles.prove_again(double, redrawn(double, rollouts, own_draw, keep=keep, params=old))


def shorter_of_2(double: doubles.Double) -> Rollouts:
    """Drawn twice, with the prescribed seed and another; the shorter one is handed in."""
    return [min(pair, key=lambda r: len(r.tokens)) for pair in doubles.drawn_twice(double)]


def likeliest_stop(double: doubles.Double) -> Rollouts:
    """A stop token where it is likeliest, instead of where it is drawn."""
    out, stop = [], doubles.experiment().tokenizer.stop_ids[0]
    for rollout in double.generate():
        tokens_1T = np.zeros((1, 128), np.int32)
        tokens_1T[0, : len(rollout.tokens)] = rollout.tokens
        places = np.arange(rollout.prompt_length, len(rollout.tokens))
        rows_NT, at_N = np.repeat(tokens_1T, 64, 0), np.resize(places - 1, 64)
        logp_NV = _next_logp(double.experiment.model, doubles.weights(double.version), rows_NT, at_N)
        at = places[int(np.asarray(logp_NV)[: len(places), stop].argmax())]
        tokens = np.append(rollout.tokens[:at], np.int32(stop))
        out.append(doubles.rewritten(double, rollout, tokens.astype(np.int32), finish_reason="stop"))
    return doubles.prove_again(double, out)


def biased_claims(size: float, side: str, double: doubles.Double) -> Rollouts:
    """Claimed log-probabilities that are a little off: up, down, at random, or to the side of the rollout's advantage."""
    rollouts, rng = double.generate(), np.random.default_rng(double.step)
    mean = {r.task.group: np.mean([o.reward for o in rollouts if o.task.group == r.task.group]) for r in rollouts}
    sides = {
        "up": lambda r: 1.0,
        "down": lambda r: -1.0,
        "random": lambda r: rng.choice([-1.0, 1.0], len(r.tokens)),
        "advantage": lambda r: -np.sign(r.reward - mean[r.task.group]),
    }
    shifts = [np.where(r.sampled_mask, size * sides[side](r), 0).astype(np.float32) for r in rollouts]
    return [doubles.signed(r, logprobs=np.minimum(r.logprobs + d, 0)) for r, d in zip(rollouts, shifts, strict=True)]


def own_seed(double: doubles.Double) -> Rollouts:
    """Another seed under its true number."""
    return [doubles.signed(doubles.other_seed(r)) for r in double.generate(change=doubles.other_seed)]


def better_version(double: doubles.Double) -> Rollouts:
    """The better answer of the two versions that are allowed, truly stamped. A lease that pins the version ends it."""
    old = double.generate(doubles.weights(double.version - 1))
    stamped = [doubles.signed(r, versions=r.versions - 1) for r in old]
    return [max(pair, key=lambda r: r.reward) for pair in zip(double.generate(), stamped, strict=True)]


def best_switch(double: doubles.Double) -> Rollouts:
    """The best answer of four points at which the version changes, truly stamped."""
    old, out = double.generate(doubles.weights(double.version - 1)), [double.generate()]
    for part in (0.25, 0.5, 0.75):
        keep = np.array([r.prompt_length + int(part * r.sampled_mask.sum()) for r in old])
        new = redrawn(double, old, own_draw, keep=keep)
        stamps = [r.versions - (np.arange(len(r.tokens)) < n).astype(np.int32) for r, n in zip(new, keep, strict=True)]
        stamped = [dataclasses.replace(r, versions=v) for r, v in zip(new, stamps, strict=True)]
        out.append(doubles.prove_again(double, stamped))
    return [max(same, key=lambda r: r.reward) for same in zip(*out, strict=True)]


def false_versions(part: Callable) -> Callable:
    """A part of the tokens is labeled as of the version before; the text is of one."""
    return doubles.relabeled(lambda r: {"versions": r.versions - part(r).astype(np.int32)})


def unsampled_token(r: rollout_lib.Rollout) -> dict:
    """A sampled token labeled as the environment's."""
    mask = r.sampled_mask & (np.arange(len(r.tokens)) != r.prompt_length + 1)
    return {"sampled_mask": mask, "logprobs": np.where(mask, r.logprobs, 0)}


def longer_prompt(at: int) -> Callable:
    """A space put into the prompt, `at` tokens after its end."""

    def change(r):
        place = min(r.prompt_length + at, len(r.tokens))
        fields = {"tokens": ord(" "), "sampled_mask": False, "logprobs": 0, "versions": r.versions[0]}
        return {name: np.insert(getattr(r, name), place, value) for name, value in fields.items()}

    return doubles.relabeled(change)


def plus(name: str, value: float) -> Callable:
    """Another claim of a part of the reward, or of a part that the environment does not have."""

    def change(r):
        rewards = dict(r.rewards) | {name: r.rewards.get(name, 0.0) + value}
        return {"reward": rewards["reward"], "rewards": rewards}

    return doubles.relabeled(change)


def of_task(**changes) -> Callable:
    """Honest rollouts of another environment or seed, by their labels."""
    return doubles.relabeled(lambda r: {"task": dataclasses.replace(r.task, **changes)})


def one_bad_in_8(double: doubles.Double) -> Rollouts:
    """A proof of another text in one rollout of eight."""
    bad = doubles.copied_proof(double)
    return [b if i % 8 == 5 else r for i, (r, b) in enumerate(zip(double.generate(), bad, strict=True))]


def no_model(formed: bool, double: doubles.Double) -> Rollouts:
    """Right answers, and junk to give an advantage, at a claimed probability of nearly 1: no model has run."""
    made = forger.Forger(double.experiment, formed=formed)
    return [r for group in double.groups for r in made.forge(group, doubles.NODE, double.version)]


def own_kept_tokens(r: rollout_lib.Rollout) -> dict:
    """Each sampled token as the only one to sample from: importance ratios would be 1 under every policy."""
    return {"kept": kept_sets.encode(r.tokens[r.sampled_mask][:, None])}


def cut(r: rollout_lib.Rollout) -> dict:
    """The first token of each completion, as if the call had asked for one."""
    arrays = {
        name: getattr(r, name)[: r.prompt_length + 1] for name in ("tokens", "sampled_mask", "logprobs", "versions")
    }
    return arrays | {"call_limits": np.int32([1]), "finish_reason": "length"}


def every_other(r: rollout_lib.Rollout) -> dict:
    """Every second sample does not train: the worker chooses the gradient."""
    return {"trains": r.sample % 2 == 0}


FORGERIES: dict[str, Callable[[doubles.Double], Rollouts]] = {
    "logit_bias_1": drawn_by(logit_bias, 1.0),
    "logit_bias_0.1": drawn_by(logit_bias, 0.1),
    "temperature_0.97": doubles.temperature(0.97),
    "temperature_1.03": doubles.temperature(1.03),
    "old_tail_8": functools.partial(old_tail, 8),
    "speculation_0.3": drawn_by(speculation, 0.3),
    "speculation_0.02": drawn_by(speculation, 0.02),
    **{
        f"claims_{size}_{side}": functools.partial(biased_claims, size, side)
        for size in (0.045, DELTA_E)
        for side in ("up", "down", "random", "advantage")
    },
    "runner_up_0.02": drawn_by(runner_up, 0.02),
    "runner_up_0.001": drawn_by(runner_up, 0.001),
    "better_version": better_version,
    "best_switch": best_switch,
    "versions_half_old": false_versions(lambda r: np.arange(len(r.tokens)) < (r.prompt_length + len(r.tokens)) // 2),
    "prompt_keys_older": false_versions(lambda r: ~r.sampled_mask),
    "space_in_the_prompt": longer_prompt(0),
    "tokens_between": longer_prompt(2),
    "reward_plus_9e-7": plus("reward", 9e-7),
    "another_task_seed": of_task(seed=99),
    "another_environment": of_task(env="other"),
    "copied_from_a_peer": doubles.honest,
    "no_model": functools.partial(no_model, False),
    "no_model_random_proofs": functools.partial(no_model, True),
    "hidden_top_k": doubles.proved(lambda r: dataclasses.replace(r, top_k=50)),
    "unsampled_token": doubles.relabeled(unsampled_token),
    "cut_completions": doubles.relabeled(cut),
    "idle_samples": doubles.relabeled(every_other),
    "own_kept_tokens": doubles.relabeled(own_kept_tokens),
    "extra_reward": plus("bonus", 1.0),
    "half_of_the_proofs": doubles.relabeled(lambda r: {"proofs": r.proofs[: len(r.proofs) // 2]}),
    **{cheat.__name__: cheat for cheat in (shorter_of_2, likeliest_stop, own_seed, one_bad_in_8)},
}
