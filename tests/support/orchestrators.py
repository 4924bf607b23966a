"""Orchestrators of tests, as seen from within."""

from rl.orchestrator import state as state_lib


def inside(orchestrator) -> state_lib.RunState:
    """The state of a run, to look at while no other thread changes it."""
    with orchestrator.locked as found:
        return found
