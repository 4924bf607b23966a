"""Measures the memory of this machine, or of the container that the process runs in, and keeps that of the process small. Does not import jax."""

import contextlib
import ctypes
import gc
import os
import pathlib
import re

MIN_TRIM_BYTES = 2**20
M_ARENA_MAX = -8  # of glibc's malloc.h


def total_bytes(cgroup: str = "/sys/fs/cgroup") -> int:
    """Returns the memory of this machine, or of the container that this process runs in."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", for no limit
            found = min(found, int(pathlib.Path(cgroup, name).read_text()))
    return found


def available_bytes(meminfo: str = "/proc/meminfo") -> int:
    """Returns the memory that programs can still take: free pages and caches. On systems without that figure, returns `total_bytes`."""
    found = total_bytes()
    with contextlib.suppress(OSError):
        if match := re.search(r"MemAvailable:\s+(\d+) kB", pathlib.Path(meminfo).read_text()):
            found = min(found, int(match[1]) * 1024)
    return found


def limit_arenas() -> None:
    """Gives malloc one arena per core instead of eight: each keeps the most memory that its threads ever used. To be called at the start."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # of glibc
        mallopt(M_ARENA_MAX, os.cpu_count() or 1)


def trim(num_bytes: int) -> None:
    """Returns memory to the operating system after `num_bytes` were freed on a CPU; does nothing if they are few.

    JAX drops its references to numpy arrays in garbage collections, and malloc keeps pieces that the next weights may not fit.
    """
    if num_bytes >= MIN_TRIM_BYTES:
        gc.collect(0)
        if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
            malloc_trim(0)
