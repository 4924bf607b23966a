"""The leases of strangers: who may take part in a run, and how many groups a key may hold whose work is not known.

Keys cost nothing, so a new key must gain nothing:
1. A newcomer (no accepted group yet) holds one group. All newcomers together hold a quarter of the unfinished groups, and
   those of one network at most as many as that leaves free, so that another network finds room. A rejected or returned group
   takes its place until its lease would have ended: else garbage would be free. A group whose pinned version was replaced
   takes it for a quarter of that time.
2. The lease of a newcomer is short: a quarter of `lease_s`. A heartbeat would not do instead, because it costs a squatter nothing.
   A group that a stranger lost is for other workers with a record for the next `lease_s`, if one of them is active.
3. Each accepted training group adds one to a worker's record, and a stranger holds 1 + record groups: twice as many each round.
   A lost lease halves the record, a rejected group ends it. Held-out groups, which no replay verifies, add nothing, and
   newcomers get none while a worker with a record is active.
4. Keys that config or launcher invited are not limited here.

Pure: the caller provides the lock, the time, and which leases still hold. Memory grows with accepted groups, not with keys.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection

from rl.protocol import lease as lease_lib

NEWCOMER_FRACTION = 4  # newcomers get 1 / this of the unfinished groups, and of the time of a lease
RATE, BURST = 100.0, 200.0  # requests per second of a network, and how many may come together
MAX_NETWORKS = 2**16  # whose rate is known

Key = tuple[str, int, int]  # task_schedule.Group.key


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rule by which strangers may take part in a run (`trust.admission`), with its numbers."""

    kind: str  # "open" | "invited" | "stake" | "work"
    min_stake: int = 0
    work_bits: int = 0

    @classmethod
    def of(cls, config) -> "Policy":
        """Returns the policy of a config; an empty `trust.admission` means "invited" if `topology.workers` names keys, else "open"."""
        kind = config.trust.admission or ("invited" if config.topology.workers else "open")
        return cls(kind, config.trust.min_stake, config.trust.work_bits)


@dataclasses.dataclass
class _Place:
    """A place for a newcomer, from its lease until its group is accepted, or until it holds none and the time is over."""

    worker: str
    network: str
    key: Key
    until_s: float


class Admission:
    """Decides which keys may lease, how many groups, and for how long.

    `invited` are the public keys (hex) that config or launcher invited; `stake(worker)` returns the stake of a key in the ledger.
    """

    def __init__(
        self,
        policy: Policy,
        run: str,
        invited: Collection[str],
        lease_s: float,
        stake: Callable[[str], int] = lambda worker: 0,
    ):
        self.policy, self._run, self._stake = policy, run, stake
        self._invited, self._lease_s = frozenset(invited), lease_s
        self._records: dict[str, int] = {}  # of strangers: accepted groups, less those lost
        self._seen_s: dict[str, float] = {}  # of workers that are known
        self._places: list[_Place] = []
        self._lost: dict[Key, tuple[str, float]] = {}  # groups kept for known workers: the last holder, and until when

    def is_stranger(self, worker: str) -> bool:
        """Returns True unless config or launcher invited this key."""
        return worker not in self._invited

    def is_known(self, worker: str) -> bool:
        """Returns True for an invited key, and for a stranger with a record."""
        return worker in self._invited or worker in self._records

    def admit(self, worker: str, request: dict) -> None:
        """Raises ValueError if the policy of the run does not let this key take part. `request` has its proof of work."""
        policy = self.policy
        if worker in self._invited or policy.kind == "open" or "work" not in request:
            return
        if policy.kind == "invited":
            raise ValueError(f"worker {worker[:16]} is not in topology.workers; ask the operator of the run to add it")
        if policy.kind == "stake" and (stake := self._stake(worker)) < policy.min_stake:
            raise ValueError(
                f"worker {worker[:16]} has a stake of {stake}, and this run asks for {policy.min_stake}; stake more"
            )
        if policy.kind == "work" and not lease_lib.is_work(self._run, worker, request["work"], policy.work_bits):
            found = f"worker {worker[:16]} sent {request['work']!r}, which is not a proof of work of {policy.work_bits} bits"
            raise ValueError(f"{found} for this run; compute one for the run and the key")

    def seen(self, worker: str, now_s: float) -> None:
        """Records that a worker that is not banned requested work now."""
        if self.is_known(worker):
            self._seen_s.pop(worker, None)
            self._seen_s[worker] = now_s  # the latest last
            while now_s - self._seen_s[oldest := next(iter(self._seen_s))] > self._lease_s:
                del self._seen_s[oldest]

    def room(
        self, worker: str, network: str, num_unfinished: int, now_s: float, held: Callable[[str], Collection[Key]]
    ) -> int:
        """Returns how many more of `num_unfinished` groups a worker may lease, as far as strangers are limited.

        `held(worker)` returns the keys of the groups that a worker holds: leased, submitted, or quarantined.
        """
        if worker in self._invited:
            return num_unfinished
        if worker in self._records:
            return 1 + self._records[worker] - len(held(worker))
        self._places = [place for place in self._places if now_s < place.until_s or place.key in held(place.worker)]
        used = [place.network for place in self._places if place.worker != worker]
        free = max(1, num_unfinished // NEWCOMER_FRACTION) - len(self._places)
        is_waiting = len(used) < len(self._places)  # for its own group, or for the end of its lease
        return int(not is_waiting and not held(worker) and used.count(network) < free)

    def may_lease(self, worker: str, key: Key, now_s: float) -> bool:
        """Returns False for a group that is kept for other workers with a record, one of which is active."""
        holder, until_s = self._lost.get(key, ("", 0.0))
        is_newcomer = not self.is_known(worker)
        if now_s >= until_s and not (is_newcomer and key[0] == "held_out"):
            return True
        others = (name for name, seen_s in self._seen_s.items() if name != holder and now_s - seen_s <= self._lease_s)
        is_wanted = next(others, None) is not None  # by a worker that may have it
        return not is_wanted or (worker != holder and not is_newcomer)

    def lease_s(self, worker: str) -> float:
        """Returns how many seconds a lease of a worker lasts."""
        return self._lease_s if self.is_known(worker) else self._lease_s / NEWCOMER_FRACTION

    def leased(self, worker: str, network: str, keys: Collection[Key], now_s: float) -> None:
        """Records new leases of a worker."""
        for key in keys:
            self._lost.pop(key, None)
            if not self.is_known(worker):
                self._places.append(_Place(worker, network, key, now_s + self.lease_s(worker)))

    def lost(self, worker: str, key: Key, now_s: float, *, blame: bool = True) -> None:
        """Records that a worker's lease on a group ended without rollouts; without `blame`, its record stays, and its place is soon free."""
        if not blame:
            soon_s = now_s + self._lease_s / NEWCOMER_FRACTION**2
            for place in self._places:
                place.until_s = min(place.until_s, soon_s) if place.worker == worker else place.until_s
        if self.is_stranger(worker):
            self._lost[key] = worker, now_s + self._lease_s
            if blame and worker in self._records:
                self._set_record(worker, self._records[worker] // 2)

    def accepted(self, worker: str, key: Key) -> None:
        """Records that a group of a worker was accepted."""
        self._lost.pop(key, None)
        self._places = [place for place in self._places if place.worker != worker]
        if self.is_stranger(worker) and key[0] == "train":
            self._set_record(worker, self._records.get(worker, 0) + 1)

    def rejected(self, worker: str, key: Key, now_s: float) -> None:
        """Records that a group of a worker was rejected: a stranger is a newcomer again, and others get the group."""
        self.lost(worker, key, now_s)
        self._set_record(worker, 0)

    def state(self) -> dict:
        """Returns the records of strangers as plain JSON, for `restore`."""
        return {"records": dict(self._records)}

    def restore(self, state: dict) -> None:
        """Sets the records of strangers to those that `state` returned earlier."""
        self._records = dict(state["records"])

    def _set_record(self, worker: str, record: int) -> None:
        self._records.pop(worker, None)
        if record:
            self._records[worker] = record
        elif self.is_stranger(worker):
            self._seen_s.pop(worker, None)


class RequestRate:
    """The rate of requests of each network: a token bucket of `BURST` requests that refills by `RATE` per second."""

    def __init__(self):
        self._buckets: dict[str, tuple[float, float]] = {}  # network -> requests left, and when; the latest last

    def take(self, network: str, now_s: float) -> bool:
        """Counts a request; returns False if the network sent too many."""
        left, since_s = self._buckets.pop(network, (BURST, now_s))
        left = min(BURST, left + (now_s - since_s) * RATE) - 1
        self._buckets[network] = max(left, 0.0), now_s
        for oldest in list(itertools.islice(self._buckets, 2)):  # full again, or one too many
            if now_s - self._buckets[oldest][1] > BURST / RATE or len(self._buckets) > MAX_NETWORKS:
                del self._buckets[oldest]
        return left >= 0

    def give_back(self, network: str) -> None:
        """Takes back the count of one request: that of a worker which is known."""
        if network in self._buckets:
            left, since_s = self._buckets[network]
            self._buckets[network] = min(BURST, left + 1), since_s
