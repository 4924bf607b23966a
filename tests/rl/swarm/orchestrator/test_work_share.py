"""Shares of work by measured speed, over the real queue and batches on a virtual clock."""

import collections
import functools
import heapq
import random
import types

import numpy as np
import pytest

from rl.protocol import lease as lease_lib
from rl.swarm.orchestrator import work_share
from rl.swarm.orchestrator.groups import batches as batches_lib
from rl.swarm.orchestrator.groups import group_queue, queue_entry
from rl.swarm.orchestrator.groups.queue_entry import State
from tests.support import rl_section

LEASE_S = 120.0


def play(speeds, *, num_groups=32, num_steps=40, max_lag=0, concurrency=64, seed=0):
    """Runs `num_steps` batches; returns (seconds per step, groups that each worker made of those that were trained on).

    Worker i makes `speeds[i]` groups per second in all, which its groups share, as those of one inference server do.
    """
    draw = random.Random(seed)
    queue, share = group_queue.GroupQueue(), work_share.WorkShare(LEASE_S)

    def make_groups(numbers, version):
        return [lease_lib.Lease(1 + n // num_groups, n, "train", n, n, 1, 1.0, 0) for n in numbers]

    rule = rl_section.make(prompts_per_step=num_groups, num_steps=num_steps, max_lag=max_lag)
    batches = batches_lib.Batches(rule, queue, make_groups)
    batches.restore(0, None)
    batches.load(0)
    mask, made, step, now_s = np.ones(1, bool), collections.Counter(), 0, 0.0
    running = [{} for _ in speeds]  # of each worker: key -> [work left, since when it is leased]
    events = [(draw.random() * 0.01, worker) for worker in range(len(speeds))]
    heapq.heapify(events)
    looked_s = [0.0] * len(speeds)
    while step < num_steps:
        now_s, worker = heapq.heappop(events)
        name, jobs = f"w{worker}", running[worker]
        for job in jobs.values():
            job[0] -= (now_s - looked_s[worker]) * speeds[worker] / len(jobs)
        looked_s[worker] = now_s
        for key in [key for key, job in jobs.items() if job[0] <= 1e-9]:
            since_s = jobs.pop(key)[1]
            one = types.SimpleNamespace(number=0, sampled_mask=mask, versions=mask * step, oldest_version=step)
            if queue.deliver(key, name, [one], "digest") is queue_entry.Delivery.TAKEN:
                queue.let_pass(key)
                share.finished(name, since_s, now_s)
        for key in queue.renew(name, [*jobs], lambda lease: lease.since_s + 1e9):
            jobs.pop(key, None)
        while taken := batches.collect(step + 1) if step < num_steps else None:
            step += 1
            made.update(entry.worker for entry in taken)
            batches.load(step)
        held, count = queue.held(name), queue.count()
        share.seen(name, len(held), now_s)
        room = min(share.room(name, len(held), count[State.OPEN] + count[State.LEASED], now_s), concurrency - len(jobs))
        is_late = functools.partial(_is_late, share, now_s)
        until = {"deadline_s": now_s + LEASE_S, "now_s": now_s}
        groups = queue.lease(name, room, **until)
        if not groups and not jobs:
            groups = queue.lease(name, max(room, 1), is_late=is_late, **until)
        share.seen(name, len(queue.held(name)), now_s)
        for group in groups:
            jobs[group.key] = [draw.uniform(0.8, 1.2), now_s]
        shortest = min((job[0] for job in jobs.values()), default=None)
        wait_s = 0.1 if shortest is None else min(shortest * len(jobs) / speeds[worker], 0.25)
        heapq.heappush(events, (now_s + wait_s + 1e-6, worker))
    return now_s / num_steps, [made[f"w{worker}"] / made.total() for worker in range(len(speeds))]


def _is_late(share, now_s, lease):
    return share.is_late(lease.worker, lease.since_s, now_s)


SIZES = pytest.mark.parametrize(("num_groups", "lag"), [(32, 0), (32, 2), (16, 1), (16, 2)])


@SIZES
def test_four_equal_workers_make_a_quarter_each(num_groups, lag):
    """D5: the first to ask took all; of 30 batches of three workers, one worker made 29."""
    seconds, shares = play([2.0] * 4, num_groups=num_groups, max_lag=lag)
    assert all(0.15 <= share <= 0.35 for share in shares), shares
    assert seconds < 1.35 * num_groups / 8


@SIZES
def test_a_worker_at_a_tenth_of_the_speed_costs_little(num_groups, lag):
    equal_s, _ = play([2.0] * 4, num_groups=num_groups, max_lag=lag)
    slow_s, shares = play([2.0, 2.0, 2.0, 0.2], num_groups=num_groups, max_lag=lag)
    assert slow_s < 1.3 * equal_s and shares[3] < 0.08, (equal_s, slow_s)


def test_speeds_follow_a_worker_that_slows_down_and_forget_one_that_is_gone():
    share = work_share.WorkShare(100.0)
    assert share.room("new", 0, 12, 0.0) == 12  # alone
    for worker in ("a", "b", "c"):
        share.seen(worker, 0, 0.0)
    assert share.room("a", 0, 12, 0.0) == 4 and share.room("a", 3, 12, 0.0) == 1  # nothing is known of them
    now_s = 0.0
    for _ in range(200):
        share.seen("a", 1, now_s)
        share.seen("b", 1, now_s)
        share.seen("c", 1, now_s)
        now_s += 1.0
        share.finished("a", now_s - 1, now_s)
        share.finished("a", now_s - 1, now_s)
        share.finished("b", now_s - 1, now_s)
        share.finished("c", now_s - 1, now_s)
    assert share.speed("a", now_s) == pytest.approx(2, rel=0.1)
    assert [share.room(worker, 0, 40, now_s) for worker in "abc"] == [19, 11, 11]
    assert share.is_late("a", now_s - 1.6, now_s) and not share.is_late("a", now_s - 1.4, now_s)
    share.seen("b", 30, now_s)  # three of its shares
    assert share.is_late("b", now_s, now_s)
    share.seen("b", 1, now_s)
    share.seen("c", 0, now_s)
    assert share.speed("b", now_s + 60) < 0.7 * share.speed("c", now_s + 60)  # b hangs, c holds nothing
    share.seen("a", 0, now_s + 99)
    share.seen("a", 0, now_s + 101)
    assert share.room("a", 0, 40, now_s + 101) == 40 and len(share._records) == 1


def test_a_leave_of_many_workers_costs_no_look_at_the_others(monkeypatch):
    share, looks, num = work_share.WorkShare(LEASE_S), [], 1000
    for i in range(num):
        share.seen(f"{i}", 0, 0.0)
    assert share.room("999", 0, num, 0.0) == 1
    monkeypatch.setattr(work_share._Record, "look", lambda *args: looks.append(args))
    for i in range(num // 2):
        share.left(f"{i}")
        share.room("999", 0, num, 0.0)
    assert not looks and share.room("999", 0, num, 0.0) == 2  # of the half that is left


def test_one_that_left_or_has_no_record_takes_no_share_of_others():
    share = work_share.WorkShare(LEASE_S)
    assert not share.is_late("stranger", 0.0, 1.0)  # divided by the sum of no speeds before
    for name in ("one", "other"):
        share.seen(name, 0, 0.0)
    assert share.room("one", 0, 32, 0.0) == 16
    share.left("other")
    assert share.room("one", 0, 32, 0.0) == 32
    for number in range(31):
        share.seen(f"w{number}", 0, 0.0)
    assert share.room("one", 0, 4, 0.0) == 1  # an eighth of a group, but as fast as the others
