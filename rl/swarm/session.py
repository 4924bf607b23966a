"""A session of a swarm on this machine: its processes started, shown in a table, and summed up at the end.

The table has a row per node with its state, version, groups, speed, and last error or line. The orchestrator's table of nodes
(POST /nodes) is joined with the processes here; nodes that came from elsewhere have rows, too. It is drawn again and again on a terminal;
elsewhere a line per node is printed every `PLAIN_S` seconds.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import rich.console
import rich.live
import rich.table
from absl import flags

from rl.evaluation import scores
from rl.experiment import workdir as run_directory
from rl.experiment.reporting import metrics
from rl.swarm import processes, supervisor
from rl.trust import audit as audit_lib
from sharding.system import atomic_file, sign_in

TARGETS = "targets.json"
MOST_NODES = 32  # of a role
# Beginnings of the options that the swarm sets.
OURS = tuple(f"config.topology.{x}" for x in "mode orchestrator port relay_port server control workers metrics".split())
OURS += ("config.trust.validators",)
COLUMNS = ("node", "state", "version", "groups", "tok/s", "last line")
PERIOD_S, PLAIN_S = 2.0, 30.0
ASK_S = 1.0  # that the orchestrator may take to reply
START_S = 600.0  # that a node may be without a sign of life after its start: it loads a model, and compiles
HOSTS = ("orchestrator", "learner")  # roles; the first one that is there has the orchestrator
MAX_CELL = 100  # characters


def define_flags() -> None:
    """Defines the flags of a command that runs a swarm, except those of its config."""
    flags.DEFINE_integer("servers", 2, "inference servers")
    flags.DEFINE_integer("relays", 2, "relays of the weights between the learner's own and the servers")
    flags.DEFINE_bool("chain", False, "relays read one from another, not all from the learner's")
    flags.DEFINE_bool("apart", False, "the orchestrator in a process of its own, apart from the learner's")
    flags.DEFINE_integer("workers", 4, "rollout workers")
    flags.DEFINE_integer("validators", 1, "validators; 0: the learner replays")


def roles() -> dict[str, str]:
    """Returns the role of each node of the command line by name. Raises ValueError for a number of nodes, or an option, that is not possible."""
    for name, least in (("servers", 1), ("relays", 0), ("workers", 1), ("validators", 0)):
        if not least <= (count := getattr(flags.FLAGS, name)) <= MOST_NODES:
            raise ValueError(f"--{name}={count} is not in {least}..{MOST_NODES}; change it")
    for argument in sys.argv[1:]:
        if argument.lstrip("-").startswith(OURS):
            raise ValueError(f"{argument} is set by the swarm; leave it out")
    single = ["learner", *["orchestrator"] * flags.FLAGS.apart]
    several = {f"{role}{i}": role for role in processes.ROLES for i in range(getattr(flags.FLAGS, f"{role}s"))}
    return {name: name for name in single} | several


class Session(NamedTuple):
    """The processes of a swarm that runs, its table, and the function that prints a line."""

    nodes: supervisor.Supervisor
    table: "Table"
    note: Callable[[str], None]


@contextlib.contextmanager
def started(workdir: pathlib.Path, swarm: processes.Swarm, roles: Mapping[str, str]) -> Iterator[Session]:
    """Runs the processes of a swarm and shows their table during the block; ends all of them after it. `roles` has the role of each node.

    WORKDIR/targets.json lists the addresses of /metrics and /health of all nodes, in the form of Prometheus' `file_sd_configs`.
    """
    key, logs = run_directory.signing_key(workdir), run_directory.logs(workdir)
    orchestrator = sign_in.Orchestrator(swarm.orchestrator, key.private, key.worker, timeout_s=ASK_S)
    table = Table({}, swarm.keys, functools.partial(orchestrator.ask, "/nodes"), workdir)
    with shown(table, sys.stdout) as note, supervisor.Supervisor(logs, note, table.progress) as nodes:
        table.nodes = nodes.nodes
        for spec in swarm.specs:
            nodes.add(spec)
        targets = [
            {"targets": [at], "labels": {"node": name, "role": roles[name]}} for name, at in swarm.metrics.items()
        ]
        atomic_file.write(workdir / TARGETS, json.dumps(targets, indent=1).encode())
        note(f"starting {len(nodes.nodes)} nodes; logs are in {logs.path}, addresses for Prometheus in {TARGETS}")
        yield Session(nodes, table, note)


def audited(
    workdir: pathlib.Path, nodes: supervisor.Supervisor, ended: Sequence[int], begun_s: float
) -> audit_lib.Audit:
    """Audits the run of a session that began at `begun_s` and is over; exits with a note if a signal in `ended` came first."""
    if ended and not nodes.is_over:
        print("stopped; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
        sys.exit(128 + ended[0])
    print(f"the run ended after {time.monotonic() - begun_s:.0f} s; {workdir / 'report.html'}", flush=True)
    return audit_lib.run(workdir, metrics.Progress())


def summary(
    audit: audit_lib.Audit, keys: Mapping[str, str], nodes: Mapping[str, supervisor.Node]
) -> tuple[list[str], list[str]]:
    """Sums up a swarm whose run was audited; returns (lines for people, problems), which decide the exit code.

    `keys` has the public key of each node by name, and `nodes` its processes.
    """
    names = {key: name for name, key in keys.items()}
    refused = {names.get(key, key[:16]): number for key, number in sorted((+audit.history.run.refusals).items())}
    barred = sorted(names.get(key, key[:16]) for key in audit.history.run.ejected)
    problems = audit.findings[: audit_lib.MAX_SHOWN] + [f"{name} was barred" for name in barred]
    steps = metrics.read_steps(audit.workdir)
    if steps and steps[-1].get("trust/num_validators_excluded"):
        problems.append("a validator is not asked any more, as it contradicted the others")
    starts = collections.Counter[str]()
    for node in nodes.values():
        starts[node.spec.role] += max(0, node.num_starts - 1)
    lines = [f"starts after the first: {listed(starts)}", *scores.summary(audit.workdir)]
    lines += [
        f"refused groups: {listed(refused)}; barred after {audit.config.trust.max_attempts}: {', '.join(barred) or 'none'}"
    ]
    return [*lines, audit_lib.table(audit).splitlines()[-1]], problems


def listed(counts: Mapping[str, int]) -> str:
    """Returns counts by name as one text."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


@dataclasses.dataclass
class Table:
    """The rows of a swarm."""

    nodes: Mapping[str, supervisor.Node]  # the processes by name
    keys: Mapping[str, str]  # their public keys
    ask: Callable[[], dict[str, Any]]  # the orchestrator's reply to POST /nodes; OSError or ValueError if it is away
    workdir: pathlib.Path  # of the learner, which writes the metrics
    waiting_for: str = ""  # why the learner waits, as of the last `rows`
    replied_s: float = -math.inf  # when the orchestrator replied last
    # by name, the start of the process that signed in
    heard: dict[str, float] = dataclasses.field(default_factory=dict)
    epochs: list[str] = dataclasses.field(default_factory=list)  # of policies so far, in order

    def rows(self, now_s: float) -> list[dict[str, str]]:
        """Returns {column: text} per node."""
        processes = [*self.nodes.items()]
        try:
            reply: dict[str, Any] = self.ask() if any(node.child for _, node in processes) else {}
            self.replied_s = now_s
        except (OSError, ValueError):
            begun_s = next(node.begun_s for _, node in processes if node.spec.role in HOSTS)
            is_new = self.replied_s < begun_s and now_s - begun_s < START_S
            reply = {"waiting_for": f"the orchestrator {'is starting' if is_new else 'does not reply'}"}
        signed_in: dict[str, dict[str, Any]] = {row["key"]: row for row in reply.get("nodes", [])}
        alive = {row["policy"].partition(" of epoch ")[2] for row in signed_in.values()} - {""}
        self.epochs = sorted({*self.epochs, *alive}, key=int)
        cells = functools.partial(_cells, self.epochs if len(alive) > 1 else [])
        self.waiting_for = reply.get("waiting_for", "")
        found = []
        for name, node in processes:
            row = dict.fromkeys(COLUMNS, "") | {"node": name, "state": "running" if node.child else "waiting"}
            row["last line"] = node.child.last_line if node.child else node.problem
            known = signed_in.pop(self.keys.get(name, ""), None)
            if node.spec.role == "learner" and (steps := _steps(self.workdir)):
                row["version"] = str(steps[-1]["step"])
                row["tok/s"] = metrics.format_value(steps[-1].get("time/tokens_per_s", 0.0))
            elif node.child and node.spec.role not in HOSTS:
                age_s = now_s - node.begun_s
                if known and known["beat_ago_s"] <= age_s:  # else it knows the process before
                    row |= cells(known, row["last line"])
                    self.heard[name] = node.begun_s
                elif self.heard.get(name) != node.begun_s:
                    row["state"] = "starting" if age_s < START_S else "silent"
            found.append(row)
        found += [{"node": f"{row['role']} {key[:8]}"} | cells(row, "") for key, row in signed_in.items()]
        return [{column: row[column][:MAX_CELL] for column in COLUMNS} for row in found]

    def progress(self, spec: supervisor.Spec) -> float:
        """Returns a number that grows with progress: the run's last train step, or the start time of a node's last process that signed in."""
        if spec.role not in HOSTS:
            return self.heard.get(spec.name, 0.0)
        return max((step["step"] for step in _steps(self.workdir)), default=0)


def _cells(epochs: Sequence[str], row: Mapping[str, Any], last_line: str) -> dict[str, str]:
    """Returns the cells of a row of the orchestrator's table, with the place of its epoch in `epochs`, if it is one of them."""
    version, _, epoch = row["policy"].removeprefix("version ").partition(" of epoch ")
    version += f" (epoch {epochs.index(epoch) + 1})" if epoch in epochs else ""
    found = {"state": row["state"], "version": version, "last line": row["problem"] or last_line}
    numbers = {"groups": str(row["groups"]), "tok/s": metrics.format_value(max(0.0, row["tokens_per_s"]))}
    return found | (numbers if row["role"] in ("server", "worker") else dict.fromkeys(numbers, ""))


@contextlib.contextmanager
def shown(table: Table, stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Shows a table during the block; yields the function that prints a line."""
    console = rich.console.Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)
    live = rich.live.Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    is_ended = threading.Event()

    def show() -> None:
        while not is_ended.wait(PERIOD_S if live else PLAIN_S):
            rows = table.rows(time.monotonic())
            if live:
                drawn = rich.table.Table(*COLUMNS, box=None, caption=table.waiting_for, caption_justify="left")
                for row in rows:
                    drawn.add_row(*row.values())
                live.update(drawn, refresh=True)
                continue
            for node, *cells in (row.items() for row in rows):
                note("  ".join([f"{node[1]:<10}", *(f"{column} {text}" for column, text in cells if text)]))
            if table.waiting_for:
                note(f"learner    waits: {table.waiting_for}")

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


def _steps(workdir: pathlib.Path) -> list[dict[str, Any]]:
    try:
        return metrics.read_steps(workdir)
    except (OSError, ValueError):
        return []
