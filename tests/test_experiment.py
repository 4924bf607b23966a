"""What every command does first: mistakes of the user end in one line, and bind no working directory."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from configs import quickstart
from rl import experiment

ROOT = pathlib.Path(__file__).resolve().parent.parent
MISTAKES = {
    "field": ("quickstart", ["--config.rl.num_stepz=3"], "no field 'num_stepz'; Did you mean \"num_steps\"", 2),
    "section": ("quickstart", ["--config.modell.x=3"], "no field 'modell'; Did you mean \"model\"", 2),
    "type": ("quickstart", ["--config.rl.num_steps=abc"], "--config.rl.num_steps=abc: invalid literal for int()", 2),
    "file": ("nope", [], "the config file cannot be read: No such file or directory: 'configs/nope.py'", 2),
    "argument": ("quickstart", ["--config.seed=1", "extra"], "argument 'extra' is not a flag", 1),
    "mesh": ("quickstart", ["--config.mesh.fsdp=7"], "fsdp=7 x expert=1 x context=1 x tensor=1 does not fit", 1),
    "rows": ("quickstart", ["--config.mesh.fsdp=8", "--config.train.rows=3"], "train.rows = 3 does not divide", 1),
}


def test_a_mistake_ends_in_one_line_and_leaves_nothing(tmp_path):
    """All of them at once: a process is mostly its imports."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "8"}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "rl.train", f"--config=configs/{config}.py", f"--workdir={tmp_path / 'w'}", *extra],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (config, extra, _, _) in MISTAKES.items()
    }
    for name, process in processes.items():
        _, errors = process.communicate(timeout=300)
        _, _, message, code = MISTAKES[name]
        assert process.returncode == code, (name, errors)
        assert errors.startswith("error: ") and errors.count("\n") == 1 and message in errors, (name, errors)
    assert not (tmp_path / "w").exists()


def resolved(**changes):
    config = quickstart.get_config()
    for name, value in changes.items():
        section, _, field = name.partition("__")
        config[section][field] = value
    return experiment.resolve(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl__loss": "ppo2"}, "rl.loss = 'ppo2' is unknown; choose one of "),
        ({"rl__samples_per_prompt": 0}, "rl.samples_per_prompt = 0 must be at least 1"),
        ({"trust__check_fraction": 1.5}, r"trust.check_fraction = 1.5 must be in \[0, 1\]"),
        ({"sampling__temperature": 0.0}, "sampling.temperature = 0.0 must be above 0"),
        ({"train__row_length": 32}, "inference.max_model_len = 64 exceeds train.row_length = 32"),
        ({"topology__mode": "remote"}, "needs topology.servers"),
        ({"objective__policy_coef": 0.0}, "leaves nothing to learn from"),
        ({"objective__policy_coef": 0.0, "objective__teacher_coef": 1.0}, "name another in objective.reference_model"),
        ({"objective__reference_model": "dir"}, "nothing reads it; set objective.teacher_coef"),
        ({"objective__entropy_coef": -0.1}, "entropy_coef = -0.1 must be at least 0"),
        ({"rl__loss": "decoupled_ppo"}, "set objective.old_logprobs = 'learner'"),
        ({"rl__loss": "gspo", "rl__average": "samples"}, "set rl.average = 'tokens'"),
        ({"rl__samples_per_prompt": 1}, "nothing to be compared with"),
        ({"rl__overlong_buffer": 99}, "rl.overlong_buffer = 99 must lie in 1..12"),
        ({"evaluation__samples_per_task": 4}, "raise evaluation.temperature"),
        ({"warmup__patience": 2}, "set warmup.eval_every"),
        ({"optimizer__schedule": "cosine", "optimizer__total_steps": 20}, "its floor for the rest of the run"),
        ({"model__vocab_size": 64}, "model.vocab_size = 64 is smaller than the tokenizer's 265 entries"),
    ],
)
def test_what_no_single_field_can_check(changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(**changes)


def test_a_workdir_belongs_to_its_config_from_the_first_step_on(tmp_path):
    one, other, moved = resolved(), resolved(rl__prompts_per_step=7), resolved(mesh__fsdp=1, rl__num_steps=7)
    for chosen in (other, one, moved, one):  # nothing was done yet: a mistake may be corrected
        with experiment.open_workdir(tmp_path / "w", chosen) as workdir:
            saved = json.loads((workdir / "config.json").read_text())["config"]
            assert saved == json.loads(chosen.raw.to_json())
    (workdir / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')
    with experiment.open_workdir(tmp_path / "w", moved):  # where it runs and how long may change
        pass
    with pytest.raises(ValueError, match="rl.prompts_per_step was 32, now 7;"), experiment.open_workdir(workdir, other):
        pass
    with (
        experiment.open_workdir(workdir, one),
        pytest.raises(ValueError, match="in use by another run"),
        experiment.open_workdir(workdir, one),
    ):
        pass


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="it is not a run"), experiment.open_workdir(tmp_path, resolved()):
        pass
    with pytest.raises(ValueError, match="is a file"), experiment.open_workdir(tmp_path / "thesis.tex", resolved()):
        pass
