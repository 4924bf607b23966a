"""Each alert fires once for its cause in real code: promtool gets two scrapes of it, before and after the cause.

A gauge keeps its value after the cause, and a counter grows in each minute as much as it did between the two scrapes.
"""

import contextlib
import json
import shutil
import subprocess
import types

import httpx
import prometheus_client
import pytest
import yaml
from prometheus_client import parser

from inference.scheduler import scheduler as scheduler_lib
from inference.server import status_routes
from rl.experiment.reporting import monitors
from rl.trust.verification import checks
from sharding.system.logs import role_metrics
from tests import test_monitoring
from tests.rl.swarm.orchestrator import test_orchestrator
from tests.support import groups, proxy
from tests.support.orchestrators import inside

make = test_orchestrator.make
MINUTES = 60
STEP = {"time/step_s": 1.0, "loss/mismatch_kl": 0.001, "rollout/zero_advantage_frac": 0.1}


def text_of(*registries):
    return "".join(prometheus_client.generate_latest(one).decode() for one in registries)


def scraped(url):
    """The text of a process, with the `up` that Prometheus adds."""
    try:
        return f"{httpx.get(f'{url}/metrics').text}# TYPE up gauge\nup 1\n"
    except httpx.HTTPError:
        return "# TYPE up gauge\nup 0\n"


def learner(**changes):
    """A learner takes a step whose metrics differ in `changes`, and then no further step."""
    found = monitors.Prometheus()
    found.write(6, "rl", STEP)
    before = text_of(found.metrics)
    found.write(7, "rl", STEP | {name.replace("__", "/"): value for name, value in changes.items()})
    return before, text_of(found.metrics)


def server(**changes):
    """The collector of a server reads a scheduler, whose state then changes."""
    stats = dict.fromkeys(scheduler_lib._STATS.split(), 0)
    slots = types.SimpleNamespace(groups=[None] * 8, running=[], usage=lambda: 0.5)
    state = {"num_pending": 8, "slots": slots, "version": 0, "epoch": 0, "seconds": {}, "stats": stats}
    scheduler = types.SimpleNamespace(**state, prefixes=types.SimpleNamespace(num_bytes=0))
    config = types.SimpleNamespace(num_slots=8, max_model_len=64, num_pages=0)
    parts = {"engine": types.SimpleNamespace(config=config), "update_s": role_metrics.latency("intellax:update", "x")}
    collector = status_routes._Collector(types.SimpleNamespace(scheduler=scheduler, model_name="policy", **parts))
    before = text_of(collector)
    vars(scheduler).update(changes)
    return before, text_of(collector)


def relays(tmp_path):
    """The upstream of a relay ends. Yields the texts of the relay, then those of the upstream."""
    with contextlib.ExitStack() as stack:
        root = tmp_path / "weights"
        root.mkdir()
        upstream = contextlib.ExitStack()
        stack.callback(upstream.close)
        origin = upstream.enter_context(proxy.running(root)).url
        relay = stack.enter_context(proxy.running(origin, tmp_path / "mirror")).url
        is_alive = lambda value: f"intellax_relay_upstream_alive {value}" in scraped(relay)  # noqa: E731
        proxy.wait_until(lambda: is_alive(1.0), 30)
        before = scraped(relay), scraped(origin)
        upstream.close()
        proxy.wait_until(lambda: is_alive(0.0), 60)
        return [*zip(before, (scraped(relay), scraped(origin)), strict=True)]


def orchestrator(make, screen=None, **changes):
    """A worker hands in the three groups of a batch; `changes` are fields of its rollouts."""
    found = make(screen=screen)
    test_orchestrator.publish(found, 0)
    found.nodes.on_served(test_orchestrator.timeline.Policy(0, 0))
    before = text_of(found.metrics)
    for group in test_orchestrator.lease(found):
        if group.split == "train":
            test_orchestrator.submit(found, groups.answers(group, **changes))
    if screen is None:
        found.next_batch(1)
    return before, text_of(found.metrics)


def refuse_one(rollouts, split):
    return (checks.Verdict("logprob"), {}) if rollouts[0].task.group == 2 else (checks.OK, {})


def ahead(make):
    """Servers have version 3 by the orchestrator, and one still serves version 0."""
    found = make()
    before = text_of(found.metrics)
    with found.locked:
        inside(found).version = 3
    return tuple(map("".join, zip((before, text_of(found.metrics)), server(), strict=True)))


CAUSES = {
    "NodeDown": lambda make, tmp_path: relays(tmp_path)[1],
    "RelayCutOff": lambda make, tmp_path: relays(tmp_path)[0],
    "RunStalled": lambda make, tmp_path: learner(),
    "SamplerMismatch": lambda make, tmp_path: learner(loss__mismatch_kl=0.5),
    "NoSignal": lambda make, tmp_path: learner(rollout__zero_advantage_frac=0.95),
    "NoServer": lambda make, tmp_path: ("", text_of(make().metrics)),  # none has signed in
    "ServerBehind": lambda make, tmp_path: ahead(make),
    "ServerFaults": lambda make, tmp_path: server(stats=dict.fromkeys(scheduler_lib._STATS.split(), 0) | {"faults": 2}),
    "RequestsQueue": lambda make, tmp_path: server(num_pending=208),
    "RolloutsRejected": lambda make, tmp_path: orchestrator(make, refuse_one),
    "RewardErrors": lambda make, tmp_path: orchestrator(make, reward=0.0, rewards={"reward": 0.0, "error": 1.0}),
}


def samples(text, names):
    """{series: (True for a counter, value)} of the metrics with these names."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for one in (one for one in family.samples if one.name in names):
            labels = ", ".join(f"{key}={json.dumps(value)}" for key, value in {**one.labels, "instance": "a"}.items())
            found[f"{one.name}{{{labels}}}"] = family.type == "counter", one.value
    return found


def series(before, after, names):
    """The inputs of promtool, a value each minute; the cause comes after five of them."""
    old = samples(before, names)
    for name, (is_counter, value) in samples(after, names).items():
        _, first = old.get(name, (False, 0.0 if is_counter else value))
        then = f"{first:g}+{value - first:g}" if is_counter else f"{value:g}"
        yield {"series": name, "values": f"{first:g}x5 {then}x{MINUTES}"}


def test_each_alert_has_a_cause_here():
    assert CAUSES.keys() == {rule["alert"] for rule in test_monitoring.ALERTS}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("alert", CAUSES)
def test_an_alert_fires_once_for_its_cause_and_not_before(alert, make, tmp_path):
    (rule,) = (rule for rule in test_monitoring.ALERTS if rule["alert"] == alert)
    names = [name for name in {*test_monitoring.KNOWN, "up"} if name in rule["expr"]]
    inputs = [*series(*CAUSES[alert](make, tmp_path), names)]
    assert {one["series"].partition("{")[0] for one in inputs} <= {*names} and inputs
    firing = f'count(ALERTS{{alertstate="firing", alertname="{alert}"}})'
    expected = {"4m": [], f"{MINUTES - 5}m": [{"value": 1}]}
    queries = [{"expr": firing, "eval_time": at, "exp_samples": found} for at, found in expected.items()]
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": queries}]
    shutil.copy(test_monitoring.FOLDER / "alerts.yml", tmp_path)
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    result = subprocess.run(["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr + json.dumps(inputs, indent=1)
