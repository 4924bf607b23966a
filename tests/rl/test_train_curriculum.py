"""Runs with a curriculum: an audit recomputes every draw, a resume is equal bit for bit, and a changed result is found."""

import json
import re

import pytest

from rl import audit
from rl.protocol import curriculum
from rl.reporting import metrics
from tests.support import tiny_run

POOLS = {
    "rl__curriculum": "pools",
    "env__num_tasks": 12,
    "rl__refill": 1.0,
    "rl__max_lag": 0,
    "env__options__reward": "exact",
}


def results(workdir):
    files = sorted((workdir / "rollouts").glob(f"step_*/{curriculum.FILE}"))
    return {file.parent.name: file.read_text() for file in files}


def audited(workdir):
    return audit.run(workdir, metrics.Progress())


@pytest.mark.slow
def test_a_run_with_pools_is_audited_and_resumed(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    one = tiny_run.run(whole, warmup__num_steps=60, **POOLS)
    assert one.returncode == 0, one.stderr
    assert tiny_run.run(cut, warmup__num_steps=60, rl__num_steps=4, **POOLS).returncode == 0
    assert tiny_run.run(cut, warmup__num_steps=60, **POOLS).returncode == 0
    assert results(whole) == results(cut) and len(results(whole)) == 6
    assert tiny_run.learned(whole) == tiny_run.learned(cut)
    lines = tiny_run.lines(whole)
    assert all(
        line["curriculum/unseen"] + line["curriculum/hard"] + line["curriculum/normal"] + line["curriculum/easy"] == 12
        for line in lines
    )
    assert lines[-1]["curriculum/unseen"] < lines[0]["curriculum/unseen"] <= 8
    for workdir in (whole, cut):
        found = audited(workdir)
        assert not found.findings and found.checked["curriculum"] == 6 and found.checked["task"] >= 96

    path = whole / "rollouts" / "step_2" / curriculum.FILE
    saved = json.loads(path.read_text())
    saved["results"][0][3] = 1.0 - saved["results"][0][3]
    path.write_text(json.dumps(saved))
    found = audited(whole)
    (line,) = [line for line in found.findings if line.startswith("step 2: curriculum")]
    assert re.search("not that of its rollouts|the digest is", line)


@pytest.mark.slow
def test_a_run_climbs_its_levels(tmp_path):
    """The quickstart's task on a ladder. Any reward opens the next level, since this model is hardly trained."""
    argv = tiny_run.command(
        tmp_path / "w", rl__curriculum="levels", curriculum__level_up=0.0, curriculum__level_groups=2
    )
    config = tmp_path / "ladder.py"
    config.write_text(
        "from configs import quickstart\n\n\ndef get_config():\n    c = quickstart.get_config()\n"
        "    del c.env.options['min_length'], c.env.options['max_length']\n"
        "    c.env.options.ladder = dict(min_length=(1, 2, 3), max_length=(2, 3, 4))\n    return c\n"
    )
    argv = [f"--config={config}" if arg.startswith("--config=") else arg for arg in argv]
    result = tiny_run.subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    levels = [line["curriculum/level"] for line in tiny_run.lines(tmp_path / "w")]
    assert levels == sorted(levels) and levels[-1] >= 1
    assert not audited(tmp_path / "w").findings
