"""The rollout side of a run: the orchestrator, and on this machine a rollout server and workers as child processes.

0. The validator and the orchestrator run in our process, on the first host of several. The validator's replays run there alone, on
   weights that it pulls for itself: with several hosts on the CPU, since a program on a chip of theirs would hold up all of them.
1. The server starts on the published weights, compiles, and writes its address to a file.
2. Workers start on the orchestrator's URL.
   With `topology.mode = "remote"` a relay on the published weights starts instead of both; the run says where it is, which key
   signs the weights, and what to start elsewhere, and waits until somebody listens at `topology.servers`.
3. Children hold the read end of a pipe from us as standard input: when we die, however suddenly, they stop.
4. A child that dies takes the run down with the last lines of its log (`<workdir>/logs/`), rather than leave it waiting.
"""

import contextlib
import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence

import jax

from rl.experiment import experiment as experiment_lib
from rl.experiment import workdir as run_directory
from rl.orchestrator import orchestrator
from rl.verification import evidence_log, verifier
from sharding import mesh as mesh_lib

START_TIMEOUT_S = 600.0
NOTICE_S = 30.0  # how often a run that waits for servers elsewhere says so


def check(experiment: experiment_lib.Experiment, num_hosts: int) -> None:
    """ValueError where this rollout side cannot run beside a learner of `num_hosts` hosts."""
    platform = jax.default_backend()
    if num_hosts > 1 and experiment.config.topology.mode == "local" and platform != "cpu":
        raise ValueError(
            f"topology.mode = 'local' would start the rollout server on this host's {platform}s, which hold the learner of "
            f"{num_hosts} hosts; set topology.mode = 'remote' and topology.servers"
        )


@contextlib.contextmanager
def start_rollout_system(
    experiment: experiment_lib.Experiment,
    workdir: pathlib.Path,
    weights: pathlib.Path,
    version: int,
    on_wait: Callable[[str], None],
    num_hosts: int = 1,
    known: dict | None = None,
) -> Iterator[orchestrator.Orchestrator]:
    """Everything that produces and judges rollouts, running, on policy version `version` of the broadcast `weights`.

    With a learner of `num_hosts` hosts, on the first of them. `known`: `Orchestrator.state` of that version's checkpoint.
    """
    config = experiment.config
    rules, bands = verifier.rules_of(config, experiment.tokenizer, on_wait), None
    if config.trust.bands:
        tolerance, bands = verifier.load_bands(config.trust.bands)
        rules = dataclasses.replace(rules, tolerance=tolerance)
    evidence = evidence_log.EvidenceLog(bands, count_once=True)
    checks = verifier.GroupChecks(verifier.Validator(experiment.model, verifier.published(weights), rules, evidence))
    rollouts = orchestrator.Orchestrator(
        config,
        workdir,
        credit=experiment.credit,
        check_with_weights=_replaying_on(config.trust.device, checks.check_with_weights, num_hosts),
        check_without_weights=checks.check_without_weights,
        evidence=evidence.state,
        secret=run_directory.secret(workdir, config.seed),
        on_wait=on_wait,
    )
    if known:
        evidence.restore(known["evidence"])
    rollouts.resume(version, known)
    if config.topology.mode == "remote":
        rollouts.connect(config.topology.servers)  # first: workers that were started before us ask for them at once
    url = rollouts.serve()
    with contextlib.ExitStack() as stack:
        stack.callback(rollouts.close)
        if config.topology.mode == "local":
            rollouts.connect([stack.enter_context(_server(experiment, workdir, weights, rollouts.fail))])
            stack.enter_context(_workers(experiment, workdir, url, rollouts.fail))
        else:
            relay = stack.enter_context(_relay(experiment, workdir, weights, rollouts.fail))
            key = run_directory.signing_key(workdir).worker
            options = f"--weights {relay} --weights_key {key}" + " --routed_experts" * experiment.engine.routed_experts
            on_wait(f"servers elsewhere: python -m inference.serve {options} --port PORT")
            on_wait(f"workers elsewhere: python -m rl.worker --orchestrator {url}")
            _await_servers(config.topology.servers, on_wait)
        rollouts.publish(version)
        yield rollouts


def _replaying_on(device: str, judge: Callable, num_hosts: int) -> Callable:
    """`judge` with its weights and programs on the default accelerator, or on the CPU of this host."""
    if device == "accelerator" or (device == "auto" and num_hosts == 1):
        return judge
    (cpu,) = jax.local_devices(backend="cpu")[:1]
    mesh = mesh_lib.create({}, devices=[cpu])  # by which the model chooses its kernels

    def judge_on_cpu(rollouts):
        with jax.default_device(cpu), jax.set_mesh(mesh):
            return judge(rollouts)

    return judge_on_cpu


@contextlib.contextmanager
def _server(
    experiment: experiment_lib.Experiment, workdir: pathlib.Path, weights: pathlib.Path, on_death: Callable
) -> Iterator[str]:
    """A rollout server on `weights`; gives its URL once it answers."""
    engine = experiment.engine
    command = ["inference.serve", "--weights", str(weights), "--port", "0"]
    if (workdir / "weights.key").exists():
        command += ["--weights_key", run_directory.signing_key(workdir).worker]
    for name in ("num_slots", "max_model_len", "prefill_batch", "prefill_chunk", "steps_per_call"):
        command += [f"--{name}", str(getattr(engine, name))]
    if engine.routed_experts:
        command.append("--routed_experts")
    if experiment.server_mesh:
        command += ["--mesh", ",".join(f"{axis}={size}" for axis, size in experiment.server_mesh.items())]
    with _answering("server", command, workdir, on_death) as url:
        yield url


@contextlib.contextmanager
def _relay(
    experiment: experiment_lib.Experiment, workdir: pathlib.Path, weights: pathlib.Path, on_death: Callable
) -> Iterator[str]:
    """A relay that serves `weights` in place, to servers and to relays below it; gives its URL."""
    topology = experiment.config.topology
    command = ["sharding.relay", "--upstream", str(weights), "--host", topology.relay_host]
    command += ["--port", str(topology.relay_port), "--trusted_key", run_directory.signing_key(workdir).worker]
    with _answering("relay", command, workdir, on_death) as url:
        yield url


def _await_servers(urls: Sequence[str], on_wait: Callable[[str], None]) -> None:
    """Until each accepts connections: people start them with what they have just been told."""
    begun_s = told_s = time.monotonic()
    for url in urls:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"topology.servers has {url!r}, which is no URL such as http://host:8100")
        while True:
            try:
                port = parts.port or (443 if parts.scheme == "https" else 80)
                socket.create_connection((parts.hostname, port), timeout=5).close()
                break
            except OSError as error:
                now_s = time.monotonic()
                if now_s > begun_s + START_TIMEOUT_S:
                    raise ValueError(
                        f"no rollout server at {url} within {START_TIMEOUT_S:.0f} s ({error}); start it, or correct "
                        "topology.servers"
                    ) from error
                if now_s > told_s + NOTICE_S:
                    on_wait(f"waiting for the rollout server at {url}: {error}")
                    told_s = now_s
                time.sleep(0.2)


@contextlib.contextmanager
def _answering(name: str, command: list[str], workdir: pathlib.Path, on_death: Callable) -> Iterator[str]:
    """A child that writes its address to a file once it answers; gives the URL."""
    address_file = workdir / "logs" / f"{name}.address"
    address_file.unlink(missing_ok=True)
    with _child(name, [*command, "--address_file", str(address_file)], workdir, on_death) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address_file.exists():
            if process.poll() is not None:
                raise ValueError(_obituary(name, process, workdir))
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the {name} process did not answer within {START_TIMEOUT_S:.0f} s; see {workdir}/logs/{name}.log"
                )
            time.sleep(0.02)
        yield address_file.read_text()


@contextlib.contextmanager
def _workers(
    experiment: experiment_lib.Experiment, workdir: pathlib.Path, orchestrator: str, on_death: Callable
) -> Iterator[None]:
    """The run's rollout workers, each with a key of its own."""
    with contextlib.ExitStack() as stack:
        for i in range(experiment.config.topology.num_workers):
            name = f"worker{i}"
            key = str(workdir / "logs" / f"{name}.key")
            stack.enter_context(
                _child(name, ["rl.worker", "--orchestrator", orchestrator, "--key", key], workdir, on_death)
            )
        yield


@contextlib.contextmanager
def _child(name: str, command: list[str], workdir: pathlib.Path, on_death: Callable) -> Iterator[subprocess.Popen]:
    logs = workdir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--exit_with_parent"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=experiment_lib.ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        stopping = threading.Event()

        def watch():
            process.wait()
            if not stopping.is_set():
                on_death(ValueError(_obituary(name, process, workdir)))

        threading.Thread(target=watch, name=f"watch-{name}", daemon=True).start()
        try:
            yield process
        finally:
            stopping.set()
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            process.kill()
            process.wait()


def _obituary(name: str, process: subprocess.Popen, workdir: pathlib.Path) -> str:
    log = workdir / "logs" / f"{name}.log"
    tail = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    return f"the {name} process ended with code {process.returncode}: {tail or 'it said nothing'} (log: {log})"
