"""A few threads for work of many parties, taken in turn: who hands in much, or what takes long, keeps itself waiting.

1. `submit(party, ...)` queues a call behind the others of its party.
2. A free thread takes the first call of the party whose turn it is, and that party goes to the end of the line.
3. A party may hold as many threads as it leaves free: one alone holds half of them, and who comes new finds one.

It bounds what a party can do to others, not what a thousand parties can.
"""

import collections
import threading
from collections.abc import Callable
from concurrent import futures


class FairPool:
    """`num_threads` threads, which end with the process or by `close`. Any thread may call."""

    def __init__(self, num_threads: int, name: str):
        self._changed = threading.Condition()
        self._waiting: dict[str, collections.deque] = {}  # whose turn it is comes first
        self._held: collections.Counter[str] = collections.Counter()
        self._num_free, self._is_closed = num_threads, False
        for i in range(num_threads):
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True).start()

    def submit(self, party: str, function: Callable, *args) -> futures.Future:
        """`function(*args)` later, in a thread; the future has its result or what it raised."""
        future = futures.Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
            else:
                self._waiting.setdefault(party, collections.deque()).append((future, function, args))
                self._changed.notify()
        return future

    def close(self) -> None:
        """What is queued is cancelled; what runs is not waited for."""
        with self._changed:
            self._is_closed = True
            for queue in self._waiting.values():
                for future, *_ in queue:
                    future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                if self._is_closed:
                    return
                party = self._next()
                queue = self._waiting.pop(party)
                future, function, args = queue.popleft()
                if queue:
                    self._waiting[party] = queue
                self._held[party] += 1
                self._num_free -= 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:  # who waits for the future hears of it
                    future.set_exception(error)
            del future, function, args  # they may hold much, and the next turn may be far
            with self._changed:
                self._num_free += 1
                self._held[party] -= 1
                if not self._held[party]:
                    del self._held[party]
                self._changed.notify_all()

    def _next(self) -> str | None:
        """Whose turn it is; None where nobody may have one."""
        return next((party for party in self._waiting if self._held[party] < max(1, self._num_free)), None)
