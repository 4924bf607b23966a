"""Sums up a swarm whose run has ended: faults, starts, scores, the audit, and who was barred. It decides the exit code, too."""

import collections
import pathlib
from collections.abc import Mapping

from rl import audit as audit_lib
from rl import evaluate
from rl.reporting import metrics
from rl.swarm import processes, supervisor


def of(
    workdir: pathlib.Path,
    swarm: processes.Swarm,
    nodes: Mapping[str, supervisor.Node],
    faults: Mapping[str, int] | None,
) -> tuple[list[str], list[str]]:
    """Audits the run of a swarm; returns (lines for people, problems). `faults` has their number by kind, None: without --chaos."""
    audit = audit_lib.run(workdir, metrics.Progress())
    names = {key: name for name, key in swarm.keys.items()}
    refused = {names.get(key, key[:16]): number for key, number in sorted((+audit.history.run.refusals).items())}
    barred = {names.get(key, key[:16]) for key in audit.history.run.ejected}
    cheats = {processes.IMPOSTOR, *(f"{name}{processes.LIAR}" for name in swarm.cheats)}
    problems = audit.findings[: audit_lib.MAX_SHOWN]
    problems += [f"{name} is honest, and was barred" for name in sorted(barred - cheats)]
    if swarm.keys[processes.IMPOSTOR] in audit.workers:
        problems.append(f"the run was trained on groups of {processes.IMPOSTOR}, which all are forged")
    steps = metrics.read_steps(workdir)
    if steps and steps[-1].get("trust/num_validators_excluded"):
        problems.append("a validator is not asked any more, as it contradicted the others")
    lines = [] if faults is None else [f"faults: {sum(faults.values())} ({_listed(faults)})"]
    lines += [f"starts after the first: {_listed(_restarts(nodes))}", *evaluate.summary(workdir)]
    barred_at = f"barred after {audit.config.trust.max_attempts}: {', '.join(sorted(barred)) or 'none'}"
    lines += [f"refused groups: {_listed(refused)}; {barred_at}"]
    return [*lines, audit_lib.table(audit).splitlines()[-1]], problems


def _restarts(nodes: Mapping[str, supervisor.Node]) -> dict[str, str]:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for node in nodes.values():
        counts[node.spec.role].update(all=max(0, node.num_starts - 1), killed=node.num_killed)
    return {role: f"{count['all']} ({count['killed']} killed)" for role, count in counts.items()}


def _listed(counts: Mapping) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
