"""Writes the logs of a run: WORKDIR/logs/attempt_0001/NAME.log, a folder per start of its command.

A line is TIME LEVEL RUN/ATTEMPT NAME TEXT, with the first digits of the run's public key, as in
`2026-11-26T15:04:05.123+00:00 INFO 3f2a91bc/1 worker0 groups leased 12 (0.4/s)`. Child processes log where their parent does.
"""

import contextlib
import dataclasses
import datetime
import functools
import os
import pathlib
import re
from typing import BinaryIO

VARIABLE = "INTELLAX_LOGS"  # of the environment: the folder of the process that started this one
LEVELS = ("INFO", "WARNING", "ERROR")
LINE = re.compile(r"(?P<time>\S+) (?P<level>[A-Z]+) (?P<run>\w*)/(?P<attempt>\d+) (?P<name>\S+) (?P<text>.*)")


@dataclasses.dataclass(frozen=True)
class Folder:
    """The folder of one attempt of a run. `run` is the run's public key."""

    path: pathlib.Path
    run: str = ""

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1; 0 for a folder with another name."""
        return int(self.path.name.rpartition("_")[2]) if self.path.name.startswith("attempt_") else 0

    @property
    def is_inherited(self) -> bool:
        """True if the process that started this one writes this one's output here."""
        return os.environ.get(VARIABLE) == str(self.path)

    def open(self, name: str) -> "Log":
        """Returns the log of a process, which grows with each of its starts."""
        self.path.mkdir(parents=True, exist_ok=True)
        return Log(open(self.path / f"{name}.log", "ab", buffering=0), f"{self.run[:8]}/{self.attempt} {name}")


@functools.cache
def folder(workdir: pathlib.Path, run: str = "", *, is_first: bool = True) -> Folder:
    """Returns the folder of this attempt: that of the parent process, else a new one, the same at each call in this process.

    A host that is not the first takes the newest, which the first host has made.
    """
    logs = workdir.absolute() / "logs"
    inherited = pathlib.Path(os.environ.get(VARIABLE, ""))
    if inherited.parent == logs:
        return Folder(inherited, run)
    found = attempts(workdir)
    if found and not is_first:
        return Folder(found[-1].path, run)
    made = Folder(logs / f"attempt_{found[-1].attempt + 1 if found else 1:04}", run)
    made.path.mkdir(parents=True, exist_ok=True)
    return made


def attempts(workdir: pathlib.Path) -> list[Folder]:
    """Returns the folders of all attempts of a run, oldest first."""
    found = (workdir.absolute() / "logs").glob("attempt_*")
    return sorted((Folder(path) for path in found if path.name[8:].isdecimal()), key=lambda one: one.attempt)


@dataclasses.dataclass(frozen=True)
class Log(contextlib.AbstractContextManager):
    """The open log of one process. Each line is one write, so several processes may append."""

    file: BinaryIO
    place: str

    def write(self, text: bytes) -> None:
        """Appends a text, each of its lines as one. A full disk costs lines, and not the process."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        head = f"{now} {level(text)} {self.place} ".encode()
        with contextlib.suppress(OSError):
            self.file.write(head + text.rstrip(b"\r\n").replace(b"\n", b"\n" + head) + b"\n")

    def __exit__(self, *_) -> None:
        self.file.close()


def level(text: bytes) -> str:
    """Returns the level of a line by its beginning."""
    if text.startswith((b"error:", b"Traceback ", b"ERROR", b"F0")):
        return "ERROR"
    return "WARNING" if text.startswith((b"notice:", b"warning:", b"advice:", b"WARNING")) else "INFO"
