"""Products of a CPU with matrices of integers: int8, or 4 bits with a factor per group of 32.

1. XLA multiplies int8 by int8 into int32, exactly, and reads each weight once. Any other operand of a product would be widened in
   memory first.
2. So a row of activations is split into two rows of int8, x = s (high + low / 256), with an error of at most 1/32,000 of the row's
   largest number. The product with both is that of the weights' integers, as on an accelerator (int8.py).
3. A 4-bit weight is scale * factor * value, with a float32 scale per output channel, and per group of inputs a factor of
   1 to 15, or -1 to -15. factor * value fits into int8: they are multiplied before the product of step 1.

s is a power of two. So all but the last multiplication, by the scale, is exact, and no bit of a row depends on the number of rows.

Few rows are multiplied by cpu_row_product.py, which computes the same integers.

Letters: R rows, K numbers summed over, N output channels, G groups of half a row.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from models.kernels import cpu_row_product, int8

GROUP = 32  # inputs with one factor
MAX_FACTOR = 15
LOWEST = -8  # values are from -8 to 7; a group whose largest number is positive has a negative factor
LOW = 256  # so many steps of the low part are one of the high part


@struct.dataclass
class Nibbles:
    """A matrix [N, K] in 4 bits: a byte has a value of the first half of a row in its low bits, one of the second half in its high bits."""

    bytes_NH: jax.Array  # int8, H = K / 2; values are signed
    factors_N2G: jax.Array  # int8
    scale: jax.Array  # float32 [N, 1]

    def halves(self) -> tuple[jax.Array, jax.Array]:
        """Returns factor * value of the two halves of the rows, int8 [N, K / 2]. One program for both would take five times as long."""

        def half(values_NH, factors_NG):
            values_NGI = (values_NH >> 4).reshape(len(values_NH), -1, GROUP)
            return (values_NGI * jnp.broadcast_to(factors_NG[..., None], values_NGI.shape)).reshape(values_NH.shape)

        return half(self.bytes_NH << 4, self.factors_N2G[:, 0]), half(self.bytes_NH, self.factors_N2G[:, 1])


def fits(num_inputs: int) -> bool:
    """Returns True if rows of `num_inputs` numbers can be `Nibbles`: both halves consist of whole groups."""
    return num_inputs % (2 * GROUP) == 0


def to_nibbles(kernel_NK: jax.Array) -> Nibbles:
    """Returns a matrix in 4 bits. Each group has, of six factors, the one with the smallest squared error."""
    N, K = kernel_NK.shape
    groups_N2GI = kernel_NK.astype(jnp.float32).reshape(N, 2, -1, GROUP)
    top_N2G1 = jnp.abs(groups_N2GI).max(axis=-1, keepdims=True)
    top_N = top_N2G1.max(axis=(1, 2, 3))
    scale_N = jnp.where(top_N > 0, top_N / (MAX_FACTOR * -LOWEST), 1.0)
    groups_N2GI /= scale_N[:, None, None, None]
    enough_N2G1 = jnp.ceil(top_N2G1 / scale_N[:, None, None, None] / -LOWEST - 1e-4)

    def rounded(step, sign):
        factor_N2G1 = sign * jnp.clip(enough_N2G1 + step, 1, MAX_FACTOR)
        values_N2GI = jnp.clip(jnp.round(groups_N2GI / factor_N2G1), LOWEST, -LOWEST - 1)
        error_N2G1 = jnp.square(values_N2GI * factor_N2G1 - groups_N2GI).sum(axis=-1, keepdims=True)
        return error_N2G1, factor_N2G1, values_N2GI

    best = rounded(0, 1)
    for step, sign in (0, -1), (-1, 1), (-1, -1), (1, 1), (1, -1):
        other = rounded(step, sign)
        best = tuple(jnp.where(other[0] < best[0], x, y) for x, y in zip(other, best, strict=True))
    _, factor_N2G1, values_N2GI = best
    first_NH, second_NH = (values_N2GI.astype(jnp.int8).reshape(N, 2, K // 2)[:, n] for n in range(2))
    return Nibbles((first_NH & 15) | (second_NH << 4), factor_N2G1[..., 0].astype(jnp.int8), scale_N[:, None])


def fits_few(num_rows: int, kernels: Sequence[int8.Quantized | Nibbles]) -> bool:
    """Returns True if cpu_row_product.py can multiply `num_rows` rows by these matrices in one call."""
    if len(set(map(type, kernels))) > 1:
        return False
    kind, weights, _ = _parts(kernels)
    return cpu_row_product.fits(2 * num_rows, weights, kind)


def product(x_RK: jax.Array, kernels: Sequence[int8.Quantized | Nibbles], *, is_few: bool) -> jax.Array:
    """Returns the products of rows and output-major matrices of integers, one after the other: float32 [R, N].

    With `is_few` (see `fits_few`), cpu_row_product.py multiplies. Without it, `kernels` must have one matrix.
    """
    x_RK = x_RK.astype(jnp.float32)
    R = len(x_RK)
    top_R1 = jnp.abs(x_RK).max(axis=1, keepdims=True)
    step_R1 = jnp.ldexp(jnp.float32(1), jnp.frexp(top_R1 / int8.LARGEST)[1])
    is_finite_R1 = jnp.isfinite(x_RK).all(axis=1, keepdims=True)  # a maximum on a CPU may pass over NaN
    step_R1 = jnp.where(is_finite_R1, step_R1, jnp.nan)  # NaN would become the integer 0
    steps_RK = x_RK / step_R1
    high_RK = jnp.round(steps_RK)
    low_RK = jnp.minimum(jnp.round((steps_RK - high_RK) * LOW), int8.LARGEST)
    rows_SK = jnp.concatenate([high_RK, low_RK]).astype(jnp.int8)  # S = 2 R
    if is_few:
        kind, weights, factors = _parts(kernels)
        out_SN = cpu_row_product.product(rows_SK, weights, kind, factors)
    else:
        (kernel,) = kernels
        out_SN = _dot(rows_SK, kernel)
    out_SN = out_SN.astype(jnp.float32)
    scale_1N = jnp.concatenate([kernel.scale.T for kernel in kernels], axis=1)
    return (out_SN[:R] + out_SN[R:] / LOW) * step_R1 * scale_1N


def _parts(kernels) -> tuple[str, list[jax.Array], list[jax.Array]]:
    """Returns the kind of matrices, their weights, and their factors, for cpu_row_product.py."""
    if isinstance(kernels[0], Nibbles):
        return "int4", [kernel.bytes_NH for kernel in kernels], [kernel.factors_N2G for kernel in kernels]
    return "int8", [kernel.values for kernel in kernels], []


def _dot(rows_SK: jax.Array, kernel: int8.Quantized | Nibbles) -> jax.Array:
    if isinstance(kernel, Nibbles):
        (first_SH, second_SH), (first_NH, second_NH) = jnp.split(rows_SK, 2, axis=1), kernel.halves()
        return _dot_int8(first_SH, first_NH) + _dot_int8(second_SH, second_NH)
    return _dot_int8(rows_SK, kernel.values)


def _dot_int8(rows_SK: jax.Array, values_NK: jax.Array) -> jax.Array:
    return jax.lax.dot_general(rows_SK, values_NK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
