"""Runs a whole swarm on this machine: learner, relays, inference servers, workers, and validators as processes.

    python -m rl.swarm --config=configs/quickstart.py --workdir=runs/swarm --servers=2 --relays=2 --workers=4 --validators=1

1. Keys and ports are made, and each node starts, with its own log (python -m rl.logs WORKDIR). WORKDIR/targets.json lists the addresses of
   /metrics and /health of all nodes, as `file_sd_configs` of Prometheus takes them.
2. A node that dies starts again, up to a limit (rl/swarm/supervisor.py). The table shows all of them.
3. With --chaos=SEED, a node has a fault every ten seconds (rl/swarm/fault_schedule.py) for --minutes; --dry_run lists them. Give the
   run enough steps (rl.num_steps) to last as long.
4. The swarm ends with its run, which it audits and sums up. The exit code is 0 if the audit finds nothing, no honest node was barred,
   and no group of the worker that cheats was trained on; else 1. Ctrl-C (130) and SIGTERM (143) leave no process, and the same command resumes.
"""

import contextlib
import functools
import itertools
import json
import sys
import time

from absl import flags

from rl.experiment import command
from rl.experiment import flags as command_line
from rl.experiment import workdir as run_directory
from rl.plan import sizes
from rl.swarm import fault_schedule, faults, processes, summary, supervisor, tcp_link
from rl.swarm import table as table_lib
from sharding.system import atomic_file, sign_in

TICK_S, MINUTES = 0.2, 10.0
TARGETS = "targets.json"
# Beginnings of the options that the swarm sets.
OURS = tuple(f"config.topology.{x}" for x in "mode orchestrator port relay_port server control workers metrics".split())
OURS += ("config.trust.validators", "config.trust.admission")


def main() -> None:
    """Runs the swarm of the command line until its run ends. Raises SystemExit after a signal."""
    values = flags.FLAGS
    experiment = sizes.resolve(values.config)
    _check()
    roles = _roles()
    if values.dry_run:
        return _list_faults(values.chaos, roles)
    with run_directory.open_workdir(values.workdir, experiment) as workdir:
        key = run_directory.signing_key(workdir)
    with contextlib.ExitStack() as stack:
        ended = supervisor.ended_by_signal(stack)
        connect = processes.direct
        if values.chaos is not None:
            connect = (links := stack.enter_context(tcp_link.Links())).add
        arguments = command_line.config_arguments(sys.argv[1:])
        swarm = processes.plan(experiment, workdir, roles, arguments, is_chain=values.chain, connect=connect)
        shell = {"note": lambda line: note(line), "progress": lambda spec: table.progress(spec)}
        logs = run_directory.logs(workdir)
        nodes = stack.enter_context(supervisor.Supervisor(logs, **shell))
        for spec in swarm.specs:
            nodes.add(spec)
        chaos: faults.Faults | None = None
        orchestrator = sign_in.Orchestrator(swarm.orchestrator, key.private, key.worker, timeout_s=table_lib.ASK_S)
        ask, active = functools.partial(orchestrator.ask, "/nodes"), lambda: chaos.active if chaos else {}
        table = table_lib.Table(nodes.nodes, swarm.keys, ask, workdir, active)
        note = stack.enter_context(table_lib.shown(table, sys.stdout))
        if values.chaos is not None:
            disks = {name: path for name, path in swarm.mirrors.items() if stack.enter_context(faults.small_disk(path))}
            kind = "file systems of their own" if disks else "a limit on the size of files, as this user may mount none"
            note(f"chaos: full disks of relays are {kind}")
            schedule, log = fault_schedule.schedule(values.chaos, roles), workdir / "chaos.jsonl"
            chaos = stack.enter_context(faults.Faults(nodes, links, schedule, swarm.cheats, disks, log, note))
        targets = [
            {"targets": [at], "labels": {"node": name, "role": roles[name]}} for name, at in swarm.metrics.items()
        ]
        atomic_file.write(workdir / TARGETS, json.dumps(targets, indent=1).encode())
        note(f"starting {len(nodes.nodes)} nodes; logs are in {logs.path}, addresses for Prometheus in {TARGETS}")
        begun_s, all_run_s = time.monotonic(), None
        while not nodes.is_over and not ended:
            if all_run_s is None and all(node.child for node in nodes.nodes.values()):
                all_run_s = time.monotonic()
            elapsed_s = time.monotonic() - (all_run_s or time.monotonic())
            left_s = 60 * (values.minutes or MINUTES) - elapsed_s  # of the faults
            nodes.tick(time.monotonic(), is_patient=chaos is not None and left_s > -supervisor.WINDOW_S)
            if chaos:
                chaos.tick(elapsed_s, begin=left_s > 0)
            time.sleep(TICK_S)
    if ended and not nodes.is_over:
        print("stopped; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
        sys.exit(128 + ended[0])
    print(f"the run ended after {time.monotonic() - begun_s:.0f} s; {workdir / 'report.html'}", flush=True)
    lines, problems = summary.of(workdir, swarm, nodes.nodes, chaos.counts if chaos else None)
    print("\n".join(lines), flush=True)
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))


def _check() -> None:
    for name, least in (("servers", 1), ("relays", 0), ("workers", 1), ("validators", 0)):
        if not least <= (count := getattr(flags.FLAGS, name)) <= 32:
            raise ValueError(f"--{name}={count} is not in {least}..32; change it")
    if (minutes := flags.FLAGS.minutes) is not None and not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes={minutes:g} must be above 0; change it, or leave it out for {MINUTES:g}")
    for name in ("minutes", "dry_run"):
        if flags.FLAGS[name].value and flags.FLAGS.chaos is None:
            raise ValueError(f"--{name} is about the faults of --chaos; add --chaos=SEED, or leave it out")
    if flags.FLAGS.chaos is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"--chaos limits processes as only Linux can, and this is {sys.platform}; leave it out")
    for argument in sys.argv[1:]:
        if argument.lstrip("-").startswith(OURS):
            raise ValueError(f"{argument} is set by the swarm; leave it out")


def _roles() -> dict[str, str]:
    single = ("learner", processes.IMPOSTOR, *(["orchestrator"] if flags.FLAGS.apart else []))
    several = {f"{role}{i}": role for role in processes.ROLES for i in range(getattr(flags.FLAGS, f"{role}s"))}
    return {name: name for name in single} | several


def _list_faults(seed: int, roles: dict[str, str]) -> None:
    end_s = 60 * (flags.FLAGS.minutes or MINUTES)
    print(f"{'at':>6} {'for':>6}  {'fault':<10} node")
    for fault in itertools.takewhile(lambda fault: fault.at_s < end_s, fault_schedule.schedule(seed, roles)):
        duration = "" if not fault.duration_s else "end" if fault.duration_s > end_s else f"{fault.duration_s:.0f} s"
        print(f"{fault.at_s:>4.0f} s {duration:>6}  {fault.kind:<10} {fault.target}")


if __name__ == "__main__":
    flags.DEFINE_integer("servers", 2, "inference servers")
    flags.DEFINE_integer("relays", 2, "relays of the weights between the learner's own and the servers")
    flags.DEFINE_bool("chain", False, "relays read one from another, not all from the learner's")
    flags.DEFINE_bool("apart", False, "the orchestrator in a process of its own, apart from the learner's")
    flags.DEFINE_integer("workers", 4, "rollout workers")
    flags.DEFINE_integer("validators", 1, "validators; 0: the learner replays")
    flags.DEFINE_integer("chaos", None, "seed of the faults; none without it")
    flags.DEFINE_float("minutes", None, f"minutes of faults, after which the run goes on (default: {MINUTES:g})")
    flags.DEFINE_bool("dry_run", False, "list the faults of --chaos, and start nothing")
    command.parse()
    command.run(main)
