"""Events of a ledger: signed statements, their canonical bytes, and the fields of each kind.

The canonical bytes are sorted ASCII JSON without spaces. Other bytes are refused, so that no two byte strings are the same event.
"""

import dataclasses
import json
import reprlib
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from inference.rollouts import rollout as rollout_lib
from rl.protocol.ledger import task_ranges
from sharding.system import text as text_lib

MAX_EVENT_BYTES = 2**16
MAX_AMOUNT = 2**53  # exact in JSON readers whose numbers are doubles
NODE_KINDS = ("join", "stake", "submit")  # signed by the worker itself, which the ledger calls node
VALIDATOR_KINDS = ("accept", "invalidate", "slash", "eject")
# Events of a training run, which its keeper signs; rl/protocol/ledger/run_rules.py has their rules.
WORKER_KINDS = ("invite", "lease", "submission", "refusal", "naming")  # node is the worker
RUN_KINDS = (*WORKER_KINDS, "resume", "appoint", "verdict", "batch", "publish")  # in the rest, node is the keeper
MAX_STEPS = 4096  # of one naming
ALSO = {"lease": ("step", "group"), "submission": ("step", "group", "digest")}  # the fields of a further group
MAX_ALSO = 256
MAX_ENVIRONMENTS = 64  # of one batch


@dataclasses.dataclass(frozen=True)
class Event:
    """One event of a ledger: a statement about the worker `node`, signed by `author` (the worker itself, a validator, or the keeper).

    `_FIELDS` has the fields of each kind. Work is named by the SHA-256 of its file, tasks and
    groups by text (rl/protocol/ledger/task_ranges.py). Work is `checked` if it was replayed; no batch will have groups that are `dropped`; with
    `any_step`, batches may have groups of any step; `also` names further groups (`each`); `environments` has counts of a batch (rl/protocol/ledger/environments.py); `curriculum` is the digest of all results up to a batch. A refusal or eject event may name a server in place of the worker: it is at fault.
    """

    kind: str
    node: str  # hex of an ed25519 public key, as `Rollout.worker`
    author: str
    nonce: str  # 32 hex digits: an event can be appended once
    fields: dict
    signature: bytes


def sign(kind: str, node: str, key: rollout_lib.WorkerKey, *, nonce: str | None = None, **fields) -> Event:
    """Creates a ledger event about the worker `node`, signed by `key`. The ledger's rules are checked when the event is appended.

    `nonce` (32 hex digits) is random by default. A ledger takes each nonce once: derive it from the subject if the event must
    not be appended twice.
    """
    event = Event(kind, node, key.worker, nonce or secrets.token_hex(16), fields, b"")
    return dataclasses.replace(event, signature=key.private.sign(b"intellax/event/1" + encode(event)))


def encode(event: Event) -> bytes:
    """Returns an event as canonical bytes (sorted JSON, no spaces), without the signature. Raises ValueError or TypeError for other fields than JSON."""
    body = {name: getattr(event, name) for name in ("kind", "node", "author", "nonce", "fields")}
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def each(fields: dict) -> Iterator[dict]:
    """Yields the fields of a lease or submission for each of its groups."""
    yield fields
    for further in fields.get("also", ()):
        yield fields | further


def decode(body: bytes, signature: bytes) -> Event | str:
    """Returns the event encoded by `body`, or a string with the reason if the bytes are not a canonical event. Never raises."""
    try:
        fields = json.loads(body)
        event = Event(**fields, signature=signature)
        same = encode(event) == body
    except (ValueError, TypeError, RecursionError):
        return "its bytes are not an event"
    return event if same else "its event is not in canonical form"


def signature_error(event: Event, *, is_own: bool = False) -> str | None:
    """Returns why the signature of an event is not valid for its author's key, or None if it is. Never raises.

    With `is_own`, this process has signed the event, and only its size is checked.
    """
    try:
        body = encode(event)
    except (ValueError, TypeError, RecursionError):
        return "fields: must be plain JSON"
    if len(body) > MAX_EVENT_BYTES:
        return f"fields: the event has {len(body)} bytes; at most {MAX_EVENT_BYTES} are allowed"
    message = b"intellax/event/1" + body
    is_signed = is_own or text_lib.is_hex(event.author) and rollout_lib.signed(event.author, event.signature, message)
    return None if is_signed else "signature: it is not the author's signature of this event"


def form_error(event: Event) -> str | None:
    """Returns the format rule that an event breaks (kind, keys, nonce, or fields), or None if it is well-formed. Never raises."""
    if not isinstance(event.kind, str) or event.kind not in _FIELDS:
        return f"kind: must be one of {', '.join(_FIELDS)}"
    for name in ("node", "author"):
        if not text_lib.is_hex(getattr(event, name)):
            return f"{name}: must be a public key as 64 lower-case hex digits"
    if not text_lib.is_hex(event.nonce, 32):
        return "nonce: must be 32 lower-case hex digits"
    try:
        _FIELDS[event.kind].model_validate(event.fields)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, rule = ".".join(map(str, first["loc"])) or "fields", first["msg"].removeprefix("Value error, ")
        return f"{name}: {reprlib.repr(first['input'])} in the event {event.kind}: {rule}"
    return None


def printable(text: str) -> str:
    """Returns `text` as the reason of an event: 1 to 1024 printable characters."""
    return "".join(c if c.isprintable() else "?" for c in text)[:1024] or "no reason"


def _printable(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("must be printable characters, one or more")
    return text


def _tasks(text: str) -> str:
    if len(text) > task_ranges.MAX_CHARS:
        raise ValueError(f"must be tasks in at most {task_ranges.MAX_CHARS} characters")
    task_ranges.parse_tasks(text)
    return text


def _at_most(most: int) -> pydantic.AfterValidator:
    """Returns a limit on the length of any text: that of pydantic refuses lone surrogates, which a validator's verdict may have."""

    def check(text: str) -> str:
        if len(text) > most:
            raise ValueError(f"must be a text of at most {most} characters")
        return text

    return pydantic.AfterValidator(check)


_T = TypeVar("_T")
_Amount = Annotated[int, pydantic.Field(gt=0, le=MAX_AMOUNT)]
_Count = Annotated[int, pydantic.Field(ge=0, le=MAX_AMOUNT)]
_Pinned = Annotated[int, pydantic.Field(ge=-1, le=MAX_AMOUNT)]  # -1: not pinned
_Rate = Annotated[float, pydantic.Field(gt=0, le=1)]
_Hex16 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{16}$")]
_Hex64 = Annotated[str, pydantic.Field(pattern=text_lib.HEX_64)]  # a SHA-256, or a public key
_Hex128 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{128}$")]
_Keys = Annotated[list[_Hex64], pydantic.Field(min_length=1, max_length=256)]
_Text = Annotated[str, _at_most(4096)]
_Reason = Annotated[str, pydantic.AfterValidator(_printable), _at_most(1024)]
_Name = Annotated[str, pydantic.AfterValidator(_printable), _at_most(256)]
_Tasks = Annotated[str, pydantic.AfterValidator(_tasks)]
_Groups = Annotated[str, pydantic.AfterValidator(lambda text: text and _tasks(text))]  # or none
_Split = Literal["train", "held_out"]


class _Fields(pydantic.BaseModel):
    """The fields of an event, or of an object in one."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")


class _Work(_Fields):
    """Names work, and the tasks of it that must not be accepted again: `run` and `tasks` are absent if there are none."""

    work: _Hex64
    run: _Hex16 = ""
    tasks: _Tasks = ""

    @pydantic.model_validator(mode="after")
    def _are_both(self):
        if bool(self.run) != bool(self.tasks):
            raise ValueError("run and tasks must both be given, or neither")
        return self


class _Place(_Fields):
    step: _Count
    group: _Count


class _Content(_Place):
    digest: _Hex64


class _Environment(_Fields):
    name: _Name
    digest: Annotated[str, pydantic.Field(pattern="^([0-9a-f]{64})?$")]
    groups: _Count
    signal: _Count
    rollouts: _Count
    errors: _Count

    @pydantic.model_validator(mode="after")
    def _are_parts(self):
        if self.signal > self.groups or self.errors > self.rollouts:
            raise ValueError("signal must be at most groups, and errors at most rollouts")
        return self


_Also = Annotated[list[_T], pydantic.Field(min_length=1, max_length=MAX_ALSO)]
_Environments = Annotated[list[_Environment], pydantic.Field(min_length=1, max_length=MAX_ENVIRONMENTS)]
# The base of each kind's fields, and the others. A pair is a field that may be absent.
_TABLE: dict[str, tuple[type[_Fields], dict[str, Any]]] = {
    "open": (_Fields, {"validators": _Keys, "window_ms": _Amount}),
    "join": (_Fields, {}),
    "stake": (_Fields, {"amount": _Amount}),
    "submit": (_Fields, {"work": _Hex64, "units": _Amount}),
    "accept": (_Work, {"checked": bool}),
    "invalidate": (_Work, {"units": _Amount, "reason": _Reason}),
    "slash": (_Fields, {"amount": _Amount, "reason": _Reason}),
    "eject": (_Fields, {"reason": _Reason}),
    "resume": (_Fields, {"step": _Count, "run": _Hex64, "any_step": (bool, False)}),
    "appoint": (_Fields, {"validators": _Keys, "quorum": _Amount, "min_rate": _Rate, "invited_rate": _Rate}),
    "invite": (_Fields, {}),
    "lease": (_Place, {"split": _Split, "version": _Pinned, "epoch": _Pinned, "also": (_Also[_Place], [])}),
    "submission": (_Content, {"split": _Split, "also": (_Also[_Content], [])}),
    "verdict": (
        _Content,
        {"split": _Split, "run": _Hex64, "accepted": bool, "reason": _Text, "detail": _Text}
        | {"validator": _Hex64, "time_us": _Count, "signature": _Hex128},
    ),
    "refusal": (_Content, {"split": _Split, "reason": _Text, "environment": (_Name, "")}),
    "batch": (
        _Fields,
        {"step": _Amount, "digest": _Hex64, "epoch": _Pinned, "verified": _Groups, "trusted": _Groups}
        | {"dropped": (_Tasks, ""), "environments": (_Environments, []), "curriculum": (_Hex64, "")},
    ),
    "publish": (_Fields, {"version": _Count, "digest": _Hex64, "epoch": _Count}),
    "naming": (_Fields, {"steps": Annotated[list[_Amount], pydantic.Field(min_length=1, max_length=MAX_STEPS)]}),
}


def _model(kind: str) -> type[_Fields]:
    base, own = _TABLE[kind]
    fields: dict[str, Any] = {name: one if isinstance(one, tuple) else (one, ...) for name, one in own.items()}
    return pydantic.create_model(kind, __base__=base, **fields)


_FIELDS = {kind: _model(kind) for kind in _TABLE}
KINDS = tuple(_FIELDS)
