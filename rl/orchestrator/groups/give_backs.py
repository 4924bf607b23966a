"""Recognizes groups that no worker can make, such as those of an environment whose options are wrong: the run would wait for them for ever.

1. A worker that gives a group back has reported the cause before (`registry.Report.problem`). Causes of environments begin with
   registry.OF_ENVIRONMENT; those of servers, networks, and disks do not, and pass.
2. The first time that a worker with a record reports a cause, a line for people names it.
3. A group that was given back `LEAST` times in `PATIENCE_S` or more, by each active worker (or by `WORKERS` of them) with one and the same cause,
   is hopeless.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection

from rl.orchestrator.groups import queue_entry
from rl.protocol import registry

LEAST, PATIENCE_S = 4, 8.0  # a service that an environment asks may be away for a moment
WORKERS = 5
MAX_CAUSES = 20  # that are printed


@dataclasses.dataclass
class GiveBacks:
    """The causes of groups that workers gave back. The caller has the lock."""

    on_notice: Callable[[str], None]
    _printed: set[str] = dataclasses.field(default_factory=set)
    # (group, normalized cause) -> (the first time, worker -> times)
    _times: dict[tuple[queue_entry.Key, str], tuple[float, collections.Counter[str]]] = dataclasses.field(
        default_factory=dict
    )

    def heard(self, worker: str, problem: str) -> None:
        """Prints the problem that a worker reports, if it is new."""
        if problem and _plain(problem) not in self._printed and len(self._printed) < MAX_CAUSES:
            self._printed.add(_plain(problem))
            self.on_notice(f"worker {worker[:16]}: {problem}")

    def returned(self, worker: str, key: queue_entry.Key, problem: str, active: Collection[str], now_s: float) -> str:
        """Records a give-back; returns the cause if the group is hopeless, else "". `active` are the workers that may lease it."""
        if not problem.startswith(registry.OF_ENVIRONMENT):
            return ""
        first_s, found = self._times.setdefault((key, _plain(problem)), (now_s, collections.Counter()))
        found[worker] += 1
        is_everywhere = not set(active) - found.keys() or len(found) >= WORKERS
        is_long = found.total() >= LEAST and now_s - first_s >= PATIENCE_S
        return problem if is_everywhere and is_long else ""


def _plain(problem: str) -> str:
    """Returns the problem without its numbers, which differ from task to task."""
    return re.sub(r"\d+", "0", problem)
