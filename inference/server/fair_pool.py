"""A thread pool that is shared fairly: a client that submits many calls, or slow ones, delays only itself.

1. `submit(client, ...)` appends a call to the client's own queue.
2. A free thread takes the first call of the next client in round-robin order.
3. A client may occupy as many threads as it leaves free: one client alone occupies half of them, and a new one finds one.

This limits the effect of one client on others, but not that of a thousand clients together.
"""

import collections
import threading
from collections.abc import Callable
from concurrent import futures


class FairPool:
    """A pool of `num_threads` threads shared by clients; a client may occupy no more threads than it leaves free. Thread-safe."""

    def __init__(self, num_threads: int, name: str):
        self._changed = threading.Condition()
        self._queues: dict[str, collections.deque] = {}  # the next client comes first
        self._num_running: collections.Counter[str] = collections.Counter()
        self._num_free, self._is_closed = num_threads, False
        for i in range(num_threads):
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True).start()

    def submit(self, client: str, function: Callable, *args) -> futures.Future:
        """Queues `function(*args)` for a client and returns the future of its result. The future is cancelled if the pool is closed."""
        future = futures.Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
            else:
                self._queues.setdefault(client, collections.deque()).append((future, function, args))
                self._changed.notify()
        return future

    def close(self) -> None:
        """Cancels queued calls and ends the threads. Does not wait for running calls."""
        with self._changed:
            self._is_closed = True
            for queue in self._queues.values():
                for future, *_ in queue:
                    future.cancel()
            self._queues.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                client = self._next()
                if client is None:  # closed
                    return
                queue = self._queues.pop(client)
                future, function, args = queue.popleft()
                if queue:
                    self._queues[client] = queue
                self._num_running[client] += 1
                self._num_free -= 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:  # raised again where the future is awaited
                    future.set_exception(error)
            del future, function, args  # they may be large, and the next call may come late
            with self._changed:
                self._num_free += 1
                self._num_running[client] -= 1
                if not self._num_running[client]:
                    del self._num_running[client]
                if self._queues:
                    self._changed.notify_all()

    def _next(self) -> str | None:
        """Returns the client whose call runs next, or None if every waiting client already has its fair share of threads."""
        return next((client for client in self._queues if self._num_running[client] < max(1, self._num_free)), None)
