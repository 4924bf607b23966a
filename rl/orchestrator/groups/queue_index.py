"""The groups of a queue by state and by holder, so that no request of a worker has to look at all of them."""

import collections

from rl.orchestrator.groups.queue_entry import Entry, Key, State

MAX_HOLDERS = 2  # of a group at the same time, but for those that leave room
_Keys = collections.OrderedDict[Key, None]


class QueueIndex:
    """Keys of groups, as of the last `update` of each."""

    def __init__(self):
        self.open: _Keys = collections.OrderedDict()  # in the order of the queue
        self.aging: _Keys = collections.OrderedDict()  # LEASED, the oldest lease first
        self.shared: _Keys = collections.OrderedDict()  # LEASED by MAX_HOLDERS: apart, as few get more
        self.held: dict[str, dict[Key, None]] = {}  # by worker
        self.count: collections.Counter[State | None] = collections.Counter()
        self.leased_samples = 0  # of all LEASED groups
        self._known: dict[Key, tuple[State | None, frozenset[str], int]] = {}

    def update(self, key: Key, entry: Entry | None) -> None:
        """Follows a change of an entry; None: it is gone."""
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
