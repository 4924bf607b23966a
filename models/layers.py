"""The small parts of a layer: projections, norms, rotary positions, the gated ffn.

Letters: B sequences, T tokens, D model, H heads, C head dim, F ffn, R rotated pairs of a head.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from models import config as config_lib
from models.kernels import adapted, cpu_transposed, int8
from sharding.mesh import fsdp, rules
from sharding.mesh import mesh as mesh_lib

SAVED = "projection"  # the name of matmul results, which rematerialization "dots" keeps
Rotation = tuple[jax.Array, jax.Array]  # cos and sin, float32 [B, T, 1, R]
Kernel = jax.Array | int8.Quantized | cpu_transposed.Transposed | adapted.Adapted


def weight(param, dtype: jax.typing.DTypeLike, config: config_lib.ModelConfig) -> Any:
    """Returns a parameter as an operand of `project`: in `dtype`, or as it is if its gradient is summed in float32."""
    return param if config.reduce_dtype == "float32" and isinstance(param, jax.Array) else param.astype(dtype)


def project(x: jax.Array, kernel: Kernel, model: int = 0) -> jax.Array:
    """Returns the product [B, T, out...] of x [B, T, in...] and the weights `kernel` [in..., out...], whose dim `model` is split over `fsdp`.

    The kernel is cast to the dtype of x. On several devices, its gradient is summed in the kernel's own dtype, and B and T stay
    separate dims, because merging them would gather the rows. On one device, the product is one multiplication of two matrices.
    """
    if not isinstance(kernel, adapted.Adapted):
        return checkpoint_name(_multiply(x, kernel, model=model), SAVED)
    # No axis of a mesh need split A or B: they are small.
    return checkpoint_name(adapted.product(functools.partial(_multiply, model=model), _multiply, x, kernel), SAVED)


def project_each(x: jax.Array, kernels: Sequence[Kernel]) -> list[jax.Array]:
    """Returns `project` of x and each kernel."""
    transposed = [kernel for kernel in kernels if isinstance(kernel, cpu_transposed.Transposed)]
    if len(transposed) == len(kernels):
        return cpu_transposed.products(x, transposed)
    return [project(x, kernel) for kernel in kernels]


def _multiply(x: jax.Array, kernel: Any, *, dtype=None, model: int | None = None) -> jax.Array:
    """Returns the product of `project` in `dtype` (None: of x), for a kernel without an adapter; `model` None: `fsdp` splits it in no known dim."""
    dtype = dtype or x.dtype
    if isinstance(kernel, cpu_transposed.Transposed):
        return kernel.rows(x, dtype)
    if isinstance(kernel, int8.Quantized):
        product = _multiply(x, kernel.values.astype(x.dtype), dtype=dtype, model=model)
        return int8.scaled(product, kernel.scale[(0,) * (x.ndim - 2)])
    if rules.several_devices() is not None:
        if model is not None and fsdp.near() > 1:
            return _gathered_product(x, kernel, 2, dtype, model % kernel.ndim)
        return _product(x, kernel, 2, dtype)
    rows, out = x.shape[:2], kernel.shape[x.ndim - 2 :]
    matrices = x.reshape(math.prod(rows), -1), kernel.astype(x.dtype).reshape(-1, math.prod(out))
    is_cpu = mesh_lib.platform() == "cpu"
    flat = _product(*matrices, 1, dtype) if is_cpu else jnp.matmul(*matrices, preferred_element_type=dtype)
    return flat.reshape(*rows, *out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x, kernel, lead: int, dtype):
    """Multiplies over all dims of x but the first `lead`, to `dtype`; its gradient is written out for the order of its operands alone.

    JAX's own rule puts the cotangent first and transposes the result, of which XLA on a CPU makes transposed copies of
    [B, T, F]. A gated ffn of 6144 tokens, D 256, F 1024, forward and backward: 760 ms of CPU time with JAX's rule, 350 ms
    with this one (2 cores, loaded, in turns).
    """
    return _contract(x, kernel.astype(x.dtype), range(lead, x.ndim), range(x.ndim - lead), dtype)


def _product_backward(lead: int, dtype, saved, out):
    x, kernel = saved
    d_x = _contract(out, kernel.astype(x.dtype), range(lead, out.ndim), range(x.ndim - lead, kernel.ndim))
    if lead == 1:  # a copy of the transposed x: 640 rows times 1024 x 256 at 185 instead of 115 GFLOP/s
        return d_x, jax.lax.optimization_barrier(x.T) @ out
    return d_x, _contract(x, out, (0, 1), (0, 1), kernel.dtype)


def _contract(a, b, dims_a, dims_b, dtype=None) -> jax.Array:
    dims = (tuple(dims_a), tuple(dims_b)), ((), ())
    return jax.lax.dot_general(a, b, dims, preferred_element_type=dtype)


_product.defvjp(lambda x, kernel, *how: (_product(x, kernel, *how), (x, kernel)), _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _gathered_product(x, kernel, lead: int, dtype, model: int):
    """Returns `_product`, with the kernel gathered, and its gradient summed, by the steps of sharding/mesh/fsdp.py."""
    return _product(x, fsdp.whole(kernel.astype(x.dtype), model), lead, dtype)


def _gathered_backward(lead: int, dtype, model: int, saved, out):
    x, kernel = saved
    whole = fsdp.whole(kernel.astype(x.dtype), model)
    d_x = _contract(out, whole, range(lead, out.ndim), range(x.ndim - lead, kernel.ndim))
    rows = range(lead)
    return d_x, fsdp.summed(lambda x, out: _contract(x, out, rows, rows, kernel.dtype), x, out, model, kernel.ndim)


_gathered_product.defvjp(lambda x, kernel, *how: (_gathered_product(x, kernel, *how), (x, kernel)), _gathered_backward)


def _recomputed(function):
    """Makes the backward pass on a CPU compute `function` again, which is cheaper than storing its residuals.

    A norm of [64, 96, 256], forward and backward: 7.5 ms of CPU time with residuals, 5.3 ms without (2 cores, loaded).
    """
    return jax.checkpoint(function) if mesh_lib.platform() == "cpu" else function


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, kind: str = "rms") -> jax.Array:
    """Returns x / rms(x) * weight over the last dim, with statistics in float32.

    "rms" casts back before it multiplies (Llama, Qwen, GLM, DeepSeek), "rms_float32" after (gpt-oss), and "rms_plus_one"
    after multiplying by 1 + weight (Gemma). The order decides bits in bfloat16.
    """

    def norm(x, weight):
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
        if kind == "rms":
            return normed.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)
        scale = weight.astype(jnp.float32) + (1.0 if kind == "rms_plus_one" else 0.0)
        return (normed * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)

    return _recomputed(norm)(x, weight)


def rotation(config: config_lib.ModelConfig, positions_BT: jax.Array, *, sliding: bool) -> Rotation:
    """Returns the rotary tables, cos and sin of every position's angles, for the sliding or the full-attention layers.

    Both are float32 for activations of any dtype: bfloat16 rounds position 257 to 256.
    """
    frequency_R, factor = frequencies(config, sliding=sliding)
    angle_BT1R = positions_BT[:, :, None, None].astype(jnp.float32) * jnp.asarray(frequency_R)[None, None, None, :]
    table = jnp.cos(angle_BT1R) * factor, jnp.sin(angle_BT1R) * factor
    if mesh_lib.platform() != "cpu":
        return table
    # The identity changes no bit, and keeps XLA from recomputing the table in every loop: its loop fusion looks through a
    # barrier, but not through a product.
    cos, sin = (part @ jnp.eye(part.shape[-1], dtype=part.dtype) for part in table)
    return cos, sin


def rotate(x_BTHC: jax.Array, rotation: Rotation, *, interleaved: bool = False) -> jax.Array:
    """Returns queries or keys with the leading 2 R dims of each head rotated by position (RoPE, arXiv 2104.09864).

    Pairs are (i, i + R) as in GPT-NeoX, or (2i, 2i + 1) if interleaved. Interleaved pairs come out as all firsts, then
    all seconds: queries and keys are reordered alike, so their product does not change.
    """
    cos, sin = (part.astype(x_BTHC.dtype) for part in rotation)
    R = cos.shape[-1]
    if interleaved:
        first, second = x_BTHC[..., 0 : 2 * R : 2], x_BTHC[..., 1 : 2 * R : 2]
    else:
        first, second = x_BTHC[..., :R], x_BTHC[..., R : 2 * R]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated if 2 * R == x_BTHC.shape[-1] else [*rotated, x_BTHC[..., 2 * R :]], axis=-1)


def frequencies(config: config_lib.ModelConfig, *, sliding: bool) -> tuple[np.ndarray, float]:
    """Returns (radians per position [R], factor on cos and sin) of rotary positions, with the config's context extension."""
    d = config.rotated_dim
    local = sliding and config.rope_local_theta > 0
    theta, scaling = (config.rope_local_theta, "none") if local else (config.rope_theta, config.rope_scaling)
    f_R = theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    factor = 1.0
    if scaling == "linear":
        f_R = f_R / config.rope_factor
    elif scaling == "llama3":
        cycles_R = config.rope_original_positions * f_R / (2 * math.pi)
        low, high = config.rope_low_freq, config.rope_high_freq
        keep_R = np.clip((cycles_R - low) / max(high - low, 1e-9), 0.0, 1.0)  # equal: a step
        f_R = f_R * (keep_R + (1 - keep_R) / config.rope_factor)
    elif scaling == "yarn":
        f_R, factor = _yarn(config, f_R), _yarn_attention_factor(config)
    return f_R.astype(np.float32), factor


def gated(gate: jax.Array, up: jax.Array, config: config_lib.ModelConfig) -> jax.Array:
    """Returns the inner activations of a gated ffn, act(gate) * up (arXiv 2002.05202).

    "clamped" is gpt-oss's (clip(up, -l, l) + 1) * min(gate, l) * sigmoid(a min(gate, l)).
    """

    def product(gate, up):
        if config.activation == "silu":
            return jax.nn.silu(gate) * up
        if config.activation == "gelu":
            return jax.nn.gelu(gate, approximate=True) * up
        gate = jnp.minimum(gate, config.clamp_limit)
        up = jnp.clip(up, -config.clamp_limit, config.clamp_limit)
        return (up + 1) * gate * jax.nn.sigmoid(config.clamp_alpha * gate)

    return _recomputed(product)(gate, up)


def ffn(x_BTD: jax.Array, params: dict, config: config_lib.ModelConfig) -> jax.Array:
    """Returns the output of a gated ffn, down(act(gate x) * up x); each matmul has a bias if `params` has one."""

    def biased(y, name):
        bias = params.get(f"{name}_bias")
        return y if bias is None else y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)

    names = "gate", "up"
    products = project_each(x_BTD, [weight(params[name], x_BTD.dtype, config) for name in names])
    gate_BTF, up_BTF = map(biased, products, names)
    hidden_BTF = gated(gate_BTF, up_BTF, config)
    return biased(project(hidden_BTF, weight(params["down"], x_BTD.dtype, config), -1), "down")


def _yarn(config: config_lib.ModelConfig, f_R: np.ndarray) -> np.ndarray:
    """Returns the rotary frequencies f_R, interpolated from kept to stretched over the dims (YaRN, arXiv 2309.00071, 3.2)."""
    d = config.rotated_dim

    def dim_with_cycles(times: float) -> float:
        length = config.rope_original_positions
        return d * math.log(length / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dim_with_cycles(config.rope_beta_fast), dim_with_cycles(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    high = high + 0.001 if low == high else high
    stretched_R = np.clip((np.arange(d // 2) - low) / (high - low), 0.0, 1.0)
    return f_R * (1 - stretched_R + stretched_R / config.rope_factor)


def _yarn_attention_factor(config: config_lib.ModelConfig) -> float:
    if config.rope_attention_factor:
        return config.rope_attention_factor
    over, under = config.rope_mscale, config.rope_mscale_all_dim
    if not (over and under):
        return config_lib.yarn_factor(config.rope_factor, 1.0)
    return config_lib.yarn_factor(config.rope_factor, over) / config_lib.yarn_factor(config.rope_factor, under)
