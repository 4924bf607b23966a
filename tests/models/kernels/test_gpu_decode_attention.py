"""The Triton kernel that decodes on GPUs, interpreted on a CPU, against plain attention of each sequence's own keys."""

import functools

import jax
import numpy as np
import pytest

from models import attention
from models.kernels import gpu_attention, gpu_decode_attention

CASES = {
    "four query heads to a key head": {},
    "one key head, values of other dims": {"heads": (3, 1), "dims": (32, 16)},
    "a window and sinks": {"window": 40, "sinks": True},
    "softcap": {"softcap": 2.0, "heads": (4, 4)},
    "more query heads than rows of a tile": {"heads": (20, 1), "scale": 0.3},
}


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_a_query_reads_the_keys_of_its_sequence(case, monkeypatch):
    """Sequences of 1 key, of a part and one more, and of all; those past the end are large."""
    options = dict(CASES[case])
    (H, K), (C, V), is_sunk = (options.pop(*d) for d in (("heads", (8, 2)), ("dims", (16, 16)), ("sinks", False)))
    monkeypatch.setattr(gpu_decode_attention, "PART", 64)
    rng, S, lengths = np.random.default_rng(0), 144, np.array([1, 64, 65, 100, 144], np.int32)
    q, k, v = draw(rng, 5, 1, H, C), draw(rng, 3, 5, K, S, C), draw(rng, 3, 5, K, S, V)
    for row, length in enumerate(lengths):
        k[:, row, :, length:], v[:, row, :, length:] = 1e4, -1e4  # of the sequence that had the slot before
    if is_sunk:
        options["sinks_H"] = draw(rng, H)
    run = jax.jit(functools.partial(gpu_decode_attention.attend, interpret=True, **options))
    got = run(q, k, v, 1, lengths)
    window = options.pop("window", 0)
    for row, length in enumerate(lengths):
        first = max(length - window, 0) if window else 0
        own = (slice(row, row + 1), slice(None), slice(first, length))
        want = attention.attend(
            q[row : row + 1], k[1][own], v[1][own], np.ones((1, 1, length - first), bool), **options
        )
        np.testing.assert_allclose(got[row], want[0], rtol=0, atol=2e-6)  # float32 sums of up to 144 terms


def test_bits_do_not_depend_on_neighbors(monkeypatch):
    """100 random batches: the result of a sequence, with other sequences and in another slot, is the same to the bit."""
    monkeypatch.setattr(gpu_decode_attention, "PART", 32)
    rng, S = np.random.default_rng(1), 64
    q, k, v = draw(rng, 4, 1, 4, 16), draw(rng, 1, 4, 2, S, 16), draw(rng, 1, 4, 2, S, 16)
    run = jax.jit(functools.partial(gpu_decode_attention.attend, interpret=True))
    own = np.asarray(run(q, k, v, 0, np.full(4, 50, np.int32)))
    for _ in range(100):
        order, lengths = rng.permutation(4), rng.integers(1, S + 1, 4).astype(np.int32)
        row = int(rng.integers(4))
        lengths[row] = 50
        got = run(q[order], k[:, order], v[:, order], 0, lengths)
        np.testing.assert_array_equal(got[row], own[order[row]])


def test_other_arrays_are_left_to_xla(monkeypatch):
    """Several new tokens, dims and capacities that no tile divides, and CPUs have no kernel."""
    q, keys = np.zeros((2, 1, 4, 16)), np.zeros((2, 2, 32, 16))
    assert not gpu_decode_attention.fits(q, keys, keys)
    monkeypatch.setattr(gpu_attention.mesh_lib, "platform", lambda: "gpu")
    assert gpu_decode_attention.fits(q, keys, keys)
    assert not gpu_decode_attention.fits(q.repeat(2, axis=1), keys, keys)
    assert not gpu_decode_attention.fits(q, keys[:, :, :30], keys[:, :, :30])
    assert not gpu_decode_attention.fits(q[..., :12], keys[..., :12], keys)
    assert not gpu_decode_attention.fits(q, keys, keys[..., :0])
