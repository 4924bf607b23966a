"""`topology.mode = "remote"` as a user runs it: learner, two relays in a row, a server and workers, each started by itself.

The learner runs the first relay; the second knows only the first's URL, the server only the second's. So the second
relay's versions went through both, and the server samples with weights from there.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request

import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment.reporting import metrics
from sharding.weights import broadcast
from tests.support import proxy, tiny_run

NUM_STEPS = 4
SAID = r"inference\.serve --weights (http://\S+) --weights_key ([0-9a-f]{64})(?s:.*)--orchestrator (http://\S+)"


def topology(server_port, control_port, relay_port):
    """Returns the fields of a run with one server elsewhere."""
    return {
        "topology.mode": "remote",
        "topology.servers": f"('http://127.0.0.1:{server_port}',)",
        "topology.control_servers": f"('http://127.0.0.1:{control_port}',)",
        "topology.relay_port": relay_port,
    }


def announced(process, words=SAID):
    """Returns the URLs and keys that a process prints for those that are to be started."""
    proxy.wait_until(lambda: re.search(words, process.text()) or process.poll() is not None, 200, "what to start")
    return re.search(words, process.text()).groups()


def serve(start, workdir, weights, key, server_port, control_port):
    start(
        *("server", "-m", "inference.serve", "--weights", weights, "--weights_key", key, "--port", str(server_port)),
        *("--num_slots", "16", "--prefill_batch", "4", "--max_model_len", "64"),
        *("--control", f"127.0.0.1:{control_port}", "--control_token_file", str(workdir / "control.token")),
    )


@pytest.mark.slow
def test_a_learner_learns_from_servers_behind_two_relays(tmp_path, request):
    server_port, control_port, relay_port = free_port(), free_port(), free_port()
    workdir = tmp_path / "run"
    overrides = topology(server_port, control_port, relay_port) | {
        "broadcast.snapshot_every": 3,
        "rl.num_steps": NUM_STEPS,
    }
    start = Starter(tmp_path, request)
    learner = start("learner", *tiny_run.command(workdir, **overrides)[1:])
    first, key, orchestrator = announced(learner)
    assert first == f"http://127.0.0.1:{relay_port}"

    relay = ["--upstream", first, "--dir", str(tmp_path / "mirror"), "--trusted_key", key, "--port", "0"]
    start("relay", "-m", "sharding.relay", *relay, "--address_file", str(tmp_path / "address"))
    proxy.wait_until((tmp_path / "address").exists, 60, "the second relay")
    second = (tmp_path / "address").read_text()
    serve(start, workdir, second, key, server_port, control_port)
    for i in range(2):
        start(f"worker{i}", "-m", "rl.worker", "--orchestrator", orchestrator)
    workers = ["worker0", "worker1"]
    proxy.wait_until(lambda: {"learner", *workers} <= {*start.ended()}, 400, "the run, and the end of its workers")
    assert {start.processes[name].returncode for name in start.ended()} == {0} and "server" not in start.ended(), [
        p.text()[-3000:] for p in start.processes.values()
    ]
    assert all(start.processes[name].text().endswith("the run ended\n") for name in workers)

    steps = [line for line in metrics.read(workdir / "metrics.jsonl") if line["phase"] == "rl"]
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    assert all(line["trust/num_refused"] == 0 for line in steps)
    manifests = [broadcast.read_manifest(workdir / "weights", v, key=key) for v in range(NUM_STEPS + 1)]
    assert len({m.digest for m in manifests}) == len(manifests) and {m.base is None for m in manifests} == {True, False}
    # The second relay fetched each object of each version once, the server is on the last one, and each was sampled from.
    assert broadcast.versions(second) == list(range(NUM_STEPS + 1))
    counted = dict(re.findall(r"^intellax_relay_(\S+) (\S+)$", get(f"{second}/metrics"), re.MULTILINE))
    assert float(counted['mirrored_total{name="bytes"}']) == sum(m.size_bytes for m in manifests)
    assert float(counted['served_total{name="sent_bytes"}']) > 0
    assert json.loads(get(f"http://127.0.0.1:{server_port}/health"))["policy_version"] == NUM_STEPS
    sampled = [parquet.read(file) for file in sorted((workdir / "rollouts").rglob("*.parquet"))]
    versions = {
        v
        for rollouts in sampled
        for r in rollouts
        for v, by_us in zip(r.versions, r.sampled_mask, strict=True)
        if by_us
    }
    assert versions >= set(range(NUM_STEPS))

    # Resumed: the server kept running, has each number already, and now gets those of a new epoch.
    resumed = start("resumed", *tiny_run.command(workdir, **(overrides | {"rl.num_steps": NUM_STEPS + 2}))[1:])
    start("worker2", "-m", "rl.worker", "--orchestrator", announced(resumed)[2])
    proxy.wait_until(lambda: resumed.poll() is not None, 400, "the resumed run")
    assert resumed.returncode == 0, [p.text()[-3000:] for p in start.processes.values()]
    assert json.loads(get(f"http://127.0.0.1:{server_port}/health"))["policy_version"] == NUM_STEPS + 2
    last = broadcast.read_manifest(workdir / "weights", NUM_STEPS + 2, key=key)
    assert last.epoch > manifests[0].epoch


@pytest.mark.slow
def test_a_learner_and_its_orchestrators_process_are_killed_in_turn(trained, tmp_path, request):
    """The run ends, at lag 0, with the losses and weights of an undisturbed one whose orchestrator is in the learner."""
    server_port, control_port, relay_port, port, learner_port = (free_port() for _ in range(5))
    workdir = tmp_path / "run"
    overrides = topology(server_port, control_port, relay_port) | {"topology.port": port}
    start = Starter(tmp_path, request)
    listener = f"--control=127.0.0.1:{learner_port}"
    orchestrator = [*tiny_run.command(workdir, module="rl.swarm.orchestrator", **overrides)[1:], listener]
    there = {"topology.orchestrator": f"http://127.0.0.1:{learner_port}"}
    learner = tiny_run.command(workdir, **overrides, **there)[1:]
    start("orchestrator", *orchestrator)
    proxy.wait_until((workdir / "control.token").exists, 120, "the orchestrator")
    weights, key, url = announced(start("learner", *learner))
    assert url == f"http://127.0.0.1:{port}"
    serve(start, workdir, weights, key, server_port, control_port)
    proxy.wait_until(lambda: "is healthy" in start.processes["orchestrator"].text(), 200, "the server")

    def wait_until(is_met, timeout_s, what):
        def tended():
            if "worker" not in start.processes or start.processes["worker"].poll() == 1:  # it found no server
                start("worker", "-m", "rl.worker", "--orchestrator", url)
            return is_met()

        proxy.wait_until(tended, timeout_s, what)

    for name, command, after in (("orchestrator", orchestrator, 2), ("learner", learner, 4)):
        wait_until(lambda after=after: len(tiny_run.lines(workdir)) >= after, 100, f"step {after}")
        start.processes[name].kill()
        start.processes[name].wait()
        start(name, *command)
    for name in ("learner", "orchestrator"):
        process = start.processes[name]
        wait_until(lambda process=process: process.poll() is not None, 150, f"the end of the {name}")
        assert process.returncode == 0, (name, process.text()[-3000:])
    found = tiny_run.learned(workdir)
    assert found == tiny_run.learned(trained[0]) and len(found[0]) == 6


@pytest.mark.slow
def test_a_checkpoint_is_scored_by_a_server_that_wants_the_runs_signature(tmp_path, request):
    """The server gets the run's key before the evaluation begins, and the weights come in the run's dtype."""
    workdir, relay_port = tmp_path / "run", free_port()
    overrides = {"rl.num_steps": 2, "broadcast.dtype": "bfloat16"}
    assert tiny_run.run(workdir, **overrides).returncode == 0
    key = broadcast.read_manifest(workdir / "weights", 2).public_key
    node = rollout_lib.WorkerKey.generate()
    node.save(tmp_path / "server.pem")
    overrides |= {"topology.mode": "remote", "topology.server_keys": f"('{node.worker}',)"}
    overrides |= {"topology.relay_port": relay_port}
    start = Starter(tmp_path, request)
    scorer = start("scorer", *tiny_run.command(workdir, module="rl.evaluate", **overrides)[1:], "--step=2")
    said = rf"--weights http://127.0.0.1:{relay_port} --weights_key {key} (?s:.*)--orchestrator (http://\S+)"
    (orchestrator,) = announced(scorer, said)
    # As printed, and no sizes of the engine: they are published with the weights.
    weights = ["--weights", f"http://127.0.0.1:{relay_port}", "--weights_key", key, "--port", "0"]
    signing = ["--orchestrator", orchestrator, "--key", str(tmp_path / "server.pem")]
    start("server", "-m", "inference.serve", *weights, *signing)
    start("worker", "-m", "rl.worker", "--orchestrator", orchestrator)
    proxy.wait_until(lambda: "scorer" in start.ended(), 200, "the evaluation")
    assert "server" not in start.ended() and scorer.returncode == 0, [
        p.text()[-3000:] for p in start.processes.values()
    ]
    scores = {e["step"]: e["scores"] for e in json.loads((workdir / "evaluations.json").read_text())}
    assert scores[2]["num_tasks"] == 8 and "held-out, version 2" in scorer.text()


class Starter:
    """Starts processes as from a shell, and ends them with the test."""

    def __init__(self, directory, request):
        self._directory, self._request, self.processes = directory, request, {}

    def __call__(self, name, *arguments):
        log = self._directory / f"{name}.log"
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=tiny_run.ROOT, env=environment, stdout=file, stderr=file
            )

        def end():
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        self._request.addfinalizer(end)
        process.text = log.read_text
        self.processes[name] = process
        return process

    def ended(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.poll() is not None]


def free_port() -> int:
    with proxy.socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def get(url) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()
