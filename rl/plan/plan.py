"""Compiles a config for a TPU topology without a TPU, and reports memory, lower bounds of time, and remedies.

    pip install -r third_party/plan-requirements.txt
    python -m rl.plan --config=configs/intellect3.py --topology=v5p:4x4x8

1. The learner's programs (train step, log-probability pass) are lowered on the mesh of `config.mesh` over the topology. Those of
   a server (prefill, decode) are lowered on `config.plan.server_mesh` over one host of the same kind.
2. The memory of a program's arguments is known exactly; a program for which that alone is too much is not compiled.
3. The TPU compiler, which is part of libtpu and needs no TPU, compiles each program. It reports the memory that a chip needs, or
   a shortage.
4. The compiled text gives the collectives and their bytes (rl/plan/hlo.py), the model the arithmetic, the chip the rates
   (rl/plan/roofline.py). Together they bound the times from below.
5. If a program does not fit, remedies are compiled, the least expensive first: fewer rows or slots, more recomputation, more
   chips, other chips. The first that fits is printed. The exit code is 1.

Programs are compiled one at a time: fragmentation and the memory of other programs are not included, nor are slices joined by a
data-center network.
"""

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from ml_collections import config_dict

from rl.experiment import experiment
from rl.plan import hlo, lowered_programs, roofline
from sharding import rules

GIB = 2**30
MAX_TRIES = 4  # compilations in the search for a remedy
# Effort of the compiler, -1 to 1; a run's own is 0. The lowest takes half the time. The memory of a program differs by 1 %
# (train step of configs/intellect2.py: 56.8 and 56.5 GiB), and some of its collectives by kind.
EFFORT = -1.0


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
    collectives: tuple[hlo.Collective, ...] = ()
    cache_copies: int = 0  # how often the program copies a whole array of the cache


# ---- compiling -------------------------------------------------------------------------------------------------------


def make_program(name: str, exp: experiment.Experiment, topology: str) -> lowered_programs.LoweredProgram:
    """Returns the program `name` of an experiment, on the topology of its role."""
    if name in lowered_programs.LEARNER:
        return lowered_programs.LEARNER[name](exp, lowered_programs.create_mesh(topology, exp.config.mesh.to_dict()))
    return lowered_programs.SERVER[name](
        exp, lowered_programs.create_mesh(topology, exp.config.plan.server_mesh.to_dict())
    )


def compile_program(program: lowered_programs.LoweredProgram, chip: roofline.Chip, effort: float = EFFORT) -> Outcome:
    """Compiles one program, unless its arguments alone exceed the memory of a chip.

    `effort` is the compiler's, from -1 to 1; 0 is a run's own. Blocks for minutes for a large model.
    """
    held = sum(program.held.values())
    if held > chip.memory_bytes:
        return Outcome(program, f"its arguments alone need {_gib(held)} of {_gib(chip.memory_bytes)} per chip")
    begun = time.perf_counter()
    try:
        compiled = program.lower().compile({"exec_time_optimization_effort": effort})  # pyright: ignore[reportArgumentType]  # stub lacks float
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Outcome(program, _shortage(str(error), chip), compile_s=time.perf_counter() - begun)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "the TPU compiler returns both"
    module = hlo.parse(text, program.turns)
    results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    peak = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    refusal = "" if peak <= chip.memory_bytes else f"it needs {_gib(peak)} of {_gib(chip.memory_bytes)} per chip"
    copies = sum(module.copies(dims) for dims in program.cache)
    if copies and not refusal:
        refusal = f"it copies whole arrays of the cache {copies} times"
    return Outcome(
        program,
        refusal,
        compile_s=time.perf_counter() - begun,
        peak_bytes=peak,
        workspace_bytes=memory.temp_size_in_bytes,
        output_bytes=results,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        collectives=tuple(module.collectives()),
        cache_copies=copies,
    )


def _shortage(message: str, chip: roofline.Chip) -> str:
    """Returns the compiler's shortage of memory in one line, with the bytes if its message has them."""
    used = re.search(r"[Uu]sed ([\d.]+[GMK]) of ([\d.]+[GMK])", message) or re.search(
        r"\(([\d.]+[GMK])\) exceeds available HBM \(([\d.]+[GMK])\)", message
    )
    if used:
        return f"it needs {used[1]}iB of {used[2]}iB per chip"
    return f"it needs more than {_gib(chip.memory_bytes)} per chip"


def bounds(outcome: Outcome, topology: str) -> roofline.Bounds:
    """Returns the lower bounds of a compiled program's times."""
    program, chip = outcome.program, roofline.chip_of(topology)
    extent = [int(part) for part in topology.partition(":")[2].split("x")]
    devices = program.mesh.devices.ravel()
    links_s = 0.0
    for collective in outcome.collectives:
        coords = np.array([devices[i].coords[: len(extent)] for i in collective.group])
        links_s += collective.sent_bytes / roofline.link_bytes_per_s(chip, extent, coords)
    return roofline.Bounds(
        compute_s=program.executed_flops / (program.mesh.size * chip.flops_per_s),
        memory_s=program.read_bytes / chip.memory_bytes_per_s,
        links_s=links_s,
    )


# ---- the report ------------------------------------------------------------------------------------------------------


def describe(outcome: Outcome, topology: str) -> str:
    """Returns the lines of the report about one program."""
    program, chip = outcome.program, roofline.chip_of(topology)
    lines = [program.title, f"  memory per chip   {_memory_line(outcome, chip)}"]
    if not outcome.peak_bytes:
        return "\n".join([*lines, f"  DOES NOT FIT: {outcome.refusal}"])
    limits = bounds(outcome, topology)
    if outcome.host_bytes > 0.01 * GIB:
        lines.append(f"  memory of hosts   {_gib(outcome.host_bytes)} per chip")
    model = f"{_flops(program.model_flops)} of the model, " if program.model_flops else ""
    lines.append(f"  arithmetic        {model}{_flops(program.executed_flops)} executed, {program.num_tokens:,} tokens")
    lines += _collective_lines(outcome)
    if program.cache:
        lines.append(f"  cache             {outcome.cache_copies} copies of a whole array of it in the program")
    lines.append(
        f"  time              compute {_seconds(limits.compute_s)}, memory {_seconds(limits.memory_s)}, links "
        f"{_seconds(limits.links_s)}: at least {_seconds(limits.overlapped_s)} ({limits.limit}), "
        f"{_seconds(limits.serial_s)} with links not overlapped"
    )
    rate = program.num_tokens / limits.overlapped_s, program.num_tokens / limits.serial_s
    lines.append(f"  tokens/s          at most {rate[0]:,.0f}; {rate[1]:,.0f} with links not overlapped")
    if program.model_flops:
        share = [
            roofline.mfu(program.model_flops, program.mesh.size, chip, s)
            for s in (limits.overlapped_s, limits.serial_s)
        ]
        lines.append(f"  MFU               at most {share[0]:.0%}; {share[1]:.0%} with links not overlapped")
        lines.append(
            f"                    = model FLOPs / ({program.mesh.size} chips x {chip.flops_per_s / 1e12:.0f} TFLOP/s x time)"
        )
    if program.name in lowered_programs.SERVER:
        rate = program.num_tokens / limits.memory_s
        lines.append(
            f"  memory allows     {rate:,.0f} tokens/s = {program.num_tokens} / ({_gib(program.read_bytes)} read per chip / "
            f"{chip.memory_bytes_per_s / 1e9:,.0f} GB/s)"
        )
    if outcome.refusal:
        lines.append(f"  DOES NOT FIT: {outcome.refusal}")
    return "\n".join([*lines, f"  compiled in {outcome.compile_s:.0f} s"])


def _memory_line(outcome: Outcome, chip: roofline.Chip) -> str:
    program = outcome.program
    parts = dict(program.held)
    if outcome.peak_bytes:
        gradients = program.needed.get("gradients", 0.0)
        if gradients:
            parts["gradients"] = gradients
        parts["workspace"] = max(outcome.workspace_bytes - gradients, 0.0)
        if outcome.output_bytes > 0.01 * GIB:
            parts["results"] = outcome.output_bytes
    line = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    if not outcome.peak_bytes:
        return f"{line} GiB of {_gib(chip.memory_bytes)}"
    left = chip.memory_bytes - outcome.peak_bytes
    return f"{line}: {_gib(outcome.peak_bytes)} of {_gib(chip.memory_bytes)}, {left / GIB:.2f} left"


def _collective_lines(outcome: Outcome) -> list[str]:
    totals: dict[tuple[str, str], list[float]] = {}
    for collective in outcome.collectives:
        total = totals.setdefault((collective.kind, _axes(collective.group, outcome.program.mesh)), [0, 0.0])
        total[0] += collective.count
        total[1] += collective.sent_bytes
    lines = []
    for (kind, axes), (count, sent) in sorted(totals.items(), key=lambda item: -item[1][1]):
        label = "collectives" if not lines else ""
        lines.append(f"  {label:<17} {kind} over {axes}: {count:,.0f} times, {_three(sent / GIB)} GiB sent per chip")
    return lines or ["  collectives       none"]


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


# ---- remedies --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the command that may make programs fit. `words` are its flags."""

    words: str
    config: config_dict.ConfigDict
    topology: str


def remedy(config: config_dict.ConfigDict, topology: str, names: Sequence[str]) -> str:
    """Returns the first change with which the programs `names` of one role compile and fit, as flags to add.

    Changes that need no more chips come first, then those that cost the least speed. Compiles at most MAX_TRIES of them.
    """
    tries = 0
    changes = _learner_changes if names[0] in lowered_programs.LEARNER else _server_changes
    for change in changes(config, topology):
        chip = roofline.chip_of(change.topology)
        try:
            exp = lowered_programs.resolve(change.config)
            made = [make_program(name, exp, change.topology) for name in names]
        except ValueError:
            continue  # dims that do not divide: this change alone is not possible
        if any(program.estimated_bytes > chip.memory_bytes for program in made):
            continue
        if tries == MAX_TRIES:
            break
        tries += 1
        if not any(compile_program(program, chip).refusal for program in made):
            return f"{change.words} (compiled: it fits)"
    return f"none of the {tries} most promising changes compiled; ask for more chips, or a smaller model"


def _learner_changes(config, topology: str) -> Iterator[Change]:
    """Yields fewer rows at a time, then more recomputation, then other topologies with the same rows or one per shard."""
    for place in [topology, *roofline.larger(topology), *roofline.others(topology)]:
        try:
            shards = rules.num_batch_shards(lowered_programs.create_mesh(place, config.mesh.to_dict()))
        except ValueError:
            continue  # the mesh of this config does not fit there
        rows = [n for n in (config.train.rows // 2**k for k in range(12)) if n and n % shards == 0] or [shards]
        if place != topology:
            rows = list(dict.fromkeys([rows[0], shards]))
        for remat, num_rows in itertools.product([config.model.remat, *_stronger(config.model.remat)], rows):
            changed = config.copy_and_resolve_references()
            changed.train.rows, changed.model.remat = num_rows, remat
            words = [
                f"--topology={place}" if place != topology else "",
                f"--config.train.rows={num_rows}" if num_rows != config.train.rows else "",
                f"--config.model.remat={remat}" if remat != config.model.remat else "",
            ]
            if any(words):
                yield Change(" ".join(filter(None, words)), changed, place)


def _server_changes(config, topology: str) -> Iterator[Change]:
    """Yields fewer slots, then larger and other topologies with as many slots as fit."""
    for place in [topology, *roofline.larger(topology), *roofline.others(topology)]:
        for k in range(0, 10):
            slots = config.inference.num_slots // 2**k
            words = [f"--server_topology={place}"] if place != topology else []
            words += [f"--config.inference.num_slots={slots}"] if k else []
            if slots >= 1 and words:
                changed = config.copy_and_resolve_references()
                changed.inference.num_slots = slots
                yield Change(" ".join(words), changed, place)


def _stronger(remat: str) -> list[str]:
    order = ["none", "dots", "block", "offload"]
    return order[order.index(remat) + 1 :]
