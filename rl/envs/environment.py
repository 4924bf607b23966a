"""What an environment is, and which tasks belong to training.

1. `make_task(index, split)` makes a task: a pure function of (options, seed, split, index), so that a worker, a
   validator and tomorrow's process all see the same one.
2. A model answers; whoever runs it takes the reasoning off (`tokenizer.parse`) and calls `score(task, completion)`.
3. `score` gives named numbers: "reward" is what training maximises, the others are there to be looked at.
4. What either raises is told in one line with the environment and the task (`failure`). A task that cannot be made ends the run.
   A completion that cannot be scored is worth 0 and has a part "error" of 1 (rl/envs/scorer.py).

Train and held-out tasks are told apart by their content, whatever generated them: a prompt is held out when its hash
is 0 modulo 16. `candidates` gives the numbers to try; a builder takes the first whose prompt is on the wanted side.

Left out: several turns. They come as one more field, `reply(task, messages) -> messages | None`; `score` stays.
"""

import dataclasses
import hashlib
import pathlib
import traceback
from collections.abc import Callable, Iterator

HELD_OUT_ONE_IN = 16
MAX_ATTEMPTS = 512  # a held-out draw fails by chance with (15/16)^512 = 5e-15
MAX_FAILURE = 300  # characters of one that are told: it may repeat a stranger's text


@dataclasses.dataclass(frozen=True)
class Task:
    env: str
    index: int
    split: str  # "train" or "held_out"
    messages: tuple[dict, ...]  # the system and user turns that open the episode
    answer: str  # a completion that scores 1.0
    decoy: str  # a tempting completion that scores less, for studies of wrong teaching; "" where there is none
    info: dict  # what `score` needs besides; stays in the process, as anyone can make the task again


@dataclasses.dataclass(frozen=True)
class Environment:
    name: str
    make_task: Callable[[int, str], Task]  # (index, split)
    score: Callable[[Task, str], dict[str, float]]  # (task, completion) -> {"reward": total, ...}


def checked(env: Environment) -> Environment:
    """The same, whose `make_task` raises nothing but a ValueError that says where to look."""

    def make_task(index: int, split: str) -> Task:
        try:
            return env.make_task(index, split)
        except Exception as error:  # foreign code may raise anything, and everything means the same
            raise ValueError(
                f"environment {env.name} cannot make {split} task {index}: {failure(error)}; mend its make_task or its "
                "options (env.options)"
            ) from error

    return dataclasses.replace(env, make_task=make_task)


def failure(error: BaseException) -> str:
    """One printable line: what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(c if c.isprintable() else "?" for c in text)[:MAX_FAILURE] + where


def candidates(name: str, seed: int, split: str, index: int) -> Iterator[int]:
    """64-bit numbers to generate the task from, one per attempt; ValueError where none of them served."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split is {split!r}; use 'train' or 'held_out'")
    if index < 0:
        raise ValueError(f"task index is {index}; use 0 or more")
    for attempt in range(MAX_ATTEMPTS):
        yield stable_hash(f"{name}/{seed}/{split}/{index}/{attempt}")
    raise ValueError(
        f"{name} has no usable {split} prompt among {MAX_ATTEMPTS} draws for task {index}: its task space is too "
        "small to keep a held-out part; widen its options"
    )


def split_of(prompt: str) -> str:
    return "held_out" if stable_hash(prompt) % HELD_OUT_ONE_IN == 0 else "train"


def stable_hash(text: str) -> int:
    """Python's own hash differs from one process to the next."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
