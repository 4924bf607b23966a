"""Moves a packed batch from the first host to the devices of all hosts.

1. Only the first host has the rollouts, and packs them.
2. Each other host is sent the rows that its devices need, of the micro-batches in use, and fills the rest with empty rows.
3. If the rollouts are in another process (rl/swarm/orchestrator/remote), it packs them, and each host `fetch`es its rows from there.
4. Every host puts its rows on its devices; together these are the global arrays that the train step takes.

So only hosts that compute with a token receive it. A collective broadcast would send the whole batch to every host and
through the memory of every device (9.7 GB in configs/intellect3.py).
"""

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rl.learning.batch import packing
from sharding.system.multihost import hosts as hosts_lib


def place(
    trees: Sequence[packing.Tree] | None, layout: packing.Layout, mesh: jax.sharding.Mesh, hosts: hosts_lib.Hosts
) -> packing.TrainBatch:
    """Packs host 0's trees (None elsewhere), sends every host its rows, and returns global arrays on `mesh`. All hosts must call it."""
    if hosts.is_first:
        assert trees is not None
        batch = packing.pack(trees, layout)
        header = {"num_micro_batches": int(batch.num_micro_batches)}
        hosts.scatter(lambda host: (header, cut(batch, layout, regions(layout, mesh, hosts.processes[host]))))
        return packing.place(batch, mesh)
    header, data = hosts.receive()
    return assemble(header["num_micro_batches"], data, layout, mesh)


def fetch(
    num_micro_batches: int | None,
    read: Callable[[list[tuple[slice, slice]]], bytes],
    layout: packing.Layout,
    mesh: jax.sharding.Mesh,
    hosts: hosts_lib.Hosts,
) -> packing.TrainBatch:
    """Reads this host's rows of a batch that another process packed; returns global arrays on `mesh`. All hosts must call it.

    Only host 0 knows the number of micro-batches. `read(regions)` returns the bytes of `cut`.
    """
    used = hosts.broadcast(num_micro_batches)
    return assemble(used, read(regions(layout, mesh, jax.process_index())), layout, mesh)


def cut(batch: packing.TrainBatch, layout: packing.Layout, regions: Sequence[tuple[slice, slice]]) -> list[np.ndarray]:
    """Returns the (rows, columns) blocks of each array of a packed batch, of the micro-batches in use."""
    used = int(batch.num_micro_batches)
    arrays = (getattr(batch, name)[:used] for name in packing.empty_row(layout))
    return [np.ascontiguousarray(array[:, *region]) for array in arrays for region in regions]


def assemble(used: int, data: bytes | bytearray, layout, mesh) -> packing.TrainBatch:
    """Returns the global arrays of a batch with `used` micro-batches from the bytes of this host's rows, as `cut` made them."""
    own, offset, arrays = regions(layout, mesh, jax.process_index()), 0, {}
    for name, row in packing.empty_row(layout).items():
        shape, blocks = (layout.num_micro_batches, layout.rows, *row.shape), {}
        for rows, columns in own:
            size = rows.stop - rows.start, columns.stop - columns.start, *row.shape[1:]
            sent = np.frombuffer(data, row.dtype, used * math.prod(size), offset).reshape(used, *size)
            idle = np.broadcast_to(row[columns], (shape[0] - used, *size))
            blocks[rows.start, columns.start] = np.concatenate([sent, idle])
            offset += sent.nbytes
        sharding = packing.sharding(mesh, len(shape))
        arrays[name] = jax.make_array_from_callback(shape, sharding, lambda index, b=blocks: b[_corner(index)])
    assert offset == len(data), (offset, len(data))
    count = jax.make_array_from_callback((), packing.sharding(mesh, 0), lambda _: np.int32(used))
    return packing.TrainBatch(**arrays, num_micro_batches=count)


def _corner(index) -> tuple[int, int]:
    return index[1].start or 0, index[2].start or 0


def regions(layout: packing.Layout, mesh: jax.sharding.Mesh, process: int) -> list[tuple[slice, slice]]:
    """Returns the (rows, columns) blocks of a batch that one process's devices need, each once, in the same order on every host."""
    shape = layout.num_micro_batches, layout.rows, layout.row_length
    indices = packing.sharding(mesh, 3).devices_indices_map(shape)
    own = [index[1:] for device, index in indices.items() if device.process_index == process]
    spans = {tuple(span.indices(size)[:2] for span, size in zip(index, shape[1:], strict=True)) for index in own}
    return [(slice(*rows), slice(*columns)) for rows, columns in sorted(spans)]
