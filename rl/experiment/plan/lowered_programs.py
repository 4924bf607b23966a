"""Lowers the programs of a run for a TPU topology: arrays have a shape and a sharding, but no content.

Each `*_program` describes a function that training or serving calls. The learner's are those of rl/learning/learner/train_step.py as
rl/train.py makes them; a server's are those of inference/engine/engine.py, with the weights as they are published. The arrays
of a batch have room for rollouts of maximum length; the lengths in it are those of `plan.median_length`.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from ml_collections import config_dict

from inference.engine import decode_state, engine, kv_cache, paged_cache, weights
from models import flops, lora, moe_experts, transformer
from rl.experiment import experiment, layout
from rl.experiment.plan import roofline
from rl.learning.batch import packing
from rl.learning.learner import reference, train_step
from rl.protocol import env_mix
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules

# Without these, libtpu waits minutes for a metadata server, which only TPU machines have.
COMPILER_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock guards chips, and none is opened here
}


@dataclasses.dataclass(frozen=True)
class Load:
    """A load of a server: its name, and the bytes per chip of the keys and values of its tokens."""

    name: str
    live_bytes: float
    pages_bytes: float  # that the kernel of a cache in pages reads of one layer

    @classmethod
    def of(cls, name: str, lengths: Sequence[int], layer_bytes: float, num_layers: int) -> "Load":
        """Returns the load of sequences of these lengths; a layer's keys and values of a token have `layer_bytes` on a chip."""
        in_pages = sum(-(-length // paged_cache.PAGE) * paged_cache.PAGE for length in lengths)
        return cls(name, sum(lengths) * layer_bytes * num_layers, in_pages * layer_bytes)


@dataclasses.dataclass(frozen=True)
class LoweredProgram:
    """One program of a run: how to lower it, the memory of its arguments, and its work."""

    name: str  # a key of LEARNER or SERVER
    title: str
    mesh: jax.sharding.Mesh
    lower: Callable[[], jax.stages.Lowered]
    held: dict[str, float]  # bytes per chip of the arguments, by kind
    needed: dict[str, float]  # estimated further bytes per chip: gradients, saved layer inputs, a layer
    num_tokens: int  # of one run (of one step, in decode)
    executed_flops: float  # of one run, all chips, by formula
    read_bytes: float  # per chip, of one run, from its memory
    model_flops: float = 0.0  # the FLOPs that MFU counts; 0 if it has no MFU
    turns: tuple[float, ...] = ()  # of loops bounded by data (rl/experiment/plan/hlo.py)
    turns_alone: float | None = None  # of such a loop that is in no other one
    waiting_bytes: float = 0.0  # of new weights in the memory of a server's host, until they replace its own one by one
    cache: tuple[tuple[int, ...], ...] = ()  # dims of a chip's part of the cache, which the program may not copy
    steps_per_call: int = 1  # of decode
    weights_bytes: float = 0.0  # per chip, that a decode step has to read
    loads: tuple[Load, ...] = ()  # for which the bytes that a decode step reads are counted in the compiled text

    @property
    def passing_bytes(self) -> float:
        """The bytes per chip of arguments that exist only while the program runs: a batch, or a prompt's part of the cache."""
        return self.held.get("batch", 0.0) + (self.held.get("cache", 0.0) if self.name == "prefill" else 0.0)

    @property
    def estimated_bytes(self) -> float:
        """The estimated bytes per chip, by which programs that cannot fit are skipped without compiling them."""
        return sum(self.held.values()) + sum(self.needed.values())


LEARNERS, ENGINES = 0, 1  # whose devices a mesh is made of


def resolve(config: config_dict.ConfigDict) -> experiment.Experiment:
    """Returns the experiment of a config, without its tokenizer files, its tasks, and its servers. Does not change `config`."""
    config = config.copy_and_resolve_references()  # ConfigDict(config) would share nested dicts
    config.tokenizer, config.env.num_tasks, config.env.max_calls = "byte_chatml", 1, config.env.max_calls or 1
    for name in config.envs:
        with config.envs[name].unlocked():
            config.envs[name].num_tasks = 1
    mode, config.topology.mode = config.topology.mode, "auto"
    exp = experiment.resolve(config)
    config = config_dict.ConfigDict(exp.config)
    config.topology.mode = mode
    return dataclasses.replace(exp, config=config_dict.FrozenConfigDict(config))


def is_shared(config: config_dict.ConfigDict) -> bool:
    """Returns True if learner and engine take turns on the same devices."""
    return has_engine(config) and not config.mesh.rollout_devices


def has_engine(config: config_dict.ConfigDict) -> bool:
    """Returns True if each host of the learner has an engine, on the learner's devices or on others; else, servers are elsewhere."""
    return config.topology.mode != "remote"


def learner_axes(config: config_dict.ConfigDict) -> dict[str, int]:
    """Returns the mesh axes of the learner, and `num_slices`. With several slices, `data` replicates the learner over them unless `mesh.data` is set."""
    axes = config.mesh.to_dict() | {"num_slices": config.plan.num_slices}
    return axes | ({"data": config.plan.num_slices} if axes["data"] == 1 else {})


def server_axes(config: config_dict.ConfigDict) -> dict[str, int]:
    """Returns the mesh axes of a server: `plan.server_mesh` if servers run elsewhere, else `inference.mesh` of an engine on the learner's hosts.

    In the second case `data` is -1: it takes the devices that the other axes leave (rl/experiment/layout.py).
    """
    axes = config.plan.server_mesh.to_dict()
    if not has_engine(config):
        return axes
    own = {axis: size for axis, size in config.inference.mesh.items() if size != 1}
    return dict.fromkeys(axes, 1) | {"data": -1, "rollout_devices": config.mesh.rollout_devices} | own


def create_mesh(topology: str, axes: dict[str, int], role: int = LEARNERS) -> jax.sharding.Mesh:
    """Returns a mesh over the devices of a topology that this machine does not have.

    With `rollout_devices` in `axes`, learner and engines have devices apart, and `role` is LEARNERS or ENGINES. With `num_slices`,
    there are several slices of this topology.
    Raises ValueError if the TPU compiler is missing, rejects the topology, or the axes do not fit it.
    """
    roofline.chip_of(topology)
    if not os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")) and importlib.util.find_spec("libtpu") is None:
        raise ValueError("libtpu, the TPU compiler, is missing; pip install -r third_party/plan-requirements.txt")
    os.environ.update(COMPILER_ENVIRONMENT | os.environ)
    axes = dict(axes)
    try:
        # Without this option, libtpu assumes hosts of four chips, as those of larger slices are.
        dims = [int(part) for part in topology.partition(":")[2].split("x")]
        alone = {"chips_per_host_bounds": [*dims, 1, 1][:3]} if roofline.host_of(topology) == topology else {}
        alone |= {"num_slices": axes.pop("num_slices", 1)}
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **alone).devices
    except jax.errors.JaxRuntimeError as error:
        sizes = ", ".join(roofline.chip_of(topology).sizes)
        raise ValueError(f"the TPU compiler rejects topology {topology!r} ({error}); choose one of {sizes}") from None
    return mesh_lib.create(axes, layout.split(devices, axes.pop("rollout_devices", 0))[role])


def train_program(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> LoweredProgram:
    """Returns the program of the train step (rl/learning/learner/train_step.py), on a batch of rollouts of maximum length."""
    config, model = exp.config, exp.model
    learner = exp.learner(mesh)
    step, state = train_step.jit_train_step(learner), train_step.abstract_state(learner)
    batch, packed = abstract_batch(exp, mesh)
    rows, T = batch.tokens.shape[1:]
    num_micro_batches, work = len(packed.sequences) // rows, flops.ModelFlops.of(model, is_frozen=bool(exp.lora))
    num_steps = min(exp.objective.optimizer_steps, num_micro_batches)
    is_scored = exp.objective.old_logprobs == "learner"  # all but the micro-batches of the first optimizer step
    num_scored = is_scored * (num_micro_batches - math.ceil(num_micro_batches / num_steps))
    num_passes = (4 if model.remat in ("block", "attention", "offload") else 3) + num_scored / num_micro_batches
    held = _held(parameters=(state.params, state.frozen), optimizer=state.opt_state, batch=batch)
    if exp.objective.needs_reference:  # it stays in memory next to the policy
        other = reference.model_of(exp.objective, model, exp.tokenizer.vocab_size)
        held["reference"] = bytes_per_chip(transformer.abstract(other, mesh))
    trained = bytes_per_chip(state.params)
    # Without collectives the compiler keeps a second gradient, and the parameters in other layouts and dtypes, over all turns.
    copies = 3 * trained if mesh.size == 1 else 0.0  # as compiled for one v5e and v6e
    num_saved = 0 if model.remat == "offload" else model.num_layers
    return LoweredProgram(
        name="train",
        title=f"train step: {num_micro_batches} micro-batches of {rows} rows x {T} tokens, {_lengths_text(config)}",
        mesh=mesh,
        lower=lambda: _lower(mesh, step, state, batch),
        held=held,
        needed={
            "gradients": trained,
            "copies": copies,
            "saved layer inputs": _local_tokens(mesh, rows, T)
            * (model.model_dim + (model.remat == "attention") * model.num_heads * model.v_dim)
            * num_saved
            * jnp.dtype(model.dtype).itemsize,
            # With its gradient; the factor is that of the compiled configs/intellect2.py. Without recomputation, those of all layers.
            "layers": (5 + 4 * model.num_layers * (model.remat == "none")) * _layer_bytes(model, mesh, rows, T),
        },
        num_tokens=packed.num_tokens,
        executed_flops=work.executed_flops(packed) + num_scored / num_micro_batches * work.scoring_flops(packed),
        model_flops=work.model_flops(packed),
        read_bytes=num_micro_batches * num_passes * _gathered_bytes(model, mesh)
        + num_steps * 2 * (held["parameters"] + held["optimizer"]),
        turns=(num_steps, num_micro_batches / num_steps),
        turns_alone=num_scored if num_steps > 1 else None,
    )


def logprobs_program(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> LoweredProgram:
    """Returns the program that computes log-probabilities of a batch without gradient, as for a reference policy."""
    model = exp.model
    params = transformer.abstract(model, mesh)
    batch, packed = abstract_batch(exp, mesh)
    rows, T = batch.tokens.shape[1:]
    num_micro_batches, work = len(packed.sequences) // rows, flops.ModelFlops.of(model)
    return LoweredProgram(
        name="logprobs",
        title=f"log-probability pass: the same {num_micro_batches} micro-batches, without gradient",
        mesh=mesh,
        lower=lambda: train_step.score.lower(exp.learner(mesh), params, batch),
        held=_held(parameters=params, batch=batch),
        needed={"a layer": _layer_bytes(model, mesh, rows, T)},
        num_tokens=packed.num_tokens,
        executed_flops=work.scoring_flops(packed),
        read_bytes=num_micro_batches * _gathered_bytes(model, mesh),
        turns=(num_micro_batches,),
    )


def prefill_program(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> LoweredProgram:
    """Returns the program that prefills the longest prompts on a server: a chunk of one prompt, or several whole prompts."""
    server, params = _server(exp, mesh)
    chunk, capacity = exp.engine.prefill_chunk, exp.engine.capacity
    held = {"parameters": bytes_per_chip(params)}
    if capacity > chunk:
        shape = (1, chunk)
        rest = _placed(jax.eval_shape(server.empty_prefix), mesh)
        held["cache"] = bytes_per_chip(rest)
        title = f"prefill: a chunk of {chunk} tokens of one prompt, against {capacity} keys"
        last = functools.partial(server.prefill_chunk, start=capacity - chunk)
        function = jax.jit(lambda params, tokens, rest: last(params, tokens, cache=rest), donate_argnums=2)
    else:
        shape = (exp.engine.prefill_batch, capacity)
        rest = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
        title = f"prefill: {shape[0]} prompts of {capacity} tokens"
        function = jax.jit(server.prefill_batch)
    num_tokens, work = math.prod(shape), flops.ModelFlops.of(exp.model)
    return LoweredProgram(
        name="prefill",
        title=title,
        mesh=mesh,
        lower=lambda: _lower(mesh, function, params, jax.ShapeDtypeStruct(shape, jnp.int32), rest),
        held=held,
        needed={},
        num_tokens=num_tokens,
        executed_flops=num_tokens * (2 * (work.multiplied - work.head) + work.attention_flops(capacity)),
        read_bytes=sum(held.values()),
    )


def decode_program(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> LoweredProgram:
    """Returns the program that decodes all slots of a server. Its work and bytes are those of one decode step."""
    server, params = _server(exp, mesh)
    sizes, config = server.config, exp.config
    slots, pages = sizes.num_slots, sizes.num_pages
    # Not the layout of this machine's own slots (inference/engine/cpu_decode_attention.py), should it be a CPU.
    cache = jax.eval_shape(
        lambda: (
            paged_cache.create(server.model, pages, sizes.page_dtype)
            if pages
            else kv_cache.create(server.model, slots, sizes.capacity)
        )
    )
    state = _placed(jax.eval_shape(lambda: server.init_slots(slots)).replace(cache=cache), mesh)
    work = flops.ModelFlops.of(server.model)
    held = _held(parameters=params, cache=state.cache, other_state=state.replace(cache=()))
    if config.mesh.rollout_devices and has_engine(config):  # they are handed over while the engine runs
        held["new version"] = held["parameters"]
    table = jax.ShapeDtypeStruct((slots, sizes.pages_per_slot), jnp.int32) if pages else None
    capacity, read_share = sizes.capacity, work.read_parameters(slots) / work.held
    if pages:  # no page is free
        length = min(pages * paged_cache.PAGE // slots, capacity)
        title = f"decode: {slots} sequences of {length} tokens on average, of {capacity} at most, in {pages} pages"
    else:
        length, title = capacity, f"decode: {slots} slots of {capacity} tokens"
    # A quarter: from no tokens to half of the length, as in a stream of requests.
    lengths = {"a quarter": [-(-(i + 1) * length // (2 * slots)) for i in range(slots)], "all": [length] * slots}
    layer_bytes = held["cache"] / ((pages * paged_cache.PAGE or slots * capacity) * server.model.num_layers)
    return LoweredProgram(
        name="decode",
        title=f"{title}, {sizes.steps_per_call} steps per call",
        mesh=mesh,
        lower=lambda: _lower(mesh, jax.jit(server.generate, donate_argnums=1), params, (state,), None, table),
        held=held,
        needed={},
        num_tokens=slots,
        executed_flops=slots * (2 * work.multiplied + work.attention_flops(length)),
        read_bytes=read_share * held["parameters"] + held["cache"],
        turns=(1,),
        waiting_bytes=0.0 if has_engine(config) else float(transformer.num_bytes(server.model)),
        cache=tuple(sorted({dims for x in jax.tree.leaves(state.cache) for dims in _whole_and_layer(x, pages > 0)})),
        steps_per_call=sizes.steps_per_call,
        weights_bytes=read_share * held["parameters"],
        # The text does not show which experts the tokens choose.
        loads=()
        if server.model.num_experts
        else tuple(Load.of(name, row, layer_bytes, server.model.num_layers) for name, row in lengths.items()),
    )


LEARNER = {"train": train_program, "logprobs": logprobs_program}  # on config.mesh
SERVER = {"prefill": prefill_program, "decode": decode_program}  # on `server_axes`


def abstract_batch(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> tuple[packing.TrainBatch, flops.PackedRows]:
    """Returns rl/train.py's batch without content, and the rows of its micro-batches in use, at the lengths of `lengths`."""
    config = exp.config
    T, sizes = config.train.row_length, lengths(config)
    sizes = [min(size, T) for size in sizes]
    rows = [tuple(sizes[i] for i in row) for row in packing.first_fit(sizes, T)]
    rows += [()] * (-len(rows) % exp.rows(mesh))
    return exp.abstract_batch(mesh), flops.PackedRows(T, rows)


def lengths(config: config_dict.ConfigDict) -> list[int]:
    """Returns the tokens of each rollout of a batch: the quantiles of the lognormal distribution of `config.plan`, or the maximum."""
    num, longest, plan = env_mix.max_streams(config), config.inference.max_model_len, config.plan
    if not plan.median_length:
        return [longest] * num
    normal = statistics.NormalDist(math.log(plan.median_length), plan.length_sigma)
    drawn = (round(math.exp(normal.inv_cdf((i + 0.5) / num))) for i in range(num))
    return [min(max(length, 1), longest) for length in drawn]


def _lengths_text(config) -> str:
    longest, plan = config.inference.max_model_len, config.plan
    if not plan.median_length:
        return f"all rollouts at {longest} tokens"
    found, mean = f"lognormal lengths of median {plan.median_length}, sigma {plan.length_sigma}", lengths(config)
    return f"{found}, at most {longest}, on average {sum(mean) / len(mean):.0f} tokens"


def _server(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> tuple[engine.Engine, transformer.Params]:
    """Returns an engine and its weights, as they are published."""
    model = exp.published_model
    config = exp.engine.settled(model, mesh)
    engine.check_mesh(config, mesh)
    if config.num_pages:
        paged_cache.check(model, mesh)
    store = weights.Store(model, mesh, lora=exp.lora or None)
    params = lora.restored(store.abstract, store.lora)
    return engine.Engine(model, config, exp.tokenizer, for_cpu=False), params


def _placed(tree, mesh: jax.sharding.Mesh):
    """Returns a state or cache of an engine with the shardings with which its programs return it."""
    specs = decode_state.layout(tree, mesh)
    return _sharded(tree, jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs))


def _sharded(tree, shardings):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _whole_and_layer(x, is_paged: bool) -> list[tuple[int, ...]]:
    """Returns the dims of one chip's part of a cache array and, if layers are stacked, also of one layer in it."""
    dims = x.sharding.shard_shape(x.shape)
    if is_paged:  # the layers' pages follow each other in the kernel's argument
        K, N, P, *page = dims
        return [dims, (K, N * P, *page), (K, P, *page)]
    return [dims[i:] for i in range(x.ndim - 3)] if math.prod(dims) else []


def _lower(mesh, function, *args) -> jax.stages.Lowered:
    with jax.set_mesh(mesh):
        return function.lower(*args)


def _held(**trees) -> dict[str, float]:
    """Returns {kind: bytes per chip} of the arguments of a program; `trees` maps each kind to its arrays."""
    return {kind.replace("_", " "): bytes_per_chip(tree) for kind, tree in trees.items()}


def bytes_per_chip(tree) -> float:
    """Returns the bytes per chip of a tree of `ShapeDtypeStruct` with shardings. Arrays in host memory do not count."""
    leaves = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != "pinned_host"]
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves))


def _gathered_bytes(model, mesh: jax.sharding.Mesh) -> float:
    """Returns the bytes of all weights as one chip reads them: gathered over `fsdp`, in the dtype of the activations."""
    split = math.prod(mesh.shape[axis] for axis in rules.RULES["model"])
    item = jnp.dtype(model.dtype).itemsize / jnp.dtype(model.param_dtype).itemsize
    return bytes_per_chip(transformer.abstract(model, mesh)) * split * item


def _layer_bytes(model, mesh: jax.sharding.Mesh, rows: int, T: int) -> float:
    """Estimates the bytes one chip needs for one feed-forward layer: input, output, gate, up, and gate * up.

    MoE layers count token-expert assignments, at most `moe_experts.ROWS`. Returns the larger of dense and MoE.
    """
    tokens, item = _local_tokens(mesh, rows, T), jnp.dtype(model.dtype).itemsize
    dense = tokens * (2 * model.model_dim + 3 * model.ffn_dim / mesh.shape["tensor"])
    assignments = min(tokens * model.experts_per_token, moe_experts.ROWS)
    return item * max(dense, assignments * (2 * model.model_dim + 3 * model.expert_ffn_dim))


def _local_tokens(mesh: jax.sharding.Mesh, rows: int, T: int) -> float:
    return rows * T / (rules.num_batch_shards(mesh) * math.prod(mesh.shape[axis] for axis in rules.RULES["sequence"]))
