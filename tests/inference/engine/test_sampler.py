"""The sampler: noise against a threefry written in numpy, filters against sets, draws against both.

A validator replays a rollout, maybe on another version of JAX: noise that changes is a broken proof, so its
bits are pinned here.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import sampler

noise = jax.jit(sampler.noise, static_argnums=2)
scores = jax.jit(sampler.scores)
sample = jax.jit(lambda logits, position, how: sampler.draw(sampler.scores(logits, how), position, how))


def sampling(size, *, seed=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (size,))

    reals = [column(value, np.float32) for value in (temperature, top_p, min_p)]
    return sampler.Sampling(column(seed, np.uint32), reals[0], column(top_k, np.int32), *reals[1:])


def threefry2x32(key, count):
    """Twenty rounds (Salmon et al. 2011, table 2 and figure 4); Python integers."""
    mask, keys = 0xFFFFFFFF, [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    a, b = (count[0] + keys[0]) & mask, (count[1] + keys[1]) & mask
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = (a + b) & mask
            b = ((b << rotation | b >> (32 - rotation)) & mask) ^ a
        a = (a + keys[(group + 1) % 3]) & mask
        b = (b + keys[(group + 2) % 3] + group + 1) & mask
    return a, b


def oracle_bits(seed, position, vocab_size):
    key = threefry2x32((0, seed), (0, position))
    blocks = [threefry2x32(key, (0, v)) for v in range(vocab_size)]
    return [high ^ low for high, low in blocks]


def oracle_noise(seed, position, vocab_size):
    uniform = [((bits >> 9) + 0.5) * 2.0**-23 for bits in oracle_bits(seed, position, vocab_size)]
    return np.array([-math.log(-math.log(u)) for u in uniform])


def test_the_oracle_is_threefry():
    """Known answers of the Random123 distribution (kat_vectors, threefry2x32 20)."""
    assert threefry2x32((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert threefry2x32((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2) == (0x1CB996FC, 0xBB002BE7)
    assert threefry2x32((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)


SEEDS = np.array([0, 1, 7, 7, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
POSITIONS = np.array([0, 1, 1, 2, 131071, 5, 2**31 - 1], np.int32)


def test_noise_equals_the_oracle():
    got = noise(SEEDS, POSITIONS, 33)
    assert got.dtype == jnp.float32 and np.isfinite(got).all()
    for row, seed, position in zip(got, SEEDS.tolist(), POSITIONS.tolist(), strict=True):
        # Two float32 logarithms of an exact uniform: a few units in the last place of a value up to 17.
        np.testing.assert_allclose(row, oracle_noise(seed, position, 33), rtol=1e-6, atol=1e-6)


def test_noise_bits_are_pinned():
    """The uniform bits of (seed 7, position 1), read back from the noise; no release of anything may change them."""
    pinned = [2899676959, 3548400998, 1692160380, 1822441453, 900059358, 2247291750]
    assert oracle_bits(7, 1, 6) == pinned
    uniform = np.exp(-np.exp(-np.asarray(noise(SEEDS[2:3], POSITIONS[2:3], 6)[0], np.float64)))
    # 24 bits of a float32 go through two logarithms: the top 18 come back.
    np.testing.assert_allclose(uniform * 2.0**32, pinned, rtol=0, atol=2.0**14)


def test_noise_is_a_function_of_seed_and_position_alone():
    """Bitwise the same alone, among others, and in another order."""
    together = np.asarray(noise(SEEDS, POSITIONS, 33))
    order = np.random.default_rng(0).permutation(len(SEEDS))
    np.testing.assert_array_equal(noise(SEEDS[order], POSITIONS[order], 33), together[order])
    for i in range(len(SEEDS)):
        np.testing.assert_array_equal(noise(SEEDS[i : i + 1], POSITIONS[i : i + 1], 33)[0], together[i])
    rows = {row.tobytes() for row in together}
    assert len(rows) == len(SEEDS)  # (7, 1), (7, 2), (1, 1), ...: each its own


def oracle_kept(logits, temperature, top_k, top_p, min_p):
    """The ids that may be sampled, and their log-probabilities; float64."""
    p = np.exp((logits - logits.max()) / (temperature or 1.0))
    ranked = sorted(range(len(p)), key=lambda v: -p[v])[: top_k or len(p)]
    total, mass, kept = sum(p[v] for v in ranked), 0.0, []
    for v in ranked:
        if kept and (mass >= top_p * total or p[v] < min_p * p[ranked[0]]):
            break
        kept.append(v)
        mass += p[v]
    return {v: math.log(p[v] / mass) for v in kept}


def test_kept_sets_and_log_probabilities_equal_the_oracle():
    rng = np.random.default_rng(0)
    B, V = 128, 24
    logits = (rng.standard_normal((B, V)) * rng.choice([0.3, 2.0, 6.0], (B, 1))).astype(np.float32)
    settings = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.5], B),
        "top_k": rng.choice([0, 1, 3, 10, 24, 100], B),
        "top_p": rng.choice([1.0, 0.95, 0.7, 0.2, 1e-6], B),
        "min_p": rng.choice([0.0, 0.02, 0.3, 1.0], B),
    }
    got = np.asarray(scores(logits, sampling(B, **settings)))
    sizes = set()
    for b in range(B):
        kept = oracle_kept(logits[b].astype(np.float64), *(x[b].item() for x in settings.values()))
        assert set(np.flatnonzero(np.isfinite(got[b]))) == set(kept), b
        for v, logp in kept.items():
            assert got[b, v] == pytest.approx(logp, abs=2e-5)  # float32 logits of size 40 at temperature 0.5
        assert np.exp(got[b].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
        sizes.add(len(kept))
    assert {1, 3, 10, V} < sizes  # the draw did exercise every filter


def test_biased_allowed_and_banned_tokens_equal_the_oracle():
    """Bits of rows that change nothing stay; -1 in the lists is skipped."""
    rng = np.random.default_rng(4)
    B, V, M = 64, 24, 6
    logits = (rng.standard_normal((B, V)) * 2).astype(np.float32)
    ids = np.stack([rng.permutation(V)[:M] for _ in range(B)])
    ids = np.where(rng.random((B, M)) < 0.4, -1, ids).astype(np.int32)
    ids[:, 0] = V  # a token that is never banned
    V += 1
    logits = np.pad(logits, [(0, 0), (0, 1)])
    bias, only = rng.standard_normal((B, M)).astype(np.float32), rng.random(B) < 0.5
    banned = rng.integers(-1, 3, (B, 2)).astype(np.int32)
    ids[:4], only[:4], banned[:4] = -1, False, -1
    how = sampling(B).replace(bias_ids=ids, bias=bias, allows_biased_only=only)
    got = np.asarray(jax.jit(sampler.scores)(logits, how, banned))
    np.testing.assert_array_equal(got[:4], np.asarray(scores(logits, sampling(B)))[:4])
    for b in range(4, B):
        added = {token: value for token, value in zip(ids[b].tolist(), bias[b].tolist(), strict=True) if token >= 0}
        kept = [v for v in (added if only[b] else range(V)) if v not in banned[b]]
        mass = sum(math.exp(logits[b, v] + added.get(v, 0.0)) for v in kept)
        assert set(np.flatnonzero(np.isfinite(got[b]))) == set(kept), b
        for v in kept:
            expected = float(logits[b, v]) + added.get(v, 0.0) - math.log(mass)
            assert got[b, v] == pytest.approx(expected, abs=1e-5)  # float32


def test_of_ties_at_a_threshold_the_first_entries_stay():
    """So that a set has at most top_k entries, also of a model whose logits are all equal."""
    logits = np.log(np.array([[0.2, 0.4, 0.2, 0.2]], np.float32))
    assert np.isfinite(scores(logits, sampling(1, top_k=2))).tolist() == [[True, True, False, False]]
    assert np.isfinite(scores(logits, sampling(1, top_p=0.7))).tolist() == [[True, True, True, False]]
    assert np.isfinite(scores(0 * logits, sampling(1, top_k=3))).tolist() == [[True, True, True, False]]
    logits = np.log(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32))
    assert np.isfinite(scores(logits, sampling(1, top_p=0.3))).tolist() == [[True, False, False, False]]
    logits = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))  # exact: the first has just the mass that is asked for
    assert np.isfinite(scores(logits, sampling(1, top_p=0.5))).tolist() == [[True, False, False]]


def test_the_recorded_set_is_that_of_the_draw():
    """`kept` finds all entries, and `restricted` to them gives the log-probabilities that the token was drawn from."""
    rng = np.random.default_rng(6)
    logits = (rng.integers(-4, 5, (64, 24)) / 2).astype(np.float32)  # many ties
    how = sampling(64, top_k=rng.choice([0, 1, 5, 8], 64), top_p=rng.choice([1.0, 0.9, 0.4], 64))
    logp = np.asarray(scores(logits, how))
    kept = np.asarray(sampler.kept(logp, 24))
    for row, ids in zip(logp, kept, strict=True):
        assert set(ids[ids >= 0].tolist()) == set(np.flatnonzero(np.isfinite(row)).tolist())
    assert ((kept[how.top_k > 0] >= 0).sum(axis=1) <= how.top_k[how.top_k > 0]).all()
    np.testing.assert_allclose(sampler.restricted(logits, kept), logp, atol=1e-6)  # float32 sums of 24 terms
    none = np.full((64, 3), -1, np.int32)
    np.testing.assert_allclose(sampler.restricted(logits, none), jax.nn.log_softmax(logits), atol=1e-6)


def test_a_row_without_filters_does_not_see_its_neighbours_filters():
    """Bitwise. Row 1 is so peaked that the float32 mass of its best entry is 1: no other may be cut off for it."""
    logits = np.random.default_rng(1).standard_normal((3, 24)).astype(np.float32)
    logits[1] *= 12
    alone = np.asarray(scores(logits, sampling(3)))
    beside = np.asarray(scores(logits, sampling(3, top_k=[0, 0, 2])))
    np.testing.assert_array_equal(beside[:2], alone[:2])
    assert np.isfinite(alone[1]).all() and np.isfinite(beside[2]).sum() == 2


def test_the_token_is_the_argmax_of_score_plus_noise_and_logp_is_its_score():
    rng = np.random.default_rng(2)
    B, V = 7, 33
    logits = rng.standard_normal((B, V)).astype(np.float32) * 2
    settings = sampling(B, seed=SEEDS, temperature=0.7, top_k=rng.choice([0, 5], B), top_p=rng.choice([1.0, 0.8], B))
    token, logp = sample(logits, POSITIONS, settings)
    assert token.dtype == jnp.int32 and logp.dtype == jnp.float32
    for b in range(B):
        kept = oracle_kept(logits[b].astype(np.float64), 0.7, int(settings.top_k[b]), float(settings.top_p[b]), 0.0)
        drawn = oracle_noise(int(SEEDS[b]), int(POSITIONS[b]), V)
        best = max(kept, key=lambda v: kept[v] + drawn[v])
        assert token[b] == best and logp[b] == pytest.approx(kept[best], abs=1e-5)


def test_temperature_zero_is_greedy_and_reports_the_untempered_distribution():
    logits = np.random.default_rng(3).standard_normal((4, 24)).astype(np.float32) * 3
    token, logp = sample(logits, np.arange(4, dtype=np.int32), sampling(4, seed=np.arange(4), temperature=0.0))
    np.testing.assert_array_equal(token, logits.argmax(axis=1))
    logits64 = logits.astype(np.float64)
    np.testing.assert_allclose(logp, logits64.max(axis=1) - np.log(np.exp(logits64).sum(axis=1)), atol=1e-5)
    cold, _ = sample(logits, np.arange(4, dtype=np.int32), sampling(4, seed=np.arange(4), temperature=1e-4))
    np.testing.assert_array_equal(cold, token)  # and it is the limit of cold sampling


def test_the_argmax_is_numpys():
    """The first of equal entries, the first NaN where there are any, entry 0 where nothing is left."""
    x = np.random.default_rng(0).integers(0, 9, (6, 40)).astype(np.float32)
    x[1, [7, 30]], x[2], x[3, 1:], x[4, 17:] = np.nan, -np.inf, -np.inf, np.inf
    np.testing.assert_array_equal(jax.jit(sampler._argmax)(x), x.argmax(axis=-1))
