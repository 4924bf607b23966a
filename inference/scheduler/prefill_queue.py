"""Prompts that wait for their keys, and requests whose prompts have them.

1. `add` puts a request in line. `prefill` takes the oldest, as many as one call holds of one length bucket; equal prompts share a
   row, and a prompt whose keys are kept (prefix_cache.py) needs none.
2. A prompt longer than a chunk is prefilled chunk by chunk (`extend`), one such prompt at a time, between calls for others.
3. A request whose prompt has its keys is ready: `next` says whose sample gets the next free slot.
4. New weights make kept keys worthless, and those of a prompt that is half done (`restart`).
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from inference.engine import decode_state as state_lib
from inference.engine import engine as engine_lib
from inference.scheduler import prefix_cache
from inference.scheduler import sequence as sequence_lib


@dataclasses.dataclass(eq=False)
class _Long:
    """A prompt that is prefilled chunk by chunk; `cache` holds its first `num_done` tokens, `experts` where they went."""

    job: sequence_lib.SequenceGroup
    cache: object
    num_done: int
    experts: tuple


class Prompts:
    """Used by the scheduler's thread; counts in its `stats`."""

    def __init__(self, engine: engine_lib.Engine, prefix_cache_bytes: int, stats: collections.Counter):
        self._engine, self._stats = engine, stats
        self._waiting: collections.deque[sequence_lib.SequenceGroup] = collections.deque()
        self._ready: collections.deque[sequence_lib.SequenceGroup] = collections.deque()
        self._long: _Long | None = None
        self._kept = prefix_cache.PrefixCache(engine.config.prefill_chunk, prefix_cache_bytes)

    def __bool__(self) -> bool:
        """Whether any request has samples that are not in slots yet."""
        return bool(self._waiting or self._ready or self._long)

    def __iter__(self) -> Iterator[sequence_lib.SequenceGroup]:
        yield from (*self._ready, *self._waiting)
        if self._long is not None:
            yield self._long.job

    @property
    def kept_bytes(self) -> int:
        return self._kept.num_bytes

    def add(self, job: sequence_lib.SequenceGroup) -> None:
        self._waiting.append(job)

    def drop_done(self) -> None:
        """Forgets requests that were cancelled, or failed."""
        self._ready = collections.deque(job for job in self._ready if not job.future.done())
        self._waiting = collections.deque(job for job in self._waiting if not job.future.done())
        if self._long is not None and self._long.job.future.done():
            self._long = None

    def clear(self) -> None:
        self._waiting.clear()
        self._ready.clear()
        self._long = None

    def forget_kept(self) -> None:
        self._kept.clear()

    def restart(self) -> None:
        """There are other weights: what is kept is worthless, and a prompt that is half done begins anew."""
        self._kept.clear()
        if self._long is not None:
            self._waiting.appendleft(self._long.job)
            self._long = None

    def next(self, params, version: int, most: int) -> sequence_lib.SequenceGroup | None:
        """The request whose sample gets the next free slot: first come, but none holds `most` while others wait."""
        while True:
            for job in self._ready:
                if job.num_running < most:
                    return job
            if not self._prefill(params, version):
                return self._ready[0] if self._ready else None

    def started(self, job: sequence_lib.SequenceGroup) -> None:
        """All samples of a ready request are in slots."""
        self._ready.remove(job)

    def extend(self, params, version: int) -> None:
        """Runs the next chunk of the long prompt under way."""
        if self._long is None:
            return
        long, chunk = self._long, self._engine.config.prefill_chunk
        tokens = long.job.request.tokens
        tokens_1T = np.zeros((1, chunk), np.int32)
        piece = tokens[long.num_done : long.num_done + chunk]
        tokens_1T[0, : len(piece)] = piece
        long.cache, experts = self._engine.prefill_chunk(params, tokens_1T, long.num_done, long.cache)
        long.experts += experts
        long.num_done += len(piece)
        self._stats["prefill_chunks"] += 1
        if long.num_done == len(tokens):
            prefix = _whole(tokens, long.cache, long.experts)
            self._kept.keep(tokens, version, prefix, 0)
            self._make_ready(long.job, params, version, prefix, 0)
            self._long = None

    def _prefill(self, params, version: int) -> bool:
        """Prefills the next waiting prompts of one length bucket, oldest first; False if there is none to prefill."""
        P, chunk = self._engine.config.prefill_batch, self._engine.config.prefill_chunk
        bucket, rows, rest = None, {}, collections.deque()  # rows: prompt -> the jobs that share its row
        num_ready = len(self._ready)
        for at, job in enumerate(self._waiting):
            tokens = tuple(job.request.tokens)
            if len(rows) == P or at >= 4 * P:  # the queue may be thousands long
                rest.append(job)
            elif len(tokens) > chunk:
                if self._long is not None:
                    rest.append(job)
                else:
                    self._open_long(job, params, version)
            elif found := self._kept.find(tokens, version):
                self._count(job, found.num_tokens)
                self._make_ready(job, params, version, found.prefix, found.row)
            elif tokens in rows:
                rows[tokens].append(job)
            elif self._engine.bucket(len(tokens)) == (bucket or self._engine.bucket(len(tokens))):
                bucket = self._engine.bucket(len(tokens))
                rows[tokens] = [job]
            else:
                rest.append(job)
        if rows:
            tokens_PT, length_P = np.zeros((P, bucket), np.int32), np.ones((P,), np.int32)
            for row, tokens in enumerate(rows):
                length_P[row] = len(tokens)
                tokens_PT[row, : len(tokens)] = tokens
            prefix = self._engine.prefill_batch(params, tokens_PT, length_P)
            self._stats["prefill_calls"] += 1
            for row, (tokens, jobs) in enumerate(rows.items()):
                self._kept.keep(tokens, version, prefix, row)
                for job in jobs:
                    self._count(job, 0 if job is jobs[0] else len(tokens))
                    self._make_ready(job, params, version, prefix, row)
        self._waiting = rest  # not before: should the engine raise, whoever fails all requests finds them there
        return len(self._ready) > num_ready

    def _open_long(self, job: sequence_lib.SequenceGroup, params, version: int) -> None:
        """Begins a prompt of several chunks, behind what is kept of it."""
        found = self._kept.find(job.request.tokens, version)
        num_done = found.num_tokens if found else 0
        self._count(job, num_done)
        if num_done == len(job.request.tokens):
            # Maybe kept of a longer prompt.
            prefix = _whole(job.request.tokens, found.prefix.cache, found.prefix.experts)
            self._make_ready(job, params, version, prefix, 0)
        else:
            # A copy: the chunks that follow are written into it, and others may find what is kept.
            cache = jax.tree.map(jax.numpy.copy, found.prefix.cache) if found else None
            num_chunks = num_done // self._engine.config.prefill_chunk
            self._long = _Long(job, cache, num_done, found.prefix.experts[:num_chunks] if found else ())

    def _count(self, job: sequence_lib.SequenceGroup, num_reused: int) -> None:
        num_tokens, job.num_cached = len(job.request.tokens), num_reused
        self._stats["prefix_queries"] += num_tokens
        self._stats["prefix_hits"] += num_reused
        self._stats["prompt_tokens"] += num_tokens - num_reused

    def _make_ready(
        self, job: sequence_lib.SequenceGroup, params, version: int, prefix: state_lib.Prefix, row: int
    ) -> None:
        job.prefix, job.row, job.prompt_version = prefix, row, version
        if job.request.prompt_logprobs:
            tokens = job.request.tokens
            tokens_1T = np.zeros((1, self._engine.bucket(len(tokens))), np.int32)
            tokens_1T[0, : len(tokens)] = tokens
            job.prompt_logprobs = self._engine.prompt_logprobs(params, tokens_1T)[: len(tokens)].tolist()
        self._ready.append(job)


def _whole(tokens: Sequence[int], cache, experts: tuple) -> state_lib.Prefix:
    """The prefix of one prompt whose keys `cache` holds."""
    return state_lib.Prefix(cache, np.array([tokens[-1]], np.int32), np.array([len(tokens)], np.int32), experts)
