"""Injects the faults of a schedule into a swarm, and heals them in time. WORKDIR/chaos.jsonl has a line for each begin and end.

A full disk is a tmpfs of `DISK_BYTES` on which a relay keeps its mirror, filled to the last byte, if this user may mount one. Else,
and for the learner, it is a limit of 0 on the size of files that the process writes: it gets EFBIG in place of ENOSPC.
"""

import collections
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping

from bench.chaos import fault_schedule, tcp_link
from rl.swarm import supervisor

DISK_BYTES = 256 * 2**20
LINK_BYTES_PER_S = 12.5e6  # 100 Mbit/s: the bandwidth that a slow link has 1 % of
DELAY_S = 0.3  # per chunk and direction
CONDITIONS = {
    "partition": tcp_link.Condition(is_held=True),
    "delay": tcp_link.Condition(delay_s=DELAY_S),
    "slow": tcp_link.Condition(bytes_per_s=0.01 * LINK_BYTES_PER_S),
}


@dataclasses.dataclass(eq=False)
class Faults(contextlib.AbstractContextManager):
    """Applies faults during a `with` block, and heals all of them at its end."""

    nodes: supervisor.Supervisor
    links: tcp_link.Links
    schedule: Iterator[fault_schedule.Fault]
    cheats: Mapping[str, supervisor.Spec]  # the processes of "forge" and "lie", by the name that they run under
    disks: dict[str, pathlib.Path]  # {relay: mirror on a file system of its own}
    file: pathlib.Path  # the log of faults
    note: Callable[[str], None]  # called with a line for people for each fault

    def __post_init__(self) -> None:
        self._next = next(self.schedule)
        self._heals: list[tuple[float, fault_schedule.Fault, Callable[[], None]]] = []
        self.counts: collections.Counter[str] = collections.Counter()  # of faults that began, by kind

    @property
    def active(self) -> dict[str, str]:
        """The kind of the fault that a node has now, by the name of the node."""
        return {fault.target: fault.kind for _, fault, _ in self._heals}

    def tick(self, elapsed_s: float, *, begin: bool = True) -> None:
        """Heals the faults whose time is over; with `begin`, starts those that are due."""
        self._heal(elapsed_s, elapsed_s)
        while begin and self._next.at_s <= elapsed_s:
            fault = self._next
            can_begin = fault.kind == "forge" or self.nodes.nodes[fault.target].child
            if not can_begin and elapsed_s < fault.at_s + fault_schedule.INTERVAL_S:
                return  # it starts again soon
            self._next = next(self.schedule)
            if not can_begin:
                self._log(elapsed_s, "skipped, as it does not run", fault)
                continue
            heal = self._begin(fault)
            self.counts[fault.kind] += 1
            self._log(elapsed_s, "begins", fault)
            if fault.duration_s:
                self._heals.append((elapsed_s + fault.duration_s, fault, heal))

    def _begin(self, fault: fault_schedule.Fault) -> Callable[[], None]:
        nodes, links, name = self.nodes, self.links, fault.target
        if fault.kind == "kill":
            nodes.signal(name, signal.SIGKILL)  # it starts again
        elif fault.kind == "stop":
            nodes.signal(name, signal.SIGSTOP)
            return lambda: nodes.signal(name, signal.SIGCONT)
        elif fault.kind in CONDITIONS:
            links.set(name, CONDITIONS[fault.kind])
            return lambda: links.set(name, tcp_link.OPEN)
        elif fault.kind == "reset":
            links.reset(name)
        elif fault.kind == "full_disk":
            return self._fill_disk(name)
        elif fault.kind == "forge":
            nodes.add(self.cheats[name])
            return lambda: self._remove(name)
        else:  # another server in the place of this one: its double, or one with its own options
            honest = nodes.nodes[name].spec
            refusing = dataclasses.replace(honest, command=["bench.chaos.cheats", "refuse", *honest.command[1:]])
            self._replace(name, self.cheats[name] if fault.kind == "lie" else refusing)
            return lambda: self._replace(name, honest)
        return lambda: None

    def _replace(self, name: str, spec: supervisor.Spec) -> None:
        """Kills the process of this name; when it starts again, it is that of `spec`."""
        self.nodes.nodes[name].spec = spec
        self.nodes.signal(name, signal.SIGKILL)

    def _remove(self, name: str) -> None:
        if child := self.nodes.nodes.pop(name).child:
            child.__exit__()

    def _fill_disk(self, name: str) -> Callable[[], None]:
        if folder := self.disks.get(name):
            ballast = folder / "ballast"
            with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(2**20)):
                    pass
            return lambda: ballast.unlink(missing_ok=True)
        child = self.nodes.nodes[name].child
        assert child is not None, name
        pid = child.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

        def heal() -> None:
            with contextlib.suppress(ProcessLookupError):  # it died of it; its successor has no limit
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

        return heal

    def _heal(self, elapsed_s: float, until_s: float) -> None:
        for item in [item for item in self._heals if item[0] <= until_s]:
            self._heals.remove(item)
            item[2]()
            self._log(elapsed_s, "ends", item[1])

    def _log(self, elapsed_s: float, event: str, fault: fault_schedule.Fault) -> None:
        now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        line = {"time": now, "elapsed_s": round(elapsed_s, 1), "event": event} | dataclasses.asdict(fault)
        with open(self.file, "a") as file:
            file.write(json.dumps(line) + "\n")
        self.note(f"chaos: {fault.kind} of {fault.target} {event}")

    def __exit__(self, *_) -> None:
        self._heal(self._next.at_s, math.inf)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[bool]:
    """Mounts a file system of `DISK_BYTES` at `folder` during the block; yields False if this user may not."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "intellax-swarm", str(folder)]
    unmount = functools.partial(subprocess.run, ["umount", "-l", str(folder)], capture_output=True)
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_mount():  # of a swarm that was killed
        unmount()
    may_mount = os.getuid() == 0 and shutil.which("mount")
    is_mounted = bool(may_mount) and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            unmount()
