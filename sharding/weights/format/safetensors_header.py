"""Reads the header of a safetensors file: a length, a JSON object, then the bytes of the tensors.

A header is untrusted: its length, offsets, dtypes and shapes are checked against the file before anything is mapped.
"""

import json
import math
import pathlib
from typing import NamedTuple

import ml_dtypes
import numpy as np

_NAMES = (
    "F64:float64 F32:float32 F16:float16 BF16:bfloat16 I64:int64 I32:int32 I16:int16 I8:int8 U8:uint8 U16:uint16 U32:uint32 "
    "U64:uint64 C64:complex64 BOOL:bool F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2"
)
DTYPES = {code: np.dtype(getattr(ml_dtypes, name, name)) for code, name in (x.split(":") for x in _NAMES.split())}
MAX_HEADER_BYTES, MAX_DIMS = 100_000_000, 64  # those of the reference implementation, and of numpy


class Entry(NamedTuple):
    """The dtype, shape and place of one tensor in a safetensors file; `offset` is in bytes from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


def read(path: pathlib.Path) -> dict[str, Entry]:
    """Reads a safetensors file's header. Returns the place of each tensor by name. Raises ValueError if it is malformed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        fits = size >= 8 and length <= min(size - 8, MAX_HEADER_BYTES)
        try:
            header = json.loads(file.read(length)) if fits else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        text = f"{path} is not a safetensors file: its header ({length} of {size} bytes) is not a JSON object"
        raise ValueError(text + ". Download it again.")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _entry(path: pathlib.Path, name: str, entry, start: int, size: int) -> Entry:
    try:
        kind, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: header entry of {name} is malformed: {entry!r}. Download it again.") from error
    if kind not in DTYPES:
        raise ValueError(f"{path}: tensor {name} has dtype {kind}, not one of {', '.join(DTYPES)}. Convert the file.")
    is_inside = 0 <= begin <= end <= size - start and min(shape, default=1) >= 0 and len(shape) <= MAX_DIMS
    if not is_inside or math.prod(shape) * DTYPES[kind].itemsize != end - begin:
        raise ValueError(
            f"{path}: tensor {name} {shape} of {kind} has bytes {begin}..{end} of {size - start}: the file is truncated, or "
            "its header is wrong. Download it again."
        )
    return Entry(DTYPES[kind], shape, start + begin)
