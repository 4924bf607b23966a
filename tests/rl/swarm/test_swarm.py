"""A swarm as processes: those that die start again, up to a limit, and a signal leaves nothing."""

import json
import os
import pathlib
import signal
import subprocess

import pytest

from rl.reporting import metrics
from rl.swarm import supervisor
from tests.support import proxy, serving, tiny_run

COMMAND = ["rl.worker", "--orchestrator", "nonsense"]  # ends with one line about its URL


def test_pauses_double_and_too_many_deaths_in_a_row_are_the_end():
    deaths, now_s, pauses = supervisor.Deaths(), 0.0, []
    while (start_s := deaths.restart_s(now_s)) is not None:
        pauses.append(start_s - now_s)
        now_s = start_s + 1.0
    assert pauses == [1.0, 2.0, 4.0, 8.0] and len(pauses) == supervisor.MAX_DEATHS - 1
    calm = supervisor.Deaths()
    assert [calm.restart_s(100.0 * i) - 100.0 * i for i in range(20)] == [1.0, 2.0, 4.0] + [8.0] * 17


def test_a_process_that_keeps_dying_ends_the_swarm_with_its_last_words(tmp_path):
    lines, clock = [], iter(range(0, 10**6, 1))
    with supervisor.Supervisor(tmp_path, lines.append) as processes:
        processes.add(supervisor.Spec("worker0", "worker", COMMAND))
        with pytest.raises(ValueError, match=r"worker0 .* code 1: error: .*'nonsense'.* died 5 times within 300 s"):
            proxy.wait_until(lambda: processes.tick(0.1 * next(clock)), 60, "the end")
    assert len(lines) == supervisor.MAX_DEATHS - 1 and (tmp_path / "worker0.log").read_text().count("====") == 5


def processes_of(workdir) -> dict[int, str]:
    """Returns the command lines of the processes that name a directory, by pid."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"{workdir}/" in f"{command}/" and int(folder.name) != os.getpid():
            found[int(folder.name)] = command
    return found


def steps(workdir) -> list[int]:
    try:
        return [line["step"] for line in metrics.read(workdir / "metrics.jsonl") if line["phase"] == "rl"]
    except (OSError, ValueError):
        return []


def start(workdir, file, *options, **overrides) -> subprocess.Popen:
    command = [*tiny_run.command(workdir, module="rl.swarm", **overrides), *options]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | serving.ENVIRONMENT
    return subprocess.Popen(command, cwd=tiny_run.ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_killed_worker_comes_back_and_a_signal_leaves_no_process(tmp_path, number):
    workdir, output = tmp_path / "run", tmp_path / "output"
    with open(output, "w") as file:
        counts = ("--servers=1", "--relays=0", "--workers=1", "--validators=0")
        swarm = start(workdir, file, *counts, **{"warmup.num_steps": 0, "rl.num_steps": 10**5})
    try:

        def until(condition, what):
            proxy.wait_until(lambda: condition() or swarm.poll() is not None, 120, what)
            assert swarm.poll() is None, output.read_text()

        until(lambda: steps(workdir), "the first step")
        (worker,) = [pid for pid, command in processes_of(workdir).items() if "rl.worker" in command]
        os.kill(worker, signal.SIGKILL)
        done = steps(workdir)[-1]
        until(lambda: steps(workdir)[-1] > done + 2, "steps after the worker's death")
        assert "worker0" in output.read_text() and "starts again" in output.read_text()
        stopped = next(pid for pid, command in processes_of(workdir).items() if "inference.serve" in command)
        os.kill(stopped, signal.SIGSTOP)
        swarm.send_signal(number)
        assert swarm.wait(30) == 128 + number
        proxy.wait_until(lambda: not processes_of(workdir), 5, "the end of all processes")
        assert {"learner", "server0", "worker0"} <= {log.stem for log in (workdir / "logs").iterdir()}
    finally:
        swarm.kill()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_swarm_under_faults_ends_its_run(tmp_path, seed):
    workdir, output = tmp_path / "run", tmp_path / "output"
    with open(output, "w") as file:
        overrides = {"rl.num_steps": 30, "rl.max_lag": 2}
        swarm = start(workdir, file, f"--chaos={seed}", "--minutes=2", "--workers=2", **overrides)
        assert swarm.wait(900) == 0, output.read_text()[-4000:]
    assert steps(workdir) == list(range(1, 31)) and not processes_of(workdir)
    assert len([json.loads(line) for line in (workdir / "chaos.jsonl").read_text().splitlines()]) >= 8
    audit = subprocess.run([tiny_run.command(workdir)[0], "-m", "rl.audit", workdir], cwd=tiny_run.ROOT)
    assert audit.returncode == 0
