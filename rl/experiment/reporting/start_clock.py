"""Measures the start of a run: the seconds from the start of this process until the end of its first step of RL, by part.

The parts follow each other. `mark` ends one, which began at the mark before it. Work that overlaps a part, such as the compilation of the
train step while a server starts, counts only for the time in which the run waits for it.
"""

import os
import pathlib
import time

WARM_UP = "warm-up steps"  # training, which a second start repeats
_parts: dict[str, float] = {}
_marked_s: float | None = None  # the age of this process at the last mark


def mark(part: str) -> None:
    """Adds the seconds since the last mark, or since the start of this process, to `part`."""
    global _marked_s
    now_s = age_s()
    _parts[part] = _parts.get(part, 0.0) + now_s - (_marked_s or 0.0)
    _marked_s = now_s


def summary(event: str) -> str:
    """Returns a line for people: seconds from the start of this process until `event`, those without warm-up steps, and the seconds of each part."""
    total_s = sum(_parts.values())
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in _parts.items())
    rest = f", {total_s - _parts[WARM_UP]:.1f} s without warm-up steps" if WARM_UP in _parts else ""
    return f"{event} after {total_s:.1f} s{rest}: {parts}"


def age_s() -> float:
    """Returns the seconds since the start of this process; where Linux's /proc is absent, since the import of this module."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.monotonic() - _IMPORTED_S


_IMPORTED_S = time.monotonic()
