"""The engine: prefill, insert, and generate over `models.transformer`, with the outputs that RL needs.

jetstream_engine.py gives it the contract of JetStream's engines.

1. `prefill_batch` computes the keys and values of prompts of one length bucket; a prompt longer than `prefill_chunk` goes
   through `prefill_chunk`, one chunk per call, so that decoding never waits for all of it. Neither samples: the first
   `generate` runs the last prompt token again.
2. `insert_batch` copies prompts into slots; several samples of one prompt share its prefill.
3. `generate` runs up to K decode steps for all slots in one call. It returns a `StepResult`: tokens, log-probabilities, and
   the values of proofs (proofs/window.py).

With `num_pages`, slots share pages of keys and values (paged_cache.py). The caller decides which pages a slot has, copies prompts
into them (`insert_pages`), and may move a sequence to host memory (`swap_out`) and into other pages and another slot (`swap_in`).

All programs (compiled_steps.py) have fixed shapes, and a row's result does not depend on the other rows. For a large model on a
CPU the number of slots, and of their positions, follows the load (cpu_layers.py, `resized`). Weights are an
argument of each call, so they can change while sequences run. On a mesh each call runs over all devices; one that spans several hosts needs the
same calls on each (multihost_replay.py).

Letters: B slots, P prompts of a prefill, T bucket or chunk length, S capacity, K steps per call, D model, V vocabulary,
N windows, k values of a proof, W pages of a slot at most.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import numpy as np

from inference.adapters import adapter_set
from inference.engine import (
    compiled_steps,
    cpu_decode_attention,
    cpu_layers,
    cpu_sub_batches,
    decode_state,
    kv_cache,
    paged_cache,
)
from inference.proofs import window
from models import config as config_lib
from models import routed_experts, transformer
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules

State = cpu_sub_batches.State
HOST, DEVICE = "pinned_host", "device"  # kinds of memory, by JAX's names
AUTO = -1  # of `num_pages`
PAGES_PER_COPY = 16  # of a copy into, or out of, a cache in pages: one program for any number


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The sizes and options for which an engine's programs are compiled."""

    num_slots: int  # sequences decoded together
    max_model_len: int  # prompt + completion, in tokens
    prefill_batch: int  # prompts per prefill call
    steps_per_call: int  # decode steps per call; the scheduler acts between calls
    prefill_chunk: int = 512  # longer prompts are prefilled this many tokens at a time
    routed_experts: bool = False  # record the experts that each token was routed to
    # record the tokens that filters left to sample from, up to so many (inference/rollouts/kept_sets.py)
    kept_tokens: int = 0
    # The pages of the cache, `paged_cache.PAGE` positions each. With 0, every slot has its whole capacity. AUTO is chosen by `settled`.
    num_pages: int = 0
    page_dtype: str = ""  # one of `paged_cache.DTYPES`; not that of activations: the server samples from another policy

    def __post_init__(self):
        for field in ("num_slots", "max_model_len", "prefill_batch", "steps_per_call", "prefill_chunk"):
            if getattr(self, field) < 1:
                raise ValueError(f"inference.{field} = {getattr(self, field)} must be at least 1; set it higher")
        if self.page_dtype not in paged_cache.DTYPES or (self.page_dtype and not self.num_pages):
            known = ", ".join(paged_cache.DTYPES[1:])
            raise ValueError(f"page_dtype = {self.page_dtype!r} is not {known}, or num_pages is 0; set both or neither")
        if (steps := self.steps_per_call) > window.WINDOW:
            found = f"inference.steps_per_call = {steps} must be at most {window.WINDOW}, the window of a proof"
            raise ValueError(f"{found}; set it lower")
        if self.num_pages not in (0, AUTO) and self.num_pages < (least := self.pages_per_slot):
            size = f"one sequence of max_model_len = {self.max_model_len} tokens"
            found = f"inference.num_pages = {self.num_pages} of {paged_cache.PAGE} positions do not hold {size}"
            raise ValueError(f"{found}; set at least {least}, or 0 for whole slots")

    @property
    def buckets(self) -> tuple[int, ...]:
        """The padded prompt lengths that `prefill_batch` is compiled for: powers of two from 16, and the longest."""
        longest = min(self.max_model_len, self.prefill_chunk)
        return (*(1 << bits for bits in range(4, 31) if 1 << bits < longest), longest)

    @property
    def capacity(self) -> int:
        """The number of positions in a slot's cache: `max_model_len`, rounded up to whole chunks if it exceeds one chunk."""
        return self.bucket(self.max_model_len)

    @property
    def pages_per_slot(self) -> int:
        """The number of pages that the longest sequence fills."""
        return -(-self.capacity // paged_cache.PAGE)

    @property
    def num_positions(self) -> int:
        """The number of tokens whose keys and values all slots together have room for."""
        return self.num_pages * paged_cache.PAGE or self.num_slots * self.max_model_len

    def settled(self, model: config_lib.ModelConfig, mesh: jax.sharding.Mesh) -> "EngineConfig":
        """Returns these sizes with a number in place of AUTO for `num_pages`.

        A TPU gets a cache in pages, with room for all slots at full length, because its kernel reads only the pages in use. Other
        devices, and models whose caches cannot be in pages, get 0: slots of whole capacity.
        """
        if self.num_pages != AUTO:
            return self
        in_pages = self.num_slots * self.pages_per_slot if paged_cache.reads_pages_in_use(model, mesh) else 0
        return dataclasses.replace(self, num_pages=in_pages, page_dtype=self.page_dtype if in_pages else "")

    def chunks(self, start: int, end: int) -> list[int]:
        """Returns the sizes of the chunks that prefill a prompt's tokens from `start` to `end`; the last one may be padded."""
        chunk = min(self.prefill_chunk, self.capacity)
        whole, rest = divmod(end - start, chunk)
        if rest > chunk // 2:
            return [chunk] * (whole + 1)
        short = min(max(16, self.prefill_chunk // 8), chunk)  # for the end of a prompt
        return [chunk] * whole + [short] * -(-rest // short)

    @property
    def key_counts(self) -> tuple[int, ...]:
        """The sizes of the caches of prompts that are prefilled in chunks: one chunk, doubled up to the capacity."""
        return (*(self.prefill_chunk << n for n in range(31) if self.prefill_chunk << n < self.capacity), self.capacity)

    def num_keys(self, num_tokens: int) -> int:
        """Returns the size of the cache for so many tokens: the smallest of `key_counts` that fits."""
        return next(size for size in self.key_counts if size >= num_tokens)

    def bucket(self, length: int) -> int:
        """Returns the padded length of a prompt: the smallest bucket that fits, or whole chunks above `prefill_chunk`."""
        if length > self.prefill_chunk:
            return -(-length // self.prefill_chunk) * self.prefill_chunk
        return next(size for size in self.buckets if size >= length)


@dataclasses.dataclass(frozen=True)
class Swapped:
    """A running sequence in host memory: the state of its slot, and copies of its pages, PAGES_PER_COPY at a time. Each host has its shards."""

    row: decode_state.DecodeState
    pages: Sequence[paged_cache.Entries]


class Engine:
    """The engine of one model on a mesh. The decode state and weights are passed to each call."""

    def __init__(
        self,
        model: config_lib.ModelConfig,
        config: EngineConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        mesh: jax.sharding.Mesh | None = None,
        *,
        for_cpu: bool = True,
        adapters: adapter_set.AdapterSet | None = None,
    ):
        """Creates an engine on `mesh`. None uses the process's first device. `adapters` are those that requests may name.

        With `for_cpu` = False it has the programs of accelerators also on a CPU, to compile them there for another device.
        Raises ValueError if the sizes do not fit the mesh, or if `config.routed_experts` is set for a model without experts.
        """
        mesh = mesh_lib.create({}, devices=jax.local_devices()[:1]) if mesh is None else mesh
        config = config.settled(model, mesh)
        check_mesh(config, mesh)
        if config.num_pages:
            paged_cache.check(model, mesh)
        if config.routed_experts and not routed_experts.num_moe_layers(model):
            raise ValueError("experts cannot be recorded: the model has none; leave routed_experts out")
        self.model, self.config, self.tokenizer, self.mesh = model, config, tokenizer, mesh
        self.adapters = adapters
        # On a CPU, layers are called one by one, however the weights are stored.
        # On other devices, a slot without a sequence does not keep its keys.
        unstacked = dataclasses.replace(model, scan_layers=False)
        self.can_read_slots = for_cpu and not config.num_pages and self._run(cpu_decode_attention.fits, unstacked)
        self._model = unstacked if self.can_read_slots else model  # as the programs run it
        self._layers = cpu_layers.UnstackedWeights(model if self.can_read_slots else unstacked)
        self._options = self._model, config.routed_experts
        # True if the decode state has as many slots as the load needs. Then `generate` blocks.
        self.follows_load = self.can_read_slots and cpu_layers.fits(unstacked)
        self._steps = cpu_layers if self.follows_load else compiled_steps
        self._replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._concurrently = cpu_sub_batches.ConcurrentDecoder()

    def choose(self, params: transformer.Params, numbers: Sequence[int]) -> transformer.Params:
        """Returns the weights for a call whose sequence i uses the adapter `numbers[i]`: `params` themselves without adapters."""
        return params if self.adapters is None else self.adapters.choose(params, numbers)

    def prefill_batch(self, params: transformer.Params, tokens_PT, length_P) -> decode_state.Prefix:
        """Returns the keys and values of P prompts, int32 [P, T] padded to one bucket, lengths [P]. P is one of `prefill_sizes`."""
        prefill = self._steps.prefill
        if self.follows_load and self.adapters is not None:  # sequences of different adapters share no keys
            prefill = functools.partial(prefill, shares=False)
        prefix = self._run(prefill, *self._options, self._layers.of(params), tokens_PT, length_P)
        return dataclasses.replace(prefix, experts=self._readable(prefix.experts))

    def prefill_chunk(
        self,
        params: transformer.Params,
        tokens_1T,
        start: int,
        cache: kv_cache.Cache | None,
        *,
        is_shared: bool = False,
    ) -> tuple[kv_cache.Cache, tuple[jax.Array, ...]]:
        """Prefills one chunk, int32 [1, T], of a prompt whose first `start` tokens are in `cache`. T is in `config.chunks`.

        The cache is donated (not usable afterwards) unless `is_shared`; pass None if `start` is 0. Returns (the new cache, of a size in
        `config.key_counts`, and the experts chosen in this chunk: an empty tuple unless the engine records them).
        """
        size = self.config.num_keys(start + tokens_1T.shape[1])
        if cache is None:
            cache = self.empty_prefix(size)
        elif is_shared or jax.tree.leaves(cache)[0].shape[-2] != size:
            cache = self._run(compiled_steps.resized, cache, size)
        layers, start_1 = self._layers.of(params), np.array([start], np.int32)
        new_cache, experts = self._run(self._steps.prefill_chunk, *self._options, layers, tokens_1T, start_1, cache)
        return new_cache, self._readable(experts)

    def empty_prefix(self, size: int | None = None) -> kv_cache.Cache:
        """Returns an empty key-value cache with room for `size` tokens; None for the longest prompt."""
        return self._on_mesh(self._run(compiled_steps.empty_prefix, self._model, 1, size or self.config.capacity))

    def read_slot(self, state: State, slot: int, num_tokens: int) -> kv_cache.Cache:
        """Returns a copy of the keys and values of the first `num_tokens` tokens in a slot, as a cache of `prefill_chunk`.

        Only an engine with `can_read_slots` has this. The sequence may have ended, if no other was inserted since.
        """
        part, own_slot = divmod(slot, len(state[0].token))
        row, size = np.int32(own_slot), self.config.num_keys(num_tokens)
        return self._on_mesh(tuple(cpu_decode_attention.read_row(blocks, row, size) for blocks in _blocks(state[part])))

    def prompt_logprobs(self, params: transformer.Params, tokens_1T) -> np.ndarray:
        """Returns float32 [T]: the log-probability at temperature 1 of each prompt token; 0 for the first token. Blocks.

        T must be a bucket or a multiple of `prefill_chunk`; pad after the prompt.
        """
        tokens_BT = np.repeat(tokens_1T, rules.num_batch_shards(self.mesh), axis=0)  # a row for each batch shard
        return np.asarray(self._readable(self._run(compiled_steps.score, self.model, params, tokens_BT)))

    def insert_batch(
        self, prefix: decode_state.Prefix, rows, state: State, slots, request: decode_state.Request
    ) -> State:
        """Copies prompt `rows[i]` into slot `slots[i]`, with parameters in row i of `request`; unused entries have slot = num_slots.

        With a cache in pages, `insert_pages` copies keys and values before.
        """
        prefix = dataclasses.replace(prefix, experts=(), cache=() if self.config.num_pages else prefix.cache)
        insert = functools.partial(compiled_steps.insert, prefix, rows, request)
        return self._run(cpu_sub_batches.at, insert, state, slots)

    def insert_pages(self, prefix: decode_state.Prefix, state: State, copies: Sequence[tuple[int, int, int]]) -> State:
        """Copies keys and values of prompts into pages. Each copy is (row of `prefix`, number of the page in the prompt, page)."""
        (part,) = state
        for rows, places, pages in self._in_parts(copies):
            firsts = places * paged_cache.PAGE
            part = self._run(compiled_steps.insert_pages, prefix.cache, rows, firsts, part, pages)
        return (part,)

    def swap_out(self, state: State, slot: int, pages: Sequence[int]) -> Swapped:
        """Fetches a sequence: the state of its slot, and the keys and values in `pages`. Blocks. The slot stays as it is."""
        (part,) = state
        row = jax.device_get(self._readable(self._run(compiled_steps.read_row, part, np.int32(slot))))
        parts = (self._run(compiled_steps.read_pages, part, at) for (at,) in self._in_parts(pages))
        return Swapped(row, [moved(copies, HOST) for copies in parts])

    def swap_in(self, state: State, slot: int, pages: Sequence[int], swapped: Swapped) -> State:
        """Puts a sequence that `swap_out` fetched into a slot and as many other pages, where it goes on bit for bit."""
        (part,) = state
        for (at,), copies in zip(self._in_parts(pages), swapped.pages, strict=True):
            part = self._run(compiled_steps.write_pages, part, moved(copies, DEVICE), at)
        return (self._run(compiled_steps.write_row, part, swapped.row, np.int32(slot)),)

    def deactivate(self, state: State, slots) -> State:
        """Returns the state with decoding stopped in `slots`: int32 [B], where unused entries have slot = num_slots."""
        return self._run(cpu_sub_batches.at, compiled_steps.deactivate, state, slots)

    def top_values(self, state: State, slot: int, window_index: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Fetches the k largest values, as (indices, bits), of the first `num_rows` rows of a proof window (32 hidden states).

        Used for the last window of a sequence that the host ended, which a decode call did not reduce to its top values.
        """
        part, own_slot = divmod(slot, len(state[0].token))
        where = (np.array([value], np.int32) for value in (own_slot, window_index, num_rows))
        indices, bits = self._readable(self._run(compiled_steps.top_values, state[part], *where))
        return np.asarray(indices)[0], np.asarray(bits)[0]

    def read(self, result: compiled_steps.StepResult) -> compiled_steps.StepResult:
        """Fetches tokens, validity, and log-probabilities of a decode call; returns the result with them on the host. Blocks until the call has ended."""
        tokens, valid, logprobs = jax.device_get((result.tokens, result.valid, result.logprobs))
        return dataclasses.replace(result, tokens=tokens, valid=valid, logprobs=logprobs)

    def init_slots(self, num_slots: int) -> decode_state.DecodeState:
        """Returns an unused `DecodeState` of `num_slots` slots, which are decoded in one call."""
        config = self.config
        empty = functools.partial(compiled_steps.empty_slots, self._model, num_slots)
        return self._on_mesh(self._run(empty, config.capacity, config.num_pages, config.page_dtype))

    @property
    def insert_sizes(self) -> tuple[int, ...]:
        """The numbers of slots that one `insert_batch` call can fill, in ascending order: few, as each has a compiled program."""
        most = self.config.num_slots
        sizes = (most,) if self.follows_load else (1, 8, self.config.prefill_batch, most)
        return tuple(sorted({min(size, most) for size in sizes}))

    @property
    def slot_sizes(self) -> tuple[int, ...]:
        """The numbers of slots for which programs are compiled: the sizes of a state that follows the load, else `insert_sizes`."""
        return cpu_layers.sizes(self.config.num_slots) if self.follows_load else self.insert_sizes

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """The numbers of prompts that a call of `prefill_batch` can have, in ascending order."""
        most = self.config.prefill_batch
        return tuple(sorted({1, -(-most // 4), most})) if self.follows_load else (most,)

    def sizes(self, state: State) -> tuple[int, int]:
        """Returns (number of slots of a state, number of positions per slot)."""
        if not self.follows_load:
            return self.config.num_slots, self.config.capacity
        values = _blocks(state[0])[0].values_NBKSV
        return values.shape[1], values.shape[0] * values.shape[3]

    def fitting(self, num_slots: int, num_positions: int) -> tuple[int, int]:
        """Returns the smallest (slots, positions per slot) of a state for `num_slots` sequences of at most `num_positions` tokens each."""
        if not self.follows_load:
            return self.config.num_slots, self.config.capacity
        num_blocks, block = cpu_decode_attention.division(self.config.capacity)
        slots = next(size for size in self.slot_sizes if size >= num_slots)
        blocks = next(size for size in cpu_layers.sizes(num_blocks) if size * block >= num_positions)
        return slots, blocks * block

    def resized(self, state: State, slots: Sequence[int], sizes: tuple[int, int]) -> State:
        """Returns a state of other sizes, which `fitting` returned, with slot `slots[i]` of `state` as slot i. Deletes `state`."""
        (part,) = state
        _, block = cpu_decode_attention.division(self.config.capacity)
        rows = np.array([*slots, *[len(part.token)] * (sizes[0] - len(slots))], np.int32)
        return (self._on_mesh(cpu_layers.resized(self._model, part, rows, sizes[1] // block)),)

    def init_decode_state(self) -> State:
        """Returns the state of all slots, with none in use. For a state that follows the load: of one slot."""
        num_slots, is_paged = self.config.num_slots, bool(self.config.num_pages)
        if self.follows_load:
            num_slots, _ = self.fitting(1, 1)
            return (self._on_mesh(cpu_layers.empty_slots(self._model, num_slots, self.config.capacity, 1)),)
        num_parts = 1 if is_paged or self.adapters else self._run(cpu_sub_batches.count, self._model, num_slots)
        return tuple(self.init_slots(num_slots // num_parts) for _ in range(num_parts))

    def generate(
        self, params: transformer.Params, decode_state: State, limit: int | None = None, table=None
    ) -> tuple[State, compiled_steps.StepResult]:
        """Starts one decode call for all slots, of at most `limit` steps if given; returns (new state, result), without blocking unless `follows_load`.

        A cache in pages needs `table`, int32 [B, W]: the pages of each slot, with room for the new tokens. `table` may be None if no
        slot is active.
        """
        K = self.config.steps_per_call
        if table is None and self.config.num_pages:
            table = np.zeros((self.config.num_slots, self.config.pages_per_slot), np.int32)
        generate = functools.partial(
            self._steps.generate,
            self._model,
            K,
            self.config.max_model_len,
            self.config.routed_experts,
            self.num_kept,
            self._layers.of(params),
            np.int32(K if limit is None else limit),
            table,
        )
        done = self._run(self._concurrently, generate, decode_state)
        results = [result for _, result in done]
        result = compiled_steps.join(results) if len(results) > 1 else results[0]
        return tuple(state for state, _ in done), self._readable(result)

    @property
    def num_kept(self) -> int:
        """The most tokens of a recorded kept set."""
        return min(self.config.kept_tokens, self.model.vocab_size)

    def _on_mesh(self, arrays):
        """Returns arrays that a program made without weights placed as those of programs with weights, or each would be compiled for both."""
        return arrays if self.mesh.size > 1 else jax.device_put(arrays, self._replicated)

    def _in_parts(self, values: Sequence) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields numbers, or columns of tuples of numbers whose last is a page, in equal parts; pages of the rest are out of range."""
        columns = np.asarray(values, np.int32).reshape(len(values), -1)
        for start in range(0, len(columns), PAGES_PER_COPY):
            part = np.zeros((PAGES_PER_COPY, columns.shape[1]), np.int32)
            part[:, -1] = self.config.num_pages
            part[: len(columns) - start] = columns[start : start + PAGES_PER_COPY]
            yield tuple(part.T.copy())

    def _run(self, function, *args):
        """Calls `function(*args)` with the engine's mesh set, if it has several devices; returns the result."""
        with jax.set_mesh(self.mesh) if self.mesh.size > 1 else contextlib.nullcontext():
            return function(*args)

    def _readable(self, tree):
        """Returns arrays that this process can fetch whole: replicated, if the mesh spans several processes."""
        if not self.mesh.is_multi_process or not jax.tree.leaves(tree):
            return tree
        return jax.device_put(tree, self._replicated)


def check_mesh(config: EngineConfig, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError if an engine of `config` cannot run on `mesh`.

    The context axis must be 1, and the slots must divide over the batch shards. With several shards, `num_pages` must be 0, AUTO, or the
    pages of all slots.
    """
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
    if shards > 1 and config.num_pages not in (0, AUTO, whole := config.num_slots * config.pages_per_slot):
        raise ValueError(
            f"inference.num_pages = {config.num_pages} on {shards} batch shards of the mesh (data x fsdp x expert), whose "
            f"slots share no pages, must be those of whole slots; set it to {whole}, or to {AUTO}"
        )


def _blocks(state: decode_state.DecodeState) -> tuple[cpu_decode_attention.Blocks, ...]:
    return cast(tuple[cpu_decode_attention.Blocks, ...], state.cache)


def moved(tree, memory: str):
    """Returns arrays in another kind of memory, `HOST` or `DEVICE`. Blocks."""
    shardings = jax.tree.map(lambda x: x.sharding.with_memory_kind(memory), tree)
    return jax.block_until_ready(jax.device_put(tree, shardings))
