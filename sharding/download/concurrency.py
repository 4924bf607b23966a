"""How many reads run at once: few while they are quick, as many as there are threads where they take long.

On a short way a handful of reads keeps every core busy with receiving and hashing, and each more only takes cache and time slices from
the others. On a long way the reads in flight are the bandwidth. So a read counts for its first `quick_s` only: where reads
take a second, all that wait have begun before the first ends.
"""

import contextlib
import threading
import time
from collections.abc import Iterator


class Ramp:
    """Use as `with ramp.admitted(): ...`. Thread-safe."""

    def __init__(self, few: int, quick_s: float):
        self._few, self._quick_s = few, quick_s
        self._changed = threading.Condition()
        self._begun_s: dict[object, float] = {}

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
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
        """Until fewer than `few` are in their first `quick_s`, if none of them ends before."""
        newest = sorted(self._begun_s.values())[-self._few :]
        return newest[0] + self._quick_s - time.monotonic() if len(newest) == self._few else 0.0
