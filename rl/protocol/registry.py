"""The nodes of a run as their heartbeats show them: a pure data structure, without a clock, threads, or I/O.

    JOINING -> HEALTHY -> SUSPECT -> DEAD -> GONE

1. A node signs in with its first beat. A server is JOINING until it reports the policy that it serves, other nodes are HEALTHY.
2. `sweep` makes a silent node SUSPECT, then DEAD, then GONE. A beat makes it HEALTHY again. `leave` makes it GONE.
3. `fault` makes a node SUSPECT that beats and fails our calls; a beat after `FAULT_BEATS` intervals makes it HEALTHY again.
4. A server is given to workers (`serving`) only while it is HEALTHY and has a policy that is allowed.
5. `was_away` recognizes outages of servers, which are not the fault of the workers that lose leases in them.

A GONE node is forgotten, unless the run named its key: people want to see that it left. Keys cost nothing, so strangers are limited
in number: a new one replaces the one that is silent for longest, or is refused if all of them beat. Imports no jax.
"""

import collections
import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rl.protocol import timeline
from sharding.system import sign_in, sockets

ROLES = ("server", "worker", "relay", "validator")
SUSPECT_BEATS, DEAD_BEATS, GONE_BEATS = 2.5, 6.0, 60.0  # intervals of silence; a lost beat alone changes nothing
FAULT_BEATS = 2.0
MAX_STRANGERS = 4096
MAX_CHANGES = 4096  # kept until the next sweep
MAX_URL = 256  # characters
OWN_SERVER = "http://own.invalid"  # the URL of a worker that uses no server of the run
OF_ENVIRONMENT = "environment "  # begins the problem of a worker that its environment causes, not a server or a disk


class State(enum.Enum):
    """The stages of a node, from its first beat until it is forgotten."""

    JOINING = "joining"  # a server without weights
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # silent, or our calls to it fail
    DEAD = "dead"  # silent for long
    GONE = "gone"  # left, or silent for so long that it is not expected back


NEXT: dict[State | None, set[State]] = {
    None: {State.JOINING},
    State.JOINING: {State.HEALTHY, State.SUSPECT, State.GONE},
    State.HEALTHY: {State.SUSPECT, State.GONE},
    State.SUSPECT: {State.HEALTHY, State.DEAD, State.GONE, State.JOINING},
    State.DEAD: {State.HEALTHY, State.GONE, State.JOINING},
    State.GONE: {State.JOINING},
}


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of a node, by its own account."""

    running: int = 0  # samples, or groups of a worker
    waiting: int = 0
    kv_used: float = 0.0  # fraction of the KV cache
    preemptions: int = 0  # since its start
    tokens_per_s: float = 0.0
    finished: int = 0  # samples, since its start
    capacity: int = 0  # samples of the greatest length that fit; 0: unknown


@dataclasses.dataclass(frozen=True)
class Report:
    """The content of a heartbeat."""

    url: str = ""  # where a server, relay, or validator listens
    policy: timeline.Policy | None = None  # that a server serves
    load: Load = Load()
    problem: str = ""  # the last error, for people

    @classmethod
    def from_json(cls, body: Any) -> "Report":
        """Returns the report in a JSON object (`dataclasses.asdict` writes it) of any origin. Raises ValueError for any other value."""
        timeline.check_fields(body, cls, "report")
        load = body["load"]
        if isinstance(load, dict):  # it may lack those that are 0
            load = dataclasses.asdict(Load()) | load
        timeline.check_fields(load, Load, "load")
        url, problem = body["url"], body["problem"]
        # Workers open it, terminals show it, and replies encode it as UTF-8.
        is_text = isinstance(url, str) and re.fullmatch(f"[!-~]{{0,{MAX_URL}}}", url)
        if not is_text or not (url == "" or sockets.is_url(url)):
            raise ValueError(f"report has url = {url!r:.80}; send an http URL of at most {MAX_URL} characters, or ''")
        if not isinstance(problem, str) or len(problem) > sign_in.MAX_PROBLEM or not problem.isprintable():
            found = f"report has problem = {problem!r:.80}"
            raise ValueError(f"{found}; send a line of at most {sign_in.MAX_PROBLEM} letters")
        for name, value in load.items():
            is_count, most = type(getattr(Load, name)) is int, 1.0 if name == "kv_used" else 1e12
            is_number = type(value) is int or (type(value) is float and not is_count)
            if not (is_number and 0 <= value <= most):
                raise ValueError(f"load has {name} = {value!r:.80}; send a number in 0..{most:g}")
        policy = None if body["policy"] is None else timeline.Policy.from_json(body["policy"])
        return cls(url, policy, Load(**load), problem)


@dataclasses.dataclass(frozen=True)
class Node:
    """A node with its last report."""

    key: str
    role: str
    state: State
    report: Report
    joined_s: float
    beat_s: float  # the last beat
    held_until_s: float = -math.inf  # after a fault: a beat before it leaves the node SUSPECT


@dataclasses.dataclass(frozen=True)
class Change:
    """A transition of a node, for logs and people."""

    key: str
    role: str
    old: State | None  # None: unknown until then
    new: State
    reason: str


class Registry:
    """The nodes of a run by public key. They are expected to beat every `interval_s` seconds.

    `is_named` returns True for keys that the run named or knows by their work: they are always taken, and shown when GONE.
    """

    def __init__(self, interval_s: float, *, is_named: Callable[[str], bool] = lambda key: False):
        self._interval_s, self._is_named = interval_s, is_named
        self._nodes: dict[str, Node] = {}
        self._keys: dict[str, dict[str, None]] = {role: {} for role in ROLES}  # of the nodes of each role
        # Workers and other nodes apart, as their intervals differ; the last to beat at the end.
        self._strangers = {is_worker: collections.OrderedDict[str, None]() for is_worker in (True, False)}
        self._count: collections.Counter[tuple[str, State]] = collections.Counter()  # of nodes
        self._changes: collections.deque[Change] = collections.deque(maxlen=MAX_CHANGES)
        self._now_s = -math.inf
        self.worker_interval_s = interval_s  # other nodes may have to beat more often
        self._away_s = -math.inf  # the last time at which servers were away

    def beat(self, key: str, role: str, now_s: float, report: Report | None = None) -> Node | None:
        """Records a heartbeat; returns the node, or None if it is a stranger and there are too many. Without `report`, its last one stays.

        Raises ValueError if the key is another role's.
        """
        assert role in ROLES, role
        self._look(now_s)
        node = self._node(key, role)
        report = report or (node.report if node else Report())
        if node is None and not self._is_named(key) and not self._make_room(now_s):
            return None
        if node is None or node.state is State.GONE:
            self._forget(key)
            node = Node(key, role, State.JOINING, report, now_s, now_s)
            self._put(node, None, "signed in")
        ready = State.HEALTHY if role != "server" or report.policy else State.JOINING
        held = node.state is State.SUSPECT and now_s < node.held_until_s
        # A server that is ready and loads other weights goes on serving its old ones, so it never joins twice while it beats.
        state = node.state if held or (ready is State.JOINING and node.state is State.HEALTHY) else ready
        self._put(dataclasses.replace(node, report=report, beat_s=now_s, state=state), node.state, "a beat")
        strangers = self._strangers[role == "worker"]
        strangers.pop(key, None)
        if not self._is_named(key):
            strangers[key] = None  # the last to beat
        return self._nodes[key]

    def fault(self, key: str, now_s: float, problem: str) -> None:
        """Records that a call of ours to a node failed: it is SUSPECT for at least `FAULT_BEATS` intervals."""
        self._look(now_s)
        if node := self._nodes.get(key):
            problem = sign_in.one_line(problem)
            state = State.SUSPECT if State.SUSPECT in NEXT[node.state] else node.state
            until_s = now_s + FAULT_BEATS * self._interval_s
            report = dataclasses.replace(node.report, problem=problem)
            self._put(dataclasses.replace(node, state=state, report=report, held_until_s=until_s), node.state, problem)

    def leave(self, key: str, role: str) -> None:
        """Records that a node ends on purpose. Raises ValueError if the key is another role's."""
        if (node := self._node(key, role)) and node.state is not State.GONE:
            self._end(node, "it left")

    def extend(self, by_s: float, now_s: float) -> None:
        """Moves the last beat of each node `by_s` seconds later, because this process could not receive beats during that time."""
        for key, node in self._nodes.items():
            self._nodes[key] = dataclasses.replace(node, beat_s=min(now_s, node.beat_s + by_s))

    def sweep(self, now_s: float) -> list[Change]:
        """Marks nodes that are silent for too long at `now_s`. Returns all changes of state since the last sweep, oldest first."""
        self._look(now_s)
        for node in [*self._nodes.values()]:
            beats = self._silent_beats(node, now_s)
            if beats <= SUSPECT_BEATS:
                continue
            reason = f"silent for {now_s - node.beat_s:.0f} s"
            if beats > GONE_BEATS and node.state is State.DEAD:
                self._end(node, reason)
            elif beats > DEAD_BEATS and node.state is State.SUSPECT:
                self._put(dataclasses.replace(node, state=State.DEAD), node.state, reason)
            elif node.state in (State.HEALTHY, State.JOINING):
                self._put(dataclasses.replace(node, state=State.SUSPECT), node.state, reason)
        changes = [*self._changes]
        self._changes.clear()
        return changes

    def healthy(self, role: str) -> list[Node]:
        """Returns the HEALTHY nodes of a role."""
        return [node for key in self._keys[role] if (node := self._nodes[key]).state is State.HEALTHY]

    def serving(self, oldest: timeline.Policy, newest: timeline.Policy | None = None) -> list[Node]:
        """Returns the servers that workers may use: HEALTHY, with a policy of this epoch from `oldest` to `newest`, by key."""
        found = (node for node in self.healthy("server") if _is_allowed(node.report.policy, oldest, newest))
        return sorted(found, key=lambda node: node.key)

    def was_away(self, since_s: float) -> bool:
        """Returns True if servers were away at some time from `since_s` on: none was HEALTHY, or as many were SUSPECT as HEALTHY."""
        return self._is_away() or self._away_s >= since_s

    def node(self, key: str) -> Node | None:
        """Returns the node with a key, None if it is unknown."""
        return self._nodes.get(key)

    def count(self, role: str) -> collections.Counter[State]:
        """Returns the number of nodes of a role in each state."""
        return collections.Counter({state: n for state in State if (n := self._count[role, state])})

    def nodes(self) -> Iterable[Node]:
        """Returns all nodes, in no order."""
        return self._nodes.values()

    def table(self) -> list[dict[str, Any]]:
        """Returns a row per node for people, by role and key: ages in seconds as of the last call that named a time."""
        order = sorted(self._nodes.values(), key=lambda node: (ROLES.index(node.role), node.key))
        return [
            {
                "role": node.role,
                "key": node.key,
                "state": node.state.value,
                "url": node.report.url,
                "policy": str(node.report.policy or ""),
                "beat_ago_s": round(self._now_s - node.beat_s, 1),
                "joined_ago_s": round(self._now_s - node.joined_s, 1),
                **dataclasses.asdict(node.report.load),
                "problem": node.report.problem,
            }
            for node in order
        ]

    def _node(self, key: str, role: str) -> Node | None:
        node = self._nodes.get(key)
        if node and node.role != role and node.state is not State.GONE:
            raise ValueError(f"key {key[:16]} signed in as a {node.role}; make another key for a {role}")
        return node

    def _look(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        if self._is_away():
            self._away_s = self._now_s

    def _is_away(self) -> bool:
        if not self._keys["server"]:
            return False
        num_healthy = self._count["server", State.HEALTHY]
        return not num_healthy or self._count["server", State.SUSPECT] >= num_healthy

    def _make_room(self, now_s: float) -> bool:
        """Returns True if a stranger more may sign in, maybe in place of a silent one."""
        if sum(map(len, self._strangers.values())) < MAX_STRANGERS:
            return True
        for strangers in self._strangers.values():
            oldest = self._nodes[next(iter(strangers))] if strangers else None
            if oldest and self._silent_beats(oldest, now_s) > SUSPECT_BEATS:
                del strangers[oldest.key]
                self._end(oldest, "another took its place")
                return True
        return False

    def _silent_beats(self, node: Node, now_s: float) -> float:
        """Returns how long a node has been silent, in its intervals."""
        return (now_s - node.beat_s) / (self.worker_interval_s if node.role == "worker" else self._interval_s)

    def _end(self, node: Node, reason: str) -> None:
        self._put(dataclasses.replace(node, state=State.GONE), node.state, reason)
        if not self._is_named(node.key):
            self._forget(node.key)

    def _forget(self, key: str) -> None:
        if node := self._nodes.pop(key, None):
            self._strangers[node.role == "worker"].pop(key, None)
            del self._keys[node.role][key]
            self._count[node.role, node.state] -= 1

    def _put(self, node: Node, old: State | None, reason: str) -> None:
        if self._is_away():  # until now
            self._away_s = self._now_s
        if node.key in self._nodes:
            self._count[node.role, self._nodes[node.key].state] -= 1
        self._nodes[node.key], self._keys[node.role][node.key] = node, None
        self._count[node.role, node.state] += 1
        if node.state is not old:
            assert node.state in NEXT[old], (old, node.state)
            self._changes.append(Change(node.key, node.role, old, node.state, reason))


def line(rows: Sequence[Mapping[str, Any]], role: str) -> str:
    """Returns a line that lists each node of a role in a table with its state and last error, for "why is it waiting"."""
    found = ((row["url"] or row["key"][:16], row["state"], row["problem"]) for row in rows if row["role"] == role)
    parts = [f"{name} {state}" + (f" ({problem})" if problem else "") for name, state, problem in found]
    return "; ".join(parts) or f"no {role} has signed in"


def _is_allowed(policy: timeline.Policy | None, oldest: timeline.Policy, newest: timeline.Policy | None) -> bool:
    if policy is None or policy.epoch != oldest.epoch or policy < oldest or (newest and newest < policy):
        return False
    # A server that serves other weights under the number of one that we know is of an abandoned timeline.
    known = [one.digest for one in (oldest, newest) if one and one == policy and one.digest]
    return not (known and policy.digest) or policy.digest in known
