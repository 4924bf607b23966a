"""One query per sequence, as loops, against `attention.attend` and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import decode_attention
from models import attention


def arrays(K, G, C, dtype, B=3, S=20, V=None):
    rng = np.random.default_rng(K * G + C)
    q, k, v = (rng.standard_normal(shape) for shape in ((B, 1, K * G, C), (B, K, S, C), (B, K, S, V or C)))
    mask = rng.random((B, 1, S)) < 0.6
    mask[:, :, 3] = True
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(mask)


@pytest.mark.parametrize("how", [{}, {"scale": 0.3}, {"softcap": 2.0}], ids=["plain", "scale", "softcap"])
@pytest.mark.parametrize(("K", "G", "C", "V"), [(2, 2, 64, None), (1, 8, 24, 40), (3, 1, 5, None)])
def test_it_is_attention(K, G, C, V, how):
    q, k, v, mask = arrays(K, G, C, jnp.float32, V=V)
    got = jax.jit(lambda *x: decode_attention.attend(*x, **how))(q, k, v, mask)
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    for b in range(3):
        for h in range(K * G):
            scores = k64[b, h // G] @ q64[b, 0, h] * how.get("scale", C**-0.5)
            if cap := how.get("softcap"):
                scores = cap * np.tanh(scores / cap)
            weights = np.where(mask[b, 0], np.exp(scores), 0)
            expected = weights @ v64[b, h // G] / weights.sum()
            # float32 sums of 64 products and 20 weights, of order 1
            np.testing.assert_allclose(got[b, 0, h], expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("K", "G", "sinks"), [(2, 2, False), (1, 16, False), (2, 2, True)])
def test_bfloat16_and_what_is_left_to_attention(K, G, sinks):
    """More query heads than the loops are good for, and sinks, take `attention.attend` itself."""
    q, k, v, mask = arrays(K, G, 32, jnp.bfloat16)
    how = {"sinks_H": jnp.ones((K * G,))} if sinks else {}
    got = decode_attention.attend(q, k, v, mask, **how).astype(jnp.float32)
    expected = attention.attend(q, k, v, mask, **how).astype(jnp.float32)
    assert decode_attention.attend(q, k, v, mask, **how).dtype == jnp.bfloat16
    if sinks or G > decode_attention.MAX_QUERIES:
        np.testing.assert_array_equal(got, expected)
    else:  # the other rounds its weights to bfloat16 before the sum, 2^-9 of values near 1
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-2)
