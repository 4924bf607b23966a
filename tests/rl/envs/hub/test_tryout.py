"""`rl.envs try` of environments of several turns shows each branch, its scores, and failures."""

import pathlib

from tests.support import commands

BROKEN = """
from rl.envs.interface import environment

def build(*, seed=0):
    async def play(task, model):
        await model.chat(task.messages)
        return {"reward": 1 / task.index}
    def make_task(index, split):
        return environment.Task("broken", index, split, ({"role": "user", "content": f"task {index}"},), answer="1")
    return environment.Environment("broken", make_task, play=play)
"""


def test_episodes_are_shown_with_all_that_the_model_reads(capfd):
    assert commands.run("rl.envs", "try", "wordle", "letters=3", "--n", 2) == 0
    out = capfd.readouterr().out
    assert out.count("<|im_start|>system") == 4  # two tasks, each with its answer and with random words
    assert out.count("solved 1") == 2
    assert "calls 1 to 6" in out
    assert commands.run("rl.envs", "try", "search", "--n", 2) == 0
    out = capfd.readouterr().out
    assert "<tool_response>" in out.partition("random words")[2]


def test_a_failed_episode_is_named_and_the_exit_code_is_1(capfd, tmp_path: pathlib.Path):
    (tmp_path / "broken.py").write_text(BROKEN)
    assert commands.run("rl.envs", "try", f"{tmp_path}/broken.py:build", "--n", 2) == 1
    out = capfd.readouterr().out
    assert out.count("failed: ZeroDivisionError") == 2
    assert out.count("scores: reward 1") == 2
