"""The CPU's attention of packed rows against the softmax written out in float64, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cpu_attention


def packed_mask(rng, B, T):
    """Causal, in sequences that begin anywhere."""
    segment_BT = np.cumsum(rng.random((B, T)) < 0.05, axis=1)
    return (segment_BT[:, :, None] == segment_BT[:, None]) & np.tril(np.ones((T, T), bool))


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


@pytest.mark.parametrize("T", [1, 7, 40, 81, 160, 203])  # one block, whole ones, and a last one that is shorter
def test_values_and_gradients_are_those_of_the_softmax_written_out(T):
    rng = np.random.default_rng(T)
    B, K, G, C, V = 2, 2, 3, 8, 5
    q, k, v, d_out = (rng.normal(size=(B, K, *shape)) for shape in ((G, T, C), (T, C), (T, V), (G, T, V)))
    mask = packed_mask(rng, B, T)
    want = oracle(q, k, v, mask, 0.3, d_out)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]

    @jax.jit
    def run(q, k, v, d_out):
        out, pull = jax.vjp(lambda *args: cpu_attention.attend(*args, jnp.asarray(mask), 0.3), q, k, v)
        return out, *pull(d_out)

    for mine, theirs in zip(run(*arrays, jnp.asarray(d_out, jnp.float32)), want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def test_scores_above_the_diagonal_of_blocks_are_not_computed():
    shapes = (
        jax.ShapeDtypeStruct((1, 1, 1, 160, 8), jnp.float32),
        *[jax.ShapeDtypeStruct((1, 1, 160, 8), jnp.float32)] * 2,
    )
    mask = jnp.ones((1, 160, 160), bool)
    cost = jax.jit(lambda q, k, v: cpu_attention.attend(q, k, v, mask, 1.0)).lower(*shapes).compile().cost_analysis()
    products = 2 * 2 * 160 * 160 * 8
    softmax = 10 * 160 * 160  # what XLA counts beside the products, at most
    assert cost["flops"] < 0.63 * (products + softmax)
