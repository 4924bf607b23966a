"""A run of the learner: all that the loop of `rl.train` uses, started in order and ended in reverse.

1. `_recording`: the files and the display that metrics go to.
2. `_restored`: the train state, of the newest checkpoint or after the warm-up. While the warm-up takes steps, the processes
   of the rollout system start, and the train step compiles.
3. `_published`: the policy of that state, with its name in the ledger.
4. `_serving`: the rollout system (rl/swarm/rollout_system.py) on the first host; the inference server in this process, if it is colocated.
5. `_evaluating`: the first score, which is taken while the train step compiles.

All hosts of a learner start a run together. Only the first has a ledger, an orchestrator, and evaluations: `FirstHost`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import secrets
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import jax

from inference.server import metrics_routes
from models import transformer
from rl.experiment import experiment, layout
from rl.experiment import workdir as run_directory
from rl.experiment.reporting import metrics, rollouts_page, start_clock
from rl.experiment.reporting import monitors as monitors_lib
from rl.learning.batch import host_feed, packing
from rl.learning.learner import reference as reference_lib
from rl.learning.learner import train_step
from rl.protocol import task_schedule, timeline
from rl.protocol.ledger import run_ledger
from rl.swarm import colocated_server, live, rollout_system
from rl.swarm import evaluations as evaluations_lib
from rl.swarm.orchestrator import assembly
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator.remote import client
from sharding.mesh import checkpoint, programs
from sharding.system import secret_file
from sharding.system.logs import run_logs
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import broadcast
from sharding.weights.format import journal

Ledger = run_ledger.RunLedger | client.RemoteOrchestrator
Orchestrator = orchestrator_lib.Orchestrator | client.RemoteOrchestrator


@dataclasses.dataclass(frozen=True)
class Place:
    """An experiment on this host: its devices, its directory, the other hosts, and where its metrics go."""

    exp: experiment.Experiment
    mesh: jax.sharding.Mesh
    workdir: pathlib.Path
    hosts: hosts_lib.Hosts
    progress: metrics.Progress
    writer: metrics.MetricsWriter

    @property
    def weights(self) -> pathlib.Path:
        """The folder of the published versions."""
        return self.workdir / "weights"


@dataclasses.dataclass(frozen=True)
class FirstHost:
    """The parts of a run that only its first host has."""

    orchestrator: Orchestrator
    ledger: Ledger
    evaluations: evaluations_lib.Evaluations


@dataclasses.dataclass
class Run:
    """A run that has started, as the loop uses it. `state` is replaced by each step."""

    place: Place
    start: int  # the step of the checkpoint that it continues
    state: train_step.TrainState
    learner: train_step.Learner
    checkpointer: checkpoint.Checkpointer
    step_fn: Callable
    reference: Callable | None
    feed: Callable[[int, Any], packing.TrainBatch]  # (step, batch, None on hosts other than the first)
    publish: Callable[[Any, int], timeline.Policy]  # (params, version)
    server: colocated_server.ColocatedServer | None  # the inference server in this process
    first: FirstHost | None  # None on the other hosts

    def publish_state(self, step: int) -> timeline.Policy:
        """Publishes the policy of the train state, and hands it to the server in this process, if there is one; returns its name."""
        params = train_step.policy(self.learner, self.state)
        policy = self.publish(params, step)
        if self.server:
            self.server.hand_over(params, policy)
        return policy

    def host_state(self, step: int) -> dict:
        """Returns a checkpoint's state besides arrays: the step, and on the first host the orchestrator's state and the ledger's head."""
        if self.first is None:
            return {"step": step, "rollouts": {}}
        return {"step": step, "rollouts": self.first.orchestrator.state(step), "ledger": self.first.ledger.head()}

    def save(self, step: int, state: train_step.TrainState) -> None:
        """Saves the state after `step`, unless it has been saved, and blocks until that is done. All hosts must call it."""
        self.checkpointer.wait()
        if self.place.hosts.broadcast(step > (self.checkpointer.latest_step() or 0)):
            self.checkpointer.save(step, state, self.host_state(step), force=True)
            self.checkpointer.wait()

    def scores(self, *, wait: bool = False) -> list[tuple[int, float]]:
        """Records the results of evaluations; returns (version, score) of those that came. With `wait`, waits for all."""
        assert self.first is not None
        found = []
        for version, score in self.first.evaluations.finished(wait=wait):
            self.checkpointer.score(version, score)
            found.append((version, score))
        return found


@contextlib.contextmanager
def started(
    exp: experiment.Experiment,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path,
    hosts: hosts_lib.Hosts,
    log: run_logs.Log | None,
    warm_up: Callable[..., transformer.Params],
) -> Iterator[Run]:
    """Yields a run that is ready for its first step, and ends its parts after the block.

    Restores the newest checkpoint, or runs the warm-up (`rl.sft.train`). Then starts the servers and workers, and waits for the compiled train step and
    the first held-out score.
    """
    with (
        _recording(exp, mesh, workdir, hosts, log) as place,
        run_directory.publisher(workdir, exp, hosts) as publisher,
        _restored(place, warm_up) as restored,
        _published(place, publisher, restored) as (ledger, publish, policy),
        _serving(place, restored, ledger, policy) as (orchestrator, server),
        _evaluating(place, restored, orchestrator, ledger) as first,
    ):
        run = Run(
            place=place,
            start=restored.start,
            state=restored.state,
            learner=restored.learner,
            checkpointer=restored.checkpointer,
            step_fn=train_step.jit_train_step(restored.learner),
            reference=restored.reference,
            feed=_feed(place, restored.remote),
            publish=publish,
            server=server,
            first=first,
        )
        if not restored.compiled.done():
            place.progress.note("compiling the train step")
        restored.compiled.result()
        start_clock.mark("train step")
        place.progress.say(start_clock.summary("ready"), programs.summary())
        if first and run.start == 0 and exp.config.init_from:  # the baseline, before the first step
            run.scores(wait=True)
        yield run


@contextlib.contextmanager
def _recording(exp, mesh, workdir: pathlib.Path, hosts: hosts_lib.Hosts, log: run_logs.Log | None) -> Iterator[Place]:
    progress, writer = metrics.of_host(workdir, hosts, run_directory.monitors(workdir, exp, hosts), log)
    with contextlib.closing(writer):
        yield Place(exp, mesh, workdir, hosts, progress, writer)


@dataclasses.dataclass
class _Restored:
    """The train state at the start, and the processes and compilations that began before it was ready."""

    learner: train_step.Learner
    checkpointer: checkpoint.Checkpointer
    state: train_step.TrainState
    start: int
    saved: dict  # the rest of the checkpoint
    reference: Callable | None
    compiled: futures.Future  # of the train step
    begun: rollout_system.Begun | None
    remote: client.RemoteOrchestrator | None


@contextlib.contextmanager
def _restored(place: Place, warm_up: Callable[..., transformer.Params]) -> Iterator[_Restored]:
    """Restores the newest checkpoint, or runs the warm-up; meanwhile processes start, and the train step compiles in a thread."""
    exp, hosts, workdir = place.exp, place.hosts, place.workdir
    learner = exp.learner(place.mesh)
    with contextlib.ExitStack() as stack:
        options = exp.config.checkpoint.to_dict()
        checkpointer = stack.enter_context(checkpoint.Checkpointer(workdir / "checkpoints", **options, hosts=hosts))
        remote = stack.enter_context(_remote(place))
        if remote and hosts.is_first:
            remote.check(experiment.fields(exp))  # before minutes of warm-up
        begun = None
        if hosts.is_first and rollout_system.has_server_process(exp) and not any(place.weights.glob("v*")):
            begun = rollout_system.begin(exp, workdir, place.weights, stack)
        compiler = futures.ThreadPoolExecutor(1)
        stack.callback(compiler.shutdown, wait=False)
        batch = exp.abstract_batch(place.mesh)
        compiled = functools.cache(lambda: compiler.submit(train_step.compile_train_step, learner, batch))

        def before_warm_up_step() -> None:
            compiled()
            if begun:
                begun.check()

        warmed_up = functools.partial(
            warm_up, exp, place.mesh, workdir, place.writer, place.progress, hosts, before_warm_up_step
        )
        reference = reference_lib.make(learner, warmed_up, vocab_size=exp.tokenizer.vocab_size)
        if not exp.config.warmup.num_steps:  # else when the warm-up has compiled its own
            compiled()
        state, start, saved = _restore_or_warm_up(place, learner, checkpointer, warmed_up)
        start_clock.mark("state")
        yield _Restored(learner, checkpointer, state, start, saved, reference, compiled(), begun, remote)


def _remote(place: Place) -> contextlib.AbstractContextManager:
    """Returns the orchestrator of a process of its own as a context, or one that yields None if it runs in this process."""
    exp, topology = place.exp, place.exp.config.topology
    if not topology.orchestrator:
        return contextlib.nullcontext()
    return client.RemoteOrchestrator(
        topology.orchestrator,
        secret_file.read(assembly.token_file(exp.config, place.workdir)),
        learner=place.hosts.broadcast(secrets.token_hex() if place.hosts.is_first else None),
        layout=exp.rollout_layout(place.mesh),
        patience_s=topology.patience_s,
        notify=place.progress.say,
    )


def _restore_or_warm_up(place: Place, learner, checkpointer: checkpoint.Checkpointer, warmed_up):
    """Restores the newest checkpoint, or runs the warm-up (step 0). Returns (train state, its step, the rest of the checkpoint)."""
    config, progress = place.exp.config, place.progress
    if restored := checkpointer.restore(train_step.abstract_state(learner)):
        step, state, host_state = restored
        if step > config.rl.num_steps:
            found = f"{place.workdir} has taken {step} steps, more than rl.num_steps = {config.rl.num_steps}"
            raise ValueError(f"{found}; raise rl.num_steps, or export an earlier checkpoint (python -m rl.export)")
        progress.say(f"resuming after step {step} from {place.workdir / 'checkpoints'}")
        return state, step, host_state
    progress.note(f"loading {config.init_from}" if config.init_from else "preparing the warm-up")
    params = warmed_up()
    progress.note("creating the train state")
    state = train_step.init_state(jax.random.key(config.seed), learner, params)
    del params
    checkpointer.save(0, state, {"step": 0}, force=True)
    return state, 0, {}


@contextlib.contextmanager
def _published(
    place: Place, publisher: broadcast.Publisher, restored: _Restored
) -> Iterator[tuple[Ledger | None, Callable[[Any, int], timeline.Policy], timeline.Policy]]:
    """Opens the run's ledger, which continues after the restored step, and publishes the restored policy.

    Yields (the ledger, None on hosts other than the first; the function that publishes further policies; the name of this one).
    """
    hosts, start = place.hosts, restored.start
    with _ledger(place, restored) as ledger:
        place.writer.truncate("rl", start)
        if hosts.is_first:  # also the version of the checkpoint: a power failure may have torn it
            publisher.forget(start)  # then the manifests that anchor the ledger are gone
        hosts.broadcast()
        publish = functools.partial(_publish, place, publisher, ledger)
        place.progress.note("publishing the weights")
        policy = publish(train_step.policy(restored.learner, restored.state), start)
        start_clock.mark("publish")
        yield ledger, publish, policy


def _ledger(place: Place, restored: _Restored) -> contextlib.AbstractContextManager:
    """Returns the run's ledger as a context, on hosts other than the first one that yields None."""
    start, saved, remote = restored.start, restored.saved, restored.remote
    if not place.hosts.is_first:
        return contextlib.nullcontext()
    if remote is not None:
        remote.attach(experiment.fields(place.exp), start, saved.get("rollouts") or {}, saved.get("ledger"))
        return contextlib.nullcontext(remote)
    any_step = not task_schedule.is_fixed(place.exp.config.rl)
    ledger = run_directory.open_ledger(place.workdir, saved.get("ledger"), any_step=any_step)
    ledger.resumed(start)
    return ledger


def _publish(
    place: Place, publisher: broadcast.Publisher, ledger: Ledger | None, params, version: int
) -> timeline.Policy:
    """Publishes a policy version with the ledger's head in its signed metadata, and records its manifest; returns the policy."""
    anchor, (tree, metadata) = {"ledger": ledger.head()} if ledger else {}, place.exp.published(params)
    epoch = publisher.publish(tree, version, metadata=metadata | anchor).epoch or 0
    if not ledger:  # not the first host
        return timeline.Policy(epoch, version)
    data = (place.weights / journal.dirname(version) / "manifest.json").read_bytes()
    policy = timeline.Policy(epoch, version, hashlib.sha256(data).hexdigest())
    ledger.published(version, policy.digest, epoch)
    return policy


@contextlib.contextmanager
def _serving(
    place: Place, restored: _Restored, ledger: Ledger | None, policy: timeline.Policy
) -> Iterator[tuple[Orchestrator | None, colocated_server.ColocatedServer | None]]:
    """Starts the rollout system on the first host, and elsewhere joins it if each host has a server in its process.

    Yields (the orchestrator, None on hosts other than the first; the inference server in this process, None if there is none).
    """
    exp, workdir, hosts, say = place.exp, place.workdir, place.hosts, place.progress.say
    with contextlib.ExitStack() as stack:
        orchestrator = serve = None
        if layout.is_colocated(exp.config):
            key, params = run_directory.trusted_key(workdir), train_step.policy(restored.learner, restored.state)
            server = colocated_server.start(exp, place.weights, key, policy, params, hosts)
            serve = functools.cache(lambda: stack.enter_context(server))  # compiles, while the workers start
            del params
        if hosts.is_first:
            place.progress.note("starting the rollout system")
            system = rollout_system.start_rollout_system(
                exp,
                workdir,
                place.weights,
                policy,
                say,
                num_hosts=hosts.count,
                known=restored.saved.get("rollouts"),
                ledger=ledger,
                server=serve,
                begun=restored.begun,
            )
            orchestrator = stack.enter_context(system)
        start_clock.mark("rollout system")
        if serve:
            url = hosts.broadcast(serve().orchestrator)
            if not hosts.is_first:
                on_death = functools.partial(_report_death, hosts)
                stack.enter_context(rollout_system.join(exp, workdir, url, hosts.index, serve, say, on_death))
        if orchestrator and exp.config.topology.metrics:
            stack.enter_context(_metrics_served(place, orchestrator))
        stack.push(hosts.report)
        yield orchestrator, serve and serve()


def _report_death(hosts: hosts_lib.Hosts, error: Exception) -> None:
    if not hosts.is_terminating:  # else the workers got the signal, too
        hosts.report(None, error, None)


@contextlib.contextmanager
def _metrics_served(place: Place, orchestrator: Orchestrator) -> Iterator[None]:
    """Serves the metrics and the health of learner and orchestrator, and the page of the run, during the block."""
    exp, address, learned = place.exp, place.exp.config.topology.metrics, monitors_lib.Prometheus()
    place.writer.monitors.add("prometheus", learned)

    def health() -> dict:
        return {"step": learned.step, "waiting_for": orchestrator.waiting_for()}

    def doing() -> str:
        return orchestrator.waiting_for() or place.progress.doing()

    if isinstance(orchestrator, client.RemoteOrchestrator):  # its own process serves them
        here, nodes = [], list
    else:
        here, nodes = [orchestrator.metrics], orchestrator.nodes.table
    path = [""]

    def add_page(app) -> None:
        host, answer = address.rpartition(":")[0] or "127.0.0.1", rollouts_page.answers(exp.config)
        path[0] = live.add(app, place.workdir, host, nodes, exp.tokenizer.decode, exp.credit, answer, doing)

    with metrics_routes.serving(address, health, learned.metrics, *here, add_more=add_page) as url:
        place.progress.say(f"page of the run: {url}{path[0]}")
        yield


@contextlib.contextmanager
def _evaluating(
    place: Place, restored: _Restored, orchestrator: Orchestrator | None, ledger: Ledger | None
) -> Iterator[FirstHost | None]:
    """Begins the evaluation of the restored policy, unless it has a score; yields the parts of the first host, elsewhere None."""
    if orchestrator is None or ledger is None:
        yield None
        return
    with evaluations_lib.Evaluations(
        place.exp, orchestrator, place.workdir, place.writer, place.progress
    ) as evaluations:
        # Read at every resume: a damaged file must not wait for the last step.
        if (score := evaluations_lib.saved_score(place.workdir, restored.start)) is not None:
            restored.checkpointer.score(restored.start, score)
        else:
            evaluations.begin(restored.start)
        yield FirstHost(orchestrator, ledger, evaluations)


def _feed(place: Place, remote: client.RemoteOrchestrator | None) -> Callable[[int, Any], packing.TrainBatch]:
    """Returns the function that puts the rows of a batch on the devices of all hosts."""
    where = place.exp.rollout_layout(place.mesh), place.mesh, place.hosts

    def from_here(step: int, batch) -> packing.TrainBatch:
        return host_feed.place(batch and batch.trees, *where)

    def from_there(step: int, batch) -> packing.TrainBatch:
        assert remote is not None
        return host_feed.fetch(batch and batch.num_micro_batches, functools.partial(remote.rows, step), *where)

    return from_there if remote else from_here
