"""Functions that the losses share: importance ratios, sums over a packed stream, totals over the step, and metrics.

Letters: B rows, T tokens. Several streams share a row; `stream_ids_BT` numbers them 0, 1, ... in order of their columns
(`rl/learning/batch/packing.py: stream_ids`), so that a row of T tokens has at most T of them and every shape is fixed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array
MAX_LOG_RATIO = 20.0  # e^20 = 5e8: a token of tiny sampling probability has a large finite ratio, and no gradient


def log_ratio(logp_BT: Array, old_logp_BT: Array, mask_BT: Array) -> Array:
    """The log of the importance ratios, logp - old_logp: at most `MAX_LOG_RATIO`, and 0 where the mask is 0."""
    return jnp.minimum(jnp.where(mask_BT > 0, logp_BT - old_logp_BT, 0.0), MAX_LOG_RATIO)


def total(x_BT: Array, mask_BT: Array, denom: Array) -> Array:
    """Returns the sum of x over trained tokens, divided by a count: sum_t mask_t x_t / denom. x may be NaN where the mask is 0."""
    return jnp.sum(jnp.where(mask_BT > 0, x_BT, 0.0) * mask_BT) / denom


def over_stream(reduce: Callable, x_BT: Array, stream_ids_BT: Array) -> Array:
    """Returns, at every token, x reduced over its stream (one rollout's sequence) by `reduce`, such as `jax.ops.segment_sum`."""
    return jax.vmap(lambda x_T, ids_T: reduce(x_T, ids_T, num_segments=len(x_T))[ids_T])(x_BT, stream_ids_BT)


def stream_mean(x_BT: Array, mask_BT: Array, stream_ids_BT: Array) -> Array:
    """Returns, at every token, the mean of x over trained tokens of its stream (one rollout's sequence); 0 if no token trains."""
    sum_BT = over_stream(jax.ops.segment_sum, jnp.where(mask_BT > 0, x_BT, 0.0) * mask_BT, stream_ids_BT)
    return sum_BT / stream_length(mask_BT, stream_ids_BT)


def stream_length(mask_BT: Array, stream_ids_BT: Array) -> Array:
    """Returns, at every token, |o|: the number of trained tokens in its stream (one rollout's sequence), at least 1."""
    return jnp.maximum(over_stream(jax.ops.segment_sum, mask_BT, stream_ids_BT), 1.0)


def num_streams(mask_BT: Array, stream_ids_BT: Array) -> Array:
    """The number of streams (token sequences) with a trained token, as the rounded sum of 1 / |o| over trained tokens."""
    return jnp.round(jnp.sum(mask_BT / stream_length(mask_BT, stream_ids_BT)))


def metrics(log_ratio_BT: Array, dropped_BT: Array, A_BT: Array, mask_BT: Array, denom: Array) -> dict[str, Array]:
    """Returns the metrics that all losses with importance ratios report. Each is a sum over tokens / denom, so micro-batches add up.

    loss/clip_frac            tokens whose gradient the loss dropped; also those with A > 0 and with A < 0
    loss/mismatch_kl          KL(mu || pi) by the k3 estimator, r - 1 - log r >= 0 (Schulman 2020); also of dropped tokens
    loss/ratio_mean           mean r, 1 in expectation; with loss/ratio_sq_mean (mean r^2) it gives the effective sample size
                              (rl/experiment/reporting/diagnostics.py)
    """
    log_ratio_BT = jax.lax.stop_gradient(log_ratio_BT)
    ratio_BT = jnp.exp(log_ratio_BT)
    kl_BT = jnp.expm1(log_ratio_BT) - log_ratio_BT
    return {
        "loss/clip_frac": total(dropped_BT, mask_BT, denom),
        "loss/clip_frac_positive": total(dropped_BT & (A_BT > 0), mask_BT, denom),
        "loss/clip_frac_negative": total(dropped_BT & (A_BT < 0), mask_BT, denom),
        "loss/mismatch_kl": total(kl_BT, mask_BT, denom),
        "loss/mismatch_kl_dropped": total(jnp.where(dropped_BT, kl_BT, 0.0), mask_BT, denom),
        "loss/ratio_mean": total(ratio_BT, mask_BT, denom),
        "loss/ratio_sq_mean": total(ratio_BT**2, mask_BT, denom),
    }
