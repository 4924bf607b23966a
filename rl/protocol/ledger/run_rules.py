"""The rules of a training run's events: nothing was trained on that was neither verified nor trusted, and nothing twice.

1. A worker joins, leases a group of a step, and hands in its rollouts: the submission names their digest.
2. Validators sign verdicts on that digest. They count if the validator was appointed (`appoint`, with the quorum) at that time; until
   the first appointment, the run's own key is the only validator.
3. A batch of step n follows that of step n - 1. Its groups are of step n, or, with any_step in the resume, of any, but neither in a
   batch before nor dropped. Each was `verified` (accepted by a quorum, not refused later) or `trusted`: its worker was invited or has
   a verified group, was not ejected before it handed in the group, and was not caught since. A worker is caught when its group is
   refused after a rejecting verdict. The batch's digest must be that of its groups' submissions.
4. Version n of the policy is published after batch n, once per epoch. A batch takes no group that was leased in another epoch than
   that of the newest version.
5. `naming` lists steps that trained on trusted groups of a worker that was caught later.
6. `resume` starts or continues the run after a checkpoint, and names its key, by which verdicts name the run: the key may be replaced.
   Batches and versions of later steps are void, and open groups are leased again.

Only training groups have rules; those of evaluations ("held_out") are recorded. Times do not matter here.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable

from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import events, task_ranges


@dataclasses.dataclass
class _Group:
    """A training group that no batch has taken: its leaseholders, and its submission with the verdicts on it."""

    holders: set[str] = dataclasses.field(default_factory=set)  # ever
    worker: str = ""  # that submitted
    epoch: int = -1  # that the newest lease pins
    digest: str = ""
    submitted: int = 0  # the number of the submission among all events
    is_refused: bool = False
    is_counted: bool = False  # in the record of the worker
    votes: dict[str, bool] = dataclasses.field(default_factory=dict)  # validator -> accepted


def batch_digest(digests: Iterable[str]) -> str:
    """Returns the digest of a batch: SHA-256 (hex) over the digests of its groups, as bytes, in ascending order of the group."""
    return hashlib.sha256(b"intellax/batch/1" + b"".join(map(bytes.fromhex, digests))).hexdigest()


class RunState:
    """The state of a run after a sequence of events: the last trained step, open groups, and the trust in each worker."""

    def __init__(self):
        self.run = ""  # the public key of the run since the last resume
        self.step = 0  # of the last batch, or of the checkpoint that was resumed from
        self.batch: dict[tuple[int, int], str] = {}  # (step, group) -> "verified" or "trusted", of the last batch
        self.submissions: dict[tuple[int, int], tuple[str, str]] = {}  # of the same groups: worker and digest
        self.dropped: list[tuple[int, int]] = []  # (step, group), by the last batch
        self.published: dict[tuple[int, int], str] = {}  # (epoch, version) -> manifest digest; without void ones
        self.epoch = -1  # of the newest version
        self.validators: frozenset[str] = frozenset()
        self.quorum = 1
        self._has_begun = False
        self._count = 0  # events so far
        self._open: dict[int, dict[int, _Group]] = collections.defaultdict(dict)  # step -> group
        self.invited: set[str] = set()
        self.records: collections.Counter[str] = collections.Counter()  # by worker: groups that a quorum accepted
        self.ejected: dict[str, int] = {}  # as _caught, and servers
        self.refusals: collections.Counter[str] = collections.Counter()  # by worker
        self._caught: dict[str, int] = {}  # worker -> the number of the event
        # Worker -> steps trained on unverified groups of it.
        self._trusted: dict[str, set[int]] = collections.defaultdict(set)
        self._any_step = False  # batches may have groups of any step, by the last resume
        self._taken: dict[int, tuple[str, ...]] = {}  # batch -> its groups, and those that it dropped, for a resume
        self._done = task_ranges.Done()  # the same groups

    def submission(self, step: int, group: int) -> tuple[str, bool] | None:
        """Returns (digest, has a quorum accepted it) of a submission that no batch has taken; None if there is none, or it was refused."""
        found = self._open.get(step, {}).get(group)
        if found is None or not found.digest or found.is_refused:
            return None
        return found.digest, sum(found.votes.values()) >= self.quorum

    def refusal(self, event: events.Event, keeper: str) -> str | None:
        """Returns the rule that a run's event would break, or None."""
        if event.author != keeper:
            return f"author: {event.kind} must be signed by the keeper"
        if event.kind not in events.WORKER_KINDS and event.node != keeper:
            return f"node: must be the keeper for a {event.kind} event"
        if event.kind == "lease" and event.node in self.ejected:
            return "node: the worker was ejected"
        fields = event.fields
        if event.kind in ("lease", "submission") and fields["split"] == "train":
            for one in events.each(fields):
                if self._is_over(one["step"], one["group"]):
                    return f"step: batch {one['step']} was trained on already, or a batch had this group"
                group = self._group(one)
                if event.kind == "submission" and (group is None or event.node not in group.holders):
                    return "group: this worker has no lease on it"
        if event.kind == "verdict" and fields["run"] != self.run:
            return f"run: the verdict is about another run than {self.run[:16] or 'one that began'}"
        if event.kind == "verdict" and not verdict_lib.SignedVerdict(**fields).check():
            return "signature: it is not the validator's signature of this verdict"
        if event.kind == "resume" and self._has_begun and fields["step"] > self.step:
            return f"step: the last batch is {self.step}; entries are missing"
        if event.kind == "publish":
            if fields["version"] > self.step:
                return f"version: batch {fields['version']} was not trained on"
            if (fields["epoch"], fields["version"]) in self.published:
                return "version: it was published already in this epoch"
        if event.kind == "naming" and not self._trusted[event.node].issuperset(fields["steps"]):
            return "steps: one of them trained on no trusted group of this worker"
        return self._batch_error(fields) if event.kind == "batch" else None

    def _batch_error(self, fields: dict) -> str | None:
        step = fields["step"]
        if step != self.step + 1:
            return f"step: the batch after {self.step} must be {self.step + 1}"
        verified, trusted = set(_groups(fields["verified"])), set(_groups(fields["trusted"]))
        tasks = sorted(verified | trusted)
        if not tasks or not (self._any_step or {task[0] for task in tasks} == {step}) or verified & trusted:
            return f"groups: they must be of step {step}, each named once"
        dropped = _groups(fields.get("dropped", ""))
        is_past = any(self._is_over(*name) for name in dropped)
        if is_past or (dropped and not self._any_step) or not {*tasks}.isdisjoint(dropped):
            return "dropped: must be groups that no batch had, in a run whose batches have groups of any step"
        found = [self._open.get(of, {}).get(number) for of, number in tasks]
        for (of, number), group in zip(tasks, found, strict=True):
            if group is None or not group.digest:
                return f"group: {number} was not handed in"
            if -1 not in (group.epoch, self.epoch) and group.epoch != self.epoch:
                return f"group: {number} was leased in epoch {group.epoch}, and the policy is of epoch {self.epoch}"
            if group.is_refused:
                return f"group: {number} was refused"
            if (of, number) in verified and sum(group.votes.values()) < self.quorum:
                num_accepting = sum(group.votes.values())
                return f"group: {number} has {num_accepting} accepting verdicts; the quorum is {self.quorum}"
            if (of, number) in trusted and not self._is_trusted(group):
                return f"group: {number} has no verdict, and its worker is not trusted"
        expected = batch_digest(group.digest for group in found if group)
        return None if fields["digest"] == expected else f"digest: must be {expected} for these groups"

    def _is_trusted(self, group: _Group) -> bool:
        has_trust = group.worker in self.invited or self.records[group.worker] > 0
        is_late = group.submitted > self.ejected.get(group.worker, group.submitted)
        return has_trust and not is_late and group.submitted > self._caught.get(group.worker, -1)

    def apply(self, event: events.Event) -> None:
        """Applies one event to this state in place. `refusal` must have returned None for it."""
        self._count += 1
        fields, worker = event.fields, event.node
        group = self._group(fields) if fields.get("split") == "train" else None
        self.refusals[worker] += event.kind == "refusal"
        if event.kind == "resume":
            self.run = fields["run"]
            self._any_step = fields.get("any_step", False)
            self._resume(fields["step"])
        elif event.kind == "appoint":
            self.validators, self.quorum = frozenset(fields["validators"]), fields["quorum"]
        elif event.kind == "invite":
            self.invited.add(worker)
        elif event.kind == "eject":
            self.ejected.setdefault(worker, self._count)
        elif event.kind == "lease" and fields["split"] == "train":
            for one in events.each(fields):
                holders = {worker} | (group.holders if (group := self._group(one)) else set())
                self._open[one["step"]][one["group"]] = _Group(holders, epoch=fields["epoch"])
        elif event.kind == "submission" and fields["split"] == "train":
            for one in events.each(fields):
                group = self._open[one["step"]][one["group"]]
                group.worker, group.digest, group.submitted = worker, one["digest"], self._count
                group.is_refused, group.is_counted, group.votes = False, False, {}
        elif event.kind == "verdict" and group and group.digest == fields["digest"]:
            if fields["validator"] in (self.validators or {self.run}):
                group.votes[fields["validator"]] = fields["accepted"]
            if sum(group.votes.values()) >= self.quorum and not group.is_counted:
                group.is_counted = True
                self.records[group.worker] += 1
        elif event.kind == "refusal" and group and group.digest == fields["digest"]:  # of its worker, or of a server
            group.is_refused = True
            if group.worker == worker and False in group.votes.values():
                self._caught[worker] = self._count
        elif event.kind == "batch":
            self._take(fields)
        elif event.kind == "publish":
            self.published[fields["epoch"], fields["version"]] = fields["digest"]
            self.epoch = fields["epoch"]

    def _group(self, fields: dict) -> _Group | None:
        return self._open.get(fields["step"], {}).get(fields["group"])

    def _is_over(self, step: int, group: int) -> bool:
        return ("", step, group) in self._done if self._any_step else step <= self.step

    def _resume(self, step: int) -> None:
        for late in [late for late in self._taken if late > step]:
            for text in filter(None, self._taken.pop(late)):
                self._done.remove("", text)
        self._has_begun, self.step, self.batch, self.dropped = True, step, {}, []
        self._open.clear()
        self.published = {name: digest for name, digest in self.published.items() if name[1] < step}
        for steps in self._trusted.values():
            steps.difference_update([late for late in steps if late > step])

    def _take(self, fields: dict) -> None:
        self._has_begun, self.step = True, fields["step"]
        self.batch = {name: basis for basis in ("verified", "trusted") for name in _groups(fields[basis])}
        groups = {(step, number): self._open[step][number] for step, number in self.batch}
        self.submissions = {name: (group.worker, group.digest) for name, group in groups.items()}
        for name in _groups(fields["trusted"]):
            self._trusted[groups[name].worker].add(self.step)
        self.dropped = _groups(fields.get("dropped", ""))
        for step, number in (*self.batch, *self.dropped):
            self._open[step].pop(number, None)
            if not self._open[step] or not self._any_step:  # the rest of them is too late
                del self._open[step]
        self._taken[self.step] = fields["verified"], fields["trusted"], fields.get("dropped", "")
        for text in filter(None, self._taken[self.step]):
            self._done.add("", text)


def _groups(text: str) -> list[tuple[int, int]]:
    return task_ranges.parse_tasks(text) if text else []
