"""Compiles a config for a TPU topology without a TPU, and reports memory, lower bounds of time, and remedies.

1. The learner's programs are lowered on the mesh of `config.mesh` over the topology, those of a server elsewhere on
   `config.plan.server_mesh` over one host of the same kind, those of an engine on the learner's hosts on `config.inference.mesh`
   over its devices of one host. A program whose arguments alone need too much is not compiled.
2. The TPU compiler, which is part of libtpu and needs no TPU, reports the memory that each program needs on a chip, or a shortage.
3. The compiled text gives the collectives and their bytes (rl/experiment/plan/hlo.py), the model the FLOPs (models/flops.py; tests compare them with the
   compiled text), the chip the rates (rl/experiment/plan/roofline.py). Together they bound the times from below.
4. If a program does not fit, remedies are compiled, the least expensive first. The first that fits is printed.

Not included: fragmentation, and the memory of other programs.
"""

import collections
import dataclasses
import itertools
import math
import operator
import re
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from ml_collections import config_dict

from rl.experiment import experiment
from rl.experiment.plan import hlo, lowered_programs, reads, roofline, sizes
from sharding.mesh import rules

GIB = 2**30
MAX_TRIES = 4  # compilations in the search for a remedy
# The compiler's levels of optimization, by name; "run" is a run's own. The lowest takes half the time. The memory of a program differs
# by 1 % (train step of configs/intellect2.py: 56.8 and 56.5 GiB), and some of its collectives by kind.
EFFORTS = {"run": 0, "O0": 9, "O1": 19, "O2": 29, "O3": 39}  # values of XLA's EffortLevel
EFFORT = "O0"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a compilation. `refusal` is empty if the program fits, else the reason."""

    program: lowered_programs.LoweredProgram
    refusal: str
    compile_s: float = 0.0
    peak_bytes: float = 0.0
    workspace_bytes: float = 0.0  # temporaries, gradients included
    output_bytes: float = 0.0  # results that do not reuse an argument's memory
    host_bytes: float = 0.0  # offloaded arrays, in the memory of the chip's host
    collectives: Sequence[hlo.Collective] = ()
    cache_copies: float = 0  # how often the program copies a whole array of the cache
    read_bytes: Sequence[float] = ()  # per chip, of a decode step with each of the program's loads, counted there


def make_program(name: str, exp: experiment.Experiment, topology: str) -> lowered_programs.LoweredProgram:
    """Returns the program `name` (a key of LEARNER or SERVER) of an experiment, on a mesh over `topology`."""
    if name in lowered_programs.LEARNER:
        return lowered_programs.LEARNER[name](
            exp, lowered_programs.create_mesh(topology, lowered_programs.learner_axes(exp.config))
        )
    axes = lowered_programs.server_axes(exp.config)
    mesh = lowered_programs.create_mesh(topology, axes, lowered_programs.ENGINES)
    return lowered_programs.SERVER[name](exp, mesh)


def compile_program(program: lowered_programs.LoweredProgram, chip: roofline.Chip, effort: str = EFFORT) -> Outcome:
    """Compiles one program, unless its arguments alone exceed a chip's memory. Returns its needs, or why it does not fit.

    `effort` is one of `EFFORTS`. Blocks for minutes for a large model.
    """
    held = sum(program.held.values())
    if held > chip.memory_bytes:
        return Outcome(program, f"its arguments alone need {_gib(held)} of {_gib(chip.memory_bytes)} per chip")
    begun = time.perf_counter()
    try:
        compiled = program.lower().compile({"optimization_level": EFFORTS[effort]})
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Outcome(program, _shortage(str(error), chip), compile_s=time.perf_counter() - begun)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "the TPU compiler returns both"
    instructions = hlo.parse(text, program.turns, program.turns_alone)
    results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    new_version = program.held.get("new version", 0.0)  # no argument
    peak = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes + new_version
    refusal = "" if peak <= chip.memory_bytes else f"it needs {_gib(peak)} of {_gib(chip.memory_bytes)} per chip"
    copies = sum(hlo.copies(instructions, dims) for dims in program.cache)
    if copies and not refusal:
        refusal = f"it copies whole arrays of the cache {copies:.0f} times"
    return Outcome(
        program,
        refusal,
        compile_s=time.perf_counter() - begun,
        peak_bytes=peak,
        workspace_bytes=memory.temp_size_in_bytes,
        output_bytes=results,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        collectives=hlo.collectives(instructions, _across(program.mesh)),
        cache_copies=copies,
        read_bytes=step_reads(program, text),
    )


def step_reads(program: lowered_programs.LoweredProgram, text: str) -> list[float]:
    """Returns the bytes per chip that a decode step reads with each load of its program, by the compiled text: those of a call, divided by its steps."""
    steps, instructions = program.steps_per_call, hlo.parse(text, (program.steps_per_call,))
    return [reads.num_bytes(instructions, program.cache, load.pages_bytes) / steps for load in program.loads]


def _across(mesh: jax.sharding.Mesh) -> list[int]:
    """Returns the positions in the mesh of one chip of each slice; `data`, the outermost axis, spans them."""
    num_slices = len({getattr(device, "slice_index", 0) for device in mesh.devices.flat})
    return list(range(0, mesh.size, mesh.size // num_slices))


def _shortage(message: str, chip: roofline.Chip) -> str:
    """Returns the compiler's shortage of memory in one line, with the bytes if its message has them."""
    used = re.search(r"[Uu]sed ([\d.]+[GMK]) of ([\d.]+[GMK])", message) or re.search(
        r"\(([\d.]+[GMK])\) exceeds available HBM \(([\d.]+[GMK])\)", message
    )
    if used:
        return f"it needs {used[1]}iB of {used[2]}iB per chip"
    return f"it needs more than {_gib(chip.memory_bytes)} per chip"


def describe(outcome: Outcome, topology: str) -> str:
    """Returns the lines of the report about one program: its memory, collectives and bounds of time, or the refusal."""
    program, is_compiled = outcome.program, outcome.peak_bytes > 0
    rows = [("memory per chip", _memory(outcome, roofline.chip_of(topology)))]
    rows += _work_rows(outcome, topology) if is_compiled else []
    lines = [program.title, *(f"  {label:<17} {text}" for label, text in rows)]
    lines += [f"  DOES NOT FIT: {outcome.refusal}"] if outcome.refusal else []
    return "\n".join([*lines, *([f"  compiled in {outcome.compile_s:.0f} s"] if is_compiled else [])])


def _memory(outcome: Outcome, chip: roofline.Chip) -> str:
    parts, gradients = dict(outcome.program.held), outcome.program.needed.get("gradients", 0.0)
    if outcome.peak_bytes:
        parts |= {"gradients": gradients} if gradients else {}
        parts["workspace"] = max(outcome.workspace_bytes - gradients, 0.0)
        parts |= {"results": outcome.output_bytes} if outcome.output_bytes > 0.01 * GIB else {}
    line = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    if not outcome.peak_bytes:
        return f"{line} GiB of {_gib(chip.memory_bytes)}"
    left = chip.memory_bytes - outcome.peak_bytes
    return f"{line}: {_gib(outcome.peak_bytes)} of {_gib(chip.memory_bytes)}, {left / GIB:.2f} left"


def shared(outcomes: Mapping[str, Outcome], chip: roofline.Chip) -> tuple[str, bool]:
    """Returns (lines about the memory of a learner and an engine that share their chips, True if it suffices)."""
    programs = {name: outcome.program for name, outcome in outcomes.items()}
    parts = sizes.budget(programs, {name: o.peak_bytes - sum(o.program.held.values()) for name, o in outcomes.items()})
    total = sum(parts.values())
    line = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in parts.items())
    line = f"  memory per chip   {line}: {_gib(total)} of {_gib(chip.memory_bytes)}"
    if total <= chip.memory_bytes:
        return f"{line}, {(chip.memory_bytes - total) / GIB:.2f} left", True
    remedy = "lower inference.num_slots or train.rows (0: chosen for the memory), or use more chips"
    return f"{line}\n  DOES NOT FIT: {remedy}", False


def _work_rows(outcome: Outcome, topology: str) -> list[tuple[str, str]]:
    program, chip, chips = outcome.program, roofline.chip_of(topology), outcome.program.mesh.size
    bounds = {
        "compute": program.executed_flops / (chips * chip.flops_per_s),
        "memory": program.read_bytes / chip.memory_bytes_per_s,
        "links": _links_s(outcome, topology),
    }
    times_s = max(bounds.values()), max(bounds["compute"], bounds["memory"]) + bounds["links"]
    rates = [program.num_tokens / s for s in times_s]
    shares = [program.model_flops / (chips * chip.flops_per_s * s) for s in times_s]
    model = f"{_flops(program.model_flops)} of the model, " if program.model_flops else ""
    rows = [
        (outcome.host_bytes > 0.01 * GIB, "memory of hosts", f"{_gib(outcome.host_bytes)} per chip"),
        (True, "arithmetic", f"{model}{_flops(program.executed_flops)} executed, {program.num_tokens:,} tokens"),
        *((True, label, text) for label, text in _collective_rows(outcome)),
        (
            program.waiting_bytes,
            "swap of weights",
            f"one by one, with no second copy; the new ones wait in {_gib(program.waiting_bytes)} of the host's memory",
        ),
        (program.cache, "cache", f"{outcome.cache_copies:.0f} copies of a whole array of it in the program"),
        (program.loads, "read per step", _reads(outcome)),
        (
            True,
            "time",
            ", ".join(f"{name} {_seconds(s)}" for name, s in bounds.items()) + f": at least {_seconds(times_s[0])} "
            f"({max(bounds, key=bounds.__getitem__)}), {_seconds(times_s[1])} with links not overlapped",
        ),
        (True, "tokens/s", f"at most {rates[0]:,.0f}; {rates[1]:,.0f} with links not overlapped"),
        (program.model_flops, "MFU", f"at most {shares[0]:.0%}; {shares[1]:.0%} with links not overlapped"),
        (program.model_flops, "", f"= model FLOPs / ({chips} chips x {chip.flops_per_s / 1e12:.0f} TFLOP/s x time)"),
        (
            program.name in lowered_programs.SERVER,
            "memory allows",
            f"{program.num_tokens / bounds['memory']:,.0f} tokens/s = {program.num_tokens} / "
            f"({_gib(program.read_bytes)} read per chip / {chip.memory_bytes_per_s / 1e9:,.0f} GB/s)",
        ),
    ]
    return [(label, text) for applies, label, text in rows if applies]


def _reads(outcome: Outcome) -> str:
    """Returns the bytes of `step_reads`, compared to those that a step has to read."""
    texts = []
    for load, num_bytes in zip(outcome.program.loads, outcome.read_bytes, strict=True):
        least = outcome.program.weights_bytes + load.live_bytes
        texts.append(f"{_gib(num_bytes)} with {load.name} of the cache in use ({num_bytes / least:.2f})")
    return f"{', '.join(texts)}, in the compiled text; in brackets: times the weights and the keys and values in use"


def _links_s(outcome: Outcome, topology: str) -> float:
    """Returns the least seconds of a program's collectives, one after the other.

    Those over several slices first reduce within each, so that the network between slices takes each chip's own part.
    """
    extent, chip = [int(part) for part in topology.partition(":")[2].split("x")], roofline.chip_of(topology)
    devices, seconds = outcome.program.mesh.devices.ravel(), 0.0
    for collective in outcome.collectives:
        group = [devices[i] for i in collective.group]
        slices = {getattr(device, "slice_index", 0) for device in group}
        inside = [device.coords[: len(extent)] for device in group if getattr(device, "slice_index", 0) == min(slices)]
        if len(inside) > 1:
            seconds += collective.sent_bytes / roofline.link_bytes_per_s(chip, extent, np.array(inside))
        if len(slices) > 1:
            seconds += collective.sent_bytes * len(slices) / len(group) / chip.network_bytes_per_s
    return seconds


def _collective_rows(outcome: Outcome) -> list[tuple[str, str]]:
    counts, sent = collections.defaultdict(float), collections.defaultdict(float)
    for collective in outcome.collectives:
        key = f"{collective.kind} over {_axes(collective.group, outcome.program.mesh)}"
        counts[key] += collective.count
        sent[key] += collective.sent_bytes
    ordered = sorted(sent.items(), key=lambda item: -item[1])
    texts = [f"{key}: {counts[key]:,.0f} times, {_three(n / GIB)} GiB sent per chip" for key, n in ordered]
    return [("" if i else "collectives", text) for i, text in enumerate(texts or ["none"])]


def _axes(group: tuple[int, ...], mesh: jax.sharding.Mesh) -> str:
    """Returns the names of the mesh axes along which a group's devices differ."""
    positions = np.array(np.unravel_index(group, mesh.devices.shape))
    return " x ".join(axis for axis, row in zip(mesh.axis_names, positions, strict=True) if len(set(row.tolist())) > 1)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _seconds(value: float) -> str:
    return f"{_three(value)} s" if value >= 1 else f"{_three(1e3 * value)} ms"


def _flops(value: float) -> str:
    exponent = min(int(math.log10(max(value, 1.0))) // 3, 7)
    return f"{_three(value / 1000**exponent)} {('', 'k', 'M', 'G', 'T', 'P', 'E', 'Z')[exponent]}FLOP"


def _three(value: float) -> str:
    """Formats a number with three digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def remedy(config: config_dict.ConfigDict, topology: str, names: Sequence[str]) -> str:
    """Returns the first change with which the programs `names` of one role compile and fit, as flags to add.

    Changes that need no more chips come first, then those that cost the least speed. Compiles at most MAX_TRIES of them.
    """
    tries = 0
    is_learner = names[0] in lowered_programs.LEARNER
    flag, changes = ("topology", _learner_changes) if is_learner else ("server_topology", _server_changes)
    for place, options in changes(config, topology):
        new = {name: value for name, value in options.items() if value != operator.attrgetter(name)(config)}
        flags = [f"--{flag}={place}"] * (place != topology) + [f"--config.{name}={new[name]}" for name in new]
        if not flags:
            continue  # this did not fit
        changed, chip = config.copy_and_resolve_references(), roofline.chip_of(place)
        changed.update_from_flattened_dict(new)
        try:
            exp = lowered_programs.resolve(changed)
            made = [make_program(name, exp, place) for name in names]
        except ValueError:
            continue  # dims that do not divide: this change alone is not possible
        if any(program.estimated_bytes > chip.memory_bytes for program in made):
            continue
        if tries == MAX_TRIES:
            break
        tries += 1
        if not any(compile_program(program, chip).refusal for program in made):
            return f"{' '.join(flags)} (compiled: it fits)"
    return f"none of the {tries} most promising changes compiled; ask for more chips, or a smaller model"


def _learner_changes(config, topology: str) -> Iterator[tuple[str, dict]]:
    """Yields fewer rows at a time, then more recomputation, then other topologies with the same rows or one per shard."""
    remats = ["none", "dots", "attention", "block", "offload"]
    for place in [topology, *roofline.alternatives(topology)]:
        try:
            shards = rules.num_batch_shards(lowered_programs.create_mesh(place, lowered_programs.learner_axes(config)))
        except ValueError:
            continue  # the mesh of this config does not fit there
        rows = [n for n in (config.train.rows // 2**k for k in range(12)) if n and n % shards == 0] or [shards]
        rows = rows if place == topology else list(dict.fromkeys([rows[0], shards]))
        for remat, num_rows in itertools.product(remats[remats.index(config.model.remat) :], rows):
            yield place, {"train.rows": num_rows, "model.remat": remat}


def _server_changes(config, topology: str) -> Iterator[tuple[str, dict]]:
    """Yields fewer slots, then for a server elsewhere larger and other topologies with as many slots as fit."""
    for place in [topology, *([] if lowered_programs.has_engine(config) else roofline.alternatives(topology))]:
        for k in range(min(10, config.inference.num_slots.bit_length())):
            slots, pages = config.inference.num_slots // 2**k, config.inference.num_pages // 2**k
            yield place, {"inference.num_slots": slots, "inference.num_pages": pages}
