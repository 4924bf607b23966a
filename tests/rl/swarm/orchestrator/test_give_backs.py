"""An environment of which no worker can make a group is hopeless, with a fixed delay; one that a single worker cannot use is not."""

import pytest

from rl.protocol import registry
from rl.swarm.orchestrator.groups import give_backs

CAUSE = f"{registry.OF_ENVIRONMENT}sums: no file x"


@pytest.fixture
def lines():
    return []


@pytest.fixture
def causes(lines):
    return give_backs.GiveBacks(lines.append)


def tell(causes, worker, number, now_s, problem=CAUSE, active=("a", "b")):
    return causes.is_hopeless(worker, "sums", (0, number), problem, active, now_s)


@pytest.mark.parametrize(
    ("workers", "problem", "last_s", "is_hopeless"),
    [
        ("abab", CAUSE, give_backs.PATIENCE_S, True),
        ("abab", CAUSE, give_backs.PATIENCE_S - 0.1, False),  # a service may start again
        ("aba", CAUSE, give_backs.PATIENCE_S, False),
        ("aaaa", CAUSE, give_backs.PATIENCE_S, False),  # of b nothing is known
        ("abab", "the server is gone", 1e6, False),
    ],
)
def test_the_same_cause_from_all_workers(causes, workers, problem, last_s, is_hopeless):
    times = [0.0] * (len(workers) - 1) + [last_s]
    found = [tell(causes, worker, n, s, problem) for n, (worker, s) in enumerate(zip(workers, times, strict=True))]
    assert found == [False] * (len(workers) - 1) + [is_hopeless]


def test_many_workers_count_for_all(causes):
    active = "abcdefgh"
    found = [tell(causes, worker, n, give_backs.PATIENCE_S * (n > 0), active=active) for n, worker in enumerate(active)]
    assert found.index(True) == give_backs.WORKERS - 1


def test_one_that_worked_may_be_away_for_longer(causes):
    causes.finished("sums")
    times = [0.0, 0.0, give_backs.PATIENCE_S, give_backs.AWAY_S - 1, give_backs.AWAY_S]
    assert [tell(causes, "ab"[n % 2], n, s) for n, s in enumerate(times)] == [False] * 4 + [True]
    causes.finished("sums")  # and this one begins anew
    assert not tell(causes, "a", 9, 2 * give_backs.AWAY_S)


def test_a_group_that_always_fails_is_hopeless_beside_others(causes):
    found = []
    for n in range(4):
        causes.finished("sums")
        found.append(tell(causes, "ab"[n % 2], 7, n * give_backs.AWAY_S / 3))
    assert found == [False, False, False, True]


def test_a_long_run_keeps_a_bounded_number_of_causes(causes):
    for number in range(give_backs.MAX_TIMES * 2):
        tell(causes, "a", number, 0.0)
        causes.finished("sums")
    assert len(causes._times) <= give_backs.MAX_TIMES


def test_a_cause_is_printed_once(causes, lines):
    for number in range(3):
        causes.heard("worker-1", f"task {number} failed")
    causes.heard("worker-1", "")
    assert lines == ["worker worker-1: task 0 failed"]
