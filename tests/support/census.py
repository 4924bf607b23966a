"""Counts the FLOPs that a compiled program executes on one chip, in its HLO text: matmuls, and calls of Pallas kernels.

XLA for TPU writes a matmul as a convolution, some of whose dims are spatial. Each pair of an output and a window position counts
that reads no padding and no hole of a dilation. A kernel is a custom call: grouped matmuls have an estimate of their FLOPs, and those of attention follow
from the blocks that it visits, which the text does not have.
"""

import collections
import functools
import math
import re
from collections.abc import Sequence

import numpy as np

from rl.experiment.plan import hlo

# Matmuls of the attention kernel's parts in units of its forward pass, which has two (models/kernels/splash_attention.py), and
# of the kernel that decodes (inference/engine/paged_cache.py).
KERNELS = {"splash_forward": 1.0, "splash_backward": 2.5, "paged_attention": 1.0}


def matmul_flops(program: Sequence[hlo.Instruction]) -> float:
    """Returns the FLOPs of all matmuls outside of attention's kernel, those of grouped matmuls (megablox) included."""
    types = collections.defaultdict(dict)
    for _, computation, line, _ in program:
        if match := _RESULT.match(line):
            types[computation][match[1]] = match[2]
    total = 0.0
    for count, computation, line, _ in program:
        if match := _MATMUL.search(line):
            names = re.findall(r"%([\w.\-]+)", match["operands"])
            lhs, rhs = (hlo.shapes(types[computation][name])[0][1] for name in names[:2])
            out = hlo.shapes(match["result"])[0][1]
            total += count * (_convolution if match["kind"] == "convolution" else _dot)(line, lhs, rhs, out)
        elif match := _ESTIMATE.search(line):
            total += count * int(match[1])
    return total


def attention_passes(program: Sequence[hlo.Instruction]) -> float:
    """Returns the calls of the attention kernel, in units of its forward pass."""
    calls = ((count, _KERNEL.search(line)) for count, _, line, _ in program)
    return sum(count * KERNELS[match[1]] for count, match in calls if match)


_RESULT = re.compile(r"(?:ROOT )?%([\w.\-]+) = (.*?) [\w\-]+\(")
_MATMUL = re.compile(r" = (?P<result>\S+) (?P<kind>convolution|dot)\((?P<operands>.*?)\)")
_KERNEL = re.compile(rf' custom-call\(.*"tpu_custom_call".*/(?:jit\()?({"|".join(KERNELS)})', re.DOTALL)
_ESTIMATE = re.compile(r" custom-call\(.*\"cost_estimate\":\{\"flops\":\"(\d+)\"", re.DOTALL)


def _dot(line: str, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> int:
    del rhs
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
    return 2 * math.prod(out) * math.prod(lhs[int(dim)] for dim in (contracted[1].split(",") if contracted else ()))


def _convolution(line: str, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> int:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    assert labels, line
    window = dict(re.findall(r"(\w+)=([\dx_]+)", (re.search(r"window=\{(.*?)\}", line) or ["", ""])[1]))
    sizes, strides, *dilations = (_numbers(window.get(key)) for key in ("size", "stride", "lhs_dilate", "rhs_dilate"))
    pads = [int(pad.split("_")[0]) for pad in window.get("pad", "").split("x") if pad]
    flops = 2 * rhs[labels[2].index("i")] * math.prod(n for n, dim in zip(out, labels[3], strict=True) if dim in "bf")
    ones = [1] * len(sizes)
    dims = zip(sizes, pads or [0] * len(sizes), strides or ones, *(found or ones for found in dilations), strict=True)
    for dim, window_of_dim in enumerate(dims):
        flops *= _pairs(lhs[labels[1].index(str(dim))], out[labels[3].index(str(dim))], *window_of_dim)
    return flops


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split("x") if number]


@functools.cache
def _pairs(num_in: int, num_out: int, size: int, pad: int, stride: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Returns the number of pairs of an output and a window position that read an input, in one spatial dim."""
    places = np.add.outer(np.arange(num_out) * stride - pad, np.arange(size) * rhs_dilate)
    return int(((places >= 0) & (places % lhs_dilate == 0) & (places < num_in * lhs_dilate)).sum())
