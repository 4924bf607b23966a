"""Signed verdicts on groups, and requests for them."""

import dataclasses
import hashlib
import json

import pytest

from inference.rollouts import rollout as rollout_lib
from rl.protocol import verdict as verdict_lib
from sharding.system import signed_message
from tests.support import rollouts

RUN, VALIDATOR, OTHER = (rollout_lib.WorkerKey.generate() for _ in range(3))
PLAIN = verdict_lib.SignedVerdict(RUN.worker, "train", 3, 7, "ab" * 32, False, "sampling", "3 of 12 tokens")


def test_a_verdict_is_signed_field_by_field_and_survives_json():
    signed = PLAIN.sign(VALIDATOR)
    assert signed.check() and signed.validator == VALIDATOR.worker and not PLAIN.check()
    body = json.loads(json.dumps(dataclasses.asdict(signed)))
    assert verdict_lib.SignedVerdict.read(body) == signed
    other = dict(run=OTHER.worker, validator=OTHER.worker, accepted=True, split="held_out", reason="ok", detail="")
    other |= dict(digest="cd" * 32, step=4, group=8, time_us=signed.time_us + 1, signature="00" * 64)
    assert other.keys() == body.keys()
    for name, value in other.items():
        for wrong in (value, None, "\ud800", [body[name]]):
            with pytest.raises(ValueError, match="; (sign it|send a|send reason)"):
                verdict_lib.SignedVerdict.read(body | {name: wrong})
    for wrong in (None, [], {}, body | {"more": 1}):
        with pytest.raises(ValueError, match="exactly the fields"):
            verdict_lib.SignedVerdict.read(wrong)


def test_the_digest_of_a_group_names_each_sample_and_its_order():
    group = [rollout_lib.sign(rollouts.make(number, sample=number), RUN) for number in range(3)]
    expected = hashlib.sha256(b"intellax/group/1" + b"".join(map(rollout_lib.digest, group))).hexdigest()
    assert verdict_lib.group_digest(group) == verdict_lib.group_digest(group[::-1]) == expected
    changed = [*group[:2], dataclasses.replace(group[2], reward=0.2)]
    assert len({verdict_lib.group_digest(g) for g in (group, group[:2], changed)}) == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"accepted": True}, "; send reason 'ok' if and only if accepted"),
        ({"reason": "ok"}, "; send reason 'ok' if and only if accepted"),
        ({"reason": "two\nlines"}, "; send reason"),
        ({"time_us": -1}, "time_us = -1; send reason"),
        ({"time_us": 2**53}, "time_us = 9007199254740992; send reason"),
        ({"accepted": 0}, "accepted = 0; send a"),
        ({"step": True}, "step = True; send a"),  # equal to the group's, step 1
        ({"detail": "x" * (verdict_lib.MAX_DETAIL + 1)}, "; sign it"),
    ],
)
def test_what_a_validator_signs_itself_must_fit_the_ledger(change, match):
    """An event that the ledger refuses ends the run: one lying validator must not be able to cause one."""
    body = dataclasses.asdict(PLAIN.sign(VALIDATOR))
    del body["signature"]
    assert verdict_lib.SignedVerdict.read(signed_message.sign(VALIDATOR.private, body)).check()
    with pytest.raises(ValueError, match=match):
        verdict_lib.SignedVerdict.read(signed_message.sign(VALIDATOR.private, body | change))


def test_a_signature_has_one_spelling():
    body = dataclasses.asdict(PLAIN.sign(VALIDATOR))
    with pytest.raises(ValueError, match="128 lower-case hex digits"):
        verdict_lib.SignedVerdict.read(body | {"signature": body["signature"].upper()})
