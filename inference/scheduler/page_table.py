"""The page table: which pages of the engine's cache hold the keys of which slot (inference/engine/paged_cache.py).

1. `admit` gives a slot the pages of its prompt. The pages that prompt tokens fill up to their last position are shared by all
   slots with the same prompt: only the first of them writes these pages, and no decode step does.
2. `grow` adds pages before a decode call, `release` takes a slot's pages back. A shared page is free once no slot has it.

With several parts, the pages are split evenly, like the slots, and a slot has those of its own part.

Pure: no thread, no clock, no device.
"""

import collections
from collections.abc import Hashable, Iterable

import numpy as np


class PageTable:
    """The pages of each slot, and the free ones. `table`, int32 [slots, pages], is the form that a decode call takes."""

    def __init__(self, num_pages: int, num_slots: int, pages_per_slot: int, page: int, num_parts: int = 1):
        """Creates a table of pages of `page` positions each, all of them free. With several parts there are pages for whole slots."""
        self._is_whole, self._slots_per_part = num_pages >= num_slots * pages_per_slot, num_slots // num_parts
        assert self._is_whole or num_parts == 1
        self.table = np.zeros((num_slots, pages_per_slot), np.int32)
        self._num_pages, self._page = num_pages, page
        size = num_pages // num_parts
        self._free = [collections.deque(range(part * size, (part + 1) * size)) for part in range(num_parts)]
        self._pages: dict[int, list[int]] = {}  # of each slot in use, by position
        self._num_slots_with = collections.Counter()  # of each page in use
        self._shared: dict[Hashable, list[int]] = {}  # the full pages of a (part, prompt) that some slot has
        self._prompt_of: dict[int, Hashable] = {}  # the (part, prompt) whose first full page it is

    def fits(self, prompt: Hashable, length: int, num_new: int) -> bool:
        """Returns True if there are enough free pages for a prompt of `length` tokens and `num_new` more, plus one page for each slot in use.

        A table with pages for whole slots always has room.
        """
        needed = self.num(length + num_new) - len(self._shared.get((0, prompt), ()))
        return self._is_whole or needed + len(self._pages) <= len(self._free[0])

    def by_part(self, slots: Iterable[int]) -> list[int]:
        """Returns these slots in an order that alternates between the parts of the pages, so that the parts get equal work."""
        return sorted(slots, key=lambda slot: slot % self._slots_per_part)

    def admit(self, slot: int, length: int, prompt: Hashable = None) -> list[tuple[int, int]]:
        """Gives a free slot pages for `length` tokens; there must be enough. Returns the pages to write, as (number in the slot, page).

        `prompt` identifies these tokens and their keys. None: they are shared with no other slot. The key of the last token is written
        again by the first decode step, so its page is the slot's own.
        """
        assert slot not in self._pages
        part = slot // self._slots_per_part
        shared = list(self._shared.get((part, prompt), ()))
        own = [self._free[part].popleft() for _ in range(self.num(length) - len(shared))]
        pages = self._pages[slot] = shared + own
        self._num_slots_with.update(pages)
        num_full = (length - 1) // self._page
        if prompt is not None and num_full:
            self._shared[part, prompt], self._prompt_of[pages[0]] = pages[:num_full], (part, prompt)
        self._fill(slot)
        return [*enumerate(pages)][len(shared) :]

    def grow(self, slot: int, length: int) -> bool:
        """Gives a slot pages until it has room for `length` tokens. Returns False, and gives none, if too few are free."""
        num_new, free = self.num(length) - len(self._pages[slot]), self._free[slot // self._slots_per_part]
        if num_new > len(free):
            return False
        if num_new > 0:
            new = [free.popleft() for _ in range(num_new)]
            self._pages[slot] += new
            self._num_slots_with.update(new)
            self._fill(slot)
        return True

    def release(self, slot: int) -> None:
        """Takes back the pages of a slot in use."""
        for page in self._pages.pop(slot):
            self._num_slots_with[page] -= 1
            if not self._num_slots_with[page]:
                del self._num_slots_with[page]
                self._free[slot // self._slots_per_part].append(page)
                if page in self._prompt_of:  # then its other full pages are free, too: the same slots had them
                    del self._shared[self._prompt_of.pop(page)]

    def pages(self, slot: int) -> list[int]:
        """Returns the pages of a slot in use, in the order of their positions."""
        return list(self._pages[slot])

    def num(self, length: int) -> int:
        """Returns the number of pages that `length` tokens need: at least one, so that a slot has a first page."""
        return max(-(-length // self._page), 1)

    def usage(self) -> float:
        """Returns the fraction of the pages in use, 0 to 1."""
        return 1 - sum(map(len, self._free)) / self._num_pages

    def _fill(self, slot: int) -> None:
        """Writes the slot's row. Entries past its last page name its first one: a page of another slot could hold a NaN."""
        pages = self._pages[slot]
        self.table[slot] = pages[0]
        self.table[slot, : len(pages)] = pages
