"""The logs of all processes in one order, filtered, followed over a restart, and harmless to a terminal."""

import subprocess
import sys
import time

import pytest

from rl import logs
from sharding.system.logs import run_logs
from tests.support import proxy, tiny_run

RUN = "ab" * 32


def write(folder, name, *texts):
    with folder.open(name) as log:
        for text in texts:
            log.write(text.encode())
            time.sleep(0.002)


def attempt(workdir, number):
    path = workdir / "logs" / f"attempt_{number:04}"
    path.mkdir(parents=True, exist_ok=True)
    return run_logs.Folder(path, RUN)


def shown(capsys, *argv):
    assert logs.main([*map(str, argv)]) == 0
    return [line.split(" ", 3)[3] for line in capsys.readouterr().out.splitlines()]


def test_lines_of_all_processes_are_in_the_order_of_time_with_level_run_and_attempt(tmp_path, capsys):
    first, second = attempt(tmp_path, 1), attempt(tmp_path, 2)
    write(first, "server", "old")
    write(second, "server", "serving", "error: no memory")
    write(second, "worker0", "groups 1")
    write(second, "worker10", "notice: a retry")
    write(second, "server", "serving again")
    whole = ["server serving", "server error: no memory", "worker0 groups 1", "worker10 notice: a retry"]
    whole += ["server serving again"]
    assert shown(capsys, tmp_path) == whole
    assert shown(capsys, tmp_path, "--role", "worker") == whole[2:4]
    assert shown(capsys, tmp_path, "--role=worker0,server") == [*whole[:3], whole[4]]
    assert shown(capsys, "--role", "worker0", tmp_path) == whole[2:3]  # the option first
    assert logs.main([str(tmp_path), "--role=wroker"]) == 1 and "server, worker0, worker10" in capsys.readouterr().err
    assert shown(capsys, tmp_path, "--level=WARNING") == [whole[1], whole[3]]
    assert shown(capsys, tmp_path, "--attempt=1") == ["server old"]
    logs.main([str(tmp_path), "--level=ERROR"])
    assert " ERROR abababab/2 server error: no memory" in capsys.readouterr().out


def test_an_unfinished_line_waits_and_control_characters_are_shown_by_their_code(tmp_path, capsys):
    folder = attempt(tmp_path, 1)
    write(folder, "worker0", "\x1b[2J\x07 clears the screen", "\u202ereversed")
    with (folder.path / "worker0.log").open("ab") as file:
        file.write(b"2026-11-26T00:00:00.000+00:00 INFO abababab/1 worker0 half a li")
    assert shown(capsys, tmp_path) == ["worker0 \\x1b[2J\\x07 clears the screen", "worker0 \\x202ereversed"]


@pytest.mark.parametrize("options", [[], ["--attempt=3"]])
def test_a_folder_without_logs_is_one_line(tmp_path, capsys, options):
    if options:
        attempt(tmp_path, 1)
    assert logs.main([str(tmp_path), *options]) == 1
    assert "give the working directory of a run, and one of them with --attempt" in capsys.readouterr().err


def test_an_attempt_is_begun_once_per_process_and_shared_with_its_children(tmp_path, monkeypatch):
    assert run_logs.folder(tmp_path, RUN).attempt == run_logs.folder(tmp_path, RUN).attempt == 1
    run_logs.folder.cache_clear()
    second = run_logs.folder(tmp_path, RUN)
    assert second.attempt == 2 and not second.is_inherited
    run_logs.folder.cache_clear()
    assert run_logs.folder(tmp_path, RUN, is_first=False).path == second.path  # another host of the same start
    monkeypatch.setenv(run_logs.VARIABLE, str(second.path))
    run_logs.folder.cache_clear()
    assert run_logs.folder(tmp_path, RUN).path == second.path and run_logs.folder(tmp_path, RUN).is_inherited
    run_logs.folder.cache_clear()
    assert run_logs.folder(tmp_path / "other", RUN).attempt == 1  # a scratch folder of the same process


def test_following_survives_rotation_and_misses_no_last_line(tmp_path, monkeypatch):
    """A file that became shorter was read no more, and the last words of an attempt were lost when the next one began."""
    monkeypatch.setattr(logs, "PERIOD_S", 0.0)
    folder, end = attempt(tmp_path, 1), lambda text: text.split(" ", 4)[4]
    write(folder, "worker0", "one", "two", "three")
    shown = map(end, logs.lines(tmp_path, (), run_logs.LEVELS, None, is_following=True))
    assert [next(shown) for _ in range(3)] == ["one", "two", "three"]
    (folder.path / "worker0.log").write_bytes(b"")
    (folder.path / "gone.log").symlink_to(tmp_path / "absent")
    (tmp_path / "logs" / "attempt_old1").mkdir()
    write(folder, "worker0", "four")
    assert next(shown) == "four"
    write(folder, "worker0", "error: a\nb")
    write(attempt(tmp_path, 2), "server", "again")
    assert [next(shown) for _ in range(3)] == ["error: a", "b", "again"]


def test_following_goes_on_with_the_next_attempt(tmp_path):
    write(attempt(tmp_path, 1), "worker0", "first")
    command = [sys.executable, "-u", "-m", "rl.logs", str(tmp_path), "--follow"]
    with (tmp_path / "out").open("wb") as out, subprocess.Popen(command, stdout=out, cwd=tiny_run.ROOT) as child:
        text = (tmp_path / "out").read_text
        try:
            proxy.wait_until(lambda: "worker0 first\n" in text(), 120)
            write(attempt(tmp_path, 1), "worker0", "more")
            proxy.wait_until(lambda: "worker0 more\n" in text(), 120)
            write(attempt(tmp_path, 2), "server", "again")
            proxy.wait_until(lambda: "abababab/2 server again\n" in text(), 120)
            assert text().count("\n") == 3
        finally:
            child.kill()
