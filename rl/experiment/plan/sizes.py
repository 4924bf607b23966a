"""Chooses the sizes that a config leaves open (0, or "auto" for a name), for the memory of the devices of learner and engine.

1. The kind of device decides `sampling.max_tokens`, `evaluation.num_tasks`, and `rl.prompts_per_step`, which makes a batch of rollouts
   (`BY_KIND`): on a CPU a small real model takes a step in less than a minute.
   `inference.max_model_len` is twice `sampling.max_tokens`, or 512 tokens more than it, but at most the positions that the model was trained for.
   `train.row_length` is that, in whole tiles of the attention kernel.
2. `inference.num_slots` and `train.rows` double in turn while all fits by the plan's own estimates
   (rl/experiment/plan/lowered_programs.py): train state, weights of the engine, and the larger of a train step and the slots. On devices of
   their own, learner and engine grow apart. The slots of servers elsewhere are not chosen: their memory is not known here.
3. `inference.mesh.tensor` is the smallest power of 2 with which the smallest sizes fit: each of its shards has a part of the weights.
4. The dtypes of `model` are bfloat16 on accelerators and float32 on a CPU. Parameters that train are float32. Accelerators compute
   layers again in the backward pass (`model.remat` "block"), and a CPU does so only where its memory is too small: a step there takes
   a third less time without.

A run with a checkpoint keeps the sizes of its config.json, on any devices.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from absl import flags
from ml_collections import config_dict

from rl.experiment import experiment, initial, layout
from rl.experiment import flags as command_line
from rl.experiment import rules as config_rules
from rl.experiment import workdir as run_directory
from rl.experiment.plan import lowered_programs, roofline
from rl.protocol import env_mix
from sharding.mesh import host_memory, rules
from sharding.mesh import mesh as mesh_lib
from sharding.weights import bucket

GIB = 2**30
# Of an accelerator, and of a CPU. Rollouts are those of a batch: with fewer, gradients are noisy.
BY_KIND = {"rollouts": (256, 64), "sampling.max_tokens": (1024, 64), "evaluation.num_tasks": (100, 64)}
LEAST_SLOTS, MOST_SLOTS = 8, 512  # per batch shard of the engine; in all
SHARE = 0.85  # of the memory: estimates err by less (tests/rl/experiment/plan/test_sizes.py), and memory fragments
# Tokens of a tile of the TPU's attention kernel, of which a row has whole ones: the largest of at most an eighth of a row.
TILES = 128, 256, 512
LEAST_PROMPT = 512  # tokens that a rollout may have before its completion
TENSOR = "inference.mesh.tensor"
# Tokens of a micro-batch per device beyond which matmuls gain nothing, on accelerators and on a CPU. There more of them leave the
# caches: a step of 3,600 tokens in rows of 512 took 2.09, 1.76, 1.27, and 1.25 s of CPU time with 8, 4, 2, and 1 rows (4 M model).
MOST_TOKENS = {False: 32768, True: 512}


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of the learner and of the engine of a run, which are the same or of one kind."""

    mesh: jax.sharding.Mesh  # of the learner
    server_mesh: jax.sharding.Mesh | None  # of the engine of one host; None: servers are elsewhere
    memory_bytes: float  # of one device
    kind: str
    is_cpu: bool = False


Find = Callable[[config_dict.ConfigDict], Devices]


class Room(NamedTuple):
    """The sizes that may still grow: names of config fields, devices whose memory they may fill, and a function that finds others."""

    names: list[str]
    place: Devices
    devices: Find
    has_rollouts: bool


def resolve(
    config: config_dict.ConfigDict, *, needs_envs: bool = True, has_rollouts: bool = True
) -> experiment.Experiment:
    """Resolves the config of the command line in stages, each of which runs once. Prints the sizes that are chosen.

    1. Its flags were parsed (rl/experiment/flags.py). 2. `initial.completed` adds the fields of its checkpoint. 3. `sized` chooses open
    sizes for the devices. 4. and 5. `experiment.resolve` checks it, and makes the frozen parts. 6. `fitted` grows open sizes into the memory.

    A run that has a checkpoint, of RL or of its warm-up, keeps its sizes. Without `needs_envs`, its environments are not loaded. Without
    `has_rollouts`, as in rl.sft, sizes are those of RL, which may follow, only if an engine fits, too, and an open
    `inference.max_model_len` is at most `train.row_length`. Raises ValueError with all mistakes, a line for each.
    """
    config = initial.completed(config, command_line.given())
    saved = _saved_sizes(config)
    if not has_rollouts and not config.inference.max_model_len and (length := config.train.row_length):
        config.inference.max_model_len = min(length, config.model.max_positions or length)
    resolved = functools.partial(experiment.resolve, saved=None if needs_envs else saved, has_rollouts=has_rollouts)
    devices = functools.partial(present, needs_engine=has_rollouts)
    found, chosen = settled(config, devices, resolved, has_rollouts=has_rollouts)
    print(chosen, end="\n" if chosen else "", flush=True)
    for name in command_line.given():
        section, _, variable = name.partition(".")
        if section == "chat_template_kwargs" and not found.tokenizer.reads(variable):
            problem = f"config.{name} has no effect here: the chat template of {config.tokenizer} has no variable {variable!r}"
            raise ValueError(f"{problem}; remove it, or name another")
    return found


def _saved_sizes(config: config_dict.ConfigDict) -> dict | None:
    """Sets the open fields of a config to those of the run in --workdir; returns the run's fields, or None if it has no checkpoint."""
    names = ("config.json", "checkpoints/*/seal.json", "warmup/*/seal.json")
    workdir = bucket.fetched(flags.FLAGS.workdir or ".", names, is_optional=True)
    if not flags.FLAGS.workdir or not any(file for name in names[1:] for file in workdir.glob(name)):
        return None
    saved = experiment.flat(run_directory.saved_config(workdir))
    config.update_from_flattened_dict({name: saved[name] for name in _open(config)})
    return saved


def settled(
    config: config_dict.ConfigDict, devices: Find, resolve: Callable, *, has_rollouts: bool = True
) -> tuple[experiment.Experiment, str]:
    """Returns (the experiment of a config with a value for each open field, a line for each reason of a choice, "" if none was open).

    `resolve` is `experiment.resolve`, or the plan's. Raises ValueError as `sized`, `resolve`, and `fitted` do.
    """
    config, room = sized(config, devices, has_rollouts=has_rollouts)
    exp = resolve(config)
    return fitted(exp, room) if room else (exp, "")


def present(config: config_dict.ConfigDict, *, needs_engine: bool = True) -> Devices:
    """Returns the devices of the learner, on this and all other hosts, and those of the run's own server, if it has one.

    If the server does not fit its devices, raises ValueError, or leaves the server out unless `needs_engine`.
    """
    mesh = layout.learner_mesh(config)  # first, since it refuses an accelerator that cannot be used in one line
    local, server, axes = jax.local_devices(), None, lowered_programs.server_axes(config)
    _, devices = layout.split(local, axes.pop("rollout_devices", 0))
    is_one = set(config.inference.mesh.values()) == {1} and not layout.is_colocated(config)  # a process of its own
    if lowered_programs.has_engine(config):
        try:
            server = mesh_lib.create(axes, devices[:1] if is_one else devices)
        except ValueError:
            if needs_engine:
                raise
    free_bytes = host_memory.total_bytes() / (2 * len(local))  # half for other programs
    memory_bytes = (local[0].memory_stats() or {}).get("bytes_limit", free_bytes)
    return Devices(mesh, server, memory_bytes, local[0].device_kind, is_cpu=local[0].platform == "cpu")


def planned(config: config_dict.ConfigDict, topology: str) -> Devices:
    """Returns the devices of a TPU topology `<kind>:<dims>`, without having them."""
    chip = roofline.chip_of(topology)
    mesh, server_mesh = lowered_programs.create_mesh(topology, lowered_programs.learner_axes(config)), None
    if lowered_programs.has_engine(config):
        axes, host = lowered_programs.server_axes(config), roofline.host_of(topology)
        server_mesh = lowered_programs.create_mesh(host, axes, lowered_programs.ENGINES)
    return Devices(mesh, server_mesh, chip.memory_bytes, topology.partition(":")[0])


def sized(
    config: config_dict.ConfigDict, devices: Find, *, has_rollouts: bool = True
) -> tuple[config_dict.ConfigDict, Room | None]:
    """Returns (a copy of the config with the least value for each open field, the room in which they can grow; None if none is open).

    `devices` is called if a field is open. Raises ValueError if the slots of servers elsewhere are open, or if replays would share the
    memory that open sizes fill.
    """
    config = config.copy_and_resolve_references()
    if not (names := _open(config)):
        return config, None
    if has_rollouts and "inference.num_slots" in names and not lowered_programs.has_engine(config):
        found = "inference.num_slots = 0 fits the slots to this run's devices, but topology.mode = 'remote'"
        raise ValueError(f"{found} has its servers elsewhere; set inference.num_slots to the slots of one server")
    if TENSOR in names:
        config.inference.mesh.tensor = 1
    place = devices(config)
    growing = " and ".join(name for name in ("inference.num_slots", "train.rows") if name in names)
    is_judge = place.server_mesh is not None and not (config.trust.validators or config.topology.orchestrator)
    if has_rollouts and growing and is_judge and config.trust.device != "cpu" and not place.is_cpu:
        found = f"trust.device = {config.trust.device!r} replays rollouts on the devices whose memory {growing} = 0 would fill"
        raise ValueError(f"{found}; set trust.device = 'cpu', or set these sizes")
    _set_least(config, place, names)
    return config, Room(names, place, devices, has_rollouts)


def fitted(exp: experiment.Experiment, room: Room) -> tuple[experiment.Experiment, str]:
    """Returns (the experiment with the largest open sizes that fit the memory, a line for each reason of a choice).

    Raises ValueError if the smallest sizes do not fit.
    """
    config, place, names = config_dict.ConfigDict(exp.config), room.place, room.names
    if "model.remat" in names and place.is_cpu and _estimate(exp, config, place) > SHARE * place.memory_bytes:
        config.model.remat = "block"
    if TENSOR in names and place.server_mesh is not None and not place.is_cpu:
        place = _with_parts(exp, config, room)
    has_engine = place.server_mesh is not None
    if has_engine and not room.has_rollouts and _estimate(exp, config, place) > SHARE * place.memory_bytes:
        place = dataclasses.replace(place, server_mesh=None)  # RL will not follow on these devices
    num_bytes = _grow(exp, config, place, names)
    values = {name: operator.attrgetter(name)(config) for name in names}
    lengths, memory = {"inference.max_model_len", "train.row_length"}, {"inference.num_slots", "train.rows", TENSOR}
    size = f"{place.mesh.size} x {place.memory_bytes / GIB:.2f} GiB, about {num_bytes / GIB:.2f} of each in use"
    reasons = (
        (f"{place.mesh.size} x {place.kind}", values.keys() - lengths - memory),
        (f"prompts and completions of at most {config.inference.max_model_len} tokens", lengths),
        (size, memory),
    )
    lines = []
    for reason, fields in reasons:
        chosen = ", ".join(f"{name} = {value}" for name, value in values.items() if name in fields)
        lines += [f"chosen for {reason}: {chosen}"] if chosen else []
    return _with_sizes(exp, config), "\n".join(lines)


def budget(
    programs: Mapping[str, lowered_programs.LoweredProgram], workspaces: Mapping[str, float]
) -> dict[str, float]:
    """Returns the bytes per device of a learner and an engine that take turns on it, as {kind of memory: bytes}.

    The kinds are the learner's state, the engine's weights, and the largest need of any one program. `programs` has "train" and
    "decode"; `workspaces` has the bytes that each program needs beyond its arguments. The slots of the engine leave the device during a
    train step.
    """
    train, decode = programs["train"], programs["decode"].held
    weights, slots = decode["parameters"], sum(decode.values()) - decode["parameters"]
    turns = {name: size + programs[name].passing_bytes for name, size in workspaces.items()}
    served = {f"{name} with slots": turns.pop(name) + slots for name in lowered_programs.SERVER if name in turns}
    # A new version is on the devices before the engine stops to use the old one. (One with adapters takes less.)
    turns |= {"new version": weights + max(0.0, *served.values())}
    largest = max(turns, key=turns.__getitem__)
    state = sum(train.held.values()) - train.passing_bytes
    return {"train state": state, "weights of the engine": weights, largest: turns[largest]}


def _open(config) -> list[str]:
    return [name for name in config_rules.OPEN if operator.attrgetter(name)(config) in (0, "auto")]


def _set_least(config, place: Devices, names: list[str]) -> None:
    """Sets those of the fields `names` that do not depend on the memory, and the least slots and rows."""
    by_kind = {name: values[place.is_cpu] for name, values in BY_KIND.items()}
    num_rollouts = by_kind.pop("rollouts")
    config.update_from_flattened_dict({name: value for name, value in by_kind.items() if name in names})
    dtype, longest = "float32" if place.is_cpu else "bfloat16", env_mix.max_tokens(config)
    wanted = longest + max(longest, LEAST_PROMPT)
    length = config.inference.max_model_len or min(wanted, config.model.max_positions or wanted)
    tile = max([size for size in TILES if size <= length / 8], default=TILES[0]) * place.mesh.shape["context"]
    values = {
        "model.dtype": dtype,
        "model.param_dtype": dtype if config.lora.rank else "float32",
        "model.remat": "none" if place.is_cpu else "block",
        "inference.max_model_len": length,
        "train.row_length": -(-length // tile) * tile,
        "rl.prompts_per_step": math.ceil(num_rollouts / env_mix.mean_samples(config)),
    }
    config.update_from_flattened_dict({name: value for name, value in values.items() if name in names})
    _set_least_rows(config, place, names)


def _set_least_rows(config, place: Devices, names: list[str]) -> None:
    shards, server_shards = (rules.num_batch_shards(mesh) for mesh in (place.mesh, place.server_mesh or place.mesh))
    values = {"inference.num_slots": LEAST_SLOTS * server_shards, "train.rows": shards}
    config.update_from_flattened_dict({name: value for name, value in values.items() if name in names})


def _with_parts(exp: experiment.Experiment, config, room: Room) -> Devices:
    """Returns the devices, with the engine's weights in the fewest parts with which the smallest sizes fit; whole if none do."""
    found = room.place
    try:
        while _estimate(exp, config, found) > SHARE * found.memory_bytes:
            config.inference.mesh.tensor *= 2
            found = room.devices(config)
            if found.server_mesh is None:
                raise ValueError("no engine has so many parts")
            _set_least_rows(config, found, room.names)
    except ValueError:  # more parts than devices, or dims that do not divide
        config.inference.mesh.tensor = 1
        _set_least_rows(config, room.place, room.names)
        return room.place
    return found


def _grow(exp: experiment.Experiment, config, place: Devices, names: list[str]) -> float:
    """Doubles those of slots and rows that are in `names` while they fit, in turn; returns the bytes of a device in use."""
    length = config.train.row_length
    num_rollouts, shards = env_mix.max_rollouts(config), rules.num_batch_shards(place.mesh)
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
        copies = place.server_mesh.shape["data"] if place.server_mesh and TENSOR not in names else 1
        if copies > 1:
            remedy += f", set inference.mesh.tensor = {copies} (each device has a copy of the engine's weights)"
        raise ValueError(f"{found}; {remedy}, use more devices, or a smaller checkpoint")
    growing = [name for name in most if name in names and (place.server_mesh or name != "inference.num_slots")]
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
    """Returns the estimated bytes in use of the device with the least left, with the slots and rows of `config`."""
    exp = _with_sizes(exp, config)
    programs = {"train": lowered_programs.train_program(exp, place.mesh)}
    if place.server_mesh is not None:
        programs["decode"] = lowered_programs.decode_program(exp, place.server_mesh)
    if place.server_mesh is None or not lowered_programs.is_shared(config):
        return max(program.estimated_bytes for program in programs.values())
    return sum(budget(programs, {name: sum(program.needed.values()) for name, program in programs.items()}).values())


def _with_sizes(exp: experiment.Experiment, config: config_dict.ConfigDict) -> experiment.Experiment:
    """Returns the experiment with the values in `config` of all fields that `fitted` changes."""
    return dataclasses.replace(
        exp,
        config=config_dict.FrozenConfigDict(config),
        model=dataclasses.replace(exp.model, remat=config.model.remat),
        engine=dataclasses.replace(exp.engine, num_slots=config.inference.num_slots),
        server_mesh=experiment.own_server_axes(config),
    )
