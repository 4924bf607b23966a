"""The engine's compiled steps: jitted functions, each for fixed shapes.

`prefill` and `prefill_chunk` compute keys and values of prompts, `insert` copies them into slots, `generate` decodes,
`deactivate` stops slots early, `read_slot` copies the keys of a sequence out of its slot, and `score` and `top_values` serve requests with extra outputs. With a cache in pages
(paged_cache.py), `insert_pages` copies keys and values of prompts, and `read_row`, `read_pages`, `write_row`, and `write_pages`
move a sequence out of its slot and into another. The state is donated.

Letters: B slots, P prompts of a prefill, T bucket or chunk length, K steps per call, V vocabulary, L MoE layers, X experts per
token, N slots of a call, k values of a proof.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from inference.engine import cpu_decode_attention, decode_state, kv_cache, paged_cache, sampler
from inference.engine import request as request_lib
from inference.proofs import window
from models import logprobs, routed_experts, transformer
from models.kernels import cpu_transposed, int8


@functools.partial(jax.jit, static_argnums=(0, 1))
def prefill(model, routed, params, tokens_PT, length_P):
    """Computes keys and values of P prompts, padded to T tokens, of lengths `length_P`; returns a `Prefix`, with experts if `routed`."""
    start_P, cache = jnp.zeros_like(length_P), kv_cache.create(model, *tokens_PT.shape)
    cache, experts = prefill_chunk(model, routed, params, tokens_PT, start_P, cache)
    last_P = jnp.take_along_axis(tokens_PT, length_P[:, None] - 1, axis=1)[:, 0]
    return decode_state.placed(decode_state.Prefix(cache, last_P, length_P, experts))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
@transformer.precise
def prefill_chunk(model, routed, params, tokens_PT, start_P, cache):
    """Computes keys and values of each prompt's next T tokens, from `start_P` on; returns (new cache, (chosen experts,) or ()).

    The cache must have room for the new tokens. Attention may read all of it, so a cache without spare room is the fastest.
    """
    positions_PT = start_P[:, None] + jnp.arange(tokens_PT.shape[1], dtype=jnp.int32)[None]
    attend = kv_cache.attend_at(start_P, implementation=model.attention)
    _, cache, routing = transformer.extend(params, model, tokens_PT, positions_PT, cache, attend)
    return decode_state.placed(cache), (routed_experts.compact(routing, model),) if routed else ()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def empty_prefix(model, num_sequences, capacity):
    """Returns a key-value cache of zeros with room for `capacity` tokens per sequence."""
    return decode_state.placed(kv_cache.create(model, num_sequences, capacity))


@functools.partial(jax.jit, static_argnums=1)
def resized(cache, size):
    """Returns a copy of the first `size` positions of a key-value cache, with zeros for those that it lacks."""

    def of(x):
        cut = x[..., :size, :]
        return jnp.pad(cut, [*[(0, 0)] * (x.ndim - 2), (0, size - cut.shape[-2]), (0, 0)])

    return decode_state.placed(jax.tree.map(of, cache))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def empty_slots(model, num_slots, capacity, num_pages=0, page_dtype=""):
    """Returns a `DecodeState` of `num_slots` unused slots: of `capacity` positions each, or of `num_pages` pages together."""
    if num_pages:
        cache = paged_cache.create(model, num_pages, page_dtype)
    else:
        create = cpu_decode_attention.create if cpu_decode_attention.fits(model) else kv_cache.create
        cache = create(model, num_slots, capacity)
    return decode_state.placed(unused_slots(model, num_slots, cache))


def unused_slots(model, num_slots, cache) -> decode_state.DecodeState:
    """Returns a `DecodeState` of `num_slots` unused slots with their cache."""
    zeros_B = np.zeros((num_slots,), np.int32)
    return decode_state.DecodeState(
        cache=cache,
        token=zeros_B,
        position=zeros_B,
        generated=zeros_B,
        active=np.zeros((num_slots,), bool),
        request=decode_state.request_arrays((), num_slots),
        ring=window.create(num_slots, model.model_dim),
    )


@functools.partial(jax.jit, static_argnums=0)
@transformer.precise
def score(model, params, tokens_BT):
    """Returns float32 [T]: the log-probability at temperature 1 of each token in row 0; 0 for the first token."""
    hidden_BTD, _ = transformer.apply(params, model, tokens_BT)
    name = "embed" if model.tie_embeddings else "lm_head"
    head = params[name]
    if isinstance(head, cpu_transposed.Transposed):
        head_VD = head.channels(slice(None), model.dtype)
        head = head_VD if model.tie_embeddings else head_VD.T
    params = params | {name: int8.dense(head, model.dtype)}
    ones_BT = jnp.ones(tokens_BT.shape, jnp.float32)
    return logprobs.token_logprobs(params, model, hidden_BTD, tokens_BT, ones_BT)[0][0]


def insert(prefix, rows_N, request, state, slots_N):
    """Copies prompt `rows_N[n]` of `prefix` into slot `slots_N[n]` and activates it; skips slots out of range; returns the state.

    Keys and values are copied entry by entry. Those of a cache in pages stay: `insert_pages` copies them.
    """
    cache = state.cache
    if not isinstance(cache, paged_cache.PagedCache):
        pairs = zip(prefix.cache, cache, strict=True)
        cache = tuple(_insert_entry(source, rows_N, target, slots_N) for source, target in pairs)
    state, prefix = state.replace(cache=()), prefix.replace(cache=())
    if isinstance(prefix.last_token, np.ndarray):  # then no program depends on the number of prompts
        prefix = prefix.replace(last_token=prefix.last_token[rows_N], length=prefix.length[rows_N])
        rows_N = np.arange(len(rows_N))
    return _insert_rows(prefix, rows_N, request, state, slots_N).replace(cache=cache)


@functools.partial(jax.jit, donate_argnums=2)
def _insert_entry(source, rows_N, target, slots_N):
    return decode_state.placed((kv_cache.copy_rows(source, rows_N, target, slots_N),))[0]


@functools.partial(jax.jit, donate_argnums=3)
def _insert_rows(prefix, rows_N, request, state, slots_N):
    """Does as `insert` with all but keys and values."""

    def put(target, values):
        return target.at[slots_N].set(values, mode="drop")

    new = state.replace(
        token=put(state.token, prefix.last_token[rows_N]),
        position=put(state.position, prefix.length[rows_N] - 1),
        generated=put(state.generated, 0),
        active=put(state.active, True),
        request=jax.tree.map(put, state.request, request),
    )
    return decode_state.placed(new)


@functools.partial(jax.jit, donate_argnums=3)
def insert_pages(cache, rows_M, firsts_M, state, pages_M):
    """Copies M pages of prefilled prompts into the state: page `pages_M[m]` gets row `rows_M[m]` from position `firsts_M[m]` on.

    Skips numbers out of range. Returns the state.
    """
    pages = paged_cache.of_prompts(cache, rows_M, firsts_M)
    return decode_state.placed(state.replace(cache=paged_cache.put(state.cache, pages, pages_M)))


@jax.jit
def read_row(state, slot):
    """Returns a copy of the state of one slot, without keys and values."""
    return jax.tree.map(lambda x: x[slot], state.replace(cache=()))


@functools.partial(jax.jit, donate_argnums=0)
def write_row(state, row, slot):
    """Puts a copy that `read_row` returned into a slot; returns the state."""
    new = jax.tree.map(lambda x, value: x.at[slot].set(value), state.replace(cache=()), row)
    return decode_state.placed(new.replace(cache=state.cache))


@jax.jit
def read_pages(state, pages_M):
    """Returns copies of pages (paged_cache.py)."""
    return paged_cache.take(state.cache, pages_M)


@functools.partial(jax.jit, donate_argnums=0)
def write_pages(state, copies, pages_M):
    """Puts copies that `read_pages` returned into pages; skips numbers out of range; returns the state."""
    return decode_state.placed(state.replace(cache=paged_cache.put(state.cache, copies, pages_M)))


@functools.partial(jax.jit, donate_argnums=0)
def deactivate(state, slots_B):
    """Returns the state with decoding stopped in the given slots; slot numbers out of range are skipped."""
    return decode_state.placed(state.replace(active=state.active.at[slots_B].set(False, mode="drop")))


@jax.jit
def top_values(state, slot_N, window_N, rows_N):
    """Returns (indices, bits) [N, k]: the k largest values of a proof window (32 hidden states), of its first `rows_N` rows."""
    return window.top_values(state.ring, slot_N, window_N, rows_N)


@struct.dataclass
class StepResult:
    """The result of a decode call. Its arrays stay on the device until `Engine.read` fetches the first three; few requests need others."""

    tokens: jax.Array  # int32 [B, K]
    valid: jax.Array  # int32 [B, K], 1 where the slot has a token, else 0
    logprobs: jax.Array  # float32 [B, K], under the sampling distribution
    # Zeros unless a slot requests them.
    raw_logprobs: jax.Array  # float32 [B, K], under softmax(logits)
    top_ids: jax.Array  # int32 [B, K, MAX_TOP], likeliest first
    top_logprobs: jax.Array  # float32 [B, K, MAX_TOP], under the sampling distribution; -inf where filtered out
    experts: jax.Array | None  # [B, K, L, X] of the tokens that were run, if they are recorded
    # int32 [B, K, W] entries of the vocabulary that the filters kept, -1 where a set has fewer, if they are recorded
    kept: jax.Array | None
    # First of the window that the call completed, then of the partly filled one of a sequence that ended; zeros in slots
    # without proofs. None until the call ends.
    proof_indices: jax.Array | None = None  # int32 [B, 2, k]
    proof_bits: jax.Array | None = None  # uint16 [B, 2, k]

    @property
    def counts(self) -> jax.Array:
        """The number of tokens of each slot, [B]."""
        return self.valid.sum(axis=1)


@struct.dataclass
class Outputs:
    """The result of the steps of a decode call so far, and the state of its slots at the start."""

    step: jax.Array  # int32, the number of steps
    generated: jax.Array  # int32 [B], at the start
    active: jax.Array  # bool [B], at the start
    result: StepResult


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=8)
@transformer.precise
def generate(model, num_steps, max_len, routed, num_kept, params, limit, table_BW, state):
    """Runs up to `limit` of `num_steps` = K decode steps; stops early when no slot is active.

    `table_BW` has the pages of each slot, room for the keys of these steps included; None if the cache is not in pages.
    Returns (state, `StepResult`).
    """

    def more(carry):
        state, outputs = carry
        return (outputs.step < jnp.minimum(num_steps, limit)) & jnp.any(state.active)

    def one(carry):
        state, outputs = carry
        attend, is_paged = attend_at(model, state, table_BW), isinstance(state.cache, paged_cache.PagedCache)
        cache = state.cache.entries if is_paged else state.cache
        tokens = state.token[:, None], state.position[:, None]
        hidden_B1D, cache, routing = transformer.extend(params, model, *tokens, cache, attend)
        state = state.replace(cache=paged_cache.PagedCache(cache) if is_paged else cache)
        return sampled(model, max_len, num_kept, params, state, outputs, hidden_B1D, routing)

    carry = decode_state.placed(state), no_outputs(model, num_steps, routed, num_kept, state)
    state, outputs = jax.lax.while_loop(more, one, carry)
    return state, result_of(state, outputs)


def no_outputs(model, num_steps, routed, num_kept, state) -> Outputs:
    """Returns the outputs of a decode call of up to `num_steps` steps before its first one."""

    def zeros(dtype, *dims):
        return jnp.zeros((len(state.token), num_steps, *dims), dtype)

    num_top, num_moe_layers = min(request_lib.MAX_TOP, model.vocab_size), routed_experts.num_moe_layers(model)
    result = StepResult(
        tokens=zeros(jnp.int32),
        valid=zeros(jnp.int32),
        logprobs=zeros(jnp.float32),
        raw_logprobs=zeros(jnp.float32),
        top_ids=zeros(jnp.int32, num_top),
        top_logprobs=zeros(jnp.float32, num_top),
        experts=zeros(routed_experts.dtype(model), num_moe_layers, model.experts_per_token) if routed else None,
        kept=zeros(jnp.int32, num_kept) if num_kept else None,
    )
    generated, active = (jnp.copy(x) for x in (state.generated, state.active))  # the state is donated
    return Outputs(jnp.int32(0), generated, active, result)


def attend_at(model, state, table_BW):
    """Returns the attention function of a decode step in `state`."""
    position_B, writes_B1 = places(state)
    if isinstance(state.cache, paged_cache.PagedCache):
        return paged_cache.attend_at(state.cache, position_B, state.active, table_BW)
    writes_B1 = writes_B1 if isinstance(state.cache[0], cpu_decode_attention.Blocks) else None
    return kv_cache.attend_at(position_B, write_BT=writes_B1, implementation=model.attention)


def places(state) -> tuple[jax.Array, jax.Array]:
    """Returns the position at which each slot attends in a decode step, [B], and whether it writes its key there, [B, 1].

    The position is 0 for a slot that is not in use, because the CPU reads keys up to the latest position of all slots
    (cpu_decode_attention.py). Such a slot writes nothing: it keeps its keys, which the next turn of a conversation may reuse.
    """
    return jnp.where(state.active, state.position, 0), state.active[:, None]


def sampled(model, max_len, num_kept, params, state, outputs: Outputs, hidden_B1D, routing):
    """Samples the next token of each active slot from the hidden states of a step; returns the new state and outputs."""
    logits_BV = transformer.logits(params, model, hidden_B1D)[:, 0]
    is_early_B = state.active & (state.generated < state.request.min_tokens)
    banned_BN = jnp.where(is_early_B[:, None], state.request.stop_ids, -1)
    logp_BV = sampler.scores(logits_BV, state.request.sampling, banned_BN)
    token_B, logp_B = sampler.draw(logp_BV, state.position + 1, state.request.sampling)
    active, generated = state.active, state.generated + state.active
    stopped_B = jnp.any(token_B[:, None] == state.request.stop_ids, axis=1)
    full_B = (generated >= state.request.max_tokens) | (state.position + 2 >= max_len)
    goes_on_B = active & ~stopped_B & ~full_B
    new_state = state.replace(
        token=jnp.where(active, token_B, state.token),
        position=state.position + goes_on_B,
        generated=generated,
        active=goes_on_B,
        ring=window.write(state.ring, hidden_B1D[:, 0], state.generated, active),
    )
    step, result = outputs.step, outputs.result
    experts, kept = result.experts, result.kept
    raw_logprobs, (top_ids, top_logprobs) = _extras(result, step, logits_BV, logp_BV, token_B, state)
    result = dataclasses.replace(
        result,
        tokens=result.tokens.at[:, step].set(jnp.where(active, token_B, 0)),
        valid=result.valid.at[:, step].set(active.astype(jnp.int32)),
        logprobs=result.logprobs.at[:, step].set(jnp.where(active, logp_B, 0.0)),
        raw_logprobs=raw_logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        experts=None if experts is None else experts.at[:, step].set(routed_experts.compact(routing, model)[:, 0]),
        kept=None if kept is None else kept.at[:, step].set(sampler.kept(logp_BV, num_kept)),
    )
    return decode_state.placed(new_state), dataclasses.replace(outputs, step=step + 1, result=result)


def result_of(state, outputs: Outputs, has_proofs: bool = True) -> StepResult:
    """Returns the result of a decode call, with the top values of finished proof windows; zeros if `has_proofs` is False."""
    ended_B = outputs.active & ~state.active
    is_finished_B2, *windows = window.finished(outputs.generated, state.generated, ended_B)
    is_wanted_B2 = is_finished_B2 & state.request.want_proof[:, None]
    is_wanted_B2 = is_wanted_B2 if has_proofs else jnp.zeros_like(is_wanted_B2)
    indices, bits = window.reduce(state.ring, is_wanted_B2, *windows)
    return dataclasses.replace(outputs.result, proof_indices=indices, proof_bits=bits)


@jax.jit
def join(results):
    """Concatenates the results of `generate` for several sub-batches along the slot axis."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *results)


def _extras(result: StepResult, step, logits_BV, logp_BV, token_B, state):
    """Returns (raw log-probabilities, (ids, log-probabilities) of the likeliest) with those of this step; skips the work if no active slot requests them."""

    def raw(values, logits_BV, logp_BV):
        raw_BV = jax.nn.log_softmax(logits_BV, axis=-1)
        return values.at[:, step].set(jnp.take_along_axis(raw_BV, token_B[:, None], axis=-1)[:, 0])

    def top(values, logits_BV, logp_BV):
        logps, ids = jax.lax.top_k(logp_BV, result.top_ids.shape[-1])
        return values[0].at[:, step].set(ids), values[1].at[:, step].set(logps)

    def either(want_B, compute, values):
        wanted = jnp.any(state.active & want_B)
        return jax.lax.cond(wanted, compute, lambda values, *_: values, values, logits_BV, logp_BV)

    request, tops = state.request, (result.top_ids, result.top_logprobs)
    return either(request.want_raw, raw, result.raw_logprobs), either(request.want_top, top, tops)
