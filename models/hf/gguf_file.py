"""Reads the tensors of a GGUF file under the names of a Hugging Face checkpoint, dequantized by the `gguf` package.

1. Construction maps each tensor that the model needs to the file's, by the names of the `gguf` package, and checks its place.
2. `Reader.tensor` dequantizes one tensor, or one expert's part of it, and undoes llama.cpp's changes: rows of q and k in
   the order of the rotary pairs (architecture llama), and norms of Gemma stored with the 1 that they add.
"""

import functools
import itertools
import math
import pathlib
import re
from typing import NamedTuple

import gguf
import ml_dtypes
import numpy as np

from models import config as config_lib
from models.hf import gguf_config, tensor_names
from sharding.weights.format import gguf_header

# Types that need no arithmetic, and the dtype of all others when dequantized.
STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
DEQUANTIZED = np.dtype(np.float32)


class Entry(NamedTuple):
    """One tensor of the model in a GGUF file: dtype and shape as read, the name of its ggml type, its bytes, and its name in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int
    stored: str


class Reader:
    """The tensors of a GGUF file, read by the names of a Hugging Face checkpoint; the counterpart of `safetensors_file.Reader`.

    Construction raises ValueError if the file is damaged, or has a type that cannot be dequantized.
    """

    def __init__(self, path: pathlib.Path, config: config_lib.ModelConfig):
        header = gguf_header.read(path)
        arch = header.metadata["general.architecture"]
        self._path, self._config, self._is_llama = path, config, arch == "llama"
        try:
            stored = {name: _entry(name, tensor) for name, tensor in header.tensors.items()}
            _check_places(stored, len(header.mapped))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self.entries: dict[str, Entry] = {}
        for name, (theirs, expert) in _names(arch, config).items():
            if theirs in stored:
                self.entries[name] = stored[theirs] if expert is None else _expert(stored[theirs], expert)
        used = {entry.stored for entry in self.entries.values()} | {gguf_config.ROPE_FACTORS}
        self.entries |= {name: entry for name, entry in stored.items() if name not in used}

    def tensor(self, name: str) -> np.ndarray:
        """Returns the tensor `name` in a Hugging Face checkpoint's layout, as stored in F32, F16, and BF16, else dequantized to float32."""
        entry, config = self.entries[name], self._config
        # Not by the map of the file: one that another process truncates meanwhile would kill this one (SIGBUS).
        values = np.fromfile(self._path, np.uint8, entry.size, offset=entry.start)
        if len(values) < entry.size:
            raise ValueError(f"{self._path} became shorter while it was read. Read it again when it is complete.")
        if entry.kind in STORED:
            values = values.view(STORED[entry.kind])
        else:
            rows = values.reshape(math.prod(entry.shape[:-1]), -1)
            values = gguf.dequantize(rows, gguf.GGMLQuantizationType[entry.kind])
        values = values.reshape(entry.shape)
        if self._is_llama and (found := re.search(r"self_attn\.([qk])_proj\.", name)):
            heads = config.num_heads if found[1] == "q" else config.num_kv_heads
            pairs = values.reshape(heads, config.head_dim // 2, 2, *values.shape[1:])
            values = np.moveaxis(pairs, 2, 1).reshape(values.shape)
        if config.norm == "rms_plus_one" and name.endswith("norm.weight"):
            values = values - np.float32(1)
        return values

    def forget(self, name: str, view: np.ndarray) -> None:
        """Does nothing: no part of the file stays in memory."""


def _entry(name: str, tensor: gguf_header.Tensor) -> Entry:
    if (kind := _readable().get(tensor.kind)) is None:
        code = next((x.name for x in gguf.GGMLQuantizationType if x == tensor.kind), tensor.kind)
        raise ValueError(f"tensor {name} has type {code}, not one of {', '.join(_readable().values())}; convert it")
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    if tensor.shape[-1] % block:
        raise ValueError(f"tensor {name}: rows of {list(tensor.shape)} are not multiples of {kind}'s blocks of {block}")
    size = math.prod(tensor.shape) // block * block_bytes
    return Entry(STORED.get(kind, DEQUANTIZED), tensor.shape, kind, tensor.offset, size, name)


@functools.cache
def _readable() -> dict[int, str]:
    """Returns {code: name} of the types that the `gguf` package dequantizes."""
    found = {}
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found[int(kind)] = kind.name
    return found


def _check_places(stored: dict[str, Entry], file_bytes: int) -> None:
    """Raises ValueError if a tensor ends after the file, or begins inside another one."""
    in_order = sorted(stored.values(), key=lambda entry: entry.start)
    for entry in in_order:
        if (end := entry.start + entry.size) > file_bytes:
            found = f"tensor {entry.stored} ends at byte {end} of {file_bytes}"
            raise ValueError(f"{found}: the file is truncated. Download it again.")
    for one, other in itertools.pairwise(in_order):
        if one.start + one.size > other.start:
            raise ValueError(f"tensors {one.stored} and {other.stored} overlap. Download or convert the file again.")


def _names(arch: str, config: config_lib.ModelConfig) -> dict[str, tuple[str, int | None]]:
    """Returns, by the names of a Hugging Face checkpoint, (the file's name of a tensor, the expert whose part of it is meant)."""
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    theirs, found = gguf.get_tensor_name_map(code, config.num_layers), {}
    for name in tensor_names.tensors(config):
        expert = re.search(r"experts\.(\d+)\.", name)
        stored = theirs.get_name(name.replace(expert[0], "experts.") if expert else name, (".weight", ".bias"))
        found[name] = stored or name, int(expert[1]) if expert else None
    return found


def _expert(entry: Entry, index: int) -> Entry:
    """Returns the entry of one expert's part of a tensor that has those of all, one after the other."""
    size = entry.size // entry.shape[0]
    return entry._replace(shape=entry.shape[1:], start=entry.start + index * size, size=size)
