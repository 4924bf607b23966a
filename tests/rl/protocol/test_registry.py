"""The registry of nodes: states by silence, servers for workers, outages, and hostile keys."""

import dataclasses
import json
import random

import pytest

from rl.protocol import registry
from rl.protocol.registry import State
from rl.protocol.timeline import Policy
from sharding.system import sign_in

BEAT_S = 10.0


def make(named=()):
    return registry.Registry(BEAT_S, is_named=lambda key: key in named)


def report(version=None, epoch=0, digest="", **fields):
    policy = None if version is None else Policy(epoch, version, digest)
    return registry.Report("http://a:1", policy, **fields)


def state_of(nodes, key):
    return next((row["state"] for row in nodes.table() if row["key"] == key), None)


@pytest.mark.parametrize("seed", range(20))
def test_states_follow_from_the_times_of_beats_alone(seed):
    """Random beats, faults, and leaves, against a function of the times of the last ones."""
    draw, nodes, now_s = random.Random(seed), make(named={"k0", "k1", "k2"}), 0.0
    beat, fault = {}, {}
    expected = {}
    for _ in range(400):
        now_s += draw.choice([0, 1, 5, 11, 40, 300])
        changes = {(one.key, one.new) for one in nodes.sweep(now_s)}
        key = f"k{draw.randrange(5)}"
        for other, state in expected.items():
            silent = (now_s - beat[other]) / BEAT_S
            if state in (State.HEALTHY, State.JOINING) and silent > 2.5:
                expected[other] = State.SUSPECT
            elif state is State.SUSPECT and silent > 6:
                expected[other] = State.DEAD
            elif state is State.DEAD and silent > 60:
                expected[other] = State.GONE
            assert expected[other] == state or (other, expected[other]) in changes
        action = draw.choice(["beat", "beat", "beat", "fault", "leave"])
        was, role = expected.get(key), "server" if key in ("k0", "k1") else "worker"
        if action == "beat":
            loads = key == "k0" and draw.random() < 0.3  # a server without weights
            nodes.beat(key, role, now_s, report(None if loads else 3))
            is_held = was is State.SUSPECT and key in fault and now_s < fault[key] + 2 * BEAT_S
            if was in (None, State.GONE):
                fault.pop(key, None)
            stays = loads and was is State.HEALTHY
            expected[key] = was if is_held or stays else State.JOINING if loads else State.HEALTHY
            beat[key] = now_s
        elif action == "fault" and was is not None:
            nodes.fault(key, now_s, "timed out\n")
            if not (was is State.GONE and key not in ("k0", "k1", "k2")):
                fault[key] = now_s
            expected[key] = State.SUSPECT if was in (State.JOINING, State.HEALTHY) else was
        elif action == "leave" and was is not None:
            nodes.leave(key, role)
            expected[key] = State.GONE
        shown = {k: s.value for k, s in expected.items() if s is not State.GONE or k in ("k0", "k1", "k2")}
        assert {row["key"]: row["state"] for row in nodes.table()} == shown
        for role, keys in (("server", ("k0", "k1")), ("worker", ("k2", "k3", "k4"))):
            states = [State(shown[k]) for k in keys if k in shown]
            assert nodes.count(role) == {state: states.count(state) for state in set(states)}


def test_servers_serve_while_they_are_healthy_and_have_an_allowed_policy():
    nodes = make()
    oldest, newest = Policy(1, 4), Policy(1, 6, "a" * 64)
    for key, version, epoch, digest in (
        ("old", 3, 1, ""),
        ("good", 4, 1, ""),
        ("best", 6, 1, "a" * 64),
        ("liar", 6, 1, "b" * 64),
        ("ahead", 7, 1, ""),
        ("abandoned", 5, 0, ""),
        ("loading", None, 0, ""),
    ):
        nodes.beat(key, "server", 0.0, report(version, epoch, digest))
    nodes.beat("worker", "worker", 0.0, report(5, 1))
    assert [node.key for node in nodes.serving(Policy(0, 0))] == ["abandoned"]
    assert [node.key for node in nodes.serving(oldest, newest)] == ["best", "good"]
    nodes.fault("best", 1.0, "connection refused")
    assert [node.key for node in nodes.serving(oldest, newest)] == ["good"]
    assert "http://a:1 suspect (connection refused)" in registry.line(nodes.table(), "server")
    assert registry.line(nodes.table(), "relay") == "no relay has signed in"
    nodes.beat("best", "server", 10.0, report(6, 1, "a" * 64))
    assert [node.key for node in nodes.serving(oldest, newest)] == ["good"]  # it beats, and our calls fail
    nodes.beat("best", "server", 22.0, report(6, 1, "a" * 64))
    assert [node.key for node in nodes.serving(oldest, newest)] == ["best", "good"]
    nodes.sweep(26.0)
    assert [node.key for node in nodes.serving(oldest, newest)] == ["best"]
    for act in (lambda: nodes.beat("best", "worker", 27.0, report()), lambda: nodes.leave("best", "relay")):
        with pytest.raises(ValueError, match="signed in as a server"):
            act()


def test_an_outage_of_servers_is_recognized_also_after_it():
    nodes = make()
    assert not nodes.was_away(0.0)  # of a run without registered servers, nothing is known
    for key in ("a", "b", "c"):
        nodes.beat(key, "server", 0.0, report(1))
    nodes.sweep(1.0)
    assert not nodes.was_away(1.0)
    nodes.fault("a", 2.0, "hangs")
    assert not nodes.was_away(1.0)  # two others serve
    nodes.fault("b", 3.0, "hangs")
    assert nodes.was_away(3.0)
    for now_s in (20.0, 30.0):
        for key in ("a", "b", "c"):
            nodes.beat(key, "server", now_s, report(1))
    assert not nodes.was_away(31.0) and nodes.was_away(30.0) == nodes.was_away(20.0) == nodes.was_away(3.0)
    for key in ("a", "b"):
        nodes.leave(key, "server")
    nodes.beat("c", "server", 50.0, report(1))
    assert not nodes.was_away(49.0)  # those that left are not missed


def test_hostile_keys_take_bounded_memory_and_no_place_of_a_named_node():
    nodes = make(named={"friend"})
    nodes.beat("friend", "worker", 0.0, report())
    for i in range(registry.MAX_STRANGERS):
        assert nodes.beat(f"s{i}", "worker", 1.0, report())
    assert nodes.beat("late", "worker", 1.0, report()) is None  # all beat
    assert nodes.beat("s7", "worker", 30.0, report())
    for i in range(3 * registry.MAX_STRANGERS):
        nodes.beat(f"t{i}", "worker", 31.0, report())
    assert len(nodes.table()) == registry.MAX_STRANGERS + 1
    assert state_of(nodes, "friend") and state_of(nodes, "s7") and not state_of(nodes, "s8")
    nodes.sweep(10_000.0)
    nodes.sweep(10_001.0)
    nodes.sweep(10_002.0)
    assert [row["key"] for row in nodes.table()] == ["friend"] and not any(nodes._strangers.values())
    assert len(nodes.sweep(10_003.0)) == 0


def test_workers_keep_their_places_for_as_long_as_their_own_interval_allows(monkeypatch):
    """Workers of a large swarm beat seldom; new keys took the places of healthy ones after the interval of a server."""
    monkeypatch.setattr(registry, "MAX_STRANGERS", 2)
    nodes = make()
    nodes.worker_interval_s, silent_s = 100.0, 100.0 * registry.SUSPECT_BEATS
    for key in ("a", "b"):
        nodes.beat(key, "worker", 0.0, report())
    nodes.sweep(silent_s)
    assert state_of(nodes, "a") == "healthy" and nodes.beat("new", "worker", silent_s, report()) is None
    assert nodes.beat("new", "worker", silent_s + 1, report()) and not state_of(nodes, "a")


def test_a_silent_relay_leaves_its_place_though_workers_may_be_silent_for_longer(monkeypatch):
    monkeypatch.setattr(registry, "MAX_STRANGERS", 2)
    nodes = make()
    nodes.worker_interval_s = 1000.0
    nodes.beat("a", "worker", 0.0, report())
    nodes.beat("relay", "relay", 1.0, report())
    assert nodes.beat("new", "worker", 2.0, report()) is None
    assert nodes.beat("new", "worker", 100.0, report()) and state_of(nodes, "a") and not state_of(nodes, "relay")


def test_reports_are_read_as_they_were_written_and_no_other_value_is():
    load = registry.Load(3, 4, 0.5, 6, 123.5)
    whole = registry.Report("https://h:1", Policy(1, 2, "a" * 64), load, "out of memory")
    body = json.loads(json.dumps(dataclasses.asdict(whole)))
    assert registry.Report.from_json(body) == whole
    assert registry.Report.from_json(dataclasses.asdict(registry.Report())) == registry.Report()
    bad = [None, [], 1, "x", {}, body | {"more": 1}, {1: 2}]
    bad += [body | {"url": url} for url in (1, "ftp://x", "http://" + "x" * 256)]
    # Attacks: a worker that opens them ends, a reply with one cannot be encoded for any worker, and a terminal obeys one.
    odd = "http://", "http://[", "http://\0", "http://h:99999", "http://h\ud800", "http://h/\x1b[2J", "http://h/a b"
    bad += [body | {"url": url} for url in odd]
    bad += [body | {"problem": text} for text in (None, "x" * (sign_in.MAX_PROBLEM + 1), "two\nlines", "\x1b[2J")]
    bad += [body | {"policy": policy} for policy in (3, {}, {"epoch": -1, "version": 0, "digest": ""})]
    values = (-1, True, None, "3", float("nan"), float("inf"), 10**13)
    names = [field.name for field in dataclasses.fields(registry.Load)]
    bad += [body | {"load": body["load"] | {name: value}} for name in names for value in values]
    bad += [body | {"load": body["load"] | change} for change in ({"running": 1.0}, {"kv_used": 1.01}, {"more": 1})]
    for value in bad:
        with pytest.raises(ValueError, match="send"):
            registry.Report.from_json(value)
