"""Faults of a colocated run: each ends it in one line, after which the same command resumes, or changes nothing."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess

import pytest

from tests.rl.swarm.test_swarm import processes_of
from tests.support import proxy, tiny_run

pytestmark = pytest.mark.slow
WAIT_S = 600
# Python imports it when a process starts: the engine's thirtieth call fails.
ENGINE = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rl.topology.colocated_server":
            from inference.engine import engine
            calls, generate = [], engine.Engine.generate
            def fail(self, *args, **options):
                calls.append(0)
                if len(calls) == 30:
                    raise ZeroDivisionError("the thirtieth call")
                return generate(self, *args, **options)
            engine.Engine.generate = fail

sys.meta_path.insert(0, Finder())
"""


def command(workdir, **fields):
    return tiny_run.command(workdir, **{"topology.mode": "colocated", "rl.num_steps": 40} | fields)


@contextlib.contextmanager
def running(workdir, env=None, **fields):
    """Yields (process, path of its output) of a run, which is killed at the end of the block."""
    output, env = workdir.parent / f"output-{len(list(workdir.parent.iterdir()))}", os.environ | (env or {})
    with open(output, "w") as file:
        process = subprocess.Popen(command(workdir, **fields), cwd=tiny_run.ROOT, stdout=file, stderr=file, env=env)
        try:
            yield process, output
        finally:
            process.kill()
            process.wait()


def reach(step, workdir, process):
    proxy.wait_until(lambda: process.poll() is not None or len(tiny_run.lines(workdir)) >= step, WAIT_S)


def workers(workdir) -> list[int]:
    return [pid for pid, line in processes_of(workdir).items() if "rl.worker" in line]


def errors(output: pathlib.Path) -> list[str]:
    text = output.read_text()
    assert "Traceback" not in text, text[-3000:]
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight") / "w"
    with running(workdir) as (process, output):
        assert process.wait(WAIT_S) == 0, output.read_text()[-3000:]
    return workdir


def test_signals_at_random_moments_change_no_bit(straight, tmp_path):
    """The run is killed, stopped, and terminated, also before its first step; its worker is killed and stopped."""
    draw, workdir = random.Random(10), tmp_path / "w"
    for kind in ("kill run", "terminate run", "kill worker", "stop worker", "stop run", "terminate run", "kill run"):
        done = len(tiny_run.lines(workdir))
        with running(workdir) as (process, output):
            proxy.wait_until(output.read_text, WAIT_S)  # its first line comes after the imports
            if kind.endswith("worker") or draw.random() < 0.7:
                reach(done + draw.randint(1, 2), workdir, process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(4 * draw.random() if not workers(workdir) else draw.random() / 2)
            assert process.poll() is None, "the run ended before the fault"
            target = process.pid if kind.endswith("run") else workers(workdir)[0]
            if kind.startswith("stop"):
                for number, pause_s in ((signal.SIGSTOP, 2.0), (signal.SIGCONT, 0.5)):
                    os.kill(target, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(pause_s)
                assert process.poll() in (None, 0), output.read_text()[-3000:]
                continue
            os.kill(target, signal.SIGKILL if kind.startswith("kill") else signal.SIGTERM)
            code, found = process.wait(WAIT_S), errors(output)
            assert (kind, code) in {("kill run", -9), ("kill worker", 1), ("terminate run", 143)}
            if kind != "kill run":
                (line,) = found
                assert (
                    "worker0 process ended with code -9" if "worker" in kind else "the same command resumes"
                ) in line
        proxy.wait_until(lambda: not workers(workdir), WAIT_S)  # no child outlives the run
    with running(workdir) as (process, output):
        assert process.wait(WAIT_S) == 0, output.read_text()[-3000:]
    assert tiny_run.curve(workdir) == tiny_run.curve(straight)


def test_an_engine_that_fails_ends_the_run_which_resumes(straight, tmp_path):
    workdir = tmp_path / "w"
    (tmp_path / "sitecustomize.py").write_text(ENGINE)
    with running(workdir, env={"PYTHONPATH": str(tmp_path)}) as (process, output):
        assert process.wait(WAIT_S) == 1
        (line,) = [line for line in output.read_text().splitlines() if line.startswith("error: ")]
        assert "the inference engine of this process ended: ZeroDivisionError: the thirtieth call; the same" in line
    done = len(tiny_run.lines(workdir))
    assert done < 40
    with running(workdir) as (process, output):
        reach(done + 1, workdir, process)
        with running(workdir) as (second, refusal):  # while the first one runs
            assert second.wait(WAIT_S) == 1 and "is in use by another run" in errors(refusal)[0]
        assert process.wait(WAIT_S) == 0, output.read_text()[-3000:]
    assert tiny_run.curve(workdir) == tiny_run.curve(straight)


def test_a_full_disk_ends_the_run_which_resumes(straight, tmp_path):
    with tiny_run.small_disk(tmp_path, "3m") as disk:
        with running(disk / "w") as (process, output):
            assert process.wait(WAIT_S) == 1
            (line,) = errors(output)
            assert "o space left" in line or "disk is full" in line  # whichever file is next
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        with running(disk / "w") as (process, output):
            assert process.wait(WAIT_S) == 0, output.read_text()[-3000:]
        assert tiny_run.curve(disk / "w") == tiny_run.curve(straight)
