"""Products of few rows on a CPU: those of numpy in float64, from several threads, with NaN, under transformations, and from a cache."""

import concurrent.futures
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.kernels import cpu_row_product, cpu_transposed

RNG = np.random.default_rng(5)
SIZES = 2048, 1, 77  # output channels of three matrices
FLOATS = "float32", "bfloat16"


def matrices(kind, K):
    """Returns (weights, factors, the numbers that they stand for), of three matrices."""
    if kind == "int4":
        packed = [RNG.integers(-128, 128, (N, K // 2)) for N in SIZES]
        factors = [RNG.integers(-15, 16, (N, 2, K // 64)) for N in SIZES]
        nibbles = [np.stack([(x + 8) % 16 - 8, x // 16], axis=1).reshape(len(x), 2, -1, 32) for x in packed]
        numbers = [(x * f[..., None]).reshape(len(x), K) for x, f in zip(nibbles, factors, strict=True)]
        arrays = ([jnp.asarray(x, "int8") for x in parts] for parts in (packed, factors))
        return *arrays, np.concatenate(numbers).astype(np.float64)
    numbers = np.concatenate([RNG.integers(-127, 128, (N, K)) for N in SIZES]).astype(np.float64)
    weights = np.split(numbers, np.cumsum(SIZES)[:-1])
    return [jnp.asarray(x, kind) for x in weights], [], numbers


@pytest.mark.parametrize("kind", cpu_row_product.BYTES)
@pytest.mark.parametrize("K, rows", [(64, 1), (576, 2), (1536, 1), (1536, 3), (192, 8)])
def test_it_is_the_product_of_numpy_in_float64(K, rows, kind):
    weights, factors, numbers = matrices(kind, K)
    x = RNG.integers(-127, 128, (rows, K))
    got = jax.jit(lambda *args: cpu_row_product.product(args[0], args[1], kind, args[2]))(
        jnp.asarray(x, "int8"), weights, factors
    )
    expected = x.astype(np.float64) @ numbers.T
    assert got.shape == expected.shape and got.dtype == (jnp.float32 if kind in FLOATS else jnp.int32)
    # Sums of float32: an ulp of the sum of magnitudes for every 100 terms, here at most 32 * 127^2 * K / 100.
    np.testing.assert_allclose(got, expected, rtol=0, atol=np.abs(expected).max() * 3e-7 * (kind in FLOATS))


def test_a_number_that_is_not_finite_stays_in_its_row_and_channel():
    kernel, x = RNG.standard_normal((1024, 192)), RNG.standard_normal((2, 192))
    kernel[3, 17], kernel[900, 0], x[1, 5] = np.nan, np.inf, np.inf
    got = np.asarray(cpu_row_product.product(jnp.asarray(x, "bfloat16"), [jnp.asarray(kernel, "bfloat16")], "bfloat16"))
    assert (
        np.argwhere(~np.isfinite(got[0])).ravel().tolist() == [3, 900] and np.isnan(got[0, 3]) and np.isinf(got[0, 900])
    )
    assert not np.isfinite(got[1]).any()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("rows", [3, 9])
def test_a_row_that_is_not_finite_is_none_after_a_product_of_integers(rows, quantization):
    """Broken weights would show as finite logits. 3 rows are multiplied by LLVM's code, 9 by XLA."""
    made = cpu_transposed.transpose(jnp.asarray(RNG.standard_normal((576, 512)), "float32"), 1, quantization)
    x = RNG.standard_normal((1, rows, 576)).astype("float32")
    expected = np.asarray(made.rows(jnp.asarray(x)))
    x[0, 0, 17], x[0, 1, 0] = np.nan, -np.inf
    got = np.asarray(made.rows(jnp.asarray(x)))
    assert np.isnan(got[0, :2]).all()
    np.testing.assert_array_equal(got[0, 2:], expected[0, 2:])


def test_many_threads_get_what_one_gets_in_loops_and_maps_too():
    """More callers than cores, each with products that several threads compute."""
    kernel = jnp.asarray(RNG.standard_normal((3000, 576)), "bfloat16")
    rows = jnp.asarray(RNG.standard_normal((40, 1, 576)), "bfloat16")

    def product(x):
        return cpu_row_product.product(x, [kernel], "bfloat16")

    expected = np.concatenate([np.asarray(product(x)) for x in rows])
    scanned = jax.jit(lambda rows: jax.lax.scan(lambda _, x: (0, product(x)), 0, rows)[1][:, 0])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got in pool.map(scanned, [rows] * 16):
            np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(jax.vmap(product)(rows)[:, 0], expected)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_without_the_compiler_xla_multiplies(quantization, monkeypatch):
    """Products that are joined are those that are not, and integers give the same bits."""
    x = jnp.asarray(RNG.standard_normal((1, 3, 576)), "bfloat16")
    made = [
        cpu_transposed.transpose(jnp.asarray(RNG.standard_normal((576, N)), "bfloat16"), 1, quantization)
        for N in (768, 512)
    ]
    program = jax.jit(lambda x, made: cpu_transposed.products(x, made, jnp.float32))
    assert "intellax_rows" in program.lower(x, made).as_text()
    got = program(x, made)
    monkeypatch.setattr(cpu_row_product, "binding", None)
    jax.clear_caches()
    assert "intellax_rows" not in program.lower(x, made).as_text()
    for ours, theirs in zip(got, program(x, made), strict=True):
        tolerance = 1.5e-4 if quantization == "none" else 0  # 4e-7 of the sum of 576 magnitudes, of XLA's sums
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


def test_a_compiled_program_of_the_cache_finds_its_code_in_another_process(tmp_path):
    code = f"""
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from models.kernels import cpu_row_product
program = jax.jit(lambda x, w: cpu_row_product.product(x, [w], "float32"))
print(program(jnp.ones((1, 576)), jnp.ones((512, 576)))[0, 511])
"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "576.0", done.stderr
    assert len([path for path in tmp_path.iterdir() if "cache" in path.name and "lambda" in path.name]) == 1
