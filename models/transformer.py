"""The decoder: tokens -> hidden -> logits, one definition of the parameters read three ways.

1. `specs(config)` is the tree of `ParamSpec`; `abstract` reads shapes from it, `init` values, and
   `sharding.rules.shardings` layouts.
2. `apply` runs packed sequences through all layers (learner, scorer). `extend` runs the same blocks over a cache
   of keys (prefill, decode, replay). Both hand `_block` a function that attends, and differ in nothing else:
   what the sampler computes is what the learner computes.
3. `logits` is the output head in float32.

Letters: B sequences, T tokens, S cache length, D model, H query heads, K key heads, C head dim, F ffn, V vocabulary.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import attention, layers, moe
from models import config as config_lib
from sharding import rules

Params = dict


def specs(config: config_lib.ModelConfig) -> Params:
    """The tree of `ParamSpec`: every parameter's shape, dtype, logical dims and initial distribution."""
    D, H, K, C, V = (
        config.model_dim,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
    )

    def kernel(shape, axes, fan_in):
        return rules.ParamSpec(shape, config.param_dtype, axes, _normal(fan_in))

    def scale(dim):
        return rules.ParamSpec((dim,), config.param_dtype, ("norm",), _ones)

    def ffn(F):
        return {
            "gate": kernel((D, F), ("model", "ffn"), D),
            "up": kernel((D, F), ("model", "ffn"), D),
            "down": kernel((F, D), ("ffn", "model"), F),
        }

    def experts(E, F):
        return {
            "router": kernel((D, E), ("model", "router"), D),
            "gate": kernel((E, D, F), ("experts", "model", "ffn"), D),
            "up": kernel((E, D, F), ("experts", "model", "ffn"), D),
            "down": kernel((E, F, D), ("experts", "ffn", "model"), F),
        }

    def layer(index):
        block = {
            "attn_norm": scale(D),
            "attn": {
                "q": kernel((D, H, C), ("model", "heads", "head_dim"), D),
                "k": kernel((D, K, C), ("model", "kv_heads", "head_dim"), D),
                "v": kernel((D, K, C), ("model", "kv_heads", "head_dim"), D),
                "o": kernel((H, C, D), ("heads", "head_dim", "model"), H * C),
            },
            "mlp_norm": scale(D),
        }
        if config.qk_norm:
            block["attn"] |= {"q_norm": scale(C), "k_norm": scale(C)}
        if config.is_mixture(index):
            return block | {"moe": experts(config.num_experts, config.expert_ffn_dim)}
        return block | {"mlp": ffn(config.ffn_dim)}

    tree = {
        "embed": kernel((V, D), ("vocab", "model"), D),  # unit-variance logits when the head is tied
        "layers": {f"{index:03d}": layer(index) for index in range(config.num_layers)},
        "final_norm": scale(D),
    }
    if not config.tie_embeddings:
        tree["lm_head"] = kernel((D, V), ("model", "vocab"), D)
    return tree


def abstract(config: config_lib.ModelConfig, mesh: jax.sharding.Mesh | None = None) -> Params:
    """The tree of `ShapeDtypeStruct`: a model of any size, without a byte of memory."""
    return rules.abstract(specs(config), mesh)


def init(key: jax.Array, config: config_lib.ModelConfig) -> Params:
    """Draws the parameters; each one's key is folded from its path, so adding a layer changes no other."""
    tree = specs(config)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=rules.is_spec)]
    leaves, structure = jax.tree.flatten(tree, is_leaf=rules.is_spec)
    drawn = [
        spec.init(jax.random.fold_in(key, _path_hash(path)), spec.shape, spec.dtype)
        for path, spec in zip(paths, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


def num_params(config: config_lib.ModelConfig) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs(config), is_leaf=rules.is_spec))


def apply(
    params: Params,
    config: config_lib.ModelConfig,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    branch_ids_BT: jax.Array | None = None,
) -> jax.Array:
    """Runs whole (packed) sequences; returns the hidden states [B, T, D] after the final norm.

    Args:
      params: the tree of `init`.
      config: static.
      tokens_BT: int32 token ids.
      positions_BT: position of each token in its own sequence; 0..T-1 when None.
      segment_ids_BT: 1, 2, ... per packed sequence, 0 for padding; one sequence per row when None.
      branch_ids_BT: 0 in a prompt that several continuations share, 1, 2, ... in those; no sharing when None.
    """
    B, T = tokens_BT.shape
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((B, T), jnp.int32)
    mask_BTS = attention.packed_mask(segment_ids_BT, branch_ids_BT)

    def attend(q_BTHC, k_BTKC, v_BTKC):
        k_BKTC, v_BKTC = k_BTKC.swapaxes(1, 2), v_BTKC.swapaxes(1, 2)
        return attention.attend(q_BTHC, k_BKTC, v_BKTC, mask_BTS)

    def run_block(block_params, x_BTD):
        return _block(block_params, config, x_BTD, positions_BT, attend)

    if config.remat == "block":
        run_block = jax.checkpoint(run_block, policy=jax.checkpoint_policies.nothing_saveable)
    x_BTD = _embed(params, config, tokens_BT)
    for index in range(config.num_layers):
        x_BTD = run_block(params["layers"][f"{index:03d}"], x_BTD)
    return layers.rms_norm(x_BTD, params["final_norm"], config.norm_eps)


def extend(
    params: Params,
    config: config_lib.ModelConfig,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    cache: tuple,
    attend_cached: Callable,
) -> tuple[jax.Array, tuple]:
    """Runs tokens that continue cached sequences; returns (hidden [B, T, D] after the final norm, new cache).

    `cache` holds one entry per layer, opaque here. `attend_cached(entry, q_BTHC, k_BTKC, v_BTKC) -> (out_BTHC,
    entry)` owns the layout of the cache, writes the new keys and attends (inference/kv_cache.py).
    """
    x_BTD = _embed(params, config, tokens_BT)
    entries = []
    for index in range(config.num_layers):

        def attend(q_BTHC, k_BTKC, v_BTKC, entry=cache[index]):
            out_BTHC, new_entry = attend_cached(entry, q_BTHC, k_BTKC, v_BTKC)
            entries.append(new_entry)
            return out_BTHC

        x_BTD = _block(params["layers"][f"{index:03d}"], config, x_BTD, positions_BT, attend)
    return layers.rms_norm(x_BTD, params["final_norm"], config.norm_eps), tuple(entries)


def logits(params: Params, config: config_lib.ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
    """The output head, float32 [B, T, V]: sampler and learner must agree on log-probabilities to 1e-4."""
    kernel_DV = params["embed"].T if config.tie_embeddings else params["lm_head"]
    return jnp.einsum("BTD,DV->BTV", hidden_BTD, kernel_DV.astype(hidden_BTD.dtype), preferred_element_type=jnp.float32)


def _embed(params, config, tokens_BT):
    x_BTD = params["embed"].astype(config.dtype)[tokens_BT]
    return rules.constrain(x_BTD, "batch", "sequence", None)


def _block(params: dict, config: config_lib.ModelConfig, x_BTD, positions_BT, attend) -> jax.Array:
    """x += Attention(norm(x)); x += FFN(norm(x))."""
    with jax.named_scope("attention"):
        h_BTD = layers.rms_norm(x_BTD, params["attn_norm"], config.norm_eps)
        q_BTHC = jnp.einsum("BTD,DHC->BTHC", h_BTD, params["attn"]["q"].astype(h_BTD.dtype))
        k_BTKC = jnp.einsum("BTD,DKC->BTKC", h_BTD, params["attn"]["k"].astype(h_BTD.dtype))
        v_BTKC = jnp.einsum("BTD,DKC->BTKC", h_BTD, params["attn"]["v"].astype(h_BTD.dtype))
        if config.qk_norm:
            q_BTHC = layers.rms_norm(q_BTHC, params["attn"]["q_norm"], config.norm_eps)
            k_BTKC = layers.rms_norm(k_BTKC, params["attn"]["k_norm"], config.norm_eps)
        q_BTHC = layers.rotate(q_BTHC, positions_BT, config.rope_theta)
        k_BTKC = layers.rotate(k_BTKC, positions_BT, config.rope_theta)
        out_BTHC = attend(q_BTHC, k_BTKC, v_BTKC)
        x_BTD += jnp.einsum("BTHC,HCD->BTD", out_BTHC, params["attn"]["o"].astype(h_BTD.dtype))
    x_BTD = rules.constrain(x_BTD, "batch", "sequence", None)
    with jax.named_scope("ffn"):
        h_BTD = layers.rms_norm(x_BTD, params["mlp_norm"], config.norm_eps)
        if "moe" in params:
            x_BTD += moe.mixture(h_BTD, params["moe"], config)
        else:
            x_BTD += layers.swiglu(h_BTD, params["mlp"])
    return rules.constrain(x_BTD, "batch", "sequence", None)


def _normal(fan_in: int):
    """Truncated normal with standard deviation 1 / sqrt(fan_in): a unit-variance input gives a unit-variance output."""

    def draw(key, shape, dtype):
        # 0.8796: standard deviation of a unit normal truncated at +-2
        return (jax.random.truncated_normal(key, -2, 2, shape) * (fan_in**-0.5 / 0.8796)).astype(dtype)

    return draw


def _ones(key, shape, dtype):
    del key
    return jnp.ones(shape, dtype)


def _path_hash(path) -> int:
    """A stable 31-bit number of a parameter's path (FNV-1a)."""
    value = 2166136261
    for byte in jax.tree_util.keystr(path).encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value & 0x7FFFFFFF
