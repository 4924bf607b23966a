"""The prefill queue: requests whose prompts are not prefilled yet, and requests ready for a slot.

1. `add` appends a request. `next` prefills the oldest ones when none is ready: as many as one call takes of one length
   bucket. Equal prompts share a row, and a prompt in the prefix cache (prefix_cache.py) needs none.
2. A prompt longer than a chunk is prefilled chunk by chunk (`prefill_chunk`), one such prompt at a time, between decode calls.
3. New weights invalidate the prefix cache and a prompt that is partly prefilled (`set_weights`).

No thread and no clock of its own.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from inference.engine import decode_state, kv_cache
from inference.engine import engine as engine_lib
from inference.scheduler import prefix_cache
from inference.scheduler import sequence as sequence_lib
from models import transformer


@dataclasses.dataclass(eq=False)
class _LongPrompt:
    """A prompt that is prefilled chunk by chunk. `cache` and `experts` cover its first `num_done` tokens."""

    group: sequence_lib.SequenceGroup
    num_cached: int  # tokens found in the prefix cache
    cache: kv_cache.Cache | None
    num_done: int
    experts: tuple[jax.Array, ...]


class PrefillQueue:
    """The queue of requests with samples that are not in slots yet. Used by one thread; updates the scheduler's `stats`.

    The caller calls `set_weights` before any other method.
    """

    def __init__(self, engine: engine_lib.Engine, prefixes: prefix_cache.PrefixCache, stats: dict[str, float]):
        self._engine, self._prefixes, self._stats = engine, prefixes, stats
        self._waiting: collections.deque[sequence_lib.SequenceGroup] = collections.deque()
        self._ready: collections.deque[sequence_lib.SequenceGroup] = collections.deque()
        self._long: _LongPrompt | None = None
        self._num_weights = 0  # that were set so far

    def __bool__(self) -> bool:
        return bool(self._waiting or self._ready or self._long)

    def __iter__(self) -> Iterator[sequence_lib.SequenceGroup]:
        yield from (*self._ready, *self._waiting)
        if self._long is not None:
            yield self._long.group

    def add(self, group: sequence_lib.SequenceGroup) -> None:
        """Appends a new request to the queue."""
        self._waiting.append(group)

    def drop_done(self) -> None:
        """Removes requests whose future is done: cancelled or failed ones."""
        self._ready = collections.deque(group for group in self._ready if not group.future.done())
        self._waiting = collections.deque(group for group in self._waiting if not group.future.done())
        if self._long is not None and self._long.group.future.done():
            self._long = None

    def set_weights(self, params: transformer.Params, version: int) -> None:
        """Sets the weights for later prefills. Empties the prefix cache; a partly prefilled long prompt starts over."""
        self._params, self._version = params, version
        self._num_weights += 1
        self._prefixes.clear()
        self._restart_long()

    def release(self) -> None:
        """Frees the keys of prompts that no sample has yet, which are then prefilled again, and the prefix cache."""
        self._prefixes.clear()
        self._restart_long()
        without_slot = [group for group in self._ready if not group.num_started]
        for group in without_slot:
            group.drop_keys()
        self._ready = collections.deque(group for group in self._ready if group.num_started)
        self._waiting.extendleft(reversed(without_slot))

    def next(
        self, most: int, fits: Callable[[sequence_lib.SequenceGroup], bool] = lambda group: True
    ) -> sequence_lib.Sequence | None:
        """Returns the sample that gets the next free slot, or None if no prompt is ready; prefills prompts if necessary.

        Requests are served in order of arrival. One that already has `most` running samples gets a slot only if no other request
        is ready. Returns None, too, if the request whose turn it is does not satisfy `fits`.
        """
        while (group := next((g for g in self._ready if g.num_running < most), None)) is None and self._prefill():
            pass
        if group is None and not self._ready:
            return None
        group = group or self._ready[0]
        if not fits(group):
            return None
        if group.num_started + 1 == group.request.num_samples:
            self._ready.remove(group)
        return group.start_next(self._engine.tokenizer.text_stream() if group.request.stop_texts else None)

    def prefill_chunk(self) -> None:
        """Prefills the next chunk of the long prompt in progress; does nothing if no long prompt is in progress."""
        if self._long is None:
            return
        long, chunk = self._long, self._engine.config.prefill_chunk
        tokens, start = long.group.request.tokens, long.num_done
        padded = _pad([tokens[start : start + chunk]], 1, chunk)
        long.cache, experts = self._engine.prefill_chunk(self._params, padded, start, long.cache)
        long.experts += experts
        long.num_done = min(start + chunk, len(tokens))
        self._stats["prefill_chunks"] += 1
        if long.num_done == len(tokens):
            prefix = _one_prompt(tokens, long.cache, long.experts)
            self._prefixes.add(tokens, prefix, 0)
            self._make_ready(long.group, prefix, 0, long.num_cached)
            self._long = None

    def _restart_long(self) -> None:
        if self._long is not None:
            self._waiting.appendleft(self._long.group)
        self._long = None

    def _prefill(self) -> bool:
        """Prefills the oldest prompts of one length bucket; returns False if no request became ready."""
        config, P = self._engine.config, self._engine.config.prefill_batch
        bucket, rest = None, collections.deque()
        rows: dict[tuple[int, ...], list[sequence_lib.SequenceGroup]] = {}  # prompt -> the requests that share its row
        num_ready = len(self._ready)
        for at, group in enumerate(self._waiting):
            tokens = tuple(group.request.tokens)
            is_long = len(tokens) > config.prefill_chunk
            if len(rows) == P or at >= 4 * P or (is_long and self._long):  # the queue may be thousands long
                rest.append(group)
            elif is_long:
                self._start_long(group)
            elif found := self._prefixes.find(tokens):
                self._make_ready(group, found.prefix, found.row, found.num_tokens)
            elif tokens in rows:
                rows[tokens].append(group)
            elif bucket in (None, own := config.bucket(len(tokens))):
                bucket, rows[tokens] = own, [group]
            else:
                rest.append(group)
        if bucket is not None:
            length_P = np.ones((P,), np.int32)
            length_P[: len(rows)] = [len(tokens) for tokens in rows]
            prefix = self._engine.prefill_batch(self._params, _pad(list(rows), P, bucket), length_P)
            self._stats["prefill_calls"] += 1
            for row, (tokens, groups) in enumerate(rows.items()):
                self._prefixes.add(tokens, prefix, row)
                for group in groups:
                    self._make_ready(group, prefix, row, 0 if group is groups[0] else len(tokens))
        self._waiting = rest  # last: if the engine raises, the requests are still here, and are failed with all others
        return len(self._ready) > num_ready

    def _start_long(self, group: sequence_lib.SequenceGroup) -> None:
        """Starts the prefill of a prompt of several chunks after its longest cached prefix; a fully cached one becomes ready."""
        tokens = group.request.tokens
        found = self._prefixes.find(tokens)
        num_done = found.num_tokens if found else 0
        if found is None:
            self._long = _LongPrompt(group, 0, None, 0, ())
        elif num_done == len(tokens):  # perhaps cached as the beginning of a longer prompt
            self._make_ready(group, _one_prompt(tokens, found.prefix.cache, found.prefix.experts), 0, num_done)
        else:  # a copy, because the next chunks are written into it while others may find the original
            cache = self._engine.copy_cache(found.prefix.cache)
            num_chunks = num_done // self._engine.config.prefill_chunk
            self._long = _LongPrompt(group, num_done, cache, num_done, found.prefix.experts[:num_chunks])

    def _make_ready(
        self, group: sequence_lib.SequenceGroup, prefix: decode_state.Prefix, row: int, num_cached: int
    ) -> None:
        group.prefix, group.row, group.prompt_version, group.num_cached = prefix, row, self._version, num_cached
        tokens = group.request.tokens
        group.prompt_key = self._num_weights, tuple(tokens)
        self._stats["prefix_queries"] += len(tokens)
        self._stats["prefix_hits"] += num_cached
        self._stats["prompt_tokens"] += len(tokens) - num_cached
        if group.request.prompt_logprobs:
            tokens_1T = _pad([tokens], 1, self._engine.config.bucket(len(tokens)))
            group.prompt_logprobs = self._engine.prompt_logprobs(self._params, tokens_1T)[: len(tokens)].tolist()
        self._ready.append(group)


def _one_prompt(tokens: Sequence[int], cache: kv_cache.Cache, experts: tuple[jax.Array, ...]) -> decode_state.Prefix:
    return decode_state.Prefix(cache, np.array([tokens[-1]], np.int32), np.array([len(tokens)], np.int32), experts)


def _pad(prompts: Sequence[Sequence[int]], num_rows: int, length: int) -> np.ndarray:
    """Returns prompts as int32 [rows, length], with zeros after the end of each."""
    tokens_PT = np.zeros((num_rows, length), np.int32)
    for row, tokens in enumerate(prompts):
        tokens_PT[row, : len(tokens)] = tokens
    return tokens_PT
