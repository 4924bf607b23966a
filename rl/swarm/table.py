"""The table of a swarm for people: a row per node with its state, version, groups, speed, and last error.

It is drawn again and again on a terminal; elsewhere a line per node is printed every `PLAIN_S` seconds.
"""

import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

import httpx
import rich.console
import rich.live
import rich.table

from rl.reporting import metrics
from rl.swarm import supervisor

PERIOD_S, PLAIN_S = 2.0, 30.0
ASK_S = 1.0  # that a server may take to reply
MAX_PROBLEM = 100  # characters


@dataclasses.dataclass(frozen=True)
class Row:
    """The state of one node for people."""

    name: str
    state: str
    version: str = ""
    groups: str = ""
    tokens_per_s: str = ""
    problem: str = ""

    def line(self) -> str:
        """Returns the row as a line."""
        named = {"version": self.version, "groups": self.groups, "tok/s": self.tokens_per_s, "last": self.problem}
        return "  ".join(
            [f"{self.name:<11}{self.state:<10}", *(f"{name} {value}" for name, value in named.items() if value)]
        )


class Table:
    """Collects and shows the rows of a swarm.

    `servers` has the URL of each server; `faults` the kind of the fault that a node has now, if any. `note` prints lines.
    """

    def __init__(
        self,
        nodes: Mapping[str, supervisor.Node],
        servers: Mapping[str, str],
        workdir: pathlib.Path,
        faults: Callable[[], Mapping[str, str]],
    ):
        self._nodes, self._servers, self._workdir, self._faults = nodes, servers, workdir, faults
        self._generated: dict[str, tuple[float, int]] = {}  # {server: (time, tokens so far)}

    def rows(self, now_s: float) -> list[Row]:
        """Returns a row per node; asks each server for its health."""
        faults = self._faults()
        return [self._row(name, node, faults.get(name, ""), now_s) for name, node in [*self._nodes.items()]]

    def _row(self, name: str, node: supervisor.Node, fault: str, now_s: float) -> Row:
        child = node.child
        last = child.last_line if child else node.problem
        row = Row(name, fault or node.state, problem=last[:MAX_PROBLEM])
        if node.spec.role == "learner":
            steps = [line for line in _lines(self._workdir / "metrics.jsonl") if line.get("phase") == "rl"]
            if steps:
                done = steps[-1]
                num_groups = sum(int(step.get("rollout/num_groups", 0)) for step in steps)
                speed = metrics.format_value(done.get("time/tokens_per_s", 0.0))
                row = dataclasses.replace(
                    row, version=str(done["step"]), tokens_per_s=speed, groups=str(num_groups or "")
                )
        elif name in self._servers and child and fault != "stop":
            row = self._server_row(row, now_s)
        return row

    def _server_row(self, row: Row, now_s: float) -> Row:
        try:
            body = httpx.get(f"{self._servers[row.name]}/health", timeout=ASK_S).json()
            version, tokens, running = body["policy_version"], body["stats"]["tokens"], body["running"]
        except (httpx.HTTPError, ValueError, KeyError):
            return dataclasses.replace(row, state="starting" if row.state == "running" else row.state)
        then_s, before = self._generated.get(row.name, (now_s, tokens))
        self._generated[row.name] = now_s, tokens
        speed = max(0, tokens - before) / (now_s - then_s) if now_s > then_s else 0.0
        return dataclasses.replace(
            row, version=str(version), groups=str(running), tokens_per_s=metrics.format_value(speed)
        )


@contextlib.contextmanager
def shown(table: Table, stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Shows a table during the block; yields the function that prints a line."""
    console = rich.console.Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)
    is_ended = threading.Event()
    live = rich.live.Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def show() -> None:
        shown_s = time.monotonic()
        while not is_ended.wait(PERIOD_S):
            rows, now_s = table.rows(time.monotonic()), time.monotonic()
            if live:
                live.update(_drawn(rows), refresh=True)
            elif now_s - shown_s >= PLAIN_S:
                shown_s = now_s
                for row in rows:
                    print(row.line(), file=stream, flush=True)

    thread = threading.Thread(target=show, name="table", daemon=True)
    with live or contextlib.nullcontext():
        thread.start()
        try:
            yield lambda line: console.print(line) if live else print(line, file=stream, flush=True)
        finally:
            is_ended.set()
            thread.join()


def _drawn(rows: Sequence[Row]) -> rich.table.Table:
    drawn = rich.table.Table("who", "state", "version", "groups", "tok/s", "last line", box=None)
    for row in rows:
        drawn.add_row(*dataclasses.astuple(row))
    return drawn


def _lines(file: pathlib.Path) -> list[dict]:
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):  # not there yet, or the last line is being written
        return []
