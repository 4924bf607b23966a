"""Which task comes when, and with which sampling noise: pure functions of the run's seed, that anyone can recompute.

1. `task_order(seed)[g]` is the task index of group g: grain's index shuffle, random access, no state. The cursor of a
   run is therefore its step: batch n holds groups (n - 1) P .. n P - 1.
2. `sampling_seed(seed, split, step, group)` is the noise seed of a group; sample i of it uses that plus i. A worker can
   choose neither: it cannot draw again until a sample pleases it.
"""

import dataclasses
import hashlib

import grain

NUM_TASKS = 2**30  # of a procedural environment: more than any run asks for


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt to be answered `num_samples` times: what a worker is given, and is later held to.

    step: the batch it belongs to (for held-out groups, the policy version under evaluation). index: of the task in its
    split. seed: of the noise of sample 0. min_version: the oldest policy version that may answer.
    """

    step: int
    group: int
    split: str  # "train" | "held_out"
    index: int
    seed: int
    num_samples: int
    temperature: float
    min_version: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.split, self.step, self.group


def task_order(seed: int) -> grain.MapDataset:
    """Group -> task index. A permutation per epoch of `NUM_TASKS`."""
    return grain.MapDataset.range(NUM_TASKS).shuffle(seed=seed).repeat()


def sampling_seed(seed: int, split: str, step: int, group: int) -> int:
    """uint32 from SHA-256, so that no two groups of a run share noise but by chance."""
    text = f"intellax/sampling/{seed}/{split}/{step}/{group}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def train_groups(config, step: int) -> list[Group]:
    """The P groups of batch `step` (1-based); `config` is the resolved config of the run."""
    order, P = task_order(config.seed), config.rl.prompts_per_step
    return [
        Group(
            step=step,
            group=group,
            split="train",
            index=int(order[group]),
            seed=sampling_seed(config.seed, "train", step, group),
            num_samples=config.rl.samples_per_prompt,
            temperature=config.sampling.temperature,
            min_version=max(0, step - 1 - config.rl.max_lag),
        )
        for group in range((step - 1) * P, step * P)
    ]


def held_out_groups(config, version: int) -> list[Group]:
    """The same held-out tasks at every evaluation, in order."""
    return [
        Group(
            step=version,
            group=group,
            split="held_out",
            index=group,
            seed=sampling_seed(config.seed, "held_out", 0, group),
            num_samples=config.evaluation.samples_per_task,
            temperature=config.evaluation.temperature,
            min_version=version,
        )
        for group in range(config.evaluation.num_tasks)
    ]


def warmup_indices(config, step: int) -> list[int]:
    """Task indices of warm-up batch `step` (1-based), from the far end of the order: RL does not meet them again."""
    order, count = task_order(config.seed), config.warmup.tasks_per_step
    return [int(order[NUM_TASKS - 1 - i]) for i in range((step - 1) * count, step * count)]
