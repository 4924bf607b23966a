"""Losses as functions of arrays. All take the same five things and return (loss, metrics).

  logp_BT            log pi(token) under the parameters being trained, at the sampling temperature; carries gradient
  behavior_logp_BT   log mu(token) under the policy that sampled it, as the sampler reported it
  advantage_BT       credit of each token; assigned before, never here
  mask_BT            1.0 on tokens that the policy sampled and that train, else 0.0
  denom              the *global* number of such tokens in the step, over all devices and micro-batches

Every loss is a sum over tokens divided by `denom`, so that micro-batches and shards add up exactly. Every metric is
one too: a fraction or mean over the step's tokens once summed over micro-batches.

Letters: B rows, T tokens. r = exp(logp - behavior_logp) throughout.
"""

import jax
import jax.numpy as jnp


def two_sided_clip(
    logp_BT: jax.Array,
    behavior_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    delta: float,
    denom: jax.Array,
) -> tuple[jax.Array, dict]:
    """PPO clipping with an upper bound on the ratio, so that a negative advantage has a bounded loss.

        loss = sum_t mask_t max(-c1 A, -c2 A) / denom
        c1 = min(r, delta),  c2 = clip(c1, 1 - clip_low, 1 + clip_high)

    Plain PPO leaves r unbounded when A < 0; INTELLECT-2 (arXiv 2505.07291, section 3.4) bounds it by delta = 4 with
    clip_low = clip_high = 0.2. The gradient of a token is zero where A < 0 and r > delta, where A > 0 and
    r > 1 + clip_high, and where A < 0 and r < 1 - clip_low. Denominator: global sampled tokens. Nothing is
    stop-gradiented.
    """
    ratio_BT = jnp.exp(_log_ratio(logp_BT, behavior_logp_BT, mask_BT))
    bounded_BT = jnp.minimum(ratio_BT, delta)
    clipped_BT = jnp.clip(bounded_BT, 1 - clip_low, 1 + clip_high)
    loss_BT = jnp.maximum(-bounded_BT * advantage_BT, -clipped_BT * advantage_BT)
    positive_BT = advantage_BT > 0
    binds_BT = jnp.where(positive_BT, ratio_BT > 1 + clip_high, (ratio_BT < 1 - clip_low) | (ratio_BT > delta))
    return _total(loss_BT, mask_BT, denom), {
        "loss/clip_frac": _total(binds_BT & (advantage_BT != 0), mask_BT, denom),
        **_mismatch(logp_BT, behavior_logp_BT, mask_BT, denom),
    }


def masked_importance_sampling(
    logp_BT: jax.Array,
    behavior_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    ratio_low: float,
    ratio_high: float,
    denom: jax.Array,
) -> tuple[jax.Array, dict]:
    """Importance sampling straight against the sampler, with tokens of a wild ratio left out (IcePop).

        loss = -sum_t mask_t 1[ratio_low <= r <= ratio_high] r A / denom

    INTELLECT-3 (arXiv 2512.16144, section 2) uses 0.5 and 5. The indicator carries no gradient; a dropped token keeps
    its place in the denominator. Denominator: global sampled tokens.
    """
    ratio_BT = jnp.exp(_log_ratio(logp_BT, behavior_logp_BT, mask_BT))
    keep_BT = (ratio_BT >= ratio_low) & (ratio_BT <= ratio_high)
    loss_BT = -jnp.where(keep_BT, ratio_BT, 0.0) * advantage_BT
    return _total(loss_BT, mask_BT, denom), {
        "loss/clip_frac": _total(~keep_BT, mask_BT, denom),
        **_mismatch(logp_BT, behavior_logp_BT, mask_BT, denom),
    }


def cross_entropy(
    logp_BT: jax.Array,
    behavior_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    denom: jax.Array,
) -> tuple[jax.Array, dict]:
    """Supervised negative log-likelihood: loss = -sum_t mask_t logp_t / denom. The behaviour policy is not used.

    The advantage weighs the tokens (1 for plain SFT). Denominator: global trained tokens.
    """
    del behavior_logp_BT
    return _total(-logp_BT * advantage_BT, mask_BT, denom), {}


LOSSES = {
    "two_sided_clip": two_sided_clip,
    "masked_importance_sampling": masked_importance_sampling,
    "cross_entropy": cross_entropy,
}


def _log_ratio(logp_BT, behavior_logp_BT, mask_BT):
    """log r, zero outside the mask (so that no infinity reaches a masked gradient) and at most 20 (e^20 = 5e8)."""
    return jnp.minimum(jnp.where(mask_BT > 0, logp_BT - behavior_logp_BT, 0.0), 20.0)


def _mismatch(logp_BT, behavior_logp_BT, mask_BT, denom) -> dict:
    """KL(mu || pi) by the k3 estimator, r - 1 - log r >= 0 (Schulman 2020): how far the learner is from the sampler."""
    log_ratio_BT = jax.lax.stop_gradient(_log_ratio(logp_BT, behavior_logp_BT, mask_BT))
    return {
        "loss/mismatch_kl": _total(jnp.expm1(log_ratio_BT) - log_ratio_BT, mask_BT, denom),
        "loss/ratio_mean": _total(jnp.exp(log_ratio_BT), mask_BT, denom),
    }


def _total(x_BT, mask_BT, denom):
    return jnp.sum(jnp.where(mask_BT > 0, x_BT, 0.0) * mask_BT) / denom
