"""The rule by which strangers may take part in a run."""

import dataclasses
from collections.abc import Callable, Collection

from rl.protocol import lease as lease_lib


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
