"""Requests for work: only the named key's own, fresh, in order, and once."""

import pytest

from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease

KEY, OTHER = rollout_lib.WorkerKey.generate(), rollout_lib.WorkerKey.generate()


class Clock:
    now_s = 1e9

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_a_request_is_read_as_it_was_written(clock):
    verifier = lease.LeaseVerifier(clock=clock)
    for capacity in (1, 64, lease.MAX_CAPACITY):
        clock.now_s += 0.001
        assert verifier.verify(lease.request(KEY, capacity, clock=clock)) == (KEY.worker, capacity)
    assert verifier.verify(lease.request(OTHER, 3, clock=clock)) == (OTHER.worker, 3)  # each worker has its own order


def test_a_copy_is_refused_for_as_long_as_its_date_would_pass(clock):
    verifier = lease.LeaseVerifier(clock=clock)
    first = lease.request(KEY, 1, clock=clock)
    verifier.verify(first)
    clock.now_s += 1
    verifier.verify(lease.request(KEY, 1, clock=clock))
    clock.now_s += 1
    verifier._prune_at = 0  # the next reading forgets whom it may
    verifier.verify(lease.request(OTHER, 1, clock=clock))
    for _ in range(10):
        with pytest.raises(ValueError, match="as a replay|off our clock"):
            verifier.verify(first)
        clock.now_s += lease.MAX_CLOCK_SKEW_S / 4
    verifier._prune_at = 0
    verifier.verify(lease.request(OTHER, 1, clock=clock))
    assert verifier._last_us.keys() == {OTHER.worker}  # requests that cannot pass any more are forgotten
    with pytest.raises(ValueError, match="off our clock"):
        verifier.verify(first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker": OTHER.worker}, "not signed by the key it names"),
        ({"capacity": 2}, "not signed by"),
        ({"time_us": int(1e15) + 1}, "not signed by"),
        ({"signature": "00" * 64}, "not signed by"),
        ({"signature": "zz"}, "signature 'zz'; send"),
        ({"worker": "zz"}, "not signed by"),
        ({"worker": 5}, "send a hex public key"),
        ({"capacity": 0}, "an integer in 1..4096"),
        ({"capacity": True}, "an integer in 1..4096"),
        ({"capacity": 1.0}, "an integer in 1..4096"),
        ({"capacity": 10**9}, "an integer in 1..4096"),
        ({"time_us": 1e15}, "time_us 1000000000000000.0;"),
        ({"time_us": 10**400}, r"an integer in 0..2\^63"),  # no float holds the difference
        ({"time_us": -1}, r"an integer in 0..2\^63"),
        ({"time_us": int(1e15 + 301e6)}, r"dated \+301 s off our clock, at most 300 s are allowed; set the"),
        ({"time_us": int(1e15 - 301e6)}, "dated -301 s off"),
        ({"signature": None}, "signature None; send"),
    ],
)
def test_what_is_wrong_is_said(clock, change, message):
    body = lease.request(KEY, 1, clock=clock)
    with pytest.raises(ValueError, match=message):
        lease.LeaseVerifier(clock=clock).verify(body | change)


def test_only_the_invited_are_served_where_there_is_a_list(clock):
    verifier = lease.LeaseVerifier([KEY.worker], clock=clock)
    assert verifier.verify(lease.request(KEY, 1, clock=clock)) == (KEY.worker, 1)
    with pytest.raises(ValueError, match="is not in topology.workers; ask"):
        verifier.verify(lease.request(OTHER, 1, clock=clock))


def test_a_workers_own_clock_never_runs_back():
    times_us = [int(lease.steady_time() * 1e6) for _ in range(1000)]
    assert times_us == sorted(set(times_us))  # each is newer, in the unit that is sent


def test_a_workers_own_clock_is_right_after_a_sleep(monkeypatch):
    """While a laptop sleeps the monotonic clock stands still, and the date goes on."""
    now_s = lease.steady_time()
    monkeypatch.setattr(lease, "_last_s", now_s)
    monkeypatch.setattr(lease.time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(lease.time, "time", lambda: now_s + 360)
    verifier = lease.LeaseVerifier(clock=lambda: now_s + 360)
    assert verifier.verify(lease.request(KEY, 1)) == (KEY.worker, 1)
    monkeypatch.setattr(lease.time, "time", lambda: now_s + 350)  # set back a little
    assert verifier.verify(lease.request(KEY, 2)) == (KEY.worker, 2)
