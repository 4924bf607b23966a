"""The nodes of a run over real sockets: static servers of every kind of fault, heartbeats, long polls, and the end of patience.

Servers are played by apps with the two routes that an orchestrator calls.
"""

import concurrent.futures
import dataclasses
import math
import re
import socket
import threading
import time
import types
import typing

import fastapi
import httpx
import pytest

from configs import quickstart
from inference.rollouts import rollout as rollout_lib
from inference.server import inference_server
from inference.swarm import membership
from rl.experiment import experiment
from rl.protocol import lease as lease_lib
from rl.protocol import registry, request_limit, task_schedule, timeline
from rl.protocol.ledger import run_ledger
from rl.swarm.orchestrator import nodes, static_servers
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator import state as state_lib
from rl.swarm.orchestrator.gate import gate
from rl.swarm.orchestrator.groups import give_backs
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks
from sharding.system import sign_in, signed_message
from tests.support import clock, proxy, serving, signed_http
from tests.support.orchestrators import give_record, inside, marks

RUN, KEY, OTHER, SERVER, STRANGER = (rollout_lib.WorkerKey.generate() for _ in range(5))
WAIT_S = 60


class Played:
    """A server with a policy version, None: without health. `status` answers an update, and `delay_s` comes before."""

    def __init__(self):
        self.version, self.status, self.delay_s, self.updates, self.is_up = -1, 200, 0.0, [], True
        self.app = fastapi.FastAPI()

        @self.app.get("/health")
        def health():
            if not self.is_up:
                return fastapi.responses.JSONResponse({"error": {"message": "the scheduler stopped"}}, status_code=503)
            policy = {"policy_epoch": 0, "policy_version": max(self.version, 0), "policy_digest": ""}
            return policy | {"load": {"running": 1, "waiting": 2}}

        @self.app.post("/update_weights")
        def update(body: dict):
            self.updates.append(body["version"])
            time.sleep(self.delay_s)
            if self.status != 200:
                message = "no version 6 under http://relay; it holds [4, 5, 7, 8]"
                return fastapi.responses.JSONResponse({"error": {"message": message}}, status_code=self.status)
            self.version = body["version"]
            return {}


@pytest.fixture
def server():
    played = Played()
    with serving.in_thread(played.app) as played.url:
        yield played


@pytest.fixture
def make(tmp_path):
    made = []

    def make(*servers, clock=time.monotonic, **topology):
        config = quickstart.get_config()
        config.rl.update(prompts_per_step=3, samples_per_prompt=2, num_steps=10, max_lag=1)
        config.topology.update({"heartbeat_s": 0.2, **topology})
        exp = experiment.resolve(config)
        verdicts = verdict_collector.VerdictCollector(RUN, lambda groups: [checks.OK] * len(groups))
        lines = []
        options = dict(credit=exp.credit, key=RUN, verdicts=verdicts, secret=b"s", invited=(KEY.worker, OTHER.worker))
        orchestrator = orchestrator_lib.Orchestrator(exp.config, tmp_path, **options, on_wait=lines.append, clock=clock)
        orchestrator.lines, orchestrator.config = lines, exp.config
        for url in servers:
            orchestrator.nodes.add(url, url)
        orchestrator.url = orchestrator.serve()
        made.append(orchestrator)
        return orchestrator

    yield make
    for orchestrator in made:
        orchestrator.close()
    while Node.opened:
        Node.opened.pop().close()


def urls(orchestrator):
    return {one["url"] for one in orchestrator.nodes.servers()}


def let_hold_many(orchestrator):
    """Leaves the share of a worker out of its bounds."""

    def room(*_):
        return 100

    inside(orchestrator).share.room = room


class Node:
    """Heartbeats and leases of one key."""

    opened: typing.ClassVar = []

    def __init__(self, orchestrator, key, role="worker"):
        self.http = httpx.Client(base_url=orchestrator.url, timeout=WAIT_S)
        self.opened.append(self.http)
        self.session, self.key, self.role = signed_http.session(self.http), key, role

    def beat(self, holding=(), *, leaving=False, policy=None, **report):
        report = dataclasses.asdict(registry.Report(policy=policy, **report))
        fields = {"role": self.role, "report": report, "holding": [*map(list, holding)], "leaving": leaving, "work": ""}
        reply = self.http.post("/heartbeat", json=lease_lib.request(self.key, self.session, **fields))
        assert reply.status_code != 200 or signed_message.is_signed(RUN.worker, reply.json())
        return reply.json()

    def lease(self, capacity=1, **fields):
        reply = self.http.post("/lease", json=signed_http.lease_body(self.key, self.session, capacity, **fields)).json()
        return [lease_lib.Lease.from_json(group) for group in reply["groups"]]


# ---- servers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        "no HTTP",
        "hangs",
        "500",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("no listener", "400", "not an address")),
    ],
)
def test_a_server_that_fails_ends_no_run_and_comes_back(make, server, fault):
    """D2, D12: each of these ended the run at the next version, or after 600 s."""
    bad = Played()
    with serving.in_thread(bad.app) as url, proxy.Proxy(url, lambda rng: "stall") as stalled, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)  # accepts, and never answers
        bad.status = int(fault) if fault.isdecimal() else 200
        bad_url = {
            "no listener": "http://127.0.0.1:9",
            "no HTTP": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "hangs": stalled.url,
            "not an address": "http://[::1",
        }.get(fault, url)
        orchestrator = make(bad_url, server.url)
        for version in (0, 1):
            orchestrator.publish(timeline.Policy(0, version))
            proxy.wait_until(lambda version=version: inside(orchestrator).version == version)
        proxy.wait_until(lambda: urls(orchestrator) == {server.url, *([url] if bad.status > 200 else [])})
        if bad.status > 200:  # it serves version 0, which is allowed, until it lags more
            orchestrator.publish(timeline.Policy(0, 2))
            proxy.wait_until(lambda: urls(orchestrator) == {server.url})
            proxy.wait_until(lambda: any("no version 6 under" in row["problem"] for row in orchestrator.nodes.table()))
        bad.status = 200
        if fault in ("hangs", "500", "400"):
            stalled.heal()
            proxy.wait_until(lambda: urls(orchestrator) == {bad_url, server.url}, WAIT_S)
        assert inside(orchestrator).failure is None and len(Node(orchestrator, KEY).lease(9)) == 9


def test_the_time_for_slow_servers_the_holder_of_a_version_and_a_stop_of_the_orchestrator():
    now, served, names = clock.Clock(), [], ("a", "b", "c")
    topology = types.SimpleNamespace(heartbeat_s=5.0, server_keys=names, patience_s=60.0)
    config = types.SimpleNamespace(topology=topology, rl=types.SimpleNamespace(max_lag=1))
    quiet = types.SimpleNamespace(is_known=lambda key: False, is_banned=lambda key: False)
    run_state = types.SimpleNamespace(clock=now, health=quiet, servers=quiet, has_news=False)
    locked = state_lib.Locked(
        typing.cast(state_lib.RunState, run_state), config, run_ledger.NoLedger(), lambda line: None
    )
    table = nodes.Nodes(locked=locked, validators=(), own_workers=(), on_served=served.append)
    first, second, third, last = (timeline.Policy(0, version) for version in range(4))

    def beat(now_s, *policies, problem=""):
        now.now = now_s
        for key, policy in zip(names, policies, strict=False):
            table.beat(key, "server", registry.Report(f"http://{key}", policy, problem=problem * (key == "c")), now_s)

    table.announce(first)
    beat(0.0, first, first, first)
    now.now = 10.0
    table.announce(second)
    beat(14.0, second, first, first)
    beat(17.9, second, first, first)
    assert served == [first]
    beat(18.1, second, first, first)  # the first server took 4 s, and the others had as long again
    assert served == [first, second]
    table.announce(third)
    beat(19.0, third, third, second, problem="weights not updated")
    assert served[-1] == third  # one with a problem delays nothing
    table.announce(last)
    with table.holding(third):
        beat(20.0, last, third, second)
        assert [table.target(key) for key in names] == [last, third, last]  # one that has the version keeps it
    assert [table.target(key) for key in names] == [last, last, last]  # the evaluation is over
    table._ticked_s = 40.0
    assert table.stopped_s(140.0) == 100.0
    table._check_patience(140.0, lambda keys: True)  # no worker for 40 s in which it ran
    with pytest.raises(ValueError, match="the run had no worker that it could use for 60 s"):
        table._check_patience(161.0, lambda keys: True)


def test_one_server_keeps_the_version_of_an_evaluation_and_the_others_go_on(make, server):
    other = Played()
    with serving.in_thread(other.app) as url:
        orchestrator, served = make(url, server.url), lambda: sorted(s["version"] for s in orchestrator.nodes.servers())
        orchestrator.publish(timeline.Policy(0, 0))
        with orchestrator.nodes.holding(timeline.Policy(0, 1)), orchestrator.nodes.holding(timeline.Policy(0, 1)):
            for version in (1, 2, 5):  # 5: version 1 is more than max_lag behind, but still for the evaluation
                orchestrator.publish(timeline.Policy(0, version))
                proxy.wait_until(lambda version=version: served() == [1, version])
                proxy.wait_until(lambda version=version: inside(orchestrator).version == version)
            held, free = sorted((server, other), key=lambda one: one.version)
            assert 2 not in held.updates and (held.version, free.version) == (1, 5)
            held.is_up = False  # its death passes the version on to no server that has a newer one
            proxy.wait_until(lambda: served() == [5])
            held.is_up = True
            proxy.wait_until(lambda: served() == [1, 5])
        proxy.wait_until(lambda: served() == [5, 5])


@pytest.mark.parametrize(
    "missing", ["server", pytest.param("worker", marks=pytest.mark.slow), "worker that is not banned"]
)
def test_without_any_server_or_worker_the_run_ends_with_a_line_on_each(make, server, missing):
    """The run waited for ever for a worker that asked for work, and that was banned."""
    role, is_banned, server.is_up = missing.partition(" ")[0], "banned" in missing, missing != "server"
    orchestrator = make("http://127.0.0.1:9", server.url, patience_s=1.0)
    inside(orchestrator).health.remember([KEY.worker] * is_banned, {}, [KEY.worker])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = pool.submit(Node(orchestrator, KEY).lease, wait_s=WAIT_S) if is_banned else None
        orchestrator.publish(timeline.Policy(0, 0))
        with pytest.raises(ValueError, match=f"the run had no {role} .* for 1 s .topology.patience_s.: ") as caught:
            orchestrator.next_batch(1)
        assert asking is None or asking.result(5) == []
    parts = {
        "server": [f"{server.url} STATE (no health: the scheduler stopped)", "127.0.0.1:9 STATE (no health: "],
        "worker": ["no worker has signed in"],
    }
    line = re.sub("suspect|dead", "STATE", str(caught.value))  # it is dead after 1.2 s
    assert all(part in line for part in parts.get(missing, [f"{KEY.worker[:16]} banned"])), line


def test_an_evaluation_for_which_only_a_stranger_is_there_ends_the_run(make, server):
    orchestrator = make(server.url, patience_s=1.0)
    orchestrator.publish(timeline.Policy(0, 0))
    stranger = Node(orchestrator, STRANGER)
    proxy.wait_until(lambda: orchestrator.leases.has_work())
    for key in [*inside(orchestrator).queue.entries]:  # no training groups are left
        inside(orchestrator).queue.drop(key, "stale")
    inside(orchestrator).queue.add(task_schedule.held_out_groups(orchestrator.config, 0))
    proxy.wait_until(lambda: stranger.beat() and inside(orchestrator).failure)
    assert "a worker (for held-out tasks one of topology.workers" in str(inside(orchestrator).failure)


def test_a_run_ends_at_once_with_the_reason_if_all_workers_are_banned_that_it_started(make):
    orchestrator = make(patience_s=15.0)
    orchestrator.publish(timeline.Policy(0, 0))
    for key in (KEY, OTHER):
        assert len(Node(orchestrator, key).lease()) == 1
        assert inside(orchestrator).failure is None  # the other one may come
        inside(orchestrator).health.remember([key.worker], {}, [key.worker])
        orchestrator.nodes.banned(key.worker, "5 rejected groups; the last: reward")
    with pytest.raises(ValueError, match="all workers of this run are banned: .*raise trust.max_attempts") as caught:
        orchestrator.next_batch(1)
    for key in (KEY, OTHER):
        assert f"{key.worker[:16]} banned (5 rejected groups; the last: reward)" in str(caught.value)


def test_servers_sign_in_pull_and_leave(make):
    orchestrator = make(mode="remote", server_keys=(SERVER.worker,))
    orchestrator.publish(timeline.Policy(0, 3))
    node, worker = Node(orchestrator, SERVER, "server"), Node(orchestrator, KEY)
    reply = node.beat(url="http://s:1")
    assert timeline.Policy.from_json(reply["policy"]) == timeline.Policy(0, 3) and reply["interval_s"] == 0.2
    assert worker.beat()["servers"] == [] and not orchestrator.leases.has_work()
    load = registry.Load(running=5, waiting=2)
    node.beat(url="http://s:1", policy=timeline.Policy(0, 3), load=load)
    (found,) = worker.beat()["servers"]
    assert found == {"url": "http://s:1", "key": SERVER.worker, "limit": 0, "version": 3, "load": 7}
    assert orchestrator.leases.has_work() and worker.lease()
    proxy.wait_until(lambda: worker.beat()["servers"] == [])  # it is silent

    attackers = [Node(orchestrator, SERVER, role) for role in ("worker", "relay", "validator")]

    def served_after_an_attack():  # a beat of another role signed the server out
        node.beat(url="http://s:1", policy=timeline.Policy(0, 3), load=load)
        replies = [attacker.beat(leaving=True) for attacker in attackers]
        assert all("signed in as a server; make another key" in reply["error"]["message"] for reply in replies)
        return len(worker.beat()["servers"])

    proxy.wait_until(lambda: served_after_an_attack() == 1, WAIT_S)  # silent for an interval, it is left out
    node.beat(leaving=True)
    assert worker.beat()["servers"] == []
    for key in (STRANGER, KEY):
        assert "is not in topology.server_keys; ask" in Node(orchestrator, key, "server").beat()["error"]["message"]


def test_the_first_failed_update_is_repeated_after_the_first_pause(make, server, monkeypatch):
    pauses = types.SimpleNamespace(next_s=iter([0.0, math.inf]).__next__, reset=lambda: None)
    monkeypatch.setattr(static_servers.retries, "Backoff", lambda first_s, most_s: pauses)
    orchestrator, server.status = make(server.url), 500
    orchestrator.publish(timeline.Policy(0, 1))
    proxy.wait_until(lambda: len(server.updates) == 2)


def test_a_health_reply_of_too_many_bytes_is_a_fault(make, server, monkeypatch):
    """Attack: a reply without end filled the memory of the orchestrator."""
    monkeypatch.setattr(static_servers.client_lib, "MAX_HEALTH_BYTES", 10)
    orchestrator, words = make(server.url), "no health: the reply has more than 10 bytes"
    proxy.wait_until(lambda: any(words in row["problem"] for row in orchestrator.nodes.table()))


def test_a_server_that_sends_its_health_byte_by_byte_holds_up_no_verdict(make, monkeypatch):
    """It is asked for its data types where a verdict waits. Its answer is shown in one line, without control characters."""
    health = {"numerics": "float32 on cpu\x1b[2J\n, jax 1"}
    played = serving.in_thread(fastapi.FastAPI(routes=[fastapi.routing.APIRoute("/health", lambda: health)]))
    with played as url, proxy.Proxy(url, lambda rng: ("rate", 20)) as slow:  # in 9 s
        serving_now = [types.SimpleNamespace(report=types.SimpleNamespace(url=one)) for one in (url, slow.url)]
        known = make().nodes
        monkeypatch.setattr(known, "_serving", lambda: serving_now)
        found = f"server {url} computes in float32 on cpu [2J , jax 1"
        assert known.numerics() == f"{found}; server {slow.url} does not report its data types"


@pytest.mark.parametrize("role", ["server", "validator"])
def test_a_node_that_waits_for_work_and_changes_its_role_ends_no_run(make, role):
    """Attack: the tick that counts the waiting workers failed, or signed the worker in again after it had left."""
    orchestrator = make(mode="remote", server_keys=(SERVER.worker,))
    orchestrator.nodes.validators = frozenset({OTHER.worker})
    key = {"server": SERVER, "validator": OTHER}[role]
    node, worker = Node(orchestrator, key, role), Node(orchestrator, key)
    body = signed_http.lease_body(key, node.session, 1, wait_s=WAIT_S)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reply = pool.submit(worker.http.post, "/lease", json=body)
        proxy.wait_until(lambda: orchestrator.nodes.num_signed_in() or reply.done())
        worker.beat(leaving=True)
        assert reply.result(WAIT_S / 2).status_code == (400 if role == "server" else 200)
        assert "policy" in node.beat(url="http://s:1")
    assert inside(orchestrator).failure is None


@pytest.mark.parametrize(("record", "path"), [(0, "/heartbeat"), (1, "/lease")])
def test_requests_with_thousands_of_groups_count_as_many(make, monkeypatch, record, path):
    """Attack: 100 of them per second, which a network may send, or any number with a record, kept out all other requests."""
    monkeypatch.setattr(gate, "RATE", 0.01)
    orchestrator = make()
    give_record(orchestrator, STRANGER.worker, record)
    node = Node(orchestrator, STRANGER)
    held, lease = [("train", 2**62, n) for n in range(4000)], signed_http.lease_body
    ask = lambda: node.http.post(path, json=lease(STRANGER, node.session, holding=held)).json()  # noqa: E731
    replies = [node.beat(held) if path == "/heartbeat" else ask() for _ in range(24)]
    assert "policy" in replies[0] and "send fewer" in replies[-1]["error"]["message"]


def test_leases_and_requests_keep_to_the_limits_of_the_servers(make):
    orchestrator = make(mode="remote", server_keys=(SERVER.worker,))
    policy = timeline.Policy(0, 0)
    orchestrator.publish(policy)
    node, worker, other = Node(orchestrator, SERVER, "server"), Node(orchestrator, KEY), Node(orchestrator, OTHER)

    def limit(by=worker, **load):
        node.beat(url="http://s:1", policy=policy, load=registry.Load(**load))
        return by.beat()["servers"][0]["limit"]

    assert limit(running=3) == 0  # a server that reports no capacity
    busy = {"running": 4, "kv_used": 0.1, "capacity": 4}  # samples; a group has two
    assert [limit(**busy), limit(**busy, finished=4), limit(**busy, finished=4, preemptions=1)] == [4, 16, 15]
    orchestrator.nodes._limits[SERVER.worker] = request_limit.State(4.0)
    let_hold_many(orchestrator)
    mine, its = worker.lease(6), other.lease(6)
    assert len(mine) == 4 and len(its) == 1  # at least one
    assert [by.beat()["servers"][0]["limit"] for by in (worker, other)] == [4, 1]  # 0 would be no limit
    orchestrator.nodes._limits[SERVER.worker] = request_limit.State(20.0)
    assert [by.beat()["servers"][0]["limit"] for by in (worker, other)] == [16, 4]
    orchestrator.nodes._limits[SERVER.worker] = request_limit.State(2.0)
    assert other.lease(6) == []
    other.beat(url=registry.OWN_SERVER)
    assert len(other.lease(6)) == 1  # the last one
    worker.lease(0, returned=[mine[0].key])
    assert other.lease(6) == mine[:1]
    other.lease(0, returned=[its[0].key])
    inside(orchestrator).health._workers.clear()  # no halvings
    orchestrator.nodes._limits[SERVER.worker] = request_limit.State(4.0)
    assert len(worker.lease(6)) == 1  # two that another server does take no place
    orchestrator.nodes._limits[SERVER.worker] = request_limit.State(20.0)
    assert worker.beat()["servers"][0]["limit"] == 20


@pytest.mark.parametrize(
    ("problem", "is_end"), [("environment toys cannot be loaded: task {}; correct it", True), ("no server {}", False)]
)
def test_groups_that_all_workers_give_back_for_one_cause_of_their_environment_end_the_run(
    make, problem, is_end, monkeypatch
):
    """C15: the workers leased and gave back for ever, the cause in their logs alone."""
    monkeypatch.setattr(give_backs, "PATIENCE_S", 0.5)
    now, rounds = clock.Clock(), 0
    orchestrator = make(clock=now)
    orchestrator.publish(timeline.Policy(0, 0))
    let_hold_many(orchestrator)
    node, other = Node(orchestrator, KEY), Node(orchestrator, OTHER)
    Node(orchestrator, STRANGER).beat(problem="environment of a stranger")
    for one in (node, other):
        one.beat(problem=problem.format(7))
    while rounds < 4 and not inside(orchestrator).failure:
        for one in (node, other):
            while not (keys := [group.key for group in one.lease(6)]) and not inside(orchestrator).failure:
                now.now += 0.1  # groups that came back rest
            one.lease(0, returned=keys, problem=problem.format(rounds))
        rounds += 1
    told = [line for line in orchestrator.lines if line.startswith("worker ")]
    assert told == [f"worker {KEY.worker[:16]}: {problem.format(7)}"]
    if is_end:
        with pytest.raises(
            ValueError, match="no worker can make a group: environment toys cannot be loaded: .*; correct"
        ):
            orchestrator.next_batch(1)
        assert 2 <= rounds <= 4
    else:
        assert inside(orchestrator).failure is None


def test_strangers_that_give_groups_back_end_no_run(make, monkeypatch):
    """Attack: five keys with two accepted groups each ended a run, after a restart within seconds, although its own workers worked."""
    monkeypatch.setattr(give_backs, "PATIENCE_S", 0.0)
    orchestrator = make()
    orchestrator.publish(timeline.Policy(0, 0))
    for key in (KEY, *(rollout_lib.WorkerKey.generate() for _ in range(5))):
        node = Node(orchestrator, key)
        node.beat()
        if key is not KEY:
            give_record(orchestrator, key.worker, 2)
            (group,) = node.lease()
            node.lease(0, returned=[group.key], problem="environment toys: this text is free")
    assert inside(orchestrator).failure is None and not inside(orchestrator).give_backs._times  # no memory, either


def test_leases_of_newcomers_take_no_samples_from_known_workers(make):
    """Attack: fresh keys that held a quarter of the groups, idle, left each honest worker one group at a time, and a part of each server."""
    orchestrator = make(mode="remote", server_keys=(SERVER.worker,), heartbeat_s=5.0)
    policy = timeline.Policy(0, 0)
    orchestrator.publish(policy)
    beat, load = Node(orchestrator, SERVER, "server").beat, registry.Load(capacity=4)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(beat, url="http://s:1", policy=policy, load=load)  # the reply waits for the next policy
        proxy.wait_until(lambda: urls(orchestrator))
        orchestrator.nodes._limits[SERVER.worker] = request_limit.State(4.0)
        let_hold_many(orchestrator)
        new, worker = Node(orchestrator, STRANGER), Node(orchestrator, KEY)
        # Groups of two samples, in all twice as many as the server runs.
        assert len(new.lease(6)) == 1 and len(worker.lease(6)) == 4
        orchestrator.nodes._limits[SERVER.worker] = request_limit.State(20.0)
        assert [by.beat()["servers"][0]["limit"] for by in (new, worker)] == [4, 20]
        orchestrator.publish(timeline.Policy(0, 1))


def test_the_operator_gets_the_table_of_nodes_and_nobody_else(make, monkeypatch):
    orchestrator = make(mode="remote", server_keys=(SERVER.worker,))
    orchestrator.publish(timeline.Policy(0, 3))
    load = registry.Load(running=5, tokens_per_s=70.0)
    Node(orchestrator, SERVER, "server").beat(url="http://s:1", policy=timeline.Policy(0, 3), load=load)
    node = Node(orchestrator, KEY)
    node.beat(problem="no disk")
    assert len(node.lease(2)) == 2
    Node(orchestrator, OTHER).beat()
    inside(orchestrator).health.remember([OTHER.worker], {}, [OTHER.worker])
    reply = sign_in.Orchestrator(orchestrator.url, RUN.private, RUN.worker).ask("/nodes")
    fields = ("role", "state", "policy", "groups", "tokens_per_s", "problem")
    assert {row["key"]: [row[field] for field in fields] for row in reply["nodes"]} == {
        SERVER.worker: ["server", "healthy", "version 3", 5, 70.0, ""],
        KEY.worker: ["worker", "healthy", "", 2, 0.0, "no disk"],
        OTHER.worker: ["worker", "banned", "", 0, 0.0, nodes.EARLIER],
    }
    with monkeypatch.context() as patch:  # a scrape of /metrics counts the nodes without it, which is sorted
        patch.delattr(registry.Registry, "table")
        assert orchestrator.nodes.counts() == dict.fromkeys(("server_healthy", "worker_healthy", "worker_banned"), 1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        batch = pool.submit(orchestrator.next_batch, 1)
        operator = sign_in.Orchestrator(orchestrator.url, RUN.private, RUN.worker)
        proxy.wait_until(lambda: "batch 1 has 0 of 3 groups; " in operator.ask("/nodes")["waiting_for"])
        orchestrator.fail(ValueError("the end"))
        assert batch.exception(5)
    for key in (KEY, STRANGER):
        with pytest.raises(ValueError, match="shown to the operator of the run.*sign with the run's key"):
            sign_in.Orchestrator(orchestrator.url, key.private).ask("/nodes")


class Stub:
    """A server with the attributes that heartbeats read. Its first update fails."""

    def __init__(self, run=""):
        self.scheduler, self.policy_digest, self.updates, self.signer, self.run = self, "", [], SERVER, run
        self.version, self.epoch, self.num_pending, self.is_paused, self.stats = 0, 0, 5, False, {"tokens": 70}
        self.load, self.is_alive = lambda: {"running": 2, "waiting": 3, "kv_used": 0.5}, True

    def update(self, version, *, epoch, digest):
        self.updates.append((epoch, version, digest))
        if len(self.updates) == 1:
            raise OSError("no version 6 under http://relay;\nit holds [4, 5, 7, 8]")
        self.version, self.epoch = version, epoch


def test_a_policy_that_cannot_be_loaded_is_tried_again_with_growing_pauses(monkeypatch):
    now, updates, go_on = clock.Clock(), [], threading.Event()
    monkeypatch.setattr(membership, "time", types.SimpleNamespace(monotonic=now))

    def update(version, **pins):
        updates.append(now.now)
        assert go_on.wait(WAIT_S)
        raise OSError("no version 6")

    stub = types.SimpleNamespace(scheduler=types.SimpleNamespace(epoch=0, version=5), update=update)
    follower = membership.PolicyFollower(stub, lambda: None)
    for _ in range(3):
        follower.follow({"epoch": 0, "version": 6, "digest": ""})
    go_on.set()
    while now.now < 100:
        follower._thread.join()
        now.now += 0.5
        follower.follow({"epoch": 0, "version": 6, "digest": ""})
    follower._thread.join()
    assert updates == [0, 1, 3, 7, 15, 31, 61, 91] and "no version 6" in follower.problem


def test_a_server_loads_and_reports_a_policy_long_before_its_next_heartbeat(make):
    orchestrator, stub = make(mode="remote", server_keys=(SERVER.worker,), heartbeat_s=5.0), Stub(RUN.worker)
    stub.updates.append(None)  # no update fails
    with membership.sign_in_server(orchestrator.url, stub, "http://s:1") as node:
        begun_s = time.monotonic()
        for version in range(1, 9):
            orchestrator.publish(timeline.Policy(0, version, "ab" * 32))
            proxy.wait_until(lambda version=version: inside(orchestrator).version == version)
        assert time.monotonic() - begun_s < 15.0  # 60 with a heartbeat to hear of each, and one to report it
    # It leaves without a wait for the reply to its last heartbeat, which waits for news.
    assert [row["state"] for row in orchestrator.nodes.table()] == ["gone"] and node._thread.is_alive()


def test_the_speed_of_a_server_is_counted_over_seconds_and_averaged_over_a_step(make, monkeypatch):
    """A local run's server signs in nowhere, and its metric was 0 in every step."""
    now_s, stats = [100.0], {"tokens": 0}
    monkeypatch.setattr(inference_server, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    server = types.SimpleNamespace(scheduler=types.SimpleNamespace(stats=stats), _counted=(100.0, 70, 0.0))
    speeds, orchestrator = [], make()
    for now_s[0], stats["tokens"] in ((100.1, 80), (110.0, 170), (110.1, 300), (115.0, 320)):
        speeds.append(inference_server.InferenceServer._tokens_per_s(server))
    assert speeds == [0.0, 10.0, 10.0, 30.0]
    table = orchestrator.nodes
    for speed in speeds:
        load = registry.Load(tokens_per_s=speed)
        table.beat("http://s", "server", registry.Report("http://s", timeline.Policy(0, 0), load), time.monotonic())
    assert [table.load()["machine/servers_tokens_per_s"] for _ in range(2)] == [
        12.5,
        30.0,
    ] and table.tokens_per_s() == 30


def test_a_server_that_signs_in_follows_the_policies_and_comes_back_after_a_restart(make, monkeypatch, capsys):
    monkeypatch.setattr(sign_in, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(membership, "FIRST_PAUSE_S", 1.0)
    orchestrator, stub = make(mode="remote", server_keys=(SERVER.worker,)), Stub()
    orchestrator.publish(timeline.Policy(0, 1, "ab" * 32))
    # No run is named, so the server joins the first that answers.
    node = membership.sign_in_server(orchestrator.url, stub, "http://s:1").__enter__()
    proxy.wait_until(lambda: any("no version 6" in row["problem"] for row in orchestrator.nodes.table()))
    proxy.wait_until(lambda: inside(orchestrator).version == 1)
    assert stub.updates == [(0, 1, "ab" * 32)] * 2 and stub.run == RUN.worker  # for which it signs
    (row,) = orchestrator.nodes.table()
    assert (row["running"], row["waiting"], row["kv_used"], row["problem"]) == (2, 3, 0.5, "")
    orchestrator.publish(timeline.Policy(1, 0))  # of another epoch
    proxy.wait_until(lambda: (stub.epoch, stub.version) == (1, 0))

    port = int(orchestrator.url.rpartition(":")[2])
    orchestrator.close()
    proxy.wait_until(lambda: "not signed in" in capsys.readouterr().err)
    again = make(mode="remote", server_keys=(SERVER.worker,), port=port)
    again.publish(timeline.Policy(1, 4))
    proxy.wait_until(lambda: inside(again).version == 4)
    assert "signed in at" in capsys.readouterr().err and again.url == orchestrator.url
    stub.is_alive = False  # its scheduler ended, and workers were sent to it for ever
    proxy.wait_until(lambda: again.nodes.servers() == [] and "the scheduler ended" in capsys.readouterr().err)
    stub.is_alive = True
    proxy.wait_until(again.nodes.servers)
    again.end()
    proxy.wait_until(lambda: "the run ended" in capsys.readouterr().err)
    again.close()
    time.sleep(0.3)  # a few beats
    assert not capsys.readouterr().err  # that nobody is there is known
    node.__exit__()
    assert again.nodes.servers() == [] and [row["state"] for row in again.nodes.table()] == ["gone"]


@pytest.mark.parametrize("role", ["relay", "validator"])
def test_relays_and_validators_are_on_the_table(make, role):
    orchestrator = make(mode="remote", server_keys=(SERVER.worker,))
    with sign_in.SignIn(orchestrator.url, SERVER.private, role, lambda: {"url": "http://r:1", "problem": "bad\ndisk"}):
        proxy.wait_until(orchestrator.nodes.table)
        (row,) = orchestrator.nodes.table()
        assert (row["role"], row["state"], row["url"], row["problem"]) == (role, "healthy", "http://r:1", "bad disk")
    said = []
    for count, (key, run) in enumerate([(STRANGER, ""), (SERVER, OTHER.worker)], 1):
        node = sign_in.SignIn(orchestrator.url, key.private, role, dict, run=run, on_notice=said.append)
        with node:
            proxy.wait_until(lambda count=count: len(said) == count)
    assert "is not in topology.server_keys" in said[0]
    assert f"it serves run {RUN.worker}, and --run is {OTHER.worker}" in said[1]


# ---- workers ---------------------------------------------------------------------------------------------------------


def test_a_group_that_takes_ten_leases_by_a_worker_that_beats_stays_its_own(make, monkeypatch):
    """D3: it was leased again, done twice, and its honest worker barred."""
    monkeypatch.setattr(nodes, "STOPPED_S", math.inf)
    now = clock.Clock()
    orchestrator = make(clock=now, lease_s=0.3)
    orchestrator.publish(timeline.Policy(0, 0))
    node, other = Node(orchestrator, KEY), Node(orchestrator, OTHER)
    other.lease(0)
    groups = node.lease(6)
    for _ in range(30):
        now.now += 0.1
        assert node.beat([group.key for group in groups])["void"] == []
    assert other.lease(6) == [] and orchestrator.take_counts()["trust/num_lease_expired"] == 0
    assert sorted(map(tuple, node.beat([("train", 9, 27)])["void"])) == [("train", 9, 27)]
    node.beat(leaving=True)
    assert len(other.lease(6)) == 6 and orchestrator.take_counts()["trust/num_lease_returned"] == 6
    now.now += 60.0
    proxy.wait_until(lambda: orchestrator.leases.has_work())  # expired, although no worker asks
    now.now += 60.0
    assert len(other.lease(6)) == 6


@pytest.mark.parametrize(
    ("is_away", "halvings", "lease_s"),
    [
        (True, 0, 60.0),
        (False, 1, 1.0),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((True, 0, 1.0), (False, 1, 60.0))),
    ],
)
def test_leases_that_end_together_count_once_and_not_in_an_outage_of_servers(make, server, is_away, halvings, lease_s):
    """D6: 32 leases of one outage of servers were 12 halvings of their worker's room."""
    orchestrator = make(server.url, lease_s=lease_s)
    orchestrator.publish(timeline.Policy(0, 0))
    proxy.wait_until(lambda: inside(orchestrator).version == 0)
    begun_s, groups = time.monotonic(), Node(orchestrator, KEY).lease(6)
    assert len(groups) == 6
    server.is_up = not is_away
    if lease_s == 60:
        proxy.wait_until(lambda: orchestrator.nodes.was_away(begun_s) == is_away)
        for group in groups:
            orchestrator.leases.lease(KEY.worker, 0, returned=[group.key])
    proxy.wait_until(lambda: inside(orchestrator).counts["lease_expired"] == 6)
    assert marks(orchestrator, KEY.worker)["num_halvings"] == halvings


def test_a_worker_that_starts_again_gets_its_groups_back_at_once_and_without_blame(make):
    orchestrator = make()
    orchestrator.publish(timeline.Policy(0, 0))
    node = Node(orchestrator, KEY)
    groups = node.lease(6, begun_us=5)
    assert len(groups) == 6 and node.lease(6, begun_us=5) == []  # the same process
    again = node.lease(6, begun_us=6)
    assert {group.key for group in again} == {group.key for group in groups}
    assert node.lease(6, begun_us=5) == []  # the earlier one goes on: it takes nothing from the later
    assert (
        inside(orchestrator).queue.num_leases(KEY.worker) == 6 and marks(orchestrator, KEY.worker)["num_halvings"] == 0
    )
    assert orchestrator.take_counts()["trust/num_lease_returned"] == 6


@pytest.mark.parametrize("by", [KEY, STRANGER], ids=["invited", "stranger"])
def test_groups_of_a_reply_that_was_lost_go_to_the_next_request_without_blame(make, by):
    orchestrator = make()
    orchestrator.publish(timeline.Policy(0, 0))
    give_record(orchestrator, STRANGER.worker, 7)
    let_hold_many(orchestrator)
    node, other, marks = (
        Node(orchestrator, by),
        Node(orchestrator, OTHER),
        inside(orchestrator).health.state()["workers"],
    )
    lost = {group.key for group in node.lease(4, begun_us=5, holding=[])}
    assert {group.key for group in node.lease(4, begun_us=5, holding=[])} == lost and len(lost) == 4
    assert inside(orchestrator).health.state()["workers"] == marks
    other.lease(0)
    kept = [*map(list, lost)][:3]
    assert node.lease(0, begun_us=5) == []  # a request that does not list them
    assert node.lease(0, begun_us=5, holding=kept[:1], returned=kept[1:2]) == []
    assert orchestrator.take_counts()["trust/num_lease_returned"] == 6
    assert inside(orchestrator).queue.held(by.worker) == [tuple(kept[0])] and len(other.lease(6)) == 5


def test_a_group_that_comes_back_again_and_again_rests_in_between(make):
    """While a server refused, a ledger showed 481 leases for 157 submissions."""
    now = clock.Clock()
    orchestrator = make(clock=now)
    orchestrator.publish(timeline.Policy(0, 0))
    let_hold_many(orchestrator)
    key, leased = ("train", 1, 0), 0
    while now.now < 2:
        now.now += 0.05
        for by in (KEY, OTHER):
            leased += key in {group.key for group in orchestrator.leases.lease(by.worker, 6)}
            orchestrator.leases.lease(by.worker, 0, returned=inside(orchestrator).queue.held(by.worker))
    assert 3 <= leased <= 4  # after 0, 0, 0.5, 1, 2 s


def test_a_worker_beats_less_often_if_there_are_many(make):
    orchestrator = make(lease_s=80.0)
    orchestrator.nodes.seen((f"{number:064x}" for number in range(80)), time.monotonic())
    orchestrator.nodes._sweep(time.monotonic())
    node = Node(orchestrator, KEY)
    assert node.beat()["interval_s"] == pytest.approx(2.0, rel=0.4)
    orchestrator.nodes.seen((f"{number:064x}" for number in range(4000)), time.monotonic())
    orchestrator.nodes._sweep(time.monotonic())
    assert 4.0 <= node.beat()["interval_s"] <= 5.0 and orchestrator.nodes.interval_s("server") == 0.2


def test_as_many_waiters_are_woken_as_there_is_work_in_order(make):
    """D7: each of them asked ten times a second."""
    orchestrator = make()
    keys = [KEY, OTHER, STRANGER, rollout_lib.WorkerKey.generate()]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        strangers_first = [keys[2], keys[3], keys[0], keys[1]]
        calls = []
        for key in strangers_first:
            calls.append(pool.submit(Node(orchestrator, key).lease, 2, wait_s=WAIT_S))
            proxy.wait_until(lambda: orchestrator.nodes.num_signed_in() == len(calls), WAIT_S)
        time.sleep(0.7)  # longer than silent workers count as there
        proxy.wait_until(lambda: orchestrator.nodes.num_signed_in() == 4, WAIT_S)
        orchestrator.publish(timeline.Policy(0, 0))  # opens 6 groups; newcomers get one in four of those
        assert [len(calls[number].result(WAIT_S)) for number in (0, 2, 3)] == [1, 2, 2] and not calls[1].done()
        begun_s = time.monotonic()
        assert Node(orchestrator, keys[3]).lease(1, wait_s=0.5) == [] and time.monotonic() - begun_s > 0.4
        assert calls[1].result(WAIT_S) == []  # which its later request ended


def test_a_newcomer_gets_a_group_although_one_worker_could_take_all(make):
    """A worker that joined a run with one worker got nothing as long as that one was there."""
    orchestrator = make()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = []
        for key in (KEY, STRANGER):
            calls.append(pool.submit(Node(orchestrator, key).lease, 6, wait_s=WAIT_S))
            proxy.wait_until(lambda: orchestrator.nodes.num_signed_in() == len(calls), WAIT_S)
        orchestrator.publish(timeline.Policy(0, 0))
        assert [len(call.result(WAIT_S)) for call in calls] == [5, 1]


def test_a_waiter_that_is_gone_gets_no_group(make):
    orchestrator = make()
    node = Node(orchestrator, KEY)
    with pytest.raises(httpx.ReadTimeout):
        node.http.post("/lease", json=signed_http.lease_body(KEY, node.session, 6, wait_s=WAIT_S), timeout=0.3)
    time.sleep(0.2)
    orchestrator.publish(timeline.Policy(0, 0))
    time.sleep(0.5)
    assert inside(orchestrator).queue.held(KEY.worker) == []


def test_the_end_of_a_run_is_told_to_workers_that_wait_and_that_work(make):
    """D9: they ended after 300 s, with an error."""
    orchestrator = make(heartbeat_s=5.0)
    busy, idle = Node(orchestrator, KEY), Node(orchestrator, OTHER)
    assert busy.beat()["ended"] is False
    body = signed_http.lease_body(OTHER, idle.session, 1, wait_s=WAIT_S)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(idle.http.post, "/lease", json=body)
        proxy.wait_until(lambda: orchestrator.nodes.num_signed_in() == 2)
        ending = pool.submit(orchestrator.end)
        assert waiting.result(WAIT_S).json()["ended"] is True
        assert not ending.done() and busy.beat()["ended"] is True
        ending.result(10)  # 15 without word from the worker
    assert busy.lease(3) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": "learner"}, "role 'learner'; send one of server, worker, relay, validator"),
        ({"holding": [["train", 1]]}, "at most 4096 keys"),
        ({"report": {}}, "exactly the fields"),
        ({"report": dataclasses.asdict(registry.Report()) | {"load": 5}}, "load is"),
        ({"leaving": 1}, "true with the last heartbeat"),
        ({"wait_s": 5}, "unknown field"),
    ],
)
def test_a_malformed_heartbeat_is_refused(make, change, words):
    node = Node(make(), KEY)
    fields = {
        "role": "worker",
        "report": dataclasses.asdict(registry.Report()),
        "holding": [],
        "leaving": False,
        "work": "",
    }
    reply = node.http.post("/heartbeat", json=lease_lib.request(KEY, node.session, **(fields | change)))
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]
