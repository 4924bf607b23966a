"""The decoder: tokens -> hidden states -> logits, for the learner and the inference engine alike.

`apply` (learner) and `extend` (inference engine) run the same layers and differ only in how a layer attends.

The fields of `ModelConfig` select the differences of the model families. With `config.scan_layers`, layers of one kind
are stacked and scanned: their parameters have a leading dim.

Letters: B sequences, T tokens, S cache length, D model, H query heads, K key heads, C head dim (V of values), F ffn,
R latent dim, N plain and P rotated dims of a latent head, E experts, X experts per token, L layers, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models import attention, blocks, layers, moe, moe_experts
from models import config as config_lib
from models.kernels import attention_tiles, cpu_transposed, int8
from sharding.mesh import fsdp, rules

Params = dict


def specs(config: config_lib.ModelConfig) -> Params:
    """Returns the model's tree of `ParamSpec`: each parameter's shape, dtype, logical dims and initializer."""
    D, V = config.model_dim, config.vocab_size

    def stacked(indices):
        def stack(spec):
            shape, axes = (len(indices), *spec.shape), ("layers", *spec.logical_axes)
            return dataclasses.replace(spec, shape=shape, logical_axes=axes) if config.scan_layers else spec

        return jax.tree.map(stack, blocks.specs(config, indices[0]), is_leaf=rules.is_spec)

    tree = {
        "embed": blocks.kernel(config, D, vocab=V, model=D),  # unit-variance logits when the head is tied
        "layers": {key: stacked(indices) for key, indices in stacks(config).items()},
        "final_norm": blocks.scale(config, D),
    }
    if not config.tie_embeddings:
        tree["lm_head"] = blocks.kernel(config, D, model=D, vocab=V)
    return tree


def abstract(config: config_lib.ModelConfig, mesh: jax.sharding.Mesh | None = None) -> Params:
    """Returns the model's parameters as a tree of `ShapeDtypeStruct`, with shardings if a mesh is given; allocates no arrays."""
    return rules.abstract(specs(config), mesh)


def init(key: jax.Array, config: config_lib.ModelConfig) -> Params:
    """Returns randomly initialized parameters. Each depends on `key` and its own path only, also in stacked layers."""

    def draw(path, spec):
        names = [part.key for part in path]

        def one(path_hash, shape):
            return spec.init(jax.random.fold_in(key, path_hash), shape, spec.dtype)

        if names[0] != "layers" or not config.scan_layers:
            return one(_path_hash(names), spec.shape)
        hashes = [_path_hash(["layers", f"{index:03d}", *names[2:]]) for index in stacks(config)[names[1]]]
        return jax.vmap(lambda path_hash: one(path_hash, spec.shape[1:]))(jnp.asarray(hashes, jnp.uint32))

    return jax.tree_util.tree_map_with_path(draw, specs(config), is_leaf=rules.is_spec)


def num_params(config: config_lib.ModelConfig) -> int:
    """Returns the number of parameters of the model."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs(config), is_leaf=rules.is_spec))


def num_bytes(config: config_lib.ModelConfig) -> int:
    """Returns the number of bytes of the model's parameters at rest."""
    leaves = jax.tree.leaves(specs(config), is_leaf=rules.is_spec)
    return sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in leaves)


def apply(
    params: Params,
    config: config_lib.ModelConfig,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    branch_ids_BT: jax.Array | None = None,
    experts_LBTX: jax.Array | None = None,
) -> tuple[jax.Array, moe.Routing | None]:
    """Runs the decoder on whole rows of packed sequences, without a cache.

    Returns (hidden states [B, T, D] after the final norm, routing of tokens to experts, stacked over MoE layers, or None
    without MoE layers). Padding is not counted in the routing's loads.

    Args:
      params: the parameters, as `init` returns them.
      config: static under jit.
      tokens_BT: int32 token ids.
      positions_BT: position of each token in its own sequence; 0..T-1 when None.
      segment_ids_BT: 1, 2, ... per packed sequence, 0 for padding; one sequence per row when None.
      branch_ids_BT: 0 in a prompt that several completions share, 1, 2, ... in the completions; no sharing when None.
      experts_LBTX: experts to use in each MoE layer (router replay). The router chooses when None, and where negative.
    """
    B, T = tokens_BT.shape
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    segment_ids_BT = jnp.ones((B, T), jnp.int32) if segment_ids_BT is None else segment_ids_BT
    packing = attention.Packing(positions_BT, segment_ids_BT, branch_ids_BT)

    def attend(entry, q_BTHC, k_BTKC, v_BTKV, **options):
        options |= {"implementation": config.attention}
        return attention.attend_packed(q_BTHC, k_BTKC, v_BTKV, packing, **options), entry

    given = {"experts_LBTX": experts_LBTX, "valid_BT": segment_ids_BT != 0}
    hidden_BTD, _, routing = _run(params, config, tokens_BT, positions_BT, None, attend, **given)
    return hidden_BTD, routing


def extend(
    params: Params,
    config: config_lib.ModelConfig,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    cache: tuple,
    attend_cached: Callable,
    *,
    experts_LBTX: jax.Array | None = None,
) -> tuple[jax.Array, tuple, moe.Routing | None]:
    """Runs the decoder on new tokens of sequences whose earlier keys and values are in `cache`.

    Returns (hidden states [B, T, D] after the final norm, new cache, routing as in `apply`, with padding counted in loads).
    `cache` has one entry per key of `stacks(config)`, in a layout that only `attend_cached` uses
    (inference/engine/kv_cache.py). `attend_cached(entry, q_BTHC, k_BTKC, v_BTKV, **options) -> (out_BTHV, entry)` writes
    the new keys and attends; with stacked layers, the layer's index in the stack follows as the last item of `entry`. Options
    are those of `attention.attend`, and `window` and `value_dim`. Latent attention passes latents as its only key head.
    """
    return _run(params, config, tokens_BT, positions_BT, cache, attend_cached, experts_LBTX=experts_LBTX)


def embed(params: Params, config: config_lib.ModelConfig, tokens_BT: jax.Array, positions_BT: jax.Array):
    """Returns the embeddings [B, T, D], which the first layer reads, and a rotary table for each kind of layer: {is_sliding: table}."""
    kinds = {config.is_sliding(index) for index in range(config.num_layers)}
    rotations = {sliding: layers.rotation(config, positions_BT, sliding=sliding) for sliding in kinds}
    table_VD = params["embed"]
    if isinstance(table_VD, cpu_transposed.Transposed):
        x_BTD = table_VD.channels(tokens_BT, config.dtype)
    else:
        is_int8 = isinstance(table_VD, int8.Quantized)
        x_BTD = _rows(table_VD.values if is_int8 else table_VD, tokens_BT, config.dtype)
        x_BTD = int8.scaled(x_BTD, table_VD.scale[tokens_BT]) if is_int8 else x_BTD
    if config.scale_embeddings:
        x_BTD *= jnp.asarray(config.model_dim**0.5, x_BTD.dtype)
    return rules.constrain(x_BTD, "batch", "sequence", None), rotations


def run_layer(
    params: Params,
    config: config_lib.ModelConfig,
    x_BTD: jax.Array,
    rotation,
    entry,
    attend_cached,
    *,
    sliding: bool,
    absorbed: bool = True,
    experts_BTX: jax.Array | None = None,
    valid_BT: jax.Array | None = None,
):
    """Runs one layer of `extend`, with its parameters and its entry of the cache; returns (x_BTD, new entry, routing or None).

    The last three options are those of `blocks.run`.
    """

    def attend(*qkv, **options):
        nonlocal entry
        out_BTHV, entry = attend_cached(entry, *qkv, **options)
        return out_BTHV

    how = {"sliding": sliding, "absorbed": absorbed, "experts_BTX": experts_BTX, "valid_BT": valid_BT}
    x_BTD, routing = blocks.run(params, config, x_BTD, attend, rotation, **how)
    return x_BTD, entry, routing


def normed(params: Params, config: config_lib.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """Returns the hidden states after the final norm, from the result of the last layer."""
    return layers.rms_norm(x_BTD, params["final_norm"], config.norm_eps, config.norm)


def precision(config: config_lib.ModelConfig) -> contextlib.AbstractContextManager:
    """Returns a context in which jax computes float32 products in full float32, forward and backward, if that is the model's dtype.

    By default GPUs round their operands to TF32 and TPUs to bfloat16: on an H100 log-probabilities of the quickstart's engine and of
    its replay differed by 6e-4. Products of bfloat16 stay as they are: some kernels reject the setting.
    """
    return jax.default_matmul_precision("highest") if config.dtype == "float32" else contextlib.nullcontext()


def precise(function: Callable) -> Callable:
    """Decorates a function of (config, further arguments) that jax traces in `precision(config)`."""

    @functools.wraps(function)
    def call(config, *args):
        with precision(config):
            return function(config, *args)

    return call


def logits(params: Params, config: config_lib.ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
    """Returns the logits of the output head for the hidden states of `apply` or `extend`, float32 [B, T, V]."""
    head = params["lm_head" if "lm_head" in params else "embed"]
    if isinstance(head, cpu_transposed.Transposed):
        logits_BTV = head.astype(hidden_BTD.dtype).rows(hidden_BTD, jnp.float32)
    else:
        kernel_DV = (head if "lm_head" in params else head.T).astype(hidden_BTD.dtype)
        is_int8 = isinstance(kernel_DV, int8.Quantized)
        values_DV = kernel_DV.values.astype(hidden_BTD.dtype) if is_int8 else kernel_DV
        logits_BTV = jnp.einsum("BTD,DV->BTV", hidden_BTD, values_DV, preferred_element_type=jnp.float32)
        logits_BTV = int8.scaled(logits_BTV, kernel_DV.scale) if is_int8 else logits_BTV
    if config.final_softcap:
        logits_BTV = config.final_softcap * jnp.tanh(logits_BTV / config.final_softcap)
    return logits_BTV


def stacks(config: config_lib.ModelConfig) -> dict[str, list[int]]:
    """Maps each key of `params["layers"]` to the layers stored under it, in order.

    Without `config.scan_layers` each layer has its own key. With it, the layers of a stack share the key of the first one.
    A pattern of several kinds (Gemma's five sliding layers and a full one) is one scan, with one stack per place in it.
    """
    return {key: indices for unit in _scans(config) for key, indices in unit.items()}


def restacked(params: Params, old: config_lib.ModelConfig, new: config_lib.ModelConfig) -> Params:
    """Returns the parameters of `old` with layers stacked, or apart, as in `new`, a model that differs in `scan_layers` alone."""
    layers = {
        index: jax.tree.map(lambda leaf, at=at: leaf[at], params["layers"][key])
        if old.scan_layers
        else params["layers"][key]
        for key, indices in stacks(old).items()
        for at, index in enumerate(indices)
    }
    together = {key: [layers[index] for index in indices] for key, indices in stacks(new).items()}
    if new.scan_layers:
        return params | {"layers": {key: jax.tree.map(lambda *x: jnp.stack(x), *one) for key, one in together.items()}}
    return params | {"layers": {key: layer for key, (layer,) in together.items()}}


def _rows(table_VD, tokens_BT, dtype) -> jax.Array:
    """Returns rows of the embedding table; over `fsdp`, devices exchange rows, or the table if it has fewer entries than tokens.

    Gradients are summed in the table's dtype: a token may occur in all rows, and bfloat16 would lose the last of many terms.
    """
    mesh = rules.several_devices()
    shards = 1 if mesh is None else rules.num_batch_shards(mesh)
    is_split = (
        mesh is not None and mesh.shape["fsdp"] > 1 and mesh.shape["expert"] == 1 and len(tokens_BT) % shards == 0
    )
    if not is_split or tokens_BT.size > len(table_VD) * shards:
        return rules.constrain(table_VD, "vocab", None)[tokens_BT].astype(dtype)
    # Each device looks up its own columns, a part of the model dim, for the tokens of all.
    spec = functools.partial(jax.sharding.PartitionSpec, "data", "context")
    if fsdp.near() > 1:
        tokens_BT = fsdp.whole(tokens_BT, 0, "data", "context")
    tokens_BT = jax.lax.with_sharding_constraint(tokens_BT, spec())
    return jax.lax.with_sharding_constraint(table_VD[tokens_BT].astype(dtype), spec("fsdp"))


def _run(params, config, tokens_BT, positions_BT, cache: tuple | None, attend, *, experts_LBTX, valid_BT=None):
    """Returns (hidden states after the final norm, new cache, stacked routing of the MoE layers or None).

    `attend` has the signature of `attend_cached` (see `extend`). For the learner `cache` and its entries are None, and latent
    attention runs over heads instead of latents.
    """
    x_BTD, rotations = embed(params, config, tokens_BT, positions_BT)

    def block(block_params, x_BTD, entry, experts_BTX, sliding):
        options = {"absorbed": cache is not None, "experts_BTX": experts_BTX, "valid_BT": valid_BT, "sliding": sliding}
        x_BTD = checkpoint_name(x_BTD, "block_input")
        return run_layer(block_params, config, x_BTD, rotations[sliding], entry, attend, **options)

    run_block = _remat(block, config) if cache is None else block
    moe_layers = [index for index in range(config.num_layers) if config.is_moe(index)]

    def experts_of(indices):
        if experts_LBTX is None or not config.is_moe(indices[0]):
            return None
        places = [moe_layers.index(index) for index in indices]
        return experts_LBTX[jnp.asarray(places) if config.scan_layers else places[0]]

    new_cache, routings = [], {}
    for unit in _scans(config):
        sliced, whole = [params["layers"][key] for key in unit], [{} for _ in unit]
        if config.scan_layers and cache is not None:
            sliced, whole = zip(*map(_apart, sliced), strict=True)

        def run_unit(carry, slices, unit=unit, whole=whole):
            (x_BTD, entries), (unit_params, experts, n) = carry, slices
            new_entries, routings = [], []
            rows = zip(unit, unit_params, whole, entries, experts, strict=True)
            for key, block_params, stacks, entry, experts_BTX in rows:
                entry = entry if n is None else (*entry, n)
                if stacks and n is not None:
                    kernels = jax.tree.map(functools.partial(moe_experts.InStack, layer=n), stacks)
                    block_params = block_params | {"moe": block_params["moe"] | kernels}
                is_sliding = config.is_sliding(int(key))
                x_BTD, entry, routing = run_block(block_params, x_BTD, entry, experts_BTX, is_sliding)
                new_entries.append(entry if n is None else tuple(entry[:-1]))
                routings.append(routing)
            return (x_BTD, new_entries), routings

        entries = [None] * len(unit) if cache is None else list(cache[len(new_cache) :][: len(unit)])
        slices = list(sliced), [experts_of(indices) for indices in unit.values()]
        if config.scan_layers:
            length = len(next(iter(unit.values())))
            n = None if cache is None else jnp.arange(length)
            (x_BTD, entries), out = jax.lax.scan(run_unit, (x_BTD, entries), (*slices, n))
        else:
            (x_BTD, entries), out = run_unit((x_BTD, entries), (*slices, None))
        new_cache += entries
        for indices, routing in zip(unit.values(), out, strict=True):
            for n, index in enumerate(indices):
                routings[index] = jax.tree.map(lambda x, n=n: x[n], routing) if config.scan_layers else routing
    hidden_BTD = normed(params, config, x_BTD)
    of_moe_layers = [routings[index] for index in moe_layers]
    routing = jax.tree.map(lambda *x: jnp.stack(x), *of_moe_layers) if of_moe_layers else None
    return hidden_BTD, tuple(new_cache), routing


def _apart(params: dict) -> tuple[dict, dict]:
    """Returns the parameters of a stack of layers in two parts: those that a scan slices, and the experts' kernels that it leaves whole."""
    whole = moe_experts.left_in_stack(params.get("moe", {}))
    if not whole:
        return params, {}
    return params | {"moe": {name: x for name, x in params["moe"].items() if name not in whole}}, whole


def _scans(config) -> list[dict[str, list[int]]]:
    """Returns, for each scan over layers in turn, its stacks {key: layers}. Without `scan_layers`, a scan is one layer."""
    if not config.scan_layers:
        return [{f"{index:03d}": [index]} for index in range(config.num_layers)]
    kinds = [(config.is_moe(index), config.is_sliding(index)) for index in range(config.num_layers)]
    out, start = [], 0
    while start < len(kinds):  # the longest repeated pattern from here on
        period, repeats = 1, 1
        for p in range(1, (len(kinds) - start) // 2 + 1):
            unit, r = kinds[start : start + p], 1
            while kinds[start + r * p : start + (r + 1) * p] == unit:
                r += 1
            if r > 1 and p * r > period * repeats:
                period, repeats = p, r
        end = start + period * repeats
        out.append({f"{first:03d}": list(range(first, end, period)) for first in range(start, start + period)})
        start = end
    return out


def _remat(block: Callable, config: config_lib.ModelConfig) -> Callable:
    """Wraps `block` so that the backward pass recomputes the parts that `config.remat` names; its last argument is static."""
    policies = jax.checkpoint_policies
    if config.remat == "none":
        return block
    policy = {
        "block": policies.nothing_saveable,
        "dots": policies.save_only_these_names(layers.SAVED),
        "attention": policies.save_only_these_names(attention_tiles.SAVED),
        # The input of each layer waits in host memory; everything inside the layer is recomputed from it.
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["block_input"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[config.remat]
    # Inside a scan nothing can be merged across layers, and the barrier that prevents it only costs.
    return jax.checkpoint(block, policy=policy, prevent_cse=not config.scan_layers, static_argnums=4)


def _path_hash(names: list[str]) -> int:
    """Returns a stable 31-bit hash of a parameter's path (FNV-1a over its names as "['layers']['000']...")."""
    value = 2166136261
    for byte in "".join(f"['{name}']" for name in names).encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value & 0x7FFFFFFF
