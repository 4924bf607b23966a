"""A session of a swarm on this machine: its processes started, shown in a table, and summed up at the end."""

import collections
import contextlib
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from absl import flags

from rl import audit as audit_lib
from rl import evaluate
from rl.experiment import workdir as run_directory
from rl.reporting import metrics
from rl.swarm import processes, supervisor
from rl.swarm import table as table_lib
from sharding.system import atomic_file, sign_in

TARGETS = "targets.json"
MOST_NODES = 32  # of a role
# Beginnings of the options that the swarm sets.
OURS = tuple(f"config.topology.{x}" for x in "mode orchestrator port relay_port server control workers metrics".split())
OURS += ("config.trust.validators",)


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
    table: table_lib.Table
    note: Callable[[str], None]


@contextlib.contextmanager
def started(workdir: pathlib.Path, swarm: processes.Swarm, roles: Mapping[str, str]) -> Iterator[Session]:
    """Runs the processes of a swarm and shows their table during the block; ends all of them after it. `roles` has the role of each node.

    WORKDIR/targets.json lists the addresses of /metrics and /health of all nodes, in the form of Prometheus' `file_sd_configs`.
    """
    key, logs = run_directory.signing_key(workdir), run_directory.logs(workdir)
    orchestrator = sign_in.Orchestrator(swarm.orchestrator, key.private, key.worker, timeout_s=table_lib.ASK_S)
    table = table_lib.Table({}, swarm.keys, functools.partial(orchestrator.ask, "/nodes"), workdir)
    with table_lib.shown(table, sys.stdout) as note, supervisor.Supervisor(logs, note, table.progress) as nodes:
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
    lines = [f"starts after the first: {listed(starts)}", *evaluate.summary(audit.workdir)]
    lines += [
        f"refused groups: {listed(refused)}; barred after {audit.config.trust.max_attempts}: {', '.join(barred) or 'none'}"
    ]
    return [*lines, audit_lib.table(audit).splitlines()[-1]], problems


def listed(counts: Mapping[str, int]) -> str:
    """Returns counts by name as one text."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
