"""Router replay: the learner runs the experts that the sampler ran, so that both compute the same function of a token.

1. The engine records the choice of every MoE layer; the worker claims it in the rollout (`Rollout.routed_experts`). A replay
   (rl/trust/verification) checks that the named policy would have chosen these experts.
2. `RouterReplay.rows` prepares a claim for packing, `given` for the model. Weights of the chosen experts, and the gradient,
   come from the router that replays (R3, arXiv 2510.11370, section 4). The last token of a rollout has no row, since it was
   not run when it was sampled: there the router chooses.

Letters: B rows, T tokens, L MoE layers, X experts per token.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from inference.rollouts import rollout as rollout_lib
from models import config as config_lib


@dataclasses.dataclass(frozen=True)
class RouterReplay:
    """The format of routed experts (the experts the inference engine chose per token) in rollouts of one MoE model."""

    num_layers: int  # of the model: a claim has a place for each, zeros in dense layers
    moe_layers: tuple[int, ...]  # indices of the MoE layers
    num_experts: int
    experts_per_token: int

    @classmethod
    def of(cls, model: config_lib.ModelConfig) -> "RouterReplay":
        """Returns the format of routed experts for `model`."""
        moe_layers = tuple(filter(model.is_moe, range(model.num_layers)))
        return cls(model.num_layers, moe_layers, model.num_experts, model.experts_per_token)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of expert rows: unsigned, with room for the extra value `unrouted` of tokens whose router chooses itself."""
        return np.dtype(np.uint8 if self.num_experts < 256 else np.uint16)

    def empty(self, *dims: int) -> np.ndarray:
        """Returns expert rows [*dims, L, X] that prescribe no experts: all routers choose themselves."""
        return np.full((*dims, len(self.moe_layers), self.experts_per_token), unrouted(self.dtype), self.dtype)

    def misfit(self, rollout: rollout_lib.Rollout) -> str | None:
        """Returns the reason why a rollout lacks routed experts or has them in the wrong shape, or None. Constant time."""
        claim_TLX = rollout.routed_experts
        if claim_TLX is None:
            return "it lacks routed experts, which this run replays; start its server with --routed_experts"
        if not self.moe_layers:
            return "it has routed experts, but this model has none"
        expected = (len(rollout.tokens) - 1, self.num_layers, self.experts_per_token)
        if claim_TLX.shape != expected:
            return f"expected {list(expected)} of rows, layers and experts per token, got {list(claim_TLX.shape)}"
        return None

    def refusal(self, rollout: rollout_lib.Rollout) -> str | None:
        """Returns the reason why a rollout's routed experts cannot be replayed with this model, or None. Reads all of them."""
        if reason := self.misfit(rollout):
            return reason
        claim_TLX = np.asarray(rollout.routed_experts)
        chosen_TLX = np.sort(claim_TLX[:, self.moe_layers], axis=-1)
        if (top := int(chosen_TLX.max())) >= self.num_experts:
            return f"expert {top} is not one of the model's {self.num_experts}"
        if (chosen_TLX[..., 1:] == chosen_TLX[..., :-1]).any():
            return "a token has one expert twice"
        if np.delete(claim_TLX, self.moe_layers, axis=1).any():
            return "it has experts in a dense layer; only zeros are allowed there"
        return None

    def rows(self, rollout: rollout_lib.Rollout) -> np.ndarray:
        """Returns a rollout's routed experts as rows [T, L, X] over the L MoE layers; `refusal` must have returned None."""
        rows_TLX = self.empty(len(rollout.tokens))
        rows_TLX[:-1] = np.asarray(rollout.routed_experts)[:, self.moe_layers]
        return rows_TLX


def unrouted(dtype: np.dtype) -> int:
    """The value that marks a token without prescribed experts in expert rows of `dtype`."""
    return int(np.iinfo(dtype).max)


def given(rows_BTLX: jax.Array | None) -> jax.Array | None:
    """Converts expert rows to the model's argument, int32 [L, B, T, X], -1 where the router chooses itself; None for None."""
    if rows_BTLX is None:
        return None
    experts_LBTX = jnp.moveaxis(rows_BTLX.astype(jnp.int32), 2, 0)
    return jnp.where(experts_LBTX == unrouted(rows_BTLX.dtype), -1, experts_LBTX)
