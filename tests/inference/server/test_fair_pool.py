"""The fair pool: how many threads one client can occupy, and that other clients are served meanwhile."""

import threading
from concurrent import futures

import pytest

from inference.server import fair_pool

WAIT_S = 60


@pytest.fixture
def four():
    made = fair_pool.FairPool(4, "test")
    yield made
    made.close()


def blocked(pool, client, count, go):
    """`count` calls that last until `go`, and how many of them have begun."""
    begun = threading.Semaphore(0)

    def call():
        begun.release()
        assert go.wait(WAIT_S)

    return [pool.submit(client, call) for _ in range(count)], begun


def test_one_client_takes_half_and_others_are_served(four):
    go = threading.Event()
    slow, begun = blocked(four, "slow", 9, go)
    assert begun.acquire(timeout=WAIT_S) and begun.acquire(timeout=WAIT_S)
    assert not begun.acquire(timeout=0.1)
    more, of_other = blocked(four, "other", 9, go)
    assert of_other.acquire(timeout=WAIT_S) and not of_other.acquire(timeout=0.1)
    assert four.submit("new", lambda: 3).result(WAIT_S) == 3  # one thread is always left for a new client
    assert four.submit("newer", lambda: 4).result(WAIT_S) == 4
    go.set()
    assert not futures.wait(slow + more, WAIT_S).not_done


def test_clients_take_turns_and_each_keeps_its_order():
    pool, done, go = fair_pool.FairPool(1, "test"), [], threading.Event()
    (first,), begun = blocked(pool, "x", 1, go)
    assert begun.acquire(timeout=WAIT_S)
    names = ("a0", "a1", "a2", "b0", "c0", "c1", "c2")
    calls = [pool.submit(name[0], done.append, name) for name in names]
    go.set()
    futures.wait(calls, WAIT_S)
    assert done == ["a0", "b0", "c0", "a1", "c1", "a2", "c2"] and first.done()
    pool.close()


def test_an_exception_is_raised_from_the_future(four):
    def fail():
        raise KeyError("it")

    with pytest.raises(KeyError, match="it"):
        four.submit("a", fail).result(WAIT_S)
    assert four.submit("a", lambda: 1).result(WAIT_S) == 1 and four._num_free == 4 and not four._num_running


def test_closing_cancels_queued_calls():
    pool, go = fair_pool.FairPool(1, "test"), threading.Event()
    (running,), begun = blocked(pool, "a", 1, go)
    assert begun.acquire(timeout=WAIT_S)
    waiting = pool.submit("b", lambda: 1)
    pool.close()
    assert waiting.cancelled() and not running.done() and pool.submit("c", lambda: 1).cancelled()
    go.set()
    running.result(WAIT_S)
