"""Orchestrators of tests, as seen from within."""

import collections

from rl.swarm.orchestrator import state as state_lib


def inside(orchestrator) -> state_lib.RunState:
    """The state of a run, to look at while no other thread changes it."""
    with orchestrator.locked as found:
        return found


def marks(orchestrator, worker: str) -> collections.Counter:
    """The marks of a worker, 0 where it has none."""
    with orchestrator.locked as found:
        return collections.Counter(found.health.state()["workers"].get(worker, {}))


def give_record(orchestrator, worker: str, count: int) -> None:
    """Has a stranger deliver `count` groups that are accepted."""
    with orchestrator.locked as found:
        for number in range(count):
            found.health.accepted(worker, ("train", 0, number))
