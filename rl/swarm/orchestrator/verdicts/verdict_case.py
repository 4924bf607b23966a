"""A quarantined group that waits for verdicts, and the record of each validator: pure, the caller provides the time."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.protocol import verdict as verdict_lib
from rl.swarm.orchestrator.groups import queue_entry
from rl.trust.verification import checks
from rl.trust.verification import rules as rules_lib
from sharding.system import retries

Reason = verdict_lib.Reason
# More than these, and than 1 in 20 of its verdicts, exclude a validator: rounding makes honest ones differ now and then.
MAX_CONTRADICTIONS = 3
MAX_DOUBTS = 8  # of rejections by "statistics" alone: more than these, and than 1 in 4
MAX_FAILURES = 3  # of a validator that is up, on one group alone
UNDECIDED = checks.Verdict(Reason.UNDECIDED, "the validators contradict each other")
UNANSWERED = checks.Verdict(Reason.UNANSWERED, "too many validators fail on this group alone")
VOID = (Reason.UNDECIDED, Reason.UNANSWERED)  # no validator may give these reasons
OF_MANY = (Reason.STATISTICS, Reason.NEWCOMER)  # reasons that rest on all groups that a validator happened to see


@dataclasses.dataclass
class Validator:
    """One validator and its record in this run."""

    url: str
    key: str
    pause: retries.Backoff  # after a fault
    free_s: float = -math.inf  # asked again from this time on
    answered_s: float = -math.inf  # last
    failed_alone: set[str] = dataclasses.field(default_factory=set)  # digests of groups, since then
    problem: str = ""  # of the last request; "": it was answered
    num_decided: int = 0
    num_contradictions: int = 0
    num_doubts: int = 0  # contradictions by "statistics"
    is_excluded: bool = False  # not asked again in this run

    @property
    def is_contradictory(self) -> bool:
        """True if it contradicted the quorum too often."""
        is_doubtful = self.num_doubts > max(MAX_DOUBTS, self.num_decided / 4)
        return is_doubtful or self.num_contradictions > max(MAX_CONTRADICTIONS, self.num_decided / 20)


@dataclasses.dataclass
class Case:
    """A group that waits for verdicts."""

    group: queue_entry.Key
    rollouts: Sequence[rollout_lib.Rollout]
    digest: str
    order: list[Validator]
    since_s: float
    verdicts: dict[str, verdict_lib.SignedVerdict] = dataclasses.field(default_factory=dict)  # by key of the validator
    lack_weights: set[str] = dataclasses.field(default_factory=set)  # validators
    # By validator: the first request with it without an answer.
    failed_s: dict[str, float] = dataclasses.field(default_factory=dict)
    num_alone: int = 0  # requests
    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # alone, by validator

    @property
    def name(self) -> str:
        """The group's name for people."""
        return f"group {'/'.join(map(str, self.group))}"

    @property
    def votes(self) -> dict[bool, int]:
        """How many validators that are not excluded accept the group, and how many reject it."""
        voters = (one.key for one in self.order if not one.is_excluded)
        cast = [self.verdicts[key].accepted for key in voters if key in self.verdicts]
        return {accepted: cast.count(accepted) for accepted in (True, False)}

    def wants(self, validator: Validator, quorum: int, now_s: float) -> bool:
        """Returns True if the group should go to `validator` now: it is one of the next in the order, and fewer than `quorum` verdicts agree."""
        able = (one for one in self.order if self._is_open(one) and one.free_s <= now_s)
        return validator in itertools.islice(able, quorum - max(self.votes.values()))

    def void(self, quorum: int) -> checks.Verdict | None:
        """Returns why the group cannot get a quorum any more; None if it can, or if all that it lacks is a validator."""
        votes = self.votes
        if max(votes.values()) + sum(map(self._is_open, self.order)) >= quorum:
            return None
        return UNDECIDED if min(votes.values()) else UNANSWERED if self.failures.total() else None

    def _is_open(self, validator: Validator) -> bool:
        """Returns True if a verdict of this validator may still come."""
        is_able = not validator.is_excluded and self.failures[validator.key] < MAX_FAILURES
        return is_able and validator.key not in self.verdicts


def take_batch(cases: Iterable[Case]) -> list[Case]:
    """Returns the groups to replay together next: at least one, those of the earliest steps first, as many as fit."""
    batch, num_rows, longest = [], 0, 0
    for case in sorted(cases, key=lambda case: case.group[1]):
        num_rows += len(case.rollouts)
        longest = max(longest, *(len(rollout.tokens) for rollout in case.rollouts))
        if batch and (num_rows > rules_lib.MAX_REPLAY_ROWS or num_rows * longest > rules_lib.MAX_REPLAY_TOKENS):
            break
        batch.append(case)
    return batch
