"""A run with VinePPO: its workers' continuations are replayed as all rollouts, accepted, and only the samples train."""

import subprocess
import sys

import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.reporting import metrics


@pytest.mark.slow
def test_every_continuation_of_a_run_is_replayed(tmp_path):
    fields = {"env.options.reward": "lcs", "trust.invited_rate": 1.0, "trust.min_rate": 1.0, "warmup.num_steps": 3}
    fields |= {"rl.credit": "vine", "rl.advantage": "rloo", "vine.step_tokens": 2, "vine.num_continuations": 2}
    fields |= {"rl.num_steps": 2, "rl.prompts_per_step": 4, "rl.samples_per_prompt": 4, "evaluation.num_tasks": 4}
    command = [sys.executable, "-m", "rl.train", "--config=configs/quickstart.py", f"--workdir={tmp_path / 'w'}"]
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr
    steps = [row for row in metrics.read(tmp_path / "w" / "metrics.jsonl") if row["phase"] == "rl"]
    for number, row in enumerate(steps, start=1):
        rollouts = parquet.read(tmp_path / "w" / "rollouts" / f"step_{number}" / "accepted.parquet")
        assert row["trust/num_checked"] == row["trust/num_accepted"] == len(rollouts) and row["trust/num_refused"] == 0
        episodes = rollout_lib.episodes([one for one in rollouts if one.task.group == rollouts[0].task.group])
        assert [[one.trains for one in own] for own in episodes] == [
            [True, *[False] * (len(own) - 1)] for own in episodes
        ]
        assert row["loss/num_tokens"] <= sum(one.sampled_mask.sum() for one in rollouts if one.trains)
    assert len(steps) == 2 and any(one.branch for one in rollouts)
