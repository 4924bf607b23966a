"""The record that every process shares: one token stream, what it was worth, and who vouches for it.

In time:
1. An environment worker drives an episode against an inference server. Each branch of it is one token stream: the
   prompt, what the policy sampled, and between two turns what the environment said (so `sampled_mask` has gaps).
2. The worker fills a `Rollout`, `sign`s it, and `write`s a group as one Parquet file: temporary name, then rename.
3. Validator and orchestrator `read` it: sizes (inference/rollout_file.py), schema, every field. A broken file is a ValueError that names the
   column and the rule, whatever the bytes were; then `signature_ok` says whether the key in `worker` vouches for it.

The columns include those of INTELLECT-2's files, so its readers find what they know. Four of them are written for
such readers only and ignored here: `advantages` (zero: credit assignment belongs to the orchestrator, which sees the
whole group and need not trust a worker), `task_rewards` (= rewards), `length_penalties` (zero) and `target_lengths`
(-1); so is `problem_id`, which repeats env and index. `input_*` is the stream before the first sampled token and
`output_*` the rest of it, gaps included. `rewards`, `temperature` are float64 where theirs are float32: the signature
covers the exact numbers.

Runs that replay routers add `ROUTED_SCHEMA`: which experts ran each token but the last, for every layer of the model, as
bytes beside their shape; the bytes per index are the length over the product of the shape. Other files do not have
these columns, and a row without a claim has none of either.

Left out: `prompt` and `completion` as text (a tokenizer makes them from tokens, and a mismatch would be one more lie
to check); dictionary and delta encodings on read (a few bytes of them expand to any amount of memory).

No jax here: a worker starts in a second.
"""

import dataclasses
import hashlib
import math
import numbers
import os
import pathlib
import re
import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from cryptography import exceptions
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference import rollout_file
from sharding import atomic_file

FINISH_REASONS = ("stop", "length")
MAX_TOKENS = 2**20  # per stream
MAX_PROOF_BYTES = 2**24  # per stream; 258 bytes per 32 tokens need half of it at MAX_TOKENS
MAX_ROUTED_BYTES = 2**27  # per stream; 16,000 tokens of 48 layers with 8 experts each take 6 MB
MAX_REWARD_PARTS = 64
MAX_FILE_PARTS = 2**18  # reward parts of all rollouts of a file: each is 200 bytes to 1 KiB of Python objects
MAX_NAME = 256  # characters of an environment's or a reward's name
LOGPROB_SLACK = 1e-6  # a log-softmax in float32 may end a hair above 0


@dataclasses.dataclass(frozen=True)
class TaskRef:
    """Which problem: anyone with the environment can build it again from these four."""

    env: str
    index: int  # of the problem in the environment's data
    group: int  # streams of one group share a problem and are compared with one another
    seed: int  # of a procedurally generated problem


@dataclasses.dataclass(frozen=True, eq=False)  # == on arrays has no single truth value; compare `digest`s
class Rollout:
    """One token stream = one branch of one episode, T tokens long.

    Example, two turns: tokens = prompt | sampled | tool result | sampled, sampled_mask = 0 0 0 1 1 0 0 1 1.
    """

    tokens: np.ndarray  # int32 [T] prompt + completion, one token stream
    sampled_mask: np.ndarray  # bool [T], True where the policy sampled the token; never at position 0
    logprobs: np.ndarray  # float32 [T], behaviour logprob at the sampling temperature; 0 where not sampled
    versions: np.ndarray  # int32 [T], policy version that sampled the token, or at prompt positions prefilled it
    temperature: float
    seed: int  # uint32: the sampling noise is a function of (seed, position)
    task: TaskRef
    sample: int  # 0 .. G-1 inside the group
    step: int  # training step (batch) this rollout was generated for
    reward: float
    rewards: dict[str, float]  # named parts, for the reader; `reward` is what counts
    finish_reason: str  # "stop" | "length"
    proofs: bytes  # toploc.join of the proofs of the sampled rows
    worker: str  # hex of the ed25519 public key; "" until signed
    signature: bytes  # 64 bytes over `digest`; b"" until signed
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [T - 1, layers, experts per token], which ran each token


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


def write(path: str | os.PathLike, rollouts: list[Rollout]) -> None:
    """Write a file that other processes see whole or not at all; the parent directory is created."""
    data = to_parquet(rollouts)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, data, durable=True)


def read(path: str | os.PathLike) -> list[Rollout]:
    """`from_parquet` of a file; the size is looked at before the bytes."""
    path = pathlib.Path(path)
    rollout_file.check_size(path.stat().st_size)
    return from_parquet(path.read_bytes())


def to_parquet(rollouts: list[Rollout]) -> bytes:
    """The file's bytes. ValueError if a rollout would be refused on read."""
    for row, rollout in enumerate(rollouts):
        if reason := validate(rollout):
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
        columns["routed_experts"] = [b"" if array is None else _little_endian(array) for array in experts]
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


def from_parquet(data: bytes) -> list[Rollout]:
    """The rollouts of a file from anyone, or ValueError with the column and the rule, for any bytes at all."""
    if not isinstance(data, bytes):
        raise ValueError(f"rollout file: expected bytes, got {type(data).__name__}")
    rollout_file.check(data)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        schema = _checked_schema(file.schema_arrow)
        table = file.read(use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise ValueError(f"rollout file: not readable as Parquet: {error}") from error
    columns = {name: _column(name, table.column(name)) for name in schema.names if name != "problem_id"}
    return [_row(columns, row) for row in range(table.num_rows)]


def validate(rollout: Rollout) -> str | None:
    """None, or the first rule broken as "field: rule, what was found". Total: it never raises."""
    if not isinstance(rollout, Rollout):
        return f"rollout: must be a Rollout, got {type(rollout).__name__}"
    return _array_error(rollout) or _scalar_error(rollout)


# ---- identity -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WorkerKey:
    """A worker's ed25519 identity. `worker` (hex of the public key) is its name everywhere."""

    private: ed25519.Ed25519PrivateKey = dataclasses.field(repr=False)

    @property
    def worker(self) -> str:
        return self.private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> "WorkerKey":
        return cls(ed25519.Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "WorkerKey":
        data = pathlib.Path(path).read_bytes()
        try:
            private = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError, exceptions.UnsupportedAlgorithm) as error:
            raise ValueError(f"{path} is not an unencrypted PEM private key: {error}") from error
        if not isinstance(private, ed25519.Ed25519PrivateKey):
            raise ValueError(f"{path} holds {type(private).__name__}; a worker key is ed25519")
        return cls(private)

    def save(self, path: str | os.PathLike) -> None:
        """PKCS8 PEM, readable by the owner only. FileExistsError rather than the loss of an older identity."""
        data = self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)


def sign(rollout: Rollout, key: WorkerKey) -> Rollout:
    """The rollout under the key's name. ValueError for one that `validate` refuses: nobody could use it."""
    rollout = dataclasses.replace(rollout, worker=key.worker, signature=b"")
    if reason := validate(rollout):
        raise ValueError(f"rollout cannot be signed: {reason}")
    return dataclasses.replace(rollout, signature=key.private.sign(digest(rollout)))


def signature_ok(rollout: Rollout) -> bool:
    """Whether the key named in `worker` signed exactly this rollout. Total: False for anything malformed."""
    if validate(rollout) or not rollout.signature:
        return False
    try:
        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(rollout.worker))
        public.verify(rollout.signature, digest(rollout))
    except (exceptions.InvalidSignature, ValueError):  # ValueError: not a point on the curve
        return False
    return True


def digest(rollout: Rollout) -> bytes:
    """SHA-256 of every field but `signature`, of a valid rollout.

    The preimage is "intellax/rollout/1", then per field, in the order below: name and payload, each behind its
    length as uint64. Integers are int64, reals float64, arrays their elements, all little-endian; `rewards` is
    (name, value) sorted by name. `routed_experts`, its shape before its elements, is there only if it is claimed.
    """
    task = rollout.task
    parts = sorted((name.encode(), float(value)) for name, value in rollout.rewards.items())
    fields = {
        "tokens": rollout.tokens.astype("<i4").tobytes(),
        "sampled_mask": rollout.sampled_mask.astype("u1").tobytes(),
        "logprobs": rollout.logprobs.astype("<f4").tobytes(),
        "versions": rollout.versions.astype("<i4").tobytes(),
        "temperature": struct.pack("<d", rollout.temperature),
        "seed": struct.pack("<q", rollout.seed),
        "task.env": task.env.encode(),
        "task.index": struct.pack("<q", task.index),
        "task.group": struct.pack("<q", task.group),
        "task.seed": struct.pack("<q", task.seed),
        "sample": struct.pack("<q", rollout.sample),
        "step": struct.pack("<q", rollout.step),
        "reward": struct.pack("<d", rollout.reward),
        "rewards": b"".join(_framed(name) + struct.pack("<d", value) for name, value in parts),
        "finish_reason": rollout.finish_reason.encode(),
        "proofs": rollout.proofs,
        "worker": rollout.worker.encode(),
    }
    if (experts := rollout.routed_experts) is not None:
        fields["routed_experts"] = struct.pack("<4q", *experts.shape, experts.itemsize) + _little_endian(experts)
    hasher = hashlib.sha256(b"intellax/rollout/1")
    for name, payload in fields.items():
        hasher.update(_framed(name.encode()) + _framed(payload))
    return hasher.digest()


def _framed(payload: bytes) -> bytes:
    return struct.pack("<Q", len(payload)) + payload


def num_bytes(rollout: Rollout) -> int:
    """Of what grows with its length: 13 per token, the proofs, the experts."""
    experts = 0 if rollout.routed_experts is None else rollout.routed_experts.nbytes
    return 13 * len(rollout.tokens) + len(rollout.proofs) + experts


def _little_endian(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


# ---- reading --------------------------------------------------------------------------------------------------------


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
    limits = {"proofs": MAX_PROOF_BYTES, "routed_experts": MAX_ROUTED_BYTES}
    longest = (limits | {"worker": 64, "finish_reason": 64, "signature": 64}).get(name, 4 * MAX_NAME)
    if not pa.types.is_list(array.type) and (texts.type == pa.string() or texts.type == pa.binary()):
        if len(texts) and (found := pc.max(pc.binary_length(texts)).as_py()) > longest:
            raise ValueError(f"rollout file: column {name}: must be at most {longest} bytes, got {found}")
    if pa.types.is_map(array.type):  # ten million empty ones fit into 7 kB of file
        counts = np.diff(array.offsets.to_numpy())
        if counts.max(initial=0) > MAX_REWARD_PARTS or counts.sum() > MAX_FILE_PARTS:
            raise ValueError(
                f"rollout file: column {name} has {counts.max()} entries in a row and {counts.sum()} in all; at most "
                f"{MAX_REWARD_PARTS} and {MAX_FILE_PARTS} are read"
            )
    if not pa.types.is_list(array.type):
        return array.to_pylist()
    values = array.values.to_numpy(zero_copy_only=False)
    offsets = array.offsets.to_numpy()
    return [values[start:end] for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


def _row(columns: dict[str, list], row: int) -> Rollout:
    get = {name: column[row] for name, column in columns.items()}
    parts = dict(get["reward_parts"])
    if len(parts) != len(get["reward_parts"]):
        raise ValueError(f"rollout file, row {row}: reward_parts: names must differ")
    rollout = Rollout(
        tokens=np.concatenate([get["input_tokens"], get["output_tokens"]]),
        sampled_mask=get["sampled_mask"],
        logprobs=np.concatenate([get["input_logprobs"], get["output_logprobs"]]),
        versions=get["versions"],
        temperature=get["temperature"],
        seed=get["seed"],
        task=TaskRef(get["task_type"], get["task_index"], get["task_group"], get["task_seed"]),
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
    reason = validate(rollout)
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


# ---- the rules ------------------------------------------------------------------------------------------------------


def _array_error(rollout: Rollout) -> str | None:
    for name, dtype in [("tokens", "i4"), ("sampled_mask", "?"), ("logprobs", "f4"), ("versions", "i4")]:
        array = getattr(rollout, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.dtype(dtype):
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            return f"{name}: must be a numpy {np.dtype(dtype)} [T], got {found}"
        if len(array) != len(rollout.tokens):
            return f"{name}: must have one entry per token, got {len(array)} for {len(rollout.tokens)}"
    if len(rollout.tokens) > MAX_TOKENS:
        return f"tokens: at most {MAX_TOKENS}, got {len(rollout.tokens)}"
    if not rollout.sampled_mask.any():
        return "sampled_mask: must have at least one True, or there is nothing to learn from"
    if rollout.sampled_mask[0]:
        return "sampled_mask: position 0 cannot be sampled, nothing came before it"
    for name in ("tokens", "versions"):
        if (lowest := int(getattr(rollout, name).min())) < 0:
            return f"{name}: must be >= 0, got {lowest}"
    bad_T = ~(rollout.logprobs <= LOGPROB_SLACK) | np.isinf(rollout.logprobs)  # the comparison is False for NaN
    if bad_T.any():
        at = int(bad_T.argmax())
        return f"logprobs: must be finite and <= {LOGPROB_SLACK}, got {rollout.logprobs[at]} at position {at}"
    if rollout.logprobs[~rollout.sampled_mask].any():
        return "logprobs: must be 0 where the token was not sampled"
    return _experts_error(rollout)


def _experts_error(rollout: Rollout) -> str | None:
    """Of form alone: a record does not say which model it is of."""
    experts = rollout.routed_experts
    if experts is None:
        return None
    if not isinstance(experts, np.ndarray) or experts.dtype not in (np.uint8, np.uint16) or experts.ndim != 3:
        found = f"{experts.dtype}{list(experts.shape)}" if isinstance(experts, np.ndarray) else type(experts).__name__
        return (
            f"routed_experts: must be None or a numpy uint8 or uint16 [T - 1, layers, experts per token], got {found}"
        )
    if len(experts) != len(rollout.tokens) - 1 or not experts.size:
        return f"routed_experts: must have a row per token but the last, got {list(experts.shape)}"
    if experts.nbytes > MAX_ROUTED_BYTES:
        return f"routed_experts: at most {MAX_ROUTED_BYTES} bytes, got {experts.nbytes}"
    return None


def _scalar_error(rollout: Rollout) -> str | None:
    task = rollout.task
    if not isinstance(task, TaskRef):
        return f"task: must be a TaskRef, got {type(task).__name__}"
    for name, value, limit in [
        ("seed", rollout.seed, 2**32),
        ("task.index", task.index, 2**63),
        ("task.group", task.group, 2**63),
        ("task.seed", task.seed, 2**63),
        ("sample", rollout.sample, 2**31),
        ("step", rollout.step, 2**31),
    ]:
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not 0 <= value < limit:
            return f"{name}: must be an integer in [0, {limit}), got {_shown(value)}"
    if not _is_finite(rollout.temperature) or rollout.temperature < 0:
        return f"temperature: must be finite and >= 0, got {_shown(rollout.temperature)}"
    if not _is_finite(rollout.reward):
        return f"reward: must be finite, got {_shown(rollout.reward)}"
    if not isinstance(rollout.rewards, dict) or len(rollout.rewards) > MAX_REWARD_PARTS:
        return f"rewards: must be a dict of at most {MAX_REWARD_PARTS}, got {_shown(rollout.rewards)}"
    for name, value in rollout.rewards.items():
        if not _is_name(name) or not _is_finite(value):
            return f"rewards: must map printable names to finite numbers, got {_shown(name)}: {_shown(value)}"
    if not _is_name(task.env):
        return f"task.env: must be 1 to {MAX_NAME} printable characters, got {_shown(task.env)}"
    if not isinstance(rollout.finish_reason, str) or rollout.finish_reason not in FINISH_REASONS:
        return f"finish_reason: must be one of {FINISH_REASONS}, got {_shown(rollout.finish_reason)}"
    if not isinstance(rollout.proofs, bytes) or len(rollout.proofs) > MAX_PROOF_BYTES:
        return f"proofs: must be at most {MAX_PROOF_BYTES} bytes"
    if not isinstance(rollout.worker, str) or not re.fullmatch("(?:[0-9a-f]{64})?", rollout.worker):
        return f"worker: must be a public key as 64 lower-case hex digits, or empty, got {_shown(rollout.worker)}"
    if not isinstance(rollout.signature, bytes) or len(rollout.signature) not in (0, 64):
        return f"signature: must be 64 bytes, or empty, got {_shown(rollout.signature)}"
    return None


def _is_finite(value) -> bool:
    if isinstance(value, numbers.Integral):
        return not isinstance(value, bool) and abs(int(value)) <= 2**53  # exact in float64
    return isinstance(value, float | np.floating) and math.isfinite(value)


def _is_name(value) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _shown(value) -> str:
    """repr, where that is short and cannot fail (it does for an int of 5000 digits)."""
    if isinstance(value, str | bytes):
        return repr(value[:80])
    if isinstance(value, numbers.Integral) and abs(int(value)) >= 2**64:
        return f"an integer of {int(value).bit_length()} bits"
    return repr(value) if isinstance(value, numbers.Number) else type(value).__name__
