"""Times the programs of a run on the devices of this machine, next to the bounds of `rl.plan` for the same config and lengths.

    python -m bench.accelerator --config=configs/finetune.py --config.init_from=FOLDER --trace=runs/trace
    python -m bench.accelerator --config=configs/quickstart.py        # on a CPU: a toy, without bounds

1. Sizes of 0 are chosen for the devices, as a run does. Weights are random; the lengths of rollouts are those of `config.plan`.
2. train: a train step on a packed batch. swap: the policy's weights, handed to an engine in the same process. prefill: the last chunk of
   the longest prompt, or a batch of prompts. decode: steps of all slots, which are full, as in the bound. `--programs` chooses among them.
3. A row has the median of `--repeats` calls after the first, which compiles; the bound, and which of arithmetic and memory sets it;
   tokens per second; MFU. `--trace` records one more call of each, for xprof, TensorBoard, or Perfetto.

The bound counts attention in the tiles of the TPU's kernel and no links between chips. A swap reads and writes its bytes once.
"""

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_dict

from inference.engine import decode_state, engine, request, weights
from models import lora, transformer
from rl.experiment import command, experiment, initial
from rl.experiment import flags as command_line
from rl.experiment.plan import lowered_programs, roofline, sizes
from rl.learning.batch import packing
from rl.learning.learner import train_step
from sharding.mesh import mesh as mesh_lib

PROGRAMS = ("train", "swap", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The seconds of the first call of a program, and the median of later ones."""

    first_s: float
    median_s: float


def main() -> None:
    """Times the chosen programs and prints a report; ends with a line of ValueError if the config does not fit the devices."""
    device, names = mesh_lib.devices()[0], flags.FLAGS.programs
    config = initial.completed(flags.FLAGS.config, command_line.given(), needs_files=False)
    exp, chosen = sizes.settled(config, sizes.present, lowered_programs.resolve)
    config = config_dict.ConfigDict(exp.config)
    place = sizes.present(config)
    server_mesh = place.server_mesh or mesh_lib.create(lowered_programs.server_axes(config), jax.local_devices())
    chip = roofline.of_device(device.device_kind)
    print(f"{len(jax.devices())} x {device.device_kind}, jax {jax.__version__}; {chosen or 'all sizes are set'}")
    if chip is None:
        print(
            "a toy: the rates of this device are unknown, so there are no bounds, and no figure is one of an accelerator"
        )
    store = weights.Store(exp.published_model, server_mesh, lora=exp.lora or None)
    params, programs = None, {}
    if {"train", "swap"} & set(names):
        learner = exp.learner(place.mesh)
        state = train_step.init_state(jax.random.key(0), learner)
        if "train" in names:
            step, taken = train_step.jit_train_step(learner), batch(exp, place.mesh)
            programs["train"] = lowered_programs.train_program(exp, place.mesh)
            timing, state = timed("train", lambda state: step(state, taken)[0], state)
            report(programs["train"], timing, chip)
        tree = lora.published(train_step.policy(learner, state))
        timing, params = timed("swap", lambda _: mesh_lib.hand_over(tree, store.abstract), None)
        if "swap" in names:
            moved = 2 * transformer.num_bytes(exp.published_model) / server_mesh.size
            bound = f", at least {moved / chip.memory_bytes_per_s:.3g} s (memory)" if chip else ""
            print(f"swap: {moved / 2e9:.3g} GB per device\n  {timing.median_s:.3g} s{bound}", flush=True)
    if {"prefill", "decode"} & set(names):
        state = tree = None  # frees the learner's memory
        if params is None:
            learner = exp.learner(server_mesh)
            params = lora.published(train_step.policy(learner, train_step.init_state(jax.random.key(0), learner)))
            params = mesh_lib.hand_over(params, store.abstract)
        params = lora.restored(params, store.lora)
        server = engine.Engine(exp.published_model, exp.engine, exp.tokenizer, mesh=server_mesh)
        for name in ("prefill", "decode"):
            if name in names:
                report(lowered_programs.SERVER[name](exp, server_mesh), RUNS[name](server, params), chip)
    stats = device.memory_stats() or {}
    if peak := stats.get("peak_bytes_in_use"):
        print(f"memory: at most {peak / 2**30:.2f} GiB of {stats['bytes_limit'] / 2**30:.2f} in use on one device")


def batch(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> packing.TrainBatch:
    """Returns a batch of random tokens on the devices, packed from rollouts of the lengths of the plan."""
    rng, layout, trees = np.random.default_rng(0), exp.train_layout(mesh), []
    for length in lowered_programs.lengths(exp.config):
        tokens = rng.integers(0, exp.model.vocab_size, min(length, layout.row_length)).astype(np.int32)
        trained = (np.arange(len(tokens)) > 0).astype(np.float32)
        trees.append(packing.stream(tokens, trained, -2 * trained, trained, np.ones_like(trained)))
    return packing.place(packing.pack(trees, layout), mesh)


def prefill(server: engine.Engine, params: transformer.Params) -> Timing:
    """Times the prefill of the longest prompts."""
    config, rng = server.config, np.random.default_rng(0)
    chunk, capacity = config.prefill_chunk, config.capacity
    shape = (1, chunk) if capacity > chunk else (config.prefill_batch, capacity)
    tokens = rng.integers(0, server.model.vocab_size, shape).astype(np.int32)
    if capacity > chunk:
        run = lambda cache: server.prefill_chunk(params, tokens, capacity - chunk, cache)[0]  # noqa: E731
        return timed("prefill", run, server.empty_prefix())[0]
    lengths = np.full(shape[0], capacity, np.int32)
    return timed("prefill", lambda _: server.prefill_batch(params, tokens, lengths), None)[0]


def decode(server: engine.Engine, params: transformer.Params) -> Timing:
    """Times a decode step of all slots, at the end of their room."""
    config = server.config

    def full(part):
        slots = part.token.shape[0]
        endless = request.GenerateRequest((), max_tokens=config.max_model_len, stop_ids=())
        new = {
            "position": np.full(slots, max(config.max_model_len - 2 - config.steps_per_call, 0), np.int32),
            "generated": np.zeros(slots, np.int32),
            "active": np.ones(slots, bool),
            "request": decode_state.request_arrays([endless] * slots, slots),
        }
        old = {name: getattr(part, name) for name in new}
        return part.replace(**jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), new, old))

    run = lambda parts: server.generate(params, tuple(map(full, parts)))[0]  # noqa: E731
    timing, _ = timed("decode", run, server.init_decode_state())
    return Timing(timing.first_s, timing.median_s / config.steps_per_call)


RUNS = {"prefill": prefill, "decode": decode}


def timed(name: str, step: Callable[[Any], Any], carry: Any) -> tuple[Timing, Any]:
    """Calls `carry = step(carry)` once, then `--repeats` times, then once in a trace; returns the times and the last carry."""
    seconds = []
    for turn in range(2 + flags.FLAGS.repeats):
        is_traced = turn == 1 + flags.FLAGS.repeats
        if is_traced and not flags.FLAGS.trace:
            break
        folder = pathlib.Path(flags.FLAGS.trace or ".") / name
        with jax.profiler.trace(folder) if is_traced else contextlib.nullcontext():
            begun = time.perf_counter()
            carry = jax.block_until_ready(step(carry))
            seconds.append(time.perf_counter() - begun)
    return Timing(seconds[0], statistics.median(seconds[1 : 1 + flags.FLAGS.repeats])), carry


def report(program: lowered_programs.LoweredProgram, timing: Timing, chip: roofline.Chip | None) -> None:
    """Prints the time of a program, next to its bound if the rates of the device are known."""
    work = program.executed_flops, program.read_bytes, program.model_flops
    text = compared(timing.median_s, *work, num_chips=program.mesh.size, chip=chip) if chip else ""
    rate = program.num_tokens / timing.median_s
    print(
        f"{program.title}\n  {timing.median_s:.3g} s{text}; {rate:,.0f} tokens/s; first call {timing.first_s:.1f} s",
        flush=True,
    )


def compared(
    seconds: float, executed_flops: float, read_bytes: float, model_flops: float, *, num_chips: int, chip: roofline.Chip
) -> str:
    """Returns a text that compares a measured time with its bound, and the MFU if `model_flops` is not 0.

    FLOPs are those of all chips, and `read_bytes` those of each. Links between chips are left out.
    """
    peak = num_chips * chip.flops_per_s
    bounds = {"arithmetic": executed_flops / peak, "memory": read_bytes / chip.memory_bytes_per_s}
    which = max(bounds, key=bounds.__getitem__)
    text = f", at least {bounds[which]:.3g} s ({which}): {bounds[which] / seconds:.0%} of that rate"
    if not model_flops:
        return text
    return f"{text}; MFU {model_flops / (peak * seconds):.1%}, at most {model_flops / (peak * bounds[which]):.1%}"


def define_flags() -> None:
    """Defines the flags of the command, except `--config`."""
    flags.DEFINE_multi_enum("programs", PROGRAMS, PROGRAMS, "programs to time; all by default")
    flags.DEFINE_integer("repeats", 5, "calls whose median is printed", lower_bound=1)
    flags.DEFINE_string("trace", None, "folder for a trace of one call of each program")


if __name__ == "__main__":
    define_flags()
    command.parse(needs_workdir=False)
    command.run(main)
