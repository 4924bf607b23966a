"""Child processes: their logs and their end."""

import datetime
import pathlib
import re

import pytest

from sharding.system import child_process
from sharding.system.logs import run_logs
from tests.support import proxy

COMMAND = ["tests.support.failing_role", "nonsense"]


def test_a_log_keeps_all_starts_with_a_time_per_line_and_an_early_end_is_reported(tmp_path):
    begun = datetime.datetime.now().astimezone()
    deaths, folder = [], run_logs.folder(tmp_path, "ab" * 32)
    for count in (1, 2):
        with child_process.ChildProcess("worker0", COMMAND, folder, deaths.append) as child:
            proxy.wait_until(lambda count=count: len(deaths) == count, 60, "the end of the child")
    _, error = deaths
    assert re.fullmatch(
        rf"the worker0 process ended with code 1: error: .*'nonsense'.*\. Read its log: {child.log}", str(error)
    )
    text = (tmp_path / "logs" / "attempt_0001" / "worker0.log").read_text()
    lines = [run_logs.LINE.fullmatch(line) for line in text.splitlines()]
    times = [datetime.datetime.fromisoformat(line["time"]) for line in lines]
    assert times == sorted(times) and times[0] >= begun - datetime.timedelta(milliseconds=1)
    header = "==== start: python -m tests.support.failing_role nonsense"
    assert [line["text"].startswith("error: ") for line in lines] == [False, True, False, True]
    assert [line["text"] for line in lines[::2]] == [header] * 2
    assert [line["level"] for line in lines] == ["INFO", "ERROR"] * 2
    assert {line.group("run", "attempt", "name") for line in lines} == {("abababab", "1", "worker0")}


def test_a_line_to_a_child_that_has_ended_raises_its_error(tmp_path):
    with child_process.ChildProcess("worker0", COMMAND, run_logs.Folder(tmp_path)) as child:
        child.process.wait(60)
        with pytest.raises(ValueError, match="the worker0 process ended with code 1: error: .*'nonsense'"):
            child.send_line("http://127.0.0.1:9")


def test_a_full_disk_costs_lines_of_the_log_and_not_the_child(tmp_path):
    """The thread that copies its output died, and with it the pipe, so that the child's next line ended it."""
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "worker0.log").symlink_to("/dev/full")
    deaths = []
    with child_process.ChildProcess("worker0", COMMAND, run_logs.Folder(tmp_path), deaths.append):
        proxy.wait_until(lambda: deaths, 60, "the end of the child")
    assert "'nonsense'" in str(deaths[0])


def test_a_child_that_is_stopped_is_not_reported(tmp_path):
    deaths = []
    with child_process.ChildProcess("worker0", [COMMAND[0], "wait"], run_logs.Folder(tmp_path), deaths.append) as child:
        pass
    assert child.process.returncode is not None and not deaths
