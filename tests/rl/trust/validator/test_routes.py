"""The routes of the validation service with a real validator and a ledger, and the command that serves them."""

import contextlib
import dataclasses
import json
import signal
import time
import types

import httpx
import numpy as np
import pytest

from inference.rollouts import rollout as rollout_lib
from rl.envs.scoring import scorer
from rl.experiment import workdir as run_directory
from rl.trust.validator import routes
from rl.trust.validator import state as validator_state
from sharding.weights import broadcast
from tests.support import commands, doubles, file_validator, ledgers, serving

pytestmark = pytest.mark.usefixtures("compile_fast")
WAIT_S = 60


@pytest.fixture
def stand(tmp_path):
    """A service over two groups of the cheats' run, and a ledger in which their node has joined."""
    file_validator.make_ledger(tmp_path, doubles.NODE)
    made = file_validator.Stand(tmp_path, doubles.make_validator(prompts=2))
    yield made
    made.close()


def batch():
    return doubles.honest(doubles.Double(3, prompts=2))


@pytest.fixture
def http(stand):
    with (
        serving.in_thread(routes.make_app(stand.judge, stand.service)) as url,
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
    ):
        yield client


def wait(http, route):
    while (status := http.get(route).json())["status"] == "pending":
        time.sleep(0.01)
    return status


def test_the_routes(stand, http):
    sha = stand.put("a-0.parquet", batch(), doubles.NODE)
    body = {"file_sha": sha, "address": doubles.NODE.worker}
    assert http.post("/validate/a-0.parquet", json=body).json()["status"] in ("pending", "accept")
    status = wait(http, "/status/a-0.parquet")
    assert status["status"] == "accept" and "tasks" not in status
    assert set(status) >= {"input_flops", "output_flops", "failing_indices", "reason"}
    body = {"file_shas": [sha], "group_id": "a", "file_number": 0, "group_size": 1}
    http.post("/validategroup/a-0.parquet", json=body)
    status = wait(http, "/statusgroup/a-0.parquet")
    assert status["status"] == "accept" and status["output_flops"] == file_validator.flops(batch())
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


def test_a_group_falls_with_its_member_and_the_node_with_it(stand):
    bad = list(batch())
    tokens = bad[3].tokens.copy()
    tokens[-2] = (tokens[-2] + 1) % 256
    bad[3] = doubles.signed(bad[3], tokens=tokens)
    sha = stand.put("a.parquet", bad, doubles.NODE)
    status = stand.ask("a.parquet", sha)
    assert status.status == "reject" and list(status.reasons) == [0]
    assert status.failing_indices == tuple(range(8))  # the first group; the second is sound, and not done again
    assert status.tasks == f"3:{bad[8].task.group}"
    assert stand.node(doubles.NODE) == (70, 1, 1, True) and stand.ledger.state.works[sha].units == 0
    assert ledgers.verify(stand.folder / "ledger.db").error is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_service_ends_in_order(tmp_path, monkeypatch, number):
    exp = doubles.experiment(prompts=2)
    config = json.loads(exp.config.to_json())
    config["topology"]["server_keys"], config["trust"]["bands"] = ["5e" * 32], ""
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    closed, pulled, key = [], [], run_directory.signing_key(tmp_path).worker
    own = rollout_lib.WorkerKey.load(run_directory.worker_key_file(tmp_path, "worker0")).worker
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
    assert [type(one) for one in closed] == [routes.validator_service.Service, scorer.Scorer]
    (checker,) = made
    vouched = [dataclasses.replace(one, server="5e" * 32) for one in file_validator.group()]
    # A worker does not answer for the claims of a registered server.
    assert {one.worker for one in checker.evidence.attributed(vouched)} == {"5e" * 32}
    # Statistics notify of the run's own workers, and convict strangers.
    claims = [dataclasses.replace(one, logprobs=one.logprobs - one.sampled_mask) for one in file_validator.group()]
    claims = [dataclasses.replace(one, logprobs=one.logprobs.astype(np.float32)) for one in claims]
    for worker, expected in ((own, "ok"), ("0" * 64, "statistics")):
        found = checker.evidence.add_claims([dataclasses.replace(one, worker=worker) for one in claims])
        assert {verdict.reason for verdict in found} == {expected}
    with contextlib.suppress(AttributeError):  # the false pull returns nothing with params
        checker.check_groups_with_weights([[dataclasses.replace(one, versions=one.versions + 3) for one in vouched]])
    assert pulled == [(("http://relay:1", 3), {"base": None, "key": key, "digest": ""})]
    (file,) = tmp_path.glob("validator-*.db")  # of the key, so that several validators may share a folder
    validator_state.State(file, f"run {key[:16]}, no ledger").close()
