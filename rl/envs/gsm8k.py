"""Grade-school word problems with a whole number for an answer (GSM8K, arXiv 2110.14168), from its two JSONL files.

1. `path` is a directory with `train.jsonl` and `test.jsonl` as published: {"question": ..., "answer": "... #### 72"}.
   Training tasks come from the one, held-out tasks from the other; a task index beyond the end starts over.
2. The model is asked to reason and to end in "#### <number>". The reference solution, without its calculator marks
   <<48/2=24>>, is the task's answer, so that a warm-up can teach it.
3. The reward is 1 when the number after the last "####" (or in the last \\boxed{}) is the reference's, however it is
   written: "1,000", "$1000", "1000.00". A number without a mark earns nothing: a policy that ends in every number it
   can think of must not be paid for it.
"""

import decimal
import json
import pathlib
import re

from rl.envs import environment

INSTRUCTION = "Solve the problem step by step. End with a line '#### ' followed by the final number."
MAX_CHARS = 65536  # a longer completion scores 0; no honest solution comes near
_MARK = re.compile(r"####[ \t]*([^\n]*)|\\boxed\{([^{}\n]*)\}")
_NUMBER = re.compile(r"[+-]?\d{1,18}(\.\d{0,18})?", re.ASCII)
_FILES = {"train": "train.jsonl", "held_out": "test.jsonl"}


def build(*, path: str = "", system_prompt: str = INSTRUCTION, seed: int = 0) -> environment.Environment:
    del seed  # the tasks are given; their order is the caller's affair
    problems = {split: _read(path, name) for split, name in _FILES.items()}

    def make_task(index: int, split: str) -> environment.Task:
        next(environment.candidates("gsm8k", 0, split, index))  # refuses a split or an index that cannot be
        question, solution, number = problems[split][index % len(problems[split])]
        messages = ({"role": "user", "content": question},)
        if system_prompt:
            messages = ({"role": "system", "content": system_prompt}, *messages)
        return environment.Task("gsm8k", index, split, messages, solution, decoy="", info={"number": number})

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        answer = final_number(completion)
        return {
            "reward": float(answer is not None and answer == task.info["number"]),
            "has_answer": float(answer is not None),
        }

    return environment.Environment("gsm8k", make_task, score)


def final_number(text: str) -> decimal.Decimal | None:
    """The number after the last mark; None where there is no mark, or no number after it."""
    if len(text) > MAX_CHARS:
        return None
    marks = _MARK.findall(text)
    if not marks:
        return None
    written = "".join(marks[-1]).strip().replace(",", "").removesuffix(".").strip("$ ").removesuffix("%").strip()
    return decimal.Decimal(written) if _NUMBER.fullmatch(written) else None


def _read(path: str, name: str) -> list[tuple[str, str, decimal.Decimal]]:
    """(question, solution, number) of each line; ValueError names the line that is none."""
    file = pathlib.Path(path) / name
    if not path or not file.is_file():
        raise ValueError(
            f"env.options.path = {path!r} holds no {name}; set it to a directory with the train.jsonl and test.jsonl of "
            "GSM8K (github.com/openai/grade-school-math)"
        )
    problems = []
    for row, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            question, solution = str(record["question"]), re.sub(r"<<[^<>]*>>", "", record["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}:{row} is no GSM8K problem: {error!r}") from error
        number = final_number(solution)
        if number is None:
            raise ValueError(f"{file}:{row}: the answer does not end in '#### <number>'")
        problems.append((question, solution, number))
    if not problems:
        raise ValueError(f"{file} is empty")
    return problems
