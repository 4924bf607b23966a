"""The prefill queue: requests whose prompts are not prefilled yet, and requests ready for a slot.

1. `add` appends a request. `next` prefills the oldest ones when none is ready: as many as one call takes of one length
   bucket. Equal prompts share a row, and a prompt in the prefix cache (prefix_cache.py) needs none.
2. A prompt longer than a chunk, or one that goes on from a cached sequence, is prefilled chunk by chunk. Between two decode calls, so
   many chunks of one prompt after the other run as have `BUDGET` times the tokens of a chunk (`begin_step`).
3. A sequence that ended is added to the prefix cache for the next turn of its conversation (`keep`).
4. New weights invalidate the prefix cache, except sequences of the version before, and a prompt that is partly prefilled (`set_weights`).

No thread and no clock of its own.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from inference.adapters import adapter_set
from inference.engine import decode_state, kv_cache
from inference.engine import engine as engine_lib
from inference.scheduler import prefix_cache
from inference.scheduler import sequence as sequence_lib
from models import routed_experts, transformer

BUDGET = 4  # chunks of prompts between two decode calls, at most


@dataclasses.dataclass(eq=False)
class _LongPrompt:
    """A prompt that is prefilled chunk by chunk. `cache` and `experts` cover its first `num_done` tokens.

    `start` is the part that the prefix cache had; its `num_prefilled` is that of the whole prompt.
    """

    group: sequence_lib.SequenceGroup
    start: prefix_cache.Found
    is_shared: bool  # True if the cache is that of others, and must not change
    cache: kv_cache.Cache | None
    num_done: int
    experts: tuple[decode_state.Array, ...]
    sizes: list[int]  # of the chunks that are left


class PrefillQueue:
    """The queue of requests with samples that are not in slots yet. Used by one thread; updates the scheduler's `stats`.

    The caller calls `set_weights` before any other method.
    """

    def __init__(self, engine: engine_lib.Engine, prefixes: prefix_cache.PrefixCache, stats: dict[str, float]):
        self._engine, self._prefixes, self._stats = engine, prefixes, stats
        self._waiting: collections.deque[sequence_lib.SequenceGroup] = collections.deque()
        self._ready: collections.deque[sequence_lib.SequenceGroup] = collections.deque()
        self._long: _LongPrompt | None = None
        self._budget = 0  # tokens of chunks that may run before the next decode call
        self._num_weights = 0  # that were set so far
        self._version, self._epoch = -1, -1
        self._oldest = 0, 0  # weights, by number and version, of which keys may be reused

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

    def set_weights(self, params: transformer.Params, version: int, epoch: int) -> None:
        """Sets the weights for later prefills. Empties the prefix cache; a partly prefilled long prompt starts over.

        Sequences of the version before stay in the cache if the new one is a later version of the same epoch.
        """
        is_next = epoch == self._epoch and version > self._version
        self._oldest = (self._num_weights, self._version) if is_next else (self._num_weights + 1, version)
        self._prefixes.clear(self._oldest[1] if is_next else math.inf)
        self._params, self._version, self._epoch = params, version, epoch
        self._num_weights += 1
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
        self, most: int, fits: Callable[[sequence_lib.SequenceGroup], bool] | None = None
    ) -> sequence_lib.Sample | None:
        """Returns the sample that gets the next free slot, or None if no prompt is ready; prefills prompts if necessary.

        Requests are served in order of arrival. One that already has `most` running samples gets a slot only if no other request
        is ready. Returns None, too, if the request whose turn it is does not satisfy `fits`, unless that is None.
        """
        while (group := next((g for g in self._ready if g.num_running < most), None)) is None and self._prefill():
            pass
        if group is None and not self._ready:
            return None
        group = group or self._ready[0]
        if fits is not None and not fits(group):
            return None
        if group.num_started + 1 == group.request.num_samples:
            self._ready.remove(group)
        return group.start_next(self._engine.tokenizer.text_stream() if group.request.stop_texts else None)

    def begin_step(self) -> None:
        """Allows further chunks of prompts, as many as `BUDGET`; prefills those of the prompt in progress, if there is one."""
        self._budget = BUDGET * self._engine.config.prefill_chunk
        self._prefill_chunks()

    def keep(self, slot: int, sequence: sequence_lib.Sample) -> None:
        """Adds a sequence that ended in `slot` to the prefix cache; does nothing if the cache cannot use it.

        Kept are sequences that may be continued: those of requests for one sample, and those of episodes, which allow keys of older
        versions. Other requests of several samples are groups of rollouts, which end here.
        """
        group, config = sequence.group, self._engine.config
        # Under older weights, the same version number may have named another policy.
        is_current = group.prompt_key is not None and group.prompt_key[0] >= self._oldest[0]
        has_experts = not config.routed_experts or group.request.routed_experts
        goes_on = group.request.num_samples == 1 or group.request.oldest_prefix_version >= 0
        is_wanted = is_current and goes_on and has_experts
        if not (is_wanted and self._engine.can_read_slots) or (runs := sequence.runs())[0][1] < self._oldest[1]:
            return
        experts = ()
        if config.routed_experts:
            prompt = group.prefix.experts, group.row, len(group.request.tokens)
            experts = (routed_experts.of_sequence(*prompt, sequence.experts)[None],)
        tokens = [*group.request.tokens, *sequence.completion.tokens][:-1]  # the last one was not run
        self._prefixes.add_sequence(tokens, slot, group.num_prefilled, runs, experts, group.request.adapter)

    def _prefill_chunks(self) -> None:
        """Prefills chunks of the prompt in progress, until it is ready or the budget is spent."""
        while self._long is not None and self._budget > 0:
            long, size = self._long, self._long.sizes.pop(0)
            tokens, start, adapter = long.group.request.tokens, long.num_done, long.group.request.adapter
            padded = _pad([tokens[start : start + size]], 1, size)
            params = self._engine.choose(self._params, [adapter])
            long.cache, experts = self._engine.prefill_chunk(
                params, padded, start, long.cache, is_shared=long.is_shared
            )
            long.experts, long.is_shared = long.experts + experts, False
            long.num_done = min(start + size, len(tokens))
            self._budget -= size
            self._stats["prefill_chunks"] += 1
            if not long.sizes:
                prefix = prefix_cache.of_one_prompt(tokens, long.cache, long.experts)
                if long.start.num_prefilled == len(tokens):
                    self._prefixes.add(tokens, prefix, 0, adapter)
                self._make_ready(long.group, dataclasses.replace(long.start, prefix=prefix, row=0))
                self._long = None

    def _restart_long(self) -> None:
        if self._long is not None:
            self._waiting.appendleft(self._long.group)
        self._long = None

    def _prefill(self) -> bool:
        """Prefills the oldest prompts of one length bucket; returns False if no request became ready."""
        config, P = self._engine.config, self._engine.config.prefill_batch
        bucket, rest = None, collections.deque()
        # (adapter, prompt) -> the requests that share a row
        rows: dict[tuple[int, tuple[int, ...]], list[sequence_lib.SequenceGroup]] = {}
        num_ready = len(self._ready)
        self._prefill_chunks()
        for at, group in enumerate(self._waiting):
            adapter, tokens = prompt = group.request.adapter, tuple(group.request.tokens)
            is_long = len(tokens) > config.prefill_chunk
            if len(rows) == P or at >= 4 * P or (is_long and self._long):  # the queue may be thousands long
                rest.append(group)
                continue
            oldest = max(group.request.policy_version, group.request.oldest_prefix_version)
            found = self._prefixes.find(tokens, self._version if oldest < 0 else oldest, adapter)
            if is_long or (found and not found.is_prompt):
                if self._long:
                    rest.append(group)
                else:
                    self._start_long(group, found)
            elif found:
                self._make_ready(group, found)
            elif prompt in rows:
                rows[prompt].append(group)
            elif bucket in (None, own := config.bucket(len(tokens))):
                bucket, rows[prompt] = own, [group]
            else:
                rest.append(group)
        if bucket is not None:
            size = next(size for size in self._engine.prefill_sizes if size >= len(rows))
            length_P = np.ones((size,), np.int32)
            length_P[: len(rows)] = [len(tokens) for _, tokens in rows]
            adapters = [*(adapter for adapter, _ in rows), *[adapter_set.NONE] * (size - len(rows))]
            params = self._engine.choose(self._params, adapters)
            tokens_PT = _pad([tokens for _, tokens in rows], size, bucket)
            prefix = self._engine.prefill_batch(params, tokens_PT, length_P)
            self._stats["prefill_calls"] += 1
            for row, ((adapter, tokens), groups) in enumerate(rows.items()):
                self._prefixes.add(tokens, prefix, row, adapter)
                for group in groups:
                    num_shared = 0 if group is groups[0] else len(tokens)
                    self._make_ready(group, prefix_cache.Found(num_shared, prefix, row, len(tokens), ()))
        self._waiting = rest  # last: if the engine raises, the requests are still here, and are failed with all others
        self._prefill_chunks()
        return len(self._ready) > num_ready

    def _start_long(self, group: sequence_lib.SequenceGroup, found: prefix_cache.Found | None) -> None:
        """Starts the prefill of a prompt in chunks after its longest cached prefix.

        A wholly cached prompt becomes ready if the version in use computed its last part; else that part is computed again.
        """
        tokens, config = group.request.tokens, self._engine.config
        found = found or prefix_cache.Found(0, prefix_cache.of_one_prompt(tokens, (), ()), 0, 0, ())
        num_done = found.num_tokens
        found = dataclasses.replace(found, row=0, num_prefilled=len(tokens) if found.is_prompt else found.num_prefilled)
        is_current = not found.runs or found.runs[-1][1] == self._version
        if num_done == len(tokens) and is_current:  # perhaps cached as the beginning of a longer prompt
            prefix = prefix_cache.of_one_prompt(tokens, found.prefix.cache, found.prefix.experts)
            self._make_ready(group, dataclasses.replace(found, prefix=prefix))
            return
        # A padded chunk needs room, too, and the version in use computes the last keys.
        while num_done == len(tokens) or num_done + sum(config.chunks(num_done, len(tokens))) > config.capacity:
            num_done -= prefix_cache.BLOCK
        start = dataclasses.replace(found, num_tokens=num_done, runs=prefix_cache.cut_runs(found.runs, num_done))
        cache, experts = (found.prefix.cache if num_done else None), _first(found.prefix.experts, num_done)
        self._long = _LongPrompt(group, start, True, cache, num_done, experts, config.chunks(num_done, len(tokens)))

    def _make_ready(self, group: sequence_lib.SequenceGroup, found: prefix_cache.Found) -> None:
        """Makes a request ready with its prompt in `found`, of which `num_tokens` were computed for others before."""
        group.prefix, group.row, group.prompt_version = found.prefix, found.row, self._version
        tokens, num_cached = group.request.tokens, found.num_tokens
        group.num_cached, group.num_prefilled = num_cached, found.num_prefilled
        group.prefix_runs = tuple(run for run in found.runs if run[1] != self._version)
        group.prompt_key = self._num_weights, group.request.adapter, tuple(tokens)
        self._stats["prefix_queries"] += len(tokens)
        self._stats["prefix_hits"] += num_cached
        self._stats["prompt_tokens"] += len(tokens) - num_cached
        if group.request.prompt_logprobs:
            tokens_1T = _pad([tokens], 1, self._engine.config.bucket(len(tokens)))
            params = self._engine.choose(self._params, [group.request.adapter])
            group.prompt_logprobs = self._engine.prompt_logprobs(params, tokens_1T)[: len(tokens)].tolist()
        self._ready.append(group)


def _first(pieces: Sequence[decode_state.Array], num_tokens: int) -> tuple[decode_state.Array, ...]:
    """Returns the pieces of an array, [1, .., L, X] each, that cover the first `num_tokens` tokens."""
    out, left = [], num_tokens
    for piece in pieces:
        if left > 0:
            out.append(piece if piece.shape[1] <= left else np.asarray(piece)[:, :left])
            left -= piece.shape[1]
    return tuple(out)


def _pad(prompts: Sequence[Sequence[int]], num_rows: int, length: int) -> np.ndarray:
    """Returns prompts as int32 [rows, length], with zeros after the end of each."""
    tokens_PT = np.zeros((num_rows, length), np.int32)
    for row, tokens in enumerate(prompts):
        tokens_PT[row, : len(tokens)] = tokens
    return tokens_PT
