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

Who rolls out and who checks do not have the same machine: workers give up after LIMIT_S, validators after CHECK_LIMIT_S
(rl/verdicts.py says what they make of it). Imports no jax, as nothing here does.
"""

import argparse
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
from collections.abc import Sequence
from typing import BinaryIO

from rl import envs
from rl.envs import environment

LIMIT_S = 1  # CPU seconds of one completion, for who rolls out
CHECK_LIMIT_S = 5  # for who checks
SPREAD = CHECK_LIMIT_S // LIMIT_S  # how much faster or slower an honest machine may be
CLOCK_FACTOR = 10  # times the limit: what a completion may take by the clock
START_S = 120.0
OUT_OF_MEMORY = 3  # exit status
MAX_GROWTH_BYTES = 2**30  # of address space, over what the child has when it is ready
COMMAND = ("-m", "rl.envs.scorer")
ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Scored:
    """Not `in_time`: the completion ended its scorer, and its scores are 0."""

    scores: dict[str, float]
    cpu_s: float
    in_time: bool = True


class Scorer:
    """The scores of one environment; any thread may ask, one at a time is answered.

    Args:
      name, options, seed: as for `envs.load`.
      limit_s: whole CPU seconds for one completion; up to one more may pass, as the system counts whole ones.
    """

    def __init__(self, name: str, options: dict, seed: int, *, limit_s: int):
        self.limit_s = limit_s
        self._config = {"name": name, "options": options, "seed": seed, "limit_s": limit_s}
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def score(self, task: environment.Task, completions: Sequence[str]) -> list[Scored]:
        """One each. RuntimeError where the environment itself fails."""
        with self._lock:
            found, _ = self._exchange(task, completions)
            return found or [self._score_alone(task, completion) for completion in completions]

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.end()
            self._child = None

    def _score_alone(self, task: environment.Task, completion: str) -> Scored:
        found, is_certain = self._exchange(task, [completion])
        if not found and not is_certain:  # something else may have ended the child
            found, _ = self._exchange(task, [completion])
        if found:
            return found[0]
        empty, _ = self._exchange(task, [""])
        if not empty:
            raise RuntimeError(f"{task.env} cannot score the empty completion of task {task.index}")
        return Scored(dict.fromkeys(empty[0].scores, 0.0), float(self.limit_s), in_time=False)

    def _exchange(self, task: environment.Task, completions: Sequence[str]) -> tuple[list[Scored], bool]:
        """All of them, or none where the child ended; and whether that was for its limits."""
        child = self._child = self._child or _Child(self._config)
        child.write(json.dumps({"index": task.index, "split": task.split, "completions": list(completions)}))
        line = child.line(CLOCK_FACTOR * self.limit_s)
        if line is None:
            self._child = None
            # Not so sure of memory: completions before this one may have left little.
            return [], child.end() in (None, -signal.SIGXCPU)
        reply = json.loads(line)
        if reply["grown"]:
            self._child = None
            child.end()
        if "error" in reply:
            raise RuntimeError(f"{task.env} failed on task {task.index}: {reply['error']}")
        return [Scored(scores, cpu_s) for scores, cpu_s in reply["scored"]], True


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
        if self.line(START_S) != b"ready":
            self.end()
            raise RuntimeError(f"the scorer of {config['name']} did not start; it says why on standard error")

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
    parser = argparse.ArgumentParser(prog="python -m rl.envs.scorer", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="JSON: name, options, seed, limit_s")
    config = json.loads(parser.parse_args(argv).config)
    env = envs.load(config["name"], seed=config["seed"], **config["options"])
    task = functools.lru_cache(1024)(env.make_task)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and it ends us
    requests, replies = _own_pipes()
    env.score(task(0, "train"), "")  # whatever a checker imports when it is first used
    ready_bytes = _address_space_bytes()
    _limit(resource.RLIMIT_AS, ready_bytes + MAX_GROWTH_BYTES)
    replies.write(b"ready\n")
    replies.flush()
    for line in requests:
        request = json.loads(line)
        signal.alarm(2 * CLOCK_FACTOR * config["limit_s"])  # ends one that waits where no parent is left to do so
        try:
            reply = {
                "scored": _scored(
                    env, task(request["index"], request["split"]), request["completions"], config["limit_s"]
                )
            }
        except MemoryError:
            return OUT_OF_MEMORY
        except Exception as error:  # ours: an environment gives a score whatever the completion says
            reply = {"error": repr(error)}
        signal.alarm(0)
        _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        reply["grown"] = _address_space_bytes() > ready_bytes + MAX_GROWTH_BYTES // 2
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
    return 0


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Where requests come from and replies go; in their place standard input is empty, and standard output the error's."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, replies


def _scored(env: environment.Environment, task: environment.Task, completions: list[str], limit_s: int) -> list:
    """(scores, CPU seconds) of each."""
    out, begun_s = [], time.process_time()
    for completion in completions:
        _limit(resource.RLIMIT_CPU, math.ceil(begun_s + limit_s))
        scores = env.score(task, completion)
        ended_s = time.process_time()
        out.append((scores, ended_s - begun_s))
        begun_s = ended_s
    return out


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
