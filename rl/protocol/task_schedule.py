"""The tasks and noise seeds of each batch: pure functions of the run's seed, which anyone can recompute.

1. The task index of group g is element g of grain's index shuffle, which has random access and no state. The position of a run
   in it is therefore its step: groups (n - 1) P .. n P - 1 are of step n. They are batch n, unless the config lets a batch have others
   (`is_fixed`): then the step is only a part of a group's name. With several environments (rl/protocol/env_mix.py) each has a shuffle
   of its own, and group g takes the next element in that of its environment. With `rl.curriculum`, the results of earlier batches choose
   the tasks (rl/protocol/curriculum.py), and a step has numbers for the groups that replace others, too.
2. Sample i of a group uses the group's seed (rl/protocol/noise_seed.py) plus i; a further branch of its episode uses a hash of its prompt. A worker can
   choose neither task nor seed, so it cannot resample until it likes a completion.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from rl.protocol import curriculum, env_mix, lease, noise_seed

NUM_TASKS = 2**30  # of an environment without a number of tasks (env.num_tasks): more than any run needs
BATCHES = ("prescribed", "first")  # values of rl.batch


Draws = Callable[[int], Sequence[tuple[str, int]]]  # step -> (environment, task index) of each of its groups
ANY = -1  # the index of a group whose task only the results of earlier batches fix


def train_groups(config, step: int, draws: Draws | None = None) -> list[lease.Lease]:
    """Returns the groups (one per prompt) of training batch `step` (1-based) of a run with this resolved config.

    `draws` returns (environment, task index) of each group of a step with `rl.curriculum`. Without it, tasks are those of a run that has none.
    """
    P, count = config.rl.prompts_per_step, curriculum.groups_per_step(config.rl)
    groups, places = range((step - 1) * count, step * count), range((step - 1) * P, (step - 1) * P + count)
    oldest = max(0, step - 1 - config.rl.max_lag) if is_fixed(config.rl) else 0
    envs, tasks = env_mix.entries(config), draws(step) if draws else _tasks(config, places)
    seeds = [noise_seed.sampling_seed(config.seed, "train", step, group) for group in groups]
    return [
        lease.Lease(step, group, "train", index, seed, one.samples_per_prompt, one.temperature, oldest, env=one.key)
        for group, seed, (env, index) in zip(groups, seeds, tasks, strict=True)
        for one in [envs[env]]
    ]


def is_fixed(rl) -> bool:
    """Returns True if batch n of a run has the groups of step n, and no others; `rl` is that section of its config."""
    return rl.batch == "prescribed" and not rl.refill and not rl.tokens_per_step


def num_open_steps(config) -> int:
    """Returns the number of steps after which no group of a step is open any more: each was trained on, or is too old."""
    rl = config.rl
    if is_fixed(rl):
        return rl.max_lag + 1
    return math.ceil((rl.max_off_policy + rl.max_lag + 1) * (rl.oversampling + rl.refill)) + 1


def group_steps(config) -> range:
    """Returns the steps that groups of this run may name: as many as there are tasks, since a resume may raise `rl.num_steps`."""
    return range(1, NUM_TASKS // curriculum.groups_per_step(config.rl) + 1)


def numbered_groups(config, numbers: Iterable[int], version: int, draws: Draws | None = None) -> list[lease.Lease]:
    """Returns the groups with these numbers. Unless `is_fixed`, `version` is the oldest policy version that may generate them."""
    count, groups = curriculum.groups_per_step(config.rl), []
    for step, same in itertools.groupby(numbers, lambda number: number // count + 1):
        prescribed = train_groups(config, step, draws)
        groups += [prescribed[number % count] for number in same]
    return groups if is_fixed(config.rl) else [dataclasses.replace(group, min_version=version) for group in groups]


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Held-out tasks with their own sampling and interval: the first `num_tasks`, as groups from number `first` on."""

    name: str  # "": that of the fields of config.evaluation itself
    first: int
    num_tasks: int
    samples_per_task: int
    temperature: float
    every: int  # steps; 0: only before and after all of them
    envs: tuple[str, ...] = ("",)  # the environments of its tasks, which take turns

    def is_due(self, step: int, num_steps: int) -> bool:
        """Returns True if the policy after `step` of `num_steps` is evaluated."""
        return step in (0, num_steps) or (self.every > 0 and step % self.every == 0)


def evaluation_sets(config) -> list[EvaluationSet]:
    """Returns the evaluation sets of a resolved config, the default one first."""
    default = {name: config.evaluation[name] for name in ("num_tasks", "samples_per_task", "temperature", "every")}
    sets, first, envs = [], 0, tuple(env_mix.entries(config))
    for name in ("", *sorted(config.evaluation.sets)):
        fields = default | (config.evaluation.sets[name].to_dict() if name else {})
        env = fields.pop("env", "")
        sets.append(EvaluationSet(name, first, **fields, envs=(env,) if env else envs))
        first += fields["num_tasks"]
    return sets


def held_out_groups(config, version: int, name: str | None = None) -> list[lease.Lease]:
    """Returns the groups of the evaluation set `name` (None: of all) for a policy: the same tasks and seeds at every evaluation."""
    return [
        lease.Lease(version, number, "held_out", index, seed, one.samples_per_task, one.temperature, version, env=env)
        for one in evaluation_sets(config)
        if name in (None, one.name)
        for number in range(one.first, one.first + one.num_tasks)
        for seed in [noise_seed.sampling_seed(config.seed, "held_out", 0, number)]
        for env, index in [in_turn(one.envs, number - one.first)]
    ]


def in_turn(envs: Sequence[str], number: int) -> tuple[str, int]:
    """Returns (environment, task index) of element `number` of held-out tasks that are taken from these environments in turn."""
    return envs[number % len(envs)], number // len(envs)


def warmup_tasks(config, step: int) -> list[tuple[str, int]]:
    """Returns (environment, task index) of supervised warm-up batch `step`, counted from the end of the task order.

    RL does not reach these tasks in an endless environment. In a dataset, RL and the warm-up both use all rows.
    """
    count = config.warmup.tasks_per_step
    return _tasks(config, [NUM_TASKS - 1 - i for i in range((step - 1) * count, step * count)])


def _tasks(config, groups: Iterable[int]) -> list[tuple[str, int]]:
    """Returns (environment, task index) for positions in the order of a run's training tasks."""
    import grain  # here: it takes seconds, and the rules of a config import this module

    orders = {}
    for env, entry in env_mix.entries(config).items():
        seed = config.seed
        if entry.key:  # else two of the same kind would take their tasks in the same order
            digest = hashlib.sha256(f"intellax/tasks/{seed}/{entry.key}".encode()).digest()
            seed = int.from_bytes(digest[:4], "little") % 2**31
        tasks = grain.MapDataset.range(entry.num_tasks or NUM_TASKS)
        orders[env] = tasks.shuffle(seed=seed).repeat()  # a permutation for each epoch
    return [(env, int(cast(int, orders[env][position]))) for env, position in env_mix.places(config, groups)]
