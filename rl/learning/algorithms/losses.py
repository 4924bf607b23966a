"""Policy losses as pure functions of arrays, each returning (loss, metrics).

All take the same five arguments:

  logp_BT            log pi(token) under the parameters being trained, at the sampling temperature; carries gradient
  behavior_logp_BT   log mu(token) under the policy that sampled it, as the sampler reported it, or as the learner
                     recomputed it before the first optimizer step of a batch (INTELLECT-2)
  advantage_BT       advantage of each token
  mask_BT            1.0 on sampled tokens that train, else 0.0
  denom              the *global* number of such tokens in the step, over all devices and micro-batches

A loss that names one of these arguments gets it from the learner, too:

  stream_ids_BT      int32 in [0, T): the stream (one sampled sequence) of its row that a token belongs to
  num_streams        the *global* number of streams that train a token. Groups without an advantage were dropped before
                     (rl/learning/batch/credit.py), so it counts the other groups alone, unlike the papers
  sampler_logp_BT    log mu(token) as the sampler reported it, also where `behavior_logp_BT` was recomputed

Every loss is a sum over tokens divided by a global count, and every metric one divided by `denom`: micro-batches add up exactly.
A user's own loss is any function of this signature (`objective.check_own` checks it); `ratio_loss` makes such functions from
formulas per token.

Letters: B rows, T tokens. r = exp(logp - behavior_logp), A = advantage, sg = stop-gradient, |o| = trained tokens of a stream.
r is at most e^20 (`importance.MAX_LOG_RATIO`); a token above has no gradient.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.learning.algorithms import importance

Array = jax.Array


class Tokens(NamedTuple):
    """The inputs of a policy loss per token [B, T], with the importance ratios r = pi / behavior policy."""

    logp_BT: Array
    behavior_logp_BT: Array
    advantage_BT: Array
    mask_BT: Array
    denom: Array
    log_ratio_BT: Array
    ratio_BT: Array


Loss = tuple[Array, dict]  # the loss and its metrics
Terms = tuple[Array, Array, Array]  # loss of each token, True where it has no gradient, global count


def ratio_loss(formula: Callable[..., Terms]) -> Callable[..., Loss]:
    """Decorates a formula (tokens, *, options) -> `Terms` as a loss that returns (sum over trained tokens / count, metrics)."""

    @functools.wraps(formula)
    def loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom, **options):
        log_ratio_BT = importance.log_ratio(logp_BT, behavior_logp_BT, mask_BT)
        ratio_BT = jnp.exp(log_ratio_BT)
        tokens = Tokens(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, denom, log_ratio_BT, ratio_BT)
        loss_BT, dropped_BT, count = formula(tokens, **options)
        metrics = importance.metrics(log_ratio_BT, dropped_BT, advantage_BT, mask_BT, denom)
        return importance.total(loss_BT, mask_BT, count), metrics

    return loss


@ratio_loss
def two_sided_clip(tokens: Tokens, *, clip_low: float, clip_high: float, delta: float) -> Terms:
    """PPO clipping with an upper bound on the ratio, so that a negative advantage has a bounded loss.

        loss = sum_t mask_t max(-c1 A, -c2 A) / denom
        c1 = min(r, delta),  c2 = clip(c1, 1 - clip_low, 1 + clip_high)

    Plain PPO leaves r unbounded when A < 0; INTELLECT-2 (arXiv 2505.07291, section 3.4) bounds it by delta = 4 with
    clip_low = clip_high = 0.2.
    """
    bounded = tokens._replace(ratio_BT=jnp.minimum(tokens.ratio_BT, delta))
    loss_BT, dropped_BT = _clipped(bounded, clip_low, clip_high)
    return loss_BT, dropped_BT | (tokens.advantage_BT < 0) & (tokens.ratio_BT > delta), tokens.denom


@ratio_loss
def grpo(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    off_policy_delta: float = 0.0,
    stream_ids_BT: Array,
    num_streams: Array,
    sampler_logp_BT: Array,
) -> Terms:
    """PPO clipping, averaged inside each stream and then over streams: a token of a long completion weighs less.

        loss = -sum_i (1 / |o_i|) sum_t keep_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / num_streams
        keep_t = not (A < 0 and mean_t log(mu / pi) of the stream > off_policy_delta)

    GRPO (arXiv 2402.03300, eq. 3). `keep` is the off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1), where
    mu is the sampler; it has no gradient, and is off for a delta of 0. The term of `kl_coef` is averaged in the same way.
    """
    loss_BT, dropped_BT = _clipped(tokens, clip_low, clip_high)
    if off_policy_delta > 0:
        log_ratio_BT = jax.lax.stop_gradient(importance.log_ratio(tokens.logp_BT, sampler_logp_BT, tokens.mask_BT))
        far_BT = importance.stream_mean(log_ratio_BT, tokens.mask_BT, stream_ids_BT) < -off_policy_delta
        dropped_BT |= far_BT & (tokens.advantage_BT < 0)
        loss_BT = jnp.where(far_BT & (tokens.advantage_BT < 0), 0.0, loss_BT)
    return loss_BT / importance.stream_length(tokens.mask_BT, stream_ids_BT), dropped_BT, num_streams


@ratio_loss
def dr_grpo(tokens: Tokens, *, clip_low: float, clip_high: float, length: float, num_streams: Array) -> Terms:
    """PPO clipping, summed over tokens and divided by a constant: neither short nor long completions are favored.

        loss = -sum_t mask_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / (num_streams * length)

    Dr. GRPO (arXiv 2503.20783, section 3.2); `length` is the generation budget, sampling.max_tokens. Goes with the advantage
    `group_mean`. The paper has no KL; the term of `kl_coef` is a mean over all tokens.
    """
    return *_clipped(tokens, clip_low, clip_high), num_streams * length


@ratio_loss
def dapo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Terms:
    """PPO clipping over all tokens alike, with a wider upper bound so that rare tokens can rise ("clip-higher").

        loss = -sum_t mask_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / denom

    DAPO (arXiv 2503.14476, eq. 8) with 0.2 and 0.28; its overlong shaping is `advantages.overlong_penalty`, its dynamic
    sampling is the dropping of groups whose rewards are equal.
    """
    return *_clipped(tokens, clip_low, clip_high), tokens.denom


def _clipped(tokens: Tokens, clip_low: float, clip_high: float) -> tuple[Array, Array]:
    """Returns PPO's surrogate as a loss, -min(r A, clip(r) A) (arXiv 1707.06347, eq. 7), and True for tokens without gradient."""
    low, high, ratio_BT, A_BT = 1 - clip_low, 1 + clip_high, tokens.ratio_BT, tokens.advantage_BT
    loss_BT = jnp.maximum(-ratio_BT * A_BT, -jnp.clip(ratio_BT, low, high) * A_BT)
    return loss_BT, _outside(ratio_BT, A_BT, low, high)


def _outside(ratio_BT: Array, A_BT: Array, low: float, high: float) -> Array:
    """Returns True for tokens whose gradient a PPO clip removes: ratio above `high` with A > 0, or below `low` with A < 0."""
    return ((A_BT > 0) & (ratio_BT > high)) | ((A_BT < 0) & (ratio_BT < low))


@ratio_loss
def gspo(tokens: Tokens, *, clip_low: float, clip_high: float, stream_ids_BT: Array, num_streams: Array) -> Terms:
    """PPO clipping with one ratio per stream, the geometric mean of its tokens' ratios.

        loss = -sum_i (1 / |o_i|) sum_t min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) / num_streams
        s_it = sg(s_i) pi_t / sg(pi_t),  s_i = exp(mean_t log r_t)

    GSPO-token (arXiv 2507.18071, eqs. 13-14), which with one advantage per stream is GSPO (eq. 5); clip bounds of 3e-4 and 4e-4.
    """
    mean_BT = importance.stream_mean(tokens.log_ratio_BT, tokens.mask_BT, stream_ids_BT)
    here_BT = jnp.where(tokens.mask_BT > 0, tokens.logp_BT, 0.0)
    ratio_BT = jnp.exp(jax.lax.stop_gradient(mean_BT - here_BT) + here_BT)
    loss_BT, dropped_BT = _clipped(tokens._replace(ratio_BT=ratio_BT), clip_low, clip_high)
    return loss_BT / importance.stream_length(tokens.mask_BT, stream_ids_BT), dropped_BT, num_streams


@ratio_loss
def gmpo(tokens: Tokens, *, log_clip: float, stream_ids_BT: Array, num_streams: Array) -> Terms:
    """The geometric instead of the arithmetic mean of a stream's clipped ratios: one extreme token weighs little.

        loss = -sum_i A_i exp((1 / |o_i|) sum_t c_t) / num_streams
        c_t = min(log r, log_clip) where A > 0, max(log r, -log_clip) where A < 0

    GMPO (arXiv 2507.20673, eq. 4) with log_clip = 0.4. A_i is the mean advantage of the stream's tokens.
    """
    log_ratio_BT, A_BT, mask_BT = tokens.log_ratio_BT, tokens.advantage_BT, tokens.mask_BT
    clipped_BT = jnp.where(A_BT > 0, jnp.minimum(log_ratio_BT, log_clip), jnp.maximum(log_ratio_BT, -log_clip))
    ratio_BT = jnp.exp(importance.stream_mean(clipped_BT, mask_BT, stream_ids_BT))
    loss_BT = -ratio_BT * A_BT / importance.stream_length(mask_BT, stream_ids_BT)
    return loss_BT, _outside(log_ratio_BT, A_BT, -log_clip, log_clip), num_streams


@ratio_loss
def sapo(
    tokens: Tokens, *, tau_positive: float, tau_negative: float, stream_ids_BT: Array, num_streams: Array
) -> Terms:
    """A soft gate on the ratio instead of a clip: the gradient fades as a token leaves the old policy, and never jumps.

        loss = -sum_i (1 / |o_i|) sum_t (4 / tau) sigmoid(tau (r - 1)) A / num_streams
        tau = tau_positive where A > 0, else tau_negative

    SAPO (arXiv 2511.20347) with 1.0 and 1.05: a larger tau fades sooner. At r = 1 the gradient is the policy gradient.
    """
    tau_BT = jnp.where(tokens.advantage_BT > 0, tau_positive, tau_negative)
    loss_BT = -4 / tau_BT * jax.nn.sigmoid(tau_BT * (tokens.ratio_BT - 1)) * tokens.advantage_BT
    none_BT = jnp.zeros(loss_BT.shape, bool)
    return loss_BT / importance.stream_length(tokens.mask_BT, stream_ids_BT), none_BT, num_streams


@ratio_loss
def oapl(tokens: Tokens, *, beta: float, stream_ids_BT: Array, num_streams: Array) -> Terms:
    """Regresses each stream's log-ratio to the sampler on its optimal advantage: right for samples of any age, without ratios.

        loss = sum_i (beta sum_t log r_t - A_i)^2 / num_streams

    OAPL (arXiv 2602.19362, eq. 3) with beta = 1e-3; docs/decisions/training.md names the source of the equation. A*-PO (arXiv 2505.20686)
    has a fixed reference policy in the place of the sampler mu. The minimum is pi = mu exp(A / beta), which is the optimum of
    reward - beta KL(pi || mu) if A is that of `advantages.optimal`. A_i is the mean advantage of the stream's tokens. Groups of equal rewards,
    which eq. 3 has with A = 0, are left out before.
    """
    lengths_BT = importance.stream_length(tokens.mask_BT, stream_ids_BT)
    A_BT = importance.stream_mean(tokens.advantage_BT, tokens.mask_BT, stream_ids_BT)
    sum_BT = importance.stream_mean(tokens.log_ratio_BT, tokens.mask_BT, stream_ids_BT) * lengths_BT
    return (beta * sum_BT - A_BT) ** 2 / lengths_BT, jnp.zeros(sum_BT.shape, bool), num_streams


@ratio_loss
def masked_importance_sampling(
    tokens: Tokens,
    *,
    ratio_low: float,
    ratio_high: float,
    stream_low: float = 0.0,
    stream_high: float = math.inf,
    geometric_low: float = 0.0,
    geometric_high: float = math.inf,
    stream_ids_BT: Array,
) -> Terms:
    """Importance sampling against the sampler; tokens and streams with extreme ratios are left out (IcePop).

        loss = -sum_t mask_t keep_t r A / denom
        keep_t = ratio_low <= r <= ratio_high
                 and stream_low <= (smallest r of the stream), (largest r of the stream) <= stream_high
                 and geometric_low <= exp(mean_t log r of the stream) <= geometric_high

    INTELLECT-3 (arXiv 2512.16144, section 2): tokens in [0.5, 5], whole stream dropped below 1e-5. PRIME-RL at its release:
    tokens in [0.125, 8]; in December 2025 also geometric mean in [0.1, 10] and stream_high = 100. The defaults disable the
    stream rules. The indicator carries no gradient; a dropped token keeps its place in `denom`.
    """
    ratio_BT, fixed_BT = tokens.ratio_BT, jax.lax.stop_gradient(tokens.log_ratio_BT)
    keep_BT = (ratio_BT >= ratio_low) & (ratio_BT <= ratio_high)
    if stream_low > 0:  # outside the mask r is 1: the bounds are on either side of it
        keep_BT &= importance.over_stream(jax.ops.segment_min, fixed_BT, stream_ids_BT) >= math.log(stream_low)
    if stream_high < math.inf:
        keep_BT &= importance.over_stream(jax.ops.segment_max, fixed_BT, stream_ids_BT) <= math.log(stream_high)
    if geometric_low > 0 or geometric_high < math.inf:
        geometric_BT = jnp.exp(importance.stream_mean(fixed_BT, tokens.mask_BT, stream_ids_BT))
        keep_BT &= (geometric_BT >= geometric_low) & (geometric_BT <= geometric_high)
    return -jnp.where(keep_BT, ratio_BT, 0.0) * tokens.advantage_BT, ~keep_BT, tokens.denom


@ratio_loss
def cispo(tokens: Tokens, *, ratio_low: float, ratio_high: float) -> Terms:
    """Clips the weight of the policy gradient instead of the surrogate: every token keeps its gradient.

        loss = -sum_t mask_t sg(clip(r, ratio_low, ratio_high)) A logp / denom

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4); without a lower bound and with an upper one of 5 in ScaleRL (arXiv 2510.13786).
    `clip_frac` counts weights that were clipped.
    """
    ratio_BT = jax.lax.stop_gradient(tokens.ratio_BT)
    loss_BT = -jnp.clip(ratio_BT, ratio_low, ratio_high) * tokens.advantage_BT * tokens.logp_BT
    return loss_BT, (ratio_BT < ratio_low) | (ratio_BT > ratio_high), tokens.denom


@ratio_loss
def truncated_importance_sampling(
    tokens: Tokens, *, clip_low: float, clip_high: float, cap: float, sampler_logp_BT: Array
) -> Terms:
    """PPO clipping against the learner's own old policy, each token weighted by how likely that policy was to sample it.

        loss = -sum_t mask_t sg(min(w, cap)) min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / denom
        w = exp(behavior_logp - sampler_logp)

    TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training") with cap = 2. `r` is
    against `behavior_logp`, so objective.old_logprobs must be "learner"; otherwise w = 1.
    """
    return *_weighted(tokens, clip_low, clip_high, cap, sampler_logp_BT), tokens.denom


@ratio_loss
def decoupled_ppo(tokens: Tokens, *, clip_low: float, clip_high: float, sampler_logp_BT: Array) -> Terms:
    """PPO with three policies: behavior (sampled), proximal (bounds the step, recomputed by the learner), target (trained).

        loss = -sum_t mask_t sg(prox / mu) min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) / denom,   u = pi / prox

    Decoupled PPO (arXiv 2110.00641, eq. 6; AReaL, arXiv 2505.24298, eq. 5): staleness goes into the weight, not into the clip.
    Equals `truncated_importance_sampling` without a cap.
    """
    return *_weighted(tokens, clip_low, clip_high, math.inf, sampler_logp_BT), tokens.denom


def _weighted(tokens: Tokens, clip_low, clip_high, cap, sampler_logp_BT) -> tuple[Array, Array]:
    behavior_logp_BT = tokens.behavior_logp_BT
    differs_BT = tokens.mask_BT * (behavior_logp_BT != sampler_logp_BT)  # equal ones have w = 1; -inf - -inf is NaN
    weight_BT = jnp.exp(importance.log_ratio(behavior_logp_BT, sampler_logp_BT, differs_BT))
    loss_BT, dropped_BT = _clipped(tokens, clip_low, clip_high)
    return loss_BT * jax.lax.stop_gradient(jnp.minimum(weight_BT, cap)), dropped_BT


@ratio_loss
def dppo_tv(tokens: Tokens, *, low: float, high: float, kl_tau: float) -> Terms:
    """Importance sampling; a token is left out once its *probability* moved too far in the direction of its advantage.

        loss = sum_t mask_t (-keep_t r A + kl_tau log(r)^2) / denom
        keep_t = not (A > 0 and pi - mu > high  or  A <= 0 and pi - mu < -low)

    DPPO with the binary total-variation mask (arXiv 2602.04879) and Kimi K2.5's squared log-ratio (arXiv 2602.02276), the
    default of PRIME-RL in 2026 with low = high = 0.2 and kl_tau = 1e-3. The squared term covers dropped tokens, too. Unlike
    PRIME-RL's, r is clamped at e^20, above which neither term has a gradient. The indicator carries no gradient.
    """
    change_BT = jnp.exp(tokens.logp_BT) - jnp.exp(tokens.behavior_logp_BT)
    return _unless(jnp.where(tokens.advantage_BT > 0, change_BT > high, change_BT < -low), tokens, kl_tau)


@ratio_loss
def ipo(tokens: Tokens, *, bound: float, kl_tau: float) -> Terms:
    """Leaves out tokens whose probability changed by more than `bound` (PRIME-RL: 0.1) in any direction; otherwise equals `dppo_tv`."""
    change_BT = jnp.exp(tokens.logp_BT) - jnp.exp(tokens.behavior_logp_BT)
    return _unless(jnp.abs(change_BT) > bound, tokens, kl_tau)


def _unless(dropped_BT: Array, tokens: Tokens, kl_tau: float) -> Terms:
    loss_BT = -jnp.where(dropped_BT, 0.0, tokens.ratio_BT) * tokens.advantage_BT + kl_tau * tokens.log_ratio_BT**2
    return loss_BT, dropped_BT, tokens.denom


def cross_entropy(logp_BT: Array, behavior_logp_BT: Array, A_BT: Array, mask_BT: Array, *, denom: Array) -> Loss:
    """Supervised negative log-likelihood: loss = -sum_t mask_t logp_t A_t / denom, where A weighs the tokens (1 for plain SFT).

    With the advantage `best_of_n`, it distills the best of each group's samples into the policy.
    """
    return importance.total(-logp_BT * A_BT, mask_BT, denom), {}


_CLIPPED = (two_sided_clip, grpo, dr_grpo, dapo, gspo, gmpo, sapo, oapl)
_WEIGHTED = (masked_importance_sampling, cispo, truncated_importance_sampling, decoupled_ppo, dppo_tv, ipo)
LOSSES = {loss.__name__: loss for loss in (*_CLIPPED, *_WEIGHTED, cross_entropy)}
