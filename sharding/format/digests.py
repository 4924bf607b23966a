"""What proves bytes in the broadcast: BLAKE3 with 256 bits, written as 64 lower-case hex digits. It is stated here and nowhere else.

SHARDCAST's hash, too. A core hashes several times as many bytes per second with it as with SHA-256 (docs/performance.md), and every
byte of a broadcast is hashed by its publisher, each relay and each client. Imports no jax: relays run without.
"""

import os
import re
from typing import Any

import blake3

HEX_DIGITS = 64
SLICE_BYTES = (
    256 << 10
)  # what is hashed at a time by whoever reads, copies or sums the same bytes: it stays in the cache
_PATTERN = re.compile(f"[0-9a-f]{{{HEX_DIGITS}}}")

Hasher = blake3.blake3  # update(bytes-like) -> None, hexdigest() -> str; lets other threads run meanwhile


def of(*parts: bytes | bytearray | memoryview) -> str:
    """The digest of `parts`, one after the other."""
    hasher = Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def of_file(path: str | os.PathLike) -> str:
    """The digest of a file's bytes; OSError where it cannot be read."""
    hasher, buffer = Hasher(), memoryview(bytearray(SLICE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            hasher.update(buffer[:size])
    return hasher.hexdigest()


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and _PATTERN.fullmatch(value) is not None
