"""Plays cheats against the validator with a pretrained model, for `python -m bench.cheats --model FOLDER`.

1. Honest rollouts of `--honest` short sums, and of GSM8K (`--gsm8k FOLDER`), are generated once per dtype and kept in `--cache`. The first
   MEASURED of each kind are the run's own, from which its limits and bands are measured; the others are of honest strangers.
2. Cheats change requests, weights, or options of the engine; several play in one scheduler. Claims and proofs of "proved" ones are made
   again by a prefill, as a cheat with the weights would. The others change honest rollouts.
3. Regimes are pairs of dtypes, of the sampler and of the validator. Printed per cheat: the share of rollouts refused on their own, and
   the rollouts until a worker is caught, median and worst over starting points; "debt": after 512 honest ones.
"""

import argparse
import collections
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from configs import finetune
from inference.proofs import toploc
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from models import transformer
from rl.experiment import experiment as experiment_lib
from rl.experiment import initial
from rl.protocol import task_schedule
from rl.validator import calibrate
from rl.verification import checks, measurement, replay, sequential_test, verifier
from rl.verification import rules as rules_lib
from sharding import mesh as mesh_lib
from tests.support import proofs as proofs_lib

Rollouts = list[rollout_lib.Rollout]
GROUP, MAX_TOKENS = 8, 64
MEASURED = 128  # rollouts of a kind
REGIMES = {
    f"{a}-{b}": (x, y)
    for a, x in (("f32", "float32"), ("bf16", "bfloat16"))
    for b, y in (("f32", "float32"), ("bf16", "bfloat16"))
}
NODE = rollout_lib.WorkerKey.generate()


@dataclasses.dataclass
class Lab:
    """The rollouts of one sampler's dtype on one kind of tasks, generated when first needed and kept in `cache`."""

    model: str
    dtype: str
    kind: str
    gsm8k: str
    cache: pathlib.Path

    @functools.cached_property
    def experiment(self) -> experiment_lib.Experiment:
        """A run on these tasks: groups of 8, 64 tokens."""
        return experiment(self.model, self.dtype, self.kind, self.gsm8k, self.cache)

    @functools.cached_property
    def params(self) -> transformer.Params:
        """The policy: in the dtype in which a run publishes it."""
        loaded = initial.load(self.experiment, mesh_lib.create({}, devices=jax.devices()[:1]))
        return jax.tree.map(lambda x: x.astype(self.dtype), loaded)

    def groups(self, first: int, count: int) -> list[task_schedule.Group]:
        """Returns `count` groups of the run from number `first` on."""
        size, found = self.experiment.config.rl.prompts_per_step, []
        for step in range(1 + first // size, 2 + (first + count) // size):
            found += task_schedule.train_groups(self.experiment.config, step)
        return found[first % size :][:count]

    def kept(self, name: str, make: Callable[[], Rollouts]) -> Rollouts:
        """Returns the rollouts of a name from the cache, or makes and keeps them."""
        path = self.cache / f"{self.dtype}-{self.kind}-{name}.parquet"
        if not path.exists():
            begun = time.monotonic()
            found = make()
            path.write_bytes(parquet.to_bytes(found))
            tokens = sum(int(one.sampled_mask.sum()) for one in found)
            print(
                f"{path.name}: {len(found)} rollouts, {tokens} tokens, {time.monotonic() - begun:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        return parquet.read(path)

    def honest(self, count: int) -> Rollouts:
        """Returns at least `count` honest rollouts, in blocks of MEASURED."""
        out: Rollouts = []
        while len(out) < count:
            first = len(out) // GROUP
            out += self.kept(f"honest-{first}", lambda first=first: self.play({"": None}, first, MEASURED // GROUP)[""])
        return out[:count]

    def play(self, changes: dict, first: int, count: int, params=None, model=None, **engine) -> dict[str, Rollouts]:
        """Generates groups once per change of requests, all in one scheduler."""
        exp = dataclasses.replace(self.experiment, engine=dataclasses.replace(self.experiment.engine, **engine))
        exp = dataclasses.replace(exp, model=model or exp.model)
        groups = self.groups(first, count)
        of = {name: [dataclasses.replace(g) for g in groups] for name in changes}
        every = [(name, group) for name in of for group in of[name]]
        turn = iter(every)

        def change(request):
            name, _ = next(turn)
            return changes[name](self, request) if changes[name] else request

        flat = calibrate.roll_out(
            exp, self.params if params is None else params, 0, [g for _, g in every], NODE, change=change
        )
        return {name: flat[i * count * GROUP : (i + 1) * count * GROUP] for i, name in enumerate(of)}


@functools.cache
def experiment(model: str, dtype: str, kind: str, gsm8k: str, cache: pathlib.Path) -> experiment_lib.Experiment:
    """Returns a run on a kind of tasks: groups of 8, 64 tokens."""
    c = finetune.get_config()
    c.init_from = model
    if kind == "gsm8k":
        c.env.name, c.env.options = "gsm8k", {"path": gsm8k}
    else:
        file = cache / "sums.jsonl"
        sums = [(a, b) for a in range(1, 31) for b in range(1, 31)]
        rows = [{"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in sums]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        c.env.name, c.env.options = "dataset", {"path": str(file), "reward": "number"}
    c.model.update(dtype=dtype, param_dtype="float32", scan_layers=False, remat="none")
    c.lora.rank = 0
    c.rl.update(prompts_per_step=16, samples_per_prompt=GROUP, num_steps=10**5)
    c.sampling.max_tokens = MAX_TOKENS
    c.inference.update(max_model_len=512, num_slots=64, prefill_batch=8)
    c.train.update(row_length=1024, rows=8)
    c.inference.mesh.tensor = 1
    return experiment_lib.resolve(initial.completed(c))


# ---- cheats ----------------------------------------------------------------------------------------------------------


def asked(**fields) -> Callable:
    """Returns a change of requests: other fields."""
    return lambda lab, request: dataclasses.replace(request, **fields)


def biased(ids: Callable, nats: float) -> Callable:
    """Draws a token of `ids` wherever it is within `nats` of the one that the policy draws; claims and proofs are made again."""
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


def wanted(lab: Lab) -> list[int]:
    """Returns 300 tokens that the policy draws often, every third of the most frequent ones."""
    counts = collections.Counter(np.concatenate([r.tokens[r.sampled_mask] for r in lab.honest(MEASURED)]).tolist())
    frequent = [token for token, _ in counts.most_common(900) if token not in stops(lab)]
    return frequent[1::9][:300]


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


def rounded(levels: int, size: int) -> Callable:
    """Rounds every matrix to `levels` steps on each side, per block of `size` entries (0: per row)."""

    def change(lab: Lab, w):
        if w.ndim < 2:
            return w
        blocks = np.asarray(w, np.float32).reshape(-1, size or w.shape[-1])
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / levels + 1e-30
        return jnp.asarray((np.round(blocks / scale) * scale).reshape(w.shape), w.dtype)

    return lambda lab: jax.tree.map(functools.partial(change, lab), lab.params)


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


def claims(nats: float) -> Callable:
    """Claims err by `nats` along the advantage."""

    def change(lab: Lab, rollouts: Rollouts) -> Rollouts:
        out = []
        for r in rollouts:
            shift = nats * (1 if r.sample % 2 else -1)
            logprobs = np.minimum(r.logprobs + np.where(r.sampled_mask, shift, 0), 0).astype(np.float32)
            reward = float(r.sample % 2)  # as if every second one were right
            rewards = dict(r.rewards) | {"reward": reward}
            out.append(
                rollout_lib.sign(dataclasses.replace(r, logprobs=logprobs, reward=reward, rewards=rewards), NODE)
            )
        return out

    return change


CHANGED: dict[str, Callable] = {f"claims +-{x}": claims(x) for x in (0.02, 0.05, 0.3)}
PROVED = (
    "int8",
    "a step of 1e-5 back",
    "a step of 1e-6 back",
    "T 0.95",
    "T 1.1",
    "top-p 0.95",
    "fp8 KV",
)


def played(lab: Lab, count: int) -> dict[str, Rollouts]:
    """Returns `count` rollouts of each cheat of this kind of tasks."""
    num, out = count // GROUP, {}
    requests = STOPS if lab.kind == "sums" else REQUESTS
    missing = {n: c for n, c in requests.items() if not (lab.cache / f"{lab.dtype}-{lab.kind}-{n}.parquet").exists()}
    made = lab.play(missing, 0, num) if missing else {}
    made = {name: found if found[0].proofs else proved(lab, found) for name, found in made.items()}
    for name in requests:
        out[name] = lab.kept(name, lambda name=name: made[name])
    if lab.kind != "sums":
        for name, change in WEIGHTS.items():
            out[name] = lab.kept(name, lambda change=change: lab.play({"": None}, 0, num, change(lab))[""])
        layers = lab.experiment.model.num_layers - 1
        short = dataclasses.replace(lab.experiment.model, num_layers=layers)
        keep = sorted(lab.params["layers"], key=lambda n: int("".join(filter(str.isdigit, n)) or 0))[:layers]
        fewer = {**lab.params, "layers": {n: lab.params["layers"][n] for n in keep}}
        out["last layer missing"] = lab.kept(
            "last layer missing", lambda: lab.play({"": None}, 0, num, fewer, short)[""]
        )
        pages = {"num_pages": 64 * 4, "page_dtype": "float8_e4m3fn", "num_slots": 32}
        out["fp8 KV"] = lab.kept("fp8 KV", lambda: lab.play({"": None}, 0, num, **pages)[""])
        for name, change in CHANGED.items():
            out[name] = change(lab, lab.honest(max(count, 64)))
        for name in PROVED:
            out[f"{name}, proved"] = lab.kept(f"{name}, proved", lambda name=name: proved(lab, out[name]))
    return out


def proved(lab: Lab, rollouts: Rollouts) -> Rollouts:
    """Returns the rollouts with claims and proofs of an honest prefill."""
    out = []
    for one in replays(lab, lab.dtype, rollouts):
        logprobs = np.zeros(len(one.rollout.tokens), np.float32)
        logprobs[one.positions_N] = np.minimum(one.logp_N, 0)
        proofs = b"".join(proofs_lib.build(one.hidden_ND))
        out.append(rollout_lib.sign(dataclasses.replace(one.rollout, logprobs=logprobs, proofs=proofs), NODE))
    return out


# ---- verdicts --------------------------------------------------------------------------------------------------------


def replays(lab: Lab, dtype: str, rollouts: Rollouts) -> list[replay.Replayed]:
    """Replays rollouts of `lab` with the policy that it publishes, computed in `dtype`."""
    model = dataclasses.replace(lab.experiment.model, dtype=dtype)
    policy = jax.tree.map(lambda w: w.astype(dtype), lab.params)
    validator = verifier.Validator(model, lambda version, epoch: policy, rules_lib.Rules.of(lab.experiment.config))
    out = []
    for start in range(0, len(rollouts), rules_lib.MAX_REPLAY_ROWS):
        out += validator.replay(rollouts[start : start + rules_lib.MAX_REPLAY_ROWS])
    return out


def first_flag(groups: Sequence[tuple[list[bool], list[sequential_test.Evidence]]], bands, before=()) -> float:
    """Returns after how many rollouts a worker is caught, on its own or by statistics; inf if never. `before` are honest groups."""
    test, count = sequential_test.SequentialTest(bands), 0
    for group in before:
        test.add(group)
    for refused, evidence in groups:
        if any(refused):
            return count + refused.index(True) + 1
        count += len(evidence)
        if test.add(evidence):
            return count
    return float("inf")


def judged(
    found: list[replay.Replayed], rules: rules_lib.Rules
) -> list[tuple[list[bool], list[sequential_test.Evidence]]]:
    """Returns (is each rollout refused on its own, the evidence of each) per group."""
    groups = collections.defaultdict(lambda: ([], []))
    for one in found:
        proofs = [_compared(result, rules.tolerance.proofs) for result in one.proofs]
        verdict = checks.first_failure(checks.WITH_WEIGHTS, dataclasses.replace(one, proofs=proofs), rules)
        noise = checks.claimed_logprobs([one.rollout])[0]
        refused, evidence = groups[one.rollout.step, one.rollout.task.group]
        refused.append(not (verdict.accepted and noise.accepted))
        evidence.append(one.evidence)
    return [*groups.values()]


def _compared(result: toploc.ProofResult, limits: toploc.Thresholds) -> toploc.ProofResult:
    """Returns the result of a proof of 128 values under other limits."""
    is_near = result.exp_mismatches <= limits.exp_mismatches and result.mantissa_mean <= limits.mantissa_mean
    is_near = is_near and result.mantissa_median <= limits.mantissa_median
    return dataclasses.replace(
        result, accepted=result.accepted and is_near, reason=result.reason if is_near else "limits"
    )


def main(args: argparse.Namespace) -> int:
    """Prints a table per regime; returns the exit code: 1 after a false alarm."""
    args.cache.mkdir(parents=True, exist_ok=True)
    alarms = 0
    for regime in args.regimes:
        sampler, validator = REGIMES[regime]
        kinds = ["sums", *(["gsm8k"] if args.gsm8k else [])]
        labs = [Lab(args.model, sampler, kind, args.gsm8k, args.cache) for kind in kinds]
        own, rest = measurement.Measured(), []
        for lab in labs:
            found = [_strip(one) for one in replays(lab, validator, lab.honest(args.honest))]
            for one in found[:MEASURED]:
                own.add(one)
            rest.append(found[MEASURED:] or found)
        tolerance, bands = measurement.limits([own])
        measurement.check_other_texts(tolerance.proofs, [own])
        print(f"{regime}: {own.numbers()}\n  {tolerance}\n  {bands}", flush=True)
        row = "  {:<26}{:>9}{:>9.3f}{:>8}{:>7}{:>7}"
        print("  cheat                      rollouts    alone  median  worst   debt")
        for lab, honest in zip(labs, rest, strict=True):
            rules = dataclasses.replace(rules_lib.Rules.of(lab.experiment.config), tolerance=tolerance, bands=bands)
            groups = judged(honest, rules)
            refused, until = sum(map(sum, (g[0] for g in groups))), first_flag([([False], e) for _, e in groups], bands)
            alarms += refused + (until < float("inf"))
            print(
                row.format(f"honest {lab.kind}", len(honest), refused / len(honest), f"{until:.0f}", "", ""), flush=True
            )
            before = [evidence for _, evidence in groups]
            before = (before * (64 // len(before) + 1))[:64]
            for name, rollouts in played(lab, args.rollouts).items() if args.cheats else ():
                groups_of = judged(replays(lab, validator, rollouts), rules)
                starts = [first_flag([*groups_of[n:], *groups_of[:n]], bands) for n in range(len(groups_of))]
                debt = first_flag(groups_of, bands, before)
                alone = np.mean([one for refused, _ in groups_of for one in refused])
                figures = [f"{x:.0f}" for x in (np.median(starts), np.max(starts), debt)]
                print(row.format(name, len(rollouts), alone, *figures), flush=True)
    print(f"false alarms of honest workers: {alarms}", flush=True)
    return 1 if alarms else 0


def _strip(one: replay.Replayed) -> replay.Replayed:
    return dataclasses.replace(one, hidden_ND=np.array(one.hidden_ND))
