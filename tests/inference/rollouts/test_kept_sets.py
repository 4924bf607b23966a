"""The encoding of kept sets: written sets are read again, and no bytes of a stranger are read as anything else."""

import dataclasses
import re

import numpy as np
import pytest

from inference.rollouts import kept_sets, parquet
from inference.rollouts import rollout as rollout_lib
from tests.support import tiny


def draw(rng, num_tokens, width):
    """Returns random sets [N, W] in any order, -1 where they have fewer IDs."""
    ids = np.array([rng.permutation(300)[:width] for _ in range(num_tokens)]).reshape(num_tokens, width)
    return np.where(np.arange(width)[None] < rng.integers(1, width + 1, (num_tokens, 1)), ids, -1)


def test_sets_of_several_calls_are_read_as_written():
    rng = np.random.default_rng(0)
    calls = [draw(rng, n, 7) for n in (1, 5, 12)]
    data = b"".join(map(kept_sets.encode, calls))
    got = kept_sets.decode(data, [1, 5, 12], 9)
    assert got.shape == (18, 9) and got.dtype == np.int32
    for row, ids in zip(got, np.concatenate(calls), strict=True):
        assert row[row >= 0].tolist() == sorted(ids[ids >= 0].tolist())
        assert (np.diff((row >= 0).astype(int)) <= 0).all()  # -1 after all IDs
    mask = np.array([False] + [True] * 12 + [False] + [True] * 5)
    both = tiny.rollout(
        mask, calls=np.int32([[1, 13], [14, 19]]), kept=b"".join(map(kept_sets.encode, (calls[2], calls[1])))
    )
    assert rollout_lib.kept_by_call(both) == [kept_sets.encode(calls[2]), kept_sets.encode(calls[1])]
    assert rollout_lib.kept_by_call(dataclasses.replace(both, kept=b"")) == [b"", b""]


def words(*values):
    return np.array(values, "<u4").tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (words(1, 1, 5), "ascending"),  # one ID is missing
        (words(1, 1, 5, 6, 7), "more than the sets"),
        (words(1, 0, 5), "1 to 4 IDs"),
        (words(1, 5, 1, 2, 3, 4, 5, 6), "1 to 4 IDs"),
        (words(2, 1, 6, 6, 7), "ascending"),  # one ID twice
        (words(2, 1, 7, 6, 7), "ascending"),
        (words(1, 1, 2**31, 7), "below 2^31"),
        (words(1, 2**32 - 1, 1), "1 to 4 IDs"),
        (words(1), "1 to 4 IDs"),
        (words(1, 1, 5, 6)[:-1], "not whole IDs"),
        (b"", "1 to 4 IDs"),
    ],
)
def test_other_bytes_are_refused(data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kept_sets.read(data, [2], 4)
    if data:
        mask = np.array([False, True, True])
        assert rollout_lib.validate(tiny.rollout(mask, kept=data + words(0) * 3)).startswith("kept: ")


def test_random_bytes_raise_nothing_else():
    rng = np.random.default_rng(1)
    good = kept_sets.encode(draw(rng, 6, 5))
    for _ in range(300):
        data = bytearray(good)
        data[rng.integers(len(data))] = rng.integers(256)
        data = bytes(data[: rng.integers(len(data) + 1)] if rng.random() < 0.3 else data)
        try:
            counts, ids = kept_sets.read(data, [6], 5)
        except ValueError:
            continue
        assert len(counts) == 6 and counts.sum() == len(ids) and len(data) == 4 * (6 + len(ids))


def test_a_file_carries_them(tmp_path):
    mask = np.array([False, True, True])
    with_sets, without = tiny.rollout(mask, kept=words(1, 2, 0, 0, 3)), tiny.rollout(mask)
    parquet.write(tmp_path / "new.parquet", [with_sets, without])
    read = parquet.read(tmp_path / "new.parquet")
    assert [one.kept for one in read] == [words(1, 2, 0, 0, 3), b""]
    assert [*map(rollout_lib.digest, read)] == [*map(rollout_lib.digest, (with_sets, without))]
    assert rollout_lib.digest(with_sets) != rollout_lib.digest(without)  # the signature covers them


def test_the_width_is_that_of_the_smallest_filter():
    off = dict(kept_sets.OFF)
    assert kept_sets.width(off, 272) == 0
    assert kept_sets.width(off | {"top_p": 0.9}, 272) == 272 == kept_sets.width(off | {"min_p": 0.1}, 272)
    assert kept_sets.width(off | {"top_p": 0.9, "top_k": 20}, 272) == 20
    assert kept_sets.width(off | {"top_k": 500}, 272) == 272
