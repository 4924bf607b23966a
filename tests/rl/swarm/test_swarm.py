"""A swarm as processes: those that die start again, up to a limit, and a signal leaves nothing."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import httpx
import pytest

from rl.experiment.reporting import metrics
from rl.swarm import processes, session, supervisor
from rl.trust import audit
from sharding.system.logs import run_logs
from tests.support import commands, proxy, recorded_run, tiny_run

pytestmark = pytest.mark.usefixtures("compile_fast")
STAND_IN = "tests.support.stand_in_role"
COMMAND = [STAND_IN, "broken", ""]  # ends with one line, and is quick


def test_pauses_double_and_too_many_deaths_in_a_row_are_the_end():
    node, now_s, pauses = supervisor.Node(supervisor.Spec("a", "worker", COMMAND)), 0.0, []
    for num_deaths in range(1, supervisor.MAX_DEATHS + 1):
        node.die(now_s, 0.0)
        assert len(node.died_s) == num_deaths
        pauses.append(node.start_s - now_s)
        now_s += pauses[-1] + supervisor.WINDOW_S  # it lives for long each time, but gets no further
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    calm, pauses = supervisor.Node(node.spec), []
    for i in range(20):
        calm.die(100.0 * i, i + 1.0)
        pauses.append(calm.start_s - 100.0 * i)
    assert pauses == [1.0, 2.0, 4.0] + [8.0] * 17


def test_a_process_that_keeps_dying_ends_the_swarm_with_its_last_words(tmp_path):
    lines, clock = [], itertools.count()
    with supervisor.Supervisor(run_logs.Folder(tmp_path), lines.append, lambda spec: 0.0) as kept:
        kept.add(supervisor.Spec("worker0", "worker", COMMAND))
        patiently = lambda: kept.tick(400.0 * next(clock), vital=())  # noqa: E731
        proxy.wait_until(lambda: patiently() or len(lines) == 2, 60, "deaths that do not count later")
        with pytest.raises(ValueError, match=r"worker0 .* code 1: error: it is broken.* 5 times within 300 s, or"):
            proxy.wait_until(lambda: kept.tick(400.0 * next(clock)), 60, "the end")
    assert len(lines) == 2 + supervisor.MAX_DEATHS - 1
    assert (tmp_path / "worker0.log").read_text().count("====") == 2 + supervisor.MAX_DEATHS


def test_one_process_alone_is_kept_alive_until_it_died_too_often(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor, "TICK_S", 0.01)
    spec = supervisor.Spec("learner", "learner", COMMAND)
    assert re.search("it is broken.* 5 times within 300 s", supervisor.keep(spec, run_logs.Folder(tmp_path)))
    assert supervisor.keep(supervisor.Spec("learner", "learner", ["platform"]), run_logs.Folder(tmp_path)) == ""


def test_signals_act_as_before_once_the_processes_are_gone():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [*map(signal.getsignal, numbers)]
    with contextlib.ExitStack() as stack:
        ended = supervisor.ended_by_signal(stack)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [signal.SIGTERM]
    assert [*map(signal.getsignal, numbers)] == before


def test_an_excluded_validator_is_a_problem_though_an_evaluation_came_last(tmp_path):
    workdir = recorded_run.write(tmp_path, 1, prompts_per_step=2)
    (workdir / "evaluations.json").write_text('[{"step": 0, "scores": {}}]')
    lines = [{"phase": "rl", "step": 1, "trust/num_validators_excluded": 1.0}, {"phase": "evaluation", "step": 1}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = audit.run(workdir, metrics.Progress())
    assert [problem[:12] for problem in session.summary(found, {}, {})[1]] == ["a validator "]


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
        return [line["step"] for line in metrics.read_steps(workdir)]
    except (OSError, ValueError):
        return []


def start(workdir, file, *options, module="rl.swarm", **overrides) -> subprocess.Popen:
    command = [*tiny_run.command(workdir, module=module, **overrides), *options]
    return subprocess.Popen(command, cwd=tiny_run.ROOT, stdout=file, stderr=subprocess.STDOUT)


def swarm_of_stand_ins(workdir, output):
    """Runs `python -m rl.swarm` for a worker and a server that do nothing."""
    os.chdir(commands.ROOT)
    with open(output, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    specs = [
        supervisor.Spec(name, name[:-1], [STAND_IN, name, str(workdir / "log")]) for name in ("worker0", "server0")
    ]

    def plan(*args, **options):
        return processes.Swarm(specs, "http://127.0.0.1:9", {}, {})

    processes.plan = plan
    sys.exit(commands.run("rl.swarm", "--config=configs/quickstart.py", f"--workdir={workdir}", "--validators=0"))


def test_a_killed_node_starts_again_and_a_signal_leaves_no_process(tmp_path):
    """The whole command, with processes that stand in for its nodes, one of which is stopped."""
    workdir, output = tmp_path / "run", tmp_path / "output"
    swarm = commands.CONTEXT.Process(target=swarm_of_stand_ins, args=(workdir, output))
    swarm.start()

    def pids(name):
        return [pid for pid, command in processes_of(workdir).items() if f"{STAND_IN} {name}" in command]

    try:
        proxy.wait_until(lambda: (workdir / "log").exists() and len(pids("worker0")) == len(pids("server0")) == 1)
        assert json.loads((workdir / "targets.json").read_text()) == []
        os.kill(pids("worker0")[0], signal.SIGKILL)
        proxy.wait_until(lambda: (workdir / "log").read_text().count("worker0") == 2)
        assert "worker0" in output.read_text() and "starts again" in output.read_text()
        os.kill(pids("server0")[0], signal.SIGSTOP)
        os.kill(swarm.pid, signal.SIGTERM)
        swarm.join(60)
        assert swarm.exitcode == 128 + signal.SIGTERM and not pids("worker0") + pids("server0")
        assert "the same command resumes" in output.read_text().splitlines()[-1]
    finally:
        swarm.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_killed_worker_comes_back_and_a_signal_leaves_no_process(tmp_path, number):
    workdir, output = tmp_path / "run", tmp_path / "output"
    with open(output, "w") as file:
        counts = ("--servers=1", "--relays=0", "--workers=1", "--validators=0")
        overrides = {"warmup.num_steps": 0, "rl.num_steps": 10**5}
        swarm = start(workdir, file, *counts, **overrides)
    try:

        def until(condition, what):
            proxy.wait_until(lambda: condition() or swarm.poll() is not None, 120, what)
            assert swarm.poll() is None, output.read_text()

        until(lambda: steps(workdir), "the first step")
        nodes = {}
        for one in json.loads((workdir / "targets.json").read_text()):
            (address,), labels = one["targets"], one["labels"]
            health, text = (httpx.get(f"http://{address}/{path}", trust_env=False) for path in ("health", "metrics"))
            nodes[labels["node"]] = health.json()["status"], "# TYPE " in text.text
        assert nodes == dict.fromkeys(("learner", "server0", "worker0"), ("ok", True))
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
        assert "the same command resumes" in output.read_text().splitlines()[-1]
        if number == signal.SIGINT:
            done = steps(workdir)[-1]
            with open(output, "a") as file:
                swarm = start(workdir, file, *counts, **overrides)
            until(lambda: steps(workdir)[-1] > done + 2, "steps after the restart")
            swarm.send_signal(number)
            assert swarm.wait(30) == 128 + number
        assert {"learner", "server0", "worker0"} <= {log.stem for log in (workdir / "logs" / "attempt_0001").iterdir()}
    finally:
        swarm.kill()
