"""Packing against a slow first-fit decreasing; the tokens that each token reads are checked.

Token ids are unique over a batch, and every other per-token value is a function of the id: a value that lands next
to another token is seen.
"""

import dataclasses
import itertools
import types

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from rl.learning.batch import packing
from sharding.mesh import mesh as mesh_lib

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
            mask = loss_mask_of(tokens)
            mask[: prompt_length == 0] = 0  # nothing predicts it
            branches.append(
                packing.Branch(tokens, mask, behavior_of(tokens), advantage_of(tokens), 0.5 + next(number) / 64)
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
    """Rows of ids: trees cut into as long runs of branches as fit a row; then longest first, equal ones in order.

    The fullest row comes first.
    """
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
    return sorted(rows, key=lambda row: -len(row))  # costly rows side by side


@hypothesis.given(SHAPES)
@hypothesis.settings(deadline=None)
def test_rows_are_those_of_a_slow_first_fit_decreasing(shapes):
    batch, rows = pack(make_trees(shapes)), expected_rows(shapes, ROW)
    for b in range(len(rows) + 1):
        ids = rows[b] if b < len(rows) else []
        assert batch.tokens[b].tolist() == ids + [0] * (ROW - len(ids))
        assert (batch.segment_ids[b] > 0).tolist() == [True] * len(ids) + [False] * (ROW - len(ids))


# ---- the content ----------------------------------------------------------------------------------------------------


@hypothesis.given(SHAPES, st.sampled_from([1, 3]))
@hypothesis.settings(deadline=None)
def test_every_token_reads_its_own_past_and_carries_what_is_its_own(shapes, rows):
    """A token of a branch occurs once; one of a prompt once per row group that its branches were split into.

    The tokens that a token may read are derived from segments and branches, column by column, and must be its sequence so far.
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
                        assert carried == [loss_mask_of(i) if n else 0, behavior_of(i), advantage_of(i)]
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


def test_a_stream_may_fill_a_row_but_not_exceed_it():
    assert pack(streams([ROW])).segment_ids[0].all()
    assert pack(make_trees([(5, [7, 7])])).segment_ids[:2].all()  # two rows, the prompt in both
    for trees in (streams([3, ROW + 1]), make_trees([(5, [2, 8])])):
        with pytest.raises(ValueError) as error:
            pack(trees)
        for word in ("13 tokens", "row of 12", "config.train.row_length"):
            assert word in str(error.value)


@pytest.mark.parametrize("lengths", [(5, 7, 0), (0, 12), (0, 0)])
def test_a_branch_of_no_token_takes_no_place(lengths):
    """Also where its row is full; a tree of nothing but such branches trains nothing and is left out."""
    (tree,) = make_trees([(0, lengths)])
    whole = dataclasses.replace(tree, branches=tuple(branch for branch in tree.branches if len(branch.tokens)))
    got, same = (packing.pack([one], packing.Layout(ROW, 1, 2)) for one in (tree, whole))
    jax.tree.map(np.testing.assert_array_equal, got, same)
    assert int(got.num_micro_batches) == (sum(lengths) > 0)


def test_a_token_that_nothing_predicts_cannot_train():
    tokens = np.array([5, 6], np.int32)
    ones = np.ones((2,), np.float32)
    layout = packing.Layout(ROW, 1, 1)
    with pytest.raises(ValueError, match="loss_mask is 1 at the first token of a stream without a prompt"):
        packing.pack([packing.stream(tokens, ones, ones, ones, 1.0)], layout)
    packing.pack([packing.stream(tokens, ones * [0, 1], ones, ones, 1.0)], layout)
    branch = packing.Branch(tokens, ones, ones, ones, 1.0)
    packing.pack([packing.Tree(tokens, (branch, branch))], layout)  # the prompt's end predicts both


def test_arrays_of_a_branch_have_one_length():
    ones = np.ones((3,), np.float32)
    with pytest.raises(AssertionError, match="advantage"):
        packing.Branch(np.ones((3,), np.int32), ones, ones, ones[:2], 1.0)


# ---- work ------------------------------------------------------------------------------------------------------------


def test_cost_counts_the_keys_that_tokens_read():
    """Compares with a loop over every pair of a token and an earlier one of its own sequence."""
    (tree,) = make_trees([(4, [3, 1, 2])])
    pairs = 0
    for branch in (*tree.branches, None):
        for n in range(4 if branch is None else len(branch.tokens)):
            pairs += n + 1 + (0 if branch is None else 4)
    assert packing._cost(tree, 0.25) == 10 + 0.25 * pairs


@hypothesis.given(st.lists(st.integers(1, ROW), min_size=1, max_size=40), st.sampled_from([1, 2, 4]))
@hypothesis.settings(deadline=None)
def test_rows_side_by_side_cost_alike(lengths, shards):
    """The time of a micro-batch is that of its slowest shard: over all, as little as for rows sorted by work."""
    rows, key_cost = 4, 0.5
    batch = packing.pack(streams(lengths), packing.Layout(ROW, rows, 40, shards=shards, key_cost=key_cost))

    def work(row):  # its own sum: sizes of the segments of a row
        sizes = np.bincount(row[row > 0])
        return sum(n + key_cost * n * (n + 1) / 2 for n in sizes)

    costs = np.array([[work(row) for row in micro] for micro in batch.segment_ids])
    flat = np.sort(costs.ravel())[::-1].reshape(costs.shape)
    np.testing.assert_allclose(np.sort(costs, axis=1)[:, ::-1], flat)  # each micro-batch holds the next costliest rows
    per_shard = costs.reshape(40, shards, -1).sum(axis=2)
    best_single = costs.max(axis=1)
    assert (np.ptp(per_shard, axis=1) <= best_single + 1e-9).all()  # the result of dealing back and forth
    assert sorted(batch.tokens[batch.tokens > 0]) == list(range(1, sum(lengths) + 1))


def test_rows_are_dealt_to_shards_back_and_forth():
    """12 and 7 against 10 and 9; dealt round and round it would be 12 and 9 against 10 and 7."""
    batch = packing.pack(streams([12, 10, 9, 7]), packing.Layout(ROW, 4, 1, shards=2))
    sizes = (batch.segment_ids[0] > 0).sum(axis=1).tolist()
    assert (sorted(sizes[:2]), sorted(sizes[2:])) == ([7, 12], [9, 10])


def test_optional_streams_lie_beside_their_tokens():
    tokens, mask = np.arange(1, 6, dtype=np.int32), np.array([0, 1, 1, 0, 1], np.float32)
    weight = np.linspace(0.1, 0.5, 5).astype(np.float32)
    branch = packing.Branch(tokens, mask, mask, mask, 1.0, ce_weight=weight, ref_logp=-weight)
    plain = packing.Branch(tokens + 5, mask, mask, mask, 1.0)
    trees = [packing.Tree(np.array([20, 21], np.int32), (branch,)), packing.Tree(np.array([22], np.int32), (plain,))]
    batch = packing.pack(trees, packing.Layout(14, 1, 1, streams=("ce_weight", "ref_logp")))
    row = batch.tokens[0, 0]
    assert batch.ref_kl_weight is None and batch.ce_weight.dtype == batch.ref_logp.dtype == np.float32
    for token, value in zip(tokens, weight, strict=True):
        (column,) = np.flatnonzero(row == token)
        assert (batch.ce_weight[0, 0, column], batch.ref_logp[0, 0, column]) == (value, -value)
    assert (batch.ce_weight[0, 0] > 0).sum() == 5  # prompts, padding and streams without it have none
    with pytest.raises(AssertionError, match="ce"):
        packing.Layout(14, 1, 1, streams=("ce",))


@hypothesis.given(SHAPES)
@hypothesis.settings(deadline=None)
def test_stream_ids_number_prompts_and_branches(shapes):
    batch = pack(make_trees(shapes))
    ids = np.asarray(packing.stream_ids(batch.segment_ids, batch.branch_ids))
    for b in range(20):
        runs = [key for key, _ in itertools.groupby(zip(batch.segment_ids[b], batch.branch_ids[b], strict=True))]
        lengths = [len(list(group)) for _, group in itertools.groupby(ids[b])]
        assert ids[b].tolist() == [i for i, n in enumerate(lengths) for _ in range(n)] and len(lengths) == len(runs)
        for i in range(len(runs)):
            (columns,) = np.nonzero(ids[b] == i)
            assert {(batch.segment_ids[b, c], batch.branch_ids[b, c]) for c in columns} == {runs[i]}


def test_a_batch_is_kept_for_replay(tmp_path):
    batch = packing.pack(make_trees([(4, [3, 5]), (0, [2])]), packing.Layout(ROW, 1, 3, streams=("ce_weight",)))
    packing.save(batch, tmp_path / "batch.npz")
    again = packing.load(tmp_path / "batch.npz")
    jax.tree.map(np.testing.assert_array_equal, again, batch)
    assert again.ref_logp is None and [p.name for p in tmp_path.iterdir()] == ["batch.npz"]
    np.savez(tmp_path / "other.npz", tokens=np.zeros(3))
    with pytest.raises(ValueError, match="other.npz is not a saved batch"):
        packing.load(tmp_path / "other.npz")


# ---- the layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("needed", "used"), [(0, 0), (1, 1), (3, 1), (4, 2), (9, 3)])
def test_a_batch_has_one_shape_and_says_how_much_of_it_is_used(needed, used):
    """Three rows to a micro-batch; everything after the micro-batches in use is padding."""
    batch = packing.pack(streams([ROW] * needed), packing.Layout(ROW, 3, 4))
    assert int(batch.num_micro_batches) == used and batch.num_micro_batches.dtype == np.int32
    for field in dataclasses.fields(batch):
        array = getattr(batch, field.name)
        if field.name in (*packing.OPTIONAL, "kept", "routed_experts"):
            assert array is None
        elif field.name != "num_micro_batches":
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
    """All lengths, shared prompts or not: `for_streams` promises room for so many streams of such a length."""
    lengths = [P + length for P, branches in shapes for length in branches]
    layout = packing.Layout.for_streams(len(lengths), max(lengths, default=1), row_length=ROW, rows=rows)
    packing.pack(make_trees(shapes), layout)
    packing.pack(streams(lengths), layout)
    # Twice the tokens is the most that first-fit wastes, and one micro-batch the most that rounding does.
    assert (
        layout.num_micro_batches * rows
        <= min(len(lengths), 2 * sum([max(lengths, default=1)] * len(lengths)) / ROW + 1) + rows
    )


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(AssertionError, match="3, 2"):
        packing.Layout(ROW, 3, 1, shards=2)
    mesh = mesh_lib.create({"fsdp": 8})
    with pytest.raises(ValueError, match="partitioned 8 times, but the dimension size is 4"):
        packing.place(packing.pack(streams([3]), packing.Layout(ROW, 4, 1)), mesh)


def test_place_splits_the_rows_of_each_micro_batch_over_the_batch_axes():
    mesh = mesh_lib.create({"data": 2, "fsdp": 2, "tensor": 2})
    batch = packing.pack(streams([12, 7, 5, 11, 1, 9, 4]), packing.Layout(ROW, 4, 3))
    placed = packing.place(batch, mesh)
    for host, device in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
        assert device.sharding.shard_shape(device.shape) == ((3, 1, ROW) if device.ndim else ())
        np.testing.assert_array_equal(host, device)
