"""Whole runs of a mix of environments, as commands: batches, metrics, and scores of each, an audit, and learning."""

import json
import subprocess
import sys

import pytest

from rl.trust import audit
from tests.support import commands, tiny_run

pytestmark = pytest.mark.usefixtures("compile_fast")
OWN = ("env.", "rl.samples_per_prompt", "rl.prompts_per_step")
TINY = {name: value for name, value in tiny_run.TINY.items() if not name.startswith(OWN)} | {
    "rl.prompts_per_step": 3,
    "rl.num_steps": 4,
    "envs.letters.samples_per_prompt": 4,
    "envs.digits.samples_per_prompt": 6,
    "envs.letters.options.reward": "lcs",  # an untrained model scores 0 on "exact", and no advantage means no gradient
    "envs.digits.options.reward": "lcs",
}


def run(workdir, config="examples/mix.py", fields=TINY, **changes):
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    flags = [f"--config.{name}={value}" for name, value in (fields | changed).items()]
    command = [sys.executable, "-m", "rl.train", f"--config={config}", f"--workdir={workdir}", *flags]
    result = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("mix") / "w"
    return workdir, run(workdir)


def test_each_batch_has_the_ratios_and_the_metrics_of_each_environment(finished):
    workdir, result = finished
    for step in tiny_run.lines(workdir):
        assert (step["env/letters/num_groups"], step["env/digits/num_groups"]) == (2, 1)
        assert step["trust/num_accepted"] == 2 * 4 + 6 and step["trust/num_refused"] == 0
        assert step["env/letters/num_tokens"] + step["env/digits/num_tokens"] == step["rollout/num_tokens"]
        mean = (8 * step["env/letters/reward"] + 6 * step["env/digits/reward"]) / 14
        assert step["rollout/reward"] == pytest.approx(mean)
        assert step["env/letters/scores/lcs"] == pytest.approx(step["env/letters/reward"])
        assert step["loss/mismatch_kl"] < 1e-6
    scores = json.loads((workdir / "evaluations.json").read_text())[-1]["scores"]
    assert scores["avg@1"] == pytest.approx((scores["letters/avg@1"] + scores["digits/avg@1"]) / 2)
    assert audit.main([str(workdir)]) == 0
    assert "held-out digits/avg@1" in result.stdout


def test_the_environments_of_a_config_are_shown(capsys):
    assert commands.run("rl.envs", "try", "--config", "examples/mix.py", "--n", "1") == 0
    shown = capsys.readouterr().out
    assert "environment letters: reverse_text, 2 of 3 groups, samples_per_prompt 8" in shown
    assert "environment digits: reverse_text, 1 of 3 groups, samples_per_prompt 12" in shown
    assert commands.run("rl.envs", "try", "--config", "examples/mix.py:/none", "--n", "1") == 1
    assert "envs.gsm8k: envs.gsm8k.options.path = '/none' has no train.jsonl" in capsys.readouterr().err
    assert commands.run("rl.envs", "try") == 1


@pytest.mark.slow
def test_both_environments_of_a_mix_are_learned(tmp_path):
    """The held-out scores of both rise from copying, below 0.4, to reversing."""
    run(tmp_path / "w", fields={})
    scores = [one["scores"] for one in json.loads((tmp_path / "w" / "evaluations.json").read_text())]
    for env in ("letters", "digits"):
        assert scores[0][f"{env}/avg@1"] < 0.4 and scores[-1][f"{env}/avg@1"] > 0.8, (env, scores)
