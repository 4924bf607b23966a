"""Packs token streams of any length into one batch of fixed shape, by first-fit decreasing; shared prompts are computed once.

1. The unit is a tree: a prompt and the branches that continue it (the samples of a group). A branch attends to the prompt
   and to itself, so a group costs one prompt instead of G. A stream that shares nothing is a tree with one branch.
2. Trees, the longest first, each go into the first row with room. A tree longer than a row is split into trees of fewer
   branches; a branch that does not fit even alone is refused.
3. Rows are sorted by estimated cost, so that rows computed at the same time on different devices cost about the same, and
   dealt to the shards of a micro-batch back and forth.
4. The number of micro-batches in use is data, their capacity is shape: the learner compiles once for streams of all lengths.

Letters: M micro-batches, B rows of one, T tokens of a row, P tokens of a prompt, L MoE layers, X experts per token.
"""

import dataclasses
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rl.learning.batch import router_replay as router_replay_lib
from sharding.mesh import rules
from sharding.system import atomic_file

Array = Any  # jax.Array on the devices, np.ndarray on the host, jax.ShapeDtypeStruct of `abstract`


class TrainBatch(struct.PyTreeNode):
    """The packed tokens of one train step: [M micro-batches, B rows, T tokens] arrays.

    Several trees (prompts with their completions) share a row. Fields of another shape say so.
    """

    tokens: Array  # int32, like the next four
    positions: Array  # from 0 at the start of each prompt
    segment_ids: Array  # 1.. per tree of a row, 0 in padding
    branch_ids: Array  # 0 in a prompt, 1.. per branch of a tree
    predictors: Array  # the column whose hidden state predicts the token
    loss_mask: Array  # float32, like all below: 1.0 where the token trains
    behavior_logp: Array
    advantage: Array
    temperature: Array
    num_micro_batches: Array  # int32 scalar: how many of the M are in use
    # None unless the run's layout names them. Weights are those of components in rl/learning/algorithms/divergences.py.
    ref_logp: Array | None = None  # under a reference policy
    ce_weight: Array | None = None
    ref_kl_weight: Array | None = None
    mixed: Array | None = None  # 1.0 where the sampler read keys of other policy versions than the token's own
    # int32 [M, B, T, W]: vocabulary entries that a token was sampled from, then -1; all are -1: from all
    kept: Array | None = None
    routed_experts: Array | None = None  # [M, B, T, L, X], of a run with router replay, for `router_replay.given`


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fixed shape of all packed batches of a run, and the optional arrays in a batch."""

    row_length: int  # T
    rows: int  # B of a micro-batch, a multiple of the batch shards
    num_micro_batches: int  # M, the capacity
    shards: int = 1  # devices that a micro-batch's rows are split over; divides `rows`
    key_cost: float = 0.0  # cost of reading one key, relative to the rest of a token's cost: about 1 / (6 model_dim)
    streams: tuple[str, ...] = ()  # names of OPTIONAL that the batches carry
    router_replay: router_replay_lib.RouterReplay | None = None  # None: batches carry no routed experts
    kept: int = 0  # W: tokens of a kept set at most; 0: batches carry none

    def __post_init__(self):
        assert self.rows % self.shards == 0, (self.rows, self.shards)
        assert set(self.streams) <= set(OPTIONAL), self.streams

    @classmethod
    def for_streams(cls, num_streams: int, max_length: int, *, row_length: int, rows: int, **fields) -> "Layout":
        """Returns a layout with room for any `num_streams` sequences of up to `max_length` tokens, packed first-fit."""
        needed = min(num_streams, 2 * num_streams * max_length // row_length + 1)
        return cls(row_length, rows, -(-needed // rows), **fields)


@dataclasses.dataclass(frozen=True)
class Branch:
    """One continuation of a prompt in a tree; arrays [T] over its own tokens, without those of the shared prompt."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logp: np.ndarray
    advantage: np.ndarray
    temperature: float
    ref_logp: np.ndarray | None = None
    ce_weight: np.ndarray | None = None
    ref_kl_weight: np.ndarray | None = None
    mixed: np.ndarray | None = None
    kept: np.ndarray | None = None  # [T, W]
    routed_experts: np.ndarray | None = None  # [T, L, X] of `RouterReplay.rows`; None: routers choose

    def __post_init__(self):
        for name in ("loss_mask", "behavior_logp", "advantage", *OPTIONAL, "kept", "routed_experts"):
            array = getattr(self, name)
            assert array is None or array.shape[:1] == self.tokens.shape, (name, array.shape, self.tokens.shape)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A prompt (int32 [P], may be empty) and the continuations that share it: the unit of packing."""

    prompt: np.ndarray
    branches: tuple[Branch, ...]
    routed_experts: np.ndarray | None = None  # [P, L, X] of the prompt

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and all branches."""
        return len(self.prompt) + sum(len(branch.tokens) for branch in self.branches)


def stream(tokens, loss_mask, behavior_logp, advantage, temperature) -> Tree:
    """Returns one token sequence as a tree with an empty prompt and a single branch; all arrays are [T]."""
    return Tree(np.zeros((0,), np.int32), (Branch(tokens, loss_mask, behavior_logp, advantage, temperature),))


def pack(trees: Sequence[Tree], layout: Layout) -> TrainBatch:
    """Packs trees into the rows of one batch with the shape `layout`.

    Raises ValueError if a branch does not fit a row, the rows do not fit the layout, or a trained token is the first of its sequence, which no token predicts.
    """
    row_length = layout.row_length
    pieces = [piece for tree in trees for piece in _split(tree, row_length)]
    rows = [[pieces[i] for i in row] for row in first_fit([piece.num_tokens for piece in pieces], row_length)]
    num_micro_batches = -(-len(rows) // layout.rows)
    if num_micro_batches > layout.num_micro_batches:
        raise ValueError(
            f"{len(rows)} rows do not fit into {layout.num_micro_batches} micro-batches of {layout.rows} rows; "
            f"raise config.train.rows or config.train.row_length"
        )
    batch = {}
    for name, row in empty_row(layout).items():
        batch[name] = np.zeros((layout.num_micro_batches * layout.rows, *row.shape), row.dtype)
        if row.any():
            batch[name][:] = row
    for i, row in _deal(rows, layout):
        start = 0
        for segment, tree in enumerate(row, start=1):
            _write({name: array[i] for name, array in batch.items()}, tree, start, segment)
            start += tree.num_tokens
    arrays = {n: x.reshape(layout.num_micro_batches, layout.rows, *x.shape[1:]) for n, x in batch.items()}
    return TrainBatch(**arrays, num_micro_batches=np.int32(num_micro_batches))


def first_fit(sizes: Sequence[int], row_length: int) -> list[list[int]]:
    """Packs sizes into rows, first-fit decreasing. Returns the indices of the sizes in each row; no size may exceed `row_length`."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((row for row, free in enumerate(room) if free >= sizes[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(i)
        room[row] -= sizes[i]
    return rows


def empty_row(layout: Layout) -> dict[str, np.ndarray]:
    """Returns the arrays of a row of padding as {name: array [T]}; routed_experts is [T, L, X], and kept [T, W]."""
    row: dict[str, np.ndarray] = {name: np.zeros(layout.row_length, np.int32) for name in _INTEGERS}
    row |= {name: np.zeros(layout.row_length, np.float32) for name in (*_FLOATS, *layout.streams)}
    row["temperature"][:] = 1.0
    row["predictors"][:] = np.arange(layout.row_length)
    if layout.kept:
        row["kept"] = np.full((layout.row_length, layout.kept), -1, np.int32)
    if layout.router_replay:
        row["routed_experts"] = layout.router_replay.empty(layout.row_length)
    return row


def abstract(layout: Layout, mesh: jax.sharding.Mesh) -> TrainBatch:
    """Returns the shapes and shardings of `place(pack(trees, layout), mesh)`, the same for all trees."""
    shape = layout.num_micro_batches, layout.rows
    arrays = {name: jax.ShapeDtypeStruct((*shape, *row.shape), row.dtype) for name, row in empty_row(layout).items()}
    batch = TrainBatch(**arrays, num_micro_batches=jax.ShapeDtypeStruct((), np.dtype(np.int32)))
    return jax.tree.map(lambda x: x.update(sharding=sharding(mesh, x.ndim)), batch)


def place(batch: TrainBatch, mesh: jax.sharding.Mesh) -> TrainBatch:
    """Puts the rows of a batch of NumPy arrays on the mesh's devices. Of several processes, each passes the same batch."""
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding(mesh, x.ndim), x.__getitem__), batch)


def sharding(mesh: jax.sharding.Mesh, ndim: int) -> jax.sharding.NamedSharding:
    """Returns the sharding of a batch's array [M, B, T, ...] or scalar: rows over the batch axes, tokens over `context`."""
    return rules.batch_sharding(mesh, ndim, num_whole=max(ndim - 3, 0))


def stream_ids(segment_ids_BT: jax.Array, branch_ids_BT: jax.Array) -> jax.Array:
    """Returns the stream number of each token: int32 in [0, T), different for each prompt, branch, and padding of a row."""
    changed = (segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]) | (branch_ids_BT[:, 1:] != branch_ids_BT[:, :-1])
    return jnp.pad(jnp.cumsum(changed, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def save(batch: TrainBatch, path: pathlib.Path) -> None:
    """Writes a batch to a file, so that its train step can be repeated: `step(state, place(load(path), mesh))`."""
    host = jax.device_get(batch)
    arrays, file = {name: x for name, x in vars(host).items() if x is not None}, io.BytesIO()
    np.savez_compressed(file, **arrays)
    atomic_file.write(path, file.getvalue())


def load(path: pathlib.Path) -> TrainBatch:
    """Reads a batch from a file that `save` wrote. Raises ValueError for files with other arrays."""
    with np.load(path, allow_pickle=False) as arrays:
        names = {field.name for field in dataclasses.fields(TrainBatch)}
        if not set(arrays) <= names or not names - {*OPTIONAL, "kept", "routed_experts"} <= set(arrays):
            raise ValueError(
                f"{path} is not a saved batch: it contains {', '.join(sorted(arrays))}; give a file that packing.save wrote"
            )
        return TrainBatch(**{name: arrays[name] for name in arrays})


OPTIONAL = ("ref_logp", "ce_weight", "ref_kl_weight", "mixed")
_INTEGERS = ("tokens", "positions", "segment_ids", "branch_ids", "predictors")
_FLOATS = ("loss_mask", "behavior_logp", "advantage", "temperature")


def _split(tree: Tree, row_length: int) -> list[Tree]:
    """Splits a tree into trees that each fit a row, each with the whole prompt. Empty branches are dropped."""
    pieces, branches, size = [], [], len(tree.prompt)
    for branch in tree.branches:
        length = len(branch.tokens)
        if length == 0:
            continue
        if len(tree.prompt) == 0 and branch.loss_mask[0] != 0:
            raise ValueError(
                "loss_mask is 1 at the first token of a stream without a prompt, which no token predicts; set it to 0, "
                "or begin the stream with a token that was not sampled"
            )
        if len(tree.prompt) + length > row_length:
            raise ValueError(
                f"a stream of {len(tree.prompt) + length} tokens does not fit into a row of {row_length}; "
                f"raise config.train.row_length"
            )
        if size + length > row_length:
            pieces.append(dataclasses.replace(tree, branches=tuple(branches)))
            branches, size = [], len(tree.prompt)
        branches.append(branch)
        size += length
    return [*pieces, dataclasses.replace(tree, branches=tuple(branches))] if branches else pieces


def _deal(rows: list[list[Tree]], layout: Layout) -> list[tuple[int, list[Tree]]]:
    """Returns (index, row) pairs: expensive rows share the first micro-batches; in a micro-batch, costs are balanced over shards."""
    per_shard = layout.rows // layout.shards
    order = sorted(rows, key=lambda row: -sum(_cost(tree, layout.key_cost) for tree in row))
    places = []
    for rank, row in enumerate(order):
        micro_batch, rank = divmod(rank, layout.rows)
        turn, shard = divmod(rank, layout.shards)
        if turn % 2:
            shard = layout.shards - 1 - shard
        places.append((micro_batch * layout.rows + shard * per_shard + turn, row))
    return places


def _cost(tree: Tree, key_cost: float) -> float:
    """The compute cost of a tree: 1 per token, and `key_cost` for every key that a token's attention reads."""
    P, lengths = len(tree.prompt), [len(branch.tokens) for branch in tree.branches]
    keys = P * (P + 1) / 2 + sum(n * P + n * (n + 1) / 2 for n in lengths)
    return tree.num_tokens + key_cost * keys


def _write(row: dict[str, np.ndarray], tree: Tree, start: int, segment: int) -> None:
    """Writes a tree into a row from column `start`: the prompt, then the branches."""
    P, begin = len(tree.prompt), start + len(tree.prompt)
    row["segment_ids"][start : start + tree.num_tokens] = segment
    row["tokens"][start:begin] = tree.prompt
    row["positions"][start:begin] = np.arange(P)
    row["predictors"][start:begin] = np.maximum(np.arange(P) - 1, 0) + start
    if "routed_experts" in row and tree.routed_experts is not None:
        row["routed_experts"][start:begin] = tree.routed_experts
    for number, branch in enumerate(tree.branches, start=1):
        span = slice(begin, begin + len(branch.tokens))
        for name, array in row.items():
            if (own := getattr(branch, name, None)) is not None:
                array[span] = own
        row["positions"][span] = np.arange(P, P + len(branch.tokens))
        row["branch_ids"][span] = number
        row["predictors"][span] = np.arange(span.start, span.stop) - 1
        row["predictors"][begin] = start + P - 1 if P else begin  # the prompt's end predicts every branch's first token
        begin = span.stop
