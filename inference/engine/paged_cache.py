"""Keys and values in pages: a slot takes as many pages as its tokens fill, where kv_cache.py keeps its whole capacity.

1. `create` makes P pages of S positions for each stack of layers, head-major. The layer is an offset of pages and not a
   slice, because a slice in front of a kernel's call is a copy of the whole cache.
2. The host decides which pages a slot has (inference/scheduler/page_table.py). Each decode call gets them as a table.
3. `attend_at` writes the new key of each active slot into its page, and attends. On a TPU, JAX's kernel reads the pages in
   use and no others; elsewhere XLA gathers the pages of each slot, as many as the capacity has.
4. `of_prompts` and `take` copy pages out of prefilled prompts and of slots, `put` copies them into other pages.

A slot's result depends on its own tokens alone: neither on the order of its pages nor on other slots.

Pages of 8-bit floats hold twice the tokens. Their keys are rounded, so such a server samples from a policy close to the published one.

Letters: B slots, K key heads, N layers of a stack, P pages, S positions of a page, C head dim, W pages of a slot at most, M
pages of a copy, H query heads.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.pallas.ops.tpu import paged_attention as paged_attention_tpu

from inference.engine import kv_cache
from models import attention, transformer
from models import config as config_lib
from sharding import mesh as mesh_lib
from sharding import rules

PAGE = 64  # positions: a page of a 106 B model's layers has 11 MiB, and the last page of a sequence is half empty
KERNEL_PAGES = 8  # that the kernel reads at a time
LANES = 128  # of a TPU's vector: the kernel reads whole ones
DTYPES = ("", "float8_e4m3fn")  # of pages
PartitionSpec = jax.sharding.PartitionSpec
# (keys, values) [K, N, M, S, C] of each stack: P pages, or M of a copy
Entries = tuple[tuple[jax.Array, jax.Array], ...]


@struct.dataclass
class PagedCache:
    """The keys and values of all slots, in pages: (keys, values) [K, N, P, S, C] of each stack of layers."""

    entries: Entries


def check(model: config_lib.ModelConfig, mesh: jax.sharding.Mesh | None = None) -> None:
    """Raises ValueError if this model, or the mesh of its server, needs slots of whole capacity."""
    reasons = {"latent attention": model.is_latent, "attention sinks": model.sinks, "sliding layers": model.window > 0}
    if mesh is not None:
        shards, parts, is_tpu = rules.num_batch_shards(mesh), mesh.shape["tensor"], _is_tpu(mesh)
        reasons |= {  # the kernel reads whole vectors, and rounds to bfloat16
            f"{shards} batch shards of the mesh (data x fsdp x expert)": shards > 1,
            f"{model.num_kv_heads} key heads over tensor={parts}": model.num_kv_heads % parts > 0,
            f"head_dim = {model.head_dim} on a TPU": is_tpu and model.head_dim % LANES > 0,
            f"dtype = {model.dtype} on a TPU": is_tpu and model.dtype != "bfloat16",
        }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"inference.num_pages: a cache in pages does not support {reason}; set it to 0")


def reads_pages_in_use(model: config_lib.ModelConfig, mesh: jax.sharding.Mesh) -> bool:
    """Returns True where a decode step reads no other pages: on a TPU, if `check` allows this model there."""
    try:
        check(model, mesh)
    except ValueError:
        return False
    return _is_tpu(mesh)


def _is_tpu(mesh: jax.sharding.Mesh) -> bool:
    device = mesh.abstract_mesh.abstract_device
    return device is not None and device.platform == "tpu"


def create(config: config_lib.ModelConfig, num_pages: int, dtype: str = "") -> PagedCache:
    """Returns a cache of zeros with `num_pages` pages per layer, in one of `DTYPES` (empty: that of activations)."""

    def zeros(num_layers):
        shape = config.num_kv_heads, num_layers, num_pages, PAGE, config.head_dim
        return jnp.zeros(shape, dtype or config.dtype)

    stacks = transformer.stacks(config).values()
    return PagedCache(tuple((zeros(len(layers)), zeros(len(layers))) for layers in stacks))


def layout(cache: PagedCache, mesh) -> PagedCache:
    """Returns the `PartitionSpec` of each array: key heads over `tensor`."""
    return jax.tree.map(lambda x: rules.fitting(mesh, x.shape, ("kv_heads", None, None, None, None)), cache)


def attend_at(position_B: jax.Array, active_B: jax.Array, table_BW: jax.Array) -> Callable:
    """Returns the attention function of `transformer.extend` for one new token per slot, at `position_B`.

    Page w of a slot, `table_BW[b, w]`, has its positions from w S on. Entries past its last page name any page. Only
    active slots write. The output of others is undefined.
    """

    def attend(entry, q_B1HC, k_B1KC, v_B1KC, *, window: int = 0, value_dim: int = 0, sinks_H=None, **how):
        assert not window and not value_dim and sinks_H is None, "check() refuses these"
        keys, values, *layer = entry
        args = keys, values, q_B1HC, k_B1KC, v_B1KC, position_B, active_B, table_BW, layer
        step, mesh = functools.partial(_step, **how), rules.several_devices()
        if mesh is not None:
            pages, heads, whole = PartitionSpec("tensor"), PartitionSpec(None, None, "tensor"), PartitionSpec()
            specs = pages, pages, heads, heads, heads, whole, whole, whole, whole
            step = jax.shard_map(step, in_specs=specs, out_specs=(heads, pages, pages), check_vma=False)
        out_B1HC, keys, values = step(*args)
        return out_B1HC, (keys, values, *layer)

    return attend


def of_prompts(cache: kv_cache.Cache, rows_M: jax.Array, firsts_M: jax.Array) -> Entries:
    """Returns M pages of the prompts in a cache of `kv_cache.create`: of row `rows_M[m]`, positions from `firsts_M[m]` on."""

    def of(x):
        x = x[None] if x.ndim == 4 else x
        T = x.shape[3]
        at_MS = firsts_M[:, None] + jnp.arange(PAGE)[None]
        # Positions past the end of the array are past that of the prompt, too: no query reads them.
        pages_MSNKC = x[:, rows_M[:, None], :, jnp.minimum(at_MS, T - 1)]
        return pages_MSNKC.transpose(3, 2, 0, 1, 4)

    return jax.tree.map(of, cache)


def take(cache: PagedCache, pages_M: jax.Array) -> Entries:
    """Returns copies of M pages."""
    return jax.tree.map(lambda x: jnp.take(x, pages_M, axis=2, mode="clip"), cache.entries)


def put(cache: PagedCache, source: Entries, pages_M: jax.Array) -> PagedCache:
    """Copies M pages into pages `pages_M`; skips numbers out of range. Returns the new cache."""

    def put_one(pages, new):
        return pages.at[:, :, pages_M].set(_rounded(new, pages.dtype), mode="drop")

    return PagedCache(jax.tree.map(put_one, cache.entries, source))


def _rounded(x: jax.Array, dtype) -> jax.Array:
    """Returns keys or values in the dtype of pages; numbers too large for 8 bits become the largest, not NaN."""
    limit = float(jnp.finfo(dtype).max)
    return x.astype(dtype) if dtype.itemsize > 1 else jnp.clip(x.astype(jnp.float32), -limit, limit).astype(dtype)


def _step(keys, values, q_B1HC, k_B1KC, v_B1KC, position_B, active_B, table_BW, layer, *, scale=None, softcap=0.0):
    """Writes the new keys and values and attends, on one device for its heads; returns (out [B, 1, H, C], keys, values)."""
    K, N, P, S, C = keys.shape
    first = layer[0] * P if layer else 0
    page_B = jnp.take_along_axis(table_BW, (position_B // S)[:, None], axis=1)[:, 0] + first
    page_B = jnp.where(active_B, page_B, N * P + jnp.arange(len(page_B)))  # out of range: not written
    where = jnp.arange(K)[:, None], page_B[None], (position_B % S)[None]

    def write(pages, new_B1KC):
        flat = pages.reshape(K, N * P, S, C)
        new_KBC = _rounded(new_B1KC[:, 0].swapaxes(0, 1), flat.dtype)
        return flat.at[where].set(new_KBC, unique_indices=True, mode="drop")

    keys, values = write(keys, k_B1KC), write(values, v_B1KC)
    scale = C**-0.5 if scale is None else scale
    if mesh_lib.platform() == "tpu" and C % LANES == 0 and q_B1HC.dtype == jnp.bfloat16:
        out_BHC = _kernel(
            keys, values, q_B1HC[:, 0].astype(jnp.float32) * scale, position_B, active_B, table_BW + first, softcap
        )
        out_B1HC = out_BHC[:, None].astype(q_B1HC.dtype)
    else:
        read_KBWSC = (x[:, table_BW + first].astype(q_B1HC.dtype) for x in (keys, values))
        k_BKSC, v_BKSC = (x.swapaxes(0, 1).reshape(len(page_B), K, -1, C) for x in read_KBWSC)
        mask_B1S = jnp.arange(k_BKSC.shape[2])[None, None] <= position_B[:, None, None]
        out_B1HC = attention.attend(q_B1HC, k_BKSC, v_BKSC, mask_B1S, scale=scale, softcap=softcap)
    return out_B1HC, keys.reshape(K, N, P, S, C), values.reshape(K, N, P, S, C)


def _kernel(keys, values, q_BHC, position_B, active_B, table_BW, softcap: float) -> jax.Array:
    """Returns attention by JAX's kernel of TPUs, [B, H, C]. It reads nothing for slots that are not active."""
    return paged_attention_tpu.paged_attention(
        q_BHC,
        keys,
        values,
        jnp.where(active_B, position_B + 1, 0),
        table_BW,
        attn_logits_soft_cap=softcap or None,
        pages_per_compute_block=math.gcd(table_BW.shape[1], KERNEL_PAGES),
    )
