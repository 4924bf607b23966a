"""The table of a swarm for people: a row per node with its state, version, requests, speed, and last line.

It is drawn again and again on a terminal; elsewhere a line per node is printed every `PLAIN_S` seconds.
"""

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import httpx
import rich.console
import rich.live
import rich.table

from rl.reporting import metrics
from rl.swarm import supervisor

COLUMNS = ("node", "state", "version", "running", "tok/s", "last line")
PERIOD_S, PLAIN_S = 2.0, 30.0
ASK_S = 1.0  # that a server may take to reply


class Table:
    """The rows of a swarm. `servers` has the URL of each server; `faults()` the kind of the fault that a node has now, if any."""

    def __init__(
        self,
        nodes: Mapping[str, supervisor.Node],
        servers: Mapping[str, str],
        workdir: pathlib.Path,
        faults: Callable[[], Mapping[str, str]],
    ):
        self._nodes, self._servers, self._workdir, self._faults = nodes, servers, workdir, faults
        self._generated: dict[str, tuple[float, int]] = {}  # {server: (time, tokens so far)}

    def rows(self, now_s: float) -> list[dict[str, str]]:
        """Returns {column: text} per node; asks each server for its health."""
        faults, found = self._faults(), []
        for name, node in [*self._nodes.items()]:
            state = faults.get(name) or ("running" if node.child else "waiting")
            row = dict.fromkeys(COLUMNS, "") | {"node": name, "state": state}
            row["last line"] = (node.child.last_line if node.child else node.problem)[:100]
            if node.spec.role == "learner" and (steps := _steps(self._workdir / "metrics.jsonl")):
                row |= {"version": str(steps[-1]["step"]), "tok/s": _shown(steps[-1].get("time/tokens_per_s", 0.0))}
            elif name in self._servers and node.child and state != "stop":
                row |= self._ask(name, now_s)
            found.append(row)
        return found

    def _ask(self, name: str, now_s: float) -> dict[str, str]:
        try:
            body = httpx.get(f"{self._servers[name]}/health", timeout=ASK_S).json()
            version, tokens, running = body["policy_version"], body["stats"]["tokens"], body["running"]
        except (httpx.HTTPError, ValueError, KeyError):
            return {}
        then_s, before = self._generated.get(name, (now_s - PERIOD_S, tokens))
        self._generated[name] = now_s, tokens
        return {"version": str(version), "running": str(running), "tok/s": _shown((tokens - before) / (now_s - then_s))}


@contextlib.contextmanager
def shown(table: Table, stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Shows a table during the block; yields the function that prints a line."""
    console = rich.console.Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)
    live = rich.live.Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    is_ended = threading.Event()

    def show() -> None:
        shown_s = time.monotonic()
        while not is_ended.wait(PERIOD_S):
            if live:
                drawn = rich.table.Table(*COLUMNS, box=None)
                for row in table.rows(time.monotonic()):
                    drawn.add_row(*row.values())
                live.update(drawn, refresh=True)
            elif time.monotonic() - shown_s >= PLAIN_S:
                shown_s = time.monotonic()
                for row in table.rows(shown_s):
                    node, *cells = row.items()
                    note("  ".join([f"{node[1]:<10}", *(f"{column} {text}" for column, text in cells if text)]))

    def note(line: str) -> None:
        console.print(line) if live else print(line, file=stream, flush=True)

    thread = threading.Thread(target=show, name="table", daemon=True)
    with live or contextlib.nullcontext():
        thread.start()
        try:
            yield note
        finally:
            is_ended.set()
            thread.join()


def _steps(file: pathlib.Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):  # not there yet, or the last line is being written
        return []
    return [line for line in lines if line.get("phase") == "rl"]


def _shown(speed: float) -> str:
    return metrics.format_value(max(0.0, speed))
