"""The arrival of requests: how long an idle engine gathers them, and if another is likely soon.

Pure: times are arguments, in seconds of any monotonic clock.
"""

GAP_S = 0.005  # an idle engine starts once no request came for this long,
GATHER_S = 0.03  # or once it has gathered requests for this long
RECENT_S = 0.25  # after a request, another is likely for this long


class ArrivalWindow:
    """A short time window in which an idle engine gathers requests, up to a full batch, before it starts them together.

    Gathering pays because a decode call costs the same for one slot in use as for all.
    """

    def __init__(self, num_slots: int):
        self._num_slots = num_slots
        self._opened_s: float | None = None
        self._num_samples = 0
        self._last_s = float("-inf")

    def reopen(self) -> None:
        """Ends the window; the next request opens a new one."""
        self._opened_s, self._num_samples = None, 0

    def add(self, num_samples: int, now_s: float) -> float:
        """Counts a request of `num_samples`; returns the seconds to wait for the next one, 0 if the window is over."""
        if self._opened_s is None:
            self._opened_s = now_s
        self._last_s = now_s
        self._num_samples += num_samples
        is_open = now_s - self._opened_s < GATHER_S and self._num_samples < self._num_slots
        return GAP_S if is_open else 0.0

    def is_next_likely(self, now_s: float) -> bool:
        """Returns True if the last request came less than `RECENT_S` seconds ago, so that another is likely soon."""
        return now_s - self._last_s < RECENT_S
