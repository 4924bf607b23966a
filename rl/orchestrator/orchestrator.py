"""Hands out groups to workers, collects their rollouts, and assembles the batches of the learner.

For batch n (1-based) of P groups:
1. `publish(version)` names it to the inference servers. Once they serve it (rl/orchestrator/nodes.py), the groups of the batches up to
   version + 1 + max_lag open.
2. A worker leases groups (rl/orchestrator/leases.py), generates their rollouts on the servers, and submits them, signed
   (rl/orchestrator/routes.py). Its heartbeats renew its leases; an expired lease goes to the next worker.
3. A submission is checked, and its group quarantined until a verdict accepts it (rl/orchestrator/submissions.py).
4. A rejected group is requeued. `next_batch(n)` waits until the batch is complete by its rule (rl/orchestrator/groups/batches.py), assigns
   advantages, and returns it.

rl/orchestrator/groups/group_queue.py has the states of a group; this file adds the lock, clock, and servers. It runs in the
learner's process and imports no environment: a task is only an index here.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import json
import math
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from inference.rollouts import parquet, row_log
from inference.rollouts import rollout as rollout_lib
from inference.server import web
from models import hub
from models.text import tokenizer as tokenizer_lib
from rl.batch import credit as credit_lib
from rl.batch import training_batch
from rl.ledger import run_ledger, run_rules
from rl.orchestrator import admission, leases, nodes, routes, shared, status, submissions, work_share, worker_health
from rl.orchestrator.groups import batches, environment_counts, give_backs, group_queue, queue_entry
from rl.orchestrator.verdicts import verdict_collector
from rl.protocol import curriculum as curriculum_lib
from rl.protocol import env_mix, task_schedule, timeline
from rl.reporting import diagnostics
from rl.verification import checks
from rl.verification import rules as rules_lib
from sharding.system import atomic_file, role_metrics, sockets

STATES = "states.json"  # in the directory of the log: of the last two batches
WAIT_NOTICE_S, EVALUATION_NOTICE_S = 30.0, 10.0
MAX_FAREWELL_S = 20.0
LATENCIES = ("lease", "submit", "update")  # of /metrics; a lease without its wait for work


class Orchestrator:
    """Serves groups to workers over HTTP, has their rollouts checked, and returns batches. All methods are thread-safe.

    Rollouts are kept in `workdir`; `credit` turns rewards into advantages. `key` is the run's, which signs replies to workers;
    `invited` are public keys of workers to trust in addition to `topology.workers`, `server_keys` those of inference servers in
    addition to `topology.server_keys`; strangers wait while `is_measuring`; `stake` returns a key's stake in the ledger.
    `verdicts` replays groups; `check_group_without_weights` runs in a few threads, which workers share in turns. `evidence` returns the
    validator's evidence against workers as of a step (plain JSON), to be saved with the checkpoint. `secret` decides which groups are
    verified: workers must not know it. `on_verified` is called with each group that a verdict accepted. Events go to `ledger`, if
    there is one. `on_wait` receives lines for people: a status every `WAIT_NOTICE_S` seconds of waiting, and the steps that a caught
    worker spoiled.
    """

    def __init__(
        self,
        config,
        workdir: pathlib.Path,
        *,
        credit: credit_lib.Credit,
        key: rollout_lib.WorkerKey,
        verdicts: verdict_collector.VerdictCollector,
        check_group_without_weights: submissions.CheckGroupWithoutWeights = lambda rollouts, split: (checks.OK, {}),
        evidence: Callable[[int], dict] = lambda step: {},
        secret: bytes,
        invited: Collection[str] = (),
        is_measuring: Callable[[], bool] = lambda: False,
        stake: Callable[[str], int] = lambda worker: 0,
        ledger: run_ledger.RunLedger | run_ledger.NoLedger | None = None,
        server_keys: Collection[str] = (),
        on_verified: Callable[[Sequence[rollout_lib.Rollout]], None] = lambda rollouts: None,
        on_wait: Callable[[str], None] = lambda line: None,
        first_error: Callable[[], str] = lambda: "",
    ):
        self._config, self._workdir, self._credit, self._key = config, workdir, credit, key
        self._ledger, self._evidence, self._on_wait = ledger or run_ledger.NoLedger(), evidence, on_wait
        self._queue = group_queue.GroupQueue()
        self._curriculum = curriculum_lib.Curriculum(config) if config.rl.curriculum else None
        draws = self._curriculum.draws if self._curriculum else None
        make_groups = functools.partial(task_schedule.numbered_groups, config, draws=draws)
        self._batches = batches.Batches(batches.BatchRule.of(config), self._queue, make_groups, self._has_signal)
        own_workers = () if config.topology.mode == "remote" else invited
        invited = frozenset({*invited, *config.topology.workers})
        self._admission = admission.Admission(admission.Policy.of(config), key.worker, invited, stake)
        attempts, lease_s = config.trust.max_attempts, config.topology.lease_s
        rates = {"min_rate": config.trust.min_rate, "invited_rate": config.trust.invited_rate}
        self._health = worker_health.WorkerHealth(
            attempts, lease_s, invited=invited, is_measuring=is_measuring, **rates
        )
        registered = {*server_keys, *config.topology.server_keys}
        self._servers = worker_health.WorkerHealth(attempts, lease_s, invited=registered, **rates)  # of those that sign
        self._share = work_share.WorkShare(lease_s)
        self._shared = shared.Shared(
            queue=self._queue,
            batches=self._batches,
            health=self._health,
            servers=self._servers,
            share=self._share,
            ledger=self._ledger,
        )
        self._changed, self._counts = self._shared.changed, self._shared.counts  # the lock guards everything below, too
        self._published_s = 0.0  # when the newest policy was
        self.nodes = nodes.Nodes(
            topology=config.topology,
            max_lag=config.rl.max_lag,
            validators=verdicts.validators,
            is_known=self._health.is_known,
            own_workers=own_workers,
            is_banned=lambda key: self._servers.is_banned(key) or self._health.is_banned(key),
            on_served=self._open,
            on_notice=on_wait,
        )
        self._kept: dict[queue_entry.Key, submissions.Kept] = {}  # of the log, until the first policy is published
        self._recorded: dict[int, list[queue_entry.Entry]] = {}  # the ledger's last batch, maybe not returned yet
        self._states: dict[int, dict] = {}  # of the last two batches, as of their hand-off
        self._wanted: int | None = None  # the batch that the learner waits for
        self._evaluating: dict[tuple[int, str], Callable[[], str]] = {}  # (version, set) -> its state for people
        self._failure: BaseException | None = None
        self._first_error = first_error
        self._num_scored = collections.Counter()  # samples: those that could not be scored, and all
        self.metrics = role_metrics.RoleMetrics("orchestrator", self._metrics, LATENCIES)  # not for workers
        self.metrics.seconds["verdict"] = verdicts.seconds
        seconds = self.metrics.seconds["lease"]
        self.leases = leases.Leases(
            shared=self._shared,
            nodes=self.nodes,
            config=config,
            seconds=seconds,
            give_backs=give_backs.GiveBacks(on_wait),
            fail=self.fail,
        )
        self._status = status.Status(self._shared, self.nodes, verdicts)
        self._log = row_log.RowLog(workdir / "rollouts" / "open", self.fail)
        self._submissions = submissions.Submissions(
            shared=self._shared,
            log=self._log,
            rules=rules_lib.Rules.of(config, key.worker),
            is_withheld=config.rl.batch == "first",
            held_out={(group.group, group.index) for group in task_schedule.held_out_groups(config, 0)},
            check_group_without_weights=check_group_without_weights,
            verdicts=verdicts,
            secret=secret,
            on_verified=on_verified,
            on_delivered=self.leases.give_backs.finished,
            on_caught=on_wait,
            on_banned=self.nodes.banned,
            fail=self.fail,
        )
        self.is_closing = False

    def serve(self) -> str:
        """Starts the HTTP server for workers in a thread; returns its URL. Raises ValueError if its address cannot be used."""
        sock = sockets.listen(self._config.topology.host, self._config.topology.port)
        self._web = web.server(routes.make_app(self, self._key, self._admission, self._health))
        self._thread = threading.Thread(target=self._web.run, args=([sock],), name="orchestrator", daemon=True)
        self._thread.start()
        # Modules and compiled functions stay: else each full collection takes 0.15 s to look at them, and no lease is answered meanwhile.
        gc.collect()
        gc.freeze()
        return sockets.address(sock)

    def end(self) -> None:
        """Tells all nodes that the run is over, so that workers do not wait for its next process; returns when they know, or soon."""
        with self._changed:
            self._shared.is_ended = True
        deadline_s = time.monotonic() + min(3 * self._config.topology.heartbeat_s, MAX_FAREWELL_S)
        while self.nodes.num_signed_in() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def close(self) -> None:
        """Stops the HTTP server and cancels queued work; waits for running replays, but not for other checks."""
        self.is_closing = True  # or the web server waits for those that wait for work
        self._web.should_exit = True
        self._thread.join()
        self._submissions.close()
        self._log.close()

    def resume(self, step: int, state: dict | None = None, later: dict | None = None) -> None:
        """Continues a run after batch `step`, whose groups are not opened again. `state` is the saved `state(step)`, if any.

        `later` is the state of the batch after, if this run's ledger has it; the learner may not have received it.
        """
        self._submissions.resume()
        with self._changed:
            self._kept = submissions.read_kept(self._log)
            begins = {"num_opened": step * self._config.rl.prompts_per_step, "waiting": []}  # of an evaluation only
            is_run = state or not isinstance(self._ledger, run_ledger.NoLedger)
            self._batches.restore(step, (state or {}).get("batches") if is_run else begins)
            if self._curriculum and step and is_run:
                if "curriculum" not in (state or {}):
                    found = f"the checkpoint of step {step} lacks the state of rl.curriculum = {self._config.rl.curriculum!r}"
                    raise ValueError(f"{found}, which the run had not then; start another --workdir")
                self._curriculum.restore((state or {})["curriculum"])
            self._states = {n: s for n, s in ((step, state), (step + 1, later)) if s}
            if newest := later or state:
                self._health.restore(newest["standing"])
                if "servers" in newest:
                    self._servers.restore(newest["servers"])
            # The ledger has the marks since the checkpoint.
            refusals, ejected = self._ledger.refusals, self._ledger.ejected_workers
            names = refusals.keys() | ejected
            self._servers.remember(names & self._servers.invited, refusals, ejected)
            self._health.remember(names - self._servers.invited, refusals, ejected)

    # Called by the learner.

    def publish(self, policy: timeline.Policy) -> None:
        """Lets the servers load `policy`, published already; once they have, further batches open.

        A policy of another epoch makes all work of earlier ones void.
        """
        with self._changed:
            self._shared.policy, self._published_s = policy, time.monotonic()
            if policy.epoch != self._queue.epoch:
                self._submissions.begin_epoch(policy.epoch)
                self._restore(policy.epoch)
        self.nodes.announce(policy)

    def next_batch(self, step: int) -> training_batch.Batch:
        """Blocks until all groups of batch `step` (1-based) are accepted; returns the batch. Raises the error given to `fail`.

        After a restart, the last batch in the ledger is returned again if the learner asks for it.
        """
        with self._changed:  # no verdict may be recorded between the two
            taken, recorded = self._recorded.pop(step, None), None
            if taken is None:
                taken, flat = self._collect(step)
                recorded = self._record_batch(step, taken, flat)
            elif step not in self._states:
                self._mark(step, taken)
            kept = {step, *(entry.group.step for entry in (*taken, *self._queue.entries.values()))}
            states = json.dumps(self._states)
        submissions.write_batch(self._log, self._workdir, step, taken, kept)
        if recorded:
            recorded.result()
        atomic_file.write(self._log.directory / STATES, states.encode(), durable=True)
        groups, errors = [group for group in map(self._rewarded, taken) if group], self._score_errors(step, taken)
        most = {entry.label: entry.max_tokens for entry in env_mix.entries(self._config).values()}
        counts = diagnostics.of_groups(groups, step=step, max_tokens=most)
        counts |= errors | {"batch/num_left_out": float(sum(len(e.rollouts) for e in taken) - sum(map(len, groups)))}
        room = env_mix.max_streams(self._config)
        return training_batch.assemble(step, groups, self._credit, counts | self._take_counts(), room)

    def state(self, step: int) -> dict:
        """Returns the marks against workers at the return of batch `step`, as JSON for `resume`; {} if it is not one of the last two."""
        with self._changed:
            return self._states.get(step, {})

    def evaluate(self, version: int, name: str = "") -> list[list[rollout_lib.Rollout]]:
        """Blocks until workers have submitted the rollouts of an evaluation set (rl/protocol/task_schedule.py) by policy `version`.

        Returns a list of rollouts per task. Training goes on meanwhile. A server keeps this version for up to `evaluation.hold_s`;
        after this time the evaluation is given up as soon as there is a newer one, and the result is [].
        """
        groups, end_s = task_schedule.held_out_groups(self._config, version, name), time.monotonic()
        end_s += self._config.evaluation.hold_s
        newest = self._shared.policy
        policy = newest if newest.version == version else timeline.Policy(newest.epoch, version)
        with self.nodes.holding(policy), self._changed, contextlib.ExitStack() as stack:
            self._wait_for(lambda: self._shared.version >= version)
            groups = [group for group in groups if group.env not in self.leases.left_out]
            keys = [group.key for group in groups]
            self._queue.add(groups, behind=version + 1)  # the learner waits for that batch, and later ones may wait
            notice_s = min(EVALUATION_NOTICE_S, self._config.evaluation.hold_s)
            self._evaluating[version, name] = functools.partial(self._evaluation, version, name, keys, time.monotonic())
            stack.callback(self._evaluating.pop, (version, name))
            while not self._wait_for(lambda: self._queue.num_eligible(keys) == len(self._not_left_out(keys)), notice_s):
                self._on_wait(self._evaluating[version, name]())
                if time.monotonic() > end_s and self._shared.policy.version > version:
                    for key in self._not_left_out(keys):
                        self._queue.drop(key, "evaluation")
                    return []
            taken = self._queue.take(self._not_left_out(keys))
            self._counts["given_up"] += sum(list(entry.scores.values()).count(None) for entry in taken)
        return [*map(self._rewarded, taken)]

    def _not_left_out(self, keys: Sequence[queue_entry.Key]) -> list[queue_entry.Key]:
        """Returns those of an evaluation's keys whose environment was not left out meanwhile. The caller has the lock."""
        return [key for key in keys if key in self._queue.entries]

    def doubt(self, node: str) -> None:
        """Has each group that a worker or server answers for replayed from now on, without blame."""
        self._submissions.doubt(node)

    def fail(self, error: BaseException) -> None:
        """Makes waiting and later calls of the learner raise `error`, such as the death of a child process."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def waiting_for(self) -> str:
        """Returns why the learner waits, as a line for people, or "" if it does not."""
        with self._changed:
            wanted = [self._waiting(f"batch {self._wanted}", self._batches.progress())] if self._wanted else []
            return "; ".join([*(waiting() for waiting in self._evaluating.values()), *wanted])

    def table(self) -> list[dict[str, Any]]:
        """Returns a row per node for people, with the number of groups that a worker has leased or that are being checked."""
        rows = self.nodes.table()
        with self._changed:
            return [row | {"groups": len(self._queue.held(row["key"])) or row["running"]} for row in rows]

    # Called by workers over HTTP.

    @property
    def is_ended(self) -> bool:
        """True once the run is over."""
        return self._shared.is_ended

    def describe(self) -> dict:
        """Returns the reply to `GET /run`: the run's environment, tokenizer, servers, and sampling settings."""
        config = self._config
        with self._changed:
            version, policy = self._shared.version, self._shared.policy
        servers = self.nodes.servers()
        return env_mix.described(config) | {
            # Nodes elsewhere find a folder by the path in the config.
            "tokenizer": (hub.pinned if config.topology.mode == "remote" else tokenizer_lib.located)(config.tokenizer),
            "servers": [server["url"] for server in servers],
            "server_keys": {server["url"]: server["key"] for server in servers if server["key"]},
            **({"vine": config.vine.to_dict()} if config.rl.credit == "vine" else {}),
            "admission": dataclasses.asdict(self._admission.policy),
            "step": version,
            "policy": policy.to_json() if policy.version >= 0 else None,
        }

    @property
    def environment(self) -> tuple[str, str]:
        """The name of the run's environment, or those of all with commas, and the digest of their code and data."""
        names = [entry.label for entry in env_mix.entries(self._config).values()]
        return ", ".join(names), self._config.env.digest

    @property
    def submission_limits(self) -> dict[str, int]:
        """The limits of `parquet.from_bytes` for a submission: twice the groups that can be open, and the longest rollout of a batch."""
        rl, sets = self._config.rl, task_schedule.evaluation_sets(self._config)
        open_rows = env_mix.max_rollouts(self._config) * (rl.max_lag + 2)
        open_rows = math.ceil(open_rows * (rl.oversampling + rl.refill))
        open_rows += sum(one.num_tasks * one.samples_per_task for one in sets)
        open_rows *= env_mix.max_branches(self._config)
        return {"max_rows": 2 * open_rows, "max_tokens": 2 * self._config.train.row_length}

    def submit(self, rows: parquet.Rows) -> dict[str, concurrent.futures.Future[str]]:
        """Starts the checks of submitted rollouts; returns per group a future of its reply, as `Submissions.submit` does."""
        begun_s, replies = time.monotonic(), self._submissions.submit(rows)
        for reply in replies.values():
            reply.add_done_callback(lambda _: self.metrics.seconds["submit"].observe(time.monotonic() - begun_s))
        return replies

    def _open(self, policy: timeline.Policy) -> None:
        """Opens the groups that may use a policy which servers have."""
        with self._changed:
            if policy.epoch != self._shared.policy.epoch:  # replaced meanwhile
                return
            self._shared.version = policy.version
            if policy == self._shared.policy:
                self.metrics.seconds["update"].observe(time.monotonic() - self._published_s)
            self._batches.load(policy.version)
            self._changed.notify_all()

    def _record_batch(
        self, step: int, taken: list[queue_entry.Entry], flat: list[queue_entry.Entry]
    ) -> concurrent.futures.Future:
        basis = {entry.group.key[1:]: "verified" if entry.is_verified else "trusted" for entry in taken}
        digest = run_rules.batch_digest(entry.digest for entry in sorted(taken, key=lambda entry: entry.group.group))
        digests = {entry.label: entry.digest for entry in env_mix.entries(self._config).values()}
        counts = environment_counts.count(taken, flat, self._has_signal, digests)
        self._status.add_environments(counts)
        dropped, chain = self._batches.take_dropped(), self._curriculum.digest if self._curriculum else ""
        return self._ledger.batch(step, digest, basis, self._shared.policy.epoch, dropped, counts, chain)

    def _collect(self, step: int) -> tuple[list[queue_entry.Entry], list[queue_entry.Entry]]:
        """Blocks until batch `step` is complete; takes its groups, and those without a signal that they replaced. The second list has the latter."""
        taken: list[queue_entry.Entry] = []
        self._wanted = step
        while not self._wait_for(lambda: taken.extend(self._batches.collect(step) or []) or taken, WAIT_NOTICE_S):
            self._on_wait(self._waiting(f"batch {step}", self._batches.progress()))  # a long wait is not an error
        self._wanted = None
        flat = self._batches.take_flat()
        if self._curriculum:  # before the ledger has the batch: after a restart, its results are in the file
            results = self._results([*taken, *flat])
            path = self._results_file(step)
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write(path, curriculum_lib.encode(step, results), durable=True)
            self._curriculum.add(step, results)
        self._submissions.void_too_old()
        self._mark(step, taken)
        self._counts["given_up"] += sum(list(entry.scores.values()).count(None) for entry in taken)
        return taken, flat

    def _results(self, entries: list[queue_entry.Entry]) -> list[curriculum_lib.Result]:
        """Returns the mean reward of each group, of the first branches of its episodes, in order."""
        found = []
        for entry in sorted(entries, key=lambda one: one.group.group):
            rewards = [one.reward for one in self._rewarded(entry) if one.branch == 0]
            if rewards:
                mean = math.fsum(rewards) / len(rewards)
                found.append(curriculum_lib.Result(entry.group.group, entry.group.env, entry.group.index, mean))
        return found

    def _results_file(self, step: int) -> pathlib.Path:
        return self._workdir / "rollouts" / f"step_{step}" / curriculum_lib.FILE

    def _mark(self, step: int, taken: list[queue_entry.Entry]) -> None:
        """Records the unverified groups that batch `step` trains on, and the state as of its hand-off. The caller has the lock."""
        for entry in taken:
            if not entry.is_verified:
                for health, name in self._submissions.answering(entry):
                    health.trained_unverified(name, step)
                self._counts["unverified"] += len(entry.rollouts)
        state = {"standing": self._health.state(), "evidence": self._evidence(step), "servers": self._servers.state()}
        state["batches"] = self._batches.state()
        if self._curriculum:
            state["curriculum"] = self._curriculum.state()
        self._states = {n: s for n, s in self._states.items() if n == step - 1} | {step: state}

    def _restore(self, epoch: int) -> None:
        """Takes the groups of the log that are of this epoch, after a restart; all others are made again. The caller has the lock."""
        kept, self._kept = self._kept, {}
        kept = {key: one for key, one in kept.items() if all(r.epoch == epoch for r in one.rollouts)}
        run = self._ledger.run
        if run.batch and run.step == self._batches.step + 1:  # recorded, but maybe not returned
            keys = [("train", *name) for name in sorted(run.batch)]
            if missing := [key for key in keys if key not in kept]:
                found = f"batch {run.step} is in the ledger, and {len(missing)} of its groups are not in {self._log.directory}"
                raise ValueError(f"{found}; put the directory back, or start the learner again")
            self._recorded[run.step] = [kept.pop(key).entry(run.batch[key[1:]] == "verified") for key in keys]
            self._batches.skip(run.step, *([number for _, number in names] for names in (run.batch, run.dropped)))
            if self._curriculum:
                self._curriculum.add(run.step, curriculum_lib.decode(self._results_file(run.step).read_bytes()))
        oldest = max(0, self._shared.policy.version - self._config.rl.max_lag)
        self._batches.reopen([number for _, _, number in kept], oldest)
        for one in kept.values():
            self._submissions.restore(one)
        self._submissions.void_too_old()

    def _wait_for(self, condition: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Returns True if `condition` became true in time; raises the error given to `fail`, if any. Call it under the lock."""
        is_met = self._changed.wait_for(lambda: self._failure or condition(), timeout_s)
        if self._failure:
            raise self._failure
        return bool(is_met)

    def _waiting(self, name: str, progress: tuple[int, int], left_s: float = 0.0) -> str:
        loading = self._shared.policy if self._shared.policy.version > self._shared.version else None
        return self._status.waiting(name, progress, loading, time.monotonic(), left_s)

    def _evaluation(self, version: int, name: str, keys: list[queue_entry.Key], begun_s: float) -> str:
        """Returns the state of an evaluation for people, with an estimate of its end: by its finished groups, else by its longest answers."""
        done, taken_s = self._queue.num_eligible(keys), time.monotonic() - begun_s
        if done:
            left_s = taken_s * (len(keys) - done) / done
        else:
            entries = [self._queue.entries[key] for key in self._not_left_out(keys)]
            most = sum(entry.group.num_samples for entry in entries) * env_mix.max_tokens(self._config)
            left_s = max(0.0, most / (self.nodes.tokens_per_s() or math.inf) - taken_s)
        label = f"the evaluation {name} of version {version}" if name else f"the evaluation of version {version}"
        return self._waiting(label, (done, len(keys)), left_s)

    def _take_counts(self) -> dict[str, float]:
        with self._changed:
            batch = self._batches.take_metrics()
            self._counts["stale"] += round(batch["batch/num_stale"] * env_mix.mean_samples(self._config))
            chosen = self._curriculum.metrics() if self._curriculum else {}
            counts = self._status.take_counts()
        return counts | batch | chosen | self.nodes.load()

    def _metrics(self) -> role_metrics.Values:
        with self._changed:
            values = self._status.values()
        return {**values, "nodes": self.nodes.counts()}

    def _has_signal(self, entry: queue_entry.Entry) -> bool:
        return self._credit.has_signal(self._rewarded(entry))

    def _rewarded(self, entry: queue_entry.Entry) -> list[rollout_lib.Rollout]:
        if entry.group.split != "train" or self._config.rl.score_errors == "zero":
            return training_batch.rewarded(entry.rollouts, entry.scores)
        failed = training_batch.failed(entry.rollouts, entry.scores)
        return training_batch.rewarded(entry.rollouts, entry.scores, failed, self._config.rl.min_group)

    def _score_errors(self, step: int, taken: list[queue_entry.Entry]) -> dict[str, float]:
        """Returns the metric of samples that the scorer raised for. Raises ValueError if these are more than half of the run's or all of the batch's."""
        num_failed = num_samples = 0
        for entry in taken:
            failed = training_batch.failed(entry.rollouts, entry.scores)
            flags = [one.number in failed for one in entry.rollouts if not one.branch]
            num_failed, num_samples = num_failed + sum(flags), num_samples + len(flags)
        self._num_scored.update(failed=num_failed, all=num_samples)
        if num_failed and self._config.rl.score_errors != "zero":
            first = self._first_error() or "no process of this run has reported it"
            total = self._num_scored
            if 2 * total["failed"] > total["all"] or num_failed == num_samples:
                found = f"the scorer failed for {total['failed']} of {total['all']} samples of this run, {num_failed} of {num_samples} in batch {step}"
                raise ValueError(
                    f"{found}; the first error: {first}; correct the environment, or set rl.score_errors = 'zero'"
                )
            left = f"batch {step} leaves out {num_failed} of {num_samples} samples, for which the scorer failed"
            self._on_wait(f"{left} (rl.score_errors); the first error: {first}")
        return {"rollout/score_error_frac": num_failed / max(num_samples, 1)}
