"""Losses against loops over micro-batches, rows, streams and tokens in Python floats; gradients by central differences.

The loops are written from the papers' formulas, token by token, with `math` alone. A = advantage, r = exp(logp - old).
Terms under a stop-gradient are computed from a copy of logp that the differences do not move.
"""

import functools
import inspect
import math

import jax
import numpy as np
import pytest

from rl.learning.algorithms import advantages, divergences, losses

# ---- the oracle ------------------------------------------------------------------------------------------------------


def clip(x, low, high):
    return min(max(x, low), high)


def ppo(r, A, low, high):
    """(loss, clipped) of one token."""
    return max(-r * A, -clip(r, 1 - low, 1 + high) * A), (A > 0 and r > 1 + high) or (A < 0 and r < 1 - low)


def each(function):
    """An oracle of a token as one of a batch: the sum over all tokens, over `denom`."""

    def whole(streams, denom, num_streams, **options):
        pairs = [function(token, **options) for stream in streams for token in stream]
        return sum(value for value, _ in pairs) / denom, [[flag for _, flag in pairs]]

    return whole


@each
def two_sided_clip(t, *, clip_low, clip_high, delta):
    """INTELLECT-2: bound the ratio by delta, then take the worse of it and its clip."""
    c1 = t.r if t.r < delta else delta
    value, clipped = ppo(c1, t.A, clip_low, clip_high)
    return value, clipped or (t.A < 0 and t.r > delta)


@each
def dapo(t, *, clip_low, clip_high):
    return ppo(t.r, t.A, clip_low, clip_high)


def each_stream(function):
    """An oracle of a stream as one of a batch: the sum over all streams, over `num_streams`."""

    def whole(streams, denom, num_streams, **options):
        pairs = [function(stream, **options) for stream in streams]
        return sum(value for value, _ in pairs) / num_streams, [flags for _, flags in pairs]

    return whole


@each_stream
def grpo(stream, *, clip_low, clip_high, off_policy_delta=0.0):
    """DeepSeek-V3.2's mask (arXiv 2512.02556, eq. 9): M = 0 if A < 0 and the mean of log(pi_old / pi) exceeds delta."""
    drift = sum(t.sampler - t.fixed for t in stream) / len(stream)
    keep = [not (off_policy_delta and t.A < 0 and drift > off_policy_delta) for t in stream]
    pairs = [ppo(t.r, t.A, clip_low, clip_high) for t in stream]
    value = sum(v * k for (v, _), k in zip(pairs, keep, strict=True))
    return value / len(stream), [f or not k for (_, f), k in zip(pairs, keep, strict=True)]


@each_stream
def dr_grpo(stream, *, clip_low, clip_high, length):
    pairs = [ppo(t.r, t.A, clip_low, clip_high) for t in stream]
    return sum(v for v, _ in pairs) / length, [f for _, f in pairs]


@each_stream
def gspo(stream, *, clip_low, clip_high):
    s = math.exp(sum(t.fixed_log_r for t in stream) / len(stream))
    pairs = [ppo(s * math.exp(t.logp - t.fixed), t.A, clip_low, clip_high) for t in stream]
    return sum(v for v, _ in pairs) / len(stream), [f for _, f in pairs]


@each_stream
def gmpo(stream, *, log_clip):
    product = math.prod(math.exp(min(t.log_r, log_clip) if t.A > 0 else max(t.log_r, -log_clip)) for t in stream)
    A = sum(t.A for t in stream) / len(stream)
    flags = [(t.A > 0 and t.log_r > log_clip) or (t.A < 0 and t.log_r < -log_clip) for t in stream]
    return -A * product ** (1 / len(stream)), flags


@each_stream
def sapo(stream, *, tau_positive, tau_negative):
    """arXiv 2511.20347: f(r) = sigmoid(tau (r - 1)) 4 / tau."""

    def gate(t):
        tau = tau_positive if t.A > 0 else tau_negative
        return 4 / tau / (1 + math.exp(-tau * (t.r - 1)))

    return -sum(gate(t) * t.A for t in stream) / len(stream), [False for _ in stream]


@each_stream
def oapl(stream, *, beta):
    """OAPL (arXiv 2602.19362, eq. 3, as NeMo RL's documentation has it): (beta log(pi(y) / mu(y)) - A)^2, with one A of the whole sequence."""
    A = sum(t.A for t in stream) / len(stream)
    return (beta * (sum(t.logp for t in stream) - sum(t.old for t in stream)) - A) ** 2, [False for _ in stream]


def masked_importance_sampling(
    streams,
    denom,
    num_streams,
    *,
    ratio_low,
    ratio_high,
    stream_low=0.0,
    stream_high=math.inf,
    geometric_low=0.0,
    geometric_high=math.inf,
):
    total, flags = 0.0, []
    for stream in streams:
        rs = [math.exp(t.fixed_log_r) for t in stream]
        geometric = math.prod(rs) ** (1 / len(rs))
        alive = min(rs) >= stream_low and max(rs) <= stream_high and geometric_low <= geometric <= geometric_high
        keep = [alive and ratio_low <= r <= ratio_high for r in rs]
        total -= sum(t.r * t.A for t, kept in zip(stream, keep, strict=True) if kept) / denom
        flags.append([not kept for kept in keep])
    return total, flags


@each
def cispo(t, *, ratio_low, ratio_high):
    r = math.exp(t.fixed_log_r)
    return -clip(r, ratio_low, ratio_high) * t.A * t.logp, not ratio_low <= r <= ratio_high


@each
def truncated_importance_sampling(t, *, clip_low, clip_high, cap):
    value, clipped = ppo(t.r, t.A, clip_low, clip_high)
    return min(math.exp(t.old - t.sampler), cap) * value, clipped


@each
def decoupled_ppo(t, *, clip_low, clip_high):
    """AReaL: weight pi_prox / pi_behav, ratio pi / pi_prox."""
    value, clipped = ppo(t.r, t.A, clip_low, clip_high)
    return math.exp(t.old) / math.exp(t.sampler) * value, clipped


@each
def dppo_tv(t, *, low, high, kl_tau):
    change = math.exp(t.fixed) - math.exp(t.old)
    dropped = change > high if t.A > 0 else change < -low
    return (0.0 if dropped else -t.r * t.A) + kl_tau * t.log_r**2, dropped


@each
def ipo(t, *, bound, kl_tau):
    dropped = abs(math.exp(t.fixed) - math.exp(t.old)) > bound
    return (0.0 if dropped else -t.r * t.A) + kl_tau * t.log_r**2, dropped


@each
def cross_entropy(t):
    return -t.logp * t.A, False


PPO, PRIME = {"clip_low": 0.2, "clip_high": 0.3}, {"ratio_low": 0.125, "ratio_high": 8.0}
CASES = {
    "two_sided_clip": (two_sided_clip, PPO | {"delta": 4.0}),
    "grpo": (grpo, PPO),
    "grpo/off_policy": (grpo, PPO | {"off_policy_delta": 0.1}),
    "sapo": (sapo, {"tau_positive": 0.9, "tau_negative": 1.4}),
    "oapl": (oapl, {"beta": 0.3}),
    "dr_grpo": (dr_grpo, PPO | {"length": 5.0}),
    "dapo": (dapo, PPO),
    "gspo": (gspo, PPO),
    "gmpo": (gmpo, {"log_clip": 0.4}),
    "masked_importance_sampling": (masked_importance_sampling, {"ratio_low": 0.5, "ratio_high": 5.0}),
    "masked_importance_sampling/kill": (masked_importance_sampling, PRIME | {"stream_low": 0.15}),
    "masked_importance_sampling/largest": (masked_importance_sampling, PRIME | {"stream_high": 6.0}),
    "masked_importance_sampling/geometric": (
        masked_importance_sampling,
        PRIME | {"geometric_low": 0.6, "geometric_high": 2.0},
    ),
    "cispo": (cispo, {"ratio_low": 0.5, "ratio_high": 5.0}),
    "truncated_importance_sampling": (truncated_importance_sampling, PPO | {"cap": 2.0}),
    "decoupled_ppo": (decoupled_ppo, PPO),
    "dppo_tv": (dppo_tv, {"low": 0.2, "high": 0.25, "kl_tau": 0.1}),
    "ipo": (ipo, {"bound": 0.1, "kl_tau": 0.1}),
    "cross_entropy": (cross_entropy, {}),
}
DROP_NOTHING = ("sapo", "oapl")
RATIO_CASES = [case for case in CASES if case != "cross_entropy"]


class Token:
    """One trained token, by name."""

    def __init__(self, logp, fixed, old, A, sampler):
        self.logp, self.fixed, self.old, self.A, self.sampler = logp, fixed, old, A, sampler
        self.log_r, self.fixed_log_r = logp - old, fixed - old
        self.r = math.exp(self.log_r)


def streams_of(batches, logps=None):
    """Lists of trained tokens by stream, over micro-batches and rows; streams that train nothing are left out."""
    found = []
    for number, (logp, old, A, mask, ids, sampler) in enumerate(batches):
        now = logp if logps is None else logps[number]
        for b in range(len(mask)):
            for stream in range(int(ids[b].max()) + 1):
                tokens = [
                    Token(now[b][t], logp[b][t], old[b][t], A[b][t], sampler[b][t])
                    for t in range(len(mask[b]))
                    if ids[b][t] == stream and mask[b][t]
                ]
                found += [tokens] if tokens else []
    return found


def oracle(case, batches, denom, num_streams, logps=None):
    """(loss, metrics)."""
    function, options = CASES[case]
    streams = streams_of(batches, logps)
    value, flags = function(streams, denom, num_streams, **options)
    tokens, flags = [t for stream in streams for t in stream], sum(flags, [])
    k3 = [math.exp(t.log_r) - 1 - t.log_r for t in tokens]

    def mean(xs):
        return math.fsum(xs) / denom

    return value, {
        "loss/clip_frac": mean(flags),
        "loss/clip_frac_positive": mean(f and t.A > 0 for f, t in zip(flags, tokens, strict=True)),
        "loss/clip_frac_negative": mean(f and t.A < 0 for f, t in zip(flags, tokens, strict=True)),
        "loss/mismatch_kl": mean(k3),
        "loss/mismatch_kl_dropped": mean(k * f for k, f in zip(k3, flags, strict=True)),
        "loss/ratio_mean": mean(t.r for t in tokens),
        "loss/ratio_sq_mean": mean(t.r**2 for t in tokens),
    }


def draw_batch(seed, shape=(6, 9)):
    """[logp, old, A, mask, stream ids, sampler]: float64, exact in float32; ratios 0.08 .. 12, not at any kink.

    A row holds streams of 1 to 4 tokens; one of them trains nothing.
    """
    rng = np.random.default_rng(seed)
    logp = rng.uniform(-3, -0.1, shape)
    log_r = rng.uniform(-2.5, 2.5, shape) * rng.choice([0.2, 1.0], (shape[0], 1))
    for kink in (0.125, 0.5, 0.8, 1.3, 4.0, 5.0, 6.0, 8.0, math.exp(0.4), math.exp(-0.4)):
        log_r = np.where(np.abs(log_r - math.log(kink)) < 0.01, log_r + 0.03, log_r)
    ids = np.sort(rng.integers(0, 4, shape), axis=1)
    ids = np.array([np.unique(row, return_inverse=True)[1] for row in ids])
    A = np.take_along_axis(rng.choice([-1.7, -0.4, 0.0, 0.6, 1.2], shape), ids, axis=1)
    A = np.where(rng.random(shape) < 0.3, rng.choice([-1.7, 0.6], shape), A)  # credit of single tokens, too
    mask = (rng.random(shape) < 0.7).astype(float)
    mask[0, ids[0] == 1] = 0
    sampler = logp - log_r + rng.uniform(-1, 1, shape)
    floats = [x.astype(np.float32).astype(np.float64) for x in (logp, logp - log_r, A, mask)]
    return [*floats, ids, sampler.astype(np.float32).astype(np.float64)]


def run(case, batch, denom, num_streams=1.0, **options):
    """(loss, metrics, d loss / d logp) in float32; options default to the case's."""
    name = case.split("/")[0]
    arrays = [np.asarray(x, np.float32) for x in batch[:4]]
    shape = arrays[0].shape
    ids = np.asarray(batch[4], np.int32) if len(batch) > 4 else np.zeros(shape, np.int32)
    sampler = np.asarray(batch[5], np.float32) if len(batch) > 5 else arrays[1]
    options = tuple(sorted((options or CASES[case][1]).items()))
    counts = np.float32(denom), np.float32(num_streams)
    (value, metrics), grad = value_and_grad(name, options, arrays, ids, sampler, *counts)
    assert value.dtype == np.float32 and value.shape == ()
    return float(value), {key: float(x) for key, x in metrics.items()}, np.asarray(grad)


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_grad(name, options, arrays, ids, sampler, denom, num_streams):
    function = losses.LOSSES[name]
    extras = {"stream_ids_BT": ids, "num_streams": num_streams, "sampler_logp_BT": sampler}
    extras = {k: x for k, x in extras.items() if k in inspect.signature(function).parameters}

    def loss(logp, *rest):
        return function(logp, *rest, denom=denom, **extras, **dict(options))

    return jax.value_and_grad(loss, has_aux=True)(*arrays)


def counts(batches):
    return sum(batch[3].sum() for batch in batches), len(streams_of(batches))


def test_every_loss_has_an_oracle():
    assert {case.split("/")[0] for case in CASES} == set(losses.LOSSES)


@pytest.mark.parametrize("case", CASES)
def test_value_metrics_and_gradient_equal_the_loops(case):
    batch = draw_batch(0)
    denom, num_streams = 29.0, 11.0
    value, metrics, grad = run(case, batch, denom, num_streams)
    expected, expected_metrics = oracle(case, [batch], denom, num_streams)
    # float32 sums of 40 tokens of size 10: 40 x 10 x 2^-24 / 29.
    assert value == pytest.approx(expected, abs=1e-5)
    if case != "cross_entropy":
        assert metrics.keys() == expected_metrics.keys()
        for key, x in expected_metrics.items():
            assert metrics[key] == pytest.approx(x, rel=1e-5, abs=1e-5), key
        if case not in DROP_NOTHING:
            assert 0.05 < metrics["loss/clip_frac"] < 0.95 and metrics["loss/clip_frac_positive"] > 0

    expected = difference(lambda logp: oracle(case, [batch], denom, num_streams, [logp])[0], batch[0])
    # Central differences of a float64 sum of size 1: (step^2 and 1e-16 / step) x the derivatives, below 1e-8.
    np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_add_up_to_the_batch(case):
    """Each part over the global denominators; catches a mean over rows, and one over a part's own tokens or streams."""
    batch = draw_batch(1)
    denom, num_streams = counts([batch])
    value, metrics, grad = run(case, batch, denom, num_streams)
    parts = [[x[rows] for x in batch] for rows in (slice(0, 2), slice(2, 4), slice(4, 6))]
    assert len({part[3].sum() for part in parts}) == 3  # parts of different weight
    assert value == pytest.approx(oracle(case, parts, denom, num_streams)[0], abs=1e-5)
    sums = [run(case, part, denom, num_streams) for part in parts]
    assert value == pytest.approx(sum(s[0] for s in sums), abs=1e-6)  # order of float32 sums
    for key, total in metrics.items():
        assert total == pytest.approx(sum(s[1][key] for s in sums), rel=1e-6, abs=1e-6)
    # Each token's own, over one denominator; sums over a stream may be vectorised otherwise.
    np.testing.assert_allclose(grad, np.concatenate([s[2] for s in sums]), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("log_r", [4.5, 12.0, 19.9, 20.1, 50.0])
def test_a_ratio_is_exact_up_to_the_clamp_and_then_has_no_gradient(log_r):
    """A token with A < 0 that became likelier, which these losses keep; e^20 is far from the limits of float32."""
    batch = [np.array([[x]]) for x in (-0.5, -0.5 - log_r, -1.5, 1.0)]
    bounded, slope = min(log_r, 20.0), float(log_r < 20)
    for case, options, tau in (
        ("masked_importance_sampling", {"ratio_low": 0.0, "ratio_high": math.inf}, 0.0),
        ("dppo_tv", {"low": 0.2, "high": 0.2, "kl_tau": 0.3}, 0.3),
    ):
        value, _, grad = run(case, batch, 2.0, **options)
        r = math.exp(bounded)
        # logp - old is rounded to float32, 2^-24 of 50, and exp passes that on.
        assert value == pytest.approx((1.5 * r + tau * bounded**2) / 2, rel=1e-5)
        assert grad.item() == pytest.approx(slope * (1.5 * r + 2 * tau * bounded) / 2, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("garbage", [1e4, -1e4, np.inf, -np.inf, np.nan])
def test_what_the_mask_hides_has_no_gradient(case, garbage):
    """Prompts and padding carry arbitrary values; the sampler reports nothing for them."""
    batch = draw_batch(2)
    value, metrics, grad = run(case, batch, 10.0, 5.0)
    hidden = batch[3] == 0
    assert (grad[hidden] == 0).all() and (grad[~hidden & (batch[2] > 0)] != 0).any()
    for which in (0, 1, 5):
        spoiled = [x.copy() for x in batch]
        spoiled[which][hidden] = garbage
        got_value, got_metrics, got_grad = run(case, spoiled, 10.0, 5.0)
        assert (got_value, got_metrics) == (value, metrics)
        np.testing.assert_array_equal(got_grad, grad)


@pytest.mark.parametrize("case", CASES)
def test_on_policy_every_loss_has_the_policy_gradient(case):
    """-A of the token, in the weights of the loss's own mean; gmpo and oapl give each token the mean A of its stream."""
    logp, _, A, mask, ids, _ = draw_batch(4)
    batch = [logp, logp, A, mask, ids, logp]
    _, metrics, grad = run(case, batch, 10.0, 4.0)
    weight = mask / 10
    if case in ("grpo", "grpo/off_policy", "gspo", "gmpo", "sapo", "oapl"):
        of_stream = (ids[:, :, None] == ids[:, None, :]) * mask[:, None, :]
        weight = mask / np.maximum(of_stream.sum(axis=2), 1) / 4
        if case in ("gmpo", "oapl"):
            A = (of_stream * A[:, None, :]).sum(axis=2) / np.maximum(of_stream.sum(axis=2), 1)
        if case == "oapl":  # d/dx (0.3 x - A)^2 at 0; a sum over the stream, not a mean
            weight = mask / 4 * 2 * 0.3
    elif case == "dr_grpo":
        weight = mask / (4 * 5.0)
    np.testing.assert_allclose(grad, -A * weight, rtol=2e-6, atol=1e-9)  # a few float32 roundings
    assert metrics.get("loss/mismatch_kl", 0) == metrics.get("loss/clip_frac", 0) == 0


# ---- golden: where each clip binds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("A", "ratio", "value", "gradient", "clipped"),
    [
        # A > 0: the ratio counts up to 1.2, so delta never binds.
        (1.0, 0.79, -0.79, -0.79, 0),
        (1.0, 1.19, -1.19, -1.19, 0),
        (1.0, 1.21, -1.2, 0.0, 1),
        (1.0, 4.1, -1.2, 0.0, 1),
        (2.0, 1e6, -2.4, 0.0, 1),
        # A < 0: no less than 0.8, no more than delta = 4; plain PPO has no upper bound here.
        (-1.0, 0.01, 0.8, 0.0, 1),
        (-1.0, 0.79, 0.8, 0.0, 1),
        (-1.0, 0.81, 0.81, 0.81, 0),
        (-1.0, 1.21, 1.21, 1.21, 0),
        (-1.0, 3.999, 3.999, 3.999, 0),
        (-1.0, 4.001, 4.0, 0.0, 1),
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
    assert metrics["loss/clip_frac_positive"] == (clipped and A > 0)


@pytest.mark.parametrize("drift", [0.49, 0.51])
@pytest.mark.parametrize("A", [1.0, -1.0])
def test_the_sequence_mask_drops_far_rollouts_with_negative_advantage_alone(A, drift):
    """delta = 0.5: two tokens that lost 0 and 2 x `drift` nats since the *sampler*; the ratio of the loss is 1."""
    logp, sampler = np.array([[-2.0, -2.0]]), np.array([[-2.0, 2 * drift - 2.0]])
    batch = [logp, logp, np.full((1, 2), A), np.ones((1, 2)), np.zeros((1, 2), int), sampler]
    _, metrics, grad = run("grpo", batch, 2.0, clip_low=0.2, clip_high=0.2, off_policy_delta=0.5)
    dropped = A < 0 and drift > 0.5
    assert metrics["loss/clip_frac"] == dropped
    np.testing.assert_allclose(grad, 0 * grad if dropped else -A / 2 + 0 * grad, rtol=1e-6)


def test_oapl_has_its_minimum_at_the_tilted_sampler():
    """Descent on the loss ends at mu exp(r / beta) / Z (A*-PO, eq. 2), summed over 5 completions drawn in the proportions of mu."""
    mu, rewards, beta = np.array([0.3, 0.3, 0.2, 0.1, 0.1]), np.array([0.0, 1.0, 0.5, 1.0, 0.0]), 1.0
    group = np.repeat(np.arange(5), (10 * mu).round().astype(int))
    A = advantages.optimal(rewards[group])
    target = mu * np.exp(rewards / beta)
    target /= target.sum()
    column = np.ones((10, 1), np.float32)
    arrays = [np.float32(x)[:, None] for x in (np.log(mu)[group], A)]

    def loss(theta):
        logp = jax.nn.log_softmax(theta)[group][:, None]
        extras = {"stream_ids_BT": np.zeros((10, 1), np.int32), "num_streams": 10.0, "denom": 10.0}
        return losses.oapl(logp, *arrays, column, beta=beta, **extras)[0]

    theta, step = np.zeros(5, np.float32), jax.jit(jax.grad(loss))
    for _ in range(300):
        theta -= np.asarray(step(theta))
    # 300 steps of a convex problem with curvature above 0.1; A is of log-mean-exp over the group itself, so the fit is exact.
    np.testing.assert_allclose(np.exp(theta) / np.exp(theta).sum(), target, atol=1e-4)
    assert float(loss(np.float32(np.log(target)))) == pytest.approx(0, abs=1e-10)


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RATIO_CASES)
@pytest.mark.parametrize("behavior", [-200.0, -math.inf])
def test_a_token_the_sampler_thought_impossible_is_finite(case, behavior):
    for A in (1.0, -1.0):
        value, metrics, grad = run(case, [[[-1.0]], [[behavior]], [[A]], [[1.0]]], 1.0)
        assert math.isfinite(value) and all(map(math.isfinite, metrics.values())) and math.isfinite(grad[0, 0])
        if case in ("two_sided_clip", "masked_importance_sampling", "dr_grpo"):
            assert grad[0, 0] == 0


# ---- the other components --------------------------------------------------------------------------------------------


def draw_component(seed):
    rng = np.random.default_rng(seed)
    logp, reference, behavior = (rng.uniform(-3, -0.1, (4, 6)) for _ in range(3))
    mask = (rng.random((4, 6)) < 0.6).astype(float)
    weight = mask * rng.uniform(0.1, 2, (4, 6))
    return [x.astype(np.float32).astype(np.float64) for x in (logp, reference, behavior, mask, weight)]


def estimator(name, logp, reference):
    """Schulman 2020, from the ratio ref / pi."""
    ratio = math.exp(reference) / math.exp(logp)
    k3 = ratio - 1 - math.log(ratio)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": k3, "weighted_k3": k3}[name]


def difference(function, logp):
    """Central differences of function(logp) for a float64 array."""
    grad = np.zeros_like(logp)
    for index in np.ndindex(logp.shape):
        sides = []
        for sign in (1, -1):
            moved = logp.copy()
            moved[index] += sign * 1e-5
            sides.append(function(moved))
        grad[index] = (sides[0] - sides[1]) / 2e-5
    return grad


def check(function, oracle, logp, hidden):
    """Value and gradient, both also with NaN in masked tokens."""
    for garbage in (None, np.nan):
        spoiled = logp if garbage is None else np.where(hidden, garbage, logp)
        value, grad = jax.jit(jax.value_and_grad(function))(np.float32(spoiled))
        assert float(value) == pytest.approx(oracle(logp), rel=1e-5, abs=1e-6)  # float32 sums of 15 tokens
        np.testing.assert_allclose(grad, difference(oracle, logp), atol=2e-6)
        assert (np.asarray(grad)[hidden] == 0).all()


@pytest.mark.parametrize("name", divergences.ESTIMATORS)
def test_kl_penalty(name):
    logp, reference, behavior, mask, _ = draw_component(0)
    mask *= np.linspace(0.5, 2, mask.size).reshape(mask.shape)  # of a mean over streams

    def loops(logp):
        total = 0.0
        for i in np.ndindex(mask.shape):
            ratio = math.exp(logp[i]) / math.exp(behavior[i]) if name == "weighted_k3" else 1.0
            total += mask[i] and mask[i] * ratio * estimator(name, logp[i], reference[i])
        return total / 7.0

    arrays = [x.astype(np.float32) for x in (reference, behavior, mask)]
    check(lambda x: divergences.kl_penalty(name, x, *arrays, 7.0), loops, logp, mask == 0)


def test_kl_estimators_agree_with_the_divergence():
    """E_pi k1 = E_pi k3 = KL(pi || ref), exactly summed over a vocabulary; and grad E k2 = grad KL in expectation."""
    rng = np.random.default_rng(0)
    pi, ref = (rng.dirichlet(np.ones(6)) for _ in range(2))
    kl = float((pi * np.log(pi / ref)).sum())
    for name in ("k1", "k3"):
        values = np.asarray(divergences.ESTIMATORS[name](np.log(pi), np.log(ref)), np.float64)
        assert (pi * values).sum() == pytest.approx(kl, rel=1e-5)
    assert (np.asarray(divergences.k3(np.log(pi), np.log(ref))) >= 0).all()
    far = divergences.k3(np.float32([-50.0]), np.float32([-1.0]))
    assert float(far[0]) == pytest.approx(math.exp(10) - 11, rel=1e-5)  # INTELLECT-2's clamp


def test_the_weighted_k3_is_unbiased_in_value_and_gradient_at_any_lag():
    """DeepSeek-V3.2, eq. 7: over tokens of mu, E r k3 = KL(pi || ref), and so is its gradient, summed exactly over a vocabulary."""
    rng = np.random.default_rng(1)
    mu, ref = (np.float32(rng.dirichlet(np.ones(6))) for _ in range(2))
    theta = np.float32(rng.normal(size=6))

    def estimate(theta, name):
        logp = jax.nn.log_softmax(theta)[None]
        return divergences.kl_penalty(name, logp, np.log(ref)[None], np.log(mu)[None], mu[None], 1.0)

    def exact(theta):
        logp = theta - np.log(np.exp(theta).sum())
        return float((np.exp(logp) * (logp - np.log(ref))).sum())

    value, grad = jax.value_and_grad(estimate)(theta, "weighted_k3")
    assert float(value) == pytest.approx(exact(theta.astype(np.float64)), rel=1e-5)
    slope = difference(exact, theta.astype(np.float64))
    np.testing.assert_allclose(grad, slope, atol=1e-5)  # float32 terms of size 1
    assert np.abs(jax.grad(estimate)(theta, "k3") - slope).max() > 0.05  # plain k3 does not


def test_kl_as_a_reward():
    logp, reference, _, mask, _ = draw_component(1)
    A = np.ones_like(logp)
    got = divergences.kl_in_advantage(A, logp, reference, mask, 0.3)
    expected = [1 - 0.3 * (logp[i] - reference[i]) if mask[i] else 1.0 for i in np.ndindex(mask.shape)]
    np.testing.assert_allclose(np.ravel(got), expected, rtol=1e-5)
    grad = jax.grad(lambda x: divergences.kl_in_advantage(A, x, reference, mask, 0.3).sum())(np.float32(logp))
    assert (np.asarray(grad) == 0).all()


def test_weighted_cross_entropy():
    logp, _, _, _, weight = draw_component(2)

    def loops(logp):
        return sum(-weight[i] * logp[i] for i in np.ndindex(weight.shape)) / 5.0

    check(lambda x: divergences.weighted_cross_entropy(x, np.float32(weight), 5.0), loops, logp, weight == 0)
    assert float(divergences.count(weight)) == (weight > 0).sum() and float(divergences.count(weight * 0)) == 1


def test_reference_distillation():
    """PRIME-RL's ref_kl: -keep sg(log ref - log pi) r + tau log(r)^2, dropped where pi - mu < -low."""
    logp, reference, behavior, _, weight = draw_component(3)
    drops = 0

    def loops(now):
        nonlocal drops
        total = drops = 0
        for i in np.ndindex(weight.shape):
            if weight[i] == 0:
                continue
            r = math.exp(now[i] - behavior[i])
            keep = math.exp(logp[i]) - math.exp(behavior[i]) >= -0.2
            drops += not keep
            total += weight[i] * (-keep * (reference[i] - logp[i]) * r + 1e-3 * math.log(r) ** 2)
        return total / 6.0

    arrays = [x.astype(np.float32) for x in (behavior, reference, weight)]
    check(lambda x: divergences.reference_distillation(x, *arrays, 6.0), loops, logp, weight == 0)
    assert 0 < drops < (weight > 0).sum()
