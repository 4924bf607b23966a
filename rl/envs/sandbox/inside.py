"""Runs in the sandbox: forks a child for each program of the model, limits it, and reports its output. Standard library only.

1. `main` gives up the user's identity, imports the modules that programs often use, and reports that it is ready.
2. Each request is a line of JSON on standard input, a socket. "run" forks a child for one program, "open" one for a session, whose
   commands come by "execute", and "close" ends it. Then all files are deleted, so the next use finds a fresh folder.
3. A child takes its rights away (sharding/system/sandbox.py) before it runs code of the model: it starts no process, signals none, opens
   no socket, and writes in its folder only. So it cannot outlive its use or reach this process.
4. `_Watch` reads the output of a child and ends it at a limit. Between two commands, a session's child is stopped, with all its threads.

The parent (cell.py) keeps the expected outputs of tests: nothing here could leak them.
"""

import ctypes
import functools
import gc
import importlib.util
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable

TICK_S = 0.02
MAX_LINE_BYTES = 2**24
_READ_ALL = 2  # CAP_DAC_READ_SEARCH


def main(sandbox_path: str, program_path: str, config_text: str) -> None:
    """Serves requests until standard input ends, and ends the process. `config_text` is JSON from backend.py."""
    config = json.loads(config_text)
    for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE):  # of the parent, for its own work
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))
    host = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    sandbox = _module("sandbox", sandbox_path)
    os.chdir(config["folder"])
    if config["uid"]:
        _become(config["uid"], config["reads_all"])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # The Python versions read clock and random numbers by functions that are replaced; `ssl` has none.
    for name in ("_datetime", "_zoneinfo", "_uuid", "_ssl"):
        sys.modules[name] = None  # type: ignore[assignment]
    program = _module("program", program_path)
    _warm()
    lacks = [lack for lack in sandbox.missing() if not (config["has_mounts"] and "Landlock" in lack)]
    gc.collect()
    gc.freeze()  # forks share the pages of the modules
    server = _Server(host, sandbox, program, config)
    if config["probe"]:
        lacks += server.probe()
    _send(host, {"ready": True, "lacks": lacks})
    os.dup2(devnull, 2)
    for line in host.makefile("rb"):
        _send(host, server.answer(json.loads(line)))
    os._exit(0)


def _module(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _warm() -> None:
    """Imports modules that programs often use: their forks share them."""
    import bisect, copy, dataclasses, datetime, decimal, enum, fractions, heapq, math, operator, re, statistics, string  # noqa
    import collections.abc, itertools, random, textwrap, typing, unittest  # noqa


def _become(uid: int, reads_all: bool) -> None:
    """Changes to a user without rights. With `reads_all`, it may still read the interpreter in another user's home."""
    libc = ctypes.CDLL(None, use_errno=True)
    if reads_all:
        libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if reads_all:
        header, bits = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[1 << _READ_ALL] * 2, 0, 0, 0, 0)
        if libc.capset(header, bits):
            raise OSError(ctypes.get_errno(), "capset")


def _send(pipe: socket.socket, message: dict) -> None:
    pipe.sendall(json.dumps(message).encode() + b"\n")


# ---- the process that forks ------------------------------------------------------------------------------------------


class _Server:
    """Answers requests: "run" for a program; "open", "execute", and "close" for a session."""

    def __init__(self, host: socket.socket, sandbox: types.ModuleType, program: types.ModuleType, config: dict):
        self._host, self._sandbox, self._program, self._config = host, sandbox, program, config
        self._session: _Child | None = None

    def answer(self, request: dict) -> dict:
        if request["do"] == "execute":
            return self._execute(request)
        if request["do"] == "close":
            if self._session is not None:
                self._session.end()
            self._session = None
            return {"clean": self._wipe()}
        try:
            _write(request["files"])
        except (OSError, ValueError):  # they do not fit
            return {"stopped": "files", "clean": self._wipe()}
        if request["do"] == "open":
            self._session = self._fork(request, functools.partial(self._program.run_session, request))
            _send(self._session.control, {"values": request["values"]})
            return self._watch(self._session, request)
        return self._run(request) | {"clean": self._wipe()}

    def _run(self, request: dict) -> dict:
        return self._watch(self._fork(request, functools.partial(self._program.run_program, request)), request)

    def _execute(self, request: dict) -> dict:
        assert self._session is not None
        os.kill(self._session.pid, signal.SIGCONT)
        _send(self._session.control, {"code": request["code"]})
        return self._watch(self._session, request)

    def _watch(self, child: "_Child", request: dict) -> dict:
        return _Watch(child, self._host, request["limits"], self._config).result()

    def probe(self) -> list[str]:
        """Returns the limits that do not hold, each with the reason: a child tries to exceed them."""
        limits = self._config["probe"]
        request = {"code": self._program.PROBE, "stdin": "", "limits": limits}
        found = self._run(request)
        if found["stdout"] == "held\n":
            return []
        return [f"limits do not hold: {(found['stdout'] + found['stderr'])[-300:] or found['stopped']!r}"]

    def _fork(self, request: dict, run: Callable[[int], None]) -> "_Child":
        return _Child(functools.partial(self._child, request["limits"], run), request.get("stdin", ""))

    def _child(self, limits: dict, run: Callable[[int], None], control: int) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.setsid()
        for kind, value in (
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_NPROC, self._config["other_tasks"] + limits["tasks"]),
            (resource.RLIMIT_STACK, 2**26),
        ):
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        lacks = self._sandbox.enter_with_folder(self._config["folder"], self._config["readable"])
        if any("some rights stay" in lack for lack in lacks):
            raise OSError(f"rights of the sandbox stay: {lacks}")
        self._program.repeat()
        run(control)

    def _wipe(self) -> bool:
        """Deletes all files of a use. Returns False if some stay: the parent then ends this process."""
        try:
            for entry in [*os.scandir(self._config["folder"])]:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
            return True
        except (OSError, RecursionError):
            return False


def _write(files: dict[str, str]) -> None:
    for name, text in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)


class _Child:
    """A process for one program or one session: `run(control)` in a fork, with pipes for its output and a socket `control`."""

    def __init__(self, run: Callable[[int], None], stdin: str):
        near, far = socket.socketpair()
        (out, out_far), (err, err_far) = os.pipe(), os.pipe()
        text = os.memfd_create("stdin")
        with open(text, "wb", closefd=False) as file:
            file.write(stdin.encode("utf-8", "replace"))
        os.lseek(text, 0, os.SEEK_SET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                control = os.dup(far.fileno())
                for place, source in enumerate((text, out_far, err_far)):
                    os.dup2(source, place)
                os.dup2(control, 3)
                os.closerange(4, 1024)
                run(3)
            except BaseException as error:  # such as a model's code that replaces a function that this file needs
                os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
            finally:
                os._exit(70)
        for fd in (out_far, err_far, text):
            os.close(fd)
        far.close()
        self.exited = os.pidfd_open(self.pid)
        self.control, self.out, self.err = near, out, err
        self.control.settimeout(10)
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        self._status: int | None = None

    def cpu_s(self) -> float:
        """Returns the CPU seconds of all its threads."""
        return time.clock_gettime((~self.pid << 3) | 2)  # the CPU clock of that process, which exists until `end`

    def has_halted(self) -> bool:
        """Returns True if the child has stopped itself by a signal: nobody would wake it."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return found is not None and found.si_code == os.CLD_STOPPED

    def end(self) -> int:
        """Kills the child, if it runs. Returns its exit status as `subprocess` has it."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.control.close()
            for fd in (self.out, self.err, self.exited):
                os.close(fd)
        return self._status


class _Output:
    """The first and the last bytes of a stream."""

    def __init__(self, limit: int):
        self.count, self._head, self._tail = 0, bytearray(), bytearray()
        self._first, self._last = limit // 2, limit - limit // 2

    def add(self, data: bytes) -> None:
        self.count += len(data)
        take = max(self._first - len(self._head), 0)
        self._head += data[:take]
        self._tail += data[take:]
        if len(self._tail) > 2 * self._last + 2**16:
            del self._tail[: -self._last]

    def text(self) -> tuple[str, bool]:
        """Returns the text, and True if its middle was left out."""
        if self.count <= self._first + self._last:
            return (self._head + self._tail).decode(errors="replace"), False
        head, tail = self._head.decode(errors="replace"), self._tail[-self._last :].decode(errors="replace")
        return f"{head}\n[{self.count - self._first - self._last} bytes left out]\n{tail}", True


class _Watch:
    """Waits until a child is done with a program or a command, and ends it at a limit."""

    def __init__(self, child: _Child, host: socket.socket, limits: dict, config: dict):
        self._child, self._host, self._limits, self._config = child, host, limits, config
        self._outputs = {fd: _Output(limits["output_bytes"]) for fd in (child.out, child.err)}
        self._line, self._stopped, self._done, self._is_asking = bytearray(), "", None, False

    def result(self) -> dict:
        child, limits = self._child, self._limits
        before_s, now_s = child.cpu_s(), time.monotonic()
        deadline_s, has_exited, has_halted, cpu_s = now_s + limits["clock_s"], False, False, 0.0
        with selectors.DefaultSelector() as selector:
            for source in (child.out, child.err, child.control, child.exited, self._host):
                selector.register(source, selectors.EVENT_READ)
            while self._done is None and not has_exited and not has_halted and not self._stopped:
                for key, _ in selector.select(TICK_S):
                    if key.fileobj is self._host:
                        self._answer()
                    elif key.fd == child.exited:
                        has_exited = True
                    elif not (self._hear() if key.fileobj is child.control else self._read(key.fd)):
                        selector.unregister(key.fileobj)
                last_s, now_s = now_s, time.monotonic()
                if self._is_asking:  # the parent works, which is not the program's time
                    deadline_s += now_s - last_s
                cpu_s = child.cpu_s() - before_s
                if cpu_s > limits["cpu_s"] or now_s > deadline_s:
                    self._stopped = "time"
                elif self._holds_too_much():
                    self._stopped = "files"
                has_halted = child.has_halted()
        if not has_exited and not self._stopped:
            os.kill(child.pid, signal.SIGSTOP)
        for fd in self._outputs:
            while not self._stopped and self._read(fd):
                pass
        is_alive = not has_exited and not has_halted and not self._stopped
        status = 0 if is_alive else child.end()
        status = -signal.SIGSTOP if has_halted else status
        return self._report(None if self._stopped else status, cpu_s) | {"is_alive": is_alive}

    def _report(self, status: int | None, cpu_s: float) -> dict:
        outputs = [("", False) if self._stopped else output.text() for output in self._outputs.values()]
        values = {}
        if self._done is not None and not self._stopped:
            status, values = self._done.get("status", 0), self._done.get("values", {})
        return {
            "stdout": outputs[0][0],
            "stderr": outputs[1][0],
            "exit": status,
            "truncated": outputs[0][1] or outputs[1][1],
            "stopped": self._stopped,
            "cpu_s": cpu_s,
            "values": values,
        }

    def _read(self, fd: int) -> bool:
        """Reads output that is available. Returns False at its end, and if none is available."""
        try:
            data = os.read(fd, 2**16)
        except BlockingIOError:
            return False
        output = self._outputs[fd]
        output.add(data)
        if output.count > self._limits["flood_bytes"]:
            self._stopped = "output"
        return bool(data)

    def _hear(self) -> bool:
        """Reads from the session, which has called a function of the parent or is done. Returns False if it has closed its pipe."""
        try:
            data = self._child.control.recv(2**16)
            self._line += data
            if self._line.endswith(b"\n"):
                message = json.loads(self._line)
                self._line.clear()
                if "done" in message:
                    self._done = message
                else:
                    _send(self._host, {"call": str(message["call"]), "arguments": list(message["arguments"])})
                    self._is_asking = True
            if len(self._line) > MAX_LINE_BYTES:
                self._stopped = "output"
            return bool(data)
        except OSError:  # the child has ended
            return False
        except (ValueError, KeyError, TypeError, RecursionError):  # the model has found the pipe
            self._stopped = "output"
            return False

    def _answer(self) -> None:
        """Passes a result of the parent on to the child."""
        line = bytearray()
        while not line.endswith(b"\n"):
            data = self._host.recv(2**16)
            if not data:
                os._exit(0)  # the parent has ended
            line += data
        self._is_asking = False
        try:
            self._child.control.sendall(line)
        except OSError:  # it does not read
            self._stopped = "time"

    def _holds_too_much(self) -> bool:
        if self._config["has_mounts"]:  # the folder is a file system of limited size
            state = os.statvfs(self._config["folder"])
            return state.f_files - state.f_ffree > self._config["max_files"]
        count = size = 0
        for folder, names, files in os.walk(self._config["folder"]):
            count += len(names) + len(files)
            for name in files:
                try:
                    size += os.lstat(os.path.join(folder, name)).st_size
                except OSError:  # it was deleted meanwhile
                    continue
            if count > self._config["max_files"] or size > self._limits["folder_bytes"]:
                return True
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
