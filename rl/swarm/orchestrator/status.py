"""The status of a run for people: why its learner waits, the values of /metrics, and the counts of rollouts by outcome."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rl.swarm.orchestrator import nodes
from rl.swarm.orchestrator.groups.queue_entry import State
from rl.swarm.orchestrator.state import RunState
from rl.swarm.orchestrator.verdicts import verdict_collector
from sharding.system.logs import role_metrics

COUNTS = """accepted called_back refused checked stale lease_expired lease_void lease_returned unleased spare given_up void_epoch
    server_faults undecided unanswered newcomer unverified trained_unverified_of_cheats""".split()
ENVIRONMENT_COUNTS = ("groups", "signal", "rollouts", "errors")
MAX_WORKERS = 32  # that have metrics of their own


@dataclasses.dataclass
class Status:
    """The status of a run from the parts of its orchestrator."""

    nodes: nodes.Nodes
    verdicts: verdict_collector.VerdictCollector
    # Rollouts by outcome, until the counts of the state were taken last.
    totals: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # Sums over the batches since this process started: count -> environment's name in the config -> number.
    environments: dict[str, collections.Counter[str]] = dataclasses.field(
        default_factory=lambda: {name: collections.Counter() for name in ENVIRONMENT_COUNTS}
    )

    def waiting(self, state: RunState, name: str, progress: tuple[int, int], now_s: float, left_s: float = 0.0) -> str:
        """Returns why the batch or evaluation `name` waits, as a line for people. `progress` is (groups that it has, groups that it needs).

        `left_s` is an estimate of the seconds that it still needs; 0: none.
        """
        rate, loading = self.nodes.tokens_per_s(), state.policy.version > state.version
        count, banned, servers = state.queue.count(), state.health.num_banned(now_s), self.nodes.notice()
        nodes = self.nodes.counts()
        num_silent = nodes["worker_suspect"] + nodes["worker_dead"]
        return (
            f"{name} has {progress[0]} of {progress[1]} groups"
            f"{f', {rate:.0f} tokens/s' if rate else ''}{f', about {left_s:.0f} s left' if left_s else ''}; "
            f"in the queue {count[State.OPEN]} wait for a worker, {count[State.LEASED]} are leased, "
            f"{count[State.SUBMITTED]} are being checked, {count[State.QUARANTINED]} wait for a verdict"
            f"{f'; the inference servers are loading policy {state.policy}' if loading and not servers else ''}"
            f"{f'; silent workers, whose leases end after topology.lease_s: {num_silent}' if num_silent else ''}"
            f"{f'; workers banned after trust.max_attempts rejections: {banned}' if banned else ''}"
            f"{f'; {silent}' if (silent := self.verdicts.notice()) else ''}"
            f"{f'; no server can be used: {servers}' if servers else ''}"
        )

    def values(self, state: RunState) -> role_metrics.Values:
        """Returns the values of /metrics but those of nodes."""
        count = state.queue.count()
        return {
            "groups": {stage.name.lower(): count[stage] for stage in State},
            "policy_version": state.version,
            "rollouts_total": self.totals + state.counts,
            "drops_total": dict(state.queue.drops),
            **{f"environment_{name}_total": dict(found) for name, found in self.environments.items()},
            **{f"worker_{name}": found for name, found in state.health.groups(MAX_WORKERS).items()},
        }

    def add_environments(self, counts: Iterable[Mapping[str, Any]]) -> None:
        """Adds the counts of a batch by environment (`rewards.by_environment`)."""
        for one in counts:
            for name, found in self.environments.items():
                found[one["name"]] += one[name]

    def take_counts(self, state: RunState) -> dict[str, float]:
        """Returns the counts of rollouts since the last call as metrics. A group that is accepted, then replayed, may count twice."""
        counts = dict.fromkeys(COUNTS, 0) | self.verdicts.counts() | dict(state.counts)
        self.totals += state.counts
        state.counts.clear()
        return {f"trust/num_{name}": float(number) for name, number in counts.items()}
