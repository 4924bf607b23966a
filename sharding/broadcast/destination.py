"""The place that a publisher writes a version to: a directory, or a bucket. A version exists once `finish` has returned.

1. `lock` takes the root (directories only); `begin` deletes the leftovers of killed publishers and makes the version's directory.
2. `put` writes an object; `note` adds it to `objects.jsonl`, from which relays learn which objects they may fetch already.
3. `finish` writes the manifest under a temporary name and renames it: from then on the version is visible, and complete.
4. `abort`, after any error, deletes everything. A killed publisher leaves a directory without manifest, which no reader takes
   for a version and the next `begin` deletes.

Nothing is synced to disk (docs/decisions/broadcast.md).
"""

import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import IO

import tensorstore as ts

from sharding.format import journal
from sharding.system import atomic_file

Buffer = bytes | memoryview


def create(root: str | os.PathLike, version: int) -> "Directory | Bucket":
    """Returns the destination of a version. Writes nothing yet."""
    return Bucket(str(root), version) if "://" in str(root) else Directory(root, version)


def remove(root: str | os.PathLike, version: int) -> None:
    """Deletes a version. It becomes invisible first. Versions that need it can no longer be pulled."""
    create(root, version).remove()


def base_of(root: str | os.PathLike, version: int) -> int | None:
    """Returns the version that `version` needs, from the first bytes of its manifest: the whole may have 60 MB."""
    head = create(root, version).get("manifest.json", 64)
    found = re.match(rb'\{"base":(null|[0-9]+),', head)  # canonical JSON: "base" comes first
    if not found:
        raise journal.CorruptSource(f"manifest of version {version} under {root} begins with {head!r}: remove() it")
    return json.loads(found[1])


class Directory:
    """A version below a directory that all hosts share."""

    def __init__(self, root: str | os.PathLike, version: int):
        self._root = pathlib.Path(root)
        self._directory = self._root / journal.dirname(version)
        self._made: set[pathlib.Path] = set()
        self._lock: int | None = None
        self._journal: IO[bytes] | None = None

    def lock(self) -> None:
        """Blocks until no other publisher has the root. The kernel unlocks it when a publisher dies."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._root, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def begin(self) -> None:
        """Deletes leftovers, and makes the version's directory. Only the first host calls this, after `lock`."""
        for path in self._root.iterdir():
            unfinished = journal.parse_dirname(path.name) is not None and not (path / "manifest.json").exists()
            if unfinished or path.name.startswith(".tmp-"):
                shutil.rmtree(path, ignore_errors=True)
        self._directory.mkdir()
        self._journal = open(self._directory / "objects.jsonl", "ab", buffering=0)

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Writes a file of the version. Called from many threads."""
        full = self._directory / path
        if full.parent not in self._made:
            full.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(full.parent)
        with open(full, "wb") as file:
            for part in parts:
                file.write(part)

    def note(self, entry: journal.Object) -> None:
        """Adds a finished object to the journal. Does nothing on a host that has not called `begin`."""
        if self._journal is not None:
            self._journal.write(json.dumps(vars(entry)).encode() + b"\n")

    def get(self, path: str, limit: int = -1) -> bytes:
        """Returns a file of the version, or its first `limit` bytes."""
        with open(self._directory / path, "rb") as file:
            return file.read(limit)

    def delete(self, path: str) -> None:
        """Deletes a file of the version."""
        (self._directory / path).unlink()

    def finish(self, manifest: bytes) -> None:
        """Writes the manifest, which makes the version visible."""
        atomic_file.write(self._directory / "manifest.json", manifest)

    def abort(self) -> None:
        """Deletes the unfinished version."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Unlocks the root."""
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            os.close(self._lock)

    def remove(self) -> None:
        """Deletes the version. It becomes invisible first."""
        doomed = self._root / f".tmp-removed-{self._directory.name}"
        os.rename(self._directory, doomed)
        shutil.rmtree(doomed)


class Bucket:
    """A version in a bucket (gs://, s3:// or file://), through tensorstore. The methods are those of `Directory`.

    It has no lock: the user must run one publisher per bucket. It has no journal, as buckets cannot append: readers see a
    version when it is complete.
    """

    def __init__(self, root: str, version: int):
        self._store = ts.KvStore.open(root if root.endswith("/") else root + "/").result()
        self._name = journal.dirname(version)

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Writes a file of the version."""
        self._store.write(f"{self._name}/{path}", b"".join(parts)).result()

    def get(self, path: str, limit: int | None = None) -> bytes:
        """Returns a file of the version, or its first `limit` bytes."""
        return self._store.read(f"{self._name}/{path}").result().value[:limit]

    def delete(self, path: str) -> None:
        """Deletes a file of the version."""
        self._store.write(f"{self._name}/{path}", None).result()

    def finish(self, manifest: bytes) -> None:
        """Writes the manifest, which makes the version visible."""
        self.put("manifest.json", [manifest])

    def lock(self, *_) -> None:
        """Does nothing."""

    note = close = lock

    def remove(self) -> None:
        """Deletes the version. It becomes invisible first."""
        self.delete("manifest.json")
        self._store.delete_range(ts.KvStore.KeyRange(f"{self._name}/", f"{self._name}0")).result()

    begin = abort = remove
