"""Reversing a few letters: the smallest task with a gradient from the first step.

1. The user writes "Reverse: abcde"; the answer is "edcba". The prompt is short, because a byte is a token in the quickstart.
2. The reward is the fraction of the text in the right order, 2 LCS(a, b) / (|a| + |b|), so a model that has only learned to
   stop in time already gets different rewards. The option `reward` selects others: "position", the fraction of positions
   that are right, and "exact", 1 for the answer itself.
3. The decoy is the unchanged text: the completion of a model that copies instead of reversing.
"""

import random
import string

from rl.envs.interface import environment

REWARDS = ("lcs", "position", "exact")


def build(
    *,
    min_length: int = 3,
    max_length: int = 8,
    alphabet: str = string.ascii_lowercase,
    reward: str = "lcs",
    seed: int = 0,
) -> environment.Environment:
    """Builds an environment whose tasks are to reverse texts of `min_length` to `max_length` characters of `alphabet`.

    Raises ValueError for lengths that are out of order, an unusable alphabet, or a `reward` that is not one of REWARDS.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(f"min_length={min_length}, max_length={max_length}; choose 1 <= min_length <= max_length")
    if not alphabet or any(char.isspace() for char in alphabet):
        raise ValueError(f"alphabet={alphabet!r}; choose at least one character and no white space, which is stripped")
    if reward not in REWARDS:
        raise ValueError(f"reward={reward!r}; choose one of {', '.join(REWARDS)}")

    def draw(number: int, index: int, split: str) -> environment.Task:
        rng = random.Random(number)
        text = "".join(rng.choices(alphabet, k=rng.randint(min_length, max_length)))
        messages = environment.asked(f"Reverse: {text}")
        return environment.Task("reverse_text", index, split, messages, answer=text[::-1], decoy=text)

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        completion = completion.strip()
        right = sum(a == b for a, b in zip(completion, task.answer, strict=False))
        scores = {
            "exact": float(completion == task.answer),
            "position": right / max(len(completion), len(task.answer)),
            "lcs": 2 * _lcs_length(completion, task.answer) / (len(completion) + len(task.answer)),
        }
        return {"reward": scores[reward], **scores}

    return environment.Environment("reverse_text", environment.drawn("reverse_text", seed, draw), score)


def _lcs_length(a: str, b: str) -> int:
    """Returns the length of the longest common subsequence of two strings; `above[j]` is the length for (a so far, b[:j])."""
    above = [0] * (len(b) + 1)
    for char in a:
        row = [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if char == other else max(above[j + 1], row[j]))
        above = row
    return above[-1]
