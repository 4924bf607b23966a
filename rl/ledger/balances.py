"""What a ledger's events amount to: the rules that each must keep, balances, windows and reputation.

`State` is a fold over the events and is stored nowhere. Times are milliseconds since 1970.
"""

import dataclasses

from rl.ledger import events, task_ranges


@dataclasses.dataclass
class Work:
    """One submission. submitted units = `units` (still good) + `invalidated` + `forfeited`."""

    node: str
    time_ms: int
    units: int
    status: str = "pending"  # "accepted", "invalidated" (nothing good is left)
    invalidated: int = 0
    forfeited: int = 0
    tasks: tuple[str, str] | None = None  # run and tasks that were accepted with it


@dataclasses.dataclass
class Node:
    stake: int = 0
    slashed: int = 0
    ejected: bool = False
    num_checked: int = 0  # submissions that were verified and accepted
    num_accepted: int = 0
    num_invalidated: int = 0  # submissions with units taken back
    num_slashes: int = 0


@dataclasses.dataclass(frozen=True)
class Balance:
    """Units of one node: what it submitted is the sum of the five."""

    pending: int
    locked: int  # accepted, and may still be invalidated
    final: int
    invalidated: int
    forfeited: int


class State:
    """What the events so far amount to. `apply` only what `refusal` lets pass."""

    def __init__(self):
        self.keeper = ""
        self.validators: frozenset[str] = frozenset()
        self.window_ms = 0
        self.time_ms = 0
        self.nodes: dict[str, Node] = {}
        self.works: dict[str, Work] = {}
        self._works_of: dict[str, list[Work]] = {}
        self.done = task_ranges.Done()  # tasks that no verdict must accept again
        self._nonces: set[str] = set()

    def balance(self, node: str, now_ms: int) -> Balance:
        totals = dict.fromkeys(("pending", "locked", "final", "invalidated", "forfeited"), 0)
        for work in self._works_of.get(node, ()):
            locked = work.time_ms + self.window_ms > now_ms
            totals["pending" if work.status == "pending" else "locked" if locked else "final"] += work.units
            totals["invalidated"] += work.invalidated
            totals["forfeited"] += work.forfeited
        return Balance(**totals)

    def has(self, event: events.Event) -> bool:
        """Whether an event of this nonce was appended."""
        return event.nonce in self._nonces

    def reputation(self, node: str) -> float:
        """In [0, 1): 0 for a stranger, 1/2 after 32 verified submissions; one taken back costs as much as 64 win."""
        record = self.nodes.get(node)
        if record is None or record.ejected:
            return 0.0
        bad = record.num_invalidated + record.num_slashes
        return record.num_checked / (record.num_checked + 32 + 64 * bad)

    def refusal(self, event: events.Event, time_ms: int) -> str | None:
        """The rule that the event breaks, or None. Total."""
        if reason := events.form_error(event):
            return reason
        if event.nonce in self._nonces:
            return "nonce: this event is in the ledger already"
        if (event.kind == "open") != (not self.keeper):
            return "open: the first entry opens the ledger, and no other"
        if event.kind == "open":
            return None if event.node == event.author else "open: must be about its author, the keeper"
        if event.kind in events.NODE_KINDS and event.author != event.node:
            return f"author: {event.kind} must be signed by the node itself"
        if event.kind in events.VALIDATOR_KINDS and event.author not in self.validators:
            return f"author: {event.kind} must be signed by a validator of this ledger"
        node = self.nodes.get(event.node)
        if event.kind == "join":
            return "join: it has joined already" if node else None
        if node is None:
            return "node: it has not joined"
        if event.kind in (*events.NODE_KINDS, "eject") and node.ejected:
            return "node: it was ejected"
        if event.kind == "submit" and event.fields["work"] in self.works:
            return "work: it was submitted already"
        return self._verdict_error(event, time_ms) if event.kind in ("accept", "invalidate") else None

    def _verdict_error(self, event: events.Event, time_ms: int) -> str | None:
        work = self.works.get(event.fields["work"])
        if work is None or work.node != event.node:
            return "work: this node did not submit it"
        if event.kind == "accept":
            return None if work.status == "pending" else f"work: it is {work.status} already"
        if event.fields["units"] > work.units:
            return f"units: {event.fields['units']} are to be taken back, {work.units} are left"
        if work.status == "accepted" and time_ms >= work.time_ms + self.window_ms:
            return f"work: its window of {self.window_ms} ms is over"
        return None

    def apply(self, event: events.Event, time_ms: int) -> None:
        self._nonces.add(event.nonce)
        self.time_ms = time_ms
        fields = event.fields
        if event.kind == "open":
            self.keeper, self.window_ms = event.author, fields["window_ms"]
            self.validators = frozenset(fields["validators"])
        elif event.kind == "join":
            self.nodes[event.node] = Node()
        else:
            self._apply_to(self.nodes[event.node], event, time_ms)

    def _apply_to(self, node: Node, event: events.Event, time_ms: int) -> None:
        fields = event.fields
        if event.kind == "stake":
            node.stake += fields["amount"]
        elif event.kind == "submit":
            work = self.works[fields["work"]] = Work(event.node, time_ms, fields["units"])
            self._works_of.setdefault(event.node, []).append(work)
        elif event.kind == "accept":
            work = self.works[fields["work"]]
            work.status = "accepted"
            if "tasks" in fields:
                work.tasks = fields["run"], fields["tasks"]
                self.done.add(*work.tasks)
            node.num_accepted += 1
            node.num_checked += fields["checked"]
        elif event.kind == "invalidate":
            work = self.works[fields["work"]]
            work.units -= fields["units"]
            work.invalidated += fields["units"]
            if not work.units:
                work.status = "invalidated"
                if work.tasks:  # somebody else may do them
                    self.done.remove(*work.tasks)
            if "tasks" in fields:  # its sound part
                self.done.add(fields["run"], fields["tasks"])
            node.num_invalidated += 1
        elif event.kind == "slash":
            taken = min(fields["amount"], node.stake)
            node.stake, node.slashed = node.stake - taken, node.slashed + taken
            node.num_slashes += 1
            for work in self._works_of.get(event.node, ()):
                if work.status == "pending" or time_ms < work.time_ms + self.window_ms:
                    work.forfeited, work.units = work.forfeited + work.units, 0
        else:
            node.ejected = True
