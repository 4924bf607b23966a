"""Transposed (output-major) weights: the form by which a CPU multiplies one row as well as a whole prompt.

1. A matrix is stored as [N, K], so that memory is read in order. A Hugging Face file and a tied embedding have this form.
2. XLA multiplies two rows and more by kernels for this CPU. A single row it would multiply by a loop of its own, which writes
   bfloat16 and integers as float32 to memory first: so a single row is padded to two.
3. Few rows times a large matrix cost the time to read it: cpu_row_product.py takes less of that.
4. Integers (int8, 4 bits) are multiplied by cpu_integers.py.

Letters: K numbers summed over, N output channels, R rows, V vocabulary, D model.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from models.kernels import cpu_integers, cpu_row_product, int8

MODULES, HEAD = {"attn", "mlp", "shared"}, "lm_head"  # whose matrices are transposed
MIN_ROWS = 2


@struct.dataclass
class Transposed:
    """A weight matrix [in..., out...], stored as [N, K]."""

    kernel_NK: Any  # jax.Array, int8.Quantized, or cpu_integers.Nibbles
    in_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of K
    out_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of N
    # True: it was [V, D] from the start, and rows of it are read, too.
    is_embedding: bool = struct.field(pytree_node=False)

    def astype(self, dtype: jax.typing.DTypeLike) -> "Transposed":
        """Returns this matrix in another dtype, and integers unchanged."""
        is_float = isinstance(self.kernel_NK, jax.Array)
        return dataclasses.replace(self, kernel_NK=self.kernel_NK.astype(dtype)) if is_float else self

    def rows(self, x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """Returns the product [B, T, out...] of x [B, T, in...] and this matrix, in the dtype of x if `dtype` is None."""
        return products(x, [self], dtype)[0]

    def channels(self, at: jax.Array | slice, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns the weights [..., K] of the output channels `at`, such as rows of an embedding; not of `Nibbles`."""
        kernel_NK = self.kernel_NK
        if isinstance(kernel_NK, int8.Quantized):
            return (kernel_NK.values[at].astype(jnp.float32) * kernel_NK.scale[at]).astype(dtype)
        return kernel_NK[at].astype(dtype)

    def view(self) -> np.ndarray:
        """Returns the parameter that this was made of, as a view of its memory; not of integers."""
        kernel_NK = np.asarray(self.kernel_NK)
        return kernel_NK if self.is_embedding else kernel_NK.T.reshape(*self.in_shape, *self.out_shape)


def products(
    x: jax.Array, matrices: Sequence[Transposed], dtype: jax.typing.DTypeLike | None = None
) -> list[jax.Array]:
    """Returns `rows` of each matrix. Few rows are multiplied by all of them in one call, which takes less time."""
    B, T = x.shape[:2]
    x_RK, kernels = x.reshape(B * T, -1), [matrix.kernel_NK for matrix in matrices]
    if _fits_few(B * T, kernels):
        ends = np.cumsum([math.prod(matrix.out_shape) for matrix in matrices])
        outs = jnp.split(_product(x_RK, kernels, is_few=True), ends[:-1], axis=1)
    else:
        outs = [_product(x_RK, [kernel], is_few=_fits_few(B * T, [kernel])) for kernel in kernels]
    return [
        out_RN.astype(dtype or x.dtype).reshape(B, T, *matrix.out_shape)
        for out_RN, matrix in zip(outs, matrices, strict=True)
    ]


def num_input_dims(path: tuple[str, ...], is_tied: bool) -> int | None:
    """Returns the number of leading dims that the products with a parameter sum over; None if it keeps its form.

    Transposed are the matrices of dense layers, and the output head. A tied embedding [V, D] has the form already: 0.
    """
    if path[-1] == int8.EMBEDDING:
        return 0 if is_tied else None
    is_matrix = path[-1] == HEAD or set(path[-2:-1]) & MODULES
    return int8.NUM_INPUT_DIMS.get(path[-1]) if is_matrix else None


def transpose(kernel: jax.Array, num_inputs: int, quantization: str = "none") -> Transposed:
    """Returns a matrix whose first `num_inputs` dims are summed over as `Transposed`; if 0, one that is output-major already.

    `quantization` is "none", "int8", or "int4". A matrix whose rows have no whole groups is in int8 instead of int4.
    """
    if not num_inputs and quantization == "none":
        return Transposed(kernel, kernel.shape[1:], kernel.shape[:1], True)  # shared
    return _transposed(kernel, num_inputs, quantization)


def is_transposed(leaf: object) -> bool:
    """Returns True for a `Transposed` matrix."""
    return isinstance(leaf, Transposed)


def views(params: dict) -> dict:
    """Returns parameters in their original shapes, as views of the memory of transposed ones."""
    return jax.tree.map(lambda x: x.view() if is_transposed(x) else x, params, is_leaf=is_transposed)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _transposed(kernel, num_inputs, quantization) -> Transposed:
    in_shape, out_shape = kernel.shape[:num_inputs], kernel.shape[num_inputs:]
    if num_inputs:
        kernel_NK = kernel.reshape(math.prod(in_shape), -1).T
    else:
        kernel_NK, in_shape, out_shape = kernel, kernel.shape[1:], kernel.shape[:1]
    N, K = kernel_NK.shape
    if quantization == "int4" and cpu_integers.fits(K):
        kernel_NK = cpu_integers.to_nibbles(kernel_NK)
    elif quantization != "none":
        kernel_NK = int8.quantize(kernel_NK, (N, 1))
    return Transposed(kernel_NK, in_shape, out_shape, not num_inputs)


def _fits_few(num_rows: int, kernels) -> bool:
    if not all(isinstance(kernel, jax.Array) for kernel in kernels):
        return cpu_integers.fits_few(num_rows, kernels)
    dtypes = {str(kernel.dtype) for kernel in kernels}
    return len(dtypes) == 1 and cpu_row_product.fits(num_rows, kernels, *dtypes)


def _product(x_RK: jax.Array, kernels, *, is_few: bool) -> jax.Array:
    """Returns the products of rows and matrices of one kind, one after the other; several only if cpu_row_product.py multiplies (`is_few`)."""
    if not isinstance(kernels[0], jax.Array):
        return cpu_integers.product(x_RK, kernels, is_few=is_few)
    if is_few:
        return cpu_row_product.product(x_RK, kernels, str(kernels[0].dtype))
    (kernel_NK,) = kernels
    padded_RK = jnp.pad(x_RK, ((0, max(MIN_ROWS - len(x_RK), 0)), (0, 0)))
    dims = ((1,), (1,)), ((), ())
    return jax.lax.dot_general(padded_RK, kernel_NK, dims, preferred_element_type=jnp.float32)[: len(x_RK)]
