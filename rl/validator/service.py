"""The validation service: rollout files in, verdicts out, over the routes of INTELLECT-2's validators.

    python -m rl.validator serve --workdir=runs/quickstart --rollouts=DIR [--bands=bands.json] [--ledger=DB --key=FILE]

1. `POST /validate/<file>` {file_sha, address} names a Parquet file under --rollouts; `POST /validategroup/<file>` {file_shas, group_id,
   file_number, group_size} names the first of several that belong together (<name>-0.parquet, <name>-1.parquet, ...). The
   reply is the current status, as for `GET /status/<file>` and `/statusgroup/<file>`; repeating a request changes nothing.
2. A few threads, which workers share fairly, run all checks that need no weights. One thread decides. It replays every rollout whose
   group is complete, but with a ledger only the groups that are drawn by their worker's reputation (rl/protocol/verdict.py).
3. The status is pending, accept, reject, incomplete_group (a file of the group is missing, or was not named), crashed (the
   validator's own fault, missing weights included: submit the file again), or unknown.
4. With a ledger, only work that was submitted there is checked (else 400). Each file is settled separately: accepted, or taken back
   and its worker slashed or ejected. That worker must have signed the rollouts, and its units must be their output FLOPs, within 1.
5. Decisions are in the state file (rl/validator/state.py) before they are reported, and survive a restart.

A client cannot harm a worker: only bytes whose hash a worker signed in the ledger can cost it anything. A file that is named without the
rest of its group, or together with a bad one, keeps its own verdict. If part of a group or weights are missing, the request accepts
nothing and can be repeated. A file has one final verdict, under every name and in every group.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import math
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence

from inference.rollouts import parquet, parquet_footer
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool
from rl.ledger import balances, task_ranges
from rl.ledger import events as ledger_events
from rl.ledger import ledger as ledger_lib
from rl.protocol import verdict as verdict_lib
from rl.validator import rollout_files
from rl.validator import state as validator_state
from rl.validator import status as validator_status
from rl.verification import checks, verifier
from sharding.system import text as text_lib

Status = validator_status.Status
Checked = validator_status.Checked
Request = tuple[str, ...]  # the hashes of its files
Name = tuple[str, bool]  # a file's name, and whether it named a group
MAX_GROUP_FILES = 256
NUM_READERS = 4  # requests read and checked at the same time, of at most parquet_footer.MAX_DECODED_BYTES each


class Service:
    """The validation service: checks rollout files under `root` in its own threads and remembers its decisions.

    `submit` and `status` may be called from any thread.

    Args:
      validator: the checks, with access to the published weights.
      root: directory of the rollout files.
      newest: returns the newest published policy version, or -1 if none exists.
      secret: key of the random draw of the groups to replay.
      min_rate: the lowest rate of replays, for a worker of the best reputation.
      state: the decisions of earlier services on this run; `close` closes it.
      ledger: the ledger to write verdicts to, opened with its keeper's key, or None for no ledger; the caller closes it.
      slash: stake to take from a worker for an offense; 0 takes none.
      eject: whether to eject a worker from the ledger for an offense.
    """

    def __init__(
        self,
        validator: verifier.Validator,
        root: pathlib.Path,
        newest: Callable[[], int],
        *,
        secret: bytes,
        min_rate: float,
        state: validator_state.State,
        ledger: ledger_lib.Ledger | None = None,
        slash: int = 0,
        eject: bool = False,
    ):
        self._validator, self._root, self._newest = validator, root, newest
        self._secret, self._ledger, self._slash, self._eject = secret, ledger, slash, eject
        self._state, self._run, self._min_rate = state, validator_state.run_of(secret), min_rate
        rules = validator.rules
        # No worker has more steps in hand than a rollout is remembered for.
        num_rows = len(rules.groups(1)) * rules.max_samples * rules.max_branches
        self._max_rows = num_rows * state.seen.keep_steps
        self._max_tokens = rules.max_model_len
        self._lock = threading.Lock()  # of the next two, and the counts
        self._futures: collections.OrderedDict[Request, concurrent.futures.Future] = collections.OrderedDict()
        self._latest: collections.OrderedDict[Name, Request | Status] = collections.OrderedDict()
        self._decoding = threading.Lock()
        self._readers = fair_pool.FairPool(NUM_READERS, "read-rollouts")
        self._decider = concurrent.futures.ThreadPoolExecutor(1, "validator")
        self._is_closed = False
        self.counts: collections.Counter = collections.Counter()
        validator.evidence.restore(state.tests())
        unsettled = [sha for sha in state.files if sha in state.unsettled]
        self._settle(unsettled, [state.files[sha] for sha in unsettled])

    @property
    def is_busy(self) -> bool:
        """True while a request is checked."""
        with self._lock:
            return any(not future.done() for future in self._futures.values())

    def submit(self, name: str, shas: Sequence[str], address: str | None = None, *, group: bool = False) -> Status:
        """Queues rollout files for checking and returns the current status of the request, without waiting for the verdict.

        `name` is a file, or with `group` the name of one of several files; `shas` are their SHA-256 hashes. A request is queued
        once, and again only if it crashed. If the rollouts are not signed by worker `address`, the reply is a rejection.
        Raises ValueError for a bad name or hash, a missing file, or work that is not in the ledger. A group that misses a file
        has the status "incomplete_group" instead.
        """
        are_hashes = all(map(text_lib.is_hex, shas))
        if not are_hashes or not 0 < len(shas) <= MAX_GROUP_FILES:
            rule = f"file_sha must be a SHA-256 as 64 lower-case hex digits, for 1 to {MAX_GROUP_FILES} files"
            raise ValueError(f"{rule}; correct it")
        if len(set(shas)) < len(shas):
            raise ValueError("file_shas names one file twice; list each hash once")
        names = rollout_files.group_names(name, len(shas)) if group else [name]
        paths = [rollout_files.locate(self._root, each) for each in names]
        request, worker, works = tuple(shas), shas[0], self._works()
        if works is not None:
            if unknown := [sha for sha in shas if sha not in works]:
                raise ValueError(f"file_sha {unknown[0]} is not work of this ledger; append its submit event first")
            worker = " ".join(sorted({works[sha].node for sha in shas}))  # several share a turn of their own
        missing = [path.name for path in paths if not path.is_file()]
        if missing and group:
            status = Status("incomplete_group", f"file: {missing[0]} does not exist yet")
            with self._lock:
                validator_state.put(self._latest, (name, group), status)
            return status
        if self._latest.get((name, group)) != request or self._must_queue(request):
            rollout_files.check(paths, shas)
            with self._lock:
                if self._must_queue(request):
                    future = self._readers.submit(worker, self._process, paths, request, (name, group))
                    validator_state.put(self._futures, request, future)
                validator_state.put(self._latest, (name, group), request)
        status = self._status(request, group)
        if address is not None and status.signers and status.signers != (address,):
            return Status("reject", "signature: another worker signed the file than the one that submits it")
        return status

    def status(self, name: str, *, group: bool = False) -> Status:
        """Returns the status of the last submission of the file `name` (or of the group of files, if `group`); "unknown" if there was none."""
        latest = self._latest.get((name, group)) or self._state.names.get((name, group), validator_status.UNKNOWN)
        return latest if isinstance(latest, Status) else self._status(latest, group)

    def close(self) -> None:
        """Stops the service: drops queued requests, waits for the one being decided, and closes the state file."""
        self._is_closed = True
        self._readers.close()
        self._decider.shutdown(cancel_futures=True)
        self._state.close()

    def _works(self) -> dict[str, balances.Work] | None:
        return None if self._ledger is None else self._ledger.refresh().works

    def _must_queue(self, request: Request) -> bool:
        """Returns True if a request was never queued, or if the validator's own fault kept the request from a verdict."""
        future = self._futures.get(request)
        if future is None or not future.done():
            return future is None
        return future.exception() is not None or any(file.status == "crashed" for file in future.result())

    def _status(self, request: Request, group: bool) -> Status:
        future = self._futures.get(request)
        if future is not None and not future.done():
            return Status("pending")
        if future is not None and (error := future.exception()):
            return Status("crashed", f"the validator failed: {type(error).__name__}")
        unknown = validator_status.UNKNOWN
        decided = [unknown] * len(request) if future is None else future.result()
        files = [self._state.files.get(sha, status) for sha, status in zip(request, decided, strict=True)]
        if unknown in files:
            return unknown
        return validator_status.combined(files) if group else files[0]

    # ---- reader threads

    def _process(self, paths: list[pathlib.Path], request: Request, name: Name) -> list[Status]:
        """Checks and decides one request in a reader thread; returns a status per file. Logs an error and raises it again."""
        try:
            newest = self._newest()
            statuses, rollouts = self._check_files(paths, request, newest)
            return self._decider.submit(self._decide, statuses, rollouts, newest, request, name).result()
        except BaseException as error:  # the status is "crashed"; the cause is for the log
            if not self._is_closed:
                print(f"validator: {paths[0].name}: {error!r}", file=sys.stderr, flush=True)
                with self._lock:
                    self.counts["crashed"] += 1
            raise

    def _check_files(
        self, paths: list[pathlib.Path], request: Request, newest: int
    ) -> tuple[list[Status | None], list[Checked]]:
        """Runs the checks that need no weights. Returns (status per file, or None if undecided; the checked rollouts of undecided files)."""
        works, checked, num_bytes = self._works(), [], 0
        statuses = [self._state.files.get(sha) for sha in request]
        for number, (path, sha) in enumerate(zip(paths, request, strict=True)):
            if statuses[number] is None and works is not None:
                statuses[number] = validator_status.of_work(works[sha])
            if statuses[number] is not None:
                continue
            rollouts = self._read(path, sha)
            if works is not None and not isinstance(rollouts, str) and len(_tasks(rollouts)) > task_ranges.MAX_CHARS:
                rollouts = f"{validator_status.TOO_MANY} for an event of the ledger; submit fewer steps per file"
            if isinstance(rollouts, str):
                statuses[number] = validator_status.rejected(rollouts)
                continue
            num_bytes += sum(map(rollout_lib.num_bytes, rollouts))
            if num_bytes > (limit := parquet_footer.MAX_DECODED_BYTES):
                raise ValueError(f"rollouts of over {limit} bytes in one request; name fewer files")
            signers = tuple(sorted({rollout.worker for rollout in rollouts}))
            if works is not None and signers != (works[sha].node,):
                reason = "signature: another worker signed the rollouts than the one that submitted the work"
                statuses[number] = validator_status.rejected(reason, len(rollouts), signers)
            else:
                checked += [Checked(rollout, number) for rollout in rollouts]
        _update(checked, functools.partial(self._validator.check_without_weights, newest=newest))
        return statuses, checked

    def _read(self, path: pathlib.Path, sha: str) -> list[rollout_lib.Rollout] | str:
        """Returns the rollouts of a file, or the reason why it has none. Raises ValueError if the file's hash has changed."""
        with self._decoding:  # takes 0.8 GiB at worst
            data = rollout_files.read(path, sha)
            try:
                return (
                    parquet.from_bytes(data, max_rows=self._max_rows, max_tokens=self._max_tokens)
                    or f"file: {path.name} contains no rollout"
                )
            except ValueError as error:
                return str(error)

    # ---- the deciding thread

    def _decide(
        self, read: list[Status | None], rollouts: list[Checked], newest: int, request: Request, name: Name
    ) -> list[Status]:
        evidence = self._validator.evidence
        try:
            statuses, accepted, workers = self._judge_files(read, rollouts, newest, request)
            if any(status.status == "crashed" for status in statuses):  # it will be repeated, and would count twice
                evidence.restore(self._state.tests())
                workers = set()
            final = {sha: status for sha, status in zip(request, statuses, strict=True) if status.final}
            evidence.forget(self._state.commit(request, name, final, accepted, evidence.states(workers)))
            self._settle(request, statuses)
        except BaseException:
            evidence.restore(self._state.tests())
            raise
        status = validator_status.combined(statuses)
        with self._lock:
            self.counts[status.status if status.status != "reject" else f"reject {status.reason.split(':')[0]}"] += 1
        return statuses

    def _judge_files(
        self, read: list[Status | None], rollouts: list[Checked], newest: int, request: Request
    ) -> tuple[list[Status], list[rollout_lib.Rollout], set[str]]:
        """Decides a request. Returns (status per file, accepted rollouts that must not be repeated, workers whose rollouts were checked)."""
        works = self._works()
        if works is not None:
            self._state.unsettled.update(sha for sha in request if sha not in self._state.files)
        # Another request may have decided a file since it was read.
        statuses = [self._state.files.get(sha, status) for sha, status in zip(request, read, strict=True)]
        rollouts = [one for one in rollouts if statuses[one.file] is None]
        by_group = collections.defaultdict(list)
        for one in rollouts:  # by worker: a worker cannot spoil or complete another's group
            by_group[one.rollout.step, one.rollout.task.group, one.rollout.worker].append(one)
        groups = list(by_group.values())
        self._judge_rollouts(groups, newest)
        # A group is rejected with its worst member. While a group is incomplete or weights are missing, nothing is accepted.
        for group in groups:
            worst = max(one.rank for one in group)
            for one in group:
                one.group_rank = worst
        least = max((one.rank for one in rollouts if one.rank < validator_status.REJECT), default=0)
        for number, part in itertools.groupby(rollouts, key=lambda one: one.file):
            status = validator_status.of_file(self._validator.model, list(part), least)
            if works is not None and status.status == "accept":
                status = validator_status.with_units(status, works[request[number]].units)
            statuses[number] = status
        decided = [status for status in statuses if status is not None]
        assert len(decided) == len(statuses)
        accepted, done = [], collections.defaultdict(list)
        for group in groups:  # the good groups of final files; other groups may be submitted again
            if not least and all(one.verdict.accepted and decided[one.file].final for one in group):
                accepted += [one.rollout for one in group]
                done[group[0].file] += [one.rollout for one in group]  # a group in two files is listed once
        for number, members in done.items():
            decided[number] = dataclasses.replace(decided[number], tasks=_tasks(members))
        return decided, accepted, {one.rollout.worker for one in rollouts}

    def _judge_rollouts(self, groups: list[list[Checked]], newest: int) -> None:
        """Completes the verdicts of all groups in place: repeats, whole groups, claims, and a replay of the drawn groups."""
        for group in groups:
            for one in group:
                self._check_repeat(one, newest)
            whole = checks.whole_group([one.rollout for one in group], self._validator.rules)
            if not whole.accepted and _is_good(group):
                if whole.reason == "samples":
                    whole = checks.Verdict(validator_status.PARTIAL, str(whole))
                for one in group:
                    one.verdict = whole
        if any(0 < one.rank < validator_status.REJECT for group in groups for one in group):
            return
        _update([one for group in groups if _is_good(group) for one in group], self._validator.evidence.add_claims)
        drawn = [one for group in groups if _is_good(group) and self._is_drawn(group[0].rollout) for one in group]
        for one in drawn:
            one.is_replayed = True
        _update(drawn, self._validator.check_with_weights)
        accepted = set()
        for group in filter(_is_good, groups):
            task = group[0].rollout.step, group[0].rollout.task.group
            if task in accepted:
                for one in group:
                    one.verdict = checks.Verdict("duplicate", "the request has another worker's group of this task")
            accepted.add(task)

    def _check_repeat(self, one: Checked, newest: int) -> None:
        """Rejects a rollout that repeats accepted work. A policy version not published here yet gets the verdict "weights" (no fault)."""
        rollout = one.rollout
        if one.verdict.accepted:
            one.verdict = checks.duplicate(rollout, self._state.seen)
            done = () if self._ledger is None else self._ledger.state.done
            if one.verdict.accepted and (self._run, rollout.step, rollout.task.group) in done:
                one.verdict = checks.Verdict("duplicate", "by the ledger, its task was accepted before")
        elif one.verdict.reason == "versions":
            version, limit = int(rollout.versions.max()), rollout.step if self._validator.rules.is_fixed else math.inf
            if newest < version < limit:
                one.verdict = checks.Verdict("weights", f"version {version} is not here yet, the newest is {newest}")

    def _is_drawn(self, rollout: rollout_lib.Rollout) -> bool:
        """Returns True if a rollout's group is to be replayed: drawn by its worker's reputation, with a secret that workers do not have."""
        if self._ledger is None:
            return True
        rate = verdict_lib.check_rate(self._ledger.refresh().reputation(rollout.worker), self._min_rate)
        return verdict_lib.draw(self._secret, f"{rollout.step}/{rollout.task.group}") < rate

    def _settle(self, shas: Sequence[str], files: list[Status]) -> None:
        """Writes decisions on pending work to the ledger: a verdict per file, and at most one penalty per worker.

        Nonces of events follow from the work, so that a kill between the writes to ledger and state file repeats no event.
        """
        if self._ledger is None or self._ledger.key is None:
            return
        ledger, key = self._ledger.refresh(), self._ledger.key
        events, guilty = [], {}

        def sign(kind: str, worker: str, sha: str, **fields) -> None:
            nonce = hashlib.sha256(f"{kind}/{worker}/{sha}".encode()).hexdigest()[:32]
            events.append(ledger_events.sign(kind, worker, key, nonce=nonce, **fields))

        for sha, file in zip(shas, files, strict=True):
            work = ledger.works.get(sha)
            if work is None or work.status != "pending" or sha not in self._state.unsettled:
                continue
            tasks = {"run": self._run, "tasks": file.tasks} if file.tasks else {}
            if file.status == "accept":
                sign("accept", work.node, sha, work=sha, checked=file.checked, **tasks)
            elif file.status == "reject":
                reason = ledger_events.printable(file.reason)
                if work.units:
                    sign("invalidate", work.node, sha, work=sha, units=work.units, reason=reason, **tasks)
                if any(map(validator_status.is_offense, file.reasons.values())):
                    guilty.setdefault(work.node, (sha, reason))
        for worker, (sha, reason) in guilty.items():
            if self._slash:
                sign("slash", worker, sha, amount=self._slash, reason=reason)
            if self._eject and not ledger.workers[worker].ejected:
                sign("eject", worker, sha, reason=reason)
        if events := [event for event in events if event.nonce not in ledger.nonces]:
            self._ledger.append(*events)
        self._state.settle(shas)


def _tasks(rollouts: Sequence[rollout_lib.Rollout]) -> str:
    return task_ranges.format_tasks((rollout.step, rollout.task.group) for rollout in rollouts)


def _is_good(group: list[Checked]) -> bool:
    return all(one.verdict.accepted for one in group)


def _update(rollouts: list[Checked], check: Callable[[list[rollout_lib.Rollout]], list[checks.Verdict]]) -> None:
    for one, verdict in zip(rollouts, check([one.rollout for one in rollouts]), strict=True):
        one.verdict = verdict
