"""Starts the rollout system of a run: orchestrator and validator here, inference server and workers as child processes.

1. The validator and the orchestrator run in this process, on the first host of several. With several hosts the validator replays
   on the CPU, since a program on one of their chips would block all of them.
2. The server starts on the published weights and writes its address to a file. Workers start with the orchestrator's URL.
   With `topology.mode = "remote"`, a relay of the weights starts instead, and the run prints the commands to start elsewhere.
3. The standard input of a child is a pipe from this process: children stop when this process ends, however suddenly.
   A child that ends early ends the run with the last lines of its output.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment as experiment_lib
from rl.experiment import workdir as run_directory
from rl.ledger import ledger as ledger_lib
from rl.ledger import run_ledger
from rl.orchestrator import nodes, orchestrator, server_records, verdict_collector
from rl.protocol import timeline
from rl.verification import checks, evidence_log, verifier
from sharding import broadcast
from sharding import mesh as mesh_lib
from sharding.system import child_process, secret_file, sockets

START_TIMEOUT_S = 600.0
SERVER = "server"  # the name of the inference server of a local run


def check(experiment: experiment_lib.Experiment, num_hosts: int) -> None:
    """Raises ValueError if this config would start the inference server on chips that a learner of several hosts uses."""
    chip = jax.default_backend()
    if num_hosts > 1 and experiment.config.topology.mode == "local" and chip != "cpu":
        found = f"topology.mode = 'local' would start the inference server on this host's {chip}s"
        remedy = "Set topology.mode = 'remote' and topology.servers"
        raise ValueError(f"{found}, but the learner of {num_hosts} hosts uses them. {remedy}")


@contextlib.contextmanager
def start_rollout_system(
    experiment: experiment_lib.Experiment,
    workdir: pathlib.Path,
    weights: pathlib.Path,
    version: int,
    on_wait: Callable[[str], None],
    num_hosts: int = 1,
    known: dict | None = None,
    ledger: run_ledger.RunLedger | None = None,
) -> Iterator[orchestrator.Orchestrator]:
    """Starts all processes that generate and check rollouts; yields the orchestrator and stops them at the end of the block.

    The first policy is `version`, already published in the directory `weights`; `known` is the `Orchestrator.state` saved in its
    checkpoint, if any. `on_wait` receives lines for people during waits. With `num_hosts` learner hosts, this runs on the first.
    Events are recorded in `ledger`, if there is one.
    """
    with contextlib.ExitStack() as stack:
        rollouts = _orchestrator(experiment, workdir, weights, stack, on_wait, num_hosts, known, ledger)
        rollouts.resume(version, known)

        def start(name: str, command: list[str]) -> child_process.ChildProcess:
            return stack.enter_context(child_process.ChildProcess(name, command, workdir / "logs", rollouts.fail))

        if experiment.config.topology.mode == "local":
            _start_here(experiment, workdir, weights, rollouts, start, stack)
        else:
            _say_elsewhere(experiment, workdir, weights, rollouts, start, stack, on_wait)
        entry = broadcast.entry_of(weights, version, key=_trusted_key(workdir))
        if entry is None:
            raise ValueError(
                f"version {version} under {weights} is not in the signed head; publish it before the start"
            )
        rollouts.publish(timeline.Policy(entry.epoch, version, entry.sha256))
        yield rollouts
        if experiment.config.topology.mode == "remote":
            rollouts.end()


def _orchestrator(
    experiment: experiment_lib.Experiment,
    workdir: pathlib.Path,
    weights: pathlib.Path,
    stack: contextlib.ExitStack,
    on_wait: Callable[[str], None],
    num_hosts: int,
    known: dict | None,
    ledger: run_ledger.RunLedger | None,
) -> orchestrator.Orchestrator:
    """Returns the orchestrator of a run with the validator in this process; neither serves yet."""
    config, key = experiment.config, run_directory.signing_key(workdir)
    rules, bands = verifier.rules_of(config, experiment.tokenizer, on_wait, stack), None
    if file := verifier.bands_file(config):
        tolerance, bands = verifier.load_bands(file)
        rules = dataclasses.replace(rules, tolerance=tolerance)
    rates = {"min_rate": config.trust.min_rate, "invited_rate": config.trust.invited_rate}
    server_keys = list(config.topology.server_keys)
    if config.topology.mode == "local":
        server_keys.append(rollout_lib.WorkerKey.load(run_directory.worker_key_file(workdir, SERVER)).worker)
    records = server_records.ServerRecords(server_keys, config.trust.max_attempts, **rates)
    evidence = evidence_log.EvidenceLog(bands, count_once=True, servers=records.keys)
    keep = min(4, config.rl.max_lag + 2)  # open batches name max_lag + 1 versions
    params = verifier.published(str(weights), keep=keep, key=_trusted_key(workdir))
    validator = verifier.Validator(experiment.model, params, rules, evidence)
    rollouts = orchestrator.Orchestrator(
        config,
        workdir,
        credit=experiment.credit,
        key=key,
        verdicts=_verdicts(config.trust, validator, key, on_wait, num_hosts),
        check_group_without_weights=validator.check_group_without_weights,
        evidence=evidence.state,
        on_verified=evidence.add_verified,
        secret=run_directory.secret(workdir, config.seed),
        invited=[rollout_lib.WorkerKey.load(file).worker for file in _worker_keys(config, workdir)],
        stake=_stakes(config.trust.stake_ledger, stack),
        ledger=ledger,
        records=records,
        on_wait=on_wait,
    )
    if ledger:
        ledger.on_failure = rollouts.fail
    if known:
        evidence.restore(**known["evidence"])
    return rollouts


def _trusted_key(workdir: pathlib.Path) -> str:
    """Returns the root file of a run that has one, else its public key: that which signs its published weights."""
    return run_directory.root_file(workdir) or run_directory.signing_key(workdir).worker


def _worker_keys(config, workdir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the key files of the workers that this process starts."""
    num_workers = config.topology.num_workers if config.topology.mode == "local" else 0
    return [run_directory.worker_key_file(workdir, f"worker{i}") for i in range(num_workers)]


def _start_here(experiment, workdir, weights, rollouts, start: Callable, stack: contextlib.ExitStack) -> None:
    """Serves the orchestrator, and starts an inference server and workers on this machine."""
    url = rollouts.serve()
    stack.callback(rollouts.close)
    control = stack.enter_context(sockets.private_path())
    file = run_directory.worker_key_file(workdir, SERVER)
    command = [*server_command(experiment, workdir, weights), "--control", control, "--key", str(file)]
    server, key = _address(start, SERVER, command, workdir), rollout_lib.WorkerKey.load(file).worker
    rollouts.nodes.add(nodes.StaticServer(server, f"unix:{control}", key=key))
    run = run_directory.signing_key(workdir).worker
    options = ["--orchestrator", url, "--run", run, "--sandbox", experiment.config.trust.sandbox]
    for file in _worker_keys(experiment.config, workdir):
        start(file.stem, ["rl.worker", *options, "--key", str(file)])


def _say_elsewhere(
    experiment, workdir, weights, rollouts, start: Callable, stack: contextlib.ExitStack, on_wait: Callable[[str], None]
) -> None:
    """Serves the orchestrator and starts a relay of the weights, with a line for people on each command to run elsewhere."""
    topology, trusted = experiment.config.topology, _trusted_key(workdir)
    token_file = topology.control_token_file or str(workdir / "control.token")
    token = secret_file.read_or_create(token_file)
    for server, control in zip(topology.servers, topology.control_servers, strict=True):
        rollouts.nodes.add(nodes.StaticServer(server.rstrip("/"), control, token))
    url = rollouts.serve()
    stack.callback(rollouts.close)
    command = ["sharding.relay", "--upstream", str(weights), "--host", topology.relay_host]
    command += ["--port", str(topology.relay_port), "--trusted_key", trusted]
    run = run_directory.signing_key(workdir).worker
    options = f"--weights {_address(start, 'relay', command, workdir)} --weights_key {trusted} --port PORT"
    if topology.server_keys:
        signing = f"--orchestrator {url} --run {run} --key FILE --url URL"
        on_wait(f"servers elsewhere: python -m inference.serve {options} {signing}")
        on_wait("with the FILE of a key in topology.server_keys, and the URL at which workers reach the server")
    if topology.servers:
        control = "--control HOST:PORT --control_token_file FILE"
        on_wait(f"servers elsewhere: python -m inference.serve {options} {control}")
        on_wait(f"with HOST:PORT of topology.control_servers, and FILE a copy of {token_file}, which no worker needs")
    on_wait(f"workers elsewhere: python -m rl.worker --orchestrator {url} --run {run}")


def _stakes(file: str, stack: contextlib.ExitStack) -> Callable[[str], int]:
    """Returns the function (public key) -> stake in a ledger file; it is 0 for unknown and ejected keys, and for all without a file."""
    if not file:
        return lambda worker: 0
    ledger = stack.enter_context(ledger_lib.Ledger(file))

    def stake(worker: str) -> int:
        one = ledger.refresh().workers.get(worker)
        return one.stake if one and not one.ejected else 0

    return stake


def _verdicts(
    trust, validator: verifier.Validator, key: rollout_lib.WorkerKey, on_fault, num_hosts: int
) -> verdict_collector.VerdictCollector:
    """Returns the collector of verdicts on quarantined groups, from the processes in `trust.validators`, or this one."""
    if not trust.validators:
        replay = _on_device(trust.device, validator.check_groups_with_weights, num_hosts)
        return verdict_collector.VerdictCollector(key, replay, on_fault=on_fault)
    options = dict(validators=trust.validators, quorum=trust.quorum, verdict_s=trust.verdict_s, on_fault=on_fault)
    return verdict_collector.VerdictCollector(key, **options)


def _on_device(device: str, check: verdict_collector.Replay, num_hosts: int) -> verdict_collector.Replay:
    """Returns the replay `check` if `device` (trust.device) allows the accelerator, else a version that runs on this host's CPU."""
    if device == "accelerator" or (device == "auto" and num_hosts == 1):
        return check
    cpu = jax.local_devices(backend="cpu")[0]
    mesh = mesh_lib.create({}, devices=[cpu])  # the model chooses its kernels by the mesh

    def check_on_cpu(groups: Sequence[Sequence[rollout_lib.Rollout]]) -> list[checks.Verdict]:
        with jax.default_device(cpu), jax.set_mesh(mesh):
            return check(groups)

    return check_on_cpu


def server_command(experiment: experiment_lib.Experiment, workdir: pathlib.Path, weights: pathlib.Path) -> list[str]:
    """Returns the arguments of `python -m` that start the inference server of a run on its published weights."""
    engine = experiment.engine
    command = ["inference.serve", "--weights", str(weights), "--port", "0"]
    if key := run_directory.root_file(workdir) or run_directory.public_key(workdir):
        command += ["--weights_key", key]
    for name in ("num_slots", "max_model_len", "prefill_batch", "prefill_chunk", "steps_per_call"):
        command += [f"--{name}", str(getattr(engine, name))]
    if engine.routed_experts:
        command += ["--routed_experts"]
    if experiment.server_mesh:
        command += ["--mesh", ",".join(f"{axis}={size}" for axis, size in experiment.server_mesh.items())]
    return command


def _address(start: Callable, name: str, command: list[str], workdir: pathlib.Path) -> str:
    """Starts a child process and waits for the file with its URL; returns the URL. Raises ValueError if it ends or is too slow."""
    file = workdir / "logs" / f"{name}.address"
    file.unlink(missing_ok=True)
    child = start(name, [*command, "--address_file", str(file)])
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not file.exists():
        if child.process.poll() is not None:
            raise ValueError(child.obituary())
        if time.monotonic() > deadline_s:
            raise ValueError(f"the {name} process did not start in {START_TIMEOUT_S:.0f} s. Read its log: {child.log}")
        time.sleep(0.02)
    return file.read_text()
