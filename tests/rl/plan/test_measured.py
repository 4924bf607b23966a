"""Times of programs next to their bounds: the text, and the command bench/accelerator.py as a toy on a CPU."""

import os
import subprocess
import sys

from rl.plan import roofline
from tests.support import tiny_run


def test_a_time_is_compared_with_its_bound():
    """An H100 needs at least 1 s for 989 TFLOP of arithmetic or 3.35 TB of its memory; half of the arithmetic is the model's."""
    chip = roofline.of_device("NVIDIA H100 80GB HBM3")
    assert chip == roofline.DEVICES["NVIDIA H100"] and roofline.of_device("TPU v5 lite") == roofline.CHIPS["v5e"]
    assert roofline.of_device("cpu") is None
    found = roofline.compared(4.0, 989e12, 0.5 * 3350e9, 0.5 * 989e12, num_chips=1, chip=chip)
    assert found == ", at least 1 s (arithmetic): 25% of that rate; MFU 12.5%, at most 50.0%"
    assert (
        roofline.compared(2.0, 989e12, 3350e9, 0.0, num_chips=2, chip=chip)
        == ", at least 1 s (memory): 50% of that rate"
    )


def test_a_cpu_times_a_toy_and_says_so(tmp_path):
    dims = dict(model_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=16)
    fields = {f"model.{name}": size for name, size in dims.items()} | {
        "rl.prompts_per_step": 2,
        "inference.num_slots": 4,
    }
    command = [sys.executable, "-m", "bench.accelerator", "--config=configs/quickstart.py", "--repeats=1"]
    command += [f"--trace={tmp_path}", *(f"--config.{name}={value}" for name, value in fields.items())]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    for words in ("a toy", "train step: ", "swap: ", "prefill: ", "decode: 4 slots"):
        assert words in done.stdout
    assert "at least" not in done.stdout and done.stdout.count(" tokens/s") == 3
    traced = {path.name for path in tmp_path.iterdir() if [*path.rglob("*.xplane.pb")]}
    assert traced == {"train", "swap", "prefill", "decode"}
