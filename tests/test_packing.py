"""Packing against a slow first-fit decreasing and against the best packing there is; what each token reads is checked.

Token ids are unique over a batch, and every other per-token value is a function of the id: a value that lands beside
another token is seen.
"""

import dataclasses
import itertools
import types

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from rl import packing
from sharding import mesh as mesh_lib

ROW = 12
# A tree's shape: tokens of its prompt, and of each branch; prompt and longest branch fit a row, the whole need not.
SHAPES = st.lists(
    st.integers(0, 5).flatmap(
        lambda P: st.tuples(st.just(P), st.lists(st.integers(1, ROW - P), min_size=1, max_size=5 if P else 1))
    ),
    max_size=16,
)


def make_trees(shapes):
    """Ids count up from 1 over prompts and branches in order; temperatures count branches."""
    ids, number, trees = itertools.count(1), itertools.count(), []

    def take(n):
        return np.array(list(itertools.islice(ids, n)), np.int32)

    for prompt_length, lengths in shapes:
        prompt, branches = take(prompt_length), []
        for length in lengths:
            tokens = take(length)
            branches.append(
                packing.Branch(
                    tokens, loss_mask_of(tokens), behavior_of(tokens), advantage_of(tokens), 0.5 + next(number) / 64
                )
            )
        trees.append(packing.Tree(prompt, tuple(branches)))
    return trees


def streams(lengths):
    return make_trees([(0, [length]) for length in lengths])


def pack(trees, rows=1):
    """A batch with room to spare, as rows: arrays [M B, T]."""
    batch = packing.pack(trees, packing.Layout(ROW, rows, 100))
    assert batch.tokens.shape == (100, rows, ROW)
    return types.SimpleNamespace(**{name: getattr(batch, name).reshape(-1, ROW) for name in ARRAYS})


FLOATS = ("loss_mask", "behavior_logp", "advantage", "temperature")
ARRAYS = ("tokens", "positions", "segment_ids", "branch_ids", "predictors", *FLOATS)


def loss_mask_of(token):
    return (token % 3 > 0).astype(np.float32)


def behavior_of(token):
    return (-token / 128).astype(np.float32)


def advantage_of(token):
    return (token / 64 - 1).astype(np.float32)


# ---- which row -------------------------------------------------------------------------------------------------------


def expected_rows(shapes, row_length):
    """Rows of ids: trees cut into as long runs of branches as fit a row; then longest first, equal ones in order."""
    pieces, first_id = [], 1
    for prompt_length, lengths in shapes:
        prompt = list(range(first_id, first_id + prompt_length))
        first_id += prompt_length
        piece = list(prompt)
        for length in lengths:
            branch = list(range(first_id, first_id + length))
            first_id += length
            if len(piece) + length > row_length:
                pieces.append(piece)
                piece = list(prompt)
            piece += branch
        pieces.append(piece)
    rows = []
    for piece in sorted(pieces, key=lambda piece: -len(piece)):
        for row in rows:
            if len(row) + len(piece) <= row_length:
                row += piece
                break
        else:
            rows.append(list(piece))
    return rows


def fewest_rows(lengths, row_length):
    """The best any packing can do, by trying every assignment."""
    best = len(lengths)

    def place(i, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if i == len(lengths):
            best = len(rooms)
            return
        for r in range(len(rooms)):
            if rooms[r] >= lengths[i]:
                place(i + 1, [*rooms[:r], rooms[r] - lengths[i], *rooms[r + 1 :]])
        place(i + 1, [*rooms, row_length - lengths[i]])

    place(0, [])
    return best


@hypothesis.given(SHAPES)
@hypothesis.settings(deadline=None)
def test_rows_are_those_of_a_slow_first_fit_decreasing(shapes):
    batch, rows = pack(make_trees(shapes)), expected_rows(shapes, ROW)
    for b in range(len(rows) + 1):
        ids = rows[b] if b < len(rows) else []
        assert batch.tokens[b].tolist() == ids + [0] * (ROW - len(ids))
        assert (batch.segment_ids[b] > 0).tolist() == [True] * len(ids) + [False] * (ROW - len(ids))


@hypothesis.given(st.lists(st.integers(1, ROW), min_size=1, max_size=7))
@hypothesis.settings(deadline=None)
def test_rows_are_nearly_as_few_as_can_be(lengths):
    used = pack(streams(lengths)).segment_ids.any(axis=1).sum()
    assert 9 * used <= 11 * fewest_rows(lengths, ROW) + 6  # the bound of first-fit decreasing (Dosa 2007), tight


# ---- what is in it ---------------------------------------------------------------------------------------------------


@hypothesis.given(SHAPES, st.sampled_from([1, 3]))
@hypothesis.settings(deadline=None)
def test_every_token_reads_its_own_past_and_carries_what_is_its_own(shapes, rows):
    """A token of a branch occurs once; one of a prompt once per row group that its branches were split into.

    What a token may read is worked out from segments and branches, column by column, and must be its sequence so far.
    """
    trees = make_trees(shapes)
    batch = pack(trees, rows)
    columns = {}  # id -> where it stands
    for b, t in np.argwhere(batch.segment_ids):
        columns.setdefault(int(batch.tokens[b, t]), []).append((b, t))
    assert sorted(columns) == list(range(1, 1 + sum(P + sum(lengths) for P, lengths in shapes)))

    for tree in trees:
        for branch in tree.branches:
            sequence = [*tree.prompt.tolist(), *branch.tokens.tolist()]
            for n, token in enumerate(sequence):
                in_prompt = n < len(tree.prompt)
                assert in_prompt or len(columns[token]) == 1
                for b, t in columns[token]:
                    segment, branch_id = batch.segment_ids[b, t], batch.branch_ids[b, t]
                    assert (branch_id == 0) == in_prompt
                    read = [
                        batch.tokens[b, s]
                        for s in range(t + 1)
                        if batch.segment_ids[b, s] == segment and batch.branch_ids[b, s] in (0, branch_id)
                    ]
                    assert read == sequence[: n + 1]
                    assert batch.positions[b, t] == n
                    assert n == 0 or batch.tokens[b, batch.predictors[b, t]] == sequence[n - 1]
                    assert batch.segment_ids[b, batch.predictors[b, t]] == segment  # also where nothing predicts
                    carried = [getattr(batch, name)[b, t] for name in ("loss_mask", "behavior_logp", "advantage")]
                    if in_prompt:
                        assert carried == [0, 0, 0]
                    else:
                        i = np.int32(token)
                        assert carried == [loss_mask_of(i), behavior_of(i), advantage_of(i)]
                        assert batch.temperature[b, t] == branch.temperature


@hypothesis.given(SHAPES)
@hypothesis.settings(deadline=None)
def test_numbering_and_padding(shapes):
    batch = pack(make_trees(shapes))
    padding = batch.segment_ids == 0
    for name in ("tokens", "positions", "branch_ids", "loss_mask", "behavior_logp", "advantage"):
        assert (getattr(batch, name)[padding] == 0).all(), name  # padding trains nothing
    assert (batch.temperature[padding] == 1).all()  # and divides by nothing that is zero
    assert ((batch.predictors >= 0) & (batch.predictors < ROW)).all()
    for row in batch.segment_ids:  # 1, 1, 2, 2, 2, 3, 0, 0: numbered from 1 without a gap
        numbers = row[row > 0].tolist()
        assert numbers == sorted(numbers) and set(numbers) == set(range(1, max(numbers, default=0) + 1))


def test_a_stream_is_a_tree_of_one_branch():
    (tree,) = streams([5])
    (branch,) = tree.branches
    same = packing.stream(branch.tokens, branch.loss_mask, branch.behavior_logp, branch.advantage, branch.temperature)
    layout = packing.Layout(ROW, 1, 1)
    jax.tree.map(np.testing.assert_array_equal, packing.pack([tree], layout), packing.pack([same], layout))


def test_packing_is_a_function_of_its_input():
    rng = np.random.default_rng(0)
    shapes = [(int(rng.integers(0, 5)), rng.integers(1, 8, rng.integers(1, 4)).tolist()) for _ in range(30)]
    a, b = (packing.pack(make_trees(shapes), packing.Layout(ROW, 4, 30)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_stream_may_fill_a_row_but_not_exceed_it():
    assert pack(streams([ROW])).segment_ids[0].all()
    assert pack(make_trees([(5, [7, 7])])).segment_ids[:2].all()  # two rows, the prompt in both
    for trees in (streams([3, ROW + 1]), make_trees([(5, [2, 8])])):
        with pytest.raises(ValueError) as error:
            pack(trees)
        for word in ("13 tokens", "row of 12", "config.train.row_length"):
            assert word in str(error.value)


# ---- the layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("needed", "used"), [(0, 0), (1, 1), (3, 1), (4, 2), (9, 3)])
def test_a_batch_has_one_shape_and_says_how_much_of_it_is_used(needed, used):
    """Three rows to a micro-batch; everything after the micro-batches in use is padding."""
    batch = packing.pack(streams([ROW] * needed), packing.Layout(ROW, 3, 4))
    assert int(batch.num_micro_batches) == used and batch.num_micro_batches.dtype == np.int32
    for field in dataclasses.fields(batch):
        array = getattr(batch, field.name)
        if field.name != "num_micro_batches":
            assert array.shape == (4, 3, ROW), field.name
            assert array.dtype == (np.float32 if field.name in FLOATS else np.int32), field.name
    assert (batch.segment_ids.reshape(12, ROW) > 0).all(axis=1).tolist() == [True] * needed + [False] * (12 - needed)


def test_more_rows_than_the_layout_holds_are_refused():
    packing.pack(streams([ROW] * 6), packing.Layout(ROW, 3, 2))
    with pytest.raises(ValueError) as error:
        packing.pack(streams([ROW] * 7), packing.Layout(ROW, 3, 2))
    for word in ("7 rows", "2 micro-batches of 3", "config.train.rows", "config.train.row_length"):
        assert word in str(error.value)


@hypothesis.given(SHAPES, st.integers(1, 4))
@hypothesis.settings(deadline=None)
def test_the_layout_of_a_run_holds_any_batch_of_it(shapes, rows):
    """Whatever the lengths, shared prompts or not: `for_streams` promises room for so many streams of such a length."""
    lengths = [P + length for P, branches in shapes for length in branches]
    layout = packing.Layout.for_streams(len(lengths), max(lengths, default=1), row_length=ROW, rows=rows)
    packing.pack(make_trees(shapes), layout)
    packing.pack(streams(lengths), layout)
    # Twice the tokens is the most that first-fit wastes, and one micro-batch the most that rounding does.
    assert (
        layout.num_micro_batches * rows
        <= min(len(lengths), 2 * sum([max(lengths, default=1)] * len(lengths)) / ROW + 1) + rows
    )


def test_place_splits_the_rows_of_each_micro_batch_over_the_batch_axes():
    mesh = mesh_lib.create({"data": 2, "fsdp": 2, "tensor": 2})
    batch = packing.pack(streams([12, 7, 5, 11, 1, 9, 4]), packing.Layout(ROW, 4, 3))
    placed = packing.place(batch, mesh)
    for host, device in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
        assert device.sharding.shard_shape(device.shape) == ((3, 1, ROW) if device.ndim else ())
        np.testing.assert_array_equal(host, device)
