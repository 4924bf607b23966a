"""Runs a swarm on this machine under faults, with nodes that cheat, and checks that its run survives them.

    python -m bench.chaos --config=configs/quickstart.py --workdir=runs/chaos --seed=1 --config.rl.max_lag=2 --config.rl.num_steps=240

1. The swarm is that of `rl.swarm`, and takes its options. Each connection runs over a link that can be broken (tcp_link.py).
2. A node has a fault every ten seconds (fault_schedule.py) for --minutes; --dry_run lists them. Give the run enough steps
   (rl.num_steps) to last as long. WORKDIR/chaos.jsonl has a line for each begin and end of a fault.
3. An impostor hands in forged rollouts from the beginning. A server that lies has a double with a key and an address of its own, which
   takes its place for a while: a server that lied is barred for good.
4. The swarm ends with its run, which is audited. The exit code is 0 if the audit finds nothing, no honest node was barred, and no group
   of the impostor was trained on; else 1.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import sys
import time
from collections.abc import Mapping

from absl import flags

from bench.chaos import fault_schedule, faults, tcp_link
from inference.rollouts import rollout as rollout_lib
from rl.experiment import command
from rl.experiment import flags as command_line
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.swarm import processes, session, supervisor

IMPOSTOR, LIAR = "impostor", "-liar"  # the name of a worker; the end of the name of a server's double


def main() -> None:
    """Runs the swarm of the command line until its run ends. Raises SystemExit after a signal."""
    values = flags.FLAGS
    experiment, roles = sizes.resolve(values.config), session.roles()
    if not sys.platform.startswith("linux"):
        raise ValueError(f"faults limit processes as only Linux can, and this is {sys.platform}; use Linux")
    if not 0 < values.minutes < float("inf"):
        raise ValueError(f"--minutes={values.minutes:g} must be above 0; change it")
    schedule = fault_schedule.schedule(values.seed, roles | {IMPOSTOR: IMPOSTOR})
    if values.dry_run:
        return _list(schedule, 60 * values.minutes)
    with run_directory.open_workdir(values.workdir, experiment) as workdir:
        run_directory.signing_key(workdir)
    doubles = {f"{name}{LIAR}": role for name, role in roles.items() if role == "server"}
    with contextlib.ExitStack() as stack:
        ended, begun_s, all_run_s = supervisor.ended_by_signal(stack), time.monotonic(), None
        links = stack.enter_context(tcp_link.Links())
        arguments = [*command_line.config_arguments(sys.argv[1:]), "--config.trust.admission=open"]
        options = {"is_chain": values.chain, "connect": links.add}
        whole = processes.plan(experiment, workdir, roles | doubles, arguments, **options)
        swarm, cheats = _split(whole, workdir, links, "orchestrator" if values.apart else "learner")
        nodes, table, note = stack.enter_context(session.started(workdir, swarm, roles))
        mirrors = {name: workdir / "relays" / name for name, role in roles.items() if role == "relay"}
        disks = {name: path for name, path in mirrors.items() if stack.enter_context(faults.small_disk(path))}
        kind = "file systems of their own" if disks else "a limit on the size of files, as this user may mount none"
        note(f"chaos: full disks of relays are {kind}")
        log = workdir / "chaos.jsonl"
        chaos = stack.enter_context(faults.Faults(nodes, links, schedule, cheats, disks, log, note))
        rows = table.rows
        table.rows = lambda now_s: [
            row | ({"state": chaos.active[row["node"]]} if row["node"] in chaos.active else {}) for row in rows(now_s)
        ]
        while not nodes.is_over and not ended:
            now_s = time.monotonic()
            if all_run_s is None and all(node.child for node in nodes.nodes.values()):
                all_run_s = now_s
            elapsed_s = now_s - (all_run_s or now_s)
            left_s = 60 * values.minutes - elapsed_s  # of the faults, after which deaths count again in a while
            nodes.tick(now_s, vital=() if left_s > -supervisor.WINDOW_S else None)
            chaos.tick(elapsed_s, begin=left_s > 0)
            time.sleep(supervisor.TICK_S)
    audit = session.audited(workdir, nodes, ended, begun_s)
    lines, problems = session.summary(audit, swarm.keys, nodes.nodes)
    print(f"faults: {chaos.counts.total()} ({session.listed(chaos.counts)})", *lines, sep="\n", flush=True)
    problems = [one for one in problems if one.removesuffix(" was barred") not in (IMPOSTOR, *doubles)]
    if swarm.keys[IMPOSTOR] in audit.workers:
        problems.append(f"the run was trained on groups of {IMPOSTOR}, which all are forged")
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))


def _split(
    swarm: processes.Swarm, workdir: pathlib.Path, links: tcp_link.Links, host: str
) -> tuple[processes.Swarm, Mapping[str, supervisor.Spec]]:
    """Returns a swarm without the doubles of its servers, and the processes that cheat, by the name that they run under.

    `host` is the node with the orchestrator. Of the keys, the swarm has those of cheats, too.
    """
    specs = {spec.name: spec for spec in swarm.specs}
    cheats = {}
    for name in [name for name in specs if name.endswith(LIAR)]:
        double, honest = specs.pop(name), name.removesuffix(LIAR)
        cheats[honest] = dataclasses.replace(
            double, name=honest, command=["bench.chaos.cheats", "lie", *double.command[1:]]
        )
    worker = next(spec for spec in swarm.specs if spec.role == "worker")
    key = run_directory.worker_key_file(workdir, IMPOSTOR)
    url = links.add(frozenset({IMPOSTOR, host}), int(swarm.orchestrator.rpartition(":")[2]))
    own = ["--orchestrator", url, "--key", str(key), "--metrics", ""]  # the last of an option counts
    forge = ["bench.chaos.cheats", "forge", *worker.command[1:], *own]
    cheats[IMPOSTOR] = dataclasses.replace(worker, name=IMPOSTOR, role=IMPOSTOR, command=forge)
    keys = swarm.keys | {IMPOSTOR: rollout_lib.WorkerKey.load(key).worker}
    metrics = {name: at for name, at in swarm.metrics.items() if name in specs}
    return dataclasses.replace(swarm, specs=[*specs.values()], keys=keys, metrics=metrics), cheats


def _list(schedule, end_s: float) -> None:
    print(f"{'at':>6} {'for':>6}  {'fault':<10} node")
    for fault in itertools.takewhile(lambda fault: fault.at_s < end_s, schedule):
        duration = "" if not fault.duration_s else "end" if fault.duration_s > end_s else f"{fault.duration_s:.0f} s"
        print(f"{fault.at_s:>4.0f} s {duration:>6}  {fault.kind:<10} {fault.target}")


if __name__ == "__main__":
    session.define_flags()
    flags.DEFINE_integer("seed", 1, "seed of the faults")
    flags.DEFINE_float("minutes", 10.0, "minutes of faults, after which the run goes on")
    flags.DEFINE_bool("dry_run", False, "list the faults, and start nothing")
    command.parse()
    command.run(main)
