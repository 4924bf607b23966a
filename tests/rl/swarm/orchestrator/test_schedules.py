"""Random schedules of everything that a swarm may lose, on a virtual clock, over the real queue, batches, shares, and registry.

`World` is a small orchestrator with workers, servers, and a learner, all driven by one random generator. Its oracle keeps books of its
own: which policy made each token, which groups were trained, and the fate of each delivery.
"""

import collections
import copy
import random
import types

import numpy as np
import pytest

from rl.protocol import env_mix, registry, task_schedule
from rl.protocol import lease as lease_lib
from rl.protocol.timeline import Policy
from rl.swarm.orchestrator import work_share
from rl.swarm.orchestrator.groups import batches as batches_lib
from rl.swarm.orchestrator.groups import group_queue, queue_entry
from rl.swarm.orchestrator.groups.queue_entry import Delivery, State
from tests.support import rl_section

LEASE_S, BEAT_S, NUM_BATCHES = 20.0, 5.0, 6
MASK = np.array([False, True, True])


class World:
    """One run of `NUM_BATCHES` batches under random faults, then in calm until it ends."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        lag = draw.choice([0, 1, 1, 2, 3])
        self.rule = rl_section.make(
            batch=draw.choice(task_schedule.BATCHES),
            prompts_per_step=draw.randint(1, 4),
            num_steps=NUM_BATCHES,
            max_lag=lag,
            max_off_policy=lag + draw.choice([-1, 0, 1, 3]) if lag else draw.choice([0, 1]),
            oversampling=draw.choice([1.0, 1.5]),
            refill=draw.choice([0.0, 0.0, 0.7, 2.0]),
            tokens_per_step=draw.choice([0, 0, 9]),
        )
        if task_schedule.is_fixed(self.rule):  # a config with more is refused
            self.rule.oversampling = 1.0
        self.calmness, self.check_rate = draw.random(), draw.choice([0.1, 0.5])
        self.now_s, self.has_validator, self.num_outages = 0.0, True, draw.choice([0, 1, 2])
        self.nodes = registry.Registry(BEAT_S, is_named=lambda key: True)
        self.begin()
        # The learner: the epoch, batches taken, versions published and loaded, and checkpoints to resume from.
        self.epoch, self.step, self.published, self.loaded, self.trained_s = 0, 0, 0, 0, None
        self.saved = {0: None}
        # The rest after a restart of an orchestrator: states of batches, the ledger's last batch, and the log of groups.
        self.states, self.last, self.log = {0: None}, ([], []), {}
        self.servers = {f"server{i}": Policy(0, 0) for i in range(2)}
        self.hung = set()
        self.jobs = []  # of workers: group, worker, first and last policy of its tokens
        self.verdicts = []  # groups in quarantine, with their digest
        self.done = []  # jobs that were handed in, to be handed in again
        # The oracle.
        self.books = collections.Counter()  # deliveries by fate
        self.trained = {}  # number -> batch
        self.truth = {}  # digest -> its job
        self.dropped, self.recorded = set(), set()  # numbers of groups that no batch will use; those in the ledger
        self.old_drops = collections.Counter()  # of orchestrators that were killed
        self.queue.begin_epoch(0)
        self.batches.restore(0, None)
        self.batches.load(0)

    def begin(self):
        self.rights, self.decided = collections.Counter(), set()  # leases whose work may come; keys with a draw
        self.queue, self.share = group_queue.GroupQueue(), work_share.WorkShare(LEASE_S)
        self.batches = batches_lib.Batches(
            self.rule, self.queue, self.make_groups, lambda entry: not entry.rollouts[0].flat
        )

    def make_groups(self, numbers, version):
        P, lag = self.rule.prompts_per_step, self.rule.max_lag
        oldest = [min(version, max(0, number // P - lag)) for number in numbers]
        assert not {*numbers} & {*self.trained}, "a group that was trained on is opened again"
        if task_schedule.is_fixed(self.rule):
            assert max(numbers, default=0) // P - lag <= self.published, "a batch opens too early"
        assert not {*numbers} & self.recorded, "a group that the ledger has as dropped is opened again"
        fields = [(1 + n // P, n, "train", n, n, 2, 1.0, low) for n, low in zip(numbers, oldest, strict=True)]
        return [lease_lib.Lease(*one) for one in fields]

    # ---- workers and servers

    def serving(self):
        newest = Policy(self.epoch, self.published)
        oldest = Policy(self.epoch, max(0, self.loaded - self.rule.max_off_policy))
        nodes = self.nodes.serving(oldest, newest)
        for node in nodes:
            assert (
                node.report.policy.epoch == self.epoch
                and oldest.version <= node.report.policy.version <= self.published
            )
        return [node.key for node in nodes if node.key not in self.hung]

    def ask(self, worker):
        self.expire()
        unfinished = sum(n for state, n in self.queue.count().items() if state in (State.OPEN, State.LEASED))
        held = self.queue.held(worker)
        self.jobs = [
            job for job in self.jobs if job.worker != worker or job.group.key in held or self.draw.random() < 0.5
        ]
        self.share.seen(worker, len(held), self.now_s)
        room = self.share.room(worker, len(held), unfinished, self.now_s)
        pin = self.draw.choice([-1, -1, self.loaded])
        until = {"deadline_s": self.now_s + LEASE_S, "version": pin, "now_s": self.now_s}
        groups = self.queue.lease(worker, room, **until)
        if not groups:
            groups = self.queue.lease(worker, room, is_late=self.is_late, **until)
        for group in groups:
            assert len(self.queue.entries[group.key].leases) <= queue_entry.MAX_HOLDERS
            assert (group.epoch, group.version) == (self.epoch, pin)
            assert group.min_version >= min(self.loaded, self.step - self.rule.max_off_policy), (
                "stale when it is leased"
            )
            self.rights[group.key, worker] += 1
            self.jobs.append(types.SimpleNamespace(group=group, worker=worker, since_s=self.now_s, policies=None))
        self.share.seen(worker, len(self.queue.held(worker)), self.now_s)

    def is_late(self, lease):
        return self.draw.random() < 0.5 or self.share.is_late(lease.worker, lease.since_s, self.now_s)

    def start(self, job):
        """A job gets its tokens from a server, which may load the next policy of its epoch meanwhile."""
        job.epoch_of_lease = self.epoch
        if (servers := self.serving()) and job.policies is None:
            first = self.servers[self.draw.choice(servers)]
            if job.group.version in (-1, first.version):
                job.policies = [first, first]
            elif self.draw.random() < 0.5:  # no server may ever generate it again
                self.jobs.remove(job)
                self.give_back(job)
            if job.policies and job.group.version == -1 and self.draw.random() < 0.3 and first.version < self.loaded:
                job.policies[1] = Policy(first.epoch, first.version + 1)

    def give_back(self, job):
        if self.queue.give_back(job.group.key, job.worker):
            self.rights[job.group.key, job.worker] -= 1

    def hand_in(self, job):
        self.expire()
        forged, flat = job.worker == "cheat", self.draw.random() < 0.3
        digest = f"{self.draw.random()}"
        job.forged, job.flat = forged, flat
        versions = np.array([policy.version for policy in (job.policies[0], *job.policies)])  # that of the prompt first
        epoch = job.policies[0].epoch
        fields = dict(sampled_mask=MASK, versions=versions, oldest_version=int(versions.min()), epoch=epoch, flat=flat)
        rollouts = [types.SimpleNamespace(sample=i, number=i, **fields) for i in (1, 0)]
        self.truth[digest] = copy.copy(job)
        self.books["delivered"] += 1
        fate = self.queue.deliver(job.group.key, job.worker, rollouts, digest)
        if fate in (Delivery.TAKEN, Delivery.SPARE):
            assert self.rights[job.group.key, job.worker] > 0, "work without a lease"
            assert epoch == self.epoch
        if fate not in (Delivery.LATE, Delivery.EPOCH):
            self.rights[job.group.key, job.worker] -= 1
        if fate is Delivery.TAKEN:
            self.share.finished(job.worker, job.since_s, self.now_s)
            self.screen(job.group.key)

    def screen(self, key):
        """Checks a submission against its lease, then quarantines it or lets it pass."""
        entry = self.queue.entries[key]
        job = self.truth[entry.digest]
        low, high = sorted(policy.version for policy in job.policies)
        if low < entry.group.min_version or (
            entry.group.version not in (-1, low) or (low < high != entry.group.version > -1)
        ):
            return self.reject(key)
        if low < self.batches.oldest:
            return self.void(key)
        assert entry.was_decided == (key in self.decided)
        self.decided.add(key)
        self.log[key] = entry.group, entry.worker, entry.rollouts, entry.digest
        if job.forged or entry.was_decided or self.draw.random() < self.check_rate:
            self.queue.quarantine(key)
            self.verdicts.append((key, entry.digest))
        else:
            self.queue.let_pass(key)
            self.batches.accepted(key)

    def reject(self, key):
        digest = self.queue.requeue(key).digest
        if key in self.log and self.log[key][3] == digest:
            del self.log[key]
        self.books["refused"] += 1
        if self.queue.entries[key].state is State.SUBMITTED:  # a spare
            self.screen(key)

    def void(self, key):
        """The rollouts of a group are too old for the next batch."""
        self.batches.void(key)
        if self.queue.entries[key].state is State.SUBMITTED:  # a spare
            self.screen(key)

    def judge(self):
        key, digest = self.verdicts.pop(self.draw.randrange(len(self.verdicts)))
        entry = self.queue.entries.get(key)
        if entry is None or entry.state is not State.QUARANTINED or entry.digest != digest:
            return
        if self.truth[digest].forged:
            self.reject(key)
        else:
            self.queue.accept(key)
            self.batches.accepted(key)

    def expire(self):
        for lease in self.queue.expire(self.now_s):
            assert lease.deadline_s < self.now_s

    # ---- learner

    def collect(self):
        """Takes the next batch if it is complete, and compares it with the oracle's choice."""
        if self.step == NUM_BATCHES or self.trained_s is not None:
            return
        n, rule = self.step + 1, self.rule
        before = {k: (e.state, e.digest) for k, e in self.queue.entries.items()}
        ready = [before[key][0] is State.ELIGIBLE for key in sorted(before, key=lambda key: key[2])]
        most = rule.prompts_per_step  # that people are shown
        progress = min(sum(ready[:most] if rule.batch == "prescribed" else ready), most), most
        assert self.batches.progress() == progress
        entries, expected = self.batches.collect(n), self.choice(n, before)
        assert expected == (entries and [entry.group.key for entry in entries])
        if entries is None:
            return self.note_dropped(before, [])
        self.books["trained"] += len(entries)
        numbers = [entry.group.group for entry in entries]
        self.note_dropped(before, numbers)
        for entry in entries:
            job = self.truth[entry.digest]
            assert before[entry.group.key] == (State.ELIGIBLE, entry.digest)
            assert not job.forged, "a forged group is trained on"
            for policy in job.policies:
                assert policy.epoch == self.epoch, "a token of another epoch"
                assert n - 1 - rule.max_off_policy <= policy.version <= n - 1, "a token older than allowed"
            assert entry.group.group not in self.trained, "a group is trained on twice"
            self.trained[entry.group.group] = n
        assert numbers == sorted(numbers)
        if rule.batch == "prescribed":  # no group of the order is left out
            assert {*self.trained} | self.dropped == {*range(len(self.trained) + len(self.dropped))}
        self.last = numbers, sorted(number for _, number in self.batches.take_dropped())
        assert {*self.last[1]} == self.dropped - self.recorded, "the ledger lacks a dropped group"
        self.recorded |= self.dropped
        self.step, self.trained_s, self.states[n] = n, self.now_s, self.batches.state()
        for key in self.batches.too_old():
            self.void(key)

    def note_dropped(self, before, taken):
        self.dropped |= {key[2] for key in before if key not in self.queue.entries} - {*taken}

    def choice(self, n, before):
        """Returns batch n, a prefix of the order: of all groups, or of those that were eligible and fresh. None: it is not complete."""
        rule, oldest = self.rule, n - 1 - self.rule.max_off_policy
        chosen, num_flat, num_tokens = [], 0, 0
        for key in sorted(before, key=lambda key: key[2]):
            state, digest = before[key]
            is_eligible = state is State.ELIGIBLE
            if not is_eligible or min(p.version for p in self.truth[digest].policies) < oldest:
                if rule.batch == "prescribed":
                    return None
            elif self.truth[digest].flat and num_flat < env_mix.max_flat(rule):
                num_flat += 1
            else:
                chosen.append(key)
                num_tokens += 4
                if len(chosen) == rule.prompts_per_step or 0 < rule.tokens_per_step <= num_tokens:
                    return chosen
        return None

    def publish(self):
        if self.trained_s is not None:
            self.trained_s, self.published = None, self.step
            if self.step % 2 == 0:
                self.saved[self.step] = self.states[self.step], dict(self.trained), {*self.recorded}

    def load(self):
        """A server loads the newest policy; the batches that may use it open."""
        server = self.draw.choice([*self.servers])
        self.servers[server] = Policy(self.epoch, self.published)
        if server not in self.hung:
            self.beat(server)
        if self.published > self.loaded:
            self.loaded = self.published
            self.batches.load(self.loaded)

    def beat(self, server):
        self.nodes.beat(server, "server", self.now_s, registry.Report(policy=self.servers[server]))

    def resume(self):
        """The learner ends and resumes from its last checkpoint, in the next epoch."""
        step = max(self.saved)
        found = self.saved[step]
        self.epoch, self.step, self.trained_s = self.epoch + 1, step, None
        self.published = self.loaded = step
        self.trained, self.recorded = (dict(found[1]), {*found[2]}) if found else ({}, set())
        self.dropped = {*self.recorded}
        self.queue.begin_epoch(self.epoch)
        self.old_drops += self.queue.drops
        self.begin()  # another orchestrator
        self.queue.begin_epoch(self.epoch)
        self.states = {step: found and found[0]}
        self.batches.restore(step, self.states[step])
        self.batches.load(step)

    def restart(self):
        """The orchestrator is killed, and continues with its log, the ledger, and the states of its batches."""
        num_kept, self.old_drops = self.num_kept(), self.old_drops + self.queue.drops
        self.begin()
        self.queue.begin_epoch(self.epoch)
        self.dropped = {*self.recorded}
        self.batches.restore(self.published, self.states[self.published])
        if self.step > self.published:
            self.batches.skip(self.step, *self.last)
        kept = [one for one in self.log.values() if one[2][0].epoch == self.epoch]
        self.batches.reopen([group.group for group, *_ in kept], max(0, self.published - self.rule.max_lag))
        for one in kept:
            if one[0].key in self.queue.entries:
                self.queue.restore(*one)
                self.screen(one[0].key)
        self.books["lost"] += num_kept - self.num_kept() - self.queue.drops["stale"]  # not those that `screen` voided
        self.loaded = self.published
        self.batches.load(self.loaded)

    # ---- time

    def act(self, calm):
        draw, workers = self.draw, ["a", "b", "c", "cheat"]
        self.now_s += draw.choice([0.0, 0.3, 1.0]) if calm else draw.choice([0.0, 0.3, 1.0, 4.0, 30.0])
        for change in self.nodes.sweep(self.now_s):
            assert change.new in registry.NEXT[change.old]
        job = draw.choice(self.jobs) if self.jobs else None
        action = draw.choice(CALM if calm or draw.random() < self.calmness else CALM + CHAOS)
        if action == "ask":
            self.ask("a" if calm else draw.choice(workers))
        elif action == "start" and job:
            self.start(job)
        elif action == "hand in" and job and job.policies:
            self.jobs.remove(job)
            self.done.append(job)
            self.hand_in(job)
        elif action == "renew" and job:
            void = self.queue.renew(job.worker, [job.group.key], lambda lease: self.now_s + LEASE_S)
            if void:
                self.jobs.remove(job)
            elif lease := self.queue.entries[job.group.key].leases.get(job.worker):
                assert lease.deadline_s >= self.now_s + LEASE_S
        elif action == "judge" and self.verdicts and self.has_validator:
            self.judge()
        elif action == "beat":
            for server in self.servers.keys() - self.hung:
                self.beat(server)
        elif action in ("collect", "publish", "load"):
            getattr(self, action)()
            if self.trained_s == self.now_s and not calm and draw.random() < 0.3:  # before the learner publishes
                self.restart()
        elif action == "lose" and job:  # its worker died
            self.jobs.remove(job)
        elif action == "give back" and job:
            self.jobs.remove(job)
            self.give_back(job)
        elif action == "race" and job:  # all holders of a group hand it in
            for one in [other for other in self.jobs if other.group.key == job.group.key]:
                self.start(one)
                if one.policies and one in self.jobs:
                    self.jobs.remove(one)
                    self.hand_in(one)
        elif action == "twice" and self.done:
            self.hand_in(draw.choice(self.done))
        elif action == "recall":
            worker = draw.choice(workers)
            recalled = self.queue.recall(lambda entry: entry.worker == worker)
            assert not any(entry.is_verified for entry in recalled)
            eligible = [one for one in self.queue.entries.values() if one.state is State.ELIGIBLE]
            assert all(entry.is_verified for entry in eligible if entry.worker == worker)
            self.verdicts += [(entry.group.key, entry.digest) for entry in recalled]
        elif action == "hang":
            self.hung.symmetric_difference_update([draw.choice([*self.servers])])
        elif action == "join" and len(self.servers) < 4:
            self.servers[f"server{len(self.servers) + draw.randrange(10**6)}"] = Policy(self.epoch, self.published)
        elif action == "leave" and len(self.servers) > 1:
            server = draw.choice([*self.servers])
            del self.servers[server]
            self.nodes.leave(server, "server")
        elif action == "no validator" and self.num_outages:  # groups that pass without a verdict fill batches meanwhile
            self.num_outages, self.has_validator = self.num_outages - 1, False
            for _ in range(draw.choice([50, 1500])):
                self.act(calm=True)
            self.has_validator = True
        elif action == "stand still":
            self.now_s += 100.0
        elif action in ("resume", "restart"):
            getattr(self, action)()
        self.audit()

    def audit(self):
        """Each delivery has one fate, and each group on its way is in the queue once."""
        drops, books = self.old_drops + self.queue.drops, self.books
        assert {*drops} <= {"duplicate", "late", "stale", "epoch", "flat"}
        fates = books["trained"] + books["refused"] + books["lost"] + drops.total() + self.num_kept()
        assert books["delivered"] == fates
        num_published = self.rule.max_lag + self.rule.max_off_policy + 2  # the newest are kept
        for entry in self.queue.entries.values():
            assert entry.state is not State.LEASED or entry.leases
            if entry.state is State.QUARANTINED:
                oldest = min(policy.version for policy in self.truth[entry.digest].policies)
                assert oldest > self.published - num_published, "no validator can replay it, as its weights are gone"
        numbers = {key[2] for key in self.queue.entries}
        state = self.batches.state()
        waiting = {*state["waiting"]}
        assert numbers <= waiting and waiting | self.trained.keys() | self.dropped == {*range(state["num_opened"])}
        assert not numbers & self.trained.keys() and len(numbers) == len(self.queue.entries)
        on_their_way = len(numbers) - sum(entry.is_submitted for entry in self.queue.entries.values())
        batch_size, lag = self.rule.prompts_per_step * self.rule.oversampling, self.rule.max_lag
        # One that had no signal may be taken back.
        assert on_their_way <= np.ceil((1 + lag) * batch_size) + env_mix.max_flat(self.rule)
        num_opened = len(waiting) + sum(n > self.loaded for n in self.trained.values())
        assert num_opened >= np.ceil((min(self.loaded + 1 + lag, NUM_BATCHES) - self.loaded) * batch_size)
        if not self.step == self.published:
            assert self.step == self.published + 1

    def num_kept(self):
        return sum(entry.is_submitted + len(entry.spares) for entry in self.queue.entries.values())


CALM = ["ask", "start", "start", "hand in", "hand in", "renew", "judge", "judge", "beat", "collect", "publish", "load"]
CHAOS = [
    "race",
    "race",
    "lose",
    "give back",
    "twice",
    "recall",
    "hang",
    "join",
    "leave",
    "stand still",
    "no validator",
    "resume",
    "restart",
]


def play(seed):
    world = World(seed)
    for _ in range(world.draw.randint(50, 400)):
        world.act(calm=False)
    world.hung.clear()
    world.jobs.clear()
    for _ in range(6000):
        if world.step == NUM_BATCHES:
            return world
        world.act(calm=True)
    raise AssertionError(f"no progress: batch {world.step + 1} of {world.rule}, {world.queue.count()}")


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_random_schedules_train_on_no_wrong_token_and_never_stop(block):
    drops, kinds = collections.Counter(), collections.Counter()
    for seed in range(40 * block, 40 * (block + 1)):
        world = play(seed)
        drops += world.queue.drops + world.old_drops
        kinds[world.rule.batch] += 1
    assert len(drops) == 5 and len(kinds) == 2  # all were seen


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_random_schedules(block):
    for seed in range(1000 + 500 * block, 1000 + 500 * (block + 1)):
        play(seed)
