"""Decides which versions a relay keeps, from the manifests that each upstream has delivered. No upstream displaces the others' versions.

With a trusted key every manifest is the publisher's: the newest `keep` versions are kept, with the bases they need. Without a key an
upstream may invent versions, so each has places and a share of the disk of its own. Objects that no manifest lists are deleted first.
"""

import functools
import shutil
import sys
import threading
from collections.abc import Iterable

from sharding.download import version_search
from sharding.format import head as head_lib
from sharding.relay import error_log
from sharding.relay import store as store_lib


class Plan:
    """The versions that the upstreams of a relay have proven, and those that its store therefore keeps. Thread-safe.

    The newest `keep` are kept. With `trusted`, all manifests are the publisher's; without, none is signed.
    """

    def __init__(
        self, store: store_lib.Store, num_upstreams: int, keep: int, trusted: head_lib.HeadVerifier | None = None
    ):
        self.store, self.log, self.lock = store, error_log.ErrorLog(), threading.RLock()
        self.keep = sys.maxsize if store.in_place else keep  # in place the publisher decides
        self.taken: dict[tuple[int, str], object] = {}  # (version, path) of objects that an upstream is asked for now
        self.is_single = num_upstreams == 1
        self._trusted, self._num_upstreams = trusted, num_upstreams
        self._shares = trusted is None and not self.is_single
        self._claims: dict[str, dict[int, version_search.Proof]] = {}  # by the upstreams that have answered
        self._followed: dict[str, int | None] = {}
        self._heads: dict[str, bytes] = {}
        self._epoch = -1  # of the head that is served
        self._is_recovered = store.in_place

    def recover(self) -> None:
        """Exposes the files on disk, once; every upstream waits for it. Raises OSError if the disk has an error."""
        with self.lock:
            if not self._is_recovered:
                self.log.count("bad_recovered", self.store.recover(self._trusted))
                self.serve_head()
                self._is_recovered = True

    def withdraw(self, upstream: str, data: bytes | None) -> None:
        """Deletes versions that a resumed run replaces, at once: to fetch their successors takes time.

        Those are the ones that the newest head does not list, or without `trusted`, that no upstream's head names. `data` are the
        bytes of the head of `upstream`. The partial versions of another epoch go, too.
        """
        with self.lock:
            if data is not None:
                self._heads[upstream] = data
            if self._trusted is None:
                self._remove_replaced(None)
            else:
                self.serve_head()

    def serve_head(self) -> None:
        """Serves the newest head that `trusted` has accepted, once its newest version is here, or if it begins an epoch.

        The versions that it replaces are deleted first. Without `trusted`, the newest one cannot be known: the first upstream that
        delivered one decides.
        """
        with self.lock:
            head = self._head
            self._remove_replaced(head)
            if self._trusted is None and self._heads:
                self.store.set_head(next(iter(self._heads.values())), write=True)
            elif head is not None:
                newest = None if self.store.head is None or head.epoch != self._epoch else head.newest
                if newest is None or self.store.is_complete(newest.version):
                    self._epoch = head.epoch
                    self.store.set_head(head.data, write=False)

    def _remove_replaced(self, head: head_lib.Head | None) -> None:
        named = self._is_named if self._trusted is None else functools.partial(_is_listed, head)
        doomed = [n for n in self.store.complete() if not named(n, self.store.versions[n].sha256)]
        self.log.count("replaced_versions", len(doomed))
        if head is not None and head.epoch != self._epoch and self.store.head is not None:
            doomed += self.store.partial()
        for number in doomed:
            self.store.remove(number)

    def _is_named(self, number: int, sha256: str) -> bool:
        """Returns False if no upstream's head names this version, and all have one."""
        return len(self._heads) < self._num_upstreams or any(sha256.encode() in data for data in self._heads.values())

    @property
    def _head(self) -> head_lib.Head | None:
        return self._trusted and self._trusted.head

    @property
    def epoch(self) -> int:
        """The epoch of the newest head that `trusted` has accepted, or -1."""
        head = self._head
        return -1 if head is None else head.epoch

    def is_current(self, number: int, sha256: str) -> bool:
        """Returns True if the newest head, if there is one, lists version `number` with the manifest of that hash."""
        return _is_listed(self._head, number, sha256)

    def update(self, upstream: str, claims: dict[int, version_search.Proof], followed: int | None) -> None:
        """Takes the versions that `upstream` has proven, and the one it is publishing, as its state; deletes versions not needed.

        Without a head, a version was published again, and the copy is deleted, if all upstreams deliver the same other manifest: one
        that lacks the version for a moment must not leave the decision to a liar.
        """
        with self.lock:
            self._claims[upstream], self._followed[upstream] = claims, followed
            for one in self._claims.values():
                for number in [n for n, claim in one.items() if not self.is_current(n, claim.sha256)]:
                    del one[number]
            for number in self.store.complete():
                held, found = self.store.versions[number].sha256, [claim.sha256 for claim in self._of(number)]
                is_unanimous = len(found) == self._num_upstreams and len({*found}) == 1
                if is_unanimous and held not in found:
                    self.store.remove(number)
                    self.log.count("replaced_versions")
            self.drop()

    def wanted(self, upstream: str) -> list[int]:
        """Returns the missing versions that `upstream` has: newest first, each after the bases its deltas need."""
        with self.lock:
            claims = self._claims.get(upstream, {})
            found = claims if self._shares else {*self.store.complete(), *(n for c in self._claims.values() for n in c)}
            order: list[int] = []
            for number in sorted(found, reverse=True)[: self.keep]:
                order += [n for n in reversed(self._chain(number)) if n not in order]
            return [n for n in order if n in claims and not self.store.is_complete(n)]

    def check(self, number: int) -> None:
        """Raises ValueError if the upstreams disagree on version `number`, or it needs more than their share of the disk."""
        with self.lock:
            found = self._of(number)
            if len({claim.data for claim in found}) > 1:
                text = f"upstreams have different manifests of version {number}"
                raise ValueError(f"{text}: it is not mirrored until they agree; without --trusted_key, pass it")
            if self._shares:
                room = self.store.max_bytes or shutil.disk_usage(self.store.root).total
                # Half of a share is for the newest version, which stays until the next one is complete.
                most, size = room * len(found) // self._num_upstreams // 2, found[0].manifest.size_bytes
                if size > most:
                    text = f"version {number} has {size} bytes, more than {most}, half of the disk's share of {len(found)} upstreams"
                    raise ValueError(f"{text} without a signature: pass --trusted_key")

    def drop(self) -> None:
        """Deletes complete versions that are neither among the newest nor their bases, and abandoned partial ones."""
        complete, partial = self.store.complete(), self.store.partial()
        kept = {n for number in self._newest(complete) for n in self._chain(number, complete)}
        if self.store.in_place:  # there the publisher decides
            kept &= {n for claims in self._claims.values() for n in claims}
        if len(self._claims) < self._num_upstreams:  # one that has not answered yet may have those found on disk
            kept.update(partial)
        for upstream, followed in self._followed.items():
            kept.update([n for n in partial if n == followed or n in self.wanted(upstream)])
        for number in sorted({*complete, *partial} - kept):
            self.store.remove(number)

    def make_room(self, number: int) -> bool:
        """Deletes one version for `number`: a partial one without a manifest, or else the oldest. Returns False if nothing is left."""
        with self.lock:
            complete = self.store.complete()
            unproven = [n for n in self.store.partial() if n != number and not self._of(n)]
            newest = self._newest(complete, 1) if self._shares else complete[-1:]
            needed = {n for m in (number, *newest) for n in self._chain(m)}
            doomed = next((n for n in (*unproven, *complete) if n not in needed), None)
            if doomed is None:
                return False
            self.store.remove(doomed)
        self.log.count("evicted_for_room")
        return True

    def _newest(self, complete: list[int], keep: int | None = None) -> set[int]:
        """Returns the newest `keep` complete versions, or of each upstream where each has places of its own."""
        keep, newest = keep or self.keep, set()
        for claims in self._claims.values() if self._shares else ():
            newest.update([n for n in complete if n in claims][-keep:])
        rest = [n for n in complete if n not in newest]
        return newest.union(rest[max(0, len(rest) - max(0, keep - len(newest))) :])

    def _of(self, number: int) -> list[version_search.Proof]:
        return [claims[number] for claims in self._claims.values() if number in claims]

    def _chain(self, number: int | None, within: Iterable[int] | None = None) -> list[int]:
        """Returns a version and its bases, newest first, up to the first that is neither complete here nor claimed."""
        chain: list[int] = []
        while number is not None and number not in chain and (within is None or number in within):
            held, found = self.store.versions.get(number), self._of(number)
            if held is not None and held.manifest is not None:
                base = held.base
            elif found:
                base = found[0].manifest.base
            else:
                break
            chain.append(number)
            number = base
        return chain


def _is_listed(head: head_lib.Head | None, number: int, sha256: str) -> bool:
    return head is None or (number in head.versions and head.versions[number].sha256 == sha256)
