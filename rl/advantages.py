"""Advantages: from the rewards of one group (the G samples of one prompt) to the credit of each sample.

Numpy in, numpy out: credit is assigned on the host, before packing, and the learner never sees a reward.
"""

import numpy as np


def group_mean(rewards_G: np.ndarray) -> np.ndarray:
    """A = r - mean(r) over the group (Dr. GRPO, arXiv 2503.20783, eq. 2; INTELLECT-3). Sums to 0."""
    return rewards_G - rewards_G.mean()


def group_mean_std(rewards_G: np.ndarray) -> np.ndarray:
    """A = (r - mean(r)) / (std(r) + 1e-6), ddof = 1 (GRPO, arXiv 2402.03300, section 4.1.2; INTELLECT-2's code).

    A group of one sample has no spread and gets 0.
    """
    if len(rewards_G) < 2:
        return np.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + 1e-6)


ADVANTAGES = {"group_mean": group_mean, "group_mean_std": group_mean_std}
