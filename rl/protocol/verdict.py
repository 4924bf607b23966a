"""Signed verdicts on groups, so that anyone can check which validator judged which bytes. Imports no jax.

1. A group is named by run, split, step, and number; its content by `group_digest`, since a group may be generated several times.
2. A validator signs its verdict with its own ed25519 key (`SignedVerdict.sign`); everyone checks it with `SignedVerdict.check`.
3. The orchestrator signs its requests for verdicts with the key of the run, so that strangers cannot use up a validator's time
   (`authorization`, `RequestVerifier`).
"""

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Sequence
from typing import Any

from inference.rollouts import rollout as rollout_lib

MAX_CLOCK_SKEW_S = 300.0
MAX_DETAIL = 500  # characters
_TYPES = dict(run=str, split=str, step=int, group=int, digest=str, accepted=bool, reason=str, detail=str)
_TYPES |= dict(validator=str, time_us=int, signature=str)


@dataclasses.dataclass(frozen=True)
class SignedVerdict:
    """A validator's statement about one group. All fields are plain values; `validator` and `run` are public keys in hex."""

    run: str
    split: str
    step: int
    group: int
    digest: str  # `group_digest` of the rollouts
    accepted: bool
    reason: str  # a code of `checks.Verdict`; "ok" if accepted
    detail: str = ""
    validator: str = ""
    time_us: int = 0
    signature: str = ""  # hex, of all other fields

    def sign(self, key: rollout_lib.WorkerKey) -> "SignedVerdict":
        """Returns this verdict with `validator`, the time, and the signature set from `key`; shortens a long detail."""
        named = dict(validator=key.worker, time_us=time.time_ns() // 1000, detail=self.detail[:MAX_DETAIL])
        unsigned = dataclasses.replace(self, **named)
        return dataclasses.replace(unsigned, signature=key.private.sign(unsigned._text()).hex())

    def check(self) -> bool:
        """Returns True if `validator` signed exactly these fields. Never raises."""
        try:
            return rollout_lib.signed(self.validator, bytes.fromhex(self.signature), self._text())
        except (ValueError, TypeError):  # not hex, or not JSON
            return False

    @classmethod
    def read(cls, body: Any) -> "SignedVerdict":
        """Returns the verdict in a JSON object (`dataclasses.asdict` writes it). Raises ValueError for any other value, or an unsigned one."""
        if not isinstance(body, dict) or body.keys() != _TYPES.keys():
            raise ValueError(
                f"verdict is {str(body)[:80]!r}; send an object with exactly the fields of a signed verdict"
            )
        for name, kind in _TYPES.items():
            if type(body[name]) is not kind:
                raise ValueError(f"verdict has {name} = {body[name]!r:.80}; send a {kind.__name__}")
        verdict = cls(**body)
        if len(verdict.detail) > MAX_DETAIL or not verdict.check():
            raise ValueError(
                f"verdict is not signed by the validator that it names, {verdict.validator[:16]!r}; sign it"
            )
        return verdict

    def _text(self) -> bytes:
        fields = {name: value for name, value in vars(self).items() if name != "signature"}
        return b"intellax/verdict/1/" + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def group_digest(rollouts: Sequence[rollout_lib.Rollout]) -> str:
    """Returns the SHA-256, in hex, of the contents that a group's worker signed: the digests of its valid rollouts in order of sample."""
    hasher = hashlib.sha256(b"intellax/group/1")
    for rollout in sorted(rollouts, key=lambda rollout: rollout.sample):
        hasher.update(rollout_lib.digest(rollout))
    return hasher.hexdigest()


def authorization(key: rollout_lib.WorkerKey, validator: str, body: bytes) -> str:
    """Returns the HTTP header `authorization` by which the run's `key` signs a request with this body to `validator` (its public key)."""
    time_us, digest = time.time_ns() // 1000, hashlib.sha256(body).hexdigest()
    signature = key.private.sign(_request_text(key.worker, validator, time_us, digest)).hex()
    return f"Intellax {time_us}:{digest}:{signature}"


class RequestVerifier:
    """Verifies requests to the validator with public key `validator`: signed by the key of `run`, recently, and for the first time."""

    def __init__(self, run: str, validator: str, *, clock=time.time):
        self.run, self._validator, self._clock = run, validator, clock
        self._seen: dict[str, int] = {}  # signature -> time

    def verify(self, header: str) -> str:
        """Returns the SHA-256, in hex, that the body of a request must have; the body need not be read before. Raises ValueError to reject."""
        match = re.fullmatch("Intellax ([0-9]{1,18}):([0-9a-f]{64}):([0-9a-f]{128})", header)
        if match is None:
            raise ValueError("the request has no authorization of the form 'Intellax TIME:SHA256:SIGNATURE'; sign it")
        time_us, digest, signature = int(match[1]), match[2], match[3]
        now_us, skew_us = int(self._clock() * 1e6), int(MAX_CLOCK_SKEW_S * 1e6)
        if abs(time_us - now_us) > skew_us:
            found = f"the request is dated {(time_us - now_us) / 1e6:+.0f} s off our clock"
            raise ValueError(f"{found}, at most {MAX_CLOCK_SKEW_S:.0f} s are allowed; set the clocks")
        text = _request_text(self.run, self._validator, time_us, digest)
        if not rollout_lib.signed(self.run, bytes.fromhex(signature), text):
            found = f"the request is not signed by run {self.run[:16]} for validator {self._validator[:16]}"
            raise ValueError(f"{found}; sign it with the key of the run")
        self._seen = {old: at_us for old, at_us in self._seen.items() if at_us >= now_us - skew_us}
        if signature in self._seen:
            raise ValueError("the request was sent before; sign a new one")
        self._seen[signature] = time_us
        return digest


def _request_text(run: str, validator: str, time_us: int, digest: str) -> bytes:
    return f"intellax/verdicts/{run}/{validator}/{time_us}/{digest}".encode()
