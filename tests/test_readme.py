"""Runs the README's commands as they are written.

`.ci/run` does their installation in a fresh environment. The quickstart runs in tests/rl/test_train.py with few steps, and here as it is.
"""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.support import tiny_run

ROOT = pathlib.Path(__file__).resolve().parents[1]


def commands() -> list[str]:
    return re.findall(r"```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_are_two_commands_of_one_line_and_a_real_run():
    quickstart, real, tests = commands()
    assert "--config=configs/finetune.py" in real
    for command in (quickstart, tests):
        assert "\n" not in command
        install = command.split(" && ")[2]
        assert install.startswith("pip install -r requirements.txt")
        for name in re.findall(r"-r (\S+)", install):
            assert (ROOT / name).exists()
    assert tests.split(" && ")[-1] == "python -m pytest"
    # Failed tests run once more, by the same line.
    assert (ROOT / ".ci" / "run").read_text().count("\npython -m pytest") == 1


def test_the_first_screen_has_the_three_ways_in():
    screen = "".join((ROOT / "README.md").read_text().splitlines(keepends=True)[:45])
    ways = ("--config=configs/quickstart.py", "colab.research.google.com", "--config=configs/finetune.py")
    assert sorted(screen.index(way) for way in ways) == [screen.index(way) for way in ways]


def quickstart(workdir: pathlib.Path) -> list[str]:
    """Returns the first command without its installation, in this environment and for this `workdir`."""
    python, *words, _ = shlex.split(commands()[0].split(" && ")[-1])
    assert python == "python"
    return [sys.executable, *words, f"--workdir={workdir}"]


def test_the_quickstart_is_what_the_tests_of_training_run(tmp_path):
    assert tiny_run.command(tmp_path)[: -len(tiny_run.TINY)] == quickstart(tmp_path)


@pytest.mark.slow
def test_the_quickstart_command(tmp_path):
    argv = quickstart(tmp_path / "w")
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    assert "report.html" in result.stdout
    before, after = re.search(r"held-out avg@1: ([\d.]+) .* -> ([\d.]+) ", result.stdout).groups()
    assert float(before) <= 0.5 and float(after) >= 0.9
