"""One object being fetched from one or several relays into a given buffer.

1. It is cut into ranges of `range_bytes`; all of them are fetched at the same time.
2. Each range asks one relay, drawn by `sharding/download/relay_choice.py`.
3. A connection that breaks keeps what it brought; the rest is asked of another relay.
4. A range that lags far behind what another relay would need is fetched there too; the first to end wins and the loser
   is cut off. No byte of a loser can reach the buffer afterwards.

Whether the bytes are right is not asked here: `Gathering.run` says which relay brought which, for whoever hashes them.
"""

import collections
import concurrent.futures
import dataclasses
import time

from sharding.download import range_get
from sharding.format import journal

FLYING_PER_OBJECT = 8


@dataclasses.dataclass(frozen=True)
class Part:
    """Where the bytes [start, stop) of a buffer came from."""

    start: int
    stop: int
    relay: range_get.Relay

    def agrees(self, data: bytes, right: bytes) -> bool:
        return data[self.start : self.stop] == right[self.start : self.stop]


class Gathering:
    """One object being fetched into `target`; used by one thread, which hands ranges to the pool and waits."""

    def __init__(
        self,
        relays,
        version: int,
        name: str,
        target: range_get.Target,
        deadline_s: float,
        only: range_get.Relay | None,
    ):
        self._source, self._choice, self._only = relays, relays.choice, only
        self._version, self._name, self._target, self._deadline_s = version, name, target, deadline_s
        step, size = relays.options.range_bytes, len(target)
        self._todo = collections.deque((start, min(start + step, size)) for start in range(0, size, step))
        self._flying: dict[concurrent.futures.Future, range_get.Get] = {}
        self._num_missing = collections.Counter()
        self._num_failed = 0
        self._parts: list[Part] = []

    def run(self) -> list[Part]:
        """The parts that fill the target; `Failed` when `only` was asked for and is not up to it."""
        if not self._todo:  # an empty object is fetched from nowhere; its hash is checked all the same
            return [Part(0, 0, self._source.relays[0])]
        try:
            while self._todo or self._flying:
                while self._todo and len(self._flying) < FLYING_PER_OBJECT:
                    relay = self._only or self._choice.choose(self._version, wait=not self._flying)
                    if relay is None:
                        break
                    self._launch(relay, *self._todo.popleft())
                done, _ = concurrent.futures.wait(self._flying, 0.05, concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    if future in self._flying:  # its twin may have ended in the same moment
                        self._settle(future)
                if not done:
                    self._hedge()
                if self._source.is_closed:
                    raise journal.Unavailable(f"the source was closed while {self._name} was read")
                if time.monotonic() > self._deadline_s:
                    raise journal.Unavailable(f"{self._name} did not come in time: {self._choice.reasons()}")
            return self._parts
        finally:
            for get in self._flying.values():
                get.abort()

    def _launch(self, relay: range_get.Relay, start: int, stop: int, twin: range_get.Get | None = None) -> None:
        where = {"target": self._target, "origin": start}
        if twin is not None:  # apart: until one of the two is cut off, both write
            where = {"target": range_get.Target([memoryview(bytearray(stop - start))])}
        get = range_get.Get(relay, self._name, start=start, stop=stop, total=len(self._target), twin=twin, **where)
        if twin is not None:
            twin.twin = get
        self._flying[self._source.submit(get)] = get

    def _settle(self, future: concurrent.futures.Future) -> None:
        get = self._flying.pop(future)
        try:
            future.result()
        except range_get.Failed as error:
            self._fail(get, error)
            return
        self._choice.observe(get.relay, True, get.received, get.seconds)
        if get.twin is not None:  # cut off before what it wrote is overwritten
            self._cut(get.twin)
        if get.is_hedge:
            self._source.count("num_hedges_won", 1)
            if get.twin is not None:
                self._parts.append(Part(get.twin.start, get.start, get.twin.relay))
            self._target.put(get.start, get.target.at(0, len(get.target)))
        self._parts.append(Part(get.start, get.stop, get.relay))

    def _fail(self, get: range_get.Get, error: range_get.Failed) -> None:
        self._choice.failed(get.relay, error, get.received, get.seconds, self._version)
        self._num_failed += 1
        if isinstance(error, range_get.Missing):
            self._num_missing[get.relay] += 1
            if all(self._num_missing[relay] >= 2 for relay in self._source.relays):
                raise FileNotFoundError(f"{self._name} is on none of {self._choice.urls()}: was the version deleted?")
        twin, get.twin = get.twin, None
        if twin is not None:
            twin.twin = None
        if get.is_hedge:
            if twin is None:  # the one it was to help failed before, and left this range to it
                self._todo.appendleft((get.start, get.stop))
        elif twin is not None:
            self._parts.append(Part(get.start, twin.start, get.relay))  # the rest is the twin's
        else:
            if get.received:
                self._source.count("num_resumed", 1)
                self._parts.append(Part(get.start, get.start + get.received, get.relay))
            if get.start + get.received < get.stop:
                self._todo.appendleft((get.start + get.received, get.stop))
        if self._only is not None and self._num_failed >= 3:
            raise error

    def _hedge(self) -> None:
        if self._only is not None:
            return
        for get in list(self._flying.values()):
            if get.twin is None and not get.is_hedge and get.is_straggling(self._source.relays):
                other = self._choice.choose(self._version, {get.relay}, wait=False)
                start = get.start + get.received
                if other is not None and start < get.stop:
                    self._source.count("num_hedges", 1)
                    self._launch(other, start, get.stop, twin=get)

    def _cut(self, get: range_get.Get) -> None:
        get.abort()
        self._choice.observe(get.relay, None, get.received, get.seconds)
        self._flying = {future: other for future, other in self._flying.items() if other is not get}
