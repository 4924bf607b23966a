"""A run, its validators, and its ledger are killed at random moments and started again.

The run is `python -m rl.train` with its learner, orchestrator, ledger, and relay. The tests' worker writes its rollouts without a
model, and validators answer by a rule instead of a replay, so that 200 kills take minutes. One more test has the real ones.
"""

import collections
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import fastapi
import httpx
import pytest

from configs import quickstart
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.protocol import verdict as verdict_lib
from rl.validator import routes
from sharding import checkpoint
from tests.support import forger as forger_lib
from tests.support import ledger_reader, ledgers, proxy, serving, signed_http, tiny_run

pytestmark = pytest.mark.usefixtures("compile_fast")
SEED, P, MIN_RATE, INVITED_RATE = 36, 4, 0.05, 0.5
OVERRIDES = {
    "trust.min_rate": MIN_RATE,
    "trust.invited_rate": INVITED_RATE,
    "trust.verdict_s": 5.0,
    "trust.sandbox": "off",
    "warmup.num_steps": 0,
    "rl.num_steps": 10**5,
    "rl.max_lag": 1,
    "rl.prompts_per_step": P,
    "rl.samples_per_prompt": 2,
    "evaluation.num_tasks": 1,
    "optimizer.learning_rate": 1e-6,
}

# A validator whose verdict on a stranger's group depends on its digest alone.
VALIDATOR = """
import sys
from inference.rollouts import rollout as rollout_lib
from inference.server import web
from rl.protocol import verdict
from sharding.system import sockets
from tests.support import validators
key, run, honest, port = rollout_lib.WorkerKey.load(sys.argv[1]), *sys.argv[2:]
def judge(rollouts):
    is_bad = rollouts[0].worker != honest and verdict.group_digest(rollouts)[0] in "012"
    return (False, "sampling") if is_bad else (True, "ok")
web.run(web.server(validators.Double(run, judge, key=key).app()), sockets.listen("127.0.0.1", int(port)))
"""


class Workers(threading.Thread):
    """An invited worker, and strangers whose bad groups sometimes pass. `taken`: the acknowledged groups, as (name, digest)."""

    def __init__(self, exp):
        super().__init__(daemon=True)
        self._forger, self.orchestrator = forger_lib.Forger(exp, formed=True), ""
        self._policy, self._is_stopped = {"policy_epoch": 0, "policy_version": 0, "policy_digest": ""}, False
        self.invited, self.taken = rollout_lib.WorkerKey.generate(), []
        self.app = fastapi.FastAPI()

        @self.app.post("/update_weights")
        async def update_weights(request: fastapi.Request):
            self._policy = {f"policy_{name}": value for name, value in (await request.json()).items()}
            return {}

        @self.app.get("/health")
        async def health():
            return self._policy | {"load": {"running": 0, "waiting": 0}}

    def run(self):
        stranger, num_idle = rollout_lib.WorkerKey.generate(), 0
        while not self._is_stopped:
            with contextlib.suppress(httpx.TransportError, AssertionError):  # the session is over
                worker = signed_http.Worker(self.orchestrator)
                while not self._is_stopped:
                    self._work(worker, self.invited)
                    num_idle = 0 if self._work(worker, stranger) else num_idle + 1
                    if num_idle == 100:  # it is banned
                        stranger, num_idle = rollout_lib.WorkerKey.generate(), 0
                    time.sleep(0.02)
            time.sleep(0.05)

    def stop(self):
        self._is_stopped = True
        self.join()

    def _work(self, worker, key) -> int:
        """Leases groups and hands them in; returns their number."""
        groups = worker.lease(key, P)
        for group in groups:
            version = max(self._policy["policy_version"] if group.version < 0 else group.version, group.min_version)
            rollouts = self._forger.forge(group, key, version)
            if worker.submit(key, rollouts) == ["taken"]:
                name = f"{group.split}/{group.step}/{group.group}"
                self.taken.append((name, verdict_lib.group_digest(rollouts)))
        return len(groups)


class Processes:
    """A run as processes that are killed and started again: its command (with children, in one process group), and validators."""

    def __init__(self, folder, command):
        self._folder, self._output = folder, open(folder / "output", "ab")
        self._commands, self._running = [command], [self._start(command)]

    def add(self, command):
        self._commands.append(command)
        self._running.append(self._start(command))

    def kill(self, number, *, restart=True):
        """Kills a process, 0 for the run, with its children."""
        assert self._running[number].poll() is None, self.output
        os.killpg(self._running[number].pid, signal.SIGKILL)
        self._running[number].wait()
        if restart:
            self._running[number] = self._start(self._commands[number])

    def wait(self, condition, timeout_s=300):
        proxy.wait_until(lambda: condition() or self._running[0].poll() is not None, timeout_s)
        assert self._running[0].poll() is None, self.output

    @property
    def output(self):
        return (self._folder / "output").read_text()[-4000:]

    def close(self):
        for number, process in enumerate(self._running):
            if process.poll() is None:
                self.kill(number, restart=False)
        self._output.close()

    def _start(self, command):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": self._output, "stderr": self._output}
        options = {"cwd": tiny_run.ROOT, "start_new_session": True}
        return subprocess.Popen(list(map(str, command)), **options, **pipes)


class Addresses:
    """Free ports, and the keys of three validators."""

    def __init__(self, folder):
        self.keys = [folder / f"{number}.key" for number in range(3)]
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            self.orchestrator, *self.ports = [one.getsockname()[1] for one in sockets]
        pairs = [(port, routes.own_key(key).worker) for port, key in zip(self.ports, self.keys, strict=True)]
        self.validators = tuple(f"http://127.0.0.1:{port}#{key}" for port, key in pairs)


@contextlib.contextmanager
def started(folder, fields, validator):
    """Yields a run of the quickstart with these fields and its validators, each of the command `validator(run, key, port)`."""
    addresses = Addresses(folder)
    fields = OVERRIDES | {"trust.validators": addresses.validators, "topology.port": addresses.orchestrator} | fields
    command = tiny_run.command(folder / "w", **{name.replace(".", "__"): value for name, value in fields.items()})
    with contextlib.closing(Processes(folder, command)) as processes:
        processes.wait((folder / "w" / "weights.key").exists)
        run = rollout_lib.WorkerKey.load(folder / "w" / "weights.key").worker
        for key, port in zip(addresses.keys, addresses.ports, strict=True):
            processes.add(validator(run, key, port))
        yield processes, f"http://127.0.0.1:{addresses.orchestrator}"


def wait_for(processes, count, num_groups):
    """Waits until the run has taken further groups."""
    wanted = count() + num_groups
    processes.wait(lambda: count() >= wanted)


def kill_at_random(processes, count, rng, num_kills):
    """Kills the run, in one of three cases a validator, at moments between the start of a process and some batches later."""
    wait_for(processes, count, P)
    for _ in range(num_kills):
        is_starting, number = rng.random() < 0.2, rng.choice((0, 0, 0, 0, 0, 0, 1, 2, 3))
        if not is_starting and number == 0:
            wait_for(processes, count, rng.choice((1, 2, 4, 8, 16)))
        time.sleep(rng.random() * (4 if is_starting else 0.5))
        processes.kill(number)
    wait_for(processes, count, 4 * P)
    processes.kill(0, restart=False)


def check_files(workdir, line):
    """Asserts that checkpoints and manifests name the ledger's entries, and that the batches on disk are those of the ledger."""
    key = rollout_lib.WorkerKey.load(workdir / "ledger.key").worker
    steps, num_anchors = checkpoint.complete_steps(workdir / "checkpoints"), 0
    newest, saved = max(steps), [file for step in steps for file in workdir.glob(f"checkpoints/{step}/host/*")]
    for file in [*saved, *workdir.glob("weights/v*/manifest.json")]:
        body = json.loads(data) if (data := file.read_bytes()).startswith(b"{") else {}
        if head := body.get("metadata", body).get("ledger"):
            number, _, hash_ = head.partition(":")
            step = int(file.parts[-3] if "host" in file.parts else file.parts[-2][1:])
            num_anchors += 1
            assert line.hashes[int(number)] == hash_, file
            if 0 < step <= newest:
                assert line.numbers[step] <= int(number), file
                assert "host" in file.parts or line.published[step] == hashlib.sha256(data).hexdigest(), file
    assert num_anchors >= 3
    for step in range(1, newest + 1):
        groups = collections.defaultdict(list)
        for rollout in parquet.read(workdir / "rollouts" / f"step_{step}" / "accepted.parquet"):
            groups[rollout.task.group].append(rollout)
        found = {group: verdict_lib.group_digest(rollouts) for group, rollouts in groups.items()}
        assert found == line.batches[step], step
    steps = [record["step"] for record in tiny_run.lines(workdir)]
    assert steps == list(range(1, len(steps) + 1)) and newest <= len(steps) <= len(line.batches)
    assert ledgers.verify(workdir / "ledger.db", keeper=key, head=head).error is None


def check(workdir, num_kills, taken=None):
    """Checks a killed run by its files; `taken` are the groups that it acknowledged as (name, digest), by default those in its ledger."""
    secret, first_record = (workdir / "secret.key").read_bytes() + b"0", 32 * (1 / INVITED_RATE - 1)
    rates = {"min_rate": MIN_RATE, "first_record": first_record}
    line, num_again = ledger_reader.Timeline(workdir / "ledger.db", secret=secret, **rates), 0
    check_files(workdir, line)
    in_batches = [digest for groups in line.batches.values() for digest in groups.values()]
    assert len(set(in_batches)) == len(in_batches) == P * len(line.batches)
    for name, digest in taken or [(name, digest) for digest, (name, _) in line.submissions.items()]:
        assert line.submissions[digest][0] == name  # durable before it was acknowledged
        submitted, (split, step, _) = line.submissions[digest][1], name.split("/")
        if split == "train" and digest not in in_batches and line.refused.get(digest, 0) < submitted:
            num_again += 1
            assert int(step) > len(line.batches) or line.leased[name] > submitted, name
    print(
        f"{num_kills} kills: {line.num_resumes} starts, {len(line.batches)} batches that count and {line.num_void} void, {dict(line.bases)} "
        f"groups, {len(taken or ())} acknowledged, {num_again} generated again, {len(line.refused)} refused, {len(line.events)} events"
    )
    return {event["kind"] for event in line.events}


@pytest.mark.parametrize("num_kills", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_of_a_run_lose_nothing_acknowledged_and_train_on_nothing_twice(tmp_path, num_kills):
    config = quickstart.get_config()
    config.update_from_flattened_dict(tiny_run.TINY | OVERRIDES)
    workers = Workers(experiment.resolve(config))
    with serving.in_thread(workers.app) as url:
        remote = {"topology.mode": "remote", "topology.servers": (url,), "topology.control_servers": (url,)}
        remote |= {"topology.workers": (workers.invited.worker,), "trust.admission": "open"}

        def validator(run, key, port):
            return [sys.executable, "-c", VALIDATOR, key, run, workers.invited.worker, port]

        with started(tmp_path, remote, validator) as (processes, workers.orchestrator):
            workers.start()
            kill_at_random(processes, lambda: len(workers.taken), random.Random(SEED), num_kills)
            workers.stop()
    check(tmp_path / "w", num_kills, workers.taken)


@pytest.mark.slow
def test_kills_of_a_run_with_real_rollouts_and_replays_lose_nothing_either(tmp_path):
    """The worker is honest: nothing is refused, however often the processes around it are killed."""

    def validator(run, key, port):
        arguments = ["--workdir", tmp_path / "w", "--key", key, "--port", port]
        return [sys.executable, "-m", "rl.validator", "serve", *arguments]

    def count():
        with contextlib.closing(sqlite3.connect(tmp_path / "w" / "ledger.db", timeout=60)) as db:
            found = 'SELECT count(*) FROM entries WHERE CAST(event AS TEXT) LIKE \'%"kind":"submission"%\''
            return db.execute(found).fetchone()[0]

    with started(tmp_path, {"trust.verdict_s": 60.0}, validator) as (processes, _):
        processes.wait((tmp_path / "w" / "ledger.db").exists)
        kill_at_random(processes, count, random.Random(SEED), 10)
    assert not check(tmp_path / "w", 10) & {"refusal", "eject", "naming"}
