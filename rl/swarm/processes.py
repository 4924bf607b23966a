"""The commands of a swarm on one machine: a learner in remote mode, relays below its own, servers, workers, and validators.

The orchestrator is part of the learner's process, or apart from it in one of its own.

Ports are chosen once, and keys kept in WORKDIR/keys, so that a node that starts again is the same node.
"""

import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import Callable, Mapping, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment as experiment_lib
from rl.experiment import workdir as run_directory
from rl.swarm import rollout_system, supervisor

ROLES = ("relay", "server", "worker", "validator")  # of which there are several nodes
Connect = Callable[[frozenset[str], int], str]  # (nodes at both ends, port) -> URL of a connection to it


@dataclasses.dataclass(frozen=True)
class Swarm:
    """The processes of a swarm. `keys` has the public key of each node, `orchestrator` is its URL for workers."""

    specs: list[supervisor.Spec]
    orchestrator: str
    keys: dict[str, str]
    metrics: dict[str, str]  # HOST:PORT of /metrics and /health of each node


def direct(ends: frozenset[str], port: int) -> str:
    """Returns the URL of a port of this machine, for a connection without a relay or tunnel in between."""
    return f"http://127.0.0.1:{port}"


def plan(
    experiment: experiment_lib.Experiment,
    workdir: pathlib.Path,
    roles: Mapping[str, str],
    config_flags: Sequence[str],
    *,
    is_chain: bool = False,
    connect: Connect = direct,
    ports: Mapping[str, int] | None = None,
    listen: str = "",
) -> Swarm:
    """Returns the processes of a swarm that trains in `workdir`, which has the config and the run's key.

    `roles` has the role of each node by its name; if there is an orchestrator, it has a process of its own. `config_flags` are the
    user's flags about the config. Relays read from the learner's relay; with `is_chain`, each reads from the relay before it. `ports`
    has a port for each node and for "orchestrator", "weights", "control", and "metrics" (None: free ones of this machine), and `listen`
    the listening address of all ("": this machine alone). `connect(nodes at both ends, port)` returns the URL of a connection.
    """
    relays, servers, workers, validators = ([name for name in roles if roles[name] == role] for role in ROLES)
    names = [*relays, *servers, *workers, *validators]
    ports = ports or _free_ports("orchestrator", "weights", "control", "metrics", "learner", *names)
    at = ["--host", listen] if listen else []
    keys = {name: run_directory.worker_key_file(workdir, name) for name in names}
    run = run_directory.signing_key(workdir).worker
    trusted, sandbox = run_directory.root_file(workdir) or run, experiment.config.trust.sandbox
    code = experiment_lib.code_options(experiment)
    urls = {name: connect(frozenset({name}), ports[name]) for name in (*relays, *servers, *validators)}
    host = "orchestrator" if "orchestrator" in roles else "learner"  # of the orchestrator
    first, specs = connect(frozenset({"learner"}), ports["weights"]), []

    def add(name: str, command: Sequence[str], after: str, *options: str) -> None:
        orchestrator = connect(frozenset({name, host}), ports["orchestrator"])
        sign_in = ["--orchestrator", orchestrator, "--run", run, "--key", str(keys[name])]
        specs.append(supervisor.Spec(name, roles[name], [*command, *sign_in, *options], ports[after]))

    source, after = first, "weights"
    for name in relays:
        files = ["--dir", str(workdir / "relays" / name), "--port", str(ports[name]), "--trusted_key", trusted]
        files += ["--keep", str(experiment.num_kept_versions), *at]
        add(name, ["sharding.relay", "--upstream", source], after, *files)
        source, after = (urls[name], name) if is_chain else (first, "weights")
    sources, after = [urls[name] for name in relays] or [first], (relays or ["weights"])[-1]
    for name in servers:
        command = [*rollout_system.server_command(experiment, workdir, pathlib.Path(""), name), "--weights", *sources]
        add(name, command, after, "--port", str(ports[name]), "--url", urls[name], *at)
    for name in validators:
        files = ["--workdir", str(workdir), "--weights", sources[0], "--port", str(ports[name]), *at]
        add(name, ["rl.validator", "serve"], after, *files, *code)
    own = ("--sandbox", sandbox, *code)
    metrics = {name: f"{listen or '127.0.0.1'}:{ports[name]}" for name in roles}
    if "orchestrator" in metrics:  # apart: its other port is for workers
        metrics["orchestrator"] = f"127.0.0.1:{ports['metrics']}"
    for name in workers:
        add(name, ["rl.worker"], "orchestrator", *own, "--metrics", metrics[name])
    public = {name: rollout_lib.WorkerKey.load(file).worker for name, file in keys.items()}
    fields = {
        "topology.mode": "remote",
        "topology.port": ports["orchestrator"],
        "topology.relay_port": ports["weights"],
        "topology.metrics": metrics["learner"],
        "topology.server_keys": tuple(public[name] for name in (*relays, *servers)),
        "topology.workers": tuple(public[name] for name in workers),
        "trust.validators": tuple(f"{urls[name]}#{public[name]}" for name in validators),
    }
    fields |= {"topology.host": listen, "topology.relay_host": listen} if listen else {}
    options = [*config_flags, f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in fields.items())]
    own = _learner(options, ports["control"], connect, metrics.get("orchestrator", ""))
    return Swarm([*own, *specs], direct(frozenset(), ports["orchestrator"]), public, metrics)


def _learner(options: Sequence[str], port: int, connect: Connect, metrics: str) -> list[supervisor.Spec]:
    """Returns the learner, and before it the orchestrator if that is apart: if it has an address for its own `metrics`.

    Then `port` is that of its control listener.
    """
    if not metrics:
        return [supervisor.Spec("learner", "learner", ["rl.train", *options])]
    control = f"--config.topology.orchestrator={connect(frozenset({'learner', 'orchestrator'}), port)}"
    orchestrator = ["rl.swarm.orchestrator", *options, f"--control=127.0.0.1:{port}", f"--metrics={metrics}"]
    learner = supervisor.Spec("learner", "learner", ["rl.train", *options, control], port)
    return [supervisor.Spec("orchestrator", "orchestrator", orchestrator), learner]


def _free_ports(*names: str) -> dict[str, int]:
    """Returns free ports of this machine by name. They are free again when this returns, so another process may take one."""
    with contextlib.ExitStack() as stack:
        socks = {name: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for name in names}
        return {name: sock.getsockname()[1] for name, sock in socks.items()}
