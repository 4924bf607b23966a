"""Comparison of parameter trees."""

import tempfile

import jax
import numpy as np

from sharding.weights import broadcast


def assert_same(tree, other):
    """Bitwise, types of containers included: NaN payloads and -0.0 count."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


def digest(tree) -> str:
    """The digest of the tree in the manifest that a publisher writes."""
    with tempfile.TemporaryDirectory() as root:
        return broadcast.publish(tree, 0, root).digest
