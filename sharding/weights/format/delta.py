"""The delta of one chunk, as a patch: the XOR of the bit patterns before and after, compressed. Bytes in, bytes out.

An Adam step of reinforcement learning (learning rate 1e-6) moves most bfloat16 weights by less than half of their last bit,
so that only 1 to 4 of 100 change (PULSE, arXiv 2602.03839). XOR is exact where a difference of floats is not, and has fewer
bits set than the new values: sign and exponent rarely change. A patch has the smaller of two forms:

* sparse: the gaps between changed elements, one byte each (255: skip 255 elements), and the XOR of each changed element;
* dense: the XOR of every element.

The XORs are split into byte planes (all low bytes, then the next). Each plane and the gaps are compressed separately (zstd
level 1), since their statistics differ. A stream that zstd does not shrink is stored uncompressed.

The bytes are untrusted: `apply` allocates at most a few times the chunk. The caller compares the digest of the result.
"""

import struct

import numpy as np
import pyarrow as pa

from sharding.weights.format import journal

SPARSE, DENSE = 1, 2
_require = journal.require
LEVEL = 1
SPARSE_BELOW = 0.45  # fraction of elements changed at which both forms are equally large
ESCAPE = 255
_HEAD = struct.Struct("<BB")  # form, bytes per element
_STREAM = struct.Struct("<QQ")  # bytes before and after compression; equal: not compressed


def encode(old: np.ndarray, new: np.ndarray, item_bytes: int) -> bytes | None:
    """Returns the compressed patch that turns the chunk `old` into the chunk `new`, or None if the chunks are equal.

    Both chunks are uint8 vectors of the same length, a multiple of `item_bytes`, the size of one array element.
    """
    if old.shape != new.shape or old.dtype != np.uint8 or new.dtype != np.uint8 or old.ndim != 1:
        raise ValueError(
            f"the chunks are {old.dtype}{old.shape} and {new.dtype}{new.shape}; pass two uint8 vectors of one size"
        )
    unit = _unit(item_bytes, len(new))
    xor = np.zeros(-(-len(new) // 8), np.uint64) if len(new) % 8 else np.empty(len(new) // 8, np.uint64)
    np.bitwise_xor(old, new, out=xor.view(np.uint8)[: len(new)])
    positions, values = _changed(xor, unit)
    if not len(positions):
        return None
    if len(positions) * unit < SPARSE_BELOW * len(new):
        form, streams = SPARSE, [_gaps(positions)]
    else:
        form, streams, values = DENSE, [], xor.view(np.uint8)[: len(new)]
    parts = [_HEAD.pack(form, unit)]
    for stream in streams + [np.ascontiguousarray(values[i::unit]) for i in range(unit)]:
        packed = pa.Codec("zstd", compression_level=LEVEL).compress(stream, asbytes=True)
        stored = packed if len(packed) < len(stream) else stream.tobytes()
        parts += [_STREAM.pack(len(stream), len(stored)), stored]
    return b"".join(parts)


def apply(chunk: np.ndarray, patch: bytes | memoryview, item_bytes: int) -> None:
    """Applies a patch of `encode` to `chunk`, a writable uint8 vector. Raises CorruptSource for a bad patch, with `chunk` unchanged."""
    unit = _unit(item_bytes, len(chunk))
    _require(len(patch) >= _HEAD.size, f"patch has {len(patch)} bytes: too short for its header of {_HEAD.size} bytes")
    form, stated = _HEAD.unpack_from(patch)
    good = form in (SPARSE, DENSE) and stated == unit
    _require(good, f"patch has form {form} with {stated} bytes per element, not form 1 or 2 with {unit}")
    num_items = len(chunk) // unit
    # Gaps: one byte per changed element, and one per 255 unchanged ones.
    sizes = [num_items + num_items // ESCAPE] if form == SPARSE else []
    streams = _read_streams(memoryview(patch)[_HEAD.size :], sizes + [num_items] * unit)
    planes = streams[-unit:]
    sizes = [len(plane) for plane in planes]
    _require(len(set(sizes)) == 1, f"patch has byte planes of {sizes} bytes: they must be equally long")
    values = np.empty((len(planes[0]), unit), np.uint8)
    for i, plane in enumerate(planes):
        values[:, i] = plane
    if form == DENSE:
        _require(len(values) == num_items, f"dense patch has {len(values)} elements for a chunk of {num_items}")
        np.bitwise_xor(chunk, values.reshape(-1), out=chunk)
        return
    positions = _positions(streams[0])
    same = len(positions) == len(values)
    _require(same, f"patch has {len(positions)} positions but {len(values)} values: the numbers must be equal")
    last = max(positions[-1:], default=-1)
    _require(last < num_items, f"patch changes element {last} of a chunk of {num_items}")
    chunk.view(f"u{unit}")[positions] ^= values.view(f"u{unit}")[:, 0]  # ascending, hence each position once


def _unit(item_bytes: int, num_bytes: int) -> int:
    """Returns the bytes of the units that a patch compares: `item_bytes`, at most 8. Raises ValueError for other sizes."""
    if item_bytes not in (1, 2, 4, 8, 16) or num_bytes % item_bytes:
        raise ValueError(f"item_bytes = {item_bytes} must be 1, 2, 4, 8 or 16 and divide the chunk's {num_bytes} bytes")
    return min(item_bytes, 8)


def _changed(xor: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ascending indices int64 [k], bytes uint8 [k * unit]) of the nonzero elements in `xor`, the XOR of two chunks."""
    where = np.flatnonzero(xor != 0)  # word by word first: skips 4 bfloat16 in one comparison
    words = xor[where]
    items = words.view(f"u{unit}")
    per_word = 8 // unit
    if per_word == 1:
        return where, words.view(np.uint8)
    inside = np.flatnonzero(items != 0)
    positions = where[inside // per_word] * per_word + inside % per_word
    return positions, items[inside].view(np.uint8)


def _gaps(positions: np.ndarray) -> np.ndarray:
    gaps = np.diff(positions, prepend=-1) - 1
    if gaps.max() < ESCAPE:  # 9 times as fast, at a fifth of the elements changed
        return gaps.astype(np.uint8)
    skips, rest = np.divmod(gaps, ESCAPE)
    ends = np.cumsum(skips + 1) - 1
    out = np.full(ends[-1] + 1, ESCAPE, np.uint8)
    out[ends] = rest
    return out


def _positions(gaps: np.ndarray) -> np.ndarray:
    is_item = gaps != ESCAPE
    return (np.cumsum(gaps.astype(np.int64) + is_item) - 1)[is_item]


def _read_streams(patch: memoryview, limits: list[int]) -> list[np.ndarray]:
    """Decompresses a patch into one uint8 vector per length limit in `limits`. Raises CorruptSource for malformed streams."""
    streams = []
    for limit in limits:
        left = len(patch) - _STREAM.size
        _require(left >= 0, f"patch ends within the header of a stream, {-left} bytes too early")
        size, num_stored = _STREAM.unpack_from(patch)
        rule = f"it may have {limit} bytes at most, must not be stored as more, and must end within the patch"
        good = num_stored <= size <= limit and num_stored <= left
        _require(good, f"patch has a stream of {size} bytes, stored as {num_stored}: {rule}")
        stored, patch = patch[_STREAM.size : _STREAM.size + num_stored], patch[_STREAM.size + num_stored :]
        if num_stored < size:
            try:
                stored = pa.decompress(stored, decompressed_size=size, codec="zstd")
            except (pa.ArrowException, OSError) as error:
                raise journal.CorruptSource(
                    f"a stream of the patch is not {size} bytes compressed by zstd: {error}"
                ) from error
        stream = np.frombuffer(stored, np.uint8)
        _require(len(stream) == size, f"a stream has {len(stream)} bytes, not the {size} that its header states")
        streams.append(stream)
    _require(not len(patch), f"patch has {len(patch)} bytes after its last stream; none are allowed")
    return streams
