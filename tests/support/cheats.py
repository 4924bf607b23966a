"""Plays one way to cheat against the real validator, and counts how soon it is caught."""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from rl.validator import calibrate
from rl.verification import checks, sequential_test, verifier
from rl.verification import rules as rules_lib
from tests.support import doubles

REGIMES = {  # dtype of generation, of replay
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "mixed": ("bfloat16", "float32"),
}


@dataclasses.dataclass(frozen=True)
class Caught:
    """The time until a cheat was caught."""

    num_rollouts: int
    rate: float  # of rollouts rejected on their own
    reasons: dict[str, int]
    mean_until: float  # rollouts of one worker until one was rejected, over starting points
    worst_until: float  # inf if a starting point saw none


def play(
    cheat: Callable,
    num_rollouts: int,
    tolerance: rules_lib.Tolerance = doubles.FLOAT32,
    bands: sequential_test.Bands = doubles.EXACT,
    regime: str = "float32",
    prompts: int = 16,
) -> Caught:
    """Checks rollouts of a cheat; a new worker starts at every 8th one, so that its sequential test starts empty."""
    dtype, replay_dtype = REGIMES[regime]
    rollouts, step, mixture = [], 3, cheat in doubles.MIXTURES
    while len(rollouts) < num_rollouts:
        rollouts += cheat(doubles.Double(step, dtype, prompts, mixture))
        step += 2  # a reused batch must not be one that is handed in, too
    rollouts = rollouts[:num_rollouts]
    validator = doubles.make_validator(tolerance, bands, prompts, replay_dtype, mixture)
    alone, evidence = [], []
    for start in range(0, len(rollouts), verifier.MAX_REPLAY_ROWS):
        batch = rollouts[start : start + verifier.MAX_REPLAY_ROWS]
        verdicts = validator.check_without_weights(batch)
        good = [i for i, verdict in enumerate(verdicts) if verdict.accepted]
        found = dict.fromkeys(range(len(batch)))
        for i, one in zip(good, validator.replay([batch[i] for i in good]) if good else [], strict=True):
            verdicts[i] = checks.first_failure(checks.WITH_WEIGHTS, one, validator.rules)
            found[i] = checks.evidence(one) if verdicts[i].accepted else None
        alone += verdicts
        evidence += found.values()
    until = []
    for begin in range(0, max(len(rollouts) - 64, 1), 8):
        test, count = sequential_test.SequentialTest(bands), float("inf")
        for n in range(begin, len(rollouts)):
            if not alone[n].accepted or test.add(evidence[n]):
                count = n - begin + 1
                break
        until.append(count)
    rejected = [verdict for verdict in alone if not verdict.accepted]
    return Caught(
        len(rollouts),
        len(rejected) / len(rollouts),
        dict(collections.Counter(verdict.reason for verdict in rejected)),
        float(np.mean(until)),
        float(np.max(until)),
    )


def calibrated(
    num_rollouts: int, regime: str, mixture: bool = False
) -> tuple[rules_lib.Tolerance, sequential_test.Bands]:
    """Returns limits for a regime, from honest rollouts of other tasks."""
    dtype, replay_dtype = REGIMES[regime]
    rollouts, step = [], 10**5
    validator = doubles.make_validator(dtype=replay_dtype, mixture=mixture)
    while len(rollouts) < num_rollouts:
        rollouts += doubles.honest(doubles.Double(step, dtype, mixture=mixture))
        step += 1
    return calibrate.limits([calibrate.measure(validator, rollouts[:num_rollouts])])
