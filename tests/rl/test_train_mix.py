"""Whole runs of a mix of environments on a folder, as commands: batches, metrics, and scores of each, an audit, and learning."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from inference.proofs import toploc
from rl.experiment import experiment
from rl.trust import audit
from rl.trust.verification import measurement, run_bands, sequential_test
from tests.rl import test_finetune
from tests.support import commands, doubles, tiny_run

pytestmark = pytest.mark.usefixtures("compile_fast")
FIELDS = {
    **{
        "rl.num_steps": 2,
        "rl.prompts_per_step": 3,
        "rl.max_lag": 0,
        "evaluation.num_tasks": 4,
        "lora.rank": 2,
        "sampling.max_tokens": 12,
    },
    **{
        "inference.max_model_len": 128,
        "inference.prefill_batch": 4,
        "model.dtype": "float32",
        "model.param_dtype": "float32",
    },
    **{"envs.letters.name": "reverse_text", "envs.letters.ratio": 2.0, "envs.letters.samples_per_prompt": 4},
    **{"envs.digits.name": "reverse_text", "envs.digits.ratio": 1.0, "envs.digits.samples_per_prompt": 6},
    # An untrained model scores 0 on "exact", and no advantage means no gradient.
    **{"envs.letters.options.reward": "lcs", "envs.digits.options.reward": "lcs"},
    **{"envs.digits.options.alphabet": "hgfedcba", "trust.invited_rate": 1.0},
}


def run(workdir, *options):
    command = [sys.executable, "-m", "rl.train", f"--workdir={workdir}", *options]
    result = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of configs/finetune.py on a folder of Hugging Face's, under bands that no rollout keeps: a thousandth of the rounding of float32."""
    base = tmp_path_factory.mktemp("mix")
    ties = dict(tie_span=1e-4, ties=(1e-3,) * sequential_test.TIE_WIDTHS)
    bands = dataclasses.replace(
        measurement.FLOORS, **ties, margin=1e-12, logprob=1e-12, scatter=1e-12, bias=1e-12, spread=1e-12, alone=1e3
    )
    tolerance = dataclasses.replace(doubles.FLOAT32, proofs=toploc.LOOSEST)
    run_bands.save(base / "bands.json", tolerance, bands, {})
    fields = FIELDS | {"init_from": test_finetune.checkpoint(base / "checkpoint"), "trust.bands": base / "bands.json"}
    options = [f"--config.{name}={value}" for name, value in fields.items()]
    return base / "w", run(base / "w", "--config=configs/finetune.py", *options)


def test_a_folder_trains_after_its_baseline(finished):
    """Its score stands before the first step, and the sizes that follow from the memory are those of config.json."""
    workdir, done = finished
    chosen = ", ".join(re.findall(r"^chosen for .*: (.*)", done.stdout, re.MULTILINE))
    saved = json.loads((workdir / "config.json").read_text())["config"]
    for name, value in (part.split(" = ") for part in chosen.split(", ")):
        assert str(experiment.flat(saved)[name]) == value
    assert saved["tokenizer"] == str(workdir.parent / "checkpoint")
    assert saved["model"]["num_layers"] == 2 and saved["model"]["model_dim"] == 32
    first = re.search(r"^rl +step +1/2 ", done.stdout, re.MULTILINE).start()
    assert done.stdout.index("held-out, baseline: avg@1") < first and "held-out, version 2: avg@1" in done.stdout


def test_own_workers_accused_by_statistics_end_no_run(finished):
    """The first replayed groups raise the flag, which bans no worker."""
    workdir, done = finished
    assert len(tiny_run.lines(workdir)) == 2
    assert done.stdout.count("differ from their replay more than honest ones did") == 1
    assert "this bans no worker" in done.stdout and "are banned" not in done.stdout + done.stderr


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
    run(tmp_path / "w", "--config=examples/mix.py")
    scores = [one["scores"] for one in json.loads((tmp_path / "w" / "evaluations.json").read_text())]
    for env in ("letters", "digits"):
        assert scores[0][f"{env}/avg@1"] < 0.4 and scores[-1][f"{env}/avg@1"] > 0.8, (env, scores)
