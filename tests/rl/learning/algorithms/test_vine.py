"""VinePPO against exact values of a chain, and by hand."""

import math

import numpy as np
import pytest

from rl.learning.algorithms import vine

OPTIONS = {"num_continuations": 3, "step_tokens": 2, "max_states": 2, "token_ratio": 2.0}


def test_advantages_add_up_to_the_reward_less_the_value_of_the_prompt():
    """Computed by hand: 7 tokens in steps of 2, 3, and 2; the sum over steps telescopes exactly for numbers that float64 holds."""
    got = vine.advantages(1.0, 0.25, 7, [2, 5], [0.5, 0.125])
    assert got.tolist() == [0.25, 0.25, -0.375, -0.375, -0.375, 0.875, 0.875]
    assert got[[0, 2, 5]].sum() + 0.25 == 1.0
    assert vine.advantages(0.0, 0.25, 3, [], []).tolist() == [-0.25] * 3  # without states, leave-one-out
    rng = np.random.default_rng(0)
    for _ in range(100):
        rewards = rng.integers(0, 9, 4) / 8
        others = (rewards.sum() - rewards[0]) / 3
        states = sorted(rng.choice(np.arange(1, 20), 3, replace=False).tolist())
        found = vine.advantages(rewards[0], others, 20, states, rng.integers(0, 9, 3) / 8)
        steps = found[[0, *states]]
        assert math.fsum([*steps, others]) == pytest.approx(rewards[0], abs=1e-15)
        assert found[0] == pytest.approx(found[states[0] - 1])


def test_a_plan_takes_the_most_uncertain_states_within_its_budget():
    rng = np.random.default_rng(1)
    logprobs = [np.log(rng.random(n)) for n in (9, 4, 12, 1)]
    states = vine.plan([0, 1, 0, 0], logprobs, **OPTIONS)
    assert states == vine.plan([0, 1, 0, 0], logprobs, **OPTIONS)
    cost = sum(3 * (len(logprobs[g]) - s) for g, own in enumerate(states) for s in own)
    assert 0 < cost <= 2 * 26 and all(len(own) <= 2 and own == sorted(own) for own in states)
    assert all(s % 2 == 0 and 0 < s < len(logprobs[g]) for g, own in enumerate(states) for s in own)
    best = min((logprobs[g][s], g, s) for g in range(4) for s in range(2, len(logprobs[g]), 2))
    assert best[2] in states[best[1]]
    assert vine.plan([1, 1, 1, 1], logprobs, **OPTIONS) == [[], [], [], []]  # nothing to learn
    assert vine.plan([0, 1, 0, 0], logprobs, **OPTIONS | {"token_ratio": 0.0}) == [[], [], [], []]
    all_states = vine.plan([0, 1, 0, 0], logprobs, **OPTIONS | {"token_ratio": 1e9, "max_states": 99})
    assert all_states == [[2, 4, 6, 8], [2], [2, 4, 6, 8, 10], []]
    exactly = {"num_continuations": 1, "step_tokens": 2, "max_states": 9, "token_ratio": 0.25}  # one token of four
    assert [vine.plan([0, 1], [np.zeros(3), np.zeros(n)], **exactly) for n in (1, 0)] == [[[2], []], [[], []]]


class Chain:
    """A chain of `length` binary decisions; the reward is the fraction of ones. The policy chooses 1 with a probability per place."""

    def __init__(self, probabilities):
        self.p = np.asarray(probabilities)

    def sample(self, rng, prefix=()):
        rest = rng.random(len(self.p) - len(prefix)) < self.p[len(prefix) :]
        return np.array([*prefix, *rest], int)

    def reward(self, choices):
        return float(np.mean(choices))

    def value(self, prefix):
        return (sum(prefix) + self.p[len(prefix) :].sum()) / len(self.p)


def test_values_of_a_chain_are_within_three_standard_errors():
    """9 continuations of each state, 400 times: the mean of the estimates against the exact value; and A of each step."""
    rng = np.random.default_rng(2)
    chain = Chain([0.2, 0.5, 0.9, 0.4, 0.7])
    choices, states = chain.sample(rng), [1, 2, 3, 4]
    found = []
    for _ in range(400):
        values = [np.mean([chain.reward(chain.sample(rng, choices[:s])) for _ in range(9)]) for s in states]
        found.append(vine.advantages(chain.reward(choices), chain.value(()), 5, states, values))
    exact = np.diff([chain.value(choices[:s]) for s in range(6)])
    error = np.std(found, axis=0, ddof=1) / math.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - exact) <= 3 * error + 1e-12).all()
