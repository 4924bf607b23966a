"""The choice of a server in virtual time: counted requests per server, against the shares that load, prefix, and faults allow."""

import collections
import random

import pytest

from inference.swarm import server_choice

A, B, C = "http://a:1", "http://b:2", "http://c:3"


def told(*urls, **fields):
    return [{"url": url, **fields} for url in urls]


def send(choice, count, now_s=0.0, **options):
    """Begins `count` requests with a key of their own each; returns their number by server."""
    found = collections.Counter()
    for number in range(count):
        url = choice.choose(now_s, sticky=f"{random.random()}/{number}", **options)
        if url:
            choice.begin(url)
        found[url] += 1
    return found


def test_clients_that_know_nothing_of_each_other_spread_evenly():
    """D10: 8 workers with one request each sent all of them to the first server of the list."""
    total = sum((send(server_choice.ServerChoice([A, B]), 1) for _ in range(200)), collections.Counter())
    assert 70 <= total[A] <= 130 and total[A] + total[B] == 200


def test_requests_of_one_episode_stay_on_their_server_until_it_is_loaded():
    choice = server_choice.ServerChoice([A, B, C])
    homes = {key: choice.choose(0.0, sticky=key) for key in map(str, range(60))}
    assert collections.Counter(homes.values()).keys() == {A, B, C}
    choice.tell(told(A, B))  # the third leaves: only its own move
    assert all(choice.choose(0.0, sticky=key) == home for key, home in homes.items() if home != C)
    choice.begin(homes["0"])
    assert choice.choose(0.0, sticky="0") == homes["0"]  # one request more is no load
    for _ in range(30):
        choice.begin(homes["0"])
    assert choice.choose(0.0, sticky="0") != homes["0"]


def test_load_of_other_clients_counts():
    choice = server_choice.ServerChoice()
    assert choice.choose(0.0) is None
    choice.tell([{"url": A, "load": 90}, {"url": B, "load": 10}])
    found = send(choice, 60)
    assert found[B] >= 55 and found[A] + found[B] == 60
    choice.tell([{"url": A, "load": 0}, {"url": B, "load": found[B]}])  # all of it is ours
    assert send(choice, 60)[A] >= 50
    choice = server_choice.ServerChoice()
    choice.tell(told(A, B))
    for _ in range(50):
        choice.begin(B)
    choice.tell([{"url": A, "load": 80}, {"url": B, "load": 50}])
    assert send(choice, 10) == {B: 10}  # 80 requests of others, against 50 of ours, which count once


def test_limits_versions_and_servers_that_leave():
    choice = server_choice.ServerChoice()
    choice.tell([{"url": A, "limit": 3, "version": 4}, {"url": B, "limit": 2, "version": 5}])
    assert send(choice, 9) == {A: 3, B: 2, None: 4}
    for _ in range(2):
        choice.end(A, 0.0)
    assert choice.choose(0.0, min_version=5) is None  # B is full
    assert choice.choose(0.0, num_samples=2) == A and choice.choose(0.0, num_samples=3) is None  # A has one of three
    choice.end(A, 0.0)
    assert choice.choose(0.0, num_samples=8) == A  # more than its limit: alone
    choice.begin(A, 8)
    assert choice.choose(0.0) is None
    choice.end(A, 0.0, 7)
    choice.tell(told(A))
    assert choice.urls() == [A]
    choice.end(B, 1.0)
    choice.end(B, 1.0, problem="reset")  # it is gone meanwhile
    assert choice.choose(1.0, min_version=4) == A and choice.choose(1.0, min_version=5) is None
    choice.lags(A, 3)
    assert choice.choose(1.0, min_version=4) is None and choice.problems() == ""


def test_a_dead_server_costs_a_probe_now_and_then():
    """D10: with the first of two servers dead, 20 requests made 20 failed connections."""
    choice, num_failed, now_s = server_choice.ServerChoice([A, B]), 0, 0.0
    for number in range(2000):  # 200 s
        now_s += 0.1
        url = choice.choose(now_s, sticky=str(number))
        choice.begin(url)
        num_failed += url == A
        choice.end(url, now_s, problem="refused" if url == A else "")
    assert 8 <= num_failed <= 16
    assert choice.problems() == f"{A}: refused"
    now_s += server_choice.MAX_PAUSE_S + 1.0  # it is back: one request tries it, then all may
    assert choice.choose(now_s, tried={B: 1}) == A
    choice.begin(A)
    assert {choice.choose(now_s, sticky=str(i)) for i in range(20)} == {B}
    choice.end(A, now_s)
    assert {choice.choose(now_s, sticky=str(i)) for i in range(20)} == {A, B} and choice.problems() == ""


@pytest.mark.parametrize("at_once", [1, 64])
def test_requests_that_fail_together_count_once(at_once):
    choice = server_choice.ServerChoice([A])
    for _ in range(at_once):
        choice.begin(A)
    for _ in range(at_once):
        choice.end(A, 5.0, problem="reset")
    assert choice.choose(5.0 + 0.9 * server_choice.FIRST_PAUSE_S) is None
    assert choice.choose(5.0 + 1.1 * server_choice.FIRST_PAUSE_S) == A
    choice.begin(A)
    choice.end(A, 9.0, is_busy=True)
    assert choice.choose(9.5) is None and choice.choose(10.0) == A
    choice.begin(A)
    choice.end(A, 10.0, problem=None)  # cancelled by us, which shows nothing
    assert choice.problems() == f"{A}: reset"
    choice.fail(A, 10.0, "reset")
    assert choice.choose(10.0 + 1.9 * server_choice.FIRST_PAUSE_S) is None  # twice as long as the first time
