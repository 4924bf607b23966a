"""A mixture of experts: route each token to X of E experts, run them dropless, sum their outputs by weight.

1. Router, all of it in float32: softmax over E (Qwen3-MoE), sigmoid with a correction that acts on the choice alone and
   optional groups (GLM-4-MoE, DeepSeek-V3), or softmax over the chosen (gpt-oss). Given expert indices (the sampler's,
   in router replay) take the place of the choice; their weights, and the gradient, come from this router.
2. Assignments are sorted by expert, so that one grouped matmul runs all experts without capacity and without dropping
   a token: `jax.lax.ragged_dot`, on TPU megablox (with jax 0.10 the weight gradient of ragged_dot is dense there).
3. On a mesh this happens inside one `shard_map`: each device sorts its own tokens. With an `expert` axis, tokens are
   gathered over it, each device runs its own experts on them, and the partial sums are scattered back.
4. `Routing` says who went where; `load_metrics`, `balance_loss` and `balanced_correction` read it.

Letters: B sequences, T tokens, N = B T, D model, E experts, X experts per token, A = N X assignments, F ffn of one expert,
L mixture layers.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox
from jax.sharding import PartitionSpec

from models import attention, layers
from models import config as config_lib
from sharding import rules

# Logical dims of the parameters that `shard_map` takes apart; models/transformer.py states their shapes.
AXES = {
    "gate": ("experts", "model", "ffn"),
    "up": ("experts", "model", "ffn"),
    "down": ("experts", "ffn", "model"),
    "gate_bias": ("experts", "ffn"),
    "up_bias": ("experts", "ffn"),
    "down_bias": ("experts", "norm"),
}
TILE = 128  # rows of a megablox tile


class Routing(NamedTuple):
    """What the router of one layer did; a leading L when several layers are put together."""

    experts: jax.Array  # int32 [B, T, X], by falling score
    weights: jax.Array  # float32 [B, T, X], what their outputs are multiplied by
    load: jax.Array  # float32 [E], tokens (padding not counted) that chose the expert
    score: jax.Array  # float32 [E], sum over those tokens of the expert's share of all scores


def mixture(
    x_BTD: jax.Array,
    params: dict,
    config: config_lib.ModelConfig,
    *,
    experts_BTX: jax.Array | None = None,
    valid_BT: jax.Array | None = None,
) -> tuple[jax.Array, Routing]:
    """Returns the mixture's output [B, T, D] and what was routed where.

    Args:
      params: `router` [D, E], expert-major `gate`, `up`, `down`, and what else the config's switches call for.
      experts_BTX: experts to use instead of the router's choice.
      valid_BT: False where padding is not to count in the load.
    """
    routing = route(x_BTD, params, config, experts_BTX=experts_BTX, valid_BT=valid_BT)
    experts = {name: params[name].astype(x_BTD.dtype) for name in AXES if name in params}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape.values()) == 1:
        out_BTD = _run_experts(x_BTD, routing.weights, routing.experts, experts, config, first_expert=None)
    else:
        tokens = PartitionSpec(rules.RULES["batch"], rules.RULES["sequence"], None)
        out_BTD = jax.shard_map(
            functools.partial(_run_local_experts, config=config),
            in_specs=(tokens, tokens, tokens, {name: _partition(name) for name in experts}),
            out_specs=tokens,
            check_vma=False,
        )(x_BTD, routing.weights, routing.experts, experts)
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
    """Scores, choice and weights of each token's experts, in float32 (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    logits_BTE = jnp.einsum(
        "BTD,DE->BTE",
        x_BTD.astype(jnp.float32),
        params["router"].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,  # a TPU would round both to bfloat16
    )
    if "router_bias" in params:
        logits_BTE += params["router_bias"].astype(jnp.float32)[None, None]
    scores_BTE = jax.nn.sigmoid(logits_BTE) if config.router == "sigmoid" else jax.nn.softmax(logits_BTE, axis=-1)
    if experts_BTX is None:
        experts_BTX = _choose(logits_BTE if config.router == "topk_softmax" else scores_BTE, params, config)
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
    return Routing(experts_BTX, weights_BTX * config.routed_scale, load_E, score_E)


def load_metrics(routing: Routing) -> dict[str, jax.Array]:
    """Balance over all L layers, from a stacked `Routing`.

    max_violation is max_e load_e / mean load - 1 (arXiv 2408.15664, equation 4): 0 is perfect, E / X - 1 the worst;
    load_entropy is the entropy of the load over log E: 1 is perfect.
    """
    load_LE = routing.load
    violation_L = load_LE.max(axis=-1) / jnp.maximum(load_LE.mean(axis=-1), 1e-9) - 1
    share_LE = load_LE / jnp.maximum(load_LE.sum(axis=-1, keepdims=True), 1e-9)
    entropy_L = -jnp.sum(share_LE * jnp.log(jnp.maximum(share_LE, 1e-30)), axis=-1) / math.log(load_LE.shape[-1])
    return {
        "moe/max_violation": violation_L.mean(),
        "moe/max_violation_worst_layer": violation_L.max(),
        "moe/load_entropy": entropy_L.mean(),
    }


def balance_loss(routing: Routing) -> jax.Array:
    """E sum_e f_e p_e, the mean over layers: f_e the part of assignments, p_e the mean share of scores of expert e.

    Switch Transformer (arXiv 2101.03961, equations 4-6); 1 when balanced. The gradient flows through p alone.
    """
    load_LE = jax.lax.stop_gradient(routing.load)
    f_LE = load_LE / jnp.maximum(load_LE.sum(axis=-1, keepdims=True), 1e-9)
    p_LE = routing.score / jnp.maximum(routing.score.sum(axis=-1, keepdims=True), 1e-9)
    return load_LE.shape[-1] * jnp.mean(jnp.sum(f_LE * p_LE, axis=-1))


def balanced_correction(correction_E: jax.Array, load_E: jax.Array, rate: float) -> jax.Array:
    """correction + rate sign(mean load - load): underused experts become easier to choose (arXiv 2408.15664, algorithm 1)."""
    return correction_E + rate * jnp.sign(load_E.mean(axis=-1, keepdims=True) - load_E)


def grouped_matmul(rows_AD, kernel_EDF, group_sizes_E, inside_A, config: config_lib.ModelConfig, *, interpret=False):
    """rows[a] @ kernel[expert of a], for rows sorted by expert; zero for rows past the groups, whose gradient is zero too.

    Neither implementation defines what it returns past the groups, forward or backward, so both ways are masked by
    selection (a product with zero would keep a NaN). `inside_A` is None when every row belongs to a group.
    """

    def mask(x):
        return x if inside_A is None else jnp.where(inside_A[:, None], x, 0)

    which = config.grouped_matmul
    if which == "auto":
        which = "megablox" if attention.platform() == "tpu" else "ragged_dot"
    if which == "ragged_dot":
        return checkpoint_name(mask(jax.lax.ragged_dot(mask(rows_AD), kernel_EDF, group_sizes_E)), layers.SAVED)
    A = rows_AD.shape[0]
    tiles = tuple(min(TILE * 8, -(-dim // TILE) * TILE) for dim in kernel_EDF.shape[1:])
    padded_AD = jnp.pad(mask(rows_AD), ((0, -A % TILE), (0, 0)))
    out_AF = megablox.gmm(
        padded_AD, kernel_EDF, group_sizes_E, rows_AD.dtype, (TILE, *tiles), None, None, False, interpret
    )
    return checkpoint_name(mask(out_AF[:A]), layers.SAVED)


def _choose(choice_BTE, params: dict, config: config_lib.ModelConfig) -> jax.Array:
    """The X best experts of each token, among those of the best groups."""
    if "correction" in params:
        choice_BTE += jax.lax.stop_gradient(params["correction"].astype(jnp.float32))[None, None]
    if config.router_groups > 1:
        B, T, E = choice_BTE.shape
        grouped_BTGE = choice_BTE.reshape(B, T, config.router_groups, -1)
        worth_BTG = jax.lax.top_k(grouped_BTGE, 2)[0].sum(axis=-1)
        kept_BTX = jax.lax.top_k(worth_BTG, config.router_groups_kept)[1]
        is_kept_BTG = (kept_BTX[..., None] == jnp.arange(config.router_groups)[None, None, None]).any(axis=2)
        choice_BTE = jnp.where(is_kept_BTG[..., None], grouped_BTGE, -jnp.inf).reshape(B, T, E)
    return jax.lax.top_k(choice_BTE, config.experts_per_token)[1]


def _run_experts(x_BTD, weights_BTX, experts_BTX, params, config, *, first_expert) -> jax.Array:
    """Runs the experts `first_expert ..` held in `params` (all of them if None); assignments to others give zero."""
    B, T, D = x_BTD.shape
    num_local, X = params["gate"].shape[0], experts_BTX.shape[-1]
    group_A = experts_BTX.reshape(-1)
    if first_expert is not None:
        group_A -= first_expert
        group_A = jnp.where((group_A >= 0) & (group_A < num_local), group_A, num_local)  # strangers sort last
    order_A = jnp.argsort(group_A, stable=True)
    sorted_A = group_A[order_A]
    inside_A = None if first_expert is None else sorted_A < num_local
    group_sizes = jnp.bincount(group_A, length=num_local + 1)[:num_local].astype(jnp.int32)

    def project(rows, name):
        out = grouped_matmul(rows, params[name], group_sizes, inside_A, config)
        if f"{name}_bias" not in params:
            return out
        bias_AF = params[f"{name}_bias"][jnp.minimum(sorted_A, num_local - 1)]
        return out + (bias_AF if inside_A is None else jnp.where(inside_A[:, None], bias_AF, 0))

    rows_AD = x_BTD.reshape(B * T, D)[order_A // X]
    hidden_AF = layers.gated(project(rows_AD, "gate"), project(rows_AD, "up"), config)
    out_AD = project(hidden_AF, "down") * weights_BTX.reshape(-1)[order_A].astype(x_BTD.dtype)[:, None]
    unsorted_AD = jnp.zeros_like(out_AD).at[order_A].set(out_AD, unique_indices=True)
    return unsorted_AD.reshape(B, T, X, D).sum(axis=2)


def _run_local_experts(x_BTD, weights_BTX, experts_BTX, params, *, config) -> jax.Array:
    """One device's share, inside `shard_map`: all tokens of the expert axis, its own experts, scattered sums."""
    full = {name: _gather_model_dim(name, param) for name, param in params.items()}
    if "down_bias" in full:  # the sum over `tensor` below would add it once per device
        is_first = jax.lax.axis_index("tensor") == 0
        full["down_bias"] = jnp.where(is_first, full["down_bias"], 0)
    num_shards = jax.lax.axis_size("expert")
    if num_shards == 1:
        return jax.lax.psum(_run_experts(x_BTD, weights_BTX, experts_BTX, full, config, first_expert=None), "tensor")

    def over_experts(x):
        return jax.lax.all_gather(x, "expert", axis=0, tiled=True)

    first_expert = jax.lax.axis_index("expert") * (config.num_experts // num_shards)
    everyone = over_experts(x_BTD), over_experts(weights_BTX), over_experts(experts_BTX)
    partial_BTD = jax.lax.psum(_run_experts(*everyone, full, config, first_expert=first_expert), "tensor")
    return jax.lax.psum_scatter(partial_BTD, "expert", scatter_dimension=0, tiled=True)


def _gather_model_dim(name: str, param: jax.Array) -> jax.Array:
    if "model" not in AXES[name]:
        return param
    return jax.lax.all_gather(param, "fsdp", axis=AXES[name].index("model"), tiled=True)


def _partition(name: str) -> PartitionSpec:
    return PartitionSpec(*(rules.RULES[axis][0] if rules.RULES[axis] else None for axis in AXES[name]))
