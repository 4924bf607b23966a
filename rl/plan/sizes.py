"""Chooses the sizes that a config leaves open (0, or "auto" for a dtype), for the memory of devices that learner and engine share.

1. `inference.max_model_len` is twice `sampling.max_tokens`, but at most the positions that the model was trained for.
   `train.row_length` is that, in whole tiles of the attention kernel. `rl.prompts_per_step` makes a batch of `ROLLOUTS`.
2. `inference.num_slots` and `train.rows` double in turn while all fits by the plan's own estimates
   (rl/plan/lowered_programs.py): train state, weights of the engine, and the larger of a train step and the slots.
3. The dtypes of `model` are bfloat16 on accelerators and float32 on a CPU. Parameters that train are float32.

A run with a checkpoint keeps the sizes of its config.json, on any devices.
"""

import dataclasses
import math
import operator
import os
import pathlib
from collections.abc import Callable, Mapping

import jax
from absl import flags
from ml_collections import config_dict

from rl.experiment import experiment, initial
from rl.experiment import flags as command_line
from rl.experiment import workdir as run_directory
from rl.plan import lowered_programs, roofline
from rl.topology import layout
from sharding import mesh as mesh_lib
from sharding import rules

GIB = 2**30
ROLLOUTS = 256  # of a batch: with fewer, gradients are noisy
LEAST_SLOTS, MOST_SLOTS = 8, 512  # per batch shard of the engine; in all
SHARE = 0.85  # of the memory: estimates err by less (tests/rl/plan/test_sizes.py), and memory fragments
TILE = 128  # tokens of a row, of which the TPU's attention kernel needs whole tiles
FIELDS = (
    *("model.dtype", "model.param_dtype", "inference.max_model_len", "train.row_length", "rl.prompts_per_step"),
    *("inference.num_slots", "train.rows"),
)
# Tokens of a micro-batch per device beyond which matmuls gain nothing, on accelerators and on a CPU.
MOST_TOKENS = {False: 32768, True: 4096}


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that the learner and the engine of a run share."""

    mesh: jax.sharding.Mesh  # of the learner
    server_mesh: jax.sharding.Mesh
    memory_bytes: float  # of one device
    kind: str
    is_cpu: bool = False


def resolve(config: config_dict.ConfigDict) -> experiment.Experiment:
    """Resolves the config of the command line, completed from its checkpoint, with sizes for this process's devices, which it prints.

    A run that has a checkpoint keeps its sizes. Raises ValueError in one line, as `initial.completed`, `settled`, and `experiment.resolve` do.
    """
    config = initial.completed(config, command_line.given())
    workdir = pathlib.Path(flags.FLAGS.workdir or "")
    if flags.FLAGS.workdir and any(workdir.glob("checkpoints/[0-9]*")):
        saved = experiment.flat(run_directory.saved_config(workdir))
        config.update_from_flattened_dict({name: saved[name] for name in _open(config)})
    config, chosen = settled(config, present, experiment.resolve)
    print(chosen, end="\n" if chosen else "", flush=True)
    return experiment.resolve(config)


def present(config: config_dict.ConfigDict) -> Devices:
    """Returns the devices of this process and of the other hosts of the learner."""
    local = jax.local_devices()
    is_one = set(config.inference.mesh.values()) == {1} and not layout.is_colocated(config)  # a process of its own
    server = mesh_lib.create(lowered_programs.server_axes(config), local[:1] if is_one else local)
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (2 * len(local))  # half for other programs
    memory_bytes = (local[0].memory_stats() or {}).get("bytes_limit", host_bytes)
    mesh, is_cpu = layout.learner_mesh(config), local[0].platform == "cpu"
    return Devices(mesh, server, memory_bytes, local[0].device_kind, is_cpu)


def planned(config: config_dict.ConfigDict, topology: str) -> Devices:
    """Returns the devices of a TPU topology `<kind>:<dims>`, without having them."""
    chip = roofline.chip_of(topology)
    mesh = lowered_programs.create_mesh(topology, config.mesh.to_dict())
    server_mesh = lowered_programs.create_mesh(topology, lowered_programs.server_axes(config))
    return Devices(mesh, server_mesh, chip.memory_bytes, topology.partition(":")[0])


def settled(
    config: config_dict.ConfigDict, devices: Callable[[config_dict.ConfigDict], Devices], resolve: Callable
) -> tuple[config_dict.ConfigDict, str]:
    """Returns (a copy of the config with a value for each open field, a line about them, "" if none was open).

    `devices` and `resolve` (`experiment.resolve`, or the plan's) are called if a field is open. Raises ValueError if the engine
    has devices of its own, or if the smallest sizes do not fit the memory.
    """
    config = config.copy_and_resolve_references()
    if not (names := _open(config)):
        return config, ""
    if not lowered_programs.is_shared(config):
        raise ValueError(
            f"{names[0]} is open, but the engine has other devices than the learner; set {', '.join(names)}"
        )
    place = devices(config)
    config.update_from_flattened_dict({name: v for name, v in _least(config, place).items() if name in names})
    num_bytes = _grow(config, place, resolve, names)
    values = ", ".join(f"{name} = {operator.attrgetter(name)(config)}" for name in names)
    where = f"{place.mesh.size} x {place.kind} with {place.memory_bytes / GIB:.2f} GiB"
    return config, f"chosen for {where}: {values}; about {num_bytes / GIB:.2f} GiB of each"


def budget(
    programs: Mapping[str, lowered_programs.LoweredProgram], workspaces: Mapping[str, float]
) -> dict[str, float]:
    """Returns the bytes per device, by kind, of a learner and an engine that take turns on it: their own arrays, and the largest rest.

    `programs` has "train" and "decode"; `workspaces` has the bytes that each of the programs needs beyond its arguments. The
    slots of the engine leave the device during a train step.
    """
    train, decode = programs["train"], programs["decode"].held
    weights, slots = decode["parameters"], sum(decode.values()) - decode["parameters"]
    turns = {name: size + programs[name].passing_bytes for name, size in workspaces.items()}
    turns |= {f"{name} with slots": turns.pop(name) + slots for name in lowered_programs.SERVER if name in turns}
    # Old and new weights of the engine exist together, and with adapters the merged parameters of the learner as well.
    turns["new version"] = weights + train.needed.get("merged parameters", 0.0)
    largest = max(turns, key=turns.__getitem__)
    state = sum(train.held.values()) - train.passing_bytes
    return {"train state": state, "weights of the engine": weights, largest: turns[largest]}


def _open(config) -> list[str]:
    return [name for name in FIELDS if operator.attrgetter(name)(config) in (0, "auto")]


def _least(config, place: Devices) -> dict:
    """Returns the values of the fields that do not depend on the memory, and the least of those that do."""
    dtype, wanted = "float32" if place.is_cpu else "bfloat16", 2 * config.sampling.max_tokens
    length = config.inference.max_model_len or min(wanted, config.model.max_positions or wanted)
    tile = TILE * place.mesh.shape["context"]
    return {
        "model.dtype": dtype,
        "model.param_dtype": dtype if config.lora.rank else "float32",
        "inference.max_model_len": length,
        "train.row_length": -(-length // tile) * tile,
        "rl.prompts_per_step": -(-ROLLOUTS // config.rl.samples_per_prompt),
        "inference.num_slots": LEAST_SLOTS * rules.num_batch_shards(place.server_mesh),
        "train.rows": rules.num_batch_shards(place.mesh),
    }


def _grow(config, place: Devices, resolve: Callable, names: list[str]) -> float:
    """Doubles those of slots and rows that are in `names` while they fit, in turn; returns the bytes of a device in use."""
    exp, length = resolve(config), config.train.row_length
    num_rollouts, shards = config.rl.prompts_per_step * config.rl.samples_per_prompt, rules.num_batch_shards(place.mesh)
    most = {
        "inference.num_slots": min(num_rollouts, MOST_SLOTS),
        "train.rows": min(num_rollouts, shards * max(1, MOST_TOKENS[place.is_cpu] // length)),
    }
    limit, num_bytes = SHARE * place.memory_bytes, _estimate(exp, config, place)
    if num_bytes > limit:
        trains = f"lora.rank = {config.lora.rank}" if config.lora.rank else "lora.rank = 0 (all parameters train)"
        found = (
            f"{trains} needs about {num_bytes / GIB:.1f} of {place.memory_bytes / GIB:.1f} GiB with the smallest sizes"
        )
        remedy = "lower sampling.max_tokens" if config.lora.rank else "set lora.rank = 16"
        if (copies := place.server_mesh.shape["data"]) > 1:
            remedy += f", set inference.mesh.tensor = {copies} (each device has a copy of the engine's weights)"
        raise ValueError(f"{found}; {remedy}, use more devices, or a smaller checkpoint")
    growing = [name for name in most if name in names]
    while growing:
        for name in list(growing):
            size = operator.attrgetter(name)(config)
            config.update_from_flattened_dict({name: 2 * size})
            larger = _estimate(exp, config, place) if 2 * size <= most[name] else math.inf
            if larger <= limit:
                num_bytes = larger
            else:
                config.update_from_flattened_dict({name: size})
                growing.remove(name)
    return num_bytes


def _estimate(exp: experiment.Experiment, config, place: Devices) -> float:
    """Returns the estimated bytes of a device in use, with the slots and rows of `config`."""
    engine = dataclasses.replace(exp.engine, num_slots=config.inference.num_slots)
    exp = dataclasses.replace(exp, config=config_dict.FrozenConfigDict(config), engine=engine)
    train = lowered_programs.train_program(exp, place.mesh)
    decode = lowered_programs.decode_program(exp, place.server_mesh)
    programs = {"train": train, "decode": decode}
    return sum(budget(programs, {name: sum(program.needed.values()) for name, program in programs.items()}).values())
