"""Ends all hosts of a run when one of them fails, with one line that names the host and the cause.

1. A host that fails sends an error report to host 0. A signal makes one as well, even if the main thread is busy elsewhere.
   For a host that was killed, host 0 makes the report when its connection closes.
2. Host 0 waits `SETTLE_S` for reports of other hosts, chooses the one with the lowest priority number, and sends it to all.
3. Each host prints that one line and exits immediately, even if its main thread hangs in a collective.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

from sharding.system.multihost import transport

# Priorities of error reports. If several hosts fail, the report with the lowest number is the cause.
MISTAKE, INTERRUPTED, DIED, BUG, REMOTE = range(5)
LAST_STEPS_S = 5.0  # before the end of a process that must end now
SETTLE_S = 1.0  # a collective can break on one host before another host reports the cause
INTERRUPTION = "interrupted; the same command resumes from the last checkpoint, if there is one"
DEATH = "its process ended without an error report (killed, or out of memory); see its output and its machine's log"


class Terminated(KeyboardInterrupt):
    """Raised after SIGTERM or Ctrl-C; its argument, if there is one, names the step of which the state of the run is saved."""

    number: int = signal.SIGTERM  # the signal

    def __str__(self) -> str:
        saved = f", with a checkpoint of {self.args[0]}" if self.args else ""
        if self.number == signal.SIGINT:
            return f"interrupted{saved}; the same command resumes"
        return f"terminated{saved}; the same command resumes"


Explain = Callable[[BaseException], tuple[str, int, int]]  # an error's message, exit code and priority


class ErrorReport(NamedTuple):
    """The error of one host, sent to host 0. The least of several, by priority, is the cause that all hosts print."""

    priority: int
    host: int  # this and the following fields are the arguments of `transport.Peers.end`
    message: str
    code: int  # exit code of all hosts


class Shutdown:
    """The end of a run of several hosts: collects their error reports, and ends each process with the line of the cause."""

    def __init__(self, peers: transport.Peers, explain: Explain):
        self.cleanups: list[Callable[[], None]] = []  # called before the process exits
        self._peers, self._explain = peers, explain
        self._reports: list[ErrorReport] = []
        self._lock, self._exiting = threading.Lock(), threading.Lock()
        self._traceback = ""
        self._signals = contextlib.ExitStack()  # never closed: until the end of the process

    def report(self, error: BaseException) -> ErrorReport:
        """Sends an error of this host to host 0, and returns the report of it. All hosts end soon after."""
        message, code, priority = self._explain(error)
        if isinstance(error, transport.RemoteHostError):
            priority = REMOTE
        elif priority >= BUG:
            self._traceback = "".join(traceback.format_exception(error))
        report = ErrorReport(priority, self._peers.index, message, code)
        self.submit(report)
        return report

    def fail(self, error: BaseException) -> None:
        """Sends an error of this host to host 0, and ends this process. Does not return."""
        report = self.report(error)
        time.sleep(30)  # the threads of the connections end the process
        self.exit(self._peers.end(*report[1:]))

    def submit(self, report: ErrorReport) -> None:
        """Sends an error report to host 0; on host 0, records it. The first report starts the end of all hosts."""
        if self._peers.index and 0 in self._peers.connections:
            with contextlib.suppress(OSError):  # host 0 is gone, which the thread that listens to it reports
                self._peers.connections[0].send({"kind": "cause", "report": report})
            return
        with self._lock:
            self._reports.append(report)
            if len(self._reports) == 1:
                threading.Thread(target=self._settle, name="settle", daemon=True).start()

    def lost(self, host: int) -> None:
        """Handles the early end of the connection to `host`: host 0 submits a report of its death, other hosts exit."""
        report = ErrorReport(DIED, host, DEATH, 1)
        if self._peers.index:
            self.exit(self._peers.end(*report[1:]))
        else:
            self.submit(report)

    def exit(self, end: dict) -> None:
        """Ends this process: prints the line of `end` (a `Peers.end` message) and exits with its code. A second caller blocks."""
        self._exiting.acquire()

        def show() -> None:
            if end["host"] == self._peers.index and self._traceback:
                print(self._traceback, file=sys.stderr, end="")
            print(end["line"], file=sys.stderr, flush=True)

        # Threads in a collective cannot be joined, and JAX's own exit would wait for the other hosts.
        end_process(end["code"], [*self.cleanups, show])

    def watch_signals(self, on_notice: Callable[[], bool]) -> None:
        """Makes SIGTERM and Ctrl-C end all hosts, even while the main thread is blocked, but not a SIGTERM at which `on_notice` is True."""

        def handle(number: int) -> None:
            if number == signal.SIGTERM and on_notice():
                return
            if number in (signal.SIGINT, signal.SIGTERM):
                self.submit(ErrorReport(INTERRUPTED, self._peers.index, INTERRUPTION, 128 + number))

        self._signals.enter_context(signals_in_thread(handle))
        # Without a handler Python would not write the signal's number to the wakeup socket.
        signal.signal(signal.SIGTERM, lambda *_: None)

    def _settle(self) -> None:
        time.sleep(SETTLE_S)
        end = self._peers.end(*min(self._reports)[1:])

        def send(connection):
            with contextlib.suppress(OSError):
                connection.send(end)

        threads = [threading.Thread(target=send, args=[c], daemon=True) for c in self._peers.connections.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2.0)
        self.exit(end)


@contextlib.contextmanager
def signals_in_thread(handle: Callable[[int], None]) -> Iterator[None]:
    """Has a thread call `handle(number)` for each signal with a handler in the block, even while a computation blocks the main thread.

    Only for the main thread. The handler itself runs as usual: once the main thread is back in code of Python.
    """
    reader, wakeup = socket.socketpair()
    wakeup.setblocking(False)

    def watch() -> None:
        with reader:
            while number := reader.recv(1):
                handle(number[0])

    threading.Thread(target=watch, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wakeup.close()


def end_process(code: int, last_steps: Iterable[Callable[[], object]]) -> NoReturn:
    """Ends the process after `last_steps`, whose errors do not count, and without waiting for other threads.

    The steps get `LAST_STEPS_S` in all: a terminal that Ctrl-S has stopped takes no line.
    """

    def run() -> None:
        for step in last_steps:
            with contextlib.suppress(Exception):
                step()

    try:
        thread = threading.Thread(target=run, name="last steps", daemon=True)
        thread.start()
        thread.join(LAST_STEPS_S)
    finally:
        os._exit(code)
