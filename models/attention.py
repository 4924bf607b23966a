"""Grouped-query attention as a function of queries, keys and a mask; who keeps the keys is the caller's affair.

Letters: B sequences, T query tokens, S keys, H query heads, K key heads, G = H / K, C head dim.
"""

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row with no key gives a uniform softmax instead of NaN; its output is unused


def attend(q_BTHC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(C)) v under a mask; scores and softmax in float32. Returns [B, T, H, C].

    Query head h reads key head h // (H / K). Keys are head-major: on a CPU a decode step over [B, K, S, C] takes
    about half the time of one over [B, S, K, C].
    """
    B, T, H, C = q_BTHC.shape
    K = k_BKSC.shape[1]
    q_BTKGC = q_BTHC.reshape(B, T, K, H // K, C)
    scores_BKGTS = jnp.einsum("BTKGC,BKSC->BKGTS", q_BTKGC, k_BKSC, preferred_element_type=jnp.float32)
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS * C**-0.5, MASKED)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(q_BTHC.dtype)
    return jnp.einsum("BKGTS,BKSC->BTKGC", weights_BKGTS, v_BKSC).reshape(B, T, H, C)


def packed_mask(segment_ids_BT: jax.Array, branch_ids_BT: jax.Array | None = None) -> jax.Array:
    """Causal inside each packed sequence, nothing across: [B, T, T], True where query t may read key s.

    With branches, a segment is a shared prompt (branch 0) and its continuations (1, 2, ...): each reads the prompt and
    itself. Segment 0 is padding; it may read itself, which keeps its (unused) rows finite.
    """
    T = segment_ids_BT.shape[1]
    mask_BTS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & jnp.tril(jnp.ones((T, T), bool))[None]
    if branch_ids_BT is None:
        return mask_BTS
    key_B1S = branch_ids_BT[:, None, :]
    return mask_BTS & ((key_B1S == 0) | (key_B1S == branch_ids_BT[:, :, None]))
