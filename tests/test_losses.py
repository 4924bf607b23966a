"""Losses against loops over micro-batches, rows and tokens in Python floats; gradients by central differences of those.

The loops are written from the papers' formulas, token by token, with `math` alone. A = advantage, r = exp(logp -
behavior_logp). Advantages are checked against `statistics`.
"""

import functools
import math
import statistics

import jax
import numpy as np
import pytest

from rl import advantages, losses

# ---- the oracle ------------------------------------------------------------------------------------------------------


def two_sided_clip(logp, behavior, A, *, clip_low, clip_high, delta):
    """INTELLECT-2: bound the ratio by delta, then take the worse of it and its clip."""
    r = math.exp(logp - behavior)
    c1 = r if r < delta else delta
    c2 = min(max(c1, 1 - clip_low), 1 + clip_high)
    flat = r > 1 + clip_high if A > 0 else (r < 1 - clip_low or r > delta) and A < 0
    return max(-c1 * A, -c2 * A), flat


def masked_importance_sampling(logp, behavior, A, *, ratio_low, ratio_high):
    """INTELLECT-3: -r A for a ratio inside the bounds, nothing outside."""
    r = math.exp(logp - behavior)
    dropped = not ratio_low <= r <= ratio_high
    return 0.0 if dropped else -r * A, dropped


def cross_entropy(logp, behavior, A):
    return -logp * A, False


ORACLES = {
    "two_sided_clip": (two_sided_clip, {"clip_low": 0.2, "clip_high": 0.3, "delta": 4.0}),
    "masked_importance_sampling": (masked_importance_sampling, {"ratio_low": 0.5, "ratio_high": 5.0}),
    "cross_entropy": (cross_entropy, {}),
}


def oracle(name, batches, denom):
    """Sums over micro-batches, rows and tokens; returns (loss, clip_frac, mismatch_kl, ratio_mean)."""
    token_loss, options = ORACLES[name]
    totals = [0.0, 0.0, 0.0, 0.0]
    for batch in batches:
        for row in zip(*(x.tolist() for x in batch), strict=True):
            for logp, behavior, A, mask in zip(*row, strict=True):
                if mask == 0:
                    continue
                value, clipped = token_loss(logp, behavior, A, **options)
                log_r = logp - behavior
                for i, x in enumerate((value, clipped, math.exp(log_r) - 1 - log_r, math.exp(log_r))):
                    totals[i] += x / denom
    return totals


def draw_batch(seed, shape=(6, 7)):
    """float64 inputs exact in float32; ratios 0.08 .. 12, at least 1 % away from every kink of every loss."""
    rng = np.random.default_rng(seed)
    logp = rng.uniform(-3, -0.1, shape)
    log_r = rng.uniform(-2.5, 2.5, shape)
    for kink in (0.5, 0.8, 1.3, 4.0, 5.0):
        log_r = np.where(np.abs(log_r - math.log(kink)) < 0.01, log_r + 0.03, log_r)
    A = rng.choice([-1.7, -0.4, 0.0, 0.6, 1.2], shape)
    mask = (rng.random(shape) < 0.7).astype(float)
    return [x.astype(np.float32).astype(np.float64) for x in (logp, logp - log_r, A, mask)]


def run(name, batch, denom, **options):
    """(loss, metrics, d loss / d logp) in float32; options default to the oracle's."""
    batch = [np.asarray(x, np.float32) for x in batch]
    (value, metrics), grad = value_and_grad(name, batch, denom, options or ORACLES[name][1])
    assert value.dtype == np.float32 and value.shape == ()
    return float(value), {key: float(x) for key, x in metrics.items()}, np.asarray(grad)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(name, batch, denom, options):
    def loss(logp, *rest):
        return losses.LOSSES[name](logp, *rest, denom=denom, **options)

    return jax.value_and_grad(loss, has_aux=True)(*batch)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_value_metrics_and_gradient_equal_the_loops(name):
    batch, denom = draw_batch(0), 29.0
    value, metrics, grad = run(name, batch, denom)
    expected, clip_frac, mismatch_kl, ratio_mean = oracle(name, [batch], denom)
    # float32 sums of 30 tokens of size 10: 30 x 10 x 2^-24 / 29.
    assert value == pytest.approx(expected, abs=1e-5)
    if name != "cross_entropy":
        assert metrics["loss/clip_frac"] == pytest.approx(clip_frac, abs=1e-6) and 0.1 < clip_frac < 0.9
        assert metrics["loss/mismatch_kl"] == pytest.approx(mismatch_kl, abs=1e-5)
        assert metrics["loss/ratio_mean"] == pytest.approx(ratio_mean, abs=1e-5)

    for b, t in np.ndindex(grad.shape):
        step, sides = 1e-5, []
        for sign in (1, -1):
            moved = [x.copy() for x in batch]
            moved[0][b, t] += sign * step
            sides.append(oracle(name, [moved], denom)[0])
        # Central differences of a float64 sum of size 1: (step^2 and 1e-16 / step) x the derivatives, below 1e-8.
        assert grad[b, t] == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-6), (b, t)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_micro_batches_add_up_to_the_batch(name):
    """Each part over the global denominator; catches a mean over rows, and one over a part's own tokens."""
    batch = draw_batch(1)
    denom = batch[3].sum()
    value, metrics, grad = run(name, batch, denom)
    parts = [[x[rows] for x in batch] for rows in (slice(0, 2), slice(2, 4), slice(4, 6))]
    assert len({part[3].sum() for part in parts}) == 3  # parts of different weight
    assert value == pytest.approx(oracle(name, parts, denom)[0], abs=1e-5)
    sums = [run(name, part, denom) for part in parts]
    assert value == pytest.approx(sum(s[0] for s in sums), abs=1e-6)  # order of float32 sums
    for key, total in metrics.items():
        assert total == pytest.approx(sum(s[1][key] for s in sums), abs=1e-6)
    np.testing.assert_array_equal(grad, np.concatenate([s[2] for s in sums]))  # each token's own, over one denominator


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("garbage", [1e4, -1e4, np.inf, -np.inf, np.nan])
def test_what_the_mask_hides_has_no_gradient(name, garbage):
    """Prompts and padding carry whatever the arrays hold there; the sampler reports nothing for them."""
    batch = draw_batch(2)
    value, metrics, grad = run(name, batch, 10.0)
    hidden = batch[3] == 0
    assert (grad[hidden] == 0).all() and (grad[~hidden & (batch[2] > 0)] != 0).any()
    for which in (0, 1):
        spoiled = [x.copy() for x in batch]
        spoiled[which][hidden] = garbage
        got_value, got_metrics, got_grad = run(name, spoiled, 10.0)
        assert (got_value, got_metrics) == (value, metrics)
        np.testing.assert_array_equal(got_grad, grad)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_no_advantage_no_gradient(name):
    """All rewards of a group equal: its tokens must not move the policy, however far off their ratio is."""
    logp, behavior, A, mask = draw_batch(3)
    value, _, grad = run(name, [logp, behavior, np.zeros_like(A), mask], 10.0)
    assert value == 0 and (grad == 0).all()


@pytest.mark.parametrize("name", losses.LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    logp, _, A, mask = draw_batch(4)
    _, metrics, grad = run(name, [logp, logp, A, mask], 10.0)
    np.testing.assert_allclose(grad, -A * mask / 10, rtol=1e-6, atol=0)  # two float32 roundings
    assert metrics.get("loss/mismatch_kl", 0) == metrics.get("loss/clip_frac", 0) == 0


# ---- golden: where each clip binds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("A", "ratio", "value", "gradient", "clipped"),
    [
        # A > 0: the ratio counts up to 1.2, so delta never binds.
        (1.0, 0.5, -0.5, -0.5, 0),
        (1.0, 0.79, -0.79, -0.79, 0),
        (1.0, 1.19, -1.19, -1.19, 0),
        (1.0, 1.21, -1.2, 0.0, 1),
        (1.0, 3.9, -1.2, 0.0, 1),
        (1.0, 4.1, -1.2, 0.0, 1),
        (2.0, 1e6, -2.4, 0.0, 1),
        # A < 0: no less than 0.8, no more than delta = 4; plain PPO has no upper bound here.
        (-1.0, 0.01, 0.8, 0.0, 1),
        (-1.0, 0.79, 0.8, 0.0, 1),
        (-1.0, 0.81, 0.81, 0.81, 0),
        (-1.0, 1.21, 1.21, 1.21, 0),
        (-1.0, 3.9, 3.9, 3.9, 0),
        (-1.0, 4.1, 4.0, 0.0, 1),
        (-2.0, 1e6, 8.0, 0.0, 1),
        (0.0, 4.1, 0.0, 0.0, 0),
    ],
)
def test_two_sided_clip_around_its_bounds(A, ratio, value, gradient, clipped):
    batch = [[[math.log(ratio) - 2.0]], [[-2.0]], [[A]], [[1.0]]]
    got, metrics, grad = run("two_sided_clip", batch, 1.0, clip_low=0.2, clip_high=0.2, delta=4.0)
    # log and exp in float32 of a ratio up to 1e6 = e^13.8: relative error 14 x 2^-24.
    assert got == pytest.approx(value, rel=1e-5)
    assert grad[0, 0] == pytest.approx(gradient, rel=1e-5)
    assert metrics["loss/clip_frac"] == clipped


@pytest.mark.parametrize(
    ("ratio", "kept"), [(0.124, False), (0.126, True), (1.0, True), (4.99, True), (5.01, False), (1e9, False)]
)
@pytest.mark.parametrize("A", [1.5, -1.5])
def test_masked_importance_sampling_around_its_bounds(A, ratio, kept):
    batch = [[[math.log(ratio) - 2.0]], [[-2.0]], [[A]], [[1.0]]]
    got, metrics, grad = run("masked_importance_sampling", batch, 1.0, ratio_low=0.125, ratio_high=5.0)
    assert got == pytest.approx(-ratio * A if kept else 0.0, rel=1e-5)
    assert grad[0, 0] == pytest.approx(-ratio * A if kept else 0.0, rel=1e-5)
    assert metrics["loss/clip_frac"] == (not kept)


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_without_delta_it_is_ppo():
    logp, behavior, A, mask = batch = draw_batch(5)
    value, _, grad = run("two_sided_clip", batch, 3.0, clip_low=0.2, clip_high=0.2, delta=math.inf)
    r = np.exp(logp - behavior)
    surrogate = np.minimum(r * A, np.clip(r, 0.8, 1.2) * A)
    assert value == pytest.approx(-(surrogate * mask).sum() / 3, abs=1e-5)
    free = np.where(A > 0, r < 1.2, r > 0.8)
    np.testing.assert_allclose(grad, -r * A * mask * free / 3, rtol=1e-5, atol=0)
    assert (r[(A < 0) & (mask > 0)] > 4).any()  # delta would have mattered


def test_without_bounds_it_is_importance_sampling():
    logp, behavior, A, mask = batch = draw_batch(6)
    value, metrics, grad = run("masked_importance_sampling", batch, 3.0, ratio_low=0.0, ratio_high=math.inf)
    r = np.exp(logp - behavior)
    assert value == pytest.approx(-(r * A * mask).sum() / 3, abs=1e-5)
    np.testing.assert_allclose(grad, -r * A * mask / 3, rtol=1e-5, atol=0)
    assert metrics["loss/clip_frac"] == 0


@pytest.mark.parametrize("name", ["two_sided_clip", "masked_importance_sampling"])
@pytest.mark.parametrize("behavior", [-200.0, -math.inf])
def test_a_token_the_sampler_thought_impossible_is_finite(name, behavior):
    for A in (1.0, -1.0):
        value, metrics, grad = run(name, [[[-1.0]], [[behavior]], [[A]], [[1.0]]], 1.0)
        assert math.isfinite(value) and all(map(math.isfinite, metrics.values())) and grad[0, 0] == 0


# ---- advantages ------------------------------------------------------------------------------------------------------

GROUPS = [
    [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0],
    [0.25, -3.0, 17.5, 0.25],
    [0.1, 0.2, 0.30000000000000004],
    [1e-3, 1e-3, 2e-3, 1e-3],
    [1.0, 0.0],
    [0.3] * 16,
    [0.7],
]


@pytest.mark.parametrize("rewards", GROUPS, ids=lambda r: f"G={len(r)}")
@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_advantages_equal_statistics(name, rewards):
    got = advantages.ADVANTAGES[name](np.array(rewards))
    mean = statistics.mean(rewards)
    expected = [r - mean for r in rewards]
    if name == "group_mean_std":
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        expected = [a / (deviation + 1e-6) for a in expected]
    assert np.isfinite(got).all()  # one sample has no spread; equal rewards have a spread of zero
    # `statistics` rounds once, numpy at every sum: 1e-16 x the rewards, over a deviation of at least 5e-4.
    np.testing.assert_allclose(got, expected, atol=1e-9, rtol=1e-9)
    assert abs(got.sum()) < 1e-9
    if len(set(rewards)) == 1:
        assert np.abs(got).max() < 1e-9


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_advantages_follow_their_samples_and_ignore_a_constant(name):
    rng = np.random.default_rng(0)
    rewards, order = rng.random(8), rng.permutation(8)
    function = advantages.ADVANTAGES[name]
    np.testing.assert_allclose(function(rewards[order]), function(rewards)[order], atol=1e-12)  # order of sums
    np.testing.assert_allclose(function(rewards + 5), function(rewards), atol=1e-9)  # 5 eats 3 bits of float64
    assert np.argmax(function(rewards)) == np.argmax(rewards)


def test_only_the_normalised_advantage_ignores_a_scale():
    rewards = np.array([0.0, 1.0, 1.0, 0.25])
    np.testing.assert_allclose(advantages.group_mean(3 * rewards), 3 * advantages.group_mean(rewards), atol=1e-12)
    # 1e-6 beside a deviation of 0.5
    np.testing.assert_allclose(advantages.group_mean_std(3 * rewards), advantages.group_mean_std(rewards), rtol=1e-5)
