"""The pauses between attempts of an operation that fails."""


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
