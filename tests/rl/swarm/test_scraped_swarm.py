"""A stock Prometheus scrapes a swarm of seven processes: every panel and alert finds its metrics."""

import json
import pathlib
import shutil
import signal
import socket
import subprocess

import httpx
import pytest
import yaml

from tests import test_monitoring
from tests.rl.swarm import test_swarm
from tests.support import proxy

# Panels whose metrics a healthy swarm on a CPU does not have.
MAY_BE_EMPTY = {"machine/mfu", "machine/device_memory_peak_bytes", "loss/sampler_kl"}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (Debian: prometheus)")
def test_every_panel_of_the_dashboard_has_data_and_no_alert_fires(tmp_path):
    workdir, log = tmp_path / "w", (tmp_path / "log").open("wb")
    options = ["--servers=2", "--relays=1", "--workers=2", "--validators=1"]
    swarm = test_swarm.start(workdir, log, *options, rl__num_steps=400, evaluation__every=5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "2s"}, "rule_files": ["alerts.yml"]}
    targets = {"files": [str(workdir / "targets.json")], "refresh_interval": "1s"}  # there is none yet
    config["scrape_configs"] = [{"job_name": "swarm", "file_sd_configs": [targets]}]
    shutil.copy(test_monitoring.FOLDER / "alerts.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    prometheus = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)

    def ask(path, **params):
        try:
            return httpx.get(f"http://{address}/api/v1/{path}", params=params, timeout=10).json()["data"]
        except (httpx.HTTPError, KeyError, ValueError):
            return {}

    def is_empty(query):
        return not ask("query", query=query.replace("$__rate_interval", "2m")).get("result")

    try:
        proxy.wait_until(lambda: len(test_swarm.steps(workdir)) >= 12, 500, (tmp_path / "log").read_text()[-2000:])
        roles = ["learner", "relay", "server", "server", "validator", "worker", "worker"]
        up = lambda: ask("query", query="up == 1").get("result", [])  # noqa: E731
        proxy.wait_until(lambda: sorted(one["metric"]["role"] for one in up()) == roles, 60, "seven processes")
        proxy.wait_until(lambda: not [title for title, query in panels() if is_empty(query)], 60)
        state = {rule["name"]: rule["state"] for group in ask("rules")["groups"] for rule in group["rules"]}
        assert {state.pop(name) for name in [*state]} <= {"inactive", "pending"}
        assert all(rule["health"] == "ok" for group in ask("rules")["groups"] for rule in group["rules"])
    finally:
        prometheus.kill()
        prometheus.wait()
        swarm.send_signal(signal.SIGTERM)
        swarm.wait(60)
        log.close()


def panels():
    alerts = {rule["alert"] for rule in test_monitoring.ALERTS}
    found = [(title, query) for title, query in test_monitoring.queries() if title not in alerts]
    return [(title, query) for title, query in found if not any(name in query for name in MAY_BE_EMPTY)]


def test_targets_name_the_jobs_that_the_dashboard_needs(tmp_path):
    jobs = {
        one["job_name"]
        for one in yaml.safe_load((test_monitoring.FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert jobs == test_monitoring.catalog.SCRAPES.keys() - {"orchestrator"}
    assert json.loads(pathlib.Path(test_monitoring.FOLDER / "dashboard.json").read_text())["uid"] == "intellax-run"
