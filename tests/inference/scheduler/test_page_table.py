"""The page table against a memory of pages: each slot must read its own tokens through the table, however the others change it."""

import random

import numpy as np
import pytest

from inference.scheduler import page_table

NUM_SLOTS, CAPACITY = 5, 24
PROMPTS = [(n, length) for n, length in enumerate((1, 2, 3, 4, 5, 8, 9, 13, 16))]


class Memory:
    """The plain model: tokens as (owner, position) in pages, and the pages that each slot may use, counted by hand."""

    def __init__(self, num_pages, page):
        self.num_pages, self.page = num_pages, page
        self.table = page_table.PageTable(num_pages, NUM_SLOTS, -(-CAPACITY // page), page)
        self.cells, self.tokens, self.prompts = {}, {}, {}

    def num_used(self):
        """Pages in use: full ones of a prompt once for all its slots, the others of each slot."""
        used = set()
        for slot, prompt in self.prompts.items():
            length = 0 if prompt is None else prompt[1] - 1
            num_shared = length // self.page
            used |= {(prompt, n) for n in range(num_shared)}
            used |= {(slot, n) for n in range(num_shared, len(self.table.pages(slot)))}
        return len(used)

    def write(self, slot, position, token):
        self.cells[int(self.table.table[slot, position // self.page]), position % self.page] = token

    def admit(self, slot, prompt, tokens):
        self.prompts[slot], self.tokens[slot] = prompt, list(tokens)
        for number, page in self.table.admit(slot, len(tokens), prompt):
            assert self.table.table[slot, number] == page
            for at, token in enumerate(tokens[number * self.page :][: self.page]):
                self.cells[page, at] = token

    def decode(self, slot, num):
        """The next step writes the key of the last token again."""
        if not self.table.grow(slot, len(self.tokens[slot]) + num - 1):
            return False
        for _ in range(num):
            position = len(self.tokens[slot]) - 1
            self.write(slot, position, self.tokens[slot][position])
            self.tokens[slot].append((slot, position + 1, random.random()))
        return True

    def release(self, slot):
        self.table.release(slot)
        del self.prompts[slot]
        return self.tokens.pop(slot)

    def check(self):
        for slot, tokens in self.tokens.items():
            pages = self.table.pages(slot)
            assert self.table.table[slot].tolist() == pages + pages[:1] * (self.table.table.shape[1] - len(pages))
            # The key of the last token is written by the next step.
            for at, token in enumerate(tokens[:-1]):
                assert self.cells[int(self.table.table[slot, at // self.page]), at % self.page] == token, (slot, at)
        assert self.table.usage() == pytest.approx(self.num_used() / self.num_pages)


@pytest.mark.parametrize("page", [1, 2, 4, 32])
def test_random_schedules_leak_no_page_and_share_only_equal_prompts(page):
    """80 schedules of each size: admit, decode, preempt, resume, finish."""
    num_shared = num_refused = 0
    for seed in range(80):
        random.seed(seed)
        memory = Memory(random.randint(-(-CAPACITY // page), 3 * -(-CAPACITY // page)), page)
        waiting = []
        for _ in range(60):
            free = sorted({*range(NUM_SLOTS)} - {*memory.tokens})
            act = random.choice(["admit", "admit", "decode", "decode", "decode", "preempt", "finish"])
            if act == "admit" and free:
                slot = random.choice(free)
                if waiting and memory.table.fits(None, len(waiting[0]) - 1, 1):
                    # A preempted sequence has its own copy of all written keys, none for the last token.
                    tokens = waiting.pop(0)
                    memory.prompts[slot], memory.tokens[slot] = None, tokens
                    for number, to in memory.table.admit(slot, max(len(tokens) - 1, 1)):
                        for at, token in enumerate(tokens[:-1][number * page :][:page]):
                            memory.cells[to, at] = token
                    continue
                prompt = random.choice(PROMPTS)
                before = memory.table.usage()
                if memory.table.fits(prompt, prompt[1], 1):
                    memory.admit(slot, prompt, [(prompt, at) for at in range(prompt[1])])
                    num_shared += memory.table.usage() - before < (prompt[1] - 1) // page / memory.num_pages
            elif act == "decode" and memory.tokens:
                slot = random.choice([*memory.tokens])
                num = min(random.randint(1, 4), CAPACITY - len(memory.tokens[slot]))
                num_refused += not memory.decode(slot, num)
            elif act in ("preempt", "finish") and memory.tokens:
                tokens = memory.release(random.choice([*memory.tokens]))
                waiting += [tokens] if act == "preempt" else []
            memory.check()
        for slot in [*memory.tokens]:
            memory.release(slot)
        assert memory.table.usage() == 0
        assert sorted(memory.table.admit(0, CAPACITY)) == [*enumerate(memory.table.pages(0))]
    assert page == 32 or (num_shared > 15 and num_refused > 15)  # the schedules meet both


def test_each_part_of_the_slots_has_pages_of_its_own():
    """Two parts of two slots. Samples of a prompt share its pages inside a part, and no slot waits for pages."""
    table = page_table.PageTable(16, 4, 4, 4, num_parts=2)
    assert table.by_part([0, 1, 2, 3]) == [0, 2, 1, 3] and table.by_part([1, 2, 3]) == [2, 1, 3]
    written = {slot: [number for number, _ in table.admit(slot, 9, "prompt")] for slot in (0, 2, 1)}
    assert written == {0: [0, 1, 2], 2: [0, 1, 2], 1: [2]} and table.fits("other", 16, 0)
    table.admit(3, 16)
    for slot in (0, 1, 2, 3, 0):
        assert table.grow(slot, 16) and {page // 8 for page in table.pages(slot)} == {slot // 2}
    assert table.usage() == 14 / 16
    for slot in range(4):
        table.release(slot)
    assert table.usage() == 0
    assert {page // 8 for slot in (3, 0) for _, page in table.admit(slot, 16)} == {0, 1}


def test_growth_that_does_not_fit_takes_nothing():
    table = page_table.PageTable(3, 2, 3, 4)
    table.admit(0, 4)
    assert table.fits(None, 4, 0) and not table.fits(
        None, 4, 1
    )  # the slot in use may soon need one of the two free pages
    table.admit(1, 4)
    before = table.table.copy()
    assert not table.grow(0, 12) and table.usage() == pytest.approx(2 / 3)
    np.testing.assert_array_equal(table.table, before)
    assert table.grow(0, 8) and table.usage() == 1
    assert table.grow(0, 7)  # has room already
    assert not table.fits(None, 1, 0)
