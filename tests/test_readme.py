"""The README's two commands: what they name exists, and they do what it says.

The install half is what `.ci/run` does in a fresh environment; here the rest is run, the quickstart with few steps.
"""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests import test_train

ROOT = pathlib.Path(__file__).resolve().parent.parent


def commands() -> list[str]:
    return re.findall(r"```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_are_two_commands_of_one_line():
    quickstart, tests = commands()
    for command in (quickstart, tests):
        assert "\n" not in command
        install = command.split(" && ")[2]
        assert install.startswith("pip install -r requirements.txt")
        for name in re.findall(r"-r (\S+)", install):
            assert (ROOT / name).exists()
    assert tests.split(" && ")[-1] == "python -m pytest"
    assert (ROOT / ".ci" / "run").read_text().count("python -m pytest") == 1


@pytest.mark.parametrize("steps", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_the_quickstart_command(tmp_path, steps):
    argv = shlex.split(commands()[0].split(" && ")[-1])
    assert argv[:3] == ["python", "-m", "rl.train"]
    argv = [sys.executable if a == "python" else a for a in argv if not a.startswith("--workdir")]
    argv.append(f"--workdir={tmp_path / 'w'}")
    if steps:
        argv += [f"--config.{k}={v}" for k, v in test_train.TINY.items()] + [f"--config.rl.num_steps={steps}"]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    assert "report.html" in result.stdout
    if steps is None:
        before, after = re.search(r"held-out avg@1: ([\d.]+) .* -> ([\d.]+) ", result.stdout).groups()
        assert float(before) <= 0.5 and float(after) >= 0.9
