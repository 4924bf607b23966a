"""Starts the rollout system of a run: orchestrator and validator here, workers as child processes, the inference server as either.

1. The validator and the orchestrator run in this process, on the first host of several. With several hosts the validator replays
   on the CPU, since a program on one of their chips would block all of them.
2. The server process compiles, waits for published weights, and writes its address to a file; the workers wait for the orchestrator's URL. All
   of them begin before the warm-up (`begin`). Or the server is a thread of this process (rl/swarm/colocated_server.py). With
   `topology.mode = "remote"`, a relay of the weights starts instead, and the run prints the commands to start elsewhere.
3. The standard input of a child is a pipe from this process: children stop when this process ends, however suddenly.
   A child that ends early ends the run with the last lines of its output.
"""

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment as experiment_lib
from rl.experiment import layout
from rl.experiment import workdir as run_directory
from rl.protocol import timeline
from rl.protocol.ledger import run_ledger
from rl.swarm import colocated_server
from rl.swarm.orchestrator import assembly, orchestrator
from rl.swarm.orchestrator.remote import client
from sharding.system import atomic_file, child_process, sockets
from sharding.system.multihost import hosts as hosts_lib


def check(experiment: experiment_lib.Experiment, hosts: hosts_lib.Hosts = hosts_lib.ALONE) -> None:
    """Raises ValueError if the inference server of this config has no device, or no address that the workers of all hosts reach; or if its replays have no device."""
    assembly.check(experiment.config, hosts.count)
    topology, chip = experiment.config.topology, jax.default_backend()
    if layout.is_colocated(experiment.config):
        layout.engine_mesh(experiment)
        if sockets.is_loopback(topology.host) and not sockets.is_loopback(hosts.address):
            found = f"topology.host = {topology.host!r} cannot be reached from the other {hosts.count - 1} hosts"
            raise ValueError(f"{found}; set it to an address of host 0")
    elif topology.mode == "local" and chip != "cpu":
        found = (
            f"topology.mode = 'local' would start a second process on this host's {chip}s, and the learner uses them"
        )
        raise ValueError(f"{found}; set topology.mode = 'colocated', or 'remote' and topology.servers")


def has_server_process(experiment: experiment_lib.Experiment) -> bool:
    """Returns True if a run starts its inference server as a child process. It does not if the server is colocated, or if servers run elsewhere."""
    topology = experiment.config.topology
    return topology.mode != "remote" and not topology.orchestrator and not layout.is_colocated(experiment.config)


class Begun(NamedTuple):
    """The processes of a run's inference server, which may not serve yet, and of its workers, which wait for the orchestrator."""

    server: child_process.ChildProcess
    control: str  # the server's unix socket of control routes
    address: pathlib.Path  # the file to which the server writes its URL once it serves
    workers: list[child_process.ChildProcess]

    def check(self) -> None:
        """Raises ValueError with the last lines of a process that has ended."""
        for child in (self.server, *self.workers):
            if child.process.poll() is not None:
                raise ValueError(child.obituary())


def begin(
    experiment: experiment_lib.Experiment, workdir: pathlib.Path, weights: pathlib.Path, stack: contextlib.ExitStack
) -> Begun:
    """Starts the processes of the run's server, which waits for the first version in the directory `weights`, and of its workers.

    Meanwhile they import their modules, and the server compiles; `stack` ends them.
    """
    control, run = stack.enter_context(sockets.private_path()), run_directory.signing_key(workdir).worker
    options = ["--control", control, "--key", str(assembly.server_key(workdir)), "--run", run]
    logs = run_directory.logs(workdir)
    if not any(weights.glob("v*")):
        expected = logs.path / "expected.json"
        atomic_file.write(expected, json.dumps(experiment.broadcast_metadata).encode())
        options += ["--expected", str(expected)]
    start = lambda name, command: stack.enter_context(child_process.ChildProcess(name, command, logs))  # noqa: E731
    child, file = _begin(start, assembly.SERVER, [*server_command(experiment, workdir, weights), *options], workdir)
    return Begun(child, control, file, _start_workers(experiment, workdir, "-", start))


@contextlib.contextmanager
def start_rollout_system(
    experiment: experiment_lib.Experiment,
    workdir: pathlib.Path,
    weights: pathlib.Path,
    policy: timeline.Policy,
    on_wait: Callable[[str], None],
    num_hosts: int = 1,
    known: dict | None = None,
    ledger: run_ledger.RunLedger | client.RemoteOrchestrator | None = None,
    server: Callable[[], colocated_server.ColocatedServer] | None = None,
    begun: Begun | None = None,
) -> Iterator[orchestrator.Orchestrator | client.RemoteOrchestrator]:
    """Starts all processes that generate and check rollouts; yields the orchestrator and stops them at the end of the block.

    The first policy is `policy`, already published in the directory `weights`; `known` is the `Orchestrator.state` saved in its
    checkpoint, if any. `on_wait` receives lines for people during waits. With `num_hosts` learner hosts, this runs on the first.
    Events are recorded in `ledger`, if there is one. If that is an orchestrator in another process, none starts here.
    `server` starts the one in this process, if the run is colocated, and `begun` has the processes that have begun to start (None: they begin here).
    """
    with contextlib.ExitStack() as stack:
        if isinstance(ledger, client.RemoteOrchestrator):
            rollouts = ledger
        else:
            rollouts = assembly.make(experiment, workdir, weights, stack, on_wait, num_hosts, known, ledger)
            rollouts.resume(policy.version, known)

        logs = run_directory.logs(workdir)

        def start(name: str, command: list[str]) -> child_process.ChildProcess:
            return stack.enter_context(child_process.ChildProcess(name, command, logs, rollouts.fail))

        if isinstance(rollouts, client.RemoteOrchestrator):
            _say_elsewhere(experiment, workdir, weights, rollouts.url, start, on_wait)
        elif experiment.config.topology.mode != "remote":
            url = rollouts.serve()
            stack.callback(rollouts.close)
            if server is not None:
                stack.enter_context(join(experiment, workdir, url, 0, server, on_wait, rollouts.fail))
            else:
                begun = begun or begin(experiment, workdir, weights, stack)
                begun.server.on_death = rollouts.fail
                for worker in begun.workers:
                    stack.push(worker)  # it ends before the orchestrator
                    worker.on_death = rollouts.fail
                    worker.send_line(url)
                key = rollout_lib.WorkerKey.load(assembly.server_key(workdir)).worker
                server_url = _address(begun.server, begun.address, experiment.config.topology.patience_s)
                rollouts.nodes.add(server_url, f"unix:{begun.control}", key=key)
        else:
            url = assembly.serve(rollouts, experiment.config, workdir, stack)
            _say_elsewhere(experiment, workdir, weights, url, start, on_wait)
        rollouts.publish(policy)
        yield rollouts
        if experiment.config.topology.mode == "remote":
            rollouts.end()


@contextlib.contextmanager
def join(
    experiment: experiment_lib.Experiment,
    workdir: pathlib.Path,
    url: str,
    host: int,
    server: Callable[[], colocated_server.ColocatedServer],
    notify: Callable[[str], None],
    on_death: Callable[[Exception], None],
) -> Iterator[None]:
    """Adds the workers and the server of a host to the run whose orchestrator is at `url`, until the end of the block.

    `server` is called while the workers start: it may compile. `notify` receives lines for people, and `on_death` the error if a worker or the engine ends early.
    """
    with contextlib.ExitStack() as stack:

        def start(name: str, command: list[str]) -> child_process.ChildProcess:
            logs = run_directory.logs(workdir, is_first=host == 0)
            cpu = {"JAX_PLATFORMS": "cpu"}  # an environment may import JAX
            return stack.enter_context(child_process.ChildProcess(name, command, logs, on_death, environment=cpu))

        _start_workers(experiment, workdir, url, start, host)
        found, run = server(), run_directory.signing_key(workdir).worker
        notify(f"inference server: {found.url} (/health, /metrics)")
        stack.enter_context(found.join(url, run, assembly.server_key(workdir, host), notify))

        def watch() -> None:
            if error := found.death():
                on_death(error)

        threading.Thread(target=watch, name="watch-engine", daemon=True).start()
        yield


def _start_workers(experiment, workdir, url: str, start: Callable, host: int = 0) -> list[child_process.ChildProcess]:
    run = run_directory.signing_key(workdir).worker
    options = ["--orchestrator", url, "--run", run, "--sandbox", experiment.config.trust.sandbox]
    options += experiment_lib.code_options(experiment)
    files = assembly.worker_keys(experiment.config, workdir, host)
    return [start(file.stem, ["rl.worker", *options, "--key", str(file)]) for file in files]


def _say_elsewhere(experiment, workdir, weights, url: str, start: Callable, on_wait: Callable[[str], None]) -> None:
    """Starts a relay of the weights, with a line for people on each command to run elsewhere."""
    topology, trusted = experiment.config.topology, run_directory.trusted_key(workdir)
    assert trusted is not None  # a run has its key before it is announced
    command = ["sharding.relay", "--upstream", str(weights), "--host", topology.relay_host]
    command += ["--port", str(topology.relay_port), "--trusted_key", trusted]
    relay = _address(*_begin(start, "relay", command, workdir), topology.patience_s)
    for line in commands_elsewhere(experiment, workdir, url, relay):
        on_wait(line)


def commands_elsewhere(
    experiment: experiment_lib.Experiment, workdir: pathlib.Path, url: str, relay: str
) -> Iterator[str]:
    """Yields lines for people: the command of each role of a remote run, and the keys that it needs."""
    topology, trusted = experiment.config.topology, run_directory.trusted_key(workdir)
    run = run_directory.signing_key(workdir).worker
    code = " ".join(["", "--code FOLDER"][: 1 + bool(experiment_lib.code_options(experiment))])
    signing = f" --orchestrator {url} --run {run} --key FILE" if topology.server_keys else ""
    options = f"--weights {relay} --weights_key {trusted} --port PORT"
    if topology.server_keys:
        yield f"servers elsewhere: python -m inference.serve {options}{signing} --url URL"
        yield "with the URL at which workers reach the server"
    if topology.servers:
        yield f"servers elsewhere: python -m inference.serve {options} --control HOST:PORT --control_token_file FILE"
        file = assembly.token_file(experiment.config, workdir)
        yield f"with HOST:PORT of topology.control_servers, and FILE a copy of {file}, which no worker needs"
    yield f"workers elsewhere: python -m rl.worker --orchestrator {url} --run {run} --key FILE{code}"
    yield "with a FILE that does not exist yet: the worker makes it, and keeps its standing when it starts again"
    mirror = f"--upstream {relay} --dir DIR --host ADDRESS --trusted_key {trusted}"
    yield f"relays elsewhere: python -m sharding.relay {mirror}{signing}"
    if topology.server_keys:
        yield f"validators elsewhere: python -m rl.validator serve --workdir DIR --weights {relay} --host ADDRESS{signing}{code}"
        yield f"with a DIR that has a copy of {workdir / 'config.json'}"
        yield (
            "a server, relay, or validator signs in with a FILE whose key was in topology.server_keys when this run started; "
            "python -m rl.validator key --key FILE makes FILE, and prints its key"
        )


def server_command(
    experiment: experiment_lib.Experiment, workdir: pathlib.Path, weights: pathlib.Path, name: str = assembly.SERVER
) -> list[str]:
    """Returns the arguments of `python -m` that start the inference server `name` of a run on its published weights."""
    command = ["inference.serve", "--weights", str(weights), "--port", "0"]
    if key := run_directory.trusted_key(workdir):
        command += ["--weights_key", key]
    if experiment.server_mesh:
        command += ["--mesh", ",".join(f"{axis}={size}" for axis, size in experiment.server_mesh.items())]
    if steps := experiment.config.profile.steps:
        command += ["--profile", str(workdir / "profile" / name), "--profile_steps", *map(str, steps)]
    return command


def _begin(start: Callable, name: str, command: list[str], workdir: pathlib.Path):
    """Starts a child process that will write its URL to a file. Returns (the child, the file)."""
    file = run_directory.logs(workdir).path / f"{name}.address"
    file.unlink(missing_ok=True)
    return start(name, [*command, "--address_file", str(file)]), file


def _address(child: child_process.ChildProcess, file: pathlib.Path, timeout_s: float) -> str:
    """Waits for the file with the URL of a child process, which is returned. Raises ValueError if it ends, or needs `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not file.exists():
        if child.process.poll() is not None:
            raise ValueError(child.obituary())
        if time.monotonic() > deadline_s:
            found = f"the {child.name} process did not start in {timeout_s:.0f} s (topology.patience_s)"
            raise ValueError(f"{found}; read its log, {child.log}, or raise the field")
        time.sleep(0.02)
    return file.read_text()
