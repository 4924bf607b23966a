"""Advantages: from the rewards of one group (the G samples of one prompt) to the advantage of each sample.

Numpy in, numpy out: advantages are assigned on the host, before packing, and the learner never gets a reward. In order:

1. reward shaping, if configured: `overlong_penalty`.
2. `ADVANTAGES[name](rewards_G)`, group by group.
3. `NORMALIZERS[name](advantages)` over all groups of the batch.
4. `AVERAGES[name](lengths, num_tokens)`: factors on the advantage that turn the losses' mean over tokens into another mean.
   Every clip and mask depends on the sign of A alone, so a factor on A is a weight on the token.

Letters: P groups (prompts) of a batch, G samples of a group.
"""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6  # added to a standard deviation (INTELLECT-2's code)


def group_mean(rewards_G: np.ndarray) -> np.ndarray:
    """A = r - mean(r) over the group (Dr. GRPO, arXiv 2503.20783, eq. 2; INTELLECT-3; PRIME-RL's `grpo`). The group's sum is 0."""
    return rewards_G - rewards_G.mean()


def group_mean_std(rewards_G: np.ndarray) -> np.ndarray:
    """A = (r - mean(r)) / (std(r) + 1e-6), ddof = 1 (GRPO, arXiv 2402.03300, section 4.1.2; INTELLECT-2's code); 0 for one sample."""
    if len(rewards_G) < 2:
        return np.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + EPSILON)


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the other rewards (RLOO, arXiv 2402.14740, section 2.2), which is unbiased; 0 for one sample."""
    G = len(rewards_G)
    return group_mean(rewards_G) * (G / (G - 1)) if G > 1 else np.zeros_like(rewards_G)


def mean_normalized(rewards_G: np.ndarray) -> np.ndarray:
    """A = (r - mean(r)) / mean(r), 0 where mean(r) <= 1e-6 (MaxRL, arXiv 2602.02710): hard prompts count more."""
    mean = rewards_G.mean()
    return (rewards_G - mean) / mean if mean > EPSILON else np.zeros_like(rewards_G)


def optimal(rewards_G: np.ndarray) -> np.ndarray:
    """A = r - log mean(exp(r)): the advantage under the optimum of reward - KL(pi || sampler) (OAPL, arXiv 2602.19362, eq. 2; `losses.oapl`).

    The papers have a temperature, beta log mean(exp(r / beta)): 1 in OAPL, 0.5 in A*-PO (arXiv 2505.20686). Between the mean reward (large) and the best (0).
    """
    best = rewards_G.max()  # exp of the others cannot overflow
    return rewards_G - best - np.log(np.exp(rewards_G - best).mean())


def best_of_n(rewards_G: np.ndarray) -> np.ndarray:
    """1 / n for the n samples of the largest reward, 0 for all others, and for all where rewards are equal.

    With the loss `cross_entropy`, the policy imitates its best of G samples (RAFT, arXiv 2304.06767; the forward KL of BOND, arXiv 2407.14622).
    """
    is_best_G = rewards_G == rewards_G.max()
    return np.where(is_best_G & ~is_best_G.all(), 1.0 / is_best_G.sum(), 0.0)


ADVANTAGES = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "rloo": leave_one_out,
    "max_rl": mean_normalized,
    "optimal": optimal,
    "best_of_n": best_of_n,
    "given": lambda rewards_G: rewards_G,  # the environment or an external critic assigned advantages as rewards
}


def batch_std(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A / (std over all samples of the batch + 1e-6), ddof = 1 (REINFORCE++, arXiv 2501.03262; ScaleRL, arXiv 2510.13786).

    Does not subtract the batch mean, which is 0 after `group_mean`. A batch of one sample gets 0.
    """
    everything = np.concatenate([*advantages, []])
    if len(everything) < 2:
        return [np.zeros_like(advantage_G) for advantage_G in advantages]
    return [advantage_G / (everything.std(ddof=1) + EPSILON) for advantage_G in advantages]


NORMALIZERS = {"none": list, "batch_std": batch_std}


def over_tokens(lengths: Sequence[np.ndarray], num_tokens: int) -> list[np.ndarray]:
    """Advantage factors of 1: every token weighs the same (INTELLECT-2). `lengths`: trained tokens of each sample, P arrays [G]."""
    return [np.ones(len(length_G)) for length_G in lengths]


def over_batch(lengths: Sequence[np.ndarray], num_tokens: int) -> list[np.ndarray]:
    """Advantage factors N / num_tokens: steps get smaller as more groups of the batch have no signal (DAPO in verl and TRL).

    N is the sum of `lengths`, the tokens of groups with a signal; `num_tokens` counts those of all groups. Without this factor, the
    last groups with a signal move a policy that has converged as far as a whole batch did, and its entropy collapses.
    """
    share = sum(map(np.sum, lengths)) / max(num_tokens, 1)
    return [np.full(len(length_G), share) for length_G in lengths]


def over_samples(lengths: Sequence[np.ndarray], num_tokens: int) -> list[np.ndarray]:
    """Advantage factors N / (samples x length), N the batch's tokens: every sample weighs the same, long or short (GRPO)."""
    N, num_samples = sum(map(np.sum, lengths)), sum(map(len, lengths))
    return [N / (num_samples * np.maximum(length_G, 1)) for length_G in lengths]


def over_prompts(lengths: Sequence[np.ndarray], num_tokens: int) -> list[np.ndarray]:
    """Advantage factors N / (P x tokens of the group): each of P prompts weighs the same (ScaleRL's "prompt average")."""
    N, P = sum(map(np.sum, lengths)), len(lengths)
    return [np.full(len(length_G), N / (P * max(length_G.sum(), 1))) for length_G in lengths]


AVERAGES = {"tokens": over_tokens, "batch": over_batch, "samples": over_samples, "prompts": over_prompts}
# Losses that average over samples themselves, with the average of their KL penalty: "streams" as their papers, inside each stream and then
# over streams, or "tokens".
OWN_AVERAGES: dict[str, str] = {
    **dict.fromkeys(("grpo", "gspo", "gmpo", "sapo"), "streams"),
    **dict.fromkeys(("dr_grpo", "oapl"), "tokens"),
}


def overlong_penalty(lengths: np.ndarray, *, max_tokens: int, buffer: int) -> np.ndarray:
    """Rewards for length: 0 up to max_tokens - buffer, then falling linearly to -1 at max_tokens (DAPO, arXiv 2503.14476, eq. 13).

    Add them to the task rewards before advantages are computed; DAPO has max_tokens = 20,480 and buffer = 4,096.
    """
    assert 0 < buffer <= max_tokens, (buffer, max_tokens)
    return -np.clip((np.asarray(lengths) - (max_tokens - buffer)) / buffer, 0.0, 1.0)
