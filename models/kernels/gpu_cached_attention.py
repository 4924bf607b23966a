"""Attention of new tokens over the cached keys of their sequences on an NVIDIA GPU, by a Triton kernel that reads no others.

1. A program has a tile of rows: all query heads that share a key head, for one token or several. It reads at most `PART` keys of
   one sequence, in place: a layer of a stacked cache is not copied out of it. It ends at the last key that its tokens read, and a
   program past this end, or before their windows, reads nothing.
2. Each returns its share of the softmax, (weighted values, sum of weights, maximum), and XLA merges the shares (flash decoding).
   The parts of a sequence depend on its length alone, and so do its bits.

Letters: N layers of a stack, B sequences, T new tokens, K key heads, S capacity, H query heads, G = H / K, A = T G rows padded to
whole tiles, R rows of a tile, C head dim (of values: V), P parts.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from models.kernels import attention_tiles, gpu_attention
from sharding.mesh import rules

PART = 1024  # keys of a program
ROWS = 16  # of the smallest tile that a product has


def fits(q_BTHC: jax.Array, keys: jax.Array, values: jax.Array) -> bool:
    """Returns True if the kernel can run: on one GPU, in arrays [.., S, C] that its tiles divide."""
    dims, is_alone = (q_BTHC.shape[-1], values.shape[-1]), rules.several_devices() is None
    is_tiled = all(16 <= dim <= 256 and dim & (dim - 1) == 0 for dim in dims) and keys.shape[-2] % ROWS == 0
    return is_tiled and is_alone and not gpu_attention.obstacle()


def attend(
    q_BTHC: jax.Array,
    k_NBKSC: jax.Array,
    v_NBKSV: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    *,
    window: int = 0,
    scale: float | None = None,
    sinks_H: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns the attention of the queries at positions `start_B`, start + 1, ... to the keys up to their own, [B, T, H, V].

    With a window, a query reads the last of them. The other options are those of `attention.attend`. `interpret` runs the kernel
    on a CPU.
    """
    (B, T, H, C), (_, _, K, S, V) = q_BTHC.shape, v_NBKSV.shape
    G, (block, (most, warps, stages), _) = H // K, gpu_attention.tiles(q_BTHC.dtype, max(C, V))
    R, size = min(max(ROWS, pl.next_power_of_2(T * G)), block), min(S & -S, most)
    num_rows = T * G + -T * G % R
    part = PART if num_rows <= PART else S  # many rows fill the GPU, and their shares much memory
    num_parts = -(-S // part)
    factor = C**-0.5 if scale is None else scale

    def cached_attention(q_ref, k_ref, v_ref, layer_ref, start_ref, sinks_ref, out_ref, total_ref, top_ref):
        b, k, p, i = (pl.program_id(dim) for dim in range(4))
        n_layer, own, row_R = layer_ref[0], pl.ds(i * R, R), i * R + jnp.arange(R)
        q_RC = q_ref[b, k, own, :]
        position_R = start_ref[b] + jnp.minimum(jax.lax.div(row_R, G), T - 1)
        first = start_ref[b] + jax.lax.div(i * R, G) - window + 1 if window else 0
        end = start_ref[b] + jnp.minimum(jax.lax.div(i * R + R - 1, G), T - 1) + 1

        def read(n, stats):
            keys = pl.ds(n * size, size)
            scores_RS = attention_tiles.dot(q_RC, k_ref[n_layer, b, k, keys, :], 1, 1) * factor
            behind_RS = position_R[:, None] - (n * size + jnp.arange(size))[None]
            mask_RS = (behind_RS >= 0) & (behind_RS < window) if window else behind_RS >= 0
            scores_RS = jnp.where(mask_RS, scores_RS, attention_tiles.MASKED)
            return gpu_attention.accumulated(stats, scores_RS, v_ref[n_layer, b, k, keys, :])

        total_R, top_R = jnp.zeros(R, jnp.float32), jnp.full(R, attention_tiles.MASKED)
        if sinks_ref is not None:  # one more score, without a value, in the first part
            total_R, top_R = jnp.where(p == 0, 1, total_R), jnp.where(p == 0, sinks_ref[k, own], top_R)
        stats = jnp.zeros((R, V), jnp.float32), total_R, top_R
        start, stop = jnp.maximum(first, p * part), jnp.minimum(end, (p + 1) * part) + size - 1
        stats = jax.lax.fori_loop(jax.lax.div(start, size), jax.lax.div(stop, size), read, stats)
        out_ref[b, k, p, own, :], total_ref[b, k, p, own], top_ref[b, k, p, own] = stats

    def by_key_head(x, *dims):  # [.., T, H, ..] -> [.., K, padded T G, ..]
        x = jnp.moveaxis(x.reshape(-1, T, K, G, *dims), 1, 2).reshape(-1, K, T * G, *dims)
        return jnp.pad(x, ((0, 0), (0, 0), (0, num_rows - T * G), *[(0, 0) for _ in dims]))

    sinks_KA = None
    if sinks_H is not None:
        sinks_KA = by_key_head(jnp.broadcast_to(sinks_H.astype(jnp.float32), (T, H)))[0]
    shapes = ((B, K, num_parts, num_rows, *dims) for dims in ((V,), (), ()))
    out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grid = B, K, num_parts, num_rows // R
    call = gpu_attention.kernel_call(cached_attention, (size, warps, stages), grid, out_shape, interpret)
    shares = call(by_key_head(q_BTHC, C), k_NBKSC, v_NBKSV, jnp.full(1, layer, jnp.int32), start_B, sinks_KA)
    out_BKPAV, total_BKPA, top_BKPA = (x_BKPA[:, :, :, : T * G] for x_BKPA in shares)
    down_BKPA = jnp.exp(top_BKPA - top_BKPA.max(axis=2, keepdims=True))
    total_BKA = (total_BKPA * down_BKPA).sum(axis=2)
    out_BKAV = (out_BKPAV * down_BKPA[..., None]).sum(axis=2) / total_BKA[..., None]
    out_BTKGV = jnp.moveaxis(out_BKAV.astype(q_BTHC.dtype).reshape(B, K, T, G, V), 1, 2)
    return out_BTKGV.reshape(B, T, H, V)
