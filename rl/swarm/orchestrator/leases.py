"""The leases of workers: which groups each may get, for how long, and the end of those that it does not finish.

1. A worker gets open groups, as many as its standing (rl/swarm/orchestrator/worker_health.py), its share of the work
   (rl/swarm/orchestrator/work_share.py), and the servers allow. If there are none, it gets copies of late ones.
2. Heartbeats renew its leases. It may give groups back; those that it leaves, loses with its process, or holds too long open again. An environment
   of which no worker can make a group is given up (rl/swarm/orchestrator/groups/give_backs.py).
3. The end of a lease counts against the worker only if it could reach a server (rl/swarm/orchestrator/nodes.py).
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import prometheus_client

from rl.protocol import env_mix, registry
from rl.protocol import lease as lease_lib
from rl.swarm.orchestrator import nodes
from rl.swarm.orchestrator import state as state_lib
from rl.swarm.orchestrator.groups import queue_entry
from rl.swarm.orchestrator.groups.queue_entry import State
from rl.swarm.orchestrator.state import RunState


@dataclasses.dataclass(kw_only=True)
class Leases:
    """Leases groups of the run's queue to workers, and renews or takes back these leases. All public methods are thread-safe."""

    locked: state_lib.Locked
    nodes: nodes.Nodes
    seconds: prometheus_client.Histogram  # of a lease without its wait for work

    def lease(
        self,
        worker: str,
        capacity: int,
        network: str = "",
        returned: Collection[queue_entry.Key] = (),
        *,
        begun_us: int = 0,
        holding: Collection[queue_entry.Key] | None = None,
        problem: str = "",
    ) -> list[lease_lib.Lease]:
        """Leases up to `capacity` groups to `worker`; returns them, or [] if the worker may get none. Reopens expired leases.

        `network` is the network that the worker connects from. `returned` are keys of groups that the worker holds and will not finish,
        because of `problem`. `begun_us` is the start of the worker's process: it holds none of the groups that an earlier process
        leased. `holding` are the groups that the request lists as held; None for a request without such a list.
        """
        with self.seconds.time(), self.locked as state:
            now_s = state.clock()
            if worker in state.servers.invited:  # the ledger takes no lease of a banned server, so the run would end
                raise ValueError(f"key {worker[:16]} is a server's; make another key for a worker")
            self.nodes.seen([worker], now_s)
            self._expire_late(state, now_s)
            known = None if holding is None else {*holding, *returned}
            self._take_back(state, worker, state.queue.orphans(worker, begun_us, known), now_s)
            for key in returned:
                self._give_back(state, worker, key, problem, now_s)
            state.health.seen(worker, now_s)
            groups = [] if state.is_ended else self._lease(state, worker, capacity, network, now_s, begun_us)
            if groups:
                self.locked.ledger.joined(worker, worker in state.health.invited)
            for group in groups:
                self.locked.ledger.leased(worker, *group.key, group.version, group.epoch)
            return groups

    def beat(self, key: str, role: str, report: registry.Report, holding: Sequence[queue_entry.Key], *, leaving: bool):
        """Records a heartbeat. Renews the leases of the groups in `holding`, or takes all leases back if the worker is `leaving`.

        Returns the keys of the groups that the worker need not finish. Raises ValueError if the key signed in with another role.
        """
        with self.locked as state:
            now_s = state.clock()
            if leaving or state.is_ended:
                self.nodes.leave(key, role)
            else:
                self.nodes.beat(key, role, report, now_s)
            if role != "worker":
                return []
            self._expire_late(state, now_s)  # a renewal after a pause is of this time
            state.health.seen(key, now_s)
            if state.health.is_known(key):
                state.give_backs.heard(key, report.problem)
            if leaving:
                state.share.left(key)
                self._take_back(state, key, state.queue.held(key), now_s)
                return []
            return state.queue.renew(key, holding, lambda lease: state.health.renewed_s(key, lease.since_s, now_s))

    def servers(self, worker: str) -> list[dict]:
        """Returns the servers that a worker may use now, with limits in proportion to its leases."""
        with self.locked as state:
            held, total = state.queue.leased_samples(worker), self._leased_samples(state, worker)
            return self.nodes.servers(min(max(held, 1) / max(total, 1), 1.0))

    def tick(self, now_s: float) -> None:
        """Reopens expired leases."""
        with self.locked as state:
            self._expire_late(state, now_s)

    def has_work(self) -> bool:
        """Returns True if a group is open, or is so late that a second worker should get it, too."""
        with self.locked as state:
            return self._has_work(state)

    def lacks_worker(self, workers: Iterable[str]) -> bool:
        """Returns True if groups wait as in `has_work`, and none of `workers` may have one."""
        with self.locked as state:
            if not self._has_work(state):
                return False
            is_train = any(e.group.split == "train" and not e.is_submitted for e in state.queue.entries.values())
            invited = state.health.invited  # if there are any, strangers get no held-out groups
            return not any(is_train or not invited or worker in invited for worker in workers)

    def holds_groups(self, worker: str) -> bool:
        """Returns True if a worker has groups that no batch has taken. Groups that passed without a verdict count: the answer must not reveal them."""
        with self.locked as state:
            return state.queue.may_deliver(worker)

    def _lease(
        self, state: RunState, worker: str, capacity: int, network: str, now_s: float, begun_us: int
    ) -> list[lease_lib.Lease]:
        """Leases open groups or, if there are none, copies of late ones; returns them."""
        is_known = state.health.is_known(worker) and not state.health.is_banned(worker)
        count = self._room(state, worker, network, capacity, now_s, is_known=is_known)
        pins = {"all": True, "none": False}.get(self.locked.config.trust.pin_versions, state.health.is_stranger(worker))
        lease = functools.partial(
            state.queue.lease,
            worker,
            count,
            deadline_s=now_s + state.health.lease_s(worker),
            may_lease=functools.partial(state.health.may_lease, worker, now_s=now_s),
            version=state.version if pins else -1,
            now_s=now_s,
            begun_us=begun_us,
            free_samples=self._free_samples(state, worker),
        )
        groups = lease()
        if not groups and count > 0:
            groups = lease(**self._late(state, now_s, is_known))
        if is_known and groups:
            state.share.seen(worker, state.queue.num_leases(worker), now_s)
        state.health.leased(worker, network, [group.key for group in groups], now_s)
        return groups

    def _room(self, state: RunState, worker: str, network: str, capacity: int, now_s: float, *, is_known: bool) -> int:
        """Returns how many more groups a worker gets, by its standing and its share of the work."""
        count, held = state.queue.count(), state.queue.num_leases(worker)
        num_unfinished = count.total() - count[State.ELIGIBLE]
        room = state.health.room(worker, network, num_unfinished, now_s, state.queue.held)
        if is_known and (capacity or held):  # one that asks for nothing has no share
            state.share.seen(worker, held, now_s)
            room = min(room, state.share.room(worker, held, count[State.OPEN] + count[State.LEASED], now_s))
        return min(room, capacity)

    def _free_samples(self, state: RunState, worker: str) -> float:
        """Returns of how many more samples the servers let a worker hold leases; each worker may hold one group."""
        if worker in self.nodes.own_servers:
            return math.inf
        free = self.nodes.max_samples() - self._leased_samples(state, worker)
        return free if state.queue.num_leases(worker) else max(free, 1)

    def _leased_samples(self, state: RunState, worker: str) -> int:
        """Returns the leased samples with which a worker shares the run's servers: a known one not with newcomers, whose leases cost nothing."""
        is_known = state.health.is_known(worker)
        others = self.nodes.own_servers | (state.health.newcomers() if is_known else frozenset())
        return state.queue.leased_samples_but(others)

    def _has_work(self, state: RunState) -> bool:
        late = self._late(state, state.clock(), True)
        return state.queue.count()[State.OPEN] > 0 or state.queue.has_late(**late)

    def _late(self, state: RunState, now_s: float, is_known: bool) -> dict[str, Any]:
        """Returns the rule of copies for a worker: those of newcomers, which cost them nothing, keep no known worker out."""
        old_s = now_s - self.locked.config.topology.lease_s
        return {
            "is_late": lambda lease: state.share.is_late(lease.worker, lease.since_s, now_s),
            "leaves_room": lambda it: it.since_s < old_s or (is_known and not state.health.is_known(it.worker)),
        }

    # The end of leases.

    def _expire_late(self, state: RunState, now_s: float) -> None:
        if stopped_s := self.nodes.stopped_s(now_s):
            state.queue.extend(stopped_s)
        for lease in state.queue.expire(now_s):
            self._expire(state, lease, now_s, "lease_expired")

    def _take_back(self, state: RunState, worker: str, keys: Sequence[queue_entry.Key], now_s: float) -> None:
        """Ends the leases of a worker that leaves, has started again, or did not get them."""
        lost = [lease for key in keys if (lease := state.queue.give_back(key, worker))]
        blame = bool(lost) and state.health.left(worker, now_s)
        for lease in lost:
            state.counts["lease_returned"] += 1
            state.health.lost(lease.worker, lease.group.key, now_s, blame=blame)

    def _give_back(self, state: RunState, worker: str, key: queue_entry.Key, problem: str, now_s: float) -> None:
        """Ends the lease of a group that its worker will not finish, because of `problem`.

        Gives the group's environment up if all invited workers give its groups back for one and the same cause.
        """
        if not (lease := state.queue.give_back(key, worker)):
            return
        is_gone = 0 <= lease.group.version < state.policy.version  # it is not served any more
        is_done = state.queue.entries[key].is_submitted
        is_void = is_gone or is_done
        self._expire(state, lease, now_s, "lease_void" if is_void else "lease_expired", blame=not is_void)
        if not is_done:
            state.health.returned(key, now_s)
        if state.health.is_stranger(worker):  # a few of those could end the run
            return
        env, invited = lease.group.env, state.health.invited
        active = [one for one in self.nodes.healthy("worker") if one in invited and not state.health.is_banned(one)]
        if state.give_backs.is_hopeless(worker, env, key, problem, active, now_s) and env not in state.left_out:
            self._give_up(state, env, problem)

    def _expire(
        self, state: RunState, lease: queue_entry.HeldLease, now_s: float, count: str, *, blame: bool = True
    ) -> None:
        """Counts a lease that ended without rollouts, also against its worker if it is to `blame`, and could reach a server."""
        state.counts[count] += 1
        is_to_blame = blame and not self.nodes.was_away(lease.since_s)
        state.health.expired(lease.worker, lease.group.key, now_s, blame=is_to_blame)

    def _give_up(self, state: RunState, env: str, cause: str) -> None:
        """Leaves an environment out of the run, or ends the run if less than half of its groups would remain."""
        config, gone, entries = self.locked.config, {*state.left_out, env}, state.queue.entries
        order = env_mix.order(config)
        if config.rl.curriculum or 2 * sum(map(order.count, gone)) > len(order):
            self.locked.fail(ValueError(f"no worker can make a group: {cause}"))
            return
        state.left_out = gone
        part = f"{env}, {order.count(env) / len(order):.0%} of the groups"
        line = f"left out from now on: {part}. The others go on; a resume tries it again. The reason: {cause}"
        self.locked.on_notice(line)
        state.batches.leave_out(env)
        held_out = [key for key, one in entries.items() if key[0] == "held_out" and one.group.env == env]
        for key in held_out:
            if not entries[key].is_submitted:
                state.queue.drop(key, "left_out")
        state.has_news = True
