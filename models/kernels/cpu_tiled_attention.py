"""Causal attention of long packed rows on a CPU, by tiles, without those in which no query may read a key.

1. Columns are cut into tiles of equal size. A tile of queries goes over the tiles of keys up to its own, with the softmax
   accumulated from one to the next (arXiv 1805.02867, 2205.14135). What stays is a number per query.
2. Where the mask lets nothing through (above the diagonal, another sequence, the branch of another sample, beyond the
   window), nothing is computed: the cost is that of the sequences, whatever row they are packed into.
3. The backward pass computes the weights of a tile again. Memory is that of a few tiles, and one tile is compiled.

Letters: B sequences, T tokens, K key heads, G query heads of each, C head dim (of values: V), S columns of a tile,
M = G S queries of a tile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.kernels import cpu_attention

TILE = 256  # columns, at most
MASKED = (
    -1e30
)  # finite: a query that has read nothing yet has weights of 1, which the first key it may read multiplies by 0


def attend(
    q_BKGTC: jax.Array, k_BKTC: jax.Array, v_BKTV: jax.Array, packing: Any, readable: Callable, scale: float
) -> jax.Array:
    """softmax(scale q k) v, float32 [B, K, G, T, V].

    Args:
      packing: a tree of arrays [B, T] that describes columns (`attention.Packing`).
      readable: `readable(packing, columns, packing, columns) -> mask [B, S, S]` of a tile of queries and one of keys: causal
        by column, and every query may read itself.
    """
    T = q_BKGTC.shape[3]
    num_tiles = -(-T // TILE)
    size = -(-T // num_tiles // 8) * 8
    pad = num_tiles * size - T

    def padded(x, axis):
        return jnp.pad(x, [(0, pad if dim == axis else 0) for dim in range(x.ndim)])

    packing = jax.tree.map(lambda x_BT: padded(x_BT, 1), packing)
    tiles = _Tiles(size, num_tiles, readable, scale)
    out_BKGTV = _attend(tiles, padded(q_BKGTC, 3), padded(k_BKTC, 2), padded(v_BKTV, 2), packing)
    return out_BKGTV[:, :, :, :T]


class _Tiles:
    """What is static: how columns are cut, and who may read whom."""

    def __init__(self, size: int, num: int, readable: Callable, scale: float):
        self.size, self.num, self.readable, self.scale = size, num, readable, scale

    def of(self, x, i, axis: int):
        return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

    def queries(self, x_BKGTC, i) -> jax.Array:
        """[B, K, M, C]: all heads of a key head below one another."""
        B, K, _, _, C = x_BKGTC.shape
        return self.of(x_BKGTC, i, 3).reshape(B, K, -1, C)

    def mask(self, packing, i, j) -> jax.Array:
        """[B, S, S]: which keys of tile j the queries of tile i may read."""
        query, key = (jax.tree.map(lambda x_BT, t=t: self.of(x_BT, t, 1), packing) for t in (i, j))
        columns_S = jnp.arange(self.size)
        return self.readable(query, i * self.size + columns_S, key, j * self.size + columns_S)

    def scores(self, q_BKMC, k_BKSC, mask_BSS) -> jax.Array:
        """[B, K, M, S]."""
        B, K, M, _ = q_BKMC.shape
        scores_BKGSS = cpu_attention.dot(q_BKMC, k_BKSC, 3, 3).reshape(B, K, -1, self.size, self.size) * self.scale
        return jnp.where(mask_BSS[:, None, None], scores_BKGSS, MASKED).reshape(B, K, M, self.size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiles: _Tiles, q_BKGTC, k_BKTC, v_BKTV, packing):
    return _forward(tiles, q_BKGTC, k_BKTC, v_BKTV, packing)[0]


def _forward(tiles: _Tiles, q_BKGTC, k_BKTC, v_BKTV, packing):
    B, K, G, T, _ = q_BKGTC.shape
    M, V = G * tiles.size, v_BKTV.shape[3]

    def over_queries(i, carry):
        out_BKGTV, log_norm_BKGT = carry
        q_BKMC = tiles.queries(q_BKGTC, i)

        def over_keys(j, stats):
            mask_BSS = tiles.mask(packing, i, j)

            def read(stats):
                max_BKM1, sum_BKM1, out_BKMV = stats
                scores_BKMS = tiles.scores(q_BKMC, tiles.of(k_BKTC, j, 2), mask_BSS)
                new_max_BKM1 = jnp.maximum(max_BKM1, scores_BKMS.max(axis=-1, keepdims=True))
                weights_BKMS = jnp.exp(scores_BKMS - new_max_BKM1)
                down_BKM1 = jnp.exp(max_BKM1 - new_max_BKM1)
                read_BKMV = cpu_attention.dot(weights_BKMS, tiles.of(v_BKTV, j, 2), 3, 2)
                sum_BKM1 = sum_BKM1 * down_BKM1 + weights_BKMS.sum(axis=-1, keepdims=True)
                return new_max_BKM1, sum_BKM1, out_BKMV * down_BKM1 + read_BKMV

            return jax.lax.cond(jnp.any(mask_BSS), read, lambda stats: stats, stats)

        zero_BKM1 = jnp.zeros((B, K, M, 1))
        stats = zero_BKM1 + MASKED, zero_BKM1, jnp.zeros((B, K, M, V))
        max_BKM1, sum_BKM1, out_BKMV = jax.lax.fori_loop(0, i + 1, over_keys, stats)

        def put(whole, part_BKMX):
            part = part_BKMX.reshape(B, K, G, tiles.size, *whole.shape[4:])
            return jax.lax.dynamic_update_slice_in_dim(whole, part, i * tiles.size, 3)

        return put(out_BKGTV, out_BKMV / sum_BKM1), put(log_norm_BKGT, max_BKM1 + jnp.log(sum_BKM1))

    blank = jnp.zeros((B, K, G, T, V)), jnp.zeros((B, K, G, T))
    out_BKGTV, log_norm_BKGT = jax.lax.fori_loop(0, tiles.num, over_queries, blank)
    return out_BKGTV, (q_BKGTC, k_BKTC, v_BKTV, packing, out_BKGTV, log_norm_BKGT)


def _backward(tiles: _Tiles, saved, d_out_BKGTV):
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
                d_weights_BKMS = cpu_attention.dot(d_out_BKMV, v_BKSV, 3, 3)
                d_scores_BKMS = weights_BKMS * (d_weights_BKMS - d_sum_BKM1) * tiles.scale
                # Keys and values transposed, so that no transposed copy is made of what is large (models/kernels/cpu_attention.py).
                return (
                    cpu_attention.dot(d_scores_BKMS, k_BKSC, 3, 2),
                    cpu_attention.dot(q_BKMC, d_scores_BKMS, 2, 2),
                    cpu_attention.dot(d_out_BKMV, weights_BKMS, 2, 2),
                )

            blank = (jnp.zeros_like(q_BKMC), *(jnp.zeros((B, K, x.shape[3], tiles.size)) for x in (k_BKSC, v_BKSV)))
            new_q_BKMC, new_k_BKCS, new_v_BKVS = jax.lax.cond(jnp.any(mask_BSS), read, lambda _: blank, None)

            def add(whole, part):
                sum_ = tiles.of(whole, j, 3) + part
                return jax.lax.dynamic_update_slice_in_dim(whole, sum_, j * tiles.size, 3)

            return d_q_BKMC + new_q_BKMC, add(d_k_BKCT, new_k_BKCS), add(d_v_BKVT, new_v_BKVS)

        d_q_BKMC, d_k_BKCT, d_v_BKVT = jax.lax.fori_loop(
            0, i + 1, over_keys, (jnp.zeros_like(q_BKMC), d_k_BKCT, d_v_BKVT)
        )
        d_q_BKGSC = d_q_BKMC.reshape(B, K, G, tiles.size, C)
        d_q_BKGTC = jax.lax.dynamic_update_slice_in_dim(d_q_BKGTC, d_q_BKGSC, i * tiles.size, 3)
        return d_q_BKGTC, d_k_BKCT, d_v_BKVT

    blank = jnp.zeros_like(q_BKGTC), jnp.zeros_like(k_BKTC.swapaxes(2, 3)), jnp.zeros_like(v_BKTV.swapaxes(2, 3))
    d_q_BKGTC, d_k_BKCT, d_v_BKVT = jax.lax.fori_loop(0, tiles.num, over_queries, blank)
    return d_q_BKGTC, d_k_BKCT.swapaxes(2, 3), d_v_BKVT.swapaxes(2, 3), None


_attend.defvjp(_forward, _backward)
