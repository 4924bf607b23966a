"""Batches of rows by grain: sources are shuffled anew in each epoch, mixed by weight, cut into batches, and prepared ahead.

Batch n is a function of the arguments alone, so a checkpoint needs no state of an iterator: its step is the number of the next batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grain

from rl.data import sources as sources_lib

AHEAD = 2  # batches that a thread prepares while the last one trains


def mix(
    sources: Sequence[sources_lib.Rows], weights: Sequence[float], size: int, seed: int
) -> grain.MapDataset[list[sources_lib.Row]]:
    """Returns the endless batches of `size` rows of some sources, with random access.

    Each source gets the part of the rows that its weight is of all weights. Without weights, the rows of all are shuffled together.
    """
    if weights and len(weights) != len(sources):
        found = f"warmup.weights has {len(weights)} numbers for {len(sources)} files of warmup.data"
        raise ValueError(f"{found}; give one for each, or none")
    parts = sources if weights else [sources_lib.join(sources)]
    shuffled = [grain.MapDataset.source(part).shuffle(seed=seed + i).repeat() for i, part in enumerate(parts)]
    mixed = grain.MapDataset.mix(shuffled, weights=list(weights)) if weights else shuffled[0]
    return mixed.batch(size, drop_remainder=True, batch_fn=list)


def in_order(batches: grain.MapDataset) -> Callable[[int], Any]:
    """Returns a function of a batch's number, from 0. A thread prepares the batches that follow; any other number begins there."""
    iterator, following = iter(batches.to_iter_dataset(grain.ReadOptions(1, prefetch_buffer_size=AHEAD))), 0

    def batch(number: int) -> Any:
        nonlocal following
        if number != following:
            iterator.set_state({"next_index": number})
        following = number + 1
        return next(iterator)

    return batch
