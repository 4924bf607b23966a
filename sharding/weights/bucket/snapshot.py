"""The state of a folder at one moment: captured on the disk, written as objects and a manifest, and restored from them.

1. `capture` takes all files at one moment, as hard links, so that an upload of any length reads the files of that moment. The state is
   one that a kill could have left: databases are locked meanwhile, so nothing is written that depends on later entries of theirs.
2. Files are divided into blocks. A block is an object `files/PATH/DIGEST.BEAT`, written once: BEAT is that of the head at the write, so a block
   that returns has another name, and a deletion by an owner that was replaced cannot hit it. A file that grows sends only its last blocks.
3. A manifest lists all files with their blocks. It is an object, too, and the state exists once another object names it (mirror.py).
4. `restore` verifies each block, and keeps the files that a restore before it has finished.

The files under a name are replaced or appended to, but not changed in place, except databases (`*.db`, of SQLite).
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from concurrent import futures

from sharding.system import atomic_file, cli
from sharding.weights.bucket import storage as storage_lib
from sharding.weights.format import digests, journal

BLOCK_BYTES, BIG_BLOCK_BYTES, BIG_BYTES = 4 << 20, 16 << 20, 1 << 30
MAX_TRIES = 3  # of a block that the bucket delivers wrong
RACY_NS = 2 * 10**9  # a file this young may change again under the same time
# Entries of these are captured whole, and before other files: lines that they depend on were written earlier.
FIRST = ("checkpoints", "warmup", "weights")
# Names of locks, unfinished files, and directories that are being written or deleted.
_LEFT_OUT = re.compile(r"\.[^/]*$|\..*\.tmp$|\.tmp-.*|.*\.orbax-checkpoint-tmp.*|torn-.*|.*\.db-\w+$")

Stamp = tuple[int, int, int]  # inode, size, time of the last change in ns


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a manifest: its size in bytes, mode, and the names of its blocks, DIGEST.BEAT."""

    size: int
    mode: int
    block_bytes: int
    names: tuple[str, ...]

    def blocks(self, path: str) -> list[tuple[str, int, int]]:
        """Returns (object's name, offset, bytes) of each block of the file `path`."""
        starts = range(0, self.size, self.block_bytes)
        keys = (block_key(path, name) for name in self.names)
        return [(key, at, min(self.block_bytes, self.size - at)) for key, at in zip(keys, starts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Captured:
    """A file of the folder at the moment of a capture. `link` has its content; None: it has not changed since the last capture."""

    stamp: Stamp | None  # None: too young to be compared
    size: int
    mode: int
    link: pathlib.Path | None


def block_key(path: str, name: str) -> str:
    """Returns the key of the object with a block of the file `path`."""
    return f"files/{path}/{name}"


def digest_of(block: str) -> str:
    """Returns the digest in the name or the key of a block."""
    return block.rpartition("/")[2].partition(".")[0]


def encode(files: Mapping[str, File], beat: int) -> bytes:
    """Returns the manifest of files as bytes; equal files give other bytes at another `beat` of the head."""
    rows = {path: [f.size, f.mode, f.block_bytes, *f.names] for path, f in sorted(files.items())}
    return json.dumps({"format": 1, "beat": beat, "files": rows}, separators=(",", ":")).encode()


def parse(data: bytes, place: str) -> dict[str, File]:
    """Returns the files of the manifest `data`, read from `place`. Raises CorruptSource for any other content."""
    try:
        fields = json.loads(data)
        if fields["format"] != 1:
            raise ValueError(f"format {fields['format']}")
        files = {}
        for path, (size, mode, block_bytes, *names) in fields["files"].items():
            files[path] = file = File(size, mode, block_bytes, tuple(names))
            is_inside = not path.startswith(".") and not {"", ".", ".."} & {*path.split("/")} and "\0" not in path
            is_possible = size >= 0 <= mode <= 0o777 and block_bytes > 0 and type(size + mode + block_bytes) is int
            are_names = all(re.fullmatch(r"[0-9a-f]{64}\.\d+", name) for name in names)
            if not (is_inside and is_possible and are_names and file.blocks(path) is not None):
                raise ValueError(f"file {path!r}")
        return files
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise journal.CorruptSource(f"{place} is not the manifest of a working directory ({error})") from error


def capture(folder: pathlib.Path, staging: pathlib.Path, known: Mapping[str, Stamp]) -> dict[str, Captured]:
    """Returns the files of `folder` at one moment, by their path. The links are made in the new directory `staging`.

    `known` has the stamps of the last capture. Raises sqlite3.Error if a database stays locked.
    """
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    begun_ns, found = time.time_ns(), {}
    with contextlib.ExitStack() as stack:
        databases = {path.name: stack.enter_context(_frozen(path)) for path in sorted(folder.glob("*.db"))}
        for name, database in databases.items():
            link, status = staging / name, (folder / name).stat()
            with contextlib.closing(sqlite3.connect(link)) as copy:
                database.backup(copy)
            found[name] = Captured(None, link.stat().st_size, status.st_mode & 0o777, link)
        others = sorted(path.name for path in folder.iterdir() if path.name not in FIRST)
        for unit in itertools.chain.from_iterable(_units(folder, top) for top in (*FIRST, *others)):
            part: dict[str, Captured] = {}
            for path in (path for path in _files(unit) if path.parent != folder or path.name not in databases):
                try:
                    part[str(path.relative_to(folder))] = _captured(path, folder, staging, known, begun_ns)
                except FileNotFoundError:  # it was deleted meanwhile
                    if unit.parent != folder:
                        part.clear()
                        break
            found |= part
    return found


def restore(
    storage: storage_lib.Storage,
    files: Mapping[str, File],
    folder: pathlib.Path,
    pool: futures.Executor,
    patience_s: float,
    can_lack: re.Pattern = re.compile("$"),
) -> None:
    """Makes `folder` have these files and no others. The threads of `pool` fetch them.

    Raises CorruptSource for a block that is not the one of its name, and FileNotFoundError for an absent one. A file whose path
    matches `can_lack` is left out with a line instead.
    """
    _remove_others(folder, files)
    folder.mkdir(parents=True, exist_ok=True)

    def fetch(path: str) -> None:
        file, target = files[path], folder / path
        if target.is_file() and _is_same(target, file):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_file.replacing(target) as temporary, open(temporary, "wb") as out:
                os.fchmod(out.fileno(), file.mode)
                for key, _, size in file.blocks(path):
                    out.write(read(storage, key, digest_of(key), "newest manifest", patience_s, size))
        except (FileNotFoundError, journal.CorruptSource) as error:
            if not can_lack.match(path):
                raise
            cli.note(f"{error}. Going on without {path}")

    list(pool.map(fetch, sorted(files, key=lambda path: -files[path].size)))


def read(storage: storage_lib.Storage, key: str, digest: str, source: str, patience_s: float, size: int = 0) -> bytes:
    """Returns the object with this digest, and `size` if that is not 0. `source` names the key, for the message.

    Raises CorruptSource for another one, and FileNotFoundError if there is none.
    """
    for _ in range(MAX_TRIES):
        data, _ = storage.read(key, patience_s, size)
        if data is None:
            found = f"{storage.url}/{key} does not exist, although the {source} names it"
            raise FileNotFoundError(f"{found}; put it back from a version or a backup of the bucket")
        if len(data) == (size or len(data)) and digests.of(data) == digest:
            return data
    raise journal.CorruptSource(f"{storage.url}/{key} is damaged; put it back from a version or a backup of the bucket")


def _remove_others(folder: pathlib.Path, files: Mapping[str, File]) -> None:
    """Removes the files that are not in `files`, and empty directories, but none whose name begins with a dot (of locks)."""
    for directory, _, names in os.walk(folder, topdown=False):
        place = pathlib.Path(directory)
        for path in (place / name for name in names):
            if str(path.relative_to(folder)) not in files and not (place == folder and path.name.startswith(".")):
                path.unlink()
        with contextlib.suppress(OSError):  # it is not empty
            place.rmdir()


def _is_same(path: pathlib.Path, file: File) -> bool:
    if path.stat().st_size != file.size:
        return False
    with open(path, "rb") as data:
        return all(digests.of(data.read(file.block_bytes)) == digest_of(name) for name in file.names)


@contextlib.contextmanager
def _frozen(path: pathlib.Path) -> Iterator[sqlite3.Connection]:
    """Yields a connection to a database that no other can write to during the block.

    A database of this process must not be opened as a file: closing it again would free SQLite's locks.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as database:
        database.execute("BEGIN")
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield database


def _units(folder: pathlib.Path, top: str) -> list[pathlib.Path]:
    """Returns the entries of a directory in `FIRST`, which are captured whole or not at all, or `top` itself."""
    path = folder / top
    if top not in FIRST:
        return [] if _LEFT_OUT.match(top) else [path]
    units = [unit for unit in sorted(path.iterdir()) if not _LEFT_OUT.match(unit.name)] if path.is_dir() else []
    if top == "weights":  # a version is whole with its manifest
        return [unit for unit in units if unit.is_file() or (unit / "manifest.json").exists()]
    return units


def _files(unit: pathlib.Path) -> Iterator[pathlib.Path]:
    if unit.is_file():
        yield unit
    for directory, names, files in os.walk(unit):
        names[:] = [name for name in names if not _LEFT_OUT.match(name)]
        yield from (pathlib.Path(directory, name) for name in files if not re.match(r"\..*\.tmp$", name))


def _captured(
    path: pathlib.Path, folder: pathlib.Path, staging: pathlib.Path, known: Mapping[str, Stamp], begun_ns: int
) -> Captured:
    status, name = path.stat(), str(path.relative_to(folder))
    stamp: Stamp | None = (status.st_ino, status.st_size, status.st_mtime_ns)
    link = None
    if known.get(name) != stamp:
        link = staging / name
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, link)
        status = link.stat()  # it may have been replaced meanwhile
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
    if begun_ns - status.st_mtime_ns < RACY_NS:
        stamp = None
    return Captured(stamp, status.st_size, status.st_mode & 0o777, link)
