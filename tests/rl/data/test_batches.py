"""Batches of rows: each row once per epoch, mixed by weight, and the same from any step on."""

import collections

import pytest

from rl.data import batches, sources

ONE, TWO = [{"a": i} for i in range(10)], [{"b": i} for i in range(7)]


def test_each_row_comes_once_per_epoch_in_a_new_order():
    made = batches.mix([ONE, TWO], (), 4, seed=3)
    rows = [tuple(row.items()) for number in range(17) for row in made[number]]
    epochs = [rows[i : i + 17] for i in range(0, 68, 17)]
    everything = sorted(tuple(row.items()) for row in ONE + TWO)
    assert all(sorted(epoch) == everything for epoch in epochs) and len({*map(tuple, epochs)}) == 4
    assert made[5] != batches.mix([ONE, TWO], (), 4, seed=4)[5]


def test_sources_are_mixed_by_weight_and_each_keeps_its_epochs():
    made = batches.mix([ONE, TWO], (3.0, 1.0), 4, seed=3)
    rows = [row for number in range(70) for row in made[number]]
    counts = collections.Counter(next(iter(row)) for row in rows)
    assert counts == {"a": 210, "b": 70}
    assert collections.Counter(row["b"] for row in rows if "b" in row) == dict.fromkeys(range(7), 10)
    twins = [row for number in range(10) for row in batches.mix([ONE, ONE], (1.0, 1.0), 2, seed=3)[number]]
    assert twins[::2] != twins[1::2]  # sources of one length have orders of their own
    with pytest.raises(ValueError, match="warmup.weights has 1 numbers for 2 files of warmup.data; give one for each"):
        batches.mix([ONE, TWO], (1.0,), 4, seed=3)


def test_batches_ahead_are_those_of_random_access_from_any_number():
    made = batches.mix([ONE], (), 3, seed=0)
    expected = [made[number] for number in range(20)]
    batch = batches.in_order(made)
    for number in (0, 1, 2, 12, 13, 3, 3):
        assert batch(number) == expected[number], number


def test_an_error_of_a_row_is_raised_as_it_is():
    def fail(rows):
        raise ValueError("row 3 is bad")

    with pytest.raises(ValueError, match="row 3 is bad"):
        batches.in_order(batches.mix([ONE], (), 3, seed=0).map(fail))(0)


def test_a_joined_source_has_the_rows_of_its_parts():
    joined = sources.join([ONE, TWO, ONE])
    assert [*joined] == ONE + TWO + ONE and joined[10] == TWO[0] and joined[17] == ONE[0] and len(joined) == 27
    assert [*sources.Chosen(joined, [16, 0])] == [TWO[6], ONE[0]]
