"""Adapters next to each kind of base. Their gradients, and all families, are compared in tests/models/test_families.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import weights
from models import layers, lora, transformer
from models.kernels import adapted, cpu_transposed, int8
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import tiny

KINDS = {
    "array": lambda kernel: kernel,
    "transposed": lambda kernel: cpu_transposed.transpose(kernel, 1),
    "int8": lambda kernel: int8.quantize(kernel, (1, kernel.shape[1])),
}
MIXED = tiny.model(num_experts=4, experts_per_token=2, expert_ffn_dim=32, num_shared_experts=1, first_dense_layers=1)
CONFIG = lora.LoraConfig(rank=2, alpha=6.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_is_rounded_once(kind):
    """The base gives 257, which bfloat16 rounds to 256, and the adapter 0.9: to 257.9 the nearest is 258, and to 256.9 it is 256."""
    base, x = KINDS[kind](jnp.ones((257, 2), jnp.bfloat16)), jnp.ones((1, 3, 257), jnp.bfloat16)
    kernel = adapted.Adapted(base, jnp.full((257, 3), 0.1 / 257), jnp.ones((3, 2)), 3.0)
    assert (
        layers.project(x, base) == (258 if kind == "int8" else 256)
    ).all()  # of int8 the sum of integers is rounded, too
    got = layers.project(x, kernel)
    assert got.dtype == jnp.bfloat16 and (got == 258).all()
    assert adapted.dense(kernel.replace(base=jnp.ones((257, 2), jnp.bfloat16))).dtype == jnp.bfloat16


def model_with_adapters(model):
    drawn = tiny.drawn(lora.specs(transformer.specs(model), CONFIG), 4, 0.2)
    return jax.tree.map(jnp.asarray, (tiny.params(model, 1), drawn))


@functools.partial(jax.jit, static_argnums=0)
def run(model, params):
    tokens_BT = np.random.default_rng(0).integers(0, 272, (2, 12)).astype(np.int32)
    return transformer.logits(params, model, transformer.apply(params, model, tokens_BT)[0])


def logits(model, params):
    return np.asarray(run(model, params))


def test_next_to_int8_matrices():
    """The same model as with plain matrices of the same numbers, experts included."""
    params, drawn = model_with_adapters(MIXED)
    specs = int8.specs(transformer.specs(MIXED))
    make = lambda spec, x: int8.quantize(x, spec.scale.shape) if int8.is_quantized(spec) else x  # noqa: E731
    is_leaf = lambda x: rules.is_spec(x) or int8.is_quantized(x)  # noqa: E731
    quantized = jax.tree.map(make, specs, params, is_leaf=is_leaf)
    meant = jax.tree.map(lambda x: int8.dense(x, jnp.float32), quantized, is_leaf=int8.is_quantized)
    zeros = jax.tree.map(jnp.zeros_like, drawn)
    want, without = (logits(MIXED, lora.attach(meant, adapters, CONFIG)) for adapters in (drawn, zeros))
    got = logits(MIXED, lora.attach(quantized, drawn, CONFIG))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())  # float32, another order
    assert np.abs(want - without).max() > 0.1


@pytest.mark.slow  # fast tests compare a server, whose matrices are transposed (tests/inference/server/test_adapters.py)
def test_next_to_transposed_matrices():
    params, drawn = model_with_adapters(MIXED)
    attached = lora.attach(params, drawn, CONFIG)
    store = weights.Store(MIXED, mesh_lib.create({}, jax.devices()[:1]), lora=CONFIG)
    want = logits(MIXED, attached)
    transposed = store.load(jax.tree.map(np.asarray, lora.published(attached)))
    kernel = transposed["layers"]["000"]["mlp"]["down"]
    assert isinstance(kernel, adapted.Adapted) and isinstance(kernel.base, cpu_transposed.Transposed)
    np.testing.assert_allclose(logits(MIXED, transposed), want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_detach_is_the_inverse_of_attach():
    params, drawn = model_with_adapters(MIXED)
    for got, want in zip(lora.detach(lora.attach(params, drawn, CONFIG)), (params, drawn), strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert lora.detach(params)[1] == {}
