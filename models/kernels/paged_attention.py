"""Attention of one new token per sequence over keys and values in pages, by a TPU kernel that reads the pages in use and no others.

1. `visits` lists, once for all layers of a decode step, the blocks of pages that the sequences read. The kernel has one grid step for
   each, so its grid is dynamic. A page past a sequence's last is named as the one that was read there before, which is not read again.
2. A page has the keys and values of all heads, side by side, so it is one copy into the memory of the core, and a head of 64
   dims fills a vector of 128 lanes. There, queries and keys are multiplied in whole rows: queries have zeros in the lanes of values.
3. The kernel accumulates the softmax over the blocks of a sequence (arXiv 2205.14135).

Letters: B sequences, H query heads, K key heads, G = H / K, C head dim, R lanes of a product, N layers, P pages, S positions of a page, W pages
of a sequence at most, L grid steps, M pages of a step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels import attention_tiles

LANES = 128  # of a vector register
MAX_PAGES = 8  # of a grid step
STEP_BYTES = 2**21  # of the pages of a grid step, for which there are two buffers; a v5e reads them in 2.6 us


class Visits(NamedTuple):
    """The grid steps of the kernel, of which the first `count` are run."""

    count: jax.Array  # int32 [1]
    sequence: jax.Array  # int32 [L]
    block: jax.Array  # int32 [L], of the pages of this sequence
    pages: jax.Array  # int32 [L M]
    length: jax.Array  # int32 [B], of the sequences in tokens; 0 is not visited


def fits(head_dim: int, dtype) -> bool:
    """Returns True if the kernel takes heads of this size and queries of this dtype."""
    return 2 * head_dim % LANES == 0 and jnp.dtype(dtype) == jnp.bfloat16


def pages_per_step(page_bytes: int, most: int) -> int:
    """Returns the number of pages of a grid step, at most `most`, for pages of all heads of `page_bytes`."""
    return max(1, min(MAX_PAGES, STEP_BYTES // page_bytes, most))


def visits(length_B: jax.Array, table_BW: jax.Array, page: int, num_pages: int) -> Visits:
    """Returns the steps of the kernel for sequences of `length_B` tokens in the pages of `table_BW`, `num_pages` at a time."""
    W, step_L = table_BW.shape[1], jnp.arange(len(length_B) * -(-table_BW.shape[1] // num_pages), dtype=jnp.int32)
    used_B = -(-length_B // page)
    blocks_B = -(-used_B // num_pages)
    first_B, end_B = jnp.cumsum(blocks_B) - blocks_B, jnp.cumsum(blocks_B)
    sequence_L = jnp.searchsorted(end_B, step_L, side="right", method="compare_all").astype(jnp.int32)
    sequence_L = jnp.minimum(sequence_L, len(length_B) - 1)
    block_L = step_L - jnp.where(first_B[None] <= step_L[:, None], first_B[None], 0).max(axis=1)

    table_BW = jnp.where(jnp.arange(W)[None] < used_B[:, None], table_BW, -1)
    blocks_XM = jnp.pad(table_BW, [(0, 0), (0, -W % num_pages)], constant_values=-1).reshape(-1, num_pages)
    pages_LM = blocks_XM[sequence_L * -(-W // num_pages) + jnp.minimum(block_L, -(-W // num_pages) - 1)]
    pages_LM = jax.lax.associative_scan(lambda earlier, own: jnp.where(own < 0, earlier, own), pages_LM)
    return Visits(end_B[-1:], sequence_L, block_L, jnp.maximum(pages_LM, 0).reshape(-1), length_B)


def attend(q_BHC: jax.Array, pages_KNPSD: jax.Array, layer: Any, steps: Visits, *, scale: float) -> jax.Array:
    """Returns softmax(scale q k) v of the visited sequences, [B, H, C]; undefined for others. Scores and softmax are in float32.

    `pages_KNPSD` are the pages of all N layers, of which the kernel reads those of `layer`. The last dim, D = 2 C, has a key and then
    its value.
    """
    (B, H, C), (K, _, _, S, D) = q_BHC.shape, pages_KNPSD.shape
    G, M, num_lanes = H // K, len(steps.pages) // len(steps.sequence), C if C % LANES == 0 else D
    q_BKGR = jnp.pad(q_BHC, [(0, 0), (0, 0), (0, num_lanes - C)]).reshape(B, K, G, num_lanes)

    def paged_attention(sequence_ref, block_ref, pages_ref, length_ref, layer_ref, q_ref, *refs):
        del pages_ref, layer_ref
        page_refs, (out_ref, top_ref, total_ref, sum_ref) = refs[:M], refs[M:]
        step = pl.program_id(0)
        first, length = block_ref[step] * M * S, length_ref[sequence_ref[step]]

        @pl.when(first == 0)
        def _():
            top_ref[...] = jnp.full(top_ref.shape, attention_tiles.MASKED, jnp.float32)
            total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
            sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

        def of_head(k, part):
            return jnp.concatenate([ref[k, :, part] for ref in page_refs]).astype(q_ref.dtype)

        def readable(shape, dim):
            return first + jax.lax.broadcasted_iota(jnp.int32, shape, dim) < length

        keys, values = slice(num_lanes), slice(D - num_lanes, D)
        scores_KGS = scale * jnp.stack([attention_tiles.dot(q_ref[k], of_head(k, keys), 1, 1) for k in range(K)])
        scores_KGS = jnp.where(readable(scores_KGS.shape, 2), scores_KGS, attention_tiles.MASKED)
        top_KG1 = jnp.maximum(top_ref[...], scores_KGS.max(axis=2, keepdims=True))
        weights_KGS, down_KG1 = jnp.exp(scores_KGS - top_KG1), jnp.exp(top_ref[...] - top_KG1)
        total_ref[...] = total_ref[...] * down_KG1 + weights_KGS.sum(axis=2, keepdims=True)
        top_ref[...] = top_KG1
        for k in range(K):  # past the sequence, a page may have NaNs
            v_SR = jnp.where(readable((M * S, num_lanes), 0), of_head(k, values), 0)
            sum_ref[k] = sum_ref[k] * down_KG1[k] + attention_tiles.dot(weights_KGS[k].astype(v_SR.dtype), v_SR, 1, 0)

        @pl.when(first + M * S >= length)
        def _():
            out_ref[...] = (sum_ref[...] / total_ref[...]).astype(out_ref.dtype)

    def page_spec(number):
        def index(step, sequence_ref, block_ref, pages_ref, length_ref, layer_ref):
            return 0, layer_ref[0], pages_ref[step * M + number], 0, 0

        return pl.BlockSpec((K, None, None, S, D), index)

    rows = pl.BlockSpec((None, K, G, num_lanes), lambda step, sequence_ref, *_: (sequence_ref[step], 0, 0, 0))
    scratch = [pltpu.VMEM((K, G, size), jnp.float32) for size in (1, 1, num_lanes)]
    spec = pltpu.PrefetchScalarGridSpec(
        5, (steps.count[0],), [rows, *map(page_spec, range(M))], rows, scratch_shapes=scratch
    )
    call = pl.pallas_call(
        paged_attention,
        jax.ShapeDtypeStruct(q_BKGR.shape, q_BHC.dtype),
        grid_spec=spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="paged_attention",
    )
    at = jnp.asarray(layer, jnp.int32).reshape(1)
    out_BKGR = call(*steps[1:], at, q_BKGR, *[pages_KNPSD] * M)
    return out_BKGR.reshape(B, H, num_lanes)[:, :, num_lanes - C :]
