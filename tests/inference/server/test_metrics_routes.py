"""Metrics on a port of their own: values, labels, and histograms in Prometheus's text, and the state for people."""

import httpx
import pytest

from inference.server import metrics_routes
from sharding.system.logs import role_metrics


def test_both_routes_are_served_for_several_roles():
    learner = role_metrics.RoleMetrics("learner", lambda: {"metric": {"loss/total": 0.5}, "step": 3})
    worker = role_metrics.RoleMetrics("worker", lambda: {"groups_total": 7}, ["lease"])
    with worker.seconds["lease"].time():
        pass
    health = lambda: {"metrics": httpx.get(f"{url}/metrics").status_code}  # noqa: E731  # one that waits stops no other route
    with metrics_routes.serving("0", health, learner, worker) as url:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "metrics": 200}
    expected = ['intellax_learner_metric{name="loss/total"} 0.5', "intellax_learner_step 3.0"]
    expected += ["intellax_worker_groups_total 7.0", "intellax_worker_lease_seconds_count 1.0"]
    assert {*expected, 'intellax_worker_lease_seconds_bucket{le="+Inf"} 1.0'} <= {*lines}
    assert not any("_created" in line for line in lines)


@pytest.mark.parametrize("address", ["x", "host:", "localhost:70000", "-1"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ValueError, match="give PORT, or HOST:PORT"):
        metrics_routes.listen(address)
