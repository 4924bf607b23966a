"""GSM8K: grade-school word problems with a number as the answer (arXiv 2110.14168), from its two JSONL files.

1. `path` is a directory with `train.jsonl` and `test.jsonl` as published: {"question": ..., "answer": "... #### 72"}.
   Training tasks come from the first, held-out tasks from the second. A task index past the end starts over.
2. The model is asked to reason and to end with "#### <number>". The reference solution, without its calculator marks
   <<48/2=24>>, is the task's answer, so a warm-up can teach it.
3. The reward is 1 if the number after the last "####" (or in the last \\boxed{}) equals the reference in any notation:
   "1,000", "$1000", "1000.00 dollars". A number without a mark earns nothing, or a policy could end with every number it can think of.
"""

import fractions
import pathlib
import re

from rl.envs.interface import environment
from rl.envs.native import numerals
from rl.learning.data import sources

INSTRUCTION = "Solve the problem step by step. End with a line '#### ' followed by the final number."
MAX_CHARS = 65536  # a longer completion scores 0; honest solutions are far shorter
_REMARK = re.compile(r"(?<=\w) *\([^()]*\)\W*$")  # 18 dollars (3 * 6)


def build(*, path: str = "", system_prompt: str = INSTRUCTION, seed: int = 0) -> environment.Environment:
    """Builds the environment GSM8K (grade-school math) from the files in the directory `path`.

    Raises ValueError for a missing or malformed file. `seed` has no effect: the files list the tasks.
    """
    problems = {"train": _read(path, "train.jsonl"), "held_out": _read(path, "test.jsonl")}

    def make_task(index: int, split: str) -> environment.Task:
        question, solution, number = problems[split][index % len(problems[split])]
        messages = environment.asked(question, system_prompt)
        return environment.Task("gsm8k", index, split, messages, solution, info={"number": number})

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        number = final_number(completion)
        is_right = number is not None and number == task.info["number"]
        return {"reward": float(is_right), "has_answer": float(number is not None)}

    return environment.Environment("gsm8k", make_task, score, num_held_out=len(problems["held_out"]))


def files(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns {name: file} of the two files in the directory `path`, which may not exist."""
    return {name: path / name for name in ("test.jsonl", "train.jsonl")}


def final_number(text: str) -> fractions.Fraction | None:
    """Returns the number after the last answer mark in a completion, or None without a mark or a number."""
    marked = text.rpartition("####") if len(text) <= MAX_CHARS else ("", "", "")
    boxed = numerals.last_boxed(marked[2])
    if boxed is None and not marked[1]:
        return None
    line = marked[2].strip().partition("\n")[0] if boxed is None else boxed
    found = numerals.only(_REMARK.sub("", line.rpartition("=")[2]))
    return found and found.value


def _read(path: str, name: str) -> list[tuple[str, str, fractions.Fraction]]:
    """Reads a JSONL file of problems. Returns (question, solution, answer) of each line; ValueError names a malformed line."""
    file = pathlib.Path(path) / name
    if not path or not file.is_file():
        raise ValueError(
            f"env.options.path = {path!r} has no {name}; set it to a directory with the train.jsonl and test.jsonl of "
            "GSM8K (github.com/openai/grade-school-math)"
        )

    def parse(row) -> tuple[str, str, fractions.Fraction]:
        question, solution = str(row["question"]), re.sub(r"<<[^<>]*>>", "", row["answer"])
        if (number := final_number(solution)) is None:
            raise ValueError("its answer does not end with '#### <number>'")
        return question, solution, number

    problems = sources.parse_lines(file, parse, "a GSM8K problem")
    if not problems:
        raise ValueError(f"{file} is empty; download it again")
    return problems
