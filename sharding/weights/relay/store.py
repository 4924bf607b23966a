"""Keeps the verified objects of complete and of growing versions on disk, and serves them to the relay's other threads.

An object is written under a temporary name, renamed, appended to the version's journal, and only then exposed. A manifest is
written after all objects that it lists. So a directory with a manifest is complete even if the process was killed, and all
readers of a publisher's directory can read a relay's. Files are not synced: after a power loss `recover` finds damaged
ones, since it hashes everything before exposing it.
"""

import collections
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import threading
from collections.abc import Iterator
from typing import Any

from sharding.system import atomic_file
from sharding.system import files as files_lib
from sharding.weights.format import digests, journal
from sharding.weights.format import head as head_lib
from sharding.weights.format import manifest as manifest_lib


class NotNeeded(FileNotFoundError):
    """An object came too late: its version is complete, or was removed while the object was downloaded."""


@dataclasses.dataclass
class Version:
    """One version of the weights in a relay: its verified objects (`log`: as they came), and its manifest when complete."""

    directory: pathlib.Path
    grown: threading.Condition
    epoch: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    objects: dict[str, journal.Object] = dataclasses.field(default_factory=dict)
    log: list[journal.Object] = dataclasses.field(default_factory=list)
    manifest: bytes | None = None
    sha256: str = ""  # of the manifest
    base: int | None = None
    is_removed: bool = False


class Store:
    """The directory of a relay and its exposed versions, all of them verified. Thread-safe.

    `root` is created if it does not exist; `in_place`, it is a publisher's directory, in which nothing is written. The objects
    may occupy `max_bytes`. Raises ValueError if another relay writes to `root`.
    """

    def __init__(self, root: str | os.PathLike, *, in_place: bool = False, max_bytes: int | None = None):
        self.root = pathlib.Path(root)
        self.in_place = in_place
        self.is_recovering = True  # until `recover` is done; in place, until the first pass of the mirror
        self.versions: dict[int, Version] = {}
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # notified when a version is added, completed or removed
        self.num_bytes = 0  # of all exposed objects and manifests
        self.head: bytes | None = None  # the signed head, as the publisher wrote it
        self.max_bytes = max_bytes
        self._reserved_bytes = 0  # of objects being written now
        self._num_removals = collections.Counter()  # by version number
        self._tag = secrets.token_hex(8)  # another one after each change of the versions
        self._closed = False
        if not in_place:
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                self._descriptor = files_lib.lock(self.root, files_lib.FOLDER, wait=False)
            except BlockingIOError as error:
                raise ValueError(f"another relay writes to {root}; give each relay its own --dir") from error

    def recover(self, trusted: head_lib.HeadVerifier | None = None) -> int:
        """Hashes the objects on disk after a restart; serves good ones again, deletes bad ones. Returns the number of bad and missing ones.

        With `trusted`, manifests are deleted that its newest head does not list.
        """
        for path in self.root.glob(".removed-*"):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.head = (self.root / head_lib.NAME).read_bytes() if trusted is None else None
        numbers = [n for path in self.root.iterdir() if (n := journal.parse_dirname(path.name)) is not None]
        num_bad = sum(self._recover(number, trusted) for number in sorted(numbers, reverse=True))
        self.recovered()
        return num_bad

    def recovered(self) -> None:
        """Ends the recovery of files on disk: an unknown version is now reported as missing (404), no longer as not ready (503)."""
        with self.lock:
            if self.is_recovering:
                self.is_recovering = False
                self._changed()

    def _recover(self, number: int, trusted: head_lib.HeadVerifier | None) -> int:
        directory = self.root / journal.dirname(number)
        for leftover in directory.rglob(atomic_file.LEFTOVERS):
            leftover.unlink()
        manifest, data, entries = None, b"", []
        try:
            data = (directory / "manifest.json").read_bytes()
            manifest = head_lib.manifest_of(trusted, data, number)
            entries = manifest.objects
        except (FileNotFoundError, journal.CorruptSource):
            with contextlib.suppress(FileNotFoundError, journal.CorruptSource):
                entries = journal.parse_journal((directory / "objects.jsonl").read_bytes())[0]
        num_bad, version = 0, self._version(number)
        for entry in {e.path: e for e in entries}.values():  # a later line of a path replaces an earlier one
            with contextlib.suppress(OSError):  # missing, or a directory where a file should be
                if digests.of_file(directory / entry.path) == entry.digest:
                    self._expose(version, entry)
                    continue
                (directory / entry.path).unlink()
            num_bad += 1
        if manifest is not None and not num_bad:
            self._complete(version, manifest, data)
            return 0
        (directory / "manifest.json").unlink(missing_ok=True)
        try:
            self._write(version, "objects.jsonl", b"".join(map(_line, version.log)))
        except OSError:  # a full disk; without a journal the next start downloads the objects again
            (directory / "objects.jsonl").unlink(missing_ok=True)
        return num_bad

    def set_head(self, data: bytes, *, write: bool) -> None:
        """Serves the bytes of a signed head from now on. With `write`, also writes them to disk, which a verifier with a floor does itself."""
        with self.lock:
            if data != self.head:
                if write and not self.in_place:
                    atomic_file.write(self.root / head_lib.NAME, data)
                self.head = data
                self._changed()

    def has(self, number: int, entry: journal.Object) -> bool:
        """Returns True if version `number` has an object with the path, size and digest of `entry`."""
        found = self.object(number, entry.path)
        return found is not None and found[1] == entry

    def is_complete(self, number: int) -> bool:
        """Returns True if version `number` has a manifest, and thus all its objects."""
        return self.manifest(number) is not None

    def complete(self) -> list[int]:
        """Returns the numbers of the complete versions, ascending."""
        with self.lock:
            return sorted(n for n, version in self.versions.items() if version.manifest is not None)

    def partial(self) -> list[int]:
        """Returns the numbers of the versions without a manifest so far, ascending."""
        with self.lock:
            return sorted(n for n, version in self.versions.items() if version.manifest is None)

    def same(self, number: int, entry: journal.Object) -> pathlib.Path | None:
        """Returns the file of this very object in a version other than `number`, or None if none has it."""
        with self.lock:
            for n, version in self.versions.items():
                if n != number and version.objects.get(entry.path) == entry:
                    return version.directory / entry.path
        return None

    def num_removals(self, number: int) -> int:
        """Returns how many versions of that number were removed; see `add`."""
        with self.lock:
            return self._num_removals[number]

    def add(
        self, number: int, entry: journal.Object, data: bytes | memoryview | pathlib.Path | None, num_removals: int
    ) -> None:
        """Makes a verified object available to clients. Before that, writes `data`, or links that file; None: the object is on disk already.

        Raises NotNeeded if the version is complete, or if more than `num_removals` versions of that number were removed, the count when
        the download began: the number may stand for another version by now. Raises OSError if the disk is full.
        """
        with self.lock:
            if num_removals != self._num_removals[number]:
                raise NotNeeded(f"version {number} was removed while an object came")
            version = self._version(number)
        if data is not None:
            self._write(version, entry.path, data, entry)
        else:
            with self._growing(version):
                self._expose(version, entry)

    def finish(self, number: int, manifest: manifest_lib.Manifest, data: bytes) -> None:
        """Completes a version that has all objects of `manifest`: deletes other objects, writes the manifest's bytes, `data`."""
        version = self._version(number)
        with self._growing(version):
            if any(version.objects.get(o.path) != o for o in manifest.objects):
                raise NotNeeded(f"an object of version {number} was replaced by that of another claim")
            for path in version.objects.keys() - {o.path for o in manifest.objects}:
                self.num_bytes -= version.objects.pop(path).size
                if not self.in_place:
                    (version.directory / path).unlink(missing_ok=True)
            if not self.in_place:
                self._write(version, "manifest.json", data)
            self._complete(version, manifest, data)

    def remove(self, number: int) -> None:
        """Stops serving version `number`, then deletes its files, the manifest first. Does nothing if the version is unknown."""
        with self.lock:
            version = self.versions.pop(number, None)
            if version is None:
                return
            version.is_removed = True
            self._num_removals[number] += 1
            self.num_bytes -= sum(o.size for o in version.objects.values()) + len(version.manifest or b"")
            self._changed()
            version.grown.notify_all()
            if self.in_place:
                return
            (version.directory / "manifest.json").unlink(missing_ok=True)
            doomed = self.root / f".removed-{version.directory.name}-{secrets.token_hex(8)}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(version.directory, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    @contextlib.contextmanager
    def _growing(self, version: Version) -> Iterator[None]:
        """Holds the lock. Raises NotNeeded if `version` is complete or was removed: its directory may be another's by now."""
        with self.lock:
            if version.is_removed or version.manifest is not None:
                raise NotNeeded(f"{version.directory} was completed or removed while an object came")
            yield

    def _write(self, version: Version, name: str, data: Any, entry: journal.Object | None = None) -> None:
        """Writes a file that appears complete or not at all, and exposes `entry` with it.

        Raises OSError if `max_bytes` would be exceeded, or if `version` is complete or removed.
        """
        path, reserved = version.directory / name, entry.size if entry else len(data)
        with self._growing(version):
            used = self.num_bytes + self._reserved_bytes
            if self.max_bytes is not None and used + reserved > self.max_bytes:
                most = f"{reserved} bytes more would exceed --max_bytes {self.max_bytes}"
                raise OSError(errno.EDQUOT, f"object {name} is not stored: {most}; raise it, or lower --keep")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._reserved_bytes += reserved
        try:
            with atomic_file.staged(path) as temporary:
                if isinstance(data, pathlib.Path):
                    os.link(data, temporary)
                else:
                    temporary.write_bytes(data)
                with self._growing(version):  # one lock for both, so that the entry is always that of the file
                    replaced = version.objects.pop(entry.path, None) if entry else None
                    self.num_bytes -= replaced.size if replaced else 0
                    os.replace(temporary, path)
                    if entry:
                        _append(version.directory / "objects.jsonl", _line(entry))
                        self._reserved_bytes, reserved = self._reserved_bytes - reserved, 0
                        self._expose(version, entry)
        finally:
            with self.lock:
                self._reserved_bytes -= reserved

    def _version(self, number: int) -> Version:
        with self.lock:
            version = self.versions.get(number)
            if version is None:
                directory = self.root / journal.dirname(number)
                if not self.in_place:
                    directory.mkdir(exist_ok=True)
                version = self.versions[number] = Version(directory, threading.Condition(self.lock))
                self._changed()
            return version

    def _expose(self, version: Version, entry: journal.Object) -> None:
        with self.lock:
            replaced = version.objects.get(entry.path)
            self.num_bytes += entry.size - (replaced.size if replaced else 0)
            version.objects[entry.path] = entry
            version.log.append(entry)
            version.grown.notify_all()

    def _complete(self, version: Version, manifest: manifest_lib.Manifest, data: bytes) -> None:
        with self.lock:
            self.num_bytes += len(data)
            version.manifest, version.base, version.sha256 = data, manifest.base, hashlib.sha256(data).hexdigest()
            self._changed()
            version.grown.notify_all()

    def _changed(self) -> None:
        self._tag = secrets.token_hex(8)
        self.changed.notify_all()

    def listing(self, tag: str = "", wait_s: float = 0.0) -> dict:
        """Returns {"complete", "partial": version numbers, "tag", "head"}. With an earlier tag, blocks up to `wait_s` for a change."""
        with self.lock:
            self.changed.wait_for(lambda: self._closed or tag != self._tag, wait_s)
            found = {"complete": self.complete(), "partial": self.partial(), "tag": self._tag}
            return found | ({} if self.head is None else {"head": self.head.decode(errors="replace")})

    def entries(self, number: int, epoch: str, after: int, wait_s: float) -> tuple[bytes, dict[str, str]] | None:
        """Returns (journal lines, HTTP headers) of version `number`, or None if the version is unknown.

        A client passes the `epoch` and the count, `after`, of an earlier reply, and gets the lines of objects finished since. With
        another epoch it gets all. Blocks up to `wait_s` if no line is new and the version is not complete.
        """
        with self.lock:
            version = self.versions.get(number)
            if version is None:
                return None
            start = min(after, len(version.log)) if epoch == version.epoch else 0
            version.grown.wait_for(lambda: self._closed or version.manifest or len(version.log) > start, wait_s)
            page = version.log[start : start + journal.MAX_PAGE_LINES]
            current = [e for e in page if version.objects.get(e.path) == e]  # without replaced ones
            headers = {"X-Epoch": version.epoch, "X-Next": str(start + len(page))}
            return b"".join(map(_line, current)), headers

    def manifest(self, number: int) -> bytes | None:
        """Returns the bytes of the manifest of version `number`, or None if the version is not complete."""
        with self.lock:
            return self.versions[number].manifest if number in self.versions else None

    def object(self, number: int, path: str) -> tuple[pathlib.Path, journal.Object] | None:
        """Returns (file, journal entry) of the object `path` of a version, or None if the object is not available."""
        with self.lock:
            version = self.versions.get(number)
            entry = version and version.objects.get(path)
            return (version.directory / path, entry) if version and entry else None

    def close(self) -> None:
        """Wakes all callers that block in `listing` or `entries`, and releases the lock on the directory."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.changed.notify_all()
            for version in self.versions.values():
                version.grown.notify_all()
        if not self.in_place:
            os.close(self._descriptor)


def _append(path: pathlib.Path, line: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, f"no disk space for a line of {path}; free some")
        except OSError:
            file.truncate(end)  # an incomplete line would make the following ones unreadable
            raise


def _line(entry: journal.Object) -> bytes:
    return json.dumps(dataclasses.asdict(entry), separators=(",", ":")).encode() + b"\n"
