"""Compares the samples of two models on the same tasks: a paired test, and a table of several models. Imports no jax.

Tasks differ in difficulty far more than models do. The difference on each task removes that: its variance is smaller than that of two
independent means, by the covariance of the models.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

from rl.evaluation import scores

MAX_FLIPS, BLOCK = 10_000, 500  # of signs, for the p-value


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference B - A of one score on the tasks that both have."""

    name: str
    a: float
    b: float
    low: float  # of the 95 % interval of b - a
    high: float
    p: float  # two-sided, of equal models
    num_better: int  # tasks on which B is better
    num_worse: int


def compare(a: Mapping[str, scores.TaskRewards], b: Mapping[str, scores.TaskRewards]) -> list[Difference]:
    """Returns the differences B - A of avg@k, pass@j, and pass^j (`scores.measure`) over the tasks that `a` and `b` have in common.

    k is the number of samples that every common task has in both, and j the powers of two up to k. The interval is that of a mean over
    C clusters, by Student's t with C - 1 degrees of freedom. p is that of a permutation test, which flips the signs of the clusters'
    differences: all 2^C of them for few clusters, else 10,000 with a fixed seed. Raises ValueError without a common task.
    """
    common = [task for task in a if task in b]
    if not common:
        raise ValueError(
            "the two files have no task in common; compare samples of the same environment, options, seed, and code"
        )
    k = min(len(one[task].rewards) for one in (a, b) for task in common)
    pair = [[dataclasses.replace(one[t], rewards=one[t].rewards[:k]) for t in common] for one in (a, b)]
    clusters = [a[task].cluster for task in common]
    of_a, of_b = (scores.of_tasks(tasks) for tasks in pair)
    return [_difference(name, of_a[name], of_b[name], clusters) for name in of_a]


def table(files: Mapping[str, Mapping[str, scores.TaskRewards]]) -> list[str]:
    """Returns the lines of a leaderboard in Markdown, the best avg@k first. `files` has the rewards of each model by name; only common tasks count.

    Each score has half of its 95 % interval, and the last column the p-value of the difference from the row above.
    """
    common = [task for task in next(iter(files.values())) if all(task in one for one in files.values())]
    if not common:
        raise ValueError("the files have no task in common; give samples of one environment, options, seed, and code")
    k = min(len(one[task].rewards) for one in files.values() for task in common)
    rows = []
    for name, one in files.items():
        tasks = {t: dataclasses.replace(one[t], rewards=one[t].rewards[:k]) for t in common}
        rows.append((name, tasks, *scores.measure([*tasks.values()])))
    rows.sort(key=lambda row: -next(iter(row[2].values())))
    names = [name for name in rows[0][2] if name != "num_tasks" and "/" not in name]
    lines = [f"| model | {' | '.join(names)} | p, against the row above |", f"|---|{'---:|' * (len(names) + 1)}"]
    for number, (name, tasks, found, intervals) in enumerate(rows):
        cells = [f"{found[score]:.3f} ± {(intervals[score][1] - intervals[score][0]) / 2:.3f}" for score in names]
        p = f"{compare(rows[number - 1][1], tasks)[0].p:.3g}" if number else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {p} |")
    return [*lines, f"{len(common)} tasks, {k} samples each; ±: 95 %, clustered by task"]


def _difference(name: str, a: Sequence[float], b: Sequence[float], clusters: Sequence[str]) -> Difference:
    sums: dict[str, list[float]] = {}
    for x, y, cluster in zip(a, b, clusters, strict=True):
        sums.setdefault(cluster, []).append(y - x)
    mean = (math.fsum(b) - math.fsum(a)) / len(a)
    count = len(sums)
    squares = math.fsum((math.fsum(own) - len(own) * mean) ** 2 for own in sums.values())
    half = math.inf
    if count > 1:
        half = float(special.stdtrit(count - 1, 0.975)) * math.sqrt(squares * count / (count - 1)) / len(a)
    better, worse = sum(y > x for x, y in zip(a, b, strict=True)), sum(y < x for x, y in zip(a, b, strict=True))
    p = _p_value([math.fsum(own) for own in sums.values()])
    return Difference(name, math.fsum(a) / len(a), math.fsum(b) / len(b), mean - half, mean + half, p, better, worse)


def _p_value(sums: Sequence[float]) -> float:
    """Returns the part of all flips of signs of which the sum is as far from 0 as that of `sums`."""
    own = np.abs([x for x in sums if x])
    seen = abs(math.fsum(sums)) - 1e-12 * own.sum()  # rounding moves a sum of 0, as of 1/3, 2/3, and -1, too
    if 2 ** len(own) <= MAX_FLIPS:
        masks = np.arange(2 ** len(own))[:, None] >> np.arange(len(own)) & 1
        return float((np.abs((1 - 2 * masks) @ own) >= seen).mean())
    rng = np.random.Generator(np.random.PCG64(0))
    flips = (rng.integers(0, 2, (BLOCK, len(own)), np.int8) for _ in range(MAX_FLIPS // BLOCK))
    hits = sum(int((np.abs((1 - 2 * masks) @ own) >= seen).sum()) for masks in flips)
    return (hits + 1) / (MAX_FLIPS + 1)  # the samples themselves are one of the flips
