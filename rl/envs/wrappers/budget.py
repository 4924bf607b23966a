"""Length budgets (INTELLECT-2, after L1 of arXiv 2503.04697): the prompt asks for a number of tokens, and the reward pays for it.

1. The target of a task is drawn from `targets` by a SHA-256 over the task's prompt. Of an environment with n tasks, an epoch has
   n * len(targets): each task once with each target. So workers and validators compute it from the index.
2. The suffix "Think for N tokens before giving a response." ends the prompt.
3. L is the number of sampled tokens of the root stream: the calls that continue the task's own messages, reasoning included.
   exact:  r - alpha * |target - L|
   max:    r * clip(alpha * (target - L) + 0.5, 0, 1)
   clip:   0 if L > target, else r

The environment becomes one with episodes, since a score sees no tokens, and validators repeat episodes. The rewards have the
parts `task_reward`, `length`, `length_target`, `length_error` = |target - L| / target, and `length_penalty` = task reward - reward.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

from rl.envs.interface import environment, episode

KINDS = ("exact", "max", "clip")
SUFFIX = "Think for {target} tokens before giving a response."
ALPHA = 0.0003  # of INTELLECT-2, for targets of thousands of tokens


def budgeted(
    env: environment.Environment, kind: str, targets: Sequence[int], alpha: float = 0.0
) -> environment.Environment:
    """Returns the environment with a length budget for each task. `alpha` is per token; 0: that of INTELLECT-2.

    Raises ValueError for an unknown kind, targets that are not positive whole numbers, or an alpha below 0.
    """
    if kind not in KINDS:
        raise ValueError(f"env.options.budget = {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    targets = tuple(targets) if isinstance(targets, (list, tuple)) else ()
    if not targets or not all(type(target) is int and target > 0 for target in targets):
        raise ValueError(f"env.options.budget_targets = {targets!r} are not positive whole numbers; write (1000, 2000)")
    if not alpha >= 0:
        raise ValueError(f"env.options.budget_alpha = {alpha!r} must be at least 0; raise it")
    rate = alpha or ALPHA
    if env.foreign is not None:
        raise ValueError(f"environment {env.name} runs in an interpreter of its own; leave out env.options.budget")

    def make_task(index: int, split: str) -> environment.Task:
        turn, own = divmod(index, env.num_tasks) if env.num_tasks and split == "train" else (0, index)
        task = env.make_task(own, split)
        goal = target_of(task, targets, turn)
        *others, last = task.messages
        messages = (*others, last | {"content": f"{last['content']}\n{SUFFIX.format(target=goal)}"})
        return dataclasses.replace(task, index=index, messages=messages, info=task.info | {"budget": (task, goal)})

    async def play(task: environment.Task, model: episode.Model) -> dict[str, float]:
        inner, goal = task.info["budget"]
        counted = _Counted(model, task.messages)
        if env.play:
            scores = await env.play(dataclasses.replace(inner, messages=task.messages, index=task.index), counted)
        else:
            assert env.score is not None
            scores = env.score(inner, (await counted.chat(task.messages)).text)
        reward = with_length(kind, scores["reward"], goal, counted.num_tokens, rate)
        length = {"length": float(counted.num_tokens), "length_target": float(goal)}
        length |= {"length_error": abs(goal - counted.num_tokens) / goal, "length_penalty": scores["reward"] - reward}
        return scores | {"reward": reward, "task_reward": scores["reward"]} | length

    low, high = env.reward_range
    reward_range = (min(low, 0.0) - rate * 2**20 if kind == "exact" else min(low, 0.0), high)
    changes = {"make_task": make_task, "play": play, "score": None, "num_tasks": env.num_tasks * len(targets)}
    return dataclasses.replace(env, reward_range=reward_range, **changes)


def target_of(task: environment.Task, targets: Sequence[int], turn: int = 0) -> int:
    """Returns the target length of a task in epoch `turn`. Over len(targets) epochs, a task gets each target once."""
    digest = hashlib.sha256(f"intellax/budget/{environment.content_key(task.messages)}".encode()).digest()
    return targets[(int.from_bytes(digest[:8], "little") + turn) % len(targets)]


def with_length(kind: str, reward: float, target: int, length: int, alpha: float) -> float:
    """Returns the reward of a completion of `length` tokens for a `target`, by the formula of `kind` in the module docstring."""
    if kind == "exact":
        return reward - alpha * abs(target - length)
    if kind == "max":
        return reward * min(max(alpha * (target - length) + 0.5, 0.0), 1.0)
    return reward if length <= target else 0.0


class _Counted:
    """A model that counts the sampled tokens of the root stream."""

    def __init__(self, model: episode.Model, messages: Sequence[dict]):
        self.num_tokens, self._model, self._root = 0, model, [*messages]

    async def chat(self, messages, **options) -> episode.Reply:
        """Implements `episode.Model.chat`."""
        reply = await self._model.chat(messages, **options)
        is_root = options.get("trains", True) and [*messages][: len(self._root)] == self._root
        self.num_tokens += reply.num_tokens if is_root else 0
        return reply
