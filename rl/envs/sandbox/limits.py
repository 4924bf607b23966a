"""Limits of code that the model wrote, and the results of running it.

A worker ends a program after `cpu_s`, and a validator, whose machine may be slower, after `factor` times as long (`set_factor`; the rule
is that of rl/envs/scoring/scorer.py). A program near the limit may so end on one of them only. `measured` finds these programs:

    >>> with measured() as times:
    ...     note(Result("", "", None, stopped="time", cpu_s=0.1), Limits())
    >>> times.is_slow
    True
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

# A program may take so much by the clock: a pool runs two per core, and the machine may be busy for a moment.
CLOCK_FACTOR, CLOCK_MORE_S = 2, 2.0
SPREAD = 5  # how much faster or slower an honest machine may be
MAX_FILES = 1000  # that a program may make


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one program, or of one command of a session. Raises ValueError for a limit below the smallest usable one."""

    cpu_s: float = 5.0  # CPU seconds on a worker
    memory_bytes: int = 2**29  # of address space, including the interpreter's own 30 MB
    folder_bytes: int = 2**25  # of all files together
    file_bytes: int = 2**23  # of one file
    output_bytes: int = 2**13  # that are kept, of each of standard output and error: half of them from the beginning
    flood_bytes: int = 2**24  # of output, after which the program is ended
    tasks: int = 32  # threads; no program may start a process

    def __post_init__(self):
        least = dataclasses.asdict(self) | {"cpu_s": 0.1, "memory_bytes": 2**26, "folder_bytes": 2**16, "tasks": 4}
        least |= dict.fromkeys(("file_bytes", "output_bytes"), 2)
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"limit {name} = {getattr(self, name)} is below {value}; raise it")


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one program, or of one command of a session.

    A program that was ended at a limit has no output: its last part would depend on the machine.
    """

    stdout: str
    stderr: str  # of a session: "", because both are in `stdout`, in their order
    exit: int | None  # status; negative: the signal that ended it; None: it was ended at a limit
    truncated: bool = False  # a part in the middle of the output was left out
    # the limit at which it was ended: "time" (CPU seconds, or by the clock), "output", "files", "lost" (the sandbox itself ended), or ""
    stopped: str = ""
    cpu_s: float = 0.0
    values: dict = dataclasses.field(default_factory=dict)  # of a session: the variables that it watches


@dataclasses.dataclass
class Times:
    """Collects the times of programs during `measured`."""

    # CPU time of a program as a part of a worker's limit; 1 or more: it was ended, or would be on a worker
    largest: float = 0.0

    @property
    def is_slow(self) -> bool:
        """True if a program came so near to its time limit that a slower or faster machine could have decided otherwise."""
        return self.largest >= 1 / SPREAD


_FACTOR = [1.0]
_TIMES: contextvars.ContextVar[Times | None] = contextvars.ContextVar("times", default=None)


def set_factor(factor: float) -> None:
    """Sets the factor on all time limits of this process. A validator sets SPREAD, and workers keep 1."""
    _FACTOR[0] = factor


def cpu_s(limits: Limits) -> float:
    """Returns the CPU seconds that a program may take in this process."""
    return limits.cpu_s * _FACTOR[0]


@contextlib.contextmanager
def measured() -> Iterator[Times]:
    """Collects times of the programs that this task of the event loop, and tasks that it makes, run in the `with` block."""
    times = Times()
    token = _TIMES.set(times)
    try:
        yield times
    finally:
        _TIMES.reset(token)


def note(result: Result, limits: Limits) -> None:
    """Records the time of a program for `measured`."""
    times = _TIMES.get()
    if times is not None:
        times.largest = max(times.largest, 1.0 if result.stopped == "time" else 0.0, result.cpu_s / limits.cpu_s)
