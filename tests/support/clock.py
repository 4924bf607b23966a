"""A clock that tests set by hand."""


class Clock:
    """Returns `now` when called."""

    now = 0.0

    def __call__(self) -> float:
        """The current time in seconds."""
        return self.now
