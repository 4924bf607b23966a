"""The life of every group of a run: a pure data structure, without threads, a clock, or I/O.

    OPEN -> LEASED -> SUBMITTED -> QUARANTINED -> ELIGIBLE -> taken by a batch

Only a verdict (`accept`) makes a quarantined group ELIGIBLE. A submitted group may skip the quarantine (`let_pass`) if the caller
trusts its worker; `recall` quarantines such groups when that trust is gone. Every move is checked against `NEXT`.

1. A group may have several holders: `lease` gives open groups, or copies of the oldest leased ones to workers without work.
   Seeds are prescribed, so a copy changes nothing but the time. Some holders leave room for another copy (`leaves_room`): two
   strangers that renew their leases forever could otherwise keep a group for themselves.
2. The first delivery that is accepted wins. Until then, one of another holder is kept as a spare and takes the place of a delivery
   that is rejected. Later ones are duplicates, which count against no worker.
3. Leases are renewed (`renew`), given back (`give_back`), and expire (`expire`). A group without a holder opens again, ahead of the
   others. Work that arrives after its lease expired is taken as long as the group needs it.
4. `begin_epoch` voids all work: policies of another epoch have the same numbers and other weights. `void` drops rollouts that are too
   old for any batch, whose group is made again.

Deliveries and groups that are dropped are counted in `drops` by reason. The caller provides the time.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease as lease_lib
from rl.swarm.orchestrator.groups import queue_entry
from rl.swarm.orchestrator.groups.queue_entry import NEXT, Delivery, Entry, HeldLease, Key, State

MAX_LOOKS = 1024  # at leased groups, for one that is late: a worker without work may ask often
FEW_LOOKS = 16
Allows = Callable[[Key], bool]
IsTrue = Callable[[HeldLease], bool]


class GroupQueue:
    """All groups of a run from their opening until a batch takes them.

    `entries` has them by key, in the order in which workers get the open ones. Only the methods may change it.
    """

    def __init__(self):
        self.entries: collections.OrderedDict[Key, Entry] = collections.OrderedDict()
        self.drops: collections.Counter[str] = collections.Counter()  # groups or deliveries, by reason
        self.epoch = -1  # that leases pin and rollouts have; -1: any
        self.min_version = -1  # the oldest that further leases of training groups allow; -1: the group's own
        self._index = queue_entry.QueueIndex()
        self._deadlines: list[tuple[float, int, Key, str]] = []  # a heap with one item per lease, maybe of an ended one
        self._max_deadlines = 0  # with more of them, those of ended leases are dropped
        self._serial = itertools.count()

    def add(self, groups: Sequence[lease_lib.Lease], *, after: int | None = None) -> None:
        """Adds open groups at the end of the queue or, with `after`, after the open ones of that training step and of evaluations."""
        first = [] if after is None else [key for key in self._index.open if key[:2] == ("train", after)]
        if after is not None:  # an evaluation that began earlier must not wait for all later ones
            first += [key for key in self._index.open if key[0] == "held_out"]
        for group in groups:
            assert group.key not in self.entries, group.key
            self.entries[group.key] = Entry(group)
            self._update(group.key)
        if after is not None:
            for key in reversed([*first, *(group.key for group in groups)]):
                self._to_front(key)

    # Leases.

    def lease(
        self,
        worker: str,
        count: int,
        deadline_s: float,
        may_lease: Allows = lambda key: True,
        version: int = -1,
        now_s: float = -math.inf,
        begun_us: int = 0,
        *,
        free_samples: float = math.inf,
        is_late: IsTrue | None = None,
        leaves_room: IsTrue = lambda lease: False,
    ) -> list[lease_lib.Lease]:
        """Leases up to `count` open groups that `may_lease` allows to `worker` until `deadline_s`; returns the leased groups.

        Stops after the group with which the leased groups have at least `free_samples` samples. With `is_late`, leases second copies of
        the oldest leased groups instead (looks at `MAX_LOOKS` at most): those whose holders are all late, and of which at most one does
        not leave room. Leases pin the epoch of the queue, and the policy version `version` unless it is -1.
        """
        keys = self._late(MAX_LOOKS, is_late, leaves_room, worker) if is_late else self._index.open
        found = []
        for key in itertools.islice(filter(may_lease, keys), max(0, count)):
            if free_samples <= 0:
                break
            found.append(key)
            free_samples -= self.entries[key].group.num_samples
        for key in found:
            entry = self.entries[key]
            pinned = key[1] if key[0] == "held_out" else version  # an evaluation is of one version
            oldest = max(entry.group.min_version, self.min_version if key[0] == "train" else -1)
            group = dataclasses.replace(entry.group, version=pinned, epoch=self.epoch, min_version=oldest)
            entry.leases[worker] = HeldLease(group, worker, now_s, deadline_s, begun_us)
            heapq.heappush(self._deadlines, (deadline_s, next(self._serial), key, worker))
            if entry.state is State.OPEN:
                entry.group, entry.worker = group, worker
                self._move(key, State.LEASED)
            else:
                self._update(key)
        if len(self._deadlines) > self._max_deadlines:
            self._drop_ended()
        return [self.entries[key].leases[worker].group for key in found]

    def has_late(self, is_late: IsTrue, leaves_room: IsTrue) -> bool:
        """Returns True if one of the oldest leased groups (at most `FEW_LOOKS`) should go to a second worker, too."""
        return any(True for _ in self._late(FEW_LOOKS, is_late, leaves_room))

    def renew(self, worker: str, keys: Sequence[Key], deadline_s: Callable[[HeldLease], float]) -> list[Key]:
        """Moves the deadlines of the leases of `worker` to `deadline_s(lease)`, if that is later. Returns the keys that the worker need not finish.

        Those are the keys of groups that have rollouts, no longer exist, or were never leased to the worker. A group with rollouts is
        returned whether or not a verdict has accepted it: otherwise a worker could find out by a second key which of its groups passed
        without a verdict.
        """
        void = []
        for key in keys:
            entry = self.entries.get(key)
            lease = entry.leases.get(worker) if entry else None
            if entry and lease and not entry.is_submitted:
                later_s = max(lease.deadline_s, deadline_s(lease))
                entry.leases[worker] = dataclasses.replace(lease, deadline_s=later_s)
            elif entry is None or entry.is_submitted or worker not in entry.past:
                void.append(key)
                if entry and lease:  # rollouts that are on their way are still accepted
                    entry.keep_past(lease)
                    self._end_lease(key, worker)
        return void

    def orphans(self, worker: str, begun_us: int, known: Collection[Key] | None = None) -> list[Key]:
        """Returns the leased groups of `worker` that its process does not work on: leased before its start at `begun_us`, or missing in `known`."""
        held = self._index.held.get(worker, {})
        known = held if known is None else known
        leases = ((key, self.entries[key].leases.get(worker)) for key in held)
        return [key for key, lease in leases if lease and (lease.begun_us < begun_us or key not in known)]

    def give_back(self, key: Key, worker: str) -> HeldLease | None:
        """Ends a lease on the request of its holder; returns it, or None if there is none."""
        entry = self.entries.get(key)
        return self._end_lease(key, worker) if entry and worker in entry.leases else None

    def extend(self, by_s: float) -> None:
        """Adds `by_s` seconds to the deadlines of all leases, because the orchestrator could not renew them for that time."""
        for entry in self.entries.values():
            for worker, lease in entry.leases.items():
                entry.leases[worker] = dataclasses.replace(lease, deadline_s=lease.deadline_s + by_s)

    def expire(self, now_s: float) -> list[HeldLease]:
        """Ends the leases whose deadline was before `now_s`; returns those of groups that were not delivered meanwhile."""
        ended = []
        while self._deadlines and self._deadlines[0][0] < now_s:
            _, serial, key, worker = heapq.heappop(self._deadlines)
            lease = self.entries[key].leases.get(worker) if key in self.entries else None
            if lease and lease.deadline_s >= now_s:  # renewed
                heapq.heappush(self._deadlines, (lease.deadline_s, serial, key, worker))
            elif lease:
                self.entries[key].keep_past(lease)
                if not self.entries[key].is_submitted:
                    ended.append(lease)
                self._end_lease(key, worker)
        return ended

    # Rollouts.

    def deliver(self, key: Key, worker: str, rollouts: Sequence[rollout_lib.Rollout], digest: str) -> Delivery:
        """Stores the rollouts of a group for which `worker` has a lease or had one that expired; returns their fate."""
        found = self._deliver(key, worker, rollouts, digest)
        if found in (Delivery.DUPLICATE, Delivery.LATE, Delivery.EPOCH):
            self.drops[found.value] += 1
        return found

    def _deliver(self, key: Key, worker: str, rollouts: Sequence[rollout_lib.Rollout], digest: str) -> Delivery:
        entry = self.entries.get(key)
        if entry is None:
            return Delivery.LATE
        if self.epoch >= 0 and any(rollout.epoch != self.epoch for rollout in rollouts):
            return Delivery.EPOCH
        lease = entry.lease_of(worker, rollouts)
        if lease is None:
            return Delivery.LATE
        (entry.leases if entry.leases.get(worker) is lease else entry.past).pop(worker)
        if entry.state is State.ELIGIBLE or (entry.is_submitted and worker == entry.worker):
            self._update(key)
            return Delivery.DUPLICATE
        delivered = lease, sorted(rollouts, key=lambda r: r.number), digest
        if entry.is_submitted:
            entry.spares.append(delivered)
            self._update(key)
            return Delivery.SPARE
        self._submit(key, *delivered)
        return Delivery.TAKEN

    def restore(
        self, group: lease_lib.Lease, worker: str, rollouts: Sequence[rollout_lib.Rollout], digest: str
    ) -> Entry:
        """Makes an open group SUBMITTED with rollouts that were delivered before a restart; returns its entry."""
        lease = HeldLease(group, worker, -math.inf, -math.inf)
        self._submit(group.key, lease, sorted(rollouts, key=lambda r: r.number), digest)
        return self.entries[group.key]

    def quarantine(self, key: Key) -> None:
        """Moves a submitted group to QUARANTINED, where it waits for a verdict."""
        self._move(key, State.QUARANTINED)

    def let_pass(self, key: Key) -> None:
        """Makes a submitted group ELIGIBLE without a verdict, by trust in its worker."""
        entry = self.entries[key]
        assert entry.state is State.SUBMITTED, (key, entry.state)
        self._win(key)

    def accept(self, key: Key) -> None:
        """Makes a quarantined group ELIGIBLE, by a verdict."""
        entry = self.entries[key]
        assert entry.state is State.QUARANTINED, (key, entry.state)
        entry.is_verified = True
        self._win(key)

    def recall(self, is_doubtful: Callable[[Entry], bool]) -> list[Entry]:
        """Quarantines the eligible training groups that have no verdict, and that are doubtful; returns their entries."""
        trusted = (e for e in self.entries.values() if e.state is State.ELIGIBLE and not e.is_verified)
        found = [e for e in trusted if e.group.split == "train" and is_doubtful(e)]
        for entry in found:
            self._move(entry.group.key, State.QUARANTINED)
        return found

    def requeue(self, key: Key) -> Entry:
        """Drops the rollouts of a group; returns its entry as it was before.

        A spare takes their place, and the group is SUBMITTED again. Without one, its other holders keep it, or it opens at the
        front of the queue.
        """
        old = self.entries[key]
        assert old.is_submitted, (key, old.state)
        entry = self.entries[key] = old.emptied()
        entry.leases, entry.past = dict(old.leases), dict(old.past)
        if old.spares:
            entry.spares = old.spares[1:]
            self._submit(key, *old.spares[0])
        else:
            self._reopen(key)
        return old

    def void(self, key: Key) -> Entry:
        """Does as `requeue` with rollouts that are too old for any batch, and counts them."""
        self.drops["stale"] += 1
        return self.requeue(key)

    # Batches.

    def take(self, keys: Sequence[Key]) -> list[Entry]:
        """Removes the groups of a batch from the queue; returns their entries in the order of `keys`. All must be eligible."""
        assert self.num_eligible(keys) == len(set(keys)) == len(keys), keys
        return [self._remove(key) for key in keys]

    def drop(self, key: Key, reason: str) -> Entry:
        """Removes a group that no batch will use, counted by `reason`; returns its entry."""
        self.drops[reason] += 1
        return self._remove(key)

    def begin_epoch(self, epoch: int) -> list[Entry]:
        """Voids all leases and rollouts; returns the entries that had any, as they were before. All groups are open again.

        Later leases pin `epoch`, and rollouts of another one are dropped.
        """
        self.epoch = epoch
        void = [entry for entry in self.entries.values() if entry.state is not State.OPEN or entry.past]
        for old in void:
            key = old.group.key
            self.drops["epoch"] += old.is_submitted + len(old.spares)
            self.entries[key] = old.emptied()
            self._update(key)
        self._index.open = collections.OrderedDict.fromkeys(self.entries)  # in order
        return void

    # Questions.

    def num_eligible(self, keys: Sequence[Key]) -> int:
        """Returns the number of groups in `keys` that a batch may use now."""
        return sum(key in self.entries and self.entries[key].state is State.ELIGIBLE for key in keys)

    def held(self, worker: str) -> list[Key]:
        """Returns the keys of the groups that `worker` has a lease on, or submitted and no verdict has decided."""
        return [*self._index.held.get(worker, ())]

    def num_leases(self, worker: str) -> int:
        """Returns the number of groups that `worker` has a lease on."""
        return sum(worker in self.entries[key].leases for key in self._index.held.get(worker, ()))

    def leased_samples(self, worker: str) -> int:
        """Returns the number of samples of the groups that `worker` has a lease on."""
        found = (self.entries[key] for key in self._index.held.get(worker, ()))
        return sum(entry.group.num_samples for entry in found if worker in entry.leases)

    def leased_samples_but(self, workers: frozenset[str]) -> int:
        """Returns the number of samples of leased groups, without the groups that only these workers have."""
        found = (self.entries[key] for key in {key for worker in workers for key in self._index.held.get(worker, ())})
        own = (e.group.num_samples for e in found if e.state is State.LEASED and e.leases.keys() <= workers)
        return self._index.leased_samples - sum(own)

    def may_deliver(self, worker: str) -> bool:
        """Returns True if rollouts of `worker` may still be needed, or if a batch may still take rollouts that it delivered."""
        known = ((entry.worker, *entry.leases, *entry.past) for entry in self.entries.values())
        return worker in self._index.held or any(worker in workers for workers in known)

    def count(self) -> collections.Counter[State]:
        """Returns the number of groups in each state."""
        return collections.Counter({state: number for state in State if (number := self._index.count[state])})

    def _late(self, num_looks: int, is_late: IsTrue, leaves_room: IsTrue, worker: str = "") -> Iterator[Key]:
        both = self._index.aging, self._index.shared
        for key in itertools.chain.from_iterable(itertools.islice(keys, num_looks) for keys in both):
            leases = self.entries[key].leases
            num_counted = sum(not leaves_room(lease) for lease in leases.values())
            if num_counted < queue_entry.MAX_HOLDERS and worker not in leases and all(map(is_late, leases.values())):
                yield key

    def _drop_ended(self) -> None:
        """Drops the deadlines of ended leases, which most are: a lease of an hour is answered in seconds."""
        leases = ((key, lease) for key, entry in self.entries.items() for lease in entry.leases.values())
        self._deadlines = [(lease.deadline_s, next(self._serial), key, lease.worker) for key, lease in leases]
        heapq.heapify(self._deadlines)
        self._max_deadlines = 2 * len(self._deadlines) + len(self.entries) // 4  # so that it happens seldom

    # Every change ends in `_update`.

    def _end_lease(self, key: Key, worker: str) -> HeldLease:
        entry = self.entries[key]
        lease = entry.leases.pop(worker)
        if entry.state is State.LEASED:
            self._reopen(key)
        else:
            self._update(key)
        return lease

    def _reopen(self, key: Key) -> None:
        """Makes a group without rollouts LEASED if it has holders, else OPEN at the front of the queue."""
        entry = self.entries[key]
        entry.worker, entry.state = next(iter(entry.leases), ""), State.LEASED if entry.leases else State.OPEN
        self._update(key)
        if entry.leases:
            entry.group = entry.leases[entry.worker].group
        else:
            self._to_front(key)

    def _submit(self, key: Key, lease: HeldLease, rollouts: list[rollout_lib.Rollout], digest: str) -> None:
        entry = self.entries[key]
        entry.worker, entry.group, entry.rollouts, entry.digest = lease.worker, lease.group, rollouts, digest
        entry.since_s, entry.lengths = lease.since_s, [int(np.count_nonzero(r.sampled_mask)) for r in rollouts]
        entry.oldest_version = min((r.oldest_version for r in rollouts), default=0)
        self._move(key, State.SUBMITTED)

    def _win(self, key: Key) -> None:
        """Makes a group ELIGIBLE; other rollouts of it are not needed any more."""
        entry = self.entries[key]
        self.drops["duplicate"] += len(entry.spares)
        entry.spares = []
        self._move(key, State.ELIGIBLE)

    def _remove(self, key: Key) -> Entry:
        entry = self.entries.pop(key)
        self.drops["duplicate"] += len(entry.spares)
        entry.leases, entry.spares = {}, []
        self._index.update(key, None)
        return entry

    def _to_front(self, key: Key) -> None:
        self.entries.move_to_end(key, last=False)
        self._index.open.move_to_end(key, last=False)

    def _move(self, key: Key, state: State) -> None:
        entry = self.entries[key]
        assert state in NEXT[entry.state], (key, entry.state, state)
        entry.state = state
        self._update(key)

    def _update(self, key: Key) -> None:
        self._index.update(key, self.entries[key])
