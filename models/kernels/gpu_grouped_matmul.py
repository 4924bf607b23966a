"""Multiplies the rows of each group with the matrix of their group on an NVIDIA GPU, by Triton kernels.

XLA lowers `jax.lax.ragged_dot` for GPUs to one product of all rows with the matrices of all groups, masked: E times the work.
1. `_tiles` lists (group, tile of rows) on the device. A tile that several groups share is listed for each of them; there are at
   most E more than tiles of rows. A program multiplies one of them, and stores the rows of its group alone.
2. The gradient of the rows is the same product with the transposed matrices. That of the matrices sums over the tiles of a
   group, in order.

Letters: A rows, E groups, D summed dims, F output dims, R rows of a tile, N listed tiles.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from models.kernels import attention_tiles, gpu_attention

LAUNCH = 8, 3  # warps, stages of the pipeline


def tile_of(num_rows: int, num_groups: int) -> int:
    """Returns the number of rows of a tile: 128, or 16 if groups have few rows on average, as in decoding. `num_rows` must be a multiple of it."""
    return 128 if num_rows >= 64 * num_groups else 16


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    rows_AD: jax.Array,
    kernel_EDF: jax.Array,
    sizes_E: jax.Array,
    interpret: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Returns rows[a] @ kernel[group of row a], [A, F], in `dtype` (None: of the rows); the rows are sorted by group, and `sizes_E` counts those of each.

    A is a multiple of `tile_of(A, E)`, D and F of 16. Rows after the last group give undefined results, and their gradients are undefined.
    `interpret` runs the kernels on a CPU.
    """
    return _product(rows_AD, kernel_EDF, sizes_E, interpret, dtype, is_transposed=False)


def _product(rows_AD, kernel, sizes_E, interpret: bool, dtype=None, *, is_transposed: bool) -> jax.Array:
    """Returns the products with `kernel` [E, D, F], or with [E, F, D] if it is transposed."""
    A, D = rows_AD.shape
    E, F = kernel.shape[0], kernel.shape[1 if is_transposed else 2]
    size, step, width = tile_of(A, E), _divisor(D, 64), _divisor(F, 128)
    tiles = _tiles(sizes_E, size, A // size + E)

    def grouped_product(rows_ref, kernel_ref, tiles_ref, out_ref):
        group, tile, first, end = (ref[pl.program_id(0)] for ref in tiles_ref)
        own, columns = pl.ds(tile * size, size), pl.ds(pl.program_id(1) * width, width)

        def add(n, total):
            summed = pl.ds(n * step, step)
            part = kernel_ref[group, columns, summed] if is_transposed else kernel_ref[group, summed, columns]
            return total + attention_tiles.dot(rows_ref[own, summed], part, 1, 1 if is_transposed else 0)

        total_RF = jax.lax.fori_loop(0, D // step, add, jnp.zeros((size, width), jnp.float32))
        index_R = tile * size + jnp.arange(size)
        is_own_RF = jnp.broadcast_to(((index_R >= first) & (index_R < end))[:, None], total_RF.shape)
        triton.store(out_ref.at[own, columns], total_RF.astype(out_ref.dtype), mask=is_own_RF)

    out_shape = jax.ShapeDtypeStruct((A, F), dtype or rows_AD.dtype)
    grid = tiles[0].shape[0], F // width
    call = gpu_attention.kernel_call(grouped_product, (size, *LAUNCH), grid, out_shape, interpret)
    return call(rows_AD, kernel, tiles)


def _backward(interpret: bool, dtype, saved, d_out_AF):
    rows_AD, kernel_EDF, sizes_E = saved
    (A, D), (E, _, F) = rows_AD.shape, kernel_EDF.shape
    size, width = tile_of(A, E), _divisor(F, 64)
    # tiles of float32 would not fit the shared memory
    height = _divisor(D, 64 if rows_AD.dtype == jnp.float32 else 128)
    end_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    start_E = end_E - sizes_E

    def grouped_gradient(rows_ref, d_out_ref, start_ref, end_ref, d_kernel_ref):
        group, i, j = (pl.program_id(dim) for dim in range(3))
        own, columns = pl.ds(i * height, height), pl.ds(j * width, width)
        first, end = start_ref[group], end_ref[group]

        def add(n, total):
            tile = pl.ds(n * size, size)
            is_own_R1 = ((n * size + jnp.arange(size) >= first) & (n * size + jnp.arange(size) < end))[:, None]
            rows_RD = jnp.where(is_own_R1, rows_ref[tile, own], 0)
            d_out_RF = jnp.where(is_own_R1, d_out_ref[tile, columns], 0)
            return total + attention_tiles.dot(rows_RD, d_out_RF, 0, 0)

        tiles = jax.lax.div(first, size), jnp.where(end > first, jax.lax.div(end + size - 1, size), 0)
        total_DF = jax.lax.fori_loop(*tiles, add, jnp.zeros((height, width), jnp.float32))
        d_kernel_ref[group, own, columns] = total_DF.astype(d_kernel_ref.dtype)

    d_rows_AD = _product(d_out_AF, kernel_EDF, sizes_E, interpret, is_transposed=True)
    out_shape = jax.ShapeDtypeStruct(kernel_EDF.shape, kernel_EDF.dtype)
    grid = E, D // height, F // width
    call = gpu_attention.kernel_call(grouped_gradient, (size, *LAUNCH), grid, out_shape, interpret)
    return d_rows_AD, call(rows_AD, d_out_AF, start_E, end_E), None


grouped_matmul.defvjp(
    lambda rows, kernel, sizes, *how: (grouped_matmul(rows, kernel, sizes, *how), (rows, kernel, sizes)),
    _backward,
)


def _tiles(sizes_E: jax.Array, size: int, num: int) -> tuple[jax.Array, ...]:
    """Returns int32 [N]: group, tile of rows, and first row and end of the group; the end is 0 in the rest of the list."""
    end_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    start_E = end_E - sizes_E
    num_E = jnp.where(sizes_E > 0, -(-end_E // size) - start_E // size, 0)
    listed_E = jnp.cumsum(num_E, dtype=jnp.int32)
    index_N = jnp.arange(num, dtype=jnp.int32)
    group_N = jnp.minimum(jnp.searchsorted(listed_E, index_N, side="right").astype(jnp.int32), len(sizes_E) - 1)
    is_listed_N = index_N < listed_E[-1]
    tile_N = jnp.where(is_listed_N, start_E[group_N] // size + index_N - (listed_E - num_E)[group_N], 0)
    return group_N, tile_N, start_E[group_N], jnp.where(is_listed_N, end_E[group_N], 0)


def _divisor(dim: int, most: int) -> int:
    """Returns the largest power of 2 that divides `dim`, at most `most`: the side of a tile."""
    return min(dim & -dim, most)
