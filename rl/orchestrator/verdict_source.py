"""The interface between an orchestrator and the replays of its quarantined groups: here (replayer.py) or elsewhere (verdict_collector.py)."""

from collections.abc import Callable, Sequence
from typing import Protocol

from inference.rollouts import rollout as rollout_lib
from rl.orchestrator import group_queue
from rl.protocol import verdict as verdict_lib
from rl.verification import checks

UNDECIDED = checks.Verdict(
    "undecided", "the validators contradict each other"
)  # no fault of the worker: the group is void
# (group, digest of its rollouts, the decision on it, signed verdicts). Without a decision (None), they are only recorded.
Decide = Callable[
    [group_queue.Key, str, checks.Verdict | None, Sequence[verdict_lib.SignedVerdict]],
    None,
]


class VerdictSource(Protocol):
    """Replays quarantined groups, in threads of its own. `quorum` of the `validators` (public keys) decide on a group. It passes decisions to the function given to `start`."""

    validators: Sequence[str]
    quorum: int

    def start(self, decide: Decide, fail: Callable[[BaseException], None]) -> None:
        """Starts the threads; `fail` ends the run with an error that is not a worker's fault. Called once, before the other methods."""
        ...

    def ask(self, key: group_queue.Key, rollouts: Sequence[rollout_lib.Rollout], digest: str) -> None:
        """Queues the replay of a group; returns immediately."""
        ...

    def notice(self) -> str:
        """Returns the reason of a long wait for verdicts, for people, or ""."""
        ...

    def counts(self) -> dict[str, float]:
        """Returns metrics since the last call, by the end of their name."""
        ...

    def close(self) -> None:
        """Cancels waiting replays; waits for running ones in this process."""
        ...
