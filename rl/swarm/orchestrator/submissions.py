"""The story of a submission: from the arrival of a group's rollouts until they may be trained on, or are refused.

1. `submit` sorts a file by its groups. A group that is not leased, or not signed by the leaseholder, changes nothing.
2. `_take` checks it against its lease: fields that follow from the task, and its age.
3. `_judge` checks it without weights in a few threads: prompt, ending, recomputed reward. The batch has our rewards, not the claims. One
   that we could not recompute in time is 0 and rejects nothing: it would recur forever. Once the ledger and the log have the group, it is
   rejected, quarantined, or passes: only a draw that no worker can predict lets a group pass without a replay, and only by the worker's
   record (rl/swarm/orchestrator/worker_health.py).
4. `_decide` accepts or rejects a quarantined group by the verdict on its replay (rl/swarm/orchestrator/verdicts/verdict_collector.py).

A group that becomes too old for any batch meanwhile is void, without blame for its quarantine, and is made again. A rejected group is
requeued. After a failed check, all groups of that worker that no batch has taken are quarantined, and the steps that trained on its
unverified groups are named.
"""

import collections
import concurrent.futures
import dataclasses
import hmac
import time
from collections.abc import Callable, Generator, Mapping, Sequence

from inference.rollouts import parquet, row_log
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool
from rl.protocol import task_schedule
from rl.protocol import verdict as verdict_lib
from rl.swarm.orchestrator import group_log, worker_health
from rl.swarm.orchestrator import state as state_lib
from rl.swarm.orchestrator.groups import queue_entry
from rl.swarm.orchestrator.groups.queue_entry import State
from rl.swarm.orchestrator.state import RunState
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks, evidence_log
from rl.trust.verification import rules as rules_lib

NOT_LEASED = "not leased (or already submitted); late work has no consequences"
NOT_SIGNED = "signature: not signed by the leaseholder; sign with its key"
VOID = "refused: void: this work is of another epoch, or too old for any batch"
Future = concurrent.futures.Future
NUM_CHECKS = 4  # without weights, at the same time; few, as each may start a scorer process
TURN_S = 0.05  # of a worker's groups in one of these threads
Scores = Mapping[int, Mapping[str, float] | None]  # rewards to train on, by sample; None: worth 0, as there was no time
# (group, split) -> its verdict, and its recomputed rewards
CheckGroupWithoutWeights = Callable[[Sequence[rollout_lib.Rollout], str], tuple[checks.Verdict, Scores]]


@dataclasses.dataclass(frozen=True)
class _Taken:
    """A submitted group that is to be judged; `recorded` is the future of its event in the ledger."""

    entry: queue_entry.Entry
    rows: parquet.Rows
    recorded: Future
    reply: Future[str] = dataclasses.field(default_factory=Future)


@dataclasses.dataclass(kw_only=True)
class Submissions:
    """Checks the groups that workers hand in, and decides which of them may be trained on. All public methods are thread-safe."""

    locked: state_lib.Locked
    log: row_log.RowLog  # gets the training groups that passed the checks without weights
    rules: rules_lib.Rules  # those of the run
    check_group_without_weights: CheckGroupWithoutWeights  # runs in a few threads, which workers share in turns
    verdicts: verdict_collector.VerdictCollector  # replays groups
    secret: bytes  # decides which groups are verified; workers must not know it
    on_verified: Callable[[Sequence[rollout_lib.Rollout]], None]  # called with each group that a verdict accepted
    on_banned: Callable[[str, str], None]  # called with the key of a node that gets no more work, and the reason

    def __post_init__(self) -> None:
        self._checkers, config = fair_pool.FairPool(NUM_CHECKS, "check"), self.locked.config
        # Groups that arrive too old count as lost leases: batches go on without them.
        self._is_withheld = config.rl.batch == "first"
        # (group number, index) of the held-out tasks.
        self._held_out = {(group.group, group.index) for group in task_schedule.held_out_groups(config, 0)}
        self.verdicts.start(self._decide, self.locked.fail)

    def resume(self) -> None:
        """Continues the run of a ledger, with fresh draws."""
        # The workers of batches that are made again may know which groups were not replayed the first time. The ledger has the head
        # from which an auditor with the secret repeats the draws.
        head = self.locked.ledger.head()  # without the lock: it waits for a thread that may call `fail`
        with self.locked as state:
            self.secret = hmac.digest(self.secret, head.encode(), "sha256")
            self.locked.ledger.appointed(self.verdicts.validators, self.verdicts.quorum, **state.health.rates)

    def close(self) -> None:
        """Waits for running replays, but not for other checks; cancels the rest."""
        self._checkers.close()
        self.verdicts.close()

    def doubt(self, key: str) -> None:
        """Has all groups of a worker or server replayed from now on, without blame: those, too, that passed without a verdict."""
        with self.locked as state:
            health = state.servers if key in state.servers.invited else state.health
            health.doubt(key)
            self._recall(state, health, key)

    # The story of a submission.

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
        taken: list[_Taken] = []
        replies: dict[str, Future[str]] = {}
        for key, of in by_key.items():
            digest = self._signed_digest(key, [rows.rollouts[row] for row in of])
            group = rows.take(of) if digest else None
            with self.locked as state:
                if digest and group:
                    found = self._deliver(state, key, group, digest)
                else:
                    state.counts["unleased"] += len(of)
                    found = f"refused: {NOT_LEASED if digest is None else NOT_SIGNED}"
            if isinstance(found, _Taken):
                taken.append(found)
                reply = found.reply
            else:
                reply = Future()
                reply.set_result(found)
            replies["/".join(map(str, key))] = reply
        self._check_in_turns(taken)
        return replies

    def _split(self, step: int, group: int, index: int) -> str:
        """Returns "train" or "held_out". A rollout does not name its split, but only one of them has its task under this number."""
        with self.locked as state:
            entry = state.queue.entries.get(("train", step, group))
            is_train = entry is not None and entry.group.index == index
        return "held_out" if not is_train and (group, index) in self._held_out else "train"

    def _signed_digest(self, key: queue_entry.Key, rollouts: list[rollout_lib.Rollout]) -> str | None:
        """Returns the digest of a group whose signer has leased it; "" if it is not signed, None if it is not leased."""
        holder = rollouts[0].worker
        with self.locked as state:
            entry = state.queue.entries.get(key)
            if entry is None or not {holder} & {*entry.leases, *entry.past}:
                return None
            most = entry.group.num_samples * self.rules.max_branches
        # A forged submission must not cost the leaseholder its lease. One rollout too many is enough to reject the group.
        signed = rollouts[: most + 1]
        digests = [rollout_lib.digest(rollout) for rollout in rollouts]
        is_signed = all(r.worker == holder for r in rollouts) and all(map(rollout_lib.is_signed, signed, digests))
        return verdict_lib.group_digest(rollouts, digests) if is_signed else ""

    def _deliver(self, state: RunState, key: queue_entry.Key, rows: parquet.Rows, digest: str) -> _Taken | str:
        """Hands a group to the queue; returns it to be judged, or the reply."""
        rollouts, holder = rows.rollouts, rows.rollouts[0].worker
        fate = state.queue.deliver(key, holder, rollouts, digest)
        if fate is queue_entry.Delivery.TAKEN:
            state.give_backs.finished(state.queue.entries[key].group.env)
            return self._take(state, state.queue.entries[key], rows, blame=self._is_withheld)
        if fate is queue_entry.Delivery.LATE:
            state.counts["unleased"] += len(rollouts)
            return f"refused: {NOT_LEASED}"
        if fate is queue_entry.Delivery.EPOCH:
            state.counts["void_epoch"] += len(rollouts)
            state.health.lost(holder, key, state.clock(), blame=False)
            return VOID
        state.counts["spare"] += len(rollouts)
        return "spare"  # also for a duplicate: the reply must not reveal whether the group passed

    def _take(self, state: RunState, entry: queue_entry.Entry, rows: parquet.Rows, *, blame: bool) -> _Taken | str:
        """Checks a group that is SUBMITTED now against its lease; returns it to be judged, or the reply.

        If it is too old for any batch, it counts as a lost lease if `blame`. After a rejection, the caller looks at the group's spare.
        """
        key = entry.group.key
        recorded = self.locked.ledger.submitted(entry.worker, *key, entry.digest)
        verdict = checks.check_at_lease(rows.rollouts, self.rules.at_lease(entry.group, state.policy.version))
        if not verdict.accepted:
            return self._blame(state, state.queue.requeue(key), verdict, is_fault=False)
        if key[0] == "train" and entry.oldest_version < state.batches.oldest:
            self._lose(state, state.batches.void(key), blame=blame)
            return VOID
        return _Taken(entry, rows, recorded)

    def _check_in_turns(self, groups: Sequence[_Taken]) -> None:
        """Has groups of one worker judged in a thread, which costs less for several together. Newcomers share two of the threads."""

        def judge_some() -> None:
            # For `TURN_S`, then the others wait again: a slow scorer must not hold up other workers.
            end_s, left = time.monotonic() + TURN_S, collections.deque(groups)
            while left and (len(left) == len(groups) or time.monotonic() < end_s):
                taken = left.popleft()
                self._advance(taken, self._judge(taken))
            self._check_in_turns(left)

        def end(judged: Future) -> None:
            for one in groups if judged.cancelled() else ():
                one.reply.cancel()

        if groups:
            worker = groups[0].entry.worker
            with self.locked as state:
                client = worker if state.health.is_known(worker) else "newcomers"
            self._checkers.submit(client, judge_some).add_done_callback(end)

    def _judge(self, taken: _Taken) -> Generator[Future, None, str]:
        """Judges a group: checks it without weights, waits until it is on disk, and rejects it, quarantines it, or lets it pass.

        On disk are its entry in the ledger and, of an accepted training group, its rollouts. This generator yields the future for
        which it waits. It returns the reply, `VOID` if the queue has dropped or replaced the group meanwhile.
        """
        entry, durable, key = taken.entry, taken.recorded, taken.entry.group.key
        with self.locked as state:
            if state.queue.entries.get(key) is not entry:
                return VOID
        verdict, scores = self.check_group_without_weights(entry.rollouts, key[0])
        if verdict.accepted and key[0] == "train":
            durable = self.log.append(key[1], group_log.header(entry, scores), taken.rows, after=durable)
        yield durable  # this thread goes on with other groups: one write may take many
        durable.result()
        with self.locked as state:
            if state.queue.entries.get(key) is not entry:
                return VOID
            if not verdict.accepted:
                return self._reject(state, key, verdict)
            entry.scores = scores
            return self._quarantine_or_pass(state, entry)

    def _advance(self, taken: _Taken, story: Generator[Future, None, str]) -> None:
        """Runs `_judge` up to the future that it waits for, whose thread continues it; sets the reply at its end."""
        try:
            future = next(story)
        except StopIteration as end:
            taken.reply.set_result(end.value)
        except BaseException as error:  # ends the run: no worker is to blame for it
            self.locked.fail(error)
            taken.reply.set_exception(error)
        else:
            future.add_done_callback(lambda _: self._advance(taken, story))

    def _quarantine_or_pass(self, state: RunState, entry: queue_entry.Entry) -> str:
        """Quarantines a checked group, or lets it pass: a held-out group, or one of a trusted worker that is not drawn."""
        key = entry.group.key
        # The draw of a group that comes again may be known: a caught worker's friend gets groups that were let pass before.
        rate = max(health.rate(name) for health, name in answering(state, entry))
        draw = verdict_lib.draw(self.secret, "/".join(map(str, key)))
        if key[0] == "train" and (entry.was_decided or draw < rate):
            state.queue.quarantine(key)
            self.verdicts.ask(key, entry.rollouts, entry.digest)
            return "quarantined"
        state.queue.let_pass(key)
        return self._accepted(state, entry)

    def _decide(self, key, digest, verdict, signed: Sequence[verdict_lib.SignedVerdict]) -> None:
        """Accepts or rejects a quarantined group by `verdict`, or requeues it if the group is void."""
        with self.locked as state:
            for one in signed:
                self.locked.ledger.verdict(one)
            entry = state.queue.entries.get(key)
            if entry is None or entry.state is not State.QUARANTINED or entry.digest != digest:
                return
            if verdict.reason in verdict_lib.NO_BLAME:
                state.counts[verdict.reason] += len(entry.rollouts)
                return self._void(state, state.queue.requeue(key))
            state.counts["checked"] += len(entry.rollouts)
            if verdict.accepted:
                state.queue.accept(key)
                for health, name in answering(state, entry):
                    health.verified(name)
                self.on_verified(entry.rollouts)
                self._accepted(state, entry)
            else:
                self._reject(state, key, verdict)

    def _accepted(self, state: RunState, entry: queue_entry.Entry) -> str:
        state.counts["accepted"] += len(entry.rollouts) if entry.group.split == "train" else 0
        state.health.accepted(entry.worker, entry.group.key)
        state.share.finished(entry.worker, entry.since_s, state.clock())
        state.batches.accepted(entry.group.key)
        state.has_news = True
        return "accepted"

    def _reject(self, state: RunState, key: queue_entry.Key, verdict: checks.Verdict) -> str:
        """Reopens a group that failed a check, which ends the trust in its worker. Returns the reply."""
        reply = self._blame(state, state.queue.requeue(key), verdict, is_fault=True)
        self._take_spare(state, key)
        return reply

    def _take_spare(self, state: RunState, key: queue_entry.Key) -> None:
        """Judges the rollouts of other holders that took the place of rejected ones, up to the first that their leases do not reject."""
        while (entry := state.queue.entries[key]).state is State.SUBMITTED:
            rows = parquet.Rows(parquet.to_table(entry.rollouts), entry.rollouts)
            found = self._take(state, entry, rows, blame=False)  # it grew old here
            if isinstance(found, _Taken):
                return self._check_in_turns([found])

    # Blame.

    def _blame(self, state: RunState, entry: queue_entry.Entry, verdict: checks.Verdict, *, is_fault: bool) -> str:
        """Counts a rejected group against its worker, or its server; returns the reply. `is_fault`: it failed a check."""
        rules = self.rules.at_lease(entry.group, state.policy.version)
        if server := evidence_log.server_at_fault(entry.rollouts, verdict, rules, state.servers.invited):
            return self._blame_server(state, entry, server, verdict)
        worker, group = entry.worker, entry.group
        state.counts["refused"] += len(entry.rollouts)
        state.counts[f"refused_{verdict.reason}"] += 1
        self.locked.ledger.refused(worker, *group.key, entry.digest, str(verdict), _environment(entry))
        state.health.rejected(worker, group.key, state.clock(), is_fault=is_fault)
        if is_fault:
            self._distrust(state, "worker", state.health, worker)
        if state.health.is_banned(worker):
            state.share.left(worker)
            found = f"{state.health.max_rejections} rejected groups; the last"
            self.locked.ledger.ejected(worker, f"{found}: {verdict}")
            self.on_banned(worker, f"{found}, group {group.group} of step {group.step}: {verdict}")
        state.has_news = True
        return f"refused: {verdict}"

    def _blame_server(self, state: RunState, entry: queue_entry.Entry, server: str, verdict: checks.Verdict) -> str:
        """Counts a group that failed by the fault of `server` against it; the group is void for its worker. Returns the reply."""
        key = entry.group.key
        state.counts["server_faults"] += len(entry.rollouts)
        state.health.lost(entry.worker, key, state.clock(), blame=False)
        was_banned = state.servers.is_banned(server)
        state.servers.rejected(server, key, state.clock(), is_fault=True)
        self.locked.ledger.joined(server)
        self.locked.ledger.refused(server, *key, entry.digest, str(verdict), _environment(entry))
        self._distrust(state, "server", state.servers, server)
        if state.servers.is_banned(server) and not was_banned:
            found = f"the samples of {state.servers.max_rejections} groups; the last: {verdict}"
            self.locked.ledger.ejected(server, found)
            self.on_banned(server, found)
            self.locked.on_notice(f"server {server[:16]} gets no more work; its last fault is {verdict}")
        state.has_news = True
        return f"refused: void: the inference server is at fault: {verdict}"

    def _distrust(self, state: RunState, role: str, health: worker_health.WorkerHealth, key: str) -> None:
        """Takes the trust in a caught node back, and names the steps that trained on groups of it that nobody verified."""
        self._recall(state, health, key)
        num_groups, steps = health.reveal(key)
        if num_groups:
            if health is state.health:
                state.counts["trained_unverified_of_cheats"] += num_groups
                self.locked.ledger.named(key, steps)
            where = f"steps {steps[0]} to {steps[-1]} trained on {num_groups} groups of it that nobody verified"
            self.locked.on_notice(f"{role} {key[:16]} failed a check; {where}; an earlier checkpoint is without them")

    def _recall(self, state: RunState, health: worker_health.WorkerHealth, key: str) -> None:
        """Quarantines all groups of a node that passed without a verdict, and that no batch has taken."""
        for entry in state.queue.recall(lambda entry: (health, key) in answering(state, entry)):
            state.counts["called_back"] += len(entry.rollouts)  # maybe accepted before the counts were last taken
            if entry.oldest_version < state.batches.oldest:  # no validator may have the weights any more
                self._void(state, state.batches.void(entry.group.key))
            else:
                self.verdicts.ask(entry.group.key, entry.rollouts, entry.digest)

    # Void work, and work of before a restart.

    def begin_epoch(self, state: RunState, epoch: int) -> None:
        """Voids all work of other epochs, without blame: its workers could not know."""
        for entry in state.queue.begin_epoch(epoch):
            state.counts["void_epoch"] += len(entry.rollouts)
            for worker in {entry.worker, *entry.leases} - {""}:
                state.health.lost(worker, entry.group.key, state.clock(), blame=False)
        state.has_news = True

    def void_too_old(self, state: RunState) -> None:
        """Voids the groups in checks or quarantine that are too old for the next batch, without blame."""
        for key in state.batches.too_old():
            self._void(state, state.batches.void(key))

    def restore(self, state: RunState, logged: queue_entry.Entry) -> None:
        """Takes a group that was submitted and checked before a restart, if the ledger still has it.

        Groups without a verdict are drawn again: the restart has other draws, by which an auditor judges the batch.
        """
        key = logged.group.key
        known, entry = self.locked.ledger.run.submission(*key[1:]), state.queue.entries.get(key)
        if known and known[0] == logged.digest and entry and entry.state is State.OPEN:
            entry = state.queue.restore(logged.group, logged.worker, logged.rollouts, logged.digest)
            entry.scores = logged.scores
            if not known[1]:
                self._quarantine_or_pass(state, entry)
                return
            state.queue.quarantine(key)
            state.queue.accept(key)
            self._accepted(state, entry)

    def _void(self, state: RunState, entry: queue_entry.Entry) -> None:
        """Ends the lease and the checks of a group that was requeued, and looks at its spare."""
        self._lose(state, entry, blame=False)
        self._take_spare(state, entry.group.key)

    def _lose(self, state: RunState, entry: queue_entry.Entry, *, blame: bool) -> None:
        self.verdicts.withdraw(entry.digest)
        state.health.lost(entry.worker, entry.group.key, state.clock(), blame=blame)
        state.has_news = True


def answering(state: RunState, entry: queue_entry.Entry) -> list[tuple[worker_health.WorkerHealth, str]]:
    """Returns who answers for a group, with the marks: its worker, and the registered server that all of its samples name."""
    server = evidence_log.server_of(entry.rollouts, state.servers.invited)
    return [(state.health, entry.worker), *([(state.servers, server)] if server else [])]


def _environment(entry: queue_entry.Entry) -> str:
    return entry.rollouts[0].task.env if entry.rollouts else ""
