"""Matrices in int8, for inference: half the bytes of bfloat16.

1. A matrix is divided by a scale per output channel (symmetric: its largest magnitude there becomes 127) and rounded, so
   entries are off by at most half a scale. A row of the embedding is an output channel of the head, with its own scale.
2. Each product of the model accepts a `Quantized` matrix: it multiplies with the integers, in the dtype of the activations,
   which represents them exactly, and scales the result.

Norms, biases, routers and the up-projections that latent attention absorbs are not quantized.

Letters: V vocabulary, D model, A rows of an expert's matmul.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from sharding.mesh import rules

# Last part of a parameter's name -> number of dims, after those of layers and experts, that a product sums over.
NUM_INPUT_DIMS = dict.fromkeys(("lm_head", "q", "k", "v", "gate", "up", "down"), 1) | {"o": 2}
NUM_INPUT_DIMS |= dict.fromkeys(("kv_down", "k_rope", "q_down", "q_up"), 1)
EMBEDDING = "embed"
LARGEST = 127


@struct.dataclass
class Quantized:
    """A weight matrix quantized to int8: `values`, and a float32 `scale` per output channel.

    `scale` has the dims of `values`, with size 1 for dims that a product sums over. Both may also be `ParamSpec`s or shardings.
    """

    values: Any  # int8
    scale: Any  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.values.shape

    @property
    def T(self) -> "Quantized":
        """The transposed matrix."""
        return Quantized(self.values.T, self.scale.T)

    def astype(self, dtype: jax.typing.DTypeLike) -> "Quantized":
        """Returns this matrix unchanged: products convert its integers to the dtype of the activations."""
        del dtype
        return self


def specs(tree: dict) -> dict:
    """Returns `tree`, a model's tree of `ParamSpec`, with each matrix that int8 inference quantizes replaced by a `Quantized` pair of specs."""

    def of(path, spec):
        name, axes = path[-1].key, spec.logical_axes
        if name == EMBEDDING:
            dims = {axes.index("model")}
        else:
            first = sum(axis in ("layers", "experts") for axis in axes)
            dims = set(range(first, first + NUM_INPUT_DIMS.get(name, 0)))
        if not dims:
            return spec

        def shrunk(values, one):
            return tuple(one if dim in dims else value for dim, value in enumerate(values))

        return Quantized(
            rules.ParamSpec(spec.shape, "int8", axes, _not_drawn),
            rules.ParamSpec(shrunk(spec.shape, 1), "float32", shrunk(axes, "norm"), _not_drawn),
        )

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=rules.is_spec)


def _not_drawn(key, shape, dtype):
    raise TypeError("int8 parameters cannot be drawn at random; load a checkpoint and quantize it")


def is_quantized(leaf: object) -> bool:
    """Returns True for a `Quantized` matrix."""
    return isinstance(leaf, Quantized)


def quantize(weights: jax.Array, scale_shape: tuple[int, ...]) -> Quantized:
    """Returns the matrix `weights` quantized to int8. Dims of size 1 in `scale_shape` are those a product sums over."""
    dims = tuple(dim for dim, size in enumerate(scale_shape) if size == 1)
    weights = weights.astype(jnp.float32)
    top = jnp.abs(weights).max(axis=dims, keepdims=True)
    scale = jnp.where(top > 0, top / LARGEST, 1.0)
    values = jnp.clip(jnp.round(weights / jnp.broadcast_to(scale, weights.shape)), -LARGEST, LARGEST)
    return Quantized(values.astype(jnp.int8), scale)


def dense(kernel: jax.Array | Quantized, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns a `Quantized` matrix as a plain array of `dtype`, and any other array unchanged."""
    if not isinstance(kernel, Quantized):
        return kernel
    return (kernel.values.astype(jnp.float32) * jnp.broadcast_to(kernel.scale, kernel.shape)).astype(dtype)


def scaled(product: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `product`, a matmul with (or rows of) the integers of a quantized matrix, times the scales of its channels."""
    scale = scale.reshape((1,) * (product.ndim - scale.ndim) + scale.shape)
    return (product.astype(jnp.float32) * jnp.broadcast_to(scale, product.shape)).astype(product.dtype)
