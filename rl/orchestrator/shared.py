"""The state that the parts of an orchestrator share: leases, submissions, status, and the learner's calls."""

import collections
import dataclasses
import threading

from rl.ledger import run_ledger
from rl.orchestrator import work_share, worker_health
from rl.orchestrator.groups import batches, group_queue
from rl.protocol import timeline


@dataclasses.dataclass(kw_only=True)
class Shared:
    """The groups of a run, the marks of its nodes, and its position. `changed` guards all but the ledger.

    It is notified when a group may be trained on or is open again, when servers have a newer policy, and when the run fails.
    """

    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    queue: group_queue.GroupQueue
    batches: batches.Batches
    health: worker_health.WorkerHealth  # the marks of workers
    servers: worker_health.WorkerHealth  # those of the servers that answer for the samples they sign: invited keys
    share: work_share.WorkShare
    ledger: run_ledger.RunLedger | run_ledger.NoLedger  # gets the events
    # By the end of their metric's name.
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    policy: timeline.Policy = timeline.Policy(0, -1)  # the newest that a server may have
    version: int = -1  # the newest that servers have
    is_ended: bool = False  # the run is over
