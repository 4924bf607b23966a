"""Attention of one new token per sequence over its cached keys on an NVIDIA GPU, by a Triton kernel that reads no others.

1. A program reads at most `PART` keys of one key head of one sequence, once for all query heads that share them, in place: a layer
   of a stacked cache is not copied out of it. Programs past the end of a sequence, or before its window, read nothing.
2. Each returns its share of the softmax, (weighted values, sum of weights, maximum), and XLA merges the shares (flash decoding).
   The parts of a sequence depend on its length alone, and so do its bits.

Letters: N layers of a stack, B sequences, K key heads, S capacity, H query heads, G = H / K padded to a tile, C head dim (of values:
V), P parts.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from models.kernels import attention_tiles, gpu_attention
from sharding import rules

PART = 1024  # keys of a program
TILE = (64, 4, 3)  # keys of a step of a program, warps, stages of its pipeline
ROWS = 16  # of the smallest tile that a product has


def fits(q_BTHC: jax.Array, keys: jax.Array, values: jax.Array) -> bool:
    """Returns True if the kernel can run: one new token per sequence, on one GPU, in arrays [.., S, C] that its tiles divide."""
    dims, is_alone = (q_BTHC.shape[-1], values.shape[-1]), rules.several_devices() is None
    is_tiled = all(16 <= dim <= 256 and dim & (dim - 1) == 0 for dim in dims) and keys.shape[-2] % ROWS == 0
    return q_BTHC.shape[1] == 1 and is_tiled and is_alone and not gpu_attention.obstacle()


def attend(
    q_B1HC: jax.Array,
    k_NBKSC: jax.Array,
    v_NBKSV: jax.Array,
    layer: jax.Array | int,
    length_B: jax.Array,
    *,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks_H: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns the attention of each query to the first `length_B` keys of its sequence, [B, 1, H, V].

    With a window, a query reads the last of them. The other options are those of `attention.attend`. `interpret` runs the kernel
    on a CPU.
    """
    (B, _, H, C), (_, _, K, S, V) = q_B1HC.shape, v_NBKSV.shape
    is_wide = q_B1HC.dtype == jnp.float32 or max(C, V) > 128  # they take more registers and shared memory
    G, size = max(ROWS, pl.next_power_of_2(H // K)), min(S & -S, TILE[0] // 2 if is_wide else TILE[0])
    num_parts = -(-S // PART)
    factor = C**-0.5 if scale is None else scale

    def decode_attention(q_ref, k_ref, v_ref, layer_ref, length_ref, sinks_ref, out_ref, total_ref, top_ref):
        b, k, p = (pl.program_id(dim) for dim in range(3))
        n_layer, end = layer_ref[0], length_ref[b]
        first = jnp.maximum(end - window, 0) if window else jnp.zeros_like(end)
        q_GC = q_ref[b, k]

        def read(n, stats):
            out_GV, total_G, top_G = stats
            keys = pl.ds(n * size, size)
            scores_GS = attention_tiles.dot(q_GC, k_ref[n_layer, b, k, keys, :], 1, 1) * factor
            if softcap:
                scores_GS = softcap * jnp.tanh(scores_GS / softcap)
            at_S = n * size + jnp.arange(size)
            scores_GS = jnp.where(((at_S >= first) & (at_S < end))[None], scores_GS, attention_tiles.MASKED)
            new_top_G = jnp.maximum(top_G, scores_GS.max(axis=1))
            weights_GS, down_G = jnp.exp(scores_GS - new_top_G[:, None]), jnp.exp(top_G - new_top_G)
            read_GV = attention_tiles.dot(weights_GS.astype(q_GC.dtype), v_ref[n_layer, b, k, keys, :], 1, 0)
            return out_GV * down_G[:, None] + read_GV, total_G * down_G + weights_GS.sum(axis=1), new_top_G

        tiles = jnp.maximum(first, p * PART), jnp.minimum(end, (p + 1) * PART) + size - 1
        total_G, top_G = jnp.zeros(G, jnp.float32), jnp.full(G, attention_tiles.MASKED)
        if sinks_ref is not None:  # one more score, without a value, in the first part
            total_G, top_G = jnp.where(p == 0, 1, total_G), jnp.where(p == 0, sinks_ref[k], top_G)
        stats = jnp.zeros((G, V), jnp.float32), total_G, top_G
        stats = jax.lax.fori_loop(jax.lax.div(tiles[0], size), jax.lax.div(tiles[1], size), read, stats)
        out_ref[b, k, p], total_ref[b, k, p], top_ref[b, k, p] = stats

    def by_key_head(x, *dims):  # in tiles of G query heads
        return jnp.pad(x.reshape(-1, K, H // K, *dims), ((0, 0), (0, 0), (0, G - H // K), *[(0, 0) for _ in dims]))

    sinks_KG = None if sinks_H is None else by_key_head(sinks_H.astype(jnp.float32))[0]
    shapes = ((B, K, num_parts, G, *dims) for dims in ((V,), (), ()))
    out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = gpu_attention.kernel_call(decode_attention, TILE, (B, K, num_parts), out_shape, interpret)
    shares = call(by_key_head(q_B1HC, C), k_NBKSC, v_NBKSV, jnp.full(1, layer, jnp.int32), length_B, sinks_KG)
    out_BKPGV, total_BKPG, top_BKPG = (x_BKPG[:, :, :, : H // K] for x_BKPG in shares)
    down_BKPG = jnp.exp(top_BKPG - top_BKPG.max(axis=2, keepdims=True))
    total_BKG = (total_BKPG * down_BKPG).sum(axis=2)
    out_BKGV = (out_BKPGV * down_BKPG[..., None]).sum(axis=2) / total_BKG[..., None]
    return out_BKGV.astype(q_B1HC.dtype).reshape(B, 1, H, V)
