"""Asynchronous GRPO from one command: warm-up, rollouts, proofs, learning, evaluation, report.

    python -m rl.train --config=configs/quickstart.py --workdir=runs/quickstart

1. Warm-up (rl/sft.py) gives policy version 0, unless a checkpoint exists to resume from (rl/swarm/running.py).
2. The rollout system starts (rl/swarm/rollout_system.py): broadcast, inference server, workers and validator, led by the orchestrator.
3. The loop: wait for a batch, one `train_step`, publish the new version, checkpoint, evaluation, metrics.
4. Held-out score before and after, report.html.

If killed at any moment, the same command resumes from the last complete checkpoint; with `rl.max_lag = 0` the resumed run is
bit-identical. SIGTERM, the notice of a preemption, and Ctrl-C save at the end of the step in progress, or during the wait for its batch.
With several hosts each runs the loop, and all take every step, publish and save together. Only the first has the rollout
system, the scores, and the files that people read; the others end when it ends (sharding/system/multihost/hosts.py).
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    if __spec__ is None:
        raise SystemExit(
            "error: rl/train.py is a module, not a script; run python -m rl.train in the root of the checkout"
        )
    from rl.experiment import command

    command.parse(is_complete=True)
    from absl import flags

    from rl.envs.foreign import early

    begun = early.begin(flags.FLAGS.config)
    if begun:
        command.before_leaving(begun.close)
else:
    begun = None

import contextlib
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NoReturn

import jax
from absl import flags
from jax.experimental import multihost_utils

from inference.server import metrics_routes, startup
from models import hub
from rl import sft
from rl.envs.foreign import process as process_lib
from rl.envs.hub import tryout
from rl.evaluation import scores
from rl.experiment import command, experiment, initial, layout, redaction, report
from rl.experiment import rules as config_rules
from rl.experiment import workdir as run_directory
from rl.experiment.plan import roofline, sizes
from rl.experiment.reporting import diagnostics, metrics, start_clock
from rl.experiment.reporting import monitors as monitors_lib
from rl.learning.batch import packing
from rl.learning.learner import optimizers
from rl.learning.learner import reference as reference_lib
from rl.protocol import task_schedule
from rl.swarm import rollout_system, running
from rl.trust.verification import run_bands
from sharding.mesh import programs
from sharding.system import cli, sockets
from sharding.system.logs import run_logs
from sharding.system.multihost import failure
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import bucket

NOTICE_S = 0.2  # between two looks for a SIGTERM of any host


def main(begun: process_lib.Beginning | None = None) -> None:
    """Runs the training command: the experiment of the command line, on this host or, with other hosts in its config, together.

    `begun` is the result of `early.begin`.
    """
    start_clock.mark("imports")
    with experiment.joined() as hosts:
        exp = sizes.resolve(flags.FLAGS.config)
        mesh = layout.learner_mesh(exp.config)
        workdir = bucket.local_folder(flags.FLAGS.workdir)
        check(exp, mesh, hosts, is_begun=any(workdir.glob("checkpoints/[0-9]*")), begun=begun)
        if begun:
            begun.close()
        with run_directory.open_workdir(flags.FLAGS.workdir, exp, hosts) as workdir:
            if hosts.is_first:
                run_directory.record_downloads(workdir, hub.commits())
                print(experiment.describe(exp, workdir))
            with _log(workdir, hosts) as log:
                train(exp, mesh, workdir, hosts, log)


def train(
    exp: experiment.Experiment,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path,
    hosts: hosts_lib.Hosts,
    log: run_logs.Log | None = None,
) -> pathlib.Path | None:
    """Runs or resumes the experiment in `workdir`; returns the path of its report, None on hosts other than host 0.

    `log` gets the lines that this process prints.
    """
    num_steps = exp.config.rl.num_steps
    adviser, scored = diagnostics.Adviser(), task_schedule.evaluation_sets(exp.config)[0]
    with running.started(exp, mesh, workdir, hosts, log, sft.train) as run:
        first, checkpointer, progress = run.first, run.checkpointer, run.place.progress
        retention = redaction.Rule(**exp.config.retention.to_dict())
        profile = programs.Profiler(workdir / "profile", exp.config.profile.steps)
        with hosts.terminable(), profile, progress.phase("rl", total=num_steps, initial=run.start) as bar:
            for step in range(run.start + 1, num_steps + 1):
                begun, annotation = time.perf_counter(), profile.begin(step)
                times: dict[str, float] = {}
                rate = optimizers.next_rate(exp.optimizer, run.state.opt_state)
                with _timed(times, "wait"):
                    batch = _next_batch(first.orchestrator, step, hosts) if first else None
                if step == run.start + 1:
                    start_clock.mark("first rollouts")
                if hosts.broadcast(hosts.is_first and batch is None):
                    _terminate(step - 1, run)
                with _timed(times, "train_step"), annotation:
                    if run.server:
                        run.server.release()
                    packed = run.feed(step, batch)
                    if run.reference is not None:
                        packed = packed.replace(ref_logp=run.reference(packed))
                    with jax.transfer_guard("disallow"):
                        run.state, step_metrics = run.step_fn(run.state, packed)
                    values = {name: float(value) for name, value in jax.device_get(step_metrics).items()}
                    _check_finite(step, values, packed, run)
                with _timed(times, "publish"):
                    policy = run.publish_state(step)
                    if run.server:
                        run.server.reclaim()
                    if first:
                        first.orchestrator.publish(policy)
                        first.evaluations.begin(step)
                with _timed(times, "checkpoint"):
                    checkpointer.save(step, run.state, run.host_state(step), force=scored.is_due(step, num_steps))
                    if first:
                        redaction.apply(workdir, checkpointer.latest_step() or 0, retention)
                if batch is None:  # not the first host
                    continue
                with _timed(times, "eval"):
                    # After a SIGTERM to the whole group, the workers are dead, and evaluations fail before the state is saved.
                    for version, score in () if hosts.is_terminating else run.scores():
                        adviser.scored(version, score)
                times |= {"time/step_s": time.perf_counter() - begun, "time/unix": time.time()}
                values = _metrics(values | {"optimizer/learning_rate": rate}, batch, times)
                values |= roofline.utilization(
                    values, exp.model, mesh.size, mesh.local_devices, is_frozen=bool(exp.lora)
                )
                run.place.writer.write(step, "rl", values)
                bar.update(step, shown(values))
                if step == run.start + 1:
                    start_clock.mark("first step")
                    progress.say(start_clock.summary("first step"))
                if line := adviser.after(step, values):
                    progress.say(line)
            if hosts.broadcast(hosts.is_terminating):  # since the last wait for a batch
                _terminate(num_steps, run)
        if first is None:
            return None
        run.scores(wait=True)
    path = report.write(workdir)
    progress.say(*scores.summary(workdir), f"report: {path}")
    return path


def check(
    exp: experiment.Experiment,
    mesh: jax.sharding.Mesh,
    hosts: hosts_lib.Hosts,
    *,
    is_begun: bool = False,
    begun: process_lib.Beginning | None = None,
) -> None:
    """Raises ValueError for mistakes in the config, before the working directory is created and minutes of warm-up are spent.

    A run that `is_begun` with several environments is not rehearsed: it may have left out an environment that no longer works. `begun`
    is the process of its environment, if it was started.
    """
    config, topology = exp.config, exp.config.topology
    checks: list[Callable[[], object]] = [
        lambda: exp.rows(mesh),
        lambda: initial.check(config.init_from),
        lambda: config_rules.check_trainable(config),
        lambda: rollout_system.check(exp, hosts),
        lambda: monitors_lib.check(topology.monitors),
    ]
    if config.objective.reference_model:
        checks += [lambda: reference_lib.model_of(exp.objective, exp.model, exp.tokenizer.vocab_size)]
    if hosts.is_first:
        checks += [
            lambda: config_rules.check_prompts(config, exp.tokenizer),
            lambda: (is_begun and config.envs) or tryout.rehearse(config, exp.tokenizer, cli.note, begun),
            lambda: config_rules.check_tolerances(config),
            lambda: config_rules.check_stakes(config),
            lambda: config.trust.bands in ("", run_bands.AUTO) or run_bands.load(config.trust.bands),
            lambda: topology.orchestrator or sockets.listen(topology.host, topology.port).close(),
            lambda: topology.metrics and metrics_routes.listen(topology.metrics).close(),
        ]
        if topology.mode == "remote":
            checks += [lambda: sockets.listen(topology.relay_host, topology.relay_port).close()]
        elif exp.server_mesh and not layout.is_colocated(config):
            checks += [lambda: _check_server_mesh(exp)]
    cli.fail_for(message for check in checks for message in cli.mistake(check))


def _check_server_mesh(exp: experiment.Experiment) -> None:
    try:
        startup.host_mesh(exp.server_mesh, exp.engine)
    except ValueError as error:
        raise ValueError(f"inference.mesh: {error}") from None


@contextlib.contextmanager
def _log(workdir: pathlib.Path, hosts: hosts_lib.Hosts) -> Iterator[run_logs.Log | None]:
    """Yields the learner's log, which gets the error that ends the block; None where the parent process writes it."""
    if not hosts.is_first or (logs := run_directory.logs(workdir)).is_inherited:
        yield None
        return
    with logs.open("learner") as log:
        try:
            yield log
        except BaseException as error:
            log.write(f"error: {type(error).__name__}: {error}".encode())
            raise


def _metrics(learned: dict[str, float], batch, times: dict[str, float]) -> dict[str, float]:
    """Returns all metrics of a step: of the train step (`learned`), its batch and the clock, and those derived from them."""
    per_s = batch.metrics["rollout/num_tokens"] / times["time/step_s"]
    values = diagnostics.of_trained_tokens(learned) | batch.metrics | times | {"time/tokens_per_s": per_s}
    return values | diagnostics.derived(values)


def _check_finite(step: int, values: dict[str, float], packed: packing.TrainBatch, run: running.Run) -> None:
    """Raises ValueError if a metric is not finite; saves the batch for a replay, and the state before it if `update` refused it."""
    hosts, workdir = run.place.hosts, run.place.workdir
    if not (bad := hosts.broadcast(diagnostics.not_finite(values))):
        return
    whole = packed if hosts.count == 1 else multihost_utils.process_allgather(packed, tiled=True)
    file, checkpointer = workdir / "failed_batch.npz", run.checkpointer
    if hosts.is_first:
        packing.save(whole, file)
    checkpointer.wait()
    if values["loss/skipped"] == 1:
        run.save(step - 1, run.state.replace(step=run.state.step - 1))
    found = f"{bad} is {values[bad]} at step {step}; nothing of this step was published; its batch is {file}, its rollouts are in"
    found += (
        f" {workdir / 'rollouts' / f'step_{step}'}, and the last good checkpoint is step {checkpointer.latest_step()}"
    )
    remedy = "look at the rollouts, or start another --workdir with a lower optimizer.learning_rate"
    raise ValueError(f"{found}; {remedy}")


def _terminate(step: int, run: running.Run) -> NoReturn:
    """Ends the run after SIGTERM, with a checkpoint of its state after `step`. All hosts must call it."""
    run.save(step, run.state)
    raise failure.Terminated(f"step {step}")


def _next_batch(orchestrator, step: int, hosts: hosts_lib.Hosts):
    """Returns batch `step`, or None after SIGTERM: a wait for rollouts may be longer than the notice of a preemption."""
    result = futures.Future()

    def run():
        try:
            result.set_result(orchestrator.next_batch(step))
        except BaseException as error:
            result.set_exception(error)

    # Not of a pool, whose threads are joined at the exit of the process.
    threading.Thread(target=run, name=f"batch {step}", daemon=True).start()
    while not hosts.is_terminating and not futures.wait([result], NOTICE_S).done:
        pass
    return None if hosts.is_terminating else result.result()


@contextlib.contextmanager
def _timed(times: dict[str, float], part: str):
    """Measures the block of a `with` statement: sets times["time/<part>_s"] to its duration in seconds."""
    begun = time.perf_counter()
    yield
    times[f"time/{part}_s"] = time.perf_counter() - begun


def shown(values: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of a step that the terminal shows, as {short name: value}; absent metrics are left out."""
    names = {
        "reward": "rollout/reward",
        "loss": "loss/total",
        "mismatch kl": metrics.sampler_kl(values),
        "entropy": "loss/entropy",
        "lag": "sync/lag",
        "tok/s": "time/tokens_per_s",
        "arrived": "trust/num_accepted",  # since the step before, also for later batches
        "rejected": "trust/num_refused",
    }
    return {short: values[name] for short, name in names.items() if name in values}


if __name__ == "__main__":
    with contextlib.closing(begun) if begun else contextlib.nullcontext():
        command.run(functools.partial(main, begun))
