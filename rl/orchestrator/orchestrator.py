"""Groups out, rollouts in: leases to workers, admission, staleness, advantages, and the hand-off to the learner.

In time, for batch n (1-based) of P groups:
1. `publish(version)` tells the servers to load it; once they have, every batch n with n - 1 - max_lag <= version opens.
2. A worker leases groups (`POST /lease`, signed: rl/protocol/lease.py), rolls them out against the servers, and submits signed
   rollouts as Parquet (`POST /submit`; rl/orchestrator/routes.py). A lease that runs out goes to the next worker.
3. A submission is admitted or refused with a reason: form, signature, the lease's task, seed and temperature, versions in
   force; what the validator can say without weights (prompt, ending, reward made again); then, for a part of the groups that
   no worker can foresee, its replay. A refused group is leased again: a batch is always its P prescribed groups. Whose
   groups are refused loses its standing (rl/orchestrator/worker_health.py). A sample on whose reward our scorer gave up is worth 0, whatever
   was claimed, and refuses nothing: it would come back the same for ever.
4. `next_batch(n)` waits for them, drops what became too stale (and leases it again), turns rewards into advantages and
   gives token streams to pack. The rollouts are kept as Parquet under `rollouts/step_N/`.

It runs in the learner's process, in threads, and imports no environment: a task is only an index here.

Letters: P groups per batch, G samples per group.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import hashlib
import hmac
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from inference import client as client_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool, web
from rl.batch import credit as credit_lib
from rl.batch import packing
from rl.orchestrator import admission, routes, worker_health
from rl.protocol import task_schedule
from sharding.system import sockets

WAIT_NOTICE_S = 30.0
Check = Callable[[Sequence[rollout_lib.Rollout]], "str | None"]  # a group -> the reason to refuse it, or None
# A group and its split -> the same, and the samples that are worth 0 because their reward could not be made again in time.
Screen = Callable[[Sequence[rollout_lib.Rollout], str], "tuple[str | None, Collection[int]]"]
NUM_SCREENS = 4  # at a time; few, as each may start a scorer of its own


@dataclasses.dataclass
class _Lease:
    group: task_schedule.Group
    worker: str
    deadline: float
    is_answered: bool = False  # rollouts came, and are being judged


@dataclasses.dataclass(frozen=True)
class Batch:
    """What the learner gets: trees to pack, metrics of their making, and the rollouts themselves, by group."""

    trees: list[packing.Tree]
    metrics: dict[str, float]
    groups: list[list[rollout_lib.Rollout]]


class Orchestrator:
    """Start it with `serve()`; every method may be called from any thread.

    Args:
      config: the resolved config (frozen).
      workdir: where rollouts are kept.
      credit: how rewards become what the learner trains on.
      check: the validator's verdict on one group; called in a thread of its own.
      screen: the same without weights, on every group; called by a few threads, in which workers take turns.
      evidence: the validator's memory, as of a step (plain JSON); kept with the checkpoint, as the workers' standing is.
      secret: decides which groups are checked; unknown to workers.
      on_wait: hears of a long wait, as a line for people, every `WAIT_NOTICE_S`.
    """

    def __init__(
        self,
        config,
        workdir: pathlib.Path,
        *,
        credit: credit_lib.Credit,
        check: Check,
        screen: Screen = lambda rollouts, split: (None, ()),
        evidence: Callable[[int], dict] = lambda step: {},
        secret: bytes,
        on_wait: Callable[[str], None] = lambda line: None,
    ):
        self._config, self._workdir, self._credit = config, workdir, credit
        self._check, self._screen, self._evidence, self._secret = check, screen, evidence, secret
        self._on_wait = on_wait
        self._servers: tuple[str, ...] = ()
        self._changed = threading.Condition()
        self._announced = -1  # the newest version any server may have
        self._version = -1  # the newest version all servers have
        self._opened_step = 0
        self._todo: collections.deque[task_schedule.Group] = collections.deque()
        self._leases: dict[tuple, _Lease] = {}
        self._to_check: set[tuple] = set()  # groups drawn for the validator
        self._done: dict[tuple, list[rollout_lib.Rollout]] = {}
        self._checked: set[tuple] = set()  # of those, the ones that the validator has replayed
        self._given_up: dict[tuple, frozenset[int]] = {}  # of those, samples that are worth 0 whatever they claim
        self._standing = worker_health.Standing(max_refusals=config.trust.max_attempts, lease_s=config.topology.lease_s)
        self._states: dict[int, dict] = {}  # of the last two batches, as they were handed off
        self._refusals: collections.Counter = collections.Counter()
        self._counts: collections.Counter = collections.Counter()
        self._failure: BaseException | None = None
        self._screeners = fair_pool.FairPool(NUM_SCREENS, "screen")
        self._checker = concurrent.futures.ThreadPoolExecutor(1, "validator")
        self._updater = concurrent.futures.ThreadPoolExecutor(1, "update-servers")

    # Lifetime.

    def serve(self) -> str:
        """Binds, answers workers in a thread, and returns the URL."""
        sock = sockets.listen(self._config.topology.host, self._config.topology.port)
        self._web = web.server(routes.make_app(self, self._config.topology.workers))
        self._thread = threading.Thread(
            target=self._web.run, kwargs={"sockets": [sock]}, name="orchestrator", daemon=True
        )
        self._thread.start()
        return sockets.address(sock)

    def close(self) -> None:
        self._web.should_exit = True
        self._thread.join()
        self._updater.shutdown(cancel_futures=True)
        self._screeners.close()
        self._checker.shutdown(cancel_futures=True)

    def connect(self, servers: Sequence[str]) -> None:
        """Names the rollout servers that workers use and that new versions go to."""
        self._servers = tuple(servers)

    def resume(self, step: int, state: dict | None = None) -> None:
        """Continues after batch `step`, with what `state` told of it: what was opened before is never asked for again."""
        self._opened_step = step
        if state:
            self._standing.restore(state["standing"])
            self._states[step] = state

    # What the learner calls.

    def publish(self, version: int) -> None:
        """Announces that `version` is on the broadcast; returns at once, servers load it meanwhile."""
        self._announced = version
        self._updater.submit(self._update_servers, version)

    def next_batch(self, step: int) -> Batch:
        """Waits for batch `step` (1-based) and returns it."""
        keys = [group.key for group in task_schedule.train_groups(self._config, step)]
        taken = self._collect(keys, step)
        path = self._workdir / "rollouts" / f"step_{step}" / "accepted.parquet"
        parquet.write(path, [rollout for group, _ in taken for rollout in group])  # as they were signed
        groups = [_worth(*group) for group in taken]
        rollouts = [rollout for group in groups for rollout in group]
        trees, flat = self._credit.assign(groups)
        lag = np.array([step - 1 - int(r.versions[r.sampled_mask].min()) for r in rollouts])
        metrics = _describe(rollouts) | {
            "rollout/zero_advantage_frac": flat,
            "sync/lag": float(lag.mean()),
            "sync/lag_max": float(lag.max()),
        }
        return Batch(trees, metrics | self._take_counts(), groups)

    def state(self, step: int) -> dict:
        """What `resume` needs besides the step, as plain JSON, as of the hand-off of batch `step`.

        Of what came later only what is news when it comes again: a resumed run asks for it again.
        """
        return self._states.get(step, {})

    def evaluate(self, version: int) -> list[list[rollout_lib.Rollout]]:
        """Rolls out the held-out tasks with `version`, once the servers have it, and returns them by task."""
        groups = task_schedule.held_out_groups(self._config, version)
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._version >= version)
            if self._failure:
                raise self._failure
            self._todo.extendleft(reversed(groups))  # before training work: the version in force moves on
            self._changed.notify_all()
        return [_worth(*group) for group in self._collect([group.key for group in groups], None)]

    def fail(self, error: BaseException) -> None:
        """Makes whoever waits raise `error` (a child process died, for instance)."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # What workers reach over HTTP.

    def describe(self) -> dict:
        """What a worker needs to know of the run."""
        config = self._config
        return {
            "env": {"name": config.env.name, "options": config.env.options.to_dict(), "seed": config.seed},
            "tokenizer": config.tokenizer,
            "tokenizer_date": config.tokenizer_date,
            "servers": list(self._servers),
            "sampling": {
                "top_k": config.sampling.top_k,
                "top_p": config.sampling.top_p,
                "min_p": config.sampling.min_p,
                "max_tokens": config.sampling.max_tokens,
            },
            "router_replay": config.train.router_replay,
            "step": self._version,
        }

    def lease(self, worker: str, capacity: int) -> list[task_schedule.Group]:
        """Up to `capacity` groups for `worker`; none when there is nothing to do."""
        with self._changed:
            now = time.monotonic()
            self._standing.asked(worker, now)
            for key, lease in list(self._leases.items()):
                if lease.deadline < now:
                    del self._leases[key]
                    self._counts["lease_expired"] += 1
                    self._standing.expired(lease.worker, key)
                    self._todo.appendleft(lease.group)
            held = sum(lease.worker == worker for lease in self._leases.values())
            room = self._standing.room(worker, held, len(self._todo) + len(self._leases), now)
            allowed = [group for group in self._todo if self._standing.may_take(worker, group.key, now)]
            groups = allowed[: max(0, min(room, capacity))]
            for group in groups:
                self._todo.remove(group)
                self._leases[group.key] = _Lease(group, worker, now + self._config.topology.lease_s)
            return groups

    def submit(self, rollouts: Sequence[rollout_lib.Rollout]) -> dict[str, concurrent.futures.Future]:
        """Takes what a file holds; per group a future of "accepted", "checking" or the reason it was refused."""
        by_key: dict[tuple, list[rollout_lib.Rollout]] = collections.defaultdict(list)
        for rollout in rollouts:
            by_key[(self._split(rollout), rollout.step, rollout.task.group)].append(rollout)
        return {"/".join(map(str, key)): self._take(key, group) for key, group in by_key.items()}

    # Inside.

    def _update_servers(self, version: int) -> None:
        try:
            if self._servers:
                asyncio.run(self._tell_servers(version))
        except (ValueError, OSError, client_lib.httpx.HTTPError, client_lib.httpx.InvalidURL) as error:
            self.fail(ValueError(f"a rollout server did not take policy version {version}: {error}"))
            return
        except BaseException as error:  # a bug: nobody looks at this thread's future, so whoever waits must hear of it
            self.fail(error)
            raise
        with self._changed:
            self._version = version
            last = min(version + 1 + self._config.rl.max_lag, self._config.rl.num_steps)
            for step in range(self._opened_step + 1, last + 1):
                groups = task_schedule.train_groups(self._config, step)
                self._todo.extend(groups)
                self._to_check |= self._draw(groups)
            self._opened_step = max(self._opened_step, last)
            self._changed.notify_all()

    async def _tell_servers(self, version: int) -> None:
        async with client_lib.Client(self._servers) as client:
            await client.update_weights(version)

    def _collect(self, keys: list[tuple], step: int | None) -> list[tuple[list[rollout_lib.Rollout], Collection[int]]]:
        """Waits until all `keys` are done; drops and leases again what is too stale for `step`. With whom we gave up on."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._failure or all(k in self._done for k in keys), WAIT_NOTICE_S)
                if self._failure:
                    raise self._failure
                num_done = sum(key in self._done for key in keys)
                if num_done < len(keys):  # a long wait is no error
                    barred = self._standing.num_barred(time.monotonic())
                    self._on_wait(
                        f"{'the evaluation' if step is None else f'batch {step}'} has {num_done} of {len(keys)} groups; "
                        f"{len(self._leases)} are with workers, {len(self._todo)} with nobody"
                        + f"; workers that were refused too often to get any (trust.max_attempts): {barred}"
                        * (barred > 0)
                    )
                    continue
                stale = [] if step is None else [k for k in keys if self._staleness(k, step) > self._max_off_policy]
                if not stale:
                    self._to_check.difference_update(keys)
                    self._checked.difference_update(keys)
                    if step is not None:
                        state = {"standing": self._standing.state(), "evidence": self._evidence(step)}
                        self._states = {n: s for n, s in self._states.items() if n == step - 1} | {step: state}
                    taken = [(self._done.pop(key), self._given_up.pop(key, ())) for key in keys]
                    self._counts["given_up"] += sum(len(given_up) for _, given_up in taken)
                    return taken
                groups = {group.key: group for group in task_schedule.train_groups(self._config, step)}
                for key in stale:
                    self._counts["stale"] += len(self._done.pop(key))
                    self._given_up.pop(key, None)
                    self._todo.appendleft(groups[key])
                self._changed.notify_all()

    @property
    def _max_off_policy(self) -> int:
        return self._config.rl.max_off_policy

    def _staleness(self, key: tuple, step: int) -> int:
        return max(step - 1 - int(r.versions[r.sampled_mask].min()) for r in self._done[key])

    def _split(self, rollout: rollout_lib.Rollout) -> str:
        """A rollout does not say its split; its key is leased under at most one."""
        held_out = ("held_out", rollout.step, rollout.task.group)
        lease = self._leases.get(held_out)
        return "held_out" if lease and lease.group.index == rollout.task.index else "train"

    def _take(self, key: tuple, rollouts: list[rollout_lib.Rollout]) -> concurrent.futures.Future:
        """Sees whose it is, and queues one that its holder signed to be judged."""
        with self._changed:
            lease = self._leases.get(key)
            is_holders = lease is not None and all(r.worker == lease.worker for r in rollouts)
        if lease is None or lease.is_answered:
            return self._turn_away(rollouts, "refused: not leased (or already submitted)")
        # A stranger's word must not cost the holder its lease. One sample too many is enough to refuse the group.
        if not is_holders or not all(map(rollout_lib.signature_ok, rollouts[: lease.group.num_samples + 1])):
            return self._turn_away(rollouts, "refused: signature: not signed by the worker that holds the lease")
        with self._changed:
            if self._leases.get(key) is not lease or lease.is_answered:
                return self._turn_away(rollouts, "refused: not leased (or already submitted)")
            lease.is_answered, lease.deadline = True, float("inf")
            reason = admission.refusal(
                self._config, lease.group, rollouts, newest=self._announced, claims=self._credit.router_replay
            )
            if reason is not None:
                return _known(self._settle(key, rollouts, reason))
        return self._screeners.submit(lease.worker, self._judge, key, lease.worker, rollouts)

    def _judge(self, key: tuple, worker: str, rollouts: list[rollout_lib.Rollout]) -> str:
        """Screens one group, without the lock, and settles it or hands it to the validator."""
        try:
            reason, given_up = self._screen(rollouts, key[0])
        except BaseException as error:  # as in `_check_later`
            self.fail(error)
            raise
        with self._changed:
            if given_up and reason is None:
                self._given_up[key] = frozenset(given_up)
            if reason is None and key[0] == "train" and (key in self._to_check or self._standing.is_suspect(worker)):
                self._checker.submit(self._check_later, key, rollouts)
                return "checking"
            return self._settle(key, rollouts, reason)

    def _turn_away(self, rollouts: list[rollout_lib.Rollout], reason: str) -> concurrent.futures.Future:
        with self._changed:
            self._counts["unleased"] += len(rollouts)
        return _known(reason)

    def _check_later(self, key: tuple, rollouts: list[rollout_lib.Rollout]) -> None:
        try:
            reason = self._check(rollouts)
        except BaseException as error:  # the validator itself broke: stop the run with its traceback, do not hang it
            self.fail(error)
            raise
        if reason is not None and reason.startswith("weights:"):  # of a version that was published: our own fault
            self.fail(ValueError(f"the validator cannot judge group {'/'.join(map(str, key))}: {reason}"))
            return
        with self._changed:
            self._counts["checked"] += len(rollouts)
            if reason is None:
                self._checked.add(key)
            self._settle(key, rollouts, reason, by_replay=True)

    def _settle(self, key: tuple, rollouts: list[rollout_lib.Rollout], reason: str | None, *, by_replay=False) -> str:
        """Accepts the group, or refuses it and leases it again; the lock is held."""
        lease = self._leases.pop(key)
        if reason is None:
            self._counts["accepted"] += len(rollouts) if key[0] == "train" else 0
            self._standing.delivered(lease.worker, key)
            self._done[key] = sorted(rollouts, key=lambda r: r.sample)
            self._changed.notify_all()
            return "accepted"
        self._given_up.pop(key, None)
        self._counts["refused"] += len(rollouts)
        self._refusals[reason.split(":")[0]] += 1
        self._standing.refused(lease.worker, by_replay=by_replay)
        if by_replay:
            self._call_back(lease.worker)
        if self._standing.is_barred(lease.worker) and not self._standing.others(lease.worker, time.monotonic()):
            self.fail(
                ValueError(
                    f"worker {lease.worker[:16]} was refused {self._config.trust.max_attempts} times, the last time group "
                    f"{lease.group.group} of step {lease.group.step} for: {reason}; no other worker is there. Look at that "
                    f"worker and its server, or raise trust.max_attempts"
                )
            )
        self._todo.appendleft(lease.group)
        self._changed.notify_all()
        return f"refused: {reason}"

    def _call_back(self, worker: str) -> None:
        """Replays what a new suspect has brought before, as far as no batch has taken it."""
        for key, rollouts in list(self._done.items()):
            if key[0] == "train" and key not in self._checked and rollouts[0].worker == worker:
                del self._done[key]
                group = next(g for g in task_schedule.train_groups(self._config, key[1]) if g.key == key)
                self._counts["called_back"] += len(rollouts)  # were accepted, maybe before the counts were last taken
                self._leases[key] = _Lease(group, worker, float("inf"), is_answered=True)
                self._checker.submit(self._check_later, key, rollouts)

    def _draw(self, groups: list[task_schedule.Group]) -> set[tuple]:
        """Keys of exactly ceil(check_fraction * P) groups of a batch, drawn by the secret."""
        count = int(np.ceil(self._config.trust.check_fraction * len(groups)))
        return {group.key for group in sorted(groups, key=lambda group: self._lot(group.group))[:count]}

    def _lot(self, group: int) -> bytes:
        return hmac.new(self._secret, str(group).encode(), hashlib.sha256).digest()

    def _take_counts(self) -> dict[str, float]:
        """Counters since the last call, as metrics. Who is called back was counted as accepted, and is again if the replay finds
        nothing; what was given up on is counted with the batch, or the evaluation, that it is handed off in."""
        with self._changed:
            names = ("accepted", "called_back", "refused", "checked", "stale", "lease_expired", "unleased", "given_up")
            counts = {f"trust/num_{name}": float(self._counts[name]) for name in names}
            counts |= {f"trust/num_refused_{reason}": float(n) for reason, n in self._refusals.items()}
            self._counts.clear()
            self._refusals.clear()
        return counts


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


def _worth(rollouts: list[rollout_lib.Rollout], given_up: Collection[int]) -> list[rollout_lib.Rollout]:
    """What a group counts for: 0 for the samples that our scorer gave up on."""
    nothing = {
        r.sample: dict(reward=0.0, rewards=dict.fromkeys(r.rewards, 0.0)) for r in rollouts if r.sample in given_up
    }
    return [dataclasses.replace(r, **nothing.get(r.sample, {})) for r in rollouts]


def _known(verdict: str) -> concurrent.futures.Future:
    future = concurrent.futures.Future()
    future.set_result(verdict)
    return future
