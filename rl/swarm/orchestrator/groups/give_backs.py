"""Recognizes environments of which no worker can make a group, such as one whose options are wrong: the run would wait for them forever.

1. A worker that gives a group back names the cause. Causes of environments begin with registry.OF_ENVIRONMENT; those of servers,
   networks, and disks do not, and pass.
2. The first time that a worker with a record reports a cause, a line for people names it.
3. An environment is hopeless if groups of it were given back `LEAST` times, by each active worker that was invited (or by `WORKERS` of
   them) with one and the same cause, for `PATIENCE_S` without a finished group. One that worked before may be away for longer (`AWAY_S`); so long a
   single group of it may fail, too.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection

from rl.protocol import registry
from rl.swarm.orchestrator.groups import queue_entry

LEAST, PATIENCE_S, AWAY_S = 4, 8.0, 300.0  # a service that an environment asks may be away for a moment, or start again
WORKERS = 5
MAX_CAUSES = 20  # that are printed
MAX_TIMES = 1_000  # that are kept: of groups which were given back and made later, too


@dataclasses.dataclass
class GiveBacks:
    """Counts why workers gave groups back. Has no clock and no lock; `on_notice` gets lines for people."""

    on_notice: Callable[[str], None]
    _printed: set[str] = dataclasses.field(default_factory=set)
    # (environment or group, normalized cause) -> (the first time, worker -> times)
    _times: dict[tuple[str | queue_entry.Key, str], tuple[float, collections.Counter[str]]] = dataclasses.field(
        default_factory=dict
    )
    _worked: set[str] = dataclasses.field(default_factory=set)  # environments of finished groups

    def heard(self, worker: str, problem: str) -> None:
        """Prints the problem that a worker reports, if it is new."""
        if problem and _plain(problem) not in self._printed and len(self._printed) < MAX_CAUSES:
            self._printed.add(_plain(problem))
            self.on_notice(f"worker {worker[:16]}: {problem}")

    def finished(self, env: str) -> None:
        """Records that a worker has made a group of an environment."""
        self._worked.add(env)
        self._times = {name: found for name, found in self._times.items() if name[0] != env}

    def is_hopeless(
        self, worker: str, env: str, key: queue_entry.Key, problem: str, active: Collection[str], now_s: float
    ) -> bool:
        """Records that a group came back; True if its environment failed for one reason on enough of the `active` workers, for long enough."""
        if not problem.startswith(registry.OF_ENVIRONMENT):
            return False
        patience_s, is_over = AWAY_S if env in self._worked else PATIENCE_S, False
        for name in (env, key):
            first_s, found = self._times.setdefault((name, _plain(problem)), (now_s, collections.Counter()))
            while len(self._times) > MAX_TIMES:
                del self._times[next(iter(self._times))]
            found[worker] += 1
            is_everywhere = not set(active) - found.keys() or len(found) >= WORKERS
            is_over |= is_everywhere and found.total() >= LEAST and now_s - first_s >= patience_s
        return is_over


def _plain(problem: str) -> str:
    """Returns the problem without its numbers, which differ from task to task."""
    return re.sub(r"\d+", "0", problem)
