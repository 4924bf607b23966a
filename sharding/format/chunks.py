"""Cuts arrays into chunks: the chunk shape, the shards that this process writes, and the bytes of one chunk.

Chunks divide the dims where possible, since zarr stores edge chunks whole. They also divide the shards of a sharded array, so
that each chunk is on one host: every host writes its own chunks from its devices, and no chunk is written twice. Of several
replicas, the first is written. Chunks of very large arrays grow, up to 32 MB.
"""

import math
from collections.abc import Iterator
from typing import Any

import google_crc32c
import jax
import ml_dtypes
import numpy as np

from sharding.format import digests, manifest

CHUNK_BYTES = 4 << 20  # large enough for 1 GB/s, small enough to fetch again, or to read for one shard
LARGEST_CHUNK_BYTES = 32 << 20
CHUNKS_PER_ARRAY = 256  # with more than this, chunks grow: 62 GB of weights have fewer than 10,000 objects

Region = tuple[slice, ...]


def dtype(name: str) -> np.dtype:
    """Returns the numpy dtype of a name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def check_array(name: str, leaf: Any) -> None:
    """Raises ValueError for a leaf that cannot be published."""
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
        raise ValueError(
            f"leaf {name!r} is a {type(leaf).__name__}: params may contain dicts, lists, tuples and arrays only"
        )
    if leaf.dtype.name not in manifest.ITEM_BYTES:
        raise ValueError(
            f"tensor {name!r} has dtype {leaf.dtype}, which cannot be published: cast it to one of {[*manifest.ITEM_BYTES]}"
        )


def shard_shape(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of one shard of a jax array, or the whole shape of any other array."""
    return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else np.shape(leaf)


def chunk_shape(shape: tuple[int, ...], shard: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Returns the chunk shape for an array: the same on every host.

    Splits leading dims until a chunk has about CHUNK_BYTES, by a divisor of the dim where a fair one exists. A prime dim
    (151,669 tokens) has none; its chunks are equal up to one row, which wastes less than a row per chunk. A sharded dim
    must be split by a divisor of the shard, so the nearest is taken.
    """
    target = max(CHUNK_BYTES, min(math.prod(shape) * item_bytes // CHUNKS_PER_ARRAY, LARGEST_CHUNK_BYTES))
    chunk = [max(1, n) for n in shard]
    for i, n in enumerate(chunk):
        if math.prod(chunk) * item_bytes <= target:
            break
        row_bytes = math.prod(chunk[i + 1 :]) * item_bytes
        rows = max(1, target // row_bytes)
        if shard[i] == shape[i]:
            balanced = -(-n // -(-n // rows))
            chunk[i] = next((d for d in range(rows, rows // 4, -1) if n % d == 0), balanced)
        else:
            largest = 4 * rows if row_bytes * 4 * rows <= manifest.MAX_CHUNK_BYTES else rows
            chunk[i] = min(_divisors(n, largest), key=lambda d: abs(math.log(d / rows)))
    return tuple(chunk)


def fits(chunk: tuple[int, ...], leaf: Any) -> bool:
    """Returns True if every chunk of this shape is within one shard of `leaf`."""
    return all(s == n or s % c == 0 for c, s, n in zip(chunk, shard_shape(leaf), leaf.shape, strict=True))


def owned_shards(leaf: Any, kind: np.dtype) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yields (start, values) of the shards of a leaf that this process writes, cast to `kind`, without waiting for them.

    The cast runs on the device, and the copy to the host is started. The first process writes an array that every process has.
    """
    if not isinstance(leaf, jax.Array) or (leaf.is_fully_addressable and jax.process_index() != 0):
        if jax.process_index() == 0:
            yield (0,) * np.ndim(leaf), np.asarray(leaf).astype(kind, copy=False)
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            values = shard.data if shard.data.dtype == kind else shard.data.astype(kind)
            values.copy_to_host_async()
            yield tuple(s.start or 0 for s in shard.index), values
            del values


def to_host(array: Any) -> np.ndarray:
    """Returns a numpy array in C order and little-endian, without a copy if possible. A scalar keeps rank 0."""
    array = np.asarray(array, order="C")
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def padded_bytes(array: np.ndarray, region: Region, chunk: tuple[int, ...]) -> np.ndarray:
    """Returns `array[region]`, padded with zeros to the chunk shape, as a uint8 vector; a view if possible."""
    part = array[(*region, ...)]
    if part.shape != chunk:
        padded = np.zeros(chunk, array.dtype)
        padded[tuple(slice(0, n) for n in part.shape)] = part
        part = padded
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def copy_into(
    target: np.ndarray, origin: tuple[int, ...], values: np.ndarray, tensor: manifest.Tensor, region: Region
) -> None:
    """Copies the bytes of a chunk to `target`, an array that starts at `origin`, as far as the two overlap."""
    chunk = values.view(target.dtype).reshape(tensor.chunk)
    into, out_of = [], []
    for s, o, n in zip(region, origin, target.shape, strict=True):
        start, stop = max(s.start, o), min(s.stop, o + n)
        into.append(slice(start - o, stop - o))
        out_of.append(slice(start - s.start, stop - s.start))
    target[(*into, ...)] = chunk[(*out_of, ...)]


def view_in(target: np.ndarray, origin: tuple[int, ...], tensor: manifest.Tensor, region: Region) -> np.ndarray | None:
    """Returns the bytes of `target` that are exactly this chunk, if contiguous, so that it can be built in place.

    `target` starts at `origin`. Returns None for a chunk that is not whole in it, or not contiguous.
    """
    inner = [slice(s.start - o, s.stop - o) for s, o in zip(region, origin, strict=True)]
    whole = all(
        0 <= s.start and s.stop <= n and s.stop - s.start == c
        for s, n, c in zip(inner, target.shape, tensor.chunk, strict=True)
    )
    part = target[(*inner, ...)] if whole else None
    return part.reshape(-1).view(np.uint8) if part is not None and part.flags.c_contiguous else None


def host_region(leaf: Any, region: Region) -> np.ndarray | None:
    """Returns `leaf[region]` on the host, or None if no device of this process has it."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[(*region, ...)]
    for shard in leaf.addressable_shards:
        starts = [s.start or 0 for s in shard.index]
        within = zip(region, starts, shard.data.shape, strict=True)
        if all(a <= r.start and r.stop <= a + n for r, a, n in within):
            inner = tuple(slice(r.start - a, r.stop - a) for r, a in zip(region, starts, strict=True))
            return np.asarray(shard.data)[(*inner, ...)]
    return np.asarray(leaf)[(*region, ...)] if leaf.is_fully_addressable else None


def encoded_digest(values: np.ndarray) -> tuple[bytes, str]:
    """Returns (CRC, digest of bytes and CRC) of a chunk's bytes, as zarr3 stores it, without a copy."""
    value, hasher = 0, digests.Hasher()
    for start in range(0, len(values), digests.SLICE_BYTES):
        part = values[start : start + digests.SLICE_BYTES]
        value = google_crc32c.extend(value, part)
        hasher.update(part.data)
    checksum = value.to_bytes(manifest.CRC_BYTES, "little")
    hasher.update(checksum)
    return checksum, hasher.hexdigest()


def _divisors(n: int, largest: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in {*small, *(n // d for d in small)} if d <= largest]
