"""Comparison of parameter trees."""

import jax
import numpy as np


def assert_same(tree, other):
    """Bitwise, types of containers included: NaN payloads and -0.0 count."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
