"""The submissions of workers: from the arrival of a group's rollouts until they may be trained on, or are refused.

1. A submission is checked against its lease. A group that is not leased, or not signed by the leaseholder, changes nothing.
2. A few threads check it without weights: prompt, ending, recomputed reward. The batch has our rewards, not the claims. One that we
   could not recompute in time is 0 and rejects nothing: it would recur forever.
3. Then the group is quarantined until a verdict on its replay accepts it (rl/orchestrator/verdicts/verdict_collector.py). Only a draw that no
   worker can predict lets a group pass without one, and only by the worker's record (rl/orchestrator/worker_health.py).
4. A rejected group is requeued. After a failed check, all groups of that worker that no batch has taken are quarantined, and the
   steps that trained on its unverified groups are named.
"""

import collections
import concurrent.futures
import dataclasses
import hmac
import itertools
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from inference.rollouts import parquet, row_log
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool
from rl.ledger import run_ledger
from rl.orchestrator import work_share, worker_health
from rl.orchestrator.groups import group_queue, queue_entry
from rl.orchestrator.groups.queue_entry import State
from rl.orchestrator.verdicts import verdict_case, verdict_collector
from rl.protocol import check_rate, task_schedule, timeline
from rl.protocol import verdict as verdict_lib
from rl.verification import checks, responsibility
from rl.verification import rules as rules_lib
from sharding.system import atomic_file

NOT_LEASED = "not leased (or already submitted); late work has no consequences"
VOID = "refused: void: the run was resumed, and this work is of another epoch"
Future = concurrent.futures.Future
NUM_CHECKS = 4  # without weights, at the same time; few, as each may start a scorer process
TURN_S = 0.05  # of a worker's groups in one of these threads
# (group, split) -> its verdict, and recomputed rewards to train on by sample; None: worth 0, as there was no time
CheckGroupWithoutWeights = Callable[
    [Sequence[rollout_lib.Rollout], str], tuple[checks.Verdict, Mapping[int, Mapping[str, float] | None]]
]


@dataclasses.dataclass(frozen=True)
class Kept:
    """A training group in the log: submitted by `worker`, and checked without weights."""

    group: task_schedule.Group
    worker: str
    digest: str
    scores: Mapping[int, Mapping[str, float] | None]
    rollouts: list[rollout_lib.Rollout]

    def to_json(self) -> dict:
        """Returns all but the rollouts as a JSON object, for `read`."""
        named = {"group": vars(self.group), "worker": self.worker, "digest": self.digest}
        return named | {"scores": [*self.scores.items()]}

    def entry(self, is_verified: bool) -> queue_entry.Entry:
        """Returns the group as a batch had taken it before a restart."""
        entry = queue_entry.Entry(self.group, State.ELIGIBLE, self.worker, digest=self.digest, is_verified=is_verified)
        entry.rollouts, entry.scores = sorted(self.rollouts, key=lambda rollout: rollout.sample), self.scores
        return entry


@dataclasses.dataclass(frozen=True)
class _Job:
    """A submitted group to be checked without weights; `recorded` is the future of its event in the ledger."""

    entry: queue_entry.Entry
    rows: parquet.Rows
    recorded: Future
    reply: Future[str]


def write_batch(
    log: row_log.RowLog, workdir: pathlib.Path, step: int, taken: Sequence[queue_entry.Entry], kept: Collection[int]
) -> None:
    """Writes the rollouts of a batch as they were signed, from the log of their groups; removes earlier steps that are not `kept`."""
    steps, wanted = {entry.group.step for entry in taken}, {entry.digest for entry in taken}
    records = itertools.chain.from_iterable(map(log.read, steps))
    found = {head["digest"]: rows.table for head, rows in records if head["digest"] in wanted}
    tables = [found[e.digest] if e.digest in found else parquet.to_table(e.rollouts) for e in taken]
    path = workdir / "rollouts" / f"step_{step}" / "accepted.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, parquet.table_bytes(tables), durable=True)
    for old in log.steps():
        if old < step and old not in kept:
            log.remove(old)


def read_kept(log: row_log.RowLog) -> dict[queue_entry.Key, Kept]:
    """Returns the last record of each group in a log, without those whose rows have another digest than they were verified by."""
    found = {}
    for step in log.steps():
        for head, rows in log.read(step):
            if verdict_lib.group_digest(rows.rollouts) != head["digest"]:
                continue
            group = task_schedule.Group(**head["group"])
            found[group.key] = Kept(group, head["worker"], head["digest"], dict(head["scores"]), rows.rollouts)
    return found


@dataclasses.dataclass(kw_only=True)
class Submissions:
    """Checks the groups that workers hand in, and decides which of them may be trained on. All methods are thread-safe."""

    changed: threading.Condition  # guards the next five; notified when a group may be trained on, or is open again
    queue: group_queue.GroupQueue
    health: worker_health.WorkerHealth  # the marks of workers
    servers: worker_health.WorkerHealth  # those of the servers that answer for the samples they sign: invited keys
    share: work_share.WorkShare
    counts: collections.Counter[str]  # rollouts by outcome, under the end of their metric's name
    ledger: run_ledger.RunLedger | run_ledger.NoLedger  # gets the events
    log: row_log.RowLog  # gets the training groups that passed the checks without weights
    rules: rules_lib.Rules  # those of the run
    max_age: float  # in versions, of rollouts when they arrive: later they are a lost lease. Infinity: such groups are made again
    held_out: Collection[tuple[int, int]]  # (group number, index) of its held-out tasks
    newest: Callable[[], timeline.Policy]  # returns the newest policy that a server may have; called under the lock
    check_group_without_weights: CheckGroupWithoutWeights  # runs in a few threads, which workers share in turns
    verdicts: verdict_collector.VerdictCollector  # replays groups
    secret: bytes  # decides which groups are verified; workers must not know it
    on_verified: Callable[[Sequence[rollout_lib.Rollout]], None]  # called with each group that a verdict accepted
    on_accepted: Callable[[queue_entry.Key], None]  # called under the lock for each group that may be trained on
    on_caught: Callable[[str], None]  # called with a line for people on the steps that a caught worker spoiled
    on_banned: Callable[[str, str], None]  # called with the key of a node that gets no more work, and the reason
    fail: Callable[[BaseException], None]  # ends the run

    def __post_init__(self) -> None:
        self._checkers = fair_pool.FairPool(NUM_CHECKS, "check")
        self.verdicts.start(self._decide, self.fail)

    def resume(self) -> None:
        """Continues the run of a ledger, with fresh draws."""
        # The workers of batches that are made again may know which groups were not replayed the first time. The ledger has the head
        # from which an auditor with the secret repeats the draws.
        head = self.ledger.head()  # without the lock: it waits for a thread that may call `fail`
        with self.changed:
            self.secret = hmac.digest(self.secret, head.encode(), "sha256")
            self.ledger.appointed(self.verdicts.validators, self.verdicts.quorum, **self.health.rates)

    def close(self) -> None:
        """Waits for running replays, but not for other checks; cancels the rest."""
        self._checkers.close()
        self.verdicts.close()

    def submit(self, rows: parquet.Rows) -> dict[str, Future[str]]:
        """Starts the checks of submitted rollouts; returns per group a future of "accepted", "quarantined", or "refused: REASON".

        A training group that is not refused is on disk when its future is set.
        """
        by_key: dict[queue_entry.Key, list[int]] = collections.defaultdict(list)
        with self.changed:
            for row, rollout in sorted(enumerate(rows.rollouts), key=lambda one: one[1].sample):
                by_key[(self._split(rollout), rollout.step, rollout.task.group)].append(row)
        groups = {key: rows.take(of) for key, of in by_key.items()}
        digests = {key: self._digest(key, group.rollouts) for key, group in groups.items()}
        jobs: list[_Job] = []
        replies = {}
        for key, group in groups.items():
            with self.changed:  # for each: leases need it, too
                replies["/".join(map(str, key))] = self._deliver(key, group, digests[key], jobs)
        self._queue_checks(jobs)
        return replies

    def answering(self, entry: queue_entry.Entry) -> list[tuple[worker_health.WorkerHealth, str]]:
        """Returns who answers for a group, with the marks: its worker, and the registered server that all of its samples name."""
        server = responsibility.server_of(entry.rollouts, self.servers.invited)
        return [(self.health, entry.worker), *([(self.servers, server)] if server else [])]

    def begin_epoch(self, epoch: int) -> None:
        """Voids all work of other epochs, without blame: its workers could not know. The caller has the lock."""
        for entry in self.queue.begin_epoch(epoch):
            self.counts["void_epoch"] += len(entry.rollouts)
            for worker in {entry.worker, *entry.leases} - {""}:
                self.health.lost(worker, entry.group.key, time.monotonic(), blame=False)
        self.changed.notify_all()

    def restore(self, kept: Kept) -> None:
        """Takes a group that was submitted and checked before a restart, if the ledger still has it. The caller has the lock.

        Groups without a verdict are drawn again: the restart has other draws, by which an auditor judges the batch.
        """
        known = self.ledger.run.submission(kept.group.step, kept.group.group)
        entry = self.queue.entries.get(kept.group.key)
        if known and known[0] == kept.digest and entry and entry.state is State.OPEN:
            entry = self.queue.restore(kept.group, kept.worker, kept.rollouts, kept.digest)
            entry.scores = kept.scores
            if not known[1]:
                self._quarantine_or_pass(entry)
                return
            self.queue.quarantine(kept.group.key)
            self.queue.accept(kept.group.key)
            self._accepted(entry)

    def _split(self, rollout: rollout_lib.Rollout) -> str:
        """Returns "train" or "held_out". A rollout does not name its split, but only one of them has its task under this number."""
        entry = self.queue.entries.get(("train", rollout.step, rollout.task.group))
        is_train = entry is not None and entry.group.index == rollout.task.index
        return "held_out" if not is_train and (rollout.task.group, rollout.task.index) in self.held_out else "train"

    def _digest(self, key: queue_entry.Key, rollouts: list[rollout_lib.Rollout]) -> str | None:
        """Returns the digest of a group whose signer has leased it; "" if it is not signed, None if it is not leased."""
        holder = rollouts[0].worker
        with self.changed:
            entry = self.queue.entries.get(key)
            if entry is None or not {holder} & {*entry.leases, *entry.past}:
                return None
            num_samples = entry.group.num_samples
        # A forged submission must not cost the leaseholder its lease. One sample too many is enough to reject the group.
        signed = rollouts[: num_samples + 1]
        digests = [rollout_lib.digest(rollout) for rollout in rollouts]
        is_signed = all(r.worker == holder for r in rollouts) and all(map(rollout_lib.is_signed, signed, digests))
        return verdict_lib.group_digest(rollouts, digests) if is_signed else ""

    def _deliver(self, key: queue_entry.Key, rows: parquet.Rows, digest: str | None, jobs: list[_Job]) -> Future[str]:
        """Takes a submitted group by its lease, and adds its other checks to `jobs`; returns a future of the reply.

        A group that its signer has not leased (see `_digest`) is rejected and changes nothing. The caller has the lock.
        """
        rollouts, holder = rows.rollouts, rows.rollouts[0].worker
        if not digest:
            reason = NOT_LEASED if digest is None else "signature: not signed by the leaseholder; sign with its key"
            return self._not_leased(rollouts, reason)
        fate = self.queue.deliver(key, holder, rollouts, digest)
        if fate is queue_entry.Delivery.LATE:
            return self._not_leased(rollouts)
        if fate is queue_entry.Delivery.EPOCH:
            self.counts["void_epoch"] += len(rollouts)
            self.health.lost(holder, key, time.monotonic(), blame=False)
            return _known(VOID)
        if fate is queue_entry.Delivery.TAKEN:
            return self._screen(self.queue.entries[key], rows, jobs)
        self.counts["spare"] += len(rollouts)
        return _known("spare")  # also for a duplicate: the reply must not reveal whether the group passed

    def _screen(self, entry: queue_entry.Entry, rows: parquet.Rows, jobs: list[_Job]) -> Future[str]:
        """Checks a group that is SUBMITTED now, but for `jobs`; returns a future of the reply. The caller has the lock."""
        key = entry.group.key
        recorded = self.ledger.submitted(entry.worker, *key, entry.digest)
        verdict = checks.check_at_lease(rows.rollouts, self.rules.at_lease(entry.group, self.newest().version))
        if not verdict.accepted:
            return _known(self._reject(key, verdict, is_fault=False))
        if key[0] == "train" and self.newest().version - entry.oldest_version > self.max_age:  # maybe withheld
            self.health.lost(entry.worker, key, time.monotonic())
        jobs.append(_Job(entry, rows, recorded, Future()))
        return jobs[-1].reply

    def _screen_spare(self, key: queue_entry.Key) -> None:
        """Checks the rollouts of another holder that took the place of rejected ones, if there are any."""
        if (entry := self.queue.entries[key]).state is State.SUBMITTED:
            jobs: list[_Job] = []
            self._screen(entry, parquet.Rows(parquet.to_table(entry.rollouts), entry.rollouts), jobs)
            self._queue_checks(jobs)

    def _not_leased(self, rollouts: list[rollout_lib.Rollout], reason: str = NOT_LEASED):
        self.counts["unleased"] += len(rollouts)
        return _known(f"refused: {reason}")

    def _queue_checks(self, jobs: Sequence[_Job]) -> None:
        """Has groups of one worker checked in a thread, which costs less for several together."""

        def end(check: Future) -> None:
            for job in jobs if check.cancelled() else ():
                job.reply.cancel()

        if jobs:
            self._checkers.submit(jobs[0].entry.worker, self._check_some, jobs).add_done_callback(end)

    def _check_some(self, jobs: Sequence[_Job]) -> None:
        """Checks groups for `TURN_S`, and queues the others again: a slow scorer must not hold up other workers."""
        end_s, left = time.monotonic() + TURN_S, collections.deque(jobs)
        self._check(left.popleft())
        while left and time.monotonic() < end_s:
            self._check(left.popleft())
        self._queue_checks(left)

    def _check(self, job: _Job) -> None:
        """Checks a submitted group without weights, and has it decided on when that is recorded and the group is on disk.

        The thread does not wait for the disk: one write may take many groups.
        """
        entry, recorded, reply, key = job.entry, job.recorded, job.reply, job.entry.group.key

        def decide(durable: Future) -> None:
            try:
                durable.result()
                with self.changed:
                    reply.set_result(self._conclude(key, entry, verdict, scores))
            except BaseException as error:
                self.fail(error)
                reply.set_exception(error)

        try:
            with self.changed:
                is_void = self.queue.entries.get(key) is not entry
            if is_void:
                return reply.set_result(VOID)
            verdict, scores = self.check_group_without_weights(entry.rollouts, key[0])
            if verdict.accepted and key[0] == "train":
                kept = Kept(entry.group, entry.worker, entry.digest, scores, [])
                recorded = self.log.append(key[1], kept.to_json(), job.rows, after=recorded)
            recorded.add_done_callback(decide)
        except BaseException as error:  # ends the run: no worker is to blame for it
            self.fail(error)
            reply.set_exception(error)

    def _conclude(self, key: queue_entry.Key, entry: queue_entry.Entry, verdict: checks.Verdict, scores) -> str:
        """Rejects a group that was checked without weights, quarantines it, or lets it pass. Returns the reply. The caller has the lock."""
        if self.queue.entries.get(key) is not entry:
            return VOID
        if not verdict.accepted:
            return self._reject(key, verdict, is_fault=True)
        entry.scores = scores
        return self._quarantine_or_pass(entry)

    def _quarantine_or_pass(self, entry: queue_entry.Entry) -> str:
        """Quarantines a checked group, or lets it pass: a held-out group, or one of a trusted worker that is not drawn."""
        key = entry.group.key
        # The draw of a group that comes again may be known: a caught worker's friend gets groups that were let pass before.
        rate = max(health.rate(key) for health, key in self.answering(entry))
        if key[0] == "train" and (entry.was_decided or self._draw(key) < rate):
            self.queue.quarantine(key)
            self.verdicts.ask(key, entry.rollouts, entry.digest)
            return "quarantined"
        self.queue.let_pass(key)
        return self._accepted(entry)

    def _draw(self, key: queue_entry.Key) -> float:
        return check_rate.draw(self.secret, "/".join(map(str, key)))

    def _decide(self, key, digest, verdict, signed: Sequence[verdict_lib.SignedVerdict]) -> None:
        """Accepts or rejects a quarantined group by `verdict`, or requeues it if the group is void."""
        with self.changed:
            for one in signed:
                self.ledger.verdict(one)
            entry = self.queue.entries.get(key)
            if entry is None or entry.state is not State.QUARANTINED or entry.digest != digest:
                return
            if verdict.reason in verdict_case.VOID:
                self.counts[verdict.reason] += len(self.queue.requeue(key).rollouts)
                self.health.lost(entry.worker, key, time.monotonic(), blame=False)
                self._screen_spare(key)
                self.changed.notify_all()
                return
            self.counts["checked"] += len(entry.rollouts)
            if verdict.accepted:
                self.queue.accept(key)
                for health, name in self.answering(entry):
                    health.verified(name)
                self.on_verified(entry.rollouts)
                self._accepted(entry)
            else:
                self._reject(key, verdict, is_fault=True)

    def _accepted(self, entry: queue_entry.Entry) -> str:
        self.counts["accepted"] += len(entry.rollouts) if entry.group.split == "train" else 0
        self.health.accepted(entry.worker, entry.group.key)
        self.share.finished(entry.worker, entry.since_s, time.monotonic())
        self.on_accepted(entry.group.key)
        self.changed.notify_all()
        return "accepted"

    def _reject(self, key: queue_entry.Key, verdict: checks.Verdict, *, is_fault: bool) -> str:
        """Reopens a group and counts it against its worker; after a failed check (`is_fault`), ends the trust in it. Returns the reply."""
        entry = self.queue.requeue(key)
        reply = self._blame(key, entry, verdict, is_fault=is_fault)
        self._screen_spare(key)
        return reply

    def _blame(self, key: queue_entry.Key, entry: queue_entry.Entry, verdict: checks.Verdict, *, is_fault: bool) -> str:
        """Counts a rejected group against its worker, or its server; returns the reply."""
        rules = self.rules.at_lease(entry.group, self.newest().version)
        if server := responsibility.server_at_fault(entry.rollouts, verdict, rules, self.servers.invited):
            return self._reject_server(entry, server, verdict)
        worker, group = entry.worker, entry.group
        self.counts["refused"] += len(entry.rollouts)
        self.counts[f"refused_{verdict.reason}"] += 1
        self.ledger.refused(worker, *key, entry.digest, str(verdict))
        self.health.rejected(worker, key, time.monotonic(), is_fault=is_fault)
        if is_fault:
            self._distrust("worker", self.health, worker)
        if self.health.is_banned(worker):
            self.share.left(worker)
            found = f"{self.health.max_rejections} rejected groups; the last"
            self.ledger.ejected(worker, f"{found}: {verdict}")
            self.on_banned(worker, f"{found}, group {group.group} of step {group.step}: {verdict}")
        self.changed.notify_all()
        return f"refused: {verdict}"

    def _reject_server(self, entry: queue_entry.Entry, server: str, verdict: checks.Verdict) -> str:
        """Counts a group that failed by the fault of `server` against it; the group is void for its worker. Returns the reply."""
        self.counts["server_faults"] += len(entry.rollouts)
        self.health.lost(entry.worker, entry.group.key, time.monotonic(), blame=False)
        was_banned = self.servers.is_banned(server)
        self.servers.rejected(server, entry.group.key, time.monotonic(), is_fault=True)
        self.ledger.joined(server)
        self.ledger.refused(server, *entry.group.key, entry.digest, str(verdict))
        self._distrust("server", self.servers, server)
        if self.servers.is_banned(server) and not was_banned:
            found = f"the samples of {self.servers.max_rejections} groups; the last: {verdict}"
            self.ledger.ejected(server, found)
            self.on_banned(server, found)
            self.on_caught(f"server {server[:16]} gets no more work; its last fault is {verdict}")
        self.changed.notify_all()
        return f"refused: void: the inference server is at fault: {verdict}"

    def _distrust(self, role: str, health: worker_health.WorkerHealth, key: str) -> None:
        """Quarantines all groups of a caught node that passed without a verdict, and names the steps that trained on such groups."""
        for entry in self.queue.recall(lambda entry: (health, key) in self.answering(entry)):
            self.counts["called_back"] += len(entry.rollouts)  # maybe accepted before the counts were last taken
            self.verdicts.ask(entry.group.key, entry.rollouts, entry.digest)
        num_groups, steps = health.reveal(key)
        if num_groups:
            if health is self.health:
                self.counts["trained_unverified_of_cheats"] += num_groups
                self.ledger.named(key, steps)
            where = f"steps {steps[0]} to {steps[-1]} trained on {num_groups} groups of it that nobody verified"
            self.on_caught(f"{role} {key[:16]} failed a check; {where}; an earlier checkpoint is without them")


def _known(reply: str) -> Future[str]:
    future = Future()
    future.set_result(reply)
    return future
