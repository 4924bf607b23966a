"""Who did what, and what it is worth: an append-only record that anyone can check and nobody can rewrite unseen.

    python -m rl.ledger verify DB [--keeper HEX] [--head SEQ:HASH]
    python -m rl.ledger show DB

In time:
1. `create` writes entry 0: the keeper's public key, the validators' keys, and the window in which work can be taken back.
2. An author signs an event (ed25519; rl/ledger/events.py). A node signs for itself (join, stake, submit), a validator signs
   verdicts (accept, invalidate, slash, eject).
3. `append` checks it against the rules, chains it (rl/ledger/storage.py: SHA-256 over number, time, the hash before it, event and
   signature), seals the hash with the keeper's key, and commits with fsync. When it returns, the event survives a kill.
4. Balances, windows, reputation and which tasks are done are derived from the events and stored nowhere
   (rl/ledger/balances.py: a fold over them).
5. `verify` repeats all of it from the file alone and names the first entry that is wrong. A signed head says how many
   entries there must be, so a tail that was cut off shows, too.

After INTELLECT-2's contracts (smart-contracts, protocol): submitted work is a SHA-256 and a number of units, never taken
twice; units stay locked for a window (a day there) in which they can be invalidated; a slash reaches the stake and
forfeits what is still locked; who was ejected does not come back.

Limits: whoever holds the keeper's key can write another history, and a whole older copy of the file is a valid ledger:
give `verify` a head that you noted elsewhere. Left out: withdrawal of stake, transfers, votes among validators.

One file, SQLite's rollback journal: a copy of the file is a copy of the ledger. Times are milliseconds since 1970.
"""

import dataclasses
import pathlib
import re
import sqlite3
import threading
import time

from inference.rollouts import rollout as rollout_lib
from rl.ledger import balances, storage
from rl.ledger import events as ledger_events

WINDOW_MS = 24 * 3600 * 1000


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` found: None, or the first bad entry (`bad_seq`) and what is wrong with it."""

    num_entries: int  # that are good
    error: str | None
    bad_seq: int | None
    head: str | None  # "SEQ:HASH" of the last good entry, to be noted elsewhere


class Ledger:
    """An open ledger; any thread may call it, and several processes may append to one file.

    Opening verifies all of it (two signatures an entry). ValueError for a file that is not a good ledger.
    """

    def __init__(self, path: str | pathlib.Path, keeper: rollout_lib.WorkerKey | None = None):
        """`keeper` is needed to append; its key must be that of entry 0."""
        self._path, self._keeper, self._lock = pathlib.Path(path), keeper, threading.Lock()
        self._connection = storage.connect(self._path)
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
        connection = storage.connect(path, check_schema=False)
        names = sorted({keeper.worker, *validators})
        event = ledger_events.sign("open", keeper.worker, keeper, validators=names, window_ms=window_ms)
        state = balances.State()
        if reason := state.refusal(event, 0):
            path.unlink()
            raise ValueError(f"ledger {path} cannot be opened with these settings: {reason}")
        with storage.transaction(connection):
            for statement in storage.SCHEMA:
                connection.execute(statement)
            storage.insert(connection, keeper, 0, now_ms(), event, bytes(32))
        connection.close()
        return cls(path, keeper)

    def append(self, *events: ledger_events.Event) -> list[storage.Entry]:
        """Appends all of them or none, durably. ValueError with the rule that the first bad one breaks."""
        if self._keeper is None:
            raise ValueError(f"ledger {self._path} was opened without the keeper's key; nothing can be appended")
        with self._lock:
            try:
                with storage.transaction(self._connection):
                    self._catch_up()  # another process may have appended
                    entries = []
                    for event in events:
                        time_ms = max(now_ms(), self.state.time_ms)  # a clock that was set back must not undo order
                        reason = ledger_events.signature_error(event) or self.state.refusal(event, time_ms)
                        if reason:
                            raise ValueError(f"event {event.kind} of {event.node[:16]} is refused: {reason}")
                        hash_ = storage.insert(
                            self._connection, self._keeper, self._next, time_ms, event, self._hash, seal_head=False
                        )
                        self._take(storage.Entry(self._next, time_ms, event, hash_))
                        entries.append(storage.Entry(self._next - 1, time_ms, event, hash_))
                    storage.write_head(self._connection, self._keeper, self._next - 1, self._hash)
            except BaseException:  # whatever it was: the state may be ahead of what was rolled back
                self._load()
                raise
        return entries

    def refresh(self) -> balances.State:
        """The state with what other processes appended since."""
        with self._lock:
            self._catch_up()
            return self.state

    def entries(self) -> list[storage.Entry]:
        with self._lock:
            return [entry for entry, _ in storage.read(self._connection, 0)]

    def _load(self) -> None:
        self.state, self._next, self._hash = balances.State(), 0, bytes(32)
        self._catch_up()
        with storage.transaction(
            self._connection, "BEGIN"
        ):  # the last entries and the head at one moment: others append
            self._catch_up()
            error = storage.head_error(self._connection, self._next - 1, self._hash, self.state.keeper)
        if error:
            raise ValueError(f"ledger {self._path}: {error}; run python -m rl.ledger verify")

    def _catch_up(self) -> None:
        for entry, error in storage.checked(self._connection, self.state, self._next, self._hash):
            if error:
                raise ValueError(f"ledger {self._path}: entry {entry.seq}: {error}; run python -m rl.ledger verify")
            self._next, self._hash = entry.seq + 1, entry.hash

    def _take(self, entry: storage.Entry) -> None:
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
    state, good, last = balances.State(), 0, bytes(32)

    def report(error: str | None) -> Report:
        return Report(good, error, good if error else None, f"{good - 1}:{last.hex()}" if good else None)

    try:
        connection = storage.connect(pathlib.Path(path))
    except (ValueError, sqlite3.Error) as error:
        return report(f"not a ledger: {error}")
    try:
        for entry, error in storage.checked(connection, state, 0, last):
            if error:
                return report(error)
            if keeper is not None and state.keeper != keeper:
                return report(f"kept by {state.keeper}, not by {keeper}")
            if head is not None and entry.seq == int(head.split(":")[0]) and entry.hash.hex() != head.split(":")[1]:
                return report(f"its hash is not the one noted as {head}")
            good, last = entry.seq + 1, entry.hash
        if head is not None and int(head.split(":")[0]) >= good:
            return report(f"missing: a head was noted at {head}")
        return report(storage.head_error(connection, good - 1, last, state.keeper))
    except sqlite3.Error as error:
        return report(f"unreadable: {error}")
    finally:
        connection.close()


def now_ms() -> int:
    return time.time_ns() // 10**6
