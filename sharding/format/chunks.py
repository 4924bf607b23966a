"""How arrays are cut: the chunk grid, what of an array this process owns, and the bytes of one chunk.

Chunks divide the dims where they can, since zarr stores edge chunks whole. They also divide the shards of a sharded array, so that
each chunk lies on one host: every host writes its own chunks, straight from its devices, and no chunk is written twice.
Replicas are written by the first. Left out: zarr's sharded codec, whose point is fewer files for very large arrays; here
chunks grow with the array instead, up to 32 MB, which costs no second pass of hashing.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import google_crc32c
import jax
import ml_dtypes
import numpy as np

from sharding.format import digests, manifest

CHUNK_BYTES = (
    4 << 20
)  # whole-chunk reads: large enough for 1 GB/s, small enough to fetch again or to read for one shard
LARGEST_CHUNK_BYTES = 32 << 20
CHUNKS_PER_ARRAY = 256  # beyond this many, chunks grow: 62 GB of weights stay below 10 000 objects

Region = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array that this process writes: where it starts, its shape, and its values on the host."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    prefetch: Callable[[], None]  # starts the copy to the host
    fetch: Callable[[], np.ndarray]


def dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def grid(leaf: Any, kind: np.dtype) -> tuple[int, ...]:
    """The chunk shape for an array of dtype `kind`, the same on every host."""
    return chunk_shape(leaf.shape, shard_shape(leaf), kind.itemsize)


def shard_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else np.shape(leaf)


def chunk_shape(shape: tuple[int, ...], shard: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Splits leading dims until a chunk has about CHUNK_BYTES, by a divisor of the dim where a fair one exists.

    A prime dim (151669 tokens) has no fair divisor; there the chunks are equal up to one row, which wastes less than a
    row per chunk. Where a dim is sharded, only a divisor of the shard will do, and the nearest is taken.
    """
    target = min(
        max(CHUNK_BYTES, math.prod(shape) * item_bytes // CHUNKS_PER_ARRAY), max(LARGEST_CHUNK_BYTES, CHUNK_BYTES)
    )
    chunk = [max(1, n) for n in shard]
    for i, n in enumerate(chunk):
        if math.prod(chunk) * item_bytes <= target:
            break
        rows = max(1, target // (math.prod(chunk[i + 1 :]) * item_bytes))
        if shard[i] == shape[i]:
            balanced = -(-n // -(-n // rows))
            chunk[i] = next((d for d in range(rows, rows // 4, -1) if n % d == 0), balanced)
        else:
            largest = (
                4 * rows if math.prod(chunk[i + 1 :]) * item_bytes * 4 * rows <= manifest.MAX_CHUNK_BYTES else rows
            )
            chunk[i] = min(_divisors(n, largest), key=lambda d: abs(math.log(d / rows)))
    return tuple(chunk)


def fits(chunk: tuple[int, ...], leaf: Any) -> bool:
    """Whether every chunk of this grid lies within one shard."""
    return all(s == n or s % c == 0 for c, s, n in zip(chunk, shard_shape(leaf), leaf.shape, strict=True))


def pieces(leaf: Any, kind: np.dtype) -> Iterator[Piece]:
    """What this process writes of a leaf, cast to `kind` on the device."""
    if not isinstance(leaf, jax.Array):
        if jax.process_index() == 0:
            yield Piece(
                (0,) * np.ndim(leaf),
                np.shape(leaf),
                lambda: None,
                lambda: host(np.asarray(leaf).astype(kind, copy=False)),
            )
        return
    if leaf.is_fully_addressable and jax.process_index() != 0:
        return  # every process has it: the first writes it
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            start = tuple(s.start or 0 for s in shard.index)
            yield _Lazy(shard.data, kind).piece(start)


def host(array: Any) -> np.ndarray:
    """C order, little-endian; 0-d stays 0-d."""
    array = np.asarray(array, order="C")
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def raw(array: np.ndarray, region: Region, chunk: tuple[int, ...]) -> np.ndarray:
    """uint8 [bytes of a chunk]: `array[region]`, filled up with zeros to the shape of the chunk; a view if possible."""
    part = array[(*region, ...)]
    if part.shape != chunk:
        padded = np.zeros(chunk, array.dtype)
        padded[tuple(slice(0, n) for n in part.shape)] = part
        part = padded
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def paste(
    target: np.ndarray, origin: tuple[int, ...], values: np.ndarray, tensor: manifest.Tensor, region: Region
) -> None:
    """Writes the part of a chunk's bytes that lies in `target`, an array whose first element is at `origin`."""
    cell = values.view(target.dtype).reshape(tensor.chunk)
    into, out_of = [], []
    for s, o, n in zip(region, origin, target.shape, strict=True):
        start, stop = max(s.start, o), min(s.stop, o + n)
        into.append(slice(start - o, stop - o))
        out_of.append(slice(start - s.start, stop - s.start))
    target[(*into, ...)] = cell[(*out_of, ...)]


def slot(target: np.ndarray, origin: tuple[int, ...], tensor: manifest.Tensor, region: Region) -> np.ndarray | None:
    """The bytes of `target` that are exactly this chunk, if they lie there in one stretch: it can be built in place."""
    inner = [slice(s.start - o, s.stop - o) for s, o in zip(region, origin, strict=True)]
    whole = all(
        0 <= s.start and s.stop <= n and s.stop - s.start == c
        for s, n, c in zip(inner, target.shape, tensor.chunk, strict=True)
    )
    part = target[(*inner, ...)] if whole else None
    return part.reshape(-1).view(np.uint8) if part is not None and part.flags.c_contiguous else None


def host_region(leaf: Any, region: Region) -> np.ndarray | None:
    """`leaf[region]` on the host; None if this process does not hold it."""
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
    """(CRC, digest of bytes and CRC): what zarr3 stores for a chunk, and what proves it, without a copy."""
    value, hasher = 0, digests.Hasher()
    for start in range(0, len(values), digests.SLICE_BYTES):
        part = values[start : start + digests.SLICE_BYTES]
        value = google_crc32c.extend(value, part)
        hasher.update(part)
    checksum = value.to_bytes(manifest.CRC_BYTES, "little")
    hasher.update(checksum)
    return checksum, hasher.hexdigest()


class _Lazy:
    """A shard on its way to the host. The cast runs on the device: half the bytes to copy."""

    def __init__(self, data: jax.Array, kind: np.dtype):
        self._data, self._kind, self._cast = data, kind, None

    def piece(self, start: tuple[int, ...]) -> Piece:
        return Piece(start, self._data.shape, self._prefetch, self._fetch)

    def _prefetch(self) -> None:
        if self._cast is None:
            self._cast = self._data if self._data.dtype == self._kind else self._data.astype(self._kind)
            self._cast.copy_to_host_async()

    def _fetch(self) -> np.ndarray:
        self._prefetch()
        array, self._cast = host(self._cast), None
        return array


def _divisors(n: int, largest: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in {*small, *(n // d for d in small)} if d <= largest]
