"""`topology.mode = "colocated"` as commands: the walk of tests/rl/test_train.py with the inference server in the learner's process."""

import json
import os
import pathlib
import subprocess

import pyarrow.parquet as pq
import pytest

from inference.rollouts import rollout as rollout_lib
from tests.rl import test_train_hosts
from tests.support import tiny_run

pytestmark = pytest.mark.slow
# JAX calls it when a process looks for devices, as a driver that allows one process per chip.
LOCK = """
import fcntl, os, sys

def initialize():
    global held
    held = open(os.environ["DEVICE_LOCK"], "a+")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("the device is in use by another process", file=sys.stderr, flush=True)
        os._exit(17)
"""

# Python imports it when a process starts.
CUSTOMIZE = """
import os

if file := os.environ.get("DEVICE_LOCK"):  # a sandbox hides it
    with open(file + ".processes", "a") as processes:
        print(os.environ["JAX_PLATFORMS"], file=processes)
"""


def run(workdir, fields, config="quickstart", env=None):
    result = tiny_run.run(workdir, config, env=env, **({"topology.mode": "colocated"} | fields))
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr[-3000:]
    return result


def made_by(workdir, step):
    """The server keys in the rollouts of a step."""
    tables = [pq.read_table(file) for file in (workdir / "rollouts" / f"step_{step}").glob("*.parquet")]
    return {key for table in tables for key in table["server"].to_pylist()}


def key_of(workdir, name):
    return rollout_lib.WorkerKey.load(workdir / "keys" / f"{name}.key").worker


def scores(workdir):
    return [entry["scores"] for entry in json.loads((workdir / "evaluations.json").read_text())]


def learns_from_its_own_tokens(workdir):
    steps, lines = tiny_run.curve(workdir), tiny_run.lines(workdir)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    # The engine has the learner's parameters of the version that it names: replays of half of the groups refuse other ones.
    assert all(step["trust/num_refused"] == 0 for step in steps) and any(step["trust/num_checked"] for step in lines)
    return all(step["loss/mismatch_kl"] < 1e-6 for step in steps if step["sync/lag"] == 0)


@pytest.fixture(scope="module")
def exclusive(tmp_path_factory):
    """The environment of processes of which one alone may use devices."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "jax_plugins" / "exclusive").mkdir(parents=True)
    (folder / "jax_plugins" / "exclusive" / "__init__.py").write_text(LOCK)
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    return {"PYTHONPATH": str(folder), "DEVICE_LOCK": str(folder / "lock"), "JAX_PLATFORMS": ""}


def test_one_process_learns_the_same_bits_as_two(trained, exclusive, tmp_path):
    workdir, (local, _) = tmp_path / "w", trained
    run(workdir, {}, env=exclusive)
    processes = pathlib.Path(exclusive["DEVICE_LOCK"] + ".processes").read_text().split("\n")[:-1]
    assert processes[0] == "" and {*processes[1:]} == {"cpu"}  # no other one could take the device, if it imported JAX
    assert tiny_run.curve(workdir) == tiny_run.curve(local) and tiny_run.learned(workdir) == tiny_run.learned(local)
    assert scores(workdir) == scores(local)
    assert made_by(workdir, 6) == {key_of(workdir, "server")}
    assert sorted(log.name for log in (workdir / "logs").rglob("*.log")) == ["learner.log", "worker0.log"]
    # The lock is real: two processes do not get the device.
    fields = {"topology.mode": "local", "rl.num_steps": 1}
    refused = tiny_run.run(tmp_path / "two", env=exclusive, **fields)
    assert refused.returncode == 1 and "the server process ended with code 17" in refused.stderr


def test_a_checkpoint_is_scored_in_one_process(exclusive, tmp_path):
    workdir = tmp_path / "w"
    run(workdir, {"rl.num_steps": 2})
    argv = tiny_run.command(workdir, module="rl.evaluate", **{"topology.mode": "colocated", "rl.num_steps": 2})
    before = scores(workdir)
    argv += ["--step=newest"]
    env = os.environ | exclusive
    result = subprocess.run(argv, cwd=tiny_run.ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert scores(workdir) == before


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ("quickstart", {}),
        ("quickstart", {"mesh.rollout_devices": 4}),
        (
            "quickstart",
            {
                "mesh.rollout_devices": 4,
                "mesh.tensor": 2,
                "model.num_kv_heads": 2,
                "rl.max_lag": 1,
                "inference.mesh.tensor": 2,
            },
        ),
        ("quickstart_moe", {"mesh.expert": 4, "inference.mesh.expert": 2, "rl.max_lag": 1}),
        ("quickstart", {"lora.rank": 2, "optimizer.learning_rate": 1e-2, "mesh.rollout_devices": 4}),
    ],
)
def test_both_layouts_on_eight_devices(tmp_path, config, fields):
    run(tmp_path / "w", fields, config, env={"JAX_NUM_CPU_DEVICES": "8"})
    assert learns_from_its_own_tokens(tmp_path / "w")
    assert any(step["sync/lag"] > 0 for step in tiny_run.lines(tmp_path / "w")) == ("rl.max_lag" in fields)


@pytest.mark.parametrize("num_rollout_devices", [0, 2])
def test_each_host_serves_its_own_devices(tmp_path, num_rollout_devices):
    workdir, fields = tmp_path / "w", {"mesh.fsdp": -1, "mesh.rollout_devices": num_rollout_devices}
    fields |= {"topology.mode": "colocated", "rl.max_lag": 1}
    results = test_train_hosts.finish(test_train_hosts.start(workdir, num_devices=8, **fields), timeout_s=280)
    assert all(code == 0 for code, _, _ in results), [(code, err[-2000:]) for code, _, err in results]
    assert learns_from_its_own_tokens(workdir)
    used = set().union(*(made_by(workdir, step) for step in range(1, 7)))
    assert used == {key_of(workdir, "server"), key_of(workdir, "server1")}
    (attempt,) = (workdir / "logs").iterdir()
    assert {log.name for log in attempt.iterdir()} == {"learner.log", "worker0.log", "worker1.log"}
