"""Replays quarantined groups in this process, in one thread, as many together as fit: a replay of 8 groups costs little more than of 1.

The earliest batch comes first, since the learner waits for it. Decisions are signed with the run's key, like those of a validator
elsewhere (verdict_collector.py).
"""

import threading
from collections.abc import Callable, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.orchestrator import group_queue, verdict_source
from rl.protocol import verdict as verdict_lib
from rl.verification import checks, verifier

Check = Callable[[Sequence[Sequence[rollout_lib.Rollout]]], list[checks.Verdict]]
Waiting = tuple[group_queue.Key, Sequence[rollout_lib.Rollout], str]  # a group, its rollouts, their digest


class Replayer:
    """A `VerdictSource` in this process. `check` replays groups and returns a verdict on each; `key` is the run's."""

    def __init__(self, check: Check, key: rollout_lib.WorkerKey):
        self._check, self._key = check, key
        self.validators: Sequence[str] = [key.worker]
        self.quorum = 1
        self._changed = threading.Condition()
        self._waiting: list[Waiting] = []
        self._num_running, self._is_closed = 0, False

    def start(self, decide: verdict_source.Decide, fail: Callable[[BaseException], None]) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._work, args=(decide, fail), name="validator", daemon=True)
        self._thread.start()

    def ask(self, key: group_queue.Key, rollouts: Sequence[rollout_lib.Rollout], digest: str) -> None:
        """Queues the replay of a group; returns immediately."""
        with self._changed:
            self._waiting.append((key, rollouts, digest))
            self._changed.notify_all()

    def flush(self) -> None:
        """Blocks until all groups are decided, or the thread has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not (self._waiting or self._num_running))

    def notice(self) -> str:
        """Returns "": this process always answers, or the run fails."""
        return ""

    def counts(self) -> dict[str, float]:
        """Returns {}: the orchestrator counts decisions itself."""
        return {}

    def close(self) -> None:
        """Cancels waiting replays and waits for the running one."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self, decide: verdict_source.Decide, fail: Callable[[BaseException], None]) -> None:
        try:
            while True:
                with self._changed:
                    self._num_running = 0
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_closed or self._waiting)
                    if self._is_closed:
                        return
                    batch = take_batch(self._waiting, verifier.MAX_REPLAY_ROWS, verifier.MAX_REPLAY_TOKENS)
                    self._num_running = len(batch)
                self._replay(batch, decide)
        except BaseException as error:  # ends the run: no other code reads the result of this thread
            fail(error)
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def _replay(self, batch: list[Waiting], decide: verdict_source.Decide) -> None:
        verdicts = self._check([rollouts for _, rollouts, _ in batch])
        for (key, _, digest), verdict in zip(batch, verdicts, strict=True):
            if verdict.reason == "weights":  # of a published version: our own fault
                problem = f"the validator cannot replay group {'/'.join(map(str, key))}: {verdict}"
                raise ValueError(f"{problem}; check the published weights of the run")
            fields = digest, verdict.accepted, verdict.reason, verdict.detail
            signed = verdict_lib.SignedVerdict(self._key.worker, *key, *fields).sign(self._key)
            decide(key, digest, verdict, [signed])


def take_batch(waiting: list[Waiting], max_rows: int, max_tokens: int) -> list[Waiting]:
    """Removes from `waiting` the groups to replay next, and returns them: of the earliest steps, at least one, as many as fit."""
    waiting.sort(key=lambda one: one[0][1])
    num_groups, num_rows, longest = 0, 0, 0
    for _, rollouts, _ in waiting:
        num_rows += len(rollouts)
        longest = max(longest, *(len(rollout.tokens) for rollout in rollouts))
        if num_groups and (num_rows > max_rows or num_rows * longest > max_tokens):
            break
        num_groups += 1
    batch = waiting[:num_groups]
    del waiting[:num_groups]
    return batch
