"""Prefilled prompts, kept for later prompts that begin alike: the next turn of a conversation, the next of a group.

1. A prompt is cut into chunks of `prefill_chunk` tokens; the key of each prefix of whole chunks, and of the whole prompt,
   is a hash over the salt (the policy version) and the tokens up to there.
2. `find` gives the longest kept prefix of a prompt; what follows it is left to prefill.
3. `keep` stores prefilled keys under all their prefixes; the least recently used go when the bytes run out.
4. `clear` forgets everything: new weights make old keys worthless.

Keys of sampled tokens are never kept, and prefixes end where a chunk does: prefill writes the same bits whether it computed
the chunks before or found them here, so that reuse cannot change a token. (Decode rounds otherwise than prefill does.)
A prompt of one chunk or less is prefilled in a batch, by another program than a first chunk, and is kept apart.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from inference.engine import decode_state as state_lib


@dataclasses.dataclass(frozen=True)
class Found:
    """`num_tokens` tokens of the prompt are in row `row` of `prefix`."""

    num_tokens: int
    prefix: state_lib.Prefix
    row: int


@dataclasses.dataclass
class _Entry:
    prefix: state_lib.Prefix
    num_bytes: int
    keys: set[bytes] = dataclasses.field(default_factory=set)


class PrefixCache:
    """Used by one thread."""

    def __init__(self, chunk: int, max_bytes: int):
        self._chunk, self._max_bytes = chunk, max_bytes
        self._found: dict[bytes, Found] = {}
        self._entries: collections.OrderedDict[int, _Entry] = collections.OrderedDict()
        self.num_bytes = 0

    def find(self, tokens: Sequence[int], salt: int) -> Found | None:
        for _, key in reversed(self._keys(tokens, salt)):
            if found := self._found.get(key):
                self._entries.move_to_end(id(found.prefix))
                return found
        return None

    def keep(self, tokens: Sequence[int], salt: int, prefix: state_lib.Prefix, row: int) -> None:
        """Keeps what `row` of `prefix` holds of a prompt, which is all of it."""
        entry = self._entries.get(id(prefix))
        if entry is None:
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((prefix.cache, prefix.experts)))
            if num_bytes > self._max_bytes:
                return
            while self.num_bytes + num_bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))
            entry = self._entries[id(prefix)] = _Entry(prefix, num_bytes)
            self.num_bytes += num_bytes
        for num_tokens, key in self._keys(tokens, salt):
            if (other := self._found.get(key)) and other.prefix is not prefix:
                self._forget(key, id(other.prefix))
            self._found[key] = Found(num_tokens, prefix, row)
            entry.keys.add(key)

    def clear(self) -> None:
        self._found.clear()
        self._entries.clear()
        self.num_bytes = 0

    def _keys(self, tokens: Sequence[int], salt: int) -> list[tuple[int, bytes]]:
        """(length, key) of each prefix that can be kept, shortest first."""
        data = np.asarray(tokens, "<i4")
        batched = len(data) <= self._chunk
        running = hashlib.blake2b(f"{salt} {batched} ".encode(), digest_size=16)
        keys = []
        for start in range(0, len(data), self._chunk):
            piece = data[start : start + self._chunk]
            running.update(piece.tobytes())
            if batched or len(piece) == self._chunk or start + len(piece) == len(data):
                keys.append((start + len(piece), running.digest()))
        return keys

    def _forget(self, key: bytes, owner: int) -> None:
        """A newer prefix holds this key too; an entry without keys cannot be found any more."""
        entry = self._entries[owner]
        entry.keys.discard(key)
        if not entry.keys:
            self._drop(owner)

    def _drop(self, owner: int) -> None:
        entry = self._entries.pop(owner)
        for key in entry.keys:
            del self._found[key]
        self.num_bytes -= entry.num_bytes
