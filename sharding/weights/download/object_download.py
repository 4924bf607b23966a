"""Downloads one object from several relays into a buffer, hedging the requests that are slow.

If a connection breaks, the received bytes are kept. The first of two hedged requests to end wins, the other is aborted.
The digest is not checked here: `run` returns which relay delivered which bytes, for the caller that does.
"""

import collections
import concurrent.futures
import dataclasses
import time

from sharding.weights.download import range_get, relay_selector
from sharding.weights.format import journal

MAX_RUNNING = 8  # requests for one object
ReceivedRange = tuple[int, int, range_get.Relay]  # the relay delivered the object's bytes [start, stop)


@dataclasses.dataclass
class ObjectDownload:
    """The download of the object `entry` of a version into `target`, from several relays, or from `only` one. Call `run` once."""

    pool: range_get.RequestPool
    selector: relay_selector.RelaySelector
    version: int
    entry: journal.Object
    target: range_get.Target
    range_bytes: int
    deadline_s: float
    only: range_get.Relay | None

    def __post_init__(self):
        self.path, size = f"/{journal.dirname(self.version)}/{self.entry.path}", self.entry.size
        starts = range(0, size, self.range_bytes)
        self._waiting = collections.deque((start, min(start + self.range_bytes, size)) for start in starts)
        self._running: dict[concurrent.futures.Future, range_get.Get] = {}
        self._num_missing = collections.Counter()
        self._num_failed = 0
        self._received: list[ReceivedRange] = []

    def run(self) -> list[ReceivedRange]:
        """Downloads the object into `target`. Returns the ranges with the relay that delivered each. Blocks until done.

        Raises Unavailable after the deadline, FileNotFoundError if no relay has the object, and Failed if the relay `only`
        failed three times.
        """
        if not self._waiting:  # an empty object needs no request; its digest is checked all the same
            return [(0, 0, self.selector.relays[0])]
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < MAX_RUNNING:
                    relay = self.only or self.selector.select(self.version, wait=not self._running)
                    if relay is None:
                        break
                    self._launch(relay, *self._waiting.popleft())
                done, _ = concurrent.futures.wait(self._running, 0.05, concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    if future in self._running:  # its rival may have ended in the same moment
                        self._settle(future)
                if not done:
                    self._hedge()
                if self.pool.is_closed:
                    raise journal.Unavailable(f"the source was closed while {self.path} was read; open it again")
                if time.monotonic() > self.deadline_s:
                    found = f"{self.path} was not downloaded in time ({self.selector.reasons()})"
                    raise journal.Unavailable(f"{found}; try again, or use other relays")
            return self._received
        finally:
            for get in self._running.values():
                get.abort()

    def _launch(self, relay: range_get.Relay, start: int, stop: int, rival: range_get.Get | None = None) -> None:
        target, origin = self.target, start
        if rival is not None:  # memory of its own: until one of the two is aborted, both write
            target, origin = range_get.Target([memoryview(bytearray(stop - start))]), 0
        get = range_get.Get(
            relay, self.path, start, stop, self.entry.size, target, origin, rival, digest=self.entry.digest
        )
        if rival is not None:
            rival.rival = get
        self._running[self.pool.submit(get)] = get

    def _settle(self, future: concurrent.futures.Future) -> None:
        get = self._running.pop(future)
        try:
            future.result()
        except range_get.Failed as error:
            self._fail(get, error)
            return
        self.selector.observe(get, True)
        if get.rival is not None:  # before its bytes are overwritten
            self._abort(get.rival)
        if get.is_hedge:
            self.pool.count("num_hedges_won")
            if get.rival is not None:
                self._received.append((get.rival.start, get.start, get.rival.relay))
            assert get.target is not None
            self.target.put(get.start, get.target.view(0, len(get.target)))
        self._received.append((get.start, get.stop, get.relay))

    def _fail(self, get: range_get.Get, error: range_get.Failed) -> None:
        self.selector.record_failure(get, error, self.version)
        self._num_failed += 1
        if isinstance(error, range_get.Missing):
            self._num_missing[get.relay] += 1
            if all(self._num_missing[relay] >= 2 for relay in self.selector.relays):
                urls = self.selector.urls()
                text = f"{self.path} is on none of the relays {urls}, perhaps deleted; pull the newest version"
                raise FileNotFoundError(text)
        rival, get.rival = get.rival, None
        if rival is not None:
            rival.rival = None
        if get.is_hedge:
            if rival is None:  # the request that it hedges failed earlier, and left this range to it
                self._waiting.appendleft((get.start, get.stop))
        elif rival is not None:
            self._received.append((get.start, rival.start, get.relay))  # the rival fetches the rest
        else:
            end = get.start + get.received
            if get.received:
                self.pool.count("num_resumed")
                self._received.append((get.start, end, get.relay))
            if end < get.stop:
                self._waiting.appendleft((end, get.stop))
        if self.only is not None and self._num_failed >= 3:
            raise error

    def _hedge(self) -> None:
        if self.only is not None:
            return
        for get in list(self._running.values()):
            if get.is_hedge and get.is_straggling(self.selector.relays):
                get.abort()  # another relay is asked instead: two that drip must not wait for each other
            elif get.rival is None and not get.is_hedge and get.is_straggling(self.selector.relays):
                other = self.selector.select(self.version, {get.relay}, wait=False)
                start = get.start + get.received
                if other is not None and start < get.stop:
                    self.pool.count("num_hedges")
                    self._launch(other, start, get.stop, rival=get)

    def _abort(self, get: range_get.Get) -> None:
        get.abort()
        self.selector.observe(get, None)
        self._running = {future: other for future, other in self._running.items() if other is not get}
