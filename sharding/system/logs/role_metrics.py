"""The metrics of one process for Prometheus: values that are read at each request, and histograms of latencies."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import prometheus_client
from prometheus_client import core, registry

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
Values = Mapping[str, float | Mapping[str, float]]  # of metrics, or by the value of their one label


def latency(name: str, text: str) -> prometheus_client.Histogram:
    """Returns a histogram of seconds that belongs to no registry. Its `time()` measures a `with` block."""
    return prometheus_client.Histogram(f"{name}_seconds", text, registry=None, buckets=BUCKETS_S)


class RoleMetrics(registry.Collector):
    """The metrics of one role: intellax_<role>_<name>. Those whose name ends in `_total` are counters, others are gauges.

    `read` returns their current values. `latencies` are names of histograms in seconds, each a member of `seconds`.
    """

    def __init__(self, role: str, read: Callable[[], Values], latencies: Sequence[str] = ()):
        self._prefix, self._read = f"intellax_{role}", read
        self.seconds = {name: latency(f"{self._prefix}_{name}", f"Seconds per {name}.") for name in latencies}

    def collect(self) -> Iterator[core.Metric]:
        """Yields the current value of each metric."""
        for name, value in self._read().items():
            family = f"{self._prefix}_{name.removesuffix('_total')}"
            metric = core.Metric(family, name, "counter" if name.endswith("_total") else "gauge")
            for label, number in value.items() if isinstance(value, Mapping) else [("", value)]:
                metric.add_sample(f"{self._prefix}_{name}", {"name": label} if label else {}, number)
            yield metric
        yield from labeled(self.seconds.values(), {})


def labeled(histograms: Iterable[prometheus_client.Histogram], labels: dict[str, str]) -> Iterator[core.Metric]:
    """Yields histograms with more labels, without the times of their creation."""
    for metric in (metric for histogram in histograms for metric in histogram.collect()):
        kept = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        metric.samples = [sample._replace(labels=labels | sample.labels) for sample in kept]
        yield metric
