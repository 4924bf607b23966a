"""A whole run of episodes with two turns: real server, worker, validator, and learner, as a command."""

import json
import subprocess

import pytest

from inference.rollouts import parquet
from rl import audit
from tests.support import tiny_run


@pytest.mark.slow
def test_a_run_of_two_turns_trains_verifies_and_reports(tmp_path):
    workdir = tmp_path / "w"
    command = tiny_run.command(workdir)[:3] + ["--config=tests/support/turns_config.py", f"--workdir={workdir}"]
    result = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    steps = tiny_run.lines(workdir)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["trust/num_refused"] == 0 and step["trust/num_accepted"] >= 16 and step["rollout/turns"] == 2
        assert step["loss/mismatch_kl"] < 1e-9 and abs(step["loss/ratio_mean"] - 1) < 1e-4
        assert step["rollout/score_error_frac"] == 0
    rollouts = [one for path in sorted((workdir / "rollouts").rglob("*.parquet")) for one in parquet.read(path)]
    digest = json.loads((workdir / "config.json").read_text())["config"]["env"]["digest"]
    assert rollouts and {one.env_digest for one in rollouts} == {digest} and len(digest) == 64
    assert {len(one.spans) for one in rollouts if one.num_branches == 1} == {2}
    assert audit.main([str(workdir)]) == 0
