"""The rule by which strangers may take part in a run, and the rate of requests that a network may send."""

import dataclasses
import itertools
from collections.abc import Callable, Collection

from rl.protocol import lease as lease_lib

RATE, BURST = 100.0, 200.0  # requests per second of a network, and how many may come together
MAX_NETWORKS = 2**16  # whose rate is known


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


class Admission:
    """Decides which keys may lease. `invited` are public keys (hex); `stake(worker)` returns the stake of a key in the ledger."""

    def __init__(self, policy: Policy, run: str, invited: Collection[str], stake: Callable[[str], int]):
        self.policy, self._run, self._invited, self._stake = policy, run, frozenset(invited), stake

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
