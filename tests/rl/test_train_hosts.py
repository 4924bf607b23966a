"""The walk of tests/rl/test_train.py over two hosts: two processes with a device each, joined as a pod's are, CPU collectives.

The oracle is one process with two devices on the same mesh: every number of the two is the same to the bit, since a sum of two
does not depend on their order.
"""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from rl.experiment.reporting import metrics
from rl.learning.batch import packing
from sharding.mesh import checkpoint
from sharding.weights import broadcast
from tests.support import tiny_run

pytestmark = pytest.mark.slow
NUM_STEPS = 6


def start(workdir, num_hosts=2, own=({}, {}), num_devices=2, **overrides):
    """The command on each host; `own` are overrides of one host alone."""
    port = free_ports()
    processes = []
    for host in range(num_hosts):
        fields = {"mesh.fsdp": 2, "topology.join_s": 60.0, "warmup.num_steps": 2} | overrides
        if num_hosts > 1:
            fields |= {"topology.coordinator": f"127.0.0.1:{port}", "topology.num_processes": num_hosts}
            fields |= {"topology.process_id": host} | own[host]
        env = os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices // num_hosts)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = tiny_run.command(workdir, **fields)
        processes.append(subprocess.Popen(command, cwd=tiny_run.ROOT, env=env, text=True, **pipes))
    return processes


def finish(processes, timeout_s=150):
    """[(exit code, stdout, stderr)] by host."""
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run(*args, **kwargs):
    results = finish(start(*args, **kwargs))
    assert all(code == 0 for code, _, _ in results), [(code, err[-2000:]) for code, _, err in results]
    return results


def the_error(results):
    """The one line that all hosts print."""
    lines = {line for _, _, err in results for line in err.splitlines() if line.startswith("error: ")}
    assert len(lines) == 1, [err[-2000:] for _, _, err in results]
    return lines.pop()


curve = functools.partial(tiny_run.curve, phases=("warm-up", "rl"))


def wait_for_step(workdir, step, processes, timeout_s=120):
    deadline_s = time.monotonic() + timeout_s
    path = workdir / "metrics.jsonl"
    while not path.exists() or not any(r["phase"] == "rl" and r["step"] >= step for r in metrics.read(path)):
        assert time.monotonic() < deadline_s and all(process.poll() is None for process in processes)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One process, uninterrupted."""
    workdir = tmp_path_factory.mktemp("one") / "w"
    run(workdir, num_hosts=1)
    return curve(workdir)


def test_two_hosts_are_one(straight, tmp_path):
    (_, out, _), (_, other_out, _) = run(tmp_path / "w")
    assert curve(tmp_path / "w") == straight and len(straight) == 2 + NUM_STEPS
    assert "report.html" in out and "rl  step" in out and "step" not in other_out  # one host speaks
    assert broadcast.versions(tmp_path / "w" / "weights") == list(range(NUM_STEPS + 1))
    for version in range(NUM_STEPS + 1):
        broadcast.verify(tmp_path / "w" / "weights", version)
    assert checkpoint.complete_steps(tmp_path / "w" / "checkpoints") == [0, 2, 4, 6]  # 0 scored best


def test_adapters_a_reference_and_deltas_over_two_hosts(tmp_path):
    """Other work that the hosts share: merge, score the reference's log-probabilities, publish differences."""
    fields = {"lora__rank": 2, "objective__kl_coef": 0.1, "objective__kl_reference": "reference", "rl__num_steps": 3}
    fields |= {"optimizer__learning_rate": 1e-2, "optimizer__warmup_steps": 0, "broadcast__snapshot_every": 3}
    for workdir, num_hosts in ((tmp_path / "one", 1), (tmp_path / "two", 2)):
        run(workdir, num_hosts, **fields)
    assert curve(tmp_path / "two") == curve(tmp_path / "one")
    assert [line["phase"] for line in curve(tmp_path / "two")] == ["warm-up"] * 2 + ["rl"] * 3
    manifests = [[broadcast.read_manifest(tmp_path / w / "weights", v) for v in range(4)] for w in ("one", "two")]
    assert [m.base for m in manifests[1]] == [None, 0, 1, None]
    one, two = ([manifest.digest for manifest in of_run] for of_run in manifests)
    assert one == two and len(set(one)) == 4


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The working directory of two hosts of which one was killed after step 3."""
    workdir = tmp_path_factory.mktemp("killed") / "w"
    processes = start(workdir)
    wait_for_step(workdir, 3, processes)
    processes[1].send_signal(signal.SIGKILL)
    begun_s = time.monotonic()
    results = finish(processes)
    assert time.monotonic() - begun_s < 15 and [code for code, _, _ in results] == [1, -signal.SIGKILL]
    assert re.search(r"error: host 1 of 2 \(\S+\): its process ended without an error .*\(killed", the_error(results))
    return workdir


@pytest.mark.parametrize("num_hosts", [2, 1])
def test_a_killed_host_ends_the_run_which_resumes(straight, killed, tmp_path, num_hosts):
    """Resumed by the same command, or on one host."""
    workdir = shutil.copytree(killed, tmp_path / "copy")
    assert "resuming after step" in run(workdir, num_hosts)[0][1]
    assert curve(workdir) == straight


def test_what_one_host_began_two_carry_on_until_a_signal(straight, tmp_path):
    run(tmp_path / "w", num_hosts=1, rl__num_steps=2)
    processes = start(tmp_path / "w")
    wait_for_step(tmp_path / "w", 5, processes)
    processes[1].send_signal(signal.SIGTERM)
    results = finish(processes)
    assert [code for code, _, _ in results] == [128 + signal.SIGTERM] * 2
    assert re.search(r"terminated, with a checkpoint of step \d+; the same command resumes", the_error(results))
    lines = curve(tmp_path / "w")
    assert lines == straight[: len(lines)] and len(lines) >= 2 + 5


POD = {  # of configs/intellect3.py, at this size; no step but the last would be saved
    **{"model.dtype": "bfloat16", "model.scan_layers": True, "model.remat": "block", "optimizer.name": "muon"},
    **{"rl.loss": "masked_importance_sampling", "checkpoint.every": 1000, "checkpoint.every_minutes": 20.0},
    "rl.num_steps": 9,  # the run keeps ten versions
}


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_sigterm_of_any_host_saves_the_step_at_which_the_run_resumes(tmp_path, num_hosts):
    run(tmp_path / "straight", num_hosts, **POD)
    processes = start(tmp_path / "w", num_hosts, **POD)
    wait_for_step(tmp_path / "w", 3, processes)
    processes[-1].send_signal(signal.SIGTERM)
    results = finish(processes)
    assert [code for code, _, _ in results] == [128 + signal.SIGTERM] * num_hosts, results
    step = checkpoint.complete_steps(tmp_path / "w" / "checkpoints")[-1]
    assert f"terminated, with a checkpoint of step {step}; the same command resumes" in the_error(results)
    assert 3 <= step == len(tiny_run.lines(tmp_path / "w")) < 9
    assert f"resuming after step {step}" in run(tmp_path / "w", num_hosts, **POD)[0][1]
    assert tiny_run.learned(tmp_path / "w") == tiny_run.learned(tmp_path / "straight")


def test_a_number_that_is_none_stops_both(tmp_path):
    fields = {"checkpoint__every": 100, "optimizer__warmup_steps": 0, "optimizer__learning_rate": 1e30}
    results = finish(start(tmp_path / "w", **fields))
    assert [code for code, _, _ in results] == [1, 1] and not any("Traceback" in err for _, _, err in results)
    step = int(re.search(r"host 0 of 2 .* is (?:nan|inf) at step (\d+); ", the_error(results))[1])
    assert f"the last good checkpoint is step {step - 1}" in the_error(results)
    assert packing.load(tmp_path / "w" / "failed_batch.npz").tokens.shape[0]
    assert checkpoint.complete_steps(tmp_path / "w" / "checkpoints")[-1] == step - 1


def test_hosts_that_disagree_do_not_begin(tmp_path):
    """The hosts agree on how many they are, on the config, and (a mistake of one alone) on whether there is a config."""
    cases = {
        "count": ({}, {"topology.num_processes": 3}),
        "config": ({}, {"rl.max_off_policy": 3}),
        "mistake": ({}, {"rl.loss": "ppo2"}),
    }
    started = {name: start(tmp_path / name, own=own) for name, own in cases.items()}
    results = {name: finish(processes) for name, processes in started.items()}
    errors = {name: the_error(result) for name, result in results.items()}
    assert all(code == 1 for result in results.values() for code, _, _ in result)
    assert re.search(r"host 1 \(\S+\) has num_processes = 3, host 0 has 2; make them", errors["count"])
    assert re.search(r"host 1 of 2 .*: rl.max_off_policy is 3 here and 8 on host 0; give every host", errors["config"])
    assert re.search(r"host 1 of 2 .*: rl.loss = 'ppo2' is unknown; choose one of", errors["mistake"])


def test_a_full_disk_ends_both_in_one_line(tmp_path):
    with tiny_run.small_disk(tmp_path) as disk:
        results = finish(start(disk / "w"))
        assert [code for code, _, _ in results] == [1, 1] and not any("Traceback" in err for _, _, err in results)
        assert "no space left" in the_error(results)
        weights = disk / "w" / "weights"
        assert not weights.exists() or all((v / "manifest.json").exists() for v in weights.glob("v*"))


def test_the_warm_up_alone_over_two_hosts(tmp_path):
    fields = {"warmup__num_steps": 4, "warmup__eval_every": 2, "warmup__eval_tasks": 6, "module": "rl.sft"}
    for workdir, num_hosts in ((tmp_path / "one", 1), (tmp_path / "two", 2)):
        run(workdir, num_hosts, **fields)
    assert curve(tmp_path / "two") == curve(tmp_path / "one")
    assert ["loss/held_out" in line for line in curve(tmp_path / "two")] == [False, True, False, True]
    assert json.loads((tmp_path / "two" / "config.json").read_text())["config"]["topology"]["num_processes"] == 2


GIVEN = set()  # ports given to a process, maybe seconds before it uses them


def free_ports() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as one, socket.socket() as following:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                following.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            if not {port, port + 1} & GIVEN:
                GIVEN.update((port, port + 1))
                return port
