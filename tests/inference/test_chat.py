"""The chat in a terminal says at once that it has nothing to talk to."""

import subprocess

from tests.support import commands


def test_a_run_that_does_not_exist_is_not_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)  # no server starts
    assert commands.run("inference.chat", "--weights", tmp_path / "none") == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/none does not exist; give the --workdir of a run\n"
