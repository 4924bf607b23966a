"""Relays are drawn by success rate times bandwidth, recover, and are never shut out."""

import collections
import types

import pytest

from sharding.weights.download import range_get, relay_selector


def relays(n):
    return [range_get.Relay(f"http://r{i}:1", range_get.Options()) for i in range(n)]


def request(relay, num_bytes, seconds):
    return types.SimpleNamespace(relay=relay, received=num_bytes, seconds=seconds)


def test_selection_is_proportional_to_success_times_bandwidth():
    selector = relay_selector.RelaySelector(relays(3), seed=1)
    for relay, (success, rate) in zip(selector.relays, [(1.0, 4e6), (0.5, 4e6), (1.0, 1e6)], strict=True):
        relay.success, relay.bytes_per_s = success, rate
    counts = collections.Counter(selector.select(0) for _ in range(7000))
    for relay, expected in zip(selector.relays, (4000, 2000, 1000), strict=True):
        assert abs(counts[relay] - expected) < 5 * expected**0.5  # five standard deviations, at least


def test_averages_heal_and_never_shut_a_relay_out():
    selector = relay_selector.RelaySelector(relays(2), seed=1)
    a, b = selector.relays
    selector.observe(request(a, 1_000_000, 0.5), True)
    selector.observe(request(a, 1_000_000, 1.0), True)
    assert a.bytes_per_s == pytest.approx(0.7 * 2e6 + 0.3 * 1e6)
    selector.observe(request(b, 1_000_000, 1.0), True)
    selector.observe(request(b, 0, 0.0), False)
    assert b.success == pytest.approx(0.7)
    selector.observe(request(a, 1, 0.001), True)  # too small to measure the bandwidth
    assert a.bytes_per_s == pytest.approx(1.7e6) and b.success == pytest.approx(0.71)
    selector.record_corrupt(b, "lied")
    assert b.success == 0.0 and all(selector.select(0) is a for _ in range(100))  # suspended
    b.suspended_s = 0.0
    counts = collections.Counter(selector.select(0) for _ in range(5000))
    assert 20 < counts[b] < 400  # one in fifty
    for _ in range(100):
        selector.observe(request(a, 0, 0.01), True)
    assert b.success == pytest.approx(1.0)


def test_a_relay_that_lacks_a_version_is_asked_for_others():
    selector = relay_selector.RelaySelector(relays(2), seed=1)
    a, b = selector.relays
    selector.record_failure(request(a, 0, 0.1), range_get.Missing("HTTP 404"), version=5)
    assert all(selector.select(5) is b for _ in range(50))
    assert {selector.select(4) for _ in range(50)} == {a, b}
    assert a.success == 1.0  # late is not a failure
    assert selector.select(5, {b}, wait=False) is None and selector.select(5, {a, b}) is None
    assert selector.select(5, {b}) is a  # after its moment
