"""Reads and writes the safetensors files of a checkpoint folder.

Files are memory-mapped for reading, unless they are small and may change meanwhile: a process that reads a mapped file which another
one truncates is killed (SIGBUS). For writing, at most one tensor is in memory.
"""

import json
import math
import mmap
import pathlib
from collections.abc import Callable

import numpy as np

from sharding.system import atomic_file
from sharding.weights.format import safetensors_header

NAMES = {dtype: name for name, dtype in safetensors_header.DTYPES.items()}
INDEX = "model.safetensors.index.json"


class Reader:
    """The tensors of a checkpoint folder's safetensors files, read by name: memory-mapped, or `in_memory`.

    Construction raises ValueError if a file is missing or damaged, or if two files have the same tensor.
    """

    def __init__(self, folder: pathlib.Path, *, in_memory: bool = False):
        self.entries: dict[str, safetensors_header.Entry] = {}  # dtype, shape and place of each tensor, by name
        self._places: dict[str, tuple[pathlib.Path, mmap.mmap | bytes]] = {}
        for path in _paths(folder):
            entries = safetensors_header.read(path)
            with path.open("rb") as file:
                mapped = file.read() if in_memory else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if twice := self.entries.keys() & entries.keys():
                name = min(twice)
                raise ValueError(f"tensor {name} is in both {self._places[name][0]} and {path}; remove one")
            self.entries |= entries
            self._places |= dict.fromkeys(entries, (path, mapped))

    def tensor(self, name: str) -> np.ndarray:
        """Returns the tensor `name` as a read-only array over the mapped file; copying reads the data."""
        (dtype, shape, offset), (path, data) = self.entries[name], self._places[name]
        if offset + math.prod(shape) * dtype.itemsize > (data.size() if isinstance(data, mmap.mmap) else len(data)):
            raise ValueError(f"{path} became shorter while it was read. Read it again when it is complete.")
        return np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)

    def forget(self, name: str, view: np.ndarray) -> None:
        """Lets the system free the memory of `view`, a part of the tensor `name`; later reads load the file again."""
        file = self._places[name][1]
        if isinstance(file, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and view.size:
            base = np.frombuffer(file, np.uint8).ctypes.data
            low, high = (address - base for address in np.lib.array_utils.byte_bounds(view))
            start = low - low % mmap.PAGESIZE
            file.madvise(mmap.MADV_DONTNEED, start, high - start)


def write(path: pathlib.Path, tensors: dict[str, tuple[np.dtype, tuple[int, ...], Callable[[], np.ndarray]]]) -> None:
    """Writes a safetensors file. `tensors` maps names to (dtype, shape, function that returns the array), called one by one."""
    # Wide dtypes first, so that every tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers rejects a file without it
    offset = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        end = offset + math.prod(shape) * dtype.itemsize
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


def _paths(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoint's files: those in its index, else `model.safetensors`, else the only `.safetensors` file."""
    if (index := folder / INDEX).is_file():
        try:
            listed = sorted(set(atomic_file.read_json(index, dict)["weight_map"].values()))
            bad = [name for name in listed if pathlib.PurePath(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index with a weight_map: {error!r}. Download it again.") from error
        if bad:
            raise ValueError(f"{index} names {bad[0]!r}, which is not a file of that folder. Download it again.")
        if missing := [name for name in listed if not (folder / name).is_file()]:
            raise ValueError(
                f"{index} names {missing[0]}, which does not exist; {len(missing)} files are missing. Download them."
            )
        if "model.safetensors" not in listed and (folder / "model.safetensors").is_file():
            raise ValueError(f"{folder} has model.safetensors, and {INDEX} names other files; delete the stale one")
        return [folder / name for name in listed]
    found = sorted(folder.glob("*.safetensors"))
    if (single := folder / "model.safetensors") in found:
        return [single]
    if not found:
        pickled = next((path.name for kind in ("bin", "pth", "pt") for path in sorted(folder.glob(f"*.{kind}"))), "")
        remedy = f"{pickled} may run code: save it as safetensors" if pickled else "Download the checkpoint again"
        raise ValueError(
            f"no weights in {folder}: expected model.safetensors, or {INDEX} and the files it names. {remedy}."
        )
    if len(found) > 1:
        raise ValueError(f"{folder} has {len(found)} .safetensors files but no {INDEX}. Download the index, too.")
    return found
