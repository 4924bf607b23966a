"""Asynchronous GRPO from one command: warm-up, rollouts, proofs, learning, evaluation, report.

    python -m rl.train --config=configs/quickstart.py --workdir=runs/quickstart

1. Warm-up (rl/sft.py) gives policy version 0, unless a checkpoint exists to resume from.
2. The rollout system starts (rl/rollout_system.py): broadcast, inference server, workers and validator, led by the orchestrator.
3. The loop: wait for a batch, one `train_step`, publish the new version, checkpoint, evaluation, metrics.
4. Held-out score before and after, report.html.

If killed at any moment, the same command resumes from the last complete checkpoint; with `rl.max_lag = 0` the resumed run is
bit-identical. SIGTERM, the notice of a preemption, saves at the end of the step in progress, or during the wait for its batch.
With several hosts each runs the loop, and all take every step, publish and save together. Only the first has the rollout
system, the scores, and the files that people read; the others end when it ends (sharding/multihost/hosts.py).
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from rl.experiment import command

    command.parse(is_complete=True)

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

import jax
from absl import flags
from jax.experimental import multihost_utils

from inference.server import metrics_routes, startup
from models import hub
from rl import evaluate, live, report, rollout_system, sft
from rl.batch import host_feed, packing
from rl.envs.hub import tryout
from rl.experiment import command, experiment, initial
from rl.experiment import rules as config_rules
from rl.experiment import workdir as run_directory
from rl.learner import optimizers, train_step
from rl.learner import reference as reference_lib
from rl.orchestrator import assembly
from rl.orchestrator.remote import client
from rl.plan import sizes, utilization
from rl.protocol import task_schedule, timeline
from rl.reporting import diagnostics, metrics, rollouts_page, start_clock
from rl.reporting import monitors as monitors_lib
from rl.retention import redaction
from rl.topology import colocated_server, layout
from rl.verification import run_bands
from sharding import broadcast, bucket, checkpoint, profiler
from sharding.format import journal
from sharding.logs import run_logs
from sharding.multihost import failure
from sharding.multihost import hosts as hosts_lib
from sharding.system import cli, compile_cache, secret_file, sockets

NOTICE_S = 0.2  # between two looks for a SIGTERM of any host


def main() -> None:
    """Runs the training command: the experiment of the command line, on this host or, with other hosts in its config, together."""
    start_clock.mark("imports")
    with experiment.joined() as hosts:
        exp = sizes.resolve(flags.FLAGS.config)
        mesh = layout.learner_mesh(exp.config)
        workdir = bucket.local_folder(flags.FLAGS.workdir)
        _check(exp, mesh, hosts, is_begun=any(workdir.glob("checkpoints/[0-9]*")))
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
    with _started(exp, mesh, workdir, hosts, log) as run:
        orchestrator, checkpointer = run.orchestrator, run.checkpointer
        retention = redaction.Rule(**exp.config.retention.to_dict())
        profile = profiler.Profiler(workdir / "profile", exp.config.profile.steps)
        with hosts.terminable(), profile, run.progress.phase("rl", total=num_steps, initial=run.start) as bar:
            for step in range(run.start + 1, num_steps + 1):
                begun, annotation = time.perf_counter(), profile.begin(step)
                times: dict[str, float] = {}
                rate = optimizers.next_rate(exp.optimizer, run.state.opt_state)
                with _timed(times, "wait"):
                    batch = _next_batch(orchestrator, step, hosts) if orchestrator else None
                if step == run.start + 1:
                    start_clock.mark("first rollouts")
                if hosts.broadcast(hosts.is_first and batch is None):
                    _terminate(step - 1, run, hosts)
                with _timed(times, "train_step"), annotation:
                    if run.server:
                        run.server.release()
                    packed = run.feed(step, batch)
                    if run.reference is not None:
                        packed = packed.replace(ref_logp=run.reference(packed))
                    with jax.transfer_guard("disallow"):
                        run.state, step_metrics = run.step_fn(run.state, packed)
                    values = {name: float(value) for name, value in jax.device_get(step_metrics).items()}
                    _check_finite(step, values, packed, run, workdir, hosts)
                with _timed(times, "publish"):
                    policy = _publish_state(run, step)
                    if run.server:
                        run.server.reclaim()
                    if orchestrator:
                        orchestrator.publish(policy)
                        run.evaluations.begin(step)
                with _timed(times, "checkpoint"):
                    checkpointer.save(step, run.state, run.host_state(step), force=scored.is_due(step, num_steps))
                    if orchestrator:
                        redaction.apply(workdir, checkpointer.latest_step() or 0, retention)
                if batch is None:  # not the first host
                    continue
                with _timed(times, "eval"):
                    # After a SIGTERM to the whole group, the workers are dead, and evaluations fail before the state is saved.
                    for version, score in () if hosts.is_terminating else run.evaluations.finished():
                        checkpointer.score(version, score)
                        adviser.scored(version, score)
                times |= {"time/step_s": time.perf_counter() - begun, "time/unix": time.time()}
                values = _metrics(values | {"optimizer/learning_rate": rate}, batch, times)
                values |= utilization.of_step(
                    values, exp.model, mesh.size, mesh.local_devices, is_frozen=bool(exp.lora)
                )
                run.writer.write(step, "rl", values)
                bar.update(step, _shown(values))
                if step == run.start + 1:
                    start_clock.mark("first step")
                    run.progress.say(start_clock.summary("first step"))
                if line := adviser.after(step, values):
                    run.progress.say(line)
            if hosts.broadcast(hosts.is_terminating):  # since the last wait for a batch
                _terminate(num_steps, run, hosts)
        if orchestrator is None:
            return None
        for version, score in run.evaluations.finished(wait=True):
            checkpointer.score(version, score)
    path = report.write(workdir)
    run.progress.say(*evaluate.summary(workdir), f"report: {path}")
    return path


@dataclasses.dataclass
class _Run:
    """The parts of a run that the loop uses. `orchestrator` is None on hosts other than the first."""

    start: int  # the step of the checkpoint that it continues
    state: Any  # replaced by each step
    learner: train_step.Learner
    orchestrator: Any
    checkpointer: checkpoint.Checkpointer
    evaluations: Any  # None on hosts other than the first
    writer: metrics.MetricsWriter
    progress: metrics.Progress
    step_fn: Callable
    reference: Callable | None
    feed: Callable[[int, Any], packing.TrainBatch]  # (step, batch, None on hosts other than the first)
    publish: Callable[[Any, int], timeline.Policy]  # (params, version)
    server: colocated_server.ColocatedServer | None  # the inference server in this process
    host_state: Callable[[int], dict]


@contextlib.contextmanager
def _started(
    exp: experiment.Experiment, mesh: jax.sharding.Mesh, workdir, hosts: hosts_lib.Hosts, log: run_logs.Log | None
) -> Iterator[_Run]:
    """Restores or warms up, and starts all that the loop needs, with the first score and the train step compiled; ends it after."""
    learner, monitors = exp.learner(mesh), run_directory.monitors(workdir, exp, hosts)
    step_fn = train_step.jit_train_step(learner)
    with contextlib.ExitStack() as stack:
        progress, writer = metrics.of_host(workdir, hosts, monitors, log)
        stack.callback(writer.close)
        publisher = stack.enter_context(run_directory.publisher(workdir, exp, hosts))
        options = exp.config.checkpoint.to_dict()
        checkpointer = checkpoint.Checkpointer(workdir / "checkpoints", **options, hosts=hosts)
        stack.enter_context(checkpointer)
        remote = stack.enter_context(_remote(exp, mesh, workdir, progress, hosts))
        if remote and hosts.is_first:
            remote.check(experiment.fields(exp))  # before minutes of warm-up
        begun = None
        if hosts.is_first and rollout_system.has_server_process(exp) and not any((workdir / "weights").glob("v*")):
            begun = rollout_system.begin(exp, workdir, workdir / "weights", stack)
        compiler = futures.ThreadPoolExecutor(1)
        stack.callback(compiler.shutdown, wait=False)
        compile_step = functools.partial(train_step.compile_train_step, learner, exp.abstract_batch(mesh))
        # While the warm-up takes steps, processes start, and the first score and the first batch are made.
        begin_to_compile = functools.cache(lambda: compiler.submit(compile_step))

        def before_warm_up_step() -> None:
            begin_to_compile()
            if begun:
                begun.check()

        warm_up = functools.partial(sft.train, exp, mesh, workdir, writer, progress, hosts, before_warm_up_step)
        reference = reference_lib.make(learner, warm_up, vocab_size=exp.tokenizer.vocab_size)
        if not exp.config.warmup.num_steps:  # else when the warm-up has compiled its own
            begin_to_compile()
        state, start, saved = _restore_or_warm_up(exp, workdir, learner, checkpointer, warm_up, progress)
        start_clock.mark("state")
        compiled = begin_to_compile()
        ledger = stack.enter_context(_ledger(exp, workdir, start, saved, hosts, remote))
        writer.truncate("rl", start)
        if hosts.is_first:  # also the version of the checkpoint: a power failure may have torn it
            publisher.forget(start)  # then the manifests that anchor the ledger are gone
        hosts.broadcast()
        publish = functools.partial(_publish, exp, workdir, publisher, ledger)
        progress.note("publishing the weights")
        params = train_step.policy(learner, state)
        policy, serve = publish(params, start), None
        start_clock.mark("publish")
        if layout.is_colocated(exp.config):
            weights, key = workdir / "weights", run_directory.trusted_key(workdir)
            server = colocated_server.start(exp, weights, key, policy, params, hosts)
            serve = functools.cache(lambda: stack.enter_context(server))  # compiles, while the workers start
        del params
        system = contextlib.nullcontext()
        if hosts.is_first:
            progress.note("starting the rollout system")
            options = {"num_hosts": hosts.count, "known": saved.get("rollouts"), "ledger": ledger}
            options |= {"server": serve, "begun": begun}
            system = rollout_system.start_rollout_system(
                exp, workdir, workdir / "weights", policy, progress.say, **options
            )
        orchestrator = stack.enter_context(system)
        start_clock.mark("rollout system")
        if serve and (url := hosts.broadcast(serve().orchestrator)) != serve().orchestrator:  # not the first host

            def on_death(error: Exception) -> None:
                if not hosts.is_terminating:  # else the workers got the signal, too
                    hosts.report(None, error, None)

            stack.enter_context(rollout_system.join(exp, workdir, url, hosts.index, serve, progress.say, on_death))
        if orchestrator and exp.config.topology.metrics:
            stack.enter_context(_metrics_served(exp, workdir, writer, orchestrator, progress))
        stack.push(hosts.report)
        evaluations = None
        if orchestrator:
            evaluations = evaluate.Evaluations(exp, orchestrator, workdir, writer, progress)
            stack.enter_context(evaluations)
            # Read at every resume: a damaged file must not wait for the last step.
            if (saved_score := evaluate.saved_score(workdir, start)) is not None:
                checkpointer.score(start, saved_score)
            else:
                evaluations.begin(start)
        if not compiled.done():
            progress.note("compiling the train step")
        compiled.result()
        start_clock.mark("train step")
        progress.say(start_clock.summary("ready"), compile_cache.summary())
        if evaluations and start == 0 and exp.config.init_from:  # the baseline, before the first step
            for version, score in evaluations.finished(wait=True):
                checkpointer.score(version, score)
        yield _Run(
            start=start,
            state=state,
            learner=learner,
            step_fn=step_fn,
            reference=reference,
            orchestrator=orchestrator,
            feed=_feed(exp, remote, mesh, hosts),
            checkpointer=checkpointer,
            publish=publish,
            server=serve and serve(),
            host_state=functools.partial(_host_state, orchestrator, ledger),
            evaluations=evaluations,
            writer=writer,
            progress=progress,
        )


def _check(
    exp: experiment.Experiment, mesh: jax.sharding.Mesh, hosts: hosts_lib.Hosts, *, is_begun: bool = False
) -> None:
    """Raises ValueError for mistakes in the config, before the working directory is created and minutes of warm-up are spent.

    A mixture that `is_begun` may have left out an environment that works no more, and is not rehearsed.
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
    if config.warmup.num_steps:
        kind = "files or folders of conversations, with commas between them"
        paths = config.warmup.data.split(",")
        checks += [lambda path=path: _check_file("warmup.data", path.strip(), kind) for path in paths]
    if hosts.is_first:
        checks += [
            lambda: config_rules.check_prompts(config, exp.tokenizer),
            lambda: (is_begun and config.envs) or tryout.rehearse(config, exp.tokenizer, cli.note),
            lambda: config_rules.check_tolerances(config),
            lambda: config_rules.check_stakes(config),
            lambda: _check_bands(config.trust.bands),
            lambda: topology.orchestrator or sockets.listen(topology.host, topology.port).close(),
            lambda: topology.metrics and metrics_routes.listen(topology.metrics).close(),
        ]
        if topology.mode == "remote":
            checks += [lambda: sockets.listen(topology.relay_host, topology.relay_port).close()]
        elif exp.server_mesh and not layout.is_colocated(config):
            checks += [lambda: _check_server_mesh(exp)]
    cli.fail_for(message for check in checks for message in cli.mistake(check))


def _check_bands(file: str) -> None:
    if file not in ("", run_bands.AUTO):
        _check_file("trust.bands", file, "the file that `python -m rl.validator calibrate` wrote")
        run_bands.load(file)


def _check_server_mesh(exp: experiment.Experiment) -> None:
    try:
        startup.host_mesh(exp.server_mesh, exp.engine)
    except ValueError as error:
        raise ValueError(f"inference.mesh: {error}") from None


def _check_file(field: str, path: str, kind: str) -> None:
    if path and not pathlib.Path(path).exists():
        raise ValueError(f"{field} = {path!r} does not exist; set it to {kind}")


def _restore_or_warm_up(exp, workdir, learner, checkpointer, warm_up, progress):
    """Restores the newest checkpoint, or runs the warm-up (step 0). Returns (train state, its step, the rest of the checkpoint)."""
    restored = checkpointer.restore(train_step.abstract_state(learner))
    if restored:
        step, state, host_state = restored
        if step > exp.config.rl.num_steps:
            found = f"{workdir} has taken {step} steps, more than rl.num_steps = {exp.config.rl.num_steps}"
            raise ValueError(f"{found}; raise rl.num_steps, or export an earlier checkpoint (python -m rl.export)")
        progress.say(f"resuming after step {step} from {workdir / 'checkpoints'}")
        return state, step, host_state
    progress.note(f"loading {exp.config.init_from}" if exp.config.init_from else "preparing the warm-up")
    params = warm_up()
    progress.note("creating the train state")
    state = train_step.init_state(jax.random.key(exp.config.seed), learner, params)
    del params
    checkpointer.save(0, state, {"step": 0}, force=True)
    return state, 0, {}


def _remote(exp, mesh: jax.sharding.Mesh, workdir: pathlib.Path, progress, hosts: hosts_lib.Hosts) -> Any:
    """Returns the orchestrator of a process of its own as a context, or one that yields None if it runs in this process."""
    topology = exp.config.topology
    if not topology.orchestrator:
        return contextlib.nullcontext()
    return client.RemoteOrchestrator(
        topology.orchestrator,
        secret_file.read(assembly.token_file(exp.config, workdir)),
        learner=hosts.broadcast(secrets.token_hex() if hosts.is_first else None),
        layout=exp.rollout_layout(mesh),
        patience_s=topology.patience_s,
        notify=progress.say,
    )


def _feed(exp, remote: client.RemoteOrchestrator | None, mesh, hosts: hosts_lib.Hosts) -> Callable:
    """Returns the function that puts the rows of a batch on the devices of all hosts."""
    place = exp.rollout_layout(mesh), mesh, hosts
    if remote is None:
        return lambda step, batch: host_feed.place(batch and batch.trees, *place)
    rows = lambda step: functools.partial(remote.rows, step)  # noqa: E731
    return lambda step, batch: host_feed.fetch(batch and batch.num_micro_batches, rows(step), *place)


def _ledger(exp, workdir: pathlib.Path, start: int, saved: dict, hosts: hosts_lib.Hosts, remote) -> Any:
    """Returns the run's ledger, which continues after step `start`; on hosts other than the first a context that yields None."""
    if not hosts.is_first:
        return contextlib.nullcontext()
    if remote is not None:
        remote.attach(experiment.fields(exp), start, saved.get("rollouts") or {}, saved.get("ledger"))
        return contextlib.nullcontext(remote)
    ledger = run_directory.open_ledger(workdir, saved.get("ledger"), any_step=not task_schedule.is_fixed(exp.config.rl))
    ledger.resumed(start)
    return ledger


def _publish(
    exp, workdir: pathlib.Path, publisher: broadcast.Publisher, ledger, params, version: int
) -> timeline.Policy:
    """Publishes a policy version with the ledger's head in its signed metadata, and records its manifest; returns the policy."""
    anchor, (tree, metadata) = {"ledger": ledger.head()} if ledger else {}, exp.published(params)
    epoch = publisher.publish(tree, version, metadata=metadata | anchor).epoch or 0
    if not ledger:  # not the first host
        return timeline.Policy(epoch, version)
    data = (workdir / "weights" / journal.dirname(version) / "manifest.json").read_bytes()
    policy = timeline.Policy(epoch, version, hashlib.sha256(data).hexdigest())
    ledger.published(version, policy.digest, epoch)
    return policy


def _publish_state(run: _Run, step: int) -> timeline.Policy:
    """Publishes the policy of the train state, and hands it to the server in this process, if there is one; returns its name."""
    params = train_step.policy(run.learner, run.state)
    policy = run.publish(params, step)
    if run.server:
        run.server.hand_over(params, policy)
    return policy


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


def _host_state(orchestrator, ledger, step: int) -> dict:
    """Returns a checkpoint's state besides arrays: the step, and on the first host the orchestrator's state and the ledger's head."""
    if orchestrator is None:
        return {"step": step, "rollouts": {}}
    return {"step": step, "rollouts": orchestrator.state(step), "ledger": ledger.head()}


@contextlib.contextmanager
def _metrics_served(
    exp, workdir: pathlib.Path, writer: metrics.MetricsWriter, orchestrator, progress
) -> Iterator[None]:
    """Serves the metrics and the health of learner and orchestrator, and the page of the run, during the block."""
    address = exp.config.topology.metrics
    learned = monitors_lib.Prometheus()
    writer.monitors.add("prometheus", learned)

    def health() -> dict:
        return {"step": learned.step, "waiting_for": orchestrator.waiting_for()}

    here = [orchestrator.metrics] if orchestrator.metrics else []  # else its own process serves them
    nodes = orchestrator.nodes.table if here else list
    path = [""]

    def add_page(app) -> None:
        host, answer = address.rpartition(":")[0] or "127.0.0.1", rollouts_page.answers(exp.config)
        doing = lambda: orchestrator.waiting_for() or progress.doing()  # noqa: E731
        path[0] = live.add(app, workdir, host, nodes, exp.tokenizer.decode, exp.credit, answer, doing)

    with metrics_routes.serving(address, health, learned.metrics, *here, add_more=add_page) as url:
        progress.say(f"page of the run: {url}{path[0]}")
        yield


def _metrics(learned: dict[str, float], batch, times: dict[str, float]) -> dict[str, float]:
    """Returns all metrics of a step: of the train step (`learned`), its batch and the clock, and those derived from them."""
    per_s = batch.metrics["rollout/num_tokens"] / times["time/step_s"]
    values = diagnostics.of_trained_tokens(learned) | batch.metrics | times | {"time/tokens_per_s": per_s}
    return values | diagnostics.derived(values)


def _check_finite(step, values, packed, run: _Run, workdir: pathlib.Path, hosts: hosts_lib.Hosts) -> None:
    """Raises ValueError if a metric is not finite; saves the batch for a replay, and the state before it if `update` refused it."""
    if not (bad := hosts.broadcast(diagnostics.not_finite(values))):
        return
    whole = packed if hosts.count == 1 else multihost_utils.process_allgather(packed, tiled=True)
    file, checkpointer = workdir / "failed_batch.npz", run.checkpointer
    if hosts.is_first:
        packing.save(whole, file)
    checkpointer.wait()
    if values["loss/skipped"] == 1:
        _save(step - 1, run.state.replace(step=run.state.step - 1), run, hosts)
    found = f"{bad} is {values[bad]} at step {step}; nothing of this step was published. Its batch is {file}, its rollouts are in"
    found += f" {workdir / 'rollouts' / f'step_{step}'}, the last good checkpoint is step {checkpointer.latest_step()}"
    remedy = "look at the rollouts, or start another --workdir with a lower optimizer.learning_rate"
    raise ValueError(f"{found}; {remedy}")


def _terminate(step: int, run: _Run, hosts: hosts_lib.Hosts) -> NoReturn:
    """Ends the run after SIGTERM, with a checkpoint of its state after `step`. All hosts must call it."""
    _save(step, run.state, run, hosts)
    raise failure.Terminated(f"step {step}")


def _save(step: int, state, run: _Run, hosts: hosts_lib.Hosts) -> None:
    """Saves the state after `step`, unless it has been saved, and blocks until that is done. All hosts must call it."""
    run.checkpointer.wait()
    if hosts.broadcast(step > (run.checkpointer.latest_step() or 0)):
        run.checkpointer.save(step, state, run.host_state(step), force=True)
        run.checkpointer.wait()


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


def _shown(values: dict[str, float]) -> dict[str, float]:
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
    command.run(main)
