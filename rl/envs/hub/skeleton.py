"""A new environment package, `python -m rl.envs init NAME`: manifest, a runnable environment, and its test."""

import pathlib
import re

from rl.envs.hub import manifest as manifest_lib
from sharding.system import atomic_file

_PROJECT = """[project]
name = "{dashed}"
version = "0.1.0"
description = "Sums of two numbers."
requires-python = ">=3.11"

[project.entry-points."intellax.environments"]
{name} = "{name}:build"

[tool.intellax.env]
kind = "pure"
tags = ["arithmetic"]

[tool.flit.module]
name = "{name}"

[build-system]
requires = ["flit_core>=3.9"]
build-backend = "flit_core.buildapi"
"""
_CODE = '''"""Sums of two numbers."""

import random

from rl.envs import environment


def build(*, largest: int = 99, seed: int = 0) -> environment.Environment:
    """Builds the environment; its keyword arguments are the options `env.options`."""

    def draw(number: int, index: int, split: str) -> environment.Task:
        a, b = random.Random(number).choices(range(largest + 1), k=2)
        messages = ({{"role": "user", "content": f"{{a}} + {{b}} = ?"}},)
        return environment.Task("{name}", index, split, messages, answer=str(a + b))

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        return {{"reward": float(completion.strip() == task.answer)}}

    return environment.Environment("{name}", environment.drawn("{name}", seed, draw), score)
'''
_TEST = """import {name}


def test_an_answer_gets_the_reward_and_silence_does_not():
    env = {name}.build(largest=9)
    task = env.make_task(0, "train")
    assert env.score(task, task.answer) == {{"reward": 1.0}} and env.score(task, "") == {{"reward": 0.0}}
"""


def write(name: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the package of an environment `name` into a new folder; returns its files. Raises ValueError if the folder has files."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"{name!r} is not a name for a package; use lower-case letters, digits, and _")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has files; choose another --folder")
    texts = {"pyproject.toml": _PROJECT, f"{name}/__init__.py": _CODE, f"tests/test_{name}.py": _TEST}
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(folder / path, text.format(name=name, dashed=name.replace("_", "-")).encode())
    manifest_lib.read(folder)
    return [folder / path for path in texts]
