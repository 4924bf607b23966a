"""The engine: JetStream's contract (prefill, insert, generate) over `models.transformer`, with what RL needs added.

1. `prefill_batch` runs prompts of one length bucket and keeps their keys. It samples nothing: the first `generate` runs
   the last prompt token again, so that every token comes out of one program.
2. `insert_batch` copies prompts into slots; several samples of one prompt share its prefill.
3. `generate` runs up to K decode steps for all slots in one call, and returns tokens, log-probabilities and validity in
   one integer array (JetStream's `ResultTokens`; float32 columns are bit-cast).
4. The last hidden states of each slot stay in a ring on the device; `harvest` fetches the rows a proof covers.

Programs have fixed shapes (prompt batch, buckets, slots, steps), and a row's result does not depend on its neighbours:
a rollout is the same whatever ran beside it. Parameters are an argument of every call, so weights change between calls
while sequences go on.

Letters: B slots, P prompts of a prefill, T bucket length, S capacity, K steps per call, D model, W ring rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from inference import kv_cache, sampler
from inference.jetstream_shim import engine_api, tokenizer_api, tokenizer_pb2
from models import config as config_lib
from models import tokenizer as tokenizer_lib
from models import transformer

PROOF_WINDOW = 32  # rows per proof
RING = 2 * PROOF_WINDOW  # a call adds at most one window, so the one before it is still whole
MAX_STOP_IDS = 8


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that are compiled in."""

    num_slots: int  # sequences decoded together
    max_model_len: int  # prompt + completion, in tokens
    prefill_batch: int  # prompts per prefill call
    steps_per_call: int  # decode steps between two looks by the host

    def __post_init__(self):
        for field in ("num_slots", "max_model_len", "prefill_batch", "steps_per_call"):
            if getattr(self, field) < 1:
                raise ValueError(f"inference.{field} = {getattr(self, field)} must be at least 1")
        if self.steps_per_call > PROOF_WINDOW:
            raise ValueError(
                f"inference.steps_per_call = {self.steps_per_call} must be at most {PROOF_WINDOW}, the window of a proof"
            )

    @property
    def buckets(self) -> tuple[int, ...]:
        """Prompt lengths that are compiled: powers of two from 16, and the capacity itself."""
        sizes, size = [], 16
        while size < self.max_model_len:
            sizes.append(size)
            size *= 2
        return (*sizes, self.max_model_len)


@struct.dataclass
class Request:
    """What a sequence was asked for; arrays [B] (or [P])."""

    sampling: sampler.Sampling
    max_tokens: jax.Array  # int32, new tokens at most
    stop_ids: jax.Array  # int32 [B, MAX_STOP_IDS], -1 where unused


@struct.dataclass
class Prefix:
    """Prefilled prompts: keys up to the bucket length, lengths, last tokens, and how to sample from there."""

    cache: kv_cache.Cache
    last_token: jax.Array  # int32 [P]
    length: jax.Array  # int32 [P]
    request: Request


@struct.dataclass
class DecodeState:
    """All slots. `position` is that of `token`, the next one to be run; a slot decodes while `active`."""

    cache: kv_cache.Cache
    token: jax.Array  # int32 [B]
    position: jax.Array  # int32 [B]
    generated: jax.Array  # int32 [B], new tokens so far
    active: jax.Array  # bool [B]
    request: Request
    hidden: jax.Array  # bfloat16 [B, W, D]; row j % W belongs to new token j


class Engine(engine_api.Engine):
    """JetStream engine of one model on one host-local mesh. Holds no sequence state and no current weights."""

    def __init__(
        self,
        model: config_lib.ModelConfig,
        config: EngineConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        params: transformer.Params | None = None,
    ):
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self._initial_params = params

    # What our scheduler calls.

    def prefill_batch(self, params, tokens_PT, length_P, request: Request) -> Prefix:
        """Runs P prompts padded to one bucket; [P, T] and [P], P = config.prefill_batch."""
        return _prefill(self.model, params, tokens_PT, length_P, request)

    def insert_batch(self, prefix: Prefix, rows, state: DecodeState, slots, seeds) -> DecodeState:
        """Starts prompt `rows[i]` in `slots[i]` with `seeds[i]`; [B] each, unused entries have slot = num_slots."""
        return _insert(prefix, rows, state, slots, seeds)

    def deactivate(self, state: DecodeState, slots) -> DecodeState:
        """Stops the given slots (abort); [B], unused entries have slot = num_slots."""
        return _deactivate(state, slots)

    def harvest(self, state: DecodeState, slots) -> jax.Array:
        """Rings of the given slots, [len(slots), W, D] bfloat16."""
        return _harvest(state, slots)

    def bucket(self, length: int) -> int:
        return next(size for size in self.config.buckets if size >= length)

    def read(self, result: "engine_api.ResultTokens") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Host view of a call: (tokens [B, K], logprobs [B, K] float32, number of valid tokens [B])."""
        data = np.asarray(result.data)
        K = self.config.steps_per_call
        logprobs = np.ascontiguousarray(data[:, 2 * K + 1 :]).view(np.float32)
        return data[:, :K], logprobs, data[:, K : 2 * K].sum(axis=1)

    # JetStream's contract.

    def load_params(self, *args, **kwargs):
        return self._initial_params

    def init_decode_state(self, *args, **kwargs) -> DecodeState:
        B = self.config.num_slots

        @jax.jit
        def create():
            zeros = jnp.zeros((B,), jnp.int32)
            return DecodeState(
                cache=kv_cache.create(self.model, B, self.config.max_model_len),
                token=zeros,
                position=zeros,
                generated=zeros,
                active=jnp.zeros((B,), bool),
                request=default_request(B, (self.tokenizer.eos_id,)),
                hidden=jnp.zeros((B, RING, self.model.model_dim), jnp.bfloat16),
            )

        return create()

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length) -> Prefix:
        if existing_prefix is not None:
            raise NotImplementedError("prefill on an existing prefix is not supported")
        request = default_request(1, self.tokenizer.stop_ids, max_tokens=self.config.max_model_len)
        tokens_1T = jnp.asarray(padded_tokens, jnp.int32)[None, : self.config.max_model_len]
        return _prefill(self.model, params, tokens_1T, jnp.asarray([true_length], jnp.int32), request)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        return _insert(
            prefix, jnp.zeros((1,), jnp.int32), decode_state, jnp.asarray([slot]), prefix.request.sampling.seed
        )

    def generate(self, params, decode_state: DecodeState):
        K = self.config.steps_per_call
        state, data = _generate(self.model, K, params, decode_state)
        result = engine_api.ResultTokens(
            data=data, tokens_idx=(0, K), valid_idx=(K, 2 * K), length_idx=(2 * K, 2 * K + 1), samples_per_slot=1
        )
        return state, result

    def get_prefix_destination_sharding(self):
        return None

    def get_tokenizer(self):
        return tokenizer_pb2.TokenizerParameters(path="")

    def build_tokenizer(self, metadata):
        del metadata
        return _JetStreamTokenizer(self.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return self.config.num_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """JetStream pads prompts to powers of two from 16; the largest that fits the capacity."""
        return 1 << (self.config.max_model_len.bit_length() - 1)

    @property
    def mesh(self):
        return None

    @property
    def colocated_cpus(self):
        return None


def default_request(size: int, stop_ids: tuple[int, ...], *, max_tokens: int = 1) -> Request:
    """Temperature 1, no filter, seed 0."""
    stop = np.full((size, MAX_STOP_IDS), -1, np.int32)
    stop[:, : len(stop_ids)] = stop_ids
    return Request(
        sampling=sampler.Sampling(
            seed=jnp.zeros((size,), jnp.uint32),
            temperature=jnp.ones((size,), jnp.float32),
            top_k=jnp.zeros((size,), jnp.int32),
            top_p=jnp.ones((size,), jnp.float32),
            min_p=jnp.zeros((size,), jnp.float32),
        ),
        max_tokens=jnp.full((size,), max_tokens, jnp.int32),
        stop_ids=jnp.asarray(stop),
    )


@functools.partial(jax.jit, static_argnums=0)
def _prefill(model, params, tokens_PT, length_P, request):
    P, T = tokens_PT.shape
    positions_PT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (P, T))
    start_P = jnp.zeros((P,), jnp.int32)
    cache = kv_cache.create(model, P, T)
    _, cache = transformer.extend(params, model, tokens_PT, positions_PT, cache, kv_cache.attend_at(start_P))
    last_P = jnp.take_along_axis(tokens_PT, length_P[:, None] - 1, axis=1)[:, 0]
    return Prefix(cache, last_P, length_P, request)


@functools.partial(jax.jit, donate_argnums=2)
def _insert(prefix, rows_B, state, slots_B, seeds_B):
    def put(target, source):
        return target.at[slots_B].set(source[rows_B], mode="drop")

    request = jax.tree.map(put, state.request, prefix.request)
    seed = state.request.sampling.seed.at[slots_B].set(seeds_B, mode="drop")
    return DecodeState(
        cache=kv_cache.copy_rows(prefix.cache, rows_B, state.cache, slots_B),
        token=put(state.token, prefix.last_token),
        position=put(state.position, prefix.length - 1),
        generated=state.generated.at[slots_B].set(0, mode="drop"),
        active=state.active.at[slots_B].set(True, mode="drop"),
        request=request.replace(sampling=request.sampling.replace(seed=seed)),
        hidden=state.hidden,
    )


@functools.partial(jax.jit, donate_argnums=0)
def _deactivate(state, slots_B):
    return state.replace(active=state.active.at[slots_B].set(False, mode="drop"))


@jax.jit
def _harvest(state, slots_N):
    return state.hidden[slots_N]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _generate(model, num_steps, params, state):
    """Up to `num_steps` decode steps; stops early when no slot is active. Data columns: K tokens, K valid, length, K logp."""
    B, S = state.token.shape[0], state.cache[0][0].shape[2]

    def more(carry):
        step, state, *_ = carry
        return (step < num_steps) & jnp.any(state.active)

    def one(carry):
        step, state, tokens, valid, logps = carry
        hidden_B1D, cache = transformer.extend(
            params,
            model,
            state.token[:, None],
            state.position[:, None],
            state.cache,
            kv_cache.attend_at(state.position),
        )
        logits_BV = transformer.logits(params, model, hidden_B1D)[:, 0]
        token_B, logp_B = sampler.sample(logits_BV, state.position + 1, state.request.sampling)
        active, generated = state.active, state.generated + state.active
        stopped_B = jnp.any(token_B[:, None] == state.request.stop_ids, axis=1)
        full_B = (generated >= state.request.max_tokens) | (state.position + 2 >= S)
        ring_B = jnp.where(active, state.generated % RING, RING)
        new_state = state.replace(
            cache=cache,
            token=jnp.where(active, token_B, state.token),
            position=jnp.where(active & ~stopped_B & ~full_B, state.position + 1, state.position),
            generated=generated,
            active=active & ~stopped_B & ~full_B,
            hidden=state.hidden.at[jnp.arange(B), ring_B].set(hidden_B1D[:, 0].astype(jnp.bfloat16), mode="drop"),
        )
        return (
            step + 1,
            new_state,
            tokens.at[:, step].set(jnp.where(active, token_B, 0)),
            valid.at[:, step].set(active.astype(jnp.int32)),
            logps.at[:, step].set(jnp.where(active, logp_B, 0.0)),
        )

    blank = jnp.zeros((B, num_steps), jnp.int32)
    carry = (jnp.int32(0), state, blank, blank, jnp.zeros((B, num_steps), jnp.float32))
    _, state, tokens, valid, logps = jax.lax.while_loop(more, one, carry)
    bits = jax.lax.bitcast_convert_type(logps, jnp.int32)
    return state, jnp.concatenate([tokens, valid, state.generated[:, None], bits], axis=1)


class _JetStreamTokenizer(tokenizer_api.Tokenizer):
    """JetStream's view of our tokenizer, for its Driver and gRPC clients."""

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, s, *, is_bos=False, prefill_lengths=None, max_prefill_length=None, jax_padding=True, **kwargs):
        ids = self._tokenizer.encode(s)
        if max_prefill_length is not None and len(ids) > max_prefill_length:
            raise ValueError(f"a prompt of {len(ids)} tokens is longer than the maximum of {max_prefill_length}")
        lengths = sorted(prefill_lengths or [1 << i for i in range(4, 16)])
        size = next(length for length in lengths if length >= len(ids))
        padded = np.full((size,), self.pad_id, np.int32)
        padded[: len(ids)] = ids
        return (jnp.asarray(padded) if jax_padding else padded), len(ids)

    def decode(self, token_ids, **kwargs):
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self):
        return self._tokenizer.pad_id

    @property
    def eos_id(self):
        return self._tokenizer.eos_id

    @property
    def bos_id(self):
        return self._tokenizer.pad_id
