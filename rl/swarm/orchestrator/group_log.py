"""The training groups in the log of a run (inference/rollouts/row_log.py): submitted, signed, and checked without weights."""

import itertools
import pathlib
from collections.abc import Collection, Mapping, Sequence

from inference.rollouts import parquet, row_log
from rl.protocol import lease as lease_lib
from rl.protocol import verdict as verdict_lib
from rl.swarm.orchestrator.groups import queue_entry
from rl.swarm.orchestrator.groups.queue_entry import State
from sharding.system import atomic_file


def header(entry: queue_entry.Entry, scores: Mapping[int, Mapping[str, float] | None]) -> dict:
    """Returns all of a submitted group but its rollouts as a JSON object, for `read`; `scores` are the rewards that we computed."""
    named = {"group": entry.group.to_json(), "worker": entry.worker, "digest": entry.digest}
    return named | {"scores": [*scores.items()]}


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


def read(log: row_log.RowLog) -> dict[queue_entry.Key, queue_entry.Entry]:
    """Returns the last record of each group in a log, in the state that a group has when a batch takes it.

    Leaves out records whose rows do not have the digest in their header.
    """
    found = {}
    for step in log.steps():
        for head, rows in log.read(step):
            if verdict_lib.group_digest(rows.rollouts) == head["digest"]:
                entry = queue_entry.Entry(lease_lib.Lease.from_json(head["group"]), State.ELIGIBLE, head["worker"])
                entry.rollouts = sorted(rows.rollouts, key=lambda rollout: rollout.number)
                entry.digest, entry.scores = head["digest"], dict(head["scores"])
                found[entry.group.key] = entry
    return found
