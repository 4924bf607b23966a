"""Worker reputation: how much one key can take from a run, and when it is banned."""

import functools
import json
import time

import pytest

from rl.swarm.orchestrator import worker_health

KEY = ("train", 1, 0)


UNMARKED = {"num_rejected": 0, "is_suspect": False, "num_halvings": 0, "num_verified": 0, "num_unverified": 0}
UNMARKED |= {"steps": [], "record": 0}
NAMES = ("friend", "slow", "good", "bad", "shady")


def make(min_rate=0.05, invited_rate=1.0, invited=NAMES):
    rates = dict(min_rate=min_rate, invited_rate=invited_rate, invited=invited)
    return worker_health.WorkerHealth(max_rejections=3, lease_s=10.0, **rates)


def room(health, worker, num_held, num_groups, now_s):
    return health.room(worker, "net", num_groups, now_s, lambda worker: [KEY] * num_held)


def reject(health, worker, is_fault=False):
    health.rejected(worker, KEY, 0.0, is_fault=is_fault)


def test_a_worker_whose_leases_expire_holds_less_while_others_are_active():
    health = make()
    health.seen("slow", 0.0)
    for _ in range(3):
        health.lost("slow", KEY, 0.0)
    assert room(health, "slow", 0, 16, 1.0) == 16 and health.may_lease("slow", KEY, 1.0)  # no other worker could do it
    health.seen("good", 1.0)
    assert room(health, "slow", 0, 16, 2.0) == 2 and not health.may_lease("slow", KEY, 2.0)
    assert room(health, "good", 0, 16, 2.0) == 16 and health.may_lease("good", KEY, 2.0)
    assert room(health, "slow", 1, 16, 2.0) == 1  # it may hold two and holds one
    for _ in range(40):
        health.lost("slow", KEY, 2.0)
    assert room(health, "slow", 0, 16, 2.0) == 1  # a chance is left
    for _ in range(worker_health.MOST_HALVINGS):
        health.accepted("slow", KEY)
    assert health.may_lease("slow", KEY, 2.0) and room(health, "slow", 0, 16, 2.0) == 16
    health.lost("slow", KEY, 2.0)
    assert room(health, "slow", 0, 16, 12.0) == 16  # the other has not asked for longer than a lease lasts


def test_marks_against_a_worker_outlive_a_restart():
    health = make()
    for name in ("bad", "shady", "slow", "good"):
        health.seen(name, 0.0)
    for _ in range(3):
        reject(health, "bad", is_fault=False)
    reject(health, "shady", is_fault=True)
    health.lost("slow", KEY, 0.0)
    for _ in range(32):
        health.verified("good")
    for step in (4, 5, 9):
        health.trained_unverified("good", step)
    again = make()
    again.restore(json.loads(json.dumps(health.state())))
    assert again.state() == health.state() and set(again.state()["workers"]) == {"bad", "shady", "slow", "good"}
    for name in ("good", "bad"):
        again.seen(name, 1000.0)  # another process, another clock
    assert again.has_others("bad", 1000.0) and not again.has_others("good", 1000.0)
    assert again.num_banned(1000.0) == 1 and again.num_banned(1011.0) == 0  # only of those that still ask
    assert again.is_banned("bad") and again.rate("shady") == 1 and not again.is_banned("shady")
    assert again.rate("good") == 1 / 2 and again.reveal("good") == (3, [4, 5, 9])
    # The ledger may know less than the checkpoint, or more.
    again.remember(["bad", "new", "gone"], {"bad": 1, "new": 1}, ["gone"])
    assert again.is_banned("bad") and again.is_banned("gone") and again.rate("new") == 1 != again.is_banned("new")
    assert room(again, "slow", 0, 16, 1000.0) == 8 and not again.may_lease("slow", KEY, 1000.0)
    reject(again, "shady", is_fault=False)
    reject(again, "shady", is_fault=False)
    assert again.is_banned("shady")


def test_keys_that_are_gone_are_forgotten():
    health = make(invited=())
    for i in range(2_000):
        health.accepted(f"key {i}", KEY)
        health.seen(f"key {i}", i * 0.1)
    assert len(health._seen_s) <= 101 and health.has_others("bad", 199.9)  # a hundred of them within a lease
    begun_s = time.process_time()
    for i in range(10_000):  # in one partition
        health.expired(f"key {i % 2_000}", KEY, 199.9 + i * 0.001, blame=True)
        health.left(f"key {i}", 199.9 + i * 0.001)
    assert time.process_time() - begun_s < 1 and health.state()["workers"] == {}


@pytest.mark.parametrize("record", [0, 1, 31, 32, 100, 607, 608, 10**6])
def test_a_rate_falls_with_the_record_to_its_floor_and_is_1_after_a_fault(record):
    health = make(invited_rate=0.125)
    for _ in range(min(record, 700)):
        health.verified("a")
        health.verified("friend")
    health._workers["a"].num_verified = health._workers["friend"].num_verified = record
    assert health.rate("a") == pytest.approx(max(0.05, 32 / (32 + record)))
    assert health.rate("friend") == pytest.approx(max(0.05, 1 / (8 + record / 32)))
    reject(health, "a", is_fault=False)
    assert health.rate("a") < 1 or not record
    for _ in range(2):  # banned, without a fault: the groups that it still holds are verified
        reject(health, "a", is_fault=False)
    assert health.rate("a") == 1
    reject(health, "friend", is_fault=True)
    assert health.rate("friend") == 1 == health.rate("unknown")
    health.verified("friend")
    assert health.rate("friend") == 1


def test_steps_are_named_once_and_kept_as_ranges():
    health = make()
    for step in (1, 2, 2, 3, 7, 9, 10):
        health.trained_unverified("a", step)
    assert health.state()["workers"]["a"] == UNMARKED | {"num_unverified": 7, "steps": [[1, 3], [7, 7], [9, 10]]}
    assert health.reveal("a") == (7, [1, 2, 3, 7, 9, 10]) and health.reveal("a") == (0, [])


def test_a_stranger_keeps_and_takes_less_than_an_invited_worker():
    health = make()
    for name in ("friend", "good"):
        health.seen(name, 0.0)
    assert [health.renewed_s(name, 0.0, 9.0) for name in ("friend", "new")] == [19.0, 10.0]
    assert [health.left("friend", s) for s in (0.0, 1.0)] == [False, False]  # nor for the second time in a lease
    health.lost("friend", KEY, 0.0)
    assert health.may_lease("new", KEY, 0.0) and not health.may_lease("friend", KEY, 0.0)
    for mark in (health.lost, functools.partial(health.rejected, is_fault=False)):
        health.accepted("new", KEY)  # the group is not lost any more
        mark("other", KEY, 0.0)
        allowed = [name for name in ("good", "new", "fresh", "other") if health.may_lease(name, KEY, 9.0)]
        assert allowed == ["good", "new"]  # one with a record, while there is any


def test_a_group_that_comes_back_rests_longer_each_time():
    health = make()
    for pause_s in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        health.returned(KEY, 100.0)
        assert health.may_lease("good", KEY, 100.0 + pause_s)
        assert not pause_s or not health.may_lease("good", KEY, 99.9 + pause_s)


def test_strangers_wait_while_the_rollouts_of_an_invited_worker_are_measured():
    """Only while one is active: a run must not wait for a worker that does not come."""
    is_measuring = True
    health = worker_health.WorkerHealth(
        3, 10.0, min_rate=0.05, invited_rate=0.125, invited=["friend"], is_measuring=lambda: is_measuring
    )
    assert room(health, "new", 0, 16, 0.0) == 1 and health.rate("friend") == 0.125
    health.seen("friend", 0.0)
    assert room(health, "new", 0, 16, 9.0) == 0 and room(health, "friend", 0, 16, 9.0) == 16
    assert room(health, "new", 0, 16, 11.0) == 1
    assert health.rate("friend") == 1  # a stranger asked for work
    for _ in range(32):
        health.verified("new")
    assert health.rate("new") == 1  # limits are loose meanwhile
    is_measuring = False
    assert room(health, "new", 0, 16, 9.0) == 1 and health.rate("friend") == 0.125
    assert health.rate("new") == 1  # attack: replays under the loose limits were trust when the strict ones came
    for _ in range(32):
        health.verified("new")
    assert health.rate("new") == 0.5


def test_a_doubt_costs_the_trust_and_counts_for_no_ban():
    health = make(invited_rate=0.125)
    for _ in range(9):
        health.doubt("friend")
    assert health.rate("friend") == 1 and not health.is_banned("friend")
