"""Reads the header of a GGUF file, llama.cpp's format: counts, metadata, the table of tensors, then their data.

A header is untrusted: each count, length, and offset is checked against the file before anything of that size is made. The
`gguf` package has a reader, too; it takes 2 s for a vocabulary of 49,152 tokens, and does not end on a count that exceeds its file.
"""

import math
import mmap
import os
import stat
import struct
from typing import Any, NamedTuple

import numpy as np

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
# dtypes by the code of a value's type; 8 and 9 are STRING and ARRAY
DTYPES = "<u1 <i1 <u2 <i2 <u4 <i4 <f4 ? _ _ <u8 <i8 <f8".split()
SCALARS = {code: np.dtype(name) for code, name in enumerate(DTYPES) if name != "_"}
MAX_ENTRIES = 2**17  # of the metadata, and of the table of tensors
MAX_TEXTS = 2**22  # in arrays: the largest vocabularies have 2^18 tokens and 2^19 merges
MAX_TEXT_BYTES = 2**24
MAX_HEADER_BYTES = 2**28  # 8 MB with 128,000 tokens
MAX_DIMS = 4  # of a tensor, as in ggml


class Tensor(NamedTuple):
    """One tensor of a GGUF file: the code of its ggml type, its shape, outermost dim first, and its place in bytes from the file's start."""

    kind: int
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """The metadata of a GGUF file, its tensors by name, and the mapped file. Arrays are numpy arrays, or lists of strings."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    mapped: mmap.mmap


def is_gguf(path: str | os.PathLike) -> bool:
    """Returns True if the path ends in .gguf and is not a folder. It does not look into the file, which may be absent or damaged."""
    return str(path).lower().endswith(".gguf") and not os.path.isdir(path)


def read(path: str | os.PathLike) -> Header:
    """Reads a GGUF file's header; takes 0.1 s for 49,152 tokens. Raises ValueError if it is absent, malformed, or of another version."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a GGUF file") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file; give a GGUF file")
        if status.st_size < 24:
            raise ValueError(f"{path} is not a GGUF file: it has {status.st_size} bytes. Download it again.")
        mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(file)
    try:
        return _Parser(mapped).header()
    except _Malformed as error:
        raise ValueError(f"{path}: {error}. Download or convert it again.") from None


class _Malformed(Exception):
    """The header breaks a rule, which the text names."""


class _Parser:
    def __init__(self, mapped: mmap.mmap):
        self.mapped, self.at, self.texts = mapped, 0, 0

    def header(self) -> Header:
        if (magic := self.take(4)) != MAGIC:
            raise _Malformed(f"it begins with {magic!r}, and a GGUF file with {MAGIC!r}")
        if (version := self.integer("<I")) not in VERSIONS:
            order = " (of the other byte order)" if version & 0xFFFF == 0 else ""
            raise _Malformed(f"GGUF version {version}{order} is not one of {', '.join(map(str, VERSIONS))}")
        num_tensors, num_entries = self.integer("<Q"), self.integer("<Q")
        for name, count in (("tensors", num_tensors), ("metadata entries", num_entries)):
            if count > MAX_ENTRIES:
                raise _Malformed(f"{count} {name} are more than {MAX_ENTRIES}")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.text()
            if key in metadata:
                raise _Malformed(f"the metadata has {key!r} twice")
            metadata[key] = self.value(key, self.integer("<I"))
        tensors: dict[str, Tensor] = {}
        for _ in range(num_tensors):
            name = self.text()
            if name in tensors:
                raise _Malformed(f"tensor {name!r} is listed twice")
            tensors[name] = self.tensor(name)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20:
            raise _Malformed(f"general.alignment {alignment!r} is not a number of bytes up to {2**20}")
        start = -(-self.at // alignment) * alignment
        placed = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors.items()}
        return Header(metadata, placed, self.mapped)

    def tensor(self, name: str) -> Tensor:
        num_dims = self.integer("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise _Malformed(f"tensor {name!r} has {num_dims} dims, not 1 to {MAX_DIMS}")
        shape = tuple(self.integer("<Q") for _ in range(num_dims))[::-1]
        if min(shape) < 1 or math.prod(shape) > 2**50:
            raise _Malformed(f"tensor {name!r} has shape {list(shape)}")
        return Tensor(self.integer("<I"), shape, self.integer("<Q"))

    def value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            number = np.frombuffer(self.take(SCALARS[kind].itemsize), SCALARS[kind])[0]
            return float(str(number)) if SCALARS[kind].kind == "f" else number.item()  # 1e-05, not 9.99999974e-06
        if kind != ARRAY:
            raise _Malformed(f"{key!r} has a value of unknown type {kind}")
        kind, count = self.integer("<I"), self.integer("<Q")
        if kind in SCALARS:
            return np.frombuffer(self.take(count * SCALARS[kind].itemsize), SCALARS[kind])
        if kind != STRING:
            raise _Malformed(f"{key!r} is an array of type {kind}, neither numbers nor strings")
        self.texts += count
        if self.texts > MAX_TEXTS:
            raise _Malformed(f"{key!r} has {count} strings: more than {MAX_TEXTS} in all")
        return [self.text() for _ in range(count)]

    def text(self) -> str:
        size = self.integer("<Q")
        if size > MAX_TEXT_BYTES:
            raise _Malformed(f"a string of {size} bytes at {self.at} is longer than {MAX_TEXT_BYTES}")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise _Malformed(f"the string at byte {self.at - size} is not UTF-8") from None

    def integer(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def take(self, size: int) -> bytes:
        left = len(self.mapped) - self.at
        if size > left:
            raise _Malformed(f"its header needs {size} bytes at {self.at}, and the file has {left}: it is truncated")
        if self.at + size > MAX_HEADER_BYTES:
            raise _Malformed(f"its header is longer than {MAX_HEADER_BYTES} bytes")
        self.at += size
        return self.mapped[self.at - size : self.at]
