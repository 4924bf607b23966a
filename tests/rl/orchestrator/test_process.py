"""`python -m rl.orchestrator` and a learner, each killed at random moments, with real processes, workers and signatures.

The learner has no model: it hashes the rows of each batch into its weights, so that one row too many, too few, or elsewhere shows.
"""

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from configs import quickstart
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.ledger import ledger as ledger_lib
from rl.ledger import task_ranges
from rl.protocol import lease as lease_lib
from rl.protocol import registry, timeline
from tests.support import forger as forger_lib
from tests.support import ledgers, signed_http, tiny_run

WORKER, SLOW, SERVER = (rollout_lib.WorkerKey.generate() for _ in range(3))
OVERRIDES = tiny_run.TINY | {
    "rl.max_lag": 0,
    "rl.prompts_per_step": 3,
    "rl.samples_per_prompt": 2,
    "topology.mode": "remote",
    "topology.server_keys": (SERVER.worker,),
    "topology.workers": (WORKER.worker, SLOW.worker),
    "topology.heartbeat_s": 0.5,
    "trust.min_rate": 1e-9,
    "trust.invited_rate": 1e-9,
    "trust.bands": "",
}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Run:
    """The processes of a run in `path`, and threads for its workers and its server. The slow worker waits up to `pause_s` per group.

    With `flat_every`, one of so many groups has no signal.
    """

    def __init__(self, path, num_steps, pause_s=0.0, flat_every=0, **rl):
        self.flat_every = flat_every
        self.path, self.num_steps, self.acknowledged, self.again, self.pause_s = path, num_steps, set(), [], pause_s
        (path / "run").mkdir(parents=True)
        (path / "learner").mkdir()
        overrides = OVERRIDES | {f"rl.{name}": value for name, value in rl.items()}
        overrides |= {"rl.num_steps": num_steps, "topology.port": free_port()}
        config = quickstart.get_config()
        for name, value in overrides.items():
            config.update_from_flattened_dict({name: value})
        self.exp, self.control = experiment.resolve(config), free_port()
        self.url = f"http://127.0.0.1:{overrides['topology.port']}"
        (path / "fields.json").write_text(json.dumps(experiment.fields(self.exp)))
        flags = [f"--config.{name}={value}" for name, value in overrides.items()]
        command = ["-m", "rl.orchestrator", "--config=configs/quickstart.py", f"--workdir={path / 'run'}"]
        self.commands = {"orchestrator": [*command, f"--control=127.0.0.1:{self.control}", *flags]}
        token = ["run/control.token", "learner"]
        options = [f"http://127.0.0.1:{self.control}", *(str(path / name) for name in token), str(num_steps)]
        stub = ["-m", "tests.support.stub_learner", *options, str(path / "fields.json")]
        self.commands["learner"] = stub
        self.processes, self.over = {}, threading.Event()

    def start(self, name):
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with open(self.path / f"{name}.log", "a") as log:
            command = [sys.executable, *self.commands[name]]
            options = dict(cwd=tiny_run.ROOT, env=environment, stdout=log, stderr=log)
            self.processes[name] = subprocess.Popen(command, **options)

    def kill(self, name):
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def log(self, name):
        return (self.path / f"{name}.log").read_text()[-3000:]

    def work(self):
        """Answers leases, also across restarts; notes groups that are leased again after they were acknowledged in one epoch."""
        forger = forger_lib.Forger(self.exp, formed=True)
        self._in_sessions(lambda http, at: self._answer(http, at, forger, WORKER))

    def work_slowly(self):
        forger, rng = forger_lib.Forger(self.exp, formed=True), random.Random(0)
        self._in_sessions(lambda http, at: self._answer(http, at, forger, SLOW, rng.uniform(0, self.pause_s)))

    def _answer(self, http, at, forger, key, pause_s=0.0):
        reply = http.post("/lease", json=signed_http.lease_body(key, at, 2, wait_s=1.0)).raise_for_status().json()
        time.sleep(pause_s)
        for group in [lease_lib.Lease.from_json(group) for group in reply["groups"]]:
            name = (group.epoch, *group.key)
            if name in self.acknowledged and key is WORKER:
                self.again.append(name)
            flat = self.flat_every > 0 and group.group % self.flat_every == 0
            rollouts = forger.forge(group, key, group.min_version, flat)
            sent = http.post("/submit", **signed_http.submission(key, at, parquet.to_bytes(rollouts)))
            if set(sent.raise_for_status().json()["verdicts"].values()) == {"taken"}:
                self.acknowledged.add(name)

    def serve(self):
        """Reports, as a server, that it has each policy that the orchestrator names."""
        policy = None

        def beat(http, at):
            nonlocal policy
            report = dataclasses.asdict(registry.Report(url="http://127.0.0.1:1", policy=policy))
            fields = {"role": "server", "report": report, "holding": [], "leaving": False, "work": ""}
            body = lease_lib.request(SERVER, at, **fields)
            reply = http.post("/heartbeat", json=body).raise_for_status().json()
            policy = timeline.Policy.from_json(reply["policy"]) if reply["policy"] else None
            time.sleep(0.2)

        self._in_sessions(beat)

    def _in_sessions(self, call):
        with httpx.Client(base_url=self.url, timeout=20) as http:
            at = None
            while not self.over.is_set():
                try:
                    at = at or signed_http.session(http)
                    call(http, at)
                except httpx.HTTPStatusError as error:
                    assert error.response.status_code in (409, 429, 503), error.response.text
                    at = None
                except (httpx.TransportError, KeyError):
                    time.sleep(0.1)
                    at = None

    def until_done(self, kills, seed):
        """Runs to the end with `kills` at random moments; returns the steps that it trained on in each epoch."""
        rng = random.Random(seed)
        targets = (self.work, self.serve, *[self.work_slowly] * (self.pause_s > 0))
        threads = [threading.Thread(target=target, daemon=True) for target in targets]
        self.start("orchestrator")
        while not (self.path / "run" / "control.token").exists():
            assert self.processes["orchestrator"].poll() is None, self.log("orchestrator")
            time.sleep(0.1)
        self.start("learner")
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + 120 + 2 * self.num_steps + 30 * kills
        next_s = time.monotonic() + rng.uniform(5, 15)
        while self.processes["learner"].poll() != 0:
            assert time.monotonic() < deadline_s, (self.log("orchestrator"), self.log("learner"))
            for name, process in self.processes.items():
                assert process.poll() in (None, 0), self.log(name)
            if kills and time.monotonic() > next_s:
                kills, name = kills - 1, rng.choice(["orchestrator", "learner"])
                self.kill(name)
                time.sleep(rng.uniform(0, 2))
                self.start(name)
                next_s = time.monotonic() + rng.uniform(0.5, 8)
            time.sleep(0.05)
        assert self.processes["orchestrator"].wait(60) == 0, self.log("orchestrator")
        self.over.set()
        return [json.loads(line) for line in (self.path / "learner" / "batches.jsonl").read_text().splitlines()]

    def end(self):
        self.over.set()
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "num_steps"), [(3, 60), (int(os.environ.get("INTELLAX_TEST_KILLS", "30")), 200)])
def test_kills_of_both_lose_nothing_and_train_nothing_twice(tmp_path, request, kills, num_steps):
    found = {}
    for name, count in (("calm", 0), ("killed", kills)):
        run = Run(tmp_path / name, num_steps)
        request.addfinalizer(run.end)
        lines = run.until_done(count, seed=kills)
        final = {line["step"]: line["weights"] for line in lines}  # the last of each step
        assert sorted(final) == list(range(1, num_steps + 1))
        assert run.again == [], "a group was leased again after it was acknowledged in the same epoch"
        assert ledgers.verify(run.path / "run" / "ledger.db").error is None
        for step in range(1, num_steps + 1):
            kept = parquet.read(run.path / "run" / "rollouts" / f"step_{step}" / "accepted.parquet")
            assert [(r.task.group, r.sample) for r in kept] == [
                (group, sample) for group in range(3 * step - 3, 3 * step) for sample in (0, 1)
            ]
        found[name] = final
    assert found["killed"] == found["calm"]


@pytest.mark.slow
def test_batches_of_the_first_groups_survive_kills_of_both(tmp_path, request):
    """Late groups come in later batches, and each once; dropped groups are in the ledger."""
    num_steps = 60
    options = {"batch": "first", "max_lag": 2, "oversampling": 1.7, "refill": 0.5, "max_off_policy": 2}
    run = Run(tmp_path, num_steps, pause_s=3.0, flat_every=7, **options)
    request.addfinalizer(run.end)
    lines = run.until_done(3, seed=1)
    assert {line["step"] for line in lines} == {*range(1, num_steps + 1)} and run.again == []
    trained, late = [], 0
    for step in range(1, num_steps + 1):
        kept = parquet.read(run.path / "run" / "rollouts" / f"step_{step}" / "accepted.parquet")
        groups = sorted({rollout.task.group for rollout in kept})
        assert len(groups) == 3 and len(kept) == 6
        assert all(step - 3 <= v <= step - 1 for rollout in kept for v in rollout.versions[rollout.sampled_mask])
        late += min(groups) < max(trained, default=0)
        trained += groups
    assert len({*trained}) == len(trained) and late > 0
    state = ledgers.verify(run.path / "run" / "ledger.db")
    assert state.error is None
    with ledger_lib.Ledger(run.path / "run" / "ledger.db") as ledger:
        batches = {e.event.fields["step"]: e.event.fields for e in ledger.entries() if e.event.kind == "batch"}
    dropped = [
        n for fields in batches.values() if "dropped" in fields for _, n in task_ranges.parse_tasks(fields["dropped"])
    ]
    assert dropped and not {*dropped} & {*trained}
