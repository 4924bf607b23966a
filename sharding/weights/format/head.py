"""The signed head of a broadcast: it names the newest version, and readers refuse older heads.

`head.jsonl` lies beside the versions. Each line is one metadata file of TUF (The Update Framework, python-tuf), unchanged, so
that one read brings all of them:

* roots after the first, in order: each names the keys of all roles, and is signed by the keys of the root before it and by its own;
* `timestamp`: its expiry, the `epoch`, in `writing` the version that is being written (or null), and the hash of
* `snapshot`, which has the hash of
* `targets`: per kept version the epoch, and the length and SHA-256 of its manifest, which are checked before it is parsed.

A reader that trusts only the run's key gives it all roles, and reads no roots. With a root file, an offline key (or several) names the
online key, replaces it, and revokes it. Each resume of a run begins an epoch. Versions are ordered by (epoch, version).

`HeadVerifier` keeps a floor: it refuses every head that is older than one it has accepted, and a second manifest of one
(epoch, version). It remembers the manifests of the newest MAX_REMEMBERED numbers, and refuses older numbers that it does not know.
Everything else of TUF's client workflow is as specified; `tests/sharding/weights/format/test_head.py` compares it with
`tuf.ngclient`, which is not used because it reads four files, each from a place of its own. Imports no jax.
"""

# pyright: reportPrivateImportUsage=false
import dataclasses
import datetime
import functools
import hashlib
import heapq
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import pydantic
from cryptography.hazmat.primitives.asymmetric import ed25519
from securesystemslib.signer import CryptoSigner
from tuf.api import exceptions
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.api.serialization.json import JSONSerializer

from sharding.system import atomic_file
from sharding.weights.format import journal
from sharding.weights.format import manifest as manifest_lib
from sharding.weights.format import roots as roots_lib

NAME = "head.jsonl"
MAX_HEAD_BYTES = 2 << 20
MAX_TIMESTAMP_BYTES = 16 << 10
MAX_REMEMBERED = 4096  # numbers (epoch, version) whose manifests a reader remembers, besides those of the newest head

_require = journal.require
Signed = TypeVar("Signed", Root, Timestamp, Snapshot, Targets)
Number = Annotated[int, pydantic.Field(ge=0, le=1 << 48)]


class StaleHead(journal.CorruptSource):
    """Raised for a head that is older than one accepted before. An honest relay may have one for a moment.

    `is_old_version` is True if its newest version is older, too, and False if only its signature is.
    """

    def __init__(self, text: str, *, is_old_version: bool = False):
        super().__init__(text)
        self.is_old_version = is_old_version


class ExpiredHead(journal.CorruptSource):
    """Raised for a head whose time is over: the publisher has ended without a last head, or the source withholds newer ones."""


@dataclasses.dataclass(frozen=True, order=True)
class Entry:
    """One version that a head lists: its place in the order (epoch, version), and its manifest's length and SHA-256 in hex."""

    epoch: int
    version: int
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes, epoch: int, version: int) -> "Entry":
        """Returns the entry for the manifest `data`."""
        return cls(epoch, version, len(data), hashlib.sha256(data).hexdigest())

    def check(self, data: bytes) -> None:
        """Raises CorruptSource unless `data` is the listed manifest. Costs one hash: nothing is parsed."""
        actual = f"{len(data)} bytes with SHA-256 {hashlib.sha256(data).hexdigest()}"
        stated = f"{self.num_bytes} bytes with SHA-256 {self.sha256}"
        text = f"the manifest of version {self.version} has {actual}, but the signed head lists {stated}"
        _require(actual == stated, f"{text}; read it from another source")


@dataclasses.dataclass(frozen=True)
class Head:
    """An accepted head. `data` are its bytes, which mirrors hand on unchanged; `writing` is the version being written, or None.

    `serial` grows with each head of a publisher: the time of its signature in milliseconds. `expires_s` is in seconds of
    time.time().
    """

    data: bytes = dataclasses.field(repr=False)
    serial: int
    expires_s: float
    epoch: int
    writing: int | None
    versions: dict[int, Entry]

    @property
    def newest(self) -> Entry | None:
        """The newest version of the newest epoch, or None while that epoch has none."""
        return max((entry for entry in self.versions.values() if entry.epoch == self.epoch), default=None)

    @property
    def renewal_s(self) -> float:
        """The seconds after its signature in which the publisher of a run signs it again, or a newer one: a quarter of its time."""
        return (self.expires_s - self.serial / 1000) / 4

    @property
    def order(self) -> tuple[int, int]:
        """The place of the newest version in the order (epoch, version); the version is -1 while the epoch has none."""
        return self.epoch, self.newest.version if self.newest else -1


class _Custom(pydantic.BaseModel):
    """The fields of our own in a timestamp, and of a version in targets."""

    model_config = pydantic.ConfigDict(strict=True)
    epoch: Number
    writing: Number | None = None


class _Remembered(pydantic.BaseModel):
    """The manifests that a floor file's reader remembers: (epoch, version, SHA-256), from heads that `keys` signed."""

    keys: list[str] = []
    manifests: list[tuple[Number, Number, str]] = []


class HeadVerifier:
    """Accepts heads and keeps the floor: the newest head accepted so far. May be shared by threads and by sources.

    `trusted` is the hex of the run's ed25519 public key, or the path of a root file (`python -m sharding.broadcast keys`). `floor`
    is a file that keeps the newest head for the next process, with the manifests of all numbers in FILE.manifests; relays serve the
    same file. `first_root` trusts the oldest root of the file until a head brings newer ones: for the publisher, whose last head an
    older key may have signed. Raises ValueError for a malformed key or file.
    """

    def __init__(
        self,
        trusted: str | os.PathLike,
        floor: str | os.PathLike | None = None,
        clock: Callable[[], float] = time.time,
        first_root: bool = False,
    ):
        self.name = str(trusted)
        self.head: Head | None = None
        self._root, self._follows_roots = roots_lib.trusted(trusted, first=first_root)
        self._roots: list[bytes] = []  # lines after the trusted one
        self._manifests: dict[tuple[int, int], str] = {}  # (epoch, version) -> SHA-256, of the heads accepted
        self._clock, self._floor = clock, None
        self._lock = threading.RLock()
        if floor is not None:
            self._recover(pathlib.Path(floor))

    @property
    def keys(self) -> frozenset[str]:
        """The hex public keys that may sign heads and manifests now."""
        return roots_lib.online_keys(self._root)

    def accept(self, data: bytes, *, expired: bool = False) -> Head:
        """Returns the head in `data`, the untrusted bytes of a head.jsonl, and raises the floor to it.

        Returns the accepted head unchanged if `data` has the same serial. With `expired`, the time is not compared: for a
        directory or bucket, whose owner could sign anyway. Raises StaleHead for an older head, ExpiredHead for one whose time
        is over, and CorruptSource for any other that is not signed by the trusted keys, malformed, or contradicts itself.
        """
        with self._lock:
            if self.head is None or data != self.head.data:
                try:
                    self._accept(data)
                except (exceptions.RepositoryError, ValueError, KeyError, RecursionError) as error:
                    if isinstance(error, journal.CorruptSource):
                        raise
                    cause = f" ({str(error.__cause__)[:200]})" if error.__cause__ else ""
                    text = f"the head is malformed, or not signed by the trusted key {self.name}: {str(error)[:300]}{cause}"
                    raise journal.CorruptSource(f"{text}; use the run's own source, or its newer root file") from error
            assert self.head is not None
            if not expired:
                self.check_time(self.head)
            return self.head

    def check_time(self, head: Head) -> None:
        """Raises ExpiredHead if the time of `head`, or of the root that it relies on, is over."""
        now_s = self._clock()
        for what, until_s in (("head", head.expires_s), ("root", self._root.expires.timestamp())):
            if now_s >= until_s:
                dates = (datetime.datetime.fromtimestamp(s, datetime.UTC) for s in (until_s, now_s))
                until, now = (date.isoformat(timespec="seconds") for date in dates)
                text = f"the {what} of key {self.name} has expired at {until}, our clock is at {now}"
                text += ": the source may withhold newer weights"
                remedy = "use another source, synchronize the clocks, or let the publisher sign a new one"
                raise ExpiredHead(f"{text}; {remedy} (python -m sharding.broadcast keys)")

    def manifest(self, data: bytes, version: int) -> manifest_lib.Manifest:
        """Returns the manifest of `version` in `data`, untrusted bytes, which are hashed before they are parsed.

        Raises CorruptSource unless they are those that the accepted head lists.
        """
        if self.head is None:
            text = f"version {version} comes without the signed head that key {self.name} writes"
            raise journal.CorruptSource(f"{text}; use another source")
        versions = self.head.versions
        _require(version in versions, f"version {version} is not in the signed head: it has {sorted(versions)}")
        versions[version].check(data)
        return manifest_lib.parse(data, version=version, is_proved=True)

    def has_signed(self, data: bytes, version: int) -> bool:
        """Returns True for a manifest of `version` by the trusted keys, such as one of an epoch before or after that of the head."""
        try:
            return manifest_lib.parse(data, version=version).public_key in self.keys
        except journal.CorruptSource:
            return False

    def _accept(self, data: bytes) -> None:
        _require(len(data) <= MAX_HEAD_BYTES, f"the head has {len(data)} bytes: at most {MAX_HEAD_BYTES} are allowed")
        lines = data.split(b"\n", roots_lib.MAX_ROOTS + 4)
        text = f"the head has {len(lines) - 1} lines, not 3 to {roots_lib.MAX_ROOTS + 3}, each with its end"
        _require(4 <= len(lines) <= roots_lib.MAX_ROOTS + 4 and not lines[-1], text)
        *roots, timestamp_line, snapshot_line, targets_line, _ = lines
        if self._follows_roots:
            self._follow(roots)
        text = f"the head's timestamp has {len(timestamp_line)} bytes: at most {MAX_TIMESTAMP_BYTES} are allowed"
        _require(len(timestamp_line) <= MAX_TIMESTAMP_BYTES, text)
        timestamp = _load(Timestamp, timestamp_line, self._root)
        if self.head is not None and timestamp.version == self.head.serial:
            return
        timestamp.snapshot_meta.verify_length_and_hashes(snapshot_line)
        snapshot = _load(Snapshot, snapshot_line, self._root, timestamp.snapshot_meta.version)
        snapshot.meta["targets.json"].verify_length_and_hashes(targets_line)
        targets = _load(Targets, targets_line, self._root, snapshot.meta["targets.json"].version)
        custom = _Custom.model_validate({k: timestamp.unrecognized_fields.get(k) for k in ("epoch", "writing")})
        until = min(role.expires for role in (timestamp, snapshot, targets))
        entries = {entry.version: entry for entry in map(_entry, targets.targets.values())}
        head = Head(data, timestamp.version, until.timestamp(), custom.epoch, custom.writing, entries)
        self._check_floor(head)
        self._remember(head)
        self._save(head)
        self.head = head

    def _follow(self, lines: Iterable[bytes]) -> None:
        """Takes on the roots in `lines` that follow the current one. Forgets the floor if the keys of the head were replaced.

        Otherwise a stolen key could sign an epoch so high that nothing of the honest keys is ever newer (TUF 5.3.11).
        """
        for line in lines:
            root = roots_lib.parse(line)
            if root.signed.version <= self._root.version:
                continue
            text = f"root {self._root.version + 1} is missing in the head"
            _require(root.signed.version == self._root.version + 1, text)
            roots_lib.check_next(self._root, root)
            revoked = set(self._root.roles[Timestamp.type].keyids) - set(root.signed.roles[Timestamp.type].keyids)
            self._root = root.signed
            self._roots.append(line)
            if revoked:
                self.head = None
                self._manifests.clear()
            self._save(self.head)

    def _check_floor(self, head: Head) -> None:
        """Raises StaleHead or CorruptSource if `head` contradicts an accepted one, or is older."""
        # The oldest of the last MAX_REMEMBERED numbers. An older one that is not remembered may have had another manifest.
        is_full = len(self._manifests) >= MAX_REMEMBERED
        oldest = heapq.nlargest(MAX_REMEMBERED, self._manifests)[-1] if is_full else (0, 0)
        for entry in head.versions.values():
            order = entry.epoch, entry.version
            known = self._manifests.get(order, entry.sha256)
            text = f"two manifests of version {entry.version} of epoch {entry.epoch} are signed: {known} and {entry.sha256}"
            _require(known == entry.sha256, f"{text}; the key signs twice; replace it (sharding.broadcast keys)")
            text = f"version {entry.version} of epoch {entry.epoch} is older than the last {MAX_REMEMBERED} that were accepted"
            _require(order >= oldest or order in self._manifests, f"{text}, and none of them; use another source")
            text = f"version {entry.version} is of epoch {entry.epoch}, newer than the head's epoch {head.epoch}"
            _require(entry.epoch <= head.epoch, text)
        if self.head is not None and (head.serial < self.head.serial or head.order < self.head.order):
            texts = (f"epoch {h.epoch}, version {h.order[1]}, serial {h.serial}" for h in (head, self.head))
            text = "the head is of {}, older than {} accepted before; use another source".format(*texts)
            raise StaleHead(text, is_old_version=head.order < self.head.order)

    def _remember(self, head: Head) -> None:
        """Remembers the manifests of `head`, on disk first: a restart must refuse a second manifest of any number accepted."""
        listed = {(entry.epoch, entry.version): entry.sha256 for entry in head.versions.values()}
        if listed.keys() <= self._manifests.keys():
            return
        found = self._manifests | listed
        newest = heapq.nlargest(MAX_REMEMBERED, found)
        found = {order: found[order] for order in {*newest, *listed}}
        if self._floor is not None:
            lines = [(*order, found[order]) for order in sorted(found)]
            content = _Remembered(keys=sorted(self.keys), manifests=lines).model_dump_json()
            atomic_file.write(_beside(self._floor), content.encode(), durable=True)
        self._manifests = found

    def _save(self, head: Head | None) -> None:
        if self._floor is not None:
            accepted = head.data.splitlines()[-3:] if head is not None else []
            atomic_file.write(self._floor, b"\n".join([*self._roots, *accepted, b""]), durable=True)

    def _recover(self, floor: pathlib.Path) -> None:
        """Reads the floor of an earlier process."""
        damaged = floor
        try:
            data = floor.read_bytes()
            _require(bool(data), "it is empty")
            try:
                if b'"_type":"timestamp"' in data:
                    self.accept(data, expired=True)
                else:
                    self._follow(data.splitlines())
            except (ValueError, exceptions.RepositoryError) as error:
                names = [name.encode() for name in self._root.roles[Timestamp.type].keyids]
                is_ours = any(name in line for name in names for line in data.splitlines()[-3:])
                # A head that names our key with a bad signature is damaged. One of another or a revoked key is no floor.
                if is_ours or not isinstance(error.__cause__, exceptions.UnsignedMetadataError):
                    raise
            damaged = _beside(floor)
            found = _Remembered.model_validate_json(damaged.read_bytes()) if damaged.exists() else _Remembered()
            if self.keys.issuperset(found.keys):
                self._manifests |= {(epoch, version): sha256 for epoch, version, sha256 in found.manifests}
        except FileNotFoundError:
            pass
        except (ValueError, exceptions.RepositoryError) as error:
            text = f"the file of the heads accepted before, {damaged}, is damaged"
            found = " ".join(str(error)[:300].split())
            raise ValueError(f"{text} ({found}); delete it, which forgets them") from error
        self._floor = floor


def _beside(floor: pathlib.Path) -> pathlib.Path:
    """Returns the file that remembers the manifests of a floor file. It is apart: readers of a directory take head.jsonl as a head."""
    return floor.with_name(f"{floor.name}.manifests")


@functools.cache
def verifier(trusted: str) -> HeadVerifier:
    """Returns the verifier that all sources of this process share for the trusted key or root file `trusted`: one floor per key."""
    return HeadVerifier(trusted)


def verifier_of(trusted: "str | os.PathLike | HeadVerifier | None") -> HeadVerifier | None:
    """Returns `trusted` if it is a verifier or None, else the one that this process shares for that key or root file."""
    return trusted if isinstance(trusted, HeadVerifier) or trusted is None else verifier(os.fspath(trusted))


def manifest_of(trusted: HeadVerifier | None, data: bytes, version: int) -> manifest_lib.Manifest:
    """Returns the manifest of `version` in `data`, which the head of `trusted` lists, or without it any valid one. Raises CorruptSource."""
    return manifest_lib.parse(data, version=version) if trusted is None else trusted.manifest(data, version)


def listing(
    trusted: HeadVerifier | None, complete: Iterable[int], partial: Iterable[int], data: bytes | None = None
) -> journal.Listing:
    """Returns the listing of the versions found at a source, as far as the accepted head confirms them.

    With `trusted`, versions without a head do not exist. Without it, nothing is confirmed, and the bytes of the source's head, `data`, are
    handed on.
    """
    complete, partial = {*complete}, {*partial} - {*complete}
    if trusted is not None:
        if (head := trusted.head) is None:
            return journal.Listing()
        partial = (complete | partial) - {*head.versions} & {head.writing}
        complete, data = complete & {*head.versions}, head.data
    return journal.Listing(tuple(sorted(complete)), tuple(sorted(partial)), data)


def sign(
    key: ed25519.Ed25519PrivateKey,
    entries: Iterable[Entry],
    serial: int,
    epoch: int,
    expires_s: float,
    writing: int | None = None,
    roots: Iterable[bytes] = (),
) -> bytes:
    """Returns the bytes of a head.jsonl that lists `entries`; `roots` are lines of a root file after its first, and the others fields of `Head`."""
    until = datetime.datetime.fromtimestamp(expires_s, datetime.UTC)
    targets = Targets(version=serial, expires=roots_lib.NEVER)
    for entry in entries:
        path = f"{journal.dirname(entry.version)}/manifest.json"
        extra = {"custom": {"epoch": entry.epoch}}
        targets.targets[path] = TargetFile(entry.num_bytes, {"sha256": entry.sha256}, path, extra)
    lines = [_signed(key, targets)]
    meta = {"targets.json": MetaFile.from_data(serial, lines[0], ["sha256"])}
    lines.append(_signed(key, Snapshot(version=serial, expires=roots_lib.NEVER, meta=meta)))
    own = {"epoch": epoch, "writing": writing}
    newest = MetaFile.from_data(serial, lines[1], ["sha256"])
    lines.append(_signed(key, Timestamp(serial, expires=until, snapshot_meta=newest, unrecognized_fields=own)))
    return b"\n".join([*roots, *reversed(lines), b""])


def _signed(key: ed25519.Ed25519PrivateKey, role: Signed) -> bytes:
    metadata = Metadata(role)
    metadata.sign(CryptoSigner(key))
    return metadata.to_bytes(JSONSerializer(compact=True))


def _load(kind: type[Signed], line: bytes, root: Root, version: int | None = None) -> Signed:
    """Returns the metadata in `line`. Raises RepositoryError unless it is of `kind`, of `version`, and signed by the root's keys."""
    loaded = Metadata.from_bytes(line)
    _require(loaded.signed.type == kind.type, f"the head has {loaded.signed.type[:80]!r} in the place of {kind.type!r}")
    root.verify_delegate(kind.type, loaded.signed_bytes, loaded.signatures)
    text = f"the head's {kind.type} is number {loaded.signed.version}, not {version}"
    _require(version in (None, loaded.signed.version), text)
    return loaded.signed


def _entry(target: Any) -> Entry:
    folder, _, name = target.path.partition("/")
    version = journal.parse_dirname(folder)
    if version is None or name != "manifest.json":
        raise journal.CorruptSource(f"the head lists {target.path[:200]!r}, not a manifest")
    text = f"the head lists {target.length} bytes for a manifest: at most {journal.MAX_MANIFEST_BYTES} are allowed"
    _require(target.length <= journal.MAX_MANIFEST_BYTES, text)
    return Entry(_Custom.model_validate(target.custom).epoch, version, target.length, target.hashes["sha256"])
