"""Who did what, and what it is worth: an append-only record that anyone can check and nobody can rewrite unseen.

    python -m rl.ledger verify DB [--keeper HEX] [--head SEQ:HASH]
    python -m rl.ledger show DB

In time:
1. `create` writes entry 0: the keeper's public key, the validators' keys, and the window in which work can be taken back.
2. An author signs an `Event` (ed25519). A node signs for itself (join, stake, submit), a validator signs verdicts
   (accept, invalidate, slash, eject).
3. `append` checks it against the rules, chains it (SHA-256 over number, time, the hash before it, event and signature),
   seals the hash with the keeper's key, and commits with fsync. When it returns, the event survives a kill.
4. Balances, windows and reputation are derived from the events and stored nowhere: `State` is a fold over them.
5. `verify` repeats all of it from the file alone and names the first entry that is wrong. A signed head says how many
   entries there must be, so a tail that was cut off shows, too.

After INTELLECT-2's contracts (smart-contracts, protocol): submitted work is a SHA-256 and a number of units, never taken
twice; units stay locked for a window (a day there) in which they can be invalidated; a slash reaches the stake and
forfeits what is still locked; who was ejected does not come back.

Limits: whoever holds the keeper's key can write another history, and a whole older copy of the file is a valid ledger:
give `verify` a head that you noted elsewhere. Left out: withdrawal of stake, transfers, votes among validators.

One file, SQLite's rollback journal: a copy of the file is a copy of the ledger. Times are milliseconds since 1970.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import re
import secrets
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference import rollout as rollout_lib

MAX_EVENT_BYTES = 2**16
MAX_AMOUNT = 2**53  # exact in JSON readers that know only doubles
WINDOW_MS = 24 * 3600 * 1000
NODE_KINDS = ("join", "stake", "submit")  # signed by the node itself
VALIDATOR_KINDS = ("accept", "invalidate", "slash", "eject")
SCHEMA = (
    "CREATE TABLE entries (seq INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, event BLOB NOT NULL, "
    "signature BLOB NOT NULL, previous BLOB NOT NULL, hash BLOB NOT NULL, seal BLOB NOT NULL)",
    "CREATE TABLE head (id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, hash BLOB NOT NULL, signature BLOB NOT NULL)",
)


@dataclasses.dataclass(frozen=True)
class Event:
    """One signed statement about `node`. `fields` by kind:

    open (validators: list of keys, window_ms), join (), stake (amount), submit (work: SHA-256 hex, units),
    accept (work, checked: whether it was verified or only sampled past), invalidate (work, units, reason),
    slash (amount, reason), eject (reason).
    """

    kind: str
    node: str  # hex of an ed25519 public key, as `Rollout.worker`
    author: str
    nonce: str  # 32 hex digits: an event can be appended once
    fields: dict
    signature: bytes


@dataclasses.dataclass(frozen=True)
class Entry:
    seq: int
    time_ms: int
    event: Event
    hash: bytes


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` found: None, or the first bad entry (`bad_seq`) and what is wrong with it."""

    num_entries: int  # that are good
    error: str | None
    bad_seq: int | None
    head: str | None  # "SEQ:HASH" of the last good entry, to be noted elsewhere


def sign(kind: str, node: str, key: rollout_lib.WorkerKey, *, nonce: str | None = None, **fields) -> Event:
    """An event under the key's name. Its rules are checked by `append`, which knows the ledger.

    `nonce`: 32 hex digits that follow from what the event is about, where it must not be appended twice; else at random.
    """
    event = Event(kind, node, key.worker, nonce or secrets.token_hex(16), fields, b"")
    return dataclasses.replace(event, signature=key.private.sign(b"intellax/event/1" + _encode(event)))


class Ledger:
    """An open ledger; any thread may call it, and several processes may append to one file.

    Opening verifies all of it (two signatures an entry). ValueError for a file that is not a good ledger.
    """

    def __init__(self, path: str | pathlib.Path, keeper: rollout_lib.WorkerKey | None = None):
        """`keeper` is needed to append; its key must be that of entry 0."""
        self._path, self._keeper, self._lock = pathlib.Path(path), keeper, threading.Lock()
        self._connection = _connect(self._path)
        self._load()
        if keeper is not None and keeper.worker != self.state.keeper:
            raise ValueError(f"ledger {path} is kept by {self.state.keeper}, not by {keeper.worker}; use its key")

    @classmethod
    def create(
        cls,
        path: str | pathlib.Path,
        keeper: rollout_lib.WorkerKey,
        *,
        validators: tuple[str, ...] = (),
        window_ms: int = WINDOW_MS,
    ) -> "Ledger":
        """A new ledger of one entry. The keeper is a validator, too. FileExistsError rather than the loss of another."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        connection = _connect(path, check_schema=False)
        names = sorted({keeper.worker, *validators})
        event = sign("open", keeper.worker, keeper, validators=names, window_ms=window_ms)
        state = State()
        if reason := state.refusal(event, 0):
            path.unlink()
            raise ValueError(f"ledger {path} cannot be opened with these settings: {reason}")
        with _transaction(connection):
            for statement in SCHEMA:
                connection.execute(statement)
            _insert(connection, keeper, 0, _now_ms(), event, bytes(32))
        connection.close()
        return cls(path, keeper)

    def append(self, *events: Event) -> list[Entry]:
        """Appends all of them or none, durably. ValueError with the rule that the first bad one breaks."""
        if self._keeper is None:
            raise ValueError(f"ledger {self._path} was opened without the keeper's key; nothing can be appended")
        with self._lock:
            try:
                with _transaction(self._connection):
                    self._catch_up()  # another process may have appended
                    entries = []
                    for event in events:
                        time_ms = max(_now_ms(), self.state.time_ms)  # a clock that was set back must not undo order
                        reason = _signature_error(event) or self.state.refusal(event, time_ms)
                        if reason:
                            raise ValueError(f"event {event.kind} of {event.node[:16]} is refused: {reason}")
                        hash_ = _insert(
                            self._connection, self._keeper, self._next, time_ms, event, self._hash, seal_head=False
                        )
                        self._take(Entry(self._next, time_ms, event, hash_))
                        entries.append(Entry(self._next - 1, time_ms, event, hash_))
                    _write_head(self._connection, self._keeper, self._next - 1, self._hash)
            except BaseException:  # whatever it was: the state may be ahead of what was rolled back
                self._load()
                raise
        return entries

    def refresh(self) -> "State":
        """The state with what other processes appended since."""
        with self._lock:
            self._catch_up()
            return self.state

    def entries(self) -> list[Entry]:
        with self._lock:
            return [entry for entry, _ in _read(self._connection, 0)]

    def _load(self) -> None:
        self.state, self._next, self._hash = State(), 0, bytes(32)
        self._catch_up()
        with _transaction(self._connection, "BEGIN"):  # the last entries and the head at one moment: others append
            self._catch_up()
            error = _head_error(self._connection, self._next - 1, self._hash, self.state.keeper)
        if error:
            raise ValueError(f"ledger {self._path}: {error}; run python -m rl.ledger verify")

    def _catch_up(self) -> None:
        for entry, error in _checked(self._connection, self.state, self._next, self._hash):
            if error:
                raise ValueError(f"ledger {self._path}: entry {entry.seq}: {error}; run python -m rl.ledger verify")
            self._next, self._hash = entry.seq + 1, entry.hash

    def _take(self, entry: Entry) -> None:
        self.state.apply(entry.event, entry.time_ms)
        self._next, self._hash = entry.seq + 1, entry.hash


def verify(path: str | pathlib.Path, *, keeper: str | None = None, head: str | None = None) -> Report:
    """Checks everything that a file says. Total for any bytes in it; OSError only where there is no file to read.

    Args:
      keeper: the public key that must have kept it; else entry 0 is taken at its word.
      head: "SEQ:HASH" noted earlier; the ledger must contain it.
    """
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"no ledger at {path}")
    if head is not None and not re.fullmatch("[0-9]{1,18}:[0-9a-f]{64}", head):
        raise ValueError(f"head {head!r} must be SEQ:HASH, as verify prints it")
    state, good, last = State(), 0, bytes(32)

    def report(error: str | None) -> Report:
        return Report(good, error, good if error else None, f"{good - 1}:{last.hex()}" if good else None)

    try:
        connection = _connect(pathlib.Path(path))
    except (ValueError, sqlite3.Error) as error:
        return report(f"not a ledger: {error}")
    try:
        for entry, error in _checked(connection, state, 0, last):
            if error:
                return report(error)
            if keeper is not None and state.keeper != keeper:
                return report(f"kept by {state.keeper}, not by {keeper}")
            if head is not None and entry.seq == int(head.split(":")[0]) and entry.hash.hex() != head.split(":")[1]:
                return report(f"its hash is not the one noted as {head}")
            good, last = entry.seq + 1, entry.hash
        if head is not None and int(head.split(":")[0]) >= good:
            return report(f"missing: a head was noted at {head}")
        return report(_head_error(connection, good - 1, last, state.keeper))
    except sqlite3.Error as error:
        return report(f"unreadable: {error}")
    finally:
        connection.close()


# ---- the rules and what follows from them ---------------------------------------------------------------------------


@dataclasses.dataclass
class Work:
    """One submission. submitted units = `units` (still good) + `invalidated` + `forfeited`."""

    node: str
    time_ms: int
    units: int
    status: str = "pending"  # "accepted", "invalidated" (nothing good is left)
    invalidated: int = 0
    forfeited: int = 0


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
        self._nonces: set[str] = set()

    def balance(self, node: str, now_ms: int) -> Balance:
        totals = dict.fromkeys(("pending", "locked", "final", "invalidated", "forfeited"), 0)
        for work in self._works_of.get(node, ()):
            locked = work.time_ms + self.window_ms > now_ms
            totals["pending" if work.status == "pending" else "locked" if locked else "final"] += work.units
            totals["invalidated"] += work.invalidated
            totals["forfeited"] += work.forfeited
        return Balance(**totals)

    def has(self, event: Event) -> bool:
        """Whether an event of this nonce was appended."""
        return event.nonce in self._nonces

    def reputation(self, node: str) -> float:
        """In [0, 1): 0 for a stranger, 1/2 after 32 verified submissions; one taken back costs as much as 64 win."""
        record = self.nodes.get(node)
        if record is None or record.ejected:
            return 0.0
        bad = record.num_invalidated + record.num_slashes
        return record.num_checked / (record.num_checked + 32 + 64 * bad)

    def refusal(self, event: Event, time_ms: int) -> str | None:
        """The rule that the event breaks, or None. Total."""
        if reason := _form_error(event):
            return reason
        if event.nonce in self._nonces:
            return "nonce: this event is in the ledger already"
        if (event.kind == "open") != (not self.keeper):
            return "open: the first entry opens the ledger, and no other"
        if event.kind == "open":
            return None if event.node == event.author else "open: must be about its author, the keeper"
        if event.kind in NODE_KINDS and event.author != event.node:
            return f"author: {event.kind} must be signed by the node itself"
        if event.kind in VALIDATOR_KINDS and event.author not in self.validators:
            return f"author: {event.kind} must be signed by a validator of this ledger"
        node = self.nodes.get(event.node)
        if event.kind == "join":
            return "join: it has joined already" if node else None
        if node is None:
            return "node: it has not joined"
        if event.kind in (*NODE_KINDS, "eject") and node.ejected:
            return "node: it was ejected"
        if event.kind == "submit" and event.fields["work"] in self.works:
            return "work: it was submitted already"
        return self._verdict_error(event, time_ms) if event.kind in ("accept", "invalidate") else None

    def _verdict_error(self, event: Event, time_ms: int) -> str | None:
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

    def apply(self, event: Event, time_ms: int) -> None:
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

    def _apply_to(self, node: Node, event: Event, time_ms: int) -> None:
        fields = event.fields
        if event.kind == "stake":
            node.stake += fields["amount"]
        elif event.kind == "submit":
            work = self.works[fields["work"]] = Work(event.node, time_ms, fields["units"])
            self._works_of.setdefault(event.node, []).append(work)
        elif event.kind == "accept":
            self.works[fields["work"]].status = "accepted"
            node.num_accepted += 1
            node.num_checked += fields["checked"]
        elif event.kind == "invalidate":
            work = self.works[fields["work"]]
            work.units -= fields["units"]
            work.invalidated += fields["units"]
            work.status = work.status if work.units else "invalidated"
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


def _form_error(event: Event) -> str | None:
    if not isinstance(event.kind, str) or event.kind not in _FIELDS:
        return f"kind: must be one of {', '.join(_FIELDS)}"
    for name in ("node", "author"):
        if not _is_hex(getattr(event, name), 64):
            return f"{name}: must be a public key as 64 lower-case hex digits"
    if not _is_hex(event.nonce, 32):
        return "nonce: must be 32 lower-case hex digits"
    if not isinstance(event.fields, dict) or set(event.fields) != set(_FIELDS[event.kind]):
        return f"fields: {event.kind} has exactly {', '.join(_FIELDS[event.kind]) or 'none'}"
    for name, rule in _FIELDS[event.kind].items():
        if not rule(event.fields[name]):
            return f"{name}: {_RULES[rule]}"
    return None


def _is_hex(value, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def _is_amount(value) -> bool:
    return type(value) is int and 0 < value <= MAX_AMOUNT


def _is_digest(value) -> bool:
    return _is_hex(value, 64)


def _is_reason(value) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1024 and value.isprintable()


def _is_bool(value) -> bool:
    return type(value) is bool


def _are_keys(value) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 256 and all(_is_hex(key, 64) for key in value)


_RULES: dict[Callable, str] = {
    _is_amount: f"must be an integer in 1..{MAX_AMOUNT}",
    _is_digest: "must be a SHA-256 as 64 lower-case hex digits",
    _is_reason: "must be 1 to 1024 printable characters",
    _is_bool: "must be true or false",
    _are_keys: "must be a list of 1 to 256 public keys",
}
_FIELDS: dict[str, dict[str, Callable]] = {
    "open": {"validators": _are_keys, "window_ms": _is_amount},
    "join": {},
    "stake": {"amount": _is_amount},
    "submit": {"work": _is_digest, "units": _is_amount},
    "accept": {"work": _is_digest, "checked": _is_bool},
    "invalidate": {"work": _is_digest, "units": _is_amount, "reason": _is_reason},
    "slash": {"amount": _is_amount, "reason": _is_reason},
    "eject": {"reason": _is_reason},
}


# ---- the chain ------------------------------------------------------------------------------------------------------


def _encode(event: Event) -> bytes:
    """The event's one spelling: sorted JSON without spaces, ASCII only, the signature apart."""
    body = {name: getattr(event, name) for name in ("kind", "node", "author", "nonce", "fields")}
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _decode(body: bytes, signature: bytes) -> Event | str:
    try:
        fields = json.loads(body)
        event = Event(**fields, signature=signature)
        same = _encode(event) == body
    except (ValueError, TypeError, RecursionError):
        return "its event is not one that was written here"
    return event if same else "its event is not in canonical form"


def _hash(seq: int, time_ms: int, previous: bytes, body: bytes, signature: bytes) -> bytes:
    """Every part behind its length or of fixed size, so that no two entries have one preimage."""
    head = b"intellax/entry/1" + struct.pack("<QQ32sQ", seq, time_ms, previous, len(body))
    return hashlib.sha256(head + body + signature).digest()


def _signature_error(event: Event) -> str | None:
    try:
        body = _encode(event)
    except (ValueError, TypeError, RecursionError):
        return "fields: must be plain JSON"
    if len(body) > MAX_EVENT_BYTES:
        return f"fields: an event of {len(body)} bytes; at most {MAX_EVENT_BYTES} are kept"
    signed = _is_hex(event.author, 64) and _signed(event.author, event.signature, b"intellax/event/1" + body)
    return None if signed else "signature: its author did not sign this event"


def _signed(author: str, signature: bytes, message: bytes) -> bool:
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(author)).verify(signature, message)
    except (exceptions.InvalidSignature, ValueError, TypeError):  # not a point on the curve; not bytes
        return False
    return True


def _checked(
    connection: sqlite3.Connection, state: State, start: int, previous: bytes
) -> Iterator[tuple[Entry, str | None]]:
    """Entries from `start` with what is wrong with the first bad one; good ones are applied to `state`."""
    expected = start
    for entry, row in _read(connection, start):
        error = row if isinstance(row, str) else _entry_error(entry, row, state, expected, previous)
        if error:
            yield dataclasses.replace(entry, seq=expected), error
            return
        state.apply(entry.event, entry.time_ms)
        yield entry, None
        expected, previous = expected + 1, entry.hash
    if expected == 0:
        yield Entry(0, 0, _NOBODY, b""), "missing: a ledger has at least the entry that opens it"


def _entry_error(entry: Entry, row: dict, state: State, expected: int, previous: bytes) -> str | None:
    if entry.seq != expected:
        return f"missing: the next entry has number {entry.seq}"
    if row["previous"] != previous:
        return "its link does not lead to the entry before it"
    if entry.time_ms < state.time_ms:
        return "its time is before that of the entry before it"
    if entry.hash != _hash(entry.seq, entry.time_ms, previous, row["event"], row["signature"]):
        return "its hash does not fit its content"
    if error := _signature_error(entry.event):
        return error
    if not _signed(state.keeper or entry.event.author, row["seal"], b"intellax/seal/1" + entry.hash):
        return "the keeper did not seal it"
    return state.refusal(entry.event, entry.time_ms)


def _read(connection: sqlite3.Connection, start: int) -> Iterator[tuple[Entry, "dict | str"]]:
    names = ("seq", "time_ms", "event", "signature", "previous", "hash", "seal")
    query = f"SELECT {', '.join(names)} FROM entries WHERE seq >= ? ORDER BY seq LIMIT 1"
    # One query a row: a cursor reads one row ahead, and would raise for a damaged entry at the good one before it.
    while values := connection.execute(query, (start,)).fetchone():
        row = dict(zip(names, values, strict=True))
        sizes = {"signature": 64, "previous": 32, "hash": 32, "seal": 64}
        whole = type(row["seq"]) is int and type(row["time_ms"]) is int and 0 <= row["time_ms"] < 2**63
        whole &= isinstance(row["event"], bytes) and len(row["event"]) <= MAX_EVENT_BYTES
        whole &= all(isinstance(row[name], bytes) and len(row[name]) == size for name, size in sizes.items())
        event = _decode(row["event"], row["signature"]) if whole else "a column of it has the wrong type or size"
        seq = row["seq"] if type(row["seq"]) is int else -1
        if isinstance(event, str):
            yield Entry(seq, 0, _NOBODY, b""), event
        else:
            yield Entry(seq, row["time_ms"], event, row["hash"]), row
        if seq < start:
            return  # the index of a damaged file lies; what was yielded says so
        start = seq + 1


def _insert(connection, keeper, seq, time_ms, event, previous, *, seal_head=True) -> bytes:
    body = _encode(event)
    hash_ = _hash(seq, time_ms, previous, body, event.signature)
    seal = keeper.private.sign(b"intellax/seal/1" + hash_)
    connection.execute(
        "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", (seq, time_ms, body, event.signature, previous, hash_, seal)
    )
    if seal_head:
        _write_head(connection, keeper, seq, hash_)
    return hash_


def _write_head(connection, keeper, seq: int, hash_: bytes) -> None:
    signature = keeper.private.sign(_head_message(seq, hash_))
    connection.execute("INSERT OR REPLACE INTO head VALUES (0, ?, ?, ?)", (seq, hash_, signature))


def _head_message(seq: int, hash_: bytes) -> bytes:
    return b"intellax/head/1" + struct.pack("<Q", seq) + hash_


def _head_error(connection, seq: int, hash_: bytes, keeper: str) -> str | None:
    rows = connection.execute("SELECT id, seq, hash, signature FROM head LIMIT 2").fetchall()
    if len(rows) != 1 or type(rows[0][1]) is not int or rows[0][1] < 0 or rows[0][0] != 0:
        return "the head is missing or there are several"
    _, head_seq, head_hash, signature = rows[0]
    if not isinstance(head_hash, bytes) or not _signed(keeper, signature, _head_message(head_seq, head_hash)):
        return "the keeper did not sign the head"
    if (head_seq, head_hash) != (seq, hash_):
        return f"missing: the head says that the last entry is {head_seq}"
    return None


_NOBODY = Event("", "", "", "", {}, b"")


# ---- the file -------------------------------------------------------------------------------------------------------


def _connect(path: pathlib.Path, *, check_schema: bool = True) -> sqlite3.Connection:
    """ValueError where the tables are not ours. Nothing that a file defines (views, triggers) is ever run."""
    if check_schema and not path.is_file():
        raise FileNotFoundError(f"no ledger at {path}; make one with rl.ledger.Ledger.create")
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.text_factory = bytes  # text of a damaged file need not be UTF-8
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * MAX_EVENT_BYTES)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA synchronous = FULL")
        found = connection.execute("SELECT sql FROM sqlite_master ORDER BY rowid LIMIT 3").fetchall()
    except sqlite3.Error as error:
        connection.close()
        raise ValueError(f"{path} is not a ledger: {error}") from error
    if check_schema and found != [(statement.encode(),) for statement in SCHEMA]:
        connection.close()
        raise ValueError(f"{path} is not a ledger: its tables are not those of one")
    return connection


class _transaction:
    """BEGIN .. COMMIT, rolled back when the block or the COMMIT raises. "BEGIN" alone is enough for reading."""

    def __init__(self, connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE"):
        self._connection, self._begin = connection, begin

    def __enter__(self):
        self._connection.execute(self._begin)

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self._connection.execute("COMMIT")
        finally:  # a COMMIT that fails (a reader outlasts the timeout) leaves the transaction open
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def _now_ms() -> int:
    return time.time_ns() // 10**6


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rl.ledger", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("verify", "check every entry"), ("show", "print nodes, balances and the last entries")):
        command = commands.add_parser(name, help=what)
        command.add_argument("path", metavar="DB")
        command.add_argument("--keeper", help="public key (hex) that must have kept it")
        command.add_argument("--head", help="SEQ:HASH noted earlier, which it must contain")
        command.add_argument("--last", type=int, default=10, help="entries that show prints")
    args = parser.parse_args(argv)
    try:
        report = verify(args.path, keeper=args.keeper, head=args.head)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if report.error:
        print(f"error: entry {report.bad_seq} is bad: {report.error}", file=sys.stderr)
        return 1
    if args.command == "show":
        _show(Ledger(args.path), args.last)
    print(f"{report.num_entries} entries are good; head {report.head}")
    return 0


def _show(ledger: Ledger, last: int) -> None:
    now_ms, state = _now_ms(), ledger.state
    print(f"{'node':<18}{'stake':>10}{'pending':>12}{'locked':>12}{'final':>12}{'taken back':>12}{'reputation':>12}")
    for name, node in state.nodes.items():
        balance = state.balance(name, now_ms)
        lost = balance.invalidated + balance.forfeited
        print(
            f"{name[:16]:<18}{node.stake:>10}{balance.pending:>12}{balance.locked:>12}{balance.final:>12}{lost:>12}"
            f"{'ejected' if node.ejected else f'{state.reputation(name):.3f}':>12}"
        )
    for entry in ledger.entries()[-last:] if last > 0 else []:
        fields = " ".join(f"{name}={value}" for name, value in entry.event.fields.items() if name != "validators")
        print(f"{entry.seq:>6} {entry.time_ms} {entry.event.kind:<10} {entry.event.node[:16]} {fields[:100]}")


if __name__ == "__main__":
    sys.exit(main())
