"""Signed messages between a worker and an orchestrator, which are worth nothing anywhere else. Imports no jax.

1. An orchestrator process draws a random session. Its replies to `GET /run` and `POST /lease` are signed by the run's key.
2. A worker signs each lease request and each submission over run, session, its own key, and the time, with the key that
   signs its rollouts. Another orchestrator, or this one after a restart, rejects them (`StaleSession`, HTTP 409).
3. A lease request must be newer than the worker's previous one, so that a copy is useless within a session as well. A copied
   submission needs no such rule: its groups are not leased any more, or are answered by the same bytes again.
4. A run signs its requests for verdicts in the same way, over the public key of the validator as session, each newer than the last.
5. A run may ask for a proof of work per key (hashcash): `find_work` searches for it, `is_work` checks it with one hash.
6. Servers, workers, relays, and validators sign in by heartbeats, which report their state and renew the leases in `holding`.
"""

import collections
import dataclasses
import datetime
import hashlib
import itertools
import json
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from inference.rollouts import rollout as rollout_lib
from rl.protocol import registry
from sharding.system import sign_in, signed_message

MAX_CAPACITY = 4096
MAX_RETURNED = 64
MAX_WAIT_S = 600.0  # that a lease request may wait for work
MAX_REMEMBERED = 2**16  # workers whose previous request is known
MAX_WORK_BITS = 40  # days of one CPU core
HEADER = "x-intellax-request"  # the signed request as JSON, where the body is a file of rollouts

Key = tuple[str, int, int]  # names a group in a run: split, step, group number


@dataclasses.dataclass(frozen=True)
class Lease:
    """A group as leased to a worker: `num_samples` completions of one prompt. Rollouts are checked against these fields."""

    step: int  # the batch; for held-out groups the policy version under evaluation
    group: int
    split: str  # "train" | "held_out"
    index: int  # of the task in its split
    seed: int  # of the noise of sample 0
    num_samples: int
    temperature: float
    min_version: int  # the oldest policy version that may generate
    version: int = -1  # the only one that may, pinned by the lease; -1: any from min_version on
    epoch: int = -1  # of every version that may, pinned by the lease; -1: any
    env: str = ""  # the name of its environment in `config.envs`; "": the run has only one

    @property
    def key(self) -> Key:
        """The tuple (split, step, group number) that identifies this group in a run."""
        return self.split, self.step, self.group

    def to_json(self) -> dict[str, Any]:
        """Returns the lease as a JSON object, for `from_json`."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, body: Any) -> "Lease":
        """Returns the lease in a JSON object from an orchestrator. Raises ValueError if a field is missing or of another type."""
        read = {}
        for field in dataclasses.fields(cls):
            value = body.get(field.name) if isinstance(body, dict) else None
            if type(value) is not field.type and not (field.type is float and type(value) is int):
                raise unreadable("lease", field.name, value)
            read[field.name] = value
        return cls(**read)


def unreadable(request: str, name: str, value: object) -> ValueError:
    """Returns the error about a field that the reply to a request lacks, or has in another form than this release sends."""
    found = f"the reply of the orchestrator to a {request} request has {name} = {value!r:.80}"
    return ValueError(f"{found}, which this worker cannot read; use the release of the orchestrator")


class Replayed(ValueError):
    """Raised for a request that is not newer than an earlier one of its signer: a copy, or one that another has overtaken."""


class StaleSession(ValueError):
    """Raised for a request to another run, or to an earlier process of the orchestrator; fetch /run again."""


@dataclasses.dataclass(frozen=True)
class Session:
    """One process of one run's orchestrator."""

    run: str  # the run's public key in hex
    id: str  # random hex

    @classmethod
    def open(cls, run: str) -> "Session":
        """Returns a new session of a run with a random ID."""
        return cls(run, secrets.token_hex(16))


def request(key: rollout_lib.WorkerKey, session: Session, **fields) -> dict:
    """Returns the signed JSON body of a worker's request. `fields` are those of its kind in `_FIELDS`; the first five are added here."""
    return signed_message.request(key.private, session.run, session.id, **fields)


def read_header(text: str) -> dict:
    """Returns the signed request in the header `HEADER`. Raises ValueError if there is none."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header {HEADER} is missing or not JSON ({error}); send the signed request") from error
    if not isinstance(message, dict):
        raise ValueError(f"the header {HEADER} is not a JSON object; send the signed request")
    return message


class RequestVerifier:
    """Verifies the signed requests of workers to one session. All but submissions must be newer than the worker's previous one.

    `admit(worker, request)` raises ValueError for a worker that may not take part; it is called before the signature is checked. The
    time of the previous request is kept for the last `MAX_REMEMBERED` workers, and for all workers that `is_known`, as long as a copy
    of it could be accepted.
    """

    def __init__(
        self,
        session: Session,
        *,
        admit: Callable[[str, dict], None] = lambda worker, request: None,
        is_known: Callable[[str], bool] = lambda worker: False,
        clock: Callable[[], float] = time.time,
    ):
        self._session, self._admit, self._is_known, self._clock = session, admit, is_known, clock
        # The time of the last request by kind and worker: those of two kinds may overtake each other.
        self._last_us: collections.OrderedDict[tuple[str, str], int] = collections.OrderedDict()

    def verify(self, message: dict, kind: str) -> str:
        """Returns the signer's public key of a request of a `kind` (`_FIELDS`). Raises ValueError to reject it."""
        rules = _FIELDS["request"] | _FIELDS[kind]
        if missing := rules.keys() - message.keys() - OPTIONAL:
            text = f"{kind} request without {', '.join(sorted(missing))}"
            raise ValueError(f"{text}; sign one as rl/protocol/lease.py does")
        if unknown := message.keys() - rules.keys():
            raise ValueError(f"{kind} request has the unknown field {min(unknown)!r:.80}; leave it out")
        for name, (is_ok, rule) in rules.items():
            if name in message and not is_ok(message[name]):
                raise ValueError(f"{kind} request has {name} {message[name]!r:.80}; send {rule}")
        worker, time_us = message["worker"], message["time_us"]
        if (message["run"], message["session"]) != (self._session.run, self._session.id):
            found = f"run {message['run'][:16]}, session {message['session'][:16]}"
            raise StaleSession(f"{kind} request is for {found}, which is not this orchestrator; fetch /run again")
        now_us = int(self._clock() * 1e6)
        if abs(time_us - now_us) > signed_message.MAX_CLOCK_SKEW_S * 1e6:
            off = f"{(time_us - now_us) / 1e6:+.0f} s off our clock, {_date(now_us)}"
            found = f"{kind} request is dated {_date(time_us)}, {off}; at most {signed_message.MAX_CLOCK_SKEW_S:.0f} s are allowed"
            raise ValueError(f"{found}; synchronize the clocks")
        self._admit(worker, message)
        if not signed_message.is_signed(worker, message):
            raise ValueError(f"{kind} request is not signed by the key it names, {worker[:16]}; sign it with that key")
        if kind != "submit":
            before_us = self._last_us.get((kind, worker), 0)
            if time_us <= before_us:
                found = f"its time, {_date(time_us)}, is not later than {_date(before_us)} of the previous one"
                remedy = "sign a new one with the current time; if the clock was set back, synchronize it and restart"
                raise Replayed(f"{kind} request rejected as a replay: {found}; {remedy}")
            self._last_us[kind, worker] = time_us
            self._last_us.move_to_end((kind, worker))
            # A copy of anything older is rejected by its date.
            self._forget(now_us - signed_message.MAX_CLOCK_SKEW_S * 1e6)
        return worker

    def _forget(self, oldest_us: float) -> None:
        """Forgets the previous requests that are no longer needed, and those beyond the limit; a known worker's is kept."""
        for _ in range(2):  # more than one, so that the number falls
            (kind, worker), last_us = next(iter(self._last_us.items()))
            if last_us >= oldest_us and len(self._last_us) <= MAX_REMEMBERED:
                return
            if last_us >= oldest_us and self._is_known(worker):
                self._last_us.move_to_end((kind, worker))
            else:
                del self._last_us[kind, worker]


def find_work(run: str, worker: str, num_bits: int, is_over: Callable[[], bool] = lambda: False) -> str:
    """Searches for a proof of work of a key for a run: 2^num_bits hashes on average. Returns "" for 0 bits, or once `is_over`.

    Raises ValueError for more than MAX_WORK_BITS: a false run must not occupy a worker forever.
    """
    if num_bits > MAX_WORK_BITS:
        raise ValueError(
            f"the run asks for a proof of work of {num_bits} bits, more than the {MAX_WORK_BITS} that a worker computes; join another run"
        )
    if not num_bits:
        return ""
    numbers = itertools.takewhile(lambda _: not is_over(), itertools.count())
    return next((work for number in numbers if is_work(run, worker, work := f"{number:x}", num_bits)), "")


def is_work(run: str, worker: str, work: str, num_bits: int) -> bool:
    """Returns True if `work` is a proof of work: the SHA-256 over run, key, and `work` begins with `num_bits` zero bits."""
    digest = hashlib.sha256(f"intellax/work/1/{run}/{worker}/{work}".encode()).digest()
    return int.from_bytes(digest, "big") >> (256 - num_bits) == 0


def _date(time_us: int) -> str:
    """Returns the UTC time of an integer in 0..2^63 - 1, as in 2026-01-31T23:59:59Z."""
    seconds = min(time_us // 10**6, 253402300799)  # datetime ends with the year 9999
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _is_hex(digits: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def _is_int(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _are_keys(most: int) -> Callable[[object], bool]:
    """Returns the test for a list of at most `most` group keys [split, step, group]."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(_is_key(key) for key in value)


def _is_key(value: Any) -> bool:
    is_named = isinstance(value, list) and len(value) == 3 and value[0] in ("train", "held_out")
    return is_named and all(map(_is_index, value[1:]))


_is_index = _is_int(0, 2**63 - 1)
OPTIONAL = {"wait_s", "begun_us", "holding", "env_digest", "problem"}
# {kind: {field: (its test, the rule in words)}}; "request": of every kind. The kinds differ in their fields, so that a
# signature for one is none for another.
_FIELDS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "request": {
        "run": (_is_hex("64"), "the run's public key in hex"),
        "session": (_is_hex("32,64"), "the session of GET /run, or the validator's public key"),
        "worker": (_is_hex("64"), "a hex public key"),
        "time_us": (_is_index, "an integer in 0..2^63 - 1"),
        "signature": (_is_hex("128"), "an ed25519 signature in hex"),
    },
    "lease": {
        "capacity": (_is_int(0, MAX_CAPACITY), f"an integer in 0..{MAX_CAPACITY}"),
        "returned": (
            _are_keys(MAX_RETURNED),
            f"at most {MAX_RETURNED} keys [split, step, group] of groups that will not be finished",
        ),
        "problem": (
            lambda value: isinstance(value, str) and len(value) <= sign_in.MAX_PROBLEM and value.isprintable(),
            f"the reason for `returned`, a line of at most {sign_in.MAX_PROBLEM} letters",
        ),
        "work": (_is_hex("0,32"), "the proof of work in hex, or an empty string"),
        "wait_s": (
            lambda value: type(value) in (int, float) and 0 <= value <= MAX_WAIT_S,
            f"the seconds to wait for work, in 0..{MAX_WAIT_S:.0f}",
        ),
        "begun_us": (_is_index, "the start of the worker's process, in microseconds"),
        # By a worker without another request for groups under way: others that it leased were in a reply that it did not get.
        "holding": (_are_keys(MAX_CAPACITY), f"at most {MAX_CAPACITY} keys [split, step, group] of leased groups"),
        "env_digest": (_is_hex("64"), "the digest of the environment's code and data in hex"),
    },
    "heartbeat": {
        "role": (lambda value: value in registry.ROLES, f"one of {', '.join(registry.ROLES)}"),
        "report": (lambda value: isinstance(value, dict), "an object as rl/protocol/registry.py has it"),
        "holding": (_are_keys(MAX_CAPACITY), f"at most {MAX_CAPACITY} keys [split, step, group] of leased groups"),
        "leaving": (lambda value: type(value) is bool, "true with the last heartbeat, else false"),
        "work": (_is_hex("0,32"), "the proof of work in hex, or an empty string"),
    },
    "nodes": {},
    "submit": {"digest": (_is_hex("64"), "the SHA-256 of the body in hex")},
    "verdicts": {"rollouts": (_is_hex("64"), "the SHA-256 of the body in hex")},
}
