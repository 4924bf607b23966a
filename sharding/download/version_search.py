"""Finds versions, by their manifests, on relays whose claims may be false: each proves its own newest claim, all at the same time.

A relay that claims versions and does not deliver their manifests wastes its own time only: the search ends when no claim is newer
than the newest proven one, or soon after the first proof.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence

from sharding.download import range_get, relay_selector
from sharding.format import head as head_lib
from sharding.format import journal
from sharding.format import manifest as manifest_lib

MAX_FALSE = 8  # claims of one relay among several that are examined at a time
MAX_TRIES = 3  # of a relay that is asked for one version: wires flip bits, and the version may be on its way
GRACE_S = 1.0  # for more claims after the first proof, or twice the time that it took
FALSE_S, LONGEST_FALSE_S = 5.0, 300.0  # until a relay with refuted claims is examined again; doubles


@dataclasses.dataclass(frozen=True)
class Proof:
    """A manifest that a source has delivered, as bytes and parsed: it proves that the source has the version."""

    data: bytes
    manifest: manifest_lib.Manifest

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of `data` in hex, by which a signed head names it."""
        return hashlib.sha256(self.data).hexdigest()


class VersionSearch:
    """Searches versions on several relays. Thread-safe.

    Without a `trusted` key, all relays that deliver a version in time must deliver the same manifest.
    """

    def __init__(
        self,
        pool: range_get.RequestPool,
        selector: relay_selector.RelaySelector,
        patience_s: float,
        trusted: head_lib.HeadVerifier | None,
    ):
        self.pool, self.selector, self.trusted, self._patience_s = pool, selector, trusted, patience_s
        self._lock = threading.Lock()  # protects the following
        self._running: dict[range_get.Relay, _Examination] = {}
        self._pauses: dict[range_get.Relay, tuple[float, float]] = {}  # until when a relay is not examined, how long

    def newest(self, claims: Mapping[range_get.Relay, Sequence[int]], known: Collection[int]) -> Proof | None:
        """Returns the proof of the newest of `claims` (ascending, by relay), or None if it is among the `known` versions.

        Blocks until no newer claim is left, or the grace for it is over; then relays are examined on until a later call. Without
        any proof, for at most `patience_s`, and raises CorruptSource or Unavailable if a claim is not plainly false.
        """
        with self._lock:
            examinations = [e for r in claims if (e := self._examine(r, claims[r], known, len(claims) > 1)) is not None]
        return self._wait(examinations, max((n for c in claims.values() for n in c if n in known), default=-1))

    def find(self, version: int) -> Proof:
        """Returns the manifest of `version`. Raises CorruptSource, Unavailable, or FileNotFoundError if no relay has it."""
        examinations = [_Examination(self, relay, [version], ()) for relay in self.selector.relays]
        try:
            found = self._wait(examinations, -1)
        finally:
            for examination in examinations:
                examination.abort()
        if found is None:
            listed = sorted({n for relay in self.selector.relays for n in relay.claims[0]})
            raise journal.no_version(version, self.selector.urls(), listed)
        return found

    def close(self) -> None:
        """Ends all examinations of `newest`."""
        with self._lock:
            for examination in self._running.values():
                examination.abort()

    def _examine(
        self, relay: range_get.Relay, numbers: Sequence[int], known: Collection[int], has_others: bool
    ) -> "_Examination | None":
        """Returns the running examination of `relay`, or a new one, or None if nothing is to be examined."""
        now_s, last = time.monotonic(), self._running.pop(relay, None)
        until_s, pause_s = self._pauses.get(relay, (0.0, FALSE_S / 2))
        is_running = last is not None and not last.future.done() and not last.is_aborted.is_set()
        if last is not None and is_running and now_s < last.begun_s + self._patience_s:
            self._running[relay] = last
            return last
        if last is not None:
            last.abort()
            pause_s = min(2 * pause_s, LONGEST_FALSE_S) if last.is_refuted else FALSE_S / 2
            until_s = now_s + pause_s if last.is_refuted else 0.0
            self._pauses[relay] = until_s, pause_s
            if last.found is not None and last.number not in known:  # since the last call
                return last
        if not numbers or numbers[-1] in known or (has_others and until_s > now_s):
            return None
        self._running[relay] = _Examination(self, relay, numbers[-MAX_FALSE:] if has_others else numbers, known)
        return self._running[relay]

    def _wait(self, examinations: Sequence["_Examination"], best: int) -> Proof | None:
        """Returns the proof of the newest version that is proven now, if it is newer than `best`, the newest known."""
        begun_s, known = time.monotonic(), best
        first_s = None if best < 0 else begun_s
        while True:
            found = [(e.relay.url, e.found) for e in examinations if e.found is not None]
            best, now_s = max([known, *(proof.manifest.version for _, proof in found)]), time.monotonic()
            least = best if self.trusted is not None or best == known else best - 1  # the others must agree
            waiting = {e.future for e in examinations if not e.future.done() and e.number > least}
            # A relay that has neither the version nor a 404 must not use up all of the time.
            until_s = begun_s + self._patience_s / (1 if len(waiting) == len(examinations) else 4)
            if best >= 0:
                first_s = first_s or now_s
                until_s = min(until_s, first_s + max(GRACE_S, 2 * (first_s - begun_s)))
            if not waiting or now_s >= until_s or self.pool.is_closed:
                break
            concurrent.futures.wait(waiting, min(0.1, until_s - now_s), concurrent.futures.FIRST_COMPLETED)
        for examination in examinations:
            if examination.number <= best:
                examination.abort()
        error = next((e.error for e in examinations if e.error is not None), None)
        if best < 0 and (error or waiting):
            text = f"no manifest was downloaded in time ({self.selector.reasons()}): try again, or use other relays"
            raise error or journal.Unavailable(text)
        proofs = {proof.data: (url, proof) for url, proof in found if proof.manifest.version == best > known}
        if len(proofs) > 1 and self.trusted is None:
            urls = ", ".join(url for url, _ in proofs.values())
            text = f"relays {urls} have different manifests of version {best}: pass the publisher's trusted key"
            raise journal.CorruptSource(text)
        return next((proof for _, proof in proofs.values()), None)


class _Examination:
    """One relay proves the newest it can of the versions `numbers`, ascending, in a thread of the search's pool.

    `found` is the proof of version `number`. `is_refuted` is True if a newer claim was false.
    """

    def __init__(self, search: VersionSearch, relay: range_get.Relay, numbers: Sequence[int], known: Collection[int]):
        self.relay, self.number, self.begun_s = relay, numbers[-1], time.monotonic()
        self.found: Proof | None = None
        self.error: journal.CorruptSource | None = None
        self.is_refuted = False
        self._search, self._numbers, self._known = search, numbers, known
        self.is_aborted = threading.Event()
        self._get = self._request()
        self.future = search.pool.submit(self._get, lambda _: self._run())

    def abort(self) -> None:
        """Ends the examination without a result. Does not block."""
        self.is_aborted.set()
        self._get.abort()

    def _request(self) -> range_get.Get:
        head = self._search.trusted and self._search.trusted.head
        listed = head and head.versions.get(self.number)
        limit = listed.num_bytes if listed else min(manifest_lib.MAX_UNPROVED_BYTES, journal.MAX_MANIFEST_BYTES)
        return range_get.Get(self.relay, f"/{journal.dirname(self.number)}/manifest.json", limit=limit)

    def _run(self) -> None:
        for number in reversed(self._numbers):
            self.number = number
            if number in self._known or self._prove() or self.is_aborted.is_set():
                return
            self.is_refuted = True

    def _prove(self) -> bool:
        """Downloads the manifest of version `number`, and returns True; False if the relay has none, or a wrong one, or at an abort."""
        search, num_refused, pause_s = self._search, 0, 0.05
        parse = manifest_lib.parse if search.trusted is None else search.trusted.manifest
        while True:
            self._get = get = self._request()
            if self.is_aborted.is_set() or search.pool.is_closed:
                return False
            try:
                data, _ = get.run()
                self.found = Proof(data, parse(data, version=self.number))
                search.selector.observe(get, True)
                return True
            except (range_get.Missing, range_get.TooLong) as error:
                self.relay.reason, num_refused = str(error), num_refused + 1
            except journal.CorruptSource as error:
                self.error, num_refused = type(error)(f"{self.relay.url}: {error}"), num_refused + 1
                self.relay.reason = str(error)
                if not (search.trusted and search.trusted.has_signed(data, self.number)):
                    search.selector.record_corrupt(self.relay, str(error))
            except range_get.Failed as error:
                if not self.is_aborted.is_set():
                    search.selector.record_failure(get, error)
            if num_refused >= (MAX_TRIES if len(self._numbers) == 1 else 1):
                return False
            self.is_aborted.wait(pause_s)
            pause_s = min(2 * pause_s, 1.0)
