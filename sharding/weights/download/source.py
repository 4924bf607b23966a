"""The places that published versions are read from: a directory, a bucket, or relays (`sharding/weights/download/relays.py`).

`open` returns a `Source`. It returns nothing unverified: with a trusted key a manifest is one that the signed head lists
(sharding/weights/format/head.py), and an object is hashed before the read returns. Imports no jax, and tensorstore only for a bucket: relays start without them.
"""

import collections
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sharding.weights.download import range_get, relays
from sharding.weights.format import digests, journal
from sharding.weights.format import head as head_lib
from sharding.weights.format import manifest as manifest_lib

DIRECTORY_POLL_S = 0.01
BUCKET_POLL_S = 1.0
MAX_TRIES = 3  # of an object that a bucket delivers wrong

Trusted = str | os.PathLike | head_lib.HeadVerifier | None


def open(
    source: str | os.PathLike | Sequence[str], *, trusted_key: Trusted = None, options: range_get.Options | None = None
) -> "Source":
    """Returns an open source of published weights: a directory, a bucket, or one or more relays.

    Args:
      source: the path of a directory, the URL of a bucket (gs://, s3://) or a relay, or a sequence of relay URLs.
      trusted_key: hex of the publisher's ed25519 public key, the path of its root file, or a verifier (one per key and process by
        default). Versions that its signed head does not list do not exist. Several relays need it.
      options: timeouts and concurrency for relays.

    Raises:
      ValueError: a malformed key, no source, an unknown scheme, several sources that are not all relays, or several relays without a key.
    """
    trusted = head_lib.verifier_of(trusted_key)
    sources = _checked(source, trusted)
    if sources[0].startswith(("http://", "https://")):
        return relays.Relays(sources, trusted, options)
    if "://" not in sources[0]:
        return Directory(sources[0], trusted)
    return Bucket(sources[0], trusted)


def _checked(source: str | os.PathLike | Sequence[str], trusted: Trusted) -> list[str]:
    """Returns the different sources as texts. Raises ValueError unless they are relays with a key, or one relay, directory or bucket."""
    sources = list(dict.fromkeys(map(str, [source] if isinstance(source, str | os.PathLike) else source)))
    if not sources:
        raise ValueError("no source is given; pass a directory, a bucket URL or a relay's URL")
    schemes = {s.partition("://")[0] if "://" in s else "" for s in sources}
    if not schemes <= {"http", "https"} and len(sources) > 1:
        raise ValueError(f"sources {sources} are not all relays; pass one source, or several http(s) URLs of relays")
    if len(sources) > 1 and trusted is None:
        found = (
            f"relays {', '.join(sources)} are given without a key, and only a signature tells which of several is right"
        )
        remedy = "pass the run's public key: --trusted_key of a relay, --weights_key of a server, --key of sharding.broadcast"
        raise ValueError(f"{found}; {remedy}")
    if not schemes <= {"", "http", "https", "gs", "s3", "file", "memory"}:
        raise ValueError(f"source {sources[0]!r} has an unknown scheme; use a path, gs://, s3://, http:// or https://")
    if re.fullmatch(r"[\w.-]+:\d+/?", sources[0]) and not os.path.exists(sources[0]):
        raise ValueError(f"source {sources[0]!r} is not a directory or a URL; write http://{sources[0]} for a relay")
    return sources


def read(source: "Source", version: int, entry: journal.Object) -> bytearray:
    """Returns the verified bytes of the object `entry`. Raises CorruptSource, FileNotFoundError or Unavailable."""
    data = bytearray(entry.size)
    source.read(version, entry, [memoryview(data)])
    return data


class _Storage:
    """The base class of the sources `Directory` and `Bucket`: waits by polling, and parses manifests."""

    _scan: Callable[[], journal.Listing]
    _new_entries: Callable[[int], list[journal.Object]]
    _get: Callable[[str, int], bytes | None]  # the first bytes of a file, None without one
    _known: Callable[[int], Sequence[int]]  # the complete versions, when one has no manifest

    def __init__(self, place: str, trusted_key: Trusted, poll_s: float):
        self._place = place if place.endswith("/") else f"{place}/"
        self.trusted, self._poll_s = head_lib.verifier_of(trusted_key), poll_s
        self._expired: head_lib.Head | None = None  # the one of which a notice was printed
        self._is_closed = False
        self._counters = collections.Counter()

    def versions(self) -> list[int]:
        """Returns the numbers of the complete versions, ascending."""
        return list(self.listing().complete)

    def head(self) -> head_lib.Head | None:
        """Returns the head, read and verified; None without a trusted key, and while there is none yet.

        An expired head is reported once on standard error, and accepted. Raises CorruptSource for a head that is not the trusted
        key's, or older than one that this process has accepted from anywhere.
        """
        if self.trusted is None or (data := self._read_head()) is None:
            return None
        try:
            head = self.trusted.accept(data, expired=True)
        except journal.CorruptSource as error:
            raise type(error)(f"{self._place}{head_lib.NAME}: {error}") from error
        try:
            self.trusted.check_time(head)
        except head_lib.ExpiredHead as error:
            if head != self._expired:
                print(f"notice: {self._place}{head_lib.NAME}: {error}", file=sys.stderr)
            self._expired = head
        return head

    def listing(self, wait_s: float = 0.0, known: journal.Listing | None = None) -> journal.Listing:
        """Returns the complete and the partial versions. Blocks up to `wait_s` seconds until they differ from `known`.

        If there is a head, complete are those that it lists, and partial is the one that it says is being written.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            listing = self._scan()
            if listing != known or not self._sleep(deadline_s):
                return listing

    def entries(self, version: int, wait_s: float = 0.0) -> list[journal.Object]:
        """Returns the objects added to the version's journal since the last call.

        Blocks up to `wait_s` seconds until an object is new or the version is complete.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            is_complete = version in self._scan().complete  # before the journal: then no entry can be missed
            entries = self._new_entries(version)
            if entries or is_complete or not self._sleep(deadline_s):
                return entries

    def manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        """Returns the manifest of `version`: (bytes of its file, parsed).

        Raises CorruptSource if the manifest is invalid, and FileNotFoundError if it is missing.
        """
        self.head()
        name = f"{journal.dirname(version)}/manifest.json"
        if (data := self._get(name, journal.MAX_MANIFEST_BYTES + 1)) is None:
            raise journal.no_version(version, self._place.rstrip("/"), self._known(version))
        try:
            return data, head_lib.manifest_of(self.trusted, data, version)
        except journal.CorruptSource as error:
            raise journal.CorruptSource(f"{self._place}{name}: {error}") from error

    def stats(self) -> dict[str, Any]:
        """Returns the place, and counters of the bytes and the corrupt objects read so far."""
        return {"source": self._place, **self._counters}

    def close(self) -> None:
        """Makes blocking calls of `listing` and `entries`, also later ones, return early."""
        self._is_closed = True

    def _read_head(self) -> bytes | None:
        return self._get(head_lib.NAME, head_lib.MAX_HEAD_BYTES + 1)

    def _listed(self, complete: Iterable[int], partial: Iterable[int]) -> journal.Listing:
        """Returns the listing of the versions found, as far as the head confirms them."""
        if self.trusted is None:
            return head_lib.listing(None, complete, partial, self._read_head())
        self.head()
        return head_lib.listing(self.trusted, complete, partial)

    def _sleep(self, deadline_s: float) -> bool:
        """Sleeps until the next poll and returns True, or returns False if the deadline has passed or the source is closed."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or self._is_closed:
            return False
        time.sleep(min(self._poll_s, left_s))
        return True


class Directory(_Storage):
    """Published weights as read from a directory: the root that a publisher writes to, or the one that a relay mirrors to."""

    def __init__(self, root: str, trusted_key: Trusted = None):
        super().__init__(root, trusted_key, DIRECTORY_POLL_S)
        self.root = pathlib.Path(root)
        self._cursors: dict[int, tuple[int, bytes]] = {}  # version -> bytes read of the journal, the last line of them

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        """Fills the buffers `into`, `entry.size` bytes in total, with the object `entry`, after checking its digest.

        Raises CorruptSource if the object has another digest everywhere, FileNotFoundError if it is missing, and Unavailable
        if no relay delivers it in time. After an error the contents of `into` are undefined.
        """
        target = range_get.Target(into, entry)
        full = self.root / journal.dirname(version) / entry.path
        try:
            with full.open("rb", buffering=0) as file:
                actual_size = os.fstat(file.fileno()).st_size
                text = f"object {full} has {actual_size} bytes, not the {entry.size} published; delete that version"
                journal.require(actual_size == entry.size, text)
                position = 0
                while position < entry.size and (n := file.readinto(target.view(position, entry.size))):
                    position += n
        except FileNotFoundError as error:
            if not (self.root / journal.dirname(version)).exists():
                text = f"{full.parent} was deleted while it was read"
                raise FileNotFoundError(f"{text}; pull the newest version, or let publishers keep more") from error
            raise journal.CorruptSource(f"object {full} is missing from its version; delete that version") from error
        self._counters["num_bytes"] += entry.size
        actual = digests.of(*target.views)
        self._counters["num_bad_objects"] += actual != entry.digest
        text = f"object {full} has digest {actual}, not the published {entry.digest}; delete that version"
        journal.require(actual == entry.digest, text)

    def _new_entries(self, version: int) -> list[journal.Object]:
        position, line = self._cursors.get(version, (0, b""))
        try:
            with (self.root / journal.dirname(version) / "objects.jsonl").open("rb") as file:
                file.seek(position - len(line))
                if file.read(len(line)) != line:  # another publisher has begun this version again
                    position = file.seek(0)
                data = file.read(journal.MAX_JOURNAL_BYTES)
        except FileNotFoundError:
            return []
        entries, used = journal.parse_journal(data)
        if entries:
            self._cursors[version] = (position + used, data[:used].splitlines(keepends=True)[-1])
        return entries

    def _scan(self) -> journal.Listing:
        complete, partial = [], []
        try:
            names = os.listdir(self.root)
        except FileNotFoundError as error:
            text = f"no broadcast directory {self.root}; start the publisher, or pass the root that it publishes to"
            raise FileNotFoundError(text) from error
        for name in names:
            version = journal.parse_dirname(name)
            if version is None:
                continue
            if (self.root / name / "manifest.json").is_file():
                complete.append(version)
            elif (self.root / name / "objects.jsonl").is_file():
                partial.append(version)
        return self._listed(complete, partial)

    def _get(self, name: str, limit: int) -> bytes | None:
        try:
            with (self.root / name).open("rb") as file:
                return file.read(limit)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _known(self, version: int) -> Sequence[int]:
        return self._scan().complete


class Bucket(_Storage):
    """Published weights as read from a bucket (gs://, s3://) by tensorstore, which handles credentials and retries."""

    def __init__(self, url: str, trusted_key: Trusted = None):
        import tensorstore as ts  # only here: relays and their clients start without it

        from sharding.weights import bucket

        super().__init__(url, trusted_key, BUCKET_POLL_S)
        self._range = ts.KvStore.KeyRange
        self._store = bucket.open_store(self._place)
        self._lock = threading.Lock()
        self._complete: set[int] = set()
        self._cursors: dict[int, int] = {}  # version -> bytes read of the journal

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        """Fills the buffers `into` with the verified object `entry`. Raises CorruptSource, FileNotFoundError or Unavailable."""
        target = range_get.Target(into, entry)
        path = f"{journal.dirname(version)}/{entry.path}"
        data, actual = b"", ""
        for _ in range(MAX_TRIES):
            found = self._get(path)
            if found is None:
                raise FileNotFoundError(f"{self._place}{path} does not exist; pull the newest version")
            data, actual = found, digests.of(found)
            if actual == entry.digest and len(data) == entry.size:
                self._counters["num_bytes"] += entry.size
                target.put(0, memoryview(data))
                return
            self._counters["num_bad_objects"] += 1
        text = f"{self._place}{path} has {len(data)} bytes with digest {actual}, not {entry.size} with {entry.digest}"
        raise journal.CorruptSource(text)

    def _scan(self) -> journal.Listing:
        """Returns the versions in the bucket. Lists only keys after the newest known version: 1,000 keys take one request."""
        with self._lock:
            newest = max(self._complete, default=-1)
        keys = self._store.list(self._range(journal.dirname(newest + 1), "w")).result()
        paths = [key.decode().partition("/") for key in keys]
        numbers = [(path, journal.parse_dirname(name)) for name, _, path in paths]
        found = {n for path, n in numbers if path == "manifest.json" and n is not None}
        partial = {n for path, n in numbers if path == "objects.jsonl" and n is not None}
        with self._lock:
            self._complete |= found
            complete = set(self._complete)
        return self._listed(complete, partial - found)

    def _new_entries(self, version: int) -> list[journal.Object]:
        data = self._get(f"{journal.dirname(version)}/objects.jsonl") or b""
        position = self._cursors.get(version, 0)
        position = position if position <= len(data) else 0
        entries, used = journal.parse_journal(data[position:])
        self._cursors[version] = position + used
        return entries

    def _known(self, version: int) -> Sequence[int]:
        with self._lock:
            self._complete.discard(version)
            return sorted(self._complete)

    def _get(self, key: str, limit: int = 0) -> bytes | None:
        """Returns all of an object: buckets charge by the request."""
        try:
            result = self._store.read(key).result()
        except ValueError as error:  # the only type of error that tensorstore raises; after its own retries
            raise journal.Unavailable(f"{self._place}{key} cannot be read: {error}; check the network") from error
        return None if result.state == "missing" else result.value


Source = Directory | Bucket | relays.Relays  # all methods may be called from many threads
