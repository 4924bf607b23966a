"""CRC-32C (RFC 3720, appendix B.4), which zarr's `crc32c` codec appends to a chunk, in numpy.

A checksum is the remainder of the message, read as a polynomial over GF(2), modulo a polynomial P of degree 32. P divides
x^6777 + x^484 + x^100 + 1, hence also each power 2^k of it, in which all exponents are 2^k times as large. So:

1. Byte j of the message may be moved to the bytes j + 6293 s, j + 6677 s and j + 6777 s (s = 1 or 8) by xor alone, since
   x^(8 s 6777) = x^(8 s 484) + x^(8 s 100) + 1. What comes earlier thus folds into the last 6777 bytes, 50 kB at a time.
2. What each nibble of those 6777 bytes adds to the remainder comes from a table.

This costs less than half of the SHA-256 of the same bytes. Left out: the package google-crc32c, faster still, which would be a
dependency for one function.
"""

import functools

import numpy as np

POLYNOMIAL = 0x82F63B78  # bit-reversed
EXPONENTS = (6777, 484, 100)  # found by search: the four-term multiple of P of degree < 9000 with the widest first gap
TAIL = EXPONENTS[0]
SEGMENT_BYTES = 256 << 10  # stays in the cache of a core with what it is folded into


def checksum(data: bytes | memoryview | np.ndarray) -> bytes:
    """The four bytes, little-endian, that zarr stores after `data` (any contiguous buffer)."""
    message = np.frombuffer(data, np.uint8)
    num_head = to_flip = min(4, len(message))  # a register that starts with ones: one whose first bytes are flipped
    tail = message[:0]
    for start in range(0, len(message), SEGMENT_BYTES):
        tail = np.concatenate([tail, message[start : start + SEGMENT_BYTES]])
        tail[:to_flip] ^= 0xFF
        to_flip = 0
        if len(tail) > TAIL * 8:
            tail = _fold(tail, 8)
    if len(tail) > TAIL:
        tail = _fold(tail, 1)
    low, high = _tables()
    positions = np.arange(TAIL - len(tail), TAIL)
    value = np.bitwise_xor.reduce(low[positions, tail & 15] ^ high[positions, tail >> 4], initial=0)
    # Of fewer than four bytes, the ones that were in the register have not all been flipped out of it.
    return int(value ^ (0xFFFFFFFF ^ (0xFFFFFFFF >> (8 * num_head)))).to_bytes(4, "little")


def _fold(message: np.ndarray, scale: int) -> np.ndarray:
    """The last TAIL * scale bytes, with everything before them folded in."""
    first, *others = (TAIL * scale, (TAIL - EXPONENTS[2]) * scale, (TAIL - EXPONENTS[1]) * scale)
    distances = (*others[::-1], first)  # ascending
    end, block = len(message) - TAIL * scale, distances[0]
    folded = np.empty(TAIL * scale + len(message), np.uint8)
    folded[: TAIL * scale] = 0  # before the first byte there is nothing to fold in
    out = folded[TAIL * scale :]

    def write(start: int, stop: int, sources: tuple[int, ...]) -> None:
        target, piece = out[start:stop], message[start:stop]
        for distance in sources:
            at = TAIL * scale + start - distance
            np.bitwise_xor(piece, folded[at : at + stop - start], out=target)
            piece = target

    for start in range(0, end, block):
        write(start, min(start + block, end), distances)
    # The tail takes from what was folded away only, not from itself.
    write(end, end + distances[0], distances)
    write(end + distances[0], end + distances[1], distances[1:])
    write(end + distances[1], len(message), distances[2:])
    return out[end:]


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """uint32 [TAIL, 16] each: what a low, or high, nibble at a position adds; the last position is the last byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    nibbles = np.arange(16)
    sums = np.concatenate([table[nibbles], table[nibbles << 4]])[None]  # [positions from the end, 32]
    step = [table ^ np.uint32(0)] + [np.arange(256, dtype=np.uint32) << np.uint32(8 * i - 8) for i in (1, 2, 3)]
    # `step` holds, for each byte of a register, the register after as many zero bytes as `sums` has positions.
    while len(sums) < TAIL:
        sums = np.concatenate([sums, _advance(step, sums)])
        step = [_advance(step, column) for column in step]
    ordered = sums[:TAIL][::-1]
    return np.ascontiguousarray(ordered[:, :16]), np.ascontiguousarray(ordered[:, 16:])


def _advance(step: list[np.ndarray], registers: np.ndarray) -> np.ndarray:
    out = step[0][registers & 255]
    for i in (1, 2, 3):
        out = out ^ step[i][(registers >> np.uint32(8 * i)) & 255]
    return out
