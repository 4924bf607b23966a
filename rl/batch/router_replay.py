"""Router replay: the learner runs the experts that the sampler ran, so that both compute the same function of a token.

1. The engine records the choice of every mixture layer; the worker claims it in the rollout (`Rollout.routed_experts`).
2. `RouterReplay.misfit` says what cannot be laid out (no claim, or of another shape), `refusal` also what cannot be run: an
   expert that is not there, one twice.
3. `RouterReplay.rows` lays it out for packing, `given` for the model. Weights of the chosen experts, and the gradient, come from
   the router that replays (R3, arXiv 2510.11370, section 4). The last token of a rollout has no row, since nobody ran it
   when it was sampled: there the router chooses.
4. That the policy named would have chosen so is for a replay to say (rl/verification/replay.py, rl/verification/checks.py).

Letters: B rows, T tokens, L mixture layers, X experts per token.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from inference.rollouts import rollout as rollout_lib
from models import config as config_lib


@dataclasses.dataclass(frozen=True)
class RouterReplay:
    """What the claims of a model's rollouts look like."""

    num_layers: int  # of the model: a claim has a place for each, zeros where there is no mixture
    mixtures: tuple[int, ...]  # the layers that are some
    num_experts: int
    experts_per_token: int

    @classmethod
    def of(cls, model: config_lib.ModelConfig) -> "RouterReplay":
        mixtures = tuple(index for index in range(model.num_layers) if model.is_moe(index))
        return cls(model.num_layers, mixtures, model.num_experts, model.experts_per_token)

    @property
    def dtype(self) -> np.dtype:
        """Of `rows`: unsigned, with room for one value more, `UNROUTED`, where the router is to choose."""
        return np.dtype(np.uint8 if self.num_experts < 256 else np.uint16)

    @property
    def row_shape(self) -> tuple[int, int]:
        """(L, X)"""
        return len(self.mixtures), self.experts_per_token

    def empty(self, *dims: int) -> np.ndarray:
        """[*dims, L, X] in which every router is to choose."""
        return np.full((*dims, *self.row_shape), unrouted(self.dtype), self.dtype)

    def misfit(self, rollout: rollout_lib.Rollout) -> str | None:
        """Why a valid rollout has no claim of this model's shape, or None. Takes no time, however long the rollout is."""
        claim_TLX = rollout.routed_experts
        if claim_TLX is None:
            return (
                "it does not say which experts ran, and this run replays them; start its server with --routed_experts"
            )
        if not self.mixtures:
            return "it names experts, and this model has none"
        expected = (len(rollout.tokens) - 1, self.num_layers, self.experts_per_token)
        if claim_TLX.shape != expected:
            return f"expected {list(expected)} of rows, layers and experts per token, got {list(claim_TLX.shape)}"
        return None

    def refusal(self, rollout: rollout_lib.Rollout) -> str | None:
        """Why the claim of a valid rollout cannot be replayed with this model, or None."""
        if reason := self.misfit(rollout):
            return reason
        claim_TLX = rollout.routed_experts
        chosen_TLX = np.sort(claim_TLX[:, self.mixtures], axis=-1)
        if (top := int(chosen_TLX.max())) >= self.num_experts:
            return f"expert {top} is not one of the model's {self.num_experts}"
        if (chosen_TLX[..., 1:] == chosen_TLX[..., :-1]).any():
            return "a token has one expert twice"
        dense = sorted(set(range(self.num_layers)) - set(self.mixtures))
        if claim_TLX[:, dense].any():
            return "it names experts of a layer that has none; zeros belong there"
        return None

    def rows(self, rollout: rollout_lib.Rollout) -> np.ndarray:
        """[T, L, X] of a claim that is not refused."""
        rows_TLX = self.empty(len(rollout.tokens))
        rows_TLX[:-1] = rollout.routed_experts[:, self.mixtures]
        return rows_TLX


def unrouted(dtype: np.dtype) -> int:
    """What stands in rows of `dtype` for the router's own choice."""
    return int(np.iinfo(dtype).max)


def given(rows_BTLX: jax.Array | None) -> jax.Array | None:
    """int32 [L, B, T, X] as models/transformer.py takes it, negative where the router is to choose; None of None."""
    if rows_BTLX is None:
        return None
    experts_LBTX = jnp.moveaxis(rows_BTLX.astype(jnp.int32), 2, 0)
    return jnp.where(experts_LBTX == unrouted(rows_BTLX.dtype), -1, experts_LBTX)
