"""Few reads run at a time while they are quick, all of them where they are slow."""

import concurrent.futures
import threading
import time

import pytest

from sharding.download import relays


def most_at_once(few, quick_s, takes_s, num_reads=12):
    limiter, lock, now, most = relays.AdaptiveConcurrency(few, quick_s), threading.Lock(), [0], [0]

    def read(_):
        with limiter.slot():
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(takes_s)
            with lock:
                now[0] -= 1

    begun_s = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(num_reads) as pool:
        list(pool.map(read, range(num_reads)))
    return most[0], time.monotonic() - begun_s


def test_quick_reads_are_few_at_once():
    most, seconds = most_at_once(few=3, quick_s=60.0, takes_s=0.01)
    assert most == 3 and 0.04 <= seconds < 5


def test_slow_reads_are_joined_by_all_others():
    most, seconds = most_at_once(few=3, quick_s=0.02, takes_s=1.0)
    assert most == 12 and seconds < 1.8  # 12 in rounds of 3 would take 4 s


def test_a_read_that_fails_makes_room():
    limiter = relays.AdaptiveConcurrency(1, 60.0)
    for _ in range(3):
        with pytest.raises(OSError), limiter.slot():
            raise OSError
    with limiter.slot():
        pass
