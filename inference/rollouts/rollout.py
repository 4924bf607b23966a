"""A rollout: one token sequence with its log-probabilities, proofs, reward, and the signature of its worker.

1. A worker drives an episode against an inference server. Each of its branches is one token stream: the prompt, the tokens that
   the policy sampled, and between two turns the tokens of the environment (so `sampled_mask` has gaps). An episode has a further branch
   where its history was rewritten: that prompt has the tokens which an earlier branch sampled, so each of them is sampled once.
2. The worker fills the `Rollout`s of a group, signs them (`sign_all`), and sends them in a Parquet file (inference/rollouts/parquet.py).
3. Validator and orchestrator read the file. `validate` checks every field of an untrusted rollout, and `signature_ok` that
   the key in `worker` signed it.

Left out: prompt and completion as text, which follow from the tokens. No jax here: a worker starts in a second.
"""

import dataclasses
import functools
import hashlib
import math
import numbers
import operator
import os
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference.rollouts import kept_sets
from sharding.system import signed_message

FINISH_REASONS = ("stop", "length")
MAX_TOKENS = 2**20  # per stream
MAX_PROOF_BYTES = 2**24  # per stream; 258 bytes per 32 tokens need half of it at MAX_TOKENS
MAX_ROUTED_BYTES = 2**27  # per stream: 16,000 tokens of 48 layers with 8 experts each take 6 MB
MAX_KEPT_BYTES = 2**27  # per stream: 16,000 tokens with sets of 1,024 IDs take half of it
MAX_PATH = 16  # hashes from a rollout to the root that its worker signed
SIGNATURE_BYTES = (0, *range(64, 65 + 32 * MAX_PATH, 32))
MAX_REWARD_PARTS = 64
MAX_NAME = 256  # characters of an environment's or a reward's name
MAX_CALLS = 2**12  # of the inference server, per stream
PROOF_TOKENS, PROOF_VALUES = 32, 128  # of a TOPLOC proof
LOGPROB_SLACK = 1e-6  # a log-softmax in float32 may end a hair above 0
_ARRAYS = {"tokens": np.dtype("<i4"), "sampled_mask": np.dtype(bool), "logprobs": np.dtype("<f4")}
_ARRAYS |= {"versions": np.dtype("<i4")}
MAX_SAMPLES = 2**31  # of a group
SIGNED_RULE = "64 bytes per call with a server, else empty"
_KEY = re.compile("([0-9a-f]{64})?")


@dataclasses.dataclass(frozen=True)
class TaskRef:
    """The reference to a task in a rollout: the environment can build the task again from these four fields."""

    env: str
    index: int  # of the task in the environment's data
    group: int  # rollouts of one group have the same task, and their rewards are compared
    seed: int  # of a procedurally generated task


@dataclasses.dataclass(frozen=True, eq=False)  # == on arrays has no single truth value; compare `digest`s
class Rollout:
    """One rollout: the T tokens of one branch of an episode, with log-probabilities, reward, proofs, and signature.

    Example, two turns: tokens = prompt | sampled | tool result | sampled, sampled_mask = 0 0 0 1 1 0 0 1 1, calls = [[3, 5], [7, 9]].
    """

    tokens: np.ndarray  # int32 [T] prompt + completion, one token stream
    sampled_mask: np.ndarray  # bool [T], True where the policy sampled the token; never at position 0
    logprobs: np.ndarray  # float32 [T], behavior logprob at the sampling temperature; 0 where not sampled
    # int32 [T], policy version that sampled the token, or prefilled the prompt of the call after it, with all tokens before
    versions: np.ndarray
    temperature: float
    seed: int  # uint32: the sampling noise is a function of (seed, position)
    task: TaskRef
    sample: int  # 0 .. G-1 inside the group: the number of the episode
    step: int  # training step (batch) this rollout was generated for
    reward: float  # of the episode, as `rewards`
    rewards: dict[str, float]  # reward components by name, for information; only `reward` is trained on
    finish_reason: str  # "stop" | "length", of the last call
    proofs: bytes  # toploc proofs of the sampled rows, joined; those of each call begin anew
    worker: str  # hex of the ed25519 public key; "" until signed
    signature: bytes  # 64 bytes over the root of a hash tree, then the path from `digest` to it; b"" until signed
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [T - 1, layers, experts per token], which ran each token
    epoch: int = 0  # of all policy versions that sampled or prefilled (rl/protocol/timeline.py)
    server: str = ""  # hex of the public key of the inference server that vouches for the samples; "": none does
    server_signature: bytes = b""  # 64 bytes per call (inference/rollouts/attestation.py); b"" without a server
    env_digest: str = ""  # SHA-256 in hex of the environment's code and data (`rl.envs.digest`); "": not recorded
    branch: int = 0  # of the episode's branches, in the order in which they began
    num_branches: int = 1
    # int32 [N, 2], first column and end of each completion; None: one, of all after the prompt
    calls: np.ndarray | None = None
    # int32 [N], tokens that each call asked for at most; None: as many as the run allows
    call_limits: np.ndarray | None = None
    draw: int = 0  # number of the first call, among those of the episode with the same prompt
    # False: the model plays another role here, such as a judge; the tokens are verified, and not trained on
    trains: bool = True
    kept: bytes = b""  # token IDs that filters left to sample from (inference/rollouts/kept_sets.py); b"": not recorded
    # int32 [N, 3], (call, end, version): keys of an older version that the call's prompt reused; None: none
    prefix_versions: np.ndarray | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The (first column, end) of the completion of each call of the inference server, in order."""
        one = [(self.prompt_length, len(self.tokens))]
        return one if self.calls is None else [(start, end) for start, end in self.calls.tolist()]

    def prefix_runs(self, call: int) -> list[tuple[int, int]]:
        """Returns (end, version), in order, of the reused keys of a call's prompt; `versions` names the version of the keys after them."""
        rows = () if self.prefix_versions is None else self.prefix_versions.tolist()
        return [(end, version) for number, end, version in rows if number == call]

    @property
    def all_versions(self) -> set[int]:
        """The policy versions that sampled a token or computed a key."""
        reused = () if self.prefix_versions is None else self.prefix_versions[:, 2].tolist()
        return {*np.unique(self.versions).tolist(), *reused}

    @property
    def oldest_version(self) -> int:
        """The oldest of `all_versions`."""
        return min(self.all_versions)

    @property
    def number(self) -> int:
        """The number of this rollout in its group: that of the sample; a further branch of an episode has a greater one than any first."""
        return self.sample + MAX_SAMPLES * self.branch

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first sampled token. At least one must be sampled, as `validate` checks."""
        return max(self.sampled_mask.tobytes().find(1), 0)  # `argmax` would give up the GIL for a moment


def validate(rollout: Rollout, *, has_good_values: bool = False) -> str | None:
    """Checks every field of an untrusted rollout; returns the first error as "field: rule, got value", or None if valid.

    The signature is not verified here, only its length. With `has_good_values`, its arrays are known to break no rule. Never
    raises, for any argument.
    """
    if not isinstance(rollout, Rollout):
        return f"rollout: must be a Rollout, got {type(rollout).__name__}"
    if not has_good_values:
        arrays = (getattr(rollout, name) for name in _ARRAYS)
        if reason := _array_error(rollout) or value_error(*arrays):
            return reason
    given = ((check, getattr(rollout, name)) for name, check in _OPTIONAL.items())
    errors = (check(rollout, found) for check, found in given if found is not None)
    return next(filter(None, errors), None) or _kept_error(rollout) or _scalar_error(rollout)


def episodes(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Returns the rollouts of one group by episode, in order of sample and branch."""
    found: dict[int, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=operator.attrgetter("sample", "branch")):
        found.setdefault(rollout.sample, []).append(rollout)
    return [*found.values()]


def proofs_by_call(rollout: Rollout, hidden_dim: int) -> list[bytes]:
    """Returns the proofs of each call of a model with `hidden_dim` dims. The last has all bytes that are left, or too few."""
    parts, left = [], rollout.proofs
    for start, end in rollout.spans[:-1]:
        whole, rest = divmod(end - start, PROOF_TOKENS)
        sizes = [2 + 2 * min(PROOF_VALUES, rows * hidden_dim) for rows in (PROOF_TOKENS, rest)]
        size = whole * sizes[0] + (rest > 0) * sizes[1]
        parts, left = [*parts, left[:size]], left[size:]
    return [*parts, left]


def kept_by_call(rollout: Rollout) -> list[bytes]:
    """Returns the encoded kept sets of each call. Raises ValueError if they are not those of its sampled tokens."""
    parts, left = [], rollout.kept
    for start, end in rollout.spans if left else ():
        counts = np.frombuffer(left[: 4 * (end - start)], "<u4")
        size = 4 * (len(counts) + int(counts.sum(dtype=np.int64)))
        parts, left = [*parts, left[:size]], left[size:]
    if rollout.kept:
        kept_sets.read(rollout.kept, [end - start for start, end in rollout.spans])
    return parts or [b""] * len(rollout.spans)


def value_error(tokens: np.ndarray, sampled_mask: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> str | None:
    """Returns the first rule for a single token that the arrays of rollouts break, joined or of one; None if they break none."""
    for name, array in (("tokens", tokens), ("versions", versions)):
        if (lowest := int(array.min(initial=0))) < 0:
            return f"{name}: must be >= 0, got {lowest}"
    bad_T = ~(logprobs <= LOGPROB_SLACK) | np.isinf(logprobs)  # the comparison is False for NaN
    if bad_T.any():
        at = int(bad_T.argmax())
        return f"logprobs: must be finite and <= {LOGPROB_SLACK}, got {logprobs[at]} at position {at}"
    is_zero = not logprobs[~sampled_mask].any()
    return None if is_zero else "logprobs: must be 0 where the token was not sampled"


@dataclasses.dataclass(frozen=True)
class WorkerKey:
    """A worker's ed25519 key pair, with which it signs rollouts and lease requests; a run signs its weights with one, too."""

    private: ed25519.Ed25519PrivateKey = dataclasses.field(repr=False)

    @functools.cached_property
    def worker(self) -> str:
        """The worker's name everywhere: its public key in hex."""
        return self.private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> "WorkerKey":
        """Returns a new random key pair."""
        return cls(ed25519.Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike, role: str = "worker key") -> "WorkerKey":
        """Returns the key pair in a file, as `signed_message.load_key` does."""
        return cls(signed_message.load_key(path, role))

    @classmethod
    def load_or_create(cls, path: str | os.PathLike, role: str = "worker key") -> "WorkerKey":
        """Returns the key pair in a file, which is created with a new one if it does not exist."""
        return cls(signed_message.load_or_create_key(path, role))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the private key to a file, as `signed_message.save_key` does."""
        signed_message.save_key(self.private, path)


def sign(rollout: Rollout, key: WorkerKey) -> Rollout:
    """Returns the rollout with `worker` and `signature` set from `key`. Raises ValueError if `validate` rejects the rollout."""
    return sign_all([rollout], key)[0]


def sign_all(rollouts: Sequence[Rollout], key: WorkerKey) -> list[Rollout]:
    """Returns at least one rollout with `worker` and `signature` set from `key`. Raises ValueError if `validate` rejects one.

    The key signs once, the root of a hash tree over the digests. Each rollout carries its path, and can be verified without the others.
    """
    named = [dataclasses.replace(rollout, worker=key.worker, signature=b"") for rollout in rollouts]
    if reason := next(filter(None, map(validate, named)), None):
        raise ValueError(f"rollout cannot be signed: {reason}; correct this field first")
    root, paths = hash_tree([digest(rollout) for rollout in named])
    signature = key.private.sign(root)
    return [dataclasses.replace(*one, signature=signature + path) for *one, path in zip(named, paths, strict=True)]


def hash_tree(digests: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
    """Returns the root of a hash tree over digests, and for each digest its path: the sibling hashes from it up to the root, joined."""
    if len(digests) == 1:
        return digests[0], [b""]
    half = len(digests) // 2
    (first, firsts), (second, seconds) = hash_tree(digests[:half]), hash_tree(digests[half:])
    return _node(first, second), [path + second for path in firsts] + [path + first for path in seconds]


def signature_ok(rollout: Rollout) -> bool:
    """Returns True if the key in `worker` signed exactly this rollout; False also for a malformed rollout. Never raises."""
    return not validate(rollout) and is_signed(rollout, digest(rollout))


def is_signed(rollout: Rollout, own_digest: bytes) -> bool:
    """Returns True if the key in `worker` signed a valid rollout with this digest. Never raises."""
    root, path = own_digest, rollout.signature[64:]
    for at in range(0, len(path), 32):
        root = _node(root, path[at : at + 32])
    return _signed(rollout.worker, rollout.signature[:64], root)


def _node(one: bytes, other: bytes) -> bytes:
    return hashlib.sha256(b"intellax/node/1" + min(one, other) + max(one, other)).digest()


def signed(worker: str, signature: bytes, message: bytes) -> bool:
    """Returns True if `signature` is the ed25519 signature of `message` by `worker`, a public key in hex. Never raises."""
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(worker)).verify(signature, message)
    except (exceptions.InvalidSignature, ValueError, TypeError):  # not a point on the curve; not bytes
        return False
    return True


_signed = functools.lru_cache(2**10)(signed)  # the rollouts of a group share one


def digest(rollout: Rollout) -> bytes:
    """Returns the SHA-256 of every field of a valid rollout except `signature`; workers sign it, or a hash tree over several.

    The preimage is "intellax/rollout/1", then name and payload of each field, in the order of `FIELDS`, each preceded by its
    length as uint64. Integers are int64, reals float64, arrays their elements, all little-endian. `rewards` is
    (name, value) sorted by name, `routed_experts` its shape before its elements. Fields with an `unset` value follow only if they have another one.
    """
    parts = [b"intellax/rollout/1"]
    for name, field in FIELDS.items():
        value = _GET[name](rollout)
        if field.pack is None or (not isinstance(value, np.ndarray) and value == field.unset):
            continue
        payload = field.pack(value)
        parts += (_NAMES[name], _LENGTH.pack(len(payload)), payload)
    return hashlib.sha256(b"".join(parts)).digest()


_LENGTH = struct.Struct("<Q")


def _framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def _packed_rewards(rewards: dict[str, float]) -> bytes:
    parts = sorted((part.encode(), float(number)) for part, number in rewards.items())
    return b"".join(_framed(part) + struct.pack("<d", number) for part, number in parts)


def _packed_experts(experts: np.ndarray) -> bytes:
    return struct.pack("<4q", *experts.shape, experts.itemsize) + little_endian(experts)


def num_bytes(rollout: Rollout) -> int:
    """Returns the total bytes of the fields that grow with the rollout's length: 13 per token, the proofs, and the experts."""
    own = (rollout.routed_experts, rollout.calls, rollout.call_limits, rollout.prefix_versions)
    arrays = sum(getattr(array, "nbytes", 0) for array in own)
    return 13 * len(rollout.tokens) + len(rollout.proofs) + len(rollout.kept) + arrays


def little_endian(array: np.ndarray | None) -> bytes:
    """Returns the elements of an array as little-endian bytes; b"" for None."""
    return b"" if array is None else array.astype(array.dtype.newbyteorder("<")).tobytes()


def _array_error(rollout: Rollout) -> str | None:
    for name, dtype in _ARRAYS.items():
        array = getattr(rollout, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
            return f"{name}: must be a numpy {dtype} [T], got {_shown(array)}"
        if len(array) != len(rollout.tokens):
            return f"{name}: must have one entry per token, got {len(array)} for {len(rollout.tokens)}"
    if len(rollout.tokens) > MAX_TOKENS:
        return f"tokens: at most {MAX_TOKENS}, got {len(rollout.tokens)}"
    if not rollout.sampled_mask.any():
        return "sampled_mask: must have at least one True, because only sampled tokens are trained on"
    if rollout.sampled_mask[0]:
        return "sampled_mask: position 0 cannot be sampled, because no token precedes it"
    return None


def _calls_error(rollout: Rollout, calls) -> str | None:
    if error := _table_error("calls", calls, 2):
        return error
    mask = np.zeros(len(rollout.tokens) + 1, np.int8)
    starts, ends = calls.T
    is_ordered = (starts < ends).all() and (ends[:-1] <= starts[1:]).all() and starts[0] > 0 and ends[-1] < len(mask)
    if is_ordered:
        np.add.at(mask, starts, 1)
        np.add.at(mask, ends, -1)
    is_same = is_ordered and np.array_equal(np.cumsum(mask[:-1], dtype=np.int8) > 0, rollout.sampled_mask)
    return None if is_same else "calls: must be the sampled tokens, in ascending order"


def _table_error(name: str, found, width: int) -> str | None:
    if not isinstance(found, np.ndarray) or found.dtype != np.int32 or found.ndim != 2 or found.shape[1] != width:
        return f"{name}: must be None or a numpy int32 [N, {width}], got {_shown(found)}"
    return None if 0 < len(found) <= MAX_CALLS else f"{name}: must have 1 to {MAX_CALLS} rows, got {len(found)}"


def _call_limits_error(rollout: Rollout, found) -> str | None:
    if not isinstance(found, np.ndarray) or found.dtype != np.int32 or found.shape != (len(rollout.spans),):
        return f"call_limits: must be None or a numpy int32 [{len(rollout.spans)}], one per call, got {_shown(found)}"
    return None if found.min() > 0 else f"call_limits: must be > 0, got {found.min()}"


def _prefix_error(rollout: Rollout, found) -> str | None:
    if error := _table_error("prefix_versions", found, 3):
        return error
    spans, last = rollout.spans, (0, 0, -1)
    for row in map(tuple, found.tolist()):
        call, end, version = row
        is_next = call > last[0] or (call == last[0] and end > last[1] and version > last[2])
        start = spans[call][0] if 0 <= call < len(spans) else 0
        if not (is_next and 0 < end < start and 0 <= version < rollout.versions[start - 1]):
            return f"prefix_versions: must be in order, within prompts, and of versions older than theirs, got {row}"
        last = row
    return None


def _experts_error(rollout: Rollout, experts) -> str | None:
    # Not checked: the counts of layers and experts, because no model is named here.
    if not isinstance(experts, np.ndarray) or experts.dtype not in (np.uint8, np.uint16) or experts.ndim != 3:
        rule = "must be None or a numpy uint8 or uint16 [T - 1, layers, experts per token]"
        return f"routed_experts: {rule}, got {_shown(experts)}"
    if len(experts) != len(rollout.tokens) - 1 or not experts.size:
        return f"routed_experts: must have a row per token but the last, got {list(experts.shape)}"
    if experts.nbytes > MAX_ROUTED_BYTES:
        return f"routed_experts: at most {MAX_ROUTED_BYTES} bytes, got {experts.nbytes}"
    return None


_OPTIONAL = {  # the checks of fields that may be None, in order
    "calls": _calls_error,
    "call_limits": _call_limits_error,
    "routed_experts": _experts_error,
    "prefix_versions": _prefix_error,
}


def _kept_error(rollout: Rollout) -> str | None:
    if not isinstance(rollout.kept, bytes) or len(rollout.kept) > MAX_KEPT_BYTES:
        return f"kept: must be at most {MAX_KEPT_BYTES} bytes, got {_shown(rollout.kept)}"
    try:
        kept_by_call(rollout)
    except ValueError as error:
        return f"kept: {error}"
    return None


def _scalar_error(rollout: Rollout) -> str | None:
    if not isinstance(rollout.task, TaskRef):
        return f"task: must be a TaskRef, got {type(rollout.task).__name__}"
    if not isinstance(rollout.rewards, dict) or len(rollout.rewards) > MAX_REWARD_PARTS:
        return f"rewards: must be a dict of at most {MAX_REWARD_PARTS}, got {_shown(rollout.rewards)}"
    for name, value in rollout.rewards.items():
        if not is_name(name) or not _is_finite(value):
            return f"rewards: must map printable names to finite numbers, got {_shown(name)}: {_shown(value)}"
    for name, field in FIELDS.items():
        if field.is_valid is not None and not field.is_valid(value := _GET[name](rollout)):
            return f"{name}: must be {field.rule}, got {_shown(value)}"
    num_signed = len(rollout.spans) if rollout.server else 0
    if len(rollout.server_signature) != 64 * num_signed:
        return f"server_signature: must be {SIGNED_RULE}, got {_shown(rollout.server_signature)}"
    if rollout.branch >= rollout.num_branches:
        return f"branch: must be less than num_branches, got {_shown(rollout.branch)}"
    return None


def _is_index(value, limit: int) -> bool:
    is_integer = type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
    return is_integer and 0 <= int(value) < limit


def _is_reason(value) -> bool:
    return isinstance(value, str) and value in FINISH_REASONS


def _is_proofs(value) -> bool:
    return isinstance(value, bytes) and len(value) <= MAX_PROOF_BYTES


def _is_signature(value) -> bool:
    return isinstance(value, bytes) and len(value) in SIGNATURE_BYTES


def _is_finite(value) -> bool:
    if type(value) is not float and isinstance(value, numbers.Integral):
        return not isinstance(value, bool) and abs(int(value)) <= 2**53  # exact in float64
    return isinstance(value, float | np.floating) and math.isfinite(value)


def is_key(value) -> bool:
    """Returns True for a public key as a rollout names it: 64 lower-case hex digits, or an empty text."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def is_name(value) -> bool:
    """Returns True for a valid name of an environment or a part of a reward."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _shown(value) -> str:
    """Returns a short repr of any value for an error message. Never raises: repr of an int of 5000 digits would."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, str | bytes):
        return repr(value[:80])
    if isinstance(value, numbers.Integral) and abs(int(value)) >= 2**64:
        return f"an integer of {int(value).bit_length()} bits"
    return repr(value) if isinstance(value, numbers.Number) else type(value).__name__


_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a rollout: the type of its column in a file, its payload in the digest, and its rule."""

    kind: type | None  # int, float, str, bytes, or bool; None: inference/rollouts/parquet.py has its columns
    pack: Callable[[Any], bytes] | None  # returns the payload; None: the digest leaves it out
    is_valid: Callable[[Any], bool] | None = None  # None: another function checks it
    rule: str = ""  # that `is_valid` checks, after "must be"
    size: int = 0  # of an integer, more than any; of a text or bytes, the most bytes that a file may have
    unset: Any = _REQUIRED  # the value that the digest does not name


def _array(dtype: np.dtype | str, unset: Any = _REQUIRED) -> Field:
    return Field(None, lambda value: value.astype(dtype, copy=False).tobytes(), unset=unset)


def _integer(size: int, unset: Any = _REQUIRED) -> Field:
    is_valid = functools.partial(_is_index, limit=size)
    return Field(int, struct.Struct("<q").pack, is_valid, f"an integer in [0, {size})", size, unset)


def _real(rule: str, is_valid: Callable[[Any], bool]) -> Field:
    return Field(float, struct.Struct("<d").pack, is_valid, rule)


def _key(rule: str, unset: Any = _REQUIRED) -> Field:
    return Field(str, str.encode, is_key, f"{rule} as 64 lower-case hex digits, or empty", 64, unset)


# In the order of the digest. The names with a dot are fields of `TaskRef`.
FIELDS = {name: _array(dtype) for name, dtype in _ARRAYS.items()} | {
    "temperature": _real("finite and >= 0", lambda value: _is_finite(value) and value >= 0),
    "seed": _integer(2**32),
    "task.env": Field(str, str.encode, is_name, f"1 to {MAX_NAME} printable characters", 4 * MAX_NAME),
    "task.index": _integer(2**63),
    "task.group": _integer(2**63),
    "task.seed": _integer(2**63),
    "sample": _integer(MAX_SAMPLES),
    "step": _integer(2**31),
    "reward": _real("finite", _is_finite),
    "rewards": Field(None, _packed_rewards),
    "finish_reason": Field(str, str.encode, _is_reason, f"one of {FINISH_REASONS}", 64),
    "proofs": Field(bytes, bytes, _is_proofs, f"at most {MAX_PROOF_BYTES} bytes", MAX_PROOF_BYTES),
    "worker": _key("a public key"),
    "routed_experts": Field(None, _packed_experts, unset=None),
    "epoch": _integer(2**48, 0),
    "server": _key("a public key", ""),
    "server_signature": Field(bytes, bytes, lambda value: isinstance(value, bytes), SIGNED_RULE, 64 * MAX_CALLS, b""),
    "env_digest": _key("a SHA-256", ""),
    "branch": _integer(2**16, 0),
    "num_branches": _integer(2**16, 1),
    "calls": _array("<i4", None),
    "call_limits": _array("<i4", None),
    "draw": _integer(2**32, 0),
    "trains": Field(
        bool, lambda value: bytes([value]), lambda value: isinstance(value, bool), "True or False", unset=True
    ),
    "kept": Field(bytes, bytes, None, "", MAX_KEPT_BYTES, b""),
    "prefix_versions": _array("<i4", None),
    "signature": Field(
        bytes, None, _is_signature, f"64 bytes and up to {MAX_PATH} hashes, or empty", max(SIGNATURE_BYTES)
    ),
}
_GET = {name: operator.attrgetter(name) for name in FIELDS}
_NAMES = {name: _framed(name.encode()) for name in FIELDS}
