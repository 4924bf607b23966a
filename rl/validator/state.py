"""The memory of a validation service, one SQLite file: a worker must not gain by a restart.

1. `commit` writes the decisions of one request with fsync: final statuses by file hash, accepted rollouts (a task is done once), and the
   sequential tests of the checked workers. Only then are they in memory and reported.
2. `settle` records that the ledger has the events that follow from them. Unsettled files are settled at the next start.
3. Opening the file restores all of it. The file belongs to one run, one ledger, and one process at a time.

Payment does not depend on this file: the ledger's events name finished tasks (rl/ledger/task_ranges.py). Its size is bounded: steps that are
over, the oldest statuses, and the tests with the least evidence are dropped. A cheat would need 2^16 honest workers to be dropped.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sqlite3
from collections.abc import Sequence

from inference.rollouts import rollout as rollout_lib
from rl.ledger import storage
from rl.validator import status as validator_status
from rl.verification import checks, seen_set

MAX_FILES = 2**16
MAX_BYTES = 2**26  # of their statuses as JSON
MAX_TESTS = 2**16
FORMAT = 1  # PRAGMA user_version
SCHEMA = """
CREATE TABLE run (identity TEXT NOT NULL);
CREATE TABLE files (number INTEGER PRIMARY KEY, sha TEXT UNIQUE NOT NULL, status TEXT NOT NULL, settled INTEGER NOT NULL);
CREATE TABLE names (name TEXT NOT NULL, is_group INTEGER NOT NULL, job TEXT NOT NULL, PRIMARY KEY (name, is_group));
CREATE TABLE seen (step INTEGER NOT NULL, digest BLOB NOT NULL, env TEXT NOT NULL, task INTEGER NOT NULL,
  sample INTEGER NOT NULL);
CREATE INDEX seen_step ON seen (step);
CREATE TABLE records (node TEXT PRIMARY KEY, record TEXT NOT NULL, wealth REAL NOT NULL);
"""


class State:
    """The decisions of a validation service, kept in an open SQLite file. One thread writes; any thread may read the attributes.

    Attributes:
      files: final statuses by the file's SHA-256, oldest first.
      unsettled: hashes of files whose verdicts the ledger may lack; a service adds the files that it is about to decide.
      seen: accepted rollouts, which must not be accepted again.
      names: (file name, whether it named a group) -> hashes of the last decided request under that name.
    """

    def __init__(self, path: str | pathlib.Path, identity: str, *, keep_steps: int):
        """Opens or creates the state file of `identity`. Raises ValueError if it is of another run or ledger, in use, or damaged."""
        self._num_bytes = 0
        self.files: dict[str, validator_status.Status] = {}
        self.names: collections.OrderedDict[tuple[str, bool], tuple[str, ...]] = collections.OrderedDict()
        self.unsettled: set[str] = set()
        self.seen = seen_set.SeenSet(keep_steps)
        with contextlib.ExitStack() as stack:
            try:  # check_same_thread: the service opens it in one thread and decides in another, never at the same time
                self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1)
                stack.callback(self.close)
                self._open(identity)
            except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
                remedy = "stop the validator that uses it, or give another --state (as for a damaged file)"
                raise ValueError(f"validator state {path} cannot be opened: {error}; {remedy}") from error
            stack.pop_all()

    def close(self) -> None:
        """Closes the state file, so that another process may open it."""
        self._connection.close()

    def tests(self) -> dict[str, dict]:
        """Returns {worker: its sequential test as plain JSON}, as last committed, for `EvidenceLog.restore`."""
        return {node: json.loads(text) for node, text in self._connection.execute("SELECT node, record FROM records")}

    def commit(
        self,
        request: tuple[str, ...],
        name: tuple[str, bool],
        files: dict[str, validator_status.Status],
        accepted: Sequence[rollout_lib.Rollout],
        tests: dict[str, dict],
    ) -> set[str]:
        """Writes the decisions on a request to disk in one transaction, then adds them to the attributes.

        `files` has the final statuses by file hash, `accepted` the rollouts that must not be repeated, and `tests` the sequential
        tests of the checked workers. Returns the workers whose tests were dropped because there were more than MAX_TESTS.
        """
        entries = [(rollout.step, checks.seen_entries(rollout)) for rollout in accepted]
        texts = {sha: _to_json(status) for sha, status in files.items() if sha not in self.files}
        dropped, num_bytes = [], self._num_bytes + sum(map(len, texts.values()))
        for sha, status in self.files.items():
            if len(self.files) + len(texts) - len(dropped) <= MAX_FILES and num_bytes <= MAX_BYTES:
                break
            dropped.append(sha)
            num_bytes -= len(_to_json(status))
        execute, executemany = self._connection.execute, self._connection.executemany
        with storage.transaction(self._connection):
            executemany("INSERT INTO files (sha, status, settled) VALUES (?, ?, 0)", texts.items())
            executemany("DELETE FROM files WHERE sha = ?", [(sha,) for sha in dropped])
            execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?)", (*name, ",".join(request)))
            rows = [(step, digest, *place) for step, (digest, place) in entries]
            executemany("INSERT INTO seen VALUES (?, ?, ?, ?, ?)", rows)
            if entries:
                newest = max(self.seen.newest, *(step for step, _ in entries))
                execute("DELETE FROM seen WHERE step <= ?", (newest - self.seen.keep_steps,))
            for worker, test in tests.items():
                most = max(max(values) for values in test["log_wealth"].values())
                execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (worker, json.dumps(test), most))
            oldest = "SELECT rowid FROM names ORDER BY rowid LIMIT max(0, (SELECT count(*) FROM names) - ?)"
            execute(f"DELETE FROM names WHERE rowid IN ({oldest})", (MAX_FILES,))
            workers = self._drop_tests()
        self._num_bytes = num_bytes
        self.files.update((sha, files[sha]) for sha in texts)
        for sha in dropped:
            del self.files[sha]
        self.unsettled.difference_update(dropped)
        put(self.names, name, request)
        for step, pair in entries:
            self.seen.add(step, *pair)
        return workers

    def settle(self, shas: Sequence[str]) -> None:
        """Records that the ledger contains the verdicts on the files with these hashes."""
        with storage.transaction(self._connection):
            self._connection.executemany("UPDATE files SET settled = 1 WHERE sha = ?", [(sha,) for sha in shas])
        self.unsettled.difference_update(shas)

    def _drop_tests(self) -> set[str]:
        """Deletes the tests with the least evidence, down to 3/4 of MAX_TESTS, if there are too many. Returns their workers."""
        (count,) = self._connection.execute("SELECT count(*) FROM records").fetchone()
        if count <= MAX_TESTS:
            return set()
        least = "SELECT node FROM records ORDER BY wealth LIMIT ?"
        rows = self._connection.execute(least, (count - 3 * MAX_TESTS // 4,)).fetchall()
        self._connection.executemany("DELETE FROM records WHERE node = ?", rows)
        return {worker for (worker,) in rows}

    def _open(self, identity: str) -> None:
        execute = self._connection.execute
        execute("PRAGMA trusted_schema = OFF")
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA synchronous = FULL")
        (version,) = execute("PRAGMA user_version").fetchone()
        with storage.transaction(self._connection, "BEGIN EXCLUSIVE"):
            if version == 0 and not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in SCHEMA.split(";")[:-1]:
                    execute(statement)
                execute("INSERT INTO run VALUES (?)", (identity,))
                execute(f"PRAGMA user_version = {FORMAT}")
            elif version != FORMAT:
                raise ValueError(f"the file is not a validator state of format {FORMAT}")
        if (found := execute("SELECT identity FROM run").fetchall()) != [(identity,)]:
            raise ValueError(f"the file belongs to {found[0][0] if found else 'no run'}, not to {identity}")
        for sha, text, settled in execute("SELECT sha, status, settled FROM files ORDER BY number"):
            self.files[sha] = _from_json(text)
            self._num_bytes += len(text)
            if not settled:
                self.unsettled.add(sha)
        for name, is_group, request in execute("SELECT name, is_group, job FROM names ORDER BY rowid"):
            put(self.names, (name, bool(is_group)), tuple(request.split(",")))
        for step, digest, *place in execute("SELECT step, digest, env, task, sample FROM seen"):
            self.seen.add(step, digest, tuple(place))


def identity(secret: bytes, keeper: str | None) -> str:
    """Returns text that identifies a run (by its secret) and its ledger (by the keeper's public key; None: no ledger)."""
    return f"run {run_of(secret)}, {f'the ledger of {keeper[:16]}' if keeper else 'no ledger'}"


def run_of(secret: bytes) -> str:
    """Returns 16 hex digits that identify the run with this secret and do not reveal the secret."""
    return hashlib.sha256(b"intellax/validator-state/" + secret).hexdigest()[:16]


def put(mapping: collections.OrderedDict, key, value) -> None:
    """Sets mapping[key] = value as the newest entry, and drops the oldest entries beyond MAX_FILES."""
    mapping[key] = value
    mapping.move_to_end(key)
    while len(mapping) > MAX_FILES:
        mapping.popitem(last=False)


def _to_json(status: validator_status.Status) -> str:
    return json.dumps(dataclasses.asdict(status), separators=(",", ":"))


def _from_json(text: str) -> validator_status.Status:
    fields = json.loads(text)
    fields |= {name: tuple(fields[name]) for name in ("failing_indices", "signers")}
    return validator_status.Status(**fields | {"reasons": {int(i): reason for i, reason in fields["reasons"].items()}})
