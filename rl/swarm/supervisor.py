"""Keeps the processes of a swarm alive: starts them, starts those again that die, and ends them all.

1. A node starts once the port that it depends on is open, since most commands end without it.
2. A node that dies starts again after a pause, which doubles with each death in a row. A vital one that dies `MAX_DEATHS` times within
   `WINDOW_S`, or without progress, ends the swarm, with its last lines of output.
3. The learner's exit code 0 is the end of the run.

The caller calls `tick` every `TICK_S` seconds. Each child leads a process group, which goes with it.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence

from sharding.system import child_process
from sharding.system.logs import run_logs

MAX_DEATHS, WINDOW_S = 5, 300.0
FIRST_PAUSE_S = 1.0
REST_S = 10.0  # after an end without an error
END_S = 5.0  # that all children together get to end by themselves
TICK_S = 0.2  # between two calls of `tick`


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
    """The state of one process that a supervisor keeps alive: its child, or None while it does not run, and its deaths."""

    spec: Spec
    child: child_process.ChildProcess | None = None
    start_s: float = 0.0  # not before
    begun_s: float = 0.0  # the last start
    problem: str = ""  # the last lines of output before its last death
    num_starts: int = 0
    died_s: list[float] = dataclasses.field(default_factory=list)  # deaths in a row
    progress: float = 0.0  # the greatest at a death

    def die(self, now_s: float, progress: float) -> None:
        """Records a death, and sets the time of the next start: the pause doubles with each death in a row.

        Progress since the last death ends the row, but deaths of the last `WINDOW_S` seconds still count.
        """
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

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process, if it runs."""
        if child := self.nodes[name].child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, number)

    def tick(self, now_s: float, vital: Collection[str] | None = None) -> None:
        """Reaps the processes that ended, and starts those that are due.

        Raises ValueError with the last lines of a process that died too often, if its role is `vital` (None: all are).
        """
        for node in [*self.nodes.values()]:
            if node.child and (code := node.child.process.poll()) is not None:
                self._reap(node, node.child, code, now_s, vital is None or node.spec.role in vital)
            if not self.is_over and node.child is None and now_s >= node.start_s and _is_open(node.spec.after_port):
                node.num_starts, node.begun_s = node.num_starts + 1, now_s
                spec, own = node.spec, {"is_group": True, "host": node.spec.host}
                node.child = child_process.ChildProcess(spec.name, spec.command, self._logs, **own)

    def _reap(self, node: Node, child: child_process.ChildProcess, code: int, now_s: float, is_vital: bool) -> None:
        self.is_over |= code == 0 and node.spec.role == "learner"
        last_words = child.obituary()
        child.__exit__()  # ends its own children
        node.child, node.start_s = None, now_s + REST_S
        if self.is_over or code == 0:  # or after the end of the run, or stopped by a person
            return
        node.problem = last_words
        node.die(now_s, self._progress(node.spec))
        if not is_vital:
            node.progress = -1.0  # so that this death counts no longer than `WINDOW_S`
        elif len(node.died_s) == MAX_DEATHS:
            found = f"{node.problem}. It died {MAX_DEATHS} times within {WINDOW_S:.0f} s, or without progress"
            raise ValueError(f"{found}; correct that, and continue with the same command")
        self._note(f"{node.problem}; it starts again")

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


def keep(spec: Spec, logs: run_logs.Folder) -> str:
    """Keeps one process alive; returns "" once a learner ended well, or its last lines of output if it died too often."""
    with Supervisor(logs, lambda line: None, lambda spec: time.monotonic()) as one:
        one.add(spec)
        try:
            while not one.is_over:
                one.tick(time.monotonic(), vital=("learner",))
                time.sleep(TICK_S)
        except ValueError as error:
            return str(error)
    return ""


def _is_open(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.2)
        return not port or sock.connect_ex(("127.0.0.1", port)) == 0
