"""The state of a ledger: rules for the next event, balances, reputation, finished tasks. Times are milliseconds since 1970.

The events of a training run have their rules in rl/protocol/ledger/run_rules.py.
"""

import dataclasses

from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import events, run_rules, task_ranges


@dataclasses.dataclass
class Work:
    """One submission of a worker (`node`), of `units` (still good) + `invalidated` (by a verdict) + `forfeited` (by a slash) units."""

    node: str
    time_ms: int
    units: int
    status: str = "pending"  # "accepted", "invalidated" (no good units left)
    invalidated: int = 0
    forfeited: int = 0
    tasks: tuple[str, str] | None = None  # run and tasks that were accepted with it


@dataclasses.dataclass
class Worker:
    """The stake of one worker and the counts of its verdicts, from which its reputation follows."""

    stake: int = 0
    slashed: int = 0
    ejected: bool = False
    num_checked: int = 0  # accepted submissions of which at least one group was replayed
    num_accepted: int = 0
    num_invalidated: int = 0  # submissions with units taken back
    num_slashes: int = 0


@dataclasses.dataclass(frozen=True)
class Balance:
    """Work units of one worker by status at one time; the five fields sum to all units that the worker submitted."""

    pending: int
    locked: int  # accepted, and may still be invalidated
    final: int
    invalidated: int
    forfeited: int


class State:
    """The state of a ledger after a sequence of events: workers, submitted work, finished tasks, and the settings of entry 0."""

    def __init__(self):
        self.keeper = ""
        self.validators: frozenset[str] = frozenset()
        self.window_ms = 0
        self.time_ms = 0
        self.workers: dict[str, Worker] = {}
        self.works: dict[str, Work] = {}
        self._works_of: dict[str, list[Work]] = {}
        self.done = task_ranges.Done()  # tasks that must not be accepted again
        self.nonces: set[str] = set()  # of all events but those of a run: only the keeper signs these
        self.run = run_rules.RunState()

    def balance(self, worker: str, now_ms: int) -> Balance:
        """Returns the work units of a worker by status at time `now_ms`; all 0 for an unknown worker."""
        totals = dict.fromkeys(("pending", "locked", "final", "invalidated", "forfeited"), 0)
        for work in self._works_of.get(worker, ()):
            locked = work.time_ms + self.window_ms > now_ms
            totals["pending" if work.status == "pending" else "locked" if locked else "final"] += work.units
            totals["invalidated"] += work.invalidated
            totals["forfeited"] += work.forfeited
        return Balance(**totals)

    def reputation(self, worker: str) -> float:
        """Returns a worker's reputation in [0, 1) by its replayed and its invalid submissions; 0 if it is unknown or ejected."""
        record = self.workers.get(worker)
        if record is None or record.ejected:
            return 0.0
        return verdict_lib.reputation(record.num_checked, record.num_invalidated + record.num_slashes)

    def refusal(self, event: events.Event, time_ms: int) -> str | None:
        """Returns the rule that an event would break if appended at `time_ms`, or None. Never raises. Does not check the signature."""
        if reason := events.form_error(event):
            return reason
        if event.nonce in self.nonces:
            return f"nonce: this event is in the ledger already ({event.nonce})"
        if (event.kind == "open") != (not self.keeper):
            return "open: the first entry must be an open event, and no other entry may be one"
        if event.kind == "open":
            return None if event.node == event.author else "open: node must equal author, the keeper's key"
        by_keeper = event.kind == "join" and event.author == self.keeper  # a run's worker signs lease requests instead
        if event.kind in events.NODE_KINDS and event.author != event.node and not by_keeper:
            return f"author: {event.kind} must be signed by the worker itself"
        if event.kind in events.VALIDATOR_KINDS and event.author not in self.validators:
            return f"author: {event.kind} must be signed by a validator of this ledger"
        worker = self.workers.get(event.node)
        if event.kind in events.RUN_KINDS and (worker or event.kind not in events.WORKER_KINDS):
            return self.run.refusal(event, self.keeper)
        if event.kind == "join":
            return "join: the worker has joined already" if worker else None
        if worker is None:
            return "node: the worker has not joined"
        if event.kind in (*events.NODE_KINDS, "eject") and worker.ejected:
            return "node: the worker was ejected"
        if event.kind == "submit" and event.fields["work"] in self.works:
            return "work: it was submitted already"
        return self._verdict_error(event, time_ms) if event.kind in ("accept", "invalidate") else None

    def _verdict_error(self, event: events.Event, time_ms: int) -> str | None:
        work = self.works.get(event.fields["work"])
        if work is None or work.node != event.node:
            return "work: this worker did not submit it"
        if event.kind == "accept":
            return None if work.status == "pending" else f"work: it is {work.status} already"
        if event.fields["units"] > work.units:
            return f"units: {event.fields['units']} cannot be taken back, {work.units} are left"
        if work.status == "accepted" and time_ms >= work.time_ms + self.window_ms:
            return f"work: its window of {self.window_ms} ms is over"
        return None

    def apply(self, event: events.Event, time_ms: int) -> None:
        """Applies one event to this state in place. `refusal` must have returned None for the event."""
        self.time_ms = time_ms
        if event.kind in (*events.RUN_KINDS, "eject"):
            self.run.apply(event)
        if event.kind in events.RUN_KINDS:
            return
        self.nonces.add(event.nonce)
        fields, worker = event.fields, self.workers.get(event.node)
        if event.kind == "open":
            self.keeper, self.window_ms = event.author, fields["window_ms"]
            self.validators = frozenset(fields["validators"])
        elif worker is None:  # it joins
            self.workers[event.node] = Worker()
        elif event.kind == "stake":
            worker.stake += fields["amount"]
        elif event.kind == "submit":
            work = self.works[fields["work"]] = Work(event.node, time_ms, fields["units"])
            self._works_of.setdefault(event.node, []).append(work)
        elif event.kind == "accept":
            work = self.works[fields["work"]]
            work.status = "accepted"
            if "tasks" in fields:
                work.tasks = fields["run"], fields["tasks"]
                self.done.add(*work.tasks)
            worker.num_accepted += 1
            worker.num_checked += fields["checked"]
        elif event.kind == "invalidate":
            work = self.works[fields["work"]]
            work.units -= fields["units"]
            work.invalidated += fields["units"]
            if not work.units:
                work.status = "invalidated"
                if work.tasks:  # another worker may do them
                    self.done.remove(*work.tasks)
            if "tasks" in fields:  # its sound groups
                self.done.add(fields["run"], fields["tasks"])
            worker.num_invalidated += 1
        elif event.kind == "slash":
            taken = min(fields["amount"], worker.stake)
            worker.stake, worker.slashed = worker.stake - taken, worker.slashed + taken
            worker.num_slashes += 1
            for work in self._works_of.get(event.node, ()):
                if work.status == "pending" or time_ms < work.time_ms + self.window_ms:
                    work.forfeited, work.units = work.forfeited + work.units, 0
        else:
            worker.ejected = True
