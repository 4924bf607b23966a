"""Applies the options that every environment takes in addition to those of its builder.

| options | effect |
|---|---|
| `solve_rate=(low, high)`, `solve_rates_path=FILE` | trains only on tasks whose measured pass rate is in the window (solve_rate.py) |
| `budget="exact"`, `budget_targets=(...)`, `budget_alpha=...` | asks for a number of tokens, and rewards it (budget.py) |
| `ladder=dict(OPTION=(v0, v1, ...))` | builds the environment once per level of difficulty (ladder.py) |

A builder that has a parameter of one of these names keeps it.
"""

import types
from collections.abc import Callable, Collection
from typing import Any

from rl.envs.interface import environment
from rl.envs.wrappers import budget, ladder, solve_rate

MODULES: dict[str, types.ModuleType] = {"solve_rate": solve_rate, "budget": budget, "ladder": ladder}
OPTIONS = {"solve_rate": "solve_rate", "solve_rates_path": "solve_rate", "ladder": "ladder"}
OPTIONS |= dict.fromkeys(("budget", "budget_targets", "budget_alpha"), "budget")
PATHS = ("solve_rates_path",)


def split(options: dict, own: Collection[str]) -> tuple[dict, dict]:
    """Returns (options of the builder, options of the wrappers); those named in `own` are of the builder."""
    wrapping = {name: value for name, value in options.items() if name in OPTIONS and name not in own}
    return {name: value for name, value in options.items() if name not in wrapping}, wrapping


def wrapped(build: Callable[[dict], environment.Environment], options: dict, wrapping: dict) -> environment.Environment:
    """Returns the environment that `build` makes of its options, in the wrappers that `wrapping` asks for. Raises ValueError for wrong options."""
    given: dict[str, Any] = dict(wrapping)
    if steps := given.pop("ladder", None):
        env = ladder.of_levels([build(options | own) for own in ladder.levels(steps, options)])
    else:
        env = build(options)
    if "solve_rate" in given or "solve_rates_path" in given:
        env = solve_rate.filtered(env, given.get("solve_rate"), given.get("solve_rates_path", ""))
    if unused := [name for name in given if name.startswith("budget_") and "budget" not in given]:
        raise ValueError(
            f"env.options.{unused[0]} has no effect without env.options.budget; set it to one of {budget.KINDS}"
        )
    if "budget" in given:
        env = budget.budgeted(env, given["budget"], given.get("budget_targets", ()), given.get("budget_alpha", 0.0))
    return env


def is_wrapped(options: Collection[str]) -> bool:
    """Returns True if one of these options of an environment asks for a wrapper, which may change the number of its tasks."""
    return not OPTIONS.keys().isdisjoint(options)


def modules(options: Collection[str]) -> list[types.ModuleType]:
    """Returns the modules that these options use, which decide tasks and rewards."""
    return [MODULES[name] for name in sorted({OPTIONS[name] for name in options if name in OPTIONS})]
