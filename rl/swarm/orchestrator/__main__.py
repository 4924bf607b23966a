"""The orchestrator of a run as a process of its own, which may be restarted at any moment: so may the learner.

    python -m rl.swarm.orchestrator --config=configs/NAME.py --workdir=DIRECTORY --control=HOST:PORT

1. It has the ledger, the log of accepted groups, and the validator (or the list of `trust.validators`) of the run, and serves its
   workers and servers at `topology.host` and `topology.port`: set the port, so that they find it again.
2. The learner runs `rl.train` with the same config and `topology.orchestrator` = the URL of `--control`, and has a copy of the token.
3. DIRECTORY may be that of the learner. If it is another one, copy the learner's weights.key (and root.json, if it has one) there, and
   name with `--weights` a relay or directory of the run's weights.

It ends when the learner has finished the run, or with an error if the ledger cannot be written: start it again.
"""

import contextlib
import functools

from absl import flags

from inference.server import guard, metrics_routes, web
from rl.experiment import command
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.experiment.reporting import metrics
from rl.protocol import task_schedule
from rl.swarm.orchestrator import assembly, orchestrator
from rl.swarm.orchestrator.remote import host as host_lib
from rl.swarm.orchestrator.remote import learner_routes
from sharding.system import sockets


def main() -> None:
    """Runs the command until the learner has finished the run, or until it is interrupted."""
    exp, options = sizes.resolve(flags.FLAGS.config), flags.FLAGS
    if exp.config.topology.mode != "remote":
        found = f"topology.mode = {exp.config.topology.mode!r} has its orchestrator in the learner"
        raise ValueError(f"{found}; set topology.mode = 'remote'")
    if options.metrics:
        metrics_routes.listen(options.metrics).close()  # it is opened when the learner attaches
    with contextlib.ExitStack() as stack:
        workdir = stack.enter_context(run_directory.open_orchestrator(options.workdir))
        any_step = not task_schedule.is_fixed(exp.config.rl)
        ledger = stack.enter_context(run_directory.open_ledger(workdir, None, any_step=any_step))
        progress, urls, failures = metrics.Progress(), [""], []
        weights = options.weights or str(workdir / "weights")

        def fail(found: orchestrator.Orchestrator, error: BaseException) -> None:
            found.fail(error)
            failures.append(error)  # a ledger that failed takes no events any more
            host.ended.set()

        def make(parts: contextlib.ExitStack, known: dict | None) -> orchestrator.Orchestrator:
            found = assembly.make(exp, workdir, weights, parts, progress.say, 1, known, ledger)
            ledger.on_failure = functools.partial(fail, found)
            urls[0] = assembly.serve(found, exp.config, workdir, parts)
            if options.metrics:
                parts.enter_context(metrics_routes.serving(options.metrics, found.health, found.metrics))
            run = run_directory.signing_key(workdir).worker
            progress.say(f"workers elsewhere: python -m rl.worker --orchestrator {urls[0]} --run {run} --key FILE")
            return found

        streams = {"streams": exp.credit.streams, "router_replay": exp.credit.router_replay, "kept": exp.credit.kept}
        host = host_lib.Host(
            workdir / "rollouts" / "open",
            orchestrator.STATES,
            ledger,
            make,
            lambda **sizes: host_lib.packing.Layout(**sizes, **streams),
            lambda fields: run_directory.check_fields(fields, exp),
            progress.say,
        )
        stack.callback(host.close)
        token_file = assembly.token_file(exp.config, workdir)
        listener = stack.enter_context(guard.control_listener(options.control, token_file, options.control_hosts))
        app = learner_routes.make_app(host, lambda: urls[0], token=listener.token, hosts=listener.hosts)
        if host.recover():
            progress.say("continuing where the last process ended")
        stack.enter_context(web.in_thread(web.server(app), listener.sock))
        address = sockets.address(listener.sock)
        progress.say(f"learner: rl.train with topology.orchestrator = '{address}', token in {token_file}")
        host.ended.wait()
        if failures:
            raise failures[0]


if __name__ == "__main__":
    flags.DEFINE_string("control", "127.0.0.1:0", "listener of the learner: HOST:PORT, or the path of a unix socket")
    flags.DEFINE_multi_string("control_hosts", [], "names that HOST:PORT is called by (Host header)")
    flags.DEFINE_string("weights", "", "directory or relay of the run's weights (default: WORKDIR/weights)")
    flags.DEFINE_string("metrics", "", "[HOST:]PORT that serves /metrics and /health")
    command.parse()
    command.run(main)
