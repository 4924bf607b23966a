"""The records of a run's inference servers, which answer for the samples that they sign. Pure: the caller provides the lock.

1. Keys of servers are registered by the operator of the run or by the launcher, never by strangers.
2. A group is verified at the larger of two rates: its worker's (worker_health.py) and its server's, which follows the same rule. A
   server's groups are those whose samples it all signed (rl/verification/responsibility.py).
3. A group that fails by its server's fault is void for the worker. The server becomes a suspect, whose rate is 1; `reveal` names the
   steps that trained on its unverified groups. After `max_rejections` such groups it is banned: workers do not get its URL any more.

The records go into the checkpoint, with those of the workers. The ledger has the faults since, so that a restart forgives none.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.protocol import check_rate
from rl.verification import responsibility


@dataclasses.dataclass
class _Record:
    """The marks of one server, in the order of a checkpoint."""

    num_rejected: int = 0
    num_verified: int = 0  # groups that passed a replay
    num_unverified: int = 0  # groups that were trained on without one,
    steps: list[int] = dataclasses.field(default_factory=list)  # in these steps


class ServerRecords:
    """The registered servers of a run, and how many of the groups that they signed passed a replay, or failed one."""

    def __init__(self, keys: Collection[str], max_rejections: int, *, min_rate: float, invited_rate: float):
        self.keys = frozenset(keys)  # public, in hex
        self.max_rejections, self._min_rate = max_rejections, min_rate
        self._given = check_rate.HALF_AT * (1 / invited_rate - 1)  # as an invited worker
        self._records = {key: _Record() for key in self.keys}

    def is_banned(self, key: str) -> bool:
        """Returns True if workers must not use this server any more."""
        return key in self.keys and self._records[key].num_rejected >= self.max_rejections

    def of(self, rollouts: Sequence[rollout_lib.Rollout]) -> str:
        """Returns the key of the registered server that all samples of a group name, or ""."""
        return responsibility.server_of(rollouts, self.keys)

    def rate(self, rollouts: Sequence[rollout_lib.Rollout]) -> float:
        """Returns the probability with which this group must be verified for its server's sake; 0 without a server."""
        if not (server := self.of(rollouts)):
            return 0.0
        record = self._records[server]
        if record.num_rejected:
            return 1.0
        return check_rate.rate(check_rate.reputation(record.num_verified + self._given), self._min_rate)

    def verified(self, rollouts: Sequence[rollout_lib.Rollout]) -> None:
        """Records that a group passed a replay."""
        if server := self.of(rollouts):
            self._records[server].num_verified += 1

    def trained_unverified(self, rollouts: Sequence[rollout_lib.Rollout], step: int) -> None:
        """Records that batch `step`, the newest, contains this group, and nobody verified it."""
        if server := self.of(rollouts):
            record = self._records[server]
            record.num_unverified += 1
            record.steps = sorted({*record.steps, step})

    def rejected(self, server: str) -> None:
        """Records that a group failed by the fault of `server`."""
        self._records[server].num_rejected += 1

    def reveal(self, server: str) -> tuple[int, list[int]]:
        """Returns (number of unverified groups of `server` that were trained on, their steps), and forgets both."""
        record = self._records[server]
        found = record.num_unverified, record.steps
        record.num_unverified, record.steps = 0, []
        return found

    def state(self) -> dict[str, list]:
        """Returns all marks as plain JSON, for `restore`."""
        return {key: list(dataclasses.asdict(one).values()) for key, one in self._records.items() if one != _Record()}

    def restore(self, state: Mapping[str, Sequence]) -> None:
        """Sets the marks to those that `state` returned earlier."""
        for key, (num_rejected, num_verified, num_unverified, steps) in state.items():
            if key in self.keys:
                self._records[key] = _Record(num_rejected, num_verified, num_unverified, list(steps))

    def remember(self, rejections: Mapping[str, int]) -> None:
        """Sets the numbers of rejected groups to those that the ledger shows, if these are larger."""
        for key in self.keys & rejections.keys():
            self._records[key].num_rejected = max(self._records[key].num_rejected, rejections[key])
