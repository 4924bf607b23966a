"""Token streams of any length -> one batch of fixed shape, by first-fit decreasing.

1. Streams are sorted by falling length (ties by their order, so that the result is a function of the input).
2. Each goes into the first row with room; a stream longer than a row is refused.
3. The number of rows is rounded up to a coarse grid and to a multiple of the batch shards, so that a run meets a
   handful of shapes, and compiles a handful of programs; the rows added are padding and train nothing.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from sharding import rules


@struct.dataclass
class TrainBatch:
    """One optimizer step's tokens, packed. B rows of T tokens; several streams share a row.

    tokens: int32 [B, T]; positions: int32, from 0 in each stream; segment_ids: int32, 1.. per stream in a row, 0 padding.
    loss_mask: float32, 1.0 where the token trains. behavior_logp, advantage, temperature: float32 per token.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    loss_mask: jax.Array
    behavior_logp: jax.Array
    advantage: jax.Array
    temperature: jax.Array


@dataclasses.dataclass(frozen=True)
class Stream:
    """One token stream on its way into a batch; arrays [T]."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logp: np.ndarray
    advantage: np.ndarray
    temperature: float


def pack(streams: Sequence[Stream], *, row_length: int, num_shards: int = 1) -> TrainBatch:
    """Packs streams into `[B, row_length]`, B a multiple of `num_shards`; ValueError if one does not fit a row."""
    rows: list[list[Stream]] = []
    room: list[int] = []
    for stream in sorted(streams, key=lambda s: -len(s.tokens)):
        length = len(stream.tokens)
        if length > row_length:
            raise ValueError(
                f"a token stream of {length} tokens does not fit a row of {row_length}; raise config.train.row_length"
            )
        row = next((i for i, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(row_length)
            row = len(rows) - 1
        rows[row].append(stream)
        room[row] -= length

    shape = (num_rows(len(rows), num_shards), row_length)
    batch = {
        "tokens": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.float32),
        "behavior_logp": np.zeros(shape, np.float32),
        "advantage": np.zeros(shape, np.float32),
        "temperature": np.ones(shape, np.float32),
    }
    for i, row in enumerate(rows):
        start = 0
        for segment, stream in enumerate(row, start=1):
            span = slice(start, start + len(stream.tokens))
            batch["tokens"][i, span] = stream.tokens
            batch["positions"][i, span] = np.arange(len(stream.tokens))
            batch["segment_ids"][i, span] = segment
            batch["loss_mask"][i, span] = stream.loss_mask
            batch["behavior_logp"][i, span] = stream.behavior_logp
            batch["advantage"][i, span] = stream.advantage
            batch["temperature"][i, span] = stream.temperature
            start = span.stop
    return TrainBatch(**batch)


def num_rows(needed: int, num_shards: int) -> int:
    """Rounds up to 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ... (at most a quarter of padding), then to shards."""
    needed = max(needed, 1)
    grain = max(1, 2 ** (needed.bit_length() - 3))
    return _ceil_to(_ceil_to(needed, grain), num_shards)


def place(batch: TrainBatch, mesh: jax.sharding.Mesh) -> TrainBatch:
    """Puts a host batch on the mesh, rows over the batch axes."""
    return jax.device_put(batch, rules.batch_sharding(mesh))


def _ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
