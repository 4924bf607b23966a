"""Counts the bytes that a compiled program reads from the memory of one chip, in its HLO text.

1. Each instruction that runs by itself, such as a fusion, reads its operands, with the padding of their tiles. An operand in on-chip
   memory was read by the copy that brought it there.
2. Of an operand of which only slices or gathered rows are used, also inside a fusion, these count. An operand that is updated in
   place is not read.
3. The kernel of a cache in pages (models/kernels/paged_attention.py) reads the pages in use, whose bytes the caller knows.

Kernels of experts read those that tokens chose, which the text does not have: the count is for models without experts.
"""

import collections
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rl.experiment.plan import hlo

# Their instructions read nothing: they name arrays, call computations that are counted, or end copies.
FREE = "parameter constant tuple get-tuple-element bitcast while conditional call async-start iota after-all".split()
SLICES = "dynamic-slice", "slice", "gather"
UPDATES = "dynamic-update-slice", "scatter"


def num_bytes(
    program: Sequence[hlo.Instruction], cache: Collection[tuple[int, ...]] = (), pages_bytes: float = 0.0
) -> float:
    """Returns the bytes that one run of a parsed program reads.

    A call of the paged attention kernel counts as `pages_bytes`, in place of the whole arrays whose shapes are in `cache`.
    """
    computations, fused = collections.defaultdict(dict), set()
    for instruction in program:
        if match := _LINE.match(instruction.line):
            name, result, opcode, operands = match.groups()
            names = re.findall(r"%([\w.\-]+)", operands)
            computations[instruction.computation][name] = _Op(instruction, result, opcode, names)
            fused |= set() if instruction.writes else {instruction.computation}
    total = 0.0
    for ops in (ops for computation, ops in computations.items() if computation not in fused):
        for op in ops.values():
            if op.opcode in FREE or op.opcode.endswith("-done"):
                continue
            is_kernel, operands = bool(_KERNEL.search(op.instruction.line)), {*filter(ops.get, op.operands)}
            in_memory = [name for name in operands if ON_CHIP not in ops[name].result]
            if is_kernel:
                in_memory = [name for name in in_memory if hlo.shapes(ops[name].result)[0][1] not in cache]
            read = sum(_read(computations, op, name, ops) for name in in_memory)
            total += op.instruction.count * (read + is_kernel * pages_bytes)
    return total


class _Op(NamedTuple):
    """An instruction, and the parts of its line."""

    instruction: hlo.Instruction
    result: str  # its type
    opcode: str
    operands: Sequence[str]  # names


ON_CHIP = "S(1)"  # in the layout of an array
_LINE = re.compile(r"(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:[,\s]|$)", re.DOTALL)
_KERNEL = re.compile(r' custom-call\(.*"tpu_custom_call".*/paged_attention', re.DOTALL)
_ARRAY = re.compile(r"\b(?:pred|bf16|[a-z]+\d+\w*)\[[\d,]*\](?:\{[^}]*\})?")


def _read(computations: Mapping[str, Mapping[str, _Op]], op: _Op, operand: str, ops: Mapping[str, _Op]) -> float:
    """Returns the bytes that an instruction of the computation `ops` reads of one of its operands."""
    whole, places = _padded_bytes(ops[operand].result), [i for i, name in enumerate(op.operands) if name == operand]
    called = re.search(r"calls=%([\w.\-]+)", op.instruction.line)
    if op.opcode == "fusion" and called and (inner := computations[called[1]]):
        parameters = (f" parameter({place})" for place in places)
        names = [name for text in parameters for name, x in inner.items() if text in x.instruction.line]
        return min(whole, sum(_used(computations, name, inner) for name in names))
    if places == [0] and op.opcode in SLICES:
        return min(whole, _padded_bytes(op.result))
    return 0.0 if places == [0] and op.opcode in UPDATES else whole


def _used(computations, name: str, ops: Mapping[str, _Op]) -> float:
    """Returns the bytes of an array that the instructions of a fusion use."""
    users = ((user, op) for user, op in ops.items() if name in op.operands)
    return sum(
        _used(computations, user, ops) if op.opcode == "bitcast" else _read(computations, op, name, ops)
        for user, op in users
    )


def _padded_bytes(result: str) -> float:
    """Returns the bytes of all arrays of a type in the tiles of their layouts: `{1,0:T(8,128)}` pads dim 1 to whole 128."""
    total = 0.0
    for text in _ARRAY.findall(result):
        ((dtype, dims),) = hlo.shapes(text)
        order, tile = (re.search(form, text) for form in (r"\{([\d,]+)", r":T\(([\d,]+)\)"))
        sizes = [dims[int(dim)] for dim in order[1].split(",")] if order else [*dims]  # the minor dim first
        steps = [int(size) for size in tile[1].split(",")][::-1] if tile else []
        steps += [1] * (len(sizes) - len(steps))
        total += hlo.item_bytes(dtype) * math.prod(
            -(-size // step) * step for size, step in zip(sizes, steps, strict=False)
        )
    return total
