"""The admission check of environments, `python -m rl.envs check`: trials in processes of their own, judged by rules, in a report.

`check` runs two trials at the same time, of which one has another hash seed, order, time zone, locale, folder, user, host name, and clock, and
the sandbox of a scorer. Further trials find the cause where the two differ. Imports none of the environment's code.
"""

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Callable

from rl.envs.catalog import catalog
from rl.envs.hub import foreign_trial, rules, trial
from rl.envs.hub import report as report_lib
from rl.envs.packages import package


def check(
    plan: trial.Plan,
    *,
    floor: float = rules.FLOOR,
    code: tuple[str, ...] = (),
    on_stage: Callable[[str], None] = lambda line: None,
) -> dict:
    """Returns the unsigned report on an environment. `plan.name` is as in `catalog.load`; `code` are folders to import from.

    `floor` is the largest mean reward that completions without an answer may earn. `on_stage` is called with a line for people on each
    step that begins. Raises ValueError if the environment does not exist. An environment that fails, hangs, or crashes has a report.
    """
    name = plan.name
    located, options = catalog.locate(name, plan.options)
    digest = catalog.digest(located, options)
    plan, limit_s = dataclasses.replace(plan, name=located, options=options), float(plan.limit_s)
    if name.partition(":")[0] in package.FRAMEWORKS:
        run, limit_s = functools.partial(_play, on_stage, plan), foreign_trial.CPU_S
    else:
        run = functools.partial(_run, on_stage, plan, (*code, *catalog.folders(located, options)))
    first, second = run(trial.FIRST, trial.SECOND)

    def causes() -> tuple[dict, dict]:
        on_stage("two more trials, to find why these differ")
        again, backwards = run(trial.Surroundings(), trial.Surroundings(order=-1))
        return again, backwards

    judged = rules.judge(first, second, causes, floor=floor, limit_s=limit_s)
    declared = next((one["kind"] for one in (first, second) if "kind" in one), "unknown")
    return report_lib.make(plan, name, digest, declared, judged)


def _run(
    on_stage: Callable[[str], None], plan: trial.Plan, code: tuple[str, ...], *surroundings: trial.Surroundings
) -> list[dict]:
    running = [trial.Running(plan, one, code, _named(on_stage, n)) for n, one in enumerate(surroundings, start=1)]
    with concurrent.futures.ThreadPoolExecutor(len(running)) as pool:
        return [*pool.map(trial.Running.result, running)]


def _play(on_stage: Callable[[str], None], plan: trial.Plan, *surroundings: trial.Surroundings) -> list[dict]:
    return [foreign_trial.run(plan, one, _named(on_stage, n)) for n, one in enumerate(surroundings, start=1)]


def _named(on_stage: Callable[[str], None], number: int) -> Callable[[str], None]:
    """Returns a function that passes on the first stage of each kind of a trial: most have one per task."""
    known = set()

    def one(stage: str) -> None:
        kind = re.split(r"\d", stage)[0]
        if kind not in known:
            known.add(kind)
            on_stage(f"trial {number}: {stage}")

    return one
