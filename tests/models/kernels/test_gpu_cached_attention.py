"""The Triton kernel of cached keys on GPUs, interpreted on a CPU, against plain attention of each sequence's own keys."""

import functools

import jax
import numpy as np
import pytest

from models import attention
from models.kernels import gpu_attention, gpu_cached_attention
from tests.support import cases

CASES = {
    "four query heads to a key head": {},
    "one key head, values of other dims": {"heads": (3, 1), "dims": (32, 16)},
    "a window and sinks": {"window": 40, "sinks": True},
    "a key head of each query head": {"heads": (4, 4)},
    "more query heads than rows of a tile": {"heads": (20, 1), "scale": 0.3},
    "a prompt": {"tokens": 70, "heads": (6, 2)},
    "a chunk with a window and sinks": {"tokens": 20, "window": 30, "sinks": True, "heads": (3, 1)},
}


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "case", cases.slow_but(CASES, "a chunk with a window and sinks", "more query heads than rows of a tile")
)
def test_a_query_reads_the_keys_up_to_its_own(case, monkeypatch):
    """Sequences that begin with the new tokens, cross a part, and fill the capacity; keys past their ends are large."""
    options = dict(CASES[case])
    (H, K), (C, V), is_sunk = (options.pop(*d) for d in (("heads", (8, 2)), ("dims", (16, 16)), ("sinks", False)))
    T = options.pop("tokens", 1)
    monkeypatch.setattr(gpu_cached_attention, "PART", 64)
    rng, S = np.random.default_rng(0), 144
    starts = np.array([0, max(64 - T, 0), 64, S - T], np.int32)
    q, k, v = draw(rng, 4, T, H, C), draw(rng, 3, 4, K, S, C), draw(rng, 3, 4, K, S, V)
    for row, start in enumerate(starts):
        k[:, row, :, start + T :], v[:, row, :, start + T :] = 1e4, -1e4  # of the sequence that had the slot before
    if is_sunk:
        options["sinks_H"] = draw(rng, H)
    run = jax.jit(functools.partial(gpu_cached_attention.attend, interpret=True, **options))
    got = run(q, k, v, 1, starts)
    position_BT1 = (starts[:, None] + np.arange(T))[..., None]
    mask = (np.arange(S) <= position_BT1) & (position_BT1 - np.arange(S) < options.pop("window", S))
    want = attention.attend(q, k[1], v[1], mask, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)  # float32 sums of up to 144 terms


def test_bits_do_not_depend_on_neighbors(monkeypatch):
    """100 random batches: the result of a sequence, with other sequences and in another slot, is the same to the bit."""
    monkeypatch.setattr(gpu_cached_attention, "PART", 32)
    rng, S = np.random.default_rng(1), 64
    q, k, v = draw(rng, 4, 1, 4, 16), draw(rng, 1, 4, 2, S, 16), draw(rng, 1, 4, 2, S, 16)
    run = jax.jit(functools.partial(gpu_cached_attention.attend, interpret=True))
    own = np.asarray(run(q, k, v, 0, np.full(4, 49, np.int32)))
    for _ in range(100):
        order, starts = rng.permutation(4), rng.integers(S, size=4).astype(np.int32)
        row = int(rng.integers(4))
        starts[row] = 49
        got = run(q[order], k[:, order], v[:, order], 0, starts)
        np.testing.assert_array_equal(got[row], own[order[row]])


def test_other_arrays_are_left_to_xla(monkeypatch):
    """Dims and capacities that no tile divides, and CPUs have no kernel."""
    q, keys = np.zeros((2, 1, 4, 16)), np.zeros((2, 2, 32, 16))
    assert not gpu_cached_attention.fits(q, keys, keys)
    monkeypatch.setattr(gpu_attention.mesh_lib, "platform", lambda: "gpu")
    assert gpu_cached_attention.fits(q, keys, keys)
    assert not gpu_cached_attention.fits(q, keys[:, :, :30], keys[:, :, :30])
    assert not gpu_cached_attention.fits(q[..., :12], keys[..., :12], keys)
    assert not gpu_cached_attention.fits(q, keys, keys[..., :0])
