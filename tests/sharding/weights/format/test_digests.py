"""sharding/weights/format/digests.py: the published vectors of BLAKE3, and every way to feed it."""

import pydantic
import pytest

from sharding.weights.format import digests

# The first 32 bytes of "hash" in test_vectors.json of the reference implementation; the input is 0, 1, .. 250, 0, 1, ..
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
}


@pytest.mark.parametrize(("size", "expected"), VECTORS.items())
def test_published_vectors(size, expected):
    data = bytes(i % 251 for i in range(size))
    assert digests.of(data) == expected
    assert digests.of(memoryview(data)[: size // 3], bytearray(data[size // 3 :])) == expected


@pytest.mark.parametrize("size", [0, 3, digests.SLICE_BYTES, digests.SLICE_BYTES + 1, 3 * digests.SLICE_BYTES + 7])
def test_of_a_file(tmp_path, size):
    data = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    assert digests.of_file(tmp_path / "file") == digests.of(data[:size])
    with pytest.raises(FileNotFoundError):
        digests.of_file(tmp_path / "none")


@pytest.mark.parametrize("value", [None, 7, "", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", b"0" * 64])
def test_what_is_no_digest(value):
    rule = pydantic.TypeAdapter(digests.Digest)
    rule.validate_python(VECTORS[1], strict=True)
    with pytest.raises(pydantic.ValidationError):
        rule.validate_python(value, strict=True)
