"""Adaptive concurrency: few reads at a time while reads are quick, as many as there are threads while they are slow.

On a fast network a few reads keep every core busy with receiving and hashing, and more of them only take cache and time slices
from the others. On a slow network the bandwidth grows with the number of reads. So a read counts against the limit only
during its first `quick_s` seconds: where reads take a second, all of them have begun before the first ends.
"""

import contextlib
import threading
import time
from collections.abc import Iterator


class AdaptiveConcurrency:
    """Limits concurrent reads: at most `limit` are in their first `quick_s` seconds; older reads do not count. Thread-safe."""

    def __init__(self, limit: int, quick_s: float):
        self._limit, self._quick_s = limit, quick_s
        self._changed = threading.Condition()
        self._begun_s: dict[object, float] = {}

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Returns a context manager to run one read in. Entering blocks until the limit allows one more read."""
        read = object()
        with self._changed:
            while (wait_s := self._wait_s()) > 0:
                self._changed.wait(wait_s)
            self._begun_s[read] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del self._begun_s[read]
                self._changed.notify()

    def _wait_s(self) -> float:
        """Returns the seconds until one more read may begin if no running read ends earlier; 0 or less: immediately."""
        newest = sorted(self._begun_s.values())[-self._limit :]
        return newest[0] + self._quick_s - time.monotonic() if len(newest) == self._limit else 0.0
