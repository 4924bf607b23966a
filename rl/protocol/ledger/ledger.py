"""The ledger: an append-only, signed record of submitted work and verdicts, which anyone can verify.

1. `create` writes entry 0: the keeper's public key, the validators' keys, and the window in which work can be taken back.
2. `append` checks a signed event (rl/protocol/ledger/events.py) against the rules, chains it by hash, seals the hash with the keeper's key, and
   commits with fsync (rl/protocol/ledger/storage.py). When it returns, the event survives a kill.
3. Balances, reputation, and finished tasks are derived from the events and never stored (rl/protocol/ledger/balances.py).
4. Opening a ledger repeats all of it from the file alone, and names the first bad entry.

After INTELLECT-2's contracts: units stay locked for a window (a day there) in which they can be invalidated; a slash reduces the stake
and forfeits locked units; an ejected worker cannot return. Left out: withdrawal of stake, transfers, votes among validators.

Limits: the owner of the keeper's key can write another history, and an older copy of the whole file is a valid ledger:
note heads elsewhere, and ask `check_contains`. A training run notes heads in its manifests and checkpoints (rl/protocol/ledger/run_ledger.py).
"""

import contextlib
import itertools
import pathlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator

from inference.rollouts import rollout as rollout_lib
from rl.protocol.ledger import balances, storage
from rl.protocol.ledger import events as ledger_events
from sharding.system import atomic_file

WINDOW_MS = 24 * 3600 * 1000


class Ledger(contextlib.AbstractContextManager):
    """An open ledger file: the append-only, signed record of submitted work and verdicts.

    Opening verifies all entries (two signatures each). `keeper` is the private key of the ledger's owner; only appending needs
    the key. `on_checked` is called with each entry and the state after it. Raises FileNotFoundError without a file, and ValueError for a bad ledger or if `keeper` is not the key of entry 0.
    Any thread may call the methods, and several processes may append to one file. `close` or `with` closes the file.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        keeper: rollout_lib.WorkerKey | None = None,
        on_checked: Callable[[storage.Entry, balances.State], object] = lambda entry, state: None,
    ):
        self._path, self.key, self._lock, self._on_checked = pathlib.Path(path), keeper, threading.Lock(), on_checked
        self._connection = storage.connect(self._path)
        try:
            self._load()
            if keeper is not None and keeper.worker != self.state.keeper:
                raise ValueError(f"key {keeper.worker} does not keep ledger {path}; use the key {self.state.keeper}")
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls,
        path: str | pathlib.Path,
        keeper: rollout_lib.WorkerKey,
        *,
        validators: tuple[str, ...] = (),
        window_ms: int = WINDOW_MS,
    ) -> "Ledger":
        """Creates a ledger file with its opening entry, and returns the open ledger. Raises FileExistsError if `path` exists.

        `keeper` is the owner's key, which signs every entry and is a validator, too. `validators` are public keys that may append
        verdicts. Accepted work can be invalidated until `window_ms` milliseconds after its submission.
        """
        path = pathlib.Path(path)
        names = sorted({keeper.worker, *validators})
        event = ledger_events.sign("open", keeper.worker, keeper, validators=names, window_ms=window_ms)
        if reason := balances.State().refusal(event, 0):
            raise ValueError(f"ledger {path} cannot be created: {reason}; correct this setting")
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file.replacing(path, exclusive=True) as temporary:
            storage.create(temporary, keeper, now_ms(), event)
        return cls(path, keeper)

    def close(self) -> None:
        """Closes the file; no other method may be called afterwards."""
        self._connection.close()

    def __exit__(self, *error) -> None:
        self.close()

    def append(self, *events: ledger_events.Event, is_own: bool = False) -> list[storage.Entry]:
        """Appends events to the ledger file durably, all or none; returns their entries.

        `is_own`: this process has just signed them, so that their signatures are not checked. Raises ValueError if one breaks a
        rule, and OSError if the file cannot be written.
        """
        if self.key is None:
            raise ValueError(f"ledger {self._path} was opened without the keeper's key; open it with the key to append")
        entries: list[storage.Entry] = []
        with self._lock:
            try:
                with storage.transaction(self._connection):
                    self._catch_up()  # another process may have appended
                    for event in events:
                        # A clock that was set back must not reverse the order.
                        time_ms = max(now_ms(), self.state.time_ms)
                        reason = ledger_events.signature_error(event, is_own=is_own)
                        if reason := reason or self.state.refusal(event, time_ms):
                            found = f"event {event.kind} of {event.node[:16]} is refused: {reason}"
                            raise ValueError(f"{found}; correct the event or leave it out")
                        entry = storage.insert(self._connection, self.key, self._next, time_ms, event, self._hash)
                        self.state.apply(event, time_ms)
                        self._next, self._hash = entry.seq + 1, entry.hash
                        entries.append(entry)
                    storage.write_head(self._connection, self.key, self._next - 1, self._hash)
                self.head = f"{self._next - 1}:{self._hash.hex()}"
            except sqlite3.Error as error:
                self._reload()
                text = f"ledger {self._path} cannot be written ({error}); nothing was appended"
                raise OSError(f"{text}; end other readers of the file, free its disk, or put the file back") from error
            except BaseException:  # the state may contain entries that were rolled back
                self._reload()
                raise
        return entries

    def check_contains(self, head: str, where: str) -> None:
        """Raises ValueError unless the ledger contains the entry `head` ("SEQ:HASH"), which `where` (a file) names."""
        seq, hash_ = _parse_head(head)
        with self._lock:
            found = self._connection.execute("SELECT hash FROM entries WHERE seq = ?", (seq,)).fetchone()
        if found != (hash_,):
            problem = "has another entry there" if found else f"ends after entry {self._next - 1}"
            text = f"{where} names entry {head} of the run's ledger, but {self._path} {problem}: an older or another history"
            remedy = "put back the newest copy of the ledger, or the whole directory from one backup, into an empty one"
            raise ValueError(f"{text}; {remedy}")

    def refresh(self) -> balances.State:
        """Returns the current state of the ledger, after reading entries that other processes appended. Raises ValueError for a bad one."""
        with self._lock:
            self._catch_up()
            return self.state

    def entries(self, start: int = 0, count: int | None = None) -> list[storage.Entry]:
        """Returns the entries that this object has verified, from number `start`, oldest first; at most `count`."""
        with self._lock:
            stop = self._next if count is None else min(self._next, start + count)
            return list(itertools.islice(storage.read(self._connection, start), max(0, stop - start)))

    def _load(self) -> None:
        self.state, self._next, self._hash = balances.State(), 0, bytes(32)
        self._catch_up()
        # The last entries and the head must be of one moment, since other processes append.
        with storage.transaction(self._connection, "BEGIN"):
            self._catch_up()
            with self._named_in_errors():
                storage.check_head(self._connection, self._next - 1, self._hash, self.state.keeper)
        self.head = f"{self._next - 1}:{self._hash.hex()}"

    def _reload(self) -> None:
        """Reads the file again after a failed write."""
        with contextlib.suppress(sqlite3.Error):
            self._load()

    def _catch_up(self) -> None:
        with self._named_in_errors():
            for entry in storage.checked(self._connection, self.state, self._next, self._hash):
                self._next, self._hash = entry.seq + 1, entry.hash
                self._on_checked(entry, self.state)

    @contextlib.contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError:  # such as a lock
            raise
        except (ValueError, sqlite3.Error) as error:
            found = f"ledger {self._path} is bad at entry {self._next}: {error}"
            raise ValueError(f"{found}; restore a copy that rl.ledger verify accepts") from error


def _parse_head(head: str) -> tuple[int, bytes]:
    if not isinstance(head, str) or not re.fullmatch("[0-9]{1,18}:[0-9a-f]{64}", head):
        raise ValueError(f"head {head!r} is not SEQ:HASH; copy the head from the output of python -m rl.ledger verify")
    seq, _, hash_ = head.partition(":")
    return int(seq), bytes.fromhex(hash_)


def now_ms() -> int:
    """Returns the current time in milliseconds since 1970."""
    return time.time_ns() // 10**6
