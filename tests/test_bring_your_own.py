"""docs/bring_your_own.md: its code runs as it is, in folders that the checkout does not know, and with the tools that it names."""

import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest

from rl import envs
from rl.experiment import experiment
from rl.learning.batch import training_batch
from tests.support import commands, pages, rollouts, tiny_run

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "bring_your_own.md").read_text()
TINY = {name: value for name, value in tiny_run.TINY.items() if not name.startswith("env.")} | {"rl.num_steps": 2}


def blocks(part):
    return pages.blocks(PAGE, part)


def num_lines(code):
    return sum(bool(line.strip()) for _, text in code for line in text.splitlines())


def run(folder, *arguments, module="rl.train"):
    """Runs a command in a folder of the user, with a policy as small as in the other tests of whole runs."""
    fields = [f"--config.{name}={value}" for name, value in TINY.items()]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", module, *arguments, *fields]
    return subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


def test_the_page_has_the_whole_code_and_it_is_short():
    assert num_lines(blocks("A dataset")) < 25
    (environment, _) = blocks("An environment")
    assert environment[1] == (ROOT / "examples" / "sort_letters" / "environment.py").read_text()
    assert num_lines([environment]) < 40


@pytest.mark.slow
def test_a_package_elsewhere_trains_and_other_code_does_not_go_on(tmp_path):
    """Environment, loss, advantages, metrics, and config of a package in no checkout; server, worker, and validator included."""
    shutil.copytree(ROOT / "examples" / "sort_letters", tmp_path / "mine" / "sort_letters")
    here = ["--code=mine", "--config=mine/sort_letters/config.py", f"--workdir={tmp_path / 'w'}"]
    done = run(tmp_path, *here)
    assert done.returncode == 0, done.stderr
    lines = tiny_run.lines(tmp_path / "w")
    assert len(lines) == 2
    for name in ("own/solved_groups", "own/position"):
        assert all(name in line for line in lines), name
    assert sum(line["trust/num_accepted"] for line in lines) == 32 and not sum(
        line["trust/num_refused"] for line in lines
    )
    saved = json.loads((tmp_path / "w" / "config.json").read_text())["config"]
    file = f"{tmp_path}/mine/sort_letters/environment.py:build"
    assert saved["env"]["digest"] == envs.digest(file, {}) and saved["rl"]["digest"]
    assert saved["rl"]["loss_function"].startswith("sort_letters.learning:clipped ")
    with open(tmp_path / "mine" / "sort_letters" / "environment.py", "a") as code:
        code.write("# changed\n")
    changed = run(tmp_path, *here)
    assert changed.returncode == 1 and changed.stderr.count("\n") == 1
    assert "code or data of the run (env.digest, rl.digest, rl.loss_function) changed since its" in changed.stderr


@pytest.mark.slow
def test_the_dataset_of_the_page_trains_with_its_commands(tmp_path):
    (_, rows), *_, (_, train), (_, reward) = blocks("A dataset")
    sums = [f'{{"question": "What is {a} + {b}?", "answer": "{a + b}"}}\n' for a in range(9) for b in range(9)]
    (tmp_path / "sums.jsonl").write_text(rows + "".join(sums))
    (tmp_path / "own_reward.py").write_text(reward)
    words = train.replace("\\\n", " ").replace("configs/", f"{ROOT}/configs/").split()[3:]
    for own in ([], ["--code=.", "--config.env.options.reward=own_reward:reward", "--workdir=own"]):
        done = run(tmp_path, *words, *own)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / ("own" if own else "runs/questions")
        assert sum(line["trust/num_accepted"] for line in tiny_run.lines(folder)) == 32
        env = json.loads((folder / "config.json").read_text())["config"]["env"]
        assert 70 < env["num_tasks"] < 83 and len(env["digest"]) == 64


def test_an_environment_is_shown_before_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(4)))
    options = [f"path={tmp_path}/sums.jsonl", "reward=number"]
    assert commands.run("rl.envs", "try", "dataset", *options) == 0  # 3 tasks: one row is held out
    text = capsys.readouterr().out
    assert (
        text.count("scores of its answer: reward 1 ")
        == 3
        == text.count("scores of the answer of the next task: reward 0 ")
    )
    assert "task 0 (train): " in text and "  user: 0+1\n  answer: 1\n" in text and "warning" not in text
    assert "mean reward of its answer 1; mean reward of the answer of the next task 0" in text and "digest " in text
    examples = ["--code", str(ROOT / "examples"), "--split", "held_out", "--sandbox", "off", "--n", "1"]
    assert commands.run("rl.envs", "try", "sort_letters.environment:build", "max_length=4", *examples) == 0
    assert "task 0 (held_out)" in capsys.readouterr().out
    (tmp_path / "none.py").write_text(
        "from rl.envs import environment as e\n\n\ndef build():\n    return e.Environment('', lambda i, split: "
        "e.Task('', i, split, ({'role': 'user', 'content': 'x'},), ''), lambda task, text: {'reward': 0.5})\n"
    )
    assert commands.run("rl.envs", "try", f"{tmp_path}/none.py:build", "--n", 1) == 0
    assert "warning: an answer gets less than 1" in capsys.readouterr().out
    for words, message in (
        (
            ["reverse_text", "max_len=4"],
            "has no option 'max_len' of env.options (did you mean max_length?); choose from ",
        ),
        (["reverse_text", "4"], "'4' is not an option; write OPTION=VALUE"),
        (["reverse_text", "--n", "0"], "--n 0 is below 1; raise it"),
        (["revers_text"], "does not exist (did you mean reverse_text?); choose one of "),
    ):
        assert commands.run("rl.envs", "try", *words) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_the_functions_of_the_example_are_those_of_its_run(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "examples")])
    config = runpy.run_path(str(ROOT / "examples" / "sort_letters" / "config.py"))["get_config"]()
    exp = experiment.resolve(config)
    assert (exp.loss.__name__, exp.loss_options, exp.config.rl.loss) == ("clipped", {"high": 2.0}, "clipped")

    def group(*rewards):
        return [
            rollouts.make(i, reward=reward, rewards={"reward": reward, "position": 1.0})
            for i, reward in enumerate(rewards)
        ]

    np.testing.assert_allclose(exp.credit._compared(np.array([0, 1, 1, 0.5])), [-0.75, 0.25, 0.25, -0.25])
    found = training_batch.assemble(1, [group(1, 1), group(0, 1)], exp.credit, {}).metrics
    assert (found["own/solved_groups"], found["own/position"]) == (0.5, 1.0)
    config.rl.advantage = "statistics:fmean"
    with pytest.raises(ValueError, match="rl.advantage returned 0.5 for 2 rewards; return one finite number for each"):
        experiment.resolve(config).credit._compared(np.arange(2.0))
    for name, words in (
        ("shutil:copyfile", "cannot be called as"),
        ("sort_letters.learning:nothing", "has no function"),
    ):
        config.rl.advantage = name
        with pytest.raises(ValueError, match=words):
            experiment.resolve(config)
