"""JAX's splash kernel over the visited blocks of packed rows: the blocks against numpy, results and gradients against XLA."""

import functools

import jax
import numpy as np
import pytest

from models import attention
from models.kernels import splash_attention


def random_row(rng, T, longest):
    """Segment IDs of one row: sequences of random lengths, then maybe padding."""
    ids, at, segment = np.zeros(T, np.int32), 0, 0
    end = T - int(rng.integers(0, T // 2)) * int(rng.random() < 0.7)
    while at < end:
        length, segment = int(rng.integers(1, longest + 1)), segment + 1
        ids[at : min(at + length, end)] = segment
        at += length
    return ids


def read_blocks(ids, block, window):
    """The set of (block of queries, block of keys) in which any query reads a key, from the mask; and the diagonal."""
    columns = np.arange(len(ids))
    mask = (ids[:, None] == ids[None]) & (ids[:, None] > 0) & (columns[:, None] >= columns[None])
    if window:
        mask &= columns[:, None] - columns[None] < window
    N = len(ids) // block
    read = mask.reshape(N, block, N, block).any(axis=(1, 3)) | np.eye(N, dtype=bool)
    return set(zip(*map(list, np.nonzero(read)), strict=True))


@pytest.mark.parametrize("window", [0, 100])
def test_visited_blocks_are_those_that_are_read(window):
    """250 random packings, a third of them with a static bound on the length of a sequence."""
    rng, T, block = np.random.default_rng(window), 512, 32
    visits = {
        longest: jax.jit(functools.partial(splash_attention.visits, block=block, window=window, longest=longest))
        for longest in (0, 200)
    }
    widths = {}
    for case in range(250):
        longest = 200 if case % 3 == 0 else 0
        ids = random_row(rng, T, longest or int(rng.choice([20, 300, T])))
        by_queries, by_keys, is_cut = jax.device_get(visits[longest](ids))
        assert not is_cut.any()
        wanted = read_blocks(ids, block, window)
        rows, steps = np.nonzero(by_queries.block_mask[0])
        assert set(zip(rows.tolist(), np.asarray(by_queries.data_next)[0, rows, steps].tolist(), strict=True)) == wanted
        steps, columns = np.nonzero(by_keys.block_mask[0])
        assert (
            set(zip(np.asarray(by_keys.data_next)[0, steps, columns].tolist(), columns.tolist(), strict=True)) == wanted
        )
        assert len(rows) == len(columns) == len(wanted)
        widths[longest] = by_queries.block_mask.shape[-1]
        # A step without work names the block of its neighbor, so that nothing is loaded for it.
        for info, axis in ((by_queries, 2), (by_keys, 1)):
            moved = np.diff(info.data_next, axis=axis) != 0
            both = np.moveaxis(np.asarray(info.block_mask), axis, 0)
            assert not (moved & ~np.moveaxis(both[1:] & both[:-1], 0, axis).astype(bool)).any()
    assert widths == (
        {0: 5, 200: 5} if window else {0: 16, 200: 8}
    )  # 1 + the blocks of 32 that 99, 511, 199 more keys span


def test_a_sequence_that_is_too_long_is_seen():
    ids = np.zeros(512, np.int32)
    ids[100:400] = 1
    for longest, is_cut in ((300, False), (290, False), (250, True)):  # to within a block of 64
        found = splash_attention.visits(jax.numpy.asarray(ids), block=64, window=0, longest=longest)[2]
        assert found.any() == is_cut


def test_only_the_row_of_a_sequence_that_is_too_long_becomes_nan(monkeypatch):
    monkeypatch.setattr(splash_attention, "BLOCK", 128)
    ids = np.ones((3, 384), np.int32)
    ids[[0, 2], 128:] = 2
    ids[[0, 2], 256:] = 3
    q = np.ones((3, 384, 1, 8), np.float32)
    out = splash_attention.attend(q, q, q, ids, scale=0.1, longest=128, interpret=True)
    np.testing.assert_allclose(out[::2], q[::2], rtol=1e-6)
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_65536_tokens_are_lowered_without_their_mask(rows):
    """The program for a TPU has three kernels, forward, dq, and dkv, of all rows at a time, and no array of T x T."""
    q, k = (jax.ShapeDtypeStruct((rows, 65536 // rows, heads, 128), jax.numpy.bfloat16) for heads in (2, 1))
    ids = jax.ShapeDtypeStruct((rows, 65536 // rows), jax.numpy.int32)

    def total(q, k, v, ids):
        out = splash_attention.attend(q, k, v, ids, scale=0.1, longest=2048)
        return out.astype(jax.numpy.float32).sum()

    program = (
        jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(q, k, k, ids).lower(lowering_platforms=("tpu",)).as_text()
    )
    T = 65536 // rows
    assert program.count("tpu_custom_call") == 3 and f"{T}x{T}" not in program and "65536x65536" not in program
    assert not any("while" in line and "x128xbf16" in line for line in program.splitlines())


CASES = {
    "softcap": {"longest": 200, "softcap": 3.0},
    "window": {"window": 70, "sinks": True},
    "one key head": {"key_heads": 1, "window": 150, "longest": 300},
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_xla(case, monkeypatch):
    """Two rows of three blocks, one of them with padding; float32, interpreted."""
    monkeypatch.setattr(splash_attention, "BLOCK", 128)
    options = dict(CASES[case])
    rng, T, H, K, C = np.random.default_rng(1), 384, 4, options.pop("key_heads", 2), 16
    longest, sunk = options.pop("longest", 0), options.pop("sinks", False)
    ids = np.stack([random_row(rng, T, longest or 250) for _ in range(2)])
    ids[1, 300:] = 0
    starts = np.stack([np.searchsorted(row, row) for row in np.where(ids == 0, 99, ids)])
    packing = attention.Packing((np.arange(T)[None] - starts).astype(np.int32), ids)
    q, k, v = (rng.standard_normal((2, T, heads, C)).astype(np.float32) for heads in (H, K, K))
    sinks = rng.standard_normal(H).astype(np.float32) if sunk else None
    cotangent = rng.standard_normal(q.shape).astype(np.float32) * (ids > 0)[..., None, None]

    def run(attend):
        extra = () if sinks is None else (sinks,)
        out, pull = jax.vjp(lambda q, k, v, sinks_H=None: attend(q, k, v, sinks_H=sinks_H), q, k, v, *extra)
        return np.asarray(out)[ids > 0], pull(cotangent)

    how = {"scale": 0.3, **options}
    got = run(functools.partial(splash_attention.attend, segment_ids_BT=ids, longest=longest, interpret=True, **how))
    want = run(functools.partial(attention.attend_packed, packing=packing, implementation="xla", **how))
    # float32 sums of up to 250 terms in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), got, want)
