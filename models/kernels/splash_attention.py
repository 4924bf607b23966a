"""Causal attention of packed rows on a TPU (splash: sparse flash attention), by kernels whose grid steps are the tiles that are read.

1. `visits` lists, on the device, the tiles of queries and keys that a row reads: sequences, shared prompts, and windows. The kernels
   have one grid step for each tile, so their grid is dynamic, and they do no work for other sequences.
2. The forward kernel goes over the tiles of a block of queries, and accumulates the softmax (arXiv 2205.14135).
3. The backward kernel goes over the tiles of a block of keys and computes the scores once for all three gradients: five products a
   tile, where two kernels, for dq and for dk and dv, have seven. dk and dv are summed in the memory of the core. dq is summed in
   the memory of the chip: its block is loaded while the tile before is worked on, and stored while the next one is.

Letters: B rows, T tokens, N = B T, H query heads, K key heads, G = H / K, C head dim, V value dim, Q queries of a block, S its keys,
L steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels import attention_tiles

BLOCK = 512  # queries and keys of a tile; a multiple of 128
LONGEST = 2**18  # tokens of a row, whose steps take half of the memory of scalars
MAX_BLOCKS = 2**14  # that the numbers of `Steps` can name
LANES = 128  # of a vector register
BUFFERS = 3  # blocks of dq: one is loaded, one summed, one stored
BRANCH, SEQUENCE, SHARED, POSITION = range(4)  # of `marks`


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The options of attention and the size of a tile; static under jit."""

    window: int
    has_branches: bool
    block: int
    interpret: Any

    def readable(self, query, key, query_marks: Sequence, key_marks: Sequence, query_dim: int):
        """Returns the mask of a tile, whose queries are in dim `query_dim`, from the numbers of its blocks and `marks`."""
        columns = (
            jax.lax.broadcasted_iota(jnp.int32, (self.block, self.block), dim) for dim in (query_dim, 1 - query_dim)
        )
        mask = query_marks[BRANCH] == key_marks[BRANCH]
        if self.has_branches:
            mask |= query_marks[SEQUENCE] == key_marks[SHARED]
        if self.window:
            mask &= query_marks[POSITION] - key_marks[POSITION] < self.window
        return mask & (next(columns) - next(columns) >= (key - query) * self.block)

    def call(self, kernel: Callable, grid: tuple, in_specs, out_specs, out_shape, scratch):
        """Returns the function of a list of `visits` and of arrays that runs a kernel; the cores of a chip share its heads."""
        spec = pltpu.PrefetchScalarGridSpec(1, grid, in_specs, out_specs, scratch_shapes=scratch)
        order: Any = ("parallel", *["arbitrary"] * (len(grid) - 1))
        params = pltpu.CompilerParams(dimension_semantics=order)
        options = {"compiler_params": params, "interpret": self.interpret, "name": kernel.__name__}
        return pl.pallas_call(kernel, out_shape, grid_spec=spec, **options)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a kernel: in each number, 14 bits for the block of queries, 14 for that of keys, and two flags."""

    packed: Any  # int32 [L], as an array or as a kernel's reference

    @classmethod
    def of(cls, query_L, key_L, is_stored_L: Any = 0, is_busy_L: Any = 0) -> "Steps":
        """Returns the list of these blocks and flags."""
        return cls(query_L << 16 | key_L << 2 | is_stored_L << 1 | is_busy_L)

    def query(self, at):
        """Returns the block of queries of a step, or of several."""
        return self.packed[at] >> 16

    def key(self, at):
        """Returns the block of keys."""
        return self.packed[at] >> 2 & MAX_BLOCKS - 1

    def is_stored(self, at):
        """Returns True where an earlier step has stored a part of dq for the step's block of queries."""
        return self.packed[at] & 2 != 0

    def is_busy(self, at):
        """Returns True where one of the two steps before, of any head, may still be storing dq of the step's block of queries."""
        return self.packed[at] & 1 != 0


def attend(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKV: jax.Array,
    packing: Any,
    *,
    scale: float,
    window: int = 0,
    sinks_H: jax.Array | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Returns attention inside each sequence of packed rows, [B, T, H, V]; models/attention.py explains the options.

    T is a multiple of 128. `packing` has arrays [B, T]: `positions`, `segment_ids`, `branch_ids` (or None). A sequence has
    consecutive columns: its shared prompt, then its branches one by one. Results of padding are finite. `interpret` runs the
    kernels on a CPU: True, or an instance of `pltpu.InterpretParams`, which simulates copies, too.
    """
    B, T, H, _ = q_BTHC.shape
    block = block_of(T)
    if B > 1 and (_num_steps(B, T // block) > _num_steps(1, LONGEST // BLOCK) or B * T // block > MAX_BLOCKS):
        how = {"scale": scale, "window": window, "sinks_H": sinks_H, "interpret": interpret}
        halves = (
            jax.tree.map(lambda x, half=half: x[half], (q_BTHC, k_BTKC, v_BTKV, packing))
            for half in (slice(B // 2), slice(B // 2, None))
        )
        return jnp.concatenate([attend(*half, **how) for half in halves])
    rule = _Rule(window, packing.branch_ids is not None, block, interpret)
    reads_BN = jax.vmap(functools.partial(attention_tiles.ranges, block=block, window=window))(packing)
    heads_first = (x.reshape(B * T, *x.shape[2:]).swapaxes(0, 1) for x in (q_BTHC * scale, k_BTKC, v_BTKV))
    sinks_H = None if sinks_H is None else sinks_H.astype(jnp.float32)
    out_HNV: Any = _attend(rule, *heads_first, sinks_H, marks(packing), visits(reads_BN, block, H // k_BTKC.shape[2]))
    return out_HNV.swapaxes(0, 1).reshape(B, T, H, -1)


def block_of(row_length: int) -> int:
    """Returns the number of queries and keys of a tile in rows of `row_length` tokens: the whole row if 128 does not divide it."""
    return next((size for size in (BLOCK, 256, 128) if row_length % size == 0), row_length)


def marks(packing: Any) -> jax.Array:
    """Returns int32 [4, N], four marks of each token: its branch, its sequence, its sequence again if it is in the shared prompt (else -1), its position.

    A query reads a key of the same branch (mark 0), and a key whose mark 2 is the query's mark 1.
    """
    segments_BT, branches_BT = packing.segment_ids, packing.branch_ids
    B, T = segments_BT.shape
    if branches_BT is None:
        branches_BT = jnp.zeros_like(segments_BT)
    columns_BT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)

    begins_BT = attention_tiles.changes(segments_BT)
    sequence_BT = attention_tiles.starts(begins_BT, columns_BT)
    branch_BT = attention_tiles.starts(begins_BT | attention_tiles.changes(branches_BT), columns_BT)
    shared_BT = jnp.where(branches_BT == 0, sequence_BT, -1)
    return jnp.stack([branch_BT, sequence_BT, shared_BT, packing.positions.astype(jnp.int32)]).reshape(4, B * T)


def _num_steps(B: int, N: int) -> int:
    return B * N * (N + 1) // 2


def visits(reads_BN: tuple[jax.Array, ...], block: int, num_queries: int) -> tuple[tuple, tuple]:
    """Returns the steps of the forward and of the backward kernel, from `attention_tiles.ranges` of each row.

    Each is (number of steps, int32 [L] of `Steps`), of which only the first so many are run. Forward steps are in order of the blocks
    of queries. Backward steps are in order of the blocks of keys, for `num_queries` query heads of each key head.
    """
    first_BN, prompt_end_BN, branch_BN, last_BN, *_ = reads_BN
    B, N = first_BN.shape
    own_N, row_B1 = jnp.arange(B * N, dtype=jnp.int32), N * jnp.arange(B, dtype=jnp.int32)[:, None]
    length = _num_steps(B, N)

    def blocks(columns_BN, up=0):
        return ((columns_BN + up * (block - 1)) // block + row_B1).reshape(-1)

    def steps(begin, end):  # of consecutive ranges: the range of each step, its offset in it, and the number of steps
        size = jnp.maximum(end - begin, 0)
        total, step_L = jnp.cumsum(size), jnp.arange(length, dtype=jnp.int32)
        of_L = jnp.minimum(jnp.searchsorted(total, step_L, side="right"), len(size) - 1).astype(jnp.int32)
        return of_L, step_L - (total - size)[of_L], total[-1]

    begin = jnp.stack([blocks(first_BN), branch := blocks(branch_BN)], axis=1).reshape(-1)
    end = jnp.stack([jnp.minimum(blocks(prompt_end_BN, up=1), branch), own_N + 1], axis=1).reshape(-1)
    of_L, offset_L, count = steps(begin, end)
    forward = count, Steps.of(of_L // 2, begin[of_L] + offset_L).packed

    end = blocks(last_BN, up=1)
    key_L, offset_L, count = steps(own_N, end)
    query_L = end[key_L] - 1 - offset_L  # descending, so that a block of queries returns as late as possible
    earliest_N = jnp.searchsorted(jax.lax.cummax(end), own_N, side="right")
    is_stored_L = key_L > earliest_N[query_L]
    is_busy_L = jnp.zeros(length, bool)
    for distance in {n // num_queries for n in range(1, BUFFERS) if n % num_queries == 0}:
        is_busy_L |= is_stored_L & (query_L == jnp.roll(query_L, distance)) & (jnp.arange(length) >= distance)
    flags = (x_L.astype(jnp.int32) for x_L in (is_stored_L, is_busy_L))
    return forward, (count, Steps.of(query_L, key_L, *flags).packed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: _Rule, *args) -> jax.Array:
    return _forward(rule, *args)[0]


@functools.partial(jax.jit, static_argnums=0)  # lowered once for all layers
def _forward(rule: _Rule, q_HNC, k_KNC, v_KNV, sinks_H, marks_4N, lists):
    (H, N, C), (K, _, V), block = q_HNC.shape, v_KNV.shape, rule.block
    count, packed = lists[0]

    def splash_forward(
        steps_ref, q_ref, k_ref, v_ref, queries_ref, keys_ref, sinks_ref, out_ref, norm_ref, top_ref, total_ref, sum_ref
    ):  # fmt: skip
        h, step, steps = pl.program_id(0), pl.program_id(1), Steps(steps_ref)
        query, is_first, is_last = _run(steps.query, step)

        @pl.when(is_first)
        def _():
            sink = attention_tiles.MASKED if sinks_H is None else sinks_ref[h]
            top_ref[...] = jnp.full(top_ref.shape, sink, jnp.float32)
            total_ref[...] = jnp.full(total_ref.shape, 0.0 if sinks_H is None else 1.0, jnp.float32)
            sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

        scores_QS = attention_tiles.dot(q_ref[0], k_ref[0], 1, 1)
        queries, keys = [queries_ref[:, n : n + 1] for n in range(4)], [keys_ref[n : n + 1] for n in range(4)]
        scores_QS = jnp.where(
            rule.readable(query, steps.key(step), queries, keys, 0), scores_QS, attention_tiles.MASKED
        )
        top_Q1 = top_ref[:, :1]
        new_top_Q1 = jnp.maximum(top_Q1, scores_QS.max(axis=1, keepdims=True))
        weights_QS, down_Q1 = jnp.exp(scores_QS - new_top_Q1), jnp.exp(top_Q1 - new_top_Q1)
        total_Q1 = total_ref[:, :1] * down_Q1 + weights_QS.sum(axis=1, keepdims=True)
        sum_ref[...] = sum_ref[...] * down_Q1 + attention_tiles.dot(weights_QS.astype(v_ref.dtype), v_ref[0], 1, 0)
        top_ref[...], total_ref[...] = (jnp.broadcast_to(x_Q1, top_ref.shape) for x_Q1 in (new_top_Q1, total_Q1))

        @pl.when(is_last)
        def _():
            out_ref[0] = (sum_ref[...] / total_ref[:, :1]).astype(out_ref.dtype)
            norm_ref[0] = (top_ref[...] + jnp.log(total_ref[...])).T[:1]

    def by_query(dims):
        return pl.BlockSpec((1, block, dims), lambda h, step, steps: (h, Steps(steps).query(step), 0))

    def by_key(dims):
        return pl.BlockSpec(
            (1, block, dims), lambda h, step, steps: (jax.lax.div(h, H // K), Steps(steps).key(step), 0)
        )

    in_specs = [
        *(by_query(C), by_key(C), by_key(V)),
        pl.BlockSpec((block, 4), lambda h, step, steps: (Steps(steps).query(step), 0)),
        pl.BlockSpec((4, block), lambda h, step, steps: (0, Steps(steps).key(step))),
        None if sinks_H is None else pl.BlockSpec(memory_space=pltpu.SMEM),
    ]
    out_specs = [by_query(V), pl.BlockSpec((1, 1, block), lambda h, step, steps: (h, 0, Steps(steps).query(step)))]
    out_shape = [jax.ShapeDtypeStruct((H, N, V), q_HNC.dtype), jax.ShapeDtypeStruct((H, 1, N), jnp.float32)]
    scratch = [pltpu.VMEM((block, dims), jnp.float32) for dims in (LANES, LANES, V)]
    run = rule.call(splash_forward, (H, count), in_specs, out_specs, out_shape, scratch)
    results = run(packed, q_HNC, k_KNC, v_KNV, marks_4N.T, marks_4N, sinks_H)
    out_HNV, norm_H1N = (checkpoint_name(x, attention_tiles.SAVED) for x in results)
    return out_HNV, (q_HNC, k_KNC, v_KNV, sinks_H, marks_4N, lists, out_HNV, norm_H1N)


@functools.partial(jax.jit, static_argnums=0)
def _backward(rule: _Rule, saved, d_out_HNV):
    q_HNC, k_KNC, v_KNV, sinks_H, marks_4N, lists, out_HNV, norm_H1N = saved
    (H, N, C), (K, _, V), block = q_HNC.shape, v_KNV.shape, rule.block
    G, (count, packed) = H // K, lists[1]
    # The sum of a query's weights times their gradient.
    d_sum_H1N = jnp.einsum("HNV,HNV->HN", d_out_HNV, out_HNV, preferred_element_type=jnp.float32)[:, None]

    def splash_backward(
        steps_ref, q_ref, k_ref, v_ref, queries_ref, keys_ref, norm_ref, d_sum_ref, d_out_ref,
        d_q_ref, d_k_ref, d_v_ref, d_k_sum_ref, d_v_sum_ref, buffers_ref, loads, stores,
    ):  # fmt: skip
        k, step, g = (pl.program_id(dim) for dim in range(3))
        steps = Steps(steps_ref)
        query, (key, is_first, is_last) = steps.query(step), _run(steps.key, step)
        at, num_steps = step * G + g, pl.num_programs(1) * G  # of this key head
        is_stored, is_busy = steps.is_stored(step), steps.is_busy(step)

        def ends(at):  # of the copies of a step's block of dq: the memories of the chip and of the core
            columns = pl.ds(pl.multiple_of(steps.query(jax.lax.div(at, G)) * block, block), block)
            return d_q_ref.at[k * G + jax.lax.rem(at, G), :, columns], buffers_ref.at[jax.lax.rem(at, BUFFERS)]

        def load(at):
            return pltpu.make_async_copy(*ends(at), loads.at[jax.lax.rem(at, BUFFERS)])

        def store(at):
            block_ref, buffer_ref = ends(at)
            return pltpu.make_async_copy(buffer_ref, block_ref, stores.at[jax.lax.rem(at, BUFFERS)])

        # A step's block of dq is loaded during the step before, unless it is busy: then the step itself waits for the store of the
        # step before, and loads. A store is waited for two steps later, before its buffer and its block are used again.
        @pl.when((at >= 2) & ~steps.is_busy(jax.lax.div(jnp.maximum(at - 1, 0), G)))
        def _():
            store(at - 2).wait()

        following = jax.lax.div(jnp.minimum(at + 1, num_steps - 1), G)

        @pl.when((at + 1 < num_steps) & steps.is_stored(following) & ~steps.is_busy(following))
        def _():
            load(at + 1).start()

        @pl.when(is_first & (g == 0))
        def _():
            d_k_sum_ref[...] = jnp.zeros(d_k_sum_ref.shape, jnp.float32)
            d_v_sum_ref[...] = jnp.zeros(d_v_sum_ref.shape, jnp.float32)

        scores_SQ = attention_tiles.dot(k_ref[0], q_ref[0], 1, 1)
        queries, keys = [queries_ref[n : n + 1] for n in range(4)], [keys_ref[:, n : n + 1] for n in range(4)]
        scores_SQ = jnp.where(rule.readable(query, key, queries, keys, 1), scores_SQ, attention_tiles.MASKED)
        weights_SQ = jnp.exp(scores_SQ - norm_ref[0])
        d_scores_SQ = weights_SQ * (attention_tiles.dot(v_ref[0], d_out_ref[0], 1, 1) - d_sum_ref[0])
        weights_SQ, d_scores_SQ = (x_SQ.astype(q_ref.dtype) for x_SQ in (weights_SQ, d_scores_SQ))
        d_k_sum_ref[...] += attention_tiles.dot(d_scores_SQ, q_ref[0], 1, 0)
        d_v_sum_ref[...] += attention_tiles.dot(weights_SQ, d_out_ref[0], 1, 0)
        d_q_CQ = attention_tiles.dot(k_ref[0], d_scores_SQ, 0, 0)

        @pl.when(is_stored & is_busy)
        def _():
            store(at - 1).wait()
            load(at).start()

        @pl.when(is_stored)
        def _():
            load(at).wait()
            buffers_ref[jax.lax.rem(at, BUFFERS)] += d_q_CQ

        @pl.when(~is_stored)
        def _():
            buffers_ref[jax.lax.rem(at, BUFFERS)] = d_q_CQ

        store(at).start()

        @pl.when(at == num_steps - 1)
        def _():
            store(at).wait()

        @pl.when((at == num_steps - 1) & (at >= 1) & ~is_busy)
        def _():
            store(at - 1).wait()

        @pl.when(is_last & (g == G - 1))
        def _():
            d_k_ref[0] = d_k_sum_ref[...].astype(d_k_ref.dtype)
            d_v_ref[0] = d_v_sum_ref[...].astype(d_v_ref.dtype)

    def by_query(dims):
        return pl.BlockSpec((1, block, dims), lambda k, step, g, steps: (k * G + g, Steps(steps).query(step), 0))

    def by_key(dims):
        return pl.BlockSpec((1, block, dims), lambda k, step, g, steps: (k, Steps(steps).key(step), 0))

    statistic = pl.BlockSpec((1, 1, block), lambda k, step, g, steps: (k * G + g, 0, Steps(steps).query(step)))
    in_specs = [
        *(by_query(C), by_key(C), by_key(V)),
        pl.BlockSpec((4, block), lambda k, step, g, steps: (0, Steps(steps).query(step))),
        pl.BlockSpec((block, 4), lambda k, step, g, steps: (Steps(steps).key(step), 0)),
        *(statistic, statistic, by_query(V)),
    ]
    out_specs = [pl.BlockSpec(memory_space=pl.ANY), by_key(C), by_key(V)]
    out_shape = [jax.ShapeDtypeStruct((H, C, N), jnp.float32)]
    out_shape += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_KNC, v_KNV)]
    scratch = [pltpu.VMEM(shape, jnp.float32) for shape in ((block, C), (block, V), (BUFFERS, C, block))]
    scratch += [pltpu.SemaphoreType.DMA((BUFFERS,))] * 2
    run = rule.call(splash_backward, (K, count, G), in_specs, out_specs, out_shape, scratch)
    d_q_HCN, d_k_KNC, d_v_KNV = run(packed, q_HNC, k_KNC, v_KNV, marks_4N, marks_4N.T, norm_H1N, d_sum_H1N, d_out_HNV)
    d_sinks_H = None
    if sinks_H is not None:
        d_sinks_H = -(jnp.exp(sinks_H[:, None, None] - norm_H1N) * d_sum_H1N).sum(axis=(1, 2))
    return d_q_HCN.swapaxes(1, 2).astype(q_HNC.dtype), d_k_KNC, d_v_KNV, d_sinks_H, None, None


_attend.defvjp(_forward, _backward)


def _run(block_of: Callable, step):
    """Returns the block of a step, and whether the steps before and after it have other ones."""
    block, last = block_of(step), pl.num_programs(1) - 1
    is_first = (step == 0) | (block_of(jnp.maximum(step - 1, 0)) != block)
    return block, is_first, (step == last) | (block_of(jnp.minimum(step + 1, last)) != block)
