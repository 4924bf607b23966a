"""Parses the HLO text of a compiled program: its collectives with their bytes and groups, and its copies.

1. `parse` splits the text into computations and follows calls from the entry. A loop's body counts once per iteration, so each
   instruction has a count.
2. A loop's number of iterations follows from the constants in its condition and its body: XLA for TPU writes no trip counts, but
   loops of `scan` and of the partitioner count from 0, the latter by 2 where they are unrolled. Loops bounded by data (the micro-batches of a step) take the numbers that the caller gives,
   the outermost first. The innermost loop of a nest takes the product of those that are left.
3. Bytes are those that one chip sends over its links by the usual algorithms: an all-gather of n bytes over g chips sends
   n (g - 1) / g, an all-reduce twice that (a reduce-scatter and an all-gather), a permute n.

4. Of the branches of a conditional, only the shortest counts: ours guard work that few calls need, such as filters of a request.

An `all-reduce` inside a fusion called all-reduce-scatter is half an all-reduce: XLA writes a reduce-scatter so.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ITEM_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2}  # other names contain their bits: f32, s8, f8e4m3fn
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program, such as an all-gather. Each execution has the same size and group."""

    kind: str  # one of KINDS
    count: float  # executions in one run of the program
    num_bytes: float  # of the whole array, before a reduce-scatter or after an all-gather, on one chip
    group: tuple[int, ...]  # positions in the mesh of the first group's devices; of a permute, source and target

    @property
    def sent_bytes(self) -> float:
        """The bytes that one chip sends over its links in all executions together."""
        share = (len(self.group) - 1) / len(self.group)
        factor = {"collective-permute": 1.0, "all-reduce": 2 * share}.get(self.kind, share)
        return self.count * self.num_bytes * factor


class Instruction(NamedTuple):
    """One instruction of the HLO text, which runs `count` times. `writes` is False for an inner step of a fusion."""

    count: float
    computation: str
    line: str
    writes: bool


def parse(text: str, turns: Sequence[float] = (), alone: float | None = None) -> list[Instruction]:
    """Returns the instructions in `compiled.as_text()`: the call tree of the entry computation, flattened.

    `turns` are the iterations of loops bounded by data, the outermost first, on average; deeper loops take 1. A loop that is in no
    other one and has none inside takes `alone`, if given. Raises ValueError if the text has no entry computation.
    """
    computations, entry = {}, None
    for block in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text):
        header = re.match(r"(ENTRY )?%([\w.\-]+) \(", block)
        if header:
            lines = re.split(r"\n(?=\s*(?:ROOT )?%[\w.\-]+ = )", block)[
                1:
            ]  # attributes of a kernel may have several lines
            computations[header[2]] = [line.strip() for line in lines]
            entry = header[2] if header[1] else entry
    if entry is None:
        raise ValueError("the text has no ENTRY computation; pass the text of a compiled HLO module")

    counts, fused = collections.defaultdict(float), set()

    def called(line: str) -> list[str]:
        names = [name for name in _called(line) if name in computations]
        return [min(names, key=size)] if " conditional(" in line and names else names

    @functools.cache
    def size(name: str) -> int:
        """Returns the number of instructions of this computation and of those that it calls."""
        return sum(1 + sum(map(size, called(line))) for line in computations[name])

    def constant_turns(loop: re.Match) -> int | None:
        return _constant_turns(computations[loop["condition"]], computations[loop["body"]])

    @functools.cache
    def bounded_by_data(name: str) -> bool:
        """Returns True if this computation, or one that it calls, has a loop bounded by data."""
        loops = filter(None, map(_LOOP.search, computations[name]))
        if any(constant_turns(loop) is None for loop in loops):
            return True
        return any(bounded_by_data(child) for line in computations[name] for child in called(line))

    def visit(name: str, count: float, left: Sequence[float]):
        counts[name] += count
        for line in computations[name]:
            loop = _LOOP.search(line)
            if loop is None:
                fused.update(called(line) if " fusion(" in line else ())
                for child in called(line):
                    visit(child, count, left)
                continue
            num_turns, inner = constant_turns(loop), left
            if num_turns is None:
                if bounded_by_data(loop["body"]):
                    num_turns, inner = math.prod(left[:1]), left[1:]
                else:
                    num_turns = math.prod(left) if alone is None or len(left) < len(turns) else alone
                    inner = ()
            visit(loop["condition"], count * (num_turns + 1), ())
            visit(loop["body"], count * num_turns, inner)

    visit(entry, 1, tuple(turns))
    return [
        Instruction(counts[name], name, line, name not in fused or line.startswith("ROOT "))
        for name, lines in computations.items()
        for line in lines
        if counts[name]
    ]


def collectives(program: Sequence[Instruction], across: Sequence[int] = ()) -> list[Collective]:
    """Returns the collectives of a parsed program between several devices. Raises ValueError for one of an unknown form.

    XLA writes collectives between slices as transfers by the hosts. `across` is their group: the positions in the mesh of one chip of
    each slice.
    """
    found = []
    for count, computation, line, _ in program:
        if transfer := _TRANSFER.search(line):
            kind, array = transfer["kind"].lower().replace("_", "-"), shapes(transfer["result"])[0]
            found.append(Collective(kind, count, _num_bytes(array), tuple(across)))
            continue
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        kind, results = match["kind"], shapes(match["result"])
        num_bytes = sum(map(_num_bytes, results))
        group = _pair(line) if kind == "collective-permute" else _group(line)
        if match["start"] and kind in ("all-gather", "collective-permute"):
            num_bytes = _num_bytes(results[1])  # (operand, result, ...)
        elif match["start"] and kind != "all-reduce":
            raise ValueError(f"unsupported asynchronous {kind}: {line[:200]}")
        elif kind == "reduce-scatter":
            num_bytes *= len(group)
        elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        if len(group) > 1:
            found.append(Collective(kind, count, num_bytes, group))
    return found


def copies(program: Sequence[Instruction], dims: Sequence[int]) -> float:
    """Returns how often the program copies a whole array of these dims, in any order and without dims of 1."""
    wanted, total = _extent(dims), 0
    for count, _, line, writes in program:
        match = _COPY.search(line)
        if match is not None and writes:
            result = match["result"].split(", ")[0]  # of copy-start: (target, source, ...)
            # S(1) is on-chip memory: a prefetch, not a copy in HBM.
            total += count * ("S(1)" not in result and _extent(shapes(result)[0][1]) == wanted)
    return total


def shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (dtype, dims) of each array in a result type, in order."""
    return [
        (dtype, tuple(int(dim) for dim in dims.split(",") if dim))
        for dtype, dims in re.findall(r"\b(pred|bf16|[a-z]+\d+\w*)\[([\d,]*)\]", text)
    ]


def item_bytes(dtype: str) -> float:
    """Returns the bytes of one number of a dtype by its name in HLO."""
    return ITEM_BYTES.get(dtype) or int(re.findall(r"\d+", dtype)[0]) / 8


_COLLECTIVE = re.compile(rf" = (?P<result>.+?) (?P<kind>{KINDS})(?P<start>-start)?\(")
_TRANSFER = re.compile(r" = (?P<result>.+?) recv\(.*_xla_megascale_transfer_type=\"(?P<kind>\w+)\"")
_COPY = re.compile(r" = (?P<result>.+?) (?:copy|copy-start|transpose)\(")
_LOOP = re.compile(r" while\(.*condition=%(?P<condition>[\w.\-]+), body=%(?P<body>[\w.\-]+)")


def _num_bytes(shape: tuple[str, tuple[int, ...]]) -> float:
    dtype, dims = shape
    return item_bytes(dtype) * math.prod(dims)


def _extent(dims: Sequence[int]) -> list[int]:
    return sorted(dim for dim in dims if dim != 1)


def _called(line: str) -> list[str]:
    """Returns the names of the computations that an instruction calls, except conditions and element-wise functions."""
    names = re.findall(r"(?:calls|body|true_computation|false_computation)=%([\w.\-]+)", line)
    for group in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", line):
        names += re.findall(r"%([\w.\-]+)", group)
    return names


def _constant_turns(condition: Sequence[str], body: Sequence[str]) -> int | None:
    """Returns the number of iterations of a loop with the condition `i < n`, n a constant; None for any other condition.

    The body adds a constant to i, 1 if none is found: the partitioner unrolls loops, whose i then grows by 2.
    """
    root = next((line for line in condition if line.startswith("ROOT ")), "")
    match = re.search(r"compare\((.*?)\), direction=LT", root)
    if match is None:
        return None
    operands, constants = _names(match[1]), _constants(condition)
    limit = next((constants[operand] for operand in operands if operand in constants), None)
    if limit is None:
        return None
    results = dict(line.removeprefix("ROOT ").removeprefix("%").split(" = ", 1) for line in (*condition, *body))
    place = re.search(r" get-tuple-element\(.*\), index=(\d+)", results.get(operands[0], ""))
    carried = re.search(r" tuple\((.*?)\)", next((line for line in body if line.startswith("ROOT ")), ""))
    step = None
    if place and carried:
        addition = re.search(r" add\((.*?)\)", results.get(_names(carried[1])[int(place[1])], ""))
        constants = _constants(body)
        step = next((constants[name] for name in _names(addition[1] if addition else "") if name in constants), None)
    return -(-limit // (step or 1))


def _names(operands: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", operands)


def _constants(computation: Sequence[str]) -> dict[str, int]:
    """Returns the values of a computation's scalar integer constants by name."""
    text = "\n".join(computation)
    found = re.findall(r"^%([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)", text, re.MULTILINE)
    return {name: int(value) for name, value in found}


def _pair(line: str) -> tuple[int, ...]:
    """Returns the first (source, target) of a collective-permute whose devices differ, or () if there is none."""
    pairs = re.findall(r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2].partition("}}")[0] + "}")
    return next(((int(a), int(b)) for a, b in pairs if a != b), ())


def _group(line: str) -> tuple[int, ...]:
    """Returns the device IDs of a collective's first replica group. Raises ValueError for an unknown notation."""
    text = line.partition("replica_groups=")[2]
    if text.startswith("{{"):
        return tuple(int(i) for i in text[2 : text.index("}")].split(","))
    if match := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        num_groups, size = _ints(match[1])[0], math.prod(_ints(match[1])[1:])
        return tuple(_iota(match[2], match[3]).reshape(num_groups, size)[0].tolist())
    if match := re.match(r"mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", text):
        axes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])]
        sizes = [size for _, size in axes]
        ids = _iota(match[2], match[3]) if match[2] else np.arange(math.prod(sizes))
        chosen = re.findall(r"'(\w+)'", match[4])
        first = tuple(slice(None) if name in chosen else 0 for name, _ in axes)
        return tuple(ids.reshape(sizes)[first].ravel().tolist())
    raise ValueError(f"unsupported replica groups: {text[:120]}")


@functools.cache
def _iota(dims: str, permutation: str | None) -> np.ndarray:
    sizes = _ints(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_ints(permutation)) if permutation else ids


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
