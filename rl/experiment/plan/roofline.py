"""Bounds the times of a program on TPU chips from below, at their published rates.

With compute, memory and links overlapped a step takes the longest of them; if the links are not overlapped, their time is
added. Both are at the full rate of the chip, so measured times are longer.

Formulas (N tokens of a step in sequences of s tokens, L layers, H heads of C dims, V_c of values):
  matmul FLOPs of a forward pass    2 N x (parameters that multiply; of experts, those that a token uses)
  attention FLOPs of a forward pass 2 N L H (C + V_c) (s + 1) / 2: each token reads itself and those before it
  model FLOPs of a step             3 x forward: the backward pass is two matmuls for each one
  MFU                               model FLOPs / (chips x peak x time); PaLM, arXiv 2204.02311, appendix B, but causal

Left out: rates below peak (shapes that do not fill the matrix unit, kernels that wait).

`utilization` measures how well a train step uses its devices: MFU, without recomputation, in the seconds of the train step alone; the
learner's busy part; and memory.
"""

import dataclasses
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models import config as config_lib
from models import flops


@dataclasses.dataclass(frozen=True)
class Chip:
    """The memory and the rates of one kind of chip: a TPU, or a GPU (for which no topology can be planned).

    The rates are those of Google's documentation (cloud.google.com/tpu/docs: v5e, v5p, v6e, November 2026) and of Nvidia's data sheets
    of the SXM cards.
    """

    memory_bytes: int  # that a program may use, from the compiler's error for one that does not fit
    flops_per_s: float  # bfloat16, dense
    memory_bytes_per_s: float
    link_bytes_per_s: float = 0.0  # of one port in one direction
    network_bytes_per_s: float = 0.0  # to other slices: a chip's part of its host's 200 Gbit/s (v6e: 800)
    wrap: int = 1  # a dim of the topology that is a multiple of this closes to a ring
    host: str = ""  # topology of one host, on which a server runs
    sizes: Sequence[str] = ()  # available topologies, by size


GIB = 2**30
_SIZES_2D = "2x2 2x4 4x4 4x8 8x8 8x16 16x16".split()
_SIZES_3D = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16".split()
CHIPS = {
    "v5e": Chip(int(15.75 * GIB), 197e12, 819e9, 50e9, 3.125e9, 16, "2x4", _SIZES_2D),
    "v6e": Chip(int(31.25 * GIB), 918e12, 1638e9, 100e9, 12.5e9, 16, "2x4", _SIZES_2D),
    "v5p": Chip(int(95.74 * GIB), 459e12, 2765e9, 100e9, 6.25e9, 4, "2x2x1", _SIZES_3D),
}
# By JAX's name of the device, or the words that it begins with.
DEVICES = {
    "TPU v5 lite": CHIPS["v5e"],
    "TPU v5": CHIPS["v5p"],
    "TPU v6 lite": CHIPS["v6e"],
    "NVIDIA A100": Chip(80 * GIB, 312e12, 2039e9),
    "NVIDIA H100": Chip(80 * GIB, 989e12, 3350e9),
    "NVIDIA H200": Chip(141 * 10**9, 989e12, 4800e9),
}


def of_device(kind: str) -> Chip | None:
    """Returns the chip of JAX's `device_kind`, or None if its rates are not known, such as those of a CPU."""
    return next((chip for name, chip in DEVICES.items() if kind == name or kind.startswith(f"{name} ")), None)


def utilization(
    values: Mapping[str, float],
    model: config_lib.ModelConfig,
    num_devices: int,
    local_devices: Sequence[Any],
    *,
    is_frozen: bool = False,
) -> dict[str, float]:
    """Returns the metrics `machine/...` of a train step from `values`, its other metrics. All `num_devices` are like the local ones.

    `is_frozen`: adapters train alone. MFU is left out where the rate of the devices is not known, such as on a CPU.
    """
    found = {
        "machine/learner_busy_frac": 1 - min(values["time/wait_s"] / max(values["time/step_s"], 1e-9), 1.0),
        "machine/memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES,
    }
    stats = [one for device in local_devices if (one := device.memory_stats())]
    if used := [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]:
        found["machine/device_memory_peak_bytes"] = max(used)
    chip = of_device(local_devices[0].device_kind)
    if chip and (num_tokens := values.get("batch/num_row_tokens", 0.0)):
        length = max(round(values["batch/sequence_length"]), 1)
        rows, counted = flops.PackedRows(length, [(length,)]), flops.ModelFlops.of(model, is_frozen=is_frozen)
        work = counted.model_flops(rows) * num_tokens / length
        found["machine/mfu"] = work / (num_devices * chip.flops_per_s * max(values["time/train_step_s"], 1e-9))
    return {name: float(value) for name, value in found.items()}


_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology `<kind>:<dims>`. Raises ValueError if the form or the kind is unknown."""
    kind, _, dims = topology.partition(":")
    if kind not in CHIPS:
        raise ValueError(f"topology {topology!r} has an unknown kind; choose one of {', '.join(CHIPS)}, like v5p:4x4x4")
    if not dims or not all(part.isdigit() and int(part) > 0 for part in dims.split("x")):
        raise ValueError(f"topology {topology!r} is malformed; write <kind>:<dims>, as in v5p:4x4x4 or v5e:2x4")
    return CHIPS[kind]


def num_chips(topology: str) -> int:
    """Returns the number of chips of a topology `<kind>:<dims>`."""
    return math.prod(int(part) for part in topology.partition(":")[2].split("x"))


def host_of(topology: str) -> str:
    """Returns the topology of one host of a slice: the slice itself if it is not larger than a host, else four chips of it."""
    kind, chip = topology.partition(":")[0], chip_of(topology)
    if num_chips(topology) <= num_chips(f"{kind}:{chip.host}"):
        return topology
    return f"{kind}:2x2x1" if chip.host.count("x") == 2 else f"{kind}:2x2"


def alternatives(topology: str) -> list[str]:
    """Returns larger topologies of the same kind, then those of all other kinds of chip; both smallest first."""
    kind = topology.partition(":")[0]
    names = sorted((f"{other}:{size}" for other, chip in CHIPS.items() for size in chip.sizes), key=num_chips)
    same = [n for n in names if n.startswith(f"{kind}:") and num_chips(n) > num_chips(topology)]
    return same + [n for n in names if not n.startswith(f"{kind}:")]


def link_bytes_per_s(chip: Chip, extent: Sequence[int], coords: np.ndarray) -> float:
    """Returns the rate at which a chip sends in a ring collective of a group at `coords` [chips, dims] of a topology.

    A dim of the topology that the group fills, and that closes to a ring, adds both of its ports to the rate. Any other dim that the
    group spans adds one port: at the end of a line, all bytes come through one port.
    """
    ports = 0
    for dim, size in enumerate(extent):
        spanned = len(set(coords[:, dim].tolist()))
        if spanned > 1:
            ports += 2 if spanned == size and size % chip.wrap == 0 else 1
    return max(ports, 1) * chip.link_bytes_per_s
