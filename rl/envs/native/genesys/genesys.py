"""The environment "genesys": tasks of your own file in the format of SYNTHETIC-1 and SYNTHETIC-2, each scored by its type.

1. A row is a `Task`, in a file that rl/learning/data/sources.py reads. Fields that a JSON column holds as a text are parsed. checks.py has the scores of the types with texts.
2. verifiable_code, prime_rl_code, and deepcoder run the last block of Python on test cases in a sandbox: the reward is the fraction that passes, or,
   for prime_rl_code and deepcoder, 1 if all pass. Only Python: other languages need compilers.
3. llm_judgeable_groundtruth_similarity asks the model itself, in a call that does not train, for a score from 1 to 100.
4. If all rows are of types with texts, the environment has one answer per task; else it has episodes.

Held-out tasks are those whose prompt has the hash 0 modulo 16.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from rl.envs.interface import environment, episode
from rl.envs.native.genesys import checks
from rl.envs.native.programs import grading
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib
from rl.learning.data import sources
from sharding.system import text as text_lib

CODE = {"verifiable_code": False, "prime_rl_code": True, "deepcoder": True}  # True: all tests must pass
JUDGED = "llm_judgeable_groundtruth_similarity"
TYPES = (*checks.SCORES, *CODE, JUDGED)
JUDGE = """Compare the response with the reference answer to the problem. Reply with one integer from 1 (unrelated or wrong) to 100 (the same \
content), and nothing else.

Problem:
{prompt}

Reference answer:
{truth}

Response:
{response}"""


class Task(pydantic.BaseModel):
    """A problem with the data that verifies a response to it."""

    problem_id: str
    source: str = ""
    task_type: str
    in_source_id: str | None = None
    prompt: str
    gold_standard_solution: str | None = None
    verification_info: dict[str, Any] = pydantic.Field(default_factory=dict)
    metadata: dict[str, Any] = pydantic.Field(default_factory=dict)

    @pydantic.field_validator("verification_info", "metadata", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        if value is None or value == "":
            return {}
        return json.loads(value) if isinstance(value, str) else value


class Response(Task):
    """A task with one answer of a model."""

    llm_response: str
    response_id: str
    model_name: str
    generation_config: dict[str, Any] = pydantic.Field(default_factory=dict)
    machine_info: dict[str, Any] | None = None


def build(
    *, path: str = "", types: str = "", tests: int = 15, test_s: float = 1.0, seed: int = 0
) -> environment.Environment:
    """Builds the environment of the rows at `path`; `types`: only those of these task types, with commas between them.

    `tests` and `test_s` limit the test cases of a program, and the CPU seconds of each. Raises ValueError for a malformed row, with its number.
    `seed` has no effect.
    """
    if not path:
        raise ValueError("env.options.path is empty; set it to your file of GENESYS tasks")
    wanted = [name for name in types.split(",") if name]
    for name in wanted:
        if name not in TYPES:
            found = f"env.options.types: task type {name!r} is unknown{text_lib.hint(name, TYPES)}"
            raise ValueError(f"{found}; choose from {', '.join(TYPES)}")
    tasks: list[Task] = []
    for own in sources.read(path).values():
        for number in range(len(own)):
            try:
                task = task_of(own[number])
                if wanted and task.task_type not in wanted:
                    continue
                _check(task)
            except ValueError as error:
                raise ValueError(f"{path}, row {number + 1}: {error}") from None
            tasks.append(task)
    rows = environment.divided(tasks, lambda task: task.prompt, path)
    found = {task.task_type for task in tasks}
    has_code = not found.isdisjoint(CODE)
    pool = pool_lib.shared(limits_lib.Limits(cpu_s=test_s)) if has_code else None

    def make_task(index: int, split: str) -> environment.Task:
        row = rows[split][index % len(rows[split])]
        messages = ({"role": "user", "content": row.prompt},)
        return environment.Task("genesys", index, split, messages, row.gold_standard_solution or "", info={"row": row})

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        return _scores(_of_text(task.info["row"], completion))

    async def play(task: environment.Task, model: episode.Model) -> dict[str, float]:
        row: Task = task.info["row"]
        try:
            text = (await model.chat(task.messages)).text
            if row.task_type in CODE:
                assert pool is not None
                cases, code = cases_of(row.verification_info)[:tests], grading.last_block(text)
                stops = CODE[row.task_type]
                passed = await grading.count_passed(pool, code, cases, stops=stops) if code else 0
                return _scores(float(passed == len(cases)) if stops else passed / len(cases))
            if row.task_type == JUDGED:
                truth = row.verification_info.get("ground_truth") or row.gold_standard_solution
                asked = JUDGE.format(prompt=row.prompt, truth=truth, response=text)
                verdict = await model.chat([{"role": "user", "content": asked}], trains=False)
                return _scores(_judged(verdict.text))
            return _scores(_of_text(row, text))
        except episode.BudgetSpent:
            return _scores(0.0)

    num_tasks, num_held_out = len(rows["train"]), len(rows["held_out"])
    if found <= checks.SCORES.keys():
        return environment.Environment("genesys", make_task, score, num_tasks, num_held_out=num_held_out)
    kind = "replayed" if has_code else "pure"
    return environment.Environment(
        "genesys", make_task, num_tasks=num_tasks, play=play, kind=kind, num_held_out=num_held_out
    )


def task_of(row: Mapping[str, Any]) -> Task:
    """Returns the task in a row; other fields are left out. Raises ValueError with the field that is wrong."""
    try:
        return Task(**{name: row[name] for name in Task.model_fields if name in row})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"field {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:  # of JSON in a text
        raise ValueError(f"verification_info or metadata is not JSON ({error})") from None


def cases_of(info: Mapping[str, Any]) -> Sequence[grading.Test]:
    """Returns the test cases of a row as tests of grading.py. Raises ValueError for malformed ones, and for another language."""
    if (language := info.get("language", "python")) != "python":
        raise ValueError(f"language {language!r} needs a compiler; remove the row")
    found = []
    for case in checks.parsed({"test_cases": [], **info}, "test_cases") or ():
        if not isinstance(case, dict) or not {"input", "output"} <= case.keys():
            raise ValueError(f"test case {str(case)[:80]!r} has no input and output; add them")
        if case.get("type") != "function_call":
            found.append({"input": str(case["input"]), "output": str(case["output"])})
            continue
        name = str(case.get("fn_name", ""))
        if not name.isidentifier():
            raise ValueError(f"test case {str(case)[:80]!r} has no fn_name; add it")
        arguments = ", ".join(map(repr, case["input"] if isinstance(case["input"], list) else [case["input"]]))
        target = f"({name} if {name!r} in globals() else Solution().{name})"
        found.append(f"assert {target}({arguments}) == {case['output']!r}")
    grading.check(found)
    return found


def _check(task: Task) -> None:
    if task.task_type in CODE:
        cases_of(task.verification_info)
    elif task.task_type == JUDGED:
        if not (task.verification_info.get("ground_truth") or task.gold_standard_solution):
            raise ValueError("it has no ground_truth and no gold_standard_solution to compare with; add one")
    elif task.task_type in checks.SCORES:
        checks.check(task.task_type, task.verification_info)
    else:
        found = f"task type {task.task_type!r} cannot run here{text_lib.hint(task.task_type, TYPES)}"
        raise ValueError(f"{found}; set env.options.types, or use {', '.join(TYPES)}")


def _of_text(row: Task, completion: str) -> float:
    completion = completion if len(completion) <= checks.MAX_CHARS else ""
    return checks.SCORES[row.task_type](completion, row.verification_info)


def _judged(text: str) -> float:
    match = re.search(r"\d+", text)
    return min(max(int(match[0][:4]), 1), 100) / 100 if match else 0.0


def _scores(score: float) -> dict[str, float]:
    return {"reward": score}
