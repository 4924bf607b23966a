"""The kernels for TPUs, interpreted on a CPU: the tiles against the mask, results and gradients against XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from models import attention
from models.kernels import attention_tiles, splash_attention
from tests.support import cases, packings


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(splash_attention, "BLOCK", 128)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("window", [0, 100])
def test_steps_are_the_tiles_that_are_read(window, branches):
    """20 packings of two rows. A window over branches may take a tile more; dq is read and stored in an order without conflicts."""
    rng, B, T, block = np.random.default_rng([window, branches]), 2, 512, 32
    N, columns = T // block, np.arange(T)

    @jax.jit
    def find(packing):
        reads = jax.vmap(functools.partial(attention_tiles.ranges, block=block, window=window))(packing)
        return [splash_attention.visits(reads, block, num_queries) for num_queries in (1, 2, 3)]

    for _ in range(20):
        packing = packings.rows(rng, B, T, branches=branches, longest=int(rng.choice([20, 150, T])))
        wanted = set()
        for b in range(B):
            row = jax.tree.map(lambda x, b=b: x[b], packing)
            mask = np.asarray(attention.readable(row, columns, row, columns, window))
            mask &= (row.segment_ids > 0) | (columns[:, None] // block == columns // block)
            tiles = mask.reshape(N, block, N, block).any(axis=(1, 3))
            wanted |= {(b * N + query, b * N + key) for query, key in zip(*np.nonzero(tiles), strict=True)}
        for num_queries, lists in enumerate(jax.device_get(find(packing)), start=1):
            forward, steps = (splash_attention.Steps(packed[:count]) for count, packed in lists)
            query, key = steps.query(...), steps.key(...)
            for found in [list(zip(one.query(...), one.key(...), strict=True)) for one in (forward, steps)]:
                assert len(set(found)) == len(found)
                assert set(found) >= wanted if window and branches else set(found) == wanted
            assert (np.diff(forward.query(...)) >= 0).all() and (np.diff(key) >= 0).all()
            order = [(block, head) for block in query for head in range(num_queries)]  # of the blocks of dq
            stored, busy = (np.repeat(flags, num_queries) for flags in (steps.is_stored(...), steps.is_busy(...)))
            before = {}
            for at, one in enumerate(order):
                assert stored[at] == (one in before)
                assert busy[at] == (at - before.get(one, -3) <= 2)
                before[one] = at


def test_rows_of_65536_tokens_are_lowered_without_their_mask():
    """The program for a TPU has two kernels, forward and backward, of all rows at a time, and no array of T x T."""
    q, k = (jax.ShapeDtypeStruct((2, 32768, heads, 128), jnp.bfloat16) for heads in (2, 1))
    ids = jax.ShapeDtypeStruct((2, 32768), jnp.int32)

    def total(q, k, v, *packing):
        return splash_attention.attend(q, k, v, attention.Packing(*packing), scale=0.1).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(q, k, k, ids, ids, ids)
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("tpu_custom_call") == 2 and "32768x32768" not in program and "65536x65536" not in program
    assert not any("while" in line and "x128xbf16" in line for line in program.splitlines())


CASES = {
    "plain": {},
    "trees": {"branches": True},
    "trees and a window": {"branches": True, "window": 70},
    "a window and sinks": {"window": 70, "sinks": True, "heads": (4, 4)},
    "one key head": {"heads": (4, 1)},
    "16 queries of a key head, sinks": {"heads": (16, 1), "branches": True, "sinks": True},
    "values of other dims": {"heads": (3, 3), "dims": (24, 16), "branches": True},
    "all": {"branches": True, "window": 70, "sinks": True, "dims": (24, 16)},
}


def check(case: str, seeds, rows: int, tokens: int, interpret, dtype=np.float32, tolerances=(1e-5, 5e-5)):
    """Compares results and gradients with those of XLA in float32, on a packing of each seed; the second tolerance is of gradients."""
    options = dict(CASES[case])
    (H, K), (C, V) = options.pop("heads", (4, 2)), options.pop("dims", (16, 16))
    branches, sunk = options.pop("branches", False), options.pop("sinks", False)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend, packing, cotangent, q, k, v, *sinks):
        out, pull = jax.vjp(lambda q, k, v, sinks_H=None: attend(q, k, v, packing, sinks_H=sinks_H), q, k, v, *sinks)
        return jnp.where(packing.segment_ids[..., None, None] > 0, out, 0), pull(cotangent.astype(out.dtype))

    ours = functools.partial(splash_attention.attend, scale=0.3, interpret=interpret, **options)
    xla = functools.partial(attention.attend_packed, implementation="xla", scale=0.3, **options)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        packing = packings.rows(rng, rows, tokens, branches=branches, longest=int(rng.choice([60, 250])))
        shapes = [(rows, tokens, *rest) for rest in ((H, V), (H, C), (K, C), (K, V))]
        cotangent, *qkv = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        sinks = [rng.standard_normal(H).astype(np.float32)] if sunk else []
        cotangent *= (packing.segment_ids > 0)[..., None, None]
        got = run(ours, packing, cotangent, *(x.astype(dtype) for x in qkv), *sinks)
        want = run(xla, packing, cotangent, *qkv, *sinks)
        for tolerance, ours_, theirs in zip(tolerances, got, want, strict=True):
            compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=tolerance, err_msg=f"seed {seed}")
            jax.tree.map(lambda a, b, compare=compare: compare(np.asarray(a, np.float32), b), ours_, theirs)


@pytest.mark.parametrize("case", cases.slow_but(CASES, "all"))
def test_results_and_gradients_are_those_of_xla(case):
    """Eight packings of two rows of three blocks, in float32."""
    check(case, range(8), 2, 384, True)


@pytest.mark.parametrize(("limit", "value"), cases.slow_but([("LONGEST", 256), ("MAX_BLOCKS", 4)], ("LONGEST", 256)))
def test_rows_with_too_many_tiles_for_one_list_are_run_in_parts(monkeypatch, limit, value):
    """Three rows of two blocks: row by row, and one row and then two."""
    monkeypatch.setattr(splash_attention, limit, value)
    check("trees and a window", range(2), 3, 256, True)


def test_results_in_bfloat16_are_near_those_in_float32():
    # Values and gradients are of the order of 1 to 10; bfloat16 has 8 bits.
    check("trees", range(8), 2, 384, True, jnp.bfloat16, (0.05, 0.25))


@pytest.mark.parametrize(
    ("case", "number"), cases.slow_but([(case, number) for case in CASES for number in (1, 71)], ("trees", 1))
)
def test_a_core_that_copies_while_it_computes_races_with_no_copy(case, number):
    """JAX's simulation of a TPU: memories, copies that take time, and a detector of races. All cases have 576 packings."""
    tokens = 256 if number == 1 or case.startswith("16 queries") else 384  # a step of each head takes a second
    check(case, range(number, 2 * number), 1, tokens, pltpu.InterpretParams(detect_races=True))
    assert not interpret_pallas_call.races.races_found
