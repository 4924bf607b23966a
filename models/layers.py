"""The small parts: projections, norms, rotary positions, the gated ffn.

Letters: B sequences, T tokens, D model, H heads, C head dim, F ffn, R rotated pairs of a head.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from models import config as config_lib
from models.kernels import cpu_transposed, int8
from sharding import mesh as mesh_lib
from sharding import rules

SAVED = "projection"  # what rematerialisation by the name "dots" keeps: the results of matmuls with parameters
Rotation = tuple[jax.Array, jax.Array]  # cos and sin, float32 [B, T, 1, R]


def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [B, T, in...] times a kernel [in..., out...]: [B, T, out...], over as many dims as x has beyond B and T.

    On one device as a product of two matrices. Over several, B and T may be split, and merging them would gather the rows.
    The kernel may be `Quantized` or `Transposed`.
    """
    if cpu_transposed.is_transposed(kernel):
        return kernel.rows(x)
    if int8.is_quantized(kernel):
        return int8.scaled(project(x, kernel.values.astype(x.dtype)), kernel.scale[(0,) * (x.ndim - 2)])
    if rules.several_devices() is not None:
        return checkpoint_name(_project(x, kernel), SAVED)
    rows, out = x.shape[:2], kernel.shape[x.ndim - 2 :]
    multiply = _multiply if mesh_lib.platform() == "cpu" else jnp.matmul
    flat = multiply(x.reshape(math.prod(rows), -1), kernel.reshape(-1, math.prod(out)))
    return checkpoint_name(flat, SAVED).reshape(*rows, *out)


@jax.custom_vjp
def _multiply(x, kernel):
    """x @ kernel. Its gradient copies the transposed x, from which XLA's products on a CPU run faster than from x by columns:
    640 rows times 1024 x 256, 185 instead of 115 GFLOP/s; a whole update of 4 M parameters takes 0.966 of the time.
    """
    return x @ kernel


def _multiply_backward(saved, out):
    x, kernel = saved
    return out @ kernel.T, jax.lax.optimization_barrier(x.T) @ out


_multiply.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _multiply_backward)


@jax.custom_vjp
def _project(x, kernel):
    """The gradient is spelled out for its order of operands alone: JAX's own rule puts the cotangent first and transposes
    the result, which XLA turns into transposed copies of [B, T, F] on a CPU. A gated ffn of 6144 tokens, D 256, F 1024,
    forward and backward: 760 ms of CPU time before, 350 ms so (2 cores, loaded, the two in turns).
    """
    n = x.ndim - 2
    return jax.lax.dot_general(x, kernel, ((tuple(range(2, x.ndim)), tuple(range(n))), ((), ())))


def _project_forward(x, kernel):
    return _project(x, kernel), (x, kernel)


def _project_backward(saved, out):
    x, kernel = saved
    n = x.ndim - 2
    d_x = jax.lax.dot_general(out, kernel, ((tuple(range(2, out.ndim)), tuple(range(n, kernel.ndim))), ((), ())))
    d_kernel = jax.lax.dot_general(x, out, (((0, 1), (0, 1)), ((), ())))
    return d_x, d_kernel


_project.defvjp(_project_forward, _project_backward)


def _computed_again(function):
    """On a CPU the backward pass computes it again: cheaper than to write and read back what its derivative needs.

    Forward and backward of [64, 96, 256], in CPU time: a norm 7.5 ms with what it keeps, 5.3 ms so (2 cores, loaded).
    """
    return jax.checkpoint(function) if mesh_lib.platform() == "cpu" else function


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, kind: str = "rms") -> jax.Array:
    """x / rms(x) * weight over the last dim; statistics in float32.

    "rms" casts back before it multiplies (Llama, Qwen, GLM, DeepSeek), "rms_float32" after (gpt-oss), "rms_plus_one"
    after it multiplied by 1 + weight (Gemma): the order decides bits in bfloat16.
    """

    def norm(x, weight):
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
        if kind == "rms":
            return normed.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)
        scale = weight.astype(jnp.float32) + (1.0 if kind == "rms_plus_one" else 0.0)
        return (normed * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)

    return _computed_again(norm)(x, weight)


def rotation(config: config_lib.ModelConfig, positions_BT: jax.Array, *, sliding: bool) -> Rotation:
    """cos and sin of every position's angles, for the full or the sliding layers.

    Float32 whatever the activations are: bfloat16 rounds position 257 to 256.
    """
    frequency_R, factor = frequencies(config, sliding=sliding)
    angle_BT1R = positions_BT[:, :, None, None].astype(jnp.float32) * jnp.asarray(frequency_R)[None, None, None, :]
    table = jnp.cos(angle_BT1R) * factor, jnp.sin(angle_BT1R) * factor
    return jax.tree.map(_computed_once, table) if mesh_lib.platform() == "cpu" else table


def _computed_once(x: jax.Array) -> jax.Array:
    """x, behind a product with the identity, which changes no bit. XLA's loop fusion on a CPU does not look through a
    product; through a barrier it does, and computes x again in every loop that reads it.
    """
    return x @ jnp.eye(x.shape[-1], dtype=x.dtype)


def rotate(x_BTHC: jax.Array, rotation: Rotation, *, interleaved: bool = False) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864) of the leading 2 R dims of each head; the others pass.

    Pairs are (i, i + R) as in GPT-NeoX, or (2i, 2i + 1) if interleaved; the latter come out as all firsts, then all
    seconds, which leaves q k as it is since both were reordered alike.
    """
    cos, sin = (part.astype(x_BTHC.dtype) for part in rotation)
    R = cos.shape[-1]
    if interleaved:
        first, second = x_BTHC[..., 0 : 2 * R : 2], x_BTHC[..., 1 : 2 * R : 2]
    else:
        first, second = x_BTHC[..., :R], x_BTHC[..., R : 2 * R]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned if 2 * R == x_BTHC.shape[-1] else [*turned, x_BTHC[..., 2 * R :]], axis=-1)


def frequencies(config: config_lib.ModelConfig, *, sliding: bool) -> tuple[np.ndarray, float]:
    """(radians per position [R], factor on cos and sin) under the config's stretch of the context."""
    d = config.rotated_dim
    local = sliding and config.rope_local_theta > 0
    theta, scaling = (config.rope_local_theta, "none") if local else (config.rope_theta, config.rope_scaling)
    f_R = theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    factor = 1.0
    if scaling == "linear":
        f_R = f_R / config.rope_factor
    elif scaling == "llama3":
        f_R = _llama3(config, f_R)
    elif scaling == "yarn":
        f_R, factor = _yarn(config, f_R), _yarn_attention_factor(config)
    return f_R.astype(np.float32), factor


def gated(gate: jax.Array, up: jax.Array, config: config_lib.ModelConfig) -> jax.Array:
    """act(gate) * up (arXiv 2002.05202); "clamped" is gpt-oss's (min(up, l) + 1) * min(gate, l) sigmoid(a gate)."""

    def product(gate, up):
        if config.activation == "silu":
            return jax.nn.silu(gate) * up
        if config.activation == "gelu":
            return jax.nn.gelu(gate, approximate=True) * up
        gate = jnp.minimum(gate, config.clamp_limit)
        up = jnp.clip(up, -config.clamp_limit, config.clamp_limit)
        return (up + 1) * gate * jax.nn.sigmoid(config.clamp_alpha * gate)

    return _computed_again(product)(gate, up)


def ffn(x_BTD: jax.Array, params: dict, config: config_lib.ModelConfig) -> jax.Array:
    """down(act(gate x) * up x), each with its bias if `params` holds one."""
    if not cpu_transposed.is_transposed(params["gate"]):
        return _ffn(x_BTD, params, config, project, bias_shape=(-1,))
    # By columns throughout: what lies between the kernels is never turned.
    x_DR = x_BTD.reshape(-1, x_BTD.shape[-1]).T
    return _ffn(x_DR, params, config, cpu_transposed.columns, bias_shape=(-1, 1)).T.reshape(x_BTD.shape)


def _ffn(x, params, config, multiply, *, bias_shape):
    def apply(x, name):
        y = multiply(x, params[name].astype(x.dtype))
        bias = params.get(f"{name}_bias")
        return y if bias is None else y + jnp.broadcast_to(bias.astype(y.dtype).reshape(bias_shape), y.shape)

    return apply(gated(apply(x, "gate"), apply(x, "up"), config), "down")


def _llama3(config: config_lib.ModelConfig, f_R: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    turns_R = config.rope_original_positions * f_R / (2 * math.pi)
    low, high = config.rope_low_freq, config.rope_high_freq
    keep_R = np.clip((turns_R - low) / max(high - low, 1e-9), 0.0, 1.0)  # equal: a step
    return f_R * (keep_R + (1 - keep_R) / config.rope_factor)


def _yarn(config: config_lib.ModelConfig, f_R: np.ndarray) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over the dims from kept to stretched."""
    d = config.rotated_dim

    def dim_that_turns(times: float) -> float:
        length = config.rope_original_positions
        return d * math.log(length / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dim_that_turns(config.rope_beta_fast), dim_that_turns(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    high = high + 0.001 if low == high else high
    stretched_R = np.clip((np.arange(d // 2) - low) / (high - low), 0.0, 1.0)
    return f_R * (1 - stretched_R + stretched_R / config.rope_factor)


def _yarn_attention_factor(config: config_lib.ModelConfig) -> float:
    if config.rope_attention_factor:
        return config.rope_attention_factor
    temperature = config_lib.yarn_temperature
    if config.rope_mscale and config.rope_mscale_all_dim:
        scale = config.rope_factor
        return temperature(scale, config.rope_mscale) / temperature(scale, config.rope_mscale_all_dim)
    return temperature(config.rope_factor, 1.0)
