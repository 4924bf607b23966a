"""Times the loading of a checkpoint and measures its memory, next to safetensors' own reader.

    python -m bench.load
    python -m bench.load --peer-python=/path/to/venv/bin/python     # a venv with torch and safetensors

1. A checkpoint of random bfloat16 weights with the dims of Qwen3-0.6B, and layers enough for `--gigabytes`, is written to a
   temporary folder and read once, so that both sides find it in the page cache.
2. In turns, each in a fresh process: `models.hf.load` onto the CPU device, every kernel transposed into our layout; and
   `safetensors.torch.load_file` with a copy of each tensor, which a program that keeps them must make.
3. Printed: seconds (median and best), and the peak of the process's memory above its memory before, over the bytes of
   the checkpoint. Acceptance: at most 1.5 times the peer's seconds, at most 1.3 times the bytes.
"""

import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from models import hf, transformer
from sharding.mesh import rules
from sharding.system import cli
from tests.support import tiny

OURS = """
import sys, jax
from models import hf
jax.block_until_ready(jax.numpy.zeros(1))
def load(folder):
    return jax.block_until_ready(hf.load(folder))
"""
PEER = """
import sys, glob, torch, safetensors.torch
def load(folder):
    return [{name: x.clone() for name, x in safetensors.torch.load_file(path).items()} for path in sorted(glob.glob(folder + "/*.safetensors"))]
"""
MEASURE = """
import json, threading, time
def resident():
    # Anonymous memory and mapped pages alike; VmHWM would count the interpreter's start.
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))
before, peak, done = resident(), [0], threading.Event()
def watch():
    while not done.wait(0.01):
        peak[0] = max(peak[0], resident())
watcher = threading.Thread(target=watch)
watcher.start()
start = time.perf_counter()
held = load(sys.argv[1])
seconds = time.perf_counter() - start
done.set()
watcher.join()
print(json.dumps({"seconds": seconds, "bytes": max(peak[0], resident()) - before}))
"""


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peer-python", help="interpreter with torch and safetensors; only ours is timed without")
    args = parser.parse_args()
    sides = {"ours": (sys.executable, OURS)}
    if args.peer_python:
        sides["load_file + copy"] = (args.peer_python, PEER)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "checkpoint"
        size = write(folder, args.gigabytes)
        runs = {name: [] for name in sides}
        for turn in range(args.turns + 1):
            for name, (python, program) in sides.items():
                output = subprocess.check_output([python, "-c", program + MEASURE, str(folder)])
                if turn:  # the first one filled the page cache
                    runs[name].append(json.loads(output))
    print(f"{size / 1e9:.2f} GB in bfloat16, {args.turns} turns, CPU")
    medians = []
    for name, results in runs.items():
        seconds, memory = [result["seconds"] for result in results], max(result["bytes"] for result in results) / size
        medians.append(statistics.median(seconds))
        print(
            f"  {name:18} {medians[-1]:6.2f} s median, {min(seconds):6.2f} s best; peak memory {memory:.2f} x the bytes"
        )
    if args.peer_python:
        print(f"  ours / peer        {medians[0] / medians[1]:6.2f}")
    return 0


def write(folder: pathlib.Path, gigabytes: float) -> int:
    """Writes a checkpoint and returns its bytes. All parameters repeat the same random numbers."""
    config = tiny.published("Qwen/Qwen3-0.6B", scan_layers=False)
    one, two = (transformer.num_params(dataclasses.replace(config, num_layers=n)) for n in (1, 2))
    layers = max(1, round((gigabytes * 1e9 / 2 - (2 * one - two)) / (two - one)))
    config = dataclasses.replace(config, num_layers=layers)
    noise = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(jnp.bfloat16)
    params = jax.tree.map(lambda spec: np.resize(noise, spec.shape), transformer.specs(config), is_leaf=rules.is_spec)
    hf.save(folder, config, params)
    return transformer.num_params(config) * 2


if __name__ == "__main__":
    sys.exit(main())
