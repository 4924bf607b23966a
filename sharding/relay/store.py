"""What a relay holds on disk and exposes: verified objects of complete and of growing versions.

An object is written under a temporary name, renamed, appended to the version's journal, and only then exposed; a manifest
is written after everything that it lists. So a directory with a manifest is whole whenever the process is killed, and
every reader of a publisher's directory can read a relay's. No file is synced: after a loss of power `recover` finds what
is damaged, since it hashes everything before exposing it.
"""

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import pathlib
import secrets
import shutil
import threading

from sharding.format import digests, journal
from sharding.format import manifest as manifest_lib
from sharding.system import atomic_file


@dataclasses.dataclass
class Version:
    """What is exposed of one version. `log` has every object in the order in which it was finished."""

    number: int
    directory: pathlib.Path
    grown: threading.Condition
    epoch: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    objects: dict[str, journal.Object] = dataclasses.field(default_factory=dict)
    log: list[journal.Object] = dataclasses.field(default_factory=list)
    manifest: bytes | None = None
    base: int | None = None
    num_bytes: int = 0


class Store:
    """The directory of a relay and what of it is exposed; whatever is here was verified. Thread-safe."""

    def __init__(self, root: str | os.PathLike, *, in_place: bool = False, max_bytes: int | None = None):
        self.root = pathlib.Path(root)
        self.in_place = in_place
        self.is_recovering = True  # until it is known what is here; in place, until the first look at the directory
        self.versions: dict[int, Version] = {}
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # the set of versions, or what is complete
        self._max_bytes = max_bytes
        self._reserved_bytes = 0  # of objects being written now
        self._epoch = secrets.token_hex(8)
        self._num_changes = 0
        self._names = itertools.count()
        self._closed = False
        if not in_place:
            self.root.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.root, os.O_RDONLY)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._descriptor)
                raise ValueError(f"another relay writes to {root}: give each its own --dir") from error

    # -- for the mirror

    def recover(self, trusted_key: str | None = None) -> int:
        """Hashes what is on disk and exposes what is good; returns how many objects were not."""
        num_bad = 0
        numbers = []
        for path in self.root.iterdir():
            number = journal.parse_dirname(path.name)
            if number is None:
                if path.name.startswith(".removed-"):
                    shutil.rmtree(path, ignore_errors=True)
            else:
                numbers.append(number)
        for number in sorted(numbers, reverse=True):
            num_bad += self._recover(number, trusted_key)
        self.recovered()
        return num_bad

    def recovered(self) -> None:
        """From now on, what is not known here is not here."""
        with self.lock:
            if self.is_recovering:
                self.is_recovering = False
                self._changed()

    def _recover(self, number: int, trusted_key: str | None) -> int:
        directory = self.root / journal.dirname(number)
        for leftover in directory.rglob(atomic_file.LEFTOVERS):
            leftover.unlink()
        manifest = None
        try:
            data = (directory / "manifest.json").read_bytes()
            manifest = manifest_lib.parse(data, version=number, trusted_key=trusted_key)
            entries = manifest.objects
        except (FileNotFoundError, journal.CorruptSource):
            (directory / "manifest.json").unlink(missing_ok=True)
            entries = self._journal(directory)
        num_bad = 0
        version = self._version(number)
        newest = {entry.path: entry for entry in entries}  # a later line of a path replaces an earlier one
        for entry in newest.values():
            if _digest_of(directory / entry.path) == entry.digest:
                self._expose(version, entry)
            else:
                num_bad += 1
                with contextlib.suppress(OSError):
                    (directory / entry.path).unlink()
        if manifest is not None and not num_bad:
            self._complete(version, manifest, data)
        else:
            (directory / "manifest.json").unlink(missing_ok=True)
            self._rewrite_journal(version)
        return num_bad

    @staticmethod
    def _journal(directory: pathlib.Path) -> list[journal.Object]:
        try:
            return journal.parse_journal((directory / "objects.jsonl").read_bytes())[0]
        except (FileNotFoundError, journal.CorruptSource):
            return []

    def has(self, number: int, entry: journal.Object) -> bool:
        with self.lock:
            version = self.versions.get(number)
            return version is not None and version.objects.get(entry.path) == entry

    def is_complete(self, number: int) -> bool:
        with self.lock:
            return number in self.versions and self.versions[number].manifest is not None

    def add(self, number: int, entry: journal.Object, data: bytes | memoryview | None) -> None:
        """Exposes a verified object; `data` None: it lies in place already."""
        version = self._version(number)
        if data is not None:
            self._write(version.directory, entry.path, data)
        self._expose(version, entry, write=data is not None)

    def finish(self, number: int, manifest: manifest_lib.Manifest, data: bytes) -> None:
        """The version is complete: every object of the manifest is here. What is not in it goes."""
        version = self._version(number)
        listed = {o.path: o for o in manifest.objects}
        with self.lock:
            missing = [o for o in manifest.objects if version.objects.get(o.path) != o]
            assert not missing, missing[:3]
            surplus = [path for path in version.objects if path not in listed]
            for path in surplus:
                version.num_bytes -= version.objects.pop(path).size
        if not self.in_place:
            for path in surplus:
                (version.directory / path).unlink(missing_ok=True)
            self._write(version.directory, "manifest.json", data)
        self._complete(version, manifest, data)

    def remove(self, number: int) -> None:
        """Not served from now on; then deleted, manifest first: a directory with a manifest is always whole."""
        with self.lock:
            version = self.versions.pop(number, None)
            if version is None:
                return
            self._changed()
            version.grown.notify_all()
        if not self.in_place:
            (version.directory / "manifest.json").unlink(missing_ok=True)
            doomed = self.root / f".removed-{version.directory.name}-{next(self._names)}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(version.directory, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    @property
    def num_bytes(self) -> int:
        with self.lock:
            return sum(version.num_bytes for version in self.versions.values())

    def _write(self, directory: pathlib.Path, name: str, data: bytes | memoryview) -> None:
        """Whole under its name, or not at all."""
        with self.lock:
            used = sum(version.num_bytes for version in self.versions.values()) + self._reserved_bytes
            if self._max_bytes is not None and used + len(data) > self._max_bytes:
                raise OSError(errno.EDQUOT, f"{name}: {len(data)} bytes more would exceed max_bytes {self._max_bytes}")
            self._reserved_bytes += len(data)
        try:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write(directory / name, data)
        finally:
            with self.lock:
                self._reserved_bytes -= len(data)

    def _version(self, number: int) -> Version:
        with self.lock:
            version = self.versions.get(number)
            if version is None:
                directory = self.root / journal.dirname(number)
                if not self.in_place:
                    directory.mkdir(exist_ok=True)
                version = self.versions[number] = Version(number, directory, threading.Condition(self.lock))
                self._changed()
            return version

    def _expose(self, version: Version, entry: journal.Object, write: bool = False) -> None:
        with self.lock:
            if write:
                _append(version.directory / "objects.jsonl", _line(entry))
            replaced = version.objects.get(entry.path)
            version.num_bytes += entry.size - (replaced.size if replaced else 0)
            version.objects[entry.path] = entry
            version.log.append(entry)
            version.grown.notify_all()

    def _complete(self, version: Version, manifest: manifest_lib.Manifest, data: bytes) -> None:
        with self.lock:
            version.num_bytes += len(data) - len(version.manifest or b"")
            version.manifest, version.base = data, manifest.base
            self._changed()
            version.grown.notify_all()

    def _rewrite_journal(self, version: Version) -> None:
        try:
            self._write(version.directory, "objects.jsonl", b"".join(map(_line, version.log)))
        except OSError:  # a full disk; without a journal the next start fetches again what it cannot name
            (version.directory / "objects.jsonl").unlink(missing_ok=True)

    def _changed(self) -> None:
        self._num_changes += 1
        self.changed.notify_all()

    # -- for clients

    def listing(self, tag: str = "", wait_s: float = 0.0) -> dict:
        """What there is; held back until it differs from what `tag` stands for."""
        with self.lock:
            self.changed.wait_for(lambda: self._closed or tag != self._tag(), wait_s)
            complete = sorted(v.number for v in self.versions.values() if v.manifest is not None)
            partial = sorted(v.number for v in self.versions.values() if v.manifest is None)
            return {"complete": complete, "partial": partial, "tag": self._tag()}

    def entries(self, number: int, epoch: str, after: int, wait_s: float) -> tuple[bytes, dict[str, str]] | None:
        """Lines of the objects finished after the first `after` of this epoch, with headers; None: no such version."""
        with self.lock:
            version = self.versions.get(number)
            if version is None:
                return None
            start = after if epoch == version.epoch else 0
            version.grown.wait_for(
                lambda: self._closed or len(version.log) > start or version.manifest is not None, wait_s
            )
            current = [
                e for e in version.log[start:] if version.objects.get(e.path) == e
            ]  # not what was replaced since
            headers = {"X-Epoch": version.epoch, "X-Next": str(len(version.log))}
            headers["X-Complete"] = str(int(version.manifest is not None))
            return b"".join(map(_line, current)), headers

    def manifest(self, number: int) -> bytes | None:
        with self.lock:
            version = self.versions.get(number)
            return None if version is None else version.manifest

    def object(self, number: int, path: str) -> tuple[pathlib.Path, journal.Object] | None:
        with self.lock:
            version = self.versions.get(number)
            entry = None if version is None else version.objects.get(path)
            return None if entry is None else (version.directory / path, entry)

    def close(self) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.changed.notify_all()
            for version in self.versions.values():
                version.grown.notify_all()
        if not self.in_place:
            os.close(self._descriptor)

    def _tag(self) -> str:
        return f"{self._epoch}-{self._num_changes}"


def _append(path: pathlib.Path, line: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, f"{path}: no space for a line")
        except OSError:
            file.truncate(end)  # half a line would spoil all that follow
            raise


def _line(entry: journal.Object) -> bytes:
    return json.dumps(dataclasses.asdict(entry), separators=(",", ":")).encode() + b"\n"


def _digest_of(path: pathlib.Path) -> str | None:
    try:
        return digests.of_file(path)
    except OSError:  # missing, or a directory where a file should be
        return None
