"""Where published versions are read from: a directory, a bucket, or relays (`sharding/download/relays.py`).

`open` gives a `Source`. Nothing leaves it unverified: a manifest is parsed (and, with `trusted_key`, its signature
checked) and an object is hashed before the read returns.
"""

import builtins
import collections
import os
import pathlib
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from sharding.download import range_get, relays
from sharding.format import digests, journal
from sharding.format import manifest as manifest_lib

POLL_S = 0.01  # how often a directory is looked at by whoever waits for it
MAX_TRIES = 3  # of an object that a bucket delivers wrong


class Source(Protocol):
    """What `open` returns. All methods may be called from many threads."""

    def versions(self) -> list[int]: ...

    def manifest_bytes(self, version: int) -> bytes: ...

    def manifest(self, version: int) -> manifest_lib.Manifest: ...

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        """Fills `into`, writable views of `entry.size` bytes together, with an object that has the digest of the entry.

        `CorruptSource` where whoever has it delivers something else, `FileNotFoundError` where nobody has it, `Unavailable`
        where nobody delivers in time. After an error the views hold anything.
        """
        ...

    def listing(self, wait_s: float = 0.0, known: journal.Listing | None = None) -> journal.Listing: ...

    def entries(self, version: int, wait_s: float = 0.0) -> tuple[list[journal.Object], bool]: ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


def open(
    source: str | os.PathLike | Sequence[str],
    *,
    trusted_key: str | None = None,
    options: range_get.Options | None = None,
):
    """A `Source` for a directory, a bucket URL (gs://, s3://), or the URLs of one or more relays.

    `trusted_key` is the hex of the ed25519 public key that must have signed every manifest. Without it the relays of a
    list must agree on a manifest, since nothing else could tell which one is right.
    """
    if trusted_key is not None and not re.fullmatch(r"[0-9a-f]{64}", trusted_key):
        raise ValueError(f"trusted_key {trusted_key!r} is not the 64 lower-case hex digits of an ed25519 public key")
    options = options or range_get.Options()
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not sources:
        raise ValueError("no source given: pass a directory, a bucket URL or a relay's URL")
    sources = list(dict.fromkeys(str(s) for s in sources))
    schemes = {s.partition("://")[0] if "://" in s else "" for s in sources}
    if schemes <= {"http", "https"}:
        return relays.Relays(sources, trusted_key, options)
    if len(sources) > 1:
        raise ValueError(f"sources {sources} mix kinds: several sources must all be http(s) relays")
    if schemes == {""}:
        return Directory(sources[0], trusted_key)
    if schemes <= {"gs", "s3", "file", "memory"}:
        return Bucket(sources[0], trusted_key)
    raise ValueError(f"source {sources[0]!r} has an unknown scheme: use a path, gs://, s3://, http:// or https://")


def read(source: Source, version: int, entry: journal.Object) -> bytearray:
    """An object of a source, in memory of its own."""
    data = bytearray(entry.size)
    source.read(version, entry, [memoryview(data)])
    return data


# ---- a directory -----------------------------------------------------------------------------------------------------


class Directory:
    """The root a publisher writes to, or a relay's directory."""

    def __init__(self, root: str, trusted_key: str | None = None):
        self.root = pathlib.Path(root)
        self._trusted_key = trusted_key
        self._cursors: dict[int, tuple[int, bytes]] = {}  # version -> bytes read of the journal, the last line of them
        self._is_closed = False
        self._counters = collections.Counter()

    def versions(self) -> list[int]:
        return list(self.listing().complete)

    def listing(self, wait_s: float = 0.0, known: journal.Listing | None = None) -> journal.Listing:
        """Held back for at most `wait_s` until it differs from `known`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            now = self._scan()
            if now != known or time.monotonic() >= deadline_s or self._is_closed:
                return now
            time.sleep(POLL_S)

    def manifest_bytes(self, version: int) -> bytes:
        return self._manifest(version)[0]

    def manifest(self, version: int) -> manifest_lib.Manifest:
        return self._manifest(version)[1]

    def _manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        path = self.root / journal.dirname(version) / "manifest.json"
        try:
            with builtins.open(path, "rb") as file:
                data = file.read(journal.MAX_MANIFEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise journal.no_version(version, self.root, self._scan().complete) from error
        return data, _parsed(data, version, self._trusted_key, path)

    def entries(self, version: int, wait_s: float = 0.0) -> tuple[list[journal.Object], bool]:
        """(Objects finished since the last call, whether the manifest is there); waits for either."""
        directory = self.root / journal.dirname(version)
        deadline_s = time.monotonic() + wait_s
        while True:
            complete = (directory / "manifest.json").exists()  # before the journal: then nothing can be missed
            entries = self._new_entries(version, directory / "objects.jsonl")
            if entries or complete or time.monotonic() >= deadline_s or self._is_closed:
                return entries, complete
            time.sleep(POLL_S)

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        target = range_get.Target.of(entry, into)
        full = self.root / journal.dirname(version) / entry.path
        try:
            with builtins.open(full, "rb", buffering=0) as file:
                actual_size = os.fstat(file.fileno()).st_size
                if actual_size != entry.size:
                    raise journal.CorruptSource(f"object {full} has {actual_size} bytes, not {entry.size}")
                position = 0
                while position < entry.size and (n := file.readinto(target.at(position, entry.size))):
                    position += n
        except FileNotFoundError as error:
            if not (self.root / journal.dirname(version)).exists():
                raise FileNotFoundError(
                    f"{full.parent} was deleted while it was read: pull the newest, or raise keep"
                ) from error
            raise journal.CorruptSource(f"object {full} is missing") from error
        self._counters["num_bytes"] += entry.size
        actual = target.digest()
        if actual != entry.digest:
            self._counters["num_bad_objects"] += 1
            raise journal.CorruptSource(f"object {full} has digest {actual}, not {entry.digest}")

    def stats(self) -> dict[str, Any]:
        return {"source": str(self.root), **self._counters}

    def close(self) -> None:
        self._is_closed = True  # ends what waits

    def _scan(self) -> journal.Listing:
        complete, partial = [], []
        try:
            names = os.listdir(self.root)
        except FileNotFoundError as error:
            what = f"no broadcast directory {self.root}: start the publisher, or pass the root it publishes to"
            raise FileNotFoundError(what) from error
        for name in names:
            version = journal.parse_dirname(name)
            if version is None:
                continue
            if (self.root / name / "manifest.json").is_file():
                complete.append(version)
            elif (self.root / name / "objects.jsonl").is_file():
                partial.append(version)
        return journal.Listing(tuple(sorted(complete)), tuple(sorted(partial)))

    def _new_entries(self, version: int, path: pathlib.Path) -> list[journal.Object]:
        try:
            with builtins.open(path, "rb") as file:
                position, line = self._cursors.get(version, (0, b""))
                file.seek(position - len(line))
                if file.read(len(line)) != line:  # a publisher that died was started again and writes this version anew
                    position, line = 0, b""
                    file.seek(0)
                data = file.read(journal.MAX_JOURNAL_BYTES)
                entries, used = journal.parse_journal(data)
        except FileNotFoundError:
            return []
        if entries:
            self._cursors[version] = (position + used, data[:used].splitlines(keepends=True)[-1])
        return entries


# ---- a bucket --------------------------------------------------------------------------------------------------------


class Bucket:
    """gs://bucket/prefix or s3://bucket/prefix, through tensorstore, which knows credentials and retries."""

    def __init__(self, url: str, trusted_key: str | None = None):
        import tensorstore as ts  # only here: relays and their clients start without it

        self.url = url if url.endswith("/") else url + "/"
        self._range = ts.KvStore.KeyRange
        self._store = ts.KvStore.open(self.url).result()
        self._trusted_key = trusted_key
        self._lock = threading.Lock()
        self._complete: set[int] = set()
        self._journals: dict[int, int] = {}
        self._counters = collections.Counter()

    def versions(self) -> list[int]:
        return list(self.listing().complete)

    def listing(self, wait_s: float = 0.0, known: journal.Listing | None = None) -> journal.Listing:
        """Lists only the keys of versions newer than the newest known: a bucket lists a thousand keys per request."""
        deadline_s = time.monotonic() + wait_s
        while True:
            with self._lock:
                newest = max(self._complete, default=-1)
            keys = self._store.list(self._range(journal.dirname(newest + 1), "w")).result()
            found = collections.defaultdict(set)
            for key in keys:
                name, _, path = key.decode().partition("/")
                version = journal.parse_dirname(name)
                if version is not None and path in ("manifest.json", "objects.jsonl"):
                    found[version].add(path)
            new = {v for v, paths in found.items() if "manifest.json" in paths}
            with self._lock:
                self._complete |= new
                result = journal.Listing(tuple(sorted(self._complete)), tuple(sorted(set(found) - new)))
            if result != known or time.monotonic() >= deadline_s:
                return result
            time.sleep(min(1.0, max(0.0, deadline_s - time.monotonic())))

    def manifest_bytes(self, version: int) -> bytes:
        return self._manifest(version)[0]

    def manifest(self, version: int) -> manifest_lib.Manifest:
        return self._manifest(version)[1]

    def _manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        data = self._get(f"{journal.dirname(version)}/manifest.json")
        if data is None:
            with self._lock:
                self._complete.discard(version)
                known = sorted(self._complete)
            raise journal.no_version(version, self.url, known)
        where = f"{self.url}{journal.dirname(version)}/manifest.json"
        return data, _parsed(data, version, self._trusted_key, where)

    def entries(self, version: int, wait_s: float = 0.0) -> tuple[list[journal.Object], bool]:
        deadline_s = time.monotonic() + wait_s
        while True:
            complete = self._get(f"{journal.dirname(version)}/manifest.json") is not None
            data = self._get(f"{journal.dirname(version)}/objects.jsonl") or b""
            position = self._journals.get(version, 0)
            position = position if position <= len(data) else 0
            entries, used = journal.parse_journal(data[position:])
            self._journals[version] = position + used
            if entries or complete or time.monotonic() >= deadline_s:
                return entries, complete
            time.sleep(min(1.0, max(0.0, deadline_s - time.monotonic())))

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        target = range_get.Target.of(entry, into)
        where = f"{self.url}{journal.dirname(version)}/{entry.path}"
        for _ in range(MAX_TRIES):
            data = self._get(f"{journal.dirname(version)}/{entry.path}")
            if data is None:
                raise FileNotFoundError(f"{where} is not there: pull the newest version")
            actual = digests.of(data)
            if actual == entry.digest and len(data) == entry.size:
                self._counters["num_bytes"] += entry.size
                target.put(0, memoryview(data))
                return
            self._counters["num_bad_objects"] += 1
        raise journal.CorruptSource(
            f"object {where} has {len(data)} bytes with digest {actual}, not {entry.size} with {entry.digest}"
        )

    def stats(self) -> dict[str, Any]:
        return {"source": self.url, **self._counters}

    def close(self) -> None:
        pass

    def _get(self, key: str) -> bytes | None:
        try:
            result = self._store.read(key).result()
        except ValueError as error:  # tensorstore's only type of error; it has retried what can be retried
            raise journal.Unavailable(f"{self.url}{key}: {error}") from error
        return None if result.state == "missing" else result.value


def _parsed(data: bytes, version: int, trusted_key: str | None, where: str | os.PathLike) -> manifest_lib.Manifest:
    try:
        return manifest_lib.parse(data, version=version, trusted_key=trusted_key)
    except journal.CorruptSource as error:
        raise journal.CorruptSource(f"{where}: {error}") from error
