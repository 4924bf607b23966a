"""The validator as a service: rollout files in, verdicts out, over the routes that INTELLECT-2's validators ask.

    python -m rl.validator serve --workdir=runs/quickstart --rollouts=DIR [--bands=bands.json] [--ledger=DB --key=FILE]

1. `POST /validate/<file>` {file_sha, address} names a Parquet file under --rollouts; `POST /validategroup/<file>`
   {file_shas, group_id, file_number, group_size} names the first of several that belong together (<name>-0.parquet,
   <name>-1.parquet, ...). The answer is the status as it stands; asking again changes nothing.
2. A few threads, in which nodes take turns (inference/server/fair_pool.py), read files and look over every rollout by all that needs no weights:
   a slow scorer delays the node that it is slow for. One thread judges them then. A file's groups must be whole; every
   rollout gets the replay unless its node earned a pass: a node of reputation r (rl/ledger/ledger.py) is replayed with
   probability max(MIN_RATE, 1 - r), decided by a secret it cannot foresee.
3. `GET /status/<file>` and `/statusgroup/<file>`: {status, input_flops, output_flops, failing_indices, reason, reasons}.
   status is pending, accept, reject, incomplete_group (a file of the group is not there yet, or was not named), crashed
   (the validator's own fault, weights that it cannot have among them, with a line in its log; hand it in again), or
   unknown. Indices are of rollouts, or of files where a group was asked.
4. With a ledger, only work that was submitted there is judged (else 400). Each file is settled for itself: accepted, or
   taken back (and its node slashed by --slash, and ejected where --eject). Its signer must be the node that submitted
   the work, its units the output FLOPs, within 1. Work that repeats other work is not paid, and no offence.
5. What was decided is in the state file (rl/validator/state.py) before anybody is told, and is there after a restart:
   verdicts, what was accepted, the evidence against each node, and what the ledger has still to be told. The ledger's
   events name the tasks that are done, so that nobody is paid twice where the state file is lost.

What an asker says costs nobody anything: a wrong hash is answered with 400, a wrong address with a refusal of that
answer alone, and a file that is named without the rest of its group, or beside a bad one, is judged as if it had not
been; where part of a group or weights are missing, nothing of the request is accepted, and it may be asked again. Only bytes whose hash a node signed for in the ledger can cost that node something. A file is judged for good
once; the same bytes under another name or in another group have the status that they had.

Group-aware: advantages compare the members of a group, so a group falls with its worst member and `failing_indices`
names all of it; `reasons` tells the culprits from the others. `GET /health` counts verdicts by reason.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import hmac
import pathlib
import re
import sys
import threading
from collections.abc import Sequence

from inference.rollouts import parquet, parquet_footer
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool
from models import config as config_lib
from rl.ledger import events as ledger_events
from rl.ledger import ledger, task_ranges
from rl.validator import rollout_files
from rl.validator import state as validator_state
from rl.validator import status as validator_status
from rl.verification import checks, verifier

Status = validator_status.Status
MIN_RATE = 0.05  # of replay, for a node of the best reputation
MAX_STATUSES = 2**16  # of files, requests and names that are remembered
MAX_GROUP_FILES = 256
NUM_LOOKS = 4  # requests that are looked over at a time, of at most rollout_file.MAX_DECODED_BYTES each
REJECT = len(validator_status.RANKS) - 1


@dataclasses.dataclass(frozen=True)
class _Look:
    """What is known of a request's files before they are judged together."""

    files: list[Status | None]  # that need no more judging
    parts: dict[int, list[rollout_lib.Rollout]]  # of the others, by number
    found: dict[int, list[checks.Verdict]]  # one per rollout of a part
    newest: int  # version, when they were looked at


class Service:
    """Judges files under `root`; `submit` and `status` from any thread.

    Args:
      validator: its weights are those of the broadcast whose newest version `newest` tells.
      state: what earlier services on this file decided; closed with the service.
      book: a ledger kept by `key`, or None.
    """

    def __init__(
        self,
        validator: verifier.Validator,
        model: config_lib.ModelConfig,
        root: pathlib.Path,
        newest,
        *,
        secret: bytes,
        state: validator_state.State,
        book: ledger.Ledger | None = None,
        key: rollout_lib.WorkerKey | None = None,
        slash: int = 0,
        eject: bool = False,
    ):
        self._validator, self._model, self._root, self._newest = validator, model, root, newest
        self._secret, self._book, self._key, self._slash, self._eject = secret, book, key, slash, eject
        self._state, self._run = state, validator_state.run_of(secret)
        self._lock = threading.Lock()  # of the next two, and the counts
        self._jobs: collections.OrderedDict[tuple[str, ...], concurrent.futures.Future] = collections.OrderedDict()
        self._latest: collections.OrderedDict[tuple[str, bool], tuple[str, ...] | Status] = collections.OrderedDict()
        self._decoding = threading.Lock()
        self._turns = fair_pool.FairPool(NUM_LOOKS, "look-over")
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "validator")
        self._is_closed = False
        self.counts: collections.Counter = collections.Counter()
        validator.evidence.restore_states(state.records())
        left = [sha for sha in state.files if sha in state.unsettled]
        self._settle(left, [state.files[sha] for sha in left])

    def submit(self, name: str, shas: Sequence[str], address: str | None = None, *, group: bool = False) -> Status:
        """Queues the files once, whatever they are called, and gives their status; what crashed is queued again.

        ValueError where it names no possible file, another's hash, or with a ledger work that nobody submitted there.
        """
        if not 0 < len(shas) <= MAX_GROUP_FILES or not all(re.fullmatch("[0-9a-f]{64}", sha or "") for sha in shas):
            raise ValueError(f"file_sha must be a SHA-256 in lower-case hex, for 1 to {MAX_GROUP_FILES} files")
        if len(set(shas)) < len(shas):
            raise ValueError("file_shas names one file twice; name each file once")
        paths = [
            rollout_files.locate(self._root, part)
            for part in (rollout_files.members(name, len(shas)) if group else [name])
        ]
        job, party = tuple(shas), shas[0]
        if self._book is not None:
            works = self._book.refresh().works
            if unknown := [sha for sha in shas if sha not in works]:
                raise ValueError(f"file_sha {unknown[0]} is no work of this ledger; append its submit event first")
            party = " ".join(sorted({works[sha].node for sha in shas}))  # nobody's turn is used up in other company
        missing = [path.name for path in paths if not path.is_file()]
        if missing and group:
            return self._point(name, group, Status("incomplete_group", f"file: {missing[0]} is not there yet"))
        if self._latest.get((name, group)) != job or self._is_open(job):
            rollout_files.check(paths, shas)
            with self._lock:
                if self._is_open(job):
                    self._jobs[job] = self._turns.submit(party, self._judge_in_turn, paths, job, (name, group))
                    while len(self._jobs) > MAX_STATUSES:
                        self._jobs.popitem(last=False)
            self._point(name, group, job)
        status = self._status(job, group)
        if address is not None and status.signers and status.signers != (address,):
            return Status("reject", "signature: it is signed by another node than the one that hands it in")
        return status

    def status(self, name: str, *, group: bool = False) -> Status:
        """Of what was last asked under this name."""
        latest = self._latest.get((name, group)) or self._state.names.get((name, group), validator_status.UNKNOWN)
        return latest if isinstance(latest, Status) else self._status(latest, group)

    def close(self) -> None:
        self._is_closed = True
        self._turns.close()
        self._thread.shutdown(cancel_futures=True)
        self._state.close()

    def _point(self, name: str, group: bool, latest: tuple[str, ...] | Status):
        with self._lock:
            self._latest[name, group] = latest
            while len(self._latest) > MAX_STATUSES:
                self._latest.popitem(last=False)
        return latest

    def _is_open(self, job: tuple[str, ...]) -> bool:
        """Whether it must be queued: it never was, or a fault of ours kept it from a verdict."""
        future = self._jobs.get(job)
        return future is None or (
            future.done() and (future.exception() is not None or any(f.status == "crashed" for f in future.result()))
        )

    def _status(self, job: tuple[str, ...], group: bool) -> Status:
        future = self._jobs.get(job)
        if future is not None and not future.done():
            return Status("pending")
        if future is not None and (error := future.exception()):
            return Status("crashed", f"the validator failed: {type(error).__name__}")
        files = [self._state.files.get(sha) for sha in job]
        if None in files and future is None:
            return validator_status.UNKNOWN
        if None in files:  # it depends on the company
            files = [known or file for known, file in zip(files, future.result(), strict=True)]
        return validator_status.combined(files) if group else files[0]

    def _judge_in_turn(self, paths: list[pathlib.Path], shas: tuple[str, ...], asked: tuple[str, bool]) -> list[Status]:
        try:
            look = self._look_over(paths, shas)
            return self._thread.submit(self._answer, look, shas, asked).result()
        except BaseException as error:  # status() says "crashed"; the log says why
            if not self._is_closed:
                print(f"validator: {paths[0].name}: {error!r}", file=sys.stderr, flush=True)
                with self._lock:
                    self.counts["crashed"] += 1
            raise

    def _look_over(self, paths: list[pathlib.Path], shas: Sequence[str]) -> _Look:
        """All that needs neither weights nor what other requests came to."""
        works = None if self._book is None else self._book.refresh().works
        look = _Look([self._state.files.get(sha) for sha in shas], {}, {}, self._newest())
        num_bytes = 0
        for number, (path, sha) in enumerate(zip(paths, shas, strict=True)):
            if look.files[number] is not None:
                continue
            if works is not None and (look_up := validator_status.of_work(works[sha])):
                look.files[number] = look_up
                continue
            part = self._decoded(path, sha)
            if works is not None and not isinstance(part, str) and len(_tasks(part)) > task_ranges.MAX_CHARS:
                part = f"{validator_status.TOO_MANY} for an event of the ledger; hand in fewer steps per file"
            if isinstance(part, str):
                look.files[number] = Status("reject", part, (0,), {0: part})
                continue
            num_bytes += sum(map(rollout_lib.num_bytes, part))
            if num_bytes > parquet_footer.MAX_DECODED_BYTES:
                raise ValueError(f"more than {parquet_footer.MAX_DECODED_BYTES} bytes of rollouts in one request")
            signers = tuple(sorted({rollout.worker for rollout in part}))
            if works is not None and signers != (works[sha].node,):
                reason = "signature: it is signed by another node than the one that submitted the work"
                look.files[number] = Status("reject", reason, tuple(range(len(part))), {0: reason}, signers=signers)
            else:
                look.parts[number] = part
        rollouts = [rollout for part in look.parts.values() for rollout in part]
        found = iter(self._validator.check_without_weights(rollouts, newest=look.newest))
        look.found.update((number, [next(found) for _ in part]) for number, part in look.parts.items())
        return look

    def _decoded(self, path: pathlib.Path, sha: str) -> list[rollout_lib.Rollout] | str:
        """What a file holds, or what is wrong with it. ValueError where it is another by now."""
        with self._decoding:  # 0.8 GiB at worst
            data = rollout_files.read(path, sha)
            try:
                return parquet.from_bytes(data) or f"file: {path.name} holds no rollout"
            except ValueError as error:
                return str(error)

    # The judging thread only.

    def _answer(self, look: _Look, shas: tuple[str, ...], asked: tuple[str, bool]) -> list[Status]:
        try:
            files, accepted, nodes = self._judge_files(look, shas)
            if any(file.status == "crashed" for file in files):  # it comes again, and would count twice
                self._validator.evidence.restore_states(self._state.records())
                nodes = set()
            final = {sha: file for sha, file in zip(shas, files, strict=True) if file.final}
            least = self._state.commit(shas, asked, final, accepted, self._validator.evidence.states(nodes))
            self._validator.evidence.forget(least)
            self._settle(shas, files)
        except BaseException:
            self._validator.evidence.restore_states(self._state.records())
            raise
        status = validator_status.combined(files)
        with self._lock:
            self.counts[status.status if status.status != "reject" else f"reject {status.reason.split(':')[0]}"] += 1
        return files

    def _judge_files(
        self, look: _Look, shas: Sequence[str]
    ) -> tuple[list[Status], list[rollout_lib.Rollout], set[str]]:
        """One status each, with indices of its rollouts; which rollouts are done with; which nodes were judged.

        A file whose status is final keeps it in any company.
        """
        works = None if self._book is None else self._book.refresh().works
        if works is not None:
            self._state.unsettled.update(sha for sha in shas if sha not in self._state.files)
        # It may have become final while it was looked over.
        files = [self._state.files.get(sha, file) for sha, file in zip(shas, look.files, strict=True)]
        parts = {number: part for number, part in look.parts.items() if files[number] is None}
        rollouts = [rollout for part in parts.values() for rollout in part]
        found = [verdict for number in parts for verdict in look.found[number]]
        checked = self._judge_rollouts(rollouts, found, look.newest, hashlib.sha256("".join(shas).encode()).digest())
        groups = _groups(rollouts)
        # A group falls with its worst member. While one is incomplete, or weights are missing, nothing else is accepted.
        falls = {i: max(validator_status.rank(found[j]) for j in members) for members in groups for i in members}
        least = max((rank for verdict in found if (rank := validator_status.rank(verdict)) < REJECT), default=0)
        start = 0
        for number, part in parts.items():
            span = range(start, start + len(part))
            files[number] = validator_status.of_file(
                self._model, part, [found[i] for i in span], [falls[i] for i in span], least, checked
            )
            if works is not None and files[number].status == "accept":
                files[number] = validator_status.with_units(files[number], works[shas[number]].units)
            start += len(part)
        owner = [number for number, part in parts.items() for _ in part]
        accepted, done = [], collections.defaultdict(list)
        for members in groups:  # what is sound of files that are done; the rest may come again
            if not least and all(falls[i] == 0 and files[owner[i]].final for i in members):
                accepted += [rollouts[i] for i in members]
                done[owner[members[0]]] += [rollouts[i] for i in members]  # a group in two files is told once
        for number, part in done.items():
            files[number] = dataclasses.replace(files[number], tasks=_tasks(part))
        return files, accepted, {rollout.worker for rollout in rollouts}

    def _judge_rollouts(
        self, rollouts: list[rollout_lib.Rollout], found: list[checks.Verdict], newest: int, lot: bytes
    ) -> bool:
        """Judges on what was `found` so far, in place; whether they were replayed."""
        done = () if self._book is None else self._book.refresh().done
        for i, rollout in enumerate(rollouts):
            if found[i].accepted:
                found[i] = checks.duplicate(rollout, self._state.seen)
                if found[i].accepted and (self._run, rollout.step, rollout.task.group) in done:
                    found[i] = checks.Verdict("duplicate", "its task was accepted before, as the ledger has it")
            elif found[i].reason == "versions" and newest < (version := int(rollout.versions.max())) < rollout.step:
                found[i] = checks.Verdict("weights", f"version {version} has not come here yet, the newest is {newest}")
        groups = _groups(rollouts)
        for members in groups:
            whole = checks.first_failure(checks.WHOLE_GROUP, [rollouts[i] for i in members], self._validator.rules)
            if not whole.accepted and all(found[i].accepted for i in members):
                whole = checks.Verdict(validator_status.PARTIAL, str(whole)) if whole.reason == "samples" else whole
                for i in members:
                    found[i] = whole
        if any(0 < validator_status.rank(verdict) < REJECT for verdict in found):
            return False
        # Whole groups only: the others are lost already. Each by the repute of its own signer: a stranger's rollouts
        # must not pass behind one that borrows a good name and fails by its signature.
        passed = [i for members in groups if all(found[i].accepted for i in members) for i in members]
        for i, verdict in zip(passed, self._validator.evidence.add_claims([rollouts[i] for i in passed]), strict=True):
            found[i] = verdict
        passed = [i for members in groups if all(found[i].accepted for i in members) for i in members]
        checked = any(self._is_drawn(node, lot) for node in {rollouts[i].worker for i in passed})
        if checked:
            judged = self._validator.check_with_weights([rollouts[i] for i in passed])
            for i, verdict in zip(passed, judged, strict=True):
                found[i] = verdict
        places = set()
        for members in groups:
            if all(found[i].accepted for i in members):
                place = rollouts[members[0]].step, rollouts[members[0]].task.group
                if place in places:
                    for i in members:
                        found[i] = checks.Verdict("duplicate", "another node's group of this task came with it")
                places.add(place)
        return checked

    def _is_drawn(self, node: str, lot: bytes) -> bool:
        if self._book is None:
            return True
        rate = max(MIN_RATE, 1 - self._book.refresh().reputation(node))
        number = int.from_bytes(hmac.new(self._secret, lot, hashlib.sha256).digest()[:8], "big")
        return number < rate * 2**64

    def _settle(self, shas: Sequence[str], files: list[Status]) -> None:
        """Writes what was decided on work that is pending: each file for itself, and a penalty once per node.

        Nonces follow from the work: after a kill between the ledger and our own note it is not written twice.
        """
        if self._book is None:
            return
        book = self._book.refresh()
        events, guilty = [], {}

        def sign(kind: str, node: str, sha: str, **fields):
            nonce = hashlib.sha256(f"{kind}/{node}/{sha}".encode()).hexdigest()[:32]
            events.append(ledger_events.sign(kind, node, self._key, nonce=nonce, **fields))

        for sha, file in zip(shas, files, strict=True):
            work = book.works.get(sha)
            if work is None or work.status != "pending" or sha not in self._state.unsettled:
                continue
            tasks = {"run": self._run, "tasks": file.tasks} if file.tasks else {}
            if file.status == "accept":
                sign("accept", work.node, sha, work=sha, checked=file.checked, **tasks)
            elif file.status == "reject":
                line = validator_status.line(file)
                if work.units:
                    sign("invalidate", work.node, sha, work=sha, units=work.units, reason=line, **tasks)
                if any(map(validator_status.is_offence, file.reasons.values())):
                    guilty.setdefault(work.node, (sha, line))
        for node, (sha, line) in guilty.items():
            if self._slash:
                sign("slash", node, sha, amount=self._slash, reason=line)
            if self._eject and not book.nodes[node].ejected:
                sign("eject", node, sha, reason=line)
        if events := [event for event in events if not book.has(event)]:
            self._book.append(*events)
        self._state.settle(shas)


def _tasks(rollouts: Sequence[rollout_lib.Rollout]) -> str:
    return task_ranges.spell((rollout.step, rollout.task.group) for rollout in rollouts)


def _groups(rollouts: Sequence[rollout_lib.Rollout]) -> list[list[int]]:
    """Indices of each group's members: one worker's, so that nobody spoils or completes the group of another."""
    groups = collections.defaultdict(list)
    for i, rollout in enumerate(rollouts):
        groups[rollout.step, rollout.task.group, rollout.worker].append(i)
    return list(groups.values())
