"""Runs a function over and over in a thread that no error ends: after one it pauses, longer each time, and shows the error."""

import threading
import time
from collections.abc import Callable
from concurrent import futures

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0


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
        pause_s = FIRST_PAUSE_S
        with futures.ThreadPoolExecutor(1, f"{self.name}-step") as pool:
            while not self.stopped.is_set():
                try:
                    error = pool.submit(self._step).exception()
                    if error is None:
                        self.error, self.since, pause_s = "", None, FIRST_PAUSE_S
                        continue
                    pool.submit(self._fail, error)
                except (RuntimeError, MemoryError):  # no thread can be started, or there is no memory for a future
                    self.since = self.since or time.time()
                self.stopped.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _fail(self, error: BaseException) -> None:
        self.error, self.since = f"{type(error).__name__}: {error}"[:300], self.since or time.time()
        self._failed(error)
