"""The parts that the implementations of attention share: the tiles of packed rows that are read, and products in them.

A block of queries reads a part of a shared prompt, and the columns from its first branch to its own end. A block of keys is read by the
queries from its own start to the end of its last sequence or branch. Both are found on the device, and so are the tiles in which each
query reads each key, which need no mask: no array is [T, T].

Letters: T tokens of a row, N blocks of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp

# Finite: a query that has read no key yet has weights of 1, which the first key it may read multiplies by 0.
MASKED = -1e30
SAVED = "attention"  # the name of attention's results (and the log-sum-exp), which rematerialization "attention" keeps


def ranges(packing: Any, *, block: int, window: int = 0) -> tuple[jax.Array, ...]:
    """Returns the columns that each block of one row reads and is read by, as six int32 arrays [N]; `packing` has arrays [T].

    A block of queries reads the keys of two ranges of columns:
    1. from the first array to the second, the end of shared prompts;
    2. from the third array to the block's own end. From the fifth array to the block's start, all queries read all keys.
    A block of keys is read by the queries from its own start to the fourth array. All queries from the block's end to the sixth array
    read all of its keys.

    All ends are exclusive. A range may have columns that no query reads, and may be empty.
    """
    segments_T, columns_T = packing.segment_ids, jnp.arange(packing.segment_ids.shape[0], dtype=jnp.int32)

    def runs(begins_T):  # the first column and the end of each column's run
        start_T = starts(begins_T, columns_T)
        end_T = jnp.where(jnp.append(begins_T[1:], True), columns_T + 1, len(columns_T))
        return start_T, jax.lax.cummin(end_T, reverse=True)

    first_T, last_T = start_T, end_T = runs(changes(segments_T))
    if window:  # a key of position p has the column start + p, or a later one if it is in a branch
        first_T = start_T + jnp.maximum(packing.positions - window + 1, 0)
    if packing.branch_ids is None:
        prompt_end_T = branch_T = first_T
        last_T = whole_end_T = jnp.minimum(end_T, columns_T + window) if window else end_T
    else:
        is_shared_T = packing.branch_ids == 0
        branch_T, branch_end_T = runs(changes(segments_T) | changes(packing.branch_ids))
        prompt_end_T = jax.lax.cummax(jnp.where(is_shared_T, columns_T + 1, start_T))
        last_T = jnp.where(is_shared_T, end_T, branch_end_T)
        # A window counts positions, and those of a branch follow those of the prompt.
        whole_end_T = jnp.minimum(branch_end_T, columns_T + window) if window else last_T
    whole_T = jnp.maximum(branch_T, columns_T - window + 1) if window else branch_T
    own_T, is_padding_T = columns_T // block * block, segments_T == 0  # padding reads itself, in its own block
    first_T, prompt_end_T, branch_T = (jnp.where(is_padding_T, own_T, x_T) for x_T in (first_T, prompt_end_T, branch_T))
    last_T = jnp.where(is_padding_T, own_T + block, last_T)
    whole_T, whole_end_T = (jnp.where(is_padding_T, own_T, x_T) for x_T in (whole_T, whole_end_T))
    first_N, branch_N, whole_end_N = (x_T.reshape(-1, block).min(axis=1) for x_T in (first_T, branch_T, whole_end_T))
    # A prompt that ends later is that of a sequence which begins in the second range.
    prompt_end_T = jnp.where(prompt_end_T > jnp.repeat(branch_N, block), 0, prompt_end_T)
    prompt_end_N, last_N, whole_N = (x_T.reshape(-1, block).max(axis=1) for x_T in (prompt_end_T, last_T, whole_T))
    return first_N, prompt_end_N, jnp.maximum(branch_N, first_N), last_N, whole_N, whole_end_N


def changes(ids: jax.Array) -> jax.Array:
    """Returns True where a run of equal IDs begins, along the last dim."""
    return jnp.concatenate([jnp.ones_like(ids[..., :1], bool), ids[..., 1:] != ids[..., :-1]], axis=-1)


def starts(begins: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns the column in which the run of each token begins, along the last dim."""
    return jax.lax.cummax(jnp.where(begins, columns, 0), axis=begins.ndim - 1)


def dot(a, b, dim_a: int, dim_b: int) -> jax.Array:
    """Contracts `dim_a` of a with `dim_b` of b, in float32; the products of float32 are not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = ((dim_a,), (dim_b,)), ((), ())
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
