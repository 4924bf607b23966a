"""Notes the effects of an environment's code on the world outside its process, and gives it another machine's surroundings.

`watch` installs an audit hook of Python: it sees files, processes, and connections that Python opens, not those of compiled libraries,
which the sandbox of the second trial (rl/envs/hub/trial.py) refuses. Network is refused, as well as noted. `pretend` moves the clock
and renames host and user. Both last until the process ends.
"""

import asyncio
import datetime
import os
import platform
import random
import socket
import sys
import time
from collections.abc import Iterable

MAX_NOTES = 8  # of one kind that are kept; all are counted
MAX_SLEEP_S = 0.05  # really slept at a time
_NETWORK = {f"socket.{name}" for name in "connect getaddrinfo gethostbyname bind sendto sendmsg".split()}
_PROCESSES = {
    "subprocess.Popen",
    "pty.spawn",
    *(f"os.{name}" for name in "system exec posix_spawn spawn fork forkpty".split()),
}
_WRITES = {f"os.{name}" for name in "mkdir remove rename rmdir link symlink truncate chmod chown utime".split()}
_READS = ("os.listdir", "os.scandir", "glob.glob")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
KINDS = ("network", "process", "write", "read")


class Effects:
    """The effects noted so far: `counts` and `notes` by kind, and `slept_s`. Only while `stage` is not "" are effects noted."""

    def __init__(self, readable: Iterable[str]):
        self.stage = ""
        self.counts: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.notes: dict[str, list[str]] = {kind: [] for kind in KINDS}
        self.slept_s = 0.0
        self._readable = tuple({os.path.realpath(path) for path in readable if path})

    def note(self, kind: str, text: str) -> None:
        """Notes one effect."""
        self.counts[kind] += 1
        line = f"{self.stage}: {text}"[:200]
        if line not in self.notes[kind] and len(self.notes[kind]) < MAX_NOTES:
            self.notes[kind].append(line)

    def hook(self, event: str, args: tuple) -> None:
        """Notes an audit event. Raises PermissionError for one of the network."""
        if not self.stage:
            return
        if event in _NETWORK:
            address = (
                args[1] if event.startswith("socket.connect") or event in ("socket.bind", "socket.sendto") else args[0]
            )
            if isinstance(address, str | bytes) and event in ("socket.connect", "socket.bind"):
                return self.note("process", f"{event} {address!r}")  # a socket in the file system
            self.note("network", f"{event} {address!r}")
            raise PermissionError(f"{event} {address!r}: an environment under check has no network")
        if event in _PROCESSES:
            self.note("process", f"{event} {args[0] if args else ''!r}")
        elif event in _WRITES:
            self.note("write", f"{event} {args[0]!r}")
        elif event in _READS:
            self._read(f"{event} {args[0]!r}", args[0])
        elif event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path, _, flags = args
            if os.fspath(path) == os.devnull:
                return None
            if isinstance(flags, int) and flags & _WRITE_FLAGS:
                self.note("write", f"open {path!r}")
            else:
                self._read(f"open {path!r}", path)
        return None

    def _read(self, text: str, path) -> None:
        place = os.path.realpath(os.fsdecode("." if path is None or isinstance(path, int) else path))
        if not any(place == root or place.startswith(root + os.sep) for root in self._readable):
            self.note("read", text)


def watch(readable: Iterable[str]) -> Effects:
    """Records this process's effects (files, network, sleeps) from now on; returns the record. Files beneath `readable` need no note."""
    effects = Effects(readable)
    sys.addaudithook(effects.hook)
    sleep, pause = time.sleep, asyncio.sleep

    def noted_sleep(seconds) -> None:
        effects.slept_s += seconds if effects.stage else 0
        sleep(min(seconds, MAX_SLEEP_S))

    async def noted_pause(delay, result=None):
        effects.slept_s += delay if effects.stage else 0
        return await pause(min(delay, MAX_SLEEP_S), result)

    time.sleep, asyncio.sleep = noted_sleep, noted_pause
    return effects


def pretend(seconds: float) -> None:
    """Moves the clock by `seconds`, and gives this process another host name, user, and number of cores."""
    _move_clock(seconds)
    os.getuid = os.geteuid = lambda: 4242
    os.cpu_count = lambda: 3
    socket.gethostname = platform.node = lambda: "elsewhere"
    sys.setswitchinterval(1e-5)  # threads that race then do so in other orders
    random.seed()


def _move_clock(seconds: float) -> None:
    clock, local, universal, text, written = time.time, time.localtime, time.gmtime, time.ctime, time.strftime
    time.time = lambda: clock() + seconds
    time.time_ns = lambda: int(time.time() * 1e9)
    time.localtime = lambda secs=None: local(time.time() if secs is None else secs)
    time.gmtime = lambda secs=None: universal(time.time() if secs is None else secs)
    time.ctime = lambda secs=None: text(time.time() if secs is None else secs)
    time.strftime = lambda form, when=None: written(form, time.localtime() if when is None else when)
    real_datetime, real_date = datetime.datetime, datetime.date

    class Kind(type):
        def __instancecheck__(cls, one) -> bool:
            return isinstance(one, real_datetime if issubclass(cls, real_datetime) else real_date)

    class MovedDatetime(real_datetime, metaclass=Kind):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def today(cls):
            return cls.fromtimestamp(time.time())

        @classmethod
        def utcnow(cls):
            return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

    class MovedDate(real_date, metaclass=Kind):
        @classmethod
        def today(cls):
            return cls.fromtimestamp(time.time())

    datetime.datetime, datetime.date = MovedDatetime, MovedDate  # type: ignore[misc]  # classes that code imports from now on
