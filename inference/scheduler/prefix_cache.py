"""The prefix cache: keys and values of prompts and of finished sequences, reused by later prompts that start with the same tokens.

1. A prompt is cut into chunks of `prefill_chunk` tokens. Each prefix of whole chunks, and the whole prompt, has a key: a hash
   of its tokens and its adapter. `add` stores a prefilled prompt under the keys of all its prefixes.
2. `add_sequence` notes a sequence that ended, for the next turn of its conversation. Its keys are of blocks of `BLOCK` tokens, and
   only of those that reach into sampled tokens. It is copied out of its slot when it is found, or when the slot gets another
   sequence (`take`); but of sequences that nothing continues, only the first few are copied.
3. `find` returns the longest cached prefix of a prompt. Least recently used entries are evicted at the limit of bytes.
4. New weights invalidate the keys of prompts. Of sequences, the keys of one older version are kept (`clear`), for requests that allow
   them: a replay then runs both versions.

Reuse of a prompt changes no bit, because its prefixes end at chunk borders. A prompt of at most one chunk
is prefilled in a batch, by another program than a first chunk, and so has keys of its own. Reuse of sampled tokens rounds as a longer
sequence does: decode steps computed their keys, and prefill would round otherwise.
"""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from inference.engine import decode_state, kv_cache

Runs = Sequence[tuple[int, int]]  # (end, policy version) of keys in order; both ascend

BLOCK = 16  # tokens: a turn prefills half as many again, on average
COPIES = 16  # sequences copied out of reused slots per sign that sequences are continued; a copy is a hundredth of a short request
MAX_LOST = 4096  # keys of sequences that were not copied, which are remembered as signs


@dataclasses.dataclass(frozen=True)
class Found:
    """A cached prefix: the keys and values of a prompt's first `num_tokens` tokens are in row `row` of `prefix`.

    Tokens from `num_prefilled` on may have been sampled; all earlier ones were prefilled. `runs` names the versions that computed the
    keys, as (end, version). It is empty for a prefilled prompt, whose keys are all of the version in use.
    """

    num_tokens: int
    prefix: decode_state.Prefix
    row: int
    num_prefilled: int
    runs: Runs

    @property
    def is_prompt(self) -> bool:
        """True if all keys were prefilled, so that reuse changes no bit."""
        return self.num_prefilled >= self.num_tokens


@dataclasses.dataclass(frozen=True)
class _Resident:
    """A sequence that ended and is still in its slot. `keys` are as `_keys` returns them."""

    tokens: Sequence[int]
    num_prefilled: int
    runs: Runs
    experts: tuple[decode_state.Array, ...]
    keys: list[tuple[int, bytes]]


class PrefixCache:
    """A least-recently-used cache of the keys and values of prompts and sequences, limited to `max_bytes`. Used by one thread."""

    def __init__(self, chunk: int, max_bytes: int, read_slot: Callable[[int, int], kv_cache.Cache]):
        """Creates an empty cache. `read_slot` returns a copy of the keys and values of a slot's first tokens; so many are its second argument."""
        self._chunk, self.max_bytes, self._read_slot = chunk, max_bytes, read_slot
        self._found: dict[bytes, Found] = {}
        # The number of bytes and the keys of each `Prefix`, by its id; least recently used first.
        self._entries: collections.OrderedDict[int, tuple[int, set[bytes]]] = collections.OrderedDict()
        self.num_bytes = 0
        self._residents: dict[int, _Resident] = {}  # by slot
        self._slots: dict[bytes, int] = {}  # by key of a resident
        self._lost: dict[bytes, None] = {}  # keys of residents that were not copied, oldest first
        self._num_copies = COPIES  # that may still be made

    def find(self, tokens: Sequence[int], oldest: int = 0, adapter: int = -1) -> Found | None:
        """Returns the longest cached prefix of the prompt `tokens` whose keys are of `adapter`, and of version `oldest` or newer, or None."""
        kinds = self._block_keys(tokens, adapter), self._prompt_keys(tokens, adapter)
        for *_, key in sorted(((end, kind, key) for kind in (0, 1) for end, key in kinds[kind]), reverse=True):
            if key in self._slots and _allows(self._residents[self._slots[key]].runs, oldest):
                self._copy(self._slots[key])
            if (found := self._found.get(key)) and not _allows(found.runs, oldest):
                found = None
            if key in self._lost or (found and not found.is_prompt):
                self._num_copies = COPIES
            if found:
                self._entries.move_to_end(id(found.prefix))
                return found
        return None

    def add(self, tokens: Sequence[int], prefix: decode_state.Prefix, row: int, adapter: int = -1) -> None:
        """Adds a prefilled prompt, which is in row `row` of `prefix`; does nothing if `prefix` is larger than the cache."""
        self._add(self._prompt_keys(tokens, adapter), prefix, row, len(tokens), ())

    def add_sequence(
        self,
        tokens: Sequence[int],
        slot: int,
        num_prefilled: int,
        runs: Runs,
        experts: tuple[decode_state.Array, ...] = (),
        adapter: int = -1,
    ) -> None:
        """Adds a sequence, which ended in `slot`. Its tokens from number `num_prefilled` on may have been sampled. `runs` names the versions of its keys."""
        keys = [key for key in self._block_keys(tokens, adapter) if num_prefilled < key[0]]
        if keys and self.max_bytes > 0:
            self._residents[slot] = _Resident(tokens, num_prefilled, runs, experts, keys)
            self._slots |= dict.fromkeys((key for _, key in keys), slot)

    def take(self, slot: int) -> None:
        """Copies the sequence that is in a slot, or loses it; the caller then puts another one into the slot."""
        if slot in self._residents and self._num_copies:
            self._num_copies -= 1
            self._copy(slot)
        elif slot in self._residents:
            self._lost |= dict.fromkeys(key for _, key in self._pop(slot).keys)
            while len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]

    def clear(self, oldest: float = math.inf) -> None:
        """Removes all prompts, and the sequences that have keys of a version before `oldest`."""
        for slot in [slot for slot, one in self._residents.items() if one.runs[0][1] < oldest]:
            self._pop(slot)
        for owner, (_, keys) in [*self._entries.items()]:
            runs = self._found[next(iter(keys))].runs
            if not runs or runs[0][1] < oldest:
                self._evict(owner)

    def _copy(self, slot: int) -> None:
        """Moves a sequence from its slot to an entry."""
        one = self._pop(slot)
        prefix = of_one_prompt(one.tokens, self._read_slot(slot, len(one.tokens)), one.experts)
        self._add(one.keys, prefix, 0, one.num_prefilled, one.runs)

    def _pop(self, slot: int) -> _Resident:
        resident = self._residents.pop(slot)
        for _, key in resident.keys:
            if self._slots.get(key) == slot:
                del self._slots[key]
        return resident

    def _add(
        self, keys: list[tuple[int, bytes]], prefix: decode_state.Prefix, row: int, num_prefilled: int, runs: Runs
    ) -> None:
        if id(prefix) not in self._entries:
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((prefix.cache, prefix.experts)))
            if num_bytes > self.max_bytes:
                return
            while self.num_bytes + num_bytes > self.max_bytes:
                self._evict(next(iter(self._entries)))
            self._entries[id(prefix)] = num_bytes, set()
            self.num_bytes += num_bytes
        for num_tokens, key in keys:
            if (other := self._found.get(key)) and other.prefix is not prefix:
                _, others = self._entries[id(other.prefix)]
                others.discard(key)
                if not others:
                    self._evict(id(other.prefix))
            self._found[key] = Found(num_tokens, prefix, row, num_prefilled, cut_runs(runs, num_tokens))
            self._entries[id(prefix)][1].add(key)

    def _prompt_keys(self, tokens: Sequence[int], adapter: int) -> list[tuple[int, bytes]]:
        return _keys(tokens, self._chunk, "batched" if len(tokens) <= self._chunk else "chunked", adapter)

    def _block_keys(self, tokens: Sequence[int], adapter: int) -> list[tuple[int, bytes]]:
        return _keys(tokens[: len(tokens) // BLOCK * BLOCK], BLOCK, "sequence", adapter)

    def _evict(self, owner: int) -> None:
        num_bytes, keys = self._entries.pop(owner)
        for key in keys:
            del self._found[key]
        self.num_bytes -= num_bytes


def joined_runs(runs: Runs) -> Runs:
    """Returns runs without empty ones; neighbors of one version are joined."""
    found: list[tuple[int, int]] = []
    for end, version in runs:
        if found and found[-1][1] == version:
            found[-1] = end, version
        elif end > (found[-1][0] if found else 0):
            found.append((end, version))
    return found


def cut_runs(runs: Runs, num_tokens: int) -> Runs:
    """Returns the runs of the first `num_tokens` tokens."""
    return joined_runs([(min(end, num_tokens), version) for end, version in runs])


def _allows(runs: Runs, oldest: int) -> bool:
    return not runs or runs[0][1] >= oldest


def of_one_prompt(
    tokens: Sequence[int], cache: kv_cache.Cache, experts: tuple[decode_state.Array, ...]
) -> decode_state.Prefix:
    """Returns the `Prefix` of one prompt, or of the first tokens of one."""
    return decode_state.Prefix(cache, np.array([tokens[-1]], np.int32), np.array([len(tokens)], np.int32), experts)


def _keys(tokens: Sequence[int], size: int, kind: str, adapter: int) -> list[tuple[int, bytes]]:
    """Returns (length, key) of each prefix of whole parts of `size` tokens, and of all tokens; shortest first."""
    data, running, keys = np.asarray(tokens, "<i4"), hashlib.blake2b(f"{kind} {adapter}".encode(), digest_size=16), []
    for start in range(0, len(data), size):
        end = min(start + size, len(data))
        running.update(data[start:end].tobytes())
        keys.append((end, running.digest()))
    return keys
