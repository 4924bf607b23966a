"""The history of a training run as its ledger states it, per batch and group, for an audit.

1. `read` verifies the entries of a ledger file in order (rl/ledger/storage.py) and adds each to a `History`. After a bad entry it goes on
   without verification, so that an audit also names the groups that lack an event.
2. A batch event closes its groups; a resume makes void the later batches, versions, and open groups, as it does in the run.

rl/ledger/run_rules.py, by which a run's own ledger accepts events, is not used here beyond the verification: it judges one event at a
time, and this file answers for a finished batch. Submissions are kept by worker and digest, so several may be made of one group.
"""

import collections
import contextlib
import dataclasses
import pathlib
import sqlite3
from collections.abc import Callable

from rl.ledger import balances, events, storage, task_ranges


@dataclasses.dataclass
class GroupHistory:
    """The events of one training group until a batch took it. `submissions` maps (worker, digest) to the number of the entry."""

    leased: set[str] = dataclasses.field(default_factory=set)  # workers
    submissions: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    refused: set[str] = dataclasses.field(default_factory=set)  # digests
    # digest -> validator -> its last verdict while it was appointed
    votes: dict[str, dict[str, bool]] = dataclasses.field(default_factory=lambda: collections.defaultdict(dict))


@dataclasses.dataclass(frozen=True)
class BatchHistory:
    """One batch event, the groups that it names with their histories, and the rule for verdicts at that time."""

    number: int  # of the entry
    digest: str
    basis: dict[int, str]  # group -> "verified" or "trusted"
    groups: dict[int, GroupHistory]
    quorum: int
    epoch: int  # of its rollouts; -1: any, in ledgers of earlier releases
    distrust: dict[tuple[int, str, str], str]  # (group, worker, digest) -> why it needed a verdict
    draw_head: str  # of the ledger when this start of the run began, from which the draws of its groups follow
    records: dict[str, int]  # worker -> its groups that a quorum had accepted


class History:
    """The state of a run after a sequence of ledger events; `error` has the first bad entry of the file, None if there is none."""

    def __init__(self):
        self.error: str | None = None
        self.num_entries = 0
        self.begin: int | None = None  # the step after which the ledger began: above 0 for runs of earlier releases
        self.hashes: dict[int, str] = {}  # entry -> hash, for the anchors in manifests
        self.batches: dict[int, BatchHistory] = {}  # by step, of the last timeline
        self.published: dict[tuple[int, int], str] = {}  # (epoch, version) -> SHA-256 of the manifest
        self.joined: dict[str, int] = {}  # worker -> entry
        self._groups: dict[int, dict[int, GroupHistory]] = collections.defaultdict(dict)
        self._validators: frozenset[str] = frozenset()
        self._quorum, self._run = 1, ""
        self.draw_head = ""
        self.invited: set[str] = set()
        self._records: collections.Counter[str] = collections.Counter()
        self.ejected: dict[str, int] = {}  # worker, or server -> entry
        self.refusals: collections.Counter[str] = collections.Counter()  # by worker, or server
        self._caught: dict[str, int] = {}  # worker -> entry

    def add(self, number: int, event: events.Event) -> None:
        """Adds entry `number`, a well-formed event. Events of other splits and kinds change nothing here."""
        self.num_entries = number + 1
        self.refusals[event.node] += event.kind == "refusal"
        fields, worker = event.fields, event.node
        if event.kind == "resume":
            self._run = fields["run"]
            self._resume(fields["step"])
        elif event.kind == "appoint":
            self._validators, self._quorum = frozenset(fields["validators"]), fields["quorum"]
            self.draw_head = f"{number - 1}:{self.hashes.get(number - 1, '')}"
        elif event.kind == "join":
            self.joined.setdefault(worker, number)
        elif event.kind == "invite":
            self.invited.add(worker)
        elif event.kind == "eject":
            self.ejected.setdefault(worker, number)
        elif event.kind == "publish":
            self.published[fields["epoch"], fields["version"]] = fields["digest"]
        elif event.kind == "batch":
            self._close(number, fields)
        elif fields.get("split") == "train":
            group = self._groups[fields["step"]].setdefault(fields["group"], GroupHistory())
            self._add_to_group(number, event, group)

    def _add_to_group(self, number: int, event: events.Event, group: GroupHistory) -> None:
        fields, worker = event.fields, event.node
        if event.kind == "lease":
            group.leased.add(worker)
        elif event.kind == "submission":
            group.submissions[worker, fields["digest"]] = number
            group.refused.discard(fields["digest"])  # the same rollouts may be generated again, and judged again
            group.votes.pop(fields["digest"], None)
        elif event.kind == "refusal":
            group.refused.add(fields["digest"])
            if False in group.votes[fields["digest"]].values():
                self._caught[worker] = number
        elif event.kind == "verdict" and fields["validator"] in (self._validators or {self._run}):
            votes = group.votes[fields["digest"]]
            had_quorum = sum(votes.values()) >= self._quorum
            votes[fields["validator"]] = fields["accepted"]
            if sum(votes.values()) >= self._quorum and not had_quorum:
                self._records.update(other for other, digest in group.submissions if digest == fields["digest"])

    def _close(self, number: int, fields: dict) -> None:
        step, basis, groups = fields["step"], {}, {}
        for name in ("verified", "trusted"):
            tasks = task_ranges.parse_tasks(fields[name]) if fields[name] else []
            basis |= {group: name for _, group in tasks}
            groups |= {group: self._groups[of].pop(group, GroupHistory()) for of, group in tasks}
        distrust = {
            (name, worker, digest): reason
            for name, group in groups.items()
            for (worker, digest), submitted in group.submissions.items()
            if (reason := self._distrust(worker, submitted))
        }
        for empty in [of for of, rest in self._groups.items() if not rest]:
            del self._groups[empty]
        rest = self._quorum, fields.get("epoch", -1), distrust, self.draw_head, dict(self._records)
        self.batches[step] = BatchHistory(number, fields["digest"], basis, groups, *rest)

    def _distrust(self, worker: str, submitted: int) -> str | None:
        """Returns why a group that `worker` submitted as entry `submitted` needs a verdict now, or None if its record suffices."""
        if worker not in self.invited and not self._records[worker]:
            return "the worker was neither invited nor had a verified group before"
        if self.ejected.get(worker, submitted) < submitted:
            return f"the worker was ejected before, by entry {self.ejected[worker]}"
        if self._caught.get(worker, -1) > submitted:
            return f"the worker was caught since, by entry {self._caught[worker]}"
        return None

    def _resume(self, step: int) -> None:
        self.begin = step if self.begin is None else self.begin
        self._groups.clear()
        self.batches = {number: batch for number, batch in self.batches.items() if number <= step}
        self.published = {name: digest for name, digest in self.published.items() if name[1] < step}


def read(path: pathlib.Path, on_entry: Callable[[int, int], object] = lambda number, count: None) -> History:
    """Reads a ledger file; returns its history. `on_entry` is called with the number of each entry and the count of all.

    Raises FileNotFoundError without a file, and ValueError if it is not a ledger. A bad entry is no exception, but `History.error`.
    """
    history = History()
    with contextlib.closing(storage.connect(path)) as db:
        try:
            _read(db, history, on_entry)
        except (ValueError, sqlite3.Error) as error:
            history.error = history.error or f"entry {history.num_entries}: {error}"
    return history


def _read(db: sqlite3.Connection, history: History, on_entry: Callable[[int, int], object]) -> None:
    state, last = balances.State(), bytes(32)
    (count,) = db.execute("SELECT COUNT(*) FROM entries").fetchone()

    def add(entry: storage.Entry) -> None:
        nonlocal last
        last = entry.hash
        history.hashes[entry.seq] = entry.hash.hex()
        history.add(entry.seq, entry.event)
        on_entry(entry.seq, count)

    try:
        for entry in storage.checked(db, state, 0, last):
            add(entry)
        # The last entries and the head must be of one moment, since a run may append. No longer: it cannot commit meanwhile.
        with storage.transaction(db, "BEGIN"):
            for entry in storage.checked(db, state, history.num_entries, last):
                add(entry)
            storage.check_head(db, history.num_entries - 1, last, state.keeper)
        return
    except (ValueError, sqlite3.DatabaseError) as error:
        history.error = f"entry {history.num_entries}: {error}"
    number, (final,) = history.num_entries, db.execute("SELECT MAX(seq) FROM entries").fetchone()
    while number <= (final or 0):
        try:
            for entry in storage.read(db, number):
                number = entry.seq + 1
                if not events.form_error(entry.event):
                    add(entry)
            return
        except ValueError:  # of the next entry, which cannot be decoded
            number += 1
