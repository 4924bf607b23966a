"""The place that a publisher writes a version to: a directory, or a bucket. A version exists once `finish` has returned.

A publisher calls `lock`, `begin`, `put` and `note` per object, `finish`; after an error, `abort`.

Nothing is synced to disk (docs/decisions/broadcast.md).
"""

import collections
import contextlib
import errno
import functools
import json
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from typing import IO

import tensorstore as ts

from sharding.system import atomic_file
from sharding.system import files as files_lib
from sharding.weights import bucket
from sharding.weights.format import journal

Buffer = bytes | memoryview
_BUCKET_LOCKS: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)  # by root


def create(root: str | os.PathLike, version: int) -> "Directory | Bucket":
    """Returns the destination to write `version` to: a `Bucket` if `root` is a URL, else a `Directory`. Writes nothing yet."""
    return Bucket(str(root), version) if "://" in str(root) else Directory(root, version)


@contextlib.contextmanager
def locked(root: str | os.PathLike) -> Iterator[None]:
    """Keeps other publishers of `root` waiting during the block."""
    with contextlib.closing(create(root, 0)) as out:
        out.lock()
        yield


def remove(root: str | os.PathLike, version: int) -> None:
    """Deletes a published version under `root`. Newer versions with deltas from that version can no longer be pulled."""
    create(root, version).remove()


def read(root: str | os.PathLike, name: str) -> bytes | None:
    """Returns the bytes of the file `name` beside the versions under `root`, or None if there is none."""
    if "://" in str(root):
        found = _store(str(root)).read(name).result()
        return None if found.state == "missing" else found.value
    path = pathlib.Path(root) / name
    return path.read_bytes() if path.exists() else None


def write(root: str | os.PathLike, name: str, data: bytes, *, durable: bool = False) -> None:
    """Writes the file `name` beside the versions under `root`, completely or not at all; with `durable`, syncs it to disk."""
    if "://" in str(root):
        _store(str(root)).write(name, data).result()
    else:
        atomic_file.write(pathlib.Path(root) / name, data, durable=durable)


@functools.cache
def _store(root: str) -> ts.KvStore:
    return bucket.open_store(root)


def base_of(root: str | os.PathLike, version: int) -> int | None:
    """Returns the version that must be read before `version`, or None for a snapshot. A bucket sends the whole manifest."""
    head = create(root, version).get("manifest.json", 64)
    found = re.match(rb'\{"base":(null|[0-9]+),', head)  # canonical JSON: "base" comes first
    if not found:
        text = f"manifest of version {version} under {root} begins with {head!r}, not with its base"
        raise journal.CorruptSource(f"{text}; remove() the version")
    return json.loads(found[1])


class Directory:
    """The directory that a publisher writes one version to. All hosts of the publisher share it."""

    def __init__(self, root: str | os.PathLike, version: int):
        self._root = pathlib.Path(root)
        self._directory = self._root / journal.dirname(version)
        self._made: set[pathlib.Path] = set()
        self._lock: int | None = None
        self._journal: IO[bytes] | None = None

    def lock(self) -> None:
        """Locks the root directory; blocks while another publisher has it locked. The kernel frees the lock of a dead process."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = files_lib.lock(self._root, files_lib.FOLDER)

    def begin(self) -> None:
        """Deletes unfinished versions under the root, and makes this version's directory. One host calls it, after `lock`."""
        for path in self._root.iterdir():
            unfinished = journal.parse_dirname(path.name) is not None and not (path / "manifest.json").exists()
            if unfinished or path.name.startswith(".tmp-"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.match(atomic_file.LEFTOVERS):
                path.unlink()
        self._directory.mkdir()
        self._journal = open(self._directory / "objects.jsonl", "ab", buffering=0)

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Writes the joined `parts` as the file `path` of this version. May be called from many threads."""
        full = self._directory / path
        if full.parent not in self._made:
            full.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(full.parent)
        with open(full, "wb") as file:
            for part in parts:
                file.write(part)

    def link(self, version: int, path: str) -> None:
        """Makes the file `path` of another version a file of this one, without a copy where the file system has hard links."""
        old, new = self._root / journal.dirname(version) / path, self._directory / path
        new.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old, new)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            shutil.copyfile(old, new)

    def note(self, entry: journal.Object) -> None:
        """Adds a finished object to the version's journal, objects.jsonl. Does nothing on a host that has not called `begin`."""
        if self._journal is not None:
            self._journal.write(json.dumps(vars(entry)).encode() + b"\n")

    def get(self, path: str, limit: int | None = None) -> bytes:
        """Returns the bytes of the file `path` of this version, at most the first `limit`; all if None."""
        with open(self._directory / path, "rb") as file:
            return file.read(limit)

    def delete(self, path: str) -> None:
        """Deletes the file `path` of this version."""
        (self._directory / path).unlink()

    def finish(self, manifest: bytes) -> None:
        """Writes the bytes `manifest` as manifest.json, which makes this version visible to readers."""
        atomic_file.write(self._directory / "manifest.json", manifest)

    def abort(self) -> None:
        """Deletes this unfinished version after an error."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Closes the journal and unlocks the root directory."""
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            os.close(self._lock)

    def remove(self) -> None:
        """Deletes this version. One rename hides the version from readers before its files are deleted."""
        doomed = self._root / f".tmp-removed-{self._directory.name}"
        os.rename(self._directory, doomed)
        shutil.rmtree(doomed)


class Bucket:
    """The place in a bucket (gs://, s3:// or file://) that a publisher writes one version to. Methods are as in `Directory`.

    A bucket has no lock for other processes: run only one publisher per bucket. It has no journal, since buckets cannot append: readers see a
    version only when the version is complete.
    """

    def __init__(self, root: str, version: int):
        self._store, self._lock, self._is_locked = _store(root), _BUCKET_LOCKS[root], False
        self._name = journal.dirname(version)

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Writes the joined `parts` as the file `path` of this version."""
        self._store.write(f"{self._name}/{path}", b"".join(parts)).result()

    def link(self, version: int, path: str) -> None:
        """Copies the file `path` of another version to this one."""
        found = self._store.read(old := f"{journal.dirname(version)}/{path}").result()
        if found.state == "missing":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        self._store.write(f"{self._name}/{path}", found.value).result()

    def get(self, path: str, limit: int | None = None) -> bytes:
        """Returns the bytes of the file `path` of this version, at most the first `limit`; all if None."""
        return self._store.read(f"{self._name}/{path}").result().value[:limit]

    def delete(self, path: str) -> None:
        """Deletes the file `path` of this version."""
        self._store.write(f"{self._name}/{path}", None).result()

    def finish(self, manifest: bytes) -> None:
        """Writes the bytes `manifest` as manifest.json, which makes this version visible to readers."""
        self.put("manifest.json", [manifest])

    def lock(self) -> None:
        """Locks the bucket for other threads of this process; blocks while one has it locked."""
        self._is_locked = self._lock.acquire()

    def note(self, entry: journal.Object) -> None:
        """Does nothing: a bucket has no journal."""

    def close(self) -> None:
        """Unlocks the bucket."""
        if self._is_locked:
            self._lock.release()

    def remove(self) -> None:
        """Deletes this version, or its leftovers. Deletes the manifest first, which hides the version from readers."""
        self.delete("manifest.json")
        self._store.delete_range(ts.KvStore.KeyRange(f"{self._name}/", f"{self._name}0")).result()

    begin = abort = remove  # of what an earlier publisher left; of an unfinished version after an error
