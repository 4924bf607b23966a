"""Reverse a few letters: the smallest task with a gradient from the first step.

1. The user says "Reverse: abcde"; the answer is "edcba". The prompt is short: a byte is a token in the quickstart.
2. The reward is the share of the text in the right order, 2 LCS(a, b) / (|a| + |b|), so that a model which has only
   learnt to end in time already sees a difference; or, by the option `reward`, the share of positions that are right
   ("position"), or 1 for the very answer ("exact").
3. The decoy is the text as it was: what a model does that copies instead of reversing.
"""

import random
import string

from rl.envs import environment

REWARDS = ("lcs", "position", "exact")


def build(
    *,
    min_length: int = 3,
    max_length: int = 8,
    alphabet: str = string.ascii_lowercase,
    reward: str = "lcs",
    seed: int = 0,
) -> environment.Environment:
    if not 1 <= min_length <= max_length:
        raise ValueError(f"min_length={min_length}, max_length={max_length}; they must satisfy 1 <= min <= max")
    if not alphabet or any(char.isspace() for char in alphabet):
        raise ValueError(f"alphabet={alphabet!r}; give at least one character and no white space, which is stripped")
    if reward not in REWARDS:
        raise ValueError(f"reward={reward!r}; use one of {', '.join(REWARDS)}")

    def make_task(index: int, split: str) -> environment.Task:
        for number in environment.candidates("reverse_text", seed, split, index):
            rng = random.Random(number)
            text = "".join(rng.choices(alphabet, k=rng.randint(min_length, max_length)))
            prompt = f"Reverse: {text}"
            if environment.split_of(prompt) == split:
                messages = ({"role": "user", "content": prompt},)
                return environment.Task("reverse_text", index, split, messages, answer=text[::-1], decoy=text, info={})
        raise AssertionError("candidates raises when it runs out")

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        completion = completion.strip()
        right = sum(a == b for a, b in zip(completion, task.answer, strict=False))
        parts = {
            "exact": float(completion == task.answer),
            "position": right / max(len(completion), len(task.answer)),
            "lcs": 2 * _lcs_length(completion, task.answer) / (len(completion) + len(task.answer)),
        }
        return {"reward": parts[reward], **parts}

    return environment.Environment("reverse_text", make_task, score)


def _lcs_length(a: str, b: str) -> int:
    """Length of the longest common subsequence; `above[j]` is that of (a so far, b[:j])."""
    above = [0] * (len(b) + 1)
    for char in a:
        row = [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if char == other else max(above[j + 1], row[j]))
        above = row
    return above[-1]
