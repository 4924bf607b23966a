"""The state of a run in its orchestrator, and the one lock that guards it.

`with locked as state:` is the only way to the state. Each public method of `Orchestrator`, `Leases`, `Submissions`, and `Nodes` takes the
lock at its door. Where the lock is held, functions get `state` as a parameter.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from rl.protocol import timeline
from rl.protocol.ledger import run_ledger
from rl.swarm.orchestrator import work_share, worker_health
from rl.swarm.orchestrator.groups import batches, give_backs, group_queue, queue_entry

Ledger = run_ledger.RunLedger | run_ledger.NoLedger


@dataclasses.dataclass(kw_only=True)
class RunState:
    """The groups of a run, the marks of its nodes, and its position."""

    queue: group_queue.GroupQueue
    batches: batches.Batches
    health: worker_health.WorkerHealth  # the marks of workers
    servers: worker_health.WorkerHealth  # those of the servers that answer for the samples they sign: invited keys
    share: work_share.WorkShare
    give_backs: give_backs.GiveBacks
    clock: Callable[[], float]  # seconds that never fall
    # By the end of their metric's name.
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    policy: timeline.Policy = timeline.Policy(0, -1)  # the newest that a server may have
    published_s: float = 0.0  # when it was published
    version: int = -1  # the newest that servers have
    left_out: set[str] = dataclasses.field(default_factory=set)  # environments of which no worker can make a group
    # From the log, until the first policy is published.
    logged: dict[queue_entry.Key, queue_entry.Entry] = dataclasses.field(default_factory=dict)
    # The ledger's last batch, maybe not returned yet.
    recorded: dict[int, list[queue_entry.Entry]] = dataclasses.field(default_factory=dict)
    states: dict[int, dict] = dataclasses.field(default_factory=dict)  # of the last two batches, as of their hand-off
    wanted: int | None = None  # the batch that the learner waits for
    # (version, set) -> the state of this evaluation for people
    evaluating: dict[tuple[int, str], Callable[[], str]] = dataclasses.field(default_factory=dict)
    failure: BaseException | None = None  # ends the run
    is_ended: bool = False  # the run is over
    # A group may be trained on or is open again, servers have a newer policy, or the run failed: waiting threads look again.
    has_news: bool = False


class Locked:
    """The state of a run with its lock, which one thread may take several times.

    With it goes what needs no lock: the run's config, its ledger, and the function that gets lines for people.
    """

    def __init__(self, state: RunState, config: Any, ledger: Ledger, on_notice: Callable[[str], None]):
        self.config, self.ledger, self.on_notice = config, ledger, on_notice
        self._state, self._lock = state, threading.RLock()
        self._changed = threading.Condition(self._lock)

    def __enter__(self) -> RunState:
        self._lock.acquire()
        return self._state

    def __exit__(self, *_) -> None:
        self._notify()
        self._lock.release()

    def fail(self, error: BaseException) -> None:
        """Ends the run: waiting and later calls of the learner raise the first such `error`."""
        with self as state:
            state.failure = state.failure or error
            state.has_news = True

    def wait_for(self, condition: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Blocks until `condition()` is true or `timeout_s` has passed; returns whether it became true. Raises the error that ended the run, if any.

        Call it in the `with` block of this object. Other threads may take the lock while it blocks.
        """
        self._notify()
        is_met = self._changed.wait_for(lambda: self._state.failure or condition(), timeout_s)
        if self._state.failure:
            raise self._state.failure
        return bool(is_met)

    def _notify(self) -> None:
        if self._state.has_news:
            self._state.has_news = False
            self._changed.notify_all()
