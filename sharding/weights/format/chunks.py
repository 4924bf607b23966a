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
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from sharding.weights.format import digests, manifest

CHUNK_BYTES = 4 << 20  # large enough for 1 GB/s, small enough to fetch again, or to read for one shard
LARGEST_CHUNK_BYTES = 32 << 20
CHUNKS_PER_ARRAY = 256  # with more than this, chunks grow: 62 GB of weights have fewer than 10,000 objects

Region = tuple[slice, ...]


def dtype(name: str) -> np.dtype:
    """Returns the numpy dtype called `name`, such as "float32" or, from ml_dtypes, "bfloat16". Raises TypeError otherwise."""
    return np.dtype(getattr(ml_dtypes, name, name))


def check_array(name: str, leaf: Any) -> None:
    """Raises ValueError unless `leaf`, called `name` in the parameter tree, is an array of a dtype that can be published."""
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
        raise ValueError(f"leaf {name!r} is a {type(leaf).__name__}, not an array; convert it, or remove it")
    if leaf.dtype.name not in manifest.ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has dtype {leaf.dtype}; cast it to one of {[*manifest.ITEM_BYTES]}")


def is_finite(array: np.ndarray) -> bool:
    """Returns True if no element is NaN or infinite. Compares bits as integers, since numpy has no fast test of bfloat16."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    infinity = np.array(np.inf, array.dtype).view(bits.dtype)
    magnitude, step = np.invert(bits.dtype.type(0)) >> 1, 1 << 20
    return all(np.max(bits[i : i + step] & magnitude) < infinity for i in range(0, bits.size, step))


def shard_shape(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of the part of a jax array that one device stores, or the whole shape of a numpy array."""
    return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else np.shape(leaf)


def chunk_shape(shape: tuple[int, ...], shard: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Returns the shape of the chunks that an array is stored in: the same on every host.

    `shape` is the shape of the array, and `shard` that of one device's part. Leading dims are split until a chunk has
    about CHUNK_BYTES. A sharded dim is split by a divisor of the shard. Any other dim is split by a divisor if one is near
    the wanted size. A prime dim (151,669 tokens) has none: its chunks then waste less than one row each.
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
    """Returns True if chunks of shape `chunk` never cross a border between two shards of the array `leaf`."""
    return all(s == n or s % c == 0 for c, s, n in zip(chunk, shard_shape(leaf), leaf.shape, strict=True))


def owned_shards(leaf: Any, kind: np.dtype) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yields (start, values) of each shard of the array `leaf` that this process must publish, cast to dtype `kind`.

    `start` is the index of the shard's first element in the whole array. The cast runs on the device. The copy to the host is
    started but not awaited. If every process has the whole array, only the first process yields.
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
    """Returns `array` as a little-endian numpy array in C order, without a copy if possible. A scalar keeps rank 0."""
    array = np.asarray(array, order="C")
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def padded_bytes(array: np.ndarray, region: Region, chunk: tuple[int, ...]) -> np.ndarray:
    """Returns the bytes of `array[region]`, padded with zeros to the shape `chunk`, as a uint8 vector; a view if possible."""
    part = array[(*region, ...)]
    if part.shape != chunk:
        padded = np.zeros(chunk, array.dtype)
        padded[tuple(slice(0, n) for n in part.shape)] = part
        part = padded
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def copy_into(
    target: np.ndarray, origin: tuple[int, ...], values: np.ndarray, tensor: manifest.Tensor, region: Region
) -> None:
    """Copies the overlap of a chunk and a part of `tensor` into the part.

    `values` are the bytes of the chunk at `region`; `target` is the part of the tensor that begins at index `origin`.
    """
    chunk = values.view(target.dtype).reshape(tensor.chunk)
    into, out_of = [], []
    for s, o, n in zip(region, origin, target.shape, strict=True):
        start, stop = max(s.start, o), min(s.stop, o + n)
        into.append(slice(start - o, stop - o))
        out_of.append(slice(start - s.start, stop - s.start))
    target[(*into, ...)] = chunk[(*out_of, ...)]


def view_in(target: np.ndarray, origin: tuple[int, ...], tensor: manifest.Tensor, region: Region) -> np.ndarray | None:
    """Returns a writable uint8 view of the chunk that contains `region` of `tensor`, inside the array `target`.

    `origin` is the index in the tensor of the first element of `target`. Returns None if `target` does not contain the
    whole chunk, or not as contiguous memory.
    """
    inner = [slice(s.start - o, s.stop - o) for s, o in zip(region, origin, strict=True)]
    dims = zip(inner, target.shape, tensor.chunk, strict=True)
    whole = all(0 <= s.start and s.stop <= n and s.stop - s.start == c for s, n, c in dims)
    part = target[(*inner, ...)] if whole else None
    return part.reshape(-1).view(np.uint8) if part is not None and part.flags.c_contiguous else None


def host_chunk(leaf: Any, tensor: manifest.Tensor, region: Region) -> np.ndarray | None:
    """Returns the bytes of the chunk at `region` of `tensor`, whose values are `leaf`; None if this process lacks them."""
    part = _host_region(leaf, region)
    if part is None or part.dtype.name != tensor.dtype:
        return None
    return padded_bytes(to_host(part), tuple(slice(0, n) for n in part.shape), tensor.chunk)


def encoded_digest(values: np.ndarray) -> tuple[bytes, str]:
    """Returns (CRC-32C of a chunk's bytes, hex digest of the bytes followed by the CRC): the form in which zarr3 stores a chunk."""
    value, hasher = 0, digests.Hasher()
    for start in range(0, len(values), digests.SLICE_BYTES):
        part = values[start : start + digests.SLICE_BYTES]
        value = google_crc32c.extend(value, part)
        hasher.update(part.data)
    checksum = value.to_bytes(manifest.CRC_BYTES, "little")
    hasher.update(checksum)
    return checksum, hasher.hexdigest()


def _host_region(leaf: Any, region: Region) -> np.ndarray | None:
    """Returns `leaf[region]` as a numpy array, or None if this process does not have the whole region (on one device)."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[(*region, ...)]
    for shard in leaf.addressable_shards:
        starts = [s.start or 0 for s in shard.index]
        within = zip(region, starts, shard.data.shape, strict=True)
        if all(a <= r.start and r.stop <= a + n for r, a, n in within):
            inner = tuple(slice(r.start - a, r.stop - a) for r, a in zip(region, starts, strict=True))
            return np.asarray(shard.data)[(*inner, ...)]
    return np.asarray(leaf)[(*region, ...)] if leaf.is_fully_addressable else None


def _divisors(n: int, largest: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in {*small, *(n // d for d in small)} if d <= largest]
