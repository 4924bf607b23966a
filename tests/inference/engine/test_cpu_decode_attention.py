"""One query per sequence over blocks of keys, against float64, and against itself among other sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import cpu_decode_attention, kv_cache
from tests.support import cases, tiny

S, NUM_BLOCKS = 16, 3
POSITIONS = (0, 15, 16, 40)  # the first and the last of a block, and one amid the last
HOWS = [{}, {"scale": 0.3}, {"window": 5}, {"window": 20}, {"sinks": True}]


def case(K, G, C, V, dtype=jnp.float32, positions=POSITIONS):
    """Returns blocks with keys before `positions` and random ones after, a new token per sequence, and all its keys."""
    rng = np.random.default_rng(K * G + C)
    B = len(positions)
    k, v = (rng.standard_normal((B, K, S * NUM_BLOCKS, dim)).astype(dtype) for dim in (C, V))
    q, new_k, new_v = (rng.standard_normal((B, 1, *shape)).astype(dtype) for shape in ((K * G, C), (K, C), (K, V)))
    blocks = cpu_decode_attention.Blocks(
        jnp.asarray(np.moveaxis(k.reshape(B, K, NUM_BLOCKS, S, C), 2, 0)),
        jnp.asarray(np.moveaxis(v.reshape(B, K, NUM_BLOCKS, S, V), 2, 0)),
    )
    for b, position in enumerate(positions):
        k[b, :, position], v[b, :, position] = new_k[b, 0], new_v[b, 0]
    return blocks, (q, new_k, new_v), np.array(positions, np.int32), k, v


def step(blocks, new, positions, **how):
    return jax.jit(lambda *args: cpu_decode_attention.step(*args, **how))(blocks, *new, positions)


def expected(q_HC, k_KSC, v_KSV, position, *, scale=None, window=0, sinks_H=None):
    """float64, one head after the other."""
    G = len(q_HC) // len(k_KSC)
    first = max(0, position - window + 1) if window else 0
    out = []
    for h, q in enumerate(np.asarray(q_HC, np.float64)):
        k, v = (np.asarray(x[h // G, first : position + 1], np.float64) for x in (k_KSC, v_KSV))
        scores = k @ q * (len(q) ** -0.5 if scale is None else scale)
        weights = np.exp(scores)
        out.append(weights @ v / (weights.sum() + (0 if sinks_H is None else np.exp(np.float64(sinks_H[h])))))
    return np.stack(out)


SHAPES = [(2, 2, 64, 64), (1, 16, 24, 40), (3, 1, 5, 5)]
STEPS = [(shape, how, dtype) for shape in SHAPES for how in HOWS for dtype in ("float32", "bfloat16")]
FAST = zip(SHAPES * 2, [*HOWS, {}], ["float32", "bfloat16"] * 3, strict=True)  # each shape with both dtypes


@pytest.mark.parametrize(("shape", "how", "dtype"), cases.slow_but(STEPS, *FAST), ids=str)
def test_the_step_is_attention(shape, how, dtype):
    (K, G, C, V), how, dtype = shape, dict(how), jnp.dtype(dtype)
    if how.pop("sinks", False):
        how["sinks_H"] = np.linspace(-1, 2, K * G, dtype=np.float32)
    blocks, new, positions, k, v = case(K, G, C, V, dtype)
    got, after = step(blocks, new, positions, **how)
    assert got.dtype == after.keys_NBKSC.dtype == after.values_NBKSV.dtype == dtype
    # float32 sums of 64 products and 41 weights, of order 1; bfloat16 is rounded once, at the end
    rtol, atol = (0, 3e-6) if dtype == jnp.float32 else (2**-8, 1e-5)
    for b, position in enumerate(positions):
        wanted = expected(new[0][b, 0], k[b], v[b], position, **how)
        np.testing.assert_allclose(np.float64(got[b, 0]), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("window", cases.slow_but([0, 1, 5, 20], 0, 5))
def test_the_cache_layout_of_other_devices_is_the_same_attention(window):
    _, new, positions, k, v = case(2, 2, 32, 32)
    out, (keys, values) = kv_cache.attend_at(jnp.asarray(positions))((jnp.zeros_like(k), v), *new, window=window)
    np.testing.assert_array_equal(np.asarray(keys)[np.arange(4), :, positions], new[1][:, 0])  # written, and no other
    assert np.count_nonzero(np.asarray(keys).any(axis=(1, 3))) == 4
    out, _ = kv_cache.attend_at(jnp.asarray(positions))((k, v), *new, window=window)
    for b, position in enumerate(positions):
        wanted = expected(new[0][b, 0], k[b], v[b], position, window=window)
        np.testing.assert_allclose(out[b, 0], wanted, rtol=0, atol=3e-6)  # as above


@pytest.mark.parametrize("active", [None, (True, False, True, False)])
def test_the_new_token_is_written_and_nothing_else(active):
    blocks, new, positions, k, v = case(2, 2, 8, 8)
    active_B = None if active is None else np.array(active)
    _, after = step(blocks, new, positions, active_B=active_B)
    for wanted, *arrays in ((k, blocks.keys_NBKSC, after.keys_NBKSC), (v, blocks.values_NBKSV, after.values_NBKSV)):
        before, found = (np.moveaxis(np.asarray(x), 0, 2).reshape(k.shape) for x in arrays)
        writes = np.array(active or [True] * 4)[:, None, None, None]
        np.testing.assert_array_equal(found, np.where(writes, wanted, before))


@pytest.mark.parametrize(
    "how", [{}, {"window": 5}, {"sinks_H": np.ones(4, np.float32)}], ids=["plain", "window", "sinks"]
)
def test_bits_do_not_depend_on_how_many_blocks_the_neighbours_fill(how):
    run = jax.jit(lambda *args: cpu_decode_attention.step(*args, **how))
    for own in POSITIONS:
        outs = []
        for neighbour in POSITIONS:  # one, two and three blocks are read
            blocks, new, _, *_ = case(2, 2, 64, 64)
            out, _ = run(blocks, *new, np.array([own] + [neighbour] * 3, np.int32))
            outs.append(np.asarray(out[0]))
        for out in outs[1:]:
            np.testing.assert_array_equal(out.view(np.int32), outs[0].view(np.int32))


@pytest.mark.parametrize("length", [8, 16, 48, 56])
def test_prompts_are_copied_into_blocks(length):
    """A partial block, a whole one, several, and padding past the last; rows in any order, those out of range skipped, other sequences untouched."""
    rng = np.random.default_rng(length)
    k, v = (rng.standard_normal((2, 3, length, 4)).astype(np.float32) for _ in range(2))
    old = cpu_decode_attention.Blocks(*(jnp.full((NUM_BLOCKS, 4, 3, S, 4), 7.0) for _ in range(2)))
    new = kv_cache.copy_rows((k, v), jnp.array([1, 0, 0]), old, jnp.array([3, 0, 4]))
    keys = np.moveaxis(np.asarray(new.keys_NBKSC), 0, 2).reshape(4, 3, -1, 4)
    values = np.moveaxis(np.asarray(new.values_NBKSV), 0, 2).reshape(4, 3, -1, 4)
    for got, wanted in ((keys, k), (values, v)):
        np.testing.assert_array_equal(got[3, :, :length], wanted[1, :, : S * NUM_BLOCKS])
        np.testing.assert_array_equal(got[0, :, :length], wanted[0, :, : S * NUM_BLOCKS])
        assert (got[1:3] == 7).all() and (got[:, :, length:] == 7).all()


@pytest.mark.parametrize(("capacity", "blocks", "size"), [(1, 1, 16), (96, 1, 96), (129, 2, 80), (288, 3, 96)])
def test_blocks_have_the_capacity(capacity, blocks, size):
    model = tiny.model()
    made = jax.eval_shape(lambda: cpu_decode_attention.create(model, 4, capacity))
    assert len(made) == model.num_layers
    assert made[0].keys_NBKSC.shape == (blocks, 4, model.num_kv_heads, size, model.head_dim)
    assert made[0].values_NBKSV.shape == (blocks, 4, model.num_kv_heads, size, model.v_dim)


def test_where_it_is_used():
    model = tiny.model()
    assert cpu_decode_attention.fits(model)
    assert not cpu_decode_attention.fits(dataclasses.replace(model, scan_layers=True))
    with jax.set_mesh(jax.make_mesh((2,), ("tensor",))):
        assert not cpu_decode_attention.fits(model)
