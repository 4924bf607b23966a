"""A clock that tests set by hand, and an event loop that skips all waiting."""

import asyncio
import dataclasses
import selectors


@dataclasses.dataclass
class Clock:
    """Returns `now` when called."""

    now: float = 0.0

    def __call__(self) -> float:
        """The current time in seconds."""
        return self.now


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer, from 0 s on: for code without I/O and threads."""

    def __init__(self):
        self._now_s, selector = 0.0, selectors.DefaultSelector()
        super().__init__(selector)
        selector.select, self._select = self._jump, selector.select

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._now_s

    def _jump(self, timeout: float | None = None) -> list:
        assert timeout is not None, "all tasks wait for each other"
        self._now_s += timeout
        return self._select(0)
