"""The validation service: rollout files in, verdicts out, over the routes of INTELLECT-2's validators.

    python -m rl.validator serve --workdir=runs/quickstart --rollouts=DIR [--bands=bands.json] [--ledger=DB --key=FILE]

1. `POST /validate/<file>` {file_sha, address} names a Parquet file under --rollouts; `POST /validategroup/<file>` {file_shas, group_id,
   file_number, group_size} names the first of several that belong together (<name>-0.parquet, <name>-1.parquet, ...). The
   reply is the current status, as for `GET /status/<file>` and `/statusgroup/<file>`; repeating a request changes nothing.
2. One thread, which workers share fairly, reads the files of a request, and gives their groups to the `Judge` (rl/trust/validator/judge.py). With a
   ledger, only groups that are drawn by their worker's reputation are replayed (rl/protocol/verdict.py).
3. The status is pending, accept, reject, incomplete_group (a file of the group is missing, or was not named), crashed (the
   validator's own fault, missing weights included: submit the file again), or unknown.
4. With a ledger, only work that was submitted there is checked (else 400). Each file is settled separately: accepted, or taken back
   and its worker slashed or ejected. That worker must have signed the rollouts, and its units must be their output FLOPs, within 1.
5. Decisions are in the state file (rl/trust/validator/state.py) before they are reported, and survive a restart.

A client cannot harm a worker: only bytes whose hash a worker signed in the ledger can cost it anything, and a group has only rollouts that
its worker signed. A file has one final verdict, under every name and in every group.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import math
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence

from inference.rollouts import parquet, parquet_footer
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool
from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import balances, task_ranges
from rl.protocol.ledger import events as ledger_events
from rl.protocol.ledger import ledger as ledger_lib
from rl.trust.validator import judge as judge_lib
from rl.trust.validator import rollout_files
from rl.trust.validator import state as validator_state
from rl.trust.validator import status as validator_status
from rl.trust.verification import checks
from sharding.system import text as text_lib

Status = validator_status.Status
Request = tuple[str, ...]  # the hashes of its files
MAX_GROUP_FILES = 256
MAX_REQUESTS = 2**16  # that are remembered


@dataclasses.dataclass
class _Group:
    """The rollouts of one worker for one task in a request, and the verdict on them."""

    rollouts: list[rollout_lib.Rollout] = dataclasses.field(default_factory=list)
    places: dict[int, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))  # by file
    verdict: checks.Verdict = checks.OK
    is_drawn: bool = False

    @property
    def task(self) -> tuple[int, int]:
        """The step and the number of the group."""
        return self.rollouts[0].step, self.rollouts[0].task.group


class Service:
    """The validation service: checks rollout files under `root` in its own thread and remembers its decisions.

    `submit` and `status` may be called from any thread.

    Args:
      judge: the checks, with the state file, which the caller closes.
      root: directory of the rollout files.
      newest: returns the newest published policy version, or -1 if none exists.
      secret: key of the random draw of the groups to replay.
      min_rate: the lowest rate of replays, for a worker of the best reputation.
      ledger: the ledger to write verdicts to, opened with its keeper's key, or None for no ledger; the caller closes it.
      slash: stake to take from a worker for an offense; 0 takes none.
      eject: whether to eject a worker from the ledger for an offense.
    """

    def __init__(
        self,
        judge: judge_lib.Judge,
        root: pathlib.Path,
        newest: Callable[[], int],
        *,
        secret: bytes,
        min_rate: float,
        ledger: ledger_lib.Ledger | None = None,
        slash: int = 0,
        eject: bool = False,
    ):
        self._judge, self._root, self._newest = judge, root, newest
        self._secret, self._ledger, self._slash, self._eject = secret, ledger, slash, eject
        self._run, self._min_rate = run_of(secret), min_rate
        rules = judge.checker.rules
        # No worker has more steps in hand than a rollout is remembered for.
        self._max_rows = len(rules.groups(1)) * rules.max_samples * rules.max_branches * judge.keep_steps
        self._lock = threading.Lock()  # of the next two, and the counts
        self._futures: collections.OrderedDict[Request, concurrent.futures.Future] = collections.OrderedDict()
        self._latest: collections.OrderedDict[str, Request | Status] = collections.OrderedDict()
        self._pool, self._deciding, self._is_closed = fair_pool.FairPool(1, "validator"), threading.Lock(), False
        self.counts: collections.Counter[str] = collections.Counter()
        self._done, self._newest_done = task_ranges.Done(), 0  # accepted tasks, and the newest step of them
        decided = judge.state.all(validator_state.FILES)
        files = [*map(validator_status.read, decided.values())]
        self._remember(files)
        self._settle([*decided], files)

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
        request, key, works, client = tuple(shas), _key(name, group), self._works(), shas[0]
        if works is not None:
            if unknown := [sha for sha in shas if sha not in works]:
                raise ValueError(f"file_sha {unknown[0]} is not work of this ledger; append its submit event first")
            client = " ".join(sorted({works[sha].node for sha in shas}))  # several share a turn of their own
        missing = [path.name for path in paths if not path.is_file()]
        if missing and group:
            status = Status("incomplete_group", f"file: {missing[0]} does not exist yet")
            with self._lock:
                _put(self._latest, key, status)
            return status
        if self._latest.get(key) != request or self._must_queue(request):
            rollout_files.check(paths, shas)
            with self._lock:
                if self._must_queue(request):
                    _put(self._futures, request, self._pool.submit(client, self._process, paths, request, key))
                _put(self._latest, key, request)
        status = self._status(request, group)
        if address is not None and status.signers and status.signers != (address,):
            return Status("reject", "signature: another worker signed the file than the one that submits it")
        return status

    def status(self, name: str, *, group: bool = False) -> Status:
        """Returns the status of the last submission of the file `name` (or of the group of files, if `group`); "unknown" if there was none."""
        key = _key(name, group)
        latest = self._latest.get(key) or self._judge.state.get(validator_state.REQUESTS, key)
        if latest is None or isinstance(latest, Status):
            return latest or validator_status.UNKNOWN
        return self._status(tuple(latest), group)

    def close(self) -> None:
        """Stops the service: drops queued requests, and waits for the one being decided."""
        self._is_closed = True
        self._pool.close()
        with self._deciding:
            pass

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
        found = [unknown] * len(request) if future is None else future.result()
        files = [self._decided(sha) or status for sha, status in zip(request, found, strict=True)]
        if unknown in files:
            return unknown
        return validator_status.combined(files) if group else files[0]

    def _decided(self, sha: str) -> Status | None:
        """Returns the final status of a file, or None."""
        body = self._judge.state.get(validator_state.FILES, sha)
        return validator_status.read(body) if body else None

    # ---- the deciding thread

    def _process(self, paths: list[pathlib.Path], request: Request, key: str) -> list[Status]:
        """Decides one request; returns a status per file. Logs an error and raises it again."""
        try:
            with self._deciding:
                statuses = self._decide(paths, request)
                final = {sha: dataclasses.asdict(one) for sha, one in zip(request, statuses, strict=True) if one.final}
                self._judge.state.commit({validator_state.FILES: final, validator_state.REQUESTS: {key: request}})
                self._remember(statuses)
                self._settle(request, statuses)
        except BaseException as error:  # the status is "crashed"; the cause is for the log
            if not self._is_closed:
                print(f"validator: {paths[0].name}: {error!r}", file=sys.stderr, flush=True)
                with self._lock:
                    self.counts["crashed"] += 1
            raise
        status = validator_status.combined(statuses)
        with self._lock:
            self.counts[status.status if status.status != "reject" else f"reject {status.reason.split(':')[0]}"] += 1
        return statuses

    def _decide(self, paths: list[pathlib.Path], request: Request) -> list[Status]:
        works, newest, groups = self._works(), self._newest(), collections.defaultdict(_Group)
        statuses: list[Status | None] = []
        files: dict[int, list[rollout_lib.Rollout]] = {}
        num_bytes = 0
        for number, (path, sha) in enumerate(zip(paths, request, strict=True)):
            work = None if works is None else works[sha]
            status = self._decided(sha) or (work and validator_status.of_work(work))
            found = status or self._read(path, sha, work and work.node)
            statuses.append(found if isinstance(found, Status) else None)
            if isinstance(found, Status):
                continue
            files[number] = found
            num_bytes += sum(map(rollout_lib.num_bytes, found))
            if num_bytes > (limit := parquet_footer.MAX_DECODED_BYTES):
                raise ValueError(f"rollouts of over {limit} bytes in one request; name fewer files")
            for index, rollout in enumerate(found):  # by worker: a worker cannot spoil or complete another's group
                group = groups[rollout.step, rollout.task.group, rollout.worker]
                group.rollouts.append(rollout)
                group.places[number].append(index)
        self._judge_groups([*groups.values()], newest)
        for number, rollouts in files.items():
            own = [group for group in groups.values() if number in group.places]
            verdicts = [(group.places[number], group.verdict) for group in own]
            is_checked = any(group.is_drawn for group in own)
            status = validator_status.of_file(self._judge.checker.model, rollouts, verdicts, is_checked=is_checked)
            if works is not None and status.status == "accept":
                status = validator_status.with_units(status, works[request[number]].units)
            statuses[number] = status
        decided = [status for status in statuses if status is not None]
        assert len(decided) == len(statuses)
        done = collections.defaultdict(list)
        for group in groups.values():  # the good groups of final files; other groups may be submitted again
            if group.verdict.accepted and all(decided[number].final for number in group.places):
                done[min(group.places)] += group.rollouts
        for number, members in done.items():
            decided[number] = dataclasses.replace(decided[number], tasks=_tasks(members))
        return decided

    def _read(self, path: pathlib.Path, sha: str, worker: str | None) -> list[rollout_lib.Rollout] | Status:
        """Returns the rollouts of a file, or its status if it has none that may be judged. Raises ValueError if the file's hash has changed."""
        data, rules = rollout_files.read(path, sha), self._judge.checker.rules
        try:
            rollouts = parquet.from_bytes(data, max_rows=self._max_rows, max_tokens=rules.max_model_len)
        except ValueError as error:
            return validator_status.rejected(str(error))
        if not rollouts:
            return validator_status.rejected(f"file: {path.name} contains no rollout")
        num, signers = len(rollouts), tuple(sorted({rollout.worker for rollout in rollouts}))
        if worker is not None and signers != (worker,):
            reason = "signature: another worker signed the rollouts than the one that submitted the work"
            return validator_status.rejected(reason, num, signers)
        if worker is not None and len(_tasks(rollouts)) > task_ranges.MAX_CHARS:
            reason = f"{validator_status.TOO_MANY} for an event of the ledger; submit fewer steps per file"
            return validator_status.rejected(reason, num, signers)
        for index, rollout in enumerate(rollouts):
            if not (verdict := checks.signature(rollout, rules)).accepted:
                return validator_status.rejected(str(verdict), num, signers, at=index)
        return rollouts

    def _judge_groups(self, groups: list[_Group], newest: int) -> None:
        """Sets the verdicts on all groups of a request."""
        for group in groups:
            group.verdict = self._known_verdict(group, newest)
        new = {verdict_lib.group_digest(one.rollouts): one for one in groups if one.verdict.accepted}
        for group in new.values():
            group.is_drawn = self._is_drawn(*group.task, group.rollouts[0].worker)
        drawn = [digest for digest, group in new.items() if group.is_drawn]
        found = self._judge.check({digest: group.rollouts for digest, group in new.items()}, drawn)
        accepted = set()
        for digest, group in new.items():
            group.verdict = found[digest]
            if group.verdict.accepted and group.task in accepted:
                detail = "the request has another worker's group of this task"
                group.verdict = checks.Verdict(checks.Reason.DUPLICATE, detail)
            elif group.verdict.accepted:
                accepted.add(group.task)

    def _known_verdict(self, group: _Group, newest: int) -> checks.Verdict:
        """Returns the verdict on a group that repeats accepted work or has policy versions that are not published here yet (no fault), else OK."""
        step, number = group.task
        version = max(int(rollout.versions.max()) for rollout in group.rollouts)
        if step <= self._newest_done - self._judge.keep_steps:
            found = f"step {step} is over: rollouts of step {self._newest_done} were accepted already"
        elif (self._run, step, number) in self._done:
            found = f"group {number} of step {step} was accepted before"
        elif self._ledger is not None and (self._run, step, number) in self._ledger.state.done:
            found = "by the ledger, its task was accepted before"
        elif newest < version < (step if self._judge.checker.rules.is_fixed else math.inf):
            return checks.Verdict(checks.Reason.WEIGHTS, f"version {version} is not here yet, the newest is {newest}")
        else:
            return checks.OK
        return checks.Verdict(checks.Reason.DUPLICATE, found)

    def _is_drawn(self, step: int, group: int, worker: str) -> bool:
        """Returns True if a group is to be replayed: drawn by its worker's reputation, with a secret that workers do not have."""
        if self._ledger is None:
            return True
        rate = verdict_lib.check_rate(self._ledger.refresh().reputation(worker), self._min_rate)
        return verdict_lib.draw(self._secret, f"{step}/{group}") < rate

    def _remember(self, files: Sequence[Status]) -> None:
        """Adds the tasks that must not be accepted again."""
        for text in (file.tasks for file in files if file.tasks):
            self._done.add(self._run, text)
            self._newest_done = max(self._newest_done, *(step for step, _ in task_ranges.parse_tasks(text)))

    def _settle(self, shas: Sequence[str], files: Sequence[Status]) -> None:
        """Writes decisions on pending work to the ledger: a verdict per file, and at most one penalty per worker.

        Nonces of events follow from the work, so that a kill between the writes to state file and ledger repeats no event.
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
            if work is None or work.status != "pending":
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


def run_of(secret: bytes) -> str:
    """Returns 16 hex digits that identify the run with this secret in a ledger, and do not reveal the secret."""
    return hashlib.sha256(b"intellax/validator-state/" + secret).hexdigest()[:16]


def _key(name: str, group: bool) -> str:
    return json.dumps([name, group])


def _put(mapping: collections.OrderedDict, key, value) -> None:
    """Sets mapping[key] = value as the newest entry, and drops the oldest entries beyond MAX_REQUESTS."""
    mapping[key] = value
    mapping.move_to_end(key)
    while len(mapping) > MAX_REQUESTS:
        mapping.popitem(last=False)


def _tasks(rollouts: Sequence[rollout_lib.Rollout]) -> str:
    return task_ranges.format_tasks((rollout.step, rollout.task.group) for rollout in rollouts)
