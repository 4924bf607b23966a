"""Arrays handed from one mesh to another: equal to the cast original, where the target is, and alive after a donation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding.mesh import mesh as mesh_lib

TREE = {"w": np.arange(64, dtype=np.float32).reshape(8, 8) / 7, "n": np.arange(8, dtype=np.int32)}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_have_the_targets_dtype_and_sharding(apart, dtype):
    devices = jax.devices()
    learner = mesh_lib.create({"fsdp": -1}, devices[:4] if apart else devices)
    engine = mesh_lib.create({"data": -1, "tensor": 2}, devices[4:] if apart else devices[::-1])
    tree = jax.device_put(TREE, NamedSharding(learner, PartitionSpec("fsdp")))
    shardings = {"w": NamedSharding(engine, PartitionSpec(None, "tensor")), "n": NamedSharding(engine, PartitionSpec())}
    kinds = {"w": dtype, "n": "int32"}
    targets = {name: jax.ShapeDtypeStruct(TREE[name].shape, kinds[name], sharding=shardings[name]) for name in TREE}
    placed = mesh_lib.hand_over(tree, targets)
    for name, array in placed.items():
        assert (array.dtype, array.sharding) == (jnp.dtype(kinds[name]), shardings[name])
        np.testing.assert_array_equal(array, TREE[name].astype(array.dtype))


def test_a_donated_original_leaves_the_copy_alive():
    """The copy could be the original itself, on one device."""
    tree = jax.device_put(TREE, NamedSharding(mesh_lib.create({}, jax.devices()[:1]), PartitionSpec()))
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    placed = mesh_lib.hand_over(tree, targets)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(tree)
    assert tree["w"].is_deleted()
    np.testing.assert_array_equal(placed["w"], TREE["w"])
