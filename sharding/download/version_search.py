"""Finds the newest version that a relay delivers, if the others claim newer ones that do not exist: each relay proves its own newest claim, all at once.

A claim is proven by its manifest. A relay that claims versions and does not deliver their manifests wastes its own time only:
the search ends when no claim is newer than the newest proven one, or soon after the first proof.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from sharding.download import range_get, relay_selector
from sharding.format import journal

MAX_FALSE = 8  # claims of one relay among several that are refuted at a time
GRACE_S = 1.0  # for newer claims after the first proof, or twice the time that it took
FALSE_S, LONGEST_FALSE_S = 5.0, 300.0  # until a relay with refuted claims is examined again; doubles


class VersionSearch:
    """Searches the newest version of several relays. Thread-safe.

    `prove(version, data)` checks and keeps the bytes of a manifest, or raises CorruptSource; `is_proven(version)` returns True
    afterwards; `limit(version)` returns the bytes that the manifest may have.
    """

    def __init__(
        self,
        pool: range_get.RequestPool,
        selector: relay_selector.RelaySelector,
        patience_s: float,
        prove: Callable[[int, bytes], None],
        is_proven: Callable[[int], bool],
        limit: Callable[[int], int],
    ):
        self.pool, self.selector, self._patience_s = pool, selector, patience_s
        self.prove, self.is_proven, self.limit = prove, is_proven, limit
        self._lock = threading.Lock()  # protects the following
        self._running: dict[range_get.Relay, _Examination] = {}
        self._false: dict[tuple[range_get.Relay, int], float] = {}  # refuted claims -> until when
        self._pauses: dict[
            range_get.Relay, tuple[float, float]
        ] = {}  # until when, and how long, a relay is not examined

    def newest(self, claims: Mapping[range_get.Relay, Sequence[int]]) -> tuple[int | None, Exception | None]:
        """Returns the newest version of `claims` (ascending, by relay) that is proven, and the error of one that is not.

        Blocks until no newer claim is left or the grace for it is over; without any proof, for at most `patience_s`. Claims that
        are examined still are so until a later call.
        """
        begun_s, best_s = time.monotonic(), None
        with self._lock:
            self._false = {claim: until_s for claim, until_s in self._false.items() if until_s > begun_s}
            examinations = [e for relay in claims if (e := self._examine(relay, claims)) is not None]
        while True:
            best, now_s = (
                max((n for c in claims.values() for n in c if self.is_proven(n)), default=None),
                time.monotonic(),
            )
            best_s = now_s if best is not None and best_s is None else best_s
            until_s = begun_s + self._patience_s
            if best_s is not None:
                until_s = min(until_s, best_s + max(GRACE_S, 2 * (best_s - begun_s)))
            waiting = {e.future for e in examinations if not e.future.done() and (best is None or e.number > best)}
            if not waiting or now_s >= until_s or self.pool.is_closed:
                break
            concurrent.futures.wait(waiting, min(0.1, until_s - now_s), concurrent.futures.FIRST_COMPLETED)
        for examination in examinations:
            if best is not None and examination.number <= best:
                examination.abort()
        error = next((e.error for e in examinations if e.error is not None), None)
        if best is None and error is None and waiting:
            reasons = self.selector.reasons()
            error = journal.Unavailable(
                f"no manifest came within {self._patience_s} s ({reasons}): try again, or use other relays"
            )
        return best, error

    def close(self) -> None:
        """Ends all examinations."""
        with self._lock:
            for examination in self._running.values():
                examination.abort()

    def refute(self, relay: range_get.Relay, number: int) -> None:
        """Ignores the claim of `relay` to have version `number` for a while."""
        with self._lock:
            self._false[relay, number] = time.monotonic() + FALSE_S

    def pause(self, relay: range_get.Relay) -> None:
        """Ignores all unproven claims of `relay` for a while that doubles each time."""
        with self._lock:
            pause_s = min(2 * self._pauses.get(relay, (0.0, FALSE_S / 2))[1], LONGEST_FALSE_S)
            self._pauses[relay] = time.monotonic() + pause_s, pause_s

    def _examine(
        self, relay: range_get.Relay, claims: Mapping[range_get.Relay, Sequence[int]]
    ) -> "_Examination | None":
        """Returns the running examination of the claims of `relay`, or a new one, or None if nothing is to be examined."""
        now_s, running = time.monotonic(), self._running.get(relay)
        if running is not None and not running.future.done() and now_s < running.begun_s + self._patience_s:
            return running
        if running is not None:
            running.abort()
            del self._running[relay]
        left = [n for n in claims[relay] if (relay, n) not in self._false]
        if not left or self.is_proven(left[-1]) or (len(claims) > 1 and self._pauses.get(relay, (0.0,))[0] > now_s):
            return None
        self._running[relay] = _Examination(self, relay, left if len(claims) == 1 else left[-MAX_FALSE:])
        return self._running[relay]


class _Examination:
    """One relay proves the newest it can of the versions `numbers`, ascending, in a thread of the search's pool."""

    def __init__(self, search: VersionSearch, relay: range_get.Relay, numbers: Sequence[int]):
        self.number, self.error, self.begun_s = numbers[-1], None, time.monotonic()
        self._search, self._relay, self._numbers = search, relay, numbers
        self._is_aborted = threading.Event()
        self._get = self._request()
        self.future = search.pool.submit(self._get, lambda _: self._run())

    def abort(self) -> None:
        """Ends the examination without a result. Does not block."""
        self._is_aborted.set()
        self._get.abort()

    def _request(self) -> range_get.Get:
        path = f"/{journal.dirname(self.number)}/manifest.json"
        return range_get.Get(self._relay, path, limit=self._search.limit(self.number))

    def _run(self) -> None:
        for number in reversed(self._numbers):
            self.number = number
            if self._is_true():
                return
            self._search.refute(self._relay, self.number)
        self._search.pause(self._relay)

    def _is_true(self) -> bool:
        """Returns False if the relay's claim to have the version `number` is refuted; True if it is proven, or at an abort."""
        search, pause_s = self._search, 0.05
        while not (search.is_proven(self.number) or self._is_aborted.is_set() or search.pool.is_closed):
            self._get = get = self._request()
            if self._is_aborted.is_set():
                break
            try:
                search.prove(self.number, get.run()[0])
                search.selector.observe(get, True)
            except range_get.Missing:
                return False
            except journal.CorruptSource as error:
                self.error = self.error or type(error)(f"{self._relay.url}: {error}")
                search.selector.record_corrupt(self._relay, str(error))
                return False
            except range_get.Failed as error:
                if not self._is_aborted.is_set():
                    text = f"{self._relay.url} lists version {self.number}, but {error}: try again, or use other relays"
                    self.error = journal.Unavailable(text)
                    search.selector.record_failure(get, error)
                self._is_aborted.wait(pause_s)
                pause_s = min(2 * pause_s, 1.0)
        return True
