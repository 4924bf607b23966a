"""What a run knows of its workers: who lets leases expire, whose rollouts were refused, who is under suspicion.

1. A refused submission counts against the worker that brought it. After `max_refusals` it is barred: it gets no more work.
2. One refused by the replay makes its worker a suspect as well: from then on everything it brings is replayed.
3. A lease that runs out halves what its worker may hold at a time, and it does not get the same group again while somebody else
   is there to take it. A delivered group doubles that again.

Keys are free where a run invites anybody, so this bounds what one key can do, not what a thousand can: a run among strangers
names its workers (`topology.workers`). Who only asks leaves no trace once it is gone. What is held against a worker goes into
the checkpoint (`state`), or whoever gains by a restart would see to one. Used under the orchestrator's lock.
"""

import collections
import dataclasses

MOST_HALVINGS = 12
MIN_PRUNED = 4096  # workers


@dataclasses.dataclass
class _Worker:
    num_refused: int = 0
    is_suspect: bool = False
    num_halvings: int = 0
    asked_s: float = float("-inf")


class Standing:
    """Of all workers of a run. `lease_s`: who asked for work within this time is there."""

    def __init__(self, *, max_refusals: int, lease_s: float):
        self._max_refusals, self._lease_s = max_refusals, lease_s
        self._workers: dict[str, _Worker] = collections.defaultdict(_Worker)
        self._expired_with: dict[tuple, str] = {}  # group -> who let it expire last
        self._prune_at = MIN_PRUNED

    def asked(self, worker: str, now_s: float) -> None:
        self._workers[worker].asked_s = now_s
        if len(self._workers) > self._prune_at:
            for name, other in list(self._workers.items()):
                if not _is_marked(other) and now_s - other.asked_s > self._lease_s:
                    del self._workers[name]
            self._prune_at = 2 * len(self._workers) + MIN_PRUNED

    def state(self) -> dict:
        """Plain JSON of what is held against whom, for `restore`."""
        marked = {name: worker for name, worker in self._workers.items() if _is_marked(worker)}
        return {
            "workers": {name: [w.num_refused, w.is_suspect, w.num_halvings] for name, w in marked.items()},
            "expired_with": [[*key, worker] for key, worker in self._expired_with.items()],
        }

    def restore(self, state: dict) -> None:
        for name, marks in state["workers"].items():
            self._workers[name] = _Worker(*marks)
        self._expired_with = {tuple(key): worker for *key, worker in state["expired_with"]}

    def room(self, worker: str, num_held: int, num_groups: int, now_s: float) -> int:
        """How many more of `num_groups` a worker may hold; where it is alone, as many as it likes."""
        if self.is_barred(worker):
            return 0
        halvings = self._workers[worker].num_halvings if self.others(worker, now_s) else 0
        return max(1, num_groups >> halvings) - num_held

    def may_take(self, worker: str, key: tuple, now_s: float) -> bool:
        return self._expired_with.get(key) != worker or not self.others(worker, now_s)

    def expired(self, worker: str, key: tuple) -> None:
        self._workers[worker].num_halvings = min(self._workers[worker].num_halvings + 1, MOST_HALVINGS)
        self._expired_with[key] = worker

    def delivered(self, worker: str, key: tuple) -> None:
        self._workers[worker].num_halvings = max(self._workers[worker].num_halvings - 1, 0)
        self._expired_with.pop(key, None)

    def refused(self, worker: str, *, by_replay: bool) -> None:
        self._workers[worker].num_refused += 1
        self._workers[worker].is_suspect |= by_replay

    def is_suspect(self, worker: str) -> bool:
        return self._workers[worker].is_suspect

    def is_barred(self, worker: str) -> bool:
        return self._workers[worker].num_refused >= self._max_refusals

    def num_barred(self, now_s: float) -> int:
        """Of those who are there."""
        return sum(self.is_barred(name) and now_s - w.asked_s <= self._lease_s for name, w in self._workers.items())

    def others(self, worker: str, now_s: float) -> bool:
        """Whether anybody else is there who may work."""
        return any(
            name != worker and not self.is_barred(name) and now_s - other.asked_s <= self._lease_s
            for name, other in self._workers.items()
        )


def _is_marked(worker: _Worker) -> bool:
    return bool(worker.num_refused or worker.is_suspect or worker.num_halvings)
