"""Few reads run at a time while they are quick, all of them where they are slow."""

import concurrent.futures
import threading
import time

import pytest

from sharding.weights.download import relays

NUM_READS = 12


def most_at_once(quick_s, read):
    """Runs all reads, three at a time at first; returns the largest number that ran at the same time. `read` gets their number."""
    limiter, lock, running, most = relays.AdaptiveConcurrency(3, quick_s), threading.Lock(), [0], [0]

    def run(_):
        with limiter.slot():
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            read(running[0])
            with lock:
                running[0] -= 1

    with concurrent.futures.ThreadPoolExecutor(NUM_READS) as pool:
        list(pool.map(run, range(NUM_READS)))
    return most[0]


def test_quick_reads_are_few_at_once():
    assert most_at_once(600.0, lambda number: time.sleep(0.01)) == 3


def test_slow_reads_are_joined_by_all_others():
    """None ends before all have begun."""
    all_run = threading.Event()
    assert most_at_once(0.02, lambda number: all_run.set() if number == NUM_READS else all_run.wait(60)) == NUM_READS


def test_a_read_that_fails_makes_room():
    limiter = relays.AdaptiveConcurrency(1, 600.0)
    for _ in range(3):
        with pytest.raises(OSError), limiter.slot():
            raise OSError
    with limiter.slot():
        pass
