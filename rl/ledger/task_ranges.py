"""Tasks that are done, as a ledger's events spell them: "3:0-15,17 4:32" is groups 0 to 15 and 17 of step 3, and 32 of step 4.

A validator pays for a task once. Which tasks an accepted file held cannot be told from its hash, so the event says it, and
whoever has the ledger knows what is done. One spelling each: steps and groups ascend, neighbours are one range.
"""

import collections
from collections.abc import Iterable, Iterator

MAX_CHARS = 48 * 1024  # an event has 64 KiB
MAX_TASKS = 2**16  # of one event: a rollout file has as many rows at most
MAX_NUMBER = 2**53
BLOCK = 1024  # groups to an integer of bits


def spell(tasks: Iterable[tuple[int, int]]) -> str:
    """Of (step, group) pairs."""
    by_step = collections.defaultdict(set)
    for step, group in tasks:
        by_step[step].add(group)
    return " ".join(f"{step}:{','.join(_ranges(sorted(by_step[step])))}" for step in sorted(by_step))


def parse(text: str) -> list[tuple[int, int]]:
    """The pairs; ValueError where it is not how they are spelled, or too much."""
    spans, count = [], 0
    for part in text.split(" "):
        step, colon, groups = part.partition(":")
        for span in groups.split(",") if colon else [""]:
            first, dash, last = span.partition("-")
            spans.append((_number(step), _number(first), _number(last) if dash else _number(first)))
            count += spans[-1][2] - spans[-1][1] + 1
            if not 0 < count <= MAX_TASKS or spans[-1][1] > spans[-1][2]:
                raise ValueError(f"a range that descends, or more than {MAX_TASKS} tasks")
    tasks = [(step, group) for step, first, last in spans for group in range(first, last + 1)]
    if spell(tasks) != text:
        raise ValueError("tasks must ascend, neighbours in one range")
    return tasks


class Done:
    """A set of tasks by run; a bit each."""

    def __init__(self):
        self._blocks: collections.defaultdict[tuple[str, int, int], int] = collections.defaultdict(int)

    def __contains__(self, task: tuple[str, int, int]) -> bool:
        """(run, step, group)."""
        run, step, group = task
        return bool(self._blocks.get((run, step, group // BLOCK), 0) >> group % BLOCK & 1)

    def add(self, run: str, text: str) -> None:
        for step, group in parse(text):
            self._blocks[run, step, group // BLOCK] |= 1 << group % BLOCK

    def remove(self, run: str, text: str) -> None:
        for step, group in parse(text):
            self._blocks[run, step, group // BLOCK] &= ~(1 << group % BLOCK)


def _ranges(groups: list[int]) -> Iterator[str]:
    first = last = groups[0]
    for group in [*groups[1:], None]:
        if group is not None and group == last + 1:
            last = group
            continue
        yield str(first) if first == last else f"{first}-{last}"
        first = last = group


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 16 or int(text) > MAX_NUMBER:
        raise ValueError(f"not a number up to {MAX_NUMBER}")
    return int(text)
