"""The chat in a terminal says at once that it has nothing to talk to, and else how to leave it."""

import io
import subprocess
import sys

import httpx
import pytest

from inference import chat
from tests.support import commands


def test_a_run_that_does_not_exist_is_not_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)  # no server starts
    assert commands.run("inference.chat", "--weights", tmp_path / "none") == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/none does not exist; give the --workdir of a run\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_told_how_to_leave(is_terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: is_terminal)
    chat.talk(httpx.Client(), {}, None)
    shown = capsys.readouterr()
    assert ("Ctrl-D ends the chat" in shown.err) == is_terminal and shown.out == "> \n"
