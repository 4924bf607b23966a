"""The engine: JetStream's contract (prefill, insert, generate) over `models.transformer`, with what RL needs added.

1. `prefill_batch` runs prompts of one length bucket and keeps their keys; a prompt longer than `prefill_chunk` goes
   through `prefill_chunk`, one chunk of it per call, so that nobody waits for all of it. Neither samples anything: the
   first `generate` runs the last prompt token again, so that every token comes out of one program.
2. `insert_batch` copies prompts into slots; several samples of one prompt share its prefill.
3. `generate` runs up to K decode steps for all slots in one call, and returns tokens, log-probabilities and validity in
   one integer array (JetStream's `ResultTokens`; float32 columns are bit-cast).
4. The last hidden states of each slot stay in a ring on the device; a call reduces the windows of 32 that it finished
   to the values that a proof is made of (proof_window.py), and the host fetches those alone.

Programs (compiled_steps.py) have fixed shapes (prompt batch, buckets, chunk, slots, steps), and a row's result does not depend on its
neighbours: a rollout is the same whatever ran beside it. A chunk starts at a multiple of `prefill_chunk` in every prompt,
so that its keys are the same bits whether they were computed for this prompt or kept from another (prefix_cache.py).
Parameters are an argument of every call, so weights change between calls while sequences go on.

On a mesh every call runs over all of its devices, and states go from one to the next as they lie (decode_state.py).

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

from inference.engine import compiled_steps, cpu_sub_batches, cpu_weights, kv_cache
from inference.engine import decode_state as state_lib
from inference.engine import routed_experts as routing
from inference.engine.jetstream_shim import engine_api, tokenizer_api, tokenizer_pb2
from inference.proofs import window
from models import config as config_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from sharding import mesh as mesh_lib
from sharding import rules


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that are compiled in."""

    num_slots: int  # sequences decoded together
    max_model_len: int  # prompt + completion, in tokens
    prefill_batch: int  # prompts per prefill call
    steps_per_call: int  # decode steps between two looks by the host
    prefill_chunk: int = 512  # longer prompts are prefilled this many tokens at a time, one prompt per call
    routed_experts: bool = False  # record which experts each token went to

    def __post_init__(self):
        for field in ("num_slots", "max_model_len", "prefill_batch", "steps_per_call", "prefill_chunk"):
            if getattr(self, field) < 1:
                raise ValueError(f"inference.{field} = {getattr(self, field)} must be at least 1")
        if self.steps_per_call > window.WINDOW:
            raise ValueError(
                f"inference.steps_per_call = {self.steps_per_call} must be at most {window.WINDOW}, "
                "the window of a proof"
            )

    @property
    def buckets(self) -> tuple[int, ...]:
        """Prompt lengths that `prefill_batch` compiles: powers of two from 16, and the longest."""
        longest = min(self.max_model_len, self.prefill_chunk)
        sizes, size = [], 16
        while size < longest:
            sizes.append(size)
            size *= 2
        return (*sizes, longest)

    @property
    def insert_sizes(self) -> tuple[int, ...]:
        """How many slots one `insert_batch` is for: few sizes instead of one per count, and not always all of the slots, because
        an insert costs as much as its size."""
        return tuple(sorted({min(size, self.num_slots) for size in (1, 8, self.prefill_batch, self.num_slots)}))

    @property
    def capacity(self) -> int:
        """Positions of a slot's cache: whole chunks, because a chunk is written whole."""
        if self.max_model_len <= self.prefill_chunk:
            return self.max_model_len
        return -(-self.max_model_len // self.prefill_chunk) * self.prefill_chunk


@struct.dataclass
class Result(engine_api.ResultTokens):
    """What JetStream reads, and beside it what only some requests ask for, left on the device until fetched."""

    raw_logps: jax.Array  # float32 [B, K], under softmax(logits)
    top_ids: jax.Array  # int32 [B, K, MAX_TOP], likeliest first
    top_logps: jax.Array  # float32 [B, K, MAX_TOP], under the distribution sampled from; -inf where filtered out
    # Of the window that the call completed, and of the one that a sequence it ended leaves partly filled; only in slots
    # that want proofs.
    proof_indices: jax.Array  # int32 [2, B, k]
    proof_bits: jax.Array  # uint16 [2, B, k]
    experts: jax.Array | None  # [B, K, L, X], if they are recorded


class Engine(engine_api.Engine):
    """JetStream engine of one model on one host-local mesh. Holds no sequence state and no current weights."""

    def __init__(
        self,
        model: config_lib.ModelConfig,
        config: EngineConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        params: transformer.Params | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        """`mesh` is one of the devices of this process; the first of them alone when None. `params` lie on it.

        Raises:
          ValueError: the slots do not divide over the mesh, it has a `context` axis, or experts that are not there are to be
            recorded.
        """
        mesh = mesh_lib.create({}, devices=jax.local_devices()[:1]) if mesh is None else mesh
        check_mesh(config, mesh)
        if config.routed_experts and not routing.num_mixtures(model):
            raise ValueError("inference.routed_experts is set and the model has no experts; leave it out")
        self.model, self.config, self.tokenizer, self._mesh = model, config, tokenizer, mesh
        self._initial_params = params
        self._side_by_side = cpu_sub_batches.ConcurrentDecoder()
        with self._on_mesh():
            self._turned = cpu_weights.TransposedWeights(model)

    # What our scheduler calls.

    def prefill_batch(self, params, tokens_PT, length_P) -> state_lib.Prefix:
        """Runs P prompts padded to one bucket; [P, T] and [P], P = config.prefill_batch."""
        with self._on_mesh():
            return compiled_steps.prefill(self.model, self.config.routed_experts, params, tokens_PT, length_P)

    def prefill_chunk(
        self, params, tokens_1T, start: int, cache: kv_cache.Cache | None
    ) -> tuple[kv_cache.Cache, tuple[jax.Array, ...]]:
        """Runs one chunk of one prompt behind its first `start` tokens, whose keys `cache` holds (None: start is 0).

        [1, T], T = config.prefill_chunk. The cache is donated. Returns the new one, and the chunk's piece of
        `Prefix.experts`.
        """
        cache = self.empty_prefix() if cache is None else cache
        with self._on_mesh():
            start_1 = np.array([start], np.int32)
            return compiled_steps.prefill_chunk(
                self.model, self.config.routed_experts, params, tokens_1T, start_1, cache
            )

    def empty_prefix(self) -> kv_cache.Cache:
        """The keys of no prompt at all, with room for the longest one."""
        with self._on_mesh():
            return compiled_steps.empty_prefix(self.model, 1, self.config.capacity)

    def prompt_logprobs(self, params, tokens_1T) -> np.ndarray:
        """float32 [T]: log-probability of each token of one prompt given those before it; 0 for the first. Untempered.

        The length must be a bucket or a multiple of `prefill_chunk`; pad behind the prompt.
        """
        with self._on_mesh():  # a row for each part of a mesh that is to hold rows
            tokens_BT = np.repeat(tokens_1T, rules.num_batch_shards(self.mesh), axis=0)
            return np.asarray(compiled_steps.score(self.model, params, tokens_BT))

    def insert_batch(
        self, prefix: state_lib.Prefix, rows, state: cpu_sub_batches.State, slots, request: state_lib.Request
    ) -> cpu_sub_batches.State:
        """Starts prompt `rows[i]` in `slots[i]`, asked for row i of `request`; unused entries have slot = num_slots."""
        prefix = prefix.replace(experts=())
        with self._on_mesh():
            return cpu_sub_batches.at(
                lambda lane, slots: compiled_steps.insert(prefix, rows, lane, slots, request), state, slots
            )

    def deactivate(self, state: cpu_sub_batches.State, slots) -> cpu_sub_batches.State:
        """Stops the given slots (abort); [B], unused entries have slot = num_slots."""
        with self._on_mesh():
            return cpu_sub_batches.at(compiled_steps.deactivate, state, slots)

    def with_limit(self, state: cpu_sub_batches.State, limit: int) -> cpu_sub_batches.State:
        """The state with the most steps that the next call may run."""
        limit = np.int32(limit)
        if self.mesh.size > 1:  # laid out as the programs return it: one more layout would be one more compilation
            limit = jax.device_put(limit, jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec()))
        return cpu_sub_batches.each(lambda lane: lane.replace(limit=limit), state)

    def top_values(self, state: cpu_sub_batches.State, slots, windows, rows) -> tuple[jax.Array, jax.Array]:
        """(indices, bits) [N, k] of the first `rows` rows of windows that the device did not finish; all arrays [N]."""
        with self._on_mesh():
            return cpu_sub_batches.gather(
                lambda lane, slots: compiled_steps.top_values(lane, slots, windows, rows), state, slots
            )

    def bucket(self, length: int) -> int:
        """The shape in which a prompt of `length` tokens is run: a bucket, or whole chunks."""
        chunk = self.config.prefill_chunk
        if length > chunk:
            return -(-length // chunk) * chunk
        return next(size for size in self.config.buckets if size >= length)

    def read(self, result: "engine_api.ResultTokens") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Host view of a call: (tokens [B, K], logprobs [B, K] float32, number of valid tokens [B])."""
        data = np.asarray(result.data)
        K = self.config.steps_per_call
        logprobs = np.ascontiguousarray(data[:, 2 * K + 1 :]).view(np.float32)
        return data[:, :K], logprobs, data[:, K : 2 * K].sum(axis=1)

    def read_proofs(self, result: Result) -> tuple[np.ndarray, np.ndarray]:
        """Host view of `proof_indices` and `proof_bits`."""
        return np.asarray(result.proof_indices), np.asarray(result.proof_bits)

    # JetStream's contract.

    def load_params(self, *args, **kwargs):
        return self._initial_params

    def init_decode_state(self, *args, **kwargs) -> cpu_sub_batches.State:
        with self._on_mesh():
            num_lanes = cpu_sub_batches.count(self.model, self.config.num_slots)
        made = [self.init_slots(self.config.num_slots // num_lanes) for _ in range(num_lanes)]
        return cpu_sub_batches.SubBatches(tuple(made)) if num_lanes > 1 else made[0]

    def init_slots(self, num_slots: int) -> state_lib.DecodeState:
        """So many empty slots that are decoded by one call."""
        with self._on_mesh():
            return compiled_steps.empty_slots(self.model, num_slots, self.config.capacity, self.config.steps_per_call)

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length) -> state_lib.Prefix:
        if existing_prefix is not None:
            raise NotImplementedError("prefill on an existing prefix is not supported")
        stop_ids = np.full((1, state_lib.MAX_STOP_IDS), -1, np.int32)
        stop_ids[0, : len(self.tokenizer.stop_ids)] = self.tokenizer.stop_ids[: state_lib.MAX_STOP_IDS]
        request = state_lib.request_arrays((), 1).replace(
            max_tokens=jnp.full((1,), self.config.max_model_len), stop_ids=jnp.asarray(stop_ids)
        )
        tokens_1T = jnp.asarray(padded_tokens, jnp.int32)[None, : self.config.max_model_len]
        prefix = self.prefill_batch(params, tokens_1T, jnp.asarray([true_length], jnp.int32))
        return prefix.replace(request=request)

    def insert(self, prefix: state_lib.Prefix, decode_state: cpu_sub_batches.State, slot: int) -> cpu_sub_batches.State:
        rows, slots = np.zeros((1,), np.int32), np.array([slot], np.int32)
        return self.insert_batch(prefix, rows, decode_state, slots, prefix.request)

    def generate(self, params, decode_state: cpu_sub_batches.State):
        K = self.config.steps_per_call
        options = self.model, K, self.config.max_model_len, self.config.routed_experts
        params = self._turned.of(params)
        if isinstance(decode_state, cpu_sub_batches.SubBatches):
            done = self._side_by_side(functools.partial(compiled_steps.generate, *options, params), decode_state)
            state = cpu_sub_batches.SubBatches(tuple(lane for lane, *_ in done))
            data, extras, proofs, experts = compiled_steps.join([results for _, *results in done])
        else:
            with self._on_mesh():
                state, data, extras, proofs, experts = compiled_steps.generate(*options, params, decode_state)
        result = Result(
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
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def colocated_cpus(self):
        return None

    def _on_mesh(self):
        """What the programs are traced and run under; on one device they need no mesh."""
        return jax.set_mesh(self.mesh) if self.mesh.size > 1 else contextlib.nullcontext()


def check_mesh(config: EngineConfig, mesh: jax.sharding.Mesh) -> None:
    """ValueError where a server of these sizes cannot run over the mesh."""
    if mesh.shape["context"] > 1:
        raise ValueError(
            f"a server has no use for a mesh with context={mesh.shape['context']}: decode reads one token at a time; "
            "give these devices to tensor, expert or data"
        )
    if config.num_slots % (shards := rules.num_batch_shards(mesh)):
        raise ValueError(
            f"inference.num_slots = {config.num_slots} does not divide over the {shards} batch shards of the mesh "
            f"(data x fsdp x expert); set it to a multiple of {shards}"
        )


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
