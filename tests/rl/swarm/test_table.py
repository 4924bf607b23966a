"""The table of a swarm: the orchestrator's rows joined with the processes, and nodes from elsewhere."""

import json
import types

from rl.swarm import supervisor
from rl.swarm import table as table_lib


def test_rows_join_what_the_orchestrator_knows_with_the_processes(tmp_path):
    steps = tmp_path / "metrics.jsonl"
    steps.write_text(json.dumps({"phase": "rl", "step": 7, "time/tokens_per_s": 50.0}) + "\n")
    child = types.SimpleNamespace(last_line="started")
    specs = (("learner", child), ("server0", child), ("worker0", child), ("worker1", None))
    nodes = {name: supervisor.Node(supervisor.Spec(name, name.rstrip("01"), []), one) for name, one in specs}
    nodes["worker1"].problem = "worker1 ended"
    row = {"state": "healthy", "policy": "version 6", "groups": 2, "tokens_per_s": 30.0, "problem": ""}
    told = [row | {"role": "server", "key": "s"}, row | {"role": "worker", "key": "w", "policy": ""}]
    told += [row | {"role": "relay", "key": "far0123456789", "state": "suspect", "problem": "no disk"}]
    replies = [{"nodes": told, "waiting_for": "batch 8"}, None]

    def ask():
        if (reply := replies.pop(0)) is None:
            raise OSError("refused")
        return reply

    table = table_lib.Table(nodes, {"server0": "s", "worker0": "w"}, ask, steps, lambda: {"worker0": "stop"})
    assert [[*row.values()] for row in table.rows()] == [
        ["learner", "running", "7", "", "50", "started"],
        ["server0", "healthy", "6", "2", "30", "started"],
        ["worker0", "stop", "", "2", "30", "started"],
        ["worker1", "waiting", "", "", "", "worker1 ended"],
        ["relay far01234", "suspect", "6", "", "", "no disk"],
    ]
    assert table.waiting_for == "batch 8"
    assert [row["state"] for row in table.rows()] == ["running", "running", "stop", "waiting"]
    assert table.waiting_for == "the orchestrator does not reply"
