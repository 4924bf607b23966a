"""The group queue against a second bookkeeping of sets, under random sequences of operations."""

import collections
import dataclasses
import types

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from rl.protocol import env_mix
from rl.protocol import lease as lease_lib
from rl.swarm.orchestrator.groups import batches, group_queue, queue_entry
from rl.swarm.orchestrator.groups.queue_entry import Delivery, State
from tests.support import rl_section

P, LEASE_S = 3, 10.0
WORKERS = st.sampled_from(["a", "b", "c"])
NUMBER = st.integers(0, 10**6)
TAKEN = "taken"


def batch(step, split="train"):
    return [lease_lib.Lease(step, group, split, group, group, 2, 1.0, 0) for group in range((step - 1) * P, step * P)]


def rollouts(version=0):
    arrays = {"sampled_mask": np.array([False, True]), "versions": np.full(2, version), "oldest_version": version}
    return [types.SimpleNamespace(sample=sample, number=sample, epoch=0, **arrays) for sample in (1, 0)]


class Machine(stateful.RuleBasedStateMachine):
    """`self.sets` has each opened group in the set of its state, moved by the rules below and by nothing else."""

    def __init__(self):
        super().__init__()
        self.queue, self.now_s, self.step = group_queue.GroupQueue(), 0.0, 0
        self.sets = {state: set() for state in (*State, TAKEN)}
        self.leases = {}  # group -> {worker: (since, deadline)}, the first holder first
        self.past = {}  # group -> workers whose lease expired
        self.delivered = {}  # group -> workers whose rollouts it has: of the submission, then of the spares
        self.verified, self.opened, self.trusted = set(), set(), set()
        self.decided = set()  # groups that were quarantined or let pass, ever
        self.drops = collections.Counter()

    def move(self, key, old, new):
        self.sets[old].remove(key)
        self.sets[new].add(key)
        self.decided |= {key} if new in (State.QUARANTINED, State.ELIGIBLE) else set()

    def reopen(self, key, old):
        """A group that lost its rollouts or a holder."""
        if self.delivered.get(key):
            return self.move(key, old, State.SUBMITTED)
        return self.move(key, old, State.LEASED if self.leases.get(key) else State.OPEN)

    def win(self, key, old):
        self.move(key, old, State.ELIGIBLE)
        self.drops["duplicate"] += len(self.delivered[key]) - 1
        del self.delivered[key][1:]

    def pick(self, state, number):
        keys = sorted(self.sets[state])
        return keys[number % len(keys)] if keys else None

    def any_group(self, number):
        return sorted(self.opened)[number % len(self.opened)] if self.opened else ("train", 1, 0)

    @stateful.rule(back=st.none() | st.integers(0, 3))
    def open_a_batch(self, back):
        self.step += 1
        keys = [group.key for group in batch(self.step)]
        before = [key for key in self.queue.entries if key in self.sets[State.OPEN]]
        self.queue.add(batch(self.step), after=None if back is None else self.step - 1 - back)
        self.sets[State.OPEN].update(keys)
        self.opened.update(keys)
        order = [key for key in self.queue.entries if key in self.sets[State.OPEN]]
        first = before if back is None else [key for key in before if key[1] == self.step - 1 - back]
        assert order == [*first, *keys, *(key for key in before if key not in first)]

    @stateful.rule(worker=WORKERS, count=st.integers(-1, 5), modulus=st.integers(1, 3), version=st.integers(-1, 3))
    def lease(self, worker, count, modulus, version):
        allowed = {key for key in self.sets[State.OPEN] if key[2] % modulus == 0}
        order = [key for key in self.queue.entries if key in allowed]
        times = {"deadline_s": self.now_s + LEASE_S, "now_s": self.now_s}
        leased = self.queue.lease(worker, count, may_lease=lambda key: key[2] % modulus == 0, version=version, **times)
        assert [group.key for group in leased] == order[: max(0, count)]
        assert all(group.version == version for group in leased)
        for group in leased:
            self.move(group.key, State.OPEN, State.LEASED)
            self.leases[group.key] = {worker: (self.now_s, self.now_s + LEASE_S)}

    @stateful.rule(worker=WORKERS, count=st.integers(0, 3), after_s=st.floats(0, 8))
    def back_up(self, worker, count, after_s):
        age_s = {
            key: self.now_s - max(since for since, _ in self.leases[key].values()) for key in self.sets[State.LEASED]
        }
        may = {key for key, age in age_s.items() if age > after_s and worker not in self.leases[key]}
        may = {key for key in may if len(self.leases[key]) < queue_entry.MAX_HOLDERS}
        times = {"deadline_s": self.now_s + LEASE_S, "now_s": self.now_s}
        is_late = {"is_late": lambda lease: self.now_s - lease.since_s > after_s}
        found = [group.key for group in self.queue.lease(worker, count, **times, **is_late)]
        assert len(found) == min(count, len(may)) and may.issuperset(found)
        for key in found:
            self.leases[key][worker] = self.now_s, self.now_s + LEASE_S

    @stateful.rule(worker=WORKERS, modulus=st.integers(1, 3), lease_s=st.floats(0, LEASE_S))
    def renew(self, worker, modulus, lease_s):
        keys = [key for key in sorted(self.opened) if key[2] % modulus == 0]
        void = self.queue.renew(worker, keys, lambda lease: self.now_s + lease_s)
        unsubmitted = self.sets[State.OPEN] | self.sets[State.LEASED]
        for key in keys:
            held = self.leases.get(key, {}).get(worker)
            assert (key in void) == (key not in unsubmitted or not (held or worker in self.past.get(key, ())))
            if held and key in void and key not in self.sets[TAKEN]:
                del self.leases[key][worker]
                self.past.setdefault(key, set()).add(worker)
            elif held:
                self.leases[key][worker] = held[0], max(held[1], self.now_s + lease_s)

    @stateful.rule(number=NUMBER, worker=WORKERS)
    def give_back(self, number, worker):
        key = self.any_group(number)
        held = self.leases.get(key, {}).pop(worker, None)
        lease = self.queue.give_back(key, worker)
        assert (lease and (lease.since_s, lease.deadline_s)) == held
        if held and key in self.sets[State.LEASED]:
            self.reopen(key, State.LEASED)

    @stateful.rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds):
        self.now_s += seconds
        late = {(k, w) for k, leases in self.leases.items() for w, (_, until) in leases.items() if until < self.now_s}
        expired = self.queue.expire(self.now_s)
        unsubmitted = self.sets[State.LEASED]
        assert {(e.group.key, e.worker) for e in expired} == {(key, w) for key, w in late if key in unsubmitted}
        for key, worker in late:
            del self.leases[key][worker]
            self.past.setdefault(key, set()).add(worker)
        for key in {key for key, _ in late if key in self.sets[State.LEASED]}:
            self.reopen(key, State.LEASED)

    @stateful.rule(number=NUMBER, worker=WORKERS)
    def deliver(self, number, worker):
        key = self.any_group(number)
        state = next((state for state, keys in self.sets.items() if key in keys), None)
        has_lease = worker in self.leases.get(key, ()) or worker in self.past.get(key, ())
        expected = Delivery.LATE
        if state in (State.OPEN, State.LEASED) and has_lease:
            expected = Delivery.TAKEN
        elif state in (State.SUBMITTED, State.QUARANTINED) and has_lease and worker != self.delivered[key][0]:
            expected = Delivery.SPARE
        elif state not in (None, TAKEN, State.OPEN, State.LEASED) and has_lease:
            expected = Delivery.DUPLICATE
        assert self.queue.deliver(key, worker, rollouts(), f"digest {worker}") is expected
        if expected is not Delivery.LATE and self.leases.get(key, {}).pop(worker, None) is None:
            self.past[key].discard(worker)
        if expected in (Delivery.TAKEN, Delivery.SPARE):
            self.delivered.setdefault(key, []).append(worker)
            if expected is Delivery.TAKEN:
                self.move(key, state, State.SUBMITTED)
                assert [r.sample for r in self.queue.entries[key].rollouts] == [0, 1]
        else:
            self.drops[expected.value] += 1

    @stateful.rule(number=NUMBER)
    def quarantine(self, number):
        if key := self.pick(State.SUBMITTED, number):
            self.queue.quarantine(key)
            self.move(key, State.SUBMITTED, State.QUARANTINED)

    @stateful.rule(number=NUMBER)
    def screened(self, number):
        """A worker that is trusted now passes; another's group is quarantined."""
        if key := self.pick(State.SUBMITTED, number):
            self.finish_screening(key)

    def finish_screening(self, key):
        if self.delivered[key][0] in self.trusted:
            self.queue.let_pass(key)
            self.win(key, State.SUBMITTED)
        else:
            self.queue.quarantine(key)
            self.move(key, State.SUBMITTED, State.QUARANTINED)

    @stateful.rule(number=NUMBER)
    def accept(self, number):
        if key := self.pick(State.QUARANTINED, number):
            self.accept_by_verdict(key)

    def accept_by_verdict(self, key):
        self.queue.accept(key)
        self.win(key, State.QUARANTINED)
        self.verified.add(key)

    @stateful.rule(worker=WORKERS)
    def earn_trust(self, worker):
        self.trusted.add(worker)

    @stateful.rule(number=NUMBER, state=st.sampled_from([State.SUBMITTED, State.QUARANTINED, State.ELIGIBLE]))
    def requeue(self, number, state):
        if key := self.pick(state, number):
            old = self.queue.requeue(key)
            assert (old.state, old.worker, len(old.rollouts)) == (state, self.delivered[key].pop(0), 2)
            self.verified.discard(key)
            self.reopen(key, state)
            new = self.queue.entries[key]
            if key in self.sets[State.OPEN]:
                assert next(iter(self.queue.entries)) == key  # ahead of all others
            if not self.delivered[key]:
                assert (new.rollouts, new.digest, new.scores) == ([], "", {})

    @stateful.rule()
    def begin_an_epoch(self):
        self.queue.begin_epoch(0)
        for state in (State.LEASED, State.SUBMITTED, State.QUARANTINED, State.ELIGIBLE):
            for key in [*self.sets[state]]:
                self.drops["epoch"] += len(self.delivered.pop(key, ()))
                self.move(key, state, State.OPEN)
        self.leases, self.past, self.delivered = {}, {}, {}
        self.verified.clear()

    @stateful.rule(number=NUMBER)
    def drop(self, number):
        if key := self.pick(State.ELIGIBLE, number):
            self.queue.drop(key, "flat")
            self.drops["flat"] += 1
            self.move(key, State.ELIGIBLE, TAKEN)
            self.leases.pop(key, None)

    @stateful.rule(worker=WORKERS)
    def lose_trust(self, worker):
        self.trusted.discard(worker)
        found = {
            key for key in self.sets[State.ELIGIBLE] if self.delivered[key][0] == worker and key not in self.verified
        }
        assert {entry.group.key for entry in self.queue.recall(lambda entry: entry.worker == worker)} == found
        for key in found:
            self.move(key, State.ELIGIBLE, State.QUARANTINED)

    @stateful.rule(number=NUMBER, finish=st.booleans())
    def take_a_batch(self, number, finish):
        keys = [group.key for group in batch(1 + number % max(1, self.step))]
        for key in self.opened.intersection(keys if finish else ()):
            if key in self.sets[State.OPEN]:
                self.queue.lease("a", 1, self.now_s + LEASE_S, lambda other, key=key: other == key, now_s=self.now_s)
                self.move(key, State.OPEN, State.LEASED)
                self.leases[key] = {"a": (self.now_s, self.now_s + LEASE_S)}
            if key in self.sets[State.LEASED]:
                worker = next(iter(self.leases[key]))
                assert self.queue.deliver(key, worker, rollouts(), "digest")
                del self.leases[key][worker]
                self.delivered[key] = [worker]
                self.move(key, State.LEASED, State.SUBMITTED)
            if key in self.sets[State.SUBMITTED]:
                self.finish_screening(key)
            if key in self.sets[State.QUARANTINED]:
                self.accept_by_verdict(key)
        if self.queue.num_eligible(keys) == P:
            taken = self.queue.take(keys)
            assert [entry.group.key for entry in taken] == keys and all(len(e.rollouts) == 2 for e in taken)
            for entry in taken:  # the promise: a verdict, or trust that still holds
                assert entry.is_verified or entry.worker in self.trusted
                assert entry.is_verified == (entry.group.key in self.verified)
            for key in keys:
                self.move(key, State.ELIGIBLE, TAKEN)
                self.leases.pop(key, None)
        else:
            with pytest.raises(AssertionError):
                self.queue.take(keys)

    @stateful.invariant()
    def every_group_is_in_exactly_one_state(self):
        kept = {entry.group.key: entry.state for entry in self.queue.entries.values()}
        assert kept == {key: s for s, keys in self.sets.items() for key in keys if s is not TAKEN}
        assert kept.keys() | self.sets[TAKEN] == self.opened and not kept.keys() & self.sets[TAKEN]
        assert self.queue.count() == {s: len(keys) for s, keys in self.sets.items() if keys and s is not TAKEN}
        opened = self.sets[State.OPEN]  # those whose draw may be known are always verified when they come again
        assert {key for key in opened if self.queue.entries[key].was_decided} == opened & self.decided
        decided = self.sets[State.ELIGIBLE] | self.sets[TAKEN]
        for worker in "abc":
            keys = {key for held in (self.leases, self.delivered) for key, names in held.items() if worker in names}
            assert sorted(self.queue.held(worker)) == sorted(keys - decided)
        assert +self.queue.drops == +self.drops
        for key, entry in self.queue.entries.items():
            assert {w: (one.since_s, one.deadline_s) for w, one in entry.leases.items()} == self.leases.get(key, {})
            assert entry.worker == next(iter(self.delivered.get(key, ()) or self.leases.get(key, ())), "")


TestGroupQueue = Machine.TestCase
TestGroupQueue.settings = hypothesis.settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_moves_that_the_states_do_not_allow_fail():
    queue, (key, *_) = group_queue.GroupQueue(), [group.key for group in batch(1)]
    queue.add(batch(1))

    def must_fail(*moves):
        for move in moves:
            with pytest.raises(AssertionError):
                move(key)

    must_fail(queue.quarantine, queue.let_pass, queue.accept, queue.requeue)
    queue.lease("a", 1, LEASE_S)
    must_fail(queue.requeue)  # it has no rollouts to drop
    assert queue.deliver(key, "a", rollouts(), "digest")
    must_fail(queue.accept)  # without a quarantine, trust alone lets it pass
    queue.quarantine(key)
    must_fail(queue.let_pass, queue.quarantine)  # a verdict alone
    with pytest.raises(AssertionError):
        queue.add(batch(1))
    assert queue.entries.get(("train", 9, 9)) is None
    (group,) = queue.lease("a", 1, LEASE_S)
    assert queue.deliver(group.key, "a", rollouts(), "digest")
    queue.let_pass(group.key)
    queue.requeue(group.key)
    assert next(iter(queue.entries)) == group.key and queue.entries[group.key].was_decided


def test_held_out_groups_are_not_recalled_and_the_oldest_token_counts():
    queue = group_queue.GroupQueue()
    queue.add(batch(1, "held_out"))
    for group in queue.lease("a", P, LEASE_S):
        assert group.version == group.step == 1  # an evaluation is of one version
        assert queue.deliver(group.key, "a", rollouts(version=4), "digest")
        queue.let_pass(group.key)
    assert queue.recall(lambda entry: True) == []
    assert queue.take([group.key for group in batch(1, "held_out")])[0].oldest_version == 4


def test_each_late_group_is_copied_for_workers_that_wait():
    queue, late = group_queue.GroupQueue(), {"is_late": lambda lease: lease.worker == "slow"}
    queue.add([group for step in range(1, 34) for group in batch(step)])
    keys = [group.key for group in queue.lease("slow", 33 * P, LEASE_S)]
    late["leaves_room"] = lambda lease: False
    for i, key in enumerate(keys):
        assert queue.has_late(**late)
        assert [group.key for group in queue.lease(f"idle{i}", 1, LEASE_S, **late)] == [key]
    assert not queue.has_late(**late)
    queue.give_back(keys[40], "idle40")
    assert queue.has_late(**late) and queue.lease("other", 9, LEASE_S, **late)[0].key == keys[40]
    late["leaves_room"] = lambda lease: lease.worker == "slow"  # such as a stranger
    assert not queue.has_late(**late) and queue.has_late(lambda lease: True, late["leaves_room"])


@pytest.mark.parametrize("percent", range(100))
def test_parts_of_a_batch_are_exact(percent):
    rule = rl_section.make(prompts_per_step=100, max_lag=0, oversampling=float(f"1.{percent:02}"), refill=percent / 100)
    queue = group_queue.GroupQueue()
    make_groups = lambda numbers, version: [dataclasses.replace(batch(1)[0], group=n) for n in numbers]  # noqa: E731
    batches.Batches(rule, queue, make_groups).load(0)
    assert env_mix.max_flat(rule) == percent and len(queue.entries) == 100 + percent


def test_a_group_whose_rollouts_are_refused_is_as_old_as_the_lease_that_is_left():
    queue, late = group_queue.GroupQueue(), {"is_late": lambda lease: True}
    queue.add(batch(1))
    keys = [group.key for group in queue.lease("slow", P, LEASE_S)]
    assert queue.lease("copy", 1, LEASE_S, **late)[0].key == keys[0]
    queue.deliver(keys[0], "slow", rollouts(), "digest")
    queue.requeue(keys[0])
    assert queue.lease("other", 1, LEASE_S, **late)[0].key == keys[0]


def test_the_deadlines_of_ended_leases_take_no_memory():
    queue = group_queue.GroupQueue()
    queue.add(batch(1))
    kept = queue.lease("slow", 1, deadline_s=5.0)
    queue.renew("slow", [kept[0].key], lambda lease: 7.0)
    for _ in range(1000):
        for group in queue.lease("fast", 2, deadline_s=3600.0):
            queue.give_back(group.key, "fast")
    assert len(queue._deadlines) <= 2 * P
    assert queue.expire(6.0) == [] and [lease.group.key for lease in queue.expire(8.0)] == [kept[0].key]


def test_the_work_of_the_last_expired_leases_is_taken():
    queue, workers = group_queue.GroupQueue(), [f"w{i}" for i in range(queue_entry.MAX_PAST + 1)]
    queue.add(batch(1)[:1])
    for now_s, worker in enumerate(workers):
        (group,) = queue.lease(worker, 1, now_s)
        assert [lease.worker for lease in queue.expire(now_s + 0.5)] == [worker]
    fates = [queue.deliver(group.key, worker, rollouts(), worker) for worker in workers]
    assert fates == [Delivery.LATE, Delivery.TAKEN, *[Delivery.SPARE] * (len(workers) - 2)]


def test_an_evaluation_waits_for_those_that_began_earlier():
    """Each new one came first: the oldest of several waited for all later ones, and servers kept its version."""
    queue = group_queue.GroupQueue()
    held_out = lambda version: [dataclasses.replace(group, split="held_out") for group in batch(version)]  # noqa: E731
    for step in (1, 2, 3):
        queue.add(batch(step))
    queue.add(held_out(0), after=1)
    queue.add(held_out(1), after=2)
    order = [*batch(2), *held_out(0), *held_out(1), *batch(1), *batch(3)]
    assert [group.key for group in queue.lease("w", 99, 1.0)] == [group.key for group in order]


def test_leases_keep_to_the_free_samples():
    queue, none = group_queue.GroupQueue(), frozenset()
    queue.add([dataclasses.replace(group, num_samples=1) for group in batch(1, "held_out")[:2]])
    queue.add(batch(1))
    assert [group.num_samples for group in queue.lease("a", 9, LEASE_S, free_samples=4)] == [1, 1, 2]
    assert len(queue.lease("b", 9, LEASE_S, free_samples=1)) == 1  # one of two samples: more than free, but the first
    assert queue.lease("b", 9, LEASE_S, free_samples=0) == []
    assert (queue.leased_samples("a"), queue.leased_samples("b")) == (4, 2)
    assert [queue.leased_samples_but(workers) for workers in (none, frozenset("a"), frozenset("ab"))] == [6, 2, 0]
    assert len(queue.expire(LEASE_S + 1)) == 4 and queue.leased_samples_but(none) == 0
