"""Standing: what one key can take from a run, and when it is taken from it."""

import json

from rl.orchestrator import worker_health

KEY = ("train", 1, 0)


def make():
    return worker_health.Standing(max_refusals=3, lease_s=10.0)


def test_who_lets_leases_run_out_holds_less_while_others_are_there():
    known = make()
    known.asked("slow", 0.0)
    for _ in range(3):
        known.expired("slow", KEY)
    assert known.room("slow", 0, 16, 1.0) == 16 and known.may_take("slow", KEY, 1.0)  # nobody else could do it
    known.asked("good", 1.0)
    assert known.room("slow", 0, 16, 2.0) == 2 and not known.may_take("slow", KEY, 2.0)
    assert known.room("good", 0, 16, 2.0) == 16 and known.may_take("good", KEY, 2.0)
    assert known.room("slow", 1, 16, 2.0) == 1  # of what it may hold, it holds one
    for _ in range(40):
        known.expired("slow", KEY)
    assert known.room("slow", 0, 16, 2.0) == 1  # a chance is left
    known.delivered("slow", KEY)
    assert known.may_take("slow", KEY, 2.0)
    assert known.room("slow", 0, 16, 12.0) == 16  # the other has not asked for longer than a lease lasts


def test_refusals_bar_and_a_replay_makes_suspect():
    known = make()
    known.asked("good", 0.0)
    known.refused("bad", by_replay=False)
    assert not known.is_suspect("bad") and not known.is_barred("bad")
    known.refused("bad", by_replay=True)
    assert known.is_suspect("bad") and known.room("bad", 0, 16, 0.0) == 16
    known.refused("bad", by_replay=False)
    assert known.is_barred("bad") and known.room("bad", 0, 16, 0.0) == 0
    assert not known.is_suspect("good") and known.others("bad", 0.0) and not known.others("good", 0.0)


def test_what_is_held_against_a_worker_outlives_a_restart():
    known = make()
    for name in ("bad", "shady", "slow", "good"):
        known.asked(name, 0.0)
    for _ in range(3):
        known.refused("bad", by_replay=False)
    known.refused("shady", by_replay=True)
    known.expired("slow", KEY)
    again = make()
    again.restore(json.loads(json.dumps(known.state())))
    assert again.state() == known.state() and set(again.state()["workers"]) == {"bad", "shady", "slow"}
    again.asked("good", 1000.0)  # another process, another clock
    assert again.is_barred("bad") and again.is_suspect("shady") and not again.is_barred("shady")
    assert again.room("slow", 0, 16, 1000.0) == 8 and not again.may_take("slow", KEY, 1000.0)
    again.refused("shady", by_replay=False)
    again.refused("shady", by_replay=False)
    assert again.is_barred("shady")


def test_keys_that_only_ask_leave_no_trace(monkeypatch):
    monkeypatch.setattr(worker_health, "MIN_PRUNED", 100)
    known = worker_health.Standing(max_refusals=3, lease_s=10.0)
    known.refused("bad", by_replay=False)
    for i in range(20_000):
        known.asked(f"key {i}", i * 0.1)  # a hundred of them within a lease
    assert len(known._workers) <= 2 * 101 + 101 and known.others("bad", 1999.9)
    assert known.state()["workers"] == {"bad": [1, False, 0]}
