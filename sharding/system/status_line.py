"""Prints how a long-running process gets on: a line of counts, rates, and the reason of a wait."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

PERIOD_S, MAX_PAUSE_S = 30.0, 600.0


@contextlib.contextmanager
def printed(read: Callable[[], tuple[Mapping[str, float], str]], period_s: float = PERIOD_S) -> Iterator[None]:
    """Prints a line to standard error every `period_s` of the block in which the counts change, and rarely in which they do not.

    `read` returns ({name: count since the start}, the thing that the process waits for or "").
    """
    ended = threading.Event()
    thread = threading.Thread(target=_print, args=(read, period_s, ended), name="status-line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _print(read: Callable[[], tuple[Mapping[str, float], str]], period_s: float, ended: threading.Event) -> None:
    (last, _), last_s, shown, due_s, pause_s = read(), time.monotonic(), "", 0.0, period_s
    while not ended.wait(period_s):
        (counts, waiting_for), now_s = read(), time.monotonic()
        is_same = counts == last and waiting_for == shown
        if not is_same or now_s >= due_s:
            pause_s = min(2 * pause_s, MAX_PAUSE_S) if is_same else period_s
            print(line(counts, last, now_s - last_s, waiting_for), file=sys.stderr, flush=True)
            shown, due_s = waiting_for, now_s + pause_s
        last, last_s = dict(counts), now_s


def line(counts: Mapping[str, float], before: Mapping[str, float], seconds: float, waiting_for: str) -> str:
    """Returns a line such as "groups 120 (3.4/s), tokens 5,100 (170.0/s); waiting for a group"."""
    rates = {name: (count - before.get(name, 0)) / seconds for name, count in counts.items()}
    parts = [f"{name} {counts[name]:,.0f} ({rate:,.1f}/s)" for name, rate in rates.items()]
    return ", ".join(parts) + (f"; waiting for {waiting_for}" if waiting_for else "")
