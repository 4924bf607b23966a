"""What a ledger's events are: signed statements, their one spelling, and the form that each kind has.

An event is signed over its canonical bytes: sorted JSON without spaces, ASCII only. What decodes to an event and is not spelled
like that is none, so that no two byte strings are one event.
"""

import dataclasses
import json
import re
import secrets
from collections.abc import Callable

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference.rollouts import rollout as rollout_lib
from rl.ledger import task_ranges

MAX_EVENT_BYTES = 2**16
MAX_AMOUNT = 2**53  # exact in JSON readers that know only doubles
NODE_KINDS = ("join", "stake", "submit")  # signed by the node itself
VALIDATOR_KINDS = ("accept", "invalidate", "slash", "eject")


@dataclasses.dataclass(frozen=True)
class Event:
    """One signed statement about `node`. `fields` by kind:

    open (validators: list of keys, window_ms), join (), stake (amount), submit (work: SHA-256 hex, units),
    accept (work, checked: whether it was verified or only sampled past), invalidate (work, units, reason),
    slash (amount, reason), eject (reason). A verdict on work may add run and tasks (rl/ledger/task_ranges.py): what is done with it.
    """

    kind: str
    node: str  # hex of an ed25519 public key, as `Rollout.worker`
    author: str
    nonce: str  # 32 hex digits: an event can be appended once
    fields: dict
    signature: bytes


def sign(kind: str, node: str, key: rollout_lib.WorkerKey, *, nonce: str | None = None, **fields) -> Event:
    """An event under the key's name. Its rules are checked by `append`, which knows the ledger.

    `nonce`: 32 hex digits that follow from what the event is about, where it must not be appended twice; else at random.
    """
    event = Event(kind, node, key.worker, nonce or secrets.token_hex(16), fields, b"")
    return dataclasses.replace(event, signature=key.private.sign(b"intellax/event/1" + encode(event)))


def encode(event: Event) -> bytes:
    """The event's one spelling: sorted JSON without spaces, ASCII only, the signature apart."""
    body = {name: getattr(event, name) for name in ("kind", "node", "author", "nonce", "fields")}
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode(body: bytes, signature: bytes) -> Event | str:
    """The event that is spelled so, or what is wrong with it. Total."""
    try:
        fields = json.loads(body)
        event = Event(**fields, signature=signature)
        same = encode(event) == body
    except (ValueError, TypeError, RecursionError):
        return "its event is not one that was written here"
    return event if same else "its event is not in canonical form"


def signature_error(event: Event) -> str | None:
    """Why the event is not signed by its author, or None. Total."""
    try:
        body = encode(event)
    except (ValueError, TypeError, RecursionError):
        return "fields: must be plain JSON"
    if len(body) > MAX_EVENT_BYTES:
        return f"fields: an event of {len(body)} bytes; at most {MAX_EVENT_BYTES} are kept"
    is_signed = _is_hex(event.author, 64) and signed(event.author, event.signature, b"intellax/event/1" + body)
    return None if is_signed else "signature: its author did not sign this event"


def signed(author: str, signature: bytes, message: bytes) -> bool:
    """Whether `author` (a public key in hex) signed the message. Total."""
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(author)).verify(signature, message)
    except (exceptions.InvalidSignature, ValueError, TypeError):  # not a point on the curve; not bytes
        return False
    return True


def form_error(event: Event) -> str | None:
    """The rule of form that the event breaks, or None. Total."""
    if not isinstance(event.kind, str) or event.kind not in _FIELDS:
        return f"kind: must be one of {', '.join(_FIELDS)}"
    for name in ("node", "author"):
        if not _is_hex(getattr(event, name), 64):
            return f"{name}: must be a public key as 64 lower-case hex digits"
    if not _is_hex(event.nonce, 32):
        return "nonce: must be 32 lower-case hex digits"
    rules = _FIELDS[event.kind]
    if isinstance(event.fields, dict) and event.kind in _TASKS_OF and "tasks" in event.fields:
        rules = rules | _TASKS
    if not isinstance(event.fields, dict) or set(event.fields) != set(rules):
        return f"fields: {event.kind} has exactly {', '.join(rules) or 'none'}"
    for name, rule in rules.items():
        if not rule(event.fields[name]):
            return f"{name}: {_RULES[rule]}"
    return None


def _is_hex(value, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def _is_amount(value) -> bool:
    return type(value) is int and 0 < value <= MAX_AMOUNT


def _is_digest(value) -> bool:
    return _is_hex(value, 64)


def _is_reason(value) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1024 and value.isprintable()


def _is_bool(value) -> bool:
    return type(value) is bool


def _are_keys(value) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 256 and all(_is_hex(key, 64) for key in value)


def _is_run(value) -> bool:
    return _is_hex(value, 16)


def _are_tasks(value) -> bool:
    try:
        return isinstance(value, str) and len(value) <= task_ranges.MAX_CHARS and bool(task_ranges.parse(value))
    except ValueError:
        return False


_RULES: dict[Callable, str] = {
    _is_amount: f"must be an integer in 1..{MAX_AMOUNT}",
    _is_digest: "must be a SHA-256 as 64 lower-case hex digits",
    _is_reason: "must be 1 to 1024 printable characters",
    _is_bool: "must be true or false",
    _are_keys: "must be a list of 1 to 256 public keys",
    _is_run: "must be 16 lower-case hex digits",
    _are_tasks: f"must be tasks as rl/ledger/task_ranges.py spells them, in at most {task_ranges.MAX_CHARS} characters",
}
_FIELDS: dict[str, dict[str, Callable]] = {
    "open": {"validators": _are_keys, "window_ms": _is_amount},
    "join": {},
    "stake": {"amount": _is_amount},
    "submit": {"work": _is_digest, "units": _is_amount},
    "accept": {"work": _is_digest, "checked": _is_bool},
    "invalidate": {"work": _is_digest, "units": _is_amount, "reason": _is_reason},
    "slash": {"amount": _is_amount, "reason": _is_reason},
    "eject": {"reason": _is_reason},
}
_TASKS_OF = ("accept", "invalidate")  # may have these, too; ledgers written before there were any do not
_TASKS: dict[str, Callable] = {"run": _is_run, "tasks": _are_tasks}

NOBODY = Event("", "", "", "", {}, b"")
