"""Counts the groups and errors of each environment of a batch, for the ledger (rl/ledger/environments.py)."""

from collections.abc import Callable, Mapping, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.orchestrator.groups import queue_entry


def count(
    taken: Sequence[queue_entry.Entry],
    flat: Sequence[queue_entry.Entry],
    has_signal: Callable[[queue_entry.Entry], bool],
    digests: Mapping[str, str],
) -> list[dict]:
    """Returns an object per environment, by name: its groups and rollouts, those of `flat` included, and how many had a signal or an error.

    `digests` has the digest of each environment. A rollout has an error if its scores do, or if our scorer had no time for it.
    """
    found: dict[str, dict] = {}
    for entry, may_teach in (*((entry, True) for entry in taken), *((entry, False) for entry in flat)):
        if not entry.rollouts:
            continue
        name = entry.rollouts[0].task.env
        empty = {"digest": digests.get(name, ""), "groups": 0, "signal": 0, "rollouts": 0, "errors": 0}
        one = found.setdefault(name, {"name": name} | empty)
        episodes = [episode[0] for episode in rollout_lib.episodes(entry.rollouts)]
        one["groups"] += 1
        one["signal"] += may_teach and has_signal(entry)
        one["rollouts"] += len(episodes)
        one["errors"] += sum(_has_error(entry, episode) for episode in episodes)
    return [found[name] for name in sorted(found)]


def _has_error(entry: queue_entry.Entry, rollout: rollout_lib.Rollout) -> bool:
    scores = entry.scores.get(rollout.sample, rollout.rewards)
    return scores is None or scores.get("error", 0.0) > 0
