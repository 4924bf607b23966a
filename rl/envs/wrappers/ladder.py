"""Builds an environment once per level of difficulty: `ladder=dict(max_length=(3, 5, 8))` has three levels, the easiest first.

The level of a task is its index modulo the number of levels, in both splits. So a curriculum of levels (rl/protocol/curriculum.py) chooses
the difficulty by the index, and every process can compute it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.envs.interface import environment

MAX_LEVELS = 64


def levels(steps: Mapping[str, Sequence], options: Mapping) -> list[dict]:
    """Returns the options that `steps` sets at each level. Raises ValueError for lengths that differ or are 1, and for a name in `options`."""
    given = steps.values() if hasattr(steps, "values") else [None]
    lengths = {len(values) if isinstance(values, (list, tuple)) else 0 for values in given}
    if len(lengths) != 1 or not 1 < min(lengths) <= MAX_LEVELS:
        found = f"env.options.ladder = {steps!r} must give each option the same number of values, 2 to {MAX_LEVELS}"
        raise ValueError(f"{found}; write dict(OPTION=(easy, ..., hard))")
    if "ladder" in steps:  # whose files nothing would have checked
        raise ValueError("env.options.ladder has a ladder of its own; write one ladder, with all options and levels")
    if twice := sorted(steps.keys() & options.keys()):
        raise ValueError(f"env.options.{twice[0]} is also in env.options.ladder; remove one of them")
    return [{name: values[level] for name, values in steps.items()} for level in range(min(lengths))]


def of_levels(envs: Sequence[environment.Environment]) -> environment.Environment:
    """Returns the environment whose task `index` is task `index // L` of level `index % L`, for L environments."""
    L, first = len(envs), envs[0]

    def make_task(index: int, split: str) -> environment.Task:
        task = envs[index % L].make_task(index // L, split)
        return dataclasses.replace(task, index=index, info=task.info | {"ladder": (envs[index % L], task)})

    def of_level(function: str) -> Callable[..., Any] | None:
        """Returns the function of this name that calls the one of a task's own level; None if environments have none."""

        def call(task: environment.Task, *rest: Any) -> Any:
            env, own = task.info["ladder"]  # not by its index, which another wrapper may have changed
            return getattr(env, function)(dataclasses.replace(own, messages=task.messages), *rest)

        return call if getattr(first, function) else None

    changes: dict[str, Any] = {name: of_level(name) for name in ("score", "play", "demonstrate")}
    changes |= {
        "make_task": make_task,
        "num_tasks": L * min(env.num_tasks for env in envs),
        "kind": max((env.kind for env in envs), key=environment.KINDS.index),
        "reward_range": (min(env.reward_range[0] for env in envs), max(env.reward_range[1] for env in envs)),
    }
    return dataclasses.replace(first, **changes)
