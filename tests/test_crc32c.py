"""The checksum against its definition, bit by bit, and against the examples of the standard."""

import numpy as np
import pytest

from sharding import crc32c


def bitwise(data: bytes) -> bytes:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (crc32c.POLYNOMIAL if register & 1 else 0)
    return (register ^ 0xFFFFFFFF).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_examples_of_rfc_3720(data, value):
    assert crc32c.checksum(data) == value.to_bytes(4, "little")


T = crc32c.TAIL


@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 4, 5, 8, 1000, T - 1, T, T + 1, T + 3, 2 * T - 400, 2 * T, 8 * T, 8 * T + 1, 90_001]
)
def test_lengths_around_every_seam(n):
    data = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
    before = data.copy()
    assert crc32c.checksum(data) == bitwise(data.tobytes())
    np.testing.assert_array_equal(data, before)


def test_the_exponents_are_a_multiple_of_the_polynomial():
    def power(exponent: int) -> int:
        register = 1 << 31  # x^0, reflected
        for _ in range(exponent):
            register = (register >> 1) ^ (crc32c.POLYNOMIAL if register & 1 else 0)
        return register

    assert power(crc32c.EXPONENTS[0]) ^ power(crc32c.EXPONENTS[1]) ^ power(crc32c.EXPONENTS[2]) ^ power(0) == 0
