"""Rollouts as a Parquet file: what workers send, and what a run keeps.

1. `write` makes a file of whole groups: temporary name, then rename.
2. `read` takes one from anyone: sizes (inference/rollouts/parquet_footer.py), schema, every field. A broken file is a ValueError that names the
   column and the rule, whatever the bytes were.

The columns include those of INTELLECT-2's files, so its readers find what they know. Four of them are written for
such readers only and ignored here: `advantages` (zero: credit assignment belongs to the orchestrator, which sees the
whole group and need not trust a worker), `task_rewards` (= rewards), `length_penalties` (zero) and `target_lengths`
(-1); so is `problem_id`, which repeats env and index. `input_*` is the stream before the first sampled token and
`output_*` the rest of it, gaps included. `rewards`, `temperature` are float64 where theirs are float32: the signature
covers the exact numbers.

Runs that replay routers add `ROUTED_SCHEMA`: which experts ran each token but the last, for every layer of the model, as
bytes beside their shape; the bytes per index are the length over the product of the shape. Other files do not have
these columns, and a row without a claim has none of either.

Left out: dictionary and delta encodings on read (a few bytes of them expand to any amount of memory).

No jax here: a worker starts in a second.
"""

import math
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inference.rollouts import parquet_footer
from inference.rollouts import rollout as rollout_lib
from sharding.system import atomic_file

MAX_FILE_PARTS = 2**18  # reward parts of all rollouts of a file: each is 200 bytes to 1 KiB of Python objects

SCHEMA = pa.schema(
    [
        pa.field(name, dtype, nullable=False)
        for name, dtype in [
            ("input_tokens", pa.list_(pa.int32())),
            ("output_tokens", pa.list_(pa.int32())),
            ("input_logprobs", pa.list_(pa.float32())),
            ("output_logprobs", pa.list_(pa.float32())),
            ("sampled_mask", pa.list_(pa.bool_())),  # over input + output, as versions
            ("versions", pa.list_(pa.int32())),
            ("advantages", pa.float32()),  # zero, ignored
            ("rewards", pa.float64()),  # `reward`
            ("reward_parts", pa.map_(pa.string(), pa.float64())),  # `rewards`
            ("task_rewards", pa.float32()),  # ignored
            ("length_penalties", pa.float32()),  # ignored
            ("target_lengths", pa.int32()),  # ignored
            ("temperature", pa.float64()),
            ("seed", pa.int64()),
            ("step", pa.int32()),
            ("task_type", pa.string()),  # `task.env`
            ("problem_id", pa.string()),  # ignored
            ("task_index", pa.int64()),
            ("task_group", pa.int64()),
            ("task_seed", pa.int64()),
            ("sample", pa.int32()),
            ("finish_reason", pa.string()),
            ("proofs", pa.binary()),
            ("worker", pa.string()),
            ("signature", pa.binary()),
        ]
    ]
)
ROUTED_SCHEMA = pa.schema(
    [
        pa.field("routed_experts", pa.binary(), nullable=False),  # little-endian
        pa.field("routed_experts_shape", pa.list_(pa.int32()), nullable=False),  # empty: no claim
    ]
)


def write(path: str | os.PathLike, rollouts: list[rollout_lib.Rollout]) -> None:
    """Write a file that other processes see whole or not at all; the parent directory is created."""
    data = to_bytes(rollouts)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, data, durable=True)


def read(path: str | os.PathLike) -> list[rollout_lib.Rollout]:
    """`from_bytes` of a file; the size is looked at before the bytes."""
    path = pathlib.Path(path)
    parquet_footer.check_size(path.stat().st_size)
    return from_bytes(path.read_bytes())


def to_bytes(rollouts: list[rollout_lib.Rollout]) -> bytes:
    """The file's bytes. ValueError if a rollout would be refused on read."""
    for row, rollout in enumerate(rollouts):
        if reason := rollout_lib.validate(rollout):
            raise ValueError(f"rollout {row} cannot be written: {reason}")
    starts = [int(rollout.sampled_mask.argmax()) for rollout in rollouts]
    pairs = list(zip(rollouts, starts, strict=True))
    columns = {
        "input_tokens": [rollout.tokens[:start] for rollout, start in pairs],
        "output_tokens": [rollout.tokens[start:] for rollout, start in pairs],
        "input_logprobs": [rollout.logprobs[:start] for rollout, start in pairs],
        "output_logprobs": [rollout.logprobs[start:] for rollout, start in pairs],
        "sampled_mask": [rollout.sampled_mask for rollout in rollouts],
        "versions": [rollout.versions for rollout in rollouts],
        "advantages": [0.0 for _ in rollouts],
        "rewards": [float(rollout.reward) for rollout in rollouts],
        "reward_parts": [[(k, float(v)) for k, v in rollout.rewards.items()] for rollout in rollouts],
        "task_rewards": [float(rollout.reward) for rollout in rollouts],
        "length_penalties": [0.0 for _ in rollouts],
        "target_lengths": [-1 for _ in rollouts],
        "temperature": [float(rollout.temperature) for rollout in rollouts],
        "seed": [int(rollout.seed) for rollout in rollouts],
        "step": [int(rollout.step) for rollout in rollouts],
        "task_type": [rollout.task.env for rollout in rollouts],
        "problem_id": [f"{rollout.task.env}/{rollout.task.index}" for rollout in rollouts],
        "task_index": [int(rollout.task.index) for rollout in rollouts],
        "task_group": [int(rollout.task.group) for rollout in rollouts],
        "task_seed": [int(rollout.task.seed) for rollout in rollouts],
        "sample": [int(rollout.sample) for rollout in rollouts],
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "proofs": [rollout.proofs for rollout in rollouts],
        "worker": [rollout.worker for rollout in rollouts],
        "signature": [rollout.signature for rollout in rollouts],
    }
    schema, experts = SCHEMA, [rollout.routed_experts for rollout in rollouts]
    if any(array is not None for array in experts):
        schema = pa.schema([*SCHEMA, *ROUTED_SCHEMA])
        columns["routed_experts"] = [b"" if array is None else rollout_lib.little_endian(array) for array in experts]
        columns["routed_experts_shape"] = [() if array is None else array.shape for array in experts]
    table = pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,  # the Parquet types say it all; an embedded Arrow schema is one more thing to parse
    )
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> list[rollout_lib.Rollout]:
    """The rollouts of a file from anyone, or ValueError with the column and the rule, for any bytes at all."""
    if not isinstance(data, bytes):
        raise ValueError(f"rollout file: expected bytes, got {type(data).__name__}")
    parquet_footer.check(data)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        schema = _checked_schema(file.schema_arrow)
        table = file.read(use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise ValueError(f"rollout file: not readable as Parquet: {error}") from error
    columns = {name: _column(name, table.column(name)) for name in schema.names if name != "problem_id"}
    return [_row(columns, row) for row in range(table.num_rows)]


def _checked_schema(schema: pa.Schema) -> pa.Schema:
    """The one that it is: ours, or ours with the routed experts."""
    more = schema.names[len(SCHEMA) :] == ROUTED_SCHEMA.names
    wanted = pa.schema([*SCHEMA, *ROUTED_SCHEMA]) if more else SCHEMA
    for position, field in enumerate(wanted):
        found = schema.field(position) if position < len(schema) else None
        if found is None or found.name != field.name or found.type != field.type:
            raise ValueError(
                f"rollout file: column {position} must be {field.name}: {field.type}, got "
                + (f"{found.name!r}: {found.type}" if found is not None else "nothing")
            )
    if len(schema) != len(wanted):
        raise ValueError(f"rollout file: column {schema.names[len(wanted)]!r} is not in the schema")
    return wanted


def _column(name: str, chunked: pa.ChunkedArray) -> list:
    """One entry per row: a numpy array for lists, a list of pairs for the map, else a Python value."""
    array = chunked.combine_chunks()
    inner = [array.keys, array.items] if pa.types.is_map(array.type) else []
    inner = [array.values] if pa.types.is_list(array.type) else inner
    if array.null_count or any(values.null_count for values in inner):
        raise ValueError(f"rollout file: column {name} must not hold nulls")
    # What is too much is refused before it is Python objects: they take up to a hundred times the bytes in the table.
    texts = array.keys if pa.types.is_map(array.type) else array
    limits = {"proofs": rollout_lib.MAX_PROOF_BYTES, "routed_experts": rollout_lib.MAX_ROUTED_BYTES}
    longest = (limits | {"worker": 64, "finish_reason": 64, "signature": 64}).get(name, 4 * rollout_lib.MAX_NAME)
    if not pa.types.is_list(array.type) and (texts.type == pa.string() or texts.type == pa.binary()):
        if len(texts) and (found := pc.max(pc.binary_length(texts)).as_py()) > longest:
            raise ValueError(f"rollout file: column {name}: must be at most {longest} bytes, got {found}")
    if pa.types.is_map(array.type):  # ten million empty ones fit into 7 kB of file
        counts = np.diff(array.offsets.to_numpy())
        if counts.max(initial=0) > rollout_lib.MAX_REWARD_PARTS or counts.sum() > MAX_FILE_PARTS:
            raise ValueError(
                f"rollout file: column {name} has {counts.max()} entries in a row and {counts.sum()} in all; at most "
                f"{rollout_lib.MAX_REWARD_PARTS} and {MAX_FILE_PARTS} are read"
            )
    if not pa.types.is_list(array.type):
        return array.to_pylist()
    values = array.values.to_numpy(zero_copy_only=False)
    offsets = array.offsets.to_numpy()
    return [values[start:end] for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


def _row(columns: dict[str, list], row: int) -> rollout_lib.Rollout:
    get = {name: column[row] for name, column in columns.items()}
    parts = dict(get["reward_parts"])
    if len(parts) != len(get["reward_parts"]):
        raise ValueError(f"rollout file, row {row}: reward_parts: names must differ")
    rollout = rollout_lib.Rollout(
        tokens=np.concatenate([get["input_tokens"], get["output_tokens"]]),
        sampled_mask=get["sampled_mask"],
        logprobs=np.concatenate([get["input_logprobs"], get["output_logprobs"]]),
        versions=get["versions"],
        temperature=get["temperature"],
        seed=get["seed"],
        task=rollout_lib.TaskRef(get["task_type"], get["task_index"], get["task_group"], get["task_seed"]),
        sample=get["sample"],
        step=get["step"],
        reward=get["rewards"],
        rewards=parts,
        finish_reason=get["finish_reason"],
        proofs=get["proofs"],
        worker=get["worker"],
        signature=get["signature"],
        routed_experts=_experts(row, get.get("routed_experts", b""), get.get("routed_experts_shape", ())),
    )
    reason = rollout_lib.validate(rollout)
    # The split is redundant with the mask; two files of one signed rollout would be one too many.
    if not reason and len(get["input_tokens"]) != int(rollout.sampled_mask.argmax()):
        reason = "input_tokens: must end where the first sampled token begins"
    if not reason and len(get["input_logprobs"]) != len(get["input_tokens"]):
        reason = "input_logprobs: must have one entry per input token"
    if reason:
        raise ValueError(f"rollout file, row {row}: {reason}")
    return rollout


def _experts(row: int, data: bytes, shape: Sequence[int]) -> np.ndarray | None:
    if not data and not len(shape):
        return None
    shape = [int(size) for size in shape]
    count = math.prod(shape)
    if len(shape) != 3 or min(shape) < 1 or len(data) not in (count, 2 * count):
        raise ValueError(
            f"rollout file, row {row}: routed_experts: must be one or two bytes per entry of routed_experts_shape = [rows, "
            f"layers, experts per token], got {len(data)} bytes and {shape[:4]}"
        )
    return np.frombuffer(data, "<u1" if len(data) == count else "<u2").reshape(shape)
