"""Patches give back every bit, are as small as promised, and a hostile one is an error or a wrong chunk, never a crash."""

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from sharding.weights.format import delta, journal


def changed(old: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """A copy with a share of its bytes changed at random."""
    rng = np.random.default_rng(seed)
    flips = np.where(rng.random(old.shape) < share, rng.integers(1, 256, old.shape), 0)
    return old ^ flips.astype(np.uint8)


def slow_apply(chunk: bytes, patch: bytes) -> bytes:
    """Applies a patch by the module's docstring, byte by byte."""
    form, unit = patch[0], patch[1]
    rest, streams = patch[2:], []
    while rest:
        size, stored = (int.from_bytes(rest[i : i + 8], "little") for i in (0, 8))
        body, rest = rest[16 : 16 + stored], rest[16 + stored :]
        streams.append(
            body if stored == size else pa.decompress(body, decompressed_size=size, codec="zstd", asbytes=True)
        )
    out = bytearray(chunk)
    gaps = streams.pop(0) if form == delta.SPARSE else bytes(len(streams[0]))
    position = item = 0
    for gap in gaps:
        position += gap
        if gap == 255:
            continue
        for i in range(unit):
            out[position * unit + i] ^= streams[i][item]
        position, item = position + 1, item + 1
    return bytes(out)


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("share", [1e-4, 0.01, 0.2, 0.9])
@pytest.mark.parametrize("num_items", [1, 3, 1001])
def test_a_patch_gives_back_every_bit(item_bytes, share, num_items):
    old = np.random.default_rng(1).integers(0, 256, num_items * item_bytes, dtype=np.uint8)
    new = changed(old, share)
    new[0] ^= 1  # the first and the last element are the ones that an offset would lose
    new[-1] ^= 128
    patch = delta.encode(old, new, item_bytes)
    chunk = old.copy()
    delta.apply(chunk, patch, item_bytes)
    assert chunk.tobytes() == new.tobytes() == slow_apply(old.tobytes(), patch)


@pytest.mark.parametrize("positions", [[0], [999_999], [254, 510, 766], [255, 511], [256], [0, 1, 2], [5, 500_000], []])
def test_gaps_of_every_length(positions):
    old = np.zeros(1_000_000, np.uint8)
    new = old.copy()
    new[positions] = 7
    patch = delta.encode(old, new, 1)
    if not positions:
        assert patch is None
        return
    assert len(patch) < 200 and slow_apply(old.tobytes(), patch) == new.tobytes()
    delta.apply(old, patch, 1)
    np.testing.assert_array_equal(old, new)


def test_empty_chunk():
    assert delta.encode(np.zeros(0, np.uint8), np.zeros(0, np.uint8), 4) is None


def adam_step(num: int, lr: float, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Weights N(0, 0.02) before and after one step of Adam in float32 with moments of their own, cast to `dtype`."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, num).astype(np.float32)
    mean, square = np.zeros(num), np.zeros(num)
    for _ in range(10):  # past the first steps, where every element moves by the full learning rate
        gradient = rng.normal(0, 1, num)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
    update = lr * (mean / (1 - 0.9**10)) / (np.sqrt(square / (1 - 0.999**10)) + 1e-8)
    before, after = weights.astype(dtype), (weights - update.astype(np.float32)).astype(dtype)
    return before.view(np.uint8), after.view(np.uint8)


def test_the_form_is_the_smaller_one(monkeypatch):
    """Far from the threshold the chosen form must win; near it they are alike."""
    for lr, form in ((1e-6, delta.SPARSE), (1e-5, delta.SPARSE), (1e-3, delta.DENSE)):
        old, new = adam_step(1 << 18, lr, ml_dtypes.bfloat16)
        sizes = {}
        for which, threshold in ((delta.SPARSE, 2.0), (delta.DENSE, 0.0)):
            monkeypatch.setattr(delta, "SPARSE_BELOW", threshold)
            sizes[which] = len(delta.encode(old, new, 2))
        monkeypatch.undo()
        assert min(sizes, key=sizes.get) == form == delta.encode(old, new, 2)[0], (lr, sizes)


def test_random_bits_cost_little_more_than_themselves():
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 256, 1 << 16, dtype=np.uint8) for _ in range(2))
    assert len(delta.encode(old, new, 4)) <= len(new) + 100


PATCH = delta.encode(np.zeros(2000, np.uint8), changed(np.zeros(2000, np.uint8), 0.1), 2)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (b"", "too short"),
        (b"\x03\x02" + PATCH[2:], "form 3"),
        (b"\x01\x04" + PATCH[2:], "4 bytes per element"),
        (PATCH[:10], "ends within"),
        (PATCH[:-1], "is a stream|bytes at most"),
        (PATCH + b"\0", "after its last stream"),
        (b"\x01\x02" + (1 << 40).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"\0", "bytes at most"),
        (delta.encode(np.zeros(4000, np.uint8), np.ones(4000, np.uint8), 2), "dense patch|bytes at most"),
        (delta.encode(np.zeros(4000, np.uint8), np.eye(1, 4000, 3998, np.uint8)[0], 2), "changes element 1999"),
    ],
)
def test_a_bad_patch_is_refused_and_changes_nothing(patch, message):
    chunk = np.zeros(2000, np.uint8)
    with pytest.raises(journal.CorruptSource, match=message):
        delta.apply(chunk, patch, 2)
    assert not chunk.any()


def test_mutated_patches_never_do_more_than_harm_the_chunk():
    rng = np.random.default_rng(0)
    for _ in range(500):
        patch = bytearray(PATCH)
        for _ in range(rng.integers(1, 4)):
            patch[rng.integers(len(patch))] = rng.integers(256)
        chunk = np.zeros(2000, np.uint8)
        try:
            delta.apply(chunk, bytes(patch[: rng.integers(len(patch)) if rng.random() < 0.2 else None]), 2)
        except journal.CorruptSource:
            assert not chunk.any()


@pytest.mark.parametrize(
    ("old", "new", "item_bytes"),
    [
        (np.zeros(4, np.uint8), np.zeros(5, np.uint8), 1),
        (np.zeros(4, np.uint16), np.zeros(4, np.uint16), 2),
        (np.zeros(5, np.uint8), np.zeros(5, np.uint8), 2),
        (np.zeros(6, np.uint8), np.zeros(6, np.uint8), 3),
    ],
)
def test_what_is_no_chunk_is_refused(old, new, item_bytes):
    with pytest.raises(ValueError, match="chunk"):
        delta.encode(old, new, item_bytes)
