"""The Triton kernels for GPUs, interpreted on a CPU: ranges against the mask, results and gradients against XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models.kernels import attention_tiles, gpu_attention
from tests.support import cases, packings


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("branches", [False, True])
def test_ranges_hold_all_that_is_read_and_skip_other_sequences(branches, window):
    """80 random rows: no readable pair is outside of the ranges, each query reads a key, and most of the causal half is left out."""
    rng, T, block = np.random.default_rng(window + branches), 384, 32
    find = jax.jit(functools.partial(attention_tiles.ranges, block=block, window=window))
    columns, spared = np.arange(T), []
    for _ in range(80):
        row = packings.draw(rng, T, branches=branches)
        mask = np.asarray(attention.readable(row, columns, row, columns, window))
        first, prompt_end, branch, last, whole, whole_end = (
            np.repeat(x, block)[:, None] for x in jax.device_get(find(row))
        )
        own_start, own_end = (columns // block * block)[:, None], (columns // block + 1)[:, None] * block
        by_queries = (columns >= first) & (columns < prompt_end) | (columns >= branch) & (columns < own_end)
        by_keys = (columns >= own_start) & (columns < last)
        real = row.segment_ids > 0
        assert not (mask & ~by_queries)[real].any() and not (mask & ~by_keys.T)[real].any()
        assert (mask & by_queries & by_keys.T).any(axis=1).all()  # padding reads a key, too
        assert mask[(columns >= whole) & (columns < own_start)].all()
        assert mask.T[(columns >= own_end) & (columns < whole_end)].all()
        assert (first >= 0).all() and (first <= branch).all() and (branch < own_end).all() and (last <= T).all()
        spared.append(1 - by_queries.sum() / (T * (T + block) / 2))
    # Sequences have 30 tokens on average without branches, and 80 with them, of which a branch reads two parts.
    assert np.mean(spared) > (0.6 if branches else 0.7)


CASES = {
    "trees": {"branches": True},
    "trees and a window": {"branches": True, "window": 20},
    "a window and sinks": {"window": 20, "sinks": True},
    "a key head of each query head": {"heads": (4, 4)},
    "one key head, values of other dims": {"heads": (4, 1), "dims": (24, 16), "branches": True, "sinks": True},
    "all": {"dims": (24, 16), "branches": True, "window": 20, "sinks": True},
}


@pytest.mark.parametrize("case", cases.slow_but(CASES, "all"))
def test_results_and_gradients_are_those_of_xla(case):
    """Two rows of 100 tokens, which no block divides; float32."""
    options = dict(CASES[case])
    rng, T, (H, K), (C, V) = np.random.default_rng(1), 100, options.pop("heads", (4, 2)), options.pop("dims", (16, 16))
    branches, sunk = options.pop("branches", False), options.pop("sinks", False)
    packing = packings.rows(rng, 2, T, branches=branches)
    q, k, v = (rng.standard_normal((2, T, heads, dims)).astype(np.float32) for heads, dims in ((H, C), (K, C), (K, V)))
    sinks = (rng.standard_normal(H).astype(np.float32),) if sunk else ()
    real = np.asarray(packing.segment_ids > 0)
    cotangent = rng.standard_normal((2, T, H, V)).astype(np.float32) * real[..., None, None]

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend):
        out, pull = jax.vjp(lambda q, k, v, sinks_H=None: attend(q, k, v, packing, sinks_H=sinks_H), q, k, v, *sinks)
        return jnp.where(real[..., None, None], out, 0), pull(cotangent)

    readable = functools.partial(attention.readable, window=options.get("window", 0))
    got = run(functools.partial(gpu_attention.attend, readable=readable, scale=0.3, interpret=True, **options))
    want = run(functools.partial(attention.attend_packed, implementation="xla", scale=0.3, **options))
    # float32 sums of up to 100 terms in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, want)
