"""The data type whose products are fastest on this CPU: measured once, and kept in the user's cache.

Versions of XLA differ: with jax 0.10 products of bfloat16 take three times as long as those of float32, with 0.12 less. `fastest`
times products of 1 and of 64 rows with weights that no core's cache holds, in the form in which a server keeps them.
"""

import contextlib
import functools
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from models.kernels import cpu_transposed
from sharding.mesh import programs
from sharding.system import atomic_file

DTYPES = "float32", "bfloat16"
ROWS = 1, 64
SHAPES = ((576, 1536), (1536, 576), (576, 16384))  # inputs and outputs, of a small real model
COPIES = 6
REPEATS = 5


@functools.cache
def fastest() -> tuple[str, str]:
    """Returns (dtype, a line with the times that decided), for this process's CPU. Takes about a second the first time."""
    name = f"dtype-jax-{jax.__version__}-cores-{os.cpu_count()}.json"
    try:
        stored = atomic_file.read_json(programs.user_folder() / name, dict)
        times = {dtype: [float(ms) for ms in stored[dtype]] for dtype in DTYPES}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        times = {dtype: _milliseconds(dtype) for dtype in DTYPES}
        with contextlib.suppress(OSError, RuntimeError):  # then it is measured again at the next start
            (folder := programs.user_folder()).mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_file.write(folder / name, json.dumps(times).encode())
    # One row decides for a chat, many for a batch: both count alike.
    chosen = min(DTYPES, key=lambda dtype: np.prod(times[dtype]))
    parts = []
    for dtype in DTYPES:
        by_rows = zip(ROWS, times[dtype], strict=True)
        parts.append(f"{dtype} " + ", ".join(f"{rows} row{'s' * (rows > 1)} {ms:.1f} ms" for rows, ms in by_rows))
    return chosen, f"dtype {chosen}, the faster on this CPU ({'; '.join(parts)})"


def _milliseconds(dtype: str) -> list[float]:
    """Returns the shortest time of the products of all shapes, by the number of rows."""
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        kernels = [cpu_transposed.transpose(jnp.full(shape, 1e-3, dtype), 1) for shape in SHAPES for _ in range(COPIES)]

        @jax.jit
        def products(x, kernels):
            return sum(kernel.rows(x[..., : kernel.in_shape[0]], jnp.float32).max() for kernel in kernels)

        found = []
        for rows in ROWS:
            x = jnp.full((1, rows, max(size for size, _ in SHAPES)), 0.5, dtype)
            products(x, kernels).block_until_ready()
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                products(x, kernels).block_until_ready()
                times.append((time.perf_counter() - start) * 1000)
            found.append(min(times))
    return found
