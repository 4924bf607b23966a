"""Counts the errors of a relay by their source, and prints at most one line per source and minute: a liar cannot fill the log."""

import collections
import sys
import threading
import time

MINUTE_S = 60.0
LINE_CHARS = 500


class ErrorLog:
    """The counters of a relay's mirror, and its errors by source: an upstream's name, or "" for the relay itself. Thread-safe."""

    def __init__(self):
        self.counters = collections.Counter()
        self.last = ""  # the last error, of any source
        self._lock = threading.Lock()
        self._printed: dict[str, tuple[float, int]] = {}  # source -> when its last line was printed, errors since then

    def count(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to the counter `name`."""
        with self._lock:
            self.counters[name] += amount

    def note(self, source: str, error: BaseException) -> None:
        """Counts an error of `source`; prints it with the number of unprinted ones, unless a line of this source is fresh."""
        text = f"{source}: {error or type(error).__name__}"[:LINE_CHARS].strip(": ").replace("\n", " ")
        now_s = time.monotonic()
        with self._lock:
            self.counters[f"errors_{type(error).__name__}"] += 1
            printed_s, num_silent = self._printed.get(source, (-MINUTE_S, 0))
            is_due = now_s - printed_s >= MINUTE_S
            self._printed[source] = (now_s, 0) if is_due else (printed_s, num_silent + 1)
            self.last = text
        if is_due:
            more = f" (and {num_silent} errors in between)" if num_silent else ""
            print(f"relay: {text}{more}", file=sys.stderr, flush=True)
