"""Runs a program in a child process, and exchanges lines of JSON with it; or a Python module with limits and without rights.

0. A `JsonProcess` is any program. Its standard input is a socket to its parent, which the child keeps elsewhere (`take_pipe`).
1. A `LimitedProcess` starts `python -m MODULE CONFIG` at its first exchange and keeps it. The child sees few environment variables
   (sandbox.py).
2. The child calls `serve`: it loads its files, enters the sandbox, limits its memory, and answers requests. For each of them, it
   may limit its CPU time (`limit_cpu`), which does not blame a request for a busy machine. With an exchange of another form, parent and
   child call `start` and `enter` instead.
3. A child that exceeds a limit ends, and the next exchange starts another one. The parent ends a child that waits. Foreign code
   may have taken over the child: its replies are data from a stranger.

No jax here, and no pickles.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharding.system import cli, sandbox

START_S, NOTICE_S = 120.0, 8.0
REHEARSAL_S, REHEARSAL_CPU_S = 60, 20
OUT_OF_MEMORY = 3  # exit status
TIMEOUTS = (None, -signal.SIGXCPU)  # statuses of a child that exceeded its time limit; None if the parent ended it
MAX_REPLY_BYTES = 2**24
ROOT = pathlib.Path(__file__).resolve().parents[2]


class JsonProcess:
    """A child process with a socket, `pipe`, as its standard input: both sides write lines of JSON. It ends with this object, and at exit.

    Args:
      command: with all arguments. OSError if it cannot be started.
      folder, variables: its current folder, and its environment variables.
      output: a file for its standard output and error; default: the standard error of this process.
      pass_fds: further file descriptors for it.
      is_group: it leads a process group, which is killed with it.
      grace_s: time in which it may end by itself once the socket is closed.
      clean: called after its end.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: str | os.PathLike,
        variables: Mapping[str, str],
        output: Any = 2,
        pass_fds: Sequence[int] = (),
        is_group: bool = False,
        grace_s: float = 0.0,
        clean: Callable[[], object] | None = None,
    ):
        self.pipe, far_end = socket.socketpair()
        with far_end:
            try:
                self.process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=variables,
                    stdin=far_end.fileno(),
                    stdout=output,
                    stderr=output,
                    pass_fds=pass_fds,
                    start_new_session=is_group,
                )
            except OSError:
                self.pipe.close()
                raise
        self._buffer = bytearray()  # received, and not yet returned
        self._end = weakref.finalize(self, _end, self.process, self.pipe, is_group, grace_s, clean)

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._end.alive and self.process.poll() is None

    def end(self) -> int | None:
        """Kills the process, if it runs. Returns its exit status if it has ended by itself. A second call does nothing, and returns None."""
        return self._end()

    def receive(self, timeout_s: float) -> dict:
        """Reads one line of JSON within `timeout_s`. Returns {} at the end, and for anything else: foreign code may have taken over the child."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while (end := self._buffer.find(b"\n")) < 0:
                self.pipe.settimeout(max(deadline_s - time.monotonic(), 0))
                if not (chunk := self.pipe.recv(2**18)):  # the process ends; its status is needed
                    self.process.wait(max(deadline_s - time.monotonic(), 0))
                    return {}
                self._buffer += chunk
                if len(self._buffer) > MAX_REPLY_BYTES:
                    return {}
            line = self._buffer[:end]
            del self._buffer[: end + 1]
            reply = json.loads(line)
            return reply if isinstance(reply, dict) else {}
        except (OSError, ValueError, RecursionError, subprocess.TimeoutExpired):
            return {}


class LimitedProcess:
    """One child process. `exchange` starts it when it does not run: at the first request, and at the next one after `end`.

    Args:
      command: arguments of Python, before the config.
      config: for `serve` in the child, as JSON.
      title, remedy: parts of the error message if it does not start.
      sandbox_mode: one of `sandbox.MODES`. "require" raises ValueError if the sandbox is not complete; "auto" prints the rights that stay, once.
      pass_fds: further file descriptors for the child.
      may_start_processes: the child keeps its rights on files, network, and processes, and still sees few environment variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: dict,
        *,
        title: str,
        remedy: str,
        sandbox_mode: str = "auto",
        pass_fds: Sequence[int] = (),
        may_start_processes: bool = False,
    ):
        if sandbox_mode not in sandbox.MODES:
            raise ValueError(f"trust.sandbox = {sandbox_mode!r} is not a mode; use one of {', '.join(sandbox.MODES)}")
        if sandbox_mode == "require" and not may_start_processes:
            _require(sandbox.missing(), title)
        self._command, self._config, self._title, self._remedy = command, config, title, remedy
        self._mode, self._pass_fds, self._is_free = sandbox_mode, pass_fds, may_start_processes
        self.process: subprocess.Popen | None = None
        self.status: int | None = None  # of the process that `end` ended; None if it was still running

    def exchange(self, request: dict, timeout_s: float) -> dict:
        """Sends a request to the child. Returns its reply, or {} if the child ended or took longer than `timeout_s`."""
        self.start()
        with contextlib.suppress(OSError):  # the process has ended, or does not read; it sends no reply then
            self._child.pipe.settimeout(timeout_s)
            self._child.pipe.sendall(_encode(request))
        return self._child.receive(timeout_s)

    def start(self) -> socket.socket:
        """Starts the child, if it does not run, and returns the socket to it. Blocks. Raises ValueError if it does not become ready."""
        if self.process is not None and self.process.poll() is not None:  # killed since its last reply
            self.end()
        if self.process is None:
            self._start()
        return self._child.pipe

    def end(self) -> None:
        """Kills the child, if it runs, and records its exit status."""
        if self.process is not None:
            self.process = None
            self.status = self._child.end()

    def _start(self) -> None:
        config = self._config | {"sandbox": self._mode != "off" and not self._is_free}
        command = [sys.executable, *self._command, json.dumps(config)]
        variables = sandbox.environment(os.environ) if self._mode != "off" else os.environ
        # Foreign code may import JAX, and the accelerator is the learner's.
        own = {**variables, "JAX_PLATFORMS": "cpu"}
        self._child = JsonProcess(command, folder=ROOT, variables=own, pass_fds=self._pass_fds)
        self.process = self._child.process
        reply = self._child.receive(NOTICE_S)
        if not reply and self.process.poll() is None:
            cli.note(
                f"{self._title}: no start after {NOTICE_S:.0f} s; it loads code and data, or makes a first try on empty input"
            )
            reply = self._child.receive(START_S)
        if "ready" not in reply:
            self.end()
            reason = reply.get("error") or _TOO_LONG.get(self.status) or f"its process ended with status {self.status}"
            raise ValueError(f"{self._title} did not start: {reason}; {self._remedy}")
        if self._mode == "require" and not self._is_free:
            _require(reply["lacks"], self._title)
        _warn(tuple(reply["lacks"]))


_TOO_LONG = {  # {status of a child that did not start: the reason}
    None: f"it takes more than {START_S:.0f} s",
    -signal.SIGALRM: f"a first try on empty input takes more than {REHEARSAL_S} s",
    -signal.SIGXCPU: f"a first try on empty input takes more than {REHEARSAL_CPU_S} s of CPU time",
}


def _end(
    process: subprocess.Popen, pipe: socket.socket, is_group: bool, grace_s: float, clean: Callable[[], object] | None
) -> int | None:
    status = process.poll()
    pipe.close()
    if grace_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(grace_s)
    if is_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    if clean:
        clean()
    return status


def _require(lacks: Sequence[str], title: str) -> None:
    if lacks:
        found = f"{title} would run without a complete sandbox: {'; '.join(lacks)}"
        remedy = "run on a machine that has these, or accept it by trust.sandbox='auto' (--sandbox auto)"
        raise ValueError(f"{found}; {remedy}")


@functools.cache
def _warn(lacks: tuple[str, ...]) -> None:
    if lacks:
        found = f"warning: foreign code runs without a complete sandbox: {'; '.join(lacks)}"
        print(f"{found}; trust.sandbox='require' (--sandbox require) refuses that", file=sys.stderr, flush=True)


def _encode(message: dict) -> bytes:
    return json.dumps(message).encode() + b"\n"


# ---- the child -------------------------------------------------------------------------------------------------------


def serve(
    config: dict,
    load: Callable[[], None],
    rehearse: Callable[[], object],
    answer: Callable[[dict], dict],
    *,
    max_growth_bytes: int,
    patience_s: int,
    describe: Callable[[BaseException], str] = str,
) -> int:
    """Runs the child: answers requests until the parent closes the pipe. Returns the exit status.

    Args:
      config: the parent's, with "sandbox" (whether to enter it).
      load: reads and imports the foreign code and its files, with all rights of the user.
      rehearse: runs once with all rights, because imports happen at first use, and once without: it must not need them.
      answer: returns the reply to a request. MemoryError ends the child.
      max_growth_bytes: the most bytes by which the address space may grow after `load`.
      patience_s: ends a child that waits for longer and whose parent is gone.
      describe: makes the text of an error before the first request.
    """
    ready = enter(config, load, rehearse, max_growth_bytes=max_growth_bytes, describe=describe)
    if ready is None:
        return 1
    for line in ready.pipe.makefile("rb"):
        signal.alarm(patience_s)
        try:
            reply = answer(json.loads(line))
        except MemoryError:
            return OUT_OF_MEMORY
        signal.alarm(0)
        limit_cpu(None)
        reply["grown"] = ready.has_grown()
        ready.pipe.sendall(_encode(reply))
    return 0


@dataclasses.dataclass(frozen=True)
class Ready:
    """A child that has loaded everything and given up its rights."""

    pipe: socket.socket  # to the parent
    num_bytes: int  # of address space, so far
    max_growth_bytes: int

    def has_grown(self) -> bool:
        """Returns True if the child has used up half of the memory that it may have; another one should take its place."""
        return _address_space_bytes() > self.num_bytes + self.max_growth_bytes // 2


def enter(
    config: dict,
    load: Callable[[], None],
    rehearse: Callable[[], object],
    *,
    max_growth_bytes: int,
    describe: Callable[[BaseException], str] = str,
) -> Ready | None:
    """Prepares the child as `serve` does, with its arguments, and reports to the parent. Returns None after an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    pipe = take_pipe()
    lacks, place = [], ""
    try:
        load()
        _in_time(rehearse)
        ready_bytes = _address_space_bytes()
        _limit(resource.RLIMIT_AS, ready_bytes + max_growth_bytes)  # in the sandbox, no limit on memory can be set
        if config["sandbox"]:
            lacks, place = sandbox.enter(), "in the sandbox, without files and network (trust.sandbox, --sandbox): "
            _in_time(rehearse)
    except BaseException as error:  # foreign code may raise anything
        pipe.sendall(_encode({"error": place + describe(error)}))
        return None
    pipe.sendall(_encode({"ready": True, "lacks": lacks}))
    return Ready(pipe, ready_bytes, max_growth_bytes)


def take_pipe() -> socket.socket:
    """Returns the socket to the parent. Standard input is empty from now on, and processes that foreign code starts do not get the socket."""
    pipe = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    return pipe


def _in_time(rehearse: Callable[[], object]) -> None:
    """Calls a function; the system ends this process if it takes too long."""
    signal.alarm(REHEARSAL_S)
    limit_cpu(math.ceil(time.process_time()) + REHEARSAL_CPU_S)
    rehearse()
    signal.alarm(0)
    limit_cpu(None)


def limit_cpu(seconds: int | None) -> None:
    """Limits the CPU time of this process, counted from its start. The system ends it after this whole number of seconds; None: no limit."""
    _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY if seconds is None else seconds)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(kind, (value if hard == unlimited else hard if value == unlimited else min(value, hard), hard))


@functools.cache
def _statm() -> Any:
    with contextlib.suppress(OSError):
        return open("/proc/self/statm", "rb", buffering=0)  # stays open: the sandbox closes /proc


def _address_space_bytes() -> int:
    if _statm() is None:
        return 2**34  # without /proc: enough for any environment here
    return int(os.pread(_statm().fileno(), 64, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")
