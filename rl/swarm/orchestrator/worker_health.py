"""The standing of a run's workers: how many groups each may lease and for how long, and at what rate theirs are verified.

Keys cost nothing, so a new key must gain nothing. Invited are the keys that config or launcher named; all others are strangers:
1. A newcomer (a stranger without an accepted group) holds one group. All newcomers together hold a quarter of the unfinished
   groups, and those of one network at most as many as that leaves free, so that another network finds room. A rejected or returned
   group takes its place until its lease would have ended: else garbage would be free. A group whose pinned version was replaced
   takes it for a quarter of that time.
2. The lease of a newcomer is short: a quarter of `lease_s`. A heartbeat would not do instead, because it costs a squatter nothing.
   A group that a stranger lost is for other workers with a record for the next `lease_s`, if one of them is active.
3. Each accepted training group adds one to a stranger's record, and it holds 1 + record groups: twice as many each round. A lost
   lease halves the record, a rejected group ends it. Held-out groups, which no replay verifies, add nothing, and only invited
   workers get them; in a run that invited none, newcomers get none while a worker with a record is active.
4. An expired lease halves the number of groups that an invited worker may lease; an accepted group doubles it again. No worker gets
   a group that it lost again while another worker is active.
5. A worker's groups are verified at the rate max(min_rate, 1 - r), where r = n / (n + HALF_AT) after n of its groups passed (rl/protocol/verdict.py). A
   worker that forges at rate q is caught after (1 - q) / q forged groups on average, and q is at least HALF_AT / (n + HALF_AT): so it
   gets one forged group past us per HALF_AT groups that it did honestly and we verified, and a new key none. The last is also why
   many keys gain nothing. An invited worker starts as if it had a record that gives it `invited_rate`.
6. A failed check makes a worker a suspect: its rate is 1 from then on. `reveal` names the steps trained on its unverified groups.
   After `max_rejections` rejected groups the worker is banned: it gets no more work.
7. Registered inference servers, which answer for the samples that they sign, have such marks of their own: as invited keys that take no
   leases, and whose groups are those in which they signed all samples (rl/trust/verification/evidence_log.py).

Marks go into the checkpoint; otherwise a worker could gain by provoking a restart. Pure: the caller provides the time and
which leases still hold. Memory grows with accepted and rejected groups, not with keys.
"""

import collections
import copy
import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Mapping

from rl.protocol import lease
from rl.protocol import verdict as verdict_lib

MOST_HALVINGS = 12
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # of a group that came back again
NEWCOMER_FRACTION = 4  # newcomers get 1 / this of the unfinished groups, and of the time of a lease

_Times = collections.OrderedDict[str, float]


@dataclasses.dataclass
class _Worker:
    """The marks of one worker."""

    num_rejected: int = 0
    is_suspect: bool = False
    num_halvings: int = 0  # of an invited worker's share
    num_verified: int = 0  # groups that passed a replay
    num_unverified: int = 0  # groups that were trained on without one,
    steps: list[list[int]] = dataclasses.field(default_factory=list)  # in these steps: [first, last] of each range
    record: int = 0  # of a stranger: accepted groups, less those lost


@dataclasses.dataclass
class _Place:
    """A place for a newcomer, from its lease until its group is accepted, or until it holds none and the time is over."""

    worker: str
    network: str
    key: lease.Key
    until_s: float


class WorkerHealth:
    """The marks of each worker. A known or banned worker is active if it requested work in the last `lease_s` seconds.

    `invited` are the public keys (hex) that config or launcher invited. While `is_measuring`, all groups of invited workers are
    replayed, and the replays are measured (rl/trust/verification/run_bands.py). Strangers then get no work while an invited worker is active;
    while none is active, strangers work, and each of their groups is replayed.
    """

    def __init__(
        self,
        max_rejections: int,
        lease_s: float,
        *,
        min_rate: float,
        invited_rate: float,
        invited: Collection[str] = (),
        is_measuring: Callable[[], bool] = lambda: False,
    ):
        self.max_rejections, self._lease_s = max_rejections, lease_s
        self.rates = {"min_rate": min_rate, "invited_rate": invited_rate}
        self._min_rate, self._given = min_rate, verdict_lib.HALF_AT * (1 / invited_rate - 1)
        self.invited = frozenset(invited)  # public keys in hex
        self._is_measuring, self._is_stranger_waiting = is_measuring, False
        self._workers: dict[str, _Worker] = collections.defaultdict(_Worker)
        # Times by worker, the latest last: those of the last `lease_s`.
        self._seen_s: _Times = collections.OrderedDict()  # of known and banned workers that are active
        self._left_s: _Times = collections.OrderedDict()  # of workers that gave all groups back
        # of workers: the last lease that expired and was held against them
        self._blamed_s: _Times = collections.OrderedDict()
        self._places: list[_Place] = []
        # Group -> its last holder, and until when newcomers do not get it.
        self._lost: dict[lease.Key, tuple[str, float]] = {}
        # Group -> the number of its returns, and the end of its rest.
        self._pauses: dict[lease.Key, tuple[int, float]] = {}

    def is_stranger(self, worker: str) -> bool:
        """Returns True unless config or launcher invited this key."""
        return worker not in self.invited

    def is_known(self, worker: str) -> bool:
        """Returns True for an invited key, and for a stranger with a record."""
        return worker in self.invited or self._of(worker).record > 0

    def seen(self, worker: str, now_s: float) -> None:
        """Records that a worker requested work now. A key that only asks leaves no trace."""
        if self.is_known(worker) or self.is_banned(worker):
            self._note(self._seen_s, worker, now_s)

    def state(self) -> dict:
        """Returns all marks of workers as plain JSON, for `restore`."""
        marks = {name: dataclasses.asdict(one) for name, one in self._workers.items() if one != _Worker()}
        return {"workers": marks, "expired_with": [[*key, worker] for key, (worker, _) in self._lost.items()]}

    def restore(self, state: dict) -> None:
        """Sets the marks of workers to those that `state` returned earlier."""
        for name, marks in copy.deepcopy(state["workers"]).items():
            self._workers[name] = _Worker(**marks)
        self._lost = {tuple(key): (worker, 0.0) for *key, worker in state["expired_with"]}

    def room(
        self, worker: str, network: str, num_unfinished: int, now_s: float, held: Callable[[str], Collection[lease.Key]]
    ) -> int:
        """Returns how many more of `num_unfinished` groups a worker may lease; 0 if it is banned.

        `held(worker)` returns the keys of the groups that a worker holds: leased, submitted, or quarantined.
        """
        if self.is_banned(worker):
            return 0
        one = self._of(worker)
        if worker in self.invited:
            halvings = one.num_halvings if self.has_others(worker, now_s) else 0
            return max(1, num_unfinished >> halvings) - len(held(worker))
        if self._is_measuring() and any(
            now_s - self._seen_s.get(key, -math.inf) <= self._lease_s for key in self.invited
        ):
            self._is_stranger_waiting = True
            return 0
        if one.record:
            return 1 + one.record - len(held(worker))
        self._places = [place for place in self._places if now_s < place.until_s or place.key in held(place.worker)]
        used = [place.network for place in self._places if place.worker != worker]
        free = max(1, num_unfinished // NEWCOMER_FRACTION) - len(self._places)
        is_waiting = len(used) < len(self._places)  # for its own group, or for the end of its lease
        return int(not is_waiting and not held(worker) and used.count(network) < free)

    def newcomers(self) -> frozenset[str]:
        """Returns the newcomers that may have a lease."""
        return frozenset(place.worker for place in self._places)

    def may_lease(self, worker: str, key: lease.Key, now_s: float) -> bool:
        """Returns False for a group that rests, that this worker lost, or that is kept for workers with a record.

        A lost or kept group is open to all again while no other known worker is active.
        """
        if now_s < self._pauses.get(key, (0, 0.0))[1]:
            return False
        holder, until_s = self._lost.get(key, ("", 0.0))
        if key[0] == "held_out" and self.invited:
            return worker in self.invited and (worker != holder or not self.has_others(worker, now_s))
        is_kept = now_s < until_s or key[0] == "held_out"
        return not (worker == holder or (is_kept and not self.is_known(worker))) or not self.has_others(holder, now_s)

    def lease_s(self, worker: str) -> float:
        """Returns how many seconds a lease of a worker lasts."""
        return self._lease_s if self.is_known(worker) else self._lease_s / NEWCOMER_FRACTION

    def renewed_s(self, worker: str, since_s: float, now_s: float) -> float:
        """Returns the deadline of a lease that a worker took at `since_s` and renews at `now_s`.

        The lease of a newcomer ends `lease_s` after `since_s` at the latest. Otherwise a newcomer could keep a group forever by
        heartbeats, at no cost.
        """
        most_s = math.inf if self.is_known(worker) else since_s + self._lease_s
        return min(now_s + self.lease_s(worker), most_s)

    def leased(self, worker: str, network: str, keys: Collection[lease.Key], now_s: float) -> None:
        """Records new leases of a worker."""
        if not self.is_known(worker):
            self._places += [_Place(worker, network, key, now_s + self.lease_s(worker)) for key in keys]

    def lost(self, worker: str, key: lease.Key, now_s: float, *, blame: bool = True) -> None:
        """Records that a worker's lease on a group ended without rollouts; without `blame`, its marks stay, and its place is soon free."""
        self._lost[key] = worker, now_s + self._lease_s if self.is_stranger(worker) else 0.0
        if not blame:
            soon_s = now_s + self._lease_s / NEWCOMER_FRACTION**2
            for place in self._places:
                place.until_s = min(place.until_s, soon_s) if place.worker == worker else place.until_s
        elif worker in self.invited:
            self._workers[worker].num_halvings = min(self._of(worker).num_halvings + 1, MOST_HALVINGS)
        elif self.is_known(worker):
            self._set_record(worker, self._of(worker).record // 2)

    def left(self, worker: str, now_s: float) -> bool:
        """Records that a worker gives all groups back. Returns True if that counts against the worker.

        It does for a newcomer, and for a stranger that left in the last `lease_s` seconds: otherwise two strangers could lease the same
        groups in turns without end.
        """
        is_again = self._note(self._left_s, worker, now_s)
        return not self.is_known(worker) or (self.is_stranger(worker) and is_again)

    def expired(self, worker: str, key: lease.Key, now_s: float, *, blame: bool) -> None:
        """Records that a lease ended by its deadline, with `blame` if that counts against the worker. Several that end in one outage are one fault."""
        if blame and self.is_known(worker):  # the marks of others do not change
            blame = not self._note(self._blamed_s, worker, now_s)
        self.lost(worker, key, now_s, blame=blame)

    def returned(self, key: lease.Key, now_s: float) -> None:
        """Records that a worker gave a group back, for example because it had no server. From the second time on, the group rests, longer each time."""
        times = self._pauses.get(key, (0, 0.0))[0] + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (times - 2), MAX_PAUSE_S) if times > 1 else 0.0
        self._pauses[key] = min(times, MOST_HALVINGS), now_s + pause_s

    def accepted(self, worker: str, key: lease.Key) -> None:
        """Records that a group of this worker was accepted, which undoes one halving."""
        self._lost.pop(key, None)
        self._pauses.pop(key, None)
        self._places = [place for place in self._places if place.worker != worker]
        if worker in self.invited:
            self._workers[worker].num_halvings = max(self._of(worker).num_halvings - 1, 0)
        elif key[0] == "train":
            self._set_record(worker, self._of(worker).record + 1)

    def rate(self, worker: str) -> float:
        """Returns the probability with which a group of this worker must be verified before it is trained on."""
        one = self._of(worker)
        # Limits are loose until then.
        is_needed = (self._is_stranger_waiting or self.is_stranger(worker)) and self._is_measuring()
        if one.is_suspect or self.is_banned(worker) or is_needed:
            return 1.0
        record = one.num_verified + (self._given if worker in self.invited else 0)
        return verdict_lib.check_rate(verdict_lib.reputation(record), self._min_rate)

    def verified(self, worker: str) -> None:
        """Records that a group of this worker passed a replay. A group of a stranger earns no trust while limits are measured."""
        self._workers[worker].num_verified += not (self.is_stranger(worker) and self._is_measuring())

    def trained_unverified(self, worker: str, step: int) -> None:
        """Records that batch `step`, the newest, contains a group of this worker that was not verified."""
        one = self._workers[worker]
        one.num_unverified += 1
        if one.steps and step <= one.steps[-1][1] + 1:
            one.steps[-1][1] = step
        else:
            one.steps.append([step, step])

    def rejected(self, worker: str, key: lease.Key, now_s: float, *, is_fault: bool) -> None:
        """Records that a group was rejected: a stranger is a newcomer again. A failed check (`is_fault`) makes the worker a suspect."""
        self._workers[worker].num_rejected += 1
        self._workers[worker].is_suspect |= is_fault
        if self.is_stranger(worker):
            self._lost[key] = worker, now_s + self._lease_s
            self._set_record(worker, 0)

    def doubt(self, worker: str) -> None:
        """Has each group of this worker verified from now on, without blame."""
        self._workers[worker].is_suspect = True

    def reveal(self, worker: str) -> tuple[int, list[int]]:
        """Returns (number of unverified groups of this worker that were trained on, their steps), and forgets both: to be named once."""
        one = self._workers[worker]
        num, steps = one.num_unverified, [step for first, last in one.steps for step in range(first, last + 1)]
        one.num_unverified, one.steps = 0, []
        return num, steps

    def remember(self, names: Collection[str], rejections: Mapping[str, int], banned: Collection[str]) -> None:
        """Restores marks of the workers `names` from the ledger. Any rejection makes a suspect, since it may have been a failed check."""
        for name in names:
            one, least = self._workers[name], self.max_rejections if name in banned else 0
            one.num_rejected, one.is_suspect = max(one.num_rejected, rejections.get(name, 0), least), True

    def is_banned(self, worker: str) -> bool:
        """Returns True if this worker gets no more work, because too many of its groups were rejected."""
        return self._of(worker).num_rejected >= self.max_rejections

    def num_banned(self, now_s: float) -> int:
        """Returns the number of active workers that are banned."""
        return sum(self.is_banned(name) and now_s - seen_s <= self._lease_s for name, seen_s in self._seen_s.items())

    def groups(self, most: int) -> dict[str, dict[str, int]]:
        """Returns the numbers of verified and rejected groups by worker (16 digits of its key), for the `most` workers with the most groups."""
        found = heapq.nlargest(most, self._workers.items(), key=lambda one: one[1].num_verified + one[1].num_rejected)
        verified = {name[:16]: one.num_verified for name, one in found}
        return {"verified_groups": verified, "rejected_groups": {name[:16]: one.num_rejected for name, one in found}}

    def has_others(self, worker: str, now_s: float) -> bool:
        """Returns True if a known worker other than this one is active and not banned."""
        others = (name for name, seen_s in self._seen_s.items() if name != worker and now_s - seen_s <= self._lease_s)
        return any(self.is_known(name) and not self.is_banned(name) for name in others)

    def _of(self, worker: str) -> _Worker:
        """Returns the marks of a worker to read; a key without marks leaves no trace."""
        return self._workers.get(worker, _NO_MARKS)

    def _note(self, times: _Times, worker: str, now_s: float) -> bool:
        """Makes a worker the latest in `times`, and drops old ones; returns True if it was there in the last `lease_s`."""
        is_again = now_s - times.pop(worker, -math.inf) <= self._lease_s
        times[worker] = now_s
        while now_s - next(iter(times.values())) > self._lease_s:
            times.popitem(last=False)
        return is_again

    def _set_record(self, worker: str, record: int) -> None:
        if record != self._of(worker).record:
            self._workers[worker].record = record


_NO_MARKS = _Worker()
