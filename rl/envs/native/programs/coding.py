"""The environment "code": the model writes a program, and hidden tests run it in a sandbox.

1. A task is a row of a JSONL file, {"prompt": ..., "tests": [...], "solution": ...}, or is generated (code_tasks.py). grading.py has the
   forms of tests. The solution is optional.
2. The program is the last block of Python in the message. At most `tests` of a row's tests run, each for `test_s` CPU seconds on a worker
   and five times as many on a validator.
3. The reward is 1 if all pass; with reward="fraction", the fraction that passes. Without a block it is 0.

The tests are never in the prompt. Held-out tasks are those whose prompt has the hash 0 modulo 16.
"""

import pathlib
import random

from rl.envs.interface import environment, episode
from rl.envs.native.programs import code_tasks, grading
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib
from rl.learning.data import sources

INSTRUCTION = "Solve the task in Python. End with one block of code, between ```python and ```."
REWARDS = ("all", "fraction")
OUTPUT_BYTES = 2**16  # of a program; more is wrong


def build(
    *,
    path: str = "",
    tests: int = 15,
    test_s: float = 1.0,
    reward: str = "all",
    system_prompt: str = INSTRUCTION,
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment. `path`: a JSONL file of tasks; "": generated ones.

    `tests` limits the tests of a task, and `test_s` the CPU seconds of each. `reward` is one of REWARDS. Raises ValueError for a
    malformed file, options out of range, and a machine where no sandbox works.
    """
    if reward not in REWARDS or tests < 1:
        raise ValueError(f"reward={reward!r}, tests={tests}; choose one of {', '.join(REWARDS)}, and at least 1 test")
    limits = limits_lib.Limits(cpu_s=test_s, output_bytes=OUTPUT_BYTES)
    pool = pool_lib.shared(limits)
    rows = _read(pathlib.Path(path)) if path else {}

    def task_of(made: code_tasks.Made, index: int, split: str) -> environment.Task:
        messages = environment.asked(made.prompt, system_prompt)
        answer, decoy = (grading.block(text) if text else "" for text in (made.solution, made.decoy))
        return environment.Task("code", index, split, messages, answer, decoy, {"tests": made.tests[:tests]})

    def of_row(index: int, split: str) -> environment.Task:
        return task_of(rows[split][index % len(rows[split])], index, split)

    def draw(number: int, index: int, split: str) -> environment.Task:
        return task_of(code_tasks.make(random.Random(number)), index, split)

    async def play(task: environment.Task, model: episode.Model) -> dict[str, float]:
        hidden = task.info["tests"]
        try:
            code = grading.last_block((await model.chat(task.messages)).text)
        except episode.BudgetSpent:
            code = None
        passed = await grading.count_passed(pool, code, hidden, stops=reward == "all") if code else 0
        fraction = passed / len(hidden)
        value = fraction if reward == "fraction" else float(passed == len(hidden))
        return {"reward": value, "passed": fraction, "has_code": float(code is not None)}

    if rows:
        return environment.Environment("code", of_row, num_tasks=len(rows["train"]), play=play, kind="replayed")
    return environment.Environment("code", environment.drawn("code", seed, draw), play=play, kind="replayed")


def _read(path: pathlib.Path) -> dict[str, list[code_tasks.Made]]:
    """Returns the tasks of each split. Raises ValueError with the line of a malformed one."""
    if not path.is_file():
        raise ValueError(f"env.options.path = {str(path)!r} is not a file; set it to a JSONL file of tasks")

    def parse(row) -> code_tasks.Made:
        grading.check(row["tests"])
        return code_tasks.Made(row["prompt"] + "", row.get("solution") or "", "", row["tests"])

    return environment.divided(sources.parse_lines(path, parse, "a task"), lambda made: made.prompt, str(path))
