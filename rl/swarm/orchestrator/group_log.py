"""The training groups in the log of a run (inference/rollouts/row_log.py): submitted, signed, and checked without weights."""

import dataclasses
import itertools
import pathlib
from collections.abc import Collection, Mapping, Sequence

from inference.rollouts import parquet, row_log
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease as lease_lib
from rl.protocol import verdict as verdict_lib
from rl.swarm.orchestrator.groups import queue_entry
from rl.swarm.orchestrator.groups.queue_entry import State
from sharding.system import atomic_file


@dataclasses.dataclass(frozen=True)
class LoggedGroup:
    """A group in the log, as `worker` submitted it, with the rewards that we computed."""

    group: lease_lib.Lease
    worker: str
    digest: str
    scores: Mapping[int, Mapping[str, float] | None]
    rollouts: list[rollout_lib.Rollout]

    @classmethod
    def of(cls, entry: queue_entry.Entry, scores: Mapping[int, Mapping[str, float] | None]) -> "LoggedGroup":
        """Returns a submitted group with its scores."""
        return cls(entry.group, entry.worker, entry.digest, scores, entry.rollouts)

    def to_json(self) -> dict:
        """Returns all but the rollouts as a JSON object, for `read`."""
        named = {"group": self.group.to_json(), "worker": self.worker, "digest": self.digest}
        return named | {"scores": [*self.scores.items()]}

    def entry(self, is_verified: bool) -> queue_entry.Entry:
        """Returns the group as an entry of the queue, in the state that it had when a batch took it."""
        entry = queue_entry.Entry(self.group, State.ELIGIBLE, self.worker, digest=self.digest, is_verified=is_verified)
        entry.rollouts, entry.scores = sorted(self.rollouts, key=lambda rollout: rollout.number), self.scores
        return entry


def write_batch(
    log: row_log.RowLog, workdir: pathlib.Path, step: int, taken: Sequence[queue_entry.Entry], kept: Collection[int]
) -> None:
    """Writes the rollouts of a batch as they were signed, from the log of their groups; removes earlier steps that are not `kept`."""
    steps, wanted = {entry.group.step for entry in taken}, {entry.digest for entry in taken}
    records = itertools.chain.from_iterable(map(log.read, steps))
    found = {head["digest"]: rows.table for head, rows in records if head["digest"] in wanted}
    tables = [found[e.digest] if e.digest in found else parquet.to_table(e.rollouts) for e in taken]
    path = workdir / "rollouts" / f"step_{step}" / "accepted.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, parquet.table_bytes(tables), durable=True)
    for old in log.steps():
        if old < step and old not in kept:
            log.remove(old)


def read(log: row_log.RowLog) -> dict[queue_entry.Key, LoggedGroup]:
    """Returns the last record of each group in a log. Leaves out records whose rows do not have the digest in their header."""
    found = {}
    for step in log.steps():
        for head, rows in log.read(step):
            if verdict_lib.group_digest(rows.rollouts) != head["digest"]:
                continue
            group = lease_lib.Lease.from_json(head["group"])
            found[group.key] = LoggedGroup(group, head["worker"], head["digest"], dict(head["scores"]), rows.rollouts)
    return found
