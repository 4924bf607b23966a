"""The threads that run the requests of one client of relays, and its counters."""

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from sharding.download import range_get
from sharding.format import journal

COUNTERS = ("num_bytes", "num_objects", "num_bad_objects", "num_resumed", "num_hedges", "num_hedges_won")


class RequestPool:
    """Runs requests in threads. Thread-safe."""

    def __init__(self, options: range_get.Options, num_relays: int):
        def executor(num_threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
            return concurrent.futures.ThreadPoolExecutor(num_threads, f"weights-{name}")

        # Separate pools: hedges must not queue after requests that hang, nor small replies after ranges.
        self._ranges, self._hedges = executor(options.parallel, "range"), executor(options.parallel, "hedge")
        self._small = executor(4 * num_relays + 4, "small")
        self._lock = threading.Lock()
        self._counters = collections.Counter()
        self.is_closed = False

    def submit(
        self, get: range_get.Get, handler: Callable[[range_get.Get], Any] = range_get.Get.run
    ) -> concurrent.futures.Future:
        """Returns the future of `handler(get)`. Raises Unavailable after `close`."""
        pool = self._small if get.target is None else self._hedges if get.is_hedge else self._ranges
        with self._lock:  # an executor that was shut down would raise a RuntimeError
            if self.is_closed:
                raise journal.Unavailable("the source was closed")
            return pool.submit(handler, get)

    def count(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to one of `COUNTERS`."""
        with self._lock:
            self._counters[name] += amount

    def counters(self) -> dict[str, int]:
        """Returns the value of each of `COUNTERS`."""
        with self._lock:
            return {name: self._counters[name] for name in COUNTERS}

    def mark_closed(self) -> None:
        """Makes `submit` raise from now on; requests that run go on."""
        with self._lock:
            self.is_closed = True

    def shut_down(self) -> None:
        """Lets the threads end when their requests have ended. Does not block."""
        for pool in (self._small, self._ranges, self._hedges):
            pool.shutdown(wait=False)


def wait_first(
    waiting: Collection[concurrent.futures.Future], until_s: float
) -> tuple[set[concurrent.futures.Future], set[concurrent.futures.Future]]:
    """Blocks until a future is done or the clock is at `until_s`. Returns (done, not done)."""
    timeout_s = max(0.0, until_s - time.monotonic())
    return concurrent.futures.wait(waiting, timeout_s, concurrent.futures.FIRST_COMPLETED)
