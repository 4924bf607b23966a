"""Finished tasks as text in a ledger's events: "3:0-15,17 4:32" is groups 0 to 15 and 17 of step 3, and group 32 of step 4.

A validator pays for a task once. The hash of an accepted file does not reveal its tasks, so the event lists them, and every copy of the
ledger shows which tasks are finished. Each set of tasks has one text: steps and groups ascend, neighbors form one range.
"""

import collections
from collections.abc import Iterable, Iterator

MAX_CHARS = 48 * 1024  # an event has 64 KiB
MAX_TASKS = 2**16  # of one event: a rollout file has as many rows at most
MAX_NUMBER = 2**53
BLOCK = 1024  # groups per integer of bits


def format_tasks(tasks: Iterable[tuple[int, int]]) -> str:
    """Formats (step, group) pairs as text, such as "3:0-15,17 4:32". The inverse of `parse_tasks`."""
    by_step = collections.defaultdict(set)
    for step, group in tasks:
        by_step[step].add(group)
    return " ".join(f"{step}:{','.join(_ranges(sorted(by_step[step])))}" for step in sorted(by_step))


def parse_tasks(text: str) -> list[tuple[int, int]]:
    """Parses text such as "3:0-15,17 4:32" into (step, group) pairs. Raises ValueError for text that `format_tasks` cannot return."""
    spans, count = [], 0
    for part in text.split(" "):
        step, colon, groups = part.partition(":")
        for span in groups.split(",") if colon else [""]:
            first, dash, last = span.partition("-")
            spans.append((_number(step), _number(first), _number(last if dash else first)))
            _, begin, end = spans[-1]
            if end < begin:
                raise ValueError(f"range {span!r} ends before it starts; write it as {last}-{first}")
            count += end - begin + 1
            if count > MAX_TASKS:
                raise ValueError(f"the task list has {count} tasks or more; list at most {MAX_TASKS} in one event")
    tasks = [(step, group) for step, first, last in spans for group in range(first, last + 1)]
    if format_tasks(tasks) != text:
        raise ValueError(f"tasks {text[:100]!r} are not in order; sort them and join neighbors into one range")
    return tasks


class Done:
    """The set of finished tasks of a ledger, as (run, step, group); each takes one bit."""

    def __init__(self):
        self._blocks: collections.defaultdict[tuple[str, int, int], int] = collections.defaultdict(int)

    def __contains__(self, task: tuple[str, int, int]) -> bool:
        run, step, group = task
        return bool(self._blocks.get((run, step, group // BLOCK), 0) >> group % BLOCK & 1)

    def add(self, run: str, text: str) -> None:
        """Marks the tasks of a run in `text` (see `format_tasks`) as finished. Raises ValueError if `text` is malformed."""
        for step, group in parse_tasks(text):
            self._blocks[run, step, group // BLOCK] |= 1 << group % BLOCK

    def remove(self, run: str, text: str) -> None:
        """Marks the tasks of a run in `text` as not finished. Raises ValueError if `text` is malformed."""
        for step, group in parse_tasks(text):
            self._blocks[run, step, group // BLOCK] &= ~(1 << group % BLOCK)


def _ranges(groups: list[int]) -> Iterator[str]:
    start = 0
    for i, group in enumerate(groups, start=1):
        if i == len(groups) or groups[i] != group + 1:
            yield str(group) if groups[start] == group else f"{groups[start]}-{group}"
            start = i


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 16 or int(text) > MAX_NUMBER:
        raise ValueError(f"{text[:20]!r} in a task list is not an integer from 0 to {MAX_NUMBER}; correct the list")
    return int(text)
