"""Measures how well a train step uses its devices: MFU, the learner's busy part, and memory.

MFU is that of rl/plan/roofline.py: three forward passes over the tokens of the batch, no recomputation, in the seconds of the train
step alone. It is left out on devices whose rate is not known there, such as a CPU.
"""

import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from models import config as config_lib
from models import flops
from rl.plan import roofline


def of_step(
    values: Mapping[str, float],
    model: config_lib.ModelConfig,
    num_devices: int,
    local_devices: Sequence[Any],
    *,
    is_frozen: bool = False,
) -> dict[str, float]:
    """Returns the metrics `machine/...` of a train step from its other metrics. All `num_devices` are like the local ones.

    `is_frozen`: adapters train alone.
    """
    found = {
        "machine/learner_busy_frac": 1 - min(values["time/wait_s"] / max(values["time/step_s"], 1e-9), 1.0),
        "machine/memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES,
    }
    stats = [one for device in local_devices if (one := device.memory_stats())]
    if used := [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]:
        found["machine/device_memory_peak_bytes"] = max(used)
    chip = roofline.of_device(local_devices[0].device_kind)
    if chip and (num_tokens := values.get("batch/num_row_tokens", 0.0)):
        length = max(round(values["batch/sequence_length"]), 1)
        rows, counted = flops.PackedRows(length, [(length,)]), flops.ModelFlops.of(model, is_frozen=is_frozen)
        work = counted.model_flops(rows) * num_tokens / length
        found["machine/mfu"] = work / (num_devices * chip.flops_per_s * max(values["time/train_step_s"], 1e-9))
    return {name: float(value) for name, value in found.items()}


_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
