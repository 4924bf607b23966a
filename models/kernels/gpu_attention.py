"""Causal attention of packed rows on an NVIDIA GPU, by Triton kernels that work only on the keys that a row reads.

1. `attention_tiles.ranges` finds the columns of keys that each block of queries may read, and the queries that read each block of keys. No array
   is [T, T].
2. The forward kernel has one program per block of queries and head. It goes over these keys in steps, and accumulates the
   softmax (arXiv 2205.14135). The mask of a step is that of models/attention.py, computed in the kernel.
3. The backward pass computes the weights again. One kernel sums dq over keys, another dk and dv over queries and the query
   heads of a key head, each in a fixed order: gradients have the same bits in each run.

Letters: B rows, T tokens, H query heads, K key heads, G = H / K, C head dim, V value dim, N blocks of a row, Q queries of a block
or step, S keys of a step or block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from models.kernels import attention_tiles
from sharding.mesh import mesh as mesh_lib

# The fastest of some tiles with bfloat16 and 128 dims on an H100 and an H200 (bench/results/gpu.md).
BLOCK = 64  # queries of a program, or keys of one that computes dk and dv
FORWARD, BACKWARD = (64, 4, 3), (64, 4, 2)  # keys or queries of a step of a program, warps, stages of its pipeline


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The options of attention, and the tiles of the kernels; static under jit."""

    readable: Callable  # of (query packing, query columns, key packing, key columns): the mask of a tile
    scale: float
    interpret: bool
    block: int
    forward: tuple[int, int, int]
    backward: tuple[int, int, int]

    def call(self, kernel: Callable, tile: tuple[int, int, int], grid: tuple[int, ...], out_shape: Any, *args):
        return kernel_call(kernel, tile, grid, out_shape, self.interpret)(*args)


def obstacle() -> str:
    """Returns why the function being traced cannot have Triton kernels where it runs; empty if it can."""
    platform = mesh_lib.platform()
    if platform not in ("gpu", "cuda"):
        return f"the kernel is for GPUs, and the platform is {platform}"
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))  # of an NVIDIA GPU
    is_old = capability[:2] in ("5.", "6.", "7.")
    return f"a GPU of compute capability {capability} has no bfloat16" if is_old else ""


def attend(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKV: jax.Array,
    packing: Any,
    readable: Callable,
    *,
    scale: float,
    window: int = 0,
    sinks_H: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention inside each sequence of packed rows, [B, T, H, V]; models/attention.py explains the options.

    `packing` has arrays [B, T]: `positions`, `segment_ids`, `branch_ids` (or None). A sequence has consecutive columns: its
    shared prompt, then its branches one by one. Results of padding are finite. `interpret` runs the kernels on a CPU.
    """
    T, C, V = q_BTHC.shape[1], q_BTHC.shape[3], v_BTKV.shape[3]
    block, forward, backward = tiles(q_BTHC.dtype, max(C, V))
    rule = _Rule(readable, scale, interpret, block, forward, backward)

    def pad(x, num_dims=None):  # whole blocks of tokens; a power of two of dims, as Triton's tiles have
        more = [(0, 0), (0, -T % block), *[(0, 0)] * (x.ndim - 2)]
        more[-1] = more[-1] if num_dims is None else (0, num_dims - x.shape[-1])
        return jnp.pad(x, more) if any(map(any, more)) else x

    qkv = (pad(x, pl.next_power_of_2(max(x.shape[3], 16))) for x in (q_BTHC, k_BTKC, v_BTKV))
    packing = jax.tree.map(pad, packing)
    reads_BN = jax.vmap(functools.partial(attention_tiles.ranges, block=block, window=window))(packing)
    sinks_H = None if sinks_H is None else sinks_H.astype(jnp.float32)
    out_BTHV: Any = _attend(rule, *qkv, sinks_H, packing, reads_BN)
    return out_BTHV[:, :T, :, :V]


def tiles(dtype: jax.typing.DTypeLike, dims: int) -> tuple[int, tuple[int, int, int], tuple[int, int, int]]:
    """Returns (queries of a block, tile of the forward pass, tile of the backward pass) for heads of at most `dims` dims."""
    if dtype != jnp.float32 and dims <= 128:
        return BLOCK, FORWARD, BACKWARD
    return 32 if dtype == jnp.float32 else 64, (32, 4, 2), (32, 4, 2)  # they take more registers and shared memory


def accumulated(stats: tuple[jax.Array, ...], scores_QS: jax.Array, v_SV: jax.Array) -> tuple[jax.Array, ...]:
    """Returns a softmax, (weighted values [Q, V], sum of weights [Q], maximum [Q]), with the scores of more keys."""
    out_QV, total_Q, top_Q = stats
    new_top_Q = jnp.maximum(top_Q, scores_QS.max(axis=1))
    weights_QS, down_Q = jnp.exp(scores_QS - new_top_Q[:, None]), jnp.exp(top_Q - new_top_Q)
    read_QV = attention_tiles.dot(weights_QS.astype(v_SV.dtype), v_SV, 1, 0)
    return out_QV * down_Q[:, None] + read_QV, total_Q * down_Q + weights_QS.sum(axis=1), new_top_Q


def kernel_call(kernel: Callable, tile: tuple[int, int, int], grid: tuple[int, ...], out_shape: Any, interpret: bool):
    """Returns the function that runs a Triton kernel; `tile` has a size, warps, and stages."""
    options, name = triton.CompilerParams(num_warps=tile[1], num_stages=tile[2]), kernel.__name__
    return pl.pallas_call(kernel, out_shape, grid=grid, compiler_params=options, interpret=interpret, name=name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: _Rule, *args) -> jax.Array:
    return _forward(rule, *args)[0]


def _forward(rule: _Rule, q_BTHC, k_BTKC, v_BTKV, sinks_H, packing, reads_BN):
    B, T, H, _ = q_BTHC.shape
    K, V = v_BTKV.shape[2:]

    def attention_forward(q_ref, k_ref, v_ref, sinks_ref, packing_ref, reads_ref, out_ref, log_norm_ref):
        i, h, b = (pl.program_id(dim) for dim in range(3))
        own, k = pl.ds(i * rule.block, rule.block), jax.lax.div(h, H // K)
        q_QC, queries = q_ref[b, own, h, :], _packing(packing_ref, b, own)

        def read(is_masked, keys, stats):
            packing = packing_ref if is_masked else None
            scores_QS = _scores(rule, q_QC, k_ref[b, keys, k, :], queries, own, packing, b, keys)
            return accumulated(stats, scores_QS, v_ref[b, keys, k, :])

        zero_Q = jnp.zeros(rule.block, jnp.float32)
        total_Q, top_Q = (
            (zero_Q, zero_Q + attention_tiles.MASKED) if sinks_ref is None else (zero_Q + 1, zero_Q + sinks_ref[h])
        )
        out_QV = jnp.zeros((rule.block, V), jnp.float32)
        stats = _over_keys(rule.block, rule.forward[0], reads_ref, b, i, read, (out_QV, total_Q, top_Q))
        out_QV, total_Q, top_Q = stats
        out_ref[b, own, h, :] = (out_QV / total_Q[:, None]).astype(out_ref.dtype)
        log_norm_ref[b, h, own] = top_Q + jnp.log(total_Q)

    out_shape = jax.ShapeDtypeStruct((B, T, H, V), q_BTHC.dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    args = q_BTHC, k_BTKC, v_BTKV, sinks_H, packing, reads_BN
    out_BTHV, log_norm_BHT = rule.call(attention_forward, rule.forward, (T // rule.block, H, B), out_shape, *args)
    results = [checkpoint_name(x, attention_tiles.SAVED) for x in (out_BTHV, log_norm_BHT)]
    return results[0], (*args, *results)


def _backward(rule: _Rule, saved, d_out_BTHV):
    q_BTHC, k_BTKC, v_BTKV, sinks_H, packing, reads_BN, out_BTHV, log_norm_BHT = saved
    B, T, H, C = q_BTHC.shape
    K, V = v_BTKV.shape[2:]
    # The sum of a query's weights times their gradient.
    d_sum_BHT = jnp.einsum("BTHV,BTHV->BHT", d_out_BTHV, out_BTHV, preferred_element_type=jnp.float32)

    def gradients(refs, is_masked, queries, keys, b, h, q_QC, k_SC, v_SV, d_out_QV):
        """Returns the weights of a tile and the gradient of its scores, both [Q, S]."""
        packing_ref, log_norm_ref, d_sum_ref = refs
        own, packing_ref = (_packing(packing_ref, b, queries), packing_ref) if is_masked else (None, None)
        scores_QS = _scores(rule, q_QC, k_SC, own, queries, packing_ref, b, keys)
        weights_QS = jnp.exp(scores_QS - log_norm_ref[b, h, queries][:, None])
        d_scores_QS = (
            weights_QS * (attention_tiles.dot(d_out_QV, v_SV, 1, 1) - d_sum_ref[b, h, queries][:, None]) * rule.scale
        )
        return weights_QS.astype(q_QC.dtype), d_scores_QS.astype(q_QC.dtype)

    def attention_dq(q_ref, k_ref, v_ref, packing_ref, reads_ref, log_norm_ref, d_sum_ref, d_out_ref, d_q_ref):
        i, h, b = (pl.program_id(dim) for dim in range(3))
        own, k = pl.ds(i * rule.block, rule.block), jax.lax.div(h, H // K)
        q_QC, d_out_QV = q_ref[b, own, h, :], d_out_ref[b, own, h, :]

        def read(is_masked, keys, d_q_QC):
            k_SC, v_SV = k_ref[b, keys, k, :], v_ref[b, keys, k, :]
            refs = packing_ref, log_norm_ref, d_sum_ref
            _, d_scores_QS = gradients(refs, is_masked, own, keys, b, h, q_QC, k_SC, v_SV, d_out_QV)
            return d_q_QC + attention_tiles.dot(d_scores_QS, k_SC, 1, 0)

        zeros_QC = jnp.zeros((rule.block, C), jnp.float32)
        d_q_QC = _over_keys(rule.block, rule.backward[0], reads_ref, b, i, read, zeros_QC)
        d_q_ref[b, own, h, :] = d_q_QC.astype(d_q_ref.dtype)

    def attention_dkv(
        q_ref, k_ref, v_ref, packing_ref, reads_ref, log_norm_ref, d_sum_ref, d_out_ref, d_k_ref, d_v_ref
    ):
        j, k, b = (pl.program_id(dim) for dim in range(3))
        own = pl.ds(j * rule.block, rule.block)
        k_SC, v_SV = k_ref[b, own, k, :], v_ref[b, own, k, :]
        size = rule.backward[0]
        first, past = (n * (rule.block // size) for n in (j, j + 1))
        end = jax.lax.div(reads_ref[3][b, j] + size - 1, size)
        whole_end = jnp.maximum(jax.lax.div(reads_ref[5][b, j], size), past)
        parts = (first, jnp.minimum(past, end), True), (past, whole_end, False), (whole_end, end, True)

        def over_heads(g, sums):
            h = k * (H // K) + g

            def read(is_masked, n, sums):
                queries = pl.ds(n * size, size)
                q_QC, d_out_QV = q_ref[b, queries, h, :], d_out_ref[b, queries, h, :]
                refs = packing_ref, log_norm_ref, d_sum_ref
                weights_QS, d_scores_QS = gradients(refs, is_masked, queries, own, b, h, q_QC, k_SC, v_SV, d_out_QV)
                d_k_SC, d_v_SV = (
                    attention_tiles.dot(d_scores_QS, q_QC, 0, 0),
                    attention_tiles.dot(weights_QS, d_out_QV, 0, 0),
                )
                return sums[0] + d_k_SC, sums[1] + d_v_SV

            for start, stop, is_masked in parts:
                sums = jax.lax.fori_loop(start, stop, functools.partial(read, is_masked), sums)
            return sums

        zeros = (jnp.zeros((rule.block, dims), jnp.float32) for dims in (C, V))
        d_k_SC, d_v_SV = jax.lax.fori_loop(0, H // K, over_heads, tuple(zeros))
        d_k_ref[b, own, k, :] = d_k_SC.astype(d_k_ref.dtype)
        d_v_ref[b, own, k, :] = d_v_SV.astype(d_v_ref.dtype)

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    args = q_BTHC, k_BTKC, v_BTKV, packing, reads_BN, log_norm_BHT, d_sum_BHT, d_out_BTHV
    d_q_BTHC = rule.call(attention_dq, rule.backward, (T // rule.block, H, B), like(q_BTHC), *args)
    d_k_BTKC, d_v_BTKV = rule.call(
        attention_dkv, rule.backward, (T // rule.block, K, B), (like(k_BTKC), like(v_BTKV)), *args
    )
    d_sinks_H = None
    if sinks_H is not None:
        d_sinks_H = -(jnp.exp(sinks_H[None, :, None] - log_norm_BHT) * d_sum_BHT).sum(axis=(0, 2))
    return d_q_BTHC, d_k_BTKC, d_v_BTKV, d_sinks_H, None, None


_attend.defvjp(_forward, _backward)


def _over_keys(block: int, size: int, reads_ref, b, i, read: Callable, carry):
    """Calls `carry = read(is masked, slice of keys, carry)` for each `size` of the keys that block i of queries reads, in order."""
    first, branch = (jax.lax.div(reads_ref[n][b, i], size) for n in (0, 2))
    prompt_end, whole = (jax.lax.div(reads_ref[n][b, i] + size - 1, size) for n in (1, 4))
    num_shared = jnp.maximum(jnp.minimum(prompt_end, branch) - first, 0)
    own, end = (n * (block // size) for n in (i, i + 1))
    whole = jnp.maximum(jnp.minimum(whole, own), branch)

    def at(n):
        return jnp.where(n < num_shared, first + n, branch + n - num_shared)

    def over(start, stop, is_masked, at, carry):
        def step(n, carry):
            return read(is_masked, pl.ds(at(n) * size, size), carry)

        return jax.lax.fori_loop(start, stop, step, carry)

    carry = over(0, num_shared + whole - branch, True, at, carry)
    carry = over(whole, own, False, lambda n: n, carry)
    return over(jnp.maximum(whole, own), end, True, lambda n: n, carry)


def _scores(rule: _Rule, q_QC, k_SC, queries, query_slice, packing_ref, b, key_slice):
    """Returns the scores of a tile, masked if there is a packing."""
    scores_QS = attention_tiles.dot(q_QC, k_SC, 1, 1) * rule.scale
    if packing_ref is None:
        return scores_QS
    columns_Q, columns_S = (part.start + jnp.arange(part.size) for part in (query_slice, key_slice))
    mask_QS = rule.readable(queries, columns_Q, _packing(packing_ref, b, key_slice), columns_S)
    return jnp.where(mask_QS, scores_QS, attention_tiles.MASKED)


def _packing(packing_ref, b, columns):
    return jax.tree.map(lambda ref: ref[b, columns], packing_ref)
