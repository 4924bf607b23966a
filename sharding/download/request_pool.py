"""The threads that run the requests of one client of relays, and its counters."""

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

    def __init__(self, parallel: int, num_relays: int):
        # Separate threads: hedges must not queue after requests that hang, nor small replies after ranges.
        sizes = {"range": parallel, "hedge": parallel, "small": 4 * num_relays + 4}
        self._threads = {name: concurrent.futures.ThreadPoolExecutor(n, f"weights-{name}") for name, n in sizes.items()}
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self.is_closed = False

    def submit(
        self, get: range_get.Get, handler: Callable[[range_get.Get], Any] = range_get.Get.run
    ) -> concurrent.futures.Future:
        """Returns the future of `handler(get)`. Raises Unavailable after `close`."""
        try:
            return self._threads["small" if get.target is None else "hedge" if get.is_hedge else "range"].submit(
                handler, get
            )
        except RuntimeError as error:  # it was shut down
            raise journal.Unavailable("the source was closed") from error

    def count(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to one of `COUNTERS`."""
        with self._lock:
            self._counters[name] += amount

    def counters(self) -> dict[str, int]:
        """Returns the value of each of `COUNTERS`."""
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        """Makes `submit` raise from now on. The threads end when their requests have ended. Does not block."""
        self.is_closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False)


def wait_first(
    waiting: Collection[concurrent.futures.Future], until_s: float
) -> tuple[set[concurrent.futures.Future], set[concurrent.futures.Future]]:
    """Blocks until a future is done or the clock is at `until_s`. Returns (done, not done)."""
    timeout_s = max(0.0, until_s - time.monotonic())
    return concurrent.futures.wait(waiting, timeout_s, concurrent.futures.FIRST_COMPLETED)
