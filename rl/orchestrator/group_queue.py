"""The life of every group of a run: a pure data structure, without threads, a clock, or I/O.

    OPEN -> LEASED -> SUBMITTED -> QUARANTINED -> ELIGIBLE -> taken by a batch

Only a verdict (`accept`) makes a quarantined group ELIGIBLE. A submitted group may skip the quarantine (`let_pass`) if the caller
trusts its worker; `recall` quarantines such groups when that trust is gone. A group returns to OPEN, ahead of the others, when its
lease expires (`expire`) or the caller rejects its rollouts (`requeue`). Every move is checked against `NEXT`. The caller provides
the lock and the time.
"""

import collections
import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.protocol import task_schedule

Key = tuple[str, int, int]  # task_schedule.Group.key


class State(enum.Enum):
    """The stages of a group in the queue, from its opening until a batch takes it."""

    OPEN = "open"  # waits for a worker
    LEASED = "leased"  # a worker has it until the deadline
    SUBMITTED = "submitted"  # its rollouts arrived; the checks that need no weights run
    QUARANTINED = "quarantined"  # waits for the verdict of a replay
    ELIGIBLE = "eligible"  # a batch may use it


NEXT: dict[State, set[State]] = {
    State.OPEN: {State.LEASED},
    State.LEASED: {State.SUBMITTED, State.OPEN},
    State.SUBMITTED: {State.QUARANTINED, State.ELIGIBLE, State.OPEN},
    State.QUARANTINED: {State.ELIGIBLE, State.OPEN},
    State.ELIGIBLE: {State.QUARANTINED, State.OPEN},
}


@dataclasses.dataclass
class Entry:
    """A group in the queue with its state. The fields after `state` belong to its current lease and submission."""

    group: task_schedule.Group
    state: State = State.OPEN
    worker: str = ""
    deadline_s: float = math.inf  # finite while LEASED
    rollouts: list[rollout_lib.Rollout] = dataclasses.field(default_factory=list)
    digest: str = ""  # of the rollouts
    scores: Mapping[int, Mapping[str, float] | None] = dataclasses.field(
        default_factory=dict
    )  # ours, by sample; None: timed out
    is_verified: bool = False  # a verdict accepted the rollouts
    was_decided: bool = False  # an earlier submission was quarantined or let pass, which its worker may have found out
    earlier: frozenset[tuple[str, int]] = frozenset()  # leases before this one that expired: worker, pinned version

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of the submitted rollouts."""
        return min(int(r.versions[r.sampled_mask].min()) for r in self.rollouts)


class GroupQueue:
    """All groups of a run from their opening until a batch takes them.

    `entries` has them by key, in the order in which workers get the open ones. Only the methods may change it.
    """

    def __init__(self):
        self.entries: collections.OrderedDict[Key, Entry] = collections.OrderedDict()

    def add(self, groups: Sequence[task_schedule.Group], *, first: bool = False) -> None:
        """Adds open groups at the end of the queue or, with `first`, at its front."""
        for group in reversed(groups) if first else groups:
            assert group.key not in self.entries, group.key
            self.entries[group.key] = Entry(group)
            self.entries.move_to_end(group.key, last=not first)

    def lease(
        self,
        worker: str,
        count: int,
        deadline_s: float,
        may_lease: Callable[[Key], bool] = lambda key: True,
        version: int = -1,
    ) -> list[task_schedule.Group]:
        """Leases up to `count` open groups that `may_lease` allows to `worker` until `deadline_s`; returns the leased groups.

        They pin the policy version `version`, unless it is -1.
        """
        allowed = (e for e in self.entries.values() if e.state is State.OPEN and may_lease(e.group.key))
        leased = list(itertools.islice(allowed, max(0, count)))
        for entry in leased:
            _move(entry, State.LEASED)
            entry.worker, entry.deadline_s = worker, deadline_s
            entry.group = dataclasses.replace(entry.group, version=version)
        return [entry.group for entry in leased]

    def expire(self, now_s: float) -> list[Entry]:
        """Reopens the groups whose lease ended before `now_s`; returns their entries as they were before, with the worker."""
        expired = [key for key, entry in self.entries.items() if entry.deadline_s < now_s]
        return [self.requeue(key) for key in expired]

    def deliver(self, key: Key, worker: str, rollouts: Sequence[rollout_lib.Rollout], digest: str) -> bool:
        """Stores the rollouts of a leased group, which ends the lease. Returns False, without a change, if `worker` has no lease on it."""
        entry = self.entries.get(key)
        if entry is None or (entry.state, entry.worker) != (State.LEASED, worker):
            return False
        _move(entry, State.SUBMITTED)
        entry.rollouts, entry.digest = sorted(rollouts, key=lambda r: r.sample), digest
        entry.deadline_s = math.inf
        return True

    def quarantine(self, key: Key) -> None:
        """Moves a submitted group to QUARANTINED, where it waits for a verdict."""
        _move(self.entries[key], State.QUARANTINED)

    def let_pass(self, key: Key) -> None:
        """Makes a submitted group ELIGIBLE without a verdict, by trust in its worker."""
        entry = self.entries[key]
        assert entry.state is State.SUBMITTED, (key, entry.state)
        _move(entry, State.ELIGIBLE)

    def accept(self, key: Key) -> None:
        """Makes a quarantined group ELIGIBLE, by a verdict."""
        entry = self.entries[key]
        assert entry.state is State.QUARANTINED, (key, entry.state)
        _move(entry, State.ELIGIBLE)
        entry.is_verified = True

    def recall(self, worker: str) -> list[Entry]:
        """Quarantines the eligible training groups of `worker` that have no verdict; returns their entries."""
        eligible = [e for e in self.entries.values() if e.state is State.ELIGIBLE and e.worker == worker]
        found = [e for e in eligible if e.group.split == "train" and not e.is_verified]
        for entry in found:
            _move(entry, State.QUARANTINED)
        return found

    def requeue(self, key: Key) -> Entry:
        """Reopens a group at the front of the queue, without its lease and rollouts; returns its entry as it was before."""
        old = self.entries[key]
        assert State.OPEN in NEXT[old.state], (key, old.state)
        was_decided = old.was_decided or old.state in (State.QUARANTINED, State.ELIGIBLE)
        lost = {(old.worker, old.group.version)} if old.state is State.LEASED else set()
        self.entries[key] = Entry(old.group, was_decided=was_decided, earlier=old.earlier | lost)
        self.entries.move_to_end(key, last=False)
        return old

    def take(self, keys: Sequence[Key]) -> list[Entry]:
        """Removes the groups of a batch from the queue; returns their entries in the order of `keys`. All must be eligible."""
        assert self.num_eligible(keys) == len(set(keys)) == len(keys), keys
        return [self.entries.pop(key) for key in keys]

    def num_eligible(self, keys: Sequence[Key]) -> int:
        """Returns the number of groups in `keys` that a batch may use now."""
        return sum(key in self.entries and self.entries[key].state is State.ELIGIBLE for key in keys)

    def held(self, worker: str) -> list[Key]:
        """Returns the keys of the groups of `worker` that are leased, submitted, or quarantined."""
        return [key for key, e in self.entries.items() if e.worker == worker and e.state is not State.ELIGIBLE]

    def count(self) -> collections.Counter[State]:
        """Returns the number of groups in each state."""
        return collections.Counter(entry.state for entry in self.entries.values())


def _move(entry: Entry, state: State) -> None:
    assert state in NEXT[entry.state], (entry.group.key, entry.state, state)
    entry.state = state
