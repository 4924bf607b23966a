"""The rewards of groups: those that we recomputed in place of the claims, and the samples that could not be scored."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inference.rollouts import rollout as rollout_lib
from rl.learning.batch import credit as credit_lib
from rl.learning.batch import training_batch
from rl.protocol import curriculum
from rl.swarm.orchestrator.groups import queue_entry


class Rewards:
    """The rewards of a run's groups by `config.rl.score_errors`; `credit` turns them into advantages.

    `first_error` returns the first error of a scorer, or "". `on_notice` gets lines for people.
    """

    def __init__(
        self, config: Any, credit: credit_lib.Credit, first_error: Callable[[], str], on_notice: Callable[[str], None]
    ):
        self._rl, self._credit, self._first_error, self._on_notice = config.rl, credit, first_error, on_notice
        self._num_scored = collections.Counter()  # samples: those that could not be scored, and all

    def of(self, entry: queue_entry.Entry) -> list[rollout_lib.Rollout]:
        """Returns the rollouts of a group with our rewards, without samples that the run leaves out."""
        if entry.group.split != "train" or self._rl.score_errors == "zero":
            return training_batch.rewarded(entry.rollouts, entry.scores)
        failed = training_batch.failed(entry.rollouts, entry.scores)
        return training_batch.rewarded(entry.rollouts, entry.scores, failed, self._rl.min_group)

    def has_signal(self, entry: queue_entry.Entry) -> bool:
        """Returns False for a group whose advantages are all zero."""
        return self._credit.has_signal(self.of(entry))

    def results(self, entries: Sequence[queue_entry.Entry]) -> list[curriculum.Result]:
        """Returns the mean reward of each group, of the first branches of its episodes, in order."""
        found = []
        for entry in sorted(entries, key=lambda one: one.group.group):
            rewards = [one.reward for one in self.of(entry) if one.branch == 0]
            if rewards:
                mean = math.fsum(rewards) / len(rewards)
                found.append(curriculum.Result(entry.group.group, entry.group.env, entry.group.index, mean))
        return found

    def check_scored(self, step: int, taken: Sequence[queue_entry.Entry]) -> dict[str, float]:
        """Returns the metric of samples that the scorer raised for. Raises ValueError if these are more than half of the run's or all of the batch's."""
        num_failed = num_samples = 0
        for entry in taken:
            failed = training_batch.failed(entry.rollouts, entry.scores)
            flags = [one.number in failed for one in entry.rollouts if not one.branch]
            num_failed, num_samples = num_failed + sum(flags), num_samples + len(flags)
        self._num_scored.update(failed=num_failed, all=num_samples)
        if num_failed and self._rl.score_errors != "zero":
            first = self._first_error() or "no process of this run has reported it"
            total = self._num_scored
            if 2 * total["failed"] > total["all"] or num_failed == num_samples:
                found = f"the scorer failed for {total['failed']} of {total['all']} samples of this run, {num_failed} of {num_samples} in batch {step}"
                text = f"{found}; the first error: {first}"
                raise ValueError(f"{text}; correct the environment, or set rl.score_errors = 'zero'")
            left = f"batch {step} leaves out {num_failed} of {num_samples} samples, for which the scorer failed"
            self._on_notice(f"{left} (rl.score_errors); the first error: {first}")
        return {"rollout/score_error_frac": num_failed / max(num_samples, 1)}


def num_given_up(entries: Sequence[queue_entry.Entry]) -> int:
    """Returns the number of samples for which our scorer had no time."""
    return sum(list(entry.scores.values()).count(None) for entry in entries)


def by_environment(
    taken: Sequence[queue_entry.Entry],
    flat: Sequence[queue_entry.Entry],
    has_signal: Callable[[queue_entry.Entry], bool],
    digests: Mapping[str, str],
) -> list[dict]:
    """Returns an object per environment, by name: its groups and rollouts, those of `flat` included, and how many had a signal or an error.

    `digests` has the digest of each environment. A rollout has an error if its scores do, or if our scorer had no time for it. It is
    for the ledger (rl/protocol/ledger/environments.py).
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
