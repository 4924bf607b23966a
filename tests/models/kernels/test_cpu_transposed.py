"""Output-major kernels: the products of numpy in float64, the same bits for any number of rows, the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import weights
from models import config as config_lib
from models import layers, transformer
from models.kernels import cpu_integers, cpu_transposed, int8
from sharding.mesh import mesh as mesh_lib
from tests.support import cases, tiny

ONE = mesh_lib.create({}, devices=jax.local_devices()[:1])
RNG = np.random.default_rng(3)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def numbers(kernel):
    """Returns the numbers that a kernel's integers stand for, float64 [N, K], decoded by numpy."""
    if isinstance(kernel, int8.Quantized):
        return np.asarray(kernel.values, np.float64) * np.asarray(kernel.scale, np.float64)
    if isinstance(kernel, cpu_integers.Nibbles):
        packed, factors = np.asarray(kernel.bytes_NH), np.repeat(np.asarray(kernel.factors_N2G, np.float64), 32, axis=2)
        nibbles = (packed.astype(np.int32) % 16, packed.astype(np.int32) // 16 % 16)
        halves = [np.where(x > 7, x - 16, x) * factors[:, n] for n, x in enumerate(nibbles)]
        return np.concatenate(halves, axis=1) * np.asarray(kernel.scale, np.float64)
    return np.asarray(kernel, np.float64)


@pytest.mark.parametrize("quantization", config_lib.QUANTIZATIONS)
@pytest.mark.parametrize("num_in, num_out, rows", [(1, 1, (1, 1)), (1, 2, (5, 1)), (2, 1, (2, 3))])
def test_a_product_is_that_of_the_numbers_that_are_stored(num_in, num_out, rows, quantization):
    x, kernel = normal(*rows, *(64, 2)[:num_in]), normal(*(64, 2)[:num_in], *(5, 3)[:num_out])
    made = cpu_transposed.transpose(jnp.asarray(kernel), num_in, quantization)
    stored = numbers(made.kernel_NK)
    plain = kernel.reshape(x[0, 0].size, -1).T
    step = {"none": 0, "int8": 0.5 / 127, "int4": 1 / 8}[quantization] * np.abs(plain).max(axis=1, keepdims=True)
    assert (np.abs(stored - plain) <= 1.001 * step).all()
    expected = (x.reshape(-1, x[0, 0].size).astype(np.float64) @ stored.T).reshape(*rows, *kernel.shape[num_in:])
    got = jax.jit(layers.project)(jnp.asarray(x), made)
    # A product of integers rounds activations to multiples of at most 2 / 127 / 256 of a row's largest.
    bound = 0 if quantization == "none" else np.abs(x).max() * 2 / 127 / 256 * np.abs(stored).sum(axis=1).max()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 + bound)
    assert got.shape == expected.shape


def test_4_bits_of_groups_of_very_different_size():
    """Each group has at most the squared error of the nearest of 15 values, for a step that is rounded up to a fifteenth of the row's largest."""
    kernel = (normal(6, 128) * np.repeat([1, 1e-3, 0.2, 0], 32)).astype(np.float32)
    kernel[5] = 0
    groups_NGI = kernel.reshape(6, 4, 32).astype(np.float64)
    tops_NG1 = np.abs(groups_NGI).max(axis=2, keepdims=True)
    unit_N11 = np.maximum(tops_NG1.max(axis=1, keepdims=True) / 15 / 8, 1e-30)
    step_NG1 = np.clip(np.ceil(tops_NG1 / 8 / unit_N11 - 1e-3), 1, 15) * unit_N11
    nearest_NGI = np.clip(np.round(groups_NGI / step_NG1), -7, 7) * step_NG1
    stored_NGI = numbers(cpu_integers.to_nibbles(jnp.asarray(kernel))).reshape(6, 4, 32)
    errors = [np.square(x - groups_NGI).sum(axis=2) for x in (stored_NGI, nearest_NGI)]
    assert (errors[0] <= errors[1] * 1.001 + 1e-12).all() and errors[0].sum() < 0.95 * errors[1].sum()
    assert np.sqrt(errors[0][:5, 0].sum() / np.square(groups_NGI[:5, 0]).sum()) < 0.09  # llama.cpp's Q4_0: 0.084


def test_in_bfloat16_it_is_summed_in_float32():
    x, kernel = np.full((1, 1, 300), 1.0), np.full((300, 2), 1.0)
    kernel[0] = 256.0  # a sum in bfloat16 would stay there
    made = cpu_transposed.transpose(jnp.asarray(kernel, jnp.bfloat16), 1)
    got = layers.project(jnp.asarray(x, jnp.bfloat16), made)
    assert got.dtype == jnp.bfloat16 and (np.asarray(got, np.float32) == np.float32(jnp.bfloat16(555.0))).all()
    assert (made.rows(jnp.asarray(x, jnp.bfloat16), jnp.float32) == 555.0).all()


KINDS = [(dtype, quantization) for dtype in ("float32", "bfloat16") for quantization in config_lib.QUANTIZATIONS]


@pytest.mark.parametrize(("dtype", "quantization"), cases.slow_but(KINDS, ("float32", "none"), ("bfloat16", "int8")))
def test_no_bit_of_a_row_depends_on_the_number_of_rows_or_its_place(dtype, quantization):
    """Sizes of a real model: 576 inputs, and 1,536. Up to 8 rows of floats are summed in another order than more rows."""
    for K, N in (576, 1536), (1536, 576):
        kernel = jnp.asarray(normal(K, N) * K**-0.5, dtype)
        made = cpu_transposed.transpose(kernel, 1, quantization)
        x_1RK = jnp.asarray(normal(1, 70, K), dtype)
        whole = np.asarray(made.rows(x_1RK, jnp.float32))
        alone = np.concatenate([made.rows(x_1RK[:, n : n + 1], jnp.float32) for n in range(13)], axis=1)
        # 4e-7 of the sum of magnitudes, at most 25.
        np.testing.assert_allclose(alone, whole[:, :13], rtol=0, atol=1e-5 if quantization == "none" else 0)
        for rows in 1, 2, 3, 8, 16, 64:
            for start in 0, 5:
                part = slice(start, start + rows)
                got = np.asarray(made.rows(x_1RK[:, part], jnp.float32))
                expected = (alone if rows <= 8 else whole)[:, part]
                np.testing.assert_array_equal(got, expected, err_msg=f"{rows} rows from {start}")


def test_one_row_is_not_widened_in_memory():
    """The compiled program reads bfloat16 and integers where they are."""
    for quantization, dtype in ("none", "bf16"), ("int8", "s8"):
        made = cpu_transposed.transpose(jnp.zeros((576, 1536), jnp.bfloat16), 1, quantization)
        text = jax.jit(made.rows).lower(jnp.zeros((1, 1, 576), jnp.bfloat16)).compile().as_text() or ""
        assert f"{dtype}[1536,576]" in text
        assert not any(f"{wide}[1536,576]" in text for wide in ("f32", "s32")), text


BIASED = {"tie_embeddings": False, "ffn_bias": True, "qkv_bias": True}
WHOLE = [(changes, quantization) for changes in ({}, BIASED) for quantization in config_lib.QUANTIZATIONS]


@pytest.mark.parametrize(("changes", "quantization"), cases.slow_but(WHOLE, (BIASED, "int4")), ids=str)
def test_the_whole_model(changes, quantization):
    """The oracle is the model on plain arrays of the numbers that are stored."""
    config = tiny.model(model_dim=64, ffn_dim=128, **changes)
    params = jax.tree.map(lambda x: x + 0.1 * normal(*x.shape) if x.ndim == 1 else x, tiny.params(config, 2))
    store = weights.Store(config, ONE, quantization)
    made = store.load(params)

    def plain(leaf, like):
        if not isinstance(leaf, cpu_transposed.Transposed):
            return int8.dense(leaf, jnp.float32)
        matrix = numbers(leaf.kernel_NK)
        return jnp.asarray((matrix if leaf.is_embedding else matrix.T).reshape(like.shape), jnp.float32)

    is_leaf = lambda x: isinstance(x, cpu_transposed.Transposed | int8.Quantized)  # noqa: E731
    stored = jax.tree.map(plain, made, params, is_leaf=is_leaf)
    if quantization == "none":
        jax.tree.map(np.testing.assert_array_equal, cpu_transposed.views(made), params)
    tokens = jnp.asarray(RNG.integers(0, 256, (2, 9)))
    run = jax.jit(lambda p: transformer.logits(p, config, transformer.apply(p, config, tokens)[0]))
    got, expected = run(made), run(stored)
    assert got.dtype == jnp.float32
    tolerance = {"none": 2e-5}.get(quantization, 1e-3)  # of integers: the activations have 15 bits
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_4_bits_are_refused_elsewhere():
    with pytest.raises(ValueError, match="quantize = 'int4' is for a server on one CPU device.*choose int8"):
        weights.Store(tiny.model(scan_layers=True), ONE, "int4")
