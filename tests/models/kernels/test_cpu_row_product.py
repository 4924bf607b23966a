"""Products of few rows on a CPU: those of numpy in float64, from several threads, with NaN, under transformations, and from a cache.

`Pool` calls the code as XLA does, with a pool of threads whose tasks run when a test chooses.
"""

import concurrent.futures
import ctypes
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from llvmlite import binding

from models.kernels import cpu_row_product, cpu_transposed
from tests.support import cases

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


SHAPES = [(64, 1), (576, 2), (1536, 1), (1536, 3), (192, 8)]
PRODUCTS = [(*shape, kind) for shape in SHAPES for kind in cpu_row_product.BYTES]
FAST = [(64, 1, "float32"), (576, 2, "bfloat16"), (1536, 1, "int8"), (1536, 3, "int4"), (192, 8, "bfloat16")]


@pytest.mark.parametrize(("K", "rows", "kind"), cases.slow_but(PRODUCTS, *FAST, (64, 1, "int4"), (192, 8, "int8")))
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


INTEGERS = [(rows, quantization) for rows in (3, 9) for quantization in ("int8", "int4")]


@pytest.mark.parametrize(("rows", "quantization"), cases.slow_but(INTEGERS, (3, "int8"), (9, "int4")))
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


@pytest.mark.parametrize("quantization", cases.slow_but(["none", "int8", "int4"], "int4"))
def test_without_the_compiler_xla_multiplies(quantization, monkeypatch, caplog):
    """Products that are joined are those that are not, and integers give the same bits."""
    x = jnp.asarray(RNG.standard_normal((1, 3, 576)), "bfloat16")
    made = [
        cpu_transposed.transpose(jnp.asarray(RNG.standard_normal((576, N)), "bfloat16"), 1, quantization)
        for N in (768, 512)
    ]

    def program():
        return jax.jit(lambda x, made: cpu_transposed.products(x, made, jnp.float32))

    assert "intellax_rows" in program().lower(x, made).as_text()
    got = program()(x, made)
    monkeypatch.setattr(cpu_row_product, "binding", None)
    cpu_row_product._warn.cache_clear()
    assert "intellax_rows" not in program().lower(x, made).as_text()
    assert [record.levelno for record in caplog.records if "install -U llvmlite" in record.message] == [logging.WARNING]
    for ours, theirs in zip(got, program()(x, made), strict=True):
        tolerance = 1.5e-4 if quantization == "none" else 0  # 4e-7 of the sum of 576 magnitudes, of XLA's sums
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.slow
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


def test_other_sizes_are_left_to_xla():
    def fits(rows, shape, dtype="bfloat16", kind=None):
        return cpu_row_product.fits(rows, [jax.ShapeDtypeStruct(shape, dtype)], kind or dtype)

    assert fits(1, (1024, 64)) and fits(8, (1024, 64)) and fits(8, (2048, 64), "int8")
    assert fits(16, (4096, 32), "int8", "int4")
    assert not fits(0, (1024, 64)) and not fits(9, (1024, 64)) and not fits(9, (2048, 64), "int8")
    assert not fits(17, (4096, 32), "int8", "int4")
    assert not fits(1, (1024, 96)) and not fits(1, (4096, 96), "int8") and not fits(1, (4096, 48), "int8", "int4")
    assert not fits(1, (1023, 64)) and not fits(1, (4096, 0)) and not fits(1, (4096, 64), "float16")
    big, small = (jax.ShapeDtypeStruct((N, 64), "bfloat16") for N in (4096, 1))
    assert not cpu_row_product.fits(1, [big, small], "bfloat16")


def test_arrays_that_it_would_read_beyond_their_end_are_refused():
    x, weights = jnp.ones((2, 128), "int8"), jnp.ones((4, 128), "int8")
    bytes_NH, factors = jnp.ones((4, 64), "int8"), jnp.ones((4, 2, 2), "int8")
    cpu_row_product.product(x, [bytes_NH], "int4", [factors])
    for wrong in (
        (x[:, :64], [weights], "int8"),
        (x, [weights, weights[:, :64]], "int8"),
        (x[:, :96], [weights[:, :96]], "int8"),
        (x, [weights], "bfloat16"),
        (x, [weights], "int4", [factors]),
        (x, [bytes_NH], "int4"),
        (x, [bytes_NH], "int4", [factors[..., :1]]),
        (x, [bytes_NH, bytes_NH], "int4", [factors]),
    ):
        with pytest.raises(AssertionError):
            cpu_row_product.product(*wrong)


def test_matrices_of_different_kinds_are_multiplied_one_by_one():
    made = [
        cpu_transposed.transpose(jnp.asarray(RNG.standard_normal((576, 512)), dtype), 1, quantization)
        for dtype, quantization in (("float32", "none"), ("float32", "int8"), ("float32", "int4"), ("bfloat16", "none"))
    ]
    x = jnp.asarray(RNG.standard_normal((1, 2, 576)), "float32")
    for order in made[:3], made[2::-1]:
        for got, matrix in zip(cpu_transposed.products(x, order), order, strict=True):
            np.testing.assert_array_equal(got, matrix.rows(x))
    both = cpu_transposed.products(x.astype("bfloat16"), [made[3], made[1]])
    np.testing.assert_array_equal(both[0], made[3].rows(x.astype("bfloat16")))


def test_a_row_that_is_larger_than_a_chunk():
    K = cpu_row_product.CHUNK_BYTES // 2
    x, kernel = (RNG.integers(-3, 4, (rows, K)) for rows in (2, 5))
    got = cpu_row_product.product(jnp.asarray(x), [jnp.asarray(kernel, "float32")], "float32")
    np.testing.assert_array_equal(got, x @ kernel.T)  # integers below 2**24


def test_each_device_multiplies_its_part():
    mesh = jax.make_mesh((8,), ("n",))
    x, kernel = jnp.asarray(RNG.integers(-9, 10, (3, 192)), "float32"), RNG.integers(-9, 10, (4096, 192))
    split = jax.device_put(jnp.asarray(kernel, "float32"), jax.NamedSharding(mesh, P("n")))

    def product(x, kernel):
        return cpu_row_product.product(x, [kernel], "float32")

    mapped = jax.shard_map(product, mesh=mesh, in_specs=(P(), P("n")), out_specs=P(None, "n"), check_vma=False)
    for program in jax.jit(mapped), jax.jit(product):  # by hand, and by XLA's partitioner
        np.testing.assert_array_equal(program(x, split), np.asarray(x) @ kernel.T)


FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def words(*values):
    return (ctypes.c_uint64 * len(values))(*values)


def address(thing):
    return thing.ctypes.data if isinstance(thing, np.ndarray) else ctypes.cast(thing, ctypes.c_void_p).value or 0


class Pool:
    """Calls the code for products of float32 as XLA does, which hands tasks to `run`; `num_threads` None: there is no pool.

    Structs are those of jaxlib's include/xla/ffi/api/c_api.h, in words of 8 bytes. `jobs` and `freed` are addresses of its memory.
    """

    def __init__(self, num_rows, num_threads, run=None):
        self.num_threads, self.run, self.freed, self.jobs = num_threads, run, [], []
        code = cpu_row_product._code("float32", num_rows, 1)
        self.memory = [words(*[0] * 6) for _ in range(2)]  # of more than one job: none is used twice
        self.functions = list(map(FUNCTION, (self._schedule, self._count, self._malloc, self._free)))
        for name, function in zip(("malloc", "free"), self.functions[2:], strict=True):
            binding.add_symbol(f"{name}_{id(self)}", address(function))
            code = code.replace(f"@{name}(", f"@{name}_{id(self)}(")
        self.handler = cpu_row_product._compiled(code)

    def _schedule(self, request):
        task, job = (ctypes.c_uint64 * 5).from_address(request)[3:]
        self.run(lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(task)(job))

    def _count(self, request):
        if self.num_threads is None:
            return 1  # stands for an error
        ctypes.c_int64.from_address((ctypes.c_uint64 * 4).from_address(request)[3]).value = self.num_threads

    def _malloc(self, size):
        assert size == ctypes.sizeof(self.memory[0])
        self.jobs.append(address(self.memory[len(self.jobs)]))
        return self.jobs[-1]

    def _free(self, job):
        self.freed.append(job)

    def __call__(self, x, kernel, extension=0):
        out = np.full((len(x), len(kernel)), np.nan, "float32")
        arrays = x.astype("float32"), kernel.astype("float32"), out
        dims = [words(*array.shape) for array in arrays]
        buffers = [words(48, 0, 11, address(a), 2, address(d)) for a, d in zip(arrays, dims, strict=True)]
        args, results = words(*map(address, buffers[:2])), words(address(buffers[2]))
        api = words(*[0] * 17, *map(address, self.functions[:2]))
        frame = words(176, extension, address(api), 0, 3, 48, 0, 2, 0, address(args), 48, 0, 1, 0, address(results))
        assert self.handler(address(frame)) is None  # success
        for memory in api, args, results, *buffers, *dims, frame:  # XLA uses it for other things
            ctypes.memset(memory, 0xFF, ctypes.sizeof(memory))
        return out


PRODUCT = RNG.integers(-9, 10, (2, 192)), RNG.integers(-9, 10, (8000, 192))  # 6 MB: for several threads


def test_a_task_that_comes_late_or_immediately_or_never():
    x, kernel = PRODUCT
    late = []
    pool = Pool(2, 4, late.append)
    out = pool(x, kernel)
    np.testing.assert_array_equal(out, x @ kernel.T)
    assert len(late) == 3
    for task in late:
        assert not pool.freed
        task()
    np.testing.assert_array_equal(out, x @ kernel.T)
    assert len(pool.jobs) == 1 and pool.freed == pool.jobs
    for num_threads, run in (4, lambda task: task()), (1, None), (None, None):
        pool = Pool(2, num_threads, run)
        np.testing.assert_array_equal(pool(x, kernel), x @ kernel.T)
        assert pool.freed == pool.jobs


def test_tasks_that_run_at_the_same_time():
    x, kernel = PRODUCT
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for num_threads in 2, 8, 100:
            pool, tasks = Pool(2, num_threads), []
            pool.run = lambda task, tasks=tasks: tasks.append(threads.submit(task))
            np.testing.assert_array_equal(pool(x, kernel), x @ kernel.T)
            assert len(tasks) == min(num_threads, cpu_row_product.MAX_THREADS) - 1
            concurrent.futures.wait(tasks)
            assert pool.freed == pool.jobs
    few = Pool(2, 8)  # `run` is None: no task is worth its thread
    np.testing.assert_array_equal(few(x, kernel[:300]), x @ kernel[:300].T)


def test_it_names_its_version_of_the_interface_where_it_is_asked_for():
    pool, frame = Pool(1, None), words(176, 0, 0, 0)
    metadata = words(*[0] * 6)
    extension = words(32, 1, 0, address(metadata))
    frame[1] = address(extension)
    assert pool.handler(address(frame)) is None
    assert metadata[3] == cpu_row_product.API["MAJOR"] + (cpu_row_product.API["MINOR"] << 32)
    assert not any(metadata[:3]) and not any(metadata[4:])
    x, kernel = (matrix[:1] for matrix in PRODUCT)
    unknown = words(24, 7, 0)
    np.testing.assert_array_equal(pool(x, kernel, address(unknown)), x @ kernel.T)
