"""Makes tasks for the environment "code": functions, and programs, that filter, change, and reduce a list of whole numbers.

A task is one choice of each kind, so there are 9 x 9 x 9 tasks in two forms. The reference computes the expected values of the tests.
"""

import dataclasses
import random

FILTERS = {
    "keep all numbers": "True",
    "keep the even numbers": "x % 2 == 0",
    "keep the odd numbers": "x % 2 == 1",
    "keep the positive numbers": "x > 0",
    "keep the negative numbers": "x < 0",
    "keep the multiples of 3": "x % 3 == 0",
    "keep the numbers greater than 5": "x > 5",
    "drop every number equal to the first one": "x != xs[0]",
    "keep the numbers at even positions, from 0": "i % 2 == 0",
}
CHANGES = {
    "leave them as they are": "x",
    "double each of them": "2 * x",
    "square each of them": "x * x",
    "negate each of them": "-x",
    "take the absolute value of each": "abs(x)",
    "subtract 1 from each": "x - 1",
    "take the remainder of each modulo 7": "x % 7",
    "add to each its position in the original list, from 0": "x + i",
    "halve each of them, rounded down": "x // 2",
}
REDUCTIONS = {
    "the sum": "sum(ys)",
    "how many there are": "len(ys)",
    "the largest, or 0 if there are none": "max(ys, default=0)",
    "the smallest, or 0 if there are none": "min(ys, default=0)",
    "the number of different values": "len(set(ys))",
    "the sum of the different values": "sum(set(ys))",
    "the last one, or 0 if there are none": "ys[-1] if ys else 0",
    "the largest minus the smallest, or 0 if there are none": "max(ys) - min(ys) if ys else 0",
    "the sum of the first three": "sum(ys[:3])",
}
NUM_TESTS = 15


@dataclasses.dataclass(frozen=True)
class Made:
    """A task: its prompt, a solution, a wrong one, and hidden tests."""

    prompt: str
    solution: str
    decoy: str
    tests: list[dict[str, str] | str]


def make(rng: random.Random) -> Made:
    """Returns a task drawn by `rng`."""
    chosen = [rng.choice([*table]) for table in (FILTERS, CHANGES, REDUCTIONS)]
    is_function = rng.random() < 0.5
    steps = f"First {chosen[0]}; then {chosen[1]}; the result is {chosen[2]}."
    if is_function:
        prompt = f"Write a Python function f(xs) of a list of whole numbers. {steps} An empty list gives the result of an empty list."
    else:
        prompt = f"Write a Python program that reads a line of whole numbers and prints one number. {steps} The line may be empty."
    parts = [table[name] for table, name in zip((FILTERS, CHANGES, REDUCTIONS), chosen, strict=True)]
    reference = _compiled(_function(*parts))
    lists = [[rng.randint(-12, 12) for _ in range(rng.randint(0, 9))] for _ in range(NUM_TESTS)]
    lists[0], lists[1] = [], [rng.randint(1, 9) for _ in range(4)]
    answers = [reference(xs) for xs in lists]
    if is_function:
        tests: list[dict[str, str] | str] = [f"assert f({xs}) == {y}" for xs, y in zip(lists, answers, strict=True)]
    else:
        tests = [
            {"input": " ".join(map(str, xs)) + "\n", "output": f"{y}\n"} for xs, y in zip(lists, answers, strict=True)
        ]
    solution, wrong = _function(*parts), _wrong(parts, lists, answers)
    if not is_function:
        solution, wrong = (f"{text}\nprint(f([int(word) for word in input().split()]))" for text in (solution, wrong))
    return Made(prompt, solution, wrong, tests)


def _function(filter: str, change: str, reduction: str) -> str:
    return f"def f(xs):\n    ys = [{change} for i, x in enumerate(xs) if {filter}]\n    return {reduction}"


def _wrong(parts: list[str], lists: list[list[int]], answers: list[int]) -> str:
    """Returns a function with another reduction, which differs on some list."""
    for other in REDUCTIONS.values():
        text = _function(parts[0], parts[1], other)
        function = _compiled(text)
        if [function(xs) for xs in lists] != answers:
            return text
    return "def f(xs):\n    return None"


def _compiled(text: str):
    namespace: dict = {}
    exec(text, namespace)  # of the tables above, never of a model
    return namespace["f"]
