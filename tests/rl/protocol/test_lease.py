"""Signed requests for work: only the named key's own, for this run and session, fresh, in order, and once."""

import functools
import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease
from sharding.system import signed_message
from tests.support import signed_http
from tests.support.clock import Clock

RUN, KEY, OTHER = (
    rollout_lib.WorkerKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes([n] * 32))) for n in (1, 2, 3)
)
SESSION = lease.Session.open(RUN.worker)


@pytest.fixture
def clock():
    return Clock(1e9)


def asked(key, clock, capacity=1, session=SESSION, **fields):
    return signed_http.lease_body(key, session, capacity, clock=clock, **fields)


def verifier_of(clock, session=SESSION, **options):
    return lease.RequestVerifier(session, clock=clock, **options)


def test_a_request_is_read_as_it_was_written(clock):
    verifier = verifier_of(clock)
    for capacity in (0, 1, 64, lease.MAX_CAPACITY):
        clock.now += 0.001
        assert verifier.verify(asked(KEY, clock, capacity), "lease") == KEY.worker
    returned = [["train", 3, 7]] * lease.MAX_RETURNED
    other = asked(OTHER, clock, returned=returned, work="ab")
    assert verifier.verify(other, "lease") == OTHER.worker  # an order of its own
    for _ in range(2):  # a submission has no order
        assert verifier.verify(lease.request(KEY, SESSION, clock=clock, digest="0" * 64), "submit") == KEY.worker


@pytest.mark.parametrize("is_known", [False, True])
def test_a_copy_is_refused_for_as_long_as_its_date_would_pass(clock, is_known, monkeypatch):
    verifier = verifier_of(clock, is_known=lambda worker: is_known and worker == KEY.worker)
    first = asked(KEY, clock)
    verifier.verify(first, "lease")
    monkeypatch.setattr(lease, "MAX_REMEMBERED", 4)
    for _ in range(12 if is_known else 2):  # a known worker is remembered however many other keys ask
        clock.now += 0.001
        verifier.verify(asked(rollout_lib.WorkerKey.generate(), clock), "lease")
        assert len(verifier._last_us) <= 4 + 1
    for _ in range(10):
        with pytest.raises(ValueError, match="as a replay|off our clock"):
            verifier.verify(first, "lease")
        clock.now += signed_message.MAX_CLOCK_SKEW_S / 4
    for _ in range(4):
        verifier.verify(asked(OTHER, clock), "lease")
        clock.now += 0.001
    with pytest.raises(ValueError, match="off our clock"):
        verifier.verify(first, "lease")


def test_a_request_is_worth_nothing_in_another_run_or_after_a_restart(clock):
    """Attack: a request or submission that was seen on the way is sent to another orchestrator, or to this one's successor."""
    requests = ("lease", asked(KEY, clock)), ("submit", lease.request(KEY, SESSION, clock=clock, digest="0" * 64))
    restarted, elsewhere = lease.Session.open(RUN.worker), lease.Session(OTHER.worker, SESSION.id)
    for kind, message in requests:
        for session in (restarted, elsewhere):
            with pytest.raises(lease.StaleSession, match="not this orchestrator; fetch /run again"):
                verifier_of(clock, session).verify(message, kind)
            with pytest.raises(ValueError, match="not signed by the key"):  # relabeled
                verifier_of(clock, session).verify(message | {"run": session.run, "session": session.id}, kind)
        assert verifier_of(clock).verify(message, kind) == KEY.worker


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker": OTHER.worker}, "not signed by the key it names"),
        ({"capacity": 2}, "not signed by"),
        ({"returned": [["train", 1, 2]]}, "not signed by"),
        ({"work": "0"}, "not signed by"),
        ({"time_us": int(1e15) + 1}, "not signed by"),
        ({"signature": "00" * 64}, "not signed by"),
        ({"signature": "zz"}, "signature 'zz'; send"),
        ({"worker": KEY.worker.upper()}, "send a hex public key"),  # a second name for the same key
        ({"worker": 5}, "send a hex public key"),
        ({"capacity": -1}, "an integer in 0..4096"),
        ({"capacity": True}, "an integer in 0..4096"),
        ({"capacity": 1.0}, "an integer in 0..4096"),
        ({"capacity": 10**9}, "an integer in 0..4096"),
        ({"returned": [["train", 1, 2]] * 65}, "at most 64 keys"),
        ({"returned": [["train", 1, 2.0]]}, "at most 64 keys"),
        ({"returned": [["train", [[]], 2]]}, "at most 64 keys"),
        ({"work": "0" * 33}, "the proof of work in hex"),
        ({"time_us": 1e15}, "time_us 1000000000000000.0;"),
        ({"time_us": 10**400}, r"an integer in 0..2\^63"),  # no float holds the difference
        ({"time_us": -1}, r"an integer in 0..2\^63"),
        (
            {"time_us": int(1e15 + 3600e6)},
            r"dated 2001-09-09T02:46:40Z, \+3600 s off our clock, 2001-09-09T01:46:40Z; at most 300 s .*; synchronize",
        ),
        ({"time_us": int(1e15 - 301e6)}, "-301 s off"),
        ({"time_us": 2**63 - 1}, "dated 9999-12-31T23:59:59Z"),
        ({"signature": None}, "signature None; send"),
        ({"extra": 1}, "the unknown field 'extra'"),
    ],
)
def test_what_is_wrong_is_said(clock, change, message):
    with pytest.raises(ValueError, match=message):
        verifier_of(clock).verify(asked(KEY, clock) | change, "lease")


def test_one_kind_of_message_is_not_another(clock):
    """Attack: a signature over one kind of message is used for another."""
    verifier, body = verifier_of(clock), asked(KEY, clock)
    with pytest.raises(ValueError, match="submit request without digest"):
        verifier.verify(body, "submit")
    with pytest.raises(ValueError, match="lease request without capacity, "):
        verifier.verify(lease.request(KEY, SESSION, clock=clock, digest="0" * 64), "lease")
    described = signed_message.sign(
        RUN.private, {"id": RUN.worker, "session": SESSION.id, "nonce": "a", "run": {"servers": ["http://a"]}}
    )
    assert signed_message.is_signed(RUN.worker, described) and not signed_message.is_signed(KEY.worker, described)
    for change in ({"nonce": "b"}, {"run": {"servers": ["http://b"]}}, {"session": ""}, {"more": 1}):
        assert not signed_message.is_signed(RUN.worker, described | change)


def test_odd_messages_are_not_signed_and_raise_nothing():
    deep = functools.reduce(lambda inner, _: [inner], range(5000), 1)
    for message in (
        None,
        5,
        [],
        {},
        {"signature": 5},
        {"signature": "0" * 127},
        {"signature": "é"},
        {"signature": "00"},
    ):
        assert not signed_message.is_signed(RUN.worker, message)
    for value in (float("nan"), deep, {1, 2}, "\ud800"):
        assert not signed_message.is_signed(RUN.worker, {"a": value, "signature": "00" * 64})
    assert not signed_message.is_signed(5, signed_message.sign(RUN.private, {})) and signed_message.is_signed(
        RUN.worker, signed_message.sign(RUN.private, {})
    )


def test_an_uninvited_key_is_refused_before_its_signature_is_checked(clock, monkeypatch):
    def admit(worker, message):
        raise ValueError(f"{worker[:4]} may not")

    monkeypatch.setattr(signed_message, "is_signed", None)
    with pytest.raises(ValueError, match="may not"):
        verifier_of(clock, admit=admit).verify(asked(KEY, clock), "lease")


def test_a_proof_of_work_is_of_its_run_and_key():
    with pytest.raises(ValueError, match="more than the 40"):
        lease.find_work(RUN.worker, KEY.worker, 41)
    work = lease.find_work(RUN.worker, KEY.worker, 12)
    digest = hashlib.sha256(f"intellax/work/1/{RUN.worker}/{KEY.worker}/{work}".encode()).hexdigest()
    assert digest.startswith("000") and lease.is_work(RUN.worker, KEY.worker, work, 12)
    others = [(OTHER.worker, KEY.worker, work), (RUN.worker, OTHER.worker, work), (RUN.worker, KEY.worker, work + "0")]
    assert sum(lease.is_work(*other, 12) for other in others) == 0
    assert sum(lease.is_work(RUN.worker, KEY.worker, f"{n:x}", 4) for n in range(4096)) == pytest.approx(
        256, abs=5 * 16
    )


def test_a_workers_own_clock_never_runs_back():
    times_us = [int(signed_message.steady_time() * 1e6) for _ in range(1000)]
    assert times_us == sorted(set(times_us))  # each is newer, in the unit that is sent


def test_a_workers_own_clock_is_right_after_a_sleep(monkeypatch):
    """While a laptop sleeps the monotonic clock stands still, and the date goes on."""
    now_s = signed_message.steady_time()
    monkeypatch.setattr(signed_message, "_last_s", now_s)
    monkeypatch.setattr(signed_message.time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(signed_message.time, "time", lambda: now_s + 360)
    verifier = verifier_of(lambda: now_s + 360)
    assert verifier.verify(signed_http.lease_body(KEY, SESSION), "lease") == KEY.worker
    monkeypatch.setattr(signed_message.time, "time", lambda: now_s + 350)  # set back a little
    assert verifier.verify(signed_http.lease_body(KEY, SESSION), "lease") == KEY.worker
    monkeypatch.setattr(signed_message.time, "time", lambda: now_s - 3600)  # a wrong clock was corrected
    assert verifier_of(lambda: now_s - 3600).verify(signed_http.lease_body(KEY, SESSION), "lease") == KEY.worker
    with pytest.raises(
        ValueError, match="its time, .*Z, is not later than .*Z of the previous .* synchronize it and re"
    ):
        verifier._clock = lambda: now_s - 3600
        verifier.verify(signed_http.lease_body(KEY, SESSION), "lease")


def test_a_lease_that_lacks_a_field_or_has_it_in_another_form_is_refused():
    sent = lease.Lease(3, 7, "train", 12, seed=5, num_samples=4, temperature=0.8, min_version=1, env="sums").to_json()
    assert lease.Lease.from_json(json.loads(json.dumps(sent))).to_json() == sent
    assert lease.Lease.from_json(sent | {"temperature": 1, "later": 2}).temperature == 1
    for body in (None, [], *({**sent, name: None} for name in sent), sent | {"seed": 5.0}, sent | {"version": True}):
        with pytest.raises(ValueError, match="which this worker cannot read; use the release of the orchestrator"):
            lease.Lease.from_json(body)
