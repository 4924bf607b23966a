"""Kernels by output: the products of numpy in float64, the same tokens from an engine, and no copy that is of other weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import cpu_weights, weights
from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from models import layers, transformer
from models.kernels import cpu_transposed, int8
from models.text import tokenizer as tokenizer_lib
from sharding import mesh as mesh_lib
from tests.support import tiny

MODEL = tiny.model()
RNG = np.random.default_rng(3)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def transposed(module, params):
    tree = {"embed": normal(7, 4), "layers": {"000": {module: params}}}
    return cpu_transposed.transpose(tree)["layers"]["000"][module]


@pytest.mark.parametrize("num_in, num_out", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("rows", [(1, 1), (5, 1), (2, 3)])
def test_a_transposed_kernel_gives_the_same_product(num_in, num_out, rows):
    x, kernel = normal(*rows, *(4, 6)[:num_in]), normal(*(4, 6)[:num_in], *(5, 3)[:num_out])
    expected = np.tensordot(x.astype(np.float64), kernel.astype(np.float64), num_in)
    name = "o" if num_in == 2 else "q"
    made = transposed("attn", {name: jnp.asarray(kernel)})[name]
    assert isinstance(made, cpu_transposed.Transposed)
    assert made.kernel_NK.shape == (kernel[(0,) * num_in].size, x[0, 0].size)
    got = jax.jit(layers.project)(jnp.asarray(x), made)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert got.shape == expected.shape


def test_in_bfloat16_it_is_summed_in_float32():
    x, kernel = np.full((1, 1, 300), 1.0), np.full((300, 2), 1.0)
    kernel[0] = 256.0  # a sum in bfloat16 would stay there
    made = transposed("mlp", {"up": jnp.asarray(kernel, jnp.bfloat16)})["up"]
    got = layers.project(jnp.asarray(x, jnp.bfloat16), made)
    assert got.dtype == jnp.bfloat16 and (np.asarray(got, np.float32) == np.float32(jnp.bfloat16(555.0))).all()
    assert (made.rows(jnp.asarray(x, jnp.bfloat16), jnp.float32) == 555.0).all()


@pytest.mark.parametrize("activation, bias", [("silu", False), ("silu", True), ("gelu", True)])
def test_a_ffn_by_columns(activation, bias):
    config = tiny.model(activation=activation, ffn_bias=bias)
    params = tiny.params(config, 1)["layers"]["000"]["mlp"]
    params = {name: param + normal(*param.shape) if "bias" in name else param for name, param in params.items()}
    assert ("up_bias" in params) == bias
    x = jnp.asarray(normal(3, 2, config.model_dim))
    got = layers.ffn(x, transposed("mlp", jax.tree.map(jnp.asarray, params)), config)
    np.testing.assert_allclose(got, layers.ffn(x, params, config), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_tree(tied):
    config = tiny.model(tie_embeddings=tied)
    params = jax.tree.map(jnp.asarray, tiny.params(config, 2))
    made = cpu_transposed.transpose(params)
    assert made["embed"] is params["embed"] and made["final_norm"] is params["final_norm"]
    assert (made["lm_head"].kernel_NK is params["embed"]) == tied
    assert sorted(made["layers"]["001"]["mlp"]) == sorted(params["layers"]["001"]["mlp"])
    assert made["layers"]["000"]["attn"]["q_norm"] is params["layers"]["000"]["attn"]["q_norm"]
    tokens = jnp.asarray(RNG.integers(0, 256, (2, 9)))
    of = [transformer.logits(p, config, transformer.apply(p, config, tokens)[0]) for p in (params, made)]
    assert of[1].dtype == jnp.float32
    np.testing.assert_allclose(of[1], of[0], rtol=1e-4, atol=1e-4)


@pytest.fixture
def calls(monkeypatch):
    """Returns the number of times that weights were transposed."""
    seen, real = [], cpu_transposed.transpose
    monkeypatch.setattr(cpu_transposed, "transpose", lambda params: seen.append(params) or real(params))
    return seen


def test_a_copy_is_kept_until_any_of_the_weights_is_another(calls):
    params = jax.tree.map(jnp.asarray, tiny.params(MODEL, 3))
    keeper = cpu_weights.TransposedWeights(MODEL)
    first = keeper.of(params)
    assert keeper.of(dict(params)) is first and len(calls) == 1
    attn = params["layers"]["001"]["attn"] | {"v": params["layers"]["001"]["attn"]["v"] + 1}
    changed = params | {"layers": params["layers"] | {"001": params["layers"]["001"] | {"attn": attn}}}
    made = keeper.of(changed)
    assert len(calls) == 2
    v = made["layers"]["001"]["attn"]["v"].kernel_NK
    np.testing.assert_array_equal(v, np.asarray(attn["v"]).reshape(MODEL.model_dim, -1).T)


def test_who_decodes_with_the_weights_as_they_are(calls, monkeypatch):
    params = jax.tree.map(jnp.asarray, tiny.params(MODEL, 3))
    store = weights.Store(MODEL, mesh_lib.create({}, devices=jax.local_devices()[:1]), "int8")
    integers = store.load(tiny.params(MODEL, 3))
    assert isinstance(integers["embed"], int8.Quantized)
    assert cpu_weights.TransposedWeights(MODEL).of(integers) is integers
    stacked = tiny.model(scan_layers=True)
    assert cpu_weights.TransposedWeights(stacked).of(params) is params
    monkeypatch.setattr(cpu_weights, "MAX_BYTES", 1000)
    assert cpu_weights.TransposedWeights(MODEL).of(params) is params
    assert not calls


def test_an_engine_decodes_by_them_and_by_new_ones_after_a_swap(calls, monkeypatch):
    """The oracle is an engine that decodes with the weights as they are."""
    params = [jax.tree.map(jnp.asarray, tiny.params(MODEL, seed)) for seed in (4, 5)]
    config = engine_lib.EngineConfig(num_slots=2, max_model_len=64, prefill_batch=2, steps_per_call=4)

    def run():
        made = engine_lib.Engine(MODEL, config, tokenizer_lib.byte_chatml(), params[0])
        scheduler = scheduler_lib.Scheduler(made, params[0], 0)
        request = scheduler_lib.GenerateRequest(tuple(b"turned"), max_tokens=30, seed=1)
        before = scheduler.submit(request).result(60)[0]
        scheduler.update(params[1], 1).result(60)
        after = scheduler.submit(dataclasses.replace(request, seed=2)).result(60)[0]
        scheduler.close()
        return before, after

    got = run()
    assert len(calls) == 2
    monkeypatch.setattr(cpu_weights, "MAX_BYTES", 0)
    for transposed_one, plain in zip(got, run(), strict=True):
        assert transposed_one.tokens == plain.tokens
        np.testing.assert_allclose(transposed_one.logprobs, plain.logprobs, rtol=1e-4, atol=1e-5)
    assert got[0].tokens != got[1].tokens and len(calls) == 2
