"""The CPU's attention of packed rows against the softmax written out in float64, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models.kernels import cpu_attention
from tests.support import cases


def oracle(q, k, v, mask_BTT, scale, d_out):
    """Output and gradients of sum(d_out * out), float64, with no use of a library's derivative."""
    scores = np.einsum("BKGTC,BKSC->BKGTS", q, k) * scale
    scores = np.where(mask_BTT[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("BKGTS,BKSV->BKGTV", weights, v)
    d_weights = np.einsum("BKGTV,BKSV->BKGTS", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    d_q = np.einsum("BKGTS,BKSC->BKGTC", d_scores, k)
    d_k = np.einsum("BKGTS,BKGTC->BKSC", d_scores, q)
    d_v = np.einsum("BKGTS,BKGTV->BKSV", weights, d_out)
    return out, d_q, d_k, d_v


def test_scores_above_the_diagonal_of_blocks_are_not_computed():
    q, k, v = (jax.ShapeDtypeStruct((1, 1, *shape, 8), jnp.float32) for shape in ((1, 160), (160,), (160,)))
    mask = jnp.ones((1, 160, 160), bool)
    attend = jax.jit(lambda q, k, v: cpu_attention.attend_blocks(q, k, v, mask, 1.0))
    cost = attend.lower(q, k, v).compile().cost_analysis()
    products = 2 * 2 * 160 * 160 * 8
    softmax = 10 * 160 * 160  # XLA's count in addition to the products, at most
    assert cost["flops"] < 0.63 * (products + softmax)


# ---- rows beyond a block, by tiles -----------------------------------------------------------------------------------


def drawn_packing(rng, B, T):
    """Sequences that begin anywhere, each a prompt and a few branches, and padding at the end of the first row."""
    segment_BT = 1 + np.cumsum(rng.random((B, T)) < 0.05, axis=1)
    segment_BT[0, T - T // 4 :] = 0
    branch_BT, position_BT = np.zeros((2, B, T), np.int32)
    for b in range(B):
        for segment in np.unique(segment_BT[b]):
            (columns,) = np.nonzero(segment_BT[b] == segment)
            branch_BT[b, columns] = np.sort(rng.integers(0, 3, len(columns)))
            for branch in range(3):
                (own,) = np.nonzero(branch_BT[b, columns] == branch)
                prompt = 0 if branch == 0 else int((branch_BT[b, columns] == 0).sum())
                position_BT[b, columns[own]] = prompt + np.arange(len(own))
    return attention.Packing(*map(jnp.asarray, (position_BT, segment_BT, branch_BT)))


BLOCKS = [(T, None) for T in (1, 40, 160, 203)]  # one block, whole ones, and a last one that is shorter
TILES = [(1, 0), (16, 5), (37, 0), (37, 5), (61, 5)]  # a part of a tile, a whole one, last ones filled up
MORE = [(7, None), (81, None), (1, 5), (16, 0), (61, 0)]


@pytest.mark.parametrize(("T", "window"), cases.slow_but(BLOCKS + TILES + MORE, (203, None), (37, 0), (61, 5)))
def test_values_and_gradients_are_those_of_the_softmax_written_out(T, window, monkeypatch):
    monkeypatch.setattr(cpu_attention, "TILE", 16)
    rng = np.random.default_rng(T)
    B, K, G, C, V = 2, 2, 3, 8, 5
    arrays = [rng.normal(size=(B, K, *shape)) for shape in ((G, T, C), (T, C), (T, V), (G, T, V))]
    packing, columns_T = drawn_packing(rng, B, T), jnp.arange(T)

    def readable(*args):
        return attention.readable(*args, window or 0)

    mask = readable(packing, columns_T, packing, columns_T)

    def attend(*qkv):
        if window is None:
            return cpu_attention.attend_blocks(*qkv, mask, 0.3)
        return cpu_attention.attend_tiles(*qkv, packing, readable, 0.3)

    @jax.jit
    def run(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    mine = run(*(jnp.asarray(x, jnp.float32) for x in arrays))
    q, k, v, d_out = arrays
    for one, theirs in zip(mine, oracle(q, k, v, np.asarray(mask), 0.3, d_out), strict=True):
        np.testing.assert_allclose(one, theirs, rtol=2e-5, atol=2e-5)


def test_tiles_in_which_nothing_may_be_read_are_not_computed(monkeypatch):
    """A NaN would spread to all that is computed from it, be it multiplied by 0."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(cpu_attention, "TILE", 16)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 64, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    bad_T = np.arange(64) // 16 == 1  # a sequence of its own, or a branch: the second tile

    for segment_T, branch_T in ((np.arange(64) // 16 + 1, np.zeros(64)), (np.ones(64), np.arange(64) // 16)):
        packing = attention.Packing(*(jnp.asarray(x, jnp.int32)[None] for x in (np.arange(64), segment_T, branch_T)))

        def loss(q, k, v, packing=packing):
            out = attention.attend_packed(q, k, v, packing)
            return jnp.where(bad_T[None, :, None, None], 0.0, out).sum()

        spoiled = [jnp.where(bad_T[None, :, None, None], jnp.nan, x) for x in (q, k, v)]
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*spoiled)
        assert np.isfinite(value)
        for gradient in gradients:
            # The first tile may be a prompt that the spoiled one reads.
            assert np.isfinite(np.asarray(gradient)[0, 32:]).all()


# ---- a chunk of new tokens over cached keys --------------------------------------------------------------------------


CHUNKS = {
    2: {},
    21: {"window": 5, "sinks_H": np.linspace(-1, 2, 6, dtype=np.float32)},
    32: {"window": 20, "scale": 0.3},
}
KINDS = [(T, dtype) for T in CHUNKS for dtype in (jnp.float32, jnp.bfloat16)]


@pytest.mark.parametrize(("T", "dtype"), cases.slow_but(KINDS, (21, jnp.float32), (32, jnp.bfloat16)))
def test_a_chunk_over_tiles_is_attention_and_reads_no_tile_after_it(T, dtype, monkeypatch):
    """Two rows from other positions on; of the 75 keys, those past the last tile read are NaN. Row 0 alone has the same bits."""
    rng, start_B, how = np.random.default_rng(T), np.array([3, 27], np.int32), CHUNKS[T]
    q, k, v = (jnp.asarray(rng.normal(size=(2, *shape)), dtype) for shape in ((T, 6, 8), (2, 75, 8), (2, 75, 5)))
    plain, run = (jax.jit(functools.partial(attention.attend_cached, **how)) for _ in range(2))
    wanted = plain(q, k, v, start_B)  # in one tile
    monkeypatch.setattr(cpu_attention, "TILE", 16)
    end = -(-(27 + T) // 16) * 16  # of the tiles that are read
    got = run(q, *(x.at[:, :, end:].set(jnp.nan) for x in (k, v)), start_B)
    assert got.dtype == dtype
    # float32 sums of up to 59 weights, of order 1; in bfloat16, the plain function rounds weights, too, and both their output
    rtol, atol = (0, 3e-6) if dtype == jnp.float32 else (2**-7, 2**-7)
    np.testing.assert_allclose(np.float32(got), np.float32(wanted), rtol, atol)
    np.testing.assert_array_equal(run(q[:1], k[:1], v[:1], start_B[:1]), got[:1])
    whole = run(q, k, v, np.array([3, 75 - T], np.int32))  # the last tile begins in the one before
    np.testing.assert_allclose(
        np.float32(whole), np.float32(plain(q, k, v, np.array([3, 75 - T], np.int32))), rtol, atol
    )
