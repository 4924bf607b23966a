"""One transformer layer: its parameters and its computation, for every model family.

1. `specs` lists a layer's parameters: norms, attention (ordinary or latent), and a dense ffn or a mixture of experts.
2. `run` adds attention and ffn to the residual stream. It attends through the `attend` function it is given:
   models/transformer.py passes one over the packed row, or one over a cache of keys.

Letters: B sequences, T tokens, D model, H query heads, K key heads, C head dim (V of values), F ffn, R and Q latent dims,
N plain and P rotated dims of a latent head, E experts, X experts per token.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.nn import initializers

from models import config as config_lib
from models import layers, moe
from models.kernels import adapted
from sharding.mesh import rules

Params = dict
LATENT_NORM_EPS = 1e-6  # DeepSeek's two latent norms do not use the config's


def specs(config: config_lib.ModelConfig, index: int) -> Params:
    """Returns the parameters of layer `index` as a tree of `ParamSpec` (shape, dtype, logical dims, initializer)."""
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
    """Runs one transformer layer: x += Attention(norm(x)); x += FFN(norm(x)), with second norms if the config has post norms.

    Returns (x_BTD, routing of the tokens to experts, or None without experts). Calls `attend(q_BTHC, k_BTKC, v_BTKV,
    **options) -> out_BTHV`. `rotation` has the rotary tables, and `sliding` is True for a sliding-window layer. `absorbed`
    runs latent attention over latents, for a cache. `experts_BTX` and `valid_BT` are arguments of `moe.ffn`.
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
        out_BTD = layers.project(out_BTHV, layers.weight(params["attn"]["o"], h_BTD.dtype, config), model=-1)
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
    q_BTHC, k_BTKC, v_BTKC = _project(params, config, h_BTD, "q", "k", "v")
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

    def latent_norm(x, name):
        return layers.rms_norm(x, params[name], LATENT_NORM_EPS, config.norm)

    q_in, q_kernel = h_BTD, "q"
    if config.q_latent_dim:
        q_in, q_kernel = latent_norm(_project(params, config, h_BTD, "q_down")[0], "q_latent_norm"), "q_up"
    q_BTHC = layers.project(q_in, layers.weight(params[q_kernel], dtype, config))
    latent_BTR = latent_norm(_project(params, config, h_BTD, "kv_down")[0], "kv_latent_norm")
    k_BT1P = _project(params, config, h_BTD, "k_rope")[0][:, :, None]
    q_BTHP = layers.rotate(q_BTHC[..., N:], rotation, interleaved=config.rope_interleaved)
    k_BT1P = layers.rotate(k_BT1P, rotation, interleaved=config.rope_interleaved)
    options = _options(params, config, sliding)
    if absorbed:
        q_BTHR = _absorb("BTHN,RHN->BTHR", "BTHN,Rr,rHN->BTHR", q_BTHC[..., :N], params["k_up"])
        k_BT1C = jnp.concatenate([latent_BTR[:, :, None], k_BT1P], axis=-1)
        q_BTHC = jnp.concatenate([q_BTHR, q_BTHP], axis=-1)
        out_BTHR = attend(q_BTHC, k_BT1C, k_BT1C[..., :0], value_dim=config.kv_latent_dim, **options)
        return _absorb("BTHR,RHV->BTHV", "BTHR,Rr,rHV->BTHV", out_BTHR, params["v_up"])
    k_BTHN, v_BTHV = (
        layers.project(latent_BTR, layers.weight(params[name], dtype, config)) for name in ("k_up", "v_up")
    )
    k_BTHP = jnp.broadcast_to(k_BT1P, (*k_BTHN.shape[:3], k_BT1P.shape[-1]))
    q_BTHC = jnp.concatenate([q_BTHC[..., :N], q_BTHP], axis=-1)
    return attend(q_BTHC, jnp.concatenate([k_BTHN, k_BTHP], axis=-1), v_BTHV, **options)


def _absorb(equation: str, low_equation: str, x, kernel) -> jax.Array:
    """Returns the product of x and an up-projection; its adapter, if it has one, is multiplied by `low_equation`, in float32."""
    if not isinstance(kernel, adapted.Adapted):
        return jnp.einsum(equation, x, kernel.astype(x.dtype))
    base = jnp.einsum(equation, x, kernel.base.astype(x.dtype), preferred_element_type=jnp.float32)
    low = x.astype(jnp.float32), kernel.a, kernel.b
    return (base + kernel.scale * jnp.einsum(low_equation, *low, precision=adapted.PRECISION)).astype(x.dtype)


def _project(params, config, x, *names: str) -> list[jax.Array]:
    outs = layers.project_each(x, [layers.weight(params[name], x.dtype, config) for name in names])
    if not config.qkv_bias:
        return outs
    return [out + _broadcast(params[f"{name}_bias"], out) for name, out in zip(names, outs, strict=True)]


def _options(params, config, sliding: bool) -> dict:
    """Returns the keyword arguments with which this layer calls `attend`: window, scale, and sinks, where not default."""
    options = {}
    if sliding:
        options["window"] = config.window
    if config.score_scale != config.head_dim**-0.5 or config.is_latent:
        options["scale"] = config.score_scale
    if config.sinks:
        options["sinks_H"] = params["sinks"]
    return options


def _broadcast(bias, like) -> jax.Array:
    return jnp.broadcast_to(bias.astype(like.dtype), like.shape)


def _attention_specs(config) -> Params:
    D, H, K, C = config.model_dim, config.num_heads, config.num_kv_heads, config.head_dim
    heads = {"q": {"heads": H}, "k": {"kv_heads": K}, "v": {"kv_heads": K}}
    tree = {name: kernel(config, D, model=D, **dim, head_dim=C) for name, dim in heads.items()}
    tree["o"] = kernel(config, H * C, heads=H, head_dim=C, model=D)
    if config.qkv_bias:
        tree |= {f"{name}_bias": _bias(config, **dim, head_dim=C) for name, dim in heads.items()}
    if config.out_bias:
        tree["o_bias"] = _bias(config, norm=D)
    if config.qk_norm:
        tree |= {"q_norm": scale(config, C), "k_norm": scale(config, C)}
    if config.sinks:
        tree["sinks"] = _bias(config, heads=H)
    return tree


def _latent_attention_specs(config) -> Params:
    D, H, C, V = config.model_dim, config.num_heads, config.head_dim, config.v_dim
    R, P, Q = config.kv_latent_dim, config.rope_dim, config.q_latent_dim

    def up(latent, size):
        return kernel(config, latent, model=latent, heads=H, head_dim=size)

    downs = {"kv_down": R, "k_rope": P} | ({"q_down": Q} if Q else {})
    tree = {name: kernel(config, D, model=D, head_dim=size) for name, size in downs.items()}
    tree |= {"kv_latent_norm": scale(config, R), "k_up": up(R, C - P), "v_up": up(R, V)}
    tree |= {"q_latent_norm": scale(config, Q), "q_up": up(Q, C)} if Q else {"q": up(D, C)}
    tree["o"] = kernel(config, H * V, heads=H, head_dim=V, model=D)
    if config.out_bias:
        tree["o_bias"] = _bias(config, norm=D)
    if config.qkv_bias:  # of the projections that make latents, and of the shared key
        tree |= {f"{name}_bias": _bias(config, head_dim=size) for name, size in downs.items()}
    return tree


def _moe_specs(config) -> Params:
    D, E, F = config.model_dim, config.num_experts, config.expert_ffn_dim
    tree = _ffn_specs(config, F, "expert_ffn", bias=config.expert_bias, experts=E)
    tree["router"] = kernel(config, D, model=D, router=E)
    if config.router_bias:
        tree["router_bias"] = _bias(config, router=E)
    if config.router_correction:  # float32 at any param_dtype: steps of 1e-3 would vanish in bfloat16
        tree["correction"] = rules.ParamSpec((E,), "float32", ("router",), initializers.zeros)
    if config.num_shared_experts:
        tree["shared"] = _ffn_specs(config, F * config.num_shared_experts, bias=False)
    return tree


def _ffn_specs(config, F: int, axis: str = "ffn", *, bias: bool, **experts: int) -> Params:
    D, ffn = config.model_dim, {axis: F}
    tree: Params = {name: kernel(config, D, **experts, model=D, **ffn) for name in ("gate", "up")}
    tree["down"] = kernel(config, F, **experts, **ffn, model=D)
    if bias:
        tree |= {name: _bias(config, **experts, **ffn) for name in ("gate_bias", "up_bias")}
        tree["down_bias"] = _bias(config, **experts, norm=D)
    return tree


def kernel(config: config_lib.ModelConfig, fan_in: int, **dims: int) -> rules.ParamSpec:
    """Returns the spec of a weight matrix with the logical dims `dims`, initialized to keep the variance of its input."""
    return rules.ParamSpec(tuple(dims.values()), config.param_dtype, tuple(dims), functools.partial(_normal, fan_in))


def scale(config: config_lib.ModelConfig, dim: int) -> rules.ParamSpec:
    """Returns the spec of the scale vector of an RMSNorm over `dim` numbers, initialized to scale by 1."""
    draw = initializers.zeros if config.norm == "rms_plus_one" else initializers.ones
    return rules.ParamSpec((dim,), config.param_dtype, ("norm",), draw)


def _bias(config, **dims: int) -> rules.ParamSpec:
    return rules.ParamSpec(tuple(dims.values()), config.param_dtype, tuple(dims), initializers.zeros)


def _normal(fan_in: int, key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns random values of a truncated normal of standard deviation 1 / sqrt(fan_in)."""
    # 0.8796: standard deviation of a unit normal truncated at +-2
    return (jax.random.truncated_normal(key, -2, 2, shape) * (fan_in**-0.5 / 0.8796)).astype(dtype)
