"""The leases of workers: which groups each may get, for how long, and the end of those that it does not finish.

1. A worker gets open groups, as many as its standing (rl/orchestrator/worker_health.py), its share of the work
   (rl/orchestrator/work_share.py), and the servers allow. If there are none, it gets copies of late ones.
2. Heartbeats renew its leases. It may give groups back; those that it leaves, loses with its process, or holds too long open again. An environment
   of which no worker can make a group is given up (rl/orchestrator/groups/give_backs.py).
3. The end of a lease counts against the worker only if it could reach a server (rl/orchestrator/nodes.py).
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import prometheus_client

from rl.orchestrator import nodes, shared
from rl.orchestrator.groups import give_backs as give_backs_lib
from rl.orchestrator.groups import queue_entry
from rl.orchestrator.groups.queue_entry import State
from rl.protocol import env_mix, registry
from rl.protocol import lease as lease_lib


@dataclasses.dataclass(kw_only=True)
class Leases:
    """Leases groups of a queue to workers. All methods are thread-safe."""

    shared: shared.Shared
    nodes: nodes.Nodes
    config: Any  # the run's
    seconds: prometheus_client.Histogram  # of a lease without its wait for work
    give_backs: give_backs_lib.GiveBacks
    fail: Callable[[BaseException], None]  # ends the run
    left_out: set[str] = dataclasses.field(default_factory=set)  # environments of which no worker can make a group

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

        `network` is that of the worker's connection. `returned` are keys of groups that the worker holds and will not finish,
        because of `problem`. `begun_us` is the start of its process, which holds none of the groups that an earlier one leased. `holding` are the groups that
        its request lists as held; None for a request of an earlier release, which lists none.
        """
        now_s = time.monotonic()
        if worker in self.shared.servers.invited:  # the ledger takes no lease of a banned server, so the run would end
            raise ValueError(f"key {worker[:16]} is a server's; make another key for a worker")
        self.nodes.seen([worker], now_s)
        with self.seconds.time(), self.shared.changed:
            self.tick(now_s)
            known = None if holding is None else {*holding, *returned}
            self._take_back(worker, self.shared.queue.orphans(worker, begun_us, known), now_s)
            for key in returned:
                env = self.shared.queue.entries[key].group.env if key in self.shared.queue.entries else ""
                if lease := self.shared.queue.give_back(key, worker):
                    is_gone = 0 <= lease.group.version < self.shared.policy.version  # it is not served any more
                    is_done = self.shared.queue.entries[key].is_submitted
                    is_void = is_gone or is_done
                    self._expire(lease, now_s, "lease_void" if is_void else "lease_expired", blame=not is_void)
                    if not is_done:
                        self.shared.health.returned(key, now_s)
                    if not self.shared.health.is_stranger(worker):  # a few of those could end the run
                        self._note_cause(worker, env, key, problem, now_s)
            self.shared.health.seen(worker, now_s)
            groups = [] if self.shared.is_ended else self._lease(worker, capacity, network, now_s, begun_us)
            if groups:
                self.shared.ledger.joined(worker, worker in self.shared.health.invited)
            for group in groups:
                self.shared.ledger.leased(worker, *group.key, group.version, group.epoch)
            return groups

    def _note_cause(self, worker: str, env: str, key: queue_entry.Key, problem: str, now_s: float) -> None:
        """Gives an environment up if all invited workers give its groups back for one and the same cause."""
        workers, health = self.nodes.healthy("worker"), self.shared.health
        active = [one for one in workers if one in health.invited and not health.is_banned(one)]
        if self.give_backs.is_hopeless(worker, env, key, problem, active, now_s) and env not in self.left_out:
            self._give_up(env, problem)

    def _give_up(self, env: str, cause: str) -> None:
        """Leaves an environment out of the run, or ends the run if less than half of its groups would remain. The caller has the lock."""
        order, gone, entries = env_mix.order(self.config), {*self.left_out, env}, self.shared.queue.entries
        if self.config.rl.curriculum or 2 * sum(map(order.count, gone)) > len(order):
            self.fail(ValueError(f"no worker can make a group: {cause}"))
            return
        self.left_out = gone
        part = f"{env}, {order.count(env) / len(order):.0%} of the groups"
        line = f"left out from now on: {part}. The others go on; a resume tries it again. The reason: {cause}"
        self.give_backs.on_notice(line)
        self.shared.batches.leave_out(env)
        held_out = [key for key, one in entries.items() if key[0] == "held_out" and one.group.env == env]
        for key in held_out:
            if not entries[key].is_submitted:
                self.shared.queue.drop(key, "left_out")
        self.shared.changed.notify_all()

    def _lease(self, worker: str, capacity: int, network: str, now_s: float, begun_us: int) -> list[lease_lib.Lease]:
        """Leases open groups or, if there are none, copies of late ones; returns them. The caller has the lock."""
        is_known = self.shared.health.is_known(worker) and not self.shared.health.is_banned(worker)
        count = self._room(worker, network, capacity, now_s, is_known=is_known)
        pins = {"all": True, "none": False}.get(self.config.trust.pin_versions, self.shared.health.is_stranger(worker))
        until_s, version = now_s + self.shared.health.lease_s(worker), self.shared.version if pins else -1
        may_lease = functools.partial(self.shared.health.may_lease, worker, now_s=now_s)
        lease = functools.partial(
            self.shared.queue.lease,
            worker,
            count,
            until_s,
            may_lease,
            version,
            now_s,
            begun_us,
            free_samples=self._free_samples(worker),
        )
        groups = lease()
        if not groups and count > 0:
            groups = lease(**self._late(now_s, is_known))
        if is_known and groups:
            self.shared.share.seen(worker, self.shared.queue.num_leases(worker), now_s)
        self.shared.health.leased(worker, network, [group.key for group in groups], now_s)
        return groups

    def _room(self, worker: str, network: str, capacity: int, now_s: float, *, is_known: bool) -> int:
        """Returns how many more groups a worker gets, by its standing and its share of the work."""
        count, held = self.shared.queue.count(), self.shared.queue.num_leases(worker)
        num_unfinished = count.total() - count[State.ELIGIBLE]
        room = self.shared.health.room(worker, network, num_unfinished, now_s, self.shared.queue.held)
        if is_known and (capacity or held):  # one that asks for nothing has no share
            self.shared.share.seen(worker, held, now_s)
            room = min(room, self.shared.share.room(worker, held, count[State.OPEN] + count[State.LEASED], now_s))
        return min(room, capacity)

    def _free_samples(self, worker: str) -> float:
        """Returns of how many more samples the servers let a worker hold leases; each worker may hold one group."""
        if worker in self.nodes.own_servers:
            return math.inf
        free = self.nodes.max_samples() - self._leased_samples(worker)
        return free if self.shared.queue.num_leases(worker) else max(free, 1)

    def _leased_samples(self, worker: str) -> int:
        """Returns the leased samples with which a worker shares the run's servers: a known one not with newcomers, whose leases cost nothing."""
        is_known = self.shared.health.is_known(worker)
        others = self.nodes.own_servers | (self.shared.health.newcomers() if is_known else frozenset())
        return self.shared.queue.leased_samples_but(others)

    def beat(self, key: str, role: str, report: registry.Report, holding: Sequence[queue_entry.Key], *, leaving: bool):
        """Records a heartbeat; renews the leases of a worker that it still works on, or takes all back if it is `leaving`.

        Returns the keys of the groups that it need not finish. Raises ValueError if the key is another role's.
        """
        now_s = time.monotonic()
        if leaving or self.shared.is_ended:
            self.nodes.leave(key, role)
        else:
            self.nodes.beat(key, role, report, now_s)
        if role != "worker":
            return []
        with self.shared.changed:
            self.tick(now_s)  # a renewal after a pause is of this time
            self.shared.health.seen(key, now_s)
            if self.shared.health.is_known(key):
                self.give_backs.heard(key, report.problem)
            if not leaving:
                return self.shared.queue.renew(
                    key, holding, lambda lease: self.shared.health.renewed_s(key, lease.since_s, now_s)
                )
            self.shared.share.left(key)
            self._take_back(key, self.shared.queue.held(key), now_s)
            return []

    def servers(self, worker: str) -> list[dict]:
        """Returns the servers that a worker may use now, with limits in proportion to its leases."""
        with self.shared.changed:
            held = self.shared.queue.leased_samples(worker)
            total = self._leased_samples(worker)
        return self.nodes.servers(min(max(held, 1) / max(total, 1), 1.0))

    def tick(self, now_s: float) -> None:
        """Reopens expired leases."""
        with self.shared.changed:
            if stopped_s := self.nodes.stopped_s(now_s):
                self.shared.queue.extend(stopped_s)
            for lease in self.shared.queue.expire(now_s):
                self._expire(lease, now_s, "lease_expired")

    def has_work(self) -> bool:
        """Returns True if groups wait for a worker, or for another one than theirs."""
        with self.shared.changed:
            late = self._late(time.monotonic(), True)
            return self.shared.queue.count()[State.OPEN] > 0 or self.shared.queue.has_late(**late)

    def lacks_worker(self, workers: Iterable[str]) -> bool:
        """Returns True if groups wait as in `has_work`, and none of `workers` may have one."""
        with self.shared.changed:
            if not self.has_work():
                return False
            is_train = any(e.group.split == "train" and not e.is_submitted for e in self.shared.queue.entries.values())
            invited = self.shared.health.invited  # if there are any, strangers get no held-out groups
            return not any(is_train or not invited or worker in invited for worker in workers)

    def _late(self, now_s: float, is_known: bool) -> dict[str, Any]:
        """Returns the rule of copies for a worker: those of newcomers, which cost them nothing, keep no known worker out."""
        old_s = now_s - self.config.topology.lease_s
        return {
            "is_late": lambda lease: self.shared.share.is_late(lease.worker, lease.since_s, now_s),
            "leaves_room": lambda it: it.since_s < old_s or (is_known and not self.shared.health.is_known(it.worker)),
        }

    def _take_back(self, worker: str, keys: Sequence[queue_entry.Key], now_s: float) -> None:
        """Ends the leases of a worker that leaves, has started again, or did not get them."""
        lost = [lease for key in keys if (lease := self.shared.queue.give_back(key, worker))]
        blame = bool(lost) and self.shared.health.left(worker, now_s)
        for lease in lost:
            self.shared.counts["lease_returned"] += 1
            self.shared.health.lost(lease.worker, lease.group.key, now_s, blame=blame)

    def _expire(self, lease: queue_entry.HeldLease, now_s: float, count: str, *, blame: bool = True) -> None:
        """Counts a lease that ended without rollouts, also against its worker if it is to `blame`, and could reach a server."""
        self.shared.counts[count] += 1
        is_to_blame = blame and not self.nodes.was_away(lease.since_s)
        self.shared.health.expired(lease.worker, lease.group.key, now_s, blame=is_to_blame)

    def holds_groups(self, worker: str) -> bool:
        """Returns True if a worker has groups that no batch has taken; else the answer would tell which passed without a verdict."""
        with self.shared.changed:
            return self.shared.queue.may_deliver(worker)
