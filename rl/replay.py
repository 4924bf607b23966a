"""Rollouts run again: one prefill instead of one step per token, with the noise of their seeds.

1. Rollouts are padded to a power of two of rows and a multiple of 64 tokens, so that few programs are compiled.
2. One pass per policy version they name. Each position's keys are written by the version that wrote them in the engine,
   so a rollout that spans several versions is replayed exactly as it was made.
3. Per sampled token: how far the claimed one lies from the argmax of the noised logits, its log-probability, the hidden state
   behind it, and how likely it is under tempered copies of the distribution (rl/sequential.py bets on those).

Letters: G rollouts, T padded length, N sampled tokens (padded), V vocabulary, D model, K tempered distributions.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from inference import kv_cache, sampler
from inference import rollout as rollout_lib
from models import config as config_lib
from models import transformer
from rl import sequential

LENGTH_MULTIPLE = 64
SAMPLED_MULTIPLE = 16  # logits and noise, the dear part of a small model, are made for sampled tokens only


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """Row t is about token t where that was sampled: arrays [G, T] (hidden [G, T, D] bfloat16, tilt [G, T, K])."""

    margin: jax.Array  # max of the noised logits minus that of the token, nats
    logp: jax.Array  # of the token, under the distribution sampled from
    tilt: jax.Array  # log of q_k(token) / p(token) with q_k ~ p^sequential.TILTS[k]
    hidden: jax.Array  # the state that predicted the token


def replay(
    model: config_lib.ModelConfig,
    weights: Callable[[int], transformer.Params],
    filters: dict[str, float],
    rollouts: Sequence[rollout_lib.Rollout],
    max_model_len: int,
) -> Replay:
    """Host arrays of at least len(rollouts) rows; what `weights` raises for a version goes through.

    `filters` are top_k, top_p, min_p. No rollout may be longer than max_model_len.
    """
    longest = max(len(r.tokens) for r in rollouts)
    assert longest <= max_model_len
    T = min(max_model_len, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
    G = 1 << (len(rollouts) - 1).bit_length()
    rows = [*rollouts, *[rollouts[0]] * (G - len(rollouts))]
    N = min(T, -(-max(int(r.sampled_mask.sum()) for r in rollouts) // SAMPLED_MULTIPLE) * SAMPLED_MULTIPLE)
    tokens, writer = np.zeros((G, T), np.int32), np.full((G, T), -1, np.int32)
    predictor = np.full((G, N), T, np.int32)  # positions that predict a sampled token; T where there is none
    for i, r in enumerate(rows):
        n = len(r.tokens)
        tokens[i, :n] = r.tokens
        at = np.flatnonzero(r.sampled_mask) - 1
        predictor[i, : len(at)] = at
        # Position t was run to predict token t + 1: by the version that sampled it, or by the prefill.
        writer[i, : n - 1] = np.where(r.sampled_mask[1:], r.versions[1:], r.versions[:-1])
    sampling = sampler.Sampling(
        seed=jnp.asarray([r.seed for r in rows], jnp.uint32),
        temperature=jnp.asarray([r.temperature for r in rows], jnp.float32),
        **{
            name: jnp.full((G,), filters[name], dtype)
            for name, dtype in (("top_k", jnp.int32), ("top_p", jnp.float32), ("min_p", jnp.float32))
        },
    )
    cache = kv_cache.create(model, G, T)
    merged = None
    for version in sorted(set(writer[writer >= 0].tolist())):
        mask_GT = jnp.asarray(writer == version)
        out, cache = _replay(model, weights(version), jnp.asarray(tokens), predictor, mask_GT, cache, sampling)
        merged = out if merged is None else jax.tree.map(functools.partial(_merge, mask_GT), out, merged)
    return jax.tree.map(np.asarray, merged)


@functools.partial(jax.jit, static_argnums=0)
def _replay(model, params, tokens_GT, predictor_GN, mask_GT, cache, sampling) -> tuple[Replay, kv_cache.Cache]:
    """One version's pass: its keys go where `mask` says it wrote; other positions keep theirs."""
    G, T = tokens_GT.shape
    attend = kv_cache.attend_at(jnp.zeros((G,), jnp.int32), write_BT=mask_GT)
    positions_GT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (G, T))
    hidden_GTD, cache = transformer.extend(params, model, tokens_GT, positions_GT, cache, attend)

    def score(row):  # one rollout at a time: logits are [N, V]
        hidden_TD, tokens_T, at_N, sampling = row
        repeated = jax.tree.map(lambda x: jnp.broadcast_to(x[None], at_N.shape), sampling)
        hidden_ND = hidden_TD[jnp.minimum(at_N, T - 1)]
        logp_NV = sampler.scores(transformer.logits(params, model, hidden_ND[None])[0], repeated)
        target_N1 = tokens_T[jnp.minimum(at_N + 1, T - 1)][:, None]
        noise_NV = sampler.noise(repeated.seed, at_N + 1, logp_NV.shape[-1])
        noised_NV = logp_NV + jnp.where(repeated.temperature > 0, 1.0, 0.0)[:, None] * noise_NV
        margin_N = noised_NV.max(axis=-1) - jnp.take_along_axis(noised_NV, target_N1, axis=-1)[:, 0]
        logp_N = jnp.take_along_axis(logp_NV, target_N1, axis=-1)[:, 0]
        tilts = [(b - 1) * logp_N - jax.nn.logsumexp(b * logp_NV, axis=-1) for b in sequential.TILTS]
        scores = (margin_N, logp_N, jnp.stack(tilts, axis=-1))
        return tuple(jnp.zeros((T, *x.shape[1:]), x.dtype).at[at_N].set(x, mode="drop") for x in scores)

    scores = jax.lax.map(score, (hidden_GTD, tokens_GT, predictor_GN, sampling))
    out = Replay(*scores, hidden_GTD.astype(jnp.bfloat16))
    return jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), out), cache


def _merge(mask_GT, new, old):
    """Takes `new` where this version predicted (one to the right of where it wrote)."""
    where = jnp.roll(mask_GT, 1, axis=1)
    return jnp.where(where.reshape(where.shape + (1,) * (new.ndim - 2)), new, old)
