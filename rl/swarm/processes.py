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


@dataclasses.dataclass(frozen=True)
class Counts:
    """The number of nodes of each role besides the learner."""

    servers: int
    relays: int
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
    names = [*counts.names("relay"), *counts.names("server"), *counts.names("validator")]
    ports = dict(
        zip(["orchestrator", "weights", *names, *(f"{s}-control" for s in names)], _free_ports(), strict=False)
    )
    trusted = run_directory.root_file(workdir) or run_directory.signing_key(workdir).worker
    keys = {
        name: run_directory.worker_key_file(workdir, name)
        for role in ("worker", "validator")
        for name in counts.names(role)
    }
    weights = connect(frozenset({"learner"}), ports["weights"])
    specs, mirrors = [], {name: workdir / "relays" / name for name in counts.names("relay")}
    upstreams, after_port = [weights], ports["weights"]
    for name in counts.names("relay"):
        command = ["sharding.relay", "--upstream", upstreams[-1] if is_chain else weights, "--dir", str(mirrors[name])]
        command += ["--port", str(ports[name]), "--trusted_key", trusted]
        specs.append(supervisor.Spec(name, "relay", command, after_port))
        upstreams.append(connect(frozenset({name}), ports[name]))
        after_port = ports[name] if is_chain else after_port
    sources = upstreams[1:] or upstreams
    token = workdir / "control.token"
    for name in counts.names("server"):
        command = [*launch.server_command(experiment, workdir, pathlib.Path("")), "--weights", *sources]
        command += ["--port", str(ports[name]), "--control", f"127.0.0.1:{ports[f'{name}-control']}"]
        command += ["--control_token_file", str(token)]
        specs.append(
            supervisor.Spec(name, "server", command, ports[counts.names("relay")[-1]] if counts.relays else after_port)
        )
    for name in counts.names("validator"):
        command = [
            "rl.validator",
            "serve",
            "--workdir",
            str(workdir),
            "--weights",
            sources[0],
            "--key",
            str(keys[name]),
        ]
        specs.append(supervisor.Spec(name, "validator", [*command, "--port", str(ports[name])], ports["weights"]))
    run, sandbox = run_directory.signing_key(workdir).worker, experiment.config.trust.sandbox

    def worker(name: str, command: Sequence[str]) -> supervisor.Spec:
        url = connect(frozenset({name, "learner"}), ports["orchestrator"])
        options = ["--orchestrator", url, "--run", run, "--sandbox", sandbox]
        return supervisor.Spec(name, "worker", [*command, *options], ports["orchestrator"])

    specs += [worker(name, ["rl.worker", "--key", str(keys[name])]) for name in counts.names("worker")]
    fields = _topology(workdir, counts, ports, keys, connect)
    command = ["rl.train", *config_flags, f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in fields.items())]
    specs.insert(0, supervisor.Spec("learner", "learner", command))
    impostor = worker("impostor", ["rl.swarm.cheats", "forge"])
    return Swarm(specs, impostor, {name: direct(frozenset(), ports[name]) for name in counts.names("server")}, mirrors)


def _topology(workdir: pathlib.Path, counts: Counts, ports: dict[str, int], keys: dict, connect: Connect) -> dict:
    """Returns the fields of the learner's config that name the other nodes."""
    servers, public = (
        counts.names("server"),
        {name: rollout_lib.WorkerKey.load(file).worker for name, file in keys.items()},
    )
    control = [connect(frozenset({name}), ports[f"{name}-control"]) for name in servers]
    validators = [f"{connect(frozenset({n}), ports[n])}#{public[n]}" for n in counts.names("validator")]
    return {
        "topology.mode": "remote",
        "topology.port": ports["orchestrator"],
        "topology.relay_port": ports["weights"],
        "topology.servers": tuple(connect(frozenset({name}), ports[name]) for name in servers),
        "topology.control_servers": tuple(control),
        "topology.control_token_file": str(workdir / "control.token"),
        "topology.workers": tuple(public[name] for name in counts.names("worker")),
        "trust.admission": "open",
    } | ({"trust.validators": tuple(validators)} if validators else {})


def _free_ports(count: int = 256) -> list[int]:
    """Returns free ports of this machine. They are free again when this returns, so another process may take one."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in socks]
