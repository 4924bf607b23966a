"""The commands of a swarm on one machine: a learner in remote mode, relays below its own, servers, workers, and validators.

Ports are chosen once, and keys kept in WORKDIR/keys, so that a node that starts again is the same node. Under test, each
connection runs over a link that can be broken (rl/swarm/tcp_link.py).
"""

import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import Callable, Sequence

from inference.rollouts import rollout as rollout_lib
from rl import launch
from rl.experiment import experiment as experiment_lib
from rl.experiment import workdir as run_directory
from rl.swarm import supervisor

Connect = Callable[[frozenset[str], int], str]  # (nodes at both ends, port) -> URL of a connection to it
IMPOSTOR = "impostor"


@dataclasses.dataclass(frozen=True)
class Counts:
    """The number of nodes of each role besides the learner."""

    relays: int
    servers: int
    workers: int
    validators: int

    def names(self, role: str) -> list[str]:
        """Returns the names of the nodes of a role, such as server0 and server1."""
        return [f"{role}{i}" for i in range(getattr(self, f"{role}s"))]


@dataclasses.dataclass(frozen=True)
class Swarm:
    """The processes of a swarm. `servers` has the URL of each server, `impostor` is the worker of a fault "forge"."""

    specs: list[supervisor.Spec]
    impostor: supervisor.Spec
    servers: dict[str, str]
    mirrors: dict[str, pathlib.Path]


def direct(ends: frozenset[str], port: int) -> str:
    """Returns the URL of a port of this machine: a connection without a link."""
    return f"http://127.0.0.1:{port}"


def plan(
    experiment: experiment_lib.Experiment,
    workdir: pathlib.Path,
    counts: Counts,
    config_flags: Sequence[str],
    *,
    is_chain: bool = False,
    connect: Connect = direct,
) -> Swarm:
    """Returns the processes of a swarm that trains in `workdir`, which has the config and the run's key.

    `config_flags` are those of the user. Relays read from the learner's, or with `is_chain` each from the one before.
    """
    relays, servers, workers, validators = (counts.names(f.name[:-1]) for f in dataclasses.fields(counts))
    names = [*relays, *servers, *workers, *validators, IMPOSTOR]
    ports = dict(zip(["orchestrator", "weights", *names], _free_ports(len(names) + 2), strict=True))
    keys = {name: run_directory.worker_key_file(workdir, name) for name in names}
    run, mirrors = run_directory.signing_key(workdir).worker, {name: workdir / "relays" / name for name in relays}
    trusted, sandbox = run_directory.root_file(workdir) or run, experiment.config.trust.sandbox
    urls = {name: connect(frozenset({name}), ports[name]) for name in (*relays, *servers, *validators)}
    specs = []

    def add(name: str, role: str, command: Sequence[str], after: str, *options: str) -> supervisor.Spec:
        orchestrator = connect(frozenset({name, "learner"}), ports["orchestrator"])
        sign_in = ["--orchestrator", orchestrator, "--run", run, "--key", str(keys[name])]
        specs.append(supervisor.Spec(name, role, [*command, *sign_in, *options], ports[after]))
        return specs[-1]

    first = source = connect(frozenset({"learner"}), ports["weights"])
    after = "weights"
    for name in relays:
        files = ["--dir", str(mirrors[name]), "--port", str(ports[name]), "--trusted_key", trusted]
        add(name, "relay", ["sharding.relay", "--upstream", source], after, *files)
        source, after = (urls[name], name) if is_chain else (first, "weights")
    sources, after = [urls[name] for name in relays] or [first], (relays or ["weights"])[-1]
    for name in servers:
        command = [*launch.server_command(experiment, workdir, pathlib.Path("")), "--weights", *sources]
        add(name, "server", command, after, "--port", str(ports[name]), "--url", urls[name])
    for name in validators:
        files = ["--workdir", str(workdir), "--weights", sources[0], "--port", str(ports[name])]
        add(name, "validator", ["rl.validator", "serve"], after, *files)
    for name in workers:
        add(name, "worker", ["rl.worker"], "orchestrator", "--sandbox", sandbox)
    impostor = add(IMPOSTOR, "worker", ["rl.swarm.cheats", "forge"], "orchestrator", "--sandbox", sandbox)
    public = {name: rollout_lib.WorkerKey.load(file).worker for name, file in keys.items()}
    fields = {
        "topology.mode": "remote",
        "topology.port": ports["orchestrator"],
        "topology.relay_port": ports["weights"],
        "topology.server_keys": tuple(public[name] for name in (*relays, *servers)),
        "topology.workers": tuple(public[name] for name in workers),
        "trust.admission": "open",
        "trust.validators": tuple(f"{urls[name]}#{public[name]}" for name in validators),
    }
    learner = ["rl.train", *config_flags, f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in fields.items())]
    specs = [supervisor.Spec("learner", "learner", learner), *specs[:-1]]
    return Swarm(specs, impostor, {name: direct(frozenset(), ports[name]) for name in servers}, mirrors)


def _free_ports(count: int) -> list[int]:
    """Returns free ports of this machine. They are free again when this returns, so another process may take one."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in socks]
