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
from inference.proofs import toploc
from inference.rollouts import rollout as rollout_lib
from models import transformer
from rl import envs
from tests.support import doubles

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


def drawn_by(choose: Choose) -> Callable:
    """Every token by a rule of the cheat's own; the rest is made to fit."""
    return lambda double: doubles.prove_again(double, redrawn(double, double.generate(), choose))


def logit_bias(value: float) -> Callable:
    """Three tokens made likelier than they are."""

    def choose(logp_GV, noise_GV):
        return (logp_GV + noise_GV + value * np.isin(np.arange(logp_GV.shape[1]), (101, 116, 32))[None]).argmax(-1)

    return drawn_by(choose)


def runner_up(gap: float) -> Callable:
    """The second-best token wherever it is nearly as good: with it a worker searches many streams for a reward."""

    def choose(logp_GV, noise_GV):
        order_GV = np.argsort(-(logp_GV + noise_GV), axis=-1)[:, :2]
        two_G2 = np.take_along_axis(logp_GV + noise_GV, order_GV, axis=-1)
        return np.where(two_G2[:, 0] - two_G2[:, 1] <= gap, order_GV[:, 1], order_GV[:, 0])

    return drawn_by(choose)


def speculation(least: float) -> Callable:
    """Drafts of a model that is a little off, kept where the policy gives them a probability of `least`."""

    def cheat(double: doubles.Double) -> Rollouts:
        def choose(logp_GV, noise_GV):
            off_GV = np.random.default_rng(double.step).normal(0, 0.3, logp_GV.shape)
            draft_G, own_G = (logp_GV + off_GV + noise_GV).argmax(-1), (logp_GV + noise_GV).argmax(-1)
            kept_G = np.take_along_axis(logp_GV, draft_G[:, None], axis=-1)[:, 0] >= np.log(least)
            return np.where(kept_G, draft_G, own_G)

        return doubles.prove_again(double, redrawn(double, double.generate(), choose))

    return cheat


def old_tail(count: int) -> Callable:
    """The last tokens by the version before."""

    def cheat(double: doubles.Double) -> Rollouts:
        rollouts = double.generate()
        keep = np.array([len(r.tokens) - count for r in rollouts])
        old = doubles.weights(double.version - 1)
        return doubles.prove_again(
            double, redrawn(double, rollouts, lambda logp, noise: (logp + noise).argmax(-1), keep=keep, params=old)
        )

    return cheat


def hidden_top_k(double: doubles.Double) -> Rollouts:
    return doubles.prove_again(double, double.generate(change=lambda r: dataclasses.replace(r, top_k=50)))


def shorter_of_2(double: doubles.Double) -> Rollouts:
    """Drawn twice, with the prescribed seed and another; the shorter one is handed in."""
    second = double.generate(change=lambda r: dataclasses.replace(r, seed=(r.seed + 10**6) % 2**32))
    return [min(pair, key=lambda r: len(r.tokens)) for pair in zip(double.generate(), second, strict=True)]


def likeliest_stop(double: doubles.Double) -> Rollouts:
    """A stop token where it is likeliest, instead of where it is drawn."""
    out, stop = [], doubles.experiment().tokenizer.stop_ids[0]
    for rollout in double.generate():
        tokens_1T = np.zeros((1, 128), np.int32)
        tokens_1T[0, : len(rollout.tokens)] = rollout.tokens
        places = np.arange(rollout.prompt_length, len(rollout.tokens))
        logp_NV = _next_logp(
            double.experiment.model,
            doubles.weights(double.version),
            np.repeat(tokens_1T, 64, 0),
            np.resize(places - 1, 64),
        )
        at = places[int(np.asarray(logp_NV)[: len(places), stop].argmax())]
        tokens = np.append(rollout.tokens[:at], np.int32(stop))
        out.append(doubles.rewritten(double, rollout, tokens.astype(np.int32), finish_reason="stop"))
    return doubles.prove_again(double, out)


def biased_claims(size: float, side: str) -> Callable:
    """Claimed log-probabilities that are a little off: up, down, at random, or to the side of the rollout's advantage."""

    def cheat(double: doubles.Double) -> Rollouts:
        rollouts, rng = double.generate(), np.random.default_rng(double.step)
        mean = {r.task.group: np.mean([o.reward for o in rollouts if o.task.group == r.task.group]) for r in rollouts}
        sides = {
            "up": lambda r: 1.0,
            "down": lambda r: -1.0,
            "random": lambda r: rng.choice([-1.0, 1.0], len(r.tokens)),
            "advantage": lambda r: -np.sign(r.reward - mean[r.task.group]),
        }
        shifts = [np.where(r.sampled_mask, size * sides[side](r), 0).astype(np.float32) for r in rollouts]
        return [
            doubles.signed(r, logprobs=np.minimum(r.logprobs + d, 0)) for r, d in zip(rollouts, shifts, strict=True)
        ]

    return cheat


def own_seed(double: doubles.Double) -> Rollouts:
    """Another seed under its true number."""
    rollouts = double.generate(change=lambda r: dataclasses.replace(r, seed=(r.seed + 10**6) % 2**32))
    return [doubles.signed(r, seed=(r.seed + 10**6) % 2**32) for r in rollouts]


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
        new = redrawn(double, old, lambda logp, noise: (logp + noise).argmax(-1), keep=keep)
        stamps = [r.versions - (np.arange(len(r.tokens)) < n).astype(np.int32) for r, n in zip(new, keep, strict=True)]
        out.append(
            doubles.prove_again(double, [dataclasses.replace(r, versions=v) for r, v in zip(new, stamps, strict=True)])
        )
    return [max(same, key=lambda r: r.reward) for same in zip(*out, strict=True)]


def false_versions(part: Callable) -> Callable:
    """A part of the tokens is labeled as of the version before; the text is of one."""

    def cheat(double: doubles.Double) -> Rollouts:
        return [doubles.signed(r, versions=r.versions - part(r).astype(np.int32)) for r in double.generate()]

    return cheat


def unsampled_token(double: doubles.Double) -> Rollouts:
    """A sampled token labeled as the environment's."""
    out = []
    for rollout in double.generate():
        mask = rollout.sampled_mask.copy()
        mask[rollout.prompt_length + 1 : rollout.prompt_length + 2] = False
        out.append(doubles.signed(rollout, sampled_mask=mask, logprobs=np.where(mask, rollout.logprobs, 0)))
    return out


def longer_prompt(at: int) -> Callable:
    """A space put into the prompt, `at` tokens after its end."""

    def cheat(double: doubles.Double) -> Rollouts:
        out = []
        for r in double.generate():
            place = min(r.prompt_length + at, len(r.tokens))
            fields = {"tokens": ord(" "), "sampled_mask": False, "logprobs": 0, "versions": r.versions[0]}
            changed = {name: np.insert(getattr(r, name), place, value) for name, value in fields.items()}
            out.append(doubles.signed(r, **changed))
        return out

    return cheat


def relabelled(**changes) -> Callable:
    """Honest rollouts of another environment or seed, or with other rewards, under false labels."""

    def cheat(double: doubles.Double) -> Rollouts:
        return [doubles.signed(r, task=dataclasses.replace(r.task, **changes)) for r in double.generate()]

    return cheat


def extra_reward(double: doubles.Double) -> Rollouts:
    return [doubles.signed(r, rewards=dict(r.rewards) | {"bonus": 1.0}) for r in double.generate()]


def half_of_the_proofs(double: doubles.Double) -> Rollouts:
    return [doubles.signed(r, proofs=r.proofs[: len(r.proofs) // 2]) for r in double.generate()]


def one_bad_in_8(double: doubles.Double) -> Rollouts:
    """A proof of another text in one rollout of eight."""
    bad = doubles.copied_proof(double)
    return [b if i % 8 == 5 else r for i, (r, b) in enumerate(zip(double.generate(), bad, strict=True))]


def no_model(proofs: Callable[[int], bytes]) -> Callable:
    """The reference answer, or junk to give an advantage, at a claimed probability of nearly 1: no model has run."""

    def cheat(double: doubles.Double) -> Rollouts:
        exp, out = double.experiment, []
        env = envs.load(exp.config.env.name, seed=exp.config.seed, **exp.config.env.options.to_dict())
        for group in double.groups:
            prompt = list(doubles.prescribed(double.prompts).prompt(group))
            answer = [*env.make_task(group.index, group.split).answer.encode()][: doubles.MAX_TOKENS - 1]
            for sample in range(group.num_samples):
                text = [*(answer if sample % 2 else b"x"), exp.tokenizer.stop_ids[0]]
                tokens = np.array([*prompt, *text], np.int32)
                mask = np.arange(len(tokens)) >= len(prompt)
                blank = rollout_lib.Rollout(
                    tokens=tokens,
                    sampled_mask=mask,
                    logprobs=np.zeros(len(tokens), np.float32),
                    versions=np.full(len(tokens), double.version, np.int32),
                    temperature=group.temperature,
                    seed=(group.seed + sample) % 2**32,
                    task=rollout_lib.TaskRef(exp.config.env.name, group.index, group.group, exp.config.seed),
                    sample=sample,
                    step=double.step,
                    reward=0.0,
                    rewards={},
                    finish_reason="stop",
                    proofs=proofs(len(text)),
                    worker="",
                    signature=b"",
                )
                scored = doubles.rewritten(double, blank, tokens)
                out.append(doubles.signed(scored, logprobs=np.where(mask, -0.001, 0).astype(np.float32)))
        return out

    return cheat


def zeros(num_rows: int) -> bytes:
    return bytes(sum(2 + 2 * min(128, min(32, num_rows - n) * 32) for n in range(0, num_rows, 32)))


def random_proofs(num_rows: int) -> bytes:
    """Proofs of the right form, of nothing."""
    rng = np.random.default_rng(num_rows)
    hidden_TD = rng.standard_normal((num_rows, 32)).astype(jnp.bfloat16)
    return b"".join(toploc.encode(toploc._top_values(toploc._chunks(hidden_TD, 32), 128)))


FORGERIES: dict[str, Callable[[doubles.Double], Rollouts]] = {
    "logit_bias_1": logit_bias(1.0),
    "logit_bias_0.1": logit_bias(0.1),
    "temperature_0.97": doubles.temperature(0.97),
    "temperature_1.03": doubles.temperature(1.03),
    "old_tail_8": old_tail(8),
    "speculation_0.3": speculation(0.3),
    "speculation_0.02": speculation(0.02),
    **{
        f"claims_{size}_{side}": biased_claims(size, side)
        for size in (0.045, DELTA_E)
        for side in ("up", "down", "random", "advantage")
    },
    "runner_up_0.02": runner_up(0.02),
    "runner_up_0.001": runner_up(0.001),
    "better_version": better_version,
    "best_switch": best_switch,
    "versions_half_old": false_versions(lambda r: np.arange(len(r.tokens)) < (r.prompt_length + len(r.tokens)) // 2),
    "prompt_keys_older": false_versions(lambda r: ~r.sampled_mask),
    "space_in_the_prompt": longer_prompt(0),
    "tokens_between": longer_prompt(2),
    "reward_plus_9e-7": lambda double: [
        doubles.signed(r, reward=r.reward + 9e-7, rewards=dict(r.rewards) | {"reward": r.reward + 9e-7})
        for r in double.generate()
    ],
    "another_task_seed": relabelled(seed=99),
    "another_environment": relabelled(env="other"),
    "copied_from_a_peer": doubles.honest,
    "no_model": no_model(zeros),
    "no_model_random_proofs": no_model(random_proofs),
    **{
        cheat.__name__: cheat
        for cheat in (
            hidden_top_k,
            shorter_of_2,
            likeliest_stop,
            own_seed,
            unsampled_token,
            extra_reward,
            half_of_the_proofs,
            one_bad_in_8,
        )
    },
}
