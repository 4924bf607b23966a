"""The rate of requests that a network may send to an orchestrator."""

import itertools

RATE, BURST = 100.0, 200.0  # requests per second of a network, and how many may come together
MAX_NETWORKS = 2**16  # whose rate is known


class RequestRate:
    """The rate of requests of each network: a token bucket of `BURST` requests that refills by `RATE` per second."""

    def __init__(self):
        self._buckets: dict[str, tuple[float, float]] = {}  # network -> requests left, and when; the latest last

    def take(self, network: str, now_s: float, count: float = 1.0) -> bool:
        """Counts a request that costs as much as `count` small ones; returns False if the network sent too many."""
        left, since_s = self._buckets.pop(network, (BURST, now_s))
        left = min(BURST, left + (now_s - since_s) * RATE) - count
        self._buckets[network] = max(left, 0.0), now_s
        for oldest in list(itertools.islice(self._buckets, 2)):  # full again, or one too many
            if now_s - self._buckets[oldest][1] > BURST / RATE or len(self._buckets) > MAX_NETWORKS:
                del self._buckets[oldest]
        return left >= 0

    def give_back(self, network: str, count: float = 1.0) -> None:
        """Takes back the `count` of one request: that of a worker which is known."""
        if network in self._buckets:
            left, since_s = self._buckets[network]
            self._buckets[network] = min(BURST, left + count), since_s
