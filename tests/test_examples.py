"""Runs the notebooks as they are, and checks their results."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_grpo_by_hand_learns():
    cells = json.loads((ROOT / "examples" / "grpo_by_hand.ipynb").read_text())["cells"]
    code = ["".join(line for line in c["source"] if line[0] != "%") for c in cells if c["cell_type"] == "code"]
    scope = {}
    for source in code:
        exec(compile(source, "grpo_by_hand", "exec"), scope)
    rewards = scope["rewards"]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.2
