"""The decoder: tokens -> hidden -> logits, one definition of the parameters read three ways.

1. `specs(config)` is the tree of `ParamSpec`; `abstract` reads shapes from it, `init` values, and
   `sharding.rules.shardings` layouts.
2. `apply` runs packed sequences through all layers (learner, scorer). `extend` runs the same blocks over a cache
   of keys (prefill, decode, replay). Both hand `_block` a function that attends, and differ in nothing else:
   what the sampler computes is what the learner computes. `apply_routed` and `extend_routed` also say which experts ran.
3. `logits` is the output head in float32.

Every family runs through this one block, by the switches of its config. With `config.scan_layers`, layers of one kind are
stacked and scanned: the parameters of `stacks` have a leading dim; `stack` and `unstack` convert.

Letters: B sequences, T tokens, S cache length, D model, H query heads, K key heads, C head dim (V of values), F ffn,
R latent dim, N plain and P rotated dims of a latent head, E experts, X experts per token, L layers, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models import attention, blocks, layers, moe
from models import config as config_lib
from models.kernels import cpu_transposed, int8
from sharding import rules

Params = dict


def specs(config: config_lib.ModelConfig) -> Params:
    """The tree of `ParamSpec`: every parameter's shape, dtype, logical dims and initial distribution."""
    D, V = config.model_dim, config.vocab_size
    tree = {
        "embed": blocks.kernel(config, (V, D), ("vocab", "model"), D),  # unit-variance logits when the head is tied
        "layers": {f"{index:03d}": blocks.specs(config, index) for index in range(config.num_layers)},
        "final_norm": blocks.scale(config, D),
    }
    if not config.tie_embeddings:
        tree["lm_head"] = blocks.kernel(config, (D, V), ("model", "vocab"), D)
    if config.scan_layers:
        tree["layers"] = {
            key: jax.tree.map(functools.partial(_stacked, len(indices)), tree["layers"][key], is_leaf=rules.is_spec)
            for key, indices in stacks(config).items()
        }
    return tree


def abstract(config: config_lib.ModelConfig, mesh: jax.sharding.Mesh | None = None) -> Params:
    """The tree of `ShapeDtypeStruct`: a model of any size, without a byte of memory."""
    return rules.abstract(specs(config), mesh)


def init(key: jax.Array, config: config_lib.ModelConfig) -> Params:
    """Draws the parameters; each one's key is folded from its path, so adding a layer changes no other.

    Stacked layers are drawn as the single ones are: `init` of the scanned config is `stack` of the other's.
    """

    def draw(spec, path):
        return spec.init(jax.random.fold_in(key, path_hash(path)), spec.shape, spec.dtype)

    def path_hash(path):
        return _path_hash("".join(f"['{name}']" for name in path))

    plain = specs(dataclasses.replace(config, scan_layers=False))
    if not config.scan_layers:
        return _map_with_names(draw, plain)

    def draw_stack(spec, path, indices):
        hashes_N = jnp.asarray([path_hash(("layers", f"{index:03d}", *path)) for index in indices], jnp.uint32)
        return jax.vmap(lambda h: spec.init(jax.random.fold_in(key, h), spec.shape, spec.dtype))(hashes_N)

    drawn = _map_with_names(draw, {name: spec for name, spec in plain.items() if name != "layers"})
    return drawn | {
        "layers": {
            key: _map_with_names(functools.partial(draw_stack, indices=indices), plain["layers"][key])
            for key, indices in stacks(config).items()
        }
    }


def num_params(config: config_lib.ModelConfig) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs(config), is_leaf=rules.is_spec))


def num_bytes(config: config_lib.ModelConfig) -> int:
    """Of all parameters in `config.param_dtype`."""
    return num_params(config) * jnp.dtype(config.param_dtype).itemsize


def apply(
    params: Params,
    config: config_lib.ModelConfig,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    branch_ids_BT: jax.Array | None = None,
    experts_LBTX: jax.Array | None = None,
) -> jax.Array:
    """Runs whole (packed) sequences; returns the hidden states [B, T, D] after the final norm.

    Args:
      params: the tree of `init`.
      config: static.
      tokens_BT: int32 token ids.
      positions_BT: position of each token in its own sequence; 0..T-1 when None.
      segment_ids_BT: 1, 2, ... per packed sequence, 0 for padding; one sequence per row when None.
      branch_ids_BT: 0 in a prompt that several continuations share, 1, 2, ... in those; no sharing when None.
      experts_LBTX: experts to use in each mixture layer (router replay); the router chooses when None, and where negative.
    """
    return apply_routed(
        params,
        config,
        tokens_BT,
        positions_BT=positions_BT,
        segment_ids_BT=segment_ids_BT,
        branch_ids_BT=branch_ids_BT,
        experts_LBTX=experts_LBTX,
    )[0]


def apply_routed(
    params: Params,
    config: config_lib.ModelConfig,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    branch_ids_BT: jax.Array | None = None,
    experts_LBTX: jax.Array | None = None,
) -> tuple[jax.Array, moe.Routing | None]:
    """`apply`, and the routing of all mixture layers, stacked (None without any); padding does not count in its loads."""
    B, T = tokens_BT.shape
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((B, T), jnp.int32)
    packing = attention.Packing(positions_BT, segment_ids_BT, branch_ids_BT)
    rotations = _rotations(config, positions_BT)

    def attend(q_BTHC, k_BTKC, v_BTKV, **options):
        return attention.attend_packed(q_BTHC, k_BTKC, v_BTKV, packing, implementation=config.attention, **options)

    def block(block_params, x_BTD, experts_BTX, sliding):
        x_BTD = checkpoint_name(x_BTD, "block_input")
        return blocks.run(
            block_params,
            config,
            x_BTD,
            attend,
            rotations[sliding],
            sliding=sliding,
            experts_BTX=experts_BTX,
            valid_BT=segment_ids_BT != 0,
        )

    block = _remat(block, config)
    x_BTD = _embed(params, config, tokens_BT)
    routings = {}
    if not config.scan_layers:
        for index in range(config.num_layers):
            experts_BTX = _of_layers(experts_LBTX, config, index)
            x_BTD, routings[index] = block(
                params["layers"][f"{index:03d}"], x_BTD, experts_BTX, config.is_sliding(index)
            )
    else:
        for keys, indices in _scans(config):

            def body(x_BTD, slices, keys=keys):
                out = []
                for key, block_params, experts_BTX in zip(keys, *slices, strict=True):
                    x_BTD, routing = block(block_params, x_BTD, experts_BTX, config.is_sliding(int(key)))
                    out.append(routing)
                return x_BTD, out

            experts = [_of_layers(experts_LBTX, config, of_key) for of_key in indices]
            x_BTD, stacked = jax.lax.scan(body, x_BTD, ([params["layers"][key] for key in keys], experts))
            for of_key, routing_N in zip(indices, stacked, strict=True):
                for n, index in enumerate(of_key):
                    routings[index] = jax.tree.map(lambda x, n=n: x[n], routing_N)
    hidden_BTD = layers.rms_norm(x_BTD, params["final_norm"], config.norm_eps, config.norm)
    routings = [routings[index] for index in range(config.num_layers) if config.is_moe(index)]
    return hidden_BTD, jax.tree.map(lambda *x: jnp.stack(x), *routings) if routings else None


def extend(
    params: Params,
    config: config_lib.ModelConfig,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    cache: tuple,
    attend_cached: Callable,
) -> tuple[jax.Array, tuple]:
    """Runs tokens that continue cached sequences; returns (hidden [B, T, D] after the final norm, new cache).

    `cache` holds one entry per layer (per stack of `stacks`, if scanned), opaque here. `attend_cached(entry, q_BTHC,
    k_BTKC, v_BTKV, **options) -> (out_BTHV, entry)` owns the layout of the cache, writes the new keys and attends
    (inference/engine/kv_cache.py). The options are those of `attention.attend`, window and value_dim; a layer that needs none
    passes none. Latent attention passes its latents as the one key head, and reads its values from them.
    """
    return extend_routed(params, config, tokens_BT, positions_BT, cache, attend_cached)[:2]


def extend_routed(
    params: Params,
    config: config_lib.ModelConfig,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    cache: tuple,
    attend_cached: Callable,
    *,
    experts_LBTX: jax.Array | None = None,
) -> tuple[jax.Array, tuple, tuple[jax.Array, jax.Array | None] | None]:
    """`extend`, and of the mixture layers (None without any) the experts that ran, [L, B, T, X], for router replay.

    `experts_LBTX`, as `apply` takes them, run in place of the routers' choice; beside them comes then how far they are from it
    (`Routing.margin`, [L, B, T]).
    """
    rotations = _rotations(config, positions_BT)

    def block(block_params, x_BTD, entry, experts_BTX, sliding):
        new_entry = None

        def attend(q_BTHC, k_BTKC, v_BTKV, **options):
            nonlocal new_entry
            out_BTHV, new_entry = attend_cached(entry, q_BTHC, k_BTKC, v_BTKV, **options)
            return out_BTHV

        x_BTD, routing = blocks.run(
            block_params,
            config,
            x_BTD,
            attend,
            rotations[sliding],
            sliding=sliding,
            absorbed=True,
            experts_BTX=experts_BTX,
        )
        return x_BTD, new_entry, None if routing is None else (routing.experts, routing.margin)

    x_BTD = _embed(params, config, tokens_BT)
    chosen, entries = {}, []
    if not config.scan_layers:
        for index in range(config.num_layers):
            experts_BTX = _of_layers(experts_LBTX, config, index)
            x_BTD, entry, chosen[index] = block(
                params["layers"][f"{index:03d}"], x_BTD, cache[index], experts_BTX, config.is_sliding(index)
            )
            entries.append(entry)
    else:
        for keys, indices in _scans(config):

            def body(carry, slices, keys=keys):
                x_BTD, entries = carry
                (block_params, experts, n), out, new_entries = slices, [], []
                for key, one_params, entry, experts_BTX in zip(keys, block_params, entries, experts, strict=True):
                    sliding = config.is_sliding(int(key))
                    x_BTD, (*entry, _), of_block = block(one_params, x_BTD, (*entry, n), experts_BTX, sliding)
                    out.append(of_block)
                    new_entries.append(tuple(entry))
                return (x_BTD, new_entries), out

            old = [cache[len(entries) + j] for j in range(len(keys))]
            given = [_of_layers(experts_LBTX, config, of_key) for of_key in indices]
            slices = [params["layers"][key] for key in keys], given, jnp.arange(len(indices[0]))
            (x_BTD, new), out = jax.lax.scan(body, (x_BTD, old), slices)
            entries += new
            for of_key, chosen_N in zip(indices, out, strict=True):
                chosen |= {index: jax.tree.map(lambda x, n=n: x[n], chosen_N) for n, index in enumerate(of_key)}
    hidden_BTD = layers.rms_norm(x_BTD, params["final_norm"], config.norm_eps, config.norm)
    chosen = [chosen[index] for index in range(config.num_layers) if config.is_moe(index)]
    return hidden_BTD, tuple(entries), jax.tree.map(lambda *x: jnp.stack(x), *chosen) if chosen else None


def logits(params: Params, config: config_lib.ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
    """The output head, float32 [B, T, V]: sampler and learner must agree on log-probabilities to 1e-4."""
    kernel_DV = head(params).astype(hidden_BTD.dtype)
    if cpu_transposed.is_transposed(kernel_DV):
        logits_BTV = kernel_DV.rows(hidden_BTD, jnp.float32)
    elif int8.is_quantized(kernel_DV):
        integers_DV = kernel_DV.values.astype(hidden_BTD.dtype)
        logits_BTV = jnp.einsum("BTD,DV->BTV", hidden_BTD, integers_DV, preferred_element_type=jnp.float32)
        logits_BTV = int8.scaled(logits_BTV, kernel_DV.scale)
    else:
        logits_BTV = jnp.einsum("BTD,DV->BTV", hidden_BTD, kernel_DV, preferred_element_type=jnp.float32)
    if config.final_softcap:
        logits_BTV = config.final_softcap * jnp.tanh(logits_BTV / config.final_softcap)
    return logits_BTV


def head(params: Params) -> jax.Array:
    """The output head's kernel [D, V]: of its own, or the embedding's."""
    return params["lm_head"] if "lm_head" in params else params["embed"].T


def stacks(config: config_lib.ModelConfig) -> dict[str, list[int]]:
    """Which layers share a stack when layers are scanned: the first one's key -> their indices, in order.

    A pattern of several kinds (Gemma's five sliding layers and a full one) is scanned as a unit, each place a stack.
    """
    kinds = [(config.is_moe(index), config.is_sliding(index)) for index in range(config.num_layers)]
    out, start = {}, 0
    while start < len(kinds):
        period, repeats = 1, 1
        for p in range(1, (len(kinds) - start) // 2 + 1):
            unit, r = kinds[start : start + p], 1
            while kinds[start + r * p : start + (r + 1) * p] == unit:
                r += 1
            if r > 1 and p * r > period * repeats:
                period, repeats = p, r
        for j in range(period):
            out[f"{start + j:03d}"] = [start + j + n * period for n in range(repeats)]
        start += period * repeats
    return out


def stack(params: Params, config: config_lib.ModelConfig) -> Params:
    """The tree of single layers -> the tree of `stacks` (what `config.scan_layers` reads)."""
    single = params["layers"]
    return params | {
        "layers": {
            key: jax.tree.map(lambda *x: jnp.stack(x), *(single[f"{index:03d}"] for index in indices))
            for key, indices in stacks(config).items()
        }
    }


def unstack(params: Params, config: config_lib.ModelConfig) -> Params:
    """The tree of `stacks` -> the tree of single layers."""
    single = {
        f"{index:03d}": jax.tree.map(lambda x, n=n: x[n], params["layers"][key])
        for key, indices in stacks(config).items()
        for n, index in enumerate(indices)
    }
    return params | {"layers": dict(sorted(single.items()))}


def _embed(params, config, tokens_BT):
    # The table is gathered over `fsdp` first: looked up as it lies, its rows would come back split over the model dim,
    # and XLA would replicate them in full to split them over the batch instead.
    if int8.is_quantized(params["embed"]):
        values_VD = rules.constrain(params["embed"].values, "vocab", None)
        x_BTD = int8.rows(params["embed"].replace(values=values_VD), tokens_BT, config.dtype)
    else:
        table_VD = rules.constrain(params["embed"].astype(config.dtype), "vocab", None)
        x_BTD = table_VD[tokens_BT]
    if config.scale_embeddings:
        x_BTD *= jnp.asarray(config.model_dim**0.5, x_BTD.dtype)
    return rules.constrain(x_BTD, "batch", "sequence", None)


def _rotations(config, positions_BT) -> dict[bool, layers.Rotation]:
    """By whether the layer slides; computed once for all layers."""
    kinds = {config.is_sliding(index) for index in range(config.num_layers)}
    return {sliding: layers.rotation(config, positions_BT, sliding=sliding) for sliding in kinds}


def _remat(block: Callable, config: config_lib.ModelConfig) -> Callable:
    """What the backward pass of a layer recomputes, by name; `block`'s last argument is static."""
    policies = jax.checkpoint_policies
    if config.remat == "none":
        return block
    policy = {
        "block": policies.nothing_saveable,
        "dots": policies.save_only_these_names(layers.SAVED),
        # The input of each layer waits in host memory; everything inside the layer is recomputed from it.
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["block_input"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[config.remat]
    # Inside a scan nothing can be merged across layers, and the barrier that prevents it only costs.
    return jax.checkpoint(block, policy=policy, prevent_cse=not config.scan_layers, static_argnums=3)


def _scans(config) -> list[tuple[list[str], list[list[int]]]]:
    """The scans that make up the model, in order: the keys of a unit, and the layers of each."""
    out, next_start = [], 0
    for key, indices in stacks(config).items():
        if int(key) == next_start:
            out.append(([], []))
        out[-1][0].append(key)
        out[-1][1].append(indices)
        next_start = max(next_start, indices[-1] + 1)
    return out


def _of_layers(experts_LBTX, config, layers_wanted: int | list[int]):
    """The replayed experts of one layer, or stacked of several; None where there are none."""
    first = layers_wanted if isinstance(layers_wanted, int) else layers_wanted[0]
    if experts_LBTX is None or not config.is_moe(first):
        return None
    mixtures = [index for index in range(config.num_layers) if config.is_moe(index)]
    if isinstance(layers_wanted, int):
        return experts_LBTX[mixtures.index(layers_wanted)]
    return experts_LBTX[jnp.asarray([mixtures.index(index) for index in layers_wanted])]


def _stacked(num_layers: int, spec: rules.ParamSpec) -> rules.ParamSpec:
    return dataclasses.replace(spec, shape=(num_layers, *spec.shape), logical_axes=("layers", *spec.logical_axes))


def _map_with_names(function, tree):
    """tree.map of `function(spec, names from the root)`."""

    def call(path, spec):
        return function(spec, tuple(key.key for key in path))

    return jax.tree_util.tree_map_with_path(call, tree, is_leaf=rules.is_spec)


def _path_hash(path: str) -> int:
    """A stable 31-bit number of a parameter's path (FNV-1a)."""
    value = 2166136261
    for byte in path.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value & 0x7FFFFFFF
