"""The compiled steps of a large model on a CPU: programs of one or a few layers, which Python calls one after the other.

1. A program of all 30 layers compiles for 8 s, and each number of slots and prompts needs its own. That of one layer compiles for 0.9 s,
   once for all layers that are alike, and runs prompts. A decode step of few sequences runs a few layers at a time, which compiles for
   1.6 s: with int8 weights, 30 layers take 17 ms one by one, and 14 ms in groups of 5.
2. So a decode state has as many slots and positions as the load needs, and `resized` gives it more or fewer.
3. `prefill`, `prefill_chunk`, and `generate` have the arguments and results of compiled_steps.py. `generate` blocks until the
   step before its last one has ended, because it stops early when no slot is active.

4. `UnstackedWeights` divides stacks of layers (`ModelConfig.scan_layers`): a scan copies each layer's weights before it multiplies with
   them. So an engine on a CPU never scans, however the learner or the checkpoint stores the layers. A layer is a view, not a copy.

A product of another number of rows may round differently, so a sequence's last bits depend on how many others run.

Letters: those of compiled_steps.py, and S positions of a block.
"""

import dataclasses
import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from inference.engine import compiled_steps, cpu_decode_attention, cpu_sub_batches, decode_state, kv_cache
from models import config as config_lib
from models import routed_experts, transformer

MAX_LAYERS = 6  # of a program
FEW = 16  # sequences: a step of more takes so long that its calls do not matter
SHARED = 8  # tokens: prompts share a multiple of it
GROWTH = 2  # from one number of slots, or blocks, to the next


def fits(model: config_lib.ModelConfig) -> bool:
    """Returns True for a model on one CPU device, of unstacked layers, whose weights are too large for a CPU's caches."""
    return cpu_decode_attention.fits(model) and transformer.num_bytes(model) > cpu_sub_batches.MAX_WEIGHTS_BYTES


def sizes(most: int) -> tuple[int, ...]:
    """Returns the sizes that a state can have, in slots or in blocks: ascending, and at most `most`."""
    return *(GROWTH**n for n in range(most.bit_length()) if GROWTH**n < most), most


def empty_slots(model, num_slots, capacity, num_blocks) -> decode_state.DecodeState:
    """Returns a `DecodeState` of unused slots, with room for the first `num_blocks` blocks of `capacity` positions."""
    cache = jax.eval_shape(lambda: cpu_decode_attention.create(model, num_slots, capacity, num_blocks))
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), cache)
    return jax.tree.map(jnp.array, compiled_steps.unused_slots(model, num_slots, cache))  # copies: the state is donated


def resized(model, state: decode_state.DecodeState, slots: np.ndarray, num_blocks: int) -> decode_state.DecodeState:
    """Returns a state of other sizes: slot i is slot `slots[i]` of `state`, or unused if that is out of range. Deletes `state`.

    Copies on the host, since a program for each pair of sizes would take longer to compile.
    """
    own = slots < len(state.token)

    def moved(x, new, at=()):
        old = np.asarray(x)
        new[(*at, own)] = old[(*at, slots[own])]
        x.delete()
        return jnp.array(new)

    def resized_blocks(x):
        new = np.zeros((num_blocks, len(slots), *x.shape[2:]), x.dtype)
        return moved(x, new, (slice(min(num_blocks, len(x))),))

    unused = jax.tree.map(np.array, compiled_steps.unused_slots(model, len(slots), ()))
    rows = jax.tree.map(moved, dataclasses.replace(state, cache=()), unused)
    return dataclasses.replace(rows, cache=jax.tree.map(resized_blocks, state.cache))


def prefill(model, routed, params, tokens_PT, length_P, *, shares=True) -> decode_state.Prefix:
    """Does as `compiled_steps.prefill`. Tokens with which all prompts begin, such as a system prompt, are computed once if it `shares`."""
    tokens_PT, length_P = np.asarray(tokens_PT), np.asarray(length_P)
    cache, experts = (None,) * model.num_layers, ()
    shared = num_shared(tokens_PT, length_P) if shares else 0
    if shared:
        start_1 = np.zeros(1, np.int32)
        cache, experts = prefill_chunk(model, routed, params, tokens_PT[:1, :shared], start_1, cache)
        cache, experts = _repeated(cache, *tokens_PT.shape), _repeated(experts, len(tokens_PT))
    start_P = np.full_like(length_P, shared)
    cache, later = prefill_chunk(model, routed, params, tokens_PT[:, shared:], start_P, cache)
    if experts:
        later = (jnp.concatenate([*experts, *later], axis=1),)
    last_P = np.take_along_axis(tokens_PT, length_P[:, None] - 1, axis=1)[:, 0]
    return decode_state.Prefix(cache, last_P, length_P, later)


def num_shared(tokens_PT: np.ndarray, length_P: np.ndarray) -> int:
    """Returns the number of tokens with which all prompts begin, rounded down to a multiple of `SHARED`. The last token of a prompt never counts.

    Prompts of fewer than two tokens are padding and do not count. The number is rounded because each value needs its own compiled
    programs.
    """
    prompts_PT = tokens_PT[length_P > 1]
    if len(prompts_PT) < 2:
        return 0
    is_same_T = (prompts_PT == prompts_PT[0]).all(axis=0)
    return int(min(np.append(is_same_T, False).argmin(), length_P[length_P > 1].min() - 1)) // SHARED * SHARED


def prefill_chunk(model, routed, params, tokens_PT, start_P, cache):
    """Does as `compiled_steps.prefill_chunk`. Entries of None in `cache` become caches for these tokens alone."""
    x_PTD, rotations = _embed(model, params["embed"], tokens_PT, start_P)
    _, cache, routings = _layers(model, params, x_PTD, rotations, cache, start_P, None)
    return cache, (_experts(model, routings),) if routed else ()


def generate(model, num_steps, max_len, routed, num_kept, params, limit, table_BW, state):
    """Does as `compiled_steps.generate`, for a cache that is not in pages. Blocks, but not for the last step."""
    assert table_BW is None
    cache, state = state.cache, state.replace(cache=())
    ends = {name: params[name] for name in ("embed", "lm_head", "final_norm") if name in params}
    request, active = jax.device_get((state.request, state.active))
    has_proofs, is_plain = (active & request.want_proof).any(), decode_state.is_plain(request, active)
    outputs, going = _no_outputs(model, num_steps, routed, num_kept, state), []
    while len(going) < min(num_steps, limit) and (len(going) < 2 or going[-2]):
        x_B1D, rotations, *where = _begin(model, params["embed"], state)
        x_B1D, cache, routings = _layers(model, params, x_B1D, rotations, cache, *where)
        routings = routings if routed else ()
        state, outputs, is_any_left = _end(model, max_len, num_kept, is_plain, ends, state, outputs, x_B1D, routings)
        going.append(is_any_left)
    return state.replace(cache=cache), _result_of(state, outputs, has_proofs)


def _layers(model, params, x_BTD, rotations, cache, start_B, write_BT):
    """Runs all layers; returns (x_BTD, new cache, routings of the MoE layers)."""
    entries, routings = [], []
    size = _alike(model) if x_BTD.shape[1] == 1 and len(x_BTD) <= FEW else 1
    for first in range(0, len(cache), size):
        indices = range(first, first + size)
        sliding = tuple(model.is_sliding(index) for index in indices)
        layers = [params["layers"][f"{index:03d}"] for index in indices]
        these = cache[first : first + size]
        x_BTD, new, routing = _some_layers(model, sliding, layers, x_BTD, these, rotations, start_B, write_BT)
        entries += new
        routings += routing
    return x_BTD, tuple(entries), tuple(routings)


@functools.cache
def _alike(model) -> int:
    """Returns how many layers, at most `MAX_LAYERS`, a program can have that runs all of them, group after group."""
    kinds = [(model.is_moe(index), model.is_sliding(index)) for index in range(model.num_layers)]
    return max((n for n in range(1, MAX_LAYERS + 1) if kinds[:n] * (len(kinds) // n) == kinds), default=1)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _some_layers(model, sliding, layers, x_BTD, entries, rotations, start_B, write_BT):
    new, routings = [], []
    attend = kv_cache.attend_at(start_B, write_BT=write_BT, implementation=model.attention)
    for params, entry, is_sliding in zip(layers, entries, sliding, strict=True):
        if entry is None:
            (entry,) = kv_cache.create(model, *x_BTD.shape[:2], num_layers=1)
        with transformer.precision(model):
            step = transformer.run_layer(params, model, x_BTD, rotations[is_sliding], entry, attend, sliding=is_sliding)
        x_BTD, entry, routing = step
        new.append(entry)
        routings += [] if routing is None else [routing]
    return x_BTD, new, routings


@functools.partial(jax.jit, static_argnums=0)
def _embed(model, table, tokens_BT, start_B):
    positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    return transformer.embed({"embed": table}, model, tokens_BT, positions_BT)


@functools.partial(jax.jit, static_argnums=0)
def _begin(model, table, state):
    """Returns the embeddings of a decode step, the rotary tables, and where the layers attend and write."""
    x_and_rotations = transformer.embed({"embed": table}, model, state.token[:, None], state.position[:, None])
    return *x_and_rotations, *compiled_steps.places(state)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def _end(model, max_len, num_kept, is_plain, params, state, outputs, x_B1D, routings):
    """Samples; returns the new state and outputs, and whether a slot is still active."""
    request = state.request
    if is_plain:  # compiles in a third of the time
        state = state.replace(request=decode_state.plain(request))
    with transformer.precision(model):
        hidden_B1D = transformer.normed(params, model, x_B1D)
        routing = jax.tree.map(lambda *x: jnp.stack(x), *routings) if routings else None
        state, outputs = compiled_steps.sampled(model, max_len, num_kept, params, state, outputs, hidden_B1D, routing)
    return state.replace(request=request), outputs, jnp.any(state.active)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _repeated(arrays, num_rows, num_positions=0):
    """Returns the first row of arrays `num_rows` times, of caches with zeros up to `num_positions`."""

    def repeat(x):
        after = [(0, num_positions - x.shape[2] if axis == 2 and num_positions else 0) for axis in range(x.ndim)]
        return jnp.pad(jnp.repeat(x, num_rows, axis=0), after)

    return jax.tree.map(repeat, arrays)


@functools.partial(jax.jit, static_argnums=0)
def _experts(model, routings):
    return routed_experts.compact(jax.tree.map(lambda *x: jnp.stack(x), *routings), model)


_no_outputs = jax.jit(compiled_steps.no_outputs, static_argnums=(0, 1, 2, 3))
_result_of = jax.jit(compiled_steps.result_of, static_argnums=2)


class UnstackedWeights:
    """Divides stacks of layers; keeps only the result for the weights that were given last."""

    def __init__(self, model: config_lib.ModelConfig):
        self._model, self._apart = model, dataclasses.replace(model, scan_layers=False)
        self._kept: tuple[list[weakref.ref], transformer.Params] = [], {}  # the stacks, and their layers

    def of(self, params: transformer.Params) -> transformer.Params:
        """Returns `params` with a tree for each layer; `params` themselves if layers are not stacked."""
        if not self._model.scan_layers:
            return params
        leaves = jax.tree.leaves(params)
        sources, made = self._kept
        # Compared leaf by leaf: two versions may share some.
        if len(sources) != len(leaves) or any(s() is not leaf for s, leaf in zip(sources, leaves, strict=True)):
            views = transformer.restacked(jax.tree.map(np.asarray, params), self._model, self._apart)
            made = params | {"layers": jax.tree.map(jax.device_put, views["layers"])}
            self._kept = [weakref.ref(leaf) for leaf in leaves], made
        return made
