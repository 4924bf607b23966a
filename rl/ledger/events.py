"""Events of a ledger: signed statements, their canonical bytes, and the fields of each kind.

The canonical bytes are sorted ASCII JSON without spaces. Other bytes are refused, so that no two byte strings are the same event.
"""

import dataclasses
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterator

from inference.rollouts import rollout as rollout_lib
from rl.ledger import task_ranges

MAX_EVENT_BYTES = 2**16
MAX_AMOUNT = 2**53  # exact in JSON readers whose numbers are doubles
NODE_KINDS = ("join", "stake", "submit")  # signed by the worker itself, which the ledger calls node
VALIDATOR_KINDS = ("accept", "invalidate", "slash", "eject")
# Of a training run, signed by the keeper (rl/ledger/run_rules.py has their rules).
WORKER_KINDS = ("invite", "lease", "submission", "refusal", "naming")  # node is the worker
RUN_KINDS = (*WORKER_KINDS, "resume", "appoint", "verdict", "batch", "publish")  # in the rest, node is the keeper
MAX_STEPS = 4096  # of one naming
ALSO = {"lease": ("step", "group"), "submission": ("step", "group", "digest")}  # the fields of a further group
MAX_ALSO = 256
MAX_ENVIRONMENTS = 64  # of one batch


@dataclasses.dataclass(frozen=True)
class Event:
    """One event of a ledger: a statement about the worker `node`, signed by `author` (the worker itself, a validator, or the keeper).

    `_FIELDS` has the fields of each kind, `_OPTIONAL` those that only some events have. Work is named by the SHA-256 of its file, tasks and
    groups by text (rl/ledger/task_ranges.py). Work is `checked` if it was replayed; no batch will have groups that are `dropped`; with
    `any_step`, batches may have groups of any step; `also` names further groups (`each`); `environments` has counts of a batch (rl/ledger/environments.py); `curriculum` is the digest of all results up to a batch. A refusal or eject event may name a server in place of the worker: it is at fault.
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
    is_signed = is_own or _is_hex(event.author, 64) and rollout_lib.signed(event.author, event.signature, message)
    return None if is_signed else "signature: it is not the author's signature of this event"


def form_error(event: Event) -> str | None:
    """Returns the format rule that an event breaks (kind, keys, nonce, or fields), or None if it is well-formed. Never raises."""
    if not isinstance(event.kind, str) or event.kind not in _FIELDS:
        return f"kind: must be one of {', '.join(_FIELDS)}"
    for name in ("node", "author"):
        if not _is_hex(getattr(event, name), 64):
            return f"{name}: must be a public key as 64 lower-case hex digits"
    if not _is_hex(event.nonce, 32):
        return "nonce: must be 32 lower-case hex digits"
    rules = _FIELDS[event.kind]
    for optional in _OPTIONAL.get(event.kind, ()):
        if isinstance(event.fields, dict) and optional.keys() & event.fields.keys():
            rules = rules | optional
    if not isinstance(event.fields, dict) or set(event.fields) != set(rules):
        return f"fields: {event.kind} has exactly {', '.join(rules) or 'none'}; add or remove fields"
    broken = (f"{name}: must be {rule}" for name, (is_ok, rule) in rules.items() if not is_ok(event.fields[name]))
    return next(broken, None)


def printable(text: str) -> str:
    """Returns `text` as the reason of an event: 1 to 1024 printable characters."""
    return "".join(c if c.isprintable() else "?" for c in text)[:1024] or "no reason"


def _is_hex(value, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def _are_tasks(value) -> bool:
    try:
        return isinstance(value, str) and len(value) <= task_ranges.MAX_CHARS and bool(task_ranges.parse_tasks(value))
    except ValueError:
        return False


def _are_groups(value, names: tuple[str, ...]) -> bool:
    """Returns True for a list of further groups with valid fields of these names."""
    rules = _GROUP | {"digest": _WORK}
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_ALSO
    return is_list and all(
        isinstance(one, dict) and one.keys() == {*names} and all(rules[name][0](one[name]) for name in names)
        for one in value
    )


def _are_environments(value) -> bool:
    """Returns True for a list of the environments of a batch: names, digests, and counts."""
    counts = ("groups", "signal", "rollouts", "errors")
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_ENVIRONMENTS
    return is_list and all(
        isinstance(one, dict)
        and one.keys() == {"name", "digest", *counts}
        and _is_name(one["name"])
        and (one["digest"] == "" or _is_hex(one["digest"], 64))
        and all(_COUNT[0](one[count]) for count in counts)
        and one["signal"] <= one["groups"]
        and one["errors"] <= one["rollouts"]
        for one in value
    )


def _is_name(value) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


_Rule = tuple[Callable[[object], bool], str]
_AMOUNT: _Rule = (lambda value: type(value) is int and 0 < value <= MAX_AMOUNT, f"an integer in 1..{MAX_AMOUNT}")
_WORK: _Rule = (lambda value: _is_hex(value, 64), "a SHA-256 as 64 lower-case hex digits")
_REASON: _Rule = (
    lambda value: isinstance(value, str) and 0 < len(value) <= 1024 and value.isprintable(),
    "1 to 1024 printable characters",
)
_BOOL: _Rule = (lambda value: type(value) is bool, "true or false")
_KEYS: _Rule = (
    lambda value: isinstance(value, list) and 0 < len(value) <= 256 and all(_is_hex(key, 64) for key in value),
    "a list of 1 to 256 public keys",
)
_COUNT: _Rule = (lambda value: type(value) is int and 0 <= value <= MAX_AMOUNT, f"an integer in 0..{MAX_AMOUNT}")
_GROUP: dict[str, _Rule] = {
    "split": (lambda value: value in ("train", "held_out"), "train or held_out"),
    "step": _COUNT,
    "group": _COUNT,
}
_TEXT: _Rule = (lambda value: isinstance(value, str) and len(value) <= 4096, "a text of at most 4096 characters")
_GROUPS: _Rule = (lambda value: value == "" or _are_tasks(value), "groups of the step like '3:0-15,17', or empty")
_FIELDS: dict[str, dict[str, _Rule]] = {
    "open": {"validators": _KEYS, "window_ms": _AMOUNT},
    "join": {},
    "stake": {"amount": _AMOUNT},
    "submit": {"work": _WORK, "units": _AMOUNT},
    "accept": {"work": _WORK, "checked": _BOOL},
    "invalidate": {"work": _WORK, "units": _AMOUNT, "reason": _REASON},
    "slash": {"amount": _AMOUNT, "reason": _REASON},
    "eject": {"reason": _REASON},
    "resume": {"step": _COUNT, "run": _WORK},
    "appoint": {"validators": _KEYS, "quorum": _AMOUNT},
    "invite": {},
    "lease": _GROUP
    | {"version": (lambda value: type(value) is int and -1 <= value <= MAX_AMOUNT, "a version, or -1 if not pinned")},
    "submission": _GROUP | {"digest": _WORK},
    "verdict": _GROUP
    | {"run": _WORK, "digest": _WORK, "accepted": _BOOL, "reason": _TEXT, "detail": _TEXT, "validator": _WORK}
    | {"time_us": _COUNT, "signature": (lambda value: _is_hex(value, 128), "128 lower-case hex digits")},
    "refusal": _GROUP | {"digest": _WORK, "reason": _TEXT},
    "batch": {"step": _AMOUNT, "digest": _WORK, "verified": _GROUPS, "trusted": _GROUPS},
    "publish": {"version": _COUNT, "digest": _WORK, "epoch": _COUNT},
    "naming": {
        "steps": (
            lambda value: (
                isinstance(value, list)
                and 0 < len(value) <= MAX_STEPS
                and all(type(step) is int and 0 < step <= MAX_AMOUNT for step in value)
            ),
            f"a list of 1 to {MAX_STEPS} steps",
        )
    },
}
KINDS = tuple(_FIELDS)
_EPOCH: dict[str, _Rule] = {
    "epoch": (lambda value: type(value) is int and -1 <= value <= MAX_AMOUNT, "an epoch, or -1 if not pinned")
}
_TASKS: dict[str, _Rule] = {
    "run": (lambda value: _is_hex(value, 16), "16 lower-case hex digits"),
    "tasks": (_are_tasks, f"tasks like '3:0-15,17 4:32', ascending, in at most {task_ranges.MAX_CHARS} characters"),
}
_DROPPED: dict[str, _Rule] = {"dropped": (_are_tasks, "groups like '3:0-15,17', or absent")}
_ENVIRONMENTS: dict[str, _Rule] = {
    "environments": (
        _are_environments,
        f"a list of 1 to {MAX_ENVIRONMENTS} objects with name, digest, groups, signal, rollouts, errors, or absent",
    )
}
_CURRICULUM: dict[str, _Rule] = {"curriculum": _WORK}  # rl/protocol/curriculum.py
_ENVIRONMENT: dict[str, _Rule] = {"environment": (_is_name, "1 to 256 printable characters, or absent")}
_ANY_STEP: dict[str, _Rule] = {"any_step": (lambda value: value is True, "true, or absent")}
_RATE: _Rule = (lambda value: isinstance(value, (int, float)) and 0 < value <= 1, "a number in (0, 1]")
_ALSO: dict[str, dict[str, _Rule]] = {
    kind: {
        "also": (
            functools.partial(_are_groups, names=names),
            f"a list of 1 to {MAX_ALSO} objects with {', '.join(names)}, or absent",
        )
    }
    for kind, names in ALSO.items()
}
# Fields that an event has all of, or none: ledgers of earlier releases lack them.
_OPTIONAL = {"accept": (_TASKS,), "invalidate": (_TASKS,), "batch": (_EPOCH, _DROPPED, _ENVIRONMENTS, _CURRICULUM)}
_OPTIONAL["refusal"] = (_ENVIRONMENT,)
_OPTIONAL |= {"lease": (_EPOCH, _ALSO["lease"]), "submission": (_ALSO["submission"],)}
_OPTIONAL |= {"resume": (_ANY_STEP,), "appoint": ({"min_rate": _RATE, "invited_rate": _RATE},)}
