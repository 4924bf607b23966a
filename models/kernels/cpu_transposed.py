"""Transposed (output-major) weights, by which a CPU multiplies a few rows faster.

1. x @ kernel of 2 to 16 rows reads the kernel in pieces of a few columns, down all of its rows: a core then reads 8 GB/s from
   memory, and 21 GB/s if it reads in order. A `Transposed` kernel is stored output-major, [N, K], and is the left operand:
   it is read in order.
2. The product is column-major, [N, R]. A barrier keeps XLA from transposing the operands back. Products of products, as in
   a gated ffn, can stay column-major (models/layers.py).

Float32, 2 cores, 8 rows x 768 x 2304: 470 -> 356 microseconds; x 32000 (a tied head): 8,134 -> 4,537.

With hundreds of rows a kernel is read once for many of them, and neither layout is faster for all shapes.

Letters: K numbers summed over, N output channels, R rows.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import struct

from models.kernels import int8

MODULES = ("attn", "mlp", "shared")  # of dense layers


@struct.dataclass
class Transposed:
    """A weight matrix [in..., out...], stored transposed (output-major), which a CPU multiplies with few rows faster."""

    kernel_NK: jax.Array
    out_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of N

    def astype(self, dtype: jax.typing.DTypeLike) -> "Transposed":
        """Returns this matrix in another dtype."""
        return Transposed(self.kernel_NK.astype(dtype), self.out_shape)

    def rows(self, x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """Returns the product [B, T, out...] of x [B, T, in...] and this matrix, in the dtype of x if `dtype` is None."""
        B, T = x.shape[:2]
        return columns(x.reshape(B * T, -1).T, self, dtype).T.reshape(B, T, *self.out_shape)


def columns(x_KR: jax.Array, kernel: Transposed, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Returns the product of `kernel` with R rows given as columns [K, R], as [N, R]; in the dtype of `x_KR` if None."""
    out_NR = jax.lax.dot(kernel.kernel_NK, x_KR, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(out_NR.astype(dtype or x_KR.dtype))


def transpose(params: dict) -> dict:
    """Returns `params` with the matrices of dense layers and the output head as `Transposed`; shares the other parameters.

    Layers must not be stacked. A tied embedding is output-major already, and becomes the head without a copy.
    """

    def one(path, leaf):
        module, name = (key.key for key in path[-2:])
        num_input_dims = int8.NUM_INPUT_DIMS.get(name) if module in MODULES else None
        return _transpose(leaf, num_input_dims) if num_input_dims else leaf

    table_VD = params["embed"]
    head = _transpose(params["lm_head"], 1) if "lm_head" in params else Transposed(table_VD, table_VD.shape[:1])
    return params | {"layers": jax.tree_util.tree_map_with_path(one, params["layers"]), "lm_head": head}


@functools.partial(jax.jit, static_argnums=1)
def _transpose(kernel: jax.Array, num_input_dims: int) -> Transposed:
    out_shape = kernel.shape[num_input_dims:]
    return Transposed(kernel.reshape(-1, math.prod(out_shape)).T, out_shape)
