"""Trains on the tasks whose pass rate is in a window: tasks that no sample solves, or all do, teach nothing.

The pass rates are a file of `python -m rl.evaluate annotate`, by the content of the prompts. INTELLECT-2 used (0.125, 0.5) of 8 samples in
an ablation; (0.1, 0.8) is the window of its shipped config.
"""

import dataclasses
import math
from collections.abc import Mapping

from rl.envs.interface import environment
from rl.learning.data import sources


def filtered(env: environment.Environment, window, path: str) -> environment.Environment:
    """Returns the environment with those of its training tasks whose pass rate is from window[0] to window[1], in the order of their indices.

    Held-out tasks stay as they are. Raises ValueError for a malformed window or file, and if no task is left.
    """
    try:
        low, high = map(float, window)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 <= low <= high <= 1:
        raise ValueError(f"env.options.solve_rate = {window!r} is not a window; write (low, high), as in (0.1, 0.8)")
    if not path:
        text = "env.options.solve_rate needs pass rates; set env.options.solve_rates_path to a file"
        raise ValueError(f"{text} of python -m rl.evaluate annotate")
    rates, indices = _read(path)
    # of tasks without end, those that were measured
    known = range(env.num_tasks) if env.num_tasks else indices.values()
    own = {index: environment.content_key(env.make_task(index, "train").messages) for index in known}
    chosen = sorted(index for index, key in own.items() if key in rates and low <= rates[key] <= high)
    if not any(key in rates for key in own.values()):
        found = f"none of the {len(own)} tasks of environment {env.name} has a pass rate in {path}"
        raise ValueError(f"{found}; make the file by python -m rl.evaluate annotate, with these options and this seed")
    if not chosen:
        raise ValueError(f"no task of {path} has a pass rate from {low:g} to {high:g}; widen env.options.solve_rate")

    def make_task(index: int, split: str) -> environment.Task:
        if split != "train":
            return env.make_task(index, split)
        task = env.make_task(chosen[index % len(chosen)], split)
        return dataclasses.replace(task, index=index)

    return dataclasses.replace(env, make_task=make_task, num_tasks=len(chosen))


def _read(path: str) -> tuple[dict[str, float], dict[str, int]]:
    """Returns {key: pass rate} and {key: index of the task}."""
    rates, indices = {}, {}
    for rows in sources.read(path).values():
        for number in range(len(rows)):
            row: Mapping = rows[number]
            try:
                key, rate, index = str(row["key"]), float(row["rate"]), int(str(row["task"]).rpartition("/")[2])
            except (KeyError, TypeError, ValueError):
                found = f"{path}, row {number + 1} has no key, task, and rate"
                raise ValueError(f"{found}; make the file by python -m rl.evaluate annotate") from None
            rates[key], indices[key] = rate, index
    return rates, indices
