"""The submissions of workers: from the arrival of a group's rollouts until they may be trained on, or are refused.

1. A submission is checked against its lease. A group that is not leased, or not signed by the leaseholder, changes nothing.
2. A few threads check it without weights: prompt, ending, recomputed reward. The batch has our rewards, not the claims. One that we
   could not recompute in time is 0 and rejects nothing: it would recur forever.
3. Then the group is quarantined until a verdict on its replay accepts it (rl/orchestrator/verdicts/verdict_collector.py). Only a draw that no
   worker can predict lets a group pass without one, and only by the worker's record (rl/orchestrator/worker_health.py).
4. A group that becomes too old for any batch meanwhile is void, without blame for its quarantine, and is made again.
5. A rejected group is requeued. After a failed check, all groups of that worker that no batch has taken are quarantined, and the
   steps that trained on its unverified groups are named.
"""

import collections
import concurrent.futures
import dataclasses
import hmac
import itertools
import pathlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from inference.rollouts import parquet, row_log
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool
from rl.orchestrator import shared, worker_health
from rl.orchestrator.groups import queue_entry
from rl.orchestrator.groups.queue_entry import State
from rl.orchestrator.verdicts import verdict_case, verdict_collector
from rl.protocol import check_rate, task_schedule
from rl.protocol import verdict as verdict_lib
from rl.verification import checks, evidence_log
from rl.verification import rules as rules_lib
from sharding.system import atomic_file

NOT_LEASED = "not leased (or already submitted); late work has no consequences"
VOID = "refused: void: this work is of another epoch, or too old for any batch"
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
        entry.rollouts, entry.scores = sorted(self.rollouts, key=lambda rollout: rollout.number), self.scores
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

    shared: shared.Shared
    log: row_log.RowLog  # gets the training groups that passed the checks without weights
    rules: rules_lib.Rules  # those of the run
    is_withheld: bool  # groups that arrive too old count as lost leases: batches go on without them
    held_out: Collection[tuple[int, int]]  # (group number, index) of its held-out tasks
    check_group_without_weights: CheckGroupWithoutWeights  # runs in a few threads, which workers share in turns
    verdicts: verdict_collector.VerdictCollector  # replays groups
    secret: bytes  # decides which groups are verified; workers must not know it
    on_verified: Callable[[Sequence[rollout_lib.Rollout]], None]  # called with each group that a verdict accepted
    on_delivered: Callable[[str], None]  # called with the environment of a group that was delivered
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
        head = self.shared.ledger.head()  # without the lock: it waits for a thread that may call `fail`
        with self.shared.changed:
            self.secret = hmac.digest(self.secret, head.encode(), "sha256")
            self.shared.ledger.appointed(self.verdicts.validators, self.verdicts.quorum, **self.shared.health.rates)

    def close(self) -> None:
        """Waits for running replays, but not for other checks; cancels the rest."""
        self._checkers.close()
        self.verdicts.close()

    def submit(self, rows: parquet.Rows) -> dict[str, Future[str]]:
        """Starts the checks of submitted rollouts; returns per group a future of "accepted", "quarantined", or "refused: REASON".

        A training group that is not refused is on disk when its future is set.
        """
        # The lock is taken for each group: a file has thousands of rows, and leases need the lock, too.
        splits: dict[tuple[int, int, int], str] = {}
        by_key: dict[queue_entry.Key, list[int]] = collections.defaultdict(list)
        for row, rollout in sorted(enumerate(rows.rollouts), key=lambda one: one[1].number):
            task = rollout.step, rollout.task.group, rollout.task.index
            if task not in splits:
                splits[task] = self._split(*task)
            by_key[splits[task], *task[:2]].append(row)
        jobs: list[_Job] = []
        replies = {}
        for key, of in by_key.items():
            name, digest = "/".join(map(str, key)), self._digest(key, [rows.rollouts[row] for row in of])
            if not digest:
                replies[name] = self._not_leased(len(of), digest)
                continue
            group = rows.take(of)
            with self.shared.changed:
                replies[name] = self._deliver(key, group, digest, jobs)
        self._queue_checks(jobs)
        return replies

    def answering(self, entry: queue_entry.Entry) -> list[tuple[worker_health.WorkerHealth, str]]:
        """Returns who answers for a group, with the marks: its worker, and the registered server that all of its samples name."""
        server = evidence_log.server_of(entry.rollouts, self.shared.servers.invited)
        return [(self.shared.health, entry.worker), *([(self.shared.servers, server)] if server else [])]

    def begin_epoch(self, epoch: int) -> None:
        """Voids all work of other epochs, without blame: its workers could not know. The caller has the lock."""
        for entry in self.shared.queue.begin_epoch(epoch):
            self.shared.counts["void_epoch"] += len(entry.rollouts)
            for worker in {entry.worker, *entry.leases} - {""}:
                self.shared.health.lost(worker, entry.group.key, time.monotonic(), blame=False)
        self.shared.changed.notify_all()

    def void_too_old(self) -> None:
        """Voids the groups in checks or quarantine that are too old for the next batch, without blame. The caller has the lock."""
        for key in self.shared.batches.too_old():
            self._void(self.shared.batches.void(key))

    def restore(self, kept: Kept) -> None:
        """Takes a group that was submitted and checked before a restart, if the ledger still has it. The caller has the lock.

        Groups without a verdict are drawn again: the restart has other draws, by which an auditor judges the batch.
        """
        known = self.shared.ledger.run.submission(kept.group.step, kept.group.group)
        entry = self.shared.queue.entries.get(kept.group.key)
        if known and known[0] == kept.digest and entry and entry.state is State.OPEN:
            entry = self.shared.queue.restore(kept.group, kept.worker, kept.rollouts, kept.digest)
            entry.scores = kept.scores
            if not known[1]:
                self._quarantine_or_pass(entry)
                return
            self.shared.queue.quarantine(kept.group.key)
            self.shared.queue.accept(kept.group.key)
            self._accepted(entry)

    def _split(self, step: int, group: int, index: int) -> str:
        """Returns "train" or "held_out". A rollout does not name its split, but only one of them has its task under this number."""
        with self.shared.changed:
            entry = self.shared.queue.entries.get(("train", step, group))
            is_train = entry is not None and entry.group.index == index
        return "held_out" if not is_train and (group, index) in self.held_out else "train"

    def _digest(self, key: queue_entry.Key, rollouts: list[rollout_lib.Rollout]) -> str | None:
        """Returns the digest of a group whose signer has leased it; "" if it is not signed, None if it is not leased."""
        holder = rollouts[0].worker
        with self.shared.changed:
            entry = self.shared.queue.entries.get(key)
            if entry is None or not {holder} & {*entry.leases, *entry.past}:
                return None
            most = entry.group.num_samples * self.rules.max_branches
        # A forged submission must not cost the leaseholder its lease. One rollout too many is enough to reject the group.
        signed = rollouts[: most + 1]
        digests = [rollout_lib.digest(rollout) for rollout in rollouts]
        is_signed = all(r.worker == holder for r in rollouts) and all(map(rollout_lib.is_signed, signed, digests))
        return verdict_lib.group_digest(rollouts, digests) if is_signed else ""

    def _deliver(self, key: queue_entry.Key, rows: parquet.Rows, digest: str, jobs: list[_Job]) -> Future[str]:
        """Takes a submitted group by its lease, and adds its other checks to `jobs`; returns a future of the reply. The caller has the lock."""
        rollouts, holder = rows.rollouts, rows.rollouts[0].worker
        fate = self.shared.queue.deliver(key, holder, rollouts, digest)
        if fate is queue_entry.Delivery.LATE:
            return self._not_leased(len(rollouts))
        if fate is queue_entry.Delivery.EPOCH:
            self.shared.counts["void_epoch"] += len(rollouts)
            self.shared.health.lost(holder, key, time.monotonic(), blame=False)
            return _known(VOID)
        if fate is queue_entry.Delivery.TAKEN:
            self.on_delivered(self.shared.queue.entries[key].group.env)
            return self._screen(self.shared.queue.entries[key], rows, jobs, blame=self.is_withheld)
        self.shared.counts["spare"] += len(rollouts)
        return _known("spare")  # also for a duplicate: the reply must not reveal whether the group passed

    def _screen(self, entry: queue_entry.Entry, rows: parquet.Rows, jobs: list[_Job], *, blame: bool) -> Future[str]:
        """Checks a group that is SUBMITTED now, but for `jobs`; returns a future of the reply. The caller has the lock.

        One that is too old for any batch counts as a lost lease if `blame`. The caller looks at the spare of a rejected one.
        """
        key = entry.group.key
        recorded = self.shared.ledger.submitted(entry.worker, *key, entry.digest)
        verdict = checks.check_at_lease(rows.rollouts, self.rules.at_lease(entry.group, self.shared.policy.version))
        if not verdict.accepted:
            return _known(self._blame(key, self.shared.queue.requeue(key), verdict, is_fault=False))
        if key[0] == "train" and entry.oldest_version < self.shared.batches.oldest:
            self._lose(self.shared.batches.void(key), blame=blame)
            return _known(VOID)
        jobs.append(_Job(entry, rows, recorded, Future()))
        return jobs[-1].reply

    def _screen_spare(self, key: queue_entry.Key) -> None:
        """Checks the rollouts of other holders that took the place of rejected ones, up to the first that are not rejected."""
        jobs: list[_Job] = []
        while not jobs and (entry := self.shared.queue.entries[key]).state is State.SUBMITTED:
            rows = parquet.Rows(parquet.to_table(entry.rollouts), entry.rollouts)
            self._screen(entry, rows, jobs, blame=False)  # it grew old here
        self._queue_checks(jobs)

    def _not_leased(self, num_rollouts: int, digest: str | None = None) -> Future[str]:
        """Returns a future of the reply for a group without a digest (see `_digest`), which changes nothing."""
        with self.shared.changed:
            self.shared.counts["unleased"] += num_rollouts
        reason = NOT_LEASED if digest is None else "signature: not signed by the leaseholder; sign with its key"
        return _known(f"refused: {reason}")

    def _queue_checks(self, jobs: Sequence[_Job]) -> None:
        """Has groups of one worker checked in a thread, which costs less for several together. Newcomers share two of the threads."""

        def end(check: Future) -> None:
            for job in jobs if check.cancelled() else ():
                job.reply.cancel()

        if jobs:
            worker = jobs[0].entry.worker
            client = worker if self.shared.health.is_known(worker) else "newcomers"
            self._checkers.submit(client, self._check_some, jobs).add_done_callback(end)

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
                with self.shared.changed:
                    reply.set_result(self._conclude(key, entry, verdict, scores))
            except BaseException as error:
                self.fail(error)
                reply.set_exception(error)

        try:
            with self.shared.changed:
                is_void = self.shared.queue.entries.get(key) is not entry
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
        if self.shared.queue.entries.get(key) is not entry:
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
            self.shared.queue.quarantine(key)
            self.verdicts.ask(key, entry.rollouts, entry.digest)
            return "quarantined"
        self.shared.queue.let_pass(key)
        return self._accepted(entry)

    def _draw(self, key: queue_entry.Key) -> float:
        return check_rate.draw(self.secret, "/".join(map(str, key)))

    def _decide(self, key, digest, verdict, signed: Sequence[verdict_lib.SignedVerdict]) -> None:
        """Accepts or rejects a quarantined group by `verdict`, or requeues it if the group is void."""
        with self.shared.changed:
            for one in signed:
                self.shared.ledger.verdict(one)
            entry = self.shared.queue.entries.get(key)
            if entry is None or entry.state is not State.QUARANTINED or entry.digest != digest:
                return
            if verdict.reason in verdict_case.NO_BLAME:
                self.shared.counts[verdict.reason] += len(entry.rollouts)
                return self._void(self.shared.queue.requeue(key))
            self.shared.counts["checked"] += len(entry.rollouts)
            if verdict.accepted:
                self.shared.queue.accept(key)
                for health, name in self.answering(entry):
                    health.verified(name)
                self.on_verified(entry.rollouts)
                self._accepted(entry)
            else:
                self._reject(key, verdict, is_fault=True)

    def _void(self, entry: queue_entry.Entry) -> None:
        """Ends the lease and the checks of a group that was requeued, and looks at its spare. The caller has the lock."""
        self._lose(entry, blame=False)
        self._screen_spare(entry.group.key)

    def _lose(self, entry: queue_entry.Entry, *, blame: bool) -> None:
        self.verdicts.withdraw(entry.digest)
        self.shared.health.lost(entry.worker, entry.group.key, time.monotonic(), blame=blame)
        self.shared.changed.notify_all()

    def _accepted(self, entry: queue_entry.Entry) -> str:
        self.shared.counts["accepted"] += len(entry.rollouts) if entry.group.split == "train" else 0
        self.shared.health.accepted(entry.worker, entry.group.key)
        self.shared.share.finished(entry.worker, entry.since_s, time.monotonic())
        self.shared.batches.accepted(entry.group.key)
        self.shared.changed.notify_all()
        return "accepted"

    def _reject(self, key: queue_entry.Key, verdict: checks.Verdict, *, is_fault: bool) -> str:
        """Reopens a group and counts it against its worker; after a failed check (`is_fault`), ends the trust in it. Returns the reply."""
        entry = self.shared.queue.requeue(key)
        reply = self._blame(key, entry, verdict, is_fault=is_fault)
        self._screen_spare(key)
        return reply

    def _blame(self, key: queue_entry.Key, entry: queue_entry.Entry, verdict: checks.Verdict, *, is_fault: bool) -> str:
        """Counts a rejected group against its worker, or its server; returns the reply."""
        rules = self.rules.at_lease(entry.group, self.shared.policy.version)
        if server := evidence_log.server_at_fault(entry.rollouts, verdict, rules, self.shared.servers.invited):
            return self._reject_server(entry, server, verdict)
        worker, group = entry.worker, entry.group
        self.shared.counts["refused"] += len(entry.rollouts)
        self.shared.counts[f"refused_{verdict.reason}"] += 1
        self.shared.ledger.refused(worker, *key, entry.digest, str(verdict), _environment(entry))
        self.shared.health.rejected(worker, key, time.monotonic(), is_fault=is_fault)
        if is_fault:
            self._distrust("worker", self.shared.health, worker)
        if self.shared.health.is_banned(worker):
            self.shared.share.left(worker)
            found = f"{self.shared.health.max_rejections} rejected groups; the last"
            self.shared.ledger.ejected(worker, f"{found}: {verdict}")
            self.on_banned(worker, f"{found}, group {group.group} of step {group.step}: {verdict}")
        self.shared.changed.notify_all()
        return f"refused: {verdict}"

    def _reject_server(self, entry: queue_entry.Entry, server: str, verdict: checks.Verdict) -> str:
        """Counts a group that failed by the fault of `server` against it; the group is void for its worker. Returns the reply."""
        self.shared.counts["server_faults"] += len(entry.rollouts)
        self.shared.health.lost(entry.worker, entry.group.key, time.monotonic(), blame=False)
        was_banned = self.shared.servers.is_banned(server)
        self.shared.servers.rejected(server, entry.group.key, time.monotonic(), is_fault=True)
        self.shared.ledger.joined(server)
        self.shared.ledger.refused(server, *entry.group.key, entry.digest, str(verdict), _environment(entry))
        self._distrust("server", self.shared.servers, server)
        if self.shared.servers.is_banned(server) and not was_banned:
            found = f"the samples of {self.shared.servers.max_rejections} groups; the last: {verdict}"
            self.shared.ledger.ejected(server, found)
            self.on_banned(server, found)
            self.on_caught(f"server {server[:16]} gets no more work; its last fault is {verdict}")
        self.shared.changed.notify_all()
        return f"refused: void: the inference server is at fault: {verdict}"

    def doubt(self, key: str) -> None:
        """Has all groups of a worker or server replayed from now on, without blame: those, too, that passed without a verdict."""
        with self.shared.changed:
            health = self.shared.servers if key in self.shared.servers.invited else self.shared.health
            health.doubt(key)
            self._recall(health, key)

    def _recall(self, health: worker_health.WorkerHealth, key: str) -> None:
        """Quarantines all groups of a node that passed without a verdict, and that no batch has taken. The caller has the lock."""
        for entry in self.shared.queue.recall(lambda entry: (health, key) in self.answering(entry)):
            self.shared.counts["called_back"] += len(entry.rollouts)  # maybe accepted before the counts were last taken
            if entry.oldest_version < self.shared.batches.oldest:  # no validator may have the weights any more
                self._void(self.shared.batches.void(entry.group.key))
            else:
                self.verdicts.ask(entry.group.key, entry.rollouts, entry.digest)

    def _distrust(self, role: str, health: worker_health.WorkerHealth, key: str) -> None:
        """Takes the trust in a caught node back, and names the steps that trained on groups of it that nobody verified."""
        self._recall(health, key)
        num_groups, steps = health.reveal(key)
        if num_groups:
            if health is self.shared.health:
                self.shared.counts["trained_unverified_of_cheats"] += num_groups
                self.shared.ledger.named(key, steps)
            where = f"steps {steps[0]} to {steps[-1]} trained on {num_groups} groups of it that nobody verified"
            self.on_caught(f"{role} {key[:16]} failed a check; {where}; an earlier checkpoint is without them")


def _environment(entry: queue_entry.Entry) -> str:
    return entry.rollouts[0].task.env if entry.rollouts else ""


def _known(reply: str) -> Future[str]:
    future = Future()
    future.set_result(reply)
    return future
