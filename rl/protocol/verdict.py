"""Signed verdicts on groups, so that anyone can check which validator judged which bytes. Imports no jax.

1. A group is named by run, split, step, and number; its content by `group_digest`, since a group may be generated several times.
2. A validator signs its verdict with its own ed25519 key (`SignedVerdict.sign`); everyone checks it with `SignedVerdict.check`.
3. A group of a worker of reputation r needs one at the rate max(min_rate, 1 - r). The draw of a group depends on a secret that workers do
   not have, and on the group alone: neither the choice of files nor another attempt changes it. It is the same for an orchestrator, a
   validator, and an auditor.
"""

import dataclasses
import enum
import hashlib
import hmac
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from inference.rollouts import rollout as rollout_lib
from rl.protocol import timeline
from sharding.system import signed_message
from sharding.system import text as text_lib

MAX_DETAIL = 500  # characters
HALF_AT = 32  # groups that passed a replay, without a fault, bring a reputation from 0 to 1/2
FAULT = 2 * HALF_AT  # how many of these one fault outweighs


class Reason(enum.StrEnum):
    """Why a rollout or group was rejected, or "ok"."""

    OK = "ok"  # accepted
    # Without weights.
    SCHEMA = "schema"  # a field has the wrong type, size, or range
    SIGNATURE = "signature"  # the worker did not sign it, or several workers did
    ATTESTATION = "attestation"  # the server that it names did not sign these samples
    STEP = "step"  # the run has no such step
    TASK = "task"  # another task or environment than the group's
    SAMPLES = "samples"  # the group lacks samples or branches, or has others
    SEED = "seed"  # another seed of the sampling noise than prescribed
    TEMPERATURE = "temperature"  # another temperature than prescribed
    PROMPT = "prompt"  # another prompt than the task's
    TURNS = "turns"  # more calls or branches than an episode may have, or fields that its environment does not have
    LENGTH = "length"  # more tokens than allowed
    TOKENS = "tokens"  # a token that the vocabulary lacks
    TERMINATION = "termination"  # a completion ends where no server ends one
    VERSIONS = "versions"  # policy versions that are too old, too new, or in descending order
    REWARD = "reward"  # our scorer found another reward
    UNSCORED = "unscored"  # our scorer timed out, and the worker claims a reward
    ENVIRONMENT = "environment"  # the replay of the episode differs
    DUPLICATE = "duplicate"  # its task was accepted before
    # With weights.
    WEIGHTS = "weights"  # a policy version is not available here: no fault of the worker
    ROUTING = "routing"  # other MoE experts than the policy's
    KEPT = "kept"  # another set of tokens to sample from than the filters keep
    SAMPLING = "sampling"  # other tokens than the noise draws
    LOGPROB = "logprob"  # other log-probabilities than the policy's
    SHAPE = "shape"  # the tokens fit another temperature
    TOPLOC = "toploc"  # a proof does not fit the hidden states
    # Over many groups.
    STATISTICS = "statistics"  # small deviations of the worker add up
    NEWCOMER = "newcomer"  # new workers deviate together: no fault of this one
    UNDECIDED = "undecided"  # validators contradict each other: no fault of the worker
    UNANSWERED = "unanswered"  # too many validators fail on this group alone: no fault of the worker


NO_BLAME = (Reason.UNDECIDED, Reason.UNANSWERED, Reason.NEWCOMER)  # no fault of the worker: its group is made again


@dataclasses.dataclass(frozen=True)
class SignedVerdict:
    """A validator's statement about one group. All fields are plain values; `validator` and `run` are public keys in hex."""

    run: str
    split: str
    step: int
    group: int
    digest: str  # `group_digest` of the rollouts
    accepted: bool
    reason: str  # a `Reason` if this release knows it; "ok" if accepted
    detail: str = ""
    validator: str = ""
    time_us: int = 0
    signature: str = ""  # hex, of all other fields

    def sign(self, key: rollout_lib.WorkerKey) -> "SignedVerdict":
        """Returns this verdict signed by `key`, with `validator` and the time set. A detail that is too long is cut."""
        named = dict(validator=key.worker, time_us=time.time_ns() // 1000, detail=self.detail[:MAX_DETAIL])
        unsigned = {name: value for name, value in (vars(self) | named).items() if name != "signature"}
        return SignedVerdict(**signed_message.sign(key.private, unsigned))

    def check(self) -> bool:
        """Returns True if `validator` signed exactly these fields. Never raises."""
        return signed_message.is_signed(self.validator, vars(self))

    @classmethod
    def read(cls, body: Any) -> "SignedVerdict":
        """Returns the verdict in a JSON object (`dataclasses.asdict` writes it). Raises ValueError for any other value, or an unsigned one."""
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        timeline.check_fields(body, cls, "verdict")
        for name, kind in types.items():
            if type(body[name]) is not kind:
                raise ValueError(f"verdict has {name} = {body[name]!r:.80}; send a {kind}")
        verdict = cls(**body)
        is_clear = verdict.accepted == (verdict.reason == Reason.OK) and re.fullmatch("[a-z_]{1,32}", verdict.reason)
        if not (is_clear and 0 <= verdict.time_us < 2**53 and text_lib.is_hex(verdict.signature, 128)):
            found = f"accepted = {verdict.accepted}, reason {verdict.reason!r:.80}, time_us = {verdict.time_us!r:.20}"
            raise ValueError(
                f"verdict has {found}; send reason 'ok' if and only if accepted, the time, and 128 lower-case hex digits"
            )
        if len(verdict.detail) > MAX_DETAIL or not verdict.check():
            raise ValueError(f"verdict is not signed by the validator it names, {verdict.validator[:16]!r}; sign it")
        return verdict


def group_digest(rollouts: Sequence[rollout_lib.Rollout], digests: Iterable[bytes] | None = None) -> str:
    """Returns the SHA-256, in hex, of the contents that a group's worker signed: the digests of its valid rollouts in order of their numbers.

    `digests` are those of the rollouts, if they are known.
    """
    known = zip(rollouts, digests or map(rollout_lib.digest, rollouts), strict=True)
    ordered = sorted(known, key=lambda one: one[0].number)
    return hashlib.sha256(b"intellax/group/1" + b"".join(digest for _, digest in ordered)).hexdigest()


def reputation(num_passed: float, num_faults: int = 0) -> float:
    """Returns the reputation in [0, 1) of a worker that passed `num_passed` replays and had `num_faults` faults."""
    return num_passed / (num_passed + HALF_AT + FAULT * num_faults)


def check_rate(reputation: float, min_rate: float) -> float:
    """Returns the probability with which a group of a worker of this reputation is replayed: 1 - reputation, but at least `min_rate`."""
    return max(min_rate, 1 - reputation)


def draw(secret: bytes, group: str) -> float:
    """Returns a number in [0, 1) drawn from the name of a group and the run's secret. The group is replayed if its check rate is above the number."""
    digest = hmac.digest(secret, group.encode(), "sha256")
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # all bits of a float: it never rounds to 1
