"""The proof windows of running sequences: 32 hidden states each, kept in a ring on the device and reduced there.

1. Every decode step writes each slot's last hidden state into its ring of two windows (`write`).
2. At the end of a call, `finished` finds the windows that it completed, and the partly filled ones of sequences that ended.
3. `reduce` takes their top values (toploc.py), `GROUP` windows at a time, so that hidden states never leave the device.
4. The host makes proofs of the indices and values (`toploc.encode`). If it ends a sequence that the device would continue
   (at a stop string), it calls `top_values` for the last window itself.

Letters: B slots, W rows of a window, D model, k values of a proof, N windows.
"""

import jax
import jax.numpy as jnp

from inference.proofs import toploc

WINDOW = 32  # rows per proof
NUM_WINDOWS = 2  # in the ring: a call adds at most one window, so the one before it is still whole
TOP = 128  # values per proof
GROUP = 8  # windows reduced together


def create(num_slots: int, model_dim: int) -> jax.Array:
    """Creates the rings that keep the last hidden states of each slot, [B, 2, W, D]; row j is in window (j // W) % 2.

    Rings contain bfloat16 as uint16: XLA on a CPU scatters bfloat16 through a float32 copy of the whole ring at every step.
    """
    return jnp.zeros((num_slots, NUM_WINDOWS, WINDOW, model_dim), jnp.uint16)


def write(ring_B2WD: jax.Array, hidden_BD: jax.Array, row_B: jax.Array, where_B: jax.Array) -> jax.Array:
    """Writes the hidden state of row `row_B` into the ring of each slot where `where_B` is True; returns the new rings."""
    slot_B = jnp.where(where_B, jnp.arange(len(row_B)), len(row_B))  # past the end: dropped
    bits_BD = jax.lax.bitcast_convert_type(hidden_BD.astype(jnp.bfloat16), jnp.uint16)
    return ring_B2WD.at[slot_B, row_B // WINDOW % NUM_WINDOWS, row_B % WINDOW].set(bits_BD, mode="drop")


def finished(before_B: jax.Array, after_B: jax.Array, ended_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the proof windows to reduce after a decode call in which sequences grew from `before_B` to `after_B` rows.

    Returns (is_finished, window index, number of rows), [B, 2] each. Column 0 is the window that the call completed (at most one),
    column 1 the partly filled last window of a sequence that ended (`ended_B`).
    """
    window_B2 = jnp.stack([after_B // WINDOW - 1, after_B // WINDOW], axis=1)
    rows_B2 = jnp.stack([jnp.full_like(after_B, WINDOW), after_B % WINDOW], axis=1)
    is_finished_B2 = jnp.stack([after_B // WINDOW > before_B // WINDOW, ended_B & (after_B % WINDOW > 0)], axis=1)
    return is_finished_B2, window_B2, rows_B2


def reduce(ring_B2WD: jax.Array, is_finished_B2: jax.Array, window_B2: jax.Array, rows_B2: jax.Array):
    """Reduces finished windows to their top k values: returns (indices int32, bits uint16) [B, 2, k], zeros for other windows."""
    B, _ = is_finished_B2.shape
    is_finished, window, rows = is_finished_B2.reshape(-1), window_B2.reshape(-1), rows_B2.reshape(-1)
    size = -(-2 * B // GROUP) * GROUP
    order = jnp.nonzero(is_finished, size=size, fill_value=2 * B)[0]
    k = min(TOP, WINDOW * ring_B2WD.shape[-1])
    out = jnp.zeros((2 * B, k), jnp.int32), jnp.zeros((2 * B, k), jnp.uint16)

    def group(i, out):
        at = jax.lax.dynamic_slice(order, (i * GROUP,), (GROUP,))
        # A barrier, because libtpu 0.0.42 aborts if the gather of single rows is fused with its consumers.
        tops = jax.lax.optimization_barrier(top_values(ring_B2WD, at // 2, window[at], rows[at]))
        return tuple(x.at[at].set(top, mode="drop") for x, top in zip(out, tops, strict=True))

    num_groups = -(-is_finished.sum() // GROUP)
    return tuple(x.reshape(B, 2, k) for x in jax.lax.fori_loop(0, num_groups, group, out))


def top_values(ring_B2WD: jax.Array, slot_N: jax.Array, window_N: jax.Array, rows_N: jax.Array):
    """Returns (indices int32, bits uint16) [N, k]: the k largest values in the first `rows_N` rows of windows in the ring."""
    bits_NWD = ring_B2WD[slot_N, window_N % NUM_WINDOWS]
    filled_NW = jnp.arange(WINDOW)[None] < rows_N[:, None]
    bits_NM = jnp.where(filled_NW[..., None], bits_NWD, jnp.uint16(0)).reshape(len(slot_N), -1)
    return toploc.topk_indices(bits_NM, min(TOP, bits_NM.shape[1]))
