"""The reputation of a run's workers: the rate at which their groups are verified, expired leases, rejected groups, bans.

1. A worker's groups are verified at the rate max(min_rate, 1 - r), where r = n / (n + HALF_AT) after n of its groups passed. A
   worker that forges at rate q is caught after (1 - q) / q forged groups on average, and q is at least HALF_AT / (n + HALF_AT): so it
   gets one forged group past us per HALF_AT groups that it did honestly and we verified, and a new key none. The last is also why
   many keys gain nothing. An invited worker starts as if it had a record that gives it `invited_rate`.
2. A failed check makes a worker a suspect: its rate is 1 from then on. `reveal` names the steps trained on its unverified groups.
3. Every rejected group counts against its worker. After `max_rejections` the worker is banned: it gets no more work.
4. An expired lease halves the number of groups that the worker may lease. It does not get that group again while another worker
   is active. Each accepted group doubles the number again.

All of it goes into the checkpoint; otherwise a worker could gain by provoking a restart.
"""

import collections
import dataclasses
from collections.abc import Collection

HALF_AT = 32  # verified groups without a fault that bring a worker's rate from 1 to 1/2, as in rl/ledger/balances.py
MOST_HALVINGS = 12
MIN_PRUNED = 4096  # workers


@dataclasses.dataclass
class _Worker:
    num_rejected: int = 0
    is_suspect: bool = False
    num_halvings: int = 0
    num_verified: int = 0  # groups that passed a replay
    num_unverified: int = 0  # groups that were trained on without one,
    steps: list[list[int]] = dataclasses.field(default_factory=list)  # in these steps: [first, last] of each range
    seen_s: float = float("-inf")

    @property
    def marks(self) -> list:
        """The fields that a checkpoint keeps, in their order; `steps` is copied."""
        counts = [self.num_rejected, self.is_suspect, self.num_halvings, self.num_verified, self.num_unverified]
        return [*counts, [list(ends) for ends in self.steps]]

    @property
    def is_marked(self) -> bool:
        return any(self.marks)


class WorkerHealth:
    """The marks against each worker, which decide how many groups it may lease. The caller provides the lock and the time.

    A worker is active if it requested work in the last `lease_s` seconds, and banned after `max_rejections` rejected groups.
    `invited` are the keys of invited workers.
    """

    def __init__(
        self,
        max_rejections: int,
        lease_s: float,
        *,
        min_rate: float,
        invited_rate: float,
        invited: Collection[str] = (),
    ):
        self._max_rejections, self._lease_s = max_rejections, lease_s
        self._min_rate, self._invited, self._given = min_rate, frozenset(invited), HALF_AT * (1 / invited_rate - 1)
        self._workers: dict[str, _Worker] = collections.defaultdict(_Worker)
        self._expired_with: dict[tuple, str] = {}  # group -> the worker whose lease on it expired last
        self._prune_at = MIN_PRUNED

    def seen(self, worker: str, now_s: float) -> None:
        """Records that a worker requested work now; sometimes forgets inactive workers without marks."""
        self._workers[worker].seen_s = now_s
        if len(self._workers) > self._prune_at:
            for name, other in list(self._workers.items()):
                if not other.is_marked and not self._is_active(other, now_s):
                    del self._workers[name]
            self._prune_at = 2 * len(self._workers) + MIN_PRUNED

    def state(self) -> dict:
        """Returns all marks against workers as plain JSON, for `restore`."""
        marks = {name: worker.marks for name, worker in self._workers.items() if worker.is_marked}
        return {"workers": marks, "expired_with": [[*key, worker] for key, worker in self._expired_with.items()]}

    def restore(self, state: dict) -> None:
        """Sets the marks against workers to those that `state` returned earlier, maybe in a version with fewer fields."""
        for name, marks in state["workers"].items():
            self._workers[name] = _Worker(*marks)
        self._expired_with = {tuple(key): worker for *key, worker in state["expired_with"]}

    def room(self, worker: str, num_held: int, num_groups: int, now_s: float) -> int:
        """Returns how many more of `num_groups` unfinished groups a worker with `num_held` of them may lease; 0 if it is banned."""
        if self.is_banned(worker):
            return 0
        one = self._workers.get(worker, _Worker())  # a key that only asks leaves no trace
        halvings = one.num_halvings if self.has_others(worker, now_s) else 0
        return max(1, num_groups >> halvings) - num_held

    def may_lease(self, worker: str, key: tuple, now_s: float) -> bool:
        """Returns False if the last lease of this group expired with this worker, and another worker is active."""
        return self._expired_with.get(key) != worker or not self.has_others(worker, now_s)

    def expired(self, worker: str, key: tuple) -> None:
        """Records that a worker's lease on a group expired, which halves the number of groups that the worker may have."""
        self._workers[worker].num_halvings = min(self._workers[worker].num_halvings + 1, MOST_HALVINGS)
        self._expired_with[key] = worker

    def accepted(self, worker: str, key: tuple) -> None:
        """Records that a group of this worker was accepted, which undoes one halving."""
        self._workers[worker].num_halvings = max(self._workers[worker].num_halvings - 1, 0)
        self._expired_with.pop(key, None)

    def rate(self, worker: str) -> float:
        """Returns the probability with which a group of this worker must be verified before it is trained on."""
        one = self._workers.get(worker, _Worker())
        if one.is_suspect or self.is_banned(worker):
            return 1.0
        record = one.num_verified + (self._given if worker in self._invited else 0)
        return max(self._min_rate, HALF_AT / (HALF_AT + record))

    def verified(self, worker: str) -> None:
        """Records that a group of this worker passed a replay."""
        self._workers[worker].num_verified += 1

    def trained_unverified(self, worker: str, step: int) -> None:
        """Records that batch `step`, the newest, contains a group of this worker that was not verified."""
        one = self._workers[worker]
        one.num_unverified += 1
        if one.steps and step <= one.steps[-1][1] + 1:
            one.steps[-1][1] = step
        else:
            one.steps.append([step, step])

    def rejected(self, worker: str, *, is_fault: bool) -> None:
        """Records that a group of this worker was rejected; a failed check (`is_fault`) makes the worker a suspect."""
        self._workers[worker].num_rejected += 1
        self._workers[worker].is_suspect |= is_fault

    def reveal(self, worker: str) -> tuple[int, list[int]]:
        """Returns (number of unverified groups of this worker that were trained on, their steps), and forgets both: to be named once."""
        one = self._workers[worker]
        num, steps = one.num_unverified, [step for first, last in one.steps for step in range(first, last + 1)]
        one.num_unverified, one.steps = 0, []
        return num, steps

    def ban(self, worker: str) -> None:
        """Bans a worker that was ejected before, however its record reads now."""
        self._workers[worker].num_rejected = max(self._workers[worker].num_rejected, self._max_rejections)

    def is_banned(self, worker: str) -> bool:
        """Returns True if this worker gets no more work, because too many of its groups were rejected."""
        return self._workers.get(worker, _Worker()).num_rejected >= self._max_rejections

    def num_banned(self, now_s: float) -> int:
        """Returns the number of active workers that are banned."""
        return sum(self.is_banned(name) and self._is_active(w, now_s) for name, w in self._workers.items())

    def has_others(self, worker: str, now_s: float) -> bool:
        """Returns True if a worker other than this one is active and not banned."""
        active = (name for name, other in self._workers.items() if name != worker and self._is_active(other, now_s))
        return not all(map(self.is_banned, active))

    def _is_active(self, worker: _Worker, now_s: float) -> bool:
        return now_s - worker.seen_s <= self._lease_s
