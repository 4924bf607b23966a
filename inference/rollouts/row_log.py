"""A durable log of groups of rollouts: files of one directory, to which records are only appended.

1. `append` returns immediately, with a future of the record's safety. One thread writes: a single fsync per file takes all records that
   gathered during the last, as in the run's ledger.
2. A record is a small JSON object and the rows of a group as one Arrow message, so that rows are neither encoded nor checked again.
   Length and CRC-32 precede both.
3. `read` returns the whole records of a file. Bytes after the last whole one were cut off by a kill, and `append` writes over them.

No jax here. The bytes are trusted: only this process and its predecessors write to the directory.
"""

import contextlib
import json
import os
import pathlib
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from inference.rollouts import parquet
from sharding.system import atomic_file

_HEAD = struct.Struct("<4sIQI")  # magic, bytes of the object, bytes of the rows, CRC-32 of both
_MAGIC = b"RLG1"


class RowLog:
    """The log in `directory`, with one file per step. Any thread may call the methods; one process may open it.

    `on_failure` is called once, with the error, if a record cannot be written; that record and all later ones fail.
    """

    def __init__(self, directory: pathlib.Path, on_failure: Callable[[BaseException], Any] = lambda error: None):
        self.directory, self._on_failure = directory, on_failure
        self._lock = threading.Lock()  # of `_waiting`
        self._waiting: list[tuple[int, bytes, futures.Future | None, futures.Future[None]]] = []
        self._files: dict[int, int] = {}  # step -> descriptor; of the writer alone
        self._failure: BaseException | None = None
        self._writer = futures.ThreadPoolExecutor(1, "row-log")

    def close(self) -> None:
        """Waits until all records are durable, and closes the files."""
        self._writer.shutdown()
        while self._files:
            os.close(self._files.popitem()[1])

    def append(
        self, step: int, head: dict, rows: parquet.Rows, *, after: futures.Future | None = None
    ) -> futures.Future[None]:
        """Appends a record to the file of a step, once the future `after` has a result; returns a future that is set when it is durable."""
        body = memoryview(parquet.to_record(rows.table))
        text = json.dumps(head | {"has_experts": rows.has_experts}).encode()
        record = b"".join([_HEAD.pack(_MAGIC, len(text), len(body), zlib.crc32(body, zlib.crc32(text))), text, body])
        written: futures.Future[None] = futures.Future()
        with self._lock:
            if not self._waiting:  # else a call that will take this one, too, has not begun
                self._writer.submit(self._write)
            self._waiting.append((step, record, after, written))
        return written

    def steps(self) -> list[int]:
        """Returns the steps that have a file, in order."""
        names = (re.fullmatch(r"step_(\d+)\.log", path.name) for path in self.directory.glob("step_*.log"))
        return sorted(int(name[1]) for name in names if name)

    def read(self, step: int) -> Iterator[tuple[dict, parquet.Rows]]:
        """Yields the records of a step: their objects and rows. Those that `append` has not finished may be missing."""
        for text, body in _whole(self._path(step)):
            head = json.loads(text)
            yield head, parquet.from_record(body, has_experts=head.pop("has_experts"))

    def remove(self, step: int) -> None:
        """Deletes the file of a step, once all earlier records are written. A later record of the step begins a new file."""
        self._writer.submit(self._remove, step).result()

    def _path(self, step: int) -> pathlib.Path:
        return self.directory / f"step_{step}.log"

    def _write(self) -> None:
        """Writes the records that wait, once the futures that they come after have results, and sets their own futures.

        Their result is None once they are durable. After an error, `on_failure` gets it, and so do these futures and all later ones.
        """
        with self._lock:
            items, self._waiting = self._waiting, []
        try:
            if self._failure:
                raise self._failure
            for _, _, after, _ in items:
                if after:
                    after.result()
            for step in {step for step, *_ in items}:
                _append(self._open(step), b"".join(record for other, record, *_ in items if other == step))
        except BaseException as error:  # those who wait for the records, and the run, get it
            if not self._failure:
                self._failure = error
                self._on_failure(error)
            for *_, written in items:
                written.set_exception(error)
            return
        for *_, written in items:
            written.set_result(None)

    def _open(self, step: int) -> int:
        if step not in self._files:
            path = self._path(step)
            path.parent.mkdir(parents=True, exist_ok=True)
            size = sum(_HEAD.size + len(text) + len(body) for text, body in _whole(path))
            self._files[step] = file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            os.ftruncate(file, size)
            os.lseek(file, size, os.SEEK_SET)
            atomic_file.sync_directory(path.parent)
        return self._files[step]

    def _remove(self, step: int) -> None:
        if step in self._files:
            os.close(self._files.pop(step))
        self._path(step).unlink(missing_ok=True)


def _append(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:  # a disk that fills up may take a few bytes first and raise only at the next write
        view = view[os.write(file, view) :]
    os.fsync(file)


def _whole(path: pathlib.Path) -> Iterator[tuple[bytes, bytes]]:
    """Yields (object, rows) of each record up to the first that is not whole."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        size = path.stat().st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            magic, num_text, num_body, crc = _HEAD.unpack(head)
            if magic != _MAGIC or num_text + num_body > size:
                return
            text, body = file.read(num_text), file.read(num_body)
            if len(body) != num_body or zlib.crc32(body, zlib.crc32(text)) != crc:
                return
            yield text, body
