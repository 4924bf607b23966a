"""Starts commands of this project as child processes, which end with this process, however suddenly.

The standard input of a child is a pipe from this process. Its output goes to a log (sharding/system/logs/run_logs.py).
"""

import collections
import contextlib
import itertools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from sharding.system.logs import run_logs

# A machine that is silent for a minute is away: without these, ssh waits for hours for one that lost its power.
SSH_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=30", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")
ROOT = pathlib.Path(__file__).resolve().parents[2]  # of the checkout: its packages are imported from there


class ChildProcess(contextlib.AbstractContextManager):
    """A child process `python -m COMMAND` during a `with` block, its output in a log. `on_death` gets the error if it ends early.

    `environment` are variables that it gets in addition. With `is_group`, it leads a process group, which is killed with it: no child
    of its own outlives it, and Ctrl-C in the terminal reaches only this process. With `host`, it runs there by ssh, in the same paths.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        logs: run_logs.Folder,
        on_death: Callable[[Exception], None] = lambda error: None,
        *,
        is_group: bool = False,
        host: str = "",
        environment: dict[str, str] | None = None,
    ):
        self.name, self.log, self.on_death = name, logs.path / f"{name}.log", on_death
        line = [sys.executable, "-m", *command, "--exit_with_parent"]
        own = {"PYTHONUNBUFFERED": "1", run_logs.VARIABLE: str(logs.path)} | (environment or {})
        if host:  # its standard input ends with ours there, too
            there = shlex.join(["env", *(f"{name}={value}" for name, value in own.items()), *line])
            line = ["ssh", *SSH_OPTIONS, "--", host, f"cd {shlex.quote(str(ROOT))} && exec {there}"]
        self.process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | own,
            process_group=0 if is_group else None,
        )
        self._is_group = is_group
        self._is_stopping = False
        self._last: collections.deque[str] = collections.deque(maxlen=3)
        log = logs.open(name)  # after the lines of earlier starts; closed by the thread
        start = f"==== start: python -m {shlex.join(command)}".encode()
        self._copier = threading.Thread(target=self._copy, args=(start, log), name=f"log-{name}", daemon=True)
        self._copier.start()
        threading.Thread(target=self._watch, name=f"watch-{name}", daemon=True).start()

    @property
    def last_line(self) -> str:
        """The last line of output, "" if there is none."""
        return self._last[-1] if self._last else ""

    def send_line(self, text: str) -> None:
        """Writes a line to the standard input of the child. Raises ValueError if it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ValueError(self.obituary()) from None

    def obituary(self) -> str:
        """Returns the error message for a child process that ended early: exit code, last lines of output, log."""
        self._copier.join(1.0)  # not longer: its own children may keep the pipe open
        tail = " | ".join(self._last) or "it printed nothing"
        return f"the {self.name} process ended with code {self.process.returncode}: {tail}. Read its log: {self.log}"

    def _copy(self, start: bytes, log: run_logs.Log) -> None:
        assert self.process.stdout is not None
        with log, self.process.stdout:
            for line in itertools.chain([start], self.process.stdout):  # until all writers, such as its children, end
                log.write(line)
                if line is not start and line.strip():
                    self._last.append(line.decode(errors="replace").strip())

    def _watch(self) -> None:
        self.process.wait()
        if not self._is_stopping:
            self.on_death(ValueError(self.obituary()))

    def ask_to_end(self) -> None:
        """Closes the standard input of the child, which then ends by itself; its death is not reported."""
        self._is_stopping = True
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def __exit__(self, *_) -> None:
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        self.process.kill()
        self.process.wait()
        if self._is_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._copier.join(1.0)
