"""Generates, keeps, replays, and judges rollouts of a pretrained model, for bench/pretrained_cheats.py.

1. A `Lab` is a run on one kind of tasks whose samplers compute in one dtype. Honest rollouts are generated in blocks of BLOCK.
2. Each set of rollouts is kept in a file, and so are its replays: an interrupted bench goes on where it was.
3. `proved` makes claims and proofs from a replay in the sampler's dtype, as a cheat with the weights would.
4. `judged` applies the validator's checks, and `until` counts rollouts until a worker is caught.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from configs import finetune
from inference.proofs import toploc
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from models import transformer
from rl.experiment import experiment as experiment_lib
from rl.experiment import initial
from rl.protocol import lease, task_schedule
from rl.trust.validator import calibrate
from rl.trust.verification import checks, replay, sequential_test, verifier
from rl.trust.verification import rules as rules_lib
from sharding.mesh import mesh as mesh_lib
from sharding.system import atomic_file
from tests.support import proofs as proofs_lib

Rollouts = list[rollout_lib.Rollout]
GROUP, MAX_TOKENS = 8, 64
BLOCK, SLOTS = 128, 128  # rollouts
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
        return experiment(self.model, self.dtype, self.kind, self.gsm8k, self.cache)

    @functools.cached_property
    def params(self) -> transformer.Params:
        """The policy: in the dtype in which a run publishes it."""
        loaded = initial.load(self.experiment, mesh_lib.create({}, devices=jax.devices()[:1]))
        return jax.tree.map(lambda x: x.astype(self.dtype), loaded)

    def groups(self, first: int, count: int) -> list[lease.Lease]:
        """Returns `count` groups of the run from number `first` on."""
        size, found = self.experiment.config.rl.prompts_per_step, []
        for step in range(1 + first // size, 2 + (first + count) // size):
            found += task_schedule.train_groups(self.experiment.config, step)
        return found[first % size :][:count]

    def path(self, name: str) -> pathlib.Path:
        return self.cache / f"{self.dtype}-{self.kind}-{name}.parquet"

    def kept(self, name: str, count: int, make: Callable[[int, int], Rollouts]) -> Rollouts:
        """Returns `count` rollouts of a name; `make(first group, number of groups)` makes those that the cache lacks."""
        found = parquet.read(self.path(name)) if self.path(name).exists() else []
        if len(found) < count:
            found += make(len(found) // GROUP, -(-(count - len(found)) // GROUP))
            parquet.write(self.path(name), found)
        return found[:count]

    def num_kept(self, name: str) -> int:
        return len(self.kept(name, 0, lambda *_: []))

    def honest(self, count: int) -> Rollouts:
        """Returns `count` honest rollouts, block by block."""
        found = []
        for n in range(0, -(-count // GROUP), BLOCK // GROUP):
            found += self.kept(f"honest-{n}", BLOCK, lambda _, size, n=n: self.play({"": None}, n, size)[""])
        return found[:count]

    def replayed_honest(self, count: int, dtype: str) -> list[replay.Replayed]:
        """Returns the replays of `count` honest rollouts, block by block."""
        rollouts = self.honest(-(-count // BLOCK) * BLOCK)
        blocks = [rollouts[start : start + BLOCK] for start in range(0, len(rollouts), BLOCK)]
        found = (self.replayed(f"honest-{i * BLOCK // GROUP}", block, dtype) for i, block in enumerate(blocks))
        return [one for block in found for one in block][:count]

    def play(self, changes: dict, first: int, count: int, params=None, model=None, **engine) -> dict[str, Rollouts]:
        """Generates groups once per change of requests, all in one scheduler."""
        begun = time.monotonic()
        exp = dataclasses.replace(self.experiment, engine=dataclasses.replace(self.experiment.engine, **engine))
        exp = dataclasses.replace(exp, model=model or exp.model)
        groups = self.groups(first, count)
        of = {name: [dataclasses.replace(g) for g in groups] for name in changes}
        every = [(name, group) for name in of for group in of[name]]
        turn = iter(every)

        def change(request):
            name, _ = next(turn)
            return changes[name](self, request) if changes[name] else request

        params, groups = self.params if params is None else params, [g for _, g in every]
        flat = calibrate.roll_out(exp, params, 0, groups, NODE, change=change)
        tokens, took = sum(int(one.sampled_mask.sum()) for one in flat), time.monotonic() - begun
        print(f"{self.dtype} {self.kind} {[*changes]}: {tokens} tokens, {took:.0f} s", file=sys.stderr, flush=True)
        return {name: flat[i * count * GROUP : (i + 1) * count * GROUP] for i, name in enumerate(of)}

    def replayed(self, name: str, rollouts: Rollouts, dtype: str) -> list[replay.Replayed]:
        """Returns the replays of the rollouts of a name in `dtype`; those that the cache lacks are made a few at a time, and kept."""
        path = self.path(name).with_suffix(f".{dtype}.pickle")
        found = pickle.loads(path.read_bytes()) if path.exists() else []
        while len(found) < len(rollouts):
            found += self.replays(rollouts[len(found) :][: rules_lib.MAX_REPLAY_ROWS], dtype)
            atomic_file.write(path, pickle.dumps(found))
        return found[: len(rollouts)]

    def replays(self, rollouts: Rollouts, dtype: str) -> list[replay.Replayed]:
        """Replays rollouts together with the policy that this run publishes, computed in `dtype`."""
        model = dataclasses.replace(self.experiment.model, dtype=dtype)
        policy = jax.tree.map(lambda w: w.astype(dtype), self.params)
        validator = verifier.Verifier(model, lambda version, epoch: policy, rules_lib.Rules.of(self.experiment.config))
        return [dataclasses.replace(one, hidden_ND=np.array(one.hidden_ND)) for one in validator.replay(rollouts)]


def proved(one: replay.Replayed) -> rollout_lib.Rollout:
    """Returns the rollout with the claims and proofs of a replay."""
    logprobs = np.zeros(len(one.rollout.tokens), np.float32)
    logprobs[one.positions_N] = np.minimum(one.logp_N, 0)
    return dataclasses.replace(one.rollout, logprobs=logprobs, proofs=b"".join(proofs_lib.build(one.hidden_ND)))


def claimed_again(one: replay.Replayed, rollout: rollout_lib.Rollout) -> replay.Replayed:
    """Returns the replay of a rollout that differs from the replayed one in claims and proofs alone."""
    proofs = toploc.split(rollout.proofs, *one.hidden_ND.shape)
    (results,) = toploc.verify_proofs_batch([one.hidden_ND], [proofs])
    return dataclasses.replace(one, rollout=rollout, proofs=results)


@contextlib.contextmanager
def patched(module: Any, name: str, wrap: Callable) -> Iterator[None]:
    """Replaces a function of the engine by `wrap(function)`, for programs that are compiled meanwhile."""
    real = getattr(module, name)
    jax.clear_caches()
    setattr(module, name, wrap(real))
    try:
        yield
    finally:
        setattr(module, name, real)
        jax.clear_caches()


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
    c.sampling.max_tokens, c.evaluation.num_tasks = MAX_TOKENS, 1
    c.inference.update(max_model_len=512, num_slots=SLOTS, prefill_batch=8)
    c.train.update(row_length=1024, rows=8)
    c.inference.mesh.tensor = 1
    return experiment_lib.resolve(initial.completed(c))


# ---- verdicts --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Judged:
    """One group: why each rollout is refused on its own ("": it is not), and the log bets for its worker's test."""

    refused: list[str]
    claims_K: np.ndarray
    gains: dict[str, np.ndarray]


def judged(found: Sequence[replay.Replayed], rules: rules_lib.Rules) -> list[Judged]:
    """Applies the validator's checks of one rollout and its tests of one worker to each group."""
    groups: dict[tuple, list[replay.Replayed]] = collections.defaultdict(list)
    for one in found:
        proofs = [_compared(result, rules.tolerance.proofs) for result in one.proofs]
        group = groups[one.rollout.step, one.rollout.task.group]
        group.append(dataclasses.replace(one, proofs=proofs))
    return [_judged(group, rules) for group in groups.values()]


def _judged(group: Sequence[replay.Replayed], rules: rules_lib.Rules) -> Judged:
    rollouts, refused = [one.rollout for one in group], []
    for one, noise in zip(group, checks.claimed_logprobs(rollouts), strict=True):
        verdict = checks.first_failure(checks.WITH_WEIGHTS, one, rules)
        refused.append("noise" if not noise.accepted else "" if verdict.accepted else verdict.reason)
    ratios = [sequential_test.claims_ratio(y_N) for y_N in checks.exponential_noise(rollouts)]
    assert rules.bands is not None
    gains = sequential_test.group_gains(rules.bands, [one.evidence for one in group])
    return Judged(refused, np.sum(ratios, axis=0), gains)


def _compared(result: toploc.ProofResult, limits: toploc.Thresholds) -> toploc.ProofResult:
    """Returns the result of a proof of 128 values under other limits."""
    is_near = result.exp_mismatches <= limits.exp_mismatches and result.mantissa_mean <= limits.mantissa_mean
    is_near = is_near and result.mantissa_median <= limits.mantissa_median
    return dataclasses.replace(
        result, accepted=result.accepted and is_near, reason=result.reason if is_near else "limits"
    )


def until(groups: Iterable[Judged], test: sequential_test.SequentialTest) -> tuple[float, str]:
    """Returns (after how many rollouts a worker is caught, inf if never; the reason or the stream). Changes the test."""
    count = 0
    for group in groups:
        for number, reason in enumerate(group.refused):
            if reason:
                return count + number + 1, reason
        count += len(group.refused)
        add(test, group)
        if test.flag:
            return count, test.flag.split(":")[0]
    return float("inf"), ""


def add(test: sequential_test.SequentialTest, group: Judged) -> None:
    """Adds a group to a worker's test, as rl/trust/verification/evidence_log.py does."""
    test.add_claims(group.claims_K, len(group.refused))
    test.add_gains(group.gains, len(group.refused))
