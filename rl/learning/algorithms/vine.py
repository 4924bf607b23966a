"""VinePPO (arXiv 2410.01679): values of intermediate states from continuations, without a critic, under a budget of tokens.

1. `plan` chooses the states of a group with different rewards: prefixes of its samples that end after each `step_tokens` tokens, the
   most uncertain first, until their continuations are expected to cost `token_ratio` times the group's own tokens. That is not a bound: they
   cost more where they turn out longer than the rest of their samples (2.1 times at a ratio of 2.0 in one run).
2. A worker samples K continuations of each, and scores them (rl/learning/algorithms/continuations.py). V(s) is their mean reward.
3. `advantages` gives every token of a step r + V(next state) - V(state). V of the prompt is the mean reward of the other samples, which
   costs nothing. The reward counts in the last step, whose end has the value 0.

The paper estimates each state, with K = 9, and splits steps at line ends. A step between two chosen states is one here, so that the
advantages of a sample still add up to its reward - V(prompt). Everything is a function of the group: a validator plans the same.

Letters: G samples of a group, N tokens of one completion, S chosen states of one, K continuations of a state.
"""

from collections.abc import Sequence

import numpy as np


def plan(
    rewards_G: Sequence[float],
    logprobs_GN: Sequence[np.ndarray],
    *,
    num_continuations: int,
    step_tokens: int,
    max_states: int,
    token_ratio: float,
) -> list[list[int]]:
    """Returns the states of each sample from which to continue, ascending: state s follows the sample's first s tokens.

    All lists are empty if all rewards are equal. States before an unlikely token come first, because there the policy could have gone
    another way. A state costs K continuations of as many tokens as its sample has left. All chosen states together cost at most
    `token_ratio` times the tokens of the samples.
    """
    chosen: list[list[int]] = [[] for _ in rewards_G]
    if len(set(map(float, rewards_G))) < 2:
        return chosen
    states = [
        (g, s) for g, logprobs_N in enumerate(logprobs_GN) for s in range(step_tokens, len(logprobs_N), step_tokens)
    ]
    left = token_ratio * sum(map(len, logprobs_GN))
    for g, s in sorted(states, key=lambda state: (float(logprobs_GN[state[0]][state[1]]), state)):
        cost = num_continuations * (len(logprobs_GN[g]) - s)
        if len(chosen[g]) < max_states and cost <= left:
            chosen[g].append(s)
            left -= cost
    return [sorted(states) for states in chosen]


def advantages(
    reward: float, others: float, num_tokens: int, states: Sequence[int], values: Sequence[float]
) -> np.ndarray:
    """Returns the advantage of each token of a sample, float64 [N]. `others` is V of the prompt: the mean reward of the other samples.

    `values` are the mean rewards of the continuations of `states`. The sum over steps is reward - others.
    """
    bounds, ends = [0, *states, num_tokens], [others, *values, reward]
    return np.repeat(np.diff(ends), np.diff(bounds))
