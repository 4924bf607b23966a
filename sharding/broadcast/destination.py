"""Where a publisher writes a version: a directory that it has to itself, or a bucket. Nothing counts before `finish`.

1. `begin` locks the root (directories only), deletes what killed publishers left behind, and makes the version's directory.
2. `put` writes an object; `note` adds it to `objects.jsonl`, from which relays learn what they may fetch already.
3. `finish` writes the manifest under a temporary name and renames it: from then on the version is there, and it is whole.
4. `abort`, on any error, takes everything back. A publisher that is killed leaves a directory without manifest, which no
   reader takes for a version and the next `begin` deletes.

Nothing is synced to disk. A process that dies loses nothing; a machine that dies may lose the newest versions, or parts of them,
which readers find by their hashes, and which a resumed learner publishes again from its checkpoint. A sync per object made the
publisher wait for the disk at every step, to protect what lives for eight steps.
"""

import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorstore as ts

from sharding.format import journal
from sharding.system import atomic_file

Buffer = bytes | memoryview | np.ndarray


class Writer(Protocol):
    def lock(self) -> None: ...

    def begin(self) -> None: ...

    def put(self, path: str, parts: Sequence[Buffer]) -> None: ...

    def note(self, entry: journal.Object) -> None: ...

    def delete(self, path: str) -> None: ...

    def get(self, path: str) -> bytes: ...

    def finish(self, manifest: bytes) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


def create(root: str | os.PathLike, version: int) -> "Directory | Bucket":
    return Bucket(str(root), version) if "://" in str(root) else Directory(root, version)


def remove(root: str | os.PathLike, version: int) -> None:
    """Deletes a version: first invisible, then gone."""
    create(root, version).remove()


def base_of(root: str | os.PathLike, version: int) -> int | None:
    """The version that `version` needs. Read from the head of our own manifest: the whole may have 60 MB."""
    if "://" in str(root):
        head = _bucket(str(root)).read(f"{journal.dirname(version)}/manifest.json").result().value[:64]
    else:
        with open(pathlib.Path(root) / journal.dirname(version) / "manifest.json", "rb") as file:
            head = file.read(64)
    found = re.match(rb'\{"base":(null|[0-9]+),', head)  # canonical JSON: "base" comes first
    if not found:
        raise journal.CorruptSource(f"manifest of version {version} under {root} begins with {head!r}: remove() it")
    return json.loads(found[1])


class Directory:
    def __init__(self, root: str | os.PathLike, version: int):
        self._root = pathlib.Path(root)
        self._directory = self._root / journal.dirname(version)
        self._made: set[pathlib.Path] = set()
        self._lock: int | None = None
        self._journal = None

    def lock(self) -> None:
        """Holds the root exclusively; the kernel lets go when a publisher dies, so its leftovers are safe to delete."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._root, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def begin(self) -> None:
        for path in self._root.iterdir():
            unfinished = journal.parse_dirname(path.name) is not None and not (path / "manifest.json").exists()
            if unfinished or path.name.startswith(".tmp-"):
                shutil.rmtree(path, ignore_errors=True)
        self._directory.mkdir()
        self._journal = open(self._directory / "objects.jsonl", "ab", buffering=0)

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        full = self._directory / path
        if full.parent not in self._made:
            full.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(full.parent)
        with open(full, "wb") as file:
            for part in parts:
                file.write(part)

    def note(self, entry: journal.Object) -> None:
        if self._journal is not None:  # the first host's: it called `begin`
            self._journal.write(json.dumps(vars(entry)).encode() + b"\n")

    def get(self, path: str) -> bytes:
        return (self._directory / path).read_bytes()

    def delete(self, path: str) -> None:
        (self._directory / path).unlink()

    def finish(self, manifest: bytes) -> None:
        atomic_file.write(self._directory / "manifest.json", manifest)

    def abort(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            os.close(self._lock)

    def remove(self) -> None:
        doomed = self._root / f".tmp-removed-{self._directory.name}"
        os.rename(self._directory, doomed)
        shutil.rmtree(doomed)


class Bucket:
    """gs://, s3:// or file:// through tensorstore. One publisher per bucket is the user's promise: there is no lock.

    There is no journal either, as buckets cannot append: readers see a version when it is complete.
    """

    def __init__(self, root: str, version: int):
        self._store = _bucket(root)
        self._name = journal.dirname(version)

    def lock(self) -> None:
        pass

    def begin(self) -> None:
        self._delete()

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        self._store.write(f"{self._name}/{path}", b"".join(parts)).result()

    def note(self, entry: journal.Object) -> None:
        pass

    def get(self, path: str) -> bytes:
        return self._store.read(f"{self._name}/{path}").result().value

    def delete(self, path: str) -> None:
        self._store.write(f"{self._name}/{path}", None).result()

    def finish(self, manifest: bytes) -> None:
        self.put("manifest.json", [manifest])

    def abort(self) -> None:
        self._delete()

    def close(self) -> None:
        pass

    def remove(self) -> None:
        self._delete()

    def _delete(self) -> None:
        self._store.write(f"{self._name}/manifest.json", None).result()  # first, so that nobody reads on
        self._store.delete_range(ts.KvStore.KeyRange(f"{self._name}/", f"{self._name}0")).result()


def _bucket(root: str) -> ts.KvStore:
    return ts.KvStore.open(root if root.endswith("/") else root + "/").result()
