"""Starts the rollout system of a run: orchestrator and validator here, inference server and workers as child processes.

1. The validator and the orchestrator run in this process, on the first host of several. With several hosts the validator replays
   on the CPU, since a program on one of their chips would block all of them.
2. The server starts on the published weights and writes its address to a file. Workers start with the orchestrator's URL.
   With `topology.mode = "remote"`, a relay of the weights starts instead, and the run prints the commands to start elsewhere.
3. The standard input of a child is a pipe from this process: children stop when this process ends, however suddenly.
   A child that ends early ends the run with the last lines of its output.
"""

import collections
import contextlib
import dataclasses
import datetime
import itertools
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import jax

from inference import client
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment as experiment_lib
from rl.experiment import workdir as run_directory
from rl.ledger import ledger as ledger_lib
from rl.ledger import run_ledger
from rl.orchestrator import orchestrator, verdict_collector
from rl.verification import checks, evidence_log, verifier
from sharding import broadcast
from sharding import mesh as mesh_lib
from sharding.system import secret_file, sockets

START_TIMEOUT_S = 600.0
NOTICE_S = 30.0  # between two notices of a run that waits for servers elsewhere


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

        def start(name: str, command: list[str]) -> _Child:
            return stack.enter_context(_Child(name, command, workdir, rollouts.fail))

        if experiment.config.topology.mode == "local":
            _start_here(experiment, workdir, weights, rollouts, start, stack)
        else:
            _await_elsewhere(experiment, workdir, weights, rollouts, start, stack, on_wait)
        rollouts.publish(version, broadcast.read_manifest(weights, version).epoch)
        yield rollouts


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
    evidence = evidence_log.EvidenceLog(bands, count_once=True)
    keep = min(4, config.rl.max_lag + 2)  # open batches name max_lag + 1 versions
    params = verifier.published(str(weights), keep=keep, key=run_directory.trusted_key(workdir))
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
        on_wait=on_wait,
    )
    if ledger:
        ledger.on_failure = rollouts.fail
    if known:
        evidence.restore(**known["evidence"])
    return rollouts


def _worker_keys(config, workdir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the key files of the workers that this process starts."""
    num_workers = config.topology.num_workers if config.topology.mode == "local" else 0
    return [run_directory.worker_key_file(workdir, f"worker{i}") for i in range(num_workers)]


def _start_here(experiment, workdir, weights, rollouts, start: Callable, stack: contextlib.ExitStack) -> None:
    """Serves the orchestrator, and starts an inference server and workers on this machine."""
    url = rollouts.serve()
    stack.callback(rollouts.close)
    control = stack.enter_context(sockets.private_path())
    command = [*server_command(experiment, workdir, weights), "--control", control]
    rollouts.servers = [_address(start, "server", command, workdir)]
    rollouts.control = client.Control([f"unix:{control}"])
    run = run_directory.signing_key(workdir).worker
    options = ["--orchestrator", url, "--run", run, "--sandbox", experiment.config.trust.sandbox]
    for file in _worker_keys(experiment.config, workdir):
        start(file.stem, ["rl.worker", *options, "--key", str(file)])


def _await_elsewhere(
    experiment, workdir, weights, rollouts, start: Callable, stack: contextlib.ExitStack, on_wait: Callable[[str], None]
) -> None:
    """Serves the orchestrator, starts a relay of the weights, and waits for servers, after a line for people on each command."""
    topology, trusted = experiment.config.topology, run_directory.trusted_key(workdir)
    assert trusted is not None  # the orchestrator has its key
    # Before `serve`: workers that are already running ask for them immediately.
    rollouts.servers = topology.servers
    token_file = topology.control_token_file or str(workdir / "control.token")
    rollouts.control = client.Control(topology.control_servers, token=secret_file.read_or_create(token_file))
    url = rollouts.serve()
    stack.callback(rollouts.close)
    command = ["sharding.relay", "--upstream", str(weights), "--host", topology.relay_host]
    command += ["--port", str(topology.relay_port), "--trusted_key", trusted]
    options = f"--weights {_address(start, 'relay', command, workdir)} --weights_key {trusted}"
    if experiment.engine.routed_experts:
        options += " --routed_experts"
    options += " --port PORT --control HOST:PORT --control_token_file FILE"
    on_wait(f"servers elsewhere: python -m inference.serve {options}")
    on_wait(f"with HOST:PORT of topology.control_servers, and FILE a copy of {token_file}, which no worker needs")
    run = run_directory.signing_key(workdir).worker
    on_wait(f"workers elsewhere: python -m rl.worker --orchestrator {url} --run {run}")
    _await_servers(topology.servers, on_wait)


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
    if key := run_directory.trusted_key(workdir):
        command += ["--weights_key", key]
    for name in ("num_slots", "max_model_len", "prefill_batch", "prefill_chunk", "steps_per_call"):
        command += [f"--{name}", str(getattr(engine, name))]
    if engine.routed_experts:
        command += ["--routed_experts"]
    if experiment.server_mesh:
        command += ["--mesh", ",".join(f"{axis}={size}" for axis, size in experiment.server_mesh.items())]
    return command


def _await_servers(urls: Sequence[str], on_wait: Callable[[str], None]) -> None:
    """Blocks until each server, which people start by hand, accepts connections. Raises ValueError after `START_TIMEOUT_S`."""
    begun_s = noticed_s = time.monotonic()
    waiting = list(urls)
    while waiting:
        parts = urllib.parse.urlsplit(waiting[0])
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
            del waiting[0]
        except OSError as error:
            now_s = time.monotonic()
            if now_s > begun_s + START_TIMEOUT_S:
                missing = f"no inference server at {waiting[0]} within {START_TIMEOUT_S:.0f} s ({error})"
                raise ValueError(f"{missing}. Start it, or correct topology.servers") from error
            if now_s > noticed_s + NOTICE_S:
                on_wait(f"waiting for the inference server at {waiting[0]}: {error}")
                noticed_s = now_s
            time.sleep(0.2)


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


class _Child(contextlib.AbstractContextManager):
    """A child process `python -m COMMAND` during a `with` block, its output in a log. `on_death` gets the error if it ends early."""

    def __init__(self, name: str, command: list[str], workdir: pathlib.Path, on_death: Callable[[Exception], None]):
        self.name, self.log, self._on_death = name, workdir / "logs" / f"{name}.log", on_death
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command, "--exit_with_parent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=experiment_lib.ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._is_stopping = False
        self._last: collections.deque[str] = collections.deque(maxlen=3)
        log = open(self.log, "ab")  # after the lines of earlier starts; closed by the thread
        start = f"==== start: python -m {shlex.join(command)}".encode()
        self._copier = threading.Thread(target=self._copy, args=(start, log), name=f"log-{name}", daemon=True)
        self._copier.start()
        threading.Thread(target=self._watch, name=f"watch-{name}", daemon=True).start()

    def obituary(self) -> str:
        """Returns the error message for a child process that ended early: exit code, last lines of output, log."""
        self._copier.join(1.0)  # not longer: its own children may keep the pipe open
        tail = " | ".join(self._last) or "it printed nothing"
        return f"the {self.name} process ended with code {self.process.returncode}: {tail}. Read its log: {self.log}"

    def _copy(self, start: bytes, log: BinaryIO) -> None:
        assert self.process.stdout is not None
        with log, self.process.stdout:
            for line in itertools.chain([start], self.process.stdout):  # until all writers, such as its children, end
                now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
                log.write(now.encode() + b" " + line.rstrip(b"\r\n") + b"\n")
                log.flush()
                if line is not start and line.strip():
                    self._last.append(line.decode(errors="replace").strip())

    def _watch(self) -> None:
        self.process.wait()
        if not self._is_stopping:
            self._on_death(ValueError(self.obituary()))

    def __exit__(self, *_) -> None:
        self._is_stopping = True
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        self.process.kill()
        self.process.wait()
        self._copier.join(1.0)
