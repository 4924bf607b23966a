"""Samples one token per sequence from logits; the noise is a pure function of (seed, position).

1. noise = Gumbel(threefry(seed, position)), one draw per vocabulary entry.
2. token = argmax(filtered logits / temperature + noise), which is a sample from the softmax (Gumbel-max).
3. logp = log-probability of that token under the sampling distribution: after bias, temperature, top-k, top-p, min-p.

So a token depends on weights, prefix, seed and position only: not on its slot, the other sequences or the server. A validator
with the seed draws the same noise and checks the argmax (arXiv 2511.20621 uses the same property).

Letters: B sequences, V vocabulary, M biased entries.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sharding.mesh import mesh as mesh_lib

Array = jax.Array | np.ndarray


@struct.dataclass
class Sampling:
    """The sampling parameters of B sequences, as arrays [B]; biases are [B, M]. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off."""

    seed: Array  # uint32
    temperature: Array  # float32
    top_k: Array  # int32
    top_p: Array  # float32
    min_p: Array  # float32
    bias_ids: Array | None = None  # int32 [B, M], -1 where unused; None: no sequence has a bias
    bias: Array | None = None  # float32 [B, M], added to the logits of those entries
    allows_biased_only: Array | None = None  # bool [B], true: no other entry is sampled; None: for no sequence


def noise(seed_B: Array, position_B: Array, vocab_size: int) -> jax.Array:
    """Returns standard Gumbel noise [B, V], a pure function of (seed, position). Position 0 is the first prompt token.

    Entry v is the xor of the two words of threefry2x32(key = threefry2x32((0, seed), (0, position)), (0, v)), as in
    `jax.random.bits(fold_in(key(seed), position), (V,))`. Written out, because a proof must replay on another version of JAX, and
    because JAX's own threefry is four times as slow on a CPU. u = (the top 23 bits + 1/2) / 2^23 is strictly inside (0, 1).
    """
    zero_B = jnp.zeros_like(seed_B, jnp.uint32)
    key = _threefry2x32(zero_B, seed_B.astype(jnp.uint32), zero_B, position_B.astype(jnp.uint32))
    entry_1V = jnp.arange(vocab_size, dtype=jnp.uint32)[None]
    key0_BV, key1_BV = (jnp.broadcast_to(word_B[:, None], (len(seed_B), vocab_size)) for word_B in key)
    entry_BV = jnp.broadcast_to(entry_1V, key0_BV.shape)
    first_BV, second_BV = _threefry2x32(key0_BV, key1_BV, jnp.zeros_like(key0_BV), entry_BV)
    u_BV = (((first_BV ^ second_BV) >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(u_BV))


def exponential_noise(seed_N: np.ndarray, position_N: np.ndarray, token_N: np.ndarray) -> np.ndarray:
    """Returns float64 [N]: exponential noise of single vocabulary entries, computed on the host; `noise` returns -log of it."""
    zero_N = np.zeros(len(seed_N), np.uint32)
    key0_N, key1_N = _threefry2x32(zero_N, seed_N.astype(np.uint32), zero_N, position_N.astype(np.uint32))
    first_N, second_N = _threefry2x32(key0_N, key1_N, zero_N, token_N.astype(np.uint32))
    return -np.log((((first_N ^ second_N) >> 9) + 0.5) * 2**-23)


def scores(logits_BV: jax.Array, sampling: Sampling, banned_BN: Array | None = None) -> jax.Array:
    """Returns log-probabilities [B, V] of the sampling distribution: after bias, temperature, top-k, top-p, and min-p.

    Tokens that a filter removed have -inf, and so have those of `banned_BN`, in which -1 is skipped; it needs `sampling.bias_ids`.
    Greedy rows (temperature 0) are computed at temperature 1.
    """
    temperature_B = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    if sampling.bias_ids is not None:
        banned_BN = jnp.full((len(logits_BV), 1), -1) if banned_BN is None else banned_BN
        changed = jnp.any(sampling.bias_ids >= 0) | jnp.any(banned_BN >= 0)
        logits_BV = jax.lax.cond(changed, _change, lambda x, *_: x, logits_BV, sampling, banned_BN)
    logits_BV = logits_BV / temperature_B[:, None]
    filters = (sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
    # The filters sort the vocabulary; a batch that uses none must not pay for it.
    logits_BV = jax.lax.cond(jnp.any(filters), _filter, lambda x, _: x, logits_BV, sampling)
    return jax.nn.log_softmax(logits_BV, axis=-1)


def draw(logp_BV: jax.Array, position_B: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Samples one token per sequence from the log-probabilities of `scores`; the noise depends on its seed and `position_B` alone.

    Returns (tokens [B], their log-probabilities [B]).
    """
    gumbel_BV = noise(sampling.seed, position_B, logp_BV.shape[-1])
    noised_BV = logp_BV + jnp.where(sampling.temperature > 0, 1.0, 0.0)[:, None] * gumbel_BV
    token_B = _argmax(noised_BV)
    return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]


def _argmax(x_BV: jax.Array) -> jax.Array:
    """Returns the first index of the maximum of each row; the first NaN if the row has one.

    A CPU runs two vectorized reductions, 0.2 ms for [64, 512]; `jnp.argmax` would take 1.5 ms (2 cores, loaded).
    """
    if mesh_lib.platform() != "cpu":
        return jnp.argmax(x_BV, axis=-1).astype(jnp.int32)
    V = x_BV.shape[-1]
    x_BV = jax.lax.optimization_barrier(x_BV)  # otherwise the noise is computed for both reductions
    top_B1 = jnp.max(x_BV, axis=-1, keepdims=True)
    at_BV = jnp.where((x_BV == top_B1) | jnp.isnan(x_BV), jnp.arange(V, dtype=jnp.int32)[None], V)
    return jnp.min(at_BV, axis=-1)


def _threefry2x32(key0, key1, x0, x1):
    """Returns Threefry-2x32 with 20 rounds (Salmon et al., SC 2011): two random uint32 words; arrays of JAX or numpy."""
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for block in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def _change(logits_BV: jax.Array, sampling: Sampling, banned_BN: jax.Array) -> jax.Array:
    """Returns the logits with the bias added, and -inf for banned tokens and for those that are not allowed."""
    V = logits_BV.shape[1]
    only_B = jnp.zeros(len(logits_BV), bool) if sampling.allows_biased_only is None else sampling.allows_biased_only

    def change(logits_V, ids_M, bias_M, only, banned_N):
        columns_M, columns_N = (jnp.where(ids >= 0, ids, V) for ids in (ids_M, banned_N))  # past the end: dropped
        is_listed_V = jnp.zeros((V,), bool).at[columns_M].set(True, mode="drop")
        added_V = logits_V.at[columns_M].add(bias_M, mode="drop")
        return jnp.where(only & ~is_listed_V, -jnp.inf, added_V).at[columns_N].set(-jnp.inf, mode="drop")

    # Row by row: rows may be on different devices.
    return jax.vmap(change)(logits_BV, sampling.bias_ids, sampling.bias, only_B, banned_BN)


def _filter(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Sets logits to -inf by top-k, then top-p, then min-p relative to the likeliest token; of ties, the first entries stay.

    So at most top_k entries stay, and `jax.lax.top_k` of the result finds them all.
    """
    V = logits_BV.shape[-1]
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    k_B = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, V), V)
    in_k_BV = jnp.arange(V)[None] < k_B[:, None]
    probs_BV = jax.nn.softmax(jnp.where(in_k_BV, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # mass of the entries sorted before each
    # top_p 1 is off and cuts nothing: float32 rounds the mass before the tail of a peaked row up to 1.
    in_p_BV = (before_BV < sampling.top_p[:, None]) | (sampling.top_p >= 1.0)[:, None]
    kept_BV = in_k_BV & in_p_BV & (probs_BV >= sampling.min_p[:, None] * probs_BV[:, :1])
    kept_BV = kept_BV.at[:, 0].set(True)
    lowest_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    is_tied_BV = logits_BV == lowest_B1
    num_tied_B1 = jnp.sum(kept_BV & (sorted_BV == lowest_B1), axis=-1, keepdims=True)
    stays_BV = (logits_BV > lowest_B1) | is_tied_BV & (jnp.cumsum(is_tied_BV, axis=-1) <= num_tied_B1)
    return jnp.where(stays_BV, logits_BV, -jnp.inf)


def kept(logp_BV: jax.Array, width: int) -> jax.Array:
    """Returns int32 [B, W]: the entries that are not -inf in the result of `scores`, the likeliest first, then -1. No row has more."""
    logp_BW, id_BW = jax.lax.top_k(logp_BV, width)
    return jnp.where(logp_BW > -jnp.inf, id_BW, -1)


def restricted(logits_BV: jax.Array, kept_BW: jax.Array) -> jax.Array:
    """Returns log-probabilities [B, V] of the softmax over the entries `kept_BW` alone, -inf for others; over all where a row has none."""
    B, V = logits_BV.shape
    column_BW = jnp.where(kept_BW >= 0, kept_BW, V)
    is_kept_BV = jnp.zeros((B, V), bool).at[jnp.arange(B)[:, None], column_BW].set(True, mode="drop")
    is_kept_BV |= kept_BW[:, :1] < 0
    return jax.nn.log_softmax(jnp.where(is_kept_BV, logits_BV, -jnp.inf), axis=-1)
