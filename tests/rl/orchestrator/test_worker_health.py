"""Worker reputation: how much one key can take from a run, and when it is banned."""

import json

from rl.orchestrator import worker_health

KEY = ("train", 1, 0)


def make():
    return worker_health.WorkerHealth(max_rejections=3, lease_s=10.0)


def test_a_worker_whose_leases_expire_holds_less_while_others_are_active():
    health = make()
    health.seen("slow", 0.0)
    for _ in range(3):
        health.expired("slow", KEY)
    assert health.room("slow", 0, 16, 1.0) == 16 and health.may_lease("slow", KEY, 1.0)  # no other worker could do it
    health.seen("good", 1.0)
    assert health.room("slow", 0, 16, 2.0) == 2 and not health.may_lease("slow", KEY, 2.0)
    assert health.room("good", 0, 16, 2.0) == 16 and health.may_lease("good", KEY, 2.0)
    assert health.room("slow", 1, 16, 2.0) == 1  # it may hold two and holds one
    for _ in range(40):
        health.expired("slow", KEY)
    assert health.room("slow", 0, 16, 2.0) == 1  # a chance is left
    health.accepted("slow", KEY)
    assert health.may_lease("slow", KEY, 2.0)
    assert health.room("slow", 0, 16, 12.0) == 16  # the other has not asked for longer than a lease lasts


def test_rejections_ban_and_a_failed_replay_makes_a_suspect():
    health = make()
    for name in ("good", "bad"):
        health.seen(name, 0.0)
    assert health.has_others("good", 0.0)
    health.rejected("bad", by_replay=False)
    assert not health.is_suspect("bad") and not health.is_banned("bad")
    health.rejected("bad", by_replay=True)
    assert health.is_suspect("bad") and health.room("bad", 0, 16, 0.0) == 16
    health.rejected("bad", by_replay=False)
    assert health.is_banned("bad") and health.room("bad", 0, 16, 0.0) == 0
    assert not health.is_suspect("good") and health.has_others("bad", 0.0) and not health.has_others("good", 0.0)
    assert health.num_banned(0.0) == 1 and health.num_banned(11.0) == 0  # only of those that still ask


def test_marks_against_a_worker_outlive_a_restart():
    health = make()
    for name in ("bad", "shady", "slow", "good"):
        health.seen(name, 0.0)
    for _ in range(3):
        health.rejected("bad", by_replay=False)
    health.rejected("shady", by_replay=True)
    health.expired("slow", KEY)
    again = make()
    again.restore(json.loads(json.dumps(health.state())))
    assert again.state() == health.state() and set(again.state()["workers"]) == {"bad", "shady", "slow"}
    again.seen("good", 1000.0)  # another process, another clock
    assert again.is_banned("bad") and again.is_suspect("shady") and not again.is_banned("shady")
    assert again.room("slow", 0, 16, 1000.0) == 8 and not again.may_lease("slow", KEY, 1000.0)
    again.rejected("shady", by_replay=False)
    again.rejected("shady", by_replay=False)
    assert again.is_banned("shady")


def test_keys_that_only_ask_leave_no_trace(monkeypatch):
    monkeypatch.setattr(worker_health, "MIN_PRUNED", 100)
    health = worker_health.WorkerHealth(max_rejections=3, lease_s=10.0)
    health.rejected("bad", by_replay=False)
    for i in range(20_000):
        health.seen(f"key {i}", i * 0.1)  # a hundred of them within a lease
    assert len(health._workers) <= 2 * 101 + 101 and health.has_others("bad", 1999.9)
    assert health.state()["workers"] == {"bad": [1, False, 0]}
