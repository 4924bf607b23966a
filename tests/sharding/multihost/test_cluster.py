"""Several processes train as one: `jax.distributed` on one machine, CPU collectives over loopback."""

import json
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]

# argv: coordinator, number of processes, this one's number, devices of each, file for the parameters.
PROGRAM = """
import json, sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, processes, mine, devices, path = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_disable_most_optimizations", True)
if processes > 1:
    jax.distributed.initialize(address, processes, mine)
from jax.experimental import multihost_utils
from rl.batch import packing
from rl.learner import optimizers, train_step
from tests.support import small_learner as small

config = optimizers.OptimizerConfig(1e-2, 2, 0.9, 0.95, 1e-8, 0.01, 1.0, name="muon")
sizes = {"data": 2 if processes > 1 else 1, "fsdp": -1}
options = {"clip_low": 0.5, "clip_high": 0.5}
learner = small.make(small.DENSE, "gspo", options, sizes, train_step.make_optimizer(config, small.DENSE))
state, step = train_step.init_state(jax.random.key(0), learner), train_step.jit_train_step(learner)
batch = packing.place(small.pack(rows=4, capacity=4), learner.mesh)
lines = []
for _ in range(3):
    state, metrics = step(state, batch)
    lines.append({name: float(x) for name, x in sorted(metrics.items())})  # every process can read them
params = jax.tree.leaves(multihost_utils.process_allgather(state.params, tiled=True))
if mine == 0:
    np.savez(path, *params)
print(json.dumps([jax.device_count(), lines]))
"""


def train(path, processes, devices):
    """(metrics of each step as every process saw them, parameters)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROGRAM, address, str(processes)]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([*command, str(mine), str(devices), str(path)], **options) for mine in range(processes)]
    try:
        outputs = [process.communicate(timeout=500) for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), outputs[0][1][-3000:]
    found = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert [count for count, _ in found] == [processes * devices] * processes
    arrays = np.load(path)
    return [lines for _, lines in found], [arrays[name] for name in arrays]


@pytest.mark.slow
def test_two_and_four_processes_train_as_one(tmp_path):
    """Muon on GSPO over data x fsdp: stacks, streams and counts all cross processes."""
    (expected,), params = train(tmp_path / "one.npz", 1, 1)
    for processes, devices in ((2, 2), (4, 1)):
        metrics, same_params = train(tmp_path / f"{processes}.npz", processes, devices)
        assert all(lines == metrics[0] for lines in metrics)  # all hosts report one number
        for line, other in zip(metrics[0], expected, strict=True):
            for name, value in other.items():
                # Float32 sums over four devices in another order, three steps of a rate of 0.01 on.
                assert line[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        for a, b in zip(same_params, params, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
