"""The memory of a validator, one SQLite file: a worker must not gain by a restart.

1. `Judge` writes the evidence against workers before a verdict leaves it; rl/trust/validator/service.py writes the final statuses of files
   before they are reported. `commit` writes with fsync.
2. The file belongs to one run, one ledger, and one process at a time.

Payment does not depend on this file: the ledger's events name finished tasks (rl/protocol/ledger/task_ranges.py). Its size is bounded: the oldest
statuses are dropped, and the tests with the least evidence. A cheat would need 2^16 honest workers to be dropped.
"""

import contextlib
import json
import pathlib
import sqlite3
import threading
from collections.abc import Mapping
from typing import Any

from rl.protocol.ledger import storage

MAX_ENTRIES = 2**16  # of a kind
MAX_BYTES = 2**26  # of the JSON of a kind in BOUNDED
FORMAT = 2  # PRAGMA user_version
FILES, REQUESTS = "file", "request"  # final statuses by SHA-256 of the file, hashes of the last decided request by name
BOUNDED = (FILES, REQUESTS)
TESTS, COUNTED = "test", "counted"  # of `EvidenceLog.state`: sequential tests by worker, and the rest under the name ""
SCHEMA = (
    "CREATE TABLE run (identity TEXT NOT NULL)",
    "CREATE TABLE entries (kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, name))",
)
PUT = (
    "INSERT INTO entries VALUES (?, ?, ?) ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value "
    "WHERE value != excluded.value"
)
DROP_OLDEST = (
    "DELETE FROM entries WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() OVER newer AS number, "
    "sum(length(value)) OVER newer AS size FROM entries WHERE kind = ? WINDOW newer AS (ORDER BY rowid DESC)) "
    "WHERE number > ? OR size > ?)"
)


class State:
    """The decisions and the evidence of a validator, JSON values by kind and name, in an open SQLite file. Any thread may call the methods."""

    def __init__(self, path: str | pathlib.Path, identity: str):
        """Opens or creates the state file of `identity`. Raises ValueError if it is of another run or ledger, in use, or damaged."""
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            try:
                self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1)
                stack.callback(self.close)
                self._open(identity)
            except (sqlite3.Error, ValueError) as error:
                remedy = "stop the validator that uses it, or give another --state (as for a damaged file)"
                raise ValueError(f"validator state {path} cannot be opened: {error}; {remedy}") from error
            stack.pop_all()

    def close(self) -> None:
        """Closes the state file, so that another process may open it. Waits for a `commit` that runs."""
        with self._lock:
            self._connection.close()

    def get(self, kind: str, name: str) -> Any:
        """Returns a value, or None."""
        with self._lock:
            query = "SELECT value FROM entries WHERE kind = ? AND name = ?"
            row = self._connection.execute(query, (kind, name)).fetchone()
        return json.loads(row[0]) if row else None

    def all(self, kind: str) -> dict[str, Any]:
        """Returns the values of a kind by name, oldest first."""
        with self._lock:
            query = "SELECT name, value FROM entries WHERE kind = ? ORDER BY rowid"
            rows = self._connection.execute(query, (kind,)).fetchall()
        return {name: json.loads(value) for name, value in rows}

    def commit(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes `values`, {kind: {name: value}}, durably and in one transaction. The value None deletes an entry.

        A kind in `BOUNDED` then loses its oldest entries above `MAX_ENTRIES` or `MAX_BYTES`.
        """
        with self._lock, storage.transaction(self._connection):
            for kind, by_name in values.items():
                for name, value in by_name.items():
                    if value is None:
                        self._connection.execute("DELETE FROM entries WHERE kind = ? AND name = ?", (kind, name))
                    else:
                        self._connection.execute(PUT, (kind, name, json.dumps(value, separators=(",", ":"))))
                if kind in BOUNDED:
                    self._connection.execute(DROP_OLDEST, (kind, MAX_ENTRIES, MAX_BYTES))

    def _open(self, identity: str) -> None:
        execute = self._connection.execute
        execute("PRAGMA trusted_schema = OFF")
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA synchronous = FULL")
        (version,) = execute("PRAGMA user_version").fetchone()
        with storage.transaction(self._connection, "BEGIN EXCLUSIVE"):
            if version == 0 and not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in SCHEMA:
                    execute(statement)
                execute("INSERT INTO run VALUES (?)", (identity,))
                execute(f"PRAGMA user_version = {FORMAT}")
            elif version != FORMAT:
                raise ValueError(f"the file is not a validator state of format {FORMAT}")
        if (found := execute("SELECT identity FROM run").fetchall()) != [(identity,)]:
            raise ValueError(f"the file belongs to {found[0][0] if found else 'no run'}, not to {identity}")
