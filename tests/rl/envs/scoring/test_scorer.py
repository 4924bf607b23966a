"""Scores from child processes equal those of the environment; an endless completion affects only its own score."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rl import envs
from rl.envs.interface import environment
from rl.envs.scoring import scorer
from sharding.system import limited_process

ENDLESS = ("regex", pytest.param("loop", marks=pytest.mark.slow), pytest.param("power", marks=pytest.mark.slow))
REPLIES = {  # as code
    "none": "b''",
    "half": """b'{"scored": [[{"reward"'""",
    "huge": "b'x' * 2**25",
    "nested": "b'[' * 100_000 + b'\\n'",
    "list": "b'[]\\n'",
}
BAD_SCORES = {
    "no_scores": {"grown": False},
    "no_numbers": {"scored": [[{"reward": "9"}, 0, ""]], "grown": False},
    "too_many": {"scored": [[{"reward": 9}, 0, ""]] * 3, "grown": False},
    "unprintable": {"scored": [[None, 0, "\x1b[2J"]], "grown": False},
    "error": {"error": "the environment is broken"},
}
LEAKED = []
REPORTED = []  # by the scorers of a test


def build(*, marks="", broken="", late="", uid=0, seed=0):
    """An environment whose completions are orders to their scorer. `broken` replaces all of them but the first two."""
    num_scored = 0
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    print("a library says hello")

    def make_task(index, split):
        if index == 13:
            raise KeyError("no thirteenth")
        return environment.Task("orders", index, split, (), "", "", {})

    def score(task, completion):
        nonlocal num_scored
        num_scored += 1
        late and pathlib.Path(late).read_bytes()
        order, _, argument = (broken if broken and num_scored > 2 else completion).partition(" ")
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
            os.write(pipe(), eval(REPLIES[argument]))
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
        elif order == "run":
            exec(argument, globals())
        elif order == "raise":
            raise KeyError(argument)
        elif order == "give":
            return {"nan": {"reward": np.nan}, "text": "1.0"}[argument]
        elif order == "numpy":
            return {"reward": np.float32(0.5), "index": np.int64(3), "length": np.bool_(True)}
        elif order in ("die", "die_once") and not pathlib.Path(marks, argument).exists():
            pathlib.Path(marks, argument if order == "die_once" else "other").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"reward": 1.0, "index": float(task.index), "length": float(len(completion))}

    return environment.Environment("orders", make_task, score)


def pipe():
    """Returns the socket of a child to its parent, as code that takes the child over can find it."""
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                return fd
    raise AssertionError("no socket")


def open_files():
    return [fd for fd in pathlib.Path("/proc/self/fd").iterdir() if int(fd.name) > 2]


def child():
    envs.ENVS["orders"] = envs.Shipped(build)
    sys.exit(scorer.main(sys.argv[1]))


def scoring(folder, sandbox):
    """Yields a function that scores completions of one task by orders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "COMMAND", ("-c", "from tests.rl.envs.scoring import test_scorer; test_scorer.child()"))
        made = scorer.Scorer("orders", {"marks": str(folder)}, 0, limit_s=1, sandbox=sandbox, on_error=REPORTED.append)
        task = build().make_task(7, "train")
        yield lambda *completions: made.score(task, completions)
        made.close()


@pytest.fixture(scope="module")
def in_sandbox(tmp_path_factory):
    yield from scoring(tmp_path_factory.mktemp("marks"), "auto")


@pytest.fixture(scope="module")
def with_rights(tmp_path_factory):
    yield from scoring(tmp_path_factory.mktemp("marks"), "off")


@pytest.fixture
def orders(in_sandbox):
    REPORTED.clear()
    return in_sandbox


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


def test_a_missing_reply_costs_itself_alone(orders, monkeypatch):
    """A completion that has taken over its child may send anything: the run goes on, and a fresh child scores the others."""
    monkeypatch.setattr(scorer, "CLOCK_FACTOR", 0.5)
    assert worth(orders("send half", "a")) == [0, 1] and not REPORTED


@pytest.mark.parametrize("reply", BAD_SCORES)
def test_a_malformed_reply_costs_itself_alone(monkeypatch, reply):
    class Child:
        process = status = None

        def __init__(self, *args, **options):
            pass

        def exchange(self, request, timeout_s):
            scored = [[{"reward": 1.0}, 0.0, ""] for _ in request["completions"]]
            return BAD_SCORES[reply] if "send" in request["completions"] else {"scored": scored}

        def end(self):
            self.status = -signal.SIGKILL

    monkeypatch.setattr(scorer.limited_process, "LimitedProcess", Child)
    REPORTED.clear()
    made = scorer.Scorer("orders", {}, 0, limit_s=1, on_error=REPORTED.append)
    found = made.score(build().make_task(7, "train"), ["send", "a"])
    assert worth(found) == [0, 1] and not found[0].in_time and not REPORTED


@pytest.mark.parametrize("reply", REPLIES)
def test_a_line_that_is_no_object_is_no_reply(reply):
    code = f"import os, time\nwith os.fdopen(0, 'wb') as pipe:\n    pipe.write({REPLIES[reply]})\n    pipe.flush()\n    time.sleep(99)"
    child = limited_process.JsonProcess([sys.executable, "-S", "-c", code], folder=".", variables=os.environ)
    assert child.receive(5.0 if reply in ("huge", "nested", "list") else 0.2) == {} and child.is_alive
    child.end()


@pytest.mark.slow
def test_a_child_that_waits_ends_without_a_parent(monkeypatch):
    code = "from tests.rl.envs.scoring import test_scorer as t; t.scorer.CLOCK_FACTOR = 1; t.child()"
    monkeypatch.setattr(scorer, "COMMAND", ("-c", code))
    config = {"name": "orders", "options": {}, "seed": 0, "limit_s": 1, "digest": ""}
    waiting = scorer.Child(scorer.COMMAND, config, title="", remedy="")
    assert waiting.exchange({"index": 0, "split": "train", "completions": ["wait"]}, 30) == {}
    waiting.end()
    assert waiting.status == -signal.SIGALRM and waiting.status not in limited_process.TIMEOUTS


def test_memory_has_a_limit(orders):
    assert worth(orders("grow", "a")) == [0, 1]


@pytest.mark.slow
def test_leaked_memory_does_not_affect_other_completions(orders):
    """Not by another task, whose checker takes the want of memory for a wrong answer; nor by the next completion."""
    assert worth(orders("leak 600")) == [1]
    assert worth(orders("grab 600")) == [1]
    assert worth(orders("leak 400")) == [1]
    (pid,) = worth(orders("pid"))
    assert worth(orders("leak 450", "leak 700")) == [1, 1]
    assert worth(orders("pid")) != [pid]


def test_a_process_of_a_checker_inherits_no_pipe(with_rights):
    assert worth(with_rights("inherited")) == [0]


def test_the_child_ignores_an_interrupt_from_the_terminal(orders):
    (pid,) = worth(orders("pid"))
    os.kill(int(pid), signal.SIGINT)
    assert worth(orders("pid")) == [pid]


def test_another_end_of_the_child_is_tried_again(with_rights):
    assert worth(with_rights("a", "die_once 1", "b", "die_once 2", "die 3", "c")) == [1, 1, 1, 1, 0, 1]


@pytest.mark.slow
def test_time_is_counted_from_one_completion_to_the_next(orders, monkeypatch):
    """The limit of the process moves with the time it has used."""
    assert worth(orders(*["x"] * 2000)) == [1] * 2000
    assert worth(orders("loop", "a")) == [0, 1]


def test_printed_text_is_never_a_score(with_rights):
    forged = '{"scored": [[{"reward": 9.0}, 0.0]], "grown": false}'
    assert worth(with_rights("print", f"print_in_c {forged}", "ask", "a")) == [1, 1, 1, 1]


def test_completions_that_cannot_be_scored_get_zeros_and_each_kind_one_report(orders):
    """Their neighbors keep their scores; metrics count the number "error"."""
    reports = {
        "raise \n\x1b[2J": r"KeyError: .* \(test_scorer.py:",
        "give nan": "ValueError: score returned reward = nan; return finite numbers",
        "give text": "TypeError: score returned str; return a dict of at most 63 numbers",
    }
    for order in reports:
        found = orders("a", order, "bc", order)
        assert worth(found) == [1, 0, 1, 0] and all(one.in_time for one in found)
        assert found[1].scores == found[3].scores == {"reward": 0, "index": 0, "length": 0, "error": 1}
        assert found[0].scores == {"reward": 1, "index": 7, "length": 1}
        orders(order)
    for line, report in zip(REPORTED, reports.values(), strict=True):
        assert re.match(f"environment orders could not score a completion of train task 7: {report}", line)
        assert line.isprintable() and "(rl.score_errors; metric" in line and "rollout/score_error_frac" in line


@pytest.mark.parametrize(
    ("scores", "report"),
    [
        ({}, r"score returned the names \[\] without 'reward'; add the reward"),
        ({"reward": "x"}, "score returned reward = 'x'; return finite numbers"),
        ({"reward": [1.0]}, r"score returned reward = \[1.0\]; return finite numbers"),
    ],
)
def test_scores_that_are_no_numbers_are_refused(scores, report):
    with pytest.raises((TypeError, ValueError), match=report):
        scorer.numbers(scores)


def test_numbers_of_any_kind_are_numbers(orders):
    assert orders("numpy")[0].scores == {"reward": 0.5, "index": 3.0, "length": 1.0}


LOOP = pytest.param("loop", "it takes too much time or memory", marks=pytest.mark.slow)


@pytest.mark.parametrize(("broken", "report"), [("raise it", "KeyError: 'it' (test_scorer.py:"), LOOP])
def test_an_environment_that_cannot_score_anything_ends_in_one_line(orders, broken, report):
    away = scorer.Scorer("orders", {"broken": broken}, 0, limit_s=1, on_error=REPORTED.append)
    with pytest.raises(ValueError) as caught:
        away.score(build().make_task(7, "held_out"), ["x"])
    from rl.experiment import command
    from sharding.system.multihost import failure  # the children that run this file shall not import jax

    line = str(caught.value)
    assert line.startswith(f"environment orders cannot score held_out task 7, not even an empty completion: {report}")
    assert line.endswith("'reward' among them, for any text") and line.isprintable()
    assert command.explain(caught.value) == (line, 1, failure.MISTAKE)  # one line, and no traceback
    assert not REPORTED
    away.close()


def test_a_task_that_cannot_be_made_is_one_line(orders, monkeypatch):
    monkeypatch.setitem(envs.ENVS, "orders", envs.Shipped(build))
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
    monkeypatch.setattr(scorer, "COMMAND", ("-c", "from tests.rl.envs.scoring import test_scorer; test_scorer.child()"))
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
    code = "from rl.envs.scoring import scorer; s = scorer.Scorer('reverse_text', {}, 0, limit_s=1)\n"
    code += "from rl import envs; s.score(envs.load('reverse_text').make_task(0, 'train'), ['x'])\n"
    code += "import os; print(s._children[0].process.pid, flush=True); os.kill(os.getpid(), 9)"
    out = subprocess.run([sys.executable, "-c", code], cwd=limited_process.ROOT, capture_output=True, text=True).stdout
    deadline = time.monotonic() + 30
    while pathlib.Path(f"/proc/{int(out)}/status").exists():
        if "State:\tZ" in pathlib.Path(f"/proc/{int(out)}/status").read_text():
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


SYSCALL = "import ctypes; ctypes.CDLL(None, use_errno=True).{}\nif ctypes.get_errno() in (1, 38): raise PermissionError"
HOSTILE = {
    "key": "open('{dir}/weights.key').read()",
    "list": "os.listdir('{dir}')",
    "tcp": "import socket; socket.create_connection(('127.0.0.1', {port}))",
    "unix": "import socket; socket.socket(socket.AF_UNIX).connect('{dir}/socket')",
    "udp": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "write": "open('{dir}/written', 'w').write('x')",
    "append": "open('{dir}/weights.key', 'a').write('x')",
    "remove": "os.unlink('{dir}/weights.key')",
    "chmod": "os.chmod('{dir}/weights.key', 0o777)",
    "temporary": "import tempfile\nwhile True: tempfile.NamedTemporaryFile(delete=False).write(bytes(2**20))",
    "signal": "os.kill({pid}, 0)",
    "signal_all": "os.kill(-1, 0)",
    "environ": "open('/proc/{pid}/environ', 'rb').read()",
    "memory": "open('/proc/{pid}/mem', 'rb+')",
    "ptrace": SYSCALL.format("ptrace(16, {pid}, 0, 0)"),
    "vm_read": SYSCALL.format("process_vm_readv({pid}, 0, 0, 0, 0, 0)"),
    "io_uring": SYSCALL.format("syscall(425, 1, 0)"),
    "clone3": SYSCALL.format("syscall(435, 0, 0)"),
    "x32": SYSCALL.format("syscall(0x40000000 + 41, 2, 1, 0)"),
    "owner": "import fcntl; fcntl.fcntl(pipe(), fcntl.F_SETOWN, {pid})",
    "terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
    "forks": "while True: os.fork()",
    "program": "subprocess.run(['true'], check=True)",
    "limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**62, 2**62))",
    "secret": "os.environ['TEST_API_KEY'] if 'TEST_API_KEY' in os.environ else open('/proc/self/environ').read()",
}


@pytest.mark.parametrize("uid", [0, pytest.param(65534, marks=pytest.mark.skipif(os.getuid() != 0, reason="not root"))])
def test_a_taken_over_checker_reaches_nothing(orders, monkeypatch, tmp_path, uid):
    """Each completion runs code of its own. It fails alone, on a worker as on a validator, as root and as a user."""
    monkeypatch.setenv("TEST_API_KEY", "secret")
    (tmp_path / "weights.key").write_text("secret")
    for place in (*reversed(tmp_path.parents[:-1]), tmp_path, tmp_path / "weights.key"):
        place.chmod(place.stat().st_mode | 0o777 * (tmp_path in (place, *place.parents)) | 0o055)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        (tmp_path / "socket").chmod(0o777)
        unix.listen()
        values = {"dir": tmp_path, "port": tcp.getsockname()[1], "pid": os.getpid()}
        attacks = {name: "run " + code.format(**values) for name, code in HOSTILE.items()}
        limits = {"limit_s": scorer.CHECK_LIMIT_S, "max_failures": scorer.MAX_CHECK_FAILURES}
        caged = scorer.Scorer("orders", {"uid": uid}, 0, **limits, sandbox="require", on_error=REPORTED.append)
        task = build().make_task(7, "train")
        for name, attack in attacks.items():
            before, hostile, after = caged.score(task, ["a", attack, "bcd"])
            assert before.scores["reward"] == after.scores["reward"] == 1, name
            assert hostile.scores["reward"] == 0 and (hostile.scores.get("error") or not hostile.in_time), name
        caged.close()
        for listener in (tcp, unix):
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.accept()
    assert (tmp_path / "weights.key").read_text() == "secret" and not (tmp_path / "written").exists()
    assert "PermissionError" in "".join(REPORTED)


def test_without_a_sandbox_the_attacks_work(with_rights, monkeypatch, tmp_path):
    """They are real: the sandbox stops them above."""
    monkeypatch.setenv("TEST_API_KEY", "secret")
    (tmp_path / "weights.key").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        values = {"dir": tmp_path, "port": tcp.getsockname()[1], "pid": os.getpid()}
        names = ("key", "list", "tcp", "udp", "write", "chmod", "signal", "environ", "program", "secret")
        assert worth(with_rights(*["run " + HOSTILE[name].format(**values) for name in names])) == [1] * len(names)


def test_a_machine_without_a_sandbox_is_refused_or_named(monkeypatch, capfd):
    monkeypatch.setattr(limited_process.sandbox, "missing", lambda: ["files stay readable (no Landlock)"])
    with pytest.raises(ValueError, match="scorer of environment reverse_text .*no Landlock.*trust.sandbox='auto'"):
        scorer.Scorer("reverse_text", {}, 0, limit_s=1, sandbox="require")
    with pytest.raises(ValueError, match="trust.sandbox = 'on' is not a mode; use one of auto, require, off"):
        scorer.Scorer("reverse_text", {}, 0, limit_s=1, sandbox="on")
    lacks = "import rl.envs.scoring.scorer as s; s.limited_process.sandbox.missing = lambda: ['no Landlock']; s.main(s.sys.argv[1])"
    monkeypatch.setattr(scorer, "COMMAND", ("-c", lacks))
    for _ in range(2):
        scorer.Scorer("reverse_text", {}, 0, limit_s=1).score(envs.load("reverse_text").make_task(0, "train"), ["x"])
    assert capfd.readouterr().err.count("warning: foreign code runs without a complete sandbox: no Landlock") == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(
            "while True: pass",
            "a first try on empty input takes more than 20 s of CPU time; fix",
            marks=pytest.mark.slow,
        ),
        ("time.sleep(99)", "a first try on empty input takes more than 60 s; fix"),
        ("sys.exit(3)", r"scoring an empty completion: SystemExit: 3 \(\w+.py:4\); fix"),
        ("os.kill(os.getpid(), 9)", "its process ended with status -9; fix"),
    ],
)
def test_a_reward_that_never_returns_ends_in_a_line_and_is_heard_of_before(monkeypatch, tmp_path, capfd, body, reason):
    """It took 120 s without a word."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "row {n}", "answer": "yes"}}\n' for n in range(4)))
    judge = tmp_path / f"{tmp_path.name}.py"  # a process has one module of a name
    judge.write_text(f"import os, sys, time\n\ndef reward(completion, row):\n    {body}\n")
    limits = "p.REHEARSAL_CPU_S" if "while" in body else "p.REHEARSAL_S"
    short = f"import rl.envs.scoring.scorer as s; p = s.limited_process; {limits} = 1; s.main(s.sys.argv[1])"
    monkeypatch.setattr(scorer, "COMMAND", ("-c", short))
    monkeypatch.setattr(limited_process, "NOTICE_S", 0.5)
    options = {"path": f"{tmp_path}/rows.jsonl", "reward": f"{judge}:reward"}
    with pytest.raises(ValueError, match=f"scorer of environment dataset did not start: {reason}"):
        scorer.Scorer("dataset", options, 0, limit_s=1).score(
            envs.load("dataset", **options).make_task(0, "train"), ["x"]
        )
    is_slow = "os." not in body and "exit" not in body  # the others may end before the notice
    notice = "dataset: no start after 0 s; it loads code and data, or makes a first try on empty input"
    assert notice in capfd.readouterr().err or not is_slow


def test_an_environment_that_needs_its_rights_does_not_start(orders):
    away = scorer.Scorer("orders", {"late": "/etc/hosts"}, 0, limit_s=1)
    with pytest.raises(ValueError, match="did not start: in the sandbox, without files .*PermissionError.*/etc/hosts"):
        away.score(build().make_task(7, "train"), ["x"])


@pytest.mark.parametrize(("bad", "scored"), [("send none", 1), pytest.param("regex", 4, marks=pytest.mark.slow)])
def test_the_time_of_a_group_is_bounded(monkeypatch, orders, bad, scored):
    """A validator gives up on a group of hostile completions; those that it does not score are worth 0, and nothing is rejected."""
    monkeypatch.setattr(scorer, "CLOCK_FACTOR", 1)
    away = scorer.Scorer("orders", {}, 0, limit_s=1, max_failures=scorer.MAX_CHECK_FAILURES)
    begun_s = time.monotonic()
    found = away.score(build().make_task(7, "train"), ["a", *[bad] * 62, "bcd"])
    assert time.monotonic() - begun_s < 30
    assert [one.in_time for one in found] == [True] + [False] * 63
    assert all(one.scores == {"reward": 0, "index": 0, "length": 0} for one in found[1:])
    assert worth(away.score(build().make_task(7, "train"), ["next"])) == [1]
    away.close()
