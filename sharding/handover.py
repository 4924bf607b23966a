"""Hands arrays from the learner's mesh to an engine on devices of this process: from device to device, never through files.

One leaf after another, so that besides both trees at most one leaf is in memory. Over several hosts a leaf is first gathered by all
of them, since each has an engine of its own and no part of the arrays of others.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def place(tree: Any, targets: Any) -> Any:
    """Returns copies of the arrays in `tree` with the dtypes and shardings of `targets`, a tree of `ShapeDtypeStruct`. Blocks.

    The copies share no memory with `tree`, whose arrays a train step may donate. All hosts of `tree` must call it together.
    """
    return jax.tree.map(_place, tree, targets)


def _place(leaf: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    if leaf.dtype != target.dtype:
        leaf = leaf.astype(target.dtype)
    if not leaf.is_fully_addressable:
        leaf = _gathered(leaf)
    return jax.block_until_ready(jax.device_put(leaf, target.sharding, may_alias=False))


def _gathered(leaf: jax.Array) -> jax.Array:
    """Returns an array of all hosts as an array of this process, whole on each of its devices that `leaf` is on."""
    devices = sorted(leaf.sharding.device_set, key=lambda device: device.id)
    everywhere = jax.sharding.Mesh(np.array(devices), ("device",))
    whole = jax.device_put(leaf, NamedSharding(everywhere, PartitionSpec()))
    parts = [shard.data for shard in whole.addressable_shards]
    own = jax.sharding.Mesh(np.array([part.device for part in parts]), ("device",))
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(own, PartitionSpec()), parts)
