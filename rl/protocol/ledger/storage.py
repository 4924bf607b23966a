"""A ledger's file: entries chained by hash and sealed by the keeper, rows of one SQLite table, and a signed head.

`insert` chains an event: SHA-256 over number, time, previous hash, event, and signature; the keeper signs the hash. `write_head` signs
the number of entries, so that a removed tail is found. `checked` reads entries and raises for the first bad one: for any bytes in
the file, only ValueError or sqlite3.Error. With SQLite's rollback journal, a copy of the file is a copy of the ledger.
"""

import contextlib
import dataclasses
import hashlib
import pathlib
import sqlite3
import struct
from collections.abc import Iterator

from inference.rollouts import rollout as rollout_lib
from rl.protocol.ledger import balances, events

SCHEMA = (
    "CREATE TABLE entries (seq INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, event BLOB NOT NULL, "
    "signature BLOB NOT NULL, previous BLOB NOT NULL, hash BLOB NOT NULL, seal BLOB NOT NULL)",
    "CREATE TABLE head (id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, hash BLOB NOT NULL, signature BLOB NOT NULL)",
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a ledger file: a signed event, chained to the entry before by its hash and sealed by the keeper's signature."""

    seq: int
    time_ms: int
    event: events.Event
    previous: bytes  # hash of the entry before
    hash: bytes
    seal: bytes


def checked(db: sqlite3.Connection, state: balances.State, start: int, previous: bytes) -> Iterator[Entry]:
    """Verifies entries from number `start` (after hash `previous`), applies each to `state`, and yields it. Raises ValueError for a bad one."""
    expected = start
    if start == 0 and (negative := db.execute("SELECT seq FROM entries WHERE seq < 0 LIMIT 1").fetchone()):
        raise ValueError(f"an entry has the number {negative[0]}; numbers begin at 0")
    for entry in read(db, start):
        if error := _entry_error(entry, state, expected, previous):
            raise ValueError(error)
        state.apply(entry.event, entry.time_ms)
        yield entry
        expected, previous = expected + 1, entry.hash
    if expected == 0:
        raise ValueError("the ledger is empty; it must have at least the opening entry")


def _entry_error(entry: Entry, state: balances.State, expected: int, previous: bytes) -> str | None:
    if entry.seq != expected:
        return f"entry missing: the next entry has number {entry.seq}"
    if entry.previous != previous:
        return "its link is not the hash of the entry before it"
    if entry.time_ms < state.time_ms:
        return "its time is before that of the entry before it"
    body = events.encode(entry.event)
    if entry.hash != hash_of(entry.seq, entry.time_ms, previous, body, entry.event.signature):
        return "its hash does not fit its content"
    if error := events.signature_error(entry.event):
        return error
    if not rollout_lib.signed(state.keeper or entry.event.author, entry.seal, b"intellax/seal/1" + entry.hash):
        return "the keeper did not seal it"
    return state.refusal(entry.event, entry.time_ms)


def read(db: sqlite3.Connection, start: int) -> Iterator[Entry]:
    """Yields a ledger's entries from number `start` without verifying them. Raises ValueError for one that cannot be decoded."""
    query = "SELECT * FROM entries WHERE seq >= ? ORDER BY seq LIMIT 1"
    # One query a row: a cursor reads one row ahead, and would raise for a damaged entry at the good one before it.
    while values := db.execute(query, (start,)).fetchone():
        seq, time_ms, body, signature, previous, hash_, seal = values
        whole = type(seq) is int and start <= seq and type(time_ms) is int and 0 <= time_ms < 2**63
        whole &= isinstance(body, bytes) and len(body) <= events.MAX_EVENT_BYTES
        sizes = ((signature, 64), (previous, 32), (hash_, 32), (seal, 64))
        whole &= all(isinstance(value, bytes) and len(value) == size for value, size in sizes)
        event = events.decode(body, signature) if whole else "a column of it has the wrong type, size, or number"
        if isinstance(event, str):
            raise ValueError(event)
        yield Entry(seq, time_ms, event, previous, hash_, seal)
        start = seq + 1


def create(path: pathlib.Path, keeper: rollout_lib.WorkerKey, time_ms: int, event: events.Event) -> None:
    """Writes the tables of a ledger, `event` as entry 0, and the signed head into an empty file."""
    with contextlib.closing(connect(path, check_schema=False)) as db:
        db.execute("PRAGMA journal_mode = MEMORY")  # a kill leaves one file, which the caller has not renamed yet
        with transaction(db):
            for statement in SCHEMA:
                db.execute(statement)
            write_head(db, keeper, 0, insert(db, keeper, 0, time_ms, event, bytes(32)).hash)


def insert(
    db: sqlite3.Connection, keeper: rollout_lib.WorkerKey, seq: int, time_ms: int, event: events.Event, previous: bytes
) -> Entry:
    """Writes an event as entry `seq` of a ledger, after the entry with hash `previous`. Returns the entry. Checks nothing; call `write_head` next."""
    body = events.encode(event)
    hash_ = hash_of(seq, time_ms, previous, body, event.signature)
    seal = keeper.private.sign(b"intellax/seal/1" + hash_)
    row = (seq, time_ms, body, event.signature, previous, hash_, seal)
    db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    return Entry(seq, time_ms, event, previous, hash_, seal)


def write_head(db: sqlite3.Connection, keeper: rollout_lib.WorkerKey, seq: int, hash_: bytes) -> None:
    """Writes the head of a ledger: the number and hash of the last entry, signed by the keeper, so that a removed tail is found."""
    signature = keeper.private.sign(_head_message(seq, hash_))
    db.execute("INSERT OR REPLACE INTO head VALUES (0, ?, ?, ?)", (seq, hash_, signature))


def _head_message(seq: int, hash_: bytes) -> bytes:
    return b"intellax/head/1" + struct.pack("<Q", seq) + hash_


def check_head(db: sqlite3.Connection, seq: int, hash_: bytes, keeper: str) -> None:
    """Raises ValueError unless the keeper's signed head names entry `seq` with this hash as the last one of the ledger."""
    rows = db.execute("SELECT id, seq, hash, signature FROM head LIMIT 2").fetchall()
    if len(rows) != 1 or type(rows[0][1]) is not int or rows[0][1] < 0 or rows[0][0] != 0:
        raise ValueError("the ledger has no valid head, or several: the signed number and hash of its last entry")
    _, head_seq, head_hash, signature = rows[0]
    is_hash = isinstance(head_hash, bytes)
    if not is_hash or not rollout_lib.signed(keeper, signature, _head_message(head_seq, head_hash)):
        raise ValueError("the ledger's head is not signed by the keeper")
    if (head_seq, head_hash) != (seq, hash_):
        found = "entries are missing or were added at the end"
        raise ValueError(f"{found}; by the ledger's signed head, entry {head_seq} is the last")


def hash_of(seq: int, time_ms: int, previous: bytes, body: bytes, signature: bytes) -> bytes:
    """Returns the SHA-256 of an entry. Every hashed field has a fixed size or follows its length, so no two entries share a preimage."""
    head = b"intellax/entry/1" + struct.pack("<QQ32sQ", seq, time_ms, previous, len(body))
    return hashlib.sha256(head + body + signature).digest()


def connect(path: pathlib.Path, *, check_schema: bool = True) -> sqlite3.Connection:
    """Opens a ledger file; its views and triggers never run. Raises FileNotFoundError, or ValueError if it is not a ledger (unless `check_schema` is False)."""
    if check_schema and not path.is_file():
        raise FileNotFoundError(f"no ledger at {path}; that of a run is WORKDIR/ledger.db; correct the path")
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    db.text_factory = bytes  # text of a damaged file need not be UTF-8
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * events.MAX_EVENT_BYTES)
    try:
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA synchronous = EXTRA")  # FULL does not sync the removal of the journal, which is the commit
        found = db.execute("SELECT sql FROM sqlite_master ORDER BY rowid LIMIT 3").fetchall()
        if check_schema and found != [(statement.encode(),) for statement in SCHEMA]:
            raise ValueError("the SQLite file does not have the tables of a ledger")
    except (sqlite3.Error, ValueError) as error:  # UnicodeDecodeError: SQLite's message quotes bytes of a damaged file
        db.close()
        raise ValueError(f"{path} is not a ledger: {error}; give the path of a ledger file") from error
    return db


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Runs the `with` block in an SQLite transaction, rolled back if the block or the commit raises. `begin="BEGIN"` suffices to read."""
    db.execute(begin)
    try:
        yield
        db.execute("COMMIT")
    finally:  # a COMMIT that fails (a reader outlasts the timeout) leaves the transaction open
        if db.in_transaction:
            db.execute("ROLLBACK")
