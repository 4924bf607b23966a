"""Scores from child processes equal those of the environment; an endless completion affects only its own score."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rl import envs
from rl.envs import environment, scorer

ENDLESS = ("regex", pytest.param("loop", marks=pytest.mark.slow), pytest.param("power", marks=pytest.mark.slow))
REPLIES = {
    "none": b"",
    "half": b'{"scored": [[{"reward"',
    "huge": b"x" * 2**25,
    "nested": b"[" * 100_000 + b"\n",
    "list": b"[]\n",
    "no_scores": b'{"grown": false}\n',
    "no_numbers": b'{"scored": [[{"reward": "9"}, 0, ""]], "grown": false}\n',
    "too_many": b'{"scored": [[{"reward": 9}, 0, ""], [{"reward": 9}, 0, ""], [{"reward": 9}, 0, ""]], "grown": false}\n',
    "unprintable": b'{"scored": [[null, 0, "\\u001b[2J"]], "grown": false}\n',
    "error": b'{"error": "the environment is broken"}\n',
}
LEAKED = []
REPORTED = []  # by the scorers of a test


def build(*, marks="", broken="", seed=0):
    """An environment whose completions are orders to their scorer. `broken` replaces all of them but the first."""
    num_scored = 0
    print("a library says hello")

    def make_task(index, split):
        if index == 13:
            raise KeyError("no thirteenth")
        return environment.Task("orders", index, split, (), "", "", {})

    def score(task, completion):
        nonlocal num_scored
        num_scored += 1
        order, _, argument = (broken if broken and num_scored > 1 else completion).partition(" ")
        if order == "loop":
            while True:
                pass
        elif order == "regex":
            re.match("(a+)+$", "a" * 64 + "b")
        elif order == "power":
            pow(9, 9**9)
        elif order == "wait":
            time.sleep(1e6)
        elif order == "send":  # takes over the child
            os.write(json.loads(sys.argv[1])["pipe"], REPLIES[argument])
            time.sleep(1e6)
        elif order == "until":
            while not pathlib.Path(marks, argument).exists():
                time.sleep(0.01)
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
        elif order == "inherited":
            return {"reward": float(sum(fd.is_symlink() and os.get_inheritable(int(fd.name)) for fd in open_files()))}
        elif order == "pid":
            return {"reward": float(os.getpid())}
        elif order == "raise":
            raise KeyError(argument)
        elif order == "give":
            return {"nan": {"reward": np.nan}, "text": "1.0", "nothing": {}, "word": {"reward": "x"}}[argument]
        elif order == "numpy":
            return {"reward": np.float32(0.5), "index": np.int64(3), "length": np.bool_(True)}
        elif order in ("die", "die_once") and not pathlib.Path(marks, argument).exists():
            pathlib.Path(marks, argument if order == "die_once" else "other").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"reward": 1.0, "index": float(task.index), "length": float(len(completion))}

    return environment.Environment("orders", make_task, score)


def open_files():
    return [fd for fd in pathlib.Path("/proc/self/fd").iterdir() if int(fd.name) > 2]


def child():
    envs.ENVS["orders"] = build
    sys.exit(scorer.main(sys.argv[1]))


@pytest.fixture
def orders(monkeypatch, tmp_path):
    """Scores completions of one task by orders."""
    monkeypatch.setattr(scorer, "COMMAND", ("-c", "from tests.rl.envs import test_scorer; test_scorer.child()"))
    REPORTED.clear()
    made = scorer.Scorer("orders", {"marks": str(tmp_path)}, 0, limit_s=1, on_error=REPORTED.append)
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
    pid = away._children[0].process.pid
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


@pytest.mark.parametrize("reply", REPLIES)
def test_a_malformed_or_missing_reply_costs_itself_alone(orders, monkeypatch, reply):
    """A completion that has taken over its child may send anything: the run goes on, and a fresh child scores the others."""
    monkeypatch.setattr(scorer, "CLOCK_FACTOR", 0.5)
    begun_s = time.monotonic()
    assert worth(orders(f"send {reply}", "a")) == [0, 1] and time.monotonic() - begun_s < 20 and not REPORTED


@pytest.mark.slow
def test_a_child_that_waits_ends_without_a_parent(monkeypatch):
    code = "from tests.rl.envs import test_scorer as t; t.scorer.CLOCK_FACTOR = 1; t.child()"
    monkeypatch.setattr(scorer, "COMMAND", ("-c", code))
    waiting = scorer._Child({"name": "orders", "options": {}, "seed": 0, "limit_s": 1})
    assert waiting.exchange({"index": 0, "split": "train", "completions": ["wait"]}, 30) == {}
    waiting.end()
    assert waiting.status == -signal.SIGALRM and waiting.status not in scorer.TIMEOUTS


def test_memory_has_a_limit(orders):
    assert worth(orders("grow", "a")) == [0, 1]


def test_leaked_memory_does_not_affect_other_completions(orders):
    """Not by another task, whose checker takes the want of memory for a wrong answer; nor by the next completion."""
    assert worth(orders("leak 600")) == [1]
    assert worth(orders("grab 600")) == [1]
    assert worth(orders("leak 400")) == [1]
    (pid,) = worth(orders("pid"))
    assert worth(orders("leak 450", "leak 700")) == [1, 1]
    assert worth(orders("pid")) != [pid]


def test_a_process_of_a_checker_inherits_no_pipe(orders):
    assert worth(orders("inherited")) == [0]


def test_the_child_ignores_an_interrupt_from_the_terminal(orders):
    (pid,) = worth(orders("pid"))
    os.kill(int(pid), signal.SIGINT)
    assert worth(orders("pid")) == [pid]


def test_another_end_of_the_child_is_tried_again(orders):
    assert worth(orders("a", "die_once 1", "b", "die_once 2", "die 3", "c")) == [1, 1, 1, 1, 0, 1]


@pytest.mark.slow
def test_time_is_counted_from_one_completion_to_the_next(orders, monkeypatch):
    """The limit of the process moves with the time it has used."""
    assert worth(orders(*["x"] * 2000)) == [1] * 2000
    assert worth(orders("loop", "a")) == [0, 1]


def test_printed_text_is_never_a_score(orders):
    forged = '{"scored": [[{"reward": 9.0}, 0.0]], "grown": false}'
    assert worth(orders("print", f"print_in_c {forged}", "ask", "a")) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("order", "report"),
    [
        ("raise this", "KeyError: 'this' (test_scorer.py:"),
        ("raise \n\x1b[2J", "KeyError: "),
        ("give nan", "ValueError: score returned reward = nan; return finite numbers"),
        ("give text", "TypeError: score returned str; return a dict of at most 63 numbers"),
        ("give nothing", "TypeError: score returned the names [] without 'reward'; add the reward"),
        ("give word", "TypeError: must be real number, not str"),
    ],
)
def test_a_completion_that_cannot_be_scored_gets_zeros_and_one_report(orders, order, report):
    """Its neighbors keep their scores; metrics count the number "error"."""
    found = orders("a", order, "bc", order)
    assert worth(found) == [1, 0, 1, 0] and all(one.in_time for one in found)
    assert found[1].scores == found[3].scores == {"reward": 0, "index": 0, "length": 0, "error": 1}
    assert found[0].scores == {"reward": 1, "index": 7, "length": 1}
    orders(order)
    (line,) = REPORTED
    assert line.startswith(f"environment orders could not score a completion of train task 7: {report}")
    assert line.isprintable() and "its reward is 0" in line and "rollout/score_error_frac" in line


def test_numbers_of_any_kind_are_numbers(orders):
    assert orders("numpy")[0].scores == {"reward": 0.5, "index": 3.0, "length": 1.0}


LOOP = pytest.param("loop", "it takes too much time or memory", marks=pytest.mark.slow)


@pytest.mark.parametrize(("broken", "report"), [("raise it", "KeyError: 'it' (test_scorer.py:"), LOOP])
def test_an_environment_that_cannot_score_anything_ends_in_one_line(orders, broken, report):
    away = scorer.Scorer("orders", {"broken": broken}, 0, limit_s=1, on_error=REPORTED.append)
    with pytest.raises(ValueError) as caught:
        away.score(build().make_task(7, "held_out"), ["x"])
    from rl.experiment import experiment
    from sharding.multihost import failure  # the children that run this file shall not import jax

    line = str(caught.value)
    assert line.startswith(f"environment orders cannot score held_out task 7, not even an empty completion: {report}")
    assert line.endswith("'reward' among them, for any text") and line.isprintable()
    assert experiment.explain(caught.value) == (line, 1, failure.MISTAKE)  # one line, and no traceback
    assert not REPORTED
    away.close()


def test_a_task_that_cannot_be_made_is_one_line(orders, monkeypatch):
    monkeypatch.setitem(envs.ENVS, "orders", build)
    report = r"environment orders cannot make train task 13: KeyError: 'no thirteenth' \(test_scorer.py:\d+\); fix"
    with pytest.raises(ValueError, match=report):
        envs.load("orders").make_task(13, "train")
    away = scorer.Scorer("orders", {}, 0, limit_s=1)
    with pytest.raises(ValueError, match=report):
        away.score(environment.Task("orders", 13, "train", (), "", "", {}), ["x"])
    away.close()


def test_an_environment_that_cannot_be_loaded():
    away = scorer.Scorer("gsm8k", {"path": "/nowhere"}, 0, limit_s=1)
    with pytest.raises(ValueError, match="scorer of environment gsm8k did not start: ValueError: .* no train.jsonl"):
        away.score(build().make_task(0, "train"), ["x"])


def test_a_busy_child_gets_help(monkeypatch, tmp_path):
    """While one completion computes, others are scored; no child is started for short calls."""
    monkeypatch.setattr(scorer, "COMMAND", ("-c", "from tests.rl.envs import test_scorer; test_scorer.child()"))
    made = scorer.Scorer("orders", {"marks": str(tmp_path)}, 0, limit_s=1, max_children=2)
    task = build().make_task(7, "train")
    (pid,) = worth(made.score(task, ["pid"]))
    threads = [threading.Thread(target=made.score, args=(task, ["a"] * 20)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worth(made.score(task, ["pid"])) == [pid]
    waits = threading.Thread(target=made.score, args=(task, ["until go"]))
    waits.start()
    while len(made._free) == 2:
        time.sleep(0.01)
    (other,) = worth(made.score(task, ["pid"]))
    assert other != pid and waits.is_alive() and worth(made.score(task, ["pid"])) == [other]
    (tmp_path / "go").touch()
    waits.join()
    made.close()


def test_the_child_ends_with_its_parent():
    code = "from rl.envs import scorer; s = scorer.Scorer('reverse_text', {}, 0, limit_s=1)\n"
    code += "from rl import envs; s.score(envs.load('reverse_text').make_task(0, 'train'), ['x'])\n"
    code += "import os; print(s._children[0].process.pid, flush=True); os.kill(os.getpid(), 9)"
    out = subprocess.run([sys.executable, "-c", code], cwd=scorer.ROOT, capture_output=True, text=True).stdout
    deadline = time.monotonic() + 30
    while pathlib.Path(f"/proc/{int(out)}/status").exists():
        if "State:\tZ" in pathlib.Path(f"/proc/{int(out)}/status").read_text():
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
