"""The dashboard and the alerts of examples/monitoring name metrics that exist; tests/test_alerts.py has the causes of alerts."""

import json
import pathlib
import re

import prometheus_client
import pytest
import yaml
from prometheus_client import parser

from docs import catalog, pages
from inference.rollouts import rollout as rollout_lib
from rl import worker
from rl.experiment.reporting import monitors
from rl.trust.validator import routes
from sharding.system import sockets
from sharding.weights.relay import server as relay_lib
from tests.support import serving

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples" / "monitoring"
KNOWN = {name for names in catalog.SCRAPES.values() for name in names}
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]


def queries():
    panels = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return panels + [(rule["alert"], rule["expr"]) for rule in ALERTS]


def names(text):
    """The names of all metrics in Prometheus's text, counters with _total."""
    found = parser.text_string_to_metric_families(text)
    return {f"{one.name}_total" if one.type == "counter" else one.name for one in found}


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
            assert names(prometheus_client.generate_latest(registry).decode()) == catalog.SCRAPES[role].keys()
        relay.close()


def test_a_validator_has_the_metrics_that_are_described():
    text = serving.asker(routes.make_app(None))("GET", "/metrics").text
    assert names(text) == catalog.SCRAPES["validator"].keys()


def test_the_page_of_metrics_is_that_of_the_catalog():
    written = (pages.DOCS / "metrics.md").read_text()
    assert written == pages.pages()["metrics.md"], "write it again: python -m docs.pages"


def test_each_alert_has_a_summary_and_a_severity():
    assert ALERTS and all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in ALERTS)
