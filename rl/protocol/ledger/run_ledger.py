"""The ledger of a training run: its threads hand events in, and one thread writes them to WORKDIR/ledger.db.

1. Every method returns immediately, with a future that has the event's number once the event is durable: a commit takes several
   fsyncs, so one commit takes all events that gathered during the last. Of these, leases of one worker that nothing separates are
   joined to one event, as are submissions: an event has two signatures. `flush` waits for all earlier events.
2. The orchestrator calls the methods under its lock, as things happen. An event that breaks a rule
   (rl/protocol/ledger/run_rules.py) means that the run must end: that event and all later ones fail.
3. `head` goes into each published manifest and each checkpoint. A ledger that lacks such an anchor is refused: it is an older copy.

The keeper has a key of its own: the run's signing key can be replaced, and the ledger must go on. The manifests that anchor the
ledger are signed with the run's key, so that a reader who trusts that key needs no other to trust the ledger.
"""

import contextlib
import dataclasses
import pathlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from inference.rollouts import rollout as rollout_lib
from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import events as ledger_events
from rl.protocol.ledger import ledger as ledger_lib
from rl.protocol.ledger import run_rules, storage, task_ranges

Recorded = futures.Future[int | None]  # the number of the event, once it is durable
_Unsigned = tuple[str, str, dict]  # kind, node, and fields of an event


class RunLedger(contextlib.AbstractContextManager):
    """The open ledger of a run, created if `path` does not exist. Any thread may call the methods; one process may open it.

    `key` is the keeper's, `run` the public key of the run. Each head in `anchors` ({where it was found: head}) must be in the ledger. Raises ValueError
    for a bad ledger, one of another key, and one that lacks an anchor. `on_failure` is called once, with the error, if an
    event cannot be recorded. With `any_step`, a batch may have groups of any step.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        key: rollout_lib.WorkerKey,
        run: str,
        *,
        anchors: Mapping[str, str] | None = None,
        any_step: bool = False,
    ):
        self.on_failure: Callable[[BaseException], Any] = lambda error: None
        self._key, self._keeper, self._run = key, key.worker, run
        self._order = {"any_step": True} if any_step else {}
        self._ledger = _opened(pathlib.Path(path), key, anchors or {})
        self.refusals = +self._ledger.state.run.refusals  # worker -> refused groups, when the ledger was opened
        self._joined = set(self._ledger.state.workers)
        self._invited = set(self._ledger.state.run.invited)
        self._ejected = {name for name, worker in self._ledger.state.workers.items() if worker.ejected}
        self._lock = threading.RLock()  # of the three sets, and of `_waiting`
        self._failure: BaseException | None = None
        self._waiting: list[tuple[_Unsigned | None, Recorded]] = []  # None: a wait for earlier events
        self._writer = futures.ThreadPoolExecutor(1, "ledger")

    def __exit__(self, *_) -> None:
        """Waits until all events are durable, and closes the file. Later events fail."""
        self._writer.shutdown()
        self._ledger.close()

    @property
    def ejected_workers(self) -> frozenset[str]:
        """The workers that were ejected, also before a resume: a lease for one of them cannot be recorded."""
        with self._lock:
            return frozenset(self._ejected)

    @property
    def run(self) -> run_rules.RunState:
        """The state of the run after the events that are durable: read it after `flush`, and while nothing else records events."""
        return self._ledger.state.run

    def flush(self) -> None:
        """Blocks until all earlier events are durable. Raises the error if one of them could not be recorded."""
        self._put(None).result()

    def head(self) -> str:
        """Returns the ledger's head, "SEQ:HASH", after all earlier events are durable. Raises their error as `flush` does."""
        self.flush()
        return self._ledger.head

    def check_contains(self, head: str, where: str) -> None:
        """Raises ValueError unless the ledger contains the entry `head`, which `where` names."""
        self.flush()
        self._ledger.check_contains(head, where)

    # Events of the run itself.

    def resumed(self, step: int) -> Recorded:
        """Records that the run starts or continues after batch `step`: later batches and versions are void, leases are lost."""
        return self._record("resume", self._keeper, step=step, run=self._run, **self._order)

    def appointed(
        self, validators: Sequence[str], quorum: int = 1, *, min_rate: float, invited_rate: float
    ) -> Recorded:
        """Records the validators (public keys) whose later verdicts count, in place of all before, and how many must accept a group.

        Groups are drawn for a verdict by the two rates from now on.
        """
        rates = {"min_rate": min_rate, "invited_rate": invited_rate}
        return self._record("appoint", self._keeper, validators=sorted(validators), quorum=quorum, **rates)

    def verdict(self, signed: verdict_lib.SignedVerdict) -> Recorded:
        """Records a validator's verdict. It counts for batches if the validator was appointed before."""
        return self._record("verdict", self._keeper, **dataclasses.asdict(signed))

    def batch(
        self,
        step: int,
        digest: str,
        groups: Mapping[tuple[int, int], str],
        epoch: int = -1,
        dropped: Sequence[tuple[int, int]] = (),
        environments: Sequence[Mapping[str, Any]] = (),
        curriculum: str = "",
    ) -> Recorded:
        """Records that batch `step` trains on `groups`: {(step, group): "verified" or "trusted"}. The learner must wait for the future.

        `digest` is `run_rules.batch_digest` over the digests of their submissions, in ascending order of the group. `dropped` are
        groups that no batch will have. `environments` are counts of its groups, and of those dropped without a signal
        (rl/protocol/ledger/environments.py). `curriculum` is the digest of the results up to this batch (rl/protocol/curriculum.py).
        """
        names = {
            basis: task_ranges.format_tasks(group for group, other in groups.items() if other == basis)
            for basis in ("verified", "trusted")
        }
        names |= {"dropped": task_ranges.format_tasks(dropped)} if dropped else {}
        names |= {"environments": [dict(one) for one in environments]} if environments else {}
        names |= {"curriculum": curriculum} if curriculum else {}
        return self._record("batch", self._keeper, step=step, digest=digest, epoch=epoch, **names)

    def published(self, version: int, digest: str, epoch: int = 0) -> Recorded:
        """Records that policy `version` was published; `digest` is the SHA-256 (hex) of its manifest."""
        return self._record("publish", self._keeper, version=version, digest=digest, epoch=epoch)

    # Events of one worker, by its public key.

    def joined(self, worker: str, invited: bool = False) -> None:
        """Records a worker's first lease request, once; `invited` if the config or launcher named the worker's key."""
        with self._lock:
            if worker not in self._joined:
                self._joined.add(worker)
                self._record("join", worker)
            if invited and worker not in self._invited:
                self._invited.add(worker)
                self._record("invite", worker)

    def leased(self, worker: str, split: str, step: int, group: int, version: int, epoch: int = -1) -> Recorded:
        """Records the lease of a group to a worker that joined. `version` and `epoch` are those that the lease pins, or -1."""
        return self._record("lease", worker, split=split, step=step, group=group, version=version, epoch=epoch)

    def submitted(self, worker: str, split: str, step: int, group: int, digest: str) -> Recorded:
        """Records that a leaseholder handed in the rollouts with this group digest. A worker's receipt must wait for the future."""
        return self._record("submission", worker, split=split, step=step, group=group, digest=digest)

    def refused(
        self, worker: str, split: str, step: int, group: int, digest: str, reason: str, environment: str = ""
    ) -> Recorded:
        """Records that a submission was refused; after a rejecting verdict on it, earlier work of the worker is not trusted."""
        named = {"environment": environment} if environment else {}
        fields = dict(split=split, step=step, group=group, digest=digest, reason=reason[:4096])
        return self._record("refusal", worker, **fields, **named)

    def named(self, worker: str, steps: Sequence[int]) -> None:
        """Records the steps that trained on unverified work of a worker that was caught."""
        for i in range(0, len(steps), ledger_events.MAX_STEPS):
            self._record("naming", worker, steps=sorted(steps)[i : i + ledger_events.MAX_STEPS])

    def ejected(self, worker: str, reason: str) -> None:
        """Records, once, that a worker gets no more work in this run."""
        with self._lock:
            if worker not in self._ejected:
                self._ejected.add(worker)
                self._record("eject", worker, reason=ledger_events.printable(reason))

    def _record(self, kind: str, node: str, **fields: Any) -> Recorded:
        return self._put((kind, node, fields))

    def _put(self, event: _Unsigned | None) -> Recorded:
        recorded: Recorded = futures.Future()
        with self._lock:
            try:
                if not self._waiting:  # else a commit that will take this one, too, has not begun
                    self._writer.submit(self._commit)
                self._waiting.append((event, recorded))
            except RuntimeError:
                found = f"{event[0] if event else 'a wait'} came after the run's ledger was closed"
                recorded.set_exception(ValueError(f"{found}; open the ledger again"))
        return recorded

    def _commit(self) -> None:
        """Commits the events that wait."""
        with self._lock:
            items, self._waiting = self._waiting, []
        entries: list[storage.Entry] = []
        joined = _joined(items)
        try:
            signed = [ledger_events.sign(*item[:2], self._key, **item[2]) for item, _ in joined if item]
            if signed and not self._failure:
                self._append(signed, entries)
        except BaseException as error:  # those who wait for the events, and the run, get it
            self._failure = error
            self.on_failure(error)
        numbers = iter([entry.seq for entry in entries])
        for item, waiting in joined:
            number = next(numbers, None) if item else None
            for recorded in waiting:
                if number is None and self._failure:
                    recorded.set_exception(self._failure)
                else:
                    recorded.set_result(number)

    def _append(self, signed: list[ledger_events.Event], entries: list[storage.Entry]) -> None:
        """Appends events to the file and to `entries`; of those with a refused one, all before it. Raises its error."""
        try:
            entries += self._ledger.append(*signed, is_own=True)
        except ValueError:
            for event in signed:
                entries += self._ledger.append(event, is_own=True)


def _joined(items: Sequence[tuple[_Unsigned | None, Recorded]]) -> list[tuple[_Unsigned | None, list[Recorded]]]:
    """Returns events, each with its futures; one in place of a worker's that differ only in their groups.

    Between them are only events of the same kind on other groups, so that their order means nothing.
    """
    out: list[tuple[_Unsigned | None, list[Recorded]]] = []
    kind, places, latest = "", set(), {}  # of the events since the last of another kind; worker -> its last one
    for event, recorded in items:
        names = ledger_events.ALSO.get(event[0], ()) if event else ()
        further = {name: event[2][name] for name in names} if event else {}
        place = tuple(event[2][name] for name in ("split", "step", "group")) if event and names else ()
        if not event or event[0] != kind or place in places:
            kind, places, latest = event[0] if event else "", set(), {}
        places.add(place)
        if event and names and event[1] in latest:
            (*_, before), waiting = latest[event[1]]
            also = before.get("also", [])
            if before | further | {"also": 0} == event[2] | {"also": 0} and len(also) < ledger_events.MAX_ALSO:
                before["also"] = [*also, further]
                waiting.append(recorded)
                continue
        out.append((event, [recorded]))
        if event:
            latest[event[1]] = out[-1]
    return out


class NoLedger:
    """Takes the events of rollouts that train nothing, as in an evaluation, and keeps none of them."""

    run = run_rules.RunState()
    refusals: Mapping[str, int] = {}
    ejected_workers: frozenset[str] = frozenset()

    def head(self) -> str:
        """Returns another text each time, so that no draw repeats."""
        return secrets.token_hex()

    def _drop(self, *_, **__) -> Recorded:
        recorded: Recorded = futures.Future()
        recorded.set_result(None)
        return recorded

    appointed = joined = leased = submitted = verdict = refused = named = ejected = batch = _drop


def _opened(path: pathlib.Path, key: rollout_lib.WorkerKey, anchors: Mapping[str, str]) -> ledger_lib.Ledger:
    """Opens the ledger, or creates it if nothing shows that the run had one before."""
    if not path.exists() and not anchors:
        return ledger_lib.Ledger.create(path, key)
    if not path.exists():
        where, head = next(iter(anchors.items()))
        text = f"{where} names entry {head} of the run's ledger, but {path} does not exist"
        raise ValueError(f"{text}; put it back, or the whole directory from one backup, into an empty one")
    ledger = ledger_lib.Ledger(path, key)
    try:
        for where, head in anchors.items():
            ledger.check_contains(head, where)
    except BaseException:
        ledger.close()
        raise
    return ledger
