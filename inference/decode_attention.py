"""Attention of one new token per sequence over its cached keys: what a decode step runs.

On a CPU, XLA makes a small matmul per sequence and key head of it, each of which costs more to call than to compute, with
transposes of the scores around them. Here both products are loops over whole arrays instead: a decode step of the 4 M
model of bench/inference.py, 64 sequences of 96 keys, takes 5.1 ms so and 10.0 ms with `attention.attend` (2 cores).

All keys are read, however short the sequences are. Reading fewer blocks of them where the longest allows it, each number of
blocks a program, was tried: XLA sums the same block in another order in another program, and a token's bits would depend
on who runs beside it.

Elsewhere, and for what is better off as matmuls (many query heads per key head, as in latent attention), `attention.attend`.

Letters: B sequences, S keys, H query heads, K key heads, G = H / K, C head dim (of values: V), N lanes.
"""

import jax
import jax.numpy as jnp

from models import attention

LANES = 16  # float32 numbers of the widest CPU vector
MAX_QUERIES = 8  # query heads per key head up to which the loops win: they read each key once per query


def attend(
    q_B1HC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSV: jax.Array,
    mask_B1S: jax.Array,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """`attention.attend` of one query per sequence; returns [B, 1, H, V]."""
    B, _, H, C = q_B1HC.shape
    K, S = k_BKSC.shape[1:3]
    lanes = next(n for n in (LANES, 8, 4, 2, 1) if C % n == 0)
    if attention.platform() != "cpu" or H // K > MAX_QUERIES or sinks_H is not None:
        how = {"scale": scale, "softcap": softcap, "sinks_H": sinks_H}
        return attention.attend(q_B1HC, k_BKSC, v_BKSV, mask_B1S, **how)
    q = q_B1HC.reshape(B, K, H // K, 1, C // lanes, lanes).astype(jnp.float32)
    k = k_BKSC.reshape(B, K, 1, S, C // lanes, lanes).astype(jnp.float32)
    # Two sums: XLA runs the first over whole vectors, a sum over all of C one number at a time.
    scores_BKGS = (q * k).sum(axis=4).sum(axis=4) * (C**-0.5 if scale is None else scale)
    if softcap:
        scores_BKGS = softcap * jnp.tanh(scores_BKGS / softcap)
    weights_BKGS = jax.nn.softmax(jnp.where(mask_B1S[:, None], scores_BKGS, attention.MASKED), axis=-1)
    out_BKGV = (weights_BKGS[..., None] * v_BKSV[:, :, None].astype(jnp.float32)).sum(axis=3)
    return out_BKGV.reshape(B, 1, H, v_BKSV.shape[-1]).astype(q_B1HC.dtype)
