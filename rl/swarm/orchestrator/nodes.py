"""Keeps the nodes of a run: who is there, which servers workers may use, and whether there is anybody left to wait for.

1. Nodes sign in by heartbeats (rl/swarm/orchestrator/routes.py). For servers that config names by URL, rl/swarm/orchestrator/static_servers.py beats.
2. `announce` names the newest policy, which servers load when they can. One that fails, lags, or is silent is left out of `servers`
   until it is well again. So no server ends a run.
3. A policy counts as served when all servers without a problem have it. One that is slow delays the others no longer than the
   first of them took.
4. A run that has no server for `patience_s`, or no worker while groups wait, ends with one line on each node. If its own process
   started all workers and all of them are banned, the run ends immediately, since no other is expected.

`run` is a coroutine for the event loop of the HTTP server; the other methods are thread-safe.
"""

import asyncio
import collections
import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from rl.experiment.reporting import start_clock
from rl.protocol import registry as registry_lib
from rl.protocol import request_limit, timeline
from rl.swarm.orchestrator import state as state_lib
from rl.swarm.orchestrator import static_servers
from sharding.system import sign_in

TICK_S = 0.2
STOPPED_S = 1.0  # without a tick: this process was stopped, or starved
HOLD, MAX_HOLD_S = 0.8, 5.0  # of an interval, and seconds, that the reply to a server's heartbeat waits for a policy
MAX_ASKED = 3  # servers that are asked for their data types
MAX_LINE = 2000  # characters of a line that lists nodes
LEASE_BEATS = 16.0  # least heartbeats per lease of a known worker, so four per lease of a newcomer
MAX_BEATS_PER_S = 40.0  # of all workers
LEASED_PER_RUNNING = 2.0  # a worker also scores and submits groups, and should have the next one at hand
SUMS = ("running", "waiting", "tokens_per_s")  # of the loads of servers
EARLIER = "in an earlier process; the ledger has the reason"
ROLES = {"server": "an inference server", "worker": "a worker (for held-out tasks one of topology.workers, if any)"}


@dataclasses.dataclass(eq=False)
class Nodes:
    """The nodes of a run with their states, and the policies of its servers."""

    locked: state_lib.Locked  # its lock guards all that is not a field
    validators: Collection[str]  # public keys that may sign in as validators only
    own_workers: Collection[str]  # public keys of the workers that this process starts
    on_served: Callable[[timeline.Policy], None]  # called with each policy that servers have

    def __post_init__(self) -> None:
        with self.locked as state:
            self.clock = state.clock
        self._topology, self._on_notice = self.locked.config.topology, self.locked.on_notice
        self.heartbeat_s, self._server_keys = self._topology.heartbeat_s, frozenset(self._topology.server_keys)
        self._static: dict[str, static_servers.StaticServer] = {}  # by URL
        self._registry = registry_lib.Registry(self.heartbeat_s, is_named=self.is_kept)
        self.newest: timeline.Policy | None = None  # that servers may load
        self._served: timeline.Policy | None = None
        self._announced_s = 0.0
        self._first: tuple[timeline.Policy, float] | None = None  # the newest that any server has, and since when
        self._well_s = dict.fromkeys(ROLES, self.clock())  # when there was one last
        self._held: collections.Counter[timeline.Policy] = collections.Counter()  # policies that evaluations need
        self._holders: dict[timeline.Policy, str] = {}  # the server that keeps one of them
        self._ticked_s = math.inf  # the last tick of `run`
        self._bans: dict[str, str] = {}  # key -> why it is banned
        self._limits: dict[str, request_limit.State] = {}  # by key of a server
        self._has_tokens = False  # a server has generated some
        # Tokens/s in the last beats since `load`, by key.
        self._rates: dict[str, collections.deque[float]] = collections.defaultdict(_last_rates)
        self.own_servers: frozenset[str] = frozenset()  # workers that use other servers than those of the run
        self._loop: asyncio.AbstractEventLoop | None = None
        self.announced = asyncio.Event()  # replaced at each announcement

    def add(self, url: str, control: str, token: str | None = None, key: str = "") -> None:
        """Adds an inference server that sends no heartbeats. The arguments are the fields of `StaticServer`."""
        with self.locked:
            self._static[url] = static_servers.StaticServer(url, control, token, key)

    def invite(self, keys: Iterable[str]) -> None:
        """Lets nodes with these public keys sign in as servers, in addition to those of the config."""
        self._server_keys |= frozenset(keys)

    def is_named(self, key: str) -> bool:
        """Returns True for a key that the run's config names, and for the URL of a static server."""
        return key in self._server_keys or key in self.validators or key in self._static

    def is_kept(self, key: str) -> bool:
        """Returns True for a key whose place in the table no stranger may take."""
        with self.locked as state:
            return self.is_named(key) or state.health.is_known(key)

    def _is_banned(self, key: str) -> bool:
        """Returns True for a server that workers must not use, and a worker that gets no more work."""
        with self.locked as state:
            return state.servers.is_banned(key) or state.health.is_banned(key)

    def may_sign_in(self, key: str, role: str) -> bool:
        """Returns True for a key that may sign in as a server, relay, or validator."""
        return key in self._server_keys or (role == "validator" and key in self.validators)

    def announce(self, policy: timeline.Policy) -> None:
        """Names the newest policy for servers to load. In a run without servers, where workers use their own, the policy counts as served immediately."""
        with self.locked:
            self.newest, self._announced_s = policy, self.clock()
            has_servers = self._has_servers()
        if has_servers:
            self._notify()
        else:
            self.on_served(policy)

    @contextlib.contextmanager
    def holding(self, policy: timeline.Policy) -> Iterator[None]:
        """Lets one server load `policy`, or keep it, during the block, for an evaluation; the others load newer ones."""
        with self.locked:
            self._held[policy] += 1
        try:
            yield
        finally:
            with self.locked:
                self._held[policy] -= 1
                if not self._held[policy]:
                    del self._held[policy]
                    self._holders.pop(policy, None)
            self._notify()

    def target(self, key: str) -> timeline.Policy | None:
        """Returns the policy that a server should have: the newest, or an older one that it holds for an evaluation."""
        with self.locked:
            serving = {node.key: node.report.policy for node in self._serving(is_old_allowed=True)}
            for policy in sorted(self._held):
                if policy == self.newest or key not in serving:
                    continue
                if self._holders.get(policy) not in serving:  # none yet, or it is away
                    have = [one for one, its in serving.items() if its == policy and one not in self._holders.values()]
                    behind = [one for one, its in serving.items() if its and its < policy]
                    if key in (have or behind)[:1]:
                        self._holders[policy] = key
                if self._holders.get(policy) == key:
                    return policy
            return self.newest

    def beat(self, key: str, role: str, report: registry_lib.Report, now_s: float) -> None:
        """Records a heartbeat. Raises ValueError if the key is another role's."""
        with self.locked:
            node = self._registry.beat(key, role, now_s, report)
            if role == "worker" and bool(node and report.url) != (key in self.own_servers):
                self.own_servers ^= {key}
            if role == "server":
                self._rates[key].append(report.load.tokens_per_s)
            if role == "server" and report.load.capacity:
                self._observe(key, report.load, now_s)
        if role == "server":
            if report.load.tokens_per_s and not self._has_tokens:
                self._has_tokens = True
                self._on_notice(f"first tokens {start_clock.age_s():.0f} s after the start")
            self._look(now_s)

    async def await_news(self, key: str, report: registry_lib.Report, is_over: Callable[[], bool]) -> None:
        """Blocks until a server should load another policy than it reported, at most for a part of its heartbeat interval.

        The reply to a held heartbeat names a new policy as soon as it is published. Otherwise each step of a fast run would wait for
        the next heartbeat.
        """
        end_s = self.clock() + min(HOLD * self.interval_s("server"), MAX_HOLD_S)
        while self.target(key) in (None, report.policy) and not is_over() and (left_s := end_s - self.clock()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 5 * TICK_S)):
                    await self.announced.wait()

    def fault(self, key: str, problem: str) -> None:
        """Records that a request of the orchestrator to a node failed, with the `problem` as text."""
        with self.locked:
            self._registry.fault(key, self.clock(), problem)

    def numerics(self) -> str:
        """Returns data types, device, and version of jax of each server, by its own account, as a line for people. Blocks for some seconds at most."""
        with self.locked:
            urls = [node.report.url for node in self._serving()][:MAX_ASKED]
        return sign_in.one_line("; ".join(asyncio.run(static_servers.numerics(urls))))

    def banned(self, key: str, reason: str) -> None:
        """Records why a key is banned, for people."""
        with self.locked:
            self._bans[key] = sign_in.one_line(reason)

    def seen(self, workers: Iterable[str], now_s: float) -> None:
        """Records that workers ask for work, or wait for it. Raises ValueError for a key of another role."""
        with self.locked:
            for worker in workers:
                self._registry.beat(worker, "worker", now_s)

    def leave(self, key: str, role: str) -> None:
        """Records that a node ends on purpose. Raises ValueError if the key is another role's."""
        with self.locked:
            self._registry.leave(key, role)

    def stopped_s(self, now_s: float) -> float:
        """Returns the seconds that this process was stopped before `now_s`, as on a laptop that slept; else 0. Nodes do not count as silent then."""
        with self.locked:
            stopped_s = now_s - self._ticked_s
            if stopped_s <= STOPPED_S:
                return 0.0
            self._ticked_s = now_s
            self._registry.extend(stopped_s, now_s)
            self._well_s = {role: min(now_s, well_s + stopped_s) for role, well_s in self._well_s.items()}
        if stopped_s > self.heartbeat_s:
            self._on_notice(f"the orchestrator was stopped for {stopped_s:.0f} s; all leases are as much longer")
        return stopped_s

    def was_away(self, since_s: float) -> bool:
        """Returns True if too many servers were away at some time from `since_s` on, so that workers could not finish."""
        with self.locked:
            return self._has_servers() and self._registry.was_away(since_s)

    def servers(self, share: float = 1.0) -> list[dict[str, Any]]:
        """Returns the servers that a worker may use now, with the version that each has at least, and its load.

        The worker gets this `share` of the samples that each server should run, and at least one.
        """
        with self.locked:
            return [
                {
                    "url": node.report.url,
                    "key": self._key(node.key),
                    "limit": math.ceil(self._limit(node) * share),  # of samples at the same time; 0: none
                    "version": node.report.policy.version if node.report.policy else 0,
                    "load": node.report.load.running + node.report.load.waiting,
                }
                for node in self._serving()
            ]

    def max_samples(self) -> float:
        """Returns the number of samples for which workers should hold leases: those that servers run now, and the next ones. Infinity means no limit."""
        with self.locked:
            limits = [self._limit(node) for node in self._serving()]
        return LEASED_PER_RUNNING * sum(limits) if limits and all(limits) else math.inf

    def interval_s(self, role: str) -> float:
        """Returns the seconds between two heartbeats of a node. The interval of a worker grows with the number of workers."""
        return self._registry.worker_interval_s if role == "worker" else self.heartbeat_s

    def healthy(self, role: str) -> list[str]:
        """Returns the keys of the healthy nodes of a role."""
        with self.locked:
            return [node.key for node in self._registry.healthy(role)]

    def num_signed_in(self) -> int:
        """Returns the number of healthy nodes that send heartbeats of their own; static servers do not count."""
        with self.locked:
            healthy = map(self._registry.healthy, registry_lib.ROLES)
            return sum(node.key not in self._static for nodes in healthy for node in nodes)

    def table(self) -> list[dict[str, Any]]:
        """Returns a row per node for people."""
        with self.locked:
            rows = [(self._key(row["key"]), row) for row in self._registry.table()]
            bans = {key: self._bans.get(key, EARLIER) for key, _ in rows if self._is_banned(key)}
        return [row | {"state": "banned", "problem": bans[key]} if key in bans else row for key, row in rows]

    def counts(self) -> collections.Counter[str]:
        """Returns the number of nodes by role and state, as "worker_healthy"."""
        with self.locked:
            found = [(node.role, node.state.value, self._key(node.key)) for node in self._registry.nodes()]
        return collections.Counter(
            f"{role}_{'banned' if self._is_banned(key) else state}" for role, state, key in found
        )

    def load(self) -> dict[str, float]:
        """Returns the load of all healthy servers as metrics of a train step, and the number of healthy nodes by role.

        Tokens per second are a mean over the heartbeats since the last call.
        """
        with self.locked:
            healthy = {role: self._registry.healthy(role) for role in registry_lib.ROLES}
            rates, self._rates = self._rates, collections.defaultdict(_last_rates)
        loads = []
        for node in healthy["server"]:
            tokens_per_s = statistics.fmean(rates.get(node.key) or [node.report.load.tokens_per_s])
            loads.append(dataclasses.replace(node.report.load, tokens_per_s=tokens_per_s))
        found = {f"machine/servers_{name}": float(sum(getattr(one, name) for one in loads)) for name in SUMS}
        found["machine/servers_kv_used"] = max((float(one.kv_used) for one in loads), default=0.0)
        return found | {f"machine/num_{role}s": float(len(nodes)) for role, nodes in healthy.items()}

    def tokens_per_s(self) -> float:
        """Returns the tokens per second that all healthy servers report now."""
        with self.locked:
            return sum(node.report.load.tokens_per_s for node in self._registry.healthy("server"))

    def notice(self) -> str:
        """Returns a line on all servers if workers can use none of them, else ""."""
        with self.locked:
            is_without = self._has_servers() and not self._serving()
        return self._line("server") if is_without else ""

    async def run(self, lacks_worker: Callable[[Iterable[str]], bool], on_tick: Callable[[float], None]) -> None:
        """Follows static servers, and acts as time passes, until it is cancelled. Raises ValueError if no node is left to wait for.

        `lacks_worker(keys)` is true if groups wait, and none of these workers may have one; `on_tick(now_s)` is called every `TICK_S` seconds.
        """
        self._loop, followed, swept_s = asyncio.get_running_loop(), set(), self.clock()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for url in [*self._static]:
                    if url not in followed:
                        followed.add(url)
                        tasks.create_task(static_servers.follow(self._static[url], self))
                now_s = self.clock()
                self._look(now_s)
                on_tick(now_s)  # first, as this process may have been stopped
                self._ticked_s = now_s
                if now_s - swept_s > self.heartbeat_s / 4:
                    swept_s = now_s
                    self._sweep(now_s)
                    self._check_patience(now_s, lacks_worker)
                await asyncio.sleep(TICK_S)

    def _sweep(self, now_s: float) -> None:
        with self.locked:
            num_workers = self._registry.count("worker")[registry_lib.State.HEALTHY]
            wanted_s = min(num_workers / MAX_BEATS_PER_S, self._topology.lease_s / LEASE_BEATS)
            # It falls slowly: workers keep to the last interval of which they know.
            wanted_s = max(self.heartbeat_s, wanted_s, 0.95 * self._registry.worker_interval_s)
            self._registry.worker_interval_s = wanted_s
            changes = self._registry.sweep(now_s)
            self.own_servers = frozenset(filter(self._registry.node, self.own_servers))
        for change in changes:
            bad = (registry_lib.State.SUSPECT, registry_lib.State.DEAD)
            if change.role == "server" and (change.new in bad or change.old in bad):
                self._on_notice(f"server {change.key[:80]} is {change.new.value}: {change.reason}")

    def _look(self, now_s: float) -> None:
        """Calls `on_served` if servers have a newer policy than before."""
        with self.locked:
            served = self._find_served(now_s)
            if served is None or (self._served is not None and served <= self._served):
                return
            self._served = served
        self.on_served(served)

    def _find_served(self, now_s: float) -> timeline.Policy | None:
        """Returns the newest policy that all servers without a problem have, or a newer one that others may still load for too long."""
        if self.newest is None:
            return None
        serving = self._serving(is_old_allowed=True)
        holders = {key for policy, key in self._holders.items() if policy != self.newest}
        reports = [node.report for node in serving if node.key not in holders] or [node.report for node in serving]
        if not reports:
            return None
        first = max(report.policy for report in reports if report.policy)
        if self._first is None or self._first[0] < first:
            self._first = first, now_s
        since_s = self._first[1]
        if now_s - since_s >= max(TICK_S, since_s - self._announced_s):
            return first
        return min((report.policy for report in reports if report.policy and not report.problem), default=first)

    def _check_patience(self, now_s: float, lacks_worker: Callable[[Iterable[str]], bool]) -> None:
        patience_s = self._topology.patience_s
        with self.locked:
            workers = (node.key for node in self._registry.healthy("worker"))
            is_lacking = lacks_worker(key for key in workers if not self._is_banned(key))  # looks at few of them
            if self.newest is None or not self._has_servers() or self._serving():
                self._well_s["server"] = now_s
            if not is_lacking:
                self._well_s["worker"] = now_s
            missing = [role for role, well_s in self._well_s.items() if now_s - well_s > patience_s]
            are_banned = self.own_workers and all(map(self._is_banned, self.own_workers))
            is_over = are_banned and self._well_s["worker"] < now_s
        if is_over:
            remedy = "Look at these workers and their servers, or raise trust.max_attempts"
            raise ValueError(f"all workers of this run are banned: {self._line('worker')}. {remedy}")
        for role in missing:
            found = f"the run had no {role} that it could use for {patience_s:.0f} s (topology.patience_s)"
            remedy = f"Start {ROLES[role]}, or mend one of these; then continue with the same command"
            raise ValueError(f"{found}: {self._line(role)}. {remedy}")

    def _has_servers(self) -> bool:
        return bool(self._static or self._server_keys)

    def _serving(self, *, is_old_allowed: bool = False) -> list[registry_lib.Node]:
        if self.newest is None:
            return []
        oldest = 0 if is_old_allowed else max(0, self.newest.version - self.locked.config.rl.max_lag)
        oldest = min([oldest, *(policy.version for policy in self._held)])
        found = self._registry.serving(timeline.Policy(self.newest.epoch, oldest), self.newest)
        return [node for node in found if not self._is_banned(self._key(node.key))]

    def _observe(self, key: str, load: registry_lib.Load, now_s: float) -> None:
        state = self._limits.get(key) or request_limit.start(load.capacity)
        blind_s = max(request_limit.BLIND_S, registry_lib.SUSPECT_BEATS * self.heartbeat_s)
        self._limits[key] = request_limit.observe(state, load, now_s, blind_s)

    def _limit(self, node: registry_lib.Node) -> int:
        """Returns the number of samples that a server should run (0: unknown)."""
        return int(self._limits[node.key].limit) if node.key in self._limits and node.report.load.capacity else 0

    def _key(self, key: str) -> str:
        """Returns the key by which a node signs, "" if it signs nothing; static servers are known by their URL."""
        return self._static[key].key if key in self._static else key

    def _line(self, role: str) -> str:
        return registry_lib.line(self.table(), role)[:MAX_LINE]

    def _notify(self) -> None:
        """Wakes the tasks of static servers."""

        def wake() -> None:
            announced, self.announced = self.announced, asyncio.Event()
            announced.set()

        if self._loop:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(wake)


def _last_rates() -> collections.deque[float]:
    return collections.deque(maxlen=1_000)
