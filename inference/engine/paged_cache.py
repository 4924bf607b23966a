"""Keys and values in pages: a slot takes as many pages as its tokens fill, where kv_cache.py keeps its whole capacity.

1. `create` makes P pages of S positions for each stack of layers, head-major. A key and its value are side by side, so that heads of
   64 dims fill the vectors of a TPU. The kernel gets all layers, because a slice in front of its call is a copy of the whole cache.
2. The host decides which pages a slot has (inference/scheduler/page_table.py). Each decode call gets them as a table.
3. `attend_at` writes the new key of each active slot into its page, and attends. On a TPU, a kernel reads the pages in
   use and no others (models/kernels/paged_attention.py); elsewhere XLA gathers the pages of each slot, as many as the capacity has.
4. `of_prompts` and `take` copy pages out of prefilled prompts and of slots, `put` copies them into other pages.
5. On a mesh with several batch shards, each has the pages of its own slots: page p is in shard p // (P / shards).

A slot's result depends on its own tokens alone: neither on the order of its pages nor on other slots.

Pages of 8-bit floats hold twice the tokens. Their keys are rounded, so such a server samples from a policy close to the published one.

Letters: B slots, K key heads, N layers of a stack, P pages, S positions of a page, C head dim, D = 2 C, W pages of a slot at most, M
pages of a copy, H query heads.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from inference.engine import kv_cache
from models import attention, transformer
from models import config as config_lib
from models.kernels import paged_attention
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules

PAGE = 64  # positions: a page of a 106 B model's layers has 11 MiB, and the last page of a sequence is half empty
DTYPES = ("", "float8_e4m3fn")  # of pages
PartitionSpec = jax.sharding.PartitionSpec
Entries = tuple[tuple[jax.Array], ...]  # ([K, N, M, S, D],) of each stack: P pages, or M of a copy


@struct.dataclass
class PagedCache:
    """The keys and values of all slots, in pages: ([K, N, P, S, D],) of each stack of layers."""

    entries: Entries


def check(model: config_lib.ModelConfig, mesh: jax.sharding.Mesh | None = None) -> None:
    """Raises ValueError if this model, or the mesh of its server, needs slots of whole capacity."""
    reasons = {"latent attention": model.is_latent, "attention sinks": model.sinks, "sliding layers": model.window > 0}
    if mesh is not None:
        parts, is_tpu = mesh.shape["tensor"], _is_tpu(mesh)
        reasons |= {
            f"{model.num_kv_heads} key heads over tensor={parts}": model.num_kv_heads % parts > 0,
            f"head_dim = {model.head_dim} in {model.dtype} on a TPU": is_tpu
            and not paged_attention.fits(model.head_dim, model.dtype),
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
        shape = config.num_kv_heads, num_layers, num_pages, PAGE, 2 * config.head_dim
        return jnp.zeros(shape, dtype or config.dtype)

    return PagedCache(tuple((zeros(len(layers)),) for layers in transformer.stacks(config).values()))


def layout(cache: PagedCache, mesh) -> PagedCache:
    """Returns the `PartitionSpec` of each array: pages over the batch axes, key heads over `tensor`."""
    return jax.tree.map(lambda x: rules.fitting(mesh, x.shape, ("kv_heads", None, "batch", None, None)), cache)


def attend_at(cache: PagedCache, position_B: jax.Array, active_B: jax.Array, table_BW: jax.Array) -> Callable:
    """Returns the attention function of `transformer.extend` for one new token per slot, at `position_B`.

    Page w of a slot, `table_BW[b, w]`, has its positions from w S on. Entries past its last page name any page. Only
    active slots write. The output of others is zeros, or undefined.
    """
    mesh, steps = rules.several_devices(), None
    names = rules.fitting(mesh, position_B.shape, ("batch",))[0] if mesh else None
    of_pages, of_heads = PartitionSpec("tensor", None, names), PartitionSpec(names, None, "tensor")
    of_slots, whole, places = PartitionSpec(names), PartitionSpec(), (position_B, active_B, table_BW)

    def on_each(function, in_specs, out_specs):
        if mesh is None:
            return function
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    if mesh_lib.platform() == "tpu":
        steps = on_each(_visits, (of_pages, *[of_slots] * 3), of_slots)(cache.entries[0][0], *places)

    def attend(entry, q_B1HC, k_B1KC, v_B1KC, *, window: int = 0, value_dim: int = 0, sinks_H=None, **how):
        assert not window and not value_dim and sinks_H is None, "check() refuses these"
        pages, *layer = entry
        specs = of_pages, *[of_heads] * 3, *[of_slots] * 4, whole
        step = on_each(functools.partial(_step, **how), specs, (of_heads, of_pages))
        out_B1HC, pages = step(pages, q_B1HC, k_B1KC, v_B1KC, *places, steps, layer)
        return out_B1HC, (pages, *layer)

    return attend


def of_prompts(cache: kv_cache.Cache, rows_M: jax.Array, firsts_M: jax.Array) -> Entries:
    """Returns M pages of the prompts in a cache of `kv_cache.create`: page m has row `rows_M[m]` from position `firsts_M[m]` on."""

    def of(x):
        x = x[None] if x.ndim == 4 else x
        T = x.shape[3]
        at_MS = firsts_M[:, None] + jnp.arange(PAGE)[None]
        # Positions past the end of the array are past that of the prompt, too: no query reads them.
        pages_MSNKC = x[:, rows_M[:, None], :, jnp.minimum(at_MS, T - 1)]
        return pages_MSNKC.transpose(3, 2, 0, 1, 4)

    return tuple((jnp.concatenate([*map(of, jax.tree.leaves(entry))], axis=-1),) for entry in cache)


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


def _visits(pages, position_B, active_B, table_BW) -> paged_attention.Visits:
    """Returns the grid steps of the kernel on one device."""
    K, _, P, S, D = pages.shape
    num_pages = paged_attention.pages_per_step(K * S * D * pages.dtype.itemsize, table_BW.shape[1])
    return paged_attention.visits(jnp.where(active_B, position_B + 1, 0), table_BW % P, S, num_pages)


def _step(pages, q_B1HC, k_B1KC, v_B1KC, position_B, active_B, table_BW, steps, layer, *, scale=None):
    """Writes the new keys and values and attends, on one device for its slots and heads; returns (out [B, 1, H, C], pages)."""
    K, N, P, S, D = pages.shape
    layer, table_BW = layer[0] if layer else 0, table_BW % P
    page_B = jnp.take_along_axis(table_BW, (position_B // S)[:, None], axis=1)[:, 0] + layer * P
    page_B = jnp.where(active_B, page_B, N * P + jnp.arange(len(page_B)))  # out of range: not written
    where = jnp.arange(K)[:, None], page_B[None], (position_B % S)[None]
    new_KBD = _rounded(jnp.concatenate([k_B1KC, v_B1KC], axis=-1)[:, 0].swapaxes(0, 1), pages.dtype)
    flat = pages.reshape(K, N * P, S, D).at[where].set(new_KBD, unique_indices=True, mode="drop")
    pages, C = flat.reshape(pages.shape), D // 2
    scale = C**-0.5 if scale is None else scale
    if steps is not None:
        out_BHC = paged_attention.attend(q_B1HC[:, 0], pages, layer, steps, scale=scale)
        out_B1HC = jnp.where(active_B[:, None, None], out_BHC, 0)[:, None]
    else:
        read_KBWSD = flat[:, table_BW + layer * P].astype(q_B1HC.dtype)
        k_BKSC, v_BKSC = jnp.split(read_KBWSD.swapaxes(0, 1).reshape(len(page_B), K, -1, D), 2, axis=-1)
        mask_B1S = jnp.arange(k_BKSC.shape[2])[None, None] <= position_B[:, None, None]
        out_B1HC = attention.attend(q_B1HC, k_BKSC, v_BKSC, mask_B1S, scale=scale)
    return out_B1HC, pages
