"""Causal attention on a CPU, in float32: of packed rows, with gradients written out, and of new tokens over cached keys.

1. `attend_blocks` is for short rows. Queries are cut into a few blocks of columns; a block reads the keys up to its own
   end, so about half of the scores above the diagonal are never computed. The weights are kept for the backward pass,
   which does not need the mask (a masked weight is 0).
2. `attend_tiles` is for long rows. A tile of queries goes over the tiles of keys up to its own and accumulates the softmax
   from one to the next (arXiv 1805.02867, 2205.14135). A tile in which no query may read a key (another sequence, the
   branch of another sample, outside the window) is skipped: the cost is that of the sequences, whichever row they are
   packed into. The backward pass computes weights again, so the memory is that of a few tiles, and one tile is compiled.
3. `attend_chunk` is for a chunk of a prompt: tiles of queries go over the cached keys up to their own in the same way.
4. Both backward passes order their operands so that XLA makes no transposed copy of the large arrays, the weights and
   their gradient: gradients of keys and values are computed transposed, since those are small.

Letters: B sequences, T tokens, K key heads, G query heads of each, C head dim (of values: V), S keys that a block or tile
reads, M = G times the queries of a block or tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.kernels import attention_tiles

MAX_BLOCKS = 4  # more save little, and each is compiled
MIN_BLOCK = 40  # queries
TILE = 256  # columns, at most


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_blocks(
    q_BKGTC: jax.Array, k_BKTC: jax.Array, v_BKTV: jax.Array, mask_BTT: jax.Array, scale: float
) -> jax.Array:
    """Returns attention of short rows, softmax(scale q k) v, as float32 [B, K, G, T, V].

    `mask_BTT` is True where query t may read key s. No query may read a later column.
    """
    return _blocks_forward(q_BKGTC, k_BKTC, v_BKTV, mask_BTT, scale)[0]


def _blocks_forward(q_BKGTC, k_BKTC, v_BKTV, mask_BTT, scale):
    B, K, G, T, _ = q_BKGTC.shape
    # The barriers here and below stop XLA from computing these arrays again in every loop that reads them.
    bias_BTT = jax.lax.optimization_barrier(jnp.where(mask_BTT, 0.0, attention_tiles.MASKED).astype(jnp.float32))
    outs, weights = [], []
    for start, end in _blocks(T):
        q_BKMC = jax.lax.optimization_barrier(_rows(q_BKGTC, start, end))
        scores_BKGTS = _dot(q_BKMC, k_BKTC[:, :, :end], 3, 3).reshape(B, K, G, end - start, end) * scale
        scores_BKGTS += bias_BTT[:, None, None, start:end, :end]
        weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
        weights_BKMS = jax.lax.optimization_barrier(weights_BKGTS.reshape(B, K, G * (end - start), end))
        out_BKMV = _dot(weights_BKMS, v_BKTV[:, :, :end], 3, 2)
        outs.append(out_BKMV.reshape(B, K, G, end - start, -1))
        weights.append(weights_BKMS)
    out_BKGTV = jnp.concatenate(outs, axis=3)
    return out_BKGTV, (q_BKGTC, k_BKTC, v_BKTV, out_BKGTV, weights)


def _blocks_backward(scale, saved, d_out_BKGTV):
    q_BKGTC, k_BKTC, v_BKTV, out_BKGTV, weights = saved
    B, K, G, T, _ = q_BKGTC.shape
    d_sum_BKGT1 = (d_out_BKGTV * out_BKGTV).sum(axis=-1, keepdims=True)  # of a row: weights times their gradient
    d_qs = []
    d_k_BKCT, d_v_BKVT = jnp.zeros_like(k_BKTC.swapaxes(2, 3)), jnp.zeros_like(v_BKTV.swapaxes(2, 3))
    for (start, end), weights_BKMS in zip(_blocks(T), weights, strict=True):
        q_BKMC = _rows(q_BKGTC, start, end)
        d_out_BKMV = jax.lax.optimization_barrier(_rows(d_out_BKGTV, start, end))
        d_weights_BKMS = _dot(d_out_BKMV, v_BKTV[:, :, :end], 3, 3)
        d_scores_BKMS = weights_BKMS * (d_weights_BKMS - _rows(d_sum_BKGT1, start, end)) * scale
        d_scores_BKMS = jax.lax.optimization_barrier(d_scores_BKMS)
        d_qs.append(_dot(d_scores_BKMS, k_BKTC[:, :, :end], 3, 2).reshape(B, K, G, end - start, -1))
        rest = ((0, 0), (0, 0), (0, 0), (0, T - end))
        d_k_BKCT += jnp.pad(_dot(q_BKMC, d_scores_BKMS, 2, 2), rest)
        d_v_BKVT += jnp.pad(_dot(d_out_BKMV, weights_BKMS, 2, 2), rest)
    return jnp.concatenate(d_qs, axis=3), d_k_BKCT.swapaxes(2, 3), d_v_BKVT.swapaxes(2, 3), None


attend_blocks.defvjp(_blocks_forward, _blocks_backward)


def _blocks(T: int) -> list[tuple[int, int]]:
    """Returns (first column, end) of each block into which a row of T queries is cut."""
    num = min(max(T // MIN_BLOCK, 1), MAX_BLOCKS)
    size = -(-T // num // 8) * 8
    return [(start, min(start + size, T)) for start in range(0, T, size)]


def _rows(x_BKGTC, start: int, end: int) -> jax.Array:
    """Returns the queries of columns start to end, [B, K, M, C]; M goes over the heads of a key head, then over columns."""
    B, K, _, _, C = x_BKGTC.shape
    return x_BKGTC[:, :, :, start:end].reshape(B, K, -1, C)


def attend_tiles(
    q_BKGTC: jax.Array, k_BKTC: jax.Array, v_BKTV: jax.Array, packing: Any, readable: Callable, scale: float
) -> jax.Array:
    """Returns attention of long rows, softmax(scale q k) v, as float32 [B, K, G, T, V].

    `packing` is a tree of arrays [B, T] that describes the columns (`attention.Packing`). `readable(query packing, query
    columns, key packing, key columns)` returns the mask [B, S, S] of two tiles; it must be causal, and let queries read
    themselves.
    """
    T = q_BKGTC.shape[3]
    num_tiles = -(-T // TILE)
    size = -(-T // num_tiles // 8) * 8
    pad = num_tiles * size - T

    def padded(x, axis):
        return jnp.pad(x, [(0, pad if dim == axis else 0) for dim in range(x.ndim)])

    packing = jax.tree.map(lambda x_BT: padded(x_BT, 1), packing)
    tiles = _Tiles(size, num_tiles, readable, scale)
    out_BKGTV = _attend_in_tiles(tiles, padded(q_BKGTC, 3), padded(k_BKTC, 2), padded(v_BKTV, 2), packing)
    return out_BKGTV[:, :, :, :T]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The division of a row's columns into `num` tiles of `size`, and the mask rule `readable`; static under jit."""

    size: int
    num: int
    readable: Callable
    scale: float

    def of(self, x, i, axis: int):
        return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

    def queries(self, x_BKGTC, i) -> jax.Array:
        """Returns the queries of tile i, [B, K, M, C], in the order of `_rows`."""
        return _rows(self.of(x_BKGTC, i, 3), 0, self.size)

    def mask(self, packing, i, j) -> jax.Array:
        """Returns the mask [B, S, S], True where a query of tile i may read a key of tile j."""
        query, key = (jax.tree.map(lambda x_BT, t=t: self.of(x_BT, t, 1), packing) for t in (i, j))
        columns_S = jnp.arange(self.size)
        return self.readable(query, i * self.size + columns_S, key, j * self.size + columns_S)

    def scores(self, q_BKMC, k_BKSC, mask_BSS) -> jax.Array:
        """Returns the scaled attention scores of a tile of queries and one of keys, [B, K, M, S], masked by `mask_BSS`."""
        B, K, M, _ = q_BKMC.shape
        scores_BKGSS = _dot(q_BKMC, k_BKSC, 3, 3).reshape(B, K, -1, self.size, self.size) * self.scale
        return jnp.where(mask_BSS[:, None, None], scores_BKGSS, attention_tiles.MASKED).reshape(B, K, M, self.size)


def _attend_tiles(tiles: _Tiles, *args) -> jax.Array:
    return _tiles_forward(tiles, *args)[0]


def _tiles_forward(tiles: _Tiles, q_BKGTC, k_BKTC, v_BKTV, packing):
    B, K, G, T, _ = q_BKGTC.shape
    M, V = G * tiles.size, v_BKTV.shape[3]

    def over_queries(i, carry):
        out_BKGTV, log_norm_BKGT = carry
        q_BKMC = tiles.queries(q_BKGTC, i)

        def over_keys(j, stats):
            mask_BSS = tiles.mask(packing, i, j)

            def read(stats):
                scores_BKMS = tiles.scores(q_BKMC, tiles.of(k_BKTC, j, 2), mask_BSS)
                return _accumulated(stats, scores_BKMS, tiles.of(v_BKTV, j, 2))

            return jax.lax.cond(jnp.any(mask_BSS), read, lambda stats: stats, stats)

        zero_BKM1 = jnp.zeros((B, K, M, 1))
        stats = zero_BKM1 + attention_tiles.MASKED, zero_BKM1, jnp.zeros((B, K, M, V))
        max_BKM1, sum_BKM1, out_BKMV = jax.lax.fori_loop(0, i + 1, over_keys, stats)

        def put(whole, part_BKMX):
            part = part_BKMX.reshape(B, K, G, tiles.size, *whole.shape[4:])
            return jax.lax.dynamic_update_slice_in_dim(whole, part, i * tiles.size, 3)

        return put(out_BKGTV, out_BKMV / sum_BKM1), put(log_norm_BKGT, max_BKM1 + jnp.log(sum_BKM1))

    blank = jnp.zeros((B, K, G, T, V)), jnp.zeros((B, K, G, T))
    out_BKGTV, log_norm_BKGT = jax.lax.fori_loop(0, tiles.num, over_queries, blank)
    return out_BKGTV, (q_BKGTC, k_BKTC, v_BKTV, packing, out_BKGTV, log_norm_BKGT)


def _tiles_backward(tiles: _Tiles, saved, d_out_BKGTV):
    q_BKGTC, k_BKTC, v_BKTV, packing, out_BKGTV, log_norm_BKGT = saved
    B, K, G, _, C = q_BKGTC.shape
    d_sum_BKGT1 = (d_out_BKGTV * out_BKGTV).sum(axis=-1, keepdims=True)  # of a query: weights times their gradient

    def over_queries(i, carry):
        d_q_BKGTC, d_k_BKCT, d_v_BKVT = carry
        q_BKMC, d_out_BKMV, d_sum_BKM1, log_norm_BKM1 = (
            tiles.queries(x, i) for x in (q_BKGTC, d_out_BKGTV, d_sum_BKGT1, log_norm_BKGT[..., None])
        )

        def over_keys(j, carry):
            d_q_BKMC, d_k_BKCT, d_v_BKVT = carry
            mask_BSS = tiles.mask(packing, i, j)
            k_BKSC, v_BKSV = tiles.of(k_BKTC, j, 2), tiles.of(v_BKTV, j, 2)

            def read(_):
                weights_BKMS = jnp.exp(tiles.scores(q_BKMC, k_BKSC, mask_BSS) - log_norm_BKM1)
                d_scores_BKMS = weights_BKMS * (_dot(d_out_BKMV, v_BKSV, 3, 3) - d_sum_BKM1) * tiles.scale
                new_q_BKMC, new_k_BKCS = _dot(d_scores_BKMS, k_BKSC, 3, 2), _dot(q_BKMC, d_scores_BKMS, 2, 2)
                return new_q_BKMC, new_k_BKCS, _dot(d_out_BKMV, weights_BKMS, 2, 2)

            blank = (jnp.zeros_like(q_BKMC), *(jnp.zeros((B, K, x.shape[3], tiles.size)) for x in (k_BKSC, v_BKSV)))
            new_q_BKMC, new_k_BKCS, new_v_BKVS = jax.lax.cond(jnp.any(mask_BSS), read, lambda _: blank, None)

            def add(whole, part):
                sum_ = tiles.of(whole, j, 3) + part
                return jax.lax.dynamic_update_slice_in_dim(whole, sum_, j * tiles.size, 3)

            return d_q_BKMC + new_q_BKMC, add(d_k_BKCT, new_k_BKCS), add(d_v_BKVT, new_v_BKVS)

        carry = jnp.zeros_like(q_BKMC), d_k_BKCT, d_v_BKVT
        d_q_BKMC, d_k_BKCT, d_v_BKVT = jax.lax.fori_loop(0, i + 1, over_keys, carry)
        d_q_BKGSC = d_q_BKMC.reshape(B, K, G, tiles.size, C)
        d_q_BKGTC = jax.lax.dynamic_update_slice_in_dim(d_q_BKGTC, d_q_BKGSC, i * tiles.size, 3)
        return d_q_BKGTC, d_k_BKCT, d_v_BKVT

    blank = jnp.zeros_like(q_BKGTC), jnp.zeros_like(k_BKTC.swapaxes(2, 3)), jnp.zeros_like(v_BKTV.swapaxes(2, 3))
    d_q_BKGTC, d_k_BKCT, d_v_BKVT = jax.lax.fori_loop(0, tiles.num, over_queries, blank)
    return d_q_BKGTC, d_k_BKCT.swapaxes(2, 3), d_v_BKVT.swapaxes(2, 3), None


def _accumulated(stats, scores_BKMS, v_BKSV) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (maximum, sum of weights, weighted values) of a softmax that reads one more tile of keys."""
    max_BKM1, sum_BKM1, out_BKMV = stats
    new_max_BKM1 = jnp.maximum(max_BKM1, scores_BKMS.max(axis=-1, keepdims=True))
    weights_BKMS = jnp.exp(scores_BKMS - new_max_BKM1)
    down_BKM1 = jnp.exp(max_BKM1 - new_max_BKM1)
    sum_BKM1 = sum_BKM1 * down_BKM1 + weights_BKMS.sum(axis=-1, keepdims=True)
    return new_max_BKM1, sum_BKM1, out_BKMV * down_BKM1 + _dot(weights_BKMS, v_BKSV, 3, 2)


_attend_in_tiles = jax.custom_vjp(_attend_tiles, nondiff_argnums=(0,))
_attend_in_tiles.defvjp(_tiles_forward, _tiles_backward)


def attend_chunk(
    q_BKGTC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSV: jax.Array,
    start_B: jax.Array,
    scale: float,
    *,
    window: int = 0,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns attention of T tokens at positions start, start + 1, ... over S cached positions, float32 [B, K, G, T, V].

    A query reads the keys up to its own; the options are those of `attention.attend_packed`. Tiles past the last query are not
    read. A row's bits depend neither on their number nor on other rows.
    """
    B, K, G, T, _ = q_BKGTC.shape
    S, V = v_BKSV.shape[2:]
    size, num_tiles = min(TILE, S), -(-T // TILE)
    num_rows = -(-T // num_tiles)  # of a tile of queries
    q_BKGTC = jnp.pad(q_BKGTC.astype(jnp.float32) * scale, [(0, 0)] * 3 + [(0, num_tiles * num_rows - T), (0, 0)])
    top_BKM1, total_BKM1 = jnp.full((B, K, G * num_rows, 1), attention_tiles.MASKED), jnp.zeros((B, K, G * num_rows, 1))
    if sinks_H is not None:  # one more score, without a value
        sinks_KM = jnp.repeat(sinks_H.astype(jnp.float32).reshape(K, G), num_rows, axis=1)
        top_BKM1, total_BKM1 = jnp.broadcast_to(sinks_KM[None, :, :, None], top_BKM1.shape), total_BKM1 + 1

    def over_queries(i):
        q_BKMC = _rows(jax.lax.dynamic_slice_in_dim(q_BKGTC, i * num_rows, num_rows, 3), 0, num_rows)
        own_BT1 = (start_B[:, None] + i * num_rows + jnp.arange(num_rows)[None])[:, :, None]

        def over_keys(j, stats):
            first = jnp.minimum(j * size, S - size)  # a tile at the end begins in the tile before
            k_BKSC_, v_BKSV_ = (
                jax.lax.dynamic_slice_in_dim(x, first, size, 2).astype(jnp.float32) for x in (k_BKSC, v_BKSV)
            )
            scores_BKMS = _dot(q_BKMC, k_BKSC_, 3, 3)
            at_11S = (first + jnp.arange(size))[None, None]
            mask_BTS = (at_11S <= own_BT1) & (at_11S >= j * size)
            if window:
                mask_BTS &= at_11S > own_BT1 - window
            scores_BKGTS = scores_BKMS.reshape(B, K, G, num_rows, size)
            scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, attention_tiles.MASKED)
            return _accumulated(stats, scores_BKGTS.reshape(scores_BKMS.shape), v_BKSV_)

        num_read = (jnp.max(start_B) + jnp.minimum((i + 1) * num_rows, T) - 1) // size + 1
        stats = top_BKM1, total_BKM1, jnp.zeros((B, K, G * num_rows, V))
        _, sum_BKM1, out_BKMV = jax.lax.fori_loop(0, num_read, over_keys, stats)
        return (out_BKMV / sum_BKM1).reshape(B, K, G, num_rows, V)

    out_NBKGTV = jax.lax.map(over_queries, jnp.arange(num_tiles))
    return jnp.moveaxis(out_NBKGTV, 0, 3).reshape(B, K, G, -1, V)[:, :, :, :T]


def _dot(a, b, dim_a: int, dim_b: int) -> jax.Array:
    """Contracts `dim_a` of a with `dim_b` of b, for each sequence and key head (dims 0 and 1 of both)."""
    return jax.lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((0, 1), (0, 1))))
