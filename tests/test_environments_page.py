"""docs/environments.md: its code runs as it is, and its commands in their order."""

import asyncio
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys

import pytest

from rl.envs.hub import probes, rules
from rl.envs.interface import environment, scripted_model
from tests.support import commands, pages

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "environments.md").read_text()


def blocks(part):
    return pages.blocks(PAGE, part)


@pytest.fixture
def boxes(tmp_path):
    (_, code), _ = blocks("Your own environment in 30 lines")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 30
    (tmp_path / "boxes.py").write_text(code)
    return tmp_path / "boxes.py"


def test_the_environment_of_the_page_plays_and_passes_the_check(boxes, capsys):
    env = runpy.run_path(str(boxes))["build"](boxes=3)
    task = env.make_task(0, "train")

    def play(*replies):
        return asyncio.run(env.play(task, scripted_model.ScriptedModel(scripted_model.in_order(*replies))))

    opened = [{"tool": "open_box", "arguments": {"box": box}} for box in range(3)]
    assert play(*opened, task.answer) == {"reward": 1.0, "opened": 3.0}
    assert play(*opened[:1], "no idea") == {"reward": 0.0, "opened": 1.0}
    find = {"tool": "open_box", "arguments": {"box": task.info["box"]}}
    assert play(find) == {"reward": 0.0, "opened": 4.0}  # the number in the result of a tool is no answer
    sizes = ["--tasks", 16, "--scored", 2, "--episodes", 2]
    assert commands.run("rl.envs", "check", f"{boxes}:build", "boxes=3", *sizes) == 0, capsys.readouterr().out


def test_the_tool_of_the_page_is_called():
    ((_, code),) = blocks("Tools")
    tool, task = {"tool": "add", "arguments": {"a": 2, "b": [3, 4]}}, environment.Task("", 0, "train", (), answer="9")
    exec(code, made := {})
    model = scripted_model.ScriptedModel(scripted_model.in_order(tool, "9"))
    assert asyncio.run(made["play"](task, model)) == {"reward": 1.0, "calls": 1.0}
    assert [messages[-1]["content"] for messages, *_ in model.calls[1:]] == ["9"]


def test_the_page_names_each_check():
    source = pathlib.Path(rules.__file__).read_text()
    used = {*re.findall(r'"((?:runtime|semantic|statistical|hub)\.\w+)"', source), *probes.CHECKS.values()}
    (text,) = re.findall(r"^## Check and publish\n(.*)", PAGE, re.MULTILINE | re.DOTALL)
    assert used == {*re.findall(r"`((?:runtime|semantic|statistical|hub)\.\w+)`", text)}


@pytest.mark.slow
def test_the_commands_of_the_page_work_in_their_order(tmp_path):
    ((_, text),) = blocks("Check and publish")
    signer, variables = "", os.environ | {"PYTHONPATH": str(ROOT), "INTELLAX_ENVIRONMENTS": str(tmp_path / "cache")}
    for line in text.strip().splitlines():
        words = shlex.split(line.replace("$SIGNER", signer or "-"))[1:]
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        signer = (re.findall(r"signed by ([0-9a-f]{64})", done.stdout) or [signer])[0]
    assert (tmp_path / "installed" / "sums" / "__init__.py").exists()
