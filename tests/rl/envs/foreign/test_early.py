"""The environment of another framework loads while the learner imports JAX, and the rehearsal takes the process that loads it."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from configs import quickstart
from models.text import tokenizer
from rl.envs.foreign import early, isolation
from rl.envs.hub import tryout
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib
from tests.support import foreign_sums

ROOT = pathlib.Path(__file__).resolve().parents[4]
NAME = "plain:begun:build"
ENVIRONMENT = (
    foreign_sums.CODE
    + """
import os, pathlib, sys, time

def build(*, marker="", hang=False, others=()):
    print("the environment loads", file=sys.stderr, flush=True)
    if marker:
        pathlib.Path(f"{marker}.new").write_text(str(os.getpid()))
        os.rename(f"{marker}.new", marker)
    while hang:
        time.sleep(1)
    return Sums([f"{n} + {n}" for n in range(50)])
"""
)
# In place of JAX, the first slow import of the learner. Its status is 7 if the environment's process runs by then.
JAX = """
import os, pathlib, signal, sys, time
for _ in range(600):
    if pathlib.Path(os.environ["INTELLAX_TEST_MARKER"]).exists():
        if "INTELLAX_TEST_SIGINT" in os.environ:
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(7)
    time.sleep(0.1)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs the environment, and returns a config of a run with it."""
    monkeypatch.setenv(package_lib.FOLDER, str(tmp_path / "installed"))
    (tmp_path / "begun.py").write_text(ENVIRONMENT)
    installation.install(NAME, python=sys.executable, paths=[str(tmp_path)])
    config = quickstart.get_config()
    config.env.name, config.env.options, config.inference.max_model_len = NAME, {"others": [1, 2]}, 512
    return config


@pytest.fixture
def learner(tmp_path, install):
    """Returns a function that starts `rl.train` with the environment, and returns its status, its errors, and the environment's process."""
    (tmp_path / "fake" / "jax").mkdir(parents=True)
    (tmp_path / "fake" / "jax" / "__init__.py").write_text(JAX)
    marker = tmp_path / "marker"

    def start(*options, **variables):
        variables = {"PYTHONPATH": f"{tmp_path}/fake", "INTELLAX_TEST_MARKER": str(marker), **variables}
        command = [sys.executable, "-m", "rl.train", "--config=configs/quickstart.py", f"--workdir={tmp_path}/w"]
        command += [f"--config.env.name={NAME}", f"--config.env.options.marker={marker}", "--config.trust.sandbox=off"]
        command += [*options, "--config.env.options.hang=True"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr, int(marker.read_text()) if marker.exists() else 0

    return start


def test_the_environment_loads_before_the_learner_imports_jax(learner):
    status, errors, process = learner()
    assert status == 7, errors
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)  # it ended with the learner, though it had not loaded


def test_ctrl_c_during_the_imports_ends_the_process(learner, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    status, errors, process = learner(INTELLAX_TEST_SIGINT="1", TMPDIR=str(tmp_path / "tmp"))
    assert status == 128 + signal.SIGINT, errors
    assert errors.splitlines()[:1] == ["the environment loads"]
    assert [line.partition(":")[0] for line in errors.splitlines()[1:]] == ["error"]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert not [*(tmp_path / "tmp").iterdir()]  # no folder is left


@pytest.mark.parametrize("sandbox", ["off", "auto"])
def test_the_rehearsal_takes_the_process_that_was_begun(install, sandbox, capfd, monkeypatch):
    if sandbox == "auto" and isolation.problem():
        pytest.skip("no bubblewrap here")
    install.trust.sandbox = sandbox
    begun, lines = early.begin(install), []
    assert begun is not None and bool(begun.unix_path) == (sandbox == "auto")
    resolved = install.copy_and_resolve_references()
    resolved.env.options.others = (1, 2)  # as in a frozen config
    tryout.rehearse(resolved, tokenizer.byte_chatml(), lines.append, begun)
    lines = [line for line in lines if "for 3 s so far" not in line]  # of a busy machine
    assert len(lines) == 1 and "loaded, and an episode of each split played, in " in lines[0]
    assert begun.child is None  # the host has ended it
    begun.close()
    assert not begun.unix_path or not os.path.exists(os.path.dirname(begun.unix_path))
    assert capfd.readouterr().err.count("the environment loads") == 1


def test_a_process_of_other_options_is_not_taken(install, capfd):
    begun = early.begin(install)
    assert begun is not None and begun.child is not None
    install.env.options.others = [3]
    tryout.rehearse(install, tokenizer.byte_chatml(), lambda line: None, begun)
    process = begun.child.process
    begun.close()
    begun.close()
    assert process.returncode is not None
    assert "Traceback" not in capfd.readouterr().err


def test_the_error_of_a_process_that_was_begun_is_that_of_the_rehearsal(install):
    install.env.options = {"other": 1}
    begun = early.begin(install)
    assert begun is not None and begun.child is not None
    begun.child.process.wait(60)  # long before the rehearsal
    with pytest.raises(
        ValueError, match=r"cannot be loaded: TypeError: .*'other'.*; correct env.options = {'other': 1}"
    ):
        tryout.rehearse(install, tokenizer.byte_chatml(), lambda line: None, begun)
    begun.close()


def test_no_process_is_begun_for_other_runs(install, tmp_path):
    assert early.begin(quickstart.get_config()) is None
    install.topology.process_id = 1
    assert early.begin(install) is None
    install.topology.process_id = -1
    install.env.name = "plain:absent:build"  # the rehearsal reports it
    assert early.begin(install) is None
