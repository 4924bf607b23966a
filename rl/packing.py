"""Token streams of any length -> one batch of fixed shape, by first-fit decreasing; shared prompts computed once.

1. What is packed is a tree: a prompt and the branches that continue it (the samples of a group). A branch attends to the
   prompt and to itself, so the group costs one prompt instead of G. A stream of its own is a tree with one branch.
2. Trees are sorted by falling length (ties by their order, so that the result is a function of the input), and each goes
   into the first row with room. A tree longer than a row is split into trees of fewer branches; a branch that does not fit
   even alone is refused.
3. Rows are laid out as micro-batches of a fixed shape in an array of fixed capacity, with the number in use beside it:
   however long the streams are, the learner compiles once, and runs no more micro-batches than there is work.

Letters: M micro-batches, B rows of one, T tokens of a row, P tokens of a prompt.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from sharding import rules


@struct.dataclass
class TrainBatch:
    """One optimizer step's tokens, packed; several trees share a row. Arrays [M, B, T], but for the count.

    tokens: int32. positions: int32, from 0 at the start of each prompt. segment_ids: int32, 1.. per tree in a row, 0 padding.
    branch_ids: int32, 0 in a prompt, 1.. per branch of a tree. predictors: int32, the column whose hidden state predicts the
    token. loss_mask: float32, 1.0 where the token trains. behavior_logp, advantage, temperature: float32 per token.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    branch_ids: jax.Array
    predictors: jax.Array
    loss_mask: jax.Array
    behavior_logp: jax.Array
    advantage: jax.Array
    temperature: jax.Array
    num_micro_batches: jax.Array  # int32 scalar: how many of the M hold anything


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fixed shape of a run's batches."""

    row_length: int  # T
    rows: int  # B of a micro-batch, a multiple of the batch shards
    num_micro_batches: int  # M, the most there can be

    @classmethod
    def for_streams(cls, num_streams: int, max_length: int, *, row_length: int, rows: int) -> "Layout":
        """Room for any `num_streams` streams of at most `max_length` tokens: first-fit leaves no two rows half empty."""
        needed = min(num_streams, 2 * num_streams * max_length // row_length + 1)
        return cls(row_length, rows, -(-needed // rows))


@dataclasses.dataclass(frozen=True)
class Branch:
    """One continuation; arrays [T] over its own tokens (the prompt, if it is shared, not among them)."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logp: np.ndarray
    advantage: np.ndarray
    temperature: float


@dataclasses.dataclass(frozen=True)
class Tree:
    """A prompt (int32 [P], may be empty) and what continues it."""

    prompt: np.ndarray
    branches: tuple[Branch, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(len(branch.tokens) for branch in self.branches)


def stream(tokens, loss_mask, behavior_logp, advantage, temperature) -> Tree:
    """A token stream that shares nothing, as a tree; arrays [T]."""
    return Tree(np.zeros((0,), np.int32), (Branch(tokens, loss_mask, behavior_logp, advantage, temperature),))


def pack(trees: Sequence[Tree], layout: Layout) -> TrainBatch:
    """Packs trees into a batch of `layout`; ValueError if a branch does not fit a row, or the rows the layout."""
    row_length = layout.row_length
    pieces = [piece for tree in trees for piece in _split(tree, row_length)]
    rows: list[list[Tree]] = []
    room: list[int] = []
    for tree in sorted(pieces, key=lambda tree: -tree.num_tokens):
        row = next((i for i, free in enumerate(room) if free >= tree.num_tokens), None)
        if row is None:
            rows.append([])
            room.append(row_length)
            row = len(rows) - 1
        rows[row].append(tree)
        room[row] -= tree.num_tokens

    num_micro_batches = -(-len(rows) // layout.rows)
    if num_micro_batches > layout.num_micro_batches:
        raise ValueError(
            f"{len(rows)} rows do not fit {layout.num_micro_batches} micro-batches of {layout.rows}; "
            f"raise config.train.rows or config.train.row_length"
        )
    shape = (layout.num_micro_batches * layout.rows, row_length)
    batch = {name: np.zeros(shape, np.int32) for name in _INTEGERS} | {
        name: np.zeros(shape, np.float32) for name in _FLOATS
    }
    batch["temperature"][:] = 1.0
    batch["predictors"][:] = np.arange(row_length)
    for i, row in enumerate(rows):
        start = 0
        for segment, tree in enumerate(row, start=1):
            _lay_out({name: array[i] for name, array in batch.items()}, tree, start, segment)
            start += tree.num_tokens
    shape = (layout.num_micro_batches, layout.rows, row_length)
    return TrainBatch(
        **{name: array.reshape(shape) for name, array in batch.items()}, num_micro_batches=np.int32(num_micro_batches)
    )


def place(batch: TrainBatch, mesh: jax.sharding.Mesh) -> TrainBatch:
    """Puts a host batch on the mesh, the rows of each micro-batch over the batch axes."""
    return jax.device_put(batch, jax.tree.map(lambda x: rules.batch_sharding(mesh, x.ndim), batch))


_INTEGERS = ("tokens", "positions", "segment_ids", "branch_ids", "predictors")
_FLOATS = ("loss_mask", "behavior_logp", "advantage", "temperature")


def _split(tree: Tree, row_length: int) -> list[Tree]:
    """The tree itself, or trees of fewer branches that each fit a row."""
    pieces, branches, size = [], [], len(tree.prompt)
    for branch in tree.branches:
        length = len(branch.tokens)
        if len(tree.prompt) + length > row_length:
            raise ValueError(
                f"a stream of {len(tree.prompt) + length} tokens does not fit a row of {row_length}; "
                f"raise config.train.row_length"
            )
        if size + length > row_length:
            pieces.append(Tree(tree.prompt, tuple(branches)))
            branches, size = [], len(tree.prompt)
        branches.append(branch)
        size += length
    return [*pieces, Tree(tree.prompt, tuple(branches))]


def _lay_out(row: dict[str, np.ndarray], tree: Tree, start: int, segment: int) -> None:
    """Writes a tree into a row from column `start`: the prompt, then branch after branch."""
    P = len(tree.prompt)
    row["segment_ids"][start : start + tree.num_tokens] = segment
    prompt = slice(start, start + P)
    row["tokens"][prompt] = tree.prompt
    row["positions"][prompt] = np.arange(P)
    row["predictors"][prompt] = np.maximum(np.arange(P) - 1, 0) + start
    begin = start + P
    for number, branch in enumerate(tree.branches, start=1):
        span = slice(begin, begin + len(branch.tokens))
        row["tokens"][span] = branch.tokens
        row["positions"][span] = np.arange(P, P + len(branch.tokens))
        row["branch_ids"][span] = number
        row["predictors"][span] = np.arange(span.start, span.stop) - 1
        row["predictors"][begin] = start + P - 1 if P else begin  # the prompt's end predicts every branch's first token
        row["loss_mask"][span] = branch.loss_mask
        row["behavior_logp"][span] = branch.behavior_logp
        row["advantage"][span] = branch.advantage
        row["temperature"][span] = branch.temperature
        begin = span.stop
