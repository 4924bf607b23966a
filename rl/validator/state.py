"""What a validation service must not forget when it restarts: whoever gains by that would wait for it, or see to it.

1. `commit` writes, in one transaction with fsync, what one request decided: the statuses that are final, by the hash of
   the file; the places and digests of what was accepted (a task is done once); the wealth against the nodes that were
   replayed (rl/verification/sequential_test.py). Only then is it in memory, and only then is anybody told.
2. `settle` notes that the ledger has what follows from them. What is not noted is settled at the next start; the
   ledger's events have nonces that follow from the work, so that none is appended twice.
3. Opening the file gives all of it back. Another run's file, or one that was written beside another ledger, is refused;
   so is a file that another process holds.

Of all this, what was paid does not depend on the file: the ledger's events say which tasks are done (rl/ledger/task_ranges.py). Lost with
it are the reasons of verdicts and the wealth against nodes.

Bounded: MAX_FILES statuses, the oldest put out first, of at most MAX_BYTES together; accepted rollouts of as many steps
as may come again; MAX_NODES records, of which those with the least against them go first. A record that comes back
starts as a stranger's does, and a cheat would have to bring 2^16 honest nodes to get rid of one.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.validator import status as validator_status
from rl.verification import checks, seen_set

MAX_FILES = 2**16
MAX_BYTES = 2**26  # of their statuses as JSON
MAX_NODES = 2**16
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
    """An open state file; one thread writes, any thread reads the dictionaries.

    Attributes:
      files: final statuses by SHA-256, oldest first.
      unsettled: of those, what the ledger may not have yet; whoever judges adds what is about to be decided.
      seen: what was accepted.
      names: (file name, whether as a group) -> hashes, of what was judged under it.
    """

    def __init__(self, path: str | pathlib.Path, identity: str, *, keep_steps: int):
        """`identity` names the run and its ledger. ValueError where the file is another's, in use, or damaged."""
        self._path, self._num_bytes = path, 0
        self.files: dict[str, validator_status.Status] = {}
        self.names: collections.OrderedDict[tuple[str, bool], tuple[str, ...]] = collections.OrderedDict()
        self.unsettled: set[str] = set()
        self.seen = seen_set.SeenSet(keep_steps)
        try:  # check_same_thread: the service opens it in one thread and judges in another, never at once
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1)
        except sqlite3.Error as error:
            raise ValueError(f"validator state {path}: {error}; give another --state") from error
        try:
            self._open(identity)
        except sqlite3.Error as error:
            self.close()
            raise ValueError(
                f"validator state {path}: {error}; another validator may use it, or it is damaged: give another --state"
            ) from error
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def records(self) -> dict[str, dict]:
        """Node -> `sequential.Record.state`, as last committed."""
        return {node: json.loads(text) for node, text in self._connection.execute("SELECT node, record FROM records")}

    def commit(
        self,
        job: tuple[str, ...],
        asked: tuple[str, bool],
        files: dict[str, validator_status.Status],
        accepted: Sequence[rollout_lib.Rollout],
        records: dict[str, dict],
    ) -> set[str]:
        """Makes what the request `job` decided, asked under a name, durable and then known.

        Args:
          files: its final statuses by hash. accepted: rollouts that are not to come again.
          records: of the nodes that were replayed, as `records` gives them back.

        Returns:
          Nodes whose records had to make room.
        """
        entries = [(rollout.step, checks.seen_entries(rollout)) for rollout in accepted]
        texts = {sha: _spelled(status) for sha, status in files.items() if sha not in self.files}
        with self._transaction() as execute:
            for sha, text in texts.items():
                execute("INSERT INTO files (sha, status, settled) VALUES (?, ?, 0)", (sha, text))
            execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?)", (*asked, ",".join(job)))
            for step, (digest, place) in entries:
                execute("INSERT INTO seen VALUES (?, ?, ?, ?, ?)", (step, digest, *place))
            if entries:
                newest = max(self.seen.newest, *(entry[0] for entry in entries))
                execute("DELETE FROM seen WHERE step <= ?", (newest - self.seen.keep_steps,))
            for node, record in records.items():
                wealth = max(max(values) for values in record["log_wealth"].values())
                execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (node, json.dumps(record), wealth))
            oldest, num_bytes = self._put_out_files(texts)
            self._put_out_names()
            least = self._put_out_records()
        self._num_bytes = num_bytes
        self.files.update((sha, files[sha]) for sha in texts)
        for sha in oldest:
            del self.files[sha]
        self.unsettled.difference_update(oldest)
        self._point(asked, job)
        for step, pair in entries:
            self.seen.add(step, *pair)
        return least

    def settle(self, shas: Iterable[str]) -> None:
        """The ledger has what follows from these."""
        shas = list(shas)
        with self._transaction() as execute:
            for sha in shas:
                execute("UPDATE files SET settled = 1 WHERE sha = ?", (sha,))
        self.unsettled.difference_update(shas)

    def _put_out_files(self, texts: dict[str, str]) -> tuple[list[str], int]:
        """Deletes the oldest statuses beyond the bounds, but none of `texts`: their hashes, and the bytes that are left."""
        num_files = len(self.files) + len(texts)
        num_bytes = self._num_bytes + sum(map(len, texts.values()))
        oldest = []
        query = "SELECT number, sha, length(status) FROM files ORDER BY number LIMIT 1"
        while (num_files > MAX_FILES or num_bytes > MAX_BYTES) and num_files > len(texts):
            number, sha, length = self._connection.execute(query).fetchone()
            self._connection.execute("DELETE FROM files WHERE number = ?", (number,))
            oldest.append(sha)
            num_files, num_bytes = num_files - 1, num_bytes - length
        return oldest, num_bytes

    def _put_out_names(self) -> None:
        oldest = "SELECT rowid FROM names ORDER BY rowid LIMIT max(0, (SELECT count(*) FROM names) - ?)"
        self._connection.execute(f"DELETE FROM names WHERE rowid IN ({oldest})", (MAX_FILES,))

    def _put_out_records(self) -> set[str]:
        """A quarter at a time: those with the least against them."""
        (count,) = self._connection.execute("SELECT count(*) FROM records").fetchone()
        if count <= MAX_NODES:
            return set()
        least = "SELECT node FROM records ORDER BY wealth LIMIT ?"
        nodes = {node for (node,) in self._connection.execute(least, (count - 3 * MAX_NODES // 4,))}
        self._connection.executemany("DELETE FROM records WHERE node = ?", [(node,) for node in nodes])
        return nodes

    def _point(self, asked: tuple[str, bool], job: tuple[str, ...]) -> None:
        self.names[asked] = job
        self.names.move_to_end(asked)
        while len(self.names) > MAX_FILES:
            self.names.popitem(last=False)

    def _open(self, identity: str) -> None:
        execute = self._connection.execute
        execute("PRAGMA trusted_schema = OFF")
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA synchronous = FULL")
        (version,) = execute("PRAGMA user_version").fetchone()
        with self._transaction("BEGIN EXCLUSIVE"):
            if version == 0 and not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in SCHEMA.split(";")[:-1]:
                    execute(statement)
                execute("INSERT INTO run VALUES (?)", (identity,))
                execute(f"PRAGMA user_version = {FORMAT}")
            elif version != FORMAT:
                raise ValueError(f"{self._path} is no validator state of format {FORMAT}; give another --state")
        if (found := execute("SELECT identity FROM run").fetchall()) != [(identity,)]:
            raise ValueError(
                f"validator state {self._path} belongs to {found[0][0] if found else 'nothing'}, not to {identity}; give "
                "another --state"
            )
        for sha, text, settled in execute("SELECT sha, status, settled FROM files ORDER BY number"):
            self.files[sha] = _read(text)
            self._num_bytes += len(text)
            if not settled:
                self.unsettled.add(sha)
        for name, is_group, job in execute("SELECT name, is_group, job FROM names ORDER BY rowid"):
            self._point((name, bool(is_group)), tuple(job.split(",")))
        for step, digest, *place in execute("SELECT step, digest, env, task, sample FROM seen"):
            self.seen.add(step, digest, tuple(place))

    @contextlib.contextmanager
    def _transaction(self, begin: str = "BEGIN") -> Iterator:
        self._connection.execute(begin)
        try:
            yield self._connection.execute
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def identity(secret: bytes, keeper: str | None) -> str:
    """Names a run by the secret that it keeps, and the ledger (its keeper's key) that its verdicts go to."""
    return f"run {run_of(secret)}, {f'the ledger of {keeper[:16]}' if keeper else 'no ledger'}"


def run_of(secret: bytes) -> str:
    """16 hex digits that name a run to all; they do not tell its secret."""
    return hashlib.sha256(b"intellax/validator-state/" + secret).hexdigest()[:16]


def _spelled(status: validator_status.Status) -> str:
    return json.dumps(dataclasses.asdict(status), separators=(",", ":"))


def _read(text: str) -> validator_status.Status:
    fields = json.loads(text)
    fields |= {name: tuple(fields[name]) for name in ("failing_indices", "signers")}
    return validator_status.Status(**fields | {"reasons": {int(i): reason for i, reason in fields["reasons"].items()}})
