"""Plays cheats against the validator with a pretrained model, for `python -m bench.cheats --model FOLDER`.

1. Honest rollouts of short sums, and of GSM8K (`--gsm8k FOLDER`): two runs. The first MEASURED rollouts of each are the run's own, from which
   its limits and bands are measured; `--honest` others are of strangers (bench/cheat_lab.py).
2. Cheats change requests, weights, options or functions of the engine, or honest rollouts. Claims and proofs of "proved" ones are those of a prefill
   with the policy, as a cheat with the weights would make them.
3. Regimes are pairs of dtypes, of the sampler and of the validator. Printed per cheat: the share of rollouts refused on their own; the
   rollouts until a worker is caught, median and worst over starting points, and median after 512 honest ones; and its gain: mean number of
   tokens, share of wanted tokens, and nats per token by which the sampler favors its own tokens.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bench import cheat_lab
from inference.engine import cpu_decode_attention, sampler
from models import layers, transformer
from rl.verification import measurement, replay, sequential_test
from rl.verification import rules as rules_lib

MEASURED = 128  # rollouts of a kind
HONEST_BEFORE = 512  # rollouts
REGIMES = {
    f"{a}-{b}": (x, y)
    for a, x in (("f32", "float32"), ("bf16", "bfloat16"))
    for b, y in (("f32", "float32"), ("bf16", "bfloat16"))
}
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
    texts = [r.tokens[r.sampled_mask] for r in lab.honest(MEASURED)]
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


def claims(nats: float) -> Callable:
    """Claims err by `nats` along the advantage, as if every second sample were right."""

    def change(one: replay.Replayed) -> replay.Replayed:
        r = one.rollout
        shift, reward = nats * (1 if r.sample % 2 else -1), float(r.sample % 2)
        logprobs = np.minimum(r.logprobs + np.where(r.sampled_mask, shift, 0), 0).astype(np.float32)
        return dataclasses.replace(one, rollout=dataclasses.replace(r, logprobs=logprobs, reward=reward))

    return change


CLAIMS: dict[str, Callable] = {f"claims +-{x}": claims(x) for x in (0.02, 0.05, 0.3, 0.5, 1.0)}
CLAIMS_F32: dict[str, Callable] = {"claims +-2e-05": claims(2e-5)}
PROVED = "int8,a step of 1e-5 back,a step of 1e-6 back,T 0.95,T 1.1,top-p 0.95,fp8 KV,bf16 KV,rotary of decode off by one".split(
    ","
)
AGAIN = {*STOPS, *(name for name in REQUESTS if name.startswith("wanted")), "Gensyn's text"}  # always proved


def made(lab: Lab, name: str, count: int, num: int) -> cheat_lab.Rollouts:
    """Returns rollouts of a cheat that is played in a scheduler of its own, or that rewrites honest ones."""
    play = functools.partial(lab.play, {"": None}, 0, num)
    if name in WEIGHTS:
        return play(WEIGHTS[name](lab))[""]
    if name in ENGINES:
        return play(**ENGINES[name](lab))[""]
    if name in REWRITTEN:
        return REWRITTEN[name](lab, lab.honest(count))
    patches = (PATCHES | PATCHES_F32)[name]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(cheat_lab.patched(*patch))
        return play()[""]


def played(lab: Lab, validator: str, count: int, only: Sequence[str]) -> Iterator[tuple[str, list[replay.Replayed]]]:
    """Yields the replays of `count` rollouts of each cheat of this kind of tasks, which are generated or read from the cache."""
    num = count // cheat_lab.GROUP
    is_f32 = lab.dtype == "float32"
    requests = STOPS if lab.kind == "sums" else REQUESTS
    own = [*WEIGHTS, *ENGINES, *PATCHES, *(PATCHES_F32 if is_f32 else ()), *REWRITTEN] if lab.kind != "sums" else []
    names = [n for n in (*requests, *own) if not only or n in only]
    missing = {n: requests[n] for n in names if n in requests and not lab.path(n).exists()}
    new = lab.play(missing, 0, num) if missing else {}
    if lab.kind != "sums":
        honest = lab.replayed("honest-0", lab.honest(MEASURED), validator)
        for name, change in (CLAIMS | (CLAIMS_F32 if is_f32 else {})).items():
            yield name, [change(one) for one in honest]
    for name in names:
        rollouts = lab.kept(name, lambda name=name: new[name] if name in new else made(lab, name, count, num))
        found = lab.replayed(name, rollouts, validator)
        if name not in AGAIN:
            yield name, found
        if name in AGAIN or name in PROVED:
            by_prefill = found if lab.dtype == validator else lab.replayed(name, rollouts, lab.dtype)
            again = [cheat_lab.claimed_again(b, cheat_lab.proved(a)) for a, b in zip(by_prefill, found, strict=True)]
            yield name if name in AGAIN else f"{name}, proved", again


# ---- the tables -------------------------------------------------------------------------------------------------------


def gain(lab: Lab, found: Sequence[replay.Replayed]) -> tuple[float, float, float]:
    """Returns (mean number of tokens, share of wanted tokens, mean claimed less replayed log-probability) of rollouts."""
    tokens = np.concatenate([one.rollout.tokens[one.positions_N] for one in found])
    errors = np.concatenate([one.error_N for one in found])
    return len(tokens) / len(found), float(np.isin(tokens, wanted(lab)).mean()), float(errors.mean())


def main(args: argparse.Namespace) -> int:
    """Prints a table per regime; returns the exit code: 1 after a false alarm."""
    args.cache.mkdir(parents=True, exist_ok=True)
    alarms = 0
    row = "  {:<28}{:>9}{:>8.3f}{:>8}{:>7}{:>7}  {:>7.1f}{:>8.3f}{:>9.4f}  {}"
    for regime in args.regimes:
        dtype, validator = REGIMES[regime]
        labs = [
            Lab(args.model, dtype, kind, args.gsm8k, args.cache) for kind in ("sums", "gsm8k")[: 1 + bool(args.gsm8k)]
        ]
        print(
            f"{regime}\n  cheat                        rollouts   alone  median  worst   debt   tokens  wanted     nats  reasons"
        )
        for lab in labs:
            found, own = lab.replayed_honest(MEASURED + args.honest, validator), measurement.Measured()
            for one in found[:MEASURED]:
                own.add(one)
            tolerance, bands = measurement.limits([own])
            measurement.check_other_texts(tolerance.proofs, [own])
            numbers = {name: round(x, 5) for name, x in own.numbers().items()}
            print(f"  {lab.kind}: {numbers}\n  {tolerance}\n  {bands}", flush=True)
            rules = dataclasses.replace(rules_lib.Rules.of(lab.experiment.config), tolerance=tolerance, bands=bands)
            strangers = found[MEASURED:]
            groups, test = cheat_lab.judged(strangers, rules), sequential_test.SequentialTest(bands)
            refused = [reason for g in groups for reason in g.refused if reason]
            before = copy.deepcopy(test)
            for group in (groups * (HONEST_BEFORE // cheat_lab.GROUP))[: HONEST_BEFORE // cheat_lab.GROUP]:
                cheat_lab.add(before, group)
            flagged, why = cheat_lab.until([dataclasses.replace(g, refused=[]) for g in groups], test)
            alarms += len(refused) + (flagged < float("inf"))
            reasons = " ".join([*refused, why])
            print(
                row.format(
                    f"honest {lab.kind}",
                    len(strangers),
                    len(refused) / len(strangers),
                    f"{flagged:.0f}",
                    "",
                    "",
                    *gain(lab, strangers),
                    reasons,
                ),
                flush=True,
            )
            for name, found in played(lab, validator, args.rollouts, args.cheats) if args.rollouts else ():
                groups = cheat_lab.judged(found, rules)
                starts = [groups[n:] + groups[:n] for n in range(len(groups))]
                fresh = [cheat_lab.until(start, sequential_test.SequentialTest(bands)) for start in starts]
                later = [cheat_lab.until(start, copy.deepcopy(before))[0] for start in starts]
                counts = [count for count, _ in fresh]
                alone = np.mean([bool(reason) for g in groups for reason in g.refused])
                figures = [f"{x:.0f}" for x in (np.median(counts), np.max(counts), np.median(later))]
                reasons = collections.Counter(reason for _, reason in fresh)
                print(row.format(name, len(found), alone, *figures, *gain(lab, found), dict(reasons)), flush=True)
    print(f"false alarms of honest workers: {alarms}", flush=True)
    return 1 if alarms else 0
