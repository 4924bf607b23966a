"""Whole runs of further kinds, as commands, which an audit finds clean: episodes of two turns, VinePPO, and curricula."""

import json
import os
import re
import subprocess

import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment.reporting import metrics
from rl.protocol import curriculum
from rl.trust import audit
from tests.support import tiny_run

pytestmark = pytest.mark.slow
VINE = {"rl.credit": "vine", "rl.advantage": "rloo", "vine.step_tokens": 2, "vine.num_continuations": 2}
POOLS = {
    "rl.curriculum": "pools",
    "env.num_tasks": 12,
    "rl.refill": 1.0,
    "rl.max_lag": 0,
    "env.options.reward": "exact",
}
LADDER = """from configs import quickstart


def get_config():
    c = quickstart.get_config()
    del c.env.options['min_length'], c.env.options['max_length']
    c.env.options.ladder = dict(min_length=(1, 2, 3), max_length=(2, 3, 4))
    return c
"""


def run(workdir, config="quickstart", **fields):
    """Returns the metrics of the steps of a run."""
    result = tiny_run.run(workdir, config, **fields)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    return tiny_run.lines(workdir)


def audited(workdir):
    return audit.run(workdir, metrics.Progress())


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
    assert not audited(workdir).findings


def test_every_continuation_of_a_run_is_replayed(tmp_path):
    """Continuations of a run with VinePPO are replayed as all rollouts, accepted, and only the samples train."""
    steps = run(tmp_path / "w", **VINE, **{"rl.num_steps": 2, "trust.invited_rate": 1.0, "trust.min_rate": 1.0})
    for number, row in enumerate(steps, start=1):
        rollouts = parquet.read(tmp_path / "w" / "rollouts" / f"step_{number}" / "accepted.parquet")
        assert row["trust/num_checked"] == row["trust/num_accepted"] == len(rollouts) and row["trust/num_refused"] == 0
        for own in rollout_lib.episodes([one for one in rollouts if one.task.group == rollouts[0].task.group]):
            assert [one.trains for one in own] == [True, *[False] * (len(own) - 1)]
        assert row["loss/num_tokens"] <= sum(one.sampled_mask.sum() for one in rollouts if one.trains)
    assert len(steps) == 2 and any(one.branch for one in rollouts)


def test_a_run_with_pools_is_audited_and_resumed(tmp_path):
    """An audit recomputes every draw, a resume is equal bit for bit, and a changed result is found."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    lines = run(whole, warmup__num_steps=60, **POOLS)
    for num_steps in (4, 6):
        run(cut, warmup__num_steps=60, rl__num_steps=num_steps, **POOLS)
    found = [sorted((workdir / "rollouts").glob(f"step_*/{curriculum.FILE}")) for workdir in (whole, cut)]
    one, other = ({file.parent.name: file.read_text() for file in files} for files in found)
    assert one == other and len(one) == 6
    assert tiny_run.learned(whole) == tiny_run.learned(cut)
    pools = ("unseen", "hard", "normal", "easy")
    assert all(sum(line[f"curriculum/{pool}"] for pool in pools) == 12 for line in lines)
    assert lines[-1]["curriculum/unseen"] < lines[0]["curriculum/unseen"] <= 8
    for workdir in (whole, cut):
        found = audited(workdir)
        assert not found.findings and found.checked["curriculum"] == 6 and found.checked["task"] >= 96

    path = whole / "rollouts" / "step_2" / curriculum.FILE
    saved = json.loads(path.read_text())
    saved["results"][0][3] = 1.0 - saved["results"][0][3]
    path.write_text(json.dumps(saved))
    (line,) = [line for line in audited(whole).findings if line.startswith("step 2: curriculum")]
    assert re.search("not that of its rollouts|the digest is", line)


def test_a_run_climbs_its_levels(tmp_path):
    """The quickstart's task on a ladder. Any reward opens the next level, since this model is hardly trained."""
    (tmp_path / "ladder.py").write_text(LADDER)
    config = os.path.relpath(tmp_path / "ladder", tiny_run.ROOT / "configs")
    levels = {"rl.curriculum": "levels", "curriculum.level_up": 0.0, "curriculum.level_groups": 2}
    reached = [line["curriculum/level"] for line in run(tmp_path / "w", config, **levels)]
    assert reached == sorted(reached) and reached[-1] >= 1
    assert not audited(tmp_path / "w").findings
