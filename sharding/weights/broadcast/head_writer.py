"""Writes the signed head of a broadcast (sharding/weights/format/head.py) for the publisher that holds the key.

1. `begin`: before a version is written, the head announces it, so that relays can follow. The first one decides the epoch.
2. `add`: after its manifest, the head lists it, and no longer the versions that are deleted next.
3. `refresh`: the same head, with a later expiry: while nothing new is published, and at the end of a run for years.
4. `forget`: a resumed run begins an epoch and takes versions out of the list, before it deletes and publishes them again.

The caller holds the lock on the root. The head that begins an epoch is synced to disk, in a copy of its own: after a power
failure that tore the last head, no epoch may be used twice. An epoch is the time at which it began, in milliseconds since 1970.
"""

import os
import pathlib
import sys
import time
from collections.abc import Collection

from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.weights.broadcast import destination
from sharding.weights.format import head as head_lib
from sharding.weights.format import journal, manifest, roots

EPOCH_NAME = "epoch.jsonl"
FINISHED_S = 10 * 365 * 86400.0  # of the last head of a run, and of versions that are published one by one


class HeadWriter:
    """Writes the heads under `root`, signed with `key`, which expire after `head_s` seconds.

    `root_file` is the path of a root file, or "" if readers trust the key itself. With `is_run`, the first version begins an epoch,
    else only one that is published again does. Raises ValueError if the root file does not name the key.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        key: ed25519.Ed25519PrivateKey,
        *,
        root_file: str = "",
        head_s: float = FINISHED_S,
        is_run: bool = False,
    ):
        self.epoch: int | None = None
        self._root, self._key, self._root_file, self._head_s, self._is_run = root, key, root_file, head_s, is_run
        self._public = key.public_key().public_bytes_raw().hex()
        self._verifier = head_lib.HeadVerifier(root_file or self._public, first_root=True)
        self._check_key()

    def begin(self, version: int, existing: Collection[int]) -> int:
        """Announces that `version` is being written, and returns its epoch. `existing` are the complete versions under the root.

        Raises ValueError if the head lists this version or a newer one, or another publisher has begun an epoch since.
        """
        head, begins = self._read(), self.epoch is None
        epoch = self._choose_epoch(head, version, existing) if self.epoch is None else self.epoch
        if head is not None and (epoch, version) <= head.order:
            order = "version {1} of epoch {0}".format(*head.order)
            text = f"version {version} of epoch {epoch} is not newer than {order}, which the head lists"
            raise ValueError(f"{text}; publish a newer version, or resume with a new Publisher")
        entries = self._entries(head, existing if begins else head and head.versions or ())
        self._write(epoch, entries, version, durable=begins and self._is_run)
        self.epoch = epoch
        return epoch

    def add(self, version: int, data: bytes, kept: Collection[int]) -> None:
        """Lists `version` with the manifest `data`, and of the versions listed before only those in `kept`."""
        assert self.epoch is not None
        head = self._read()
        others = self._entries(head, {*kept} & {*head.versions} - {version} if head else ())
        self._write(self.epoch, [*others, head_lib.Entry.of(data, self.epoch, version)])

    def forget(self, first: int, existing: Collection[int]) -> None:
        """Begins an epoch that does not list the versions from `first` on. Does nothing if there is neither a head nor a complete version.

        `existing` are the complete versions under the root.
        """
        head = self._read()
        if head is None and not existing:
            return
        epoch = self._choose_epoch(head, first, existing)
        self._write(epoch, self._entries(head, [v for v in existing if v < first]), durable=True)
        self.epoch = epoch

    def refresh(self, is_last: bool = False) -> None:
        """Signs the current head again, with a later expiry: in years if `is_last`. Raises ValueError if another epoch has begun."""
        if is_last:
            self._head_s = FINISHED_S
        if (head := self._read()) is not None:
            self._write(head.epoch, list(head.versions.values()), head.writing)

    def _choose_epoch(self, head: head_lib.Head | None, version: int, existing: Collection[int]) -> int:
        """Returns the epoch that `version` belongs to: that of `head`, or one that begins now, named by the time in milliseconds.

        With the next number instead, a run that is resumed in a backup of its directory would use an epoch a second time.
        """
        begins_ms = time.time_ns() // 10**6
        if head is None:
            return begins_ms if self._is_run else int(bool(existing))
        newest = head.newest and head.newest.version
        begins = self._is_run or (newest is not None and (version <= newest or newest not in existing))
        return max(head.epoch + 1, begins_ms) if begins else head.epoch

    def _read(self) -> head_lib.Head | None:
        """Returns the newest head under the root, or that this process wrote; None if there is none."""
        errors = {}
        for name in (EPOCH_NAME, head_lib.NAME):
            data = destination.read(self._root, name)
            try:
                if data is not None:
                    self._verifier.accept(data, expired=True)
            except head_lib.StaleHead:
                pass  # the copy of the epoch's begin is always older
            except journal.CorruptSource as error:
                errors[name] = error
        head = self._verifier.head
        if head_lib.NAME in errors and head is None:
            text = f"{self._root}/{head_lib.NAME} cannot be followed ({errors[head_lib.NAME]})"
            remedy = "publish with the key that signed it, name the newer root file, or use another root"
            raise ValueError(f"{text}; {remedy}")
        if self.epoch is not None and head is not None and head.epoch != self.epoch:
            text = f"another publisher has begun epoch {head.epoch} under {self._root}, after this one's {self.epoch}"
            raise ValueError(f"{text}; only the newest may go on; stop one of them")
        return head

    def _entries(self, head: head_lib.Head | None, versions: Collection[int]) -> list[head_lib.Entry]:
        """Returns the entries of `versions`: those of `head`, and for others of the manifest, if this key signed it."""
        entries = [entry for entry in head.versions.values() if entry.version in versions] if head else []
        for version in {*versions} - {entry.version for entry in entries}:
            data = destination.create(self._root, version).get("manifest.json")
            try:
                found = manifest.parse(data, version=version, trusted_key=self._public)
                entries.append(head_lib.Entry.of(data, found.epoch or 0, version))
            except journal.CorruptSource as error:
                print(f"notice: version {version} under {self._root} is not listed: {error}", file=sys.stderr)
        return entries

    def _write(
        self, epoch: int, entries: list[head_lib.Entry], writing: int | None = None, *, durable: bool = False
    ) -> None:
        lines, now_s = self._check_key(), time.time()
        serial = max(self._verifier.head.serial + 1 if self._verifier.head else 0, int(1000 * now_s))
        fields = serial, epoch, now_s + self._head_s, writing, lines[1:]
        data = head_lib.sign(self._key, entries, *fields)
        if durable:
            destination.write(self._root, EPOCH_NAME, data, durable=True)
        destination.write(self._root, head_lib.NAME, data)
        self._verifier.accept(data, expired=True)

    def _check_key(self) -> list[bytes]:
        """Returns the lines of the root file as it is now. Raises ValueError if its newest root does not name the key."""
        if not self._root_file:
            return []
        data = pathlib.Path(self._root_file).read_bytes()
        named = roots.online_keys(roots.read(data)[-1].signed)
        if self._public not in named:
            text = f"{self._root_file} names {sorted(named)}, not this publisher's {self._public}: the key was revoked"
            raise ValueError(f"{text}; publish with a named key, or add this one by `keys --online`")
        return data.splitlines()
