"""The service with a real validator and a ledger: verdicts on files, and the HTTP routes."""

import contextlib
import dataclasses
import functools
import json
import signal
import threading
import time
import types

import httpx
import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import web
from rl.envs.scoring import scorer
from rl.experiment import workdir as run_directory
from rl.ledger import balances, events
from rl.validator import routes
from rl.verification import checks
from sharding import broadcast
from sharding.system import sockets as listening
from tests.rl.validator import test_service as stand
from tests.support import commands, doubles, ledgers

pytestmark = pytest.mark.usefixtures("compile_fast")
WAIT_S = 60


@pytest.fixture
def service(tmp_path):
    """A service over two groups of the cheats' run, and a ledger in which their node has joined."""
    stand.make_ledger(tmp_path, doubles.NODE)
    made = stand.start(tmp_path, doubles.make_validator(prompts=2, count_once=False))
    yield made
    stand.close(made)


put = functools.partial(stand.put, node=doubles.NODE)
ask = stand.ask


@functools.cache
def batch(step=3):
    return tuple(doubles.honest(doubles.Double(step, prompts=2)))


def test_a_group_falls_with_its_member_and_the_node_with_it(service):
    bad = list(batch())
    tokens = bad[3].tokens.copy()
    tokens[-2] = (tokens[-2] + 1) % 256
    bad[3] = rollout_lib.sign(dataclasses.replace(bad[3], tokens=tokens), doubles.NODE)
    sha = put(service, "a.parquet", bad)
    status = ask(service, "a.parquet", sha)
    assert status.status == "reject" and list(status.reasons) == [3]
    assert status.failing_indices == tuple(range(8))  # the first group; the second is sound
    state = service._ledger.state
    assert state.workers[doubles.NODE.worker].stake == 70 and state.workers[doubles.NODE.worker].ejected
    assert state.works[sha].units == 0 and ledgers.verify(service._ledger._path).error is None
    assert checks.duplicate(batch()[0], service._state.seen).accepted  # may come again from an honest node
    assert not checks.duplicate(batch()[8], service._state.seen).accepted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: parquet.to_bytes(list(b))[:-9], "rollout file: not readable"),
        (lambda b: parquet.to_bytes([]), "file: a.parquet contains no rollout"),
        (lambda b: b[:15], "samples: expected 0..7 once each"),
        (lambda b: [dataclasses.replace(r, reward=0.5) for r in b], "signature: the key"),
        (lambda b: doubles.inflated_reward(doubles.Double(3, prompts=2)), "reward: reward is 1.0, recomputed"),
        (lambda b: doubles.honest(doubles.Double(1, prompts=2)) + list(b), "ok"),
    ],
)
def test_files_and_what_is_said_of_them(service, change, reason):
    sha = put(service, "a.parquet", change(batch()))
    status = ask(service, "a.parquet", sha)
    assert (status.reason or "ok").startswith(reason) and (status.status == "accept") == (reason == "ok")


def test_what_an_asker_says_costs_nobody_anything(service):
    sha = put(service, "a.parquet", batch())
    for name, other, said in [
        ("a.parquet", "0" * 64, "is not work of this ledger"),
        ("a.parquet", put(service, "c.parquet", batch(5)), "a.parquet does not have the SHA-256 "),
        ("b.parquet", sha, "does not exist"),
    ]:
        with pytest.raises(ValueError, match=said):
            service.submit(name, [other])
    assert ask(service, "a.parquet", sha, address="0" * 64).status == "accept"
    assert service.submit("a.parquet", [sha], "0" * 64).reason.startswith("signature: another worker signed the file")
    assert service.submit("a.parquet", [sha], doubles.NODE.worker).status == "accept"
    assert service.counts == {"accept": 1} and service._ledger.state.workers[doubles.NODE.worker].stake == 100


def test_a_borrowed_name_does_not_hide_a_cheat(service, monkeypatch):
    """The first file is of a node of good repute and fails by its signature; the second is a cheat's own."""
    good = rollout_lib.WorkerKey.generate()
    service._ledger.append(events.sign("join", good.worker, good))
    monkeypatch.setattr(balances.State, "reputation", lambda self, node: 0.9999 if node == good.worker else 0.0)
    service._min_rate = 0.0
    shas = [
        put(service, "a-0.parquet", [dataclasses.replace(r, worker=good.worker) for r in batch()[:8]], node=good),
        put(service, "a-1.parquet", doubles.CHEATS["copied_proof"](doubles.Double(3, prompts=2))[8:]),
    ]
    status = ask(service, "a-0.parquet", *shas)
    assert status.checked and status.reasons[0].startswith("signature") and status.reasons[1].startswith("toploc")


def test_names_stay_inside(service):
    sha = put(service, "a.parquet", batch())
    assert service.status("never.parquet").status == "unknown"
    (service._root / "link.parquet").symlink_to("/etc/passwd")
    for name in (
        "../a.parquet",
        "/etc/passwd.parquet",
        "a.txt",
        "",
        ".a.parquet",
        "x" * 300 + ".parquet",
        "link.parquet",
    ):
        with pytest.raises(ValueError, match="is not a name of a rollout file|is outside"):
            service.submit(name, [sha], None, group=False)
    with pytest.raises(ValueError, match="file_sha must be a SHA-256"):
        service.submit("a.parquet", ["xyz"], None, group=False)


def test_good_repute_is_replayed_less(service, monkeypatch):
    rollouts = [dataclasses.replace(batch()[0], step=step) for step in range(2000)]
    assert all(map(service._is_drawn, rollouts))
    monkeypatch.setattr(balances.State, "reputation", lambda self, node: 0.9)
    assert 150 < sum(map(service._is_drawn, rollouts)) < 250  # a tenth: 200 +- 3.7 standard errors
    monkeypatch.setattr(balances.State, "reputation", lambda self, node: 0.9999)
    assert 60 < sum(map(service._is_drawn, rollouts)) < 140  # never below the lowest rate


def test_the_routes(service):
    sock = listening.listen("127.0.0.1", 0)
    server = web.server(routes.make_app(service))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    with httpx.Client(base_url=listening.address(sock), timeout=WAIT_S) as http:
        sha = put(service, "a-0.parquet", batch())
        body = {"file_sha": sha, "address": doubles.NODE.worker}
        assert http.post("/validate/a-0.parquet", json=body).json()["status"] in ("pending", "accept")
        while (status := http.get("/status/a-0.parquet").json())["status"] == "pending":
            time.sleep(0.01)
        assert status["status"] == "accept" and set(status) >= {
            "input_flops",
            "output_flops",
            "failing_indices",
            "reason",
        }
        body = {"file_shas": [sha], "group_id": "a", "file_number": 0, "group_size": 1}
        http.post("/validategroup/a-0.parquet", json=body)
        while (status := http.get("/statusgroup/a-0.parquet").json())["status"] == "pending":
            time.sleep(0.01)
        assert status["status"] == "accept" and status["output_flops"] == stand.flops(batch())
        assert http.get("/status/other").json()["status"] == "unknown"
        for route, bad in [
            ("/validate/a-0.parquet", {}),
            ("/validate/a-0.parquet", {"file_sha": "0" * 64}),
            ("/validate/..%2Fa.parquet", {"file_sha": sha}),
            ("/validate/a-0.parquet", {"file_sha": sha, "address": 3}),
            ("/validategroup/a-0.parquet", {"file_shas": "x"}),
            ("/validategroup/a-0.parquet", {"file_shas": [sha], "group_size": 2}),
            ("/validategroup/a-0.parquet", {"file_shas": []}),
        ]:
            reply = http.post(route, json=bad)
            assert reply.status_code == 400 and reply.json()["error"]["message"]
        assert http.post("/validate/a-0.parquet", content=b"{").status_code == 400
        assert http.get("/health").json() == {"status": "ok", "verdicts": {"accept": 1}, "waiting_for": "requests"}
        assert 'intellax_validator_verdicts_total{name="accept"} 1.0' in http.get("/metrics").text
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_service_ends_in_order(tmp_path, monkeypatch, number):
    exp = doubles.experiment(prompts=2)
    config = json.loads(exp.config.to_json())
    config["topology"]["server_keys"] = ["5e" * 32]
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    closed, pulled, key = [], [], run_directory.signing_key(tmp_path).worker
    made, judge = [], routes.judge_lib.Judge
    monkeypatch.setattr(
        routes.judge_lib, "Judge", lambda own, *a, **options: made.append(own) or judge(own, *a, **options)
    )

    def run(sockets):
        sockets[0].close()
        signal.raise_signal(number)

    server = types.SimpleNamespace(run=run)
    monkeypatch.setattr(routes.web, "server", lambda app: server)
    monkeypatch.setattr(routes.validator_service.Service, "close", lambda self: closed.append(self))
    monkeypatch.setattr(scorer.Scorer, "close", lambda self: closed.append(self))
    monkeypatch.setattr(broadcast, "entry_of", lambda *args, **options: None)
    monkeypatch.setattr(broadcast, "pull", lambda *args, **options: pulled.append((args, options)))
    options = {"workdir": tmp_path, "rollouts": tmp_path, "port": 0, "weights": "http://relay:1"}
    assert commands.run("rl.validator", "serve", *(f"--{name}={value}" for name, value in options.items())) == 0
    service, scores = closed
    assert isinstance(scores, scorer.Scorer)
    vouched = [dataclasses.replace(one, server="5e" * 32) for one in stand.group()]
    for validator in (*made, service._validator):  # a worker does not answer for the claims of a registered server
        assert {one.worker for one in validator.evidence.attributed(vouched)} == {"5e" * 32}
    service._state.close()
    with contextlib.suppress(AttributeError):  # the false pull returns nothing with params
        service._validator._weights(3)
    assert pulled == [(("http://relay:1", 3), {"base": None, "key": key, "digest": ""})]
