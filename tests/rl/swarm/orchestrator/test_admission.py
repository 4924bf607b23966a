"""Strangers: keys alone buy nothing. The real `Leases.lease` on a virtual clock, against floods of fresh keys."""

import asyncio
import heapq
import itertools
import json
import random
import sys
import types

import httpx
import numpy as np
import pytest

from configs import quickstart
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.protocol import lease as lease_lib
from rl.protocol import registry, task_schedule, timeline
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator import submissions, worker_health
from rl.swarm.orchestrator.gate import gate, lease_waiters
from rl.swarm.orchestrator.groups import queue_entry
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks
from sharding.system import signed_message
from tests.support import signed_http, validators
from tests.support.clock import Clock
from tests.support.groups import answers
from tests.support.orchestrators import inside, marks

RUN = rollout_lib.WorkerKey.generate()
LEASE_S = 8.0
WAIT_S = 60


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def make(tmp_path, clock):
    made = []

    def make(invited=(), num_groups=16, max_lag=0, batch="prescribed", **trust):
        config = quickstart.get_config()
        config.rl.update(prompts_per_step=num_groups, samples_per_prompt=2, max_lag=max_lag, advantage="group_mean")
        config.rl.batch = batch
        config.topology.lease_s = LEASE_S
        config.trust.update(trust)
        exp = experiment.resolve(config)
        verdicts = verdict_collector.VerdictCollector(RUN, lambda rollouts: [checks.OK] * len(rollouts))
        options = dict(credit=exp.credit, key=RUN, verdicts=verdicts, secret=b"secret", invited=invited)
        made.append(orchestrator_lib.Orchestrator(exp.config, tmp_path, clock=clock, **options))
        made[-1].config = exp.config
        publish(made[-1], 0)
        return made[-1]

    yield make
    for orchestrator in made:
        orchestrator.close()


def publish(orchestrator, version):
    orchestrator.publish(timeline.Policy(0, version))


@pytest.mark.parametrize("first", ["tick", "lease", "heartbeat"])
def test_a_stop_of_the_orchestrator_costs_no_lease_and_no_node(make, clock, first):
    """Each worker lost its leases, and was blamed; a stop for longer than topology.patience_s was the end of the run."""
    worker, other = (rollout_lib.WorkerKey.generate().worker for _ in range(2))
    orchestrator = make([worker, other])
    held = [group.key for group in orchestrator.leases.lease(worker, 16)]
    clock.now += 2.0
    orchestrator.leases.lease(other, 0)

    def tick(seconds):
        for _ in range(round(5 * seconds)):
            clock.now += 0.2
            orchestrator.leases.tick(clock.now)
            orchestrator.nodes._ticked_s = clock.now  # as its loop does

    tick(4.0)
    clock.now += 10_000.0
    if first == "lease":
        assert orchestrator.leases.lease(other, 16) == []
    elif first == "heartbeat":
        assert orchestrator.leases.beat(worker, "worker", registry.Report(), held, leaving=False) == []
    orchestrator.leases.tick(clock.now)
    orchestrator.nodes._sweep(clock.now)
    orchestrator.nodes._check_patience(clock.now, lambda there: not there)
    assert {row["state"] for row in orchestrator.table()} == {"healthy"}
    tick(LEASE_S - 0.4 if first == "heartbeat" else 1.6)
    assert (
        inside(orchestrator).queue.num_leases(worker) == len(held) > 0 == inside(orchestrator).counts["lease_expired"]
    )
    tick(1.0)  # since then, it had the time that was left
    assert inside(orchestrator).queue.num_leases(worker) == 0 and marks(orchestrator, worker)["num_halvings"] == 1


def deliver(orchestrator, key, group, **changes):
    """The reply to the group's rollouts, once its verdict is known."""
    version = group.version if group.version >= 0 else None
    rollouts = [rollout_lib.sign(r, key) for r in answers(group, version, **changes)]
    (future,) = orchestrator.submit(parquet.Rows(parquet.to_table(rollouts), rollouts)).values()
    verdict = future.result(WAIT_S)
    validators.settled(orchestrator, WAIT_S)
    return verdict


def earn(orchestrator, key, count, network="earned"):
    """Lets a key deliver `count` groups of further steps, one by one."""
    for _ in range(count):
        (group,) = orchestrator.leases.lease(key.worker, 1, network)
        assert not deliver(orchestrator, key, group).startswith("refused")


def num_left(orchestrator):
    count = inside(orchestrator).queue.count()
    return count.total() - count[queue_entry.State.ELIGIBLE]


def fresh():
    """Names of keys that never asked before; `lease` itself checks no signature."""
    return map("{:064x}".format, itertools.count(1))


def periods(orchestrator, clock, honest, *, rate, network, per_s=10.0, act=lambda orchestrator, worker, groups: None):
    """The lease periods until all groups are eligible. Each honest key asks `per_s` times a second and needs 0.5 s for a group."""
    begun_s, tie, rng = clock.now, itertools.count(), random.Random(rate)
    events = [(begun_s, next(tie), None, None)]
    begin_s = begun_s + 0.1  # the flood comes first
    events += [(begin_s + i / per_s / len(honest), next(tie), key, None) for i, key in enumerate(honest)]
    attackers, busy = enumerate(fresh()), dict.fromkeys(honest, 0)
    while num_left(orchestrator):
        clock.now, _, key, group = heapq.heappop(events)
        assert clock.now < begun_s + 20 * LEASE_S
        if key is None:
            number, worker = next(attackers)
            act(orchestrator, worker, orchestrator.leases.lease(worker, 16, network(number)))
            heapq.heappush(events, (clock.now + rng.expovariate(rate), next(tie), None, None))
        elif group is None:
            groups = orchestrator.leases.lease(key.worker, 4 - busy[key], f"honest {honest.index(key)}")
            busy[key] += len(groups)
            for leased in groups:
                heapq.heappush(events, (clock.now + 0.5, next(tie), key, leased))
            heapq.heappush(events, (clock.now + rng.uniform(0.5, 1.5) / per_s, next(tie), key, None))
        else:
            busy[key] -= 1
            deliver(orchestrator, key, group)
    return (clock.now - begun_s) / LEASE_S


def health_of(*invited):
    rates = dict(min_rate=0.05, invited_rate=0.125, invited=invited)
    return worker_health.WorkerHealth(max_rejections=3, lease_s=LEASE_S, **rates)


*KEYS, STRANGER = [rollout_lib.WorkerKey.generate() for _ in range(5)]


@pytest.mark.parametrize("rate", [50, 1000])
@pytest.mark.parametrize(("num_honest", "per_s"), [(4, 10.0), (1, 1.0)])
@pytest.mark.parametrize("num_networks", [1, 3])
def test_a_fresh_key_per_request_delays_a_batch_of_newcomers_little(make, clock, rate, num_honest, per_s, num_networks):
    """Attack C2: 8.4 lease periods before. The honest workers are as unknown as the flood, and have other addresses."""
    network = lambda number: f"evil {number % num_networks}"  # noqa: E731
    assert periods(make(), clock, KEYS[:num_honest], rate=rate, network=network, per_s=per_s) < 1.5


def garbage(orchestrator, worker, groups):
    for group in groups:
        with orchestrator.locked as found:  # as a submission that fails the checks at the lease, after its signature
            found.queue.deliver(group.key, worker, answers(group), "")
            found.queue.requeue(group.key)
            found.health.rejected(worker, group.key, found.clock(), is_fault=False)


def give_back(orchestrator, worker, groups):
    orchestrator.leases.lease(worker, 0, "evil", [group.key for group in groups])


@pytest.mark.parametrize("act", [lambda *args: None, garbage, give_back], ids=["squat", "garbage", "give back"])
@pytest.mark.parametrize("rate", [50, 1000])
@pytest.mark.parametrize(("num_honest", "per_s"), [(4, 10.0), (1, 1.0)])
def test_fresh_keys_and_fresh_addresses_delay_workers_with_a_record_little(make, clock, act, rate, num_honest, per_s):
    """Attack: each request from another key and address; groups are held, answered by garbage, or given back for others."""
    orchestrator, honest = make(num_groups=20), KEYS[:num_honest]
    for key in honest:
        earn(orchestrator, key, 4 // num_honest, f"honest {honest.index(key)}")
    assert num_left(orchestrator) == 16
    assert periods(orchestrator, clock, honest, rate=rate, network=str, per_s=per_s, act=act) < 1.5


def test_a_newcomer_copies_a_group_of_the_only_worker_when_that_is_late(make, clock):
    """The only worker was killed with all groups: the next one got none before these leases ended."""
    orchestrator, (key, other, *_) = make(), KEYS
    earn(orchestrator, key, 8)
    assert (
        len(orchestrator.leases.lease(key.worker, 64, "a")) == 8
        and orchestrator.leases.lease(other.worker, 64, "b") == []
    )
    clock.now += LEASE_S / 2
    (copy,) = orchestrator.leases.lease(other.worker, 64, "b")
    deliver(orchestrator, other, copy)
    assert len(orchestrator.leases.lease(other.worker, 64, "b")) == 2  # it has a record now


def test_newcomers_that_hold_a_group_and_its_copy_keep_no_known_worker_from_it(make, clock):
    """Attack: nobody else got the group for a lease period, as newcomers that beat keep theirs for so long."""
    orchestrator, (honest, one, other, *_) = make(num_groups=24), KEYS
    earn(orchestrator, honest, 12)
    (group,), held = (orchestrator.leases.lease(key.worker, 64, key.worker) for key in (one, honest))
    assert len(held) == 11
    clock.now += 1.0
    assert orchestrator.leases.lease(other.worker, 64, "b")[0].key == group.key  # the one leased first
    for leased in held:
        deliver(orchestrator, honest, leased)
    clock.now += 1.0
    for key in (one, other):
        orchestrator.leases.beat(key.worker, "worker", registry.Report(), [group.key], leaving=False)
    assert orchestrator.leases.has_work() and orchestrator.leases.lease(STRANGER.worker, 1, "c") == []
    assert [again.key for again in orchestrator.leases.lease(honest.worker, 1)] == [group.key]


def test_waiting_newcomers_of_one_network_hold_up_none_of_another():
    """Attack: each of a thousand keys at one address had its turn before the next newcomer, whose work a known worker took."""
    work, asked = ["group"], []

    def attempt(worker):
        asked.append(worker)
        if worker == "bad0":
            raise ValueError("its request cannot be served")
        return [] if worker.startswith("evil") else [work.pop()]  # whose network has its share

    async def main():
        waiters, never = lease_waiters.LeaseWaiters(lambda: bool(work)), asyncio.Future()

        def wait(worker):
            options = {"is_known": worker.startswith("known"), "gone": never}
            network = worker.rstrip("0123456789")
            return asyncio.ensure_future(waiters.wait(worker, lambda: attempt(worker), 60.0, network, **options))

        most = lease_waiters.MAX_STRANGERS
        evil, known = ([f"{name}{i}" for i in range(most + 9)] for name in ("evil", "known"))
        waits = [wait(worker) for worker in (*evil, "bad0", "honest", *known)]
        await asyncio.sleep(0)
        assert len(waiters) == most // 2 + 2 + len(known)  # more known workers than `most` polled once a second each
        waits += [wait("known7") for _ in range(9)]
        await asyncio.sleep(0.1)
        assert len(waiters) == len({*waiters.workers()}) == most // 2 + 2 + len(known)  # one key held up all others
        waiters.leave("evil0")  # it took the turn of a newcomer
        waiters.wake()
        waiters.close()
        await asyncio.gather(*waits, return_exceptions=True)

    asyncio.run(main())
    assert asked == ["evil1", "bad0", "honest"]


def test_work_that_no_waiter_may_have_is_tried_seldom():
    """Each tick, 32 known workers and 32 newcomers tried to lease groups that all of them had lost, under the lock."""
    asked, work = [], []

    def attempt(worker):
        asked.append(worker)
        return work and [work.pop()]

    async def main():
        waiters, never = lease_waiters.LeaseWaiters(lambda: True), asyncio.Future()
        names = [f"{kind}{i}" for kind in ("known", "new") for i in range(40)]
        for name in names:
            options = {"is_known": name.startswith("known"), "gone": never}
            asyncio.ensure_future(waiters.wait(name, lambda name=name: attempt(name), 60.0, name, **options))
        await asyncio.sleep(0)
        waiters._turn_s = float("inf")  # of a newcomer that is first
        counts = []
        for _ in range(40):
            before = len(asked)
            waiters.wake()
            counts.append(len(asked) - before)
        assert counts[:4] == [64, 32, 16, 16] and {*counts[4:]} == {16}
        assert {*asked} == {*names}  # each in turn
        work.extend(range(20))
        waiters.wake()
        assert not work
        asked.clear()
        waiters.wake()
        assert len(asked) > 32  # there may be more
        waiters.close()

    asyncio.run(main())


def test_a_newcomer_holds_one_group_until_one_is_accepted_then_more(make, clock):
    orchestrator, (key, other, *_) = make(), KEYS
    held = orchestrator.leases.lease(key.worker, 64, "a")
    for expected in (1, 2, 4, 8, 1):  # the last: 16 - 15
        assert len(held) == expected and orchestrator.leases.lease(key.worker, 64, "a") == []
        for group in held:
            assert deliver(orchestrator, key, group) in ("quarantined", "accepted")
        held = orchestrator.leases.lease(key.worker, 64, "a")
    assert held == []
    saved, again = json.loads(json.dumps(inside(orchestrator).health.state())), health_of()
    again.restore(saved)
    assert again.is_known(key.worker) and not again.is_known(other.worker)
    again.rejected(key.worker, ("train", 1, 0), clock.now, is_fault=False)
    assert not again.is_known(key.worker)


@pytest.mark.parametrize("pins", ["strangers", "all", "none"])
@pytest.mark.parametrize("versions", [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
def test_a_stranger_must_finish_under_the_pinned_version(make, clock, pins, versions):
    """Attack: the better of two allowed versions, or the best place to switch between them, truthfully stamped."""
    key, guest, other, *_ = KEYS
    orchestrator = make(invited=[guest.worker, other.worker], max_lag=1, pin_versions=pins)
    publish(orchestrator, 1)
    assert len(orchestrator.leases.lease(other.worker, 16)) == 16  # of batch 1, which version 1 comes too late for
    for worker, is_pinned in ((key, pins != "none"), (guest, pins == "all")):
        (group,) = orchestrator.leases.lease(worker.worker, 1)
        assert (group.step, group.min_version, group.version) == (2, 0, 1 if is_pinned else -1)
        verdict = deliver(orchestrator, worker, group, versions=np.array(versions, np.int32))
        if is_pinned and versions[0] == 0:
            assert verdict == f"refused: versions: 0 to {versions[-1]}, but the lease pins 1"
        else:
            assert not verdict.startswith("refused"), verdict


def test_a_lost_lease_halves_a_record_and_a_group_without_blame_does_not(make, clock):
    key, other, *_ = KEYS
    orchestrator = make(num_groups=32, invited=[other.worker])
    orchestrator.leases.lease(other.worker, 0)  # alone, a worker would get its groups again
    earn(orchestrator, key, 7)
    assert len(groups := orchestrator.leases.lease(key.worker, 64)) == 8
    publish(orchestrator, 1)  # the pinned version is gone
    kept = orchestrator.leases.lease(key.worker, 64, "", [group.key for group in groups])
    assert len(kept) == 8 and not {g.key for g in kept} & {g.key for g in groups} and {g.version for g in kept} == {1}
    assert orchestrator.take_counts()["trust/num_lease_void"] == 8
    clock.now += LEASE_S + 1
    assert len(groups := orchestrator.leases.lease(key.worker, 64)) == 4  # 7 // 2 + 1: they ended together
    assert orchestrator.take_counts()["trust/num_lease_expired"] == 8
    only = {"may_lease": lambda key: key == groups[0].key, "is_late": lambda lease: True}
    (copy,) = inside(orchestrator).queue.lease(other.worker, 1, clock.now + 1, **only)
    assert deliver(orchestrator, other, copy) == "accepted"
    orchestrator.leases.lease(key.worker, 0, "", [copy.key])  # given back, as another worker made it
    assert orchestrator.take_counts()["trust/num_lease_void"] == 1 and marks(orchestrator, key.worker)["record"] == 3


@pytest.mark.parametrize(
    ("batch", "num_versions", "is_held_out", "record"),
    [("first", 9, False, 2), ("first", 8, False, 5), ("prescribed", 9, False, 4), ("first", 9, True, 4)],
)
def test_a_group_that_arrives_stale_is_made_again_and_counts_as_a_lost_lease_where_no_batch_waits_for_it(
    make, clock, batch, num_versions, is_held_out, record
):
    """Attack: a worker handed in the groups that it disliked when no batch could use them, and lost nothing by it."""
    key, orchestrator = KEYS[0], make(batch=batch)
    earn(orchestrator, key, 4)
    if is_held_out:  # an evaluation is of an old version, and takes its time
        inside(orchestrator).queue.add(task_schedule.held_out_groups(orchestrator.config, 0), after=0)
    (group,) = orchestrator.leases.lease(key.worker, 1)
    publish(orchestrator, num_versions)
    inside(orchestrator).batches.step, is_stale = num_versions, num_versions == 9 and not is_held_out
    reply, (again, *_) = deliver(orchestrator, key, group), orchestrator.leases.lease("another", 1)
    assert (reply == submissions.VOID) == is_stale and reply.startswith(("quarantined", "accepted", "refused: void"))
    assert (again.key == group.key) == is_stale  # with a lease for newer versions
    assert marks(orchestrator, key.worker)["record"] == record  # 4 // 2, 4 + 1, or 4
    assert orchestrator.take_counts()["trust/num_stale"] == 2 * is_stale


def test_work_of_an_expired_lease_costs_its_worker_neither_its_name_nor_its_new_lease(make, clock):
    """A worker paused for longer than a lease got the same groups for a newer version, and was banned by its earlier work."""
    key, other, *_ = KEYS
    orchestrator = make(invited=[other.worker], max_lag=1)
    assert len(orchestrator.leases.lease(other.worker, 16)) == 16  # of batch 1, which version 1 comes too late for
    earn(orchestrator, key, 3)
    old = orchestrator.leases.lease(key.worker, 64)
    publish(orchestrator, 1)
    clock.now += LEASE_S + 1
    new = {group.key: group for group in orchestrator.leases.lease(key.worker, 64)}
    again = [group for group in old if group.key in new]
    assert again and {group.version for group in old} == {0} and {group.version for group in new.values()} == {1}
    for group in again:
        verdict = deliver(orchestrator, key, group, versions=np.zeros(5, np.int32))
        assert verdict == "quarantined"  # as the group still needs it
    for group in again:
        assert deliver(orchestrator, key, new[group.key], versions=np.ones(5, np.int32)) == "spare"
    assert orchestrator.take_counts()["trust/num_refused"] == 0


@pytest.mark.parametrize("is_void", [True, False])
def test_a_newcomer_waits_for_its_place_unless_its_version_was_replaced(make, clock, is_void):
    orchestrator, (key, *_) = make(), KEYS
    (group,) = orchestrator.leases.lease(key.worker, 4)
    if is_void:
        publish(orchestrator, 1)
    assert orchestrator.leases.lease(key.worker, 4, "", [group.key]) == []
    clock.now += LEASE_S / 16 + 0.1
    assert len(orchestrator.leases.lease(key.worker, 4)) == is_void
    clock.now += LEASE_S / 4
    assert is_void or len(orchestrator.leases.lease(key.worker, 4)) == 1


def test_two_strangers_that_beat_for_ever_hold_up_no_batch(make, clock):
    """Attack: one renews its lease, the other that on the copy; a group had two holders at most."""
    orchestrator, (honest, one, other) = make(num_groups=4), (rollout_lib.WorkerKey.generate() for _ in range(3))
    for key in (honest, one, other):
        earn(orchestrator, key, 1)
    ((group,), report, since_s) = orchestrator.leases.lease(one.worker, 1), registry.Report(), clock.now
    while not (found := orchestrator.leases.lease(honest.worker, 1)):
        clock.now += LEASE_S / 8
        orchestrator.leases.lease(other.worker, 1)
        for key in (one, other):
            orchestrator.leases.beat(key.worker, "worker", report, [group.key], leaving=False)
        assert clock.now < since_s + 2 * LEASE_S
    assert found[0].key == group.key and deliver(orchestrator, honest, group) in ("accepted", "quarantined")
    assert num_left(orchestrator) == 0 and marks(orchestrator, one.worker)["record"] == 1  # it may only be slow


def test_strangers_that_leave_again_and_again_lose_their_records(make, clock):
    """Attack: without blame, two filled the ledger with leases of the same groups, as often as they asked."""
    orchestrator, keys = make(), [rollout_lib.WorkerKey.generate() for _ in range(2)]
    for key in keys:
        earn(orchestrator, key, 1)
    num_leases = 0
    for _ in range(50):
        for key in keys:
            num_leases += len(orchestrator.leases.lease(key.worker, 16))
            orchestrator.leases.beat(key.worker, "worker", registry.Report(), [], leaving=True)
            clock.now += 0.001
    assert 4 <= num_leases <= 12 and not any(inside(orchestrator).health.is_known(key.worker) for key in keys)


def test_no_one_holds_a_group_by_letting_others_lose_it(make, clock):
    """Attack: two keys of one party lose the groups to each other. After a lease period, everyone may have them."""
    orchestrator, (known, *_) = make(num_groups=17), KEYS
    earn(orchestrator, known, 1)
    names = fresh()
    taken = [orchestrator.leases.lease(next(names), 1, f"net {n}") for n in range(4)]
    assert all(taken)
    clock.now += LEASE_S / 4 + 0.1
    orchestrator.leases.lease(known.worker, 0)
    lost = {group.key for groups in taken for group in groups}
    for n in range(4):  # not the lost ones, which lead the queue
        (group,) = orchestrator.leases.lease(next(names), 1, f"net {n}")
        assert group.key not in lost
    assert {group.key for group in orchestrator.leases.lease(known.worker, 2)} <= lost
    clock.now += LEASE_S + 1  # the worker with a record went away: its groups, and all others, are free again
    assert all(orchestrator.leases.lease(next(names), 1, f"net {n}") for n in range(4))
    assert all(inside(orchestrator).health.may_lease(next(names), key, clock.now) for key in lost)


def test_a_held_out_group_is_no_record(make, clock):
    """Attack: groups that no replay verifies are answered without a model, to earn leases."""
    health = health_of()
    held_out, train = ("held_out", 0, 1), ("train", 1, 1)
    assert health.may_lease("new", held_out, 0.0)  # no other worker could do it
    health.accepted("new", held_out)
    assert not health.is_known("new")
    health.accepted("known", train)
    health.seen("known", 0.0)
    assert not health.may_lease("new", held_out, LEASE_S) and health.may_lease("new", train, LEASE_S)
    invited = health_of("guest")
    invited.accepted("known", train)
    allowed = [invited.may_lease(worker, held_out, 0.0) for worker in ("new", "known", "guest")]
    assert allowed == [False, False, True] and invited.may_lease("new", train, 0.0)
    assert health.may_lease("known", held_out, LEASE_S) and health.may_lease("new", held_out, LEASE_S + 0.1)


def test_thousands_of_keys_leave_no_trace(make, clock, monkeypatch):
    orchestrator, session = make(), lease_lib.Session.open(RUN.worker)
    monkeypatch.setattr(signed_message, "is_signed", lambda worker, message: True)
    now = [1e9]
    health, rate = inside(orchestrator).health, gate.RequestRate()
    verifier = lease_lib.RequestVerifier(
        session, admit=orchestrator.admission.admit, is_known=health.is_known, clock=lambda: now[0]
    )
    monkeypatch.setattr(lease_lib, "MAX_REMEMBERED", 1000)
    monkeypatch.setattr(gate, "MAX_NETWORKS", 1000)
    message = lease_lib.request(KEYS[0], session, capacity=4, returned=[], work="")

    def ask(name, number):
        now[0] += 1e-3
        clock.now += 1e-3
        assert rate.take(str(number), clock.now)
        verifier.verify(message | {"worker": name, "time_us": int(now[0] * 1e6)}, "lease")
        orchestrator.leases.lease(name, 4, str(number))

    names, kept, sizes = fresh(), (verifier, rate, health, inside(orchestrator).queue), []
    for number in range(8_000):
        ask(next(names), number)
        if number in (2_000, 7_999):
            sizes.append(sum(map(size, kept)))
    assert sizes[1] < sizes[0] + 5_000, sizes
    assert len(verifier._last_us) <= 1001 and len(rate._buckets) <= 1001 and len(health._places) <= 4


def size(found):
    """The bytes of an object with all that it contains."""
    inner = vars(found) if hasattr(found, "__dict__") and not callable(found) else found
    if isinstance(inner, dict):
        return sys.getsizeof(inner) + sum(size(key) + size(value) for key, value in inner.items())
    items = inner if isinstance(inner, list | tuple | set | frozenset) else ()
    return sys.getsizeof(inner) + sum(map(size, items))


@pytest.mark.parametrize("kind", ["open", "invited", "stake", "work"])
def test_who_may_take_part(kind):
    stakes = {"rich": 5, "poor": 4}
    trust = types.SimpleNamespace(admission=kind, min_stake=5, work_bits=8)
    config = types.SimpleNamespace(trust=trust, topology=types.SimpleNamespace(workers=()))
    admission = gate.Admission(config, RUN.worker, ["guest"], lambda worker: stakes.get(worker, 0))
    work = lease_lib.find_work(RUN.worker, "rich", 8)
    admission.admit("guest", {"work": ""})
    admission.admit("poor", {})  # a submission: its key leased before
    allowed = {"open": ("rich", "poor"), "invited": (), "stake": ("rich",), "work": ("rich",)}[kind]
    for worker in ("rich", "poor"):
        if worker in allowed:
            admission.admit(worker, {"work": work})
        else:
            with pytest.raises(ValueError, match="ask the operator|stake more|compute one for the run"):
                admission.admit(worker, {"work": work})


def test_the_rate_of_a_network_is_bounded_and_known_workers_cost_nothing():
    rate = gate.RequestRate()
    assert sum(rate.take("a", 0.0) for _ in range(1000)) == gate.BURST
    assert rate.take("b", 0.0)
    assert sum(rate.take("a", 0.5) for _ in range(1000)) == gate.RATE / 2
    assert sum(rate.take("a", 1e3) for _ in range(1000)) == gate.BURST
    for _ in range(1000):
        assert rate.take("c", 0.0)
        rate.give_back("c")


def test_floods_and_old_sessions_over_http(make, monkeypatch):
    """Attack: garbage, requests of other sessions, and keys without work from one address; an invited worker has another."""
    monkeypatch.setattr(gate, "BURST", 20.0)
    monkeypatch.setattr(gate, "RATE", 0.01)
    guest, key, *_ = KEYS
    orchestrator = make(invited=[guest.worker], admission="work", work_bits=8)
    address = httpx.HTTPTransport(local_address="127.0.0.2")
    url = orchestrator.serve()
    with httpx.Client(base_url=url) as http, httpx.Client(base_url=url, transport=address) as evil:
        session = signed_http.session(http)
        (refused,) = {evil.post("/lease", json=signed_http.lease_body(key, session)).json()["error"]["message"]}
        assert "is not a proof of work of 8 bits for this run" in refused
        work = lease_lib.find_work(session.run, key.worker, 8)
        reply = evil.post("/lease", json=signed_http.lease_body(key, session, 9, work=work)).json()
        assert signed_message.is_signed(session.run, reply) and len(reply["groups"]) == 1
        stale = signed_http.lease_body(key, lease_lib.Session.open(session.run), work=work)
        assert evil.post("/lease", json=stale).status_code == 409
        submission = signed_http.submission(key, lease_lib.Session.open(session.run), b"body")
        assert evil.post("/submit", **submission).status_code == 409
        monkeypatch.setattr(parquet, "decode", lambda body, **limits: pytest.fail("decoded"))
        reply = evil.post("/submit", **signed_http.submission(STRANGER, session, b"PAR1"))  # a key without a lease
        assert reply.json()["verdicts"] == {"every group": f"refused: {submissions.NOT_LEASED}"}
        deep = '{"returned": ' + "[" * 4000 + "]" * 4000 + "}"  # nothing but the size and the form is read
        assert evil.post("/lease", content=deep).status_code == 400
        assert [evil.post("/lease", json={}).status_code for _ in range(40)][-20:] == [429] * 20
        reply = evil.get("/run")
        assert reply.status_code == 429 and "requests per second; send fewer" in reply.json()["error"]["message"]
        for _ in range(60):
            assert http.post("/lease", json=signed_http.lease_body(guest, session)).status_code == 200
    orchestrator.close()
