"""Plays one way to cheat against the real validator, and counts how soon it is caught."""

import collections
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl.trust.verification import checks, evidence_log, measurement, sequential_test
from rl.trust.verification import rules as rules_lib
from sharding.weights import broadcast
from tests.support import doubles, forgeries

REGIMES = {  # dtype of generation, of replay
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "mixed": ("bfloat16", "float32"),
}
CHEATS = doubles.CHEATS | forgeries.FORGERIES
# The first rejection of each. A cheat that changes a few tokens may be seen by the draw or by the log-probability.
REPLAYED = {"sampling", "logprob", "termination", "shape", "toploc"}
REASONS = {
    "wrong_task": {"prompt", "task"},
    "reused_rollout": {"prompt"},
    "copied_proof": {"toploc"},
    "constant_proof": {"toploc"},
    "inflated_reward": {"reward"},
    "unsigned_change": {"signature"},
    "future_version": {"versions"},
    "other_expert": {"routing", "logprob"},  # near a tie, later differences are found first
    "other_experts": {"routing"},
    "space_in_the_prompt": {"prompt"},
    "tokens_between": {"prompt", "termination"},
    "another_task_seed": {"task"},
    "another_environment": {"task"},
    "no_model": {"toploc"},
    "own_seed": {"seed"},
    "unsampled_token": {"prompt", "termination", "toploc"},
    "own_kept_tokens": {"kept"},
    "cut_completions": {"turns"},
    "idle_samples": {"turns"},
    "extra_reward": {"reward"},
    "half_of_the_proofs": {"toploc"},
}
# On random weights some rollouts stop after a token or two, and a tenth more heat does not change those.
LEAST_RATE = {"temperature_0.9": 0.3, "temperature_1.1": 0.3, "best_of_2": 0.2, "early_stop": 0.5}
LEAST_RATE |= {"claims_0.0009_advantage": 0.5, "claims_0.045_advantage": 0.5, "shorter_of_2": 0.2, "one_bad_in_8": 0.1}
LEAST_RATE |= {"idle_samples": 0.5}
# Not caught, because nothing is gained, or because another part prevents it: the same tokens, a reward within rounding, choices among allowed versions (which a
# lease that pins the version ends), and another's work under an own name (which the lease decides).
HARMLESS = {"speculation_0.3", "reward_plus_9e-7", "better_version", "best_switch", "copied_from_a_peer"}

GROUP = 8  # rollouts
MAX_STARTS = 16


@dataclasses.dataclass(frozen=True)
class Caught:
    """The time until a cheat was caught."""

    num_rollouts: int
    rate: float  # of rollouts rejected on their own
    reasons: dict[str, int]
    median_until: float  # rollouts of one worker until it was caught, over starting points
    worst_until: float  # inf if a starting point saw none


def play(
    cheat: Callable,
    num_rollouts: int,
    tolerance: rules_lib.Tolerance = doubles.FLOAT32,
    bands: sequential_test.Bands = doubles.EXACT,
    regime: str = "float32",
    prompts: int = 16,
) -> Caught:
    """Checks rollouts of a cheat; a new worker starts at every group, so that its sequential test starts empty."""
    dtype, replay_dtype = REGIMES[regime]
    rollouts, step, mixture = [], 3, cheat in doubles.MIXTURES
    while len(rollouts) < num_rollouts:
        rollouts += cheat(doubles.Double(step, dtype, prompts, mixture))
        step += 2  # a reused batch must not be one that is handed in, too
    rollouts = rollouts[:num_rollouts]
    validator = doubles.make_validator(tolerance, bands, prompts, replay_dtype, mixture)
    alone, evidence = [], []
    for start in range(0, len(rollouts), rules_lib.MAX_REPLAY_ROWS):
        batch = rollouts[start : start + rules_lib.MAX_REPLAY_ROWS]
        verdicts = validator.check_without_weights(batch)
        good = [i for i, verdict in enumerate(verdicts) if verdict.accepted]
        found = dict.fromkeys(range(len(batch)))
        for i, one in zip(good, validator.replay([batch[i] for i in good]) if good else [], strict=True):
            verdicts[i] = checks.first_failure(checks.WITH_WEIGHTS, one, validator.rules)
            found[i] = one.evidence if verdicts[i].accepted else None
        alone += verdicts
        evidence += found.values()
    starts = range(0, max(len(rollouts) - 64, 1), GROUP)
    starts = starts[:: -(-len(starts) // MAX_STARTS)]  # honest lives are long, and their tests take the square of that
    until = [_until(rollouts[begin:], alone[begin:], evidence[begin:], bands) for begin in starts]
    rejected = [verdict for verdict in alone if not verdict.accepted]
    return Caught(
        len(rollouts),
        len(rejected) / len(rollouts),
        dict(collections.Counter(verdict.reason for verdict in rejected)),
        float(np.median(until)),
        float(np.max(until)),
    )


def _until(rollouts, alone, evidence, bands: sequential_test.Bands) -> float:
    test, group = sequential_test.SequentialTest(bands), []
    for n, (rollout, verdict, one) in enumerate(zip(rollouts, alone, evidence, strict=True), start=1):
        if not verdict.accepted:
            return n
        group.append((rollout, one))
        if n % GROUP == 0:
            noise = zip(checks.exponential_noise([r for r, _ in group]), group, strict=True)
            ratios = [sequential_test.claims_ratio(y_N) * (r.temperature > 0) for y_N, (r, _) in noise]
            test.add_claims(np.sum(ratios, axis=0), GROUP)
            test.add([evidence for _, evidence in group])
            group = []
        if test.flag:
            return n
    return float("inf")


def play_among_others(cheat: Callable, num_steps: int = 12, share: int = 4) -> tuple[int | None, str]:
    """Lets a cheat do every `share`-th group among honest workers, and compares claims without ever replaying its own.

    Returns (number of its rollouts until it was flagged, or None; the workers flagged).
    """
    log, keys = evidence_log.EvidenceLog(None), [rollout_lib.WorkerKey.generate() for _ in range(share - 1)]
    validator = doubles.make_validator()
    count, flagged = 0, None
    for step in range(3, 3 + num_steps):
        double = doubles.Double(step)
        for forged, honest in zip(_groups(cheat(double)), _groups(doubles.honest(double)), strict=True):
            place = honest[0].task.group % share
            if place == 0:
                assert all(verdict.accepted for verdict in validator.check_without_weights(forged))
                log.add_claims(forged)
                count += GROUP
                continue
            honest = [rollout_lib.sign(r, keys[place - 1]) for r in honest]
            log.add_claims(honest)
            log.add_verified(honest)
        if flagged is None and not log.verdict(doubles.NODE.worker).accepted:
            flagged = count
    wrongly = sum(not log.verdict(key.worker).accepted for key in keys)
    return flagged, f"{wrongly} of {len(keys)} honest workers flagged"


def _groups(rollouts: list) -> list[list]:
    return [rollouts[start : start + GROUP] for start in range(0, len(rollouts), GROUP)]


def write_run(workdir: pathlib.Path, mixture: bool = False) -> None:
    """Writes the working directory of the run in which the cheats play, for `python -m rl.validator calibrate`."""
    exp = doubles.experiment(prompts=2, mixture=mixture)
    (workdir / "config.json").write_text(json.dumps({"config": json.loads(exp.config.to_json())}))
    broadcast.publish(doubles.weights(0, mixture), 4, str(workdir / "weights"))


@functools.cache
def measured(regime: str, mixture: bool = False, count: int = 256) -> tuple[rules_lib.Tolerance, sequential_test.Bands]:
    """Returns the limits that a run measures on `count` honest rollouts of its own workers."""
    dtype, replay_dtype = REGIMES[regime]
    first, found, step = doubles.honest_mixture if mixture else doubles.honest, measurement.Measured(), 1001
    validator = doubles.make_validator(dtype=replay_dtype, mixture=mixture)
    while found.num_rollouts < count:
        rollouts = first(doubles.Double(step, dtype, 16, mixture))
        step += 2
        for start in range(0, len(rollouts), rules_lib.MAX_REPLAY_ROWS):
            for one in validator.replay(rollouts[start : start + rules_lib.MAX_REPLAY_ROWS]):
                found.add(one)
    return measurement.limits([found])
