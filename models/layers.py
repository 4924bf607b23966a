"""The small parts: RMSNorm, rotary positions, SwiGLU. Letters: B sequences, T tokens, D model, H heads, C head dim, F ffn."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last dim; statistics in float32, cast back before the weight (as Qwen, Llama)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)


def rotate(x_BTHC: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding, half-split pairing (i, i + C/2) (arXiv 2104.09864; GPT-NeoX layout).

    Angles are float32 whatever the dtype of x: bfloat16 rounds position 257 to 256.
    """
    C = x_BTHC.shape[-1]
    frequency_C = theta ** (-jnp.arange(0, C, 2, dtype=jnp.float32) / C)
    angle_BT1C = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_C[None, None, None, :]
    cos, sin = jnp.cos(angle_BT1C).astype(x_BTHC.dtype), jnp.sin(angle_BT1C).astype(x_BTHC.dtype)
    first, second = jnp.split(x_BTHC, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(x_BTD: jax.Array, params: dict) -> jax.Array:
    """down(silu(gate x) * up x) (arXiv 2002.05202)."""
    dtype = x_BTD.dtype
    gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, params["gate"].astype(dtype))
    up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, params["up"].astype(dtype))
    return jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, params["down"].astype(dtype))
