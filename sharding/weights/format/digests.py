"""The digest of the broadcast: BLAKE3 with 256 bits, written as 64 lowercase hex digits. The only place that names the hash.

SHARDCAST uses the same hash. One core hashes several times as many bytes per second as with SHA-256 (docs/performance.md),
and every byte of a broadcast is hashed by its publisher, each relay, and each client. Imports no jax: relays run without it.
"""

import hashlib
import os
from typing import Annotated

import blake3
import pydantic

from sharding.system import text as text_lib

SLICE_BYTES = 256 << 10  # the step of a loop that reads, copies or sums the bytes that it hashes: they stay in cache

Digest = Annotated[str, pydantic.Field(pattern=text_lib.HEX_64)]  # the rule for a field of parsed JSON
Hasher = blake3.blake3  # update(bytes-like) -> None, hexdigest() -> str; releases the GIL


def of(*parts: bytes | bytearray | memoryview) -> str:
    """Returns the BLAKE3 digest (64 hex digits) of the concatenated `parts`."""
    hasher = Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def of_file(path: str | os.PathLike) -> str:
    """Returns the BLAKE3 digest (64 hex digits) of a file's bytes. Raises OSError if the file cannot be read."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, Hasher).hexdigest()  # pyright: ignore[reportArgumentType]  # its names differ
