"""Grouped-query attention as a function of queries, keys, and a rule for which keys a query may read.

1. `attend_packed` runs whole packed rows (learner, scoring). The implementation follows the platform of the mesh: splash
   (models/kernels/splash_attention.py) on TPU, Triton (gpu_attention.py) on GPU, XLA elsewhere and for layers that the other
   two cannot express.
2. With a `context` mesh axis larger than one, every device keeps its queries, and the keys go round the ring of the axis
   (arXiv 2310.01889).
3. `attend` is the plain function of a mask. `attend_cached` is for new tokens over cached keys (inference/engine/kv_cache.py).
4. XLA works on blocks of `BLOCK` queries and recomputes them in the backward pass: no [B, H, T, T] ever exists. On a CPU,
   attention in float32 without sinks runs in models/kernels/cpu_attention.py.

Letters: B sequences, T query tokens, S keys, H query heads, K key heads, G = H / K, C head dim (of values: V).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from models.kernels import attention_tiles, cpu_attention, gpu_attention, splash_attention
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules

BLOCK = 512  # queries whose scores exist at one time


class Packing(NamedTuple):
    """The sequence, branch (completion of a shared prompt) and position of each token in packed rows, as arrays [B, T]."""

    positions: jax.Array  # of each token in its own sequence
    segment_ids: jax.Array  # 1, 2, ... per sequence; 0 is padding
    branch_ids: jax.Array | None = None  # 0 in a shared prompt, 1, 2, ... in its completions


def attend_packed(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKV: jax.Array,
    packing: Packing,
    *,
    window: int = 0,
    implementation: str = "auto",
    scale: float | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns the output of causal attention inside each packed sequence, [B, T, H, V].

    A query reads the last `window` tokens, its own included (0: all). `implementation` is a value of `ModelConfig.attention`.
    Raises ValueError if it cannot run this layer; "auto" then uses XLA. `attend` explains the others.
    """
    how = {"scale": q_BTHC.shape[-1] ** -0.5 if scale is None else scale, "sinks_H": sinks_H}
    k_BTKC, v_BTKV = _over_tensor(k_BTKC), _over_tensor(v_BTKV)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.shape["context"] > 1:
        run = functools.partial(_ring, window=window, scale=how["scale"])
        out_BTHV = _per_device(run, "context")(q_BTHC, k_BTKC, v_BTKV, packing, sinks_H)
        return checkpoint_name(out_BTHV, attention_tiles.SAVED)
    implementation = _choose(implementation, q_BTHC, v_BTKV, packing, how)
    if implementation == "xla":
        out_BTHV = _blockwise(q_BTHC, k_BTKC, v_BTKV, packing, window, how)
        return checkpoint_name(out_BTHV, attention_tiles.SAVED)  # the kernels name their own

    return _kernel(implementation, q_BTHC, k_BTKC, v_BTKV, packing, how | {"window": window})


def _kernel(implementation: str, q_BTHC, k_BTKC, v_BTKV, packing: Packing, how: dict) -> jax.Array:
    """Returns attention by the kernel of TPUs ("splash") or of GPUs ("triton"), on each device for its rows and heads."""

    def run(q_BTHC, k_BTKC, v_BTKV, packing, sinks_H):
        more = how | {"sinks_H": sinks_H}
        if implementation == "splash":
            return splash_attention.attend(q_BTHC, k_BTKC, v_BTKV, packing, **more)
        mask = functools.partial(readable, window=how["window"])
        return gpu_attention.attend(q_BTHC, k_BTKC, v_BTKV, packing, mask, **more)

    run = run if jax.sharding.get_abstract_mesh().empty else _per_device(run, None)
    return run(q_BTHC, k_BTKC, v_BTKV, packing, how["sinks_H"])


def attend(
    q_BTHC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSV: jax.Array,
    mask_BTS: jax.Array,
    *,
    scale: float | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax(scale q k) v under a mask, [B, T, H, V]; scores and softmax are in float32.

    Query t may read key s where `mask_BTS` is True; query head h reads key head h // (H / K). Scores are multiplied by
    `scale` (C ** -0.5 when None). `sinks_H` is one more logit per head, which takes its share of the softmax and has no value.
    Keys are head-major: on a CPU a decode step over [B, K, S, C] takes about half the time of one over [B, S, K, C].
    """
    B, T, H, C = q_BTHC.shape
    q_BKGTC = _by_key_head(q_BTHC, k_BKSC.shape[1])
    out_BKGTV = _attend(q_BKGTC, k_BKSC, v_BKSV, mask_BTS, C**-0.5 if scale is None else scale, sinks_H)
    return jnp.moveaxis(out_BKGTV, 3, 1).reshape(B, T, H, v_BKSV.shape[-1])


def attend_cached(
    q_BTHC: jax.Array, k_BKSC: jax.Array, v_BKSV: jax.Array, start_B: jax.Array, *, window: int = 0, **how
) -> jax.Array:
    """Returns attention of new tokens at positions start, start + 1, ... over S cached positions, [B, T, H, V].

    A query reads the keys up to its own, and at most the last `window` (0: all). `how` has the options of `attend`.
    """
    (B, T, H, C), S = q_BTHC.shape, k_BKSC.shape[2]
    # Several devices would have to read the same tiles.
    is_alone = mesh_lib.platform() == "cpu" and rules.several_devices() is None
    if is_alone and T > 1 and S > cpu_attention.TILE:
        how = {**how, "scale": C**-0.5 if how.get("scale") is None else how["scale"], "window": window}
        q_BKGTC = _by_key_head(q_BTHC, k_BKSC.shape[1])
        out_BKGTV = cpu_attention.attend_chunk(q_BKGTC, k_BKSC, v_BKSV, start_B, **how)
        return jnp.moveaxis(out_BKGTV, 3, 1).reshape(B, T, H, -1).astype(q_BTHC.dtype)
    key_11S, position_BT1 = jnp.arange(S)[None, None], (start_B[:, None] + jnp.arange(T)[None])[:, :, None]
    mask_BTS = key_11S <= position_BT1
    if window:
        mask_BTS &= key_11S > position_BT1 - window
    return attend(q_BTHC, k_BKSC, v_BKSV, mask_BTS, **how)


def _over_tensor(x_BTKC: jax.Array) -> jax.Array:
    """Repeats key heads until the mesh's `tensor` axis divides them: a device with some query heads then has their key heads."""
    mesh, num_heads = rules.several_devices(), x_BTKC.shape[2]
    copies = 1 if mesh is None else math.lcm(num_heads, mesh.shape.get("tensor", 1)) // num_heads
    return x_BTKC if copies == 1 else rules.constrain(jnp.repeat(x_BTKC, copies, 2), "batch", "sequence", "heads", None)


def readable(query: Packing, query_columns_T, key: Packing, key_columns_S, window: int = 0) -> jax.Array:
    """Returns the attention mask [B, T, S] of packed rows, or [T, S] of one, True where query t may read key s.

    Query t may read keys of its sequence that are in no later column, in its own branch or the shared prompt, and in the
    window, which counts positions.
    Padding (segment 0) may read padding, which keeps the unused results finite.
    """
    mask_BTS = query.segment_ids[..., :, None] == key.segment_ids[..., None, :]
    is_past_TS = query_columns_T[:, None] >= key_columns_S[None, :]
    mask_BTS &= is_past_TS if mask_BTS.ndim == 2 else is_past_TS[None]
    if query.branch_ids is not None and key.branch_ids is not None:
        key_B1S = key.branch_ids[..., None, :]
        mask_BTS &= (key_B1S == 0) | (key_B1S == query.branch_ids[..., :, None])
    if window:
        mask_BTS &= query.positions[..., :, None] - key.positions[..., None, :] < window
    return mask_BTS


def _choose(implementation: str, q_BTHC, v_BTKV, packing: Packing, how: dict) -> str:
    """Returns the attention implementation to use, with "auto" resolved. Raises ValueError if a named one cannot run here."""
    T, C, longest = q_BTHC.shape[1], q_BTHC.shape[-1], splash_attention.LONGEST
    dims, obstacle = max(C, v_BTKV.shape[-1]), gpu_attention.obstacle()
    reasons = {
        "xla": [],
        "splash": [
            (T % 128 != 0, f"rows of {T} tokens are not a multiple of 128"),
            (T > longest, f"rows of {T} tokens exceed {longest}, unless mesh.context splits them"),
        ],
        "triton": [
            (bool(obstacle), obstacle),
            (dims > 256, f"heads have {dims} dims, more than 256"),
        ],
    }
    wanted = implementation
    if implementation == "auto":
        wanted = {"tpu": "splash", "gpu": "triton", "cuda": "triton"}.get(mesh_lib.platform(), "xla")
    problems = [text for applies, text in reasons[wanted] if applies]
    if problems and implementation != "auto":
        raise ValueError(f"model.attention = {implementation!r} cannot run: {problems[0]}; set it to 'auto' or 'xla'")
    return "xla" if problems else wanted


def _blockwise(q_BTHC, k_BTKC, v_BTKV, packing: Packing, window: int, how: dict) -> jax.Array:
    """Returns attention of packed rows by XLA or on a CPU; only the scores of one block of queries exist at a time."""
    T, K = q_BTHC.shape[1], k_BTKC.shape[2]
    k_BKTC, v_BKTV, columns_T = _stored(k_BTKC.swapaxes(1, 2)), _stored(v_BTKV.swapaxes(1, 2)), jnp.arange(T)
    is_plain = q_BTHC.dtype == jnp.float32 and how["sinks_H"] is None
    on_cpu = mesh_lib.platform() == "cpu" and is_plain
    is_tiled = on_cpu and T > BLOCK and rules.several_devices() is None  # several would have to skip the same tiles
    mask = functools.partial(readable, window=window)

    def run(q_BTHC, packing_q, columns):
        qkv = _stored(_by_key_head(q_BTHC, K)), k_BKTC, v_BKTV
        if is_tiled:
            out_BKGTV = cpu_attention.attend_tiles(*qkv, packing, mask, how["scale"])
        elif on_cpu and T <= BLOCK:
            out_BKGTV = cpu_attention.attend_blocks(*qkv, mask(packing_q, columns, packing, columns_T), how["scale"])
        else:
            out_BKGTV = _attend(*qkv, mask(packing_q, columns, packing, columns_T), **how)
        return jnp.moveaxis(_stored(out_BKGTV), 3, 1).reshape(*q_BTHC.shape[:3], -1)

    return (run if is_tiled else functools.partial(_by_blocks, run))(q_BTHC, packing, columns_T)


def _stored(x) -> jax.Array:
    """Makes a CPU store an array (and its gradient) heads first.

    Left to itself, XLA takes 1.3 to 1.5 times as long for the products over heads (CPU time of forward and backward,
    64 x 96 and 8 x 128 tokens).
    """
    return jax.lax.optimization_barrier(x) if mesh_lib.platform() == "cpu" else x


def _attend(q_BKGTC, k_BKSC, v_BKSV, mask_BTS, scale: float, sinks_H) -> jax.Array:
    scores_BKGTS = _scores(q_BKGTC, k_BKSC, mask_BTS, scale)
    if sinks_H is None:
        weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    else:
        _, K, G, *_ = scores_BKGTS.shape
        sinks_1KG11 = sinks_H.astype(jnp.float32).reshape(1, K, G, 1, 1)
        sinks_BKGT1 = jnp.broadcast_to(sinks_1KG11, (*scores_BKGTS.shape[:-1], 1))
        weights_BKGTS = jax.nn.softmax(jnp.concatenate([scores_BKGTS, sinks_BKGT1], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("BKGTS,BKSV->BKGTV", weights_BKGTS.astype(q_BKGTC.dtype), v_BKSV)


def _by_blocks(run, q_BTHC, packing: Packing, columns_T):
    """Calls `run(q, packing, columns)` on each block of `BLOCK` queries, and joins the results along dim 1, the queries."""
    T = q_BTHC.shape[1]
    if T <= BLOCK:
        return run(q_BTHC, packing, columns_T)
    pad = -T % BLOCK

    def split(x, axis):  # [.., T, ..] -> [blocks, .., BLOCK, ..]
        x = jnp.pad(x, [(0, pad if dim == axis else 0) for dim in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :]), axis, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]

    blocks = split(q_BTHC, 1), jax.tree.map(lambda x: split(x, 1), packing), split(columns_T, 0)
    return jax.tree.map(join, jax.lax.map(lambda block: jax.checkpoint(run)(*block), blocks))


def _by_key_head(q_BTHC, num_kv_heads: int) -> jax.Array:
    """Returns queries [B, T, H, C] grouped by the key head that they read, [B, K, G, T, C]."""
    B, T, _, C = q_BTHC.shape
    return jnp.moveaxis(q_BTHC.reshape(B, T, num_kv_heads, -1, C), 1, 3)


def _scores(q_BKGTC, k_BKSC, mask_BTS, scale: float) -> jax.Array:
    scores_BKGTS = jnp.einsum("BKGTC,BKSC->BKGTS", q_BKGTC, k_BKSC, preferred_element_type=jnp.float32) * scale
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, attention_tiles.MASKED)


def _per_device(run: Callable, context: str | None) -> Callable:
    """Returns `run(q, k, v, a tree of arrays per token, sinks)`, run on each device's rows, heads and part of `context`."""
    batch = rules.RULES["batch"]
    tokens, heads = PartitionSpec(batch, context), PartitionSpec(batch, context, "tensor", None)
    in_specs = heads, heads, heads, tokens, PartitionSpec("tensor")
    return jax.shard_map(run, in_specs=in_specs, out_specs=heads, check_vma=False)


def _ring(q_BTHC, k_BTKC, v_BTKV, packing: Packing, sinks_H, *, window, scale):
    """Returns ring attention of one device's queries to the keys of all devices; T is the device's share of the row.

    The softmax is accumulated as (weighted values, sum of weights, maximum).
    """
    B, T, H, _ = q_BTHC.shape
    K, V = v_BTKV.shape[2:]
    index, num_devices = jax.lax.axis_index("context"), jax.lax.axis_size("context")
    columns_T = jnp.arange(T)

    def partial_softmax(q, packing_q, columns_q, keys, columns_k):
        k, v, packing_k = keys
        mask = readable(packing_q, columns_q, packing_k, columns_k, window)
        scores = _scores(_by_key_head(q, K), k.swapaxes(1, 2), mask, scale)
        top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - top)
        out = jnp.einsum("BKGTS,BSKV->BTKGV", weights.astype(q.dtype), v, preferred_element_type=jnp.float32)
        return out, jnp.moveaxis(weights.sum(axis=-1), 3, 1), jnp.moveaxis(top[..., 0], 3, 1)  # [B, T, K, G, ..]

    @jax.checkpoint
    def attend_to(keys, owner, so_far):
        run = functools.partial(partial_softmax, keys=keys, columns_k=owner * T + columns_T)
        return _merge(so_far, _by_blocks(run, q_BTHC, packing, index * T + columns_T))

    def step(carry, i):
        keys, so_far = carry
        so_far = attend_to(keys, (index - i) % num_devices, so_far)
        around = [(device, (device + 1) % num_devices) for device in range(num_devices)]
        return (jax.tree.map(lambda x: jax.lax.ppermute(x, "context", around), keys), so_far), None

    empty = jnp.zeros((B, T, K, H // K, V), jnp.float32), jnp.zeros((B, T, K, H // K), jnp.float32)
    so_far = *empty, jnp.full((B, T, K, H // K), attention_tiles.MASKED, jnp.float32)
    carry = (k_BTKC, v_BTKV, packing), so_far
    (_, (out, total, top)), _ = jax.lax.scan(step, carry, jnp.arange(num_devices))
    if sinks_H is not None:
        sink = jnp.broadcast_to(sinks_H.astype(jnp.float32).reshape(1, 1, K, H // K), top.shape)
        out, total, _ = _merge((out, total, top), (jnp.zeros_like(out), jnp.ones_like(total), sink))
    return (out / total[..., None]).reshape(B, T, H, V).astype(q_BTHC.dtype)


def _merge(a, b):
    """Merges two partial softmaxes of the same queries: (weighted values, sum of weights, maximum)."""
    (out_a, total_a, top_a), (out_b, total_b, top_b) = a, b
    top = jax.lax.stop_gradient(jnp.maximum(top_a, top_b))  # the quotient is the same for any reference
    scale_a, scale_b = jnp.exp(top_a - top), jnp.exp(top_b - top)
    out = out_a * scale_a[..., None] + out_b * scale_b[..., None]
    return out, total_a * scale_a + total_b * scale_b, top
