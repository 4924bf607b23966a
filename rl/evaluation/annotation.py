"""Pass rates of tasks by the content of their prompts, which an environment may filter by. Imports no jax.

`python -m rl.evaluate annotate` writes a row for each task: {"key", "task", "num_samples", "num_passed", "rate", "low", "high"}, the last two of
Wilson's 95 % interval. The file is sorted by key, so that a run that was killed and continued writes the same bytes.
"""

import collections
from collections.abc import Iterable, Mapping

from rl.evaluation import scores


def of_rows(rows: Iterable[Mapping]) -> list[dict]:
    """Returns the pass rates of rows of samples, sorted by key. Tasks with the same prompt share theirs."""
    rewards: dict[str, dict[tuple[str, int], float]] = collections.defaultdict(dict)
    for row in rows:
        rewards[row["key"]][row["task"], row["sample"]] = float(row["reward"])
    found = []
    for key in sorted(rewards):
        num_samples = len(rewards[key])
        passed = sum(reward >= scores.RIGHT for reward in rewards[key].values())
        low, high = (round(x, 6) for x in scores.wilson(passed, num_samples))
        counts = {"num_samples": num_samples, "num_passed": passed}
        rate = {"rate": passed / num_samples, "low": low, "high": high}
        found.append({"key": key, "task": min(task for task, _ in rewards[key])} | counts | rate)
    return found


def summary(found: list[dict]) -> str:
    """Returns a line for people: how many tasks are never, sometimes, and always passed."""
    rates = [one["rate"] for one in found]
    counts = f"{rates.count(0.0)} never passed, {rates.count(1.0)} always"
    return f"{len(found)} tasks, mean pass rate {sum(rates) / len(rates):.3f}: {counts}"
