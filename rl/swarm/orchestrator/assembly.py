"""Assembles the orchestrator of a run with its validator, ledger, and keys, for the learner's process or one of its own."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment as experiment_lib
from rl.experiment import layout
from rl.experiment import workdir as run_directory
from rl.protocol import task_schedule
from rl.protocol.ledger import ledger as ledger_lib
from rl.protocol.ledger import run_ledger
from rl.swarm.orchestrator import orchestrator
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks, evidence_log, run_bands, verifier
from sharding.mesh import mesh as mesh_lib
from sharding.system import secret_file

_config: Any = jax.config  # defines its attributes at run time
SERVER = "server"  # the name of the inference server of a local run


def make(
    experiment: experiment_lib.Experiment,
    workdir: pathlib.Path,
    weights: pathlib.Path | str,
    stack: contextlib.ExitStack,
    on_wait: Callable[[str], None],
    num_hosts: int,
    known: dict | None,
    ledger: run_ledger.RunLedger | None,
) -> orchestrator.Orchestrator:
    """Returns the orchestrator of a run with the validator in this process; neither serves yet.

    `weights` is the root of the published versions, `known` the saved state of the orchestrator (None: a new run), and `num_hosts` the
    number of the learner's hosts. `on_wait` gets lines for people. Leaving `stack` ends the scorers.
    """
    config, key = experiment.config, run_directory.signing_key(workdir)
    errors: list[str] = []  # of scorers

    def on_error(line: str) -> None:
        errors.append(line)
        on_wait(line)

    rules = verifier.rules_of(config, experiment.tokenizer, on_error, stack, key.worker)
    own_servers = []
    num_parts = num_hosts if layout.is_colocated(config) else 1  # hosts that have a server and workers of this run
    if config.topology.mode != "remote":
        own_servers = [rollout_lib.WorkerKey.load(server_key(workdir, host)).worker for host in range(num_parts)]
    server_keys = [*config.topology.server_keys, *own_servers]
    files = [file for host in range(num_parts) for file in worker_keys(config, workdir, host)]
    own_workers = [rollout_lib.WorkerKey.load(file).worker for file in files]
    own = {*own_workers, *own_servers}
    bands = run_bands.RunBands.of(config, workdir, own=own, on_note=on_wait)

    def on_flagged(node: str, line: str) -> None:
        validator_is = f"{config.model.dtype} on {jax.devices()[0].device_kind}, jax {jax.__version__}"
        on_wait(f"{line}; the validator computes in {validator_is}; {rollouts.nodes.numerics()}")
        rollouts.doubt(node)

    options = {"servers": server_keys, "own": own, "on_flagged": on_flagged}
    evidence = evidence_log.EvidenceLog.of(config, bands.bands, convicts=bands.convicts, **options)
    # A resumed run makes late groups of earlier steps again.
    num_kept = 0 if task_schedule.is_fixed(config.rl) else task_schedule.num_open_steps(config)
    keep = min(4, config.rl.max_lag + 2)  # open batches name max_lag + 1 versions
    params = verifier.published(str(weights), keep=keep, key=run_directory.trusted_key(workdir))
    validator = verifier.Verifier(experiment.model, params, rules, evidence, bands)
    rollouts = orchestrator.Orchestrator(
        config,
        workdir,
        credit=experiment.credit,
        key=key,
        verdicts=_verdicts(config.trust, validator, key, on_wait, num_hosts),
        # Submissions are checked for fields and signatures when they arrive.
        check_group_without_weights=functools.partial(validator.check_group_without_weights, is_signed=True),
        evidence=lambda step: evidence.state(step - num_kept),
        on_verified=evidence.add_verified,
        secret=run_directory.secret(workdir, config.seed),
        invited=own_workers,
        is_measuring=lambda: not config.trust.validators and bands.is_measuring,
        stake=_stakes(config.trust.stake_ledger, stack),
        ledger=ledger,
        server_keys=server_keys,
        on_wait=on_wait,
        first_error=lambda: next(iter(errors), ""),
    )
    if layout.is_colocated(config):
        rollouts.nodes.invite(server_keys)
    if ledger:
        ledger.on_failure = rollouts.fail
    if known:
        evidence.restore(**known["evidence"])
    return rollouts


def serve(rollouts: orchestrator.Orchestrator, config, workdir: pathlib.Path, stack: contextlib.ExitStack) -> str:
    """Serves an orchestrator to nodes elsewhere until `stack` ends; returns its URL. Static servers get their policies from it."""
    topology = config.topology
    token = secret_file.read_or_create(token_file(config, workdir))
    for server, control in zip(topology.servers, topology.control_servers, strict=True):
        rollouts.nodes.add(server.rstrip("/"), control, token)
    url = rollouts.serve()
    stack.callback(rollouts.close)
    return url


def token_file(config, workdir: pathlib.Path) -> str:
    """Returns the file of the token of all control listeners of a run."""
    return config.topology.control_token_file or str(workdir / "control.token")


def server_key(workdir: pathlib.Path, host: int = 0) -> pathlib.Path:
    """Returns the key file of the server that host `host` of the learner starts."""
    return run_directory.worker_key_file(workdir, f"{SERVER}{host or ''}")


def worker_keys(config, workdir: pathlib.Path, host: int = 0) -> list[pathlib.Path]:
    """Returns the key files of the workers that host `host` of the learner starts."""
    num = 0 if config.topology.mode == "remote" else config.topology.num_workers
    return [run_directory.worker_key_file(workdir, f"worker{i}") for i in range(host * num, host * num + num)]


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
    trust, validator: verifier.Verifier, key: rollout_lib.WorkerKey, on_fault, num_hosts: int
) -> verdict_collector.VerdictCollector:
    """Returns the collector of verdicts on quarantined groups, from the processes in `trust.validators`, or this one."""
    limits = {"quorum": trust.quorum, "verdict_s": trust.verdict_s}
    replay = None if trust.validators else _on_device(trust.device, validator.check_groups_with_weights, num_hosts)
    return verdict_collector.VerdictCollector(key, replay, validators=trust.validators, on_fault=on_fault, **limits)


def check(config, num_hosts: int) -> None:
    """Raises ValueError if the validator in this process needs the CPU for its replays and JAX_PLATFORMS leaves the CPU out.

    `num_hosts` is the number of the learner's hosts: with several, trust.device = 'auto' replays on the CPU.
    """
    is_here = not (config.trust.validators or config.topology.orchestrator)
    if is_here and not _is_accelerated(config.trust.device, num_hosts):
        try:
            jax.local_devices(backend="cpu")
        except RuntimeError as error:
            platforms = _config.jax_platforms
            found = f"trust.device = {config.trust.device!r} replays on the CPU, which JAX_PLATFORMS = {platforms} leaves out"
            raise ValueError(f"{found}; set JAX_PLATFORMS={platforms},cpu, or trust.device = 'accelerator'") from error


def _is_accelerated(device: str, num_hosts: int) -> bool:
    return device == "accelerator" or (device == "auto" and num_hosts == 1)


def _on_device(device: str, check: verdict_collector.Replay, num_hosts: int) -> verdict_collector.Replay:
    """Returns the replay `check` if `device` (trust.device) allows the accelerator, else a version that runs on this host's CPU."""
    if _is_accelerated(device, num_hosts):
        return check
    cpu = jax.local_devices(backend="cpu")[0]
    mesh = mesh_lib.create({}, devices=[cpu])  # the model chooses its kernels by the mesh

    def check_on_cpu(groups: Sequence[Sequence[rollout_lib.Rollout]]) -> list[checks.Verdict]:
        with jax.default_device(cpu), jax.set_mesh(mesh):
            return check(groups)

    return check_on_cpu
