"""Measurement: limits and bands fit the honest rollouts that they are derived from, and hold for others."""

import collections
import dataclasses
import math

import numpy as np
import pytest

from inference.proofs import toploc
from rl.trust.verification import measurement, sequential_test
from tests.support import proofs


@pytest.mark.parametrize(("num_massive", "limits"), [(4, toploc.PAPER), (0, toploc.LOOSEST), (4, toploc.LOOSEST)])
def test_limits_that_accept_proofs_of_other_texts_are_refused(num_massive, limits):
    """Massive channels, four of them, let the published limits accept the proof of one text for another."""
    rng, chunks = np.random.default_rng(0), []
    for _ in range(8):
        hidden_TD = rng.standard_normal((32, 256))
        hidden_TD[:, :num_massive] = 60 * (1 + 0.15 * rng.standard_normal((32, num_massive)))
        hidden_TD = hidden_TD.astype(toploc.jnp.bfloat16)
        chunks.append((hidden_TD, proofs.build(hidden_TD)[0]))
    measured = [measurement.Measured(chunks={(n,): one for n, one in enumerate(chunks)})]
    if limits == toploc.PAPER or not num_massive:
        assert measurement.check_other_texts(limits, measured) == 7
        return
    with pytest.raises(ValueError, match="accept [67] of 7 proofs of other texts; replay in the dtype"):
        measurement.check_other_texts(limits, measured)


def test_a_limit_in_log_odds_holds_for_likely_and_unlikely_tokens():
    """A logit that errs by r changes the log-odds by r, and in units of 1 - p the error of a likely token by e^r - 1."""
    rng = np.random.default_rng(2)
    logit_N, r_N = rng.uniform(-6, 6, 200_000), rng.laplace(0, 0.08, 200_000)
    logp_N, claimed_N = -np.log1p(np.exp(-logit_N)), -np.log1p(np.exp(-logit_N + r_N))
    doubt_N = -np.expm1(logp_N)
    np.testing.assert_allclose(sequential_test.log_odds(claimed_N - logp_N, doubt_N, 1e-12), -r_N, atol=1e-6)
    np.testing.assert_array_equal(sequential_test.log_odds(r_N, doubt_N, 1.0), r_N)
    odds_N = np.abs(sequential_test.log_odds(claimed_N - logp_N, doubt_N, 0.02))
    assert odds_N.max() <= np.abs(r_N).max() and odds_N.max() < measurement.tail_limit(odds_N[:8000]) < 2


def test_scales_and_ties_hold_for_the_rollouts_they_were_measured_on():
    """A scale bounds the mean of every bet; shares of ties come from errors where none was seen, and elsewhere from counts."""
    rng = np.random.default_rng(1)
    for x in (rng.normal(0, 3, 500), rng.standard_t(3, 500), np.full(500, -0.5)):
        scale = measurement._scale(x)
        bets = [
            np.exp(a * np.minimum(x / scale, sequential_test.MAX_SCALED) - a * a / 2) for a in sequential_test.SLOPES
        ]
        assert np.mean(bets, axis=1).max() <= 1 and scale < 12
    bands = dataclasses.replace(measurement.FLOORS, tie_span=0.1)
    error_N, gap_N = rng.normal(0, 0.01, 4000), rng.uniform(0, 1, 4000)
    is_second_N = gap_N < np.abs(rng.normal(0, 0.01 * 2**0.5, 4000)) * rng.choice([0, 1], 4000)
    one = sequential_test.Evidence(0, 0, np.zeros(4), 0.0, np.zeros(4000), error_N, gap_N, gap_N, is_second_N)

    def variant(one):
        return measurement.Measured(by_group={(0, 0): [one]})

    shares = measurement._ties(bands, [variant(one)])
    assert shares[0] == measurement.LEAST_TIES and 0.5 <= shares[-1] <= 0.75 and shares[2] < shares[6] < shares[10]
    for k, share in enumerate(shares):
        seen = is_second_N[bands.classes(gap_N) == k]
        assert share >= seen.sum() / max(len(seen), 50)
    quiet = measurement._ties(
        bands, [variant(dataclasses.replace(one, error_N=np.zeros(4000), is_second_N=gap_N < 0.05))]
    )
    assert quiet[0] < 0.01 and min(quiet[2:4]) == 1.0  # 0.05 is the border of classes 1 and 2


def test_shares_of_wide_ties_of_which_few_are_lost_come_from_the_tail_of_margins():
    """Models SmolLM2 in bfloat16: the share of ties of 0.27 nats that are lost, where 8,192 tokens of 20 runs lost 0 to 4 of 450."""
    # Mutation seen to fail here: without the tail of margins, 0.1 % where 0.4 % are lost.
    rng, bands, shares = np.random.default_rng(0), dataclasses.replace(measurement.FLOORS, tie_span=0.88), []
    for _ in range(20):
        gap_N = rng.exponential(2, 8192)
        tokens, is_second_N = np.zeros(8192), rng.laplace(0, 0.053, 8192) > gap_N
        one = sequential_test.Evidence(0, 0, np.zeros(4), 0.0, tokens, tokens, gap_N, gap_N, is_second_N)
        shares.append(measurement._ties(bands, [measurement.Measured(by_group={(0, 0): [one]})])[3])
    most, least = 0.88 / 2**1.5, 0.88 / 2**2
    exact = 0.053 / 2 * (math.exp(-least / 0.053) - math.exp(-most / 0.053)) / (most - least)
    assert 0.7 * exact <= min(shares) and exact <= np.median(shares) <= 4 * exact, (exact, shares)


def test_bands_on_sums_are_those_by_hand():
    """Three groups with copies, of other lengths; one rollout alone errs much, and downward."""
    rng, quiet = np.random.default_rng(5), np.zeros(4)
    texts = [[(1, 2), (1, 2), (3, 4, 5)], [(1,), (2, 3), (2, 4)], [(7, 8, 9), (7, 8, 1), (6,)]]
    rewards = (1.0, 0.0, 0.25)
    errors = [[rng.exponential(0.002, len(text)) - 0.001 for text in group] for group in texts]
    errors[0][2] -= 0.02
    groups = [
        [
            sequential_test.Evidence(
                0, 0, quiet, r, np.array(t), e, quiet[: len(t)] + 1, quiet[: len(t)], quiet[: len(t)] > 0
            )
            for t, e, r in zip(*group, rewards, strict=True)
        ]
        for group in zip(texts, errors, strict=True)
    ]
    signs = [[np.clip(e / 0.0125, -1, 1).sum() for e in group] for group in errors]
    mean = sum(map(sum, signs)) / 19

    def deviation(texts, weights):
        sums = collections.Counter()
        for text, weight in zip(texts, weights, strict=True):
            sums.update({text[:n]: abs(weight) for n in range(len(text))})
        return math.sqrt(sum(value**2 for value in sums.values()))

    over, lean, favored, squares = {1: [], 3: []}, {1: [], 3: []}, [], 0.0
    for text, error, sign in zip(texts, errors, signs, strict=True):
        lengths = list(map(len, text))
        squares += (sum(sign) - mean * sum(lengths)) ** 2
        for size in (1, 3):
            for first in range(0, 3, size):
                part = slice(first, first + size)
                root = deviation(text[part], [1] * size)
                over[size].append((sum(np.abs(e).sum() for e in error[part]) - 0.01 * sum(lengths[part])) / root)
                lean[size].append((sum(sign[part]) - mean * sum(lengths[part])) / root)
        per_token = np.dot(rewards, lengths) / sum(lengths)
        weights = [reward - per_token for reward in rewards]
        favored.append(sum(w * (s - mean * n) for w, s, n in zip(weights, sign, lengths, strict=True)))
        favored[-1] /= deviation(text, weights)
    expected = {
        "scatter": measurement._scale(*map(np.array, over.values())),
        "alone": measurement._scale(np.array(over[1])),
        "bias": 1.25 * (abs(mean) + 4 * math.sqrt(squares) / 19),
        "spread": measurement._scale(
            *(side * np.array(x) for side in (1, -1) for x in (*lean.values(), favored, np.zeros(9)))
        ),
    }
    bands = dataclasses.replace(measurement.FLOORS, logprob=0.0125)
    assert measurement._sums(bands, groups) == pytest.approx(expected)
    for n, group in enumerate(groups):
        assert measurement._scaled(bands, mean, group) == pytest.approx((over[3][n], lean[3][n], favored[n]))
    _, found = measurement.limits([measurement.Measured(by_group=dict(enumerate(groups)))])
    square = np.mean(np.concatenate(sum(errors, [])) ** 2)
    assert found.shape == pytest.approx(measurement.SHAPE_SAFETY * 16 * square)


@pytest.mark.parametrize("easier", [0.0, 0.5])
def test_bands_on_sums_hold_where_some_prompts_are_easier_than_others(easier):
    """All samples of a prompt err less or more, so that a group is no sum of independent rollouts. The bets are those of the test itself."""
    rng = np.random.default_rng(2)

    def group():
        rate, lean = 0.01 * rng.lognormal(-(easier**2) / 2, easier), easier * rng.normal(0, 0.5)
        for first in range(8):
            error_N = rng.exponential(rate, 100) * rng.choice([-1, 1], 100, p=[0.5 - lean / 4, 0.5 + lean / 4])
            token_N, quiet = np.array([first, *range(99)]), np.zeros(100)
            fields = token_N, error_N, quiet + 1, quiet + 1, quiet.astype(bool)
            yield sequential_test.Evidence(0, 0, np.zeros(4), first % 2, *fields)

    bands = dataclasses.replace(measurement.FLOORS, logprob=measurement.BAND_SAFETY * 0.01)
    bands = dataclasses.replace(bands, **measurement._sums(bands, [list(group()) for _ in range(64)]))
    gains = {"error": [], "bias": [], "advantage": []}
    for _ in range(200):
        test = sequential_test.SequentialTest(bands)
        test.add(list(group()))
        for name, found in gains.items():
            found.append(np.array(test.state()["log_wealth"][name]) - sequential_test.log_start(1))
    # Mutation seen to fail here: scales of rollouts alone.
    means = {name: np.exp(found).mean(axis=0).max() for name, found in gains.items()}
    assert max(means.values()) <= 1, means


@pytest.mark.parametrize(
    ("draw", "share", "num", "exact", "least"),
    [
        ("normal", 1, 8192, 6.1, 0.7),
        ("laplace", 1, 8192, 20.7, 0.7),
        ("logistic", 1, 8192, 21.4, 0.7),
        ("laplace", 0.0168, 8192, 16.6, 0.7),
        ("laplace", 0.005, 8192, 15.4, 0.7),
        ("laplace", 1, 64, 20.7, 0.45),
    ],
)
def test_a_limit_is_beyond_honest_tokens_and_not_far_beyond(draw, share, num, exact, least):
    """Extrapolates from a number of honest tokens to a chance of 1e-9, over 20 samples; all but a `share` are 0, as margins are."""
    # Mutations seen to fail here: a tail that begins at 0 with a probability of 1, twice the maximum, zeros in the tail, and a tail of one value.
    rng = np.random.default_rng(0)
    samples = np.abs(getattr(rng, draw)(size=(20, num)))
    samples *= rng.random(samples.shape) < share
    found = [measurement.tail_limit(sample) for sample in samples]
    assert 0.9 * exact <= np.median(found) <= 1.4 * exact and least * exact <= min(found), found
    assert measurement.tail_limit(np.append(samples, 1e4)) == 1.25e4


def test_limits_and_bands_are_those_of_the_variant_that_differs_most():
    """Compares with sums by hand: of two variants, one errs ten times as much. In a third, routers flip, and few tokens show it."""
    rng, quiet = np.random.default_rng(6), np.zeros(4)

    def variant(size):
        def rollout(num):
            fields = np.arange(num), rng.laplace(0, size, num), np.ones(num), np.ones(num), np.zeros(num, bool)
            return sequential_test.Evidence(rng.exponential(size), rng.exponential(size), quiet, 0.0, *fields)

        groups = {n: [rollout(4 + n % 3) for _ in range(4)] for n in range(16)}
        return measurement.Measured(by_group=groups, routing=size, proofs=[(999.0, 0.1, 999.0)] * 8)

    still, loud = variant(0.002), variant(0.02)
    fields = np.arange(100), np.zeros(100), np.ones(100), np.full(100, 9.0), np.arange(100) < 3
    flipped = sequential_test.Evidence(0.0, 0.0, quiet, 0.0, *fields)
    tolerance, bands = measurement.limits([loud, still, measurement.Measured(True, {0: [flipped]})])
    assert tolerance.logprob == measurement.tail_limit(np.abs(loud.error_N)) and tolerance.margin == 1e-4
    assert tolerance.routing == pytest.approx(3 * 0.02) and tolerance.flips == pytest.approx(1.25 * (3 + 4 * 2) / 100)
    assert tolerance.proofs == dataclasses.replace(toploc.LOOSEST, mantissa_mean=2)
    values = {
        "margin": lambda one: one.margin,
        "proof": lambda one: one.proof,
        "logprob": lambda one: np.abs(one.error_N).mean(),
    }
    for name, value in values.items():
        means = [np.mean([value(one) for one in group]) for group in loud.groups]  # of 4 rollouts each
        error = math.sqrt(sum((x - np.mean(means)) ** 2 for x in means)) / 16
        assert getattr(bands, name) == pytest.approx(1.25 * (np.mean(means) + 4 * error)), name


@pytest.mark.parametrize(("noise", "rounding", "expected"), [(0.05, 0.0, 2e-2), (1e-5, 2e-6, 0.2)])
def test_errors_are_measured_in_units_that_fit_their_growth_with_uncertainty(noise, rounding, expected):
    """Models errors of SmolLM2: in bfloat16 they vanish with 1 - p, in float32 the rounding of large logits stays."""
    rng = np.random.default_rng(3)
    doubt_N = np.where(rng.random(8192) < 0.5, 10 ** rng.uniform(-6, -2, 8192), rng.uniform(0.01, 1, 8192))
    error_N = noise * doubt_N * rng.laplace(size=8192) + rounding * rng.normal(size=8192)
    floor = measurement._floor(error_N, doubt_N)
    assert floor <= expected if rounding == 0 else expected / 3 <= floor <= 3 * expected, floor
