"""Runs a whole swarm on this machine: learner, relays, inference servers, workers, and validators as processes.

    python -m rl.swarm --config=configs/quickstart.py --workdir=runs/swarm --servers=2 --relays=2 --workers=4 --validators=1

1. Keys and ports are made, and each node starts, with its own log (python -m rl.logs WORKDIR).
2. A node that dies starts again, up to a limit (rl/swarm/supervisor.py). The table shows all of them.
3. The swarm ends with its run, which it audits and sums up. The exit code is 0 if the audit finds nothing and no node was barred, else 1.
   Ctrl-C (130) and SIGTERM (143) leave no process, and the same command resumes.

`python -m bench.chaos` runs a swarm under faults.
"""

import contextlib
import sys
import time

from absl import flags

from rl.experiment import command
from rl.experiment import flags as command_line
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.swarm import processes, session, supervisor


def main() -> None:
    """Runs the swarm of the command line until its run ends. Raises SystemExit after a signal."""
    values = flags.FLAGS
    experiment, roles = sizes.resolve(values.config), session.roles()
    with run_directory.open_workdir(values.workdir, experiment) as workdir:
        run_directory.signing_key(workdir)
    with contextlib.ExitStack() as stack:
        ended, begun_s = supervisor.ended_by_signal(stack), time.monotonic()
        arguments = command_line.config_arguments(sys.argv[1:])
        swarm = processes.plan(experiment, workdir, roles, arguments, is_chain=values.chain)
        nodes = stack.enter_context(session.started(workdir, swarm, roles)).nodes
        while not nodes.is_over and not ended:
            nodes.tick(time.monotonic())
            time.sleep(supervisor.TICK_S)
    lines, problems = session.summary(session.audited(workdir, nodes, ended, begun_s), swarm.keys, nodes.nodes)
    print("\n".join(lines), flush=True)
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))


if __name__ == "__main__":
    session.define_flags()
    command.parse()
    command.run(main)
