"""Which experts each token went to, on its way from the device to a client that replays them (router replay).

1. The programs put out the choice of every mixture layer (`narrow`), prefill per prompt position, decode per step.
2. `of_sample` joins both: the rows of prompt and completion, but for the last token, which nobody ran.
3. `full` gives every layer of the model a place, as trainers index them; those without a mixture hold zeros.
4. `wire` is the field `routed_experts` of a reply: base64 of [tokens, layers, experts per token], from `start` on.

Letters: T tokens, L mixture layers, B slots or prompts, K steps of a call, X experts per token.
"""

import base64
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib


def dtype(model: config_lib.ModelConfig) -> np.dtype:
    return np.dtype("uint8" if model.num_experts <= 256 else "uint16")


def num_mixtures(model: config_lib.ModelConfig) -> int:
    return sum(model.is_moe(index) for index in range(model.num_layers))


def narrow(experts_LBTX: jax.Array, model: config_lib.ModelConfig) -> jax.Array:
    """[B, T, L, X], in the narrowest type."""
    return jnp.moveaxis(experts_LBTX, 0, 2).astype(dtype(model))


def of_sequence(pieces: Sequence[jax.Array], row: int, num_prompt: int, decoded: Sequence[np.ndarray]) -> np.ndarray:
    """[T, L, X] of a sample: `pieces` [B, .., L, X] cover the prompt from its start, `decoded` [.., L, X] the steps behind.

    The first step ran the last prompt token again, and its choice is the one that counts.
    """
    prompt = np.concatenate([np.asarray(piece[row]) for piece in pieces])[: num_prompt - 1]
    return np.concatenate([prompt, *decoded])


def with_all_layers(experts_TLX: np.ndarray, model: config_lib.ModelConfig) -> np.ndarray:
    """[T, layers of the model, X] of the mixtures' choices."""
    out = np.zeros((len(experts_TLX), model.num_layers, experts_TLX.shape[-1]), dtype(model))
    out[:, [index for index in range(model.num_layers) if model.is_moe(index)]] = experts_TLX
    return out


def reply_field(experts_TLX: np.ndarray, model: config_lib.ModelConfig, start: int) -> dict:
    """The tokens from `start` on, with a place for every layer; `data` comes first, where clients look for it."""
    rows = with_all_layers(experts_TLX[start:], model)
    data = base64.b64encode(rows.astype(rows.dtype.newbyteorder("<")).tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "start": start, "dtype": str(rows.dtype)}
