"""Runs a function over and over in a thread that no error ends: after one it pauses, longer each time, and shows the error."""

import threading
import time
from collections.abc import Callable
from concurrent import futures

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0


class LastingThread:
    """A thread that calls `step` until `stop`. `failed` gets the error, of any type, that ended a step.

    `error` is the one that has ended every step since the Unix time `since`; they are "" and None while steps succeed.
    """

    def __init__(self, name: str, step: Callable[[], None], failed: Callable[[BaseException], None]):
        self.error, self.since = "", None
        self.stopped = threading.Event()
        self._step, self._failed = step, failed
        # The step runs in a thread of the pool, whose future holds even an error such as MemoryError.
        self._pool = futures.ThreadPoolExecutor(1, f"{name}-step")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread: once, after its owner has all that `step` needs."""
        self._thread.start()

    def stop(self) -> None:
        """Makes the thread end after the running step. Does not block."""
        self.stopped.set()

    def join(self, timeout_s: float) -> None:
        """Blocks until the thread has ended, for at most `timeout_s`."""
        self._thread.join(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self.stopped.is_set():
            try:
                error = self._pool.submit(self._step).exception()
                if error is None:
                    self.error, self.since, pause_s = "", None, FIRST_PAUSE_S
                    continue
                self._pool.submit(self._fail, error)
            except (RuntimeError, MemoryError):  # no thread can be started, or there is no memory for a future
                self.since = self.since or time.time()
            self.stopped.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _fail(self, error: BaseException) -> None:
        self.error, self.since = f"{type(error).__name__}: {error}"[:300], self.since or time.time()
        self._failed(error)
