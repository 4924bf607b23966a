"""Chooses the tasks of each batch by the results of earlier batches, so that anyone can recompute the choice.

1. The result of a group is the mean reward of its samples, by our own scorer. The results of batch n are those of its groups, of
   groups without a signal that others replaced too, in the order of their numbers.
2. The tasks of step n are a function of the run's seed, n, and the results of the batches up to n - 1 - max_lag: the newest that exist
   when the groups of step n open, however fast workers are. A worker can move a draw by its samples alone, as it does with every gradient, and not by speed or failure.
3. "pools": a task is unseen, hard (result up to `hard_below`), normal, or easy (above `easy_above`) by its newest result. A draw takes a pool in proportion to
   its weight times its number of tasks, and then one of its tasks. A task with a result of `drop_at` or more is never drawn again (ScaleRL, arXiv 2510.13786).
   If no pool with a weight has a task, draws are uniform over the tasks that are not dropped; if all are dropped, over all tasks.
4. "levels": the environment has levels of difficulty (rl/envs/wrappers/ladder.py). Draws are uniform over the `level_width` highest levels that are open. After
   `level_groups` results of the highest one with a mean of `level_up` or more, the next one opens (RLVE, arXiv 2511.07317).
5. `digest` is a hash chain over all results. It is in the ledger's event of each batch; the results are in the run's files.
"""

import bisect
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence

import numpy as np

from rl.protocol import env_mix

KINDS = ("", "pools", "levels")  # values of rl.curriculum
POOLS = ("hard", "normal", "easy", "unseen")
# Fields of `config.curriculum`, in the order of the digest.
FIELDS = (
    "hard_below",
    "easy_above",
    *(f"{pool}_weight" for pool in POOLS),
    "drop_at",
    "level_up",
    "level_groups",
    "level_width",
)
MAX_ATTEMPTS = 32  # to draw a task that the step does not have yet
MAX_TASKS = 2**30
FILE = "curriculum.json"  # in the directory of a step's rollouts


@dataclasses.dataclass(frozen=True)
class Result:
    """The mean reward of the samples of one group."""

    group: int
    env: str  # key in `env_mix.entries`
    index: int
    reward: float


def _check(rule) -> None:
    """Raises ValueError for values of `config.curriculum` that are out of their range."""
    if not rule.hard_below <= rule.easy_above:
        found = f"curriculum.hard_below = {rule.hard_below:g} exceeds curriculum.easy_above = {rule.easy_above:g}"
        raise ValueError(f"{found}; lower it")
    if not (min(rule[f"{pool}_weight"] for pool in POOLS) >= 0 and rule.unseen_weight > 0):
        raise ValueError("the weights of curriculum must be at least 0, and unseen_weight above 0; raise them")
    if min(rule.level_groups, rule.level_width) < 1:
        raise ValueError("curriculum.level_groups and level_width must be at least 1; raise them")


def slots(config, step: int) -> list[str]:
    """Returns the environments of the groups that step `step` may have, replacement groups included."""
    first = (step - 1) * config.rl.prompts_per_step
    places = env_mix.places(config, range(first, first + groups_per_step(config.rl)))
    return [env for env, _ in places]


def groups_per_step(rl) -> int:
    """Returns how many group numbers a step has; `rl` is that section of a config. With a curriculum, replacement groups count, too."""
    P = rl.prompts_per_step
    return P + env_mix.max_flat(rl) if rl.curriculum else P


class Curriculum:
    """The state of a run's curriculum after a batch, and the tasks of the steps that may be open then."""

    def __init__(self, config):
        """Begins before the first batch. Raises ValueError for a rule or an environment that do not fit."""
        rule, self._config, self._lag = config.curriculum, config, config.rl.max_lag
        _check(rule)
        kind = _Pools if config.rl.curriculum == "pools" else _Levels
        self._envs = {key: kind(rule, entry) for key, entry in env_mix.entries(config).items()}
        text = json.dumps([config.rl.curriculum, config.seed, [rule[name] for name in FIELDS]])
        self.step, self.digest = 0, hashlib.sha256(b"intellax/curriculum/1" + text.encode()).hexdigest()
        self._draws: dict[int, list[tuple[str, int]]] = {}
        self._fill()

    def draws(self, step: int) -> list[tuple[str, int]]:
        """Returns (environment, task index) of each group that step `step` may have, one of the max_lag + 1 after the last batch."""
        return self._draws[step]

    def add(self, step: int, results: Sequence[Result]) -> None:
        """Takes the results of batch `step`, the one after the last, in the order of their groups."""
        assert step == self.step + 1, (step, self.step)
        self.step, self.digest = step, chained(self.digest, step, results)
        for one in results:
            self._envs[one.env].add(one.index, one.reward)
        self._draws = {n: draws for n, draws in self._draws.items() if n > step}
        self._fill()

    def state(self) -> dict:
        """Returns the state as plain JSON, for `restore`."""
        draws = {str(step): draws for step, draws in self._draws.items()}
        envs = {key: one.state() for key, one in self._envs.items()}
        return {"step": self.step, "digest": self.digest, "draws": draws, "envs": envs}

    def restore(self, state: dict) -> None:
        """Continues from a saved state."""
        self.step, self.digest = state["step"], state["digest"]
        self._draws = {int(step): [(env, index) for env, index in draws] for step, draws in state["draws"].items()}
        for key, own in state["envs"].items():
            self._envs[key].restore(own)

    def metrics(self) -> dict[str, float]:
        """Returns the sizes of pools, or the highest open level, of each environment."""
        several = len(self._envs) > 1
        return {
            f"curriculum/{key}/{name}" if several else f"curriculum/{name}": value
            for key, one in self._envs.items()
            for name, value in one.metrics().items()
        }

    def _fill(self) -> None:
        """Draws the tasks of the steps that the results so far decide."""
        for step in range(self.step + 1, self.step + self._lag + 2):
            if step not in self._draws:
                self._draws[step] = self._draw(step)

    def _draw(self, step: int) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        seen: set[tuple[str, int]] = set()
        views = {key: one.view() for key, one in self._envs.items()}
        for number, env in enumerate(slots(self._config, step)):
            for attempt in range(MAX_ATTEMPTS):
                text = f"intellax/curriculum/{self._config.seed}/{step}/{number}/{attempt}"
                digest = hashlib.sha256(text.encode()).digest()
                index = views[env](int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))
                if (env, index) not in seen:
                    break
            seen.add((env, index))
            found.append((env, index))
        return found


def chained(digest: str, step: int, results: Sequence[Result]) -> str:
    """Returns the digest after batch `step`, which had these results; `digest` is the one before."""
    rows = [[one.group, one.env, one.index, one.reward] for one in results]
    text = json.dumps([digest, step, rows], allow_nan=False)
    return hashlib.sha256(b"intellax/curriculum/1" + text.encode()).hexdigest()


def encode(step: int, results: Sequence[Result]) -> bytes:
    """Returns the content of FILE for the results of a batch."""
    rows = [list(dataclasses.astuple(one)) for one in results]
    return json.dumps({"step": step, "results": rows}).encode()


def decode(data: bytes) -> list[Result]:
    """Returns the results in a FILE. Raises ValueError for other bytes."""
    try:
        rows = json.loads(data)["results"]
        return [Result(int(group), str(env), int(index), float(reward)) for group, env, index, reward in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the results of a batch ({error})") from error


class _Pools:
    """The newest result of each task of an environment."""

    def __init__(self, rule, entry: env_mix.Entry):
        if not entry.num_tasks:
            found = f"{entry.field('num_tasks')} is 0: the environment makes tasks without end, and a pool would stay unseen"
            raise ValueError(f"{found}; set it, as in 1000, or rl.curriculum = 'levels'")
        self._rule = rule
        self._newest = np.full(entry.num_tasks, np.nan)
        self._dropped = np.zeros(entry.num_tasks, bool)

    def add(self, index: int, reward: float) -> None:
        self._newest[index] = reward
        if self._rule.drop_at and reward >= self._rule.drop_at:
            self._dropped[index] = True

    def view(self):
        """Returns the function from two random 64-bit numbers to a task index."""
        sized = ((own, self._rule[f"{pool}_weight"] * len(own)) for pool, own in self._members().items())
        pools = [(own, size) for own, size in sized if size > 0]
        if not pools:
            left = np.flatnonzero(~self._dropped if not self._dropped.all() else self._dropped)
            return lambda first, second: int(left[second * len(left) >> 64])
        ends = [*itertools.accumulate(size for _, size in pools)]

        def draw(first: int, second: int) -> int:
            own, _ = pools[bisect.bisect_right(ends, first / 2**64 * ends[-1], 0, len(ends) - 1)]
            return int(own[second * len(own) >> 64])

        return draw

    def metrics(self) -> dict[str, float]:
        sizes = {pool: float(len(own)) for pool, own in self._members().items()}
        return sizes | {"dropped": float(self._dropped.sum())}

    def state(self) -> dict:
        seen = np.flatnonzero(~np.isnan(self._newest))
        own = {"index": seen.tolist(), "reward": self._newest[seen].tolist()}
        return own | {"dropped": np.flatnonzero(self._dropped).tolist()}

    def restore(self, state: dict) -> None:
        self._newest[:], self._dropped[:] = np.nan, False
        self._newest[state["index"]], self._dropped[state["dropped"]] = state["reward"], True

    def _members(self) -> dict[str, np.ndarray]:
        """Returns the tasks of each of POOLS."""
        newest, rule = self._newest, self._rule
        hard, easy = newest <= rule.hard_below, newest > rule.easy_above
        normal = ~(hard | easy | np.isnan(newest))
        found = zip(POOLS, (hard, normal, easy, np.isnan(newest)), strict=True)
        return {pool: np.flatnonzero(own & ~self._dropped) for pool, own in found}


class _Levels:
    """The highest open level of an environment, and the results of its tasks since it opened."""

    def __init__(self, rule, entry: env_mix.Entry):
        ladder = entry.options.get("ladder") or {}
        self._num = len(next(iter(ladder.values()), ()))
        if not self._num:
            found = f"rl.curriculum = 'levels', and {entry.field('options')} has no ladder of difficulty"
            raise ValueError(f"{found}; add ladder=dict(OPTION=(easy, ..., hard))")
        if entry.options.get("solve_rate"):
            found = f"rl.curriculum = 'levels', and {entry.field('options')} has solve_rate, which renumbers the tasks"
            raise ValueError(f"{found}; remove solve_rate, or set rl.curriculum = 'pools'")
        self._rule, self._count = rule, (entry.num_tasks or MAX_TASKS) // self._num
        self._top, self._results, self._sum = 0, 0, 0.0

    def add(self, index: int, reward: float) -> None:
        if index % self._num != self._top or self._top == self._num - 1:
            return
        self._results, self._sum = self._results + 1, self._sum + reward
        if self._results < self._rule.level_groups:
            return
        self._top += self._sum / self._results >= self._rule.level_up
        self._results, self._sum = 0, 0.0

    def view(self):
        low = max(0, self._top - self._rule.level_width + 1)
        width = self._top - low + 1
        return lambda first, second: (second * self._count >> 64) * self._num + low + (first * width >> 64)

    def metrics(self) -> dict[str, float]:
        return {"level": float(self._top)}

    def state(self) -> dict:
        return {"top": self._top, "results": self._results, "sum": self._sum}

    def restore(self, state: dict) -> None:
        self._top, self._results, self._sum = state["top"], state["results"], state["sum"]
