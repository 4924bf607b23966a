"""Cheats with a pretrained model, for bench/cheat_table.py.

1. Cheats change requests, weights, options or functions of the engine, or honest rollouts.
2. Claims and proofs of "proved" ones are those of a prefill with the policy, as a cheat with the weights would make them.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bench import cheat_lab
from inference.engine import cpu_decode_attention, sampler
from models import layers, transformer
from rl.trust.verification import replay

Lab = cheat_lab.Lab


# ---- other requests --------------------------------------------------------------------------------------------------


def asked(**fields) -> Callable:
    return lambda lab, request: dataclasses.replace(request, **fields)


def biased(ids: Callable, nats: float) -> Callable:
    """Draws a token of `ids` wherever it is within `nats` of the one that the policy draws."""
    return lambda lab, r: dataclasses.replace(r, logit_bias=tuple((i, nats) for i in ids(lab)), proofs=False)


def cut(lab: Lab, request):
    """The last 16 tokens of the question are missing."""
    tokens = list(request.tokens)
    return dataclasses.replace(request, tokens=tuple(tokens[:-24] + tokens[-8:]))


def without_system(lab: Lab, request):
    """The system prompt is missing: the first message, up to the second one's start."""
    tokens = list(request.tokens)
    return dataclasses.replace(request, tokens=tuple(tokens[tokens.index(tokens[0], 1) :]))


def stops(lab: Lab) -> Sequence[int]:
    return lab.experiment.tokenizer.stop_ids


@functools.cache
def _wanted(text: bytes) -> tuple[int, ...]:
    counts = collections.Counter(np.frombuffer(text, np.int32).tolist())
    return tuple(token for token, _ in counts.most_common(900))[1::9][:300]


def wanted(lab: Lab) -> tuple[int, ...]:
    """Returns 100 tokens that the policy draws often, every ninth of the most frequent ones; no stop token."""
    texts = [r.tokens[r.sampled_mask] for r in lab.honest(cheat_lab.BLOCK)]
    found = np.concatenate(texts).astype(np.int32)
    return _wanted(found[~np.isin(found, stops(lab))].tobytes())


REQUESTS: dict[str, Callable] = {
    "T 0.95": asked(temperature=0.95),
    "T 1.1": asked(temperature=1.1),
    "top-p 0.95": asked(top_p=0.95),
    "other seed": lambda lab, r: dataclasses.replace(r, seed=(r.seed + 10**6) % 2**32),
    "greedy": asked(temperature=0.0),
    "question cut": cut,
    "system prompt missing": without_system,
    **{f"wanted tenth {x}": biased(wanted, x) for x in (0.28, 0.8, 1.55)},
}
STOPS: dict[str, Callable] = {
    "stop suppressed": biased(stops, -100.0),
    "stop suppressed 0.28": biased(stops, -0.28),
    "stop forced 0.28": biased(stops, 0.28),
    "stop forced 1.55": biased(stops, 1.55),
}

# ---- other weights ---------------------------------------------------------------------------------------------------


def rounded(levels: int, size: int) -> Callable:
    """Rounds every matrix to `levels` steps on each side, per block of `size` entries (0: per row)."""

    def change(w):
        if w.ndim < 2:
            return w
        blocks = np.asarray(w, np.float32).reshape(-1, size or w.shape[-1])
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / levels + 1e-30
        return jnp.asarray((np.round(blocks / scale) * scale).reshape(w.shape), w.dtype)

    return lambda lab: jax.tree.map(change, lab.params)


def step_back(rate: float) -> Callable:
    """Returns weights that differ by a first step of AdamW on honest rollouts: `rate` against the sign of each gradient."""

    def change(lab: Lab):
        exp, some = lab.experiment, lab.honest(16)
        length = max(len(one.tokens) for one in some)
        tokens_BT = np.zeros((len(some), length), np.int32)
        mask_BT = np.zeros((len(some), length), np.float32)
        for row, one in enumerate(some):
            tokens_BT[row, : len(one.tokens)] = one.tokens
            mask_BT[row, : len(one.tokens)] = one.sampled_mask * (row % 2 - 0.5)  # half of the samples are better

        def loss(params):
            hidden_BTD, _ = transformer.apply(params, exp.model, tokens_BT)
            logp_BTV = jax.nn.log_softmax(transformer.logits(params, exp.model, hidden_BTD)[:, :-1])
            logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
            return (logp_BT * mask_BT[:, 1:]).mean()

        whole = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), lab.params)
        grads = jax.grad(loss)(whole)
        return jax.tree.map(lambda w, g: (w - rate * jnp.sign(g)).astype(lab.dtype), whole, grads)

    return change


WEIGHTS: dict[str, Callable] = {
    "int8": rounded(127, 0),
    "4 bit": rounded(7, 32),
    "a step of 1e-5 back": step_back(1e-5),
    "a step of 1e-6 back": step_back(1e-6),
}


def last_layer_missing(lab: Lab) -> dict:
    """Returns the arguments of `Lab.play` for a policy without its last layer."""
    count = lab.experiment.model.num_layers - 1
    keep = sorted(lab.params["layers"])[:count]
    fewer = lab.params | {"layers": {n: lab.params["layers"][n] for n in keep}}
    return {"params": fewer, "model": dataclasses.replace(lab.experiment.model, num_layers=count)}


ENGINES: dict[str, Callable] = {
    "last layer missing": last_layer_missing,
    "fp8 KV": lambda lab: {"num_pages": 64 * 4, "page_dtype": "float8_e4m3fn", "num_slots": 32},
}

# ---- another engine --------------------------------------------------------------------------------------------------


def shifted(real: Callable) -> Callable:
    return lambda config, positions_BT, **how: real(config, positions_BT + (positions_BT.shape[1] == 1), **how)


def second_best(real: Callable) -> Callable:
    """Draws the second best token at every 20th position."""

    def draw(logp_BV, position_B, sampling):
        token_B, best_B = real(logp_BV, position_B, sampling)
        others_BV = jnp.where(jnp.arange(logp_BV.shape[1]) == token_B[:, None], -jnp.inf, logp_BV)
        second_B, logp_B = real(others_BV, position_B, sampling)
        is_at_B = position_B % 20 == 0
        return jnp.where(is_at_B, second_B, token_B), jnp.where(is_at_B, logp_B, best_B)

    return draw


def in_bfloat16(num: int) -> Callable:
    """Returns a wrapper that rounds two arguments, keys and values, from number `num` on."""

    def wrap(real):
        def call(*args, **how):
            found = [x.astype(jnp.bfloat16).astype(x.dtype) for x in args[num : num + 2]]
            return real(*args[:num], *found, *args[num + 2 :], **how)

        return call

    return wrap


Patches = list[tuple]  # of (module, function, wrapper)
PATCHES: dict[str, Patches] = {
    "rotary of decode off by one": [(layers, "rotation", shifted)],
    "noise one position off": [
        (sampler, "noise", lambda real: lambda seed_B, position_B, size: real(seed_B, position_B + 1, size))
    ],
    "runner-up at 1 of 20": [(sampler, "draw", second_best)],
}
PATCHES_F32: dict[str, Patches] = {  # elsewhere the cache is in bfloat16
    "bf16 KV": [(cpu_decode_attention, "step", in_bfloat16(2)), (cpu_decode_attention, "copy_rows", in_bfloat16(0))]
}

# ---- changed rollouts ------------------------------------------------------------------------------------------------


def one_seed(lab: Lab, rollouts: cheat_lab.Rollouts) -> cheat_lab.Rollouts:
    """Hands in the first sample of each group as all of them."""
    out = []
    for first, r in zip(
        np.repeat(np.array(rollouts[:: cheat_lab.GROUP], object), cheat_lab.GROUP), rollouts, strict=True
    ):
        out.append(dataclasses.replace(first, sample=r.sample, seed=r.seed))
    return out


def written_in(lab: Lab, rollouts: cheat_lab.Rollouts) -> cheat_lab.Rollouts:
    """Writes the text of Gensyn's attack over the middle of each completion."""
    text, out = np.array(lab.experiment.tokenizer.encode(" All hail to the thief"), np.int32), []
    for r in rollouts:
        tokens, start = r.tokens.copy(), (r.prompt_length + len(r.tokens) - len(text)) // 2
        tokens[max(start, r.prompt_length) :][: len(text)] = text[: len(r.tokens) - r.prompt_length]
        out.append(dataclasses.replace(r, tokens=tokens))
    return out


REWRITTEN: dict[str, Callable] = {"one seed for all samples": one_seed, "Gensyn's text": written_in}


def claims(nats: float, is_scaled: bool = False) -> Callable:
    """Claims err by `nats` along the advantage, as if every second sample were right; scaled: by as much less as a token is likely."""

    def change(one: replay.Replayed) -> replay.Replayed:
        r, logprobs = one.rollout, one.rollout.logprobs.copy()
        logprobs[one.positions_N] += nats * (1 if r.sample % 2 else -1) * (one.doubt_N if is_scaled else 1)
        reward = float(r.sample % 2)
        return dataclasses.replace(one, rollout=dataclasses.replace(r, logprobs=np.minimum(logprobs, 0), reward=reward))

    return change


CLAIMS: dict[str, Callable] = {f"claims +-{x}": claims(x) for x in (0.02, 0.05, 0.3, 0.5, 1.0)}
CLAIMS |= {f"claims +-{x} (1 - p)": claims(x, True) for x in (0.02, 0.05, 0.2)}
CLAIMS_F32: dict[str, Callable] = {"claims +-2e-05": claims(2e-5)}
PROVED = "int8,a step of 1e-5 back,a step of 1e-6 back,T 0.95,T 1.1,top-p 0.95,fp8 KV,bf16 KV,rotary of decode off by one".split(
    ","
)
AGAIN = {*STOPS, *(name for name in REQUESTS if name.startswith("wanted")), "Gensyn's text"}  # always proved


def names(lab: Lab) -> list[str]:
    """Returns the cheats that are played on the tasks of a lab."""
    if lab.kind == "sums":
        return [*STOPS]
    only_f32 = [*PATCHES_F32, *CLAIMS_F32] if lab.dtype == "float32" else []
    return [*CLAIMS, *REQUESTS, *WEIGHTS, *ENGINES, *PATCHES, *REWRITTEN, *only_f32]


def make_requests(lab: Lab, chosen: Sequence[str], count: int) -> None:
    """Generates the rollouts that the cache lacks of the cheats that only change requests: together, since a full batch costs less."""
    missing = [name for name in chosen if name in REQUESTS | STOPS and lab.num_kept(name) < count]
    for first in {lab.num_kept(name) for name in missing}:
        some = {name: (REQUESTS | STOPS)[name] for name in missing if lab.num_kept(name) == first}
        num = -(-(count - first) // cheat_lab.GROUP)
        for name, rollouts in lab.play(some, first // cheat_lab.GROUP, num).items():
            lab.kept(name, count, lambda _first, _num, rollouts=rollouts: rollouts)


def made(lab: Lab, name: str, first: int, num: int) -> cheat_lab.Rollouts:
    """Returns the rollouts of `num` groups from `first` on, of a cheat that is played in a scheduler of its own or rewrites honest ones."""
    if name in REWRITTEN:
        return REWRITTEN[name](lab, lab.honest((first + num) * cheat_lab.GROUP)[first * cheat_lab.GROUP :])
    how = ENGINES[name](lab) if name in ENGINES else {"params": WEIGHTS[name](lab)} if name in WEIGHTS else {}
    with contextlib.ExitStack() as stack:
        for patch in (PATCHES | PATCHES_F32).get(name, ()):
            stack.enter_context(cheat_lab.patched(*patch))
        return lab.play({"": None}, first, num, **how)[""]


def played(lab: Lab, validator: str, name: str, count: int) -> dict[str, list[replay.Replayed]]:
    """Returns the replays of `count` rollouts of a cheat: as they are, and proved, by the name of either."""
    if change := (CLAIMS | CLAIMS_F32).get(name):
        return {name: [change(one) for one in lab.replayed_honest(count, validator)]}
    rollouts = lab.kept(name, count, functools.partial(made, lab, name))
    found = lab.replayed(name, rollouts, validator)
    out = {} if name in AGAIN else {name: found}
    if name in AGAIN or name in PROVED:
        by_prefill = found if lab.dtype == validator else lab.replayed(name, rollouts, lab.dtype)
        again = [cheat_lab.claimed_again(b, cheat_lab.proved(a)) for a, b in zip(by_prefill, found, strict=True)]
        out[name if name in AGAIN else f"{name}, proved"] = again
    return out
