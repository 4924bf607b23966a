"""Sequences in a paged cache: admission by free pages, and preemption when they run out.

1. `admit` gives a new sequence the pages of its prompt (page_table.py), and `insert` copies keys and values into those that no
   earlier sample of the prompt has written.
2. `make_room` gives every running sequence the pages that the next decode call may write, the oldest first. Without a free
   page, the youngest sequence leaves its slot: its keys, values, and state wait in host memory.
3. `resume` brings such sequences back, the oldest first, before any new request gets a slot.

Keys are kept and not computed again, because prefill rounds otherwise than decode, and because their versions may be gone. So a
sequence goes on bit for bit, and its version stamps stay true.
"""

import dataclasses
from collections.abc import Sequence

from inference.engine import decode_state, paged_cache
from inference.engine import engine as engine_lib
from inference.scheduler import page_table
from inference.scheduler import sequence as sequence_lib
from inference.scheduler import slots as slots_lib
from sharding.mesh import rules


@dataclasses.dataclass(eq=False)
class _Preempted:
    sequence: sequence_lib.Sample
    swapped: engine_lib.Swapped


class Paging:
    """The pages of the running sequences, and the sequences that wait for pages. Used by one thread."""

    def __init__(self, engine: engine_lib.Engine, slots: slots_lib.Slots):
        config = engine.config
        self._engine, self._slots = engine, slots
        num_parts = rules.num_batch_shards(engine.mesh)
        self.pages = page_table.PageTable(
            config.num_pages, config.num_slots, config.pages_per_slot, paged_cache.PAGE, num_parts
        )
        self._preempted: list[_Preempted] = []  # oldest first
        self._to_write: dict[int, list[tuple[int, int]]] = {}  # of slots whose prompt is not inserted yet

    def __len__(self) -> int:
        """Returns the number of sequences that wait for pages."""
        return len(self._preempted)

    @property
    def groups(self) -> list[sequence_lib.SequenceGroup]:
        """The requests of the sequences that wait for pages, without duplicates."""
        return list(dict.fromkeys(waiting.sequence.group for waiting in self._preempted))

    def fits(self, group: sequence_lib.SequenceGroup) -> bool:
        """Returns True if a sample of this request may get a slot: no sequence waits for pages, and there are enough for it."""
        num_new = min(self._engine.config.steps_per_call, group.request.max_tokens)
        return not self._preempted and self.pages.fits(group.prompt_key, len(group.request.tokens), num_new - 1)

    def admit(self, slot: int, group: sequence_lib.SequenceGroup) -> None:
        """Gives a slot the pages of the request's prompt."""
        self._to_write[slot] = self.pages.admit(slot, len(group.request.tokens), group.prompt_key)

    def insert(
        self, prefix: decode_state.Prefix, state: engine_lib.State, rows: Sequence[tuple[int, int]]
    ) -> engine_lib.State:
        """Copies prompts into the pages of admitted slots, the rows (slot, row of `prefix`); returns the new state."""
        copies = [(row, number, page) for slot, row in rows for number, page in self._to_write.pop(slot)]
        return self._engine.insert_pages(prefix, state, copies)

    def make_room(self, state: engine_lib.State, num_steps: int) -> list[int]:
        """Gives each running sequence pages for `num_steps` further tokens. Returns the slots that sequences had to leave."""
        by_age, left = sorted(self._slots.running, key=lambda item: (item[1].begun_s, item[0])), []
        while by_age:
            slot, sequence = by_age.pop(0)
            num_new = min(num_steps, sequence.num_left(self._engine.config.max_model_len))
            while not self.pages.grow(slot, _num_keys(sequence) + num_new):
                last, youngest = by_age.pop() if by_age else (slot, sequence)
                pages = self.pages.pages(last)[: self.pages.num(_num_keys(youngest))]
                self._preempted.insert(0, _Preempted(youngest, self._engine.swap_out(state, last, pages)))
                self.pages.release(last)
                self._slots.release(last)
                left.append(last)
                if last == slot:
                    break
        return left

    def resume(self, state: engine_lib.State) -> engine_lib.State:
        """Brings sequences back while there are slots and pages for them; returns the new state."""
        for slot in self._slots.free:
            if not self._preempted:
                break
            sequence, config = self._preempted[0].sequence, self._engine.config
            num_new = min(config.steps_per_call, sequence.num_left(config.max_model_len))
            if not self.pages.fits(None, _num_keys(sequence), num_new):
                break
            self.pages.admit(slot, _num_keys(sequence))
            state = self._engine.swap_in(state, slot, self.pages.pages(slot), self._preempted.pop(0).swapped)
            sequence.group.num_running += 1
            self._slots.put(slot, sequence)
        return state

    def drop_done(self) -> int:
        """Removes waiting sequences whose request was cancelled or failed; returns their number."""
        left = [waiting for waiting in self._preempted if not waiting.sequence.group.future.done()]
        num_dropped, self._preempted = len(self._preempted) - len(left), left
        return num_dropped


def _num_keys(sequence: sequence_lib.Sample) -> int:
    """Returns the number of tokens whose keys are written for good: the next step runs the last token."""
    return len(sequence.group.request.tokens) + len(sequence.completion.tokens) - 1
