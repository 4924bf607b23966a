"""Keeps the processes of a swarm alive: starts them, starts those again that die, and ends them all.

1. A node starts once the port that it depends on is open, since most commands end without it.
2. A node that dies starts again after a pause, which doubles with each death in a row. One that dies `MAX_DEATHS` times within
   `WINDOW_S`, or without progress, ends the swarm, with its last words, unless its nodes have faults or had some in that time.
3. The learner's exit code 0 is the end of the run.

The caller calls `tick` a few times per second. Each child leads a process group, which goes with it.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

from sharding.logs import run_logs
from sharding.system import child_process

MAX_DEATHS, WINDOW_S = 5, 300.0
FIRST_PAUSE_S = 1.0
REST_S = 10.0  # after an end without an error
END_S = 5.0  # that all children together get to end by themselves


@dataclasses.dataclass(frozen=True)
class Spec:
    """A process to keep alive: the arguments of its `python -m`, the local port that must be open before it starts, and its host by ssh."""

    name: str
    role: str
    command: Sequence[str]
    after_port: int = 0  # 0: none
    host: str = ""  # "": this one


@dataclasses.dataclass
class Node:
    """A process of the swarm now. `child` is None while it does not run."""

    spec: Spec
    child: child_process.ChildProcess | None = None
    start_s: float = 0.0  # not before
    begun_s: float = 0.0  # the last start
    is_killed: bool = False  # by us: its death is none of its faults
    problem: str = ""  # its last words
    num_starts: int = 0
    num_killed: int = 0  # by us
    died_s: list[float] = dataclasses.field(default_factory=list)  # its own deaths in a row
    progress: float = 0.0  # the greatest at a death

    def die(self, now_s: float, progress: float) -> None:
        """Records a death, after which it starts again in a while, longer each time. Progress ends the row, but for the last `WINDOW_S` seconds."""
        if progress > self.progress:
            self.progress = progress
            self.died_s = [died_s for died_s in self.died_s if now_s - died_s <= WINDOW_S]
        self.died_s = [*self.died_s, now_s][-MAX_DEATHS:]
        self.start_s = now_s + FIRST_PAUSE_S * 2 ** (len(self.died_s) - 1)


class Supervisor(contextlib.AbstractContextManager):
    """The processes of a swarm by name, during a `with` block.

    `note` is called with lines for people. `progress` returns a number that is greater once a process has got further.
    """

    def __init__(self, logs: run_logs.Folder, note: Callable[[str], None], progress: Callable[[Spec], float]):
        self.nodes: dict[str, Node] = {}
        self.is_over = False  # the learner ended well
        self._logs, self._note, self._progress = logs, note, progress

    def add(self, spec: Spec) -> None:
        """Adds a process, which the next `tick` starts."""
        assert spec.name not in self.nodes, spec.name
        self.nodes[spec.name] = Node(spec)

    def remove(self, name: str) -> None:
        """Ends a process for good."""
        if child := self.nodes.pop(name).child:
            child.__exit__()

    def replace(self, spec: Spec) -> None:
        """Kills the process of this name, and starts `spec` in its place."""
        self.nodes[spec.name].spec = spec
        self.kill(spec.name)

    def kill(self, name: str) -> None:
        """Kills a process as kill -9 does; it starts again."""
        node = self.nodes[name]
        if node.child:
            node.is_killed, node.num_killed = True, node.num_killed + 1
            node.child.process.kill()

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process, if it runs."""
        if child := self.nodes[name].child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, number)

    def tick(self, now_s: float, *, is_patient: bool = False) -> None:
        """Buries the dead, and starts those that are due.

        Raises ValueError with the obituary of a process that died too often, unless `is_patient`: others make it die.
        """
        for node in [*self.nodes.values()]:
            if node.child and (code := node.child.process.poll()) is not None:
                self._bury(node, node.child, code, now_s, is_patient)
            if not self.is_over and node.child is None and now_s >= node.start_s and _is_open(node.spec.after_port):
                node.num_starts, node.begun_s = node.num_starts + 1, now_s
                spec, own = node.spec, {"is_group": True, "host": node.spec.host}
                node.child = child_process.ChildProcess(spec.name, spec.command, self._logs, **own)

    def _bury(self, node: Node, child: child_process.ChildProcess, code: int, now_s: float, is_patient: bool) -> None:
        self.is_over |= code == 0 and node.spec.role == "learner"
        obituary = child.obituary()
        child.__exit__()  # ends its own children
        node.child, was_killed, node.is_killed = None, node.is_killed, False
        node.start_s = now_s + (FIRST_PAUSE_S if code else REST_S)
        if self.is_over or code == 0:  # or after the end of the run, or stopped by a person
            return
        node.problem = "killed" if was_killed else obituary
        if not was_killed:
            node.die(now_s, self._progress(node.spec))
            if is_patient:
                node.progress = -1.0  # so that this death counts no longer than `WINDOW_S`
            elif len(node.died_s) == MAX_DEATHS:
                raise ValueError(f"{obituary}. It died {MAX_DEATHS} times within {WINDOW_S:.0f} s, or without progress")
        self._note(f"{f'{node.spec.name} was killed' if was_killed else obituary}; it starts again")

    def __exit__(self, *_) -> None:
        """Ends all processes: first by a request to all of them, then by force."""
        children = {name: node.child for name, node in self.nodes.items() if node.child}
        for name, child in children.items():
            self.signal(name, signal.SIGCONT)
            child.ask_to_end()
        deadline_s = time.monotonic() + END_S
        while time.monotonic() < deadline_s and any(child.process.poll() is None for child in children.values()):
            time.sleep(0.05)
        for child in children.values():
            child.__exit__()


def ended_by_signal(stack: contextlib.ExitStack) -> list[int]:
    """Returns a list that gets the number of a signal which asks the swarm to end, until the end of `stack`."""
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        stack.callback(signal.signal, number, signal.signal(number, lambda number, frame: ended.append(number)))
    return ended


def is_too_often(died_s: Sequence[float]) -> bool:
    """Returns True if the last `MAX_DEATHS` of the times `died_s` are within `WINDOW_S`: a mistake, which a start more repeats."""
    return len(died_s) >= MAX_DEATHS and died_s[-1] - died_s[-MAX_DEATHS] <= WINDOW_S


def _is_open(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.2)
        return not port or sock.connect_ex(("127.0.0.1", port)) == 0
