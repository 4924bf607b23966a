"""The engine: JetStream's contract (prefill, insert, generate) over `models.transformer`, extended for RL.

1. `prefill_batch` computes the keys and values of prompts of one length bucket; a prompt longer than `prefill_chunk` goes
   through `prefill_chunk`, one chunk per call, so that decoding never waits for all of it. Neither samples: the first
   `generate` runs the last prompt token again.
2. `insert_batch` copies prompts into slots; several samples of one prompt share its prefill.
3. `generate` runs up to K decode steps for all slots in one call. It returns tokens, log-probabilities and validity in
   one integer array (JetStream's `ResultTokens`; float32 columns are bit-cast), and the values of proofs (proofs/window.py).

All programs (compiled_steps.py) have fixed shapes, and a row's result does not depend on the other rows. Weights are an
argument of each call, so they can change while sequences run. On a mesh each call runs over all devices.

Letters: B slots, P prompts of a prefill, T bucket or chunk length, S capacity, K steps per call, D model, V vocabulary,
N windows, k values of a proof.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from inference.engine import compiled_steps, cpu_sub_batches, cpu_weights, decode_state, kv_cache, routed_experts
from inference.engine import request as request_lib
from inference.engine.jetstream_shim import engine_api, token_utils, tokenizer_api, tokenizer_pb2
from inference.proofs import window
from models import config as config_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from sharding import mesh as mesh_lib
from sharding import rules

State = cpu_sub_batches.State


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that are compiled in."""

    num_slots: int  # sequences decoded together
    max_model_len: int  # prompt + completion, in tokens
    prefill_batch: int  # prompts per prefill call
    steps_per_call: int  # decode steps per call; the scheduler acts between calls
    prefill_chunk: int = 512  # longer prompts are prefilled this many tokens at a time, one prompt per call
    routed_experts: bool = False  # record the experts that each token was routed to

    def __post_init__(self):
        for field in ("num_slots", "max_model_len", "prefill_batch", "steps_per_call", "prefill_chunk"):
            if getattr(self, field) < 1:
                raise ValueError(f"inference.{field} = {getattr(self, field)} must be at least 1; set it higher")
        if self.steps_per_call > window.WINDOW:
            raise ValueError(
                f"inference.steps_per_call = {self.steps_per_call} must be at most {window.WINDOW}, the window of a "
                "proof; set it lower"
            )

    @property
    def buckets(self) -> tuple[int, ...]:
        """Prompt lengths that `prefill_batch` is compiled for: powers of two from 16, and the longest."""
        longest = min(self.max_model_len, self.prefill_chunk)
        return (*(1 << bits for bits in range(4, 31) if 1 << bits < longest), longest)

    @property
    def insert_sizes(self) -> tuple[int, ...]:
        """Numbers of slots that `insert_batch` is compiled for.

        Few, to compile few programs, but not only all slots, because an insert costs as much as its size.
        """
        return tuple(sorted({min(size, self.num_slots) for size in (1, 8, self.prefill_batch, self.num_slots)}))

    @property
    def capacity(self) -> int:
        """Positions of a slot's cache. With several chunks a multiple of them, because a chunk is written whole."""
        return self.bucket(self.max_model_len)

    def bucket(self, length: int) -> int:
        """Returns the padded length of a prompt of `length` tokens: a bucket, or whole chunks."""
        if length > self.prefill_chunk:
            return -(-length // self.prefill_chunk) * self.prefill_chunk
        return next(size for size in self.buckets if size >= length)


@struct.dataclass
class Result(engine_api.ResultTokens):
    """JetStream's result of a call, plus columns that few requests ask for. They stay on the device until fetched."""

    raw_logps: jax.Array  # float32 [B, K], under softmax(logits)
    top_ids: jax.Array  # int32 [B, K, MAX_TOP], likeliest first
    top_logps: jax.Array  # float32 [B, K, MAX_TOP], under the sampling distribution; -inf where filtered out
    # First of the window that the call completed, then of the partly filled one of a sequence that ended; zeros in slots
    # without proofs.
    proof_indices: jax.Array  # int32 [2, B, k]
    proof_bits: jax.Array  # uint16 [2, B, k]
    experts: jax.Array | None  # [B, K, L, X], if they are recorded


class Engine(engine_api.Engine):
    """JetStream engine of one model on one host-local mesh. Sequences and current weights are arguments of its methods."""

    def __init__(
        self,
        model: config_lib.ModelConfig,
        config: EngineConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        params: transformer.Params | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        """Creates an engine on `mesh`, over devices of this process; None: its first device.

        `params`, laid out on the mesh, are returned by `load_params` and not used otherwise.

        Raises:
          ValueError: the sizes do not fit the mesh, or experts of a model without any are to be recorded.
        """
        mesh = mesh_lib.create({}, devices=jax.local_devices()[:1]) if mesh is None else mesh
        check_mesh(config, mesh)
        if config.routed_experts and not routed_experts.num_moe_layers(model):
            raise ValueError("inference.routed_experts = true, but the model has no experts; leave the field out")
        self.model, self.config, self.tokenizer, self._mesh = model, config, tokenizer, mesh
        self._initial_params, self._options = params, (model, config.routed_experts)
        self._concurrently = cpu_sub_batches.ConcurrentDecoder()
        self._decode_weights = self._run(cpu_weights.TransposedWeights, model)

    # The methods that our scheduler calls.

    def prefill_batch(self, params: transformer.Params, tokens_PT, length_P) -> decode_state.Prefix:
        """Prefills P = config.prefill_batch prompts padded to one bucket; int32 [P, T] and [P]."""
        return self._run(compiled_steps.prefill, *self._options, params, tokens_PT, length_P)

    def prefill_chunk(
        self, params: transformer.Params, tokens_1T, start: int, cache: kv_cache.Cache | None
    ) -> tuple[kv_cache.Cache, tuple[jax.Array, ...]]:
        """Prefills one chunk, int32 [1, config.prefill_chunk], of a prompt whose first `start` tokens are in `cache`.

        The cache is donated; None: start is 0. Returns the new one, and the chunk's part of `Prefix.experts`.
        """
        cache = self.empty_prefix() if cache is None else cache
        start_1 = np.array([start], np.int32)
        return self._run(compiled_steps.prefill_chunk, *self._options, params, tokens_1T, start_1, cache)

    def empty_prefix(self) -> kv_cache.Cache:
        """An empty cache with room for the longest prompt."""
        return self._run(compiled_steps.empty_prefix, self.model, 1, self.config.capacity)

    def prompt_logprobs(self, params: transformer.Params, tokens_1T) -> np.ndarray:
        """Returns float32 [T]: the untempered log-probability of each prompt token given those before it; 0 for the first.

        T must be a bucket or a multiple of `prefill_chunk`; pad after the prompt.
        """
        tokens_BT = np.repeat(tokens_1T, rules.num_batch_shards(self.mesh), axis=0)  # a row for each batch shard
        return np.asarray(self._run(compiled_steps.score, self.model, params, tokens_BT))

    def insert_batch(
        self, prefix: decode_state.Prefix, rows, state: State, slots, request: decode_state.Request
    ) -> State:
        """Starts prompt `rows[i]` of `prefix` in `slots[i]` with row i of `request`; unused entries have slot = num_slots."""
        prefix = dataclasses.replace(prefix, experts=())

        def insert(part, own_slots):
            return compiled_steps.insert(prefix, rows, part, own_slots, request)

        return self._run(cpu_sub_batches.at, insert, state, slots)

    def deactivate(self, state: State, slots) -> State:
        """Stops the given slots; int32 [B], unused entries have slot = num_slots."""
        return self._run(cpu_sub_batches.at, compiled_steps.deactivate, state, slots)

    def with_limit(self, state: State, limit: int) -> State:
        """Returns the state with the most steps that the next decode call runs."""
        limit_array = np.int32(limit)
        if self.mesh.size > 1:  # laid out as programs return it: another layout would be compiled again
            replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
            limit_array = jax.device_put(limit_array, replicated)
        return tuple(dataclasses.replace(part, limit=limit_array) for part in state)

    def top_values(self, state: State, slot: int, window_index: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Fetches proof values (indices, bits) [k] of the first rows of a window that the device has not reduced.

        That is the last window of a sequence which the host ended.
        """
        part, own_slot = divmod(slot, len(state[0].token))
        where = (np.array([value], np.int32) for value in (own_slot, window_index, num_rows))
        indices, bits = self._run(compiled_steps.top_values, state[part], *where)
        return np.asarray(indices)[0], np.asarray(bits)[0]

    def read(self, result: engine_api.ResultTokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fetches (tokens [B, K], logprobs [B, K], number of valid tokens [B]) of a decode call; blocks until it has ended."""
        data = np.asarray(result.data)
        K = self.config.steps_per_call
        logprobs = np.ascontiguousarray(data[:, 2 * K + 1 :]).view(np.float32)
        return data[:, :K], logprobs, data[:, K : 2 * K].sum(axis=1)

    def read_proofs(self, result: Result) -> tuple[np.ndarray, np.ndarray]:
        """Fetches the proof values (indices, bits), [2, B, k] each, of a decode call."""
        return np.asarray(result.proof_indices), np.asarray(result.proof_bits)

    def init_slots(self, num_slots: int) -> decode_state.DecodeState:
        """An empty state of `num_slots` slots, which one call decodes."""
        sizes = num_slots, self.config.capacity, self.config.steps_per_call
        return self._run(compiled_steps.empty_slots, self.model, *sizes)

    # JetStream's contract.

    def load_params(self, *args, **kwargs) -> transformer.Params | None:
        """The weights given to the constructor, or None."""
        return self._initial_params

    def init_decode_state(self, *args, **kwargs) -> State:
        """A state with no slot in use."""
        num_parts = self._run(cpu_sub_batches.count, self.model, self.config.num_slots)
        return tuple(self.init_slots(self.config.num_slots // num_parts) for _ in range(num_parts))

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length) -> decode_state.Prefix:
        """Prefills one prompt, to be sampled at temperature 1 and seed 0 until a stop id of the tokenizer."""
        if existing_prefix is not None:
            raise NotImplementedError("prefill on an existing prefix is not supported; pass None")
        stop_ids, max_len = tuple(self.tokenizer.stop_ids), self.config.max_model_len
        request = request_lib.GenerateRequest((), max_tokens=max_len, stop_ids=stop_ids)
        tokens_1T = jnp.asarray(padded_tokens, jnp.int32)[None, :max_len]
        prefix = self.prefill_batch(params, tokens_1T, jnp.asarray([true_length], jnp.int32))
        return dataclasses.replace(prefix, request=decode_state.request_arrays([request], 1))

    def insert(self, prefix: decode_state.Prefix, decode_state: State, slot: int) -> State:
        """Starts the prompt that `prefill` returned in a slot."""
        assert prefix.request is not None
        rows, slots = np.zeros((1,), np.int32), np.array([slot], np.int32)
        return self.insert_batch(prefix, rows, decode_state, slots, prefix.request)

    def generate(self, params: transformer.Params, decode_state: State) -> tuple[State, Result]:
        """Runs one decode call for all slots. Returns before the devices have finished."""
        K = self.config.steps_per_call
        options = self.model, K, self.config.max_model_len, self.config.routed_experts
        generate = functools.partial(compiled_steps.generate, *options, self._decode_weights.of(params))
        done = self._run(self._concurrently, generate, decode_state)
        state, *results = zip(*done, strict=True)
        data, extras, proofs, experts = compiled_steps.join(*results) if len(state) > 1 else done[0][1:]
        return state, Result(
            data=data,
            tokens_idx=(0, K),
            valid_idx=(K, 2 * K),
            length_idx=(2 * K, 2 * K + 1),
            samples_per_slot=1,
            raw_logps=extras[0],
            top_ids=extras[1],
            top_logps=extras[2],
            proof_indices=proofs[0],
            proof_bits=proofs[1],
            experts=experts,
        )

    def get_prefix_destination_sharding(self) -> None:
        """None: a prefix stays where `prefill` put it."""
        return None

    def get_tokenizer(self):
        """Placeholder parameters; `build_tokenizer` needs none."""
        return tokenizer_pb2.TokenizerParameters(path="")  # pyright: ignore[reportAttributeAccessIssue]  # generated code

    def build_tokenizer(self, metadata) -> tokenizer_api.Tokenizer:
        """The model's tokenizer with JetStream's interface."""
        del metadata
        return _JetStreamTokenizer(self.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots."""
        return self.config.num_slots

    @property
    def samples_per_slot(self) -> int:
        """1; several samples of a prompt are in slots of their own."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The largest power of two that fits the capacity, because JetStream pads prompts to powers of two."""
        return 1 << (self.config.max_model_len.bit_length() - 1)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of devices, with one device or several."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None; host arrays stay in this process."""
        return None

    def _run(self, function, *args):
        """Calls a function in the context in which programs are traced and run; one device needs no mesh."""
        with jax.set_mesh(self.mesh) if self.mesh.size > 1 else contextlib.nullcontext():
            return function(*args)


def check_mesh(config: EngineConfig, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError if an engine of these sizes cannot run on the mesh."""
    if mesh.shape["context"] > 1:
        raise ValueError(
            f"mesh axis context={mesh.shape['context']} must be 1 for a server, because decoding reads one token at a "
            "time; give these devices to tensor, expert or data"
        )
    if config.num_slots % (shards := rules.num_batch_shards(mesh)):
        raise ValueError(
            f"inference.num_slots = {config.num_slots} does not divide over the {shards} batch shards of the mesh "
            f"(data x fsdp x expert); set it to a multiple of {shards}"
        )


class _JetStreamTokenizer(tokenizer_api.Tokenizer):
    """JetStream's interface to our tokenizer, for its Driver and gRPC clients."""

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, s, *, is_bos=False, max_prefill_length=None, **padding):
        ids = np.array(self._tokenizer.encode(s), np.int32)
        if max_prefill_length is not None and len(ids) > max_prefill_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but at most {max_prefill_length} are allowed; shorten it"
            )
        return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, is_bos=False, **padding)

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
