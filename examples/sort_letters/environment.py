"""Sorting a few letters: an environment of your own, in 30 lines."""

import random

from rl.envs import environment


def build(*, min_length: int = 3, max_length: int = 5, seed: int = 0) -> environment.Environment:
    """Builds the environment; its keyword arguments are the options `env.options`."""

    # A task is a pure function of its number: workers and validators make it again. Its prompt decides its split.
    def draw(number: int, index: int, split: str) -> environment.Task:
        rng = random.Random(number)
        text = "".join(rng.choices("abcdefgh", k=rng.randint(min_length, max_length)))
        messages = ({"role": "user", "content": f"Sort: {text}"},)
        return environment.Task("sort_letters", index, split, messages, answer="".join(sorted(text)), decoy=text)

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        completion = completion.strip()
        right = sum(a == b for a, b in zip(completion, task.answer, strict=False))
        return {"reward": float(completion == task.answer), "position": right / max(len(completion), len(task.answer))}

    return environment.Environment("sort_letters", environment.drawn("sort_letters", seed, draw), score)
