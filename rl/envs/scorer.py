"""Scores made in a process of its own, with a limit: a completion may be a stranger's, and make a checker run for ever.

1. `Scorer` starts `python -m rl.envs.scorer` when it is first asked, and keeps it. One exchange carries all completions
   of one task (a group), so that the way there and back costs little of each; if the child does not survive that, each
   gets an exchange of its own.
2. The child makes the task again from its number. Before each completion it sets the CPU time at which the system ends
   it (RLIMIT_CPU reaches into a regular expression or a product of huge numbers, where no Python signal handler runs).
   CPU time and not the clock: a busy machine blames nobody. Memory has a limit, too. A scorer that waits instead of
   working is ended by its parent. Its standard streams are not the pipes that we speak through: what a checker prints,
   in C or by a process of its own, is no score.
3. A completion that ended its child is worth 0 in every part, wherever it is scored; the next one gets a new child. So
   does the next task if half of the memory is not given back: a stranger's completion must not be felt by others.
4. A completion whose `score` raises, or gives no numbers, is worth 0 in every part, too, beside an "error" of 1 that metrics
   count: one text, maybe a stranger's, ends no run. The first of each kind is told. An environment that cannot score even
   the empty completion is broken, and that ends the run in one line.
5. Several children work at once for who asks from several threads; a second one starts when the first is busy for long.

Who rolls out and who checks do not have the same machine: workers give up after LIMIT_S, validators after CHECK_LIMIT_S
(rl/verification/checks.py says what they make of it). Imports no jax, as nothing here does.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from rl import envs
from rl.envs import environment
from sharding.system import cli

LIMIT_S = 1  # CPU seconds of one completion, for who rolls out
CHECK_LIMIT_S = 5  # for who checks
SPREAD = CHECK_LIMIT_S // LIMIT_S  # how much faster or slower an honest machine may be
CLOCK_FACTOR = 10  # times the limit: what a completion may take by the clock
START_S = 120.0
PATIENCE_S = 1.0  # to wait for a child that others keep busy, before another is started
OUT_OF_MEMORY = 3  # exit status
MAX_KINDS = 16  # of errors that are told
MAX_PARTS, MAX_NAME = 63, 256  # of a score: what a rollout holds (inference/rollouts/rollout.py), and room for "error"
MAX_GROWTH_BYTES = 2**30  # of address space, over what the child has when it is ready
COMMAND = ("-m", "rl.envs.scorer")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Scored:
    """Not `in_time`: the completion ended its scorer, and its scores are 0."""

    scores: dict[str, float]
    cpu_s: float
    in_time: bool = True


@dataclasses.dataclass
class _Seat:
    child: "_Child | None" = None


class Scorer:
    """The scores of one environment; any thread may ask.

    Args:
      name, options, seed: as for `envs.load`.
      limit_s: whole CPU seconds for one completion; up to one more may pass, as the system counts whole ones.
      max_children: how many may be answered at a time.
      on_error: hears of the first completion of each kind that could not be scored, as a line for people.
    """

    def __init__(
        self,
        name: str,
        options: dict,
        seed: int,
        *,
        limit_s: int,
        max_children: int = 1,
        on_error: Callable[[str], None] = tell,
    ):
        self.limit_s, self._on_error = limit_s, on_error
        self._config = {"name": name, "options": options, "seed": seed, "limit_s": limit_s}
        self._seats = [_Seat() for _ in range(max_children)]
        self._free, self._changed = list(self._seats), threading.Condition()
        self._told: set[str] = set()

    def score(self, task: environment.Task, completions: Sequence[str]) -> list[Scored]:
        """One each. ValueError where the environment itself is broken."""
        with self._seat() as seat:
            found, _ = self._exchange(seat, task, completions)
            return found or [self._score_alone(seat, task, completion) for completion in completions]

    def close(self) -> None:
        """Waits for who is being answered."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) == len(self._seats))
            for seat in self._seats:
                if seat.child is not None:
                    seat.child.end()
                seat.child = None

    @contextlib.contextmanager
    def _seat(self) -> Iterator[_Seat]:
        def started():
            return next((seat for seat in self._free if seat.child is not None), None)

        with self._changed:
            self._changed.wait_for(lambda: started() or len(self._free) == len(self._seats), PATIENCE_S)
            self._changed.wait_for(lambda: self._free)
            seat = started() or self._free[0]
            self._free.remove(seat)
        try:
            yield seat
        finally:
            with self._changed:
                self._free.append(seat)
                self._changed.notify_all()

    def _score_alone(self, seat: _Seat, task: environment.Task, completion: str) -> Scored:
        found, is_certain = self._exchange(seat, task, [completion])
        if not found and not is_certain:  # something else may have ended the child
            found, _ = self._exchange(seat, task, [completion])
        return found[0] if found else Scored(self._nothing(seat, task), float(self.limit_s), in_time=False)

    def _nothing(self, seat: _Seat, task: environment.Task, why: str = "it takes too long or too much memory") -> dict:
        """0 in every part that a score of this task has; ValueError where that cannot be found out, for `why`."""
        reply = (
            self._ask(seat, task, [""])[0] or self._ask(seat, task, [""])[0]
        )  # something else may have ended the child
        if reply and reply[0][0] is not None:
            return dict.fromkeys(reply[0][0], 0.0)
        raise ValueError(
            f"environment {task.env} cannot score {task.split} task {task.index}, not even an empty completion: "
            f"{reply[0][2] if reply else why}; mend its score, which must give numbers by name, 'reward' among them, for "
            "any text"
        )

    def _exchange(self, seat: _Seat, task: environment.Task, completions: Sequence[str]) -> tuple[list[Scored], bool]:
        """All of them, or none where the child ended; and whether that was for its limits."""
        reply, is_certain = self._ask(seat, task, completions)
        nothing = {}
        if failures := [error for scores, _, error in reply or () if scores is None]:
            nothing = self._nothing(seat, task, failures[0]) | {"error": 1.0}
            self._tell_of(task, failures)
        return [Scored(nothing if scores is None else scores, cpu_s) for scores, cpu_s, _ in reply or ()], is_certain

    def _ask(self, seat: _Seat, task: environment.Task, completions: Sequence[str]) -> tuple[list | None, bool]:
        """(Scores or None, CPU seconds, what was raised) of each, or None where the child ended; whether for its limits."""
        child = seat.child = seat.child or _Child(self._config)
        child.write(json.dumps({"index": task.index, "split": task.split, "completions": list(completions)}))
        line = child.line(CLOCK_FACTOR * self.limit_s)
        if line is None:
            seat.child = None
            # Not so sure of memory: completions before this one may have left little.
            return None, child.end() in (None, -signal.SIGXCPU)
        reply = json.loads(line)
        if reply["grown"]:
            seat.child = None
            child.end()
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["scored"], True

    def _tell_of(self, task: environment.Task, failures: list[str]) -> None:
        for error in failures:
            kind = error.partition(":")[0]
            if kind not in self._told and len(self._told) < MAX_KINDS:
                self._told.add(kind)
                self._on_error(
                    f"environment {task.env} could not score a completion of {task.split} task {task.index}: {error}; it is "
                    f"worth 0, and so are others for which score raises {kind} (rollout/score_error_frac counts them)"
                )


class _Child:
    """A process that scores, and lines to and from it."""

    def __init__(self, config: dict):
        self._process = subprocess.Popen(
            [sys.executable, *COMMAND, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=ROOT,
        )
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._process.stdout, selectors.EVENT_READ)
        self._ended = weakref.finalize(self, _end, self._process, self._waiting)  # or nobody ends it: also at exit
        self._buffer = b""
        reply = json.loads(self.line(START_S) or "{}")
        if "ready" not in reply:
            self.end()
            why = reply.get("error", "it ended, or took too long; standard error may say why")
            raise ValueError(f"the scorer of environment {config['name']} did not start: {why}")

    def write(self, line: str) -> None:
        data = memoryview(line.encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # `line` finds that it has ended
            while data:
                data = data[self._process.stdin.write(data) :]

    def line(self, timeout_s: float) -> bytes | None:
        """The next one; None when it has ended, or takes longer."""
        while b"\n" not in self._buffer:
            if not self._waiting.select(timeout_s):
                return None
            data = self._process.stdout.read(2**16)
            if not data:
                self._process.wait()
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def end(self) -> int | None:
        """Its exit status if it has ended by itself."""
        return self._ended()


def _end(process: subprocess.Popen, waiting: selectors.BaseSelector) -> int | None:
    status = process.poll()
    process.kill()
    process.wait()
    waiting.close()
    process.stdout.close()
    process.stdin.close()
    return status


# ---- the child -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m rl.envs.scorer", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="JSON: name, options, seed, limit_s")
    config = json.loads(parser.parse_args(argv).config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and it ends us
    requests, replies = _own_pipes()  # before anything of the environment's runs, which may print
    try:
        env = envs.load(config["name"], seed=config["seed"], **config["options"])
        task = functools.lru_cache(1024)(env.make_task)
        env.score(task(0, "train"), "")  # whatever a checker imports when it is first used
    except Exception as error:  # an environment's own code raises anything
        _send(replies, {"error": environment.failure(error)})
        return 1
    ready_bytes = _address_space_bytes()
    _limit(resource.RLIMIT_AS, ready_bytes + MAX_GROWTH_BYTES)
    _send(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        signal.alarm(2 * CLOCK_FACTOR * config["limit_s"])  # ends one that waits where no parent is left to do so
        try:
            one = task(request["index"], request["split"])
            reply = {"scored": _scored(env, one, request["completions"], config["limit_s"])}
        except MemoryError:
            return OUT_OF_MEMORY
        except ValueError as error:  # of `make_task`
            reply = {"error": str(error)}
        signal.alarm(0)
        _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        reply["grown"] = _address_space_bytes() > ready_bytes + MAX_GROWTH_BYTES // 2
        _send(replies, reply)
    return 0


def _send(replies: BinaryIO, reply: dict) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Where requests come from and replies go; in their place standard input is empty, and standard output the error's."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, replies


def _scored(env: environment.Environment, task: environment.Task, completions: list[str], limit_s: int) -> list:
    """(Scores, CPU seconds, "") of each; None in the place of scores with what was raised."""
    out, begun_s = [], time.process_time()
    for completion in completions:
        _limit(resource.RLIMIT_CPU, math.ceil(begun_s + limit_s))
        try:
            scores, error = _numbers(env.score(task, completion)), ""
        except MemoryError:
            raise
        except Exception as raised:  # an environment's own code raises anything
            scores, error = None, environment.failure(raised)
        ended_s = time.process_time()
        out.append((scores, ended_s - begun_s, error))
        begun_s = ended_s
    return out


def _numbers(scores) -> dict[str, float]:
    """The scores as a rollout takes them: whatever is a number, numpy's too."""
    if not isinstance(scores, dict) or len(scores) > MAX_PARTS:
        raise TypeError(f"score gave {type(scores).__name__}, not a dict of at most {MAX_PARTS} numbers")
    if "reward" not in scores:
        raise TypeError(f"score gave the parts {list(scores)[:8]}, and no 'reward'")
    for name, value in scores.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise TypeError(
                f"score gave a part called {str(name)[:80]!r}; a name has 1..{MAX_NAME} printable characters"
            )
        if not math.isfinite(value):
            raise ValueError(f"score gave {name} = {value}, not a finite number")
    return {name: float(value) for name, value in scores.items()}


def _limit(what: int, value: int) -> None:
    """Sets the soft limit, as far as the hard one allows."""
    hard = resource.getrlimit(what)[1]
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(what, (value if hard == unlimited else hard if value == unlimited else min(value, hard), hard))


def _address_space_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 2**34  # where it cannot be known: enough for any environment here


if __name__ == "__main__":
    sys.exit(main())
