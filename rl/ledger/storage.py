"""A ledger's file: entries chained by hash and sealed by the keeper, rows of one SQLite table, and a signed head.

1. `insert` chains an event: SHA-256 over number, time, the hash before it, event and signature; the keeper signs the hash.
2. `write_head` signs how many entries there must be, so that a tail which was cut off shows.
3. `checked` reads entries back and says what is wrong with the first bad one. Total for any bytes in the file; only
   sqlite3.Error leaves.

SQLite's rollback journal: a copy of the file is a copy of the ledger.
"""

import dataclasses
import hashlib
import pathlib
import sqlite3
import struct
from collections.abc import Iterator

from rl.ledger import balances, events

SCHEMA = (
    "CREATE TABLE entries (seq INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, event BLOB NOT NULL, "
    "signature BLOB NOT NULL, previous BLOB NOT NULL, hash BLOB NOT NULL, seal BLOB NOT NULL)",
    "CREATE TABLE head (id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, hash BLOB NOT NULL, signature BLOB NOT NULL)",
)


@dataclasses.dataclass(frozen=True)
class Entry:
    seq: int
    time_ms: int
    event: events.Event
    hash: bytes


def checked(
    connection: sqlite3.Connection, state: balances.State, start: int, previous: bytes
) -> Iterator[tuple[Entry, str | None]]:
    """Entries from `start` with what is wrong with the first bad one; good ones are applied to `state`."""
    expected = start
    for entry, row in read(connection, start):
        error = row if isinstance(row, str) else _entry_error(entry, row, state, expected, previous)
        if error:
            yield dataclasses.replace(entry, seq=expected), error
            return
        state.apply(entry.event, entry.time_ms)
        yield entry, None
        expected, previous = expected + 1, entry.hash
    if expected == 0:
        yield Entry(0, 0, events.NOBODY, b""), "missing: a ledger has at least the entry that opens it"


def _entry_error(entry: Entry, row: dict, state: balances.State, expected: int, previous: bytes) -> str | None:
    if entry.seq != expected:
        return f"missing: the next entry has number {entry.seq}"
    if row["previous"] != previous:
        return "its link does not lead to the entry before it"
    if entry.time_ms < state.time_ms:
        return "its time is before that of the entry before it"
    if entry.hash != hash_of(entry.seq, entry.time_ms, previous, row["event"], row["signature"]):
        return "its hash does not fit its content"
    if error := events.signature_error(entry.event):
        return error
    if not events.signed(state.keeper or entry.event.author, row["seal"], b"intellax/seal/1" + entry.hash):
        return "the keeper did not seal it"
    return state.refusal(entry.event, entry.time_ms)


def read(connection: sqlite3.Connection, start: int) -> Iterator[tuple[Entry, "dict | str"]]:
    """Entries from `start` with their columns, or with why they cannot be decoded; nothing is verified."""
    names = ("seq", "time_ms", "event", "signature", "previous", "hash", "seal")
    query = f"SELECT {', '.join(names)} FROM entries WHERE seq >= ? ORDER BY seq LIMIT 1"
    # One query a row: a cursor reads one row ahead, and would raise for a damaged entry at the good one before it.
    while values := connection.execute(query, (start,)).fetchone():
        row = dict(zip(names, values, strict=True))
        sizes = {"signature": 64, "previous": 32, "hash": 32, "seal": 64}
        whole = type(row["seq"]) is int and type(row["time_ms"]) is int and 0 <= row["time_ms"] < 2**63
        whole &= isinstance(row["event"], bytes) and len(row["event"]) <= events.MAX_EVENT_BYTES
        whole &= all(isinstance(row[name], bytes) and len(row[name]) == size for name, size in sizes.items())
        event = "a column of it has the wrong type or size"
        if whole:
            event = events.decode(row["event"], row["signature"])
        seq = row["seq"] if type(row["seq"]) is int else -1
        if isinstance(event, str):
            yield Entry(seq, 0, events.NOBODY, b""), event
        else:
            yield Entry(seq, row["time_ms"], event, row["hash"]), row
        if seq < start:
            return  # the index of a damaged file lies; what was yielded says so
        start = seq + 1


def insert(connection, keeper, seq, time_ms, event, previous, *, seal_head=True) -> bytes:
    """Appends an event behind the entry of hash `previous`; its own hash."""
    body = events.encode(event)
    hash_ = hash_of(seq, time_ms, previous, body, event.signature)
    seal = keeper.private.sign(b"intellax/seal/1" + hash_)
    connection.execute(
        "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", (seq, time_ms, body, event.signature, previous, hash_, seal)
    )
    if seal_head:
        write_head(connection, keeper, seq, hash_)
    return hash_


def write_head(connection, keeper, seq: int, hash_: bytes) -> None:
    """Signs that entry `seq` of this hash is the last."""
    signature = keeper.private.sign(_head_message(seq, hash_))
    connection.execute("INSERT OR REPLACE INTO head VALUES (0, ?, ?, ?)", (seq, hash_, signature))


def _head_message(seq: int, hash_: bytes) -> bytes:
    return b"intellax/head/1" + struct.pack("<Q", seq) + hash_


def head_error(connection, seq: int, hash_: bytes, keeper: str) -> str | None:
    """What is wrong with the signed head where the last entry is `seq` of this hash, or None."""
    rows = connection.execute("SELECT id, seq, hash, signature FROM head LIMIT 2").fetchall()
    if len(rows) != 1 or type(rows[0][1]) is not int or rows[0][1] < 0 or rows[0][0] != 0:
        return "the head is missing or there are several"
    _, head_seq, head_hash, signature = rows[0]
    message = _head_message(head_seq, head_hash) if isinstance(head_hash, bytes) else b""
    if not message or not events.signed(keeper, signature, message):
        return "the keeper did not sign the head"
    if (head_seq, head_hash) != (seq, hash_):
        return f"missing: the head says that the last entry is {head_seq}"
    return None


def hash_of(seq: int, time_ms: int, previous: bytes, body: bytes, signature: bytes) -> bytes:
    """Every part behind its length or of fixed size, so that no two entries have one preimage."""
    head = b"intellax/entry/1" + struct.pack("<QQ32sQ", seq, time_ms, previous, len(body))
    return hashlib.sha256(head + body + signature).digest()


def connect(path: pathlib.Path, *, check_schema: bool = True) -> sqlite3.Connection:
    """ValueError where the tables are not ours. Nothing that a file defines (views, triggers) is ever run."""
    if check_schema and not path.is_file():
        raise FileNotFoundError(f"no ledger at {path}; make one with rl.ledger.Ledger.create")
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.text_factory = bytes  # text of a damaged file need not be UTF-8
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * events.MAX_EVENT_BYTES)
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


class transaction:
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
