"""A weight matrix with a low-rank adapter (LoRA, arXiv 2106.09685) next to it: y = x W + s (x A) B.

1. A and B are float32, and so are their products and the sum, which is rounded once, to the dtype of x. Steps of 2e-5 would vanish
   in a W of bfloat16: after 20 of them the merged matrix had lost 85 % of its change.
2. W may be of any kind: a plain array, quantized, or transposed (models/layers.py multiplies by it). Its gradient is not computed,
   which saves a third of a train step's products.
3. Learner, server, and validator use this one definition. `dense` adds A B to W, for export alone.
4. Several adapters may stand next to each other in r, of which each sequence uses one, or none (`mask`): a server's.

Letters: D inputs and F outputs of a matrix (each may be several dims), r rank.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

PRECISION = "highest"  # by default GPUs round float32 operands to TF32 and TPUs to bfloat16


@struct.dataclass
class Adapted:
    """A weight matrix `base` [D, F] and its adapter: `a` [D, r], `b` [r, F], float32. Dims of layers and experts lead in all three.

    The fields may also be `ParamSpec`s or shardings.
    """

    base: Any
    a: Any
    b: Any
    scale: float = struct.field(pytree_node=False)  # s, alpha / rank
    mask: Any = None  # bool [B, r], which of the products x A each sequence uses; None: all. Has no gradient

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.base.shape

    def astype(self, dtype: jax.typing.DTypeLike) -> "Adapted":
        """Returns this matrix with its base in another dtype; the adapter stays float32."""
        return dataclasses.replace(self, base=self.base.astype(dtype))


def is_adapted(leaf: object) -> bool:
    """Returns True for an `Adapted` matrix."""
    return isinstance(leaf, Adapted)


def base_of(kernel: Any) -> Any:
    """Returns the base of an `Adapted` matrix, and any other matrix unchanged."""
    return kernel.base if isinstance(kernel, Adapted) else kernel


def product(multiply: Callable, multiply_low: Callable, x: jax.Array, kernel: Adapted, *context: Any) -> jax.Array:
    """Returns x W + s (x A) B in the dtype of x. The gradient goes to x, A, and B, not to W or `context`.

    `multiply(x, matrix, *context, dtype)` returns the product of x and the base in `dtype`; `multiply_low` does so for A and B,
    with x in float32.
    """
    return _product(multiply, multiply_low, kernel.scale, x, kernel.base, kernel.a, kernel.b, context, kernel.mask)


def dense(kernel: Any, dtype: jax.typing.DTypeLike | None = None) -> Any:
    """Returns an `Adapted` matrix of a plain base as one array, W + s A B summed in float32, in `dtype` (None: of W); others unchanged."""
    if not isinstance(kernel, Adapted):
        return kernel
    base, a, b = kernel.base, kernel.a.astype(jnp.float32), kernel.b.astype(jnp.float32)
    num_copies = a.ndim + b.ndim - base.ndim - 2  # dims of layers and experts, which all three have
    multiply = functools.partial(jnp.tensordot, axes=1, precision=PRECISION)
    for _ in range(num_copies):
        multiply = jax.vmap(multiply)
    return (base.astype(jnp.float32) + kernel.scale * multiply(a, b)).astype(dtype or base.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(multiply, multiply_low, scale, x, base, a, b, context, mask):
    change = _change(multiply_low, scale, x, a, b, context, mask)
    return (multiply(x, base, *context, dtype=jnp.float32) + change).astype(x.dtype)


def _change(multiply_low, scale, x, a, b, context, mask):
    with jax.default_matmul_precision(PRECISION):
        inner = multiply_low(x.astype(jnp.float32), a, *context, dtype=jnp.float32)
        if mask is not None:
            inner = jnp.where(mask[:, None], inner, 0.0)
        return scale * multiply_low(inner, b, *context, dtype=jnp.float32)


def _backward(multiply, multiply_low, scale, saved, out):
    """Returns the gradients, computed from x: x A is small, and quicker to compute again than to keep."""
    x, base, a, b, context, mask = saved
    _, pull = jax.vjp(lambda x: multiply(x, base, *context, dtype=x.dtype), x)
    _, pull_low = jax.vjp(lambda x, a, b: _change(multiply_low, scale, x, a, b, context, mask), x, a, b)
    with jax.default_matmul_precision(PRECISION):
        d_x_low, d_a, d_b = pull_low(out.astype(jnp.float32))
    return pull(out)[0] + d_x_low, None, d_a, d_b, None, None


_product.defvjp(lambda *args: (_product(*args), args[3:]), _backward)
