"""A run on the real model with default settings trusts its own workers. Ones that are accused are in tests/rl/test_train_mix.py."""

import json
import subprocess
import sys

import pytest

from rl.experiment.reporting import metrics
from rl.trust.verification import run_bands
from tests.support import real_model, tiny_run

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.mark.real
def test_a_run_on_a_real_model_trusts_its_own_worker_and_measures_it(tmp_path):
    """The reproduction of "all workers of this run are banned" at step 1, but for sizes: 8 tokens, 2 steps of 64 rollouts."""
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {
        "init_from": real_model.folder("bfloat16"),
        "env.name": "dataset",
        "env.options.path": tmp_path / "sums.jsonl",
        "env.options.reward": "number",
        "sampling.max_tokens": 8,
        "rl.prompts_per_step": 8,
        "rl.num_steps": 2,
        "evaluation.num_tasks": 1,
        "trust.invited_rate": 1.0,  # each of the 16 groups is replayed, so that the measurement ends
        "trust.min_rate": 1.0,
    }
    options = (f"--config.{name}={value}" for name, value in fields.items())
    argv = [sys.executable, "-m", "rl.train", "--config=configs/finetune.py", f"--workdir={tmp_path / 'w'}", *options]
    done = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = metrics.read(tmp_path / "w" / "metrics.jsonl", "rl")
    assert len(steps) == 2 and all(step["rollout/num_tokens"] >= 64 for step in steps)  # 8 groups of 8 each
    assert "banned" not in done.stdout and "differ from their replay" not in done.stdout
    measured = json.loads((tmp_path / "w" / run_bands.FILE).read_text())["measured"]
    assert measured["rollouts"] >= run_bands.MIN_ROLLOUTS
    assert 0 < measured["error_mean"] < {"float32": 1e-4, "bfloat16": 0.1}[measured["numerics"]["dtype"]]
