"""A run, its validators, and its ledger are killed at random moments and started again.

The run is `python -m rl.train` with its learner, orchestrator, ledger, and relay. The tests' worker writes its rollouts without a
model, and validators answer by a rule instead of a replay, so that 200 kills take minutes.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import fastapi
import httpx
import pytest

from configs import quickstart
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.experiment.reporting import metrics
from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import events
from rl.protocol.ledger import ledger as ledger_lib
from rl.trust import audit
from rl.trust.validator import routes
from sharding.mesh import checkpoint
from tests.support import forger as forger_lib
from tests.support import proxy, serving, signed_http, tiny_run

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


def check_anchors(workdir):
    """Asserts that each checkpoint names an entry of the ledger that is after its batch."""
    checked = 0
    with ledger_lib.Ledger(workdir / "ledger.db") as ledger:
        batches = {one.event.fields["step"]: one.seq for one in ledger.entries() if one.event.kind == "batch"}
        for step in checkpoint.complete_steps(workdir / "checkpoints"):
            for file in workdir.glob(f"checkpoints/{step}/host/*"):
                body = json.loads(data) if (data := file.read_bytes()).startswith(b"{") else {}
                if head := body.get("ledger"):
                    ledger.check_contains(head, str(file))
                    assert not step or batches[step] <= int(head.partition(":")[0]), file
                    checked += 1
    assert checked


def check(workdir, num_kills, taken):
    """Checks a killed run by its files; `taken` are the groups that it acknowledged as (name, digest)."""
    audited = audit.run(workdir, metrics.Progress())
    history = audited.history
    assert not audited.findings and audited.checked["manifest"] and audited.checked["draw"], audit.table(audited)
    check_anchors(workdir)
    submissions, leased, refused = {}, {}, {}
    with ledger_lib.Ledger(workdir / "ledger.db") as ledger:
        for entry in ledger.entries():
            for fields in events.each(entry.event.fields):
                name = f"{fields.get('split')}/{fields.get('step')}/{fields.get('group')}"
                if entry.event.kind == "lease":
                    leased[name] = entry.seq
                elif entry.event.kind == "submission":
                    submissions[fields["digest"]] = name, entry.seq
                elif entry.event.kind == "refusal":
                    refused[fields["digest"]] = entry.seq
    in_batches = [digest for one in history.batches.values() for _, digest in one.submissions.values()]
    assert len(set(in_batches)) == len(in_batches) == P * len(history.batches)
    steps, num_again = [record["step"] for record in tiny_run.lines(workdir)], 0
    assert steps == list(range(1, len(steps) + 1)) and len(steps) <= len(history.batches)
    for name, digest in taken:
        assert submissions[digest][0] == name  # durable before it was acknowledged
        submitted, (split, step, _) = submissions[digest][1], name.split("/")
        if split == "train" and digest not in in_batches and refused.get(digest, 0) < submitted:
            num_again += 1
            assert int(step) > len(history.batches) or leased[name] > submitted, name
    print(f"{num_kills} kills: {history.num_resumes} starts, {len(history.batches)} batches, {num_again} groups again")


@pytest.mark.parametrize("num_kills", [2, pytest.param(200, marks=pytest.mark.slow)])
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
