"""Decode attention on a CPU: the attention of one new token per sequence over its cached keys.

1. `create` divides the positions of all sequences into blocks, contiguous in memory. `copy_rows` copies prefilled prompts into them.
2. `step` writes the new key and value of each sequence, then reads the blocks up to the last one in use by any sequence,
   and accumulates the softmax from block to block (arXiv 1805.02867).
3. Products read keys and values in their own dtype and sum in float32: a copy in float32 would take longer than the products. Weights of
   values in bfloat16 are split into two numbers of bfloat16, so that they keep 16 bits.

So a step reads as many keys as the longest sequence has, not the capacity. A sequence's bits do not depend on the number of
blocks read for others: a block without a key of the sequence leaves its maximum unchanged, scales by exp(0) = 1 and adds
exp(-1e30) = 0. Used where `fits` is True (docs/decisions/kept.md has the times).

Letters: N blocks, B sequences, K key heads, S positions of a block, H query heads, G = H / K, C head dim (of values: V).
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from models import config as config_lib
from models.kernels import attention_tiles
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules

MAX_BLOCK = 128  # positions; smaller blocks cost more in loop iterations than they save in keys
MULTIPLE = 16  # float32 numbers of the widest CPU vector


@struct.dataclass
class Blocks:
    """The cached keys and values of one layer for all sequences, divided into blocks of S positions."""

    keys_NBKSC: jax.Array
    values_NBKSV: jax.Array


def fits(config: config_lib.ModelConfig) -> bool:
    """Returns True if this block layout works: on one CPU device, for unstacked layers without latent attention."""
    is_alone = rules.several_devices() is None
    return mesh_lib.platform() == "cpu" and is_alone and not config.is_latent and not config.scan_layers


def division(capacity: int) -> tuple[int, int]:
    """Returns (number of blocks, positions of a block) for at least `capacity` positions per sequence."""
    num_blocks = -(-capacity // MAX_BLOCK)
    return num_blocks, -(-capacity // (num_blocks * MULTIPLE)) * MULTIPLE


def create(
    config: config_lib.ModelConfig, num_sequences: int, capacity: int, num_blocks: int = 0
) -> tuple[Blocks, ...]:
    """Returns one `Blocks` of zeros per layer, with the first `num_blocks` of the blocks for `capacity` positions (0: all)."""
    most, block = division(capacity)
    shape = num_blocks or most, num_sequences, config.num_kv_heads
    return tuple(
        Blocks(
            jnp.zeros((*shape, block, config.head_dim), config.dtype),
            jnp.zeros((*shape, block, config.v_dim), config.dtype),
        )
        for _ in range(config.num_layers)
    )


def copy_rows(k_PKTC: jax.Array, v_PKTV: jax.Array, rows_B: jax.Array, blocks: Blocks, slots_B: jax.Array) -> Blocks:
    """Copies keys and values of prompts `rows_B` into sequences `slots_B` of a layer's blocks; skips slots out of range.

    Padding past the last block is not copied.
    """
    N, B, _, S, _ = blocks.values_NBKSV.shape
    order = jnp.nonzero(slots_B < B, size=len(slots_B), fill_value=0)[0]

    def copy(n, x_PKTC):
        """Returns the pieces of a prompt: whole blocks, and the beginning of one."""
        x_KTC = jax.lax.dynamic_index_in_dim(x_PKTC, rows_B[order[n]], keepdims=False)[:, : N * S]
        K, T, C = x_KTC.shape
        whole = T // S
        pieces = [jnp.moveaxis(x_KTC[:, : whole * S].reshape(K, whole, S, C), 1, 0), x_KTC[None, :, whole * S :]]
        return [(at, piece[:, None]) for at, piece in zip((0, whole), pieces, strict=True) if piece.size]

    def insert(n, blocks):
        def put(target, source):
            for at, piece in copy(n, source):
                target = jax.lax.dynamic_update_slice(target, piece, (at, slots_B[order[n]], 0, 0, 0))
            return target

        return Blocks(put(blocks.keys_NBKSC, k_PKTC), put(blocks.values_NBKSV, v_PKTV))

    # A loop of updates in place: XLA's scatter on a CPU copies the whole cache.
    return jax.lax.fori_loop(0, jnp.sum(slots_B < B), insert, blocks)


@functools.partial(jax.jit, static_argnums=2)
def read_row(blocks: Blocks, slot: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns copies of one sequence's first `size` keys and values, [1, K, size, C] each, as `copy_rows` takes them.

    Positions past the last block are zeros.
    """

    def joined(x_NKSC: jax.Array) -> jax.Array:
        x_1KTC = jnp.moveaxis(x_NKSC, 0, 1).reshape(1, x_NKSC.shape[1], -1, x_NKSC.shape[-1])[:, :, :size]
        return jnp.pad(x_1KTC, [(0, 0), (0, 0), (0, size - x_1KTC.shape[2]), (0, 0)])

    return joined(blocks.keys_NBKSC[:, slot]), joined(blocks.values_NBKSV[:, slot])


def step(
    blocks: Blocks,
    q_B1HC: jax.Array,
    k_B1KC: jax.Array,
    v_B1KV: jax.Array,
    position_B: jax.Array,
    *,
    active_B: jax.Array | None = None,
    window: int = 0,
    scale: float | None = None,
    sinks_H: jax.Array | None = None,
) -> tuple[jax.Array, Blocks]:
    """Writes one new key and value per sequence at `position_B`, then attends from the query of that token.

    Returns (attention output [B, 1, H, V], the new blocks). Only sequences in `active_B` write (None: all). The other options are
    those of `attention.attend`. With a window, a query reads that many tokens, including its own.
    """
    B, _, H, C = q_B1HC.shape
    keys, values, rows_B = blocks.keys_NBKSC, blocks.values_NBKSV, jnp.arange(B)
    K, S, V = values.shape[2:]
    block_B, column_B = position_B // S, position_B % S
    where = {"unique_indices": True, "mode": "promise_in_bounds"}
    if active_B is not None:
        rows_B, where["mode"] = jnp.where(active_B, rows_B, B + rows_B), "drop"
    keys = keys.at[block_B, rows_B, :, column_B].set(k_B1KC[:, 0].astype(keys.dtype), **where)
    values = values.at[block_B, rows_B, :, column_B].set(v_B1KV[:, 0].astype(values.dtype), **where)
    # Of one block of one sequence, XLA would fuse the write with the reads, and copy it eight times.
    keys, values = jax.lax.optimization_barrier((keys, values))
    q_BKGC, factor = q_B1HC.reshape(B, K, H // K, C), C**-0.5 if scale is None else scale

    def block(n, carry):
        out_BKGV, total_BKG, top_BKG = carry
        k_BKSC, v_BKSV = (jax.lax.dynamic_index_in_dim(x, n, keepdims=False) for x in (keys, values))
        scores_BKGS = factor * jnp.einsum("BKGC,BKSC->BKGS", q_BKGC, k_BKSC, preferred_element_type=jnp.float32)
        at_1S, own_B1 = n * S + jnp.arange(S)[None], position_B[:, None]
        mask_BS = at_1S <= own_B1
        if window:
            mask_BS &= at_1S > own_B1 - window
        scores_BKGS = jnp.where(mask_BS[:, None, None], scores_BKGS, attention_tiles.MASKED)
        new_BKG = jnp.maximum(top_BKG, scores_BKGS.max(axis=-1))
        keep_BKG, weights_BKGS = jnp.exp(top_BKG - new_BKG), jnp.exp(scores_BKGS - new_BKG[..., None])
        part_BKGV = _weighted_sums(weights_BKGS, v_BKSV)
        return out_BKGV * keep_BKG[..., None] + part_BKGV, total_BKG * keep_BKG + weights_BKGS.sum(axis=-1), new_BKG

    shape = B, K, H // K
    total_BKG, top_BKG = jnp.zeros(shape), jnp.full(shape, attention_tiles.MASKED)
    if sinks_H is not None:  # one more score, without a value
        total_BKG = jnp.ones(shape)
        top_BKG = jnp.broadcast_to(sinks_H.astype(jnp.float32).reshape(1, *shape[1:]), shape)
    carry = jnp.zeros((*shape, V)), total_BKG, top_BKG
    if len(keys) == 1:
        out_BKGV, total_BKG, _ = block(0, carry)
    else:
        out_BKGV, total_BKG, _ = jax.lax.fori_loop(0, jnp.max(block_B) + 1, block, carry)
    out_B1HV = (out_BKGV / total_BKG[..., None]).reshape(B, 1, H, V)
    return out_B1HV.astype(q_B1HC.dtype), Blocks(keys, values)


def _weighted_sums(weights_BKGS: jax.Array, v_BKSV: jax.Array) -> jax.Array:
    """Returns the sums of values, by weights of float32, over the positions: float32 [B, K, G, V]."""

    def sums(rows):
        return jnp.einsum("BKGS,BKSV->BKGV", rows, v_BKSV, preferred_element_type=jnp.float32)

    if v_BKSV.dtype == jnp.float32:
        return sums(weights_BKGS)
    high = weights_BKGS.astype(v_BKSV.dtype)
    low = (weights_BKGS - high.astype(jnp.float32)).astype(v_BKSV.dtype)
    high_BKGV, low_BKGV = jnp.split(sums(jnp.concatenate([high, low], axis=2)), 2, axis=2)
    return high_BKGV + low_BKGV
