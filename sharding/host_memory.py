"""Returns the memory of this machine, or of the container that the process runs in. Does not import jax."""

import contextlib
import os
import pathlib
import re


def total_bytes(cgroup: str = "/sys/fs/cgroup") -> int:
    """Returns the memory of this machine, or of the container that this process runs in."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", for no limit
            found = min(found, int(pathlib.Path(cgroup, name).read_text()))
    return found


def available_bytes(meminfo: str = "/proc/meminfo") -> int:
    """Returns the memory that programs can still take: free pages and caches. All of `total_bytes`, on systems without that figure."""
    found = total_bytes()
    with contextlib.suppress(OSError):
        if match := re.search(r"MemAvailable:\s+(\d+) kB", pathlib.Path(meminfo).read_text()):
            found = min(found, int(match[1]) * 1024)
    return found
