"""A mixture of experts: route each token to X of E experts, run them dropless, sum their outputs by weight.

1. Router: softmax over all E in float32, the X best, optionally renormalised (Qwen3-MoE).
2. Assignments are sorted by expert, so that one grouped matmul (`jax.lax.ragged_dot`) runs all experts without
   capacity and without dropping a token.
3. With an `expert` mesh axis the experts are split over it inside one `shard_map`: tokens are gathered over the
   axis, each device runs its own experts on them, and the partial sums are scattered back.

Letters: B sequences, T tokens, N = B T, D model, E experts, X experts per token, F ffn of one expert.
Left out: load statistics, balancing and router replay.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models import config as config_lib
from sharding import rules


def mixture(x_BTD: jax.Array, params: dict, config: config_lib.ModelConfig) -> jax.Array:
    """Returns the mixture's output [B, T, D]; `params` holds `router` [D, E] and expert-major gate, up, down."""
    weights_BTX, experts_BTX = route(x_BTD, params["router"], config)
    experts = {name: params[name].astype(x_BTD.dtype) for name in ("gate", "up", "down")}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["expert"] == 1:
        return _run_experts(x_BTD, weights_BTX, experts_BTX, experts, first_expert=0)

    batch, sequence = rules.RULES["batch"], rules.RULES["sequence"]
    tokens = PartitionSpec(batch, sequence, None)
    return jax.shard_map(
        functools.partial(_run_local_experts, num_local=config.num_experts // mesh.shape["expert"]),
        in_specs=(
            tokens,
            tokens,
            tokens,
            {
                "gate": PartitionSpec("expert", "fsdp", "tensor"),
                "up": PartitionSpec("expert", "fsdp", "tensor"),
                "down": PartitionSpec("expert", "tensor", "fsdp"),
            },
        ),
        out_specs=tokens,
        check_vma=False,
    )(x_BTD, weights_BTX, experts_BTX, experts)


def route(x_BTD: jax.Array, router_DE: jax.Array, config: config_lib.ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns (weights_BTX float32, experts_BTX int32), experts by falling weight; all of it in float32."""
    logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD.astype(jnp.float32), router_DE.astype(jnp.float32))
    weights_BTX, experts_BTX = jax.lax.top_k(jax.nn.softmax(logits_BTE, axis=-1), config.experts_per_token)
    if config.norm_topk:
        weights_BTX = weights_BTX / weights_BTX.sum(axis=-1, keepdims=True)
    return weights_BTX, experts_BTX


def _run_experts(x_BTD, weights_BTX, experts_BTX, params, *, first_expert: int | jax.Array) -> jax.Array:
    """Runs the experts `first_expert ..` held in `params`; assignments to others contribute zero."""
    B, T, D = x_BTD.shape
    num_local, X = params["gate"].shape[0], experts_BTX.shape[-1]
    local_A = experts_BTX.reshape(-1) - first_expert  # A = N X assignments
    is_local_A = (local_A >= 0) & (local_A < num_local)
    group_A = jnp.where(is_local_A, local_A, num_local)  # strangers sort last, behind every group
    order_A = jnp.argsort(group_A, stable=True)
    group_sizes = jnp.bincount(group_A, length=num_local + 1)[:num_local].astype(jnp.int32)

    rows_AD = x_BTD.reshape(B * T, D)[order_A // X]
    gate_AF = jax.lax.ragged_dot(rows_AD, params["gate"], group_sizes)
    up_AF = jax.lax.ragged_dot(rows_AD, params["up"], group_sizes)
    out_AD = jax.lax.ragged_dot(jax.nn.silu(gate_AF) * up_AF, params["down"], group_sizes)

    weight_A = jnp.where(is_local_A, weights_BTX.reshape(-1), 0.0)[order_A].astype(out_AD.dtype)
    out_AD = jnp.where(weight_A[:, None] != 0, out_AD * weight_A[:, None], 0)  # rows past the groups are undefined
    unsorted_AD = jnp.zeros_like(out_AD).at[order_A].set(out_AD, unique_indices=True)
    return unsorted_AD.reshape(B, T, X, D).sum(axis=2)


def _run_local_experts(x_BTD, weights_BTX, experts_BTX, params, *, num_local: int) -> jax.Array:
    """One device's share, inside `shard_map`: all tokens of the expert axis, its own experts, scattered sums."""

    def over_experts(x):
        return jax.lax.all_gather(x, "expert", axis=0, tiled=True)

    full = {
        "gate": jax.lax.all_gather(params["gate"], "fsdp", axis=1, tiled=True),
        "up": jax.lax.all_gather(params["up"], "fsdp", axis=1, tiled=True),
        "down": jax.lax.all_gather(params["down"], "fsdp", axis=2, tiled=True),
    }
    partial_BTD = _run_experts(
        over_experts(x_BTD),
        over_experts(weights_BTX),
        over_experts(experts_BTX),
        full,
        first_expert=jax.lax.axis_index("expert") * num_local,
    )
    partial_BTD = jax.lax.psum(partial_BTD, "tensor")
    return jax.lax.psum_scatter(partial_BTD, "expert", scatter_dimension=0, tiled=True)
