"""Problems of mathematics from your own files, {"problem": ..., "answer": ...} per row, checked by math-verify.

1. The answer counts in the last \\boxed{} of the completion alone. An integer is compared as such; other answers, as in
   \\boxed{\\frac{1}{2}}, are equal if math-verify finds them to be, with the gold answer first.
2. math-verify computes with untrusted text for as long as that takes; rl/envs/scoring/scorer.py limits it.
3. Files, splits, and errors are those of the environment `dataset`, which scores other kinds of rows (rl/envs/native/dataset.py).
"""

import dataclasses

from rl.envs.interface import environment
from rl.envs.native import dataset

INSTRUCTION = "Solve the problem step by step. Put the final answer into \\boxed{}."


def build(
    *,
    path: str = "",
    problem: str = "problem",
    answer: str = "answer",
    system_prompt: str = INSTRUCTION,
    held_out: str = "",
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment of the rows at `path`, with names of their fields. `held_out` names the split of held-out tasks.

    Raises ValueError for a missing or malformed file, and without the package math-verify. `seed` has no effect.
    """
    made = dataset.build(
        path=path, prompt=problem, answer=answer, system_prompt=system_prompt, reward="boxed", held_out=held_out
    )

    def make_task(index: int, split: str) -> environment.Task:
        task = made.make_task(index, split)
        own = task.info["answer"]
        return dataclasses.replace(task, env="math", answer=own if "\\boxed{" in own else f"\\boxed{{{own}}}")

    return environment.Environment("math", make_task, made.score, made.num_tasks, num_held_out=made.num_held_out)
