"""Terms in addition to the policy loss: divergences from a reference policy, and components with weights per token.

The objective of a step is a sum of components, each over its own tokens and divided by its own global count:

    L = policy / N + kl_coef * KL / N - entropy_coef * H / N + CE / N_ce + ref_kl / N_ref_kl

N counts the tokens that the policy loss trains; N_ce and N_ref_kl the tokens whose weight is not 0. Letters: B rows, T tokens.
"""

import jax
import jax.numpy as jnp

from rl.learning.algorithms import importance

Array = jax.Array


def k1(logp_BT: Array, reference_logp_BT: Array) -> Array:
    """log(pi / ref) per token: an unbiased estimate of KL(pi || ref). Its expected gradient is 0: use it in rewards, not losses."""
    return logp_BT - reference_logp_BT


def k2(logp_BT: Array, reference_logp_BT: Array) -> Array:
    """log(pi / ref)^2 / 2 per token: a biased estimate of KL(pi || ref) with the right expected gradient, so use it as a loss."""
    return 0.5 * jnp.square(logp_BT - reference_logp_BT)


def k3(logp_BT: Array, reference_logp_BT: Array) -> Array:
    """ref/pi - 1 - log(ref/pi) per token: an unbiased estimate >= 0 of KL(pi || ref) (GRPO, arXiv 2402.03300, eq. 4).

    As a loss, its expected gradient is that of KL(ref || pi), the other direction; k2 has that of KL(pi || ref).
    log(ref/pi) is at most 10 (INTELLECT-2).
    """
    log_BT = jnp.minimum(reference_logp_BT - logp_BT, 10.0)
    return jnp.expm1(log_BT) - log_BT


# Estimators of KL(pi || ref) from samples of pi (Schulman 2020, "Approximating KL"). "weighted_k3" multiplies `k3` of the sampler's tokens
# by r = pi / mu, and differentiates r, too (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): value and gradient are unbiased at any lag.
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "weighted_k3": k3}


def kl_penalty(
    estimator: str, logp_BT: Array, reference_logp_BT: Array, sampler_logp_BT: Array, mask_BT: Array, denom: Array
) -> Array:
    """The KL penalty, sum_t mask_t k(logp_t, reference_logp_t) / denom; only `logp` has a gradient.

    `mask` and `denom` define the mean. A mean over tokens has a mask of 0 or 1, and the global number of trained tokens as `denom`. A
    mean over streams has a mask of 1 / |o|, and the number of streams.
    """
    logp_BT = jnp.where(mask_BT > 0, logp_BT, 0.0)
    reference_logp_BT = jax.lax.stop_gradient(jnp.where(mask_BT > 0, reference_logp_BT, 0.0))
    kl_BT = ESTIMATORS[estimator](logp_BT, reference_logp_BT)
    if estimator == "weighted_k3":
        kl_BT *= jnp.exp(importance.log_ratio(logp_BT, sampler_logp_BT, mask_BT))
    return importance.total(kl_BT, mask_BT, denom)


def kl_in_advantage(A_BT: Array, logp_BT: Array, reference_logp_BT: Array, mask_BT: Array, coef: float) -> Array:
    """Advantages A less a KL penalty per token, A_t - coef * log(pi_t / ref_t), without gradient (RLHF, arXiv 1909.08593)."""
    k1_BT = jax.lax.stop_gradient(k1(logp_BT, reference_logp_BT))
    return jnp.where(mask_BT > 0, A_BT - coef * k1_BT, A_BT)


def weighted_cross_entropy(logp_BT: Array, weight_BT: Array, denom: Array) -> Array:
    """The cross-entropy -sum_t w_t logp_t / denom: supervision in addition to reward, for instance on tool results (ECHO).

    Denominator: tokens of the step with w != 0.
    """
    return -jnp.sum(jnp.where(weight_BT != 0, logp_BT, 0.0) * weight_BT) / denom


def reference_distillation(
    logp_BT: Array, behavior_logp_BT: Array, reference_logp_BT: Array, weight_BT: Array, denom: Array
) -> Array:
    """Per-token reverse KL to a teacher by policy gradient (on-policy distillation), as PRIME-RL's fixed `ref_kl` component.

        sum_t w_t [-1[pi - mu >= -0.2] sg(log ref - log pi) r + 0.001 log(r)^2] / denom,   r = pi / mu

    The advantage is log(ref / pi) of the teacher `ref`; a token whose probability fell by more than 0.2 has no policy gradient.
    `denom`: the step's tokens with w != 0.
    """
    mask_BT = (weight_BT != 0).astype(jnp.float32)
    log_r_BT = importance.log_ratio(logp_BT, behavior_logp_BT, mask_BT)
    advantage_BT = jax.lax.stop_gradient(reference_logp_BT - logp_BT)
    keep_BT = jnp.exp(logp_BT) - jnp.exp(behavior_logp_BT) >= -0.2
    loss_BT = -jnp.where(keep_BT & (mask_BT > 0), advantage_BT, 0.0) * jnp.exp(log_r_BT) + 1e-3 * log_r_BT**2
    return jnp.sum(jnp.where(mask_BT > 0, loss_BT, 0.0) * weight_BT) / denom


def count(weight_BT: Array) -> Array:
    """The number of tokens with a weight other than 0 in a component of the loss, at least 1."""
    return jnp.maximum(jnp.sum(weight_BT != 0).astype(jnp.float32), 1.0)
