"""The prefix cache: keys and values of prefilled prompts, reused by later prompts that start with the same tokens.

1. A prompt is cut into chunks of `prefill_chunk` tokens. Each prefix of whole chunks, and the whole prompt, has a key: a hash
   of its tokens. `find` returns the longest cached prefix of a prompt.
2. `add` stores a prefilled prompt under the keys of all its prefixes. Least recently used entries are evicted at the limit.
3. `clear` empties the cache, because new weights invalidate the keys and values.

Keys of sampled tokens are not cached, and prefixes end at chunk borders: so reuse changes no bit. A prompt of at most one chunk
is prefilled in a batch, by another program than a first chunk, and so has keys of its own.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from inference.engine import decode_state


@dataclasses.dataclass(frozen=True)
class Found:
    """A cached prefix: the keys and values of a prompt's first `num_tokens` tokens are in row `row` of `prefix`."""

    num_tokens: int
    prefix: decode_state.Prefix
    row: int


class PrefixCache:
    """A least-recently-used cache of the keys and values of prompts, limited to `max_bytes`. Used by one thread."""

    def __init__(self, chunk: int, max_bytes: int):
        self._chunk, self._max_bytes = chunk, max_bytes
        self._found: dict[bytes, Found] = {}
        # The number of bytes and the keys of each `Prefix`, by its id; least recently used first.
        self._entries: collections.OrderedDict[int, tuple[int, set[bytes]]] = collections.OrderedDict()
        self.num_bytes = 0

    def find(self, tokens: Sequence[int]) -> Found | None:
        """Returns the longest cached prefix of the prompt `tokens`, or None if no prefix is cached."""
        for _, key in reversed(self._keys(tokens)):
            if found := self._found.get(key):
                self._entries.move_to_end(id(found.prefix))
                return found
        return None

    def add(self, tokens: Sequence[int], prefix: decode_state.Prefix, row: int) -> None:
        """Adds a prefilled prompt, which is in row `row` of `prefix`; does nothing if `prefix` is larger than the cache."""
        if id(prefix) not in self._entries:
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((prefix.cache, prefix.experts)))
            if num_bytes > self._max_bytes:
                return
            while self.num_bytes + num_bytes > self._max_bytes:
                self._evict(next(iter(self._entries)))
            self._entries[id(prefix)] = num_bytes, set()
            self.num_bytes += num_bytes
        for num_tokens, key in self._keys(tokens):
            if (other := self._found.get(key)) and other.prefix is not prefix:
                _, keys = self._entries[id(other.prefix)]
                keys.discard(key)
                if not keys:
                    self._evict(id(other.prefix))
            self._found[key] = Found(num_tokens, prefix, row)
            self._entries[id(prefix)][1].add(key)

    def clear(self) -> None:
        """Removes all cached prompts."""
        self._found.clear()
        self._entries.clear()
        self.num_bytes = 0

    def _keys(self, tokens: Sequence[int]) -> list[tuple[int, bytes]]:
        """Returns (length, key) of each prefix of `tokens` that can be cached, shortest first."""
        data = np.asarray(tokens, "<i4")
        is_batched = len(data) <= self._chunk
        running = hashlib.blake2b(b"%d" % is_batched, digest_size=16)
        keys = []
        for start in range(0, len(data), self._chunk):
            end = min(start + self._chunk, len(data))
            running.update(data[start:end].tobytes())
            keys.append((end, running.digest()))
        return keys

    def _evict(self, owner: int) -> None:
        num_bytes, keys = self._entries.pop(owner)
        for key in keys:
            del self._found[key]
        self.num_bytes -= num_bytes
