"""The evidence against all workers of a run: one sequential test per worker, fed with every checked rollout.

A registered server that vouches for a group (rl/verification/responsibility.py) has a test of its own in place of the worker's. Its
flag is for people and refuses nothing: workers choose which samples they hand in with its signature, after they have seen them.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.protocol import task_schedule
from rl.verification import checks, peers, responsibility, seen_set, sequential_test


class EvidenceLog:
    """The evidence that workers cheat: one sequential test per worker, which adds up deviations over rollouts. Thread-safe.

    Args:
      bands: tolerance bands (largest mean deviations of honest workers); None: replays are ignored, only claims count.
      count_once: ignore a sample that was added before. An orchestrator repeats a group that became stale, was rejected for
        another member, or was lost in a restart; its sampling noise, and so its evidence, is the same.
      servers: public keys of the servers that answer for the samples they sign.
      open_steps: steps after which the groups of a step are over (`task_schedule.num_open_steps`).
      on_flagged: called with a line for people on each server that is flagged.
    """

    def __init__(
        self,
        bands: sequential_test.Bands | None,
        *,
        count_once: bool = False,
        servers: Collection[str] = (),
        open_steps: int = peers.OPEN_STEPS,
        on_flagged: Callable[[str], None] = lambda line: None,
    ):
        self._bands, self._count_once, self._servers = bands, count_once, servers
        self._lock = threading.Lock()
        self._open_steps, self._on_flagged, self._told = open_steps, on_flagged, set()
        self._seen = self._nothing_seen()
        self._peers = peers.Peers(open_steps)
        self.tests: dict[str, sequential_test.SequentialTest] = {}

    @classmethod
    def of(
        cls, config, bands: sequential_test.Bands | None, *, servers: Collection[str] = (), **options
    ) -> "EvidenceLog":
        """Returns the log of a run by its resolved config: of `servers` in addition to `topology.server_keys`; `options` as above."""
        answering = frozenset({*config.topology.server_keys, *servers})
        return cls(bands, servers=answering, open_steps=task_schedule.num_open_steps(config), **options)

    def add_claims(self, rollouts: Sequence[rollout_lib.Rollout]) -> list[checks.Verdict]:
        """Adds the claimed log-probabilities of whole groups to their workers' tests. Returns "statistics" for rollouts of a flagged cheat, else OK."""
        rollouts, groups = self.attributed(rollouts), collections.defaultdict(list)
        for rollout in rollouts:
            groups[rollout.step, rollout.task.group, rollout.worker].append(rollout)
        with self._lock:
            for (step, _, _), group in sorted(groups.items()):
                self._peers.add(group)
                for worker, ratio_K in self._peers.bets(step):
                    self._test(worker).add_peers(ratio_K)
        out = []
        for rollout, y_N in zip(rollouts, checks.exponential_noise(rollouts), strict=True):
            ratio_K = sequential_test.claims_ratio(y_N) * (rollout.temperature > 0)
            with self._lock:
                if self._mark("claims", rollout):
                    self._test(rollout.worker).add_claims(ratio_K)
                out.append(self._verdict(rollout.worker))
        return out

    def add_verified(self, rollouts: Sequence[rollout_lib.Rollout]) -> None:
        """Records that a replay, here or elsewhere, accepted these samples of one group: others' claims are compared with theirs."""
        first = self.attributed(rollouts)[0]
        with self._lock:
            self._peers.verify(first)

    def add_replays(self, group: Sequence[tuple[rollout_lib.Rollout, sequential_test.Evidence]]) -> None:
        """Adds accepted replays of one node's samples of one group (`attributed`) to its test, if this log has bands."""
        worker = group[0][0].worker
        with self._lock:
            new = [evidence for rollout, evidence in group if self._mark("replay", rollout)]
            if self._bands is not None and new:
                self._test(worker).add(new)

    def attributed(self, rollouts: Sequence[rollout_lib.Rollout]) -> list[rollout_lib.Rollout]:
        """Returns the rollouts with the node that answers for each as its `worker`: the one server of its whole group, or its worker."""
        groups = collections.defaultdict(list)
        if not self._servers:
            return list(rollouts)
        for rollout in rollouts:
            groups[rollout.step, rollout.task.group, rollout.worker].append(rollout)
        nodes = {name: responsibility.server_of(group, self._servers) for name, group in groups.items()}
        named = [(r, nodes[r.step, r.task.group, r.worker]) for r in rollouts]
        return [dataclasses.replace(r, worker=server) if server else r for r, server in named]

    def verdict(self, worker: str) -> checks.Verdict:
        """Returns "statistics" if the worker is flagged as a cheat, else OK."""
        with self._lock:
            return self._verdict(worker)

    def states(self, workers: Iterable[str]) -> dict[str, dict]:
        """Returns {worker: its sequential test as plain JSON} of these workers, for `restore`. Workers without a test are left out."""
        with self._lock:
            return {worker: self.tests[worker].state() for worker in workers if worker in self.tests}

    def forget(self, workers: Iterable[str]) -> None:
        """Removes the sequential tests of these workers; their evidence starts again from nothing."""
        with self._lock:
            for worker in workers:
                self.tests.pop(worker, None)

    def state(self, after: int) -> dict:
        """Returns all tests ("records") and the counted samples of steps after `after` ("counted") as plain JSON for `restore`."""
        with self._lock:
            tests = {worker: test.state() for worker, test in self.tests.items()}
            counted = [[step, *entry] for step, entry in sorted(self._seen) if step > after]
            return {"records": tests, "counted": counted, "groups": self._peers.state()}

    def restore(self, records: dict[str, dict], counted: Iterable[Sequence] = (), groups: dict | None = None) -> None:
        """Replaces all tests by `records` (from `states` or `state`), and the samples and open groups so far by those of `state`."""
        with self._lock:
            if groups is not None:
                self._peers = peers.Peers.restored(groups, self._open_steps)
            self.tests = {w: sequential_test.SequentialTest.restored(self._bands, s) for w, s in records.items()}
            self._seen = self._nothing_seen()
            for step, *entry in counted:
                self._seen.add(step, tuple(entry))

    def _nothing_seen(self) -> seen_set.SeenSet:
        return seen_set.SeenSet(max(16, self._open_steps))

    def _mark(self, stream: str, rollout: rollout_lib.Rollout) -> bool:
        """Marks a rollout's sample as counted. Returns False if it was counted before. Without `count_once`, returns True and marks nothing."""
        if not self._count_once:
            return True
        item = rollout.step, (stream, rollout.worker, rollout.task.group, rollout.number)
        if item in self._seen:
            return False
        self._seen.add(*item)
        return True

    def _test(self, worker: str) -> sequential_test.SequentialTest:
        return self.tests.setdefault(worker, sequential_test.SequentialTest(self._bands))

    def _verdict(self, worker: str) -> checks.Verdict:
        flag = self.tests[worker].flag if worker in self.tests else None
        if worker in self._servers:
            if flag and worker not in self._told:
                self._told.add(worker)
                found = f"server {worker[:16]} or the workers that use it may cheat, by statistics over their groups: {flag}"
                self._on_flagged(f"{found}; replay samples that you request from it, or remove its key")
            return checks.OK
        return checks.Verdict("statistics", flag) if flag else checks.OK
