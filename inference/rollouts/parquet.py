"""Parquet files of rollouts: workers send them, and a run keeps them.

1. `write` writes a file under a temporary name and renames it.
2. `read` accepts a file of any origin and checks sizes (parquet_footer.py), schema, and every field. For any bytes, a broken
   file is a ValueError that names the column and the rule.
3. `decode` also keeps the table, whose rows are written again (`table_bytes`, `to_record`) without another encoding or check.

Most columns are fields of `rollout.FIELDS`. Others are those of INTELLECT-2's files, of which five are written for its readers only
and ignored here (the orchestrator assigns advantages). `input_*` is the stream before the first sampled token and `output_*` the rest,
gaps included. `rewards` and `temperature` are float64, theirs float32: the signature covers the exact numbers.

Runs that replay routers have `ALL_SCHEMA`: it adds the experts of each token but the last, for every layer of the model, as bytes
with their shape. Both are empty in a row without routed experts.

No jax here: a worker starts in a second.
"""

import dataclasses
import itertools
import math
import operator
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inference.rollouts import kept_sets, parquet_footer
from inference.rollouts import rollout as rollout_lib
from sharding.system import atomic_file

# TOPLOC: bytes per so many tokens; twice that is read here and refused with a verdict.
PROOF_BYTES, PROOF_TOKENS = 2 + 2 * rollout_lib.PROOF_VALUES, rollout_lib.PROOF_TOKENS
MAX_EXPERT_BYTES = 2**12  # of a token: 61 layers of 8 experts take 1 KiB
SLACK_BYTES = 2**22  # of a column, for pages and their headers
MAX_FILE_PARTS = 2**18  # reward parts of all rollouts of a file: each is 200 bytes to 1 KiB of Python objects

Column = tuple[pa.DataType, Callable[[rollout_lib.Rollout], Any]]  # its type, and its value of a rollout
# Columns of fields that have another name there, as in INTELLECT-2's files.
_NAMES = {"reward": "rewards", "task.env": "task_type"}
_ARROW_TYPES = {float: pa.float64(), str: pa.string(), bytes: pa.binary(), bool: pa.bool_()}
_INTS = pa.list_(pa.int32())


def _column_of(name: str, field: rollout_lib.Field) -> Column:
    """Returns the column of a field of `rollout.FIELDS`."""
    assert field.kind is not None
    get, kind = operator.attrgetter(name), field.kind
    small = pa.int32() if field.size <= 2**31 else pa.int64()
    return _ARROW_TYPES.get(kind, small), lambda rollout: kind(get(rollout))


def _flat(name: str) -> Column:
    """Returns the column of a table of integers, joined; an empty list stands for None."""
    return _INTS, lambda rollout: () if (table := getattr(rollout, name)) is None else table.ravel()


_FIELDS = {name: field for name, field in rollout_lib.FIELDS.items() if field.kind is not None}
_COLUMNS: dict[str, Column] = {
    "input_tokens": (_INTS, lambda r: r.tokens[: r.prompt_length]),
    "output_tokens": (_INTS, lambda r: r.tokens[r.prompt_length :]),
    "input_logprobs": (pa.list_(pa.float32()), lambda r: r.logprobs[: r.prompt_length]),
    "output_logprobs": (pa.list_(pa.float32()), lambda r: r.logprobs[r.prompt_length :]),
    "sampled_mask": (pa.list_(pa.bool_()), lambda r: r.sampled_mask),  # over input + output, as versions
    "versions": (_INTS, lambda r: r.versions),
    "reward_parts": (pa.map_(pa.string(), pa.float64()), lambda r: [(k, float(v)) for k, v in r.rewards.items()]),
    "calls": _flat("calls"),
    "call_limits": _flat("call_limits"),
    "prefix_versions": _flat("prefix_versions"),
    # The next five are ignored.
    "advantages": (pa.float32(), lambda r: 0.0),
    "task_rewards": (pa.float32(), lambda r: float(r.reward)),
    "length_penalties": (pa.float32(), lambda r: 0.0),
    "target_lengths": (pa.int32(), lambda r: -1),
    "problem_id": (pa.string(), lambda r: f"{r.task.env}/{r.task.index}"),
    **{_NAMES.get(name, name.replace(".", "_")): _column_of(name, field) for name, field in _FIELDS.items()},
    # The last two are of `ALL_SCHEMA`.
    "routed_experts": (pa.binary(), lambda r: rollout_lib.little_endian(r.routed_experts)),
    "routed_experts_shape": (_INTS, lambda r: getattr(r.routed_experts, "shape", ())),
}
ALL_SCHEMA = pa.schema([pa.field(name, dtype, nullable=False) for name, (dtype, _) in _COLUMNS.items()])
SCHEMA = pa.schema(list(ALL_SCHEMA)[:-2])  # without routed experts
# The longest values of columns of texts and of bytes.
_MAX_BYTES = {_NAMES.get(name, name): field.size for name, field in _FIELDS.items() if field.kind in (str, bytes)}
_MAX_BYTES |= {"routed_experts": rollout_lib.MAX_ROUTED_BYTES}
# Fields that are columns of the same name.
_SAME = [name for name in _FIELDS if name in _COLUMNS]


def write(path: str | os.PathLike, rollouts: list[rollout_lib.Rollout]) -> None:
    """Writes rollouts to a Parquet file, atomically and durably, and creates its parent directory.

    Raises ValueError if `read` would reject a rollout.
    """
    data = to_bytes(rollouts)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(pathlib.Path(path), data, durable=True)


def read(path: str | os.PathLike) -> list[rollout_lib.Rollout]:
    """Returns the rollouts of a Parquet file of any origin. Raises ValueError if the file is too large or breaks a rule."""
    path = pathlib.Path(path)
    parquet_footer.check_size(path.stat().st_size)
    return from_bytes(path.read_bytes())


def to_bytes(rollouts: Sequence[rollout_lib.Rollout]) -> bytes:
    """Returns the bytes of a Parquet file of these rollouts. Raises ValueError if `read` would reject a rollout."""
    for row, rollout in enumerate(rollouts):
        if reason := rollout_lib.validate(rollout):
            raise ValueError(f"rollout {row} cannot be written: {reason}; correct this field first")
    return table_bytes([to_table(rollouts)])


def to_table(rollouts: Sequence[rollout_lib.Rollout]) -> pa.Table:
    """Returns valid rollouts as the table that a file of them has."""
    schema = SCHEMA if all(rollout.routed_experts is None for rollout in rollouts) else ALL_SCHEMA
    return pa.table([pa.array(map(_COLUMNS[f.name][1], rollouts), f.type) for f in schema], schema=schema)


def table_bytes(tables: Sequence[pa.Table]) -> bytes:
    """Returns the bytes of a Parquet file with the rows of these tables of valid rollouts, in order."""
    if len({len(table.schema) for table in tables}) > 1:  # some name their experts
        tables = [to_table([rollout for table in tables for rollout in Rows(table).rollouts])]
    sink = pa.BufferOutputStream()
    # An embedded Arrow schema is one more thing to parse, and the Parquet types suffice.
    off: dict[str, Any] = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    pq.write_table(pa.concat_tables(tables).combine_chunks(), sink, compression="zstd", write_page_checksum=True, **off)
    return sink.getvalue().to_pybytes()


def to_record(table: pa.Table) -> pa.Buffer:
    """Returns the rows of a table of valid rollouts as one Arrow message, for `from_record`."""
    batches = table.to_batches()
    return (batches[0] if len(batches) == 1 else table.combine_chunks().to_batches()[0]).serialize()


def from_record(data: bytes | pa.Buffer, *, has_experts: bool) -> "Rows":
    """Returns the rows of a message that `to_record` made. They are not checked again: the bytes must be our own."""
    schema = ALL_SCHEMA if has_experts else SCHEMA
    return Rows(pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(data), schema)]))


class Rows:
    """The rows of a file of valid rollouts, as a table and as `rollouts`, which are made when they are needed."""

    def __init__(self, table: pa.Table, rollouts: list[rollout_lib.Rollout] | None = None):
        self.table, self._rollouts = table, rollouts

    @property
    def rollouts(self) -> list[rollout_lib.Rollout]:
        """The rows as rollouts."""
        if self._rollouts is None:
            columns = _columns(self.table)
            self._rollouts = _rollouts(columns, _arrays(columns), self.table.num_rows)
        return self._rollouts

    @property
    def has_experts(self) -> bool:
        """True if the table has the columns of routed experts."""
        return "routed_experts" in self.table.schema.names

    def take(self, rows: Sequence[int]) -> "Rows":
        """Returns the rows with these numbers. A part of the rows is copied, so that it does not keep a large file in memory."""
        if [*rows] == [*range(self.table.num_rows)]:
            return self
        found = [self.rollouts[row] for row in rows]
        is_range = [*rows] == [*range(rows[0], rows[0] + len(rows))]
        table = self.table.slice(rows[0], len(rows)) if is_range else self.table.take(pa.array(rows))
        # A message has these rows only. From a slice it costs a tenth of Arrow's `take`.
        copy = pa.ipc.read_record_batch(to_record(table), self.table.schema)
        return Rows(pa.Table.from_batches([copy]), [dataclasses.replace(one, **_copied(one)) for one in found])


def _copied(rollout: rollout_lib.Rollout) -> dict[str, np.ndarray]:
    """Returns copies of the arrays that the rollouts of a file share."""
    names = ("tokens", "logprobs", "sampled_mask", "versions", "calls", "call_limits", "prefix_versions")
    return {name: array.copy() for name in names if (array := getattr(rollout, name)) is not None}


def from_bytes(
    data: bytes, *, max_rows: int | None = None, max_tokens: int = rollout_lib.MAX_TOKENS
) -> list[rollout_lib.Rollout]:
    """Returns the rollouts in the bytes of a Parquet file, as `decode` does."""
    return decode(data, max_rows=max_rows, max_tokens=max_tokens).rollouts


def decode(data: bytes, *, max_rows: int | None = None, max_tokens: int = rollout_lib.MAX_TOKENS) -> Rows:
    """Returns the rows in the bytes of a Parquet file: at most `max_rows` of up to `max_tokens`.

    Any broken file raises ValueError with the column and the rule.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"rollout file: must be bytes, got {type(data).__name__}; pass the content of the file")
    _check_sizes(parquet_footer.check(data, max_rows=max_rows), max_tokens)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        _check_schema(file.schema_arrow)
        table = file.read(use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise ValueError(f"rollout file: not readable as Parquet: {error}; write the file again") from error
    columns = _columns(table)
    arrays = _arrays(columns)
    rollouts = _rollouts(columns, arrays, table.num_rows)
    has_good_values = _have_good_values(arrays)
    for row, rollout in enumerate(rollouts):
        if reason := _error(columns, row, rollout, has_good_values):
            raise ValueError(f"rollout file, row {row}: {reason}")
    return Rows(table, rollouts)


def _check_sizes(sizes: dict[str, list[int]], max_tokens: int) -> None:
    """Raises ValueError if a column is larger than the rollouts of a file can make it, before it is decoded.

    Zeros compress to nothing: 128 MB of proofs were 8 kB. `sizes` is the result of `parquet_footer.check`.
    """

    def get(name):  # a column that is missing is an error of the schema
        return sizes.get(name, (0, 0))

    rows, tokens = get("rewards")[0], get("input_tokens")[0] + get("output_tokens")[0]
    lists = ("input_logprobs", "output_logprobs", "sampled_mask", "versions")
    most = {name: (2 * rows + tokens, 0) for name in lists}  # an empty list counts as a value
    most |= {
        "calls": (rows + 2 * tokens, 0),
        "call_limits": (rows + tokens, 0),
        "prefix_versions": (rows + 3 * tokens, 0),
    }
    for name in ("input_tokens", "output_tokens"):
        most[name] = (rows + rows * max_tokens, 0)
    per_token = {"proofs": 2 * PROOF_BYTES / PROOF_TOKENS, "routed_experts": MAX_EXPERT_BYTES, "server_signature": 64}
    per_token["kept"] = 4 + 4 * kept_sets.MAX_KEPT
    for name, kind in zip(ALL_SCHEMA.names, ALL_SCHEMA.types, strict=True):
        if kind in (pa.string(), pa.binary()):
            row_bytes = 2 * PROOF_BYTES if name in per_token else _MAX_BYTES.get(name, 4 * rollout_lib.MAX_NAME)
            most[name] = (rows, rows * row_bytes + tokens * per_token.get(name, 0) + SLACK_BYTES)
    most["proofs"] = (rows, most["proofs"][1] + PROOF_BYTES * get("calls")[0])  # a proof may be of a single token
    for name, (values, num_bytes) in most.items():
        if get(name)[0] > values or get(name)[1] > (num_bytes or math.inf):
            found = f"{get(name)[0]} values and {get(name)[1]} bytes for {rows} rollouts of {tokens} tokens"
            raise ValueError(
                f"rollout file: column {name} has {found}, at most {values} and {num_bytes or 'any number'} are read; "
                f"write rollouts of at most {max_tokens} tokens, and only their own values"
            )


def _check_schema(schema: pa.Schema) -> None:
    """Raises ValueError if a file's schema is not that of rollouts, with or without routed experts."""
    wanted = ALL_SCHEMA if "routed_experts" in schema.names else SCHEMA
    for position, (found, field) in enumerate(itertools.zip_longest(schema, wanted)):
        if field is None:
            raise ValueError(f"rollout file: column {found.name!r} is not in the schema; leave it out")
        if found is None or (found.name, found.type) != (field.name, field.type):
            got = f"{found.name!r}: {found.type}" if found else "nothing"
            text = f"rollout file: column {position} must be {field.name}: {field.type}, got {got}"
            raise ValueError(f"{text}; write all in this order")


@dataclasses.dataclass(frozen=True)
class _Lists:
    """A column of lists: all values in a row, and where the list of each row begins and ends."""

    values: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


def _columns(table: pa.Table) -> dict[str, Any]:
    return {name: _column(name, table.column(name)) for name in table.schema.names if name != "problem_id"}


def _column(name: str, chunked: pa.ChunkedArray) -> Any:
    """Returns a column's values by row: `_Lists`, a list of pairs for the map, an array of numbers, or a list of texts or bytes."""
    array = chunked.combine_chunks()
    is_list, is_map = pa.types.is_list(array.type), pa.types.is_map(array.type)
    inner = [array.keys, array.items] if is_map else [array.values] if is_list else []
    if any(values.null_count for values in (array, *inner)):
        raise ValueError(f"rollout file: column {name} must not contain nulls; fill them in")
    # Sizes are checked before Python objects are made: these take up to a hundred times the bytes in the table.
    texts = array.keys if is_map else array
    if texts.type in (pa.string(), pa.binary()):
        longest = _MAX_BYTES.get(name, 4 * rollout_lib.MAX_NAME)
        found = pc.call_function("max", [pc.call_function("binary_length", [texts])]).as_py()
        if found is not None and found > longest:
            raise ValueError(f"rollout file: column {name}: must be at most {longest} bytes, got {found}; shorten it")
    if is_map:  # ten million empty ones fit into 7 kB of file
        counts = np.diff(array.offsets.to_numpy())
        if counts.max(initial=0) > rollout_lib.MAX_REWARD_PARTS or counts.sum() > MAX_FILE_PARTS:
            raise ValueError(
                f"rollout file: column {name} has {counts.max()} entries in a row and {counts.sum()} in all; at most "
                f"{rollout_lib.MAX_REWARD_PARTS} and {MAX_FILE_PARTS} are allowed; write fewer"
            )
    if is_list:
        return _Lists(array.values.to_numpy(zero_copy_only=False), array.offsets.to_numpy())
    if is_map or pa.types.is_binary(array.type) or pa.types.is_string(array.type):
        return array.to_pylist()
    return array.to_numpy(zero_copy_only=False)  # booleans have no other form


def _joined(first: _Lists, second: _Lists) -> _Lists:
    """Returns lists that are each a list of `first` and then one of `second`."""
    lengths = np.stack([first.lengths, second.lengths], axis=1)
    is_first = np.repeat(np.tile([True, False], len(lengths)), lengths.ravel())
    values = np.empty(len(is_first), first.values.dtype)
    for mask, lists in ((is_first, first), (~is_first, second)):
        values[mask] = lists.values[lists.offsets[0] : lists.offsets[-1]]
    return _Lists(values, np.concatenate([[0], np.cumsum(lengths.sum(axis=1))]))


def _arrays(columns: dict[str, Any]) -> dict[str, _Lists]:
    """Returns the arrays of all rows by their name in a rollout."""
    names = ("tokens", "logprobs")
    joined = {name: _joined(columns[f"input_{name}"], columns[f"output_{name}"]) for name in names}
    return joined | {name: columns[name] for name in ("sampled_mask", "versions")}


def _have_good_values(arrays: dict[str, _Lists]) -> bool:
    """Returns True if no rule for the arrays of a rollout is broken in any row: one look at all costs less than one at each."""
    lengths = arrays["tokens"].lengths
    if not all(np.array_equal(lists.lengths, lengths) for lists in arrays.values()):
        return False
    values = {name: lists.values[lists.offsets[0] : lists.offsets[-1]] for name, lists in arrays.items()}
    mask, starts = values["sampled_mask"], np.cumsum(lengths) - lengths
    if lengths.min(initial=1) < 1 or lengths.max(initial=1) > rollout_lib.MAX_TOKENS or mask[starts].any():
        return False
    return bool(np.logical_or.reduceat(mask, starts).all()) and rollout_lib.value_error(**values) is None


def _rollouts(columns: dict[str, Any], arrays: dict[str, _Lists], num_rows: int) -> list[rollout_lib.Rollout]:
    """Returns the rollouts of rows, valid or not. Those of a file share its arrays."""
    same = {name: columns[name] for name in _SAME}
    same = {name: column.tolist() if isinstance(column, np.ndarray) else column for name, column in same.items()}
    numbers = ("task_index", "task_group", "task_seed", "rewards")
    index, group, seed, reward = (columns[name].tolist() for name in numbers)
    return [
        rollout_lib.Rollout(
            task=rollout_lib.TaskRef(columns["task_type"][row], index[row], group[row], seed[row]),
            reward=reward[row],
            rewards=dict(columns["reward_parts"][row]),
            routed_experts=_experts(row, columns),
            calls=_table(columns["calls"][row], 2),
            prefix_versions=_table(columns["prefix_versions"][row], 3),
            call_limits=columns["call_limits"][row] if len(columns["call_limits"][row]) else None,
            **{name: lists[row] for name, lists in arrays.items()},
            **{name: column[row] for name, column in same.items()},
        )
        for row in range(num_rows)
    ]


def _error(columns: dict[str, Any], row: int, rollout: rollout_lib.Rollout, has_good_values: bool) -> str | None:
    """Returns the first rule that a row breaks, None if it is valid."""
    if len(rollout.rewards) != len(columns["reward_parts"][row]):
        return "reward_parts: names must differ; merge or rename them"
    if reason := rollout_lib.validate(rollout, has_good_values=has_good_values):
        return reason
    # The split is redundant with the mask, but a signed rollout should have one file only.
    num_prompt = rollout.prompt_length
    if len(columns["input_tokens"][row]) != num_prompt:
        return "input_tokens: must end where the first sampled token begins"
    if len(columns["input_logprobs"][row]) != num_prompt:
        return "input_logprobs: must have one entry per input token"
    return None


def _table(values: np.ndarray, width: int) -> np.ndarray | None:
    if not len(values):
        return None
    return values if len(values) % width else values.reshape(-1, width)  # `rollout.validate` rejects other numbers


def _experts(row: int, columns: dict[str, Any]) -> np.ndarray | None:
    if "routed_experts" not in columns:
        return None
    data, shape = columns["routed_experts"][row], columns["routed_experts_shape"][row]
    if not data and not len(shape):
        return None
    shape = [int(size) for size in shape]
    count = math.prod(shape)
    if len(shape) != 3 or min(shape) < 1 or len(data) not in (count, 2 * count):
        raise ValueError(
            f"rollout file, row {row}: routed_experts: must have one or two bytes per expert ID of the shape [tokens, "
            f"layers, experts per token], got {len(data)} bytes and the shape {shape[:4]}"
        )
    return np.frombuffer(data, "<u1" if len(data) == count else "<u2").reshape(shape)
