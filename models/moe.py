"""The mixture-of-experts ffn: route each token to X of E experts, run them dropless, sum their outputs by weight.

In router replay, given expert indices (the sampler's) replace the router's choice. Their weights and the gradient still
come from this router. `models/moe_experts.py` runs the experts; shared experts are added.

Letters: B sequences, T tokens, D model, E experts, X experts per token, F ffn of one expert, L MoE layers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models import config as config_lib
from models import layers, moe_experts
from models.kernels import adapted


class Routing(NamedTuple):
    """The experts that one MoE layer's router chose for each token, and their load; of several layers, with a leading dim L."""

    experts: jax.Array  # int32 [B, T, X], by falling score
    weights: jax.Array  # float32 [B, T, X], the factors on the experts' outputs
    load: jax.Array  # float32 [E], number of tokens that chose the expert, without padding
    score: jax.Array  # float32 [E], the expert's share of all scores, summed over those tokens
    margin: jax.Array | None = None  # float32 [B, T], `_margin` of given experts; 0 where the router chose


def ffn(
    x_BTD: jax.Array,
    params: dict,
    config: config_lib.ModelConfig,
    *,
    experts_BTX: jax.Array | None = None,
    valid_BT: jax.Array | None = None,
) -> tuple[jax.Array, Routing]:
    """Runs the mixture-of-experts ffn of one layer. Returns (output [B, T, D], routing: the experts of each token).

    `params` has `router` [D, E], expert-major `gate`, `up`, `down`, and the biases and shared experts of the config.
    `experts_BTX` replaces the router's choice, except where it is negative; a token's experts must all be different.
    `valid_BT` is False for padding, which the load does not count.
    """
    routing = route(x_BTD, params, config, experts_BTX=experts_BTX, valid_BT=valid_BT)
    experts = {name: layers.weight(params[name], x_BTD.dtype, config) for name in moe_experts.AXES if name in params}
    out_BTD = moe_experts.run(x_BTD, routing.weights, routing.experts, experts, config)
    if "shared" in params:
        out_BTD += layers.ffn(x_BTD, params["shared"], config)
    return out_BTD, routing


def route(
    x_BTD: jax.Array,
    params: dict,
    config: config_lib.ModelConfig,
    *,
    experts_BTX: jax.Array | None = None,
    valid_BT: jax.Array | None = None,
) -> Routing:
    """Returns the experts that the router chooses for each token, and their weights in float32 (arXiv 2412.19437, 2.1.2)."""
    x_BTD, router_DE = x_BTD.astype(jnp.float32), adapted.dense(params["router"], jnp.float32).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST  # a TPU would round both to bfloat16
    logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, router_DE, precision=highest)
    if "router_bias" in params:
        logits_BTE += params["router_bias"].astype(jnp.float32)[None, None]
    scores_BTE = jax.nn.sigmoid(logits_BTE) if config.router == "sigmoid" else jax.nn.softmax(logits_BTE, axis=-1)
    given_BTX = experts_BTX
    experts_BTX = _choose(logits_BTE if config.router == "topk_softmax" else scores_BTE, params, config)
    if given_BTX is not None:
        experts_BTX = jnp.where(given_BTX < 0, experts_BTX, given_BTX)
    if config.router == "topk_softmax":
        weights_BTX = jax.nn.softmax(jnp.take_along_axis(logits_BTE, experts_BTX, axis=-1), axis=-1)
    else:
        weights_BTX = jnp.take_along_axis(scores_BTE, experts_BTX, axis=-1)
        if config.norm_topk:
            epsilon = 1e-20 if config.router == "sigmoid" else 0.0  # every sigmoid may underflow
            weights_BTX = weights_BTX / (weights_BTX.sum(axis=-1, keepdims=True) + epsilon)
    chosen_BTE = (experts_BTX[..., None] == jnp.arange(config.num_experts)[None, None, None]).sum(axis=2)
    share_BTE = scores_BTE / scores_BTE.sum(axis=-1, keepdims=True)
    valid_BT1 = jnp.ones_like(logits_BTE[..., :1]) if valid_BT is None else valid_BT[..., None].astype(jnp.float32)
    load_E, score_E = (jnp.sum(x * valid_BT1, axis=(0, 1)) for x in (chosen_BTE.astype(jnp.float32), share_BTE))
    margin_BT = None if given_BTX is None else _margin(chosen_BTE > 0, logits_BTE, scores_BTE, params, config)
    return Routing(experts_BTX, weights_BTX * config.routed_scale, load_E, score_E, margin_BT)


def load_metrics(load_LE: jax.Array) -> dict[str, jax.Array]:
    """Returns metrics of how evenly experts are used, from `load_LE`, the number of tokens per layer and expert.

    max_violation is max_e load_e / mean load - 1 (arXiv 2408.15664, equation 4): 0 is perfect, E / X - 1 the worst.
    load_entropy is the entropy of the load over log E: 1 is perfect.
    """
    violation_L = load_LE.max(axis=-1) / jnp.maximum(load_LE.mean(axis=-1), 1e-9) - 1
    share_LE = load_LE / jnp.maximum(load_LE.sum(axis=-1, keepdims=True), 1e-9)
    entropy_L = -jnp.sum(share_LE * jnp.log(jnp.maximum(share_LE, 1e-30)), axis=-1) / math.log(load_LE.shape[-1])
    return {
        "moe/max_violation": violation_L.mean(),
        "moe/max_violation_worst_layer": violation_L.max(),
        "moe/load_entropy": entropy_L.mean(),
    }


def balance_loss(routing: Routing) -> jax.Array:
    """Returns the auxiliary loss E sum_e f_e p_e, averaged over layers (Switch Transformer, arXiv 2101.03961, eq. 4-6).

    f_e is the fraction of assignments to expert e, p_e its mean share of the scores. Balanced routing gives 1. The
    gradient flows through p alone.
    """
    load_LE = jax.lax.stop_gradient(routing.load)
    f_LE = load_LE / jnp.maximum(load_LE.sum(axis=-1, keepdims=True), 1e-9)
    p_LE = routing.score / jnp.maximum(routing.score.sum(axis=-1, keepdims=True), 1e-9)
    return load_LE.shape[-1] * jnp.mean(jnp.sum(f_LE * p_LE, axis=-1))


def balanced_correction(correction_E: jax.Array, load_E: jax.Array, rate: float) -> jax.Array:
    """Returns the router's correction plus rate * sign(mean load - load): underused experts are then chosen more often.

    This is auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1).
    """
    return correction_E + rate * jnp.sign(load_E.mean(axis=-1, keepdims=True) - load_E)


def _choose(choice_BTE, params: dict, config: config_lib.ModelConfig) -> jax.Array:
    """Returns the numbers of the X experts with the best scores of each token, [B, T, X], among those of the best groups."""
    if "correction" in params:
        choice_BTE += jax.lax.stop_gradient(params["correction"].astype(jnp.float32))[None, None]
    if config.router_groups > 1:
        B, T, E = choice_BTE.shape
        grouped_BTGE, group_score_BTG = _grouped(choice_BTE, config)
        kept_BTX = jax.lax.top_k(group_score_BTG, config.router_groups_kept)[1]
        is_kept_BTG = (kept_BTX[..., None] == jnp.arange(config.router_groups)[None, None, None]).any(axis=2)
        choice_BTE = jnp.where(is_kept_BTG[..., None], grouped_BTGE, -jnp.inf).reshape(B, T, E)
    return jax.lax.top_k(choice_BTE, config.experts_per_token)[1]


def _grouped(choice_BTE, config: config_lib.ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns scores by group, [B, T, G, E / G], and the score of each group, [B, T, G]: the sum of its two best."""
    grouped_BTGE = choice_BTE.reshape(*choice_BTE.shape[:2], config.router_groups, -1)
    return grouped_BTGE, jax.lax.top_k(grouped_BTGE, 2)[0].sum(axis=-1)


def _margin(chosen_BTE, logits_BTE, scores_BTE, params: dict, config: config_lib.ModelConfig) -> jax.Array:
    """Returns the distance of given experts (bool) from this router's choice, [B, T]: 0 if equal, small if nearly so.

    It is in nats: by so much must the logits of two experts approach each other before the router could choose the given
    ones. Sigmoids and corrected scores are converted at a slope of 1/4, the steepest of a sigmoid. With groups, it may
    also be the group scores that must approach. NaN logits give NaN.
    """
    if config.router == "topk_softmax":
        choice_BTE, slope = logits_BTE, 1.0
    elif config.router == "softmax" and "correction" not in params:
        choice_BTE, slope = jnp.log(jnp.maximum(scores_BTE, 1e-37)), 1.0  # scores that vanish are equal
    else:
        choice_BTE, slope = scores_BTE, 0.25
    if "correction" in params:
        choice_BTE += params["correction"].astype(jnp.float32)[None, None]
    least_BT1 = jnp.where(chosen_BTE, choice_BTE, jnp.inf).min(axis=-1, keepdims=True)
    passed_over_BTE = jnp.where(chosen_BTE, -jnp.inf, choice_BTE - least_BT1) / slope
    if config.router_groups == 1:
        return jnp.maximum(passed_over_BTE.max(axis=-1), 0.0)
    grouped_BTGE, group_score_BTG = _grouped(choice_BTE, config)
    # The scores of the last group that the router keeps, and of the next one; a group's score is a sum of two.
    best_BTG, kept = jnp.sort(group_score_BTG, descending=True), config.router_groups_kept
    last_BT1 = best_BTG[..., kept - 1 : kept]
    next_BT1 = best_BTG[..., kept : kept + 1] if kept < config.router_groups else jnp.full_like(last_BT1, -jnp.inf)
    used_BTG = chosen_BTE.reshape(grouped_BTGE.shape).any(axis=-1)
    promoted_BTG = jnp.where(used_BTG, last_BT1 - group_score_BTG, -jnp.inf) / (2 * slope)
    dropped_BTG1 = ((group_score_BTG - next_BT1) / (2 * slope))[..., None]
    passed_over_BTGE = jnp.minimum(passed_over_BTE.reshape(grouped_BTGE.shape), dropped_BTG1)
    return jnp.maximum(jnp.maximum(passed_over_BTGE.max(axis=(-2, -1)), promoted_BTG.max(axis=-1)), 0.0)
