"""Hands out groups to workers, collects their rollouts, and assembles the batches of the learner.

For batch n (1-based) of P groups:
1. `publish(version)` makes the inference servers load it. Once they have, every batch n with n - 1 - max_lag <= version opens.
2. A worker leases groups (rl/protocol/lease.py), generates their rollouts on the servers, and submits them, signed
   (rl/orchestrator/routes.py). An expired lease goes to the next worker.
3. A submission is checked against its lease, then without weights (prompt, ending, recomputed reward). The batch has our
   rewards, not the claims. One that we could not recompute in time is 0 and rejects nothing: it would recur forever.
4. Then the group is quarantined until a verdict on its replay accepts it. Only a draw that no worker can predict lets a group pass
   without one, and only by the worker's record (rl/orchestrator/worker_health.py). After a failed check, all groups of that worker
   that no batch has taken are quarantined, and the steps that trained on its unverified groups are named.
5. A rejected group is requeued, so that a batch is always its P prescribed groups. `next_batch(n)` waits for the groups, requeues
   those that became too stale, assigns advantages, and returns the batch.

rl/orchestrator/group_queue.py has the states of a group; this file adds the lock, threads, clock, and servers. It runs in the
learner's process and imports no environment: a task is only an index here. verdict_collector.py asks for verdicts.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import hmac
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from inference import client as client_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool, web
from models import hub
from rl.batch import credit as credit_lib
from rl.batch import packing
from rl.ledger import run_ledger, run_rules
from rl.orchestrator import admission, group_queue, routes, verdict_collector, worker_health
from rl.orchestrator.group_queue import State
from rl.protocol import task_schedule
from rl.protocol import verdict as verdict_lib
from rl.verification import checks
from rl.verification import rules as rules_lib
from sharding.system import sockets

WAIT_NOTICE_S = 30.0
NUM_CHECKS = 4  # without weights, at the same time; few, as each may start a scorer process
# (group, split) -> its verdict, and recomputed rewards to train on by sample; None: worth 0, as there was no time
CheckGroupWithoutWeights = Callable[
    [Sequence[rollout_lib.Rollout], str], tuple[checks.Verdict, Mapping[int, Mapping[str, float] | None]]
]


@dataclasses.dataclass(frozen=True)
class Batch:
    """One training batch: token trees for the learner to pack into rows, metrics of the batch, and its rollouts by group."""

    trees: list[packing.Tree]
    metrics: dict[str, float]
    groups: list[list[rollout_lib.Rollout]]


class Orchestrator:
    """Serves groups to workers over HTTP, has their rollouts checked, and returns batches. All methods are thread-safe.

    Rollouts are kept in `workdir`; `credit` turns rewards into advantages. `key` is the run's, which signs replies to workers;
    `invited` are public keys of workers to trust in addition to `topology.workers`; `stake` returns a key's stake in the ledger.
    `verdicts` replays groups; `check_group_without_weights` runs in a few threads, which workers share in turns. `evidence` returns the
    validator's evidence against workers as of a step (plain JSON), to be saved with the checkpoint. `secret` decides which groups are
    verified: workers must not know it. `on_verified` is called with each group that a verdict accepted. Events go to `ledger`. `on_wait` receives lines for people: a status every `WAIT_NOTICE_S`
    seconds of waiting, and the steps that a caught worker spoiled.
    """

    def __init__(
        self,
        config,
        workdir: pathlib.Path,
        *,
        credit: credit_lib.Credit,
        key: rollout_lib.WorkerKey,
        verdicts: verdict_collector.VerdictCollector,
        check_group_without_weights: CheckGroupWithoutWeights = lambda rollouts, split: (checks.OK, {}),
        evidence: Callable[[int], dict] = lambda step: {},
        secret: bytes,
        invited: Collection[str] = (),
        stake: Callable[[str], int] = lambda worker: 0,
        ledger: run_ledger.RunLedger | None = None,
        on_verified: Callable[[Sequence[rollout_lib.Rollout]], None] = lambda rollouts: None,
        on_wait: Callable[[str], None] = lambda line: None,
    ):
        self._config, self._workdir, self._credit, self._rules = config, workdir, credit, rules_lib.Rules.of(config)
        self._key, self._verdicts, self._ledger = key, verdicts, ledger
        self._check_group_without_weights = check_group_without_weights
        self._evidence, self._secret, self._on_wait, self._on_verified = evidence, secret, on_wait, on_verified
        self.servers: Sequence[str] = ()  # URLs of the inference servers, for workers
        self.control: client_lib.Control | None = None  # of those servers; set before `publish`
        self._changed = threading.Condition()  # guards everything below
        self._announced = -1  # the newest version that a server may have
        self._version = -1  # the newest version that all servers have
        self._opened_step = 0
        self._queue = group_queue.GroupQueue()
        self._invited = frozenset({*invited, *config.topology.workers})
        self._admission = admission.Admission(admission.Policy.of(config), key.worker, self._invited, stake)
        self._health = worker_health.WorkerHealth(
            config.trust.max_attempts,
            config.topology.lease_s,
            min_rate=config.trust.min_rate,
            invited_rate=config.trust.invited_rate,
            invited=self._invited,
        )
        self._states: dict[int, dict] = {}  # of the last two batches, as of their hand-off
        self._counts: collections.Counter[str] = collections.Counter()  # by the end of their metric's name
        self._failure: BaseException | None = None
        self._checkers = fair_pool.FairPool(NUM_CHECKS, "check")
        self._updater = concurrent.futures.ThreadPoolExecutor(1, "update-servers")
        verdicts.start(self._decide, self.fail)

    def serve(self) -> str:
        """Starts the HTTP server for workers in a thread; returns its URL. Raises ValueError if its address cannot be used."""
        sock = sockets.listen(self._config.topology.host, self._config.topology.port)
        self._web = web.server(routes.make_app(self, self._key, self._admission, self._health))
        self._thread = threading.Thread(target=self._web.run, args=([sock],), name="orchestrator", daemon=True)
        self._thread.start()
        return sockets.address(sock)

    def close(self) -> None:
        """Stops the HTTP server and cancels queued work; waits for running replays and server updates, but not for other checks."""
        self._web.should_exit = True
        self._thread.join()
        self._updater.shutdown(cancel_futures=True)
        self._checkers.close()
        self._verdicts.close()

    def resume(self, step: int, state: dict | None = None) -> None:
        """Continues a run after batch `step`, whose groups are not opened again. `state` is the saved `state(step)`, if any."""
        # Fresh draws: the workers of batches that are made again may know which groups were not replayed the first time. The ledger
        # has the head from which an auditor with the secret repeats them.
        head = self._ledger.head() if self._ledger else secrets.token_hex()
        with self._changed:
            self._opened_step = step
            self._secret = hmac.digest(self._secret, head.encode(), "sha256")
            if state:
                self._health.restore(state["standing"])
                self._states[step] = state
            self._record("appointed", self._verdicts.validators, self._verdicts.quorum)
            if self._ledger:  # it has the events after the checkpoint
                self._health.remember(self._ledger.refusals, self._ledger.ejected_workers)

    # Called by the learner.

    def publish(self, version: int, epoch: int | None = None) -> None:
        """Makes the servers load policy `version`, published already in `epoch`, in the background; then further batches open."""
        with self._changed:
            self._announced = version
        self._updater.submit(self._guarded, self._update_servers, version, epoch)

    def next_batch(self, step: int) -> Batch:
        """Blocks until all groups of batch `step` (1-based) are accepted; returns the batch. Raises the error given to `fail`."""
        with self._changed:  # no verdict may be recorded between the two
            taken = self._collect([group.key for group in task_schedule.train_groups(self._config, step)], step)
            recorded = self._record_batch(step, taken)
        path = self._workdir / "rollouts" / f"step_{step}" / "accepted.parquet"
        parquet.write(path, [rollout for entry in taken for rollout in entry.rollouts])  # as they were signed
        groups = [_rewarded(entry) for entry in taken]
        rollouts = [rollout for group in groups for rollout in group]
        trees, flat = self._credit.assign(groups)
        lag = np.array([step - 1 - int(r.versions[r.sampled_mask].min()) for r in rollouts])
        metrics = _describe(rollouts) | {"rollout/zero_advantage_frac": flat}
        metrics |= {"sync/lag": float(lag.mean()), "sync/lag_max": float(lag.max())}
        recorded.result()
        return Batch(trees, metrics | self._take_counts(), groups)

    def state(self, step: int) -> dict:
        """Returns the marks against workers at the return of batch `step`, as JSON for `resume`; {} if it is not one of the last two."""
        with self._changed:
            return self._states.get(step, {})

    def evaluate(self, version: int) -> list[list[rollout_lib.Rollout]]:
        """Blocks until workers have submitted the held-out rollouts of policy `version`; returns one list of rollouts per task."""
        groups = task_schedule.held_out_groups(self._config, version)
        with self._changed:
            self._wait_for(lambda: self._version >= version)
            self._queue.add(groups, first=True)  # before training groups: the servers' version moves on
        return [_rewarded(entry) for entry in self._collect([group.key for group in groups], None)]

    def fail(self, error: BaseException) -> None:
        """Makes waiting and later calls of the learner raise `error`, such as the death of a child process."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # Called by workers over HTTP.

    def describe(self) -> dict:
        """Returns the reply to `GET /run`: the run's environment, tokenizer, servers, and sampling settings."""
        config = self._config
        with self._changed:
            version = self._version
        return {
            "env": {"name": config.env.name, "options": config.env.options.to_dict(), "seed": config.seed},
            "tokenizer": hub.pinned(config.tokenizer),
            "tokenizer_date": config.tokenizer_date,
            "servers": list(self.servers),
            "sampling": {name: config.sampling[name] for name in ("top_k", "top_p", "min_p", "max_tokens")},
            "router_replay": config.train.router_replay,
            "admission": dataclasses.asdict(self._admission.policy),
            "step": version,
        }

    @property
    def submission_limits(self) -> dict[str, int]:
        """The limits of `parquet.from_bytes` for a submission: twice the groups that can be open, and the longest rollout of a batch."""
        rl, held_out = self._config.rl, self._config.evaluation
        open_rows = rl.prompts_per_step * rl.samples_per_prompt * (rl.max_lag + 2)
        open_rows += held_out.num_tasks * held_out.samples_per_task
        return {"max_rows": 2 * open_rows, "max_tokens": 2 * self._config.train.row_length}

    def lease(
        self, worker: str, capacity: int, network: str = "", returned: Collection[group_queue.Key] = ()
    ) -> list[task_schedule.Group]:
        """Leases up to `capacity` groups to `worker`; returns them, or [] if the worker may get none. Reopens expired leases.

        `network` is that of the worker's connection. `returned` are keys of groups that the worker holds and will not finish.
        """
        with self._changed:
            now_s = time.monotonic()
            for expired in self._queue.expire(now_s):
                self._lose(expired, now_s)
            for key in returned:
                entry = self._queue.entries.get(key)
                if entry and (entry.state, entry.worker) == (State.LEASED, worker):
                    self._lose(self._queue.requeue(key), now_s, is_void=0 <= entry.group.version < self._announced)
            self._health.seen(worker, now_s)
            count = self._queue.count()
            num_unfinished = count.total() - count[State.ELIGIBLE]
            room = self._health.room(worker, network, num_unfinished, now_s, self._queue.held)
            is_stranger = self._health.is_stranger(worker)
            pins = {"all": True, "none": False}.get(self._config.trust.pin_versions, is_stranger)
            groups = self._queue.lease(
                worker,
                min(room, capacity),
                now_s + self._health.lease_s(worker),
                lambda key: self._health.may_lease(worker, key, now_s),
                self._version if pins else -1,
            )
            self._health.leased(worker, network, [group.key for group in groups], now_s)
            if groups:
                self._record("joined", worker, worker in self._invited)
            for group in groups:
                self._record("leased", worker, *group.key, group.version)
            return groups

    def _lose(self, entry: group_queue.Entry, now_s: float, *, is_void: bool = False) -> None:
        """Counts a lease that ended without rollouts against its worker, unless `is_void`: its version is not served any more."""
        self._counts["lease_void" if is_void else "lease_expired"] += 1
        self._health.lost(entry.worker, entry.group.key, now_s, blame=not is_void)

    def holds_groups(self, worker: str) -> bool:
        """Returns True if a worker has groups that no batch has taken; else the answer would tell which passed without a verdict."""
        with self._changed:
            return any(entry.worker == worker for entry in self._queue.entries.values())

    def submit(self, rollouts: Sequence[rollout_lib.Rollout]) -> dict[str, concurrent.futures.Future[str]]:
        """Starts the checks of submitted rollouts; returns per group a future of "accepted", "quarantined", or "refused: REASON"."""
        by_key: dict[group_queue.Key, list[rollout_lib.Rollout]] = collections.defaultdict(list)
        for rollout in rollouts:
            by_key[(self._split(rollout), rollout.step, rollout.task.group)].append(rollout)
        return {"/".join(map(str, key)): self._deliver(key, group) for key, group in by_key.items()}

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`, called in a background thread. An exception fails the run, since no other code reads it there."""
        try:
            return function(*args)
        except BaseException as error:
            self.fail(error)
            raise

    def _update_servers(self, version: int, epoch: int | None) -> None:
        try:
            if self.control is not None:
                asyncio.run(self.control.update_weights(version, epoch=epoch))
        except (ValueError, OSError, client_lib.httpx.HTTPError, client_lib.httpx.InvalidURL) as error:
            found = f"an inference server did not load policy version {version}: {error}"
            self.fail(ValueError(f"{found}; read the log of that server"))
            return
        with self._changed:
            self._version = version
            last = min(version + 1 + self._config.rl.max_lag, self._config.rl.num_steps)
            for step in range(self._opened_step + 1, last + 1):
                self._queue.add(task_schedule.train_groups(self._config, step))
            self._opened_step = max(self._opened_step, last)
            self._changed.notify_all()

    def _split(self, rollout: rollout_lib.Rollout) -> str:
        """Returns "train" or "held_out". A rollout does not name its split, but only one of them uses its step and group now."""
        with self._changed:
            held_out = self._queue.entries.get(("held_out", rollout.step, rollout.task.group))
            return "held_out" if held_out and held_out.group.index == rollout.task.index else "train"

    def _deliver(self, key: group_queue.Key, rollouts: list[rollout_lib.Rollout]) -> concurrent.futures.Future[str]:
        """Checks a submitted group against its lease and queues its other checks; returns a future of the reply.

        A group that is not leased, or not signed by the leaseholder, is rejected and changes nothing.
        """
        with self._changed:
            entry = self._queue.entries.get(key)
            if entry is None or entry.state is not State.LEASED:
                return self._not_leased(rollouts)
            holder = entry.worker
        # A forged submission must not cost the leaseholder its lease. One sample too many is enough to reject the group.
        signed = rollouts[: entry.group.num_samples + 1]
        if any(r.worker != holder for r in rollouts) or not all(map(rollout_lib.signature_ok, signed)):
            return self._not_leased(rollouts, "signature: not signed by the leaseholder; sign with its key")
        # A worker that was paused hands in late a group that it got again meanwhile: no fault, and not worth its new lease.
        found = {int(version) for rollout in signed for version in rollout.versions}
        if found != {entry.group.version} and len(found) == 1 and (holder, *found) in entry.earlier:
            return self._not_leased(rollouts)
        digest = verdict_lib.group_digest(rollouts)
        with self._changed:
            if not self._queue.deliver(key, holder, rollouts, digest):
                return self._not_leased(rollouts)
            recorded = self._record("submitted", holder, *key, digest)
            verdict = checks.check_at_lease(rollouts, self._rules.at_lease(entry.group, self._announced))
            if not verdict.accepted:
                return _known(self._reject(key, verdict, is_fault=False))
        return self._checkers.submit(holder, self._guarded, self._check, key, recorded)

    def _not_leased(self, rollouts: list[rollout_lib.Rollout], reason="not leased (or already submitted)"):
        with self._changed:
            self._counts["unleased"] += len(rollouts)
        return _known(f"refused: {reason}")

    def _check(self, key: group_queue.Key, recorded: concurrent.futures.Future) -> str:
        """Checks a submitted group without weights; rejects it, quarantines it, or lets it pass. Returns the reply, when it is `recorded`."""
        with self._changed:
            entry = self._queue.entries[key]
        verdict, scores = self._check_group_without_weights(entry.rollouts, key[0])
        recorded.result()
        with self._changed:
            if not verdict.accepted:
                return self._reject(key, verdict, is_fault=True)
            entry.scores = scores
            # The draw of a group that comes again may be known: a caught worker's friend gets groups that were let pass before.
            if key[0] == "train" and (entry.was_decided or self._draw(key) < self._health.rate(entry.worker)):
                self._queue.quarantine(key)
                self._verdicts.ask(key, entry.rollouts, entry.digest)
                return "quarantined"
            self._queue.let_pass(key)
            return self._accepted(entry)

    def _draw(self, key: group_queue.Key) -> float:
        """Returns the number in [0, 1) below which a worker's rate lets its group pass. It depends on the secret and the group alone."""
        digest = hmac.digest(self._secret, "/".join(map(str, key)).encode(), "sha256")
        return int.from_bytes(digest[:8], "big") / 2**64

    def _decide(self, key, digest, verdict, signed: Sequence[verdict_lib.SignedVerdict]) -> None:
        """Accepts or rejects a quarantined group by `verdict`, or requeues it if the group is void."""
        with self._changed:
            for one in signed:
                self._record("verdict", one)
            entry = self._queue.entries.get(key)
            if entry is None or entry.state is not State.QUARANTINED or entry.digest != digest:
                return
            if verdict.reason in verdict_collector.VOID:
                self._counts[verdict.reason] += len(self._queue.requeue(key).rollouts)
                self._health.lost(entry.worker, key, time.monotonic(), blame=False)
                self._changed.notify_all()
                return
            self._counts["checked"] += len(entry.rollouts)
            if verdict.accepted:
                self._queue.accept(key)
                self._health.verified(entry.worker)
                self._on_verified(entry.rollouts)
                self._accepted(entry)
            else:
                self._reject(key, verdict, is_fault=True)

    def _accepted(self, entry: group_queue.Entry) -> str:
        self._counts["accepted"] += len(entry.rollouts) if entry.group.split == "train" else 0
        self._health.accepted(entry.worker, entry.group.key)
        self._changed.notify_all()
        return "accepted"

    def _reject(self, key: group_queue.Key, verdict: checks.Verdict, *, is_fault: bool) -> str:
        """Reopens a group and counts it against its worker; after a failed check (`is_fault`), ends the trust in it. Returns the reply."""
        entry = self._queue.requeue(key)
        worker, group = entry.worker, entry.group
        self._counts["refused"] += len(entry.rollouts)
        self._counts[f"refused_{verdict.reason}"] += 1
        self._record("refused", worker, *key, entry.digest, str(verdict))
        self._health.rejected(worker, key, time.monotonic(), is_fault=is_fault)
        if is_fault:
            self._distrust(worker)
        if self._health.is_banned(worker):
            self._record("ejected", worker, f"{self._config.trust.max_attempts} rejected groups; the last: {verdict}")
            # A stranger must not be able to end the run, even before others have joined.
            if worker in self._invited and not self._health.has_others(worker, time.monotonic()):
                found = f"worker {worker[:16]} was rejected {self._config.trust.max_attempts} times and no other worker is active"
                last = f"the last reason, for group {group.group} of step {group.step}: {verdict}"
                remedy = "Look at that worker and its server, or raise trust.max_attempts"
                self.fail(ValueError(f"{found}; {last}. {remedy}"))
        self._changed.notify_all()
        return f"refused: {verdict}"

    def _distrust(self, worker: str) -> None:
        """Quarantines all groups of a caught worker that passed without a verdict, and names the steps that trained on such groups."""
        for entry in self._queue.recall(worker):
            self._counts["called_back"] += len(entry.rollouts)  # maybe accepted before the counts were last taken
            self._verdicts.ask(entry.group.key, entry.rollouts, entry.digest)
        num_groups, steps = self._health.reveal(worker)
        if num_groups:
            self._counts["trained_unverified_of_cheats"] += num_groups
            self._record("named", worker, steps)
            where = f"steps {steps[0]} to {steps[-1]} trained on {num_groups} groups of it that nobody verified"
            self._on_wait(f"worker {worker[:16]} failed a check; {where}; an earlier checkpoint is without them")

    def _record(self, event: str, *fields: Any) -> concurrent.futures.Future:
        """Passes an event to the ledger, if there is one; returns a future that is done when the event is durable."""
        found = getattr(self._ledger, event)(*fields) if self._ledger else None
        return found or _known(None)

    def _record_batch(self, step: int, taken: list[group_queue.Entry]) -> concurrent.futures.Future:
        basis = {entry.group.group: "verified" if entry.is_verified else "trusted" for entry in taken}
        digest = run_rules.batch_digest(entry.digest for entry in sorted(taken, key=lambda entry: entry.group.group))
        return self._record("batch", step, digest, basis)

    def _collect(self, keys: list[group_queue.Key], step: int | None) -> list[group_queue.Entry]:
        """Blocks until all groups are eligible and takes them; reopens groups too stale for batch `step` (None: held-out)."""
        while True:
            with self._changed:
                if not self._wait_for(lambda: self._queue.num_eligible(keys) == len(keys), WAIT_NOTICE_S):
                    self._on_wait(self._wait_notice(keys, step))  # a long wait is not an error
                    continue
                oldest = -1 if step is None else step - 1 - self._config.rl.max_off_policy
                stale = [key for key in keys if self._queue.entries[key].oldest_version < oldest]
                for key in reversed(stale):
                    self._counts["stale"] += len(self._queue.requeue(key).rollouts)
                if stale:
                    continue
                taken = self._queue.take(keys)
                if step is not None:  # held-out groups train nothing
                    for entry in taken:
                        if not entry.is_verified:
                            self._health.trained_unverified(entry.worker, step)
                            self._counts["unverified"] += len(entry.rollouts)
                    state = {"standing": self._health.state(), "evidence": self._evidence(step)}
                    self._states = {n: s for n, s in self._states.items() if n == step - 1} | {step: state}
                self._counts["given_up"] += sum(list(entry.scores.values()).count(None) for entry in taken)
                return taken

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Returns True if `condition` became true in time; raises the error given to `fail`, if any. Call it under the lock."""
        is_met = self._changed.wait_for(lambda: self._failure or condition(), timeout_s)
        if self._failure:
            raise self._failure
        return bool(is_met)

    def _wait_notice(self, keys: list[group_queue.Key], step: int | None) -> str:
        count, banned = self._queue.count(), self._health.num_banned(time.monotonic())
        loading = f"; the inference servers are loading policy version {self._announced}"
        return (
            f"{'the evaluation' if step is None else f'batch {step}'} has {self._queue.num_eligible(keys)} of {len(keys)} groups; "
            f"{count[State.OPEN]} wait for a worker, {count[State.LEASED]} are leased, "
            f"{count[State.SUBMITTED]} are being checked, {count[State.QUARANTINED]} wait for a verdict"
            f"{loading if self._announced > self._version else ''}"
            f"{f'; workers banned after trust.max_attempts rejections: {banned}' if banned else ''}"
            f"{f'; {silent}' if (silent := self._verdicts.notice()) else ''}"
        )

    def _take_counts(self) -> dict[str, float]:
        """Returns the counts of rollouts since the last call as metrics. A group that is accepted, then replayed, may count twice."""
        with self._changed:
            names = "accepted called_back refused checked stale lease_expired lease_void unleased given_up"
            names += " undecided unanswered unverified trained_unverified_of_cheats"
            counts = dict.fromkeys(names.split(), 0) | self._verdicts.counts() | dict(self._counts)
            self._counts.clear()
        return {f"trust/num_{name}": float(number) for name, number in counts.items()}


def _describe(rollouts: list[rollout_lib.Rollout]) -> dict[str, float]:
    lengths = np.array([int(r.sampled_mask.sum()) for r in rollouts])
    rewards = np.array([r.reward for r in rollouts])
    return {
        "rollout/reward": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/response_length": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_frac": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "rollout/score_error_frac": float(np.mean([r.rewards.get("error", 0.0) > 0 for r in rollouts])),
        "rollout/num_tokens": float(lengths.sum()),
    }


def _rewarded(entry: group_queue.Entry) -> list[rollout_lib.Rollout]:
    """Returns the rollouts of a group with the rewards that we recomputed, 0 where there was no time; else a claim could break ties."""
    out = []
    for one in entry.rollouts:
        if one.sample in entry.scores:
            scores = entry.scores[one.sample] or dict.fromkeys([*one.rewards, "reward"], 0.0)
            one = dataclasses.replace(
                one, reward=scores["reward"], rewards={name: scores[name] for name in one.rewards}
            )
        out.append(one)
    return out


def _known(result: Any) -> concurrent.futures.Future:
    future = concurrent.futures.Future()
    future.set_result(result)
    return future
