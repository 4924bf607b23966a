"""The experts that each token was routed to, from the device to a client that replays the routing (router replay).

1. Prefill returns the choice of every MoE layer per prompt position, decode per step (`compact`).
2. `of_sequence` joins both for prompt and completion, except the last token, which is not run.
3. `with_all_layers` adds a place for every other layer of the model, as completions and rollouts have it.

Letters: T tokens, L MoE layers, B slots or prompts, K steps of a call, X experts per token.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import moe


def dtype(model: config_lib.ModelConfig) -> np.dtype:
    """Returns the numpy type of an expert's index: uint8 for up to 256 experts, else uint16."""
    return np.dtype("uint8" if model.num_experts <= 256 else "uint16")


def num_moe_layers(model: config_lib.ModelConfig) -> int:
    """Returns the number of the model's layers that have a router (MoE layers)."""
    return sum(model.is_moe(index) for index in range(model.num_layers))


def compact(routing: moe.Routing | None, model: config_lib.ModelConfig) -> jax.Array:
    """Returns the experts that `routing` chose for each token, [B, T, L, X], as uint8 or uint16. `model` must have MoE layers."""
    assert routing is not None
    return jnp.moveaxis(routing.experts, 0, 2).astype(dtype(model))


def of_sequence(
    pieces: Sequence[jax.Array | np.ndarray], row: int, num_prompt: int, decoded: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns the experts [T, L, X] of one sequence: prompt and completion, without the last token, which was not run.

    `pieces` [B, .., L, X] cover the prompts from the start; this sequence is in `row`. `decoded` [.., L, X] cover the decode
    steps. The last prompt token is run again by the first decode step, whose choice is used.
    """
    prompt = np.concatenate([np.asarray(piece[row]) for piece in pieces])[: num_prompt - 1]
    return np.concatenate([prompt, *decoded])


def with_all_layers(experts_TLX: np.ndarray, model: config_lib.ModelConfig) -> np.ndarray:
    """Expands the experts of MoE layers to all layers: returns [T, layers of the model, X], with zeros for dense layers."""
    out = np.zeros((len(experts_TLX), model.num_layers, experts_TLX.shape[-1]), dtype(model))
    out[:, [index for index in range(model.num_layers) if model.is_moe(index)]] = experts_TLX
    return out
