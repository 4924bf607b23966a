"""Scores from a process of its own: the same as here, and a completion that never ends costs itself alone."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from rl import envs
from rl.envs import environment, scorer

ENDLESS = ("regex", pytest.param("loop", marks=pytest.mark.slow), pytest.param("power", marks=pytest.mark.slow))
LEAKED = []


def build(*, marks="", seed=0):
    """An environment whose completions say what their scorer is to do."""

    def make_task(index, split):
        return environment.Task("orders", index, split, (), "", "", {})

    def score(task, completion):
        order, _, argument = completion.partition(" ")
        if order == "loop":
            while True:
                pass
        elif order == "regex":
            re.match("(a+)+$", "a" * 64 + "b")
        elif order == "power":
            pow(9, 9**9)
        elif order == "wait":
            time.sleep(1e6)
        elif order == "grow":
            bytes(8 * 2**30)
        elif order == "grab":
            try:
                bytes(int(argument) * 2**20)
            except MemoryError:
                return {"reward": 0.0}
        elif order == "leak":
            LEAKED.append(bytes(int(argument) * 2**20))
        elif order == "print":
            print("ready")
        elif order == "print_in_c":
            subprocess.run(["echo", argument], check=True)
        elif order == "ask":
            try:
                return {"reward": float(len(input()))}
            except EOFError:
                pass
        elif order == "pid":
            return {"reward": float(os.getpid())}
        elif order == "raise":
            raise KeyError(argument)
        elif order in ("die", "die_once") and not pathlib.Path(marks, argument).exists():
            pathlib.Path(marks, argument if order == "die_once" else "other").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"reward": 1.0, "index": float(task.index), "length": float(len(completion))}

    return environment.Environment("orders", make_task, score)


def child():
    envs.ENVS["orders"] = build
    sys.exit(scorer.main(sys.argv[1:]))


@pytest.fixture
def orders(monkeypatch, tmp_path):
    """Scores completions of one task by orders."""
    monkeypatch.setattr(scorer, "COMMAND", ("-c", "from tests import test_scorer; test_scorer.child()"))
    made = scorer.Scorer("orders", {"marks": str(tmp_path)}, 0, limit_s=1)
    task = build().make_task(7, "train")
    yield lambda *completions: made.score(task, completions)
    made.close()


def worth(scored):
    return [one.scores["reward"] for one in scored]


def test_scores_are_those_of_the_environment():
    options = {"min_length": 3, "max_length": 8}
    env = envs.load("reverse_text", seed=4, **options)
    away = scorer.Scorer("reverse_text", options, 4, limit_s=5)
    for index in range(3):
        for split in ("train", "held_out"):
            task = env.make_task(index, split)
            completions = [task.answer, task.decoy, "", "\u00e9\n\ud800\x00" * 40, *(task.answer[:n] for n in range(3))]
            found = away.score(task, completions)
            assert [one.scores for one in found] == [env.score(task, completion) for completion in completions]
            assert all(one.in_time and 0 <= one.cpu_s < 1 for one in found)
    assert away.score(task, []) == []
    pid = away._child._process.pid
    away.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("order", ENDLESS)
def test_an_endless_completion_costs_itself_alone(orders, order):
    begun_s = time.process_time()
    found = orders("a", order, "bcd")
    assert worth(found) == [1, 0, 1] and [one.in_time for one in found] == [True, False, True]
    assert found[1].scores == {"reward": 0.0, "index": 0.0, "length": 0.0} and found[2].scores["index"] == 7
    assert time.process_time() - begun_s < 1 and worth(orders("again")) == [1]


def test_who_waits_instead_of_working_is_ended(orders, monkeypatch):
    monkeypatch.setattr(scorer, "CLOCK_FACTOR", 0.5)
    assert worth(orders("wait", "a")) == [0, 1]


def test_who_waits_ends_though_no_parent_is_left_to_end_it(monkeypatch):
    code = "from tests import test_scorer as t; t.scorer.CLOCK_FACTOR = 1; t.child()"
    monkeypatch.setattr(scorer, "COMMAND", ("-c", code))
    waiting = scorer._Child({"name": "orders", "options": {}, "seed": 0, "limit_s": 1})
    waiting.write(json.dumps({"index": 0, "split": "train", "completions": ["wait"]}))
    assert waiting.line(30) is None and waiting.end() == -signal.SIGALRM


def test_memory_has_a_limit(orders):
    assert worth(orders("grow", "a")) == [0, 1]


def test_what_a_completion_leaves_in_memory_is_not_felt_by_others(orders):
    """Not by another task, whose checker takes the want of memory for a wrong answer; nor by the next completion."""
    assert worth(orders("leak 600")) == [1]
    assert worth(orders("grab 600")) == [1]
    assert worth(orders("leak 400")) == [1]
    (pid,) = worth(orders("pid"))
    assert worth(orders("leak 450", "leak 700")) == [1, 1]
    assert worth(orders("pid")) != [pid]


def test_an_interrupt_from_the_terminal_is_for_the_parent(orders):
    (pid,) = worth(orders("pid"))
    os.kill(int(pid), signal.SIGINT)
    assert worth(orders("pid")) == [pid]


def test_what_else_ends_the_child_is_tried_again(orders):
    assert worth(orders("a", "die_once 1", "b", "die_once 2", "die 3", "c")) == [1, 1, 1, 1, 0, 1]


def test_time_is_counted_from_one_completion_to_the_next(orders, monkeypatch):
    """The limit of the whole process moves on with what it has used."""
    assert worth(orders(*["x"] * 2000)) == [1] * 2000
    assert worth(orders("loop", "a")) == [0, 1]


def test_a_checker_may_print_and_its_own_fault_is_ours(orders):
    forged = '{"scored": [[{"reward": 9.0}, 0.0]], "grown": false}'
    assert worth(orders("print", f"print_in_c {forged}", "ask", "a")) == [1, 1, 1, 1]
    with pytest.raises(RuntimeError, match="orders failed on task 7: KeyError"):
        orders("raise this")
    assert worth(orders("a")) == [1]


def test_an_environment_that_cannot_be_loaded(capfd):
    away = scorer.Scorer("gsm8k", {"path": "/nowhere"}, 0, limit_s=1)
    with pytest.raises(RuntimeError, match="the scorer of gsm8k did not start"):
        away.score(build().make_task(0, "train"), ["x"])
    assert "holds no train.jsonl" in capfd.readouterr().err


def test_the_child_ends_with_its_parent():
    code = "from rl.envs import scorer; s = scorer.Scorer('reverse_text', {}, 0, limit_s=1)\n"
    code += "from rl import envs; s.score(envs.load('reverse_text').make_task(0, 'train'), ['x'])\n"
    code += "import os; print(s._child._process.pid, flush=True); os.kill(os.getpid(), 9)"
    out = subprocess.run([sys.executable, "-c", code], cwd=scorer.ROOT, capture_output=True, text=True).stdout
    deadline = time.monotonic() + 30
    while pathlib.Path(f"/proc/{int(out)}/status").exists():
        if "State:\tZ" in pathlib.Path(f"/proc/{int(out)}/status").read_text():
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
