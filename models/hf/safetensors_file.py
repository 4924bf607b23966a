"""The safetensors format: a length, a JSON header, the bytes of the tensors.

1. `Reader` maps the files of a folder (one, or several under an index) and shows each tensor as an array over the mapping;
   nothing is read before it is copied from. `forget` gives back the pages of what was copied.
2. `write` streams tensors into one file: the header needs shapes only, so no more than one tensor is in memory.

A header is a stranger's word: lengths, offsets, dtypes and shapes are checked against the file before anything is mapped.
"""

import json
import mmap
import pathlib
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # that of the reference implementation
INDEX = "model.safetensors.index.json"


class Reader:
    """The tensors of a checkpoint folder, by name."""

    def __init__(self, folder: pathlib.Path):
        self._files: dict[pathlib.Path, mmap.mmap] = {}
        self._tensors: dict[str, tuple[pathlib.Path, np.dtype, tuple[int, ...], int]] = {}
        for path in _file_names(folder):
            for name, place in self._open(path).items():
                if name in self._tensors:
                    raise ValueError(f"tensor {name} is in {self._tensors[name][0]} and again in {path}")
                self._tensors[name] = (path, *place)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][2]

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name][1]

    def tensor(self, name: str) -> np.ndarray:
        """A read-only array over the file."""
        path, dtype, shape, offset = self._tensors[name]
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._files[path], dtype, count, offset).reshape(shape)

    def forget(self, name: str, view: np.ndarray) -> None:
        """Lets the system drop the pages under `view`, a view of the tensor, from this process; a later look reads again."""
        file = self._files[self._tensors[name][0]]
        if hasattr(mmap, "MADV_DONTNEED") and view.size:
            base = np.frombuffer(file, np.uint8).ctypes.data
            low, high = (address - base for address in np.lib.array_utils.byte_bounds(view))
            start = low - low % mmap.PAGESIZE
            file.madvise(mmap.MADV_DONTNEED, start, high - start)

    def _open(self, path: pathlib.Path) -> dict:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"{path} is not a safetensors file: a header of {length} bytes in a file of {size}")
            header = _parse(path, file.read(length))
            self._files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return {name: _place(path, name, entry, 8 + length, size) for name, entry in header.items()}


def write(path: pathlib.Path, tensors: dict[str, tuple[np.dtype, tuple[int, ...], Callable[[], np.ndarray]]]) -> None:
    """Writes name -> (dtype, shape, maker of the array) to one file; the same tensors give the same bytes."""
    # Wide dtypes first, so that every tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    header, offset = {"__metadata__": {"format": "pt"}}, 0  # transformers refuses a file without it
    for name in order:
        dtype, shape, _ = tensors[name]
        end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            dtype, shape, make = tensors[name]
            array = np.ascontiguousarray(make())
            assert array.dtype == dtype and array.shape == tuple(shape), (name, array.dtype, array.shape)
            file.write(array.reshape(-1).view(np.uint8).data)


def _file_names(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of an index, else `model.safetensors`, else the only `.safetensors` there is."""
    if (folder / INDEX).is_file():
        try:
            listed = sorted(set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / INDEX} is not an index with a weight_map: {error!r}") from error
        if bad := [name for name in listed if pathlib.PurePath(name).name != name]:
            raise ValueError(f"{folder / INDEX} names {bad[0]!r}, which is not a file of that folder")
        if missing := [name for name in listed if not (folder / name).is_file()]:
            raise ValueError(
                f"{folder / INDEX} names {missing[0]}, which is not there; {len(missing)} files are missing"
            )
        return [folder / name for name in listed]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise ValueError(f"{folder} holds {len(found)} .safetensors files and no {INDEX}; one of the two is needed")
    return found


def _parse(path: pathlib.Path, text: bytes) -> dict:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is no object")
    header.pop("__metadata__", None)
    return header


def _place(path, name, entry, start: int, size: int) -> tuple[np.dtype, tuple[int, ...], int]:
    try:
        dtype_name, shape, (begin, end) = (
            entry["dtype"],
            tuple(map(int, entry["shape"])),
            map(int, entry["data_offsets"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the header entry of {name} is malformed: {entry!r}") from error
    if dtype_name not in DTYPES:
        raise ValueError(f"{path}: tensor {name} has dtype {dtype_name}, which is not one of {', '.join(DTYPES)}")
    dtype = DTYPES[dtype_name]
    count = 1
    for dim in shape:
        count *= dim
    inside = 0 <= begin <= end <= size - start
    if not inside or min(shape, default=1) < 0 or count * dtype.itemsize != end - begin:
        raise ValueError(
            f"{path}: tensor {name} {shape} of {dtype_name} claims bytes {begin}..{end} of {size - start}; the file is "
            "cut short or its header is wrong: fetch it again"
        )
    return dtype, shape, start + begin
