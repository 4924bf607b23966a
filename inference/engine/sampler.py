"""One token per sequence from logits; the randomness is a pure function of (seed, position).

1. noise = Gumbel(threefry(seed, position)), one draw per vocabulary entry.
2. token = argmax(filtered logits / temperature + noise), which is a sample from the softmax (Gumbel-max).
3. logp = log-probability of that token under the distribution sampled from: after bias, temperature, top-k, top-p, min-p.

So a token depends on weights, prefix, seed and position only: not on its slot, its neighbours or the server. A validator
that knows the seed draws the same noise and checks the argmax (arXiv 2511.20621 uses the same property).

Letters: B sequences, V vocabulary, M biased entries.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sharding import mesh as mesh_lib


@struct.dataclass
class Sampling:
    """How each sequence samples; arrays [B]. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off."""

    seed: jax.Array  # uint32
    temperature: jax.Array  # float32
    top_k: jax.Array  # int32
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    bias_ids: jax.Array | None = None  # int32 [B, M], -1 where unused; None: no sequence has a bias
    bias: jax.Array | None = None  # float32 [B, M], added to the logits of those entries


def noise(seed_B: jax.Array, position_B: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise [B, V] of (seed, position); `position` counts tokens from the start of the sequence.

    Entry v is made of threefry2x32(key = threefry2x32((0, seed), (0, position)), (0, v)), its two words xored: what
    `jax.random.bits(fold_in(key(seed), position), (V,))` gives. Spelled out, because a proof must replay on another
    version (the bits-to-float step of `jax.random.gumbel` has changed between releases), and because JAX's own threefry
    is a loop on a CPU, four times as slow. u = (the top 23 bits + 1/2) / 2^23 lies strictly inside (0, 1).
    """
    zero_B = jnp.zeros_like(seed_B, jnp.uint32)
    key = _threefry2x32(zero_B, seed_B.astype(jnp.uint32), zero_B, position_B.astype(jnp.uint32))
    entry_1V = jnp.arange(vocab_size, dtype=jnp.uint32)[None]
    key_BV = [jnp.broadcast_to(word_B[:, None], (len(seed_B), vocab_size)) for word_B in key]
    first_BV, second_BV = _threefry2x32(*key_BV, jnp.zeros_like(key_BV[0]), jnp.broadcast_to(entry_1V, key_BV[0].shape))
    u_BV = (((first_BV ^ second_BV) >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(u_BV))


def exponential_noise(seed_N: np.ndarray, position_N: np.ndarray, token_N: np.ndarray) -> np.ndarray:
    """-log u [N] float64 of single entries of `noise`, on the host: `noise` is -log of it. Exponentially distributed."""
    zero_N = np.zeros(len(seed_N), np.uint32)
    key = _threefry2x32(zero_N, seed_N.astype(np.uint32), zero_N, position_N.astype(np.uint32))
    first_N, second_N = _threefry2x32(*key, zero_N, token_N.astype(np.uint32))
    return -np.log((((first_N ^ second_N) >> 9) + 0.5) * 2**-23)


def scores(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Log-probabilities [B, V] of the distribution sampled from; -inf where filtered out.

    Greedy rows (temperature 0) report the untempered distribution.
    """
    temperature_B = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    if sampling.bias_ids is not None:
        biased = jnp.any(sampling.bias_ids >= 0)
        logits_BV = jax.lax.cond(biased, _add_bias, lambda x, _: x, logits_BV, sampling)
    logits_BV = logits_BV / temperature_B[:, None]
    filters = (sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
    # The filters sort the vocabulary; a batch that uses none must not pay for it.
    logits_BV = jax.lax.cond(jnp.any(filters), _filter, lambda x, _: x, logits_BV, sampling)
    return jax.nn.log_softmax(logits_BV, axis=-1)


def sample(logits_BV: jax.Array, position_B: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Returns (token_B int32, logp_B float32): the token to put at `position_B`, and its log-probability."""
    return draw(scores(logits_BV, sampling), position_B, sampling)


def draw(logp_BV: jax.Array, position_B: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """The second half of `sample`, from its `scores`."""
    gumbel_BV = noise(sampling.seed, position_B, logp_BV.shape[-1])
    noised_BV = logp_BV + jnp.where(sampling.temperature > 0, 1.0, 0.0)[:, None] * gumbel_BV
    token_B = _argmax(noised_BV)
    return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]


def _argmax(x_BV: jax.Array) -> jax.Array:
    """The first entry of the maximum of each row; where a row holds NaN, an entry that is NaN.

    On a CPU as two reductions, each of which runs over whole vectors on both cores: `jnp.argmax` takes one number after the
    other, with the noise computed in between, 1.5 ms for [64, 512] where this takes 0.2 (2 cores, loaded).
    """
    if mesh_lib.platform() != "cpu":
        return jnp.argmax(x_BV, axis=-1).astype(jnp.int32)
    V = x_BV.shape[-1]
    x_BV = jax.lax.optimization_barrier(x_BV)  # or the noise is computed for both
    top_B1 = jnp.max(x_BV, axis=-1, keepdims=True)
    at_BV = jnp.where((x_BV == top_B1) | jnp.isnan(x_BV), jnp.arange(V, dtype=jnp.int32)[None], V)
    return jnp.min(at_BV, axis=-1)


def _threefry2x32(key0, key1, x0, x1):
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011) of uint32 arrays of one shape, jax's or numpy's."""
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for block in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def _add_bias(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    columns_BM = jnp.where(sampling.bias_ids >= 0, sampling.bias_ids, logits_BV.shape[1])  # past the end: dropped

    def add(logits_V, columns_M, bias_M):
        return logits_V.at[columns_M].add(bias_M, mode="drop")

    return jax.vmap(add)(logits_BV, columns_BM, sampling.bias)  # row by row: rows may lie on different devices


def _filter(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """top-k, then top-p over what is left, then min-p relative to the best; ties at a threshold are kept."""
    V = logits_BV.shape[-1]
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    k_B = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, V), V)
    kth_B = jnp.take_along_axis(sorted_BV, k_B[:, None] - 1, axis=-1)
    in_k_BV = sorted_BV >= kth_B
    probs_BV = jax.nn.softmax(jnp.where(in_k_BV, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # mass of strictly better entries
    # top_p 1 is off and cuts nothing: float32 rounds the mass before the tail of a peaked row up to 1.
    in_p_BV = (before_BV < sampling.top_p[:, None]) | (sampling.top_p >= 1.0)[:, None]
    kept_BV = in_k_BV & in_p_BV & (probs_BV >= sampling.min_p[:, None] * probs_BV[:, :1])
    kept_BV = kept_BV.at[:, 0].set(True)
    lowest_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= lowest_B1, logits_BV, -jnp.inf)
