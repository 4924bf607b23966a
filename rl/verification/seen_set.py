"""A set of accepted or counted entries, by step, that forgets old steps."""

from collections.abc import Iterator
from typing import Any


class SeenSet:
    """A set of (step, entry) pairs, such as rollouts accepted so far, that keeps only the newest `keep_steps` steps."""

    def __init__(self, keep_steps: int = 16):
        self.keep_steps = keep_steps
        self._by_step: dict[int, set[Any]] = {}

    @property
    def newest(self) -> int:
        """The newest step that has an entry, or 0 if the set is empty."""
        return max(self._by_step, default=0)

    def is_over(self, step: int) -> bool:
        """Returns True if the step is so old that its entries were dropped, and new ones would be."""
        return bool(self._by_step) and step <= self.newest - self.keep_steps

    def __contains__(self, item: tuple[int, Any]) -> bool:
        step, entry = item
        return entry in self._by_step.get(step, ())

    def add(self, step: int, *entries: Any) -> None:
        """Adds hashable entries of one step, and drops all entries of steps that are too old."""
        self._by_step.setdefault(step, set()).update(entries)
        for old in [old for old in self._by_step if self.is_over(old)]:
            del self._by_step[old]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yields all (step, entry) pairs in the set."""
        return ((step, entry) for step, entries in self._by_step.items() for entry in entries)
