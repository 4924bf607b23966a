"""Matrices in int8: half the bytes of bfloat16, for who only runs the model.

1. A matrix is divided by a scale per output channel (symmetric: its largest magnitude there becomes 127) and rounded, so that
   no entry is off by more than half a scale. A row of the embedding is an output channel of the head, and has its own.
2. Wherever the model multiplies with a matrix it may be given a `Quantized` one: the product is taken with the integers, in
   the dtype of the activations, which holds them exactly, and scaled after.

Norms, biases, routers and the up-projections that latent attention absorbs stay as they are.

Letters: V vocabulary, D model, A rows of an expert's matmul.
"""

import jax
import jax.numpy as jnp
from flax import struct

from sharding import rules

# Parameters by the last part of their name -> how many dims, behind those of layers and experts, are summed over.
NUM_INPUT_DIMS = dict.fromkeys(("lm_head", "q", "k", "v", "gate", "up", "down"), 1) | {"o": 2}
NUM_INPUT_DIMS |= dict.fromkeys(("kv_down", "k_rope", "q_down", "q_up"), 1)
EMBEDDING = "embed"
LARGEST = 127


@struct.dataclass
class Quantized:
    """A matrix; `scale` has its dims, of size 1 where they are summed over. (Also of two `ParamSpec`s, or two layouts.)"""

    values: jax.Array  # int8
    scale: jax.Array  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def T(self) -> "Quantized":
        return Quantized(self.values.T, self.scale.T)

    def astype(self, dtype) -> "Quantized":
        """Itself: the integers take the dtype of what they are multiplied with."""
        del dtype
        return self


def specs(tree):
    """The tree of `ParamSpec` with `Quantized` ones in the place of the large matrices."""

    def of(path, spec):
        dims = _input_dims(path[-1].key, spec)
        if not dims:
            return spec

        def shrunk(values, one):
            return tuple(one if dim in dims else value for dim, value in enumerate(values))

        return Quantized(
            rules.ParamSpec(spec.shape, "int8", spec.logical_axes, None),
            rules.ParamSpec(shrunk(spec.shape, 1), "float32", shrunk(spec.logical_axes, "norm"), None),
        )

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=rules.is_spec)


def is_quantized(leaf) -> bool:
    return isinstance(leaf, Quantized)


def quantize(weights: jax.Array, scale_shape: tuple[int, ...]) -> Quantized:
    """A matrix as integers and scales; it is summed over the dims that have size 1 in the shape of the scales."""
    dims = tuple(dim for dim, size in enumerate(scale_shape) if size == 1)
    weights = weights.astype(jnp.float32)
    top = jnp.abs(weights).max(axis=dims, keepdims=True)
    scale = jnp.where(top > 0, top / LARGEST, 1.0)
    values = jnp.clip(jnp.round(weights / jnp.broadcast_to(scale, weights.shape)), -LARGEST, LARGEST)
    return Quantized(values.astype(jnp.int8), scale)


def dense(kernel, dtype) -> jax.Array:
    """A matrix as plain numbers, for who cannot use it otherwise; one that is not quantized as it is."""
    if not is_quantized(kernel):
        return kernel
    return (kernel.values.astype(jnp.float32) * jnp.broadcast_to(kernel.scale, kernel.shape)).astype(dtype)


def scaled(product: jax.Array, scale: jax.Array) -> jax.Array:
    """A product with integers [.., out...], times the scales [.., out...] of its output channels."""
    scale = scale.reshape((1,) * (product.ndim - scale.ndim) + scale.shape)
    return (product.astype(jnp.float32) * jnp.broadcast_to(scale, product.shape)).astype(product.dtype)


def rows(table: Quantized, index, dtype) -> jax.Array:
    """Rows of an embedding, [..., D]."""
    return scaled(table.values[index].astype(dtype), table.scale[index])


def grouped(product_AF: jax.Array, kernel: Quantized, group_A: jax.Array) -> jax.Array:
    """A grouped product with the integers of experts, scaled by those of each row's own."""
    last = kernel.scale.shape[0] - 1
    return scaled(product_AF, kernel.scale[:, 0][jnp.minimum(group_A, last)])


def _input_dims(name: str, spec: rules.ParamSpec) -> tuple[int, ...]:
    if name == EMBEDDING:
        return (spec.logical_axes.index("model"),)
    first = sum(axis in ("layers", "experts") for axis in spec.logical_axes)
    return tuple(range(first, first + NUM_INPUT_DIMS.get(name, 0)))
