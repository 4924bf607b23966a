"""Advantages against `statistics` and loops; the inputs that each ignores."""

import math
import statistics

import numpy as np
import pytest

from rl.learning.algorithms import advantages

GROUPS = [
    [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0],
    [0.25, -3.0, 17.5, 0.25],
    [0.1, 0.2, 0.30000000000000004],
    [1e-3, 1e-3, 2e-3, 1e-3],
    [1.0, 0.0],
    [0.3] * 16,
    [0.7],
    [0.0, 0.0, 0.0],
    [-1.0, -0.5],
]


def oracle(name, rewards):
    mean, n = statistics.mean(rewards), len(rewards)
    if name == "group_mean":
        return [r - mean for r in rewards]
    if name == "group_mean_std":
        deviation = statistics.stdev(rewards) if n > 1 else 0.0
        return [(r - mean) / (deviation + 1e-6) for r in rewards]
    if name == "rloo":
        others = [[r for j, r in enumerate(rewards) if j != i] for i in range(n)]
        return [r - statistics.mean(rest) if rest else 0.0 for r, rest in zip(rewards, others, strict=True)]
    if name == "optimal":
        return [r - math.log(math.fsum(math.exp(other) for other in rewards) / n) for r in rewards]
    if name == "best_of_n":
        best = [r == max(rewards) for r in rewards]
        return [float(b) / sum(best) if not all(best) else 0.0 for b in best]
    if name == "max_rl":
        return [(r - mean) / mean if mean > 0 else 0.0 for r in rewards]
    return rewards


@pytest.mark.parametrize("rewards", GROUPS, ids=lambda r: f"G={len(r)}")
@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_advantages_equal_statistics(name, rewards):
    got = advantages.ADVANTAGES[name](np.array(rewards))
    assert np.isfinite(got).all()  # one sample has no spread; equal rewards have a spread of zero
    # `statistics` rounds once, numpy at every sum: 1e-16 x the rewards, over a deviation of at least 5e-4.
    np.testing.assert_allclose(got, oracle(name, rewards), atol=1e-9, rtol=1e-9)
    if name != "given":
        assert abs(got.sum()) < 1e-9 or name in ("optimal", "best_of_n")
        if len(set(rewards)) == 1:
            assert np.abs(got).max() < 1e-9


def test_the_optimal_advantage_is_finite_for_rewards_of_any_size():
    """Between the largest reward and the mean, as the log-mean-exp is; exp(1000) would overflow."""
    np.testing.assert_allclose(advantages.optimal(np.array([0.0, 1000.0])), [math.log(2) - 1000, math.log(2)])
    rewards = np.array([0.0, 0.25, 1.0])
    assert rewards.mean() < (rewards - advantages.optimal(rewards)).max() < 1.0


def test_batch_std_divides_by_the_spread_of_the_whole_batch():
    credits = [np.array([1.0, -1.0]), np.array([0.5, 0.0, -0.5]), np.array([0.0])]
    everything = [1.0, -1.0, 0.5, 0.0, -0.5, 0.0]
    got = advantages.batch_std(credits)
    deviation = statistics.stdev(everything) + 1e-6
    assert [len(c) for c in got] == [2, 3, 1]
    np.testing.assert_allclose(np.concatenate(got), np.array(everything) / deviation, rtol=1e-12)
    assert [c.tolist() for c in advantages.batch_std([np.array([2.0])])] == [[0.0]] and advantages.batch_std([]) == []
    assert all(np.isfinite(c).all() for c in advantages.batch_std([np.zeros(3)]))
    assert [c is d for c, d in zip(advantages.NORMALIZERS["none"](credits), credits, strict=True)] == [True] * 3


def test_averages_turn_a_token_mean_into_a_sample_or_prompt_mean():
    """sum_t f A / N over tokens must be the mean over samples, or over prompts, of the mean over tokens."""
    lengths = [np.array([3, 1]), np.array([5, 5, 2])]
    values = [np.array([0.5, 2.0]), np.array([1.0, -1.0, 4.0])]  # loss of each token of a sample
    N, samples = 16, [v for group in values for v in group]

    def by_tokens(name):
        factors = advantages.AVERAGES[name](lengths, 20)
        return sum((f * n * v).sum() for f, n, v in zip(factors, lengths, values, strict=True)) / N

    assert by_tokens("tokens") == pytest.approx((1.5 + 2 + 5 - 5 + 8) / 16)
    assert by_tokens("batch") == pytest.approx((1.5 + 2 + 5 - 5 + 8) / 20)  # 4 tokens are in a group without a signal
    assert by_tokens("samples") == pytest.approx(statistics.mean(samples))
    assert by_tokens("prompts") == pytest.approx(statistics.mean([(1.5 + 2) / 4, (5 - 5 + 8) / 12]))
    for name in advantages.AVERAGES:
        factors = advantages.AVERAGES[name]([np.array([0, 4]), np.array([0])], 4)
        assert all((f > 0).all() for f in factors)  # no division by 0


def test_overlong_penalty():
    """DAPO, equation 13: 0, a ramp over the last `buffer` tokens, -1."""
    lengths = np.array([0, 10, 12, 13, 15, 16, 17, 100])
    got = advantages.overlong_penalty(lengths, max_tokens=16, buffer=4)
    expected = [0 if n <= 12 else (12 - n) / 4 if n <= 16 else -1 for n in lengths]
    np.testing.assert_allclose(got, expected)
    for buffer in (0, 17):
        with pytest.raises(AssertionError):
            advantages.overlong_penalty(lengths, max_tokens=16, buffer=buffer)
