"""The table of a swarm: the orchestrator's rows joined with the processes, and nodes from elsewhere."""

import json
import types

import yaml

from rl.swarm import session, supervisor
from tests import test_monitoring


def test_rows_join_what_the_orchestrator_knows_with_the_processes(tmp_path):
    steps = tmp_path / "metrics.jsonl"
    steps.write_text(json.dumps({"phase": "rl", "step": 7, "time/tokens_per_s": 50.0}) + "\n")
    child = types.SimpleNamespace(last_line="started")
    specs = (("learner", child), ("server0", child), ("server1", child), ("worker0", child), ("worker1", None))
    nodes = {name: supervisor.Node(supervisor.Spec(name, name.rstrip("01"), []), one) for name, one in specs}
    nodes["learner"].begun_s = nodes["server1"].begun_s = 100.0
    nodes["server0"].begun_s = 50.0
    nodes["worker1"].problem = "worker1 ended"
    numbers = {"groups": 2, "tokens_per_s": 30.0, "beat_ago_s": 1.0}
    row = {"state": "healthy", "policy": "version 6 of epoch 1763905730123", "problem": ""} | numbers
    listed = [row | {"role": "server", "key": "s"}, row | {"role": "worker", "key": "w", "policy": ""}]
    listed += [row | {"role": "server", "key": "t", "state": "dead", "beat_ago_s": 50.0}]  # before it started again
    listed += [row | {"role": "relay", "key": "far0123456789", "state": "suspect", "problem": "no disk"}]
    resumed = [*listed[:1], *listed[2:], listed[1] | {"policy": "version 7 of epoch 1763905830123"}]
    replies = [None, *({"nodes": nodes, "waiting_for": "batch 8"} for nodes in (listed, resumed))]
    replies += [None, None, {"nodes": [], "waiting_for": ""}]

    def ask():
        if (reply := replies.pop(0)) is None:
            raise OSError("refused")
        return reply

    keys = {"server0": "s", "server1": "t", "worker0": "w"}
    table = session.Table(nodes, keys, ask, tmp_path)
    states = lambda now_s: [row["state"] for row in table.rows(now_s)]  # noqa: E731
    assert states(101.0) == ["running", "starting", "starting", "starting", "waiting"]
    assert table.waiting_for == "the orchestrator is starting"
    assert [[*row.values()] for row in table.rows(110.0)] == [
        ["learner", "running", "7", "", "50", "started"],
        ["server0", "healthy", "6", "2", "30", "started"],
        ["server1", "starting", "", "", "", "started"],
        ["worker0", "healthy", "", "2", "30", "started"],
        ["worker1", "waiting", "", "", "", "worker1 ended"],
        ["relay far01234", "suspect", "6", "", "", "no disk"],
    ]
    assert table.waiting_for == "batch 8"
    versions = ["7", "6 (epoch 1)", "", "7 (epoch 2)", "", "6 (epoch 1)"]
    assert [row["version"] for row in table.rows(110.0)] == versions
    assert [table.progress(nodes[name].spec) for name in ("learner", "server0", "server1")] == [7, 50.0, 0.0]
    states(111.0)
    assert table.waiting_for == "the orchestrator does not reply"  # it did before
    table.replied_s = 0.0
    states(701.0)
    assert table.waiting_for == "the orchestrator does not reply"  # for too long
    assert states(701.0) == ["running", "running", "silent", "running", "waiting"]


def test_targets_name_the_jobs_that_the_dashboard_needs():
    configs = yaml.safe_load((test_monitoring.FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert {one["job_name"] for one in configs} == test_monitoring.catalog.SCRAPES.keys() - {"orchestrator"}
    assert json.loads((test_monitoring.FOLDER / "dashboard.json").read_text())["uid"] == "intellax-run"
