"""Scores of a model on tasks with several samples each: avg@k, pass@k, pass^k, and their intervals. Imports no jax.

All scores are means over tasks, and the samples of a task are not independent. So the unit of an interval is the task; tasks with the same
prompt are one unit, a cluster.
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from sharding.system import atomic_file

Z = 1.959964  # of a 95 % interval
RIGHT = 1.0  # the reward of a sample that counts as passed


@dataclasses.dataclass(frozen=True)
class TaskRewards:
    """The rewards of the samples of one task."""

    cluster: str  # equal for tasks that are not independent
    rewards: tuple[float, ...]
    env: str = ""

    @property
    def num_passed(self) -> int:
        """The number of samples with the full reward."""
        return sum(reward >= RIGHT for reward in self.rewards)


def measure(tasks: Sequence[TaskRewards]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Returns the scores of at least one task by name, and the 95 % interval of each, for the k samples that every task has.

    avg@k is the mean reward. For the powers of two j up to k, and c of n samples passed, pass@j = 1 - C(n - c, j) / C(n, j) is the probability that
    one of j samples passes (arXiv 2107.03374, eq. 1), and pass^j = C(c, j) / C(n, j), for j above 1, that all of them do (arXiv 2406.12045).
    "num_tasks" has no interval. With several environments, "NAME/avg@k" and so on follow for each.
    """
    by_env = collections.defaultdict(list)
    for task in tasks:
        by_env[task.env].append(task)
    scores, intervals = _measure(tasks)
    scores["num_tasks"] = len(tasks)
    for env in sorted(by_env) if len(by_env) > 1 else ():
        of_env = _measure(by_env[env])
        for found, own in zip((scores, intervals), of_env, strict=True):
            found |= {f"{env}/{name}": value for name, value in own.items()}
    return scores, intervals


def of_tasks(tasks: Sequence[TaskRewards]) -> dict[str, list[float]]:
    """Returns the scores of each task by the name of the score."""
    k = min(len(task.rewards) for task in tasks)
    powers = [2**i for i in range(k.bit_length())]
    counts = [(len(task.rewards), task.num_passed) for task in tasks]
    found = {f"avg@{k}": [math.fsum(task.rewards) / len(task.rewards) for task in tasks]}
    found |= {f"pass@{j}": [1 - math.comb(n - c, j) / math.comb(n, j) for n, c in counts] for j in powers}
    return found | {f"pass^{j}": [math.comb(c, j) / math.comb(n, j) for n, c in counts] for j in powers[1:]}


def interval(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of `values`. `clusters` names the cluster of each value; clusters are independent.

    The interval is Agresti and Coull's, for clusters. It adds Z^2 clusters of mean size, half of them with the lowest and half with the
    highest possible value, so that it is valid also where all values are equal. With one value of 0 or 1 per cluster, it is exactly
    theirs. The possible values are 0 to 1, or a wider range if values lie outside.
    """
    low, high, clustered = min(0.0, *values), max(1.0, *values), collections.defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        clustered[cluster].append(value)
    size = len(values) / len(clustered)
    total = len(values) + Z**2 * size
    mean = (math.fsum(values) + Z**2 * size * (low + high) / 2) / total
    squares = math.fsum((math.fsum(own) - len(own) * mean) ** 2 for own in clustered.values())
    squares += Z**2 / 2 * size**2 * ((low - mean) ** 2 + (high - mean) ** 2)
    half = Z * math.sqrt(squares) / total
    return max(low, mean - half), min(high, mean + half)


def wilson(num_passed: int, num_samples: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a pass rate, of at least one independent sample."""
    rate, n = num_passed / num_samples, num_samples
    center = (rate + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(rate * (1 - rate) / n + Z**2 / (4 * n**2))
    return max(0.0, center - half), min(1.0, center + half)


def pass_rates(rows: Iterable[Mapping]) -> list[dict]:
    """Returns the pass rates of rows of samples by the content of the prompts, by which an environment may filter its tasks.

    Each has {"key", "task", "num_samples", "num_passed", "rate", "low", "high"}, the last two of Wilson's 95 % interval. Tasks with the same
    prompt share theirs. They are sorted by key, so that a command that was killed and continued returns the same.
    """
    rewards: dict[str, dict[tuple[str, int], float]] = collections.defaultdict(dict)
    for row in rows:
        rewards[row["key"]][row["task"], row["sample"]] = float(row["reward"])
    found = []
    for key in sorted(rewards):
        num_samples = len(rewards[key])
        passed = sum(reward >= RIGHT for reward in rewards[key].values())
        low, high = (round(x, 6) for x in wilson(passed, num_samples))
        counts = {"num_samples": num_samples, "num_passed": passed}
        rate = {"rate": passed / num_samples, "low": low, "high": high}
        found.append({"key": key, "task": min(task for task, _ in rewards[key])} | counts | rate)
    return found


def shown_rates(found: list[dict]) -> str:
    """Returns a line for people: how many tasks are never, sometimes, and always passed."""
    rates = [one["rate"] for one in found]
    counts = f"{rates.count(0.0)} never passed, {rates.count(1.0)} always"
    return f"{len(found)} tasks, mean pass rate {sum(rates) / len(rates):.3f}: {counts}"


def shown(scores: Mapping[str, float], intervals: Mapping[str, Iterable[float]]) -> str:
    """Returns scores as a line for people, avg@k with its interval."""

    def one(name: str, value: float) -> str:
        if name not in intervals or "avg@" not in name:
            return f"{name} {value:.4g}"
        low, high = intervals[name]
        return f"{name} {value:.4g} ({low:.2g} to {high:.2g})"

    return "  ".join(one(name, value) for name, value in scores.items())


def _measure(tasks: Sequence[TaskRewards]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    found, clusters = of_tasks(tasks), [task.cluster for task in tasks]
    means = {name: math.fsum(values) / len(values) for name, values in found.items()}
    return means, {name: interval(values, clusters) for name, values in found.items()}


def summary(workdir: pathlib.Path) -> list[str]:
    """Returns one line of text per held-out score of a run: its value at the first and the last evaluation; none if all were given up."""
    entries = atomic_file.read_json(workdir / "evaluations.json", list)
    if not entries:
        return []
    names = [name for name in entries[-1]["scores"] if name != "num_tasks" and name in entries[0]["scores"]]
    return [f"held-out {name}: {_shown(entries[0], name)} -> {_shown(entries[-1], name)}" for name in names]


def _shown(entry: dict, name: str) -> str:
    return f"{entry['scores'][name]:.3f} (version {entry['step']})"
