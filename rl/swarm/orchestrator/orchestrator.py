"""Hands out groups to workers, collects their rollouts, and assembles the batches of the learner.

For batch n (1-based) of P groups:
1. `publish(version)` names it to the inference servers. Once they serve it (rl/swarm/orchestrator/nodes.py), the groups of the batches up to
   version + 1 + max_lag open.
2. A worker leases groups (rl/swarm/orchestrator/leases.py), generates their rollouts on the servers, and submits them, signed
   (rl/swarm/orchestrator/routes.py). Its heartbeats renew its leases; an expired lease goes to the next worker.
3. A submission is checked, and its group quarantined until a verdict accepts it (rl/swarm/orchestrator/submissions.py).
4. A rejected group is requeued. `next_batch(n)` waits until the batch is complete by its rule (rl/swarm/orchestrator/groups/batches.py), assigns
   advantages, and returns it.

rl/swarm/orchestrator/groups/group_queue.py has the states of a group, rl/swarm/orchestrator/state.py those of the run and their lock; this file adds
clock and servers. It runs in the learner's process and imports no environment: a task is only an index here.
"""

import concurrent.futures
import contextlib
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
from rl.experiment.reporting import diagnostics
from rl.learning.batch import credit as credit_lib
from rl.learning.batch import training_batch
from rl.protocol import curriculum as curriculum_lib
from rl.protocol import env_mix, task_schedule, timeline
from rl.protocol import lease as lease_lib
from rl.protocol.ledger import run_ledger, run_rules
from rl.swarm.orchestrator import group_log, leases, nodes, routes, status, submissions, work_share, worker_health
from rl.swarm.orchestrator import state as state_lib
from rl.swarm.orchestrator.gate import gate
from rl.swarm.orchestrator.groups import batches, give_backs, group_queue, queue_entry
from rl.swarm.orchestrator.groups import rewards as rewards_lib
from rl.swarm.orchestrator.state import RunState
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks
from rl.trust.verification import rules as rules_lib
from sharding.system import atomic_file, sockets
from sharding.system.logs import role_metrics

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
    there is one. `clock` returns seconds that never fall. `on_wait` receives lines for people: a status every `WAIT_NOTICE_S` seconds of waiting, and the steps that a caught
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
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._workdir, self._credit, self._key = config, workdir, credit, key
        self._ledger, self._evidence, self._on_wait = ledger or run_ledger.NoLedger(), evidence, on_wait
        self._entries = env_mix.entries(config)
        self._rewards = rewards_lib.Rewards(config, credit, first_error, on_wait)
        self._curriculum = curriculum_lib.Curriculum(config) if config.rl.curriculum else None
        own_workers = () if config.topology.mode == "remote" else invited
        invited = frozenset({*invited, *config.topology.workers})
        state = self._first_state(invited, {*server_keys, *config.topology.server_keys}, is_measuring, clock)
        self.locked = state_lib.Locked(state, config, self._ledger, on_wait)
        self.admission = gate.Admission(config, key.worker, invited, stake)
        self.nodes = nodes.Nodes(
            locked=self.locked, validators=verdicts.validators, own_workers=own_workers, on_served=self._open
        )
        self.metrics = role_metrics.RoleMetrics("orchestrator", self._metrics, LATENCIES)  # not for workers
        self.metrics.seconds["verdict"] = verdicts.seconds
        self.leases = leases.Leases(locked=self.locked, nodes=self.nodes, seconds=self.metrics.seconds["lease"])
        self._status = status.Status(self.nodes, verdicts)
        self._log = row_log.RowLog(workdir / "rollouts" / "open", self.locked.fail)
        self._submissions = submissions.Submissions(
            locked=self.locked,
            log=self._log,
            rules=rules_lib.Rules.of(config, key.worker),
            check_group_without_weights=check_group_without_weights,
            verdicts=verdicts,
            secret=secret,
            on_verified=on_verified,
            on_banned=self.nodes.banned,
        )
        self.is_closing = False
        self._web: Any = None  # from `serve` on, as the thread
        self._thread: Any = None

    def serve(self) -> str:
        """Starts the HTTP server for workers in a thread; returns its URL. Raises ValueError if its address cannot be used."""
        sock = sockets.listen(self._config.topology.host, self._config.topology.port)
        self._web = web.server(routes.make_app(self, self._key))
        self._thread = threading.Thread(target=self._web.run, args=([sock],), name="orchestrator", daemon=True)
        self._thread.start()
        # Modules and compiled functions stay: else each full collection takes 0.15 s to look at them, and no lease is answered meanwhile.
        gc.collect()
        gc.freeze()
        return sockets.address(sock)

    def end(self) -> None:
        """Tells all nodes that the run is over, so that workers do not wait for its next process; returns when they know, or soon."""
        with self.locked as state:
            state.is_ended = True
        deadline_s = time.monotonic() + min(3 * self._config.topology.heartbeat_s, MAX_FAREWELL_S)
        while self.nodes.num_signed_in() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def close(self) -> None:
        """Stops the HTTP server, if it serves, and cancels queued work; waits for running replays, but not for other checks."""
        self.is_closing = True  # or the web server waits for those that wait for work
        if self._web:
            self._web.should_exit = True
            self._thread.join()
        self._submissions.close()
        self._log.close()

    def resume(self, step: int, saved: dict | None = None, later: dict | None = None) -> None:
        """Continues a run after batch `step`, whose groups are not opened again. `saved` is the `state(step)` of then, if any.

        `later` is the state of the batch after, if this run's ledger has it; the learner may not have received it.
        """
        self._submissions.resume()
        with self.locked as state:
            state.logged = group_log.read(self._log)
            begins = {"num_opened": step * self._config.rl.prompts_per_step, "waiting": []}  # of an evaluation only
            is_run = saved or not isinstance(self._ledger, run_ledger.NoLedger)
            state.batches.restore(step, (saved or {}).get("batches") if is_run else begins)
            if self._curriculum and step and is_run:
                if "curriculum" not in (saved or {}):
                    found = f"the checkpoint of step {step} lacks the state of rl.curriculum = {self._config.rl.curriculum!r}"
                    raise ValueError(f"{found}: the run began without it; start another --workdir")
                self._curriculum.restore((saved or {})["curriculum"])
            state.states = {n: s for n, s in ((step, saved), (step + 1, later)) if s}
            if newest := later or saved:
                state.health.restore(newest["standing"])
                state.servers.restore(newest["servers"])
            # The ledger has the marks since the checkpoint.
            refusals, ejected = self._ledger.refusals, self._ledger.ejected_workers
            names, registered = refusals.keys() | ejected, state.servers.invited
            state.servers.remember(names & registered, refusals, ejected)
            state.health.remember(names - registered, refusals, ejected)

    # Called by the learner.

    def publish(self, policy: timeline.Policy) -> None:
        """Lets the servers load `policy`, published already; once they have, further batches open.

        A policy of another epoch makes all work of earlier ones void.
        """
        with self.locked as state:
            state.policy, state.published_s = policy, state.clock()
            if policy.epoch != state.queue.epoch:
                self._submissions.begin_epoch(state, policy.epoch)
                self._restore(state, policy.epoch)
        self.nodes.announce(policy)

    def next_batch(self, step: int) -> training_batch.Batch:
        """Blocks until all groups of batch `step` (1-based) are accepted; returns the batch. Raises the error given to `fail`.

        After a restart, the last batch in the ledger is returned again if the learner asks for it.
        """
        with self.locked as state:  # no verdict may be recorded between the two
            taken, recorded = state.recorded.pop(step, None), None
            if taken is None:
                taken, flat = self._collect(state, step)
                recorded = self._record_batch(state, step, taken, flat)
            elif step not in state.states:
                self._mark(state, step, taken)
            kept = {step, *(entry.group.step for entry in (*taken, *state.queue.entries.values()))}
            states = json.dumps(state.states)
        group_log.write_batch(self._log, self._workdir, step, taken, kept)
        if recorded:
            recorded.result()
        atomic_file.write(self._log.directory / STATES, states.encode(), durable=True)
        groups = [group for group in map(self._rewards.of, taken) if group]
        counts = self._rewards.check_scored(step, taken)
        counts["batch/num_left_out"] = float(sum(len(e.rollouts) for e in taken) - sum(map(len, groups)))
        most = {entry.label: entry.max_tokens for entry in self._entries.values()}
        counts = diagnostics.of_groups(groups, step=step, max_tokens=most) | counts | self.take_counts()
        return training_batch.assemble(step, groups, self._credit, counts, env_mix.max_streams(self._config))

    def state(self, step: int) -> dict:
        """Returns the marks against workers at the return of batch `step`, as JSON for `resume`; {} if it is not one of the last two."""
        with self.locked as state:
            return state.states.get(step, {})

    def evaluate(self, version: int, name: str = "") -> list[list[rollout_lib.Rollout]]:
        """Blocks until workers have submitted the rollouts of an evaluation set (rl/protocol/task_schedule.py) by policy `version`.

        Returns a list of rollouts per task. Training goes on meanwhile. A server keeps this version for up to `evaluation.hold_s`;
        after this time the evaluation is given up as soon as there is a newer one, and the result is [].
        """
        groups, hold_s = task_schedule.held_out_groups(self._config, version, name), self._config.evaluation.hold_s
        with self.locked as state:
            newest, begun_s = state.policy, state.clock()
        policy = newest if newest.version == version else timeline.Policy(newest.epoch, version)
        with self.nodes.holding(policy), self.locked as state, contextlib.ExitStack() as stack:
            self.locked.wait_for(lambda: state.version >= version)
            groups = [group for group in groups if group.env not in state.left_out]
            state.queue.add(groups, after=version + 1)  # the learner waits for that batch, and later ones may wait
            waiting = functools.partial(self._evaluation, state, version, name, groups, state.clock())
            state.evaluating[version, name] = waiting
            stack.callback(state.evaluating.pop, (version, name))

            def present() -> list[queue_entry.Key]:  # those whose environment was not left out meanwhile
                return [group.key for group in groups if group.key in state.queue.entries]

            def is_complete() -> bool:
                return state.queue.num_eligible(present()) == len(present())

            while not self.locked.wait_for(is_complete, min(EVALUATION_NOTICE_S, hold_s)):
                self._on_wait(waiting())
                if state.clock() > begun_s + hold_s and state.policy.version > version:
                    for key in present():
                        state.queue.drop(key, "evaluation")
                    return []
            taken = state.queue.take(present())
            state.counts["given_up"] += rewards_lib.num_given_up(taken)
        return [*map(self._rewards.of, taken)]

    def doubt(self, node: str) -> None:
        """Has each group that a worker or server answers for replayed from now on, without blame."""
        self._submissions.doubt(node)

    def fail(self, error: BaseException) -> None:
        """Makes waiting and later calls of the learner raise `error`, such as the death of a child process."""
        self.locked.fail(error)

    def waiting_for(self) -> str:
        """Returns why the learner waits, as a line for people, or "" if it does not."""
        with self.locked as state:
            found = [waiting() for waiting in state.evaluating.values()]
            if state.wanted:
                found.append(self._waiting(state))
            return "; ".join(found)

    def health(self) -> dict[str, str]:
        """Returns the body of /health."""
        return {"waiting_for": self.waiting_for()}

    def table(self) -> list[dict[str, Any]]:
        """Returns a row per node for people, with the number of groups that a worker has leased or that are being checked."""
        with self.locked as state:
            rows = self.nodes.table()
            return [row | {"groups": len(state.queue.held(row["key"])) or row["running"]} for row in rows]

    # Called by workers over HTTP.

    @property
    def is_ended(self) -> bool:
        """True once the run is over."""
        with self.locked as state:
            return state.is_ended

    def is_known(self, worker: str) -> bool:
        """Returns True for an invited worker, and for a stranger with a record."""
        with self.locked as state:
            return state.health.is_known(worker)

    def is_invited(self, worker: str) -> bool:
        """Returns True for a worker that config or launcher named."""
        with self.locked as state:
            return worker in state.health.invited

    def describe(self) -> dict:
        """Returns the reply to `GET /run`: the run's environment, tokenizer, servers, and sampling settings."""
        config = self._config
        with self.locked as state:
            version, policy, servers = state.version, state.policy, self.nodes.servers()
        return env_mix.described(config) | {
            # Nodes elsewhere find a folder by the path in the config.
            "tokenizer": (hub.pinned if config.topology.mode == "remote" else tokenizer_lib.located)(config.tokenizer),
            "servers": [server["url"] for server in servers],
            "server_keys": {server["url"]: server["key"] for server in servers if server["key"]},
            **({"vine": config.vine.to_dict()} if config.rl.credit == "vine" else {}),
            "admission": self.admission.policy,
            "step": version,
            "policy": policy.to_json() if policy.version >= 0 else None,
        }

    @property
    def environment(self) -> tuple[str, str]:
        """The name of the run's environment, or those of all with commas, and the digest of their code and data."""
        return ", ".join(entry.label for entry in self._entries.values()), self._config.env.digest

    @property
    def submission_limits(self) -> dict[str, int]:
        """The limits of `parquet.from_bytes` for a submission: twice the rollouts that can be open, of up to twice the tokens of a training row."""
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

    # Parts of the above.

    def _first_state(
        self,
        invited: Collection[str],
        registered: Collection[str],
        is_measuring: Callable[[], bool],
        clock: Callable[[], float],
    ) -> RunState:
        """Returns the state of a run without groups; `invited` are keys of workers, `registered` those of servers that sign."""
        config, queue = self._config, group_queue.GroupQueue()
        draws = self._curriculum.draws if self._curriculum else None
        make_groups = functools.partial(task_schedule.numbered_groups, config, draws=draws)
        marks = functools.partial(
            worker_health.WorkerHealth,
            config.trust.max_attempts,
            config.topology.lease_s,
            min_rate=config.trust.min_rate,
            invited_rate=config.trust.invited_rate,
        )
        return RunState(
            queue=queue,
            batches=batches.Batches(config.rl, queue, make_groups, self._rewards.has_signal),
            health=marks(invited=invited, is_measuring=is_measuring),
            servers=marks(invited=registered),
            share=work_share.WorkShare(config.topology.lease_s),
            give_backs=give_backs.GiveBacks(self._on_wait),
            clock=clock,
        )

    def _open(self, policy: timeline.Policy) -> None:
        """Opens the groups that may use a policy which servers have."""
        with self.locked as state:
            if policy.epoch != state.policy.epoch:  # replaced meanwhile
                return
            state.version = policy.version
            if policy == state.policy:
                self.metrics.seconds["update"].observe(state.clock() - state.published_s)
            state.batches.load(policy.version)
            state.has_news = True

    def _collect(self, state: RunState, step: int) -> tuple[list[queue_entry.Entry], list[queue_entry.Entry]]:
        """Blocks until batch `step` is complete; takes its groups, and those without a signal that they replaced. The second list has the latter."""
        taken: list[queue_entry.Entry] = []
        state.wanted = step
        while not self.locked.wait_for(lambda: taken.extend(state.batches.collect(step) or []) or taken, WAIT_NOTICE_S):
            self._on_wait(self._waiting(state))  # a long wait is not an error
        state.wanted = None
        flat = state.batches.take_flat()
        if self._curriculum:  # before the ledger has the batch: after a restart, its results are in the file
            results = self._rewards.results([*taken, *flat])
            path = self._results_file(step)
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write(path, curriculum_lib.encode(step, results), durable=True)
            self._curriculum.add(step, results)
        self._submissions.void_too_old(state)
        self._mark(state, step, taken)
        state.counts["given_up"] += rewards_lib.num_given_up(taken)
        return taken, flat

    def _record_batch(
        self, state: RunState, step: int, taken: list[queue_entry.Entry], flat: list[queue_entry.Entry]
    ) -> concurrent.futures.Future:
        digests = {entry.label: entry.digest for entry in self._entries.values()}
        counts = rewards_lib.by_environment(taken, flat, self._rewards.has_signal, digests)
        self._status.add_environments(counts)
        return self._ledger.batch(
            step=step,
            digest=run_rules.batch_digest(entry.digest for entry in sorted(taken, key=lambda entry: entry.group.group)),
            groups={entry.group.key[1:]: "verified" if entry.is_verified else "trusted" for entry in taken},
            epoch=state.policy.epoch,
            dropped=state.batches.take_dropped(),
            environments=counts,
            curriculum=self._curriculum.digest if self._curriculum else "",
        )

    def _results_file(self, step: int) -> pathlib.Path:
        return self._workdir / "rollouts" / f"step_{step}" / curriculum_lib.FILE

    def _mark(self, state: RunState, step: int, taken: list[queue_entry.Entry]) -> None:
        """Records the unverified groups that batch `step` trains on, and the state as of its hand-off."""
        for entry in taken:
            if not entry.is_verified:
                for health, name in submissions.answering(state, entry):
                    health.trained_unverified(name, step)
                state.counts["unverified"] += len(entry.rollouts)
        saved = {"standing": state.health.state(), "servers": state.servers.state(), "evidence": self._evidence(step)}
        saved["batches"] = state.batches.state()
        if self._curriculum:
            saved["curriculum"] = self._curriculum.state()
        state.states = {n: s for n, s in state.states.items() if n == step - 1} | {step: saved}

    def _restore(self, state: RunState, epoch: int) -> None:
        """Takes the groups of the log that are of this epoch, after a restart; all others are made again."""
        logged, state.logged = state.logged, {}
        logged = {key: one for key, one in logged.items() if all(r.epoch == epoch for r in one.rollouts)}
        run = self._ledger.run
        if run.batch and run.step == state.batches.step + 1:  # recorded, but maybe not returned
            keys = [("train", *name) for name in sorted(run.batch)]
            if missing := [key for key in keys if key not in logged]:
                found = f"batch {run.step} is in the ledger, and {len(missing)} of its groups are not in {self._log.directory}"
                raise ValueError(f"{found}; put the directory back, or start the learner again")
            state.recorded[run.step] = [logged.pop(key) for key in keys]
            for entry in state.recorded[run.step]:
                entry.is_verified = run.batch[entry.group.key[1:]] == "verified"
            taken, dropped = ([number for _, number in names] for names in (run.batch, run.dropped))
            state.batches.skip(run.step, taken, dropped)
            if self._curriculum:
                self._curriculum.add(run.step, curriculum_lib.decode(self._results_file(run.step).read_bytes()))
        oldest = max(0, state.policy.version - self._config.rl.max_lag)
        state.batches.reopen([number for _, _, number in logged], oldest)
        for one in logged.values():
            self._submissions.restore(state, one)
        self._submissions.void_too_old(state)

    def _waiting(self, state: RunState) -> str:
        """Returns why the learner's batch waits."""
        return self._status.waiting(state, f"batch {state.wanted}", state.batches.progress(), state.clock())

    def _evaluation(
        self, state: RunState, version: int, name: str, groups: Sequence[lease_lib.Lease], begun_s: float
    ) -> str:
        """Returns the state of an evaluation for people, with an estimate of its end: by its finished groups, else by its longest answers."""
        now_s = state.clock()
        done, taken_s = state.queue.num_eligible([group.key for group in groups]), now_s - begun_s
        if done:
            left_s = taken_s * (len(groups) - done) / done
        else:
            num_samples = sum(group.num_samples for group in groups if group.key in state.queue.entries)
            most = num_samples * env_mix.max_tokens(self._config)
            left_s = max(0.0, most / (self.nodes.tokens_per_s() or math.inf) - taken_s)
        label = f"the evaluation {name} of version {version}" if name else f"the evaluation of version {version}"
        return self._status.waiting(state, label, (done, len(groups)), now_s, left_s)

    def take_counts(self) -> dict[str, float]:
        """Returns the counts of rollouts and groups since the last call, and the load of the servers, as metrics of a batch."""
        with self.locked as state:
            batch = state.batches.take_metrics()
            state.counts["stale"] += round(batch["batch/num_stale"] * env_mix.mean_samples(self._config))
            chosen = self._curriculum.metrics() if self._curriculum else {}
            return self._status.take_counts(state) | batch | chosen | self.nodes.load()

    def _metrics(self) -> role_metrics.Values:
        with self.locked as state:
            return {**self._status.values(state), "nodes": self.nodes.counts()}
