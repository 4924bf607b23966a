"""One group in the queue: its state, the leases on it, and the rollouts that were delivered; and an index of all of them."""

import collections
import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease as lease_lib
from rl.protocol.lease import Key as Key

MAX_PAST = 4  # expired leases of a group whose work is still taken
MAX_HOLDERS = 2  # of a group at the same time, except those that leave room
_Keys = collections.OrderedDict[Key, None]


class State(enum.Enum):
    """The stages of a group in the queue, from its opening until a batch takes it."""

    OPEN = "open"  # waits for a worker
    LEASED = "leased"  # one or more workers have it until their deadlines
    SUBMITTED = "submitted"  # its rollouts arrived; the checks that need no weights run
    QUARANTINED = "quarantined"  # waits for the verdict of a replay
    ELIGIBLE = "eligible"  # a batch may use it


NEXT: dict[State, set[State]] = {
    State.OPEN: {State.LEASED, State.SUBMITTED},
    State.LEASED: {State.SUBMITTED, State.OPEN},
    State.SUBMITTED: {State.QUARANTINED, State.ELIGIBLE, State.OPEN},
    State.QUARANTINED: {State.ELIGIBLE, State.OPEN},
    State.ELIGIBLE: {State.QUARANTINED, State.OPEN},
}


class Delivery(enum.Enum):
    """The fate of delivered rollouts. None counts against the worker."""

    TAKEN = "taken"  # the group is SUBMITTED with them
    SPARE = "spare"  # they are checked if those of another worker are rejected
    DUPLICATE = "duplicate"  # another worker's were accepted, or this worker's before
    LATE = "late"  # this worker has no lease on the group (any more), or a batch took it
    EPOCH = "epoch"  # policies of another epoch made them


@dataclasses.dataclass(frozen=True)
class HeldLease:
    """The right of a worker to produce a group before a deadline."""

    group: lease_lib.Lease  # with the pinned version
    worker: str
    since_s: float
    deadline_s: float
    begun_us: int = 0  # the start of the worker's process, by its account


@dataclasses.dataclass
class Entry:
    """A group in the queue with its state, its holders, and its submission."""

    group: lease_lib.Lease  # as leased last, or as it was leased to the worker that submitted
    state: State = State.OPEN
    worker: str = ""  # that submitted, or got the first of the current leases
    leases: dict[str, HeldLease] = dataclasses.field(default_factory=dict)  # by worker; none of the one that submitted
    past: dict[str, HeldLease] = dataclasses.field(default_factory=dict)  # the newest expired lease of each worker
    rollouts: list[rollout_lib.Rollout] = dataclasses.field(default_factory=list)
    digest: str = ""  # of the rollouts
    # Ours, by sample; None: timed out.
    scores: Mapping[int, Mapping[str, float] | None] = dataclasses.field(default_factory=dict)
    is_verified: bool = False  # a verdict accepted the rollouts
    was_decided: bool = False  # an earlier submission was quarantined or let pass, which its worker may have found out
    since_s: float = -math.inf  # of the lease that the rollouts answer
    # With digests.
    spares: list[tuple[HeldLease, list[rollout_lib.Rollout], str]] = dataclasses.field(default_factory=list)
    oldest_version: int = 0  # of the submitted rollouts, prompts included
    lengths: Sequence[int] = ()  # sampled tokens of each

    @property
    def is_submitted(self) -> bool:
        """True if rollouts were delivered and not rejected."""
        return self.state not in (State.OPEN, State.LEASED)

    @property
    def holders(self) -> frozenset[str]:
        """The workers that have a lease, or whose rollouts no verdict has decided."""
        if self.state is State.ELIGIBLE:
            return frozenset()
        spares = (spare[0].worker for spare in self.spares)
        return frozenset({*self.leases, *spares, *({self.worker} if self.is_submitted else ())})

    def lease_of(self, worker: str, rollouts: Sequence[rollout_lib.Rollout]) -> HeldLease | None:
        """Returns the lease that rollouts of `worker` answer (None: none): the current one, unless only an expired one pinned their version."""
        found = [leases[worker] for leases in (self.leases, self.past) if worker in leases]
        if len(found) > 1:
            versions = {int(version) for rollout in rollouts for version in rollout.versions[rollout.sampled_mask]}
            found.sort(key=lambda lease: not (lease.group.version == -1 or versions == {lease.group.version}))
        return found[0] if found else None

    def keep_past(self, lease: HeldLease) -> None:
        """Remembers a lease that ends: the work for it is still taken."""
        self.past.pop(lease.worker, None)
        self.past[lease.worker] = lease
        if len(self.past) > MAX_PAST:
            del self.past[next(iter(self.past))]

    def emptied(self) -> "Entry":
        """Returns an open entry of the same group, without leases and rollouts."""
        return Entry(self.group, was_decided=self.was_decided or self.state in (State.QUARANTINED, State.ELIGIBLE))


class QueueIndex:
    """The keys of a queue's groups by state and by holder, so that no request of a worker has to look at all groups.

    The index shows each group as it was at its last `update`.
    """

    def __init__(self):
        self.open: _Keys = collections.OrderedDict()  # in the order of the queue
        self.aging: _Keys = collections.OrderedDict()  # LEASED, the oldest lease first
        self.shared: _Keys = collections.OrderedDict()  # LEASED by MAX_HOLDERS: apart, as few get more
        self.held: dict[str, dict[Key, None]] = {}  # by worker
        self.count: collections.Counter[State | None] = collections.Counter()
        self.leased_samples = 0  # of all LEASED groups
        self._known: dict[Key, tuple[State | None, frozenset[str], int]] = {}

    def update(self, key: Key, entry: Entry | None) -> None:
        """Records the new state of an entry; None means that the group has left the queue."""
        old_state, old_holders, num_old = self._known.pop(key, (None, frozenset(), 0))
        state, holders = (entry.state, entry.holders) if entry else (None, frozenset())
        num_samples = entry.group.num_samples if entry else 0
        if entry:
            self._known[key] = state, holders, num_samples
        for worker in old_holders - holders:
            del self.held[worker][key]
            if not self.held[worker]:
                del self.held[worker]
        for worker in holders - old_holders:
            self.held.setdefault(worker, {})[key] = None
        old, new = self._place(old_state, old_holders), self._place(state, holders)
        if new is not old:
            if old is not None:
                del old[key]
            if new is not None:
                new[key] = None
                # a group that comes back has old leases
                new.move_to_end(key, last=new is not self.aging or old is self.open)
        self.count[old_state] -= 1
        self.count[state] += 1
        self.leased_samples += num_samples * (state is State.LEASED) - num_old * (old_state is State.LEASED)

    def _place(self, state: State | None, holders: frozenset[str]) -> _Keys | None:
        if state is State.LEASED:
            return self.aging if len(holders) < MAX_HOLDERS else self.shared
        return self.open if state is State.OPEN else None
