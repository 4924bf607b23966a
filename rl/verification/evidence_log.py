"""The evidence against all workers of a run: one sequential test per worker, fed with every checked rollout."""

import threading
from collections.abc import Iterable, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.verification import checks, seen_set, sequential_test


class EvidenceLog:
    """The sequential tests of all workers; any thread may call it.

    Args:
      bands: of honest means; without them only claims are summed up.
      count_once: ignores a sample that was added before. An orchestrator repeats a group that became stale, whose other
        members were rejected, or that a restart lost; the noise, and so the evidence, is the same.
    """

    def __init__(self, bands: sequential_test.Bands | None, *, count_once: bool = False):
        self._bands, self._count_once = bands, count_once
        self._lock = threading.Lock()
        self._seen = seen_set.SeenSet()
        self.tests: dict[str, sequential_test.SequentialTest] = {}

    def add_claims(self, rollouts: Sequence[rollout_lib.Rollout]) -> list[checks.Verdict]:
        """Adds the claimed log-probabilities, replayed or not. The verdict rejects every rollout of a flagged worker."""
        out = []
        for rollout, y_N in zip(rollouts, checks.exponential_noise(rollouts), strict=True):
            ratio_K = sequential_test.claims_ratio(y_N) * (rollout.temperature > 0)
            with self._lock:
                if self._mark("claims", rollout):
                    self._test(rollout.worker).add_claims(ratio_K)
                out.append(self._verdict(rollout.worker))
        return out

    def add_replay(self, one: checks.Replayed) -> checks.Verdict:
        """Adds a rollout whose replay was accepted. The verdict is as for `add_claims`; without bands it accepts."""
        if self._bands is None:
            return checks.OK
        with self._lock:
            if self._mark("replay", one.rollout):
                self._test(one.rollout.worker).add(checks.evidence(one))
            return self._verdict(one.rollout.worker)

    def states(self, workers: Iterable[str]) -> dict[str, dict]:
        """Returns the tests of those workers that have one, as plain JSON for `restore`."""
        with self._lock:
            return {worker: self.tests[worker].state() for worker in workers if worker in self.tests}

    def forget(self, workers: Iterable[str]) -> None:
        """Removes the tests of these workers."""
        with self._lock:
            for worker in workers:
                self.tests.pop(worker, None)

    def state(self, after: int) -> dict:
        """Returns the evidence so far as plain JSON for `restore`, if rollouts of steps after `after` may be repeated."""
        with self._lock:
            tests = {worker: test.state() for worker, test in self.tests.items()}
            return {"records": tests, "counted": [[step, *entry] for step, entry in sorted(self._seen) if step > after]}

    def restore(self, records: dict[str, dict], counted: Iterable[Sequence] = ()) -> None:
        """Replaces all tests by results of `states`, and the samples that were counted by those of `state`."""
        with self._lock:
            self.tests = {w: sequential_test.SequentialTest.restored(self._bands, s) for w, s in records.items()}
            self._seen = seen_set.SeenSet()
            for step, *entry in counted:
                self._seen.add(step, tuple(entry))

    def _mark(self, stream: str, rollout: rollout_lib.Rollout) -> bool:
        """Marks the sample as counted; returns False if it is not to be counted again."""
        item = rollout.step, (stream, rollout.worker, rollout.task.group, rollout.sample)
        if self._count_once and item in self._seen:
            return False
        self._seen.add(*item)
        return True

    def _test(self, worker: str) -> sequential_test.SequentialTest:
        return self.tests.setdefault(worker, sequential_test.SequentialTest(self._bands))

    def _verdict(self, worker: str) -> checks.Verdict:
        flag = self._test(worker).flag
        return checks.Verdict("statistics", flag) if flag else checks.OK
