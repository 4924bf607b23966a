"""Tasks from your own file or folder: JSON lines, CSV, Parquet, or a folder in Hugging Face's layout (rl/learning/data/sources.py).

1. Each row is a task. Field `prompt` has the user's message, or a list of messages (rl/learning/data/messages.py), the last of which the model
   continues if it is the assistant's. Field `answer` has the answer, and `solution`, if there is such a field, a whole completion to
   imitate in a warm-up.
2. Held-out tasks are those of the split `validation`, else `test`. Without one, a row is held out by the hash of its whole prompt, 1 in 16.
3. rl/envs/native/rewards.py scores a completion by the answer.

All rows are looked at when the environment is built, so that a malformed one ends a run before it begins.

The environment `math` (`build_math`) has problems of mathematics, {"problem": ..., "answer": ...} per row. The answer counts in the last
\\boxed{} of the completion alone. An integer is compared as such; other answers, as in \\boxed{\\frac{1}{2}}, are equal if math-verify finds
them to be, with the gold answer first. It computes with untrusted text for as long as that takes; rl/envs/scoring/scorer.py limits it.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from rl.envs.interface import environment
from rl.envs.native import rewards
from rl.learning.data import messages as messages_lib
from rl.learning.data import sources
from sharding.system import text as text_lib

MAX_CHARS = 65536  # a longer completion scores as an empty one
MATH_INSTRUCTION = "Solve the problem step by step. Put the final answer into \\boxed{}."


def build(
    *,
    path: str = "",
    prompt: str = "prompt",
    answer: str = "answer",
    solution: str = "",
    system_prompt: str = "",
    reward: str = "exact",
    pattern: str = "",
    held_out: str = "",
    seed: int = 0,
) -> environment.Environment:
    """Builds an environment of the rows at `path`. `held_out` names the split of held-out tasks; "": the default of the module docstring.

    Raises ValueError for a missing or malformed file, a field that a row lacks, and a wrong reward. `seed` has no effect.
    """
    if not path:
        raise ValueError("env.options.path is empty; set it to your file or folder of rows")
    score_row, is_own = rewards.make(reward, pattern), reward not in rewards.NAMES
    system = ({"role": "system", "content": system_prompt},) * bool(system_prompt)
    needed = {"prompt": prompt} | ({} if is_own else {"answer": answer}) | ({"solution": solution} if solution else {})

    def read(row: Mapping[str, Any]) -> tuple[tuple[dict, ...], str, str]:
        for option, field in needed.items():
            if field not in row:
                found = f"field {field!r} does not exist" + f", only {', '.join(map(repr, [*row][:20]))}" * bool(row)
                raise ValueError(f"{found}{text_lib.hint(field, row)}; set env.options.{option}")
        if isinstance(row.get(answer), list | dict | bytes) and not is_own:  # no completion equals its notation
            found = f"the answer {str(row[answer])[:60]} is not a text or a number"
            raise ValueError(f"{found}; set env.options.reward to your own module:function, which gets the row")
        own = "" if row.get(answer) is None else str(row[answer])
        if not is_own:
            rewards.check_answer(reward, own)
        return _messages(filled(row[prompt])), own, str(row[solution]) if solution else own

    splits, filled = sources.read(path), messages_lib.filler(path)
    training, testing = _divide(splits, held_out, read, path)
    rows = {"train": training, "held_out": testing}

    def make_task(index: int, split: str) -> environment.Task:
        row = rows[split][index % len(rows[split])]
        messages, own, solved = read(row)
        return environment.Task("dataset", index, split, (*system, *messages), solved, info={"row": row, "answer": own})

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        completion = completion if len(completion) <= MAX_CHARS else ""
        found = score_row(completion, task.info["answer"], task.info["row"])
        return found if isinstance(found, dict) else {"reward": found}

    return environment.Environment("dataset", make_task, score, len(training), num_held_out=len(testing))


def build_math(
    *,
    path: str = "",
    problem: str = "problem",
    answer: str = "answer",
    system_prompt: str = MATH_INSTRUCTION,
    held_out: str = "",
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment `math` of the rows at `path`, with names of their fields. `held_out` names the split of held-out tasks.

    Raises ValueError for a missing or malformed file, and without the package math-verify. `seed` has no effect.
    """
    made = build(
        path=path, prompt=problem, answer=answer, system_prompt=system_prompt, held_out=held_out, reward="boxed"
    )

    def make_task(index: int, split: str) -> environment.Task:
        task = made.make_task(index, split)
        own = task.info["answer"]
        return dataclasses.replace(task, env="math", answer=own if "\\boxed{" in own else f"\\boxed{{{own}}}")

    return dataclasses.replace(made, name="math", make_task=make_task)


def _messages(value: Any) -> tuple[dict, ...]:
    """Returns the messages of a prompt. Raises ValueError for other values than a text and a list of messages."""
    given = [{"role": "user", "content": value}] if isinstance(value, str) else value
    # A list in a column of texts, as CSV has.
    if isinstance(value, str) and value.startswith("[{") and '"role"' in value:
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(value)
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise ValueError(f"the prompt is {str(value)[:80]!r}; write a text, or messages with role and content")
    messages = tuple(messages_lib.parse(given)) if given else ()
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        found = f"the prompt is {str(value)[:80]!r}, which has no text"
        raise ValueError(f"{found}; write a text, or messages with role and content")
    return messages


def _divide(splits: Mapping[str, sources.Rows], held_out: str, read, path: str) -> tuple[sources.Rows, sources.Rows]:
    """Returns the rows to train on and those that are held out. Raises ValueError with the place of a malformed row."""
    name = held_out or next((split for split in ("validation", "test") if split in splits), "")
    if name and (name not in splits or name == "train"):
        raise ValueError(f"{path} has no split {name!r} to hold out (env.options.held_out); it has {', '.join(splits)}")
    prompts = {}
    for split in ["train", name] if name else ["train"]:
        if not (rows := splits.get(split, ())):
            raise ValueError(f"{path} has no rows of the split {split!r}; add a file of this name")
        prompts[split] = []
        for number in range(len(rows)):
            row = rows[number]  # raises with its own place
            try:
                prompts[split].append(environment.prompt_text(read(row)[0]))
                prompts[split][-1].encode()
            except ValueError as error:
                remedy = "; remove the character" * isinstance(error, UnicodeError)
                raise ValueError(f"{path}, {split} row {number + 1}: {error}{remedy}") from None
    if name:
        return splits["train"], splits[name]
    found = environment.splits_of(prompts["train"], path)
    train, held = (sources.Chosen(splits["train"], found[split]) for split in environment.SPLITS)
    return train, held
