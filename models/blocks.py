"""One transformer layer: its parameters and its computation, for every model family.

1. `specs` lists a layer's parameters: norms, attention (ordinary or latent), and a dense ffn or a mixture of experts.
2. `run` adds attention and ffn to the residual stream. It attends through the `attend` function it is given:
   models/transformer.py passes one over the packed row, or one over a cache of keys.

Letters: B sequences, T tokens, D model, H query heads, K key heads, C head dim (V of values), F ffn, R and Q latent dims,
N plain and P rotated dims of a latent head, E experts, X experts per token.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import config as config_lib
from models import layers, moe
from sharding import rules

Params = dict
LATENT_NORM_EPS = 1e-6  # DeepSeek's two latent norms do not use the config's


def specs(config: config_lib.ModelConfig, index: int) -> Params:
    """Returns the tree of `ParamSpec` of layer `index`."""
    D = config.model_dim
    block: Params = {"attn_norm": scale(config, D), "mlp_norm": scale(config, D)}
    block["attn"] = _latent_attention_specs(config) if config.is_latent else _attention_specs(config)
    if config.post_norms:
        block |= {"attn_post_norm": scale(config, D), "mlp_post_norm": scale(config, D)}
    if config.is_moe(index):
        return block | {"moe": _moe_specs(config)}
    return block | {"mlp": _ffn_specs(config, config.ffn_dim, bias=config.ffn_bias)}


def run(
    params: Params,
    config: config_lib.ModelConfig,
    x_BTD: jax.Array,
    attend: Callable[..., jax.Array],
    rotation: layers.Rotation,
    *,
    sliding: bool,
    absorbed: bool = False,
    experts_BTX: jax.Array | None = None,
    valid_BT: jax.Array | None = None,
) -> tuple[jax.Array, moe.Routing | None]:
    """Computes x += Attention(norm(x)); x += FFN(norm(x)), with a second norm after each if the config has post norms.

    Returns (x_BTD, routing); the routing is None if the layer has no experts. The layer attends by
    `attend(q_BTHC, k_BTKC, v_BTKV, **options) -> out_BTHV`. `rotation` and `sliding` are those of its kind. `absorbed` runs
    latent attention over latents, as a cache needs it. `experts_BTX` and `valid_BT` are those of `moe.ffn`.
    """

    def norm(x, name):
        return layers.rms_norm(x, params[name], config.norm_eps, config.norm)

    routing = None
    with jax.named_scope("attention"):
        h_BTD = norm(x_BTD, "attn_norm")
        if config.is_latent:
            out_BTHV = _latent_attention(params["attn"], config, h_BTD, attend, rotation, sliding, absorbed)
        else:
            out_BTHV = _attention(params["attn"], config, h_BTD, attend, rotation, sliding)
        out_BTD = layers.project(out_BTHV, params["attn"]["o"].astype(h_BTD.dtype))
        if config.out_bias:
            out_BTD += _broadcast(params["attn"]["o_bias"], out_BTD)
        x_BTD += norm(out_BTD, "attn_post_norm") if config.post_norms else out_BTD
    x_BTD = rules.constrain(x_BTD, "batch", "sequence", None)
    with jax.named_scope("ffn"):
        h_BTD = norm(x_BTD, "mlp_norm")
        if "moe" in params:
            out_BTD, routing = moe.ffn(h_BTD, params["moe"], config, experts_BTX=experts_BTX, valid_BT=valid_BT)
        else:
            out_BTD = layers.ffn(h_BTD, params["mlp"], config)
        x_BTD += norm(out_BTD, "mlp_post_norm") if config.post_norms else out_BTD
    return rules.constrain(x_BTD, "batch", "sequence", None), routing


def _attention(params, config, h_BTD, attend, rotation, sliding) -> jax.Array:
    def heads(name):
        x_BTHC = layers.project(h_BTD, params[name].astype(h_BTD.dtype))
        return x_BTHC + _broadcast(params[f"{name}_bias"], x_BTHC) if config.qkv_bias else x_BTHC

    q_BTHC, k_BTKC, v_BTKC = heads("q"), heads("k"), heads("v")
    if config.qk_norm:
        q_BTHC = layers.rms_norm(q_BTHC, params["q_norm"], config.norm_eps, config.norm)
        k_BTKC = layers.rms_norm(k_BTKC, params["k_norm"], config.norm_eps, config.norm)
    q_BTHC = layers.rotate(q_BTHC, rotation, interleaved=config.rope_interleaved)
    k_BTKC = layers.rotate(k_BTKC, rotation, interleaved=config.rope_interleaved)
    return attend(q_BTHC, k_BTKC, v_BTKC, **_options(params, config, sliding))


def _latent_attention(params, config, h_BTD, attend, rotation, sliding, absorbed: bool) -> jax.Array:
    """Runs DeepSeek's multi-head latent attention (arXiv 2405.04434, section 2.1).

    If absorbed, the up-projections of keys and values act on the queries and the output instead, so that the cache
    contains latents alone. Otherwise every head has its own keys, which costs less without a cache.
    """
    dtype, N = h_BTD.dtype, config.head_dim - config.rope_dim
    weights = {name: param.astype(dtype) for name, param in params.items()}

    def down(name):
        x = layers.project(h_BTD, weights[name])
        return x + _broadcast(params[f"{name}_bias"], x) if config.qkv_bias else x

    def latent_norm(x, name):
        return layers.rms_norm(x, params[name], LATENT_NORM_EPS, config.norm)

    q_in, q_kernel = h_BTD, "q"
    if config.q_latent_dim:
        q_in, q_kernel = latent_norm(down("q_down"), "q_latent_norm"), "q_up"
    q_BTHC = layers.project(q_in, weights[q_kernel])
    latent_BTR = latent_norm(down("kv_down"), "kv_latent_norm")
    k_BT1P = down("k_rope")[:, :, None]
    q_BTHP = layers.rotate(q_BTHC[..., N:], rotation, interleaved=config.rope_interleaved)
    k_BT1P = layers.rotate(k_BT1P, rotation, interleaved=config.rope_interleaved)
    options = _options(params, config, sliding)
    if absorbed:
        q_BTHR = jnp.einsum("BTHN,RHN->BTHR", q_BTHC[..., :N], weights["k_up"])
        k_BT1C = jnp.concatenate([latent_BTR[:, :, None], k_BT1P], axis=-1)
        q_BTHC = jnp.concatenate([q_BTHR, q_BTHP], axis=-1)
        out_BTHR = attend(q_BTHC, k_BT1C, k_BT1C[..., :0], value_dim=config.kv_latent_dim, **options)
        return jnp.einsum("BTHR,RHV->BTHV", out_BTHR, weights["v_up"])
    k_BTHN = layers.project(latent_BTR, weights["k_up"])
    v_BTHV = layers.project(latent_BTR, weights["v_up"])
    k_BTHP = jnp.broadcast_to(k_BT1P, (*k_BTHN.shape[:3], k_BT1P.shape[-1]))
    q_BTHC = jnp.concatenate([q_BTHC[..., :N], q_BTHP], axis=-1)
    return attend(q_BTHC, jnp.concatenate([k_BTHN, k_BTHP], axis=-1), v_BTHV, **options)


def _options(params, config, sliding: bool) -> dict:
    """Returns the keyword arguments of `attend` in which this layer differs from plain attention."""
    options = {}
    if sliding:
        options["window"] = config.window
    if config.score_scale != config.head_dim**-0.5 or config.is_latent:
        options["scale"] = config.score_scale
    if config.attention_softcap:
        options["softcap"] = config.attention_softcap
    if config.sinks:
        options["sinks_H"] = params["sinks"]
    return options


def _broadcast(bias, like) -> jax.Array:
    return jnp.broadcast_to(bias.astype(like.dtype), like.shape)


def _attention_specs(config) -> Params:
    D, H, K, C = config.model_dim, config.num_heads, config.num_kv_heads, config.head_dim
    sizes = {"q": (H, "heads"), "k": (K, "kv_heads"), "v": (K, "kv_heads")}
    tree = {name: kernel(config, (D, n, C), ("model", axis, "head_dim"), D) for name, (n, axis) in sizes.items()}
    tree["o"] = kernel(config, (H, C, D), ("heads", "head_dim", "model"), H * C)
    if config.qkv_bias:
        tree |= {f"{name}_bias": _bias(config, (n, C), (axis, "head_dim")) for name, (n, axis) in sizes.items()}
    if config.out_bias:
        tree["o_bias"] = _bias(config, (D,), ("norm",))
    if config.qk_norm:
        tree |= {"q_norm": scale(config, C), "k_norm": scale(config, C)}
    if config.sinks:
        tree["sinks"] = _bias(config, (H,), ("heads",))
    return tree


def _latent_attention_specs(config) -> Params:
    D, H, C, V = config.model_dim, config.num_heads, config.head_dim, config.v_dim
    R, P, Q = config.kv_latent_dim, config.rope_dim, config.q_latent_dim
    up = ("model", "heads", "head_dim")
    tree = {
        "kv_down": kernel(config, (D, R), ("model", "head_dim"), D),
        "kv_latent_norm": scale(config, R),
        "k_rope": kernel(config, (D, P), ("model", "head_dim"), D),
        "k_up": kernel(config, (R, H, C - P), up, R),
        "v_up": kernel(config, (R, H, V), up, R),
        "o": kernel(config, (H, V, D), ("heads", "head_dim", "model"), H * V),
    }
    if config.out_bias:
        tree["o_bias"] = _bias(config, (D,), ("norm",))
    if config.qkv_bias:  # of the projections that make latents, and of the shared key
        sizes = {"kv_down_bias": R, "k_rope_bias": P} | ({"q_down_bias": Q} if Q else {})
        tree |= {name: _bias(config, (size,), ("head_dim",)) for name, size in sizes.items()}
    if not Q:
        return tree | {"q": kernel(config, (D, H, C), up, D)}
    return tree | {
        "q_down": kernel(config, (D, Q), ("model", "head_dim"), D),
        "q_latent_norm": scale(config, Q),
        "q_up": kernel(config, (Q, H, C), up, Q),
    }


def _moe_specs(config) -> Params:
    D, E, F = config.model_dim, config.num_experts, config.expert_ffn_dim
    tree: Params = {
        "router": kernel(config, (D, E), ("model", "router"), D),
        "gate": kernel(config, (E, D, F), moe.AXES["gate"], D),
        "up": kernel(config, (E, D, F), moe.AXES["up"], D),
        "down": kernel(config, (E, F, D), moe.AXES["down"], F),
    }
    if config.expert_bias:
        shapes = {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, D)}
        tree |= {name: _bias(config, shape, moe.AXES[name]) for name, shape in shapes.items()}
    if config.router_bias:
        tree["router_bias"] = _bias(config, (E,), ("router",))
    if config.router_correction:  # float32 at any param_dtype: steps of 1e-3 would vanish in bfloat16
        tree["correction"] = rules.ParamSpec((E,), "float32", ("router",), _zeros)
    if config.num_shared_experts:
        tree["shared"] = _ffn_specs(config, F * config.num_shared_experts, bias=False)
    return tree


def _ffn_specs(config, F: int, *, bias: bool) -> Params:
    D = config.model_dim
    tree = {
        "gate": kernel(config, (D, F), ("model", "ffn"), D),
        "up": kernel(config, (D, F), ("model", "ffn"), D),
        "down": kernel(config, (F, D), ("ffn", "model"), F),
    }
    if bias:
        tree |= {name: _bias(config, (F,), ("ffn",)) for name in ("gate_bias", "up_bias")}
        tree["down_bias"] = _bias(config, (D,), ("norm",))
    return tree


def kernel(
    config: config_lib.ModelConfig, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int
) -> rules.ParamSpec:
    """Returns the spec of a matrix with logical dims `axes`, drawn so that it keeps the variance of its input."""
    return rules.ParamSpec(shape, config.param_dtype, axes, Normal(fan_in))


def _bias(config, shape, axes) -> rules.ParamSpec:
    return rules.ParamSpec(shape, config.param_dtype, axes, _zeros)


def scale(config: config_lib.ModelConfig, dim: int) -> rules.ParamSpec:
    """Returns the spec of a norm's scale, drawn so that the norm starts as the plain one."""
    return rules.ParamSpec((dim,), config.param_dtype, ("norm",), _zeros if config.norm == "rms_plus_one" else _ones)


@dataclasses.dataclass(frozen=True)
class Normal:
    """Draws a truncated normal of standard deviation 1 / sqrt(fan_in): input and output have the same variance."""

    fan_in: int

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
        """Returns an array of draws."""
        # 0.8796: standard deviation of a unit normal truncated at +-2
        return (jax.random.truncated_normal(key, -2, 2, shape) * (self.fan_in**-0.5 / 0.8796)).astype(dtype)


def _ones(key, shape, dtype):
    del key
    return jnp.ones(shape, dtype)


def _zeros(key, shape, dtype):
    del key
    return jnp.zeros(shape, dtype)
