"""The pauses between attempts of an operation that fails, and a thread that no error ends."""

import threading
import time
from collections.abc import Callable
from concurrent import futures

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0  # of a `LastingThread`


class Backoff:
    """Pauses in seconds: first `first_s`, then each `growth` times as long as the one before, and at most `most_s`."""

    def __init__(self, first_s: float, most_s: float, growth: float = 2.0):
        self._first_s, self._most_s, self._growth = min(first_s, most_s), most_s, growth
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Returns the pause after one more failure."""
        pause_s = self._next_s
        self._next_s = min(self._growth * pause_s, self._most_s)
        return pause_s

    def reset(self) -> None:
        """Makes the next pause the first one again, as an attempt has succeeded."""
        self._next_s = self._first_s


class LastingThread(threading.Thread):
    """A thread that calls `step` until the event `stopped`. `failed` gets the error, of any type, that ended a step.

    `error` is the one that has ended every step since the Unix time `since`; they are "" and None while steps succeed.
    """

    def __init__(self, name: str, step: Callable[[], None], failed: Callable[[BaseException], None]):
        super().__init__(name=name, daemon=True)
        self.error, self.since, self.stopped = "", None, threading.Event()
        self._step, self._failed = step, failed

    def run(self) -> None:
        """Calls the steps, each in a thread of a pool, whose future holds even an error such as MemoryError."""
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        with futures.ThreadPoolExecutor(1, f"{self.name}-step") as pool:
            while not self.stopped.is_set():
                try:
                    error = pool.submit(self._step).exception()
                    if error is None:
                        self.error, self.since = "", None
                        pauses.reset()
                        continue
                    pool.submit(self._fail, error)
                except (RuntimeError, MemoryError):  # no thread can be started, or there is no memory for a future
                    self.since = self.since or time.time()
                self.stopped.wait(pauses.next_s())

    def _fail(self, error: BaseException) -> None:
        self.error, self.since = f"{type(error).__name__}: {error}"[:300], self.since or time.time()
        self._failed(error)
