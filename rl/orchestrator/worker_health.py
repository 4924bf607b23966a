"""The reputation of a run's workers: expired leases, rejected groups, suspicion, bans.

1. Every rejected group counts against its worker. After `max_rejections` the worker is banned: it gets no more work.
2. A group rejected by the replay also makes its worker a suspect: from then on all of its groups are replayed.
3. An expired lease halves the number of groups that the worker may lease. It does not get that group again while another worker
   is active. Each accepted group doubles the number again.

Keys are free where a run accepts any worker. So this limits one key, not a thousand keys: a run with unknown participants
names its workers (`topology.workers`). Marks go into the checkpoint; otherwise a worker could gain by provoking a restart.
"""

import collections
import dataclasses

MOST_HALVINGS = 12
MIN_PRUNED = 4096  # workers


@dataclasses.dataclass
class _Worker:
    num_rejected: int = 0
    is_suspect: bool = False
    num_halvings: int = 0
    seen_s: float = float("-inf")

    @property
    def is_marked(self) -> bool:
        return bool(self.num_rejected or self.is_suspect or self.num_halvings)


class WorkerHealth:
    """The marks against each worker, which decide how many groups it may lease. The caller provides the lock and the time.

    A worker is active if it requested work in the last `lease_s` seconds, and banned after `max_rejections` rejected groups.
    """

    def __init__(self, max_rejections: int, lease_s: float):
        self._max_rejections, self._lease_s = max_rejections, lease_s
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
        workers = self._workers.items()
        marks = {name: [w.num_rejected, w.is_suspect, w.num_halvings] for name, w in workers if w.is_marked}
        return {"workers": marks, "expired_with": [[*key, worker] for key, worker in self._expired_with.items()]}

    def restore(self, state: dict) -> None:
        """Sets the marks against workers to those that `state` returned earlier."""
        for name, marks in state["workers"].items():
            self._workers[name] = _Worker(*marks)
        self._expired_with = {tuple(key): worker for *key, worker in state["expired_with"]}

    def room(self, worker: str, num_held: int, num_groups: int, now_s: float) -> int:
        """Returns how many more of `num_groups` unfinished groups a worker with `num_held` of them may lease; 0 if it is banned."""
        if self.is_banned(worker):
            return 0
        halvings = self._workers[worker].num_halvings if self.has_others(worker, now_s) else 0
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

    def rejected(self, worker: str, *, by_replay: bool) -> None:
        """Records that a group of this worker was rejected; a failed replay (`by_replay`) makes the worker a suspect."""
        self._workers[worker].num_rejected += 1
        self._workers[worker].is_suspect |= by_replay

    def is_suspect(self, worker: str) -> bool:
        """Returns True if a group of this worker failed a replay, so that all of its groups must be replayed."""
        return self._workers[worker].is_suspect

    def is_banned(self, worker: str) -> bool:
        """Returns True if this worker gets no more work, because too many of its groups were rejected."""
        return self._workers[worker].num_rejected >= self._max_rejections

    def num_banned(self, now_s: float) -> int:
        """Returns the number of active workers that are banned."""
        return sum(self.is_banned(name) and self._is_active(w, now_s) for name, w in self._workers.items())

    def has_others(self, worker: str, now_s: float) -> bool:
        """Returns True if a worker other than this one is active and not banned."""
        active = (name for name, other in self._workers.items() if name != worker and self._is_active(other, now_s))
        return not all(map(self.is_banned, active))

    def _is_active(self, worker: _Worker, now_s: float) -> bool:
        return now_s - worker.seen_s <= self._lease_s
