"""Comparison of a worker's claimed log-probabilities with those of other workers in the same step. It needs no weights.

A forger without a model chooses its text without looking at the noise, and then claims near 0 fit the noise perfectly. They do not fit
the policy: all workers of a step sample from one policy, and the run's order of tasks decides who gets which.

1. A group's statistics are the mean and the standard deviation of its claims. They are kept until the step is over.
2. Then a worker's groups are ranked among them and the verified groups of others. Which of all these are the worker's is as if drawn at
   random, if it is honest: so the odds of prod exp(t u) over its ranks u, against the mean over all choices of as many groups, are a fair
   bet, t in TILTS. Groups that failed or had no replay are not compared with, or forgers could make the honest ones stand out.
3. Each group of the worker costs HETEROGENEITY nats. Some honest workers finish more groups of one kind than others, since long ones
   expire or come too late. The bound on false alarms holds as long as this favors no set of groups by more than e^HETEROGENEITY each.

Letters: K statistics, N groups compared, k of them the worker's.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from inference.rollouts import rollout as rollout_lib

TILTS = (4.0, 64.0, -4.0, -64.0)  # per unit of rank, from 0 to 1: gently and steeply, upward and downward
HETEROGENEITY = 0.25  # nats
OPEN_STEPS = 3  # a step is over once a group of at least so many steps later arrives
MAX_GROUPS = 4096  # of a step that are kept


@dataclasses.dataclass
class _Group:
    worker: str
    statistics: tuple[float, float]
    is_verified: bool = False


class Peers:
    """The groups of the steps that are not over, with the statistics of their claims. Not thread-safe.

    A step is over once a group of `open_steps` steps later arrives. Groups that arrive after their step is over are not compared.
    """

    def __init__(self, open_steps: int = OPEN_STEPS):
        self._open_steps = max(open_steps, OPEN_STEPS)
        self._steps: dict[int, dict[tuple[int, str], _Group]] = {}
        self._over = -1  # the newest step that is over

    def add(self, rollouts: Sequence[rollout_lib.Rollout]) -> None:
        """Adds the claims of one worker's samples of one group, unless they were added before or their step is over."""
        first = rollouts[0]
        step = self._steps.setdefault(first.step, {}) if first.step > self._over else {}
        claims = np.concatenate([r.logprobs[r.sampled_mask] for r in rollouts]).astype(np.float64)
        if len(step) < MAX_GROUPS:
            group = _Group(first.worker, (float(claims.mean()), float(claims.std())))
            step.setdefault((first.task.group, first.worker), group)

    def verify(self, rollout: rollout_lib.Rollout) -> None:
        """Records that a replay accepted the group of this rollout."""
        if group := self._steps.get(rollout.step, {}).get((rollout.task.group, rollout.worker)):
            group.is_verified = True

    def bets(self, newest: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (worker, `log_bets`) of the steps that are over since a group of step `newest` arrived, and removes them."""
        for step in sorted(step for step in self._steps if step <= newest - self._open_steps):
            groups, self._over = self._steps.pop(step), step
            for worker in sorted({group.worker for group in groups.values()}):
                own = [group.statistics for group in groups.values() if group.worker == worker]
                others = [g.statistics for g in groups.values() if g.worker != worker and g.is_verified]
                if others:
                    yield worker, log_bets(np.array(own), np.array(others))

    def state(self) -> dict:
        """Returns the groups as plain JSON, for `restored`."""
        groups = [
            [step, group, one.worker, one.statistics, one.is_verified]
            for step, groups in self._steps.items()
            for (group, _), one in groups.items()
        ]
        return {"over": self._over, "groups": groups}

    @classmethod
    def restored(cls, state: dict, open_steps: int = OPEN_STEPS) -> "Peers":
        """Returns the groups in a result of `state`; an empty state gives no groups."""
        peers = cls(open_steps)
        peers._over = state.get("over", -1)
        for step, group, worker, statistics, is_verified in state.get("groups", ()):
            peers._steps.setdefault(step, {})[group, worker] = _Group(worker, tuple(statistics), is_verified)
        return peers


def log_bets(own_kK: np.ndarray, others_NK: np.ndarray) -> np.ndarray:
    """Returns log bets [K len(TILTS)] that a worker's groups rank higher or lower among those of others than chance explains.

    `own_kK` and `others_NK` have K statistics of each group: k of the worker, N of others.
    """
    num_own = len(own_kK)
    bets = []
    for values in np.concatenate([own_kK, others_NK]).T:
        order = np.sort(values)
        below, upto = np.searchsorted(order, values, "left"), np.searchsorted(order, values, "right")
        rank_N = (below + upto) / (2 * len(values))  # equal values share their mean rank
        for tilt in TILTS:
            mean = _log_symmetric(tilt * rank_N, num_own) - _log_choose(len(values), num_own)
            bets.append(tilt * rank_N[:num_own].sum() - mean - HETEROGENEITY * num_own)
    return np.array(bets)


def _log_symmetric(log_N: np.ndarray, k: int) -> float:
    """Returns the log of the sum, over all choices of k of N numbers (given as logs), of their product."""
    sums = np.full(k + 1, -np.inf)
    sums[0] = 0.0
    for value in log_N:
        sums[1:] = np.logaddexp(sums[1:], sums[:-1] + value)
    return float(sums[k])


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
