"""The keys and values of sequences, and the attention that reads and writes them.

One entry (k, v) per layer, each `[B, K, S, C]`: separate arrays per layer and head-major, because on a 2-core CPU a
decode step of a 4-layer model takes 3.0-3.9 ms with them, 5.4-8.5 ms with [B, S, K, C] and 18-41 ms with one stacked array.
With `config.scan_layers`, equal layers share an entry `[N, B, K, S, C]`. The scan carries it and writes by scatter, because
a cache that a scan consumes and produces exists twice.

Latent attention (DeepSeek) keeps one array: the latent and the rotated key of each token, [B, 1, S, R + P]. The values are its
first R columns, so `v` has no columns. A sliding layer keeps every token and masks those outside its window, because a ring of
`window` rows could not be replayed by a validator.

Letters: B sequences, T new tokens, S capacity, K key heads, C head dim, N layers of a stack.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from inference.engine import cpu_decode_attention
from models import attention, transformer
from models import config as config_lib
from models.kernels import gpu_cached_attention
from sharding.mesh import rules

Entry = tuple[jax.Array, jax.Array] | cpu_decode_attention.Blocks
Cache = tuple[Entry, ...]


def create(config: config_lib.ModelConfig, num_sequences: int, capacity: int, num_layers: int = 0) -> Cache:
    """Returns a key-value cache of zeros with `capacity` positions per sequence, for the first layers alone if `num_layers` is given."""
    heads, k_dim, v_dim = config.num_kv_heads, config.head_dim, config.v_dim
    if config.is_latent:
        heads, k_dim, v_dim = 1, config.kv_latent_dim + config.rope_dim, 0
    stacks = [(len(layers),) if config.scan_layers else () for layers in transformer.stacks(config).values()]
    stacks = stacks[:num_layers] if num_layers else stacks

    def zeros(stack, dim):
        return jnp.zeros((*stack, num_sequences, heads, capacity, dim), config.dtype)

    return tuple((zeros(stack, k_dim), zeros(stack, v_dim)) for stack in stacks)


def layout(cache: Cache, mesh) -> Cache:
    """Returns the `PartitionSpec` of each cache array: sequences over the batch axes, key heads over `tensor` if they divide."""

    def of(x):
        return rules.fitting(mesh, x.shape, (*[None] * (x.ndim - 4), "batch", "kv_heads", None, None))

    return jax.tree.map(of, cache)


def attend_at(start_B: jax.Array, *, write_BT: jax.Array | None = None, implementation: str = "xla") -> Callable:
    """Returns the attention function of `transformer.extend` for tokens at positions start, start + 1, ...

    The function writes the new keys and values into the cache at these positions; where `write_BT` is False, the old ones stay.
    Each query attends to all positions up to its own. The caller ensures `start + T <= S`: XLA silently moves a write past the end back, and in a stacked cache such a write is undefined.
    `implementation` is a value of `ModelConfig.attention`: "auto" and "triton" run the kernel of GPUs where it fits.
    """

    def attend(entry, q_BTHC, k_BTKC, v_BTKC, *, window: int = 0, value_dim: int = 0, **how):
        if isinstance(entry, cpu_decode_attention.Blocks):
            assert not value_dim
            how |= {"window": window, "active_B": None if write_BT is None else write_BT[:, 0]}
            return cpu_decode_attention.step(entry, q_BTHC, k_BTKC, v_BTKC, start_B, **how)
        position_BT = start_B[:, None] + jnp.arange(q_BTHC.shape[1])[None]
        entry = _update(entry, k_BTKC, v_BTKC, start_B, position_BT, write_BT)
        if implementation in ("auto", "triton") and gpu_cached_attention.fits(q_BTHC, *entry[:2]):
            keys, values, layer = entry if len(entry) == 3 else (*(x[None] for x in entry), 0)
            return gpu_cached_attention.attend(q_BTHC, keys, values, layer, start_B, window=window, **how), entry
        k_BKSC, v_BKSC = entry if len(entry) == 2 else (x[entry[2]] for x in entry[:2])
        if value_dim:
            v_BKSC = k_BKSC[..., :value_dim]
        return attention.attend_cached(q_BTHC, k_BKSC, v_BKSC, start_B, window=window, **how), entry

    return attend


def copy_rows(source: Entry, source_rows: jax.Array, target: Entry, target_rows: jax.Array) -> Entry:
    """Copies the sequences in rows `source_rows` of an entry to rows `target_rows` of `target`; skips rows out of range; returns the target."""

    def copy(a, b):
        stack = (slice(None),) * (a.ndim - 4)
        return b.at[(*stack, target_rows, slice(None), slice(a.shape[-2]))].set(a[(*stack, source_rows)], mode="drop")

    assert not isinstance(source, cpu_decode_attention.Blocks)
    if isinstance(target, cpu_decode_attention.Blocks):
        return cpu_decode_attention.copy_rows(*source, source_rows, target, target_rows)
    return copy(source[0], target[0]), copy(source[1], target[1])


def _update(entry, k_BTKC, v_BTKC, start_B, position_BT, write_BT):
    """Writes new keys and values into the cache `entry` of a layer; returns the new entry.

    An entry is (keys, values) of one layer, or (keys, values, layer index) of a stack of layers.
    """
    new = [k_BTKC, v_BTKC]

    def merged(old):
        return [jnp.where(write_BT[:, :, None, None], n, o) for n, o in zip(new, old, strict=True)]

    if len(entry) == 2:
        if write_BT is not None:
            new = merged(jnp.take_along_axis(x, position_BT[:, None, :, None], axis=2).swapaxes(1, 2) for x in entry)
        return tuple(_write(x, n.swapaxes(1, 2), start_B) for x, n in zip(entry, new, strict=True))
    *stacked, layer = entry
    # Heads are indexed, too: with a slice, XLA on a TPU chooses another layout and copies the whole cache at every call.
    rows_B11, heads_11K = jnp.arange(k_BTKC.shape[0])[:, None, None], jnp.arange(k_BTKC.shape[2])[None, None]
    where = (layer, rows_B11, heads_11K, position_BT[:, :, None])
    if write_BT is not None:
        new = merged(x[where] for x in stacked)
    how = {"unique_indices": True, "mode": "promise_in_bounds"}
    return *(x.at[where].set(n.astype(x.dtype), **how) for x, n in zip(stacked, new, strict=True)), layer


def _write(cache_BKSC, new_BKTC, start_B):
    def write(row_KSC, new_KTC, start):
        return jax.lax.dynamic_update_slice(row_KSC, new_KTC, (0, start, 0))

    return jax.vmap(write)(cache_BKSC, new_BKTC.astype(cache_BKSC.dtype), start_B)
