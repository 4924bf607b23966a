"""Where keys and values of running sequences live, and how the model's attention reads and writes them.

One entry (k, v) per layer, each `[B, K, S, C]`: separate arrays per layer and head-major, because on a 2-core CPU a
decode step of a 4-layer model takes 3.0-3.9 ms that way, 5.4-8.5 ms with [B, S, K, C] and 18-41 ms with one stacked array.

Letters: B sequences, T new tokens, S capacity, K key heads, C head dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import attention
from models import config as config_lib

Entry = tuple[jax.Array, jax.Array]
Cache = tuple[Entry, ...]


def create(config: config_lib.ModelConfig, num_sequences: int, capacity: int) -> Cache:
    shape = (num_sequences, config.num_kv_heads, capacity, config.head_dim)
    return tuple((jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.num_layers))


def attend_at(start_B: jax.Array) -> Callable:
    """Returns the attention of `transformer.extend` for tokens at positions start, start + 1, ... of each sequence.

    It writes the new keys and values there and attends to every position up to each query's own. `start + T <= S` is the
    caller's duty (a write that would run over the end is moved back by XLA, silently).
    """

    def attend(entry: Entry, q_BTHC, k_BTKC, v_BTKC):
        k_BKSC = _write(entry[0], k_BTKC.swapaxes(1, 2), start_B)
        v_BKSC = _write(entry[1], v_BTKC.swapaxes(1, 2), start_B)
        T, S = q_BTHC.shape[1], k_BKSC.shape[2]
        position_BT = start_B[:, None] + jnp.arange(T)[None]
        mask_BTS = jnp.arange(S)[None, None] <= position_BT[:, :, None]
        return attention.attend(q_BTHC, k_BKSC, v_BKSC, mask_BTS), (k_BKSC, v_BKSC)

    return attend


def copy_rows(source: Cache, source_rows: jax.Array, target: Cache, target_rows: jax.Array) -> Cache:
    """Copies sequences `source_rows` into `target_rows`; rows of `target` out of range are skipped."""

    def copy(a_PKSC, b_BKSC):
        length = a_PKSC.shape[2]
        return b_BKSC.at[target_rows, :, :length].set(a_PKSC[source_rows], mode="drop")

    return jax.tree.map(copy, source, target)


def _write(cache_BKSC, new_BKTC, start_B):
    def write(row_KSC, new_KTC, start):
        return jax.lax.dynamic_update_slice(row_KSC, new_KTC, (0, start, 0))

    return jax.vmap(write)(cache_BKSC, new_BKTC.astype(cache_BKSC.dtype), start_B)
