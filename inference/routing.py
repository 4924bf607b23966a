"""Which experts each token went to, on its way from the device to a client that replays them (router replay).

1. The programs put out the choice of every mixture layer (`narrow`), prefill per prompt position, decode per step.
2. `of_sample` joins both: the rows of prompt and completion, but for the last token, which nobody ran.
3. `wire` is the field `routed_experts` of a reply: base64 of [tokens, layers, experts per token], from `start` on.

The layers are all of the model's, as trainers index them; those without a mixture hold zeros.

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
    return sum(model.is_mixture(index) for index in range(model.num_layers))


def narrow(experts_LBTX: jax.Array, model: config_lib.ModelConfig) -> jax.Array:
    """[B, T, L, X], in the narrowest type."""
    return jnp.moveaxis(experts_LBTX, 0, 2).astype(dtype(model))


def of_sample(pieces: Sequence[jax.Array], row: int, num_prompt: int, decoded: Sequence[np.ndarray]) -> np.ndarray:
    """[T, L, X] of a sample: `pieces` [B, .., L, X] cover the prompt from its start, `decoded` [.., L, X] the steps behind.

    The first step ran the last prompt token again, and its choice is the one that counts.
    """
    prompt = np.concatenate([np.asarray(piece[row]) for piece in pieces])[: num_prompt - 1]
    return np.concatenate([prompt, *decoded])


def wire(experts_TLX: np.ndarray, model: config_lib.ModelConfig, start: int) -> dict:
    """The tokens from `start` on, with a place for every layer; `data` comes first, where clients look for it."""
    rows = experts_TLX[start:]
    full = np.zeros((len(rows), model.num_layers, rows.shape[-1]), dtype(model))
    full[:, [index for index in range(model.num_layers) if model.is_mixture(index)]] = rows
    data = base64.b64encode(full.astype(full.dtype.newbyteorder("<")).tobytes()).decode()
    return {"data": data, "shape": list(full.shape), "start": start, "dtype": str(full.dtype)}
