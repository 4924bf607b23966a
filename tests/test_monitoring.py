"""The dashboard and the alerts of examples/monitoring name metrics that exist, and each alert fires for its cause."""

import json
import pathlib
import re
import shutil
import subprocess

import prometheus_client
import pytest
import yaml

from docs import catalog, pages
from inference.rollouts import rollout as rollout_lib
from rl import worker
from rl.reporting import monitors
from rl.validator import routes
from sharding.relay import server as relay_lib
from sharding.system import sockets
from tests.support import scrapes

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples" / "monitoring"
KNOWN = {name for names in catalog.SCRAPES.values() for name in names}
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
# By alert, series (promtool's notation, a value each minute) that cause it, and the time at which it fires.
CAUSES = {
    "NodeDown": (['up{job="worker", instance="a"} 1 0x10'], "5m"),
    "RunStalled": (['intellax_learner_step{instance="a"} 7x60'], "50m"),
    "NoServer": (['intellax_orchestrator_nodes{instance="a", name="server_healthy"} 1 0x30'], "20m"),
    "ServerBehind": (
        ["intellax_orchestrator_policy_version 9x30", 'intellax:policy_version{instance="a"} 5x30']
        + ['intellax_orchestrator_nodes{name="server_healthy"} 1x30'],
        "10m",
    ),
    "ServerFaults": (['intellax:faults_total{instance="a"} 0 0 0 2x30'], "10m"),
    "RequestsQueue": (["vllm:num_requests_waiting 200x60", "vllm:num_requests_running 8x60"], "30m"),
    "RolloutsRejected": (
        ['intellax_orchestrator_rollouts_total{name="accepted", instance="a"} 0+10x60']
        + ['intellax_orchestrator_rollouts_total{name="refused", instance="a"} 0+2x60'],
        "30m",
    ),
    "SamplerMismatch": (['intellax_learner_metric{name="loss/mismatch_kl"} 0.5x60'], "20m"),
    "NoSignal": (['intellax_learner_metric{name="rollout/zero_advantage_frac"} 0.95x60'], "40m"),
    "RewardErrors": (
        ['intellax_orchestrator_environment_errors_total{name="math"} 0+3x60']
        + ['intellax_orchestrator_environment_rollouts_total{name="math"} 0+10x60'],
        "30m",
    ),
    "RelayCutOff": (['intellax_relay_upstream_alive{instance="a"} 0x60'], "10m"),
}


def queries():
    panels = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return panels + [(rule["alert"], rule["expr"]) for rule in ALERTS]


@pytest.mark.parametrize(("title", "query"), queries())
def test_a_query_names_metrics_that_a_role_has(title, query):
    named = set(re.findall(r"\b(?:intellax|vllm)[a-z0-9_:]*", query))
    assert named <= KNOWN | {f"{name}_{part}" for name in KNOWN for part in ("bucket", "sum", "count")}
    for name in re.findall(r'intellax_learner_metric\{name="([^"]*)"', query):
        assert catalog.describe(name), name


def test_most_metrics_are_watched():
    everything = " ".join(query for _, query in queries())
    histograms = {name for name in KNOWN if name.endswith("_seconds")}
    assert [name for name in histograms if name not in everything and "e2e" not in name] == []


def test_the_registries_of_roles_have_the_metrics_that_are_described(tmp_path):
    learner = monitors.Prometheus()
    own = worker.Worker("http://127.0.0.1:9", rollout_lib.WorkerKey.generate(), concurrency=1, give_up_s=1.0)
    with sockets.listen("127.0.0.1", 0) as sock:
        relay = relay_lib.Relay([str(tmp_path)], None, sock)
        found = {"learner": learner.metrics, "worker": own.metrics, "relay": relay._metrics}
        for role, registry in found.items():
            assert scrapes.names(prometheus_client.generate_latest(registry).decode()) == catalog.SCRAPES[role].keys()
        relay.close()


def test_a_validator_has_the_metrics_that_are_described():
    text = scrapes.get(routes.make_app(None), "/metrics")
    assert scrapes.names(text) == catalog.SCRAPES["validator"].keys()


def test_the_page_of_metrics_is_that_of_the_catalog():
    written = (pages.DOCS / "metrics.md").read_text()
    assert written == pages.pages()["metrics.md"], "write it again: python -m docs.pages"


def test_each_alert_has_a_cause_under_test():
    assert CAUSES.keys() == {rule["alert"] for rule in ALERTS}
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in ALERTS)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")
def test_each_alert_fires_once_for_its_cause_alone(tmp_path):
    tests = []
    for name, (series, at) in CAUSES.items():
        inputs = [
            dict(zip(("series", "values"), one.split("} ") if "} " in one else one.split(" ", 1), strict=True))
            for one in series
        ]
        for one in inputs:
            one["series"] += "}" * ("{" in one["series"])
        tests.append(
            {
                "interval": "1m",
                "input_series": inputs,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertstate="firing", alertname="{name}"}})',
                        "eval_time": at,
                        "exp_samples": [{"value": 1}],
                    },
                    {
                        "expr": f'count(ALERTS{{alertstate="firing", alertname!="{name}"}})',
                        "eval_time": at,
                        "exp_samples": [],
                    },
                ],
            }
        )
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    result = subprocess.run(["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
