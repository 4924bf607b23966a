"""Decides which versions a relay keeps: the newest `keep`, with the bases they need. Objects that no manifest lists are deleted first.

With a trusted key the signed head decides which versions there are, else what the upstream lists.
"""

import sys
import threading
from collections.abc import Callable, Iterable

from sharding.weights.download import manifest_download
from sharding.weights.format import head as head_lib
from sharding.weights.relay import store as store_lib


class Plan:
    """The versions that the upstream has proven, and those that the store of a relay therefore keeps. `count` counts those deleted.

    One thread calls the methods; `make_room` may be called by several.
    """

    def __init__(
        self,
        store: store_lib.Store,
        keep: int,
        trusted: head_lib.HeadVerifier | None,
        count: Callable[[str, int], None],
    ):
        self.keep = sys.maxsize if store.in_place else keep  # in place the publisher decides
        self.proofs: dict[int, manifest_download.Proof] = {}
        self._store, self._trusted, self._count = store, trusted, count
        self._making_room = threading.Lock()
        self._unproven_head: bytes | None = None  # the upstream's, without `trusted`
        self._served_epoch = -1  # of the head that is served

    @property
    def epoch(self) -> int:
        """The epoch of the newest head that `trusted` has accepted, or -1."""
        return -1 if self._head is None else self._head.epoch

    def withdraw(self, data: bytes | None) -> None:
        """Deletes versions that a resumed run replaces, immediately: to fetch their successors takes time.

        Those are the ones that the newest head does not list, or without `trusted`, that the upstream's head, `data`, does not name.
        The partial versions of another epoch go, too.
        """
        if self._trusted is not None:
            self.serve_head()
        elif data is not None:
            self._unproven_head = data
            self._remove_replaced()

    def serve_head(self) -> None:
        """Serves the newest head once its newest version is complete here, or immediately if the head begins an epoch.

        Without `trusted`, serves the head of the upstream. Deletes the versions that the head replaces first.
        """
        self._remove_replaced()
        head = self._head
        if self._unproven_head is not None:
            self._store.set_head(self._unproven_head, write=True)
        elif head is not None:
            newest = None if self._store.head is None or head.epoch != self._served_epoch else head.newest
            if newest is None or self._store.is_complete(newest.version):
                self._served_epoch = head.epoch
                self._store.set_head(head.data, write=False)

    def is_current(self, number: int, sha256: str) -> bool:
        """Returns True if the newest head, if there is one, lists version `number` with the manifest of that hash."""
        head = self._head
        return head is None or (number in head.versions and head.versions[number].sha256 == sha256)

    def update(self, proofs: dict[int, manifest_download.Proof], followed: int | None) -> None:
        """Takes the versions that the upstream has proven, and the one that is followed; deletes versions that are not needed.

        A version that was published again without a head is deleted, too.
        """
        self.proofs = {n: proof for n, proof in proofs.items() if self.is_current(n, proof.sha256)}
        self._remove_replaced()
        complete, partial = self._store.complete(), self._store.partial()
        kept = {n for number in complete[-self.keep :] for n in self._chain(number, complete)}
        if self._store.in_place:  # there the publisher decides
            kept &= self.proofs.keys()
        kept |= {*partial} & {*self.wanted(), followed}
        for number in sorted({*complete, *partial} - kept):
            self._store.remove(number)

    def wanted(self) -> list[int]:
        """Returns the missing versions that the upstream has: newest first, each after the bases its deltas need."""
        order: list[int] = []
        for number in sorted({*self._store.complete(), *self.proofs}, reverse=True)[: self.keep]:
            order += [n for n in reversed(self._chain(number)) if n not in order]
        return [n for n in order if n in self.proofs and not self._store.is_complete(n)]

    def make_room(self, number: int) -> bool:
        """Deletes one version for `number`: a partial one without a manifest, or else the oldest. Returns False if nothing is left."""
        with self._making_room:
            complete = self._store.complete()
            unproven = [n for n in self._store.partial() if n != number and n not in self.proofs]
            needed = {n for m in (number, *complete[-1:]) for n in self._chain(m)}
            doomed = next((n for n in (*unproven, *complete) if n not in needed), None)
            if doomed is None:
                return False
            self._store.remove(doomed)
        self._count("evicted_for_room", 1)
        return True

    @property
    def _head(self) -> head_lib.Head | None:
        return self._trusted and self._trusted.head

    def _remove_replaced(self) -> None:
        head, doomed = self._head, []
        for number in self._store.complete():
            sha256, proof = self._store.versions[number].sha256, self.proofs.get(number)
            is_named = self._unproven_head is None or sha256.encode() in self._unproven_head
            if not is_named or not self.is_current(number, sha256) or (proof and proof.sha256 != sha256):
                doomed.append(number)
        self._count("replaced_versions", len(doomed))
        if head is not None and head.epoch != self._served_epoch and self._store.head is not None:
            doomed += self._store.partial()
        for number in doomed:
            self._store.remove(number)

    def _chain(self, number: int | None, within: Iterable[int] | None = None) -> list[int]:
        """Returns a version and its bases, newest first, up to the first that is neither complete here nor proven."""
        chain: list[int] = []
        while number is not None and number not in chain and (within is None or number in within):
            held, proof = self._store.versions.get(number), self.proofs.get(number)
            if held is not None and held.manifest is not None:
                base = held.base
            elif proof is not None:
                base = proof.manifest.base
            else:
                break
            chain.append(number)
            number = base
        return chain
