"""Causal attention of packed rows by JAX's splash kernel for TPUs, which works only on the blocks of keys that a row reads.

1. A sequence has consecutive columns. So a block of queries reads the blocks of keys from the first token that its first query
   may read (of its sequence, within the window) to its own.
2. `visits` finds these blocks on the device, from the segment IDs. JAX's own masks are arrays of whole rows, built in
   Python when a program is traced: 54 s for a row of 65,536 tokens.
3. The grid of the kernel has `longest` tokens before each query; of its steps, those that visit no block load and compute nothing.

Left out: shared prompts, whose branches read two ranges of keys, and grids that have visited blocks alone.

Letters: B rows, T tokens, H query heads, K key heads, C head dim, V value dim, N blocks of a row, W blocks in the grid of each.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask_info

BLOCK = 512  # queries and keys of a tile; a multiple of 128
SAVED = "attention"  # the name of attention's results (and the kernel's log-sum-exp), which rematerialization "attention" keeps


def attend(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKV: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: jax.Array | None = None,
    longest: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention inside each sequence of packed rows, [B, T, H, V]; models/attention.py explains the options.

    T is a multiple of 128. `segment_ids_BT` are 1, 2, ... per sequence, whose columns are consecutive, and 0 for padding, whose
    results are finite. A sequence of more than `longest` tokens (0: those of the row) makes its row NaN, because keys are missing.
    `interpret` runs the kernel on a CPU.
    """
    B, T, H, _ = q_BTHC.shape
    block = block_of(T)
    names = ("block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    # One row of all rows: JAX would run the kernel in a loop over rows, and copy the rows in and out.
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    segment_ids_N = jnp.where(segment_ids_BT == 0, 0, segment_ids_BT + row_B1 * (T + 1)).reshape(-1)
    by_queries, by_keys, is_cut = visits(segment_ids_N, block=block, window=window, longest=longest or T)
    kernel = splash_attention_kernel.SplashAttentionKernel(
        *(by_queries, by_queries, by_keys),
        block_sizes=splash_attention_kernel.BlockSizes(block, block, **dict.fromkeys(names, block)),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap or None,
        residual_checkpoint_name=SAVED,
        mask_function=_readable(window),
        interpret=interpret,
    )
    is_cut_B = is_cut.reshape(B, -1).any(axis=1)
    factor_B = jnp.where(is_cut_B, jnp.nan, scale).astype(q_BTHC.dtype)
    q_BTHC *= factor_B[:, None, None, None]
    heads_first = (x.reshape(B * T, *x.shape[2:]).swapaxes(0, 1) for x in (q_BTHC, k_BTKC, v_BTKV))
    extra = {} if sinks_H is None else {"sinks": sinks_H.astype(jnp.float32)}
    out = kernel(*heads_first, splash_attention_kernel.SegmentIds(segment_ids_N, segment_ids_N), **extra)
    assert isinstance(out, jax.Array)  # without residuals
    return out.swapaxes(0, 1).reshape(B, T, H, -1)


def block_of(row_length: int) -> int:
    """Returns the number of queries and keys of a tile in rows of `row_length` tokens: the whole row if 128 does not divide it."""
    return next((size for size in (BLOCK, 256, 128) if row_length % size == 0), row_length)


def first_blocks(segment_ids_T: jax.Array, block: int, window: int) -> jax.Array:
    """Returns int32 [N], ascending: the first block of keys that each block of queries reads; the last one is its own."""
    columns_T = jnp.arange(len(segment_ids_T), dtype=jnp.int32)
    begins_T = jnp.append(True, segment_ids_T[1:] != segment_ids_T[:-1])
    first_T = jax.lax.cummax(jnp.where(begins_T, columns_T, 0))
    if window:
        first_T = jnp.maximum(first_T, columns_T - window + 1)
    # A query of padding reads the padding in its own block: one needs a key, or its softmax divides by zero.
    first_T = jnp.where(segment_ids_T == 0, columns_T // block * block, first_T)
    return first_T[::block] // block


def visits(segment_ids_T: jax.Array, *, block: int, window: int, longest: int) -> tuple:
    """Returns the kernel's `MaskInfo` by blocks of queries (for the outputs and dq) and by blocks of keys (for dk and dv).

    Step w of block i of queries has block i - (W - 1) + w of keys; step w of block j of keys has block j + w of queries. The third
    result, [N], is True where a sequence is longer than `longest`, so that the steps of a block of queries miss keys.
    """
    first_N = first_blocks(segment_ids_T, block, window)
    N = len(first_N)
    reach = min(length for length in (longest, window, N * block) if length)  # keys that a query can read at most
    W = min(N, 1 + -(-(reach - 1) // block))
    block_N, step_W = jnp.arange(N), jnp.arange(W)
    key_NW = block_N[:, None] - (W - 1) + step_W[None]
    query_WN = block_N[None] + step_W[:, None]
    # the last block of queries that reads each block of keys
    last_N = jnp.searchsorted(first_N, block_N, side="right") - 1

    def info(is_visited, other, nearest):
        """`nearest` is the visited block next to the steps without work, which so load nothing."""
        return splash_attention_mask_info.MaskInfo(
            data_next=jnp.where(is_visited, other, nearest)[None].astype(jnp.int32),
            mask_next=None,
            block_mask=is_visited[None].astype(jnp.int32),
            partial_mask_blocks=None,
            q_sequence=jnp.arange(N * block, dtype=jnp.int32),  # pyright: ignore[reportArgumentType]  # may be traced
            is_dynamic_mask=True,
        )

    by_queries = info(key_NW >= first_N[:, None], key_NW, first_N[:, None])
    return by_queries, info(query_WN <= last_N[None], query_WN, last_N[None]), first_N < block_N - (W - 1)


@functools.cache  # one function per window: the kernel is compiled for it
def _readable(window: int) -> Callable:
    def is_readable(query, key):
        return (query >= key) & (query - key < window) if window else query >= key

    return is_readable
