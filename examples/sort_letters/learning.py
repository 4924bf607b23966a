"""A loss, a rule for advantages, and metrics of your own."""

import jax.numpy as jnp
import numpy as np


def clipped(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom, high: float = 2.0):
    """REINFORCE with importance weights up to `high` (rl/learning/algorithms/losses.py has the arguments)."""
    ratio_BT = jnp.exp(jnp.clip(logp_BT - behavior_logp_BT, -20.0, 20.0))
    loss_BT = -jnp.minimum(ratio_BT, high) * advantage_BT
    return (loss_BT * mask_BT).sum() / denom, {"loss/capped_frac": ((ratio_BT > high) * mask_BT).sum() / denom}


def above_median(rewards_G: np.ndarray) -> np.ndarray:
    """Advantages of a group: its rewards less their median."""
    return rewards_G - np.median(rewards_G)


def spread(groups) -> dict[str, float]:
    """Metrics of a batch, from its groups of rollouts (inference/rollouts/rollout.py)."""
    solved = [np.mean([rollout.reward for rollout in group]) for group in groups]
    return {"solved_groups": float(np.mean(np.array(solved) == 1.0)), "position": _mean(groups, "position")}


def _mean(groups, name: str) -> float:
    return float(np.mean([rollout.rewards[name] for group in groups for rollout in group]))
