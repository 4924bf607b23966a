"""Selects the relay for the next request by the results of the earlier ones.

A relay is drawn with probability proportional to success rate x bandwidth, as in SHARDCAST. Both are exponential moving
averages. The success rate recovers a little whenever another relay is used, and no weight is 0, so a relay that works again
is found. In addition, a failure suspends a relay for a moment that doubles, a 404 marks it as lacking a version for a moment,
and a corrupt reply sets its success rate to 0 and suspends it for longer each time.
"""

import random
import threading
import time
from collections.abc import Collection
from typing import Any

from sharding.weights.download import range_get

EMA = 0.3  # weight of the newest observation
HEALING = 0.01  # added to a relay's success rate whenever another relay is used
EXPLORE = 0.02  # least weight, relative to the best: one request in fifty finds out that a relay works again
RATE_SAMPLE_BYTES = 64 << 10  # smaller replies measure the latency, not the bandwidth
STATS = ("success", "bytes_per_s", "num_bytes", "num_requests", "num_failures", "num_lies", "is_alive", "reason")


class RelaySelector:
    """Selects the relay for each request at random, favoring fast and reliable ones, from measurements. Thread-safe."""

    def __init__(self, relays: list[range_get.Relay], seed: int | None):
        self.relays = relays
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def select(
        self, version: int, avoid: Collection[range_get.Relay] = (), *, wait: bool = True
    ) -> range_get.Relay | None:
        """Returns a relay to request `version` from that is not in `avoid`, or None if `avoid` has all relays.

        If every such relay is suspended or lacks the version, sleeps for up to 1 s and returns the relay that is ready first.
        With `wait=False` returns None immediately instead.
        """
        allowed = [r for r in self.relays if r not in avoid]
        with self._lock:
            now_s = time.monotonic()
            ready = [r for r in allowed if r.ready_s(version) <= now_s]
            if ready:
                measured = [r.bytes_per_s for r in ready if r.bytes_per_s is not None]
                fastest = max(measured, default=1.0)  # also of relays without a measurement, so that they get one
                weights = [r.success * (fastest if r.bytes_per_s is None else r.bytes_per_s) for r in ready]
                floor = max(EXPLORE * max(weights), 1e-9)
                return self._random.choices(ready, [max(w, floor) for w in weights])[0]
        if not allowed or not wait:
            return None
        relay = min(allowed, key=lambda r: r.ready_s(version))
        time.sleep(min(1.0, max(0.0, relay.ready_s(version) - time.monotonic())))
        return relay

    def observe(self, get: range_get.Get, succeeded: bool | None) -> None:
        """Updates a relay's success rate and speed with one request; only the speed if `succeeded` is None (aborted)."""
        relay, num_bytes, seconds = get.relay, get.received, get.seconds
        with self._lock:
            relay.num_bytes += num_bytes
            if num_bytes >= RATE_SAMPLE_BYTES or (not succeeded and seconds > 0.5):
                rate = num_bytes / max(seconds, 1e-6)
                relay.bytes_per_s = rate if relay.bytes_per_s is None else (1 - EMA) * relay.bytes_per_s + EMA * rate
            if succeeded is None:
                return
            relay.success = (1 - EMA) * relay.success + EMA * succeeded
            relay.num_requests += 1
            for other in self.relays:
                if other is not relay:
                    other.success = min(1.0, other.success + HEALING)
            if succeeded:
                relay.failure_pauses.reset()
            else:
                relay.num_failures += 1
                relay.suspended_s = time.monotonic() + relay.failure_pauses.next_s()

    def record_failure(self, get: range_get.Get, error: range_get.Failed, version: int | None = None) -> None:
        """Records a failed request, and suspends its relay for a moment: after a 404, only for requests of `version`."""
        relay = get.relay
        relay.reason = str(error)
        if isinstance(error, range_get.Missing):
            if version is not None:
                relay.lacking_s[version] = time.monotonic() + 0.3  # it may be on its way there
            return
        self.observe(get, False)
        if error.retry_after_s:
            with self._lock:
                relay.suspended_s = max(relay.suspended_s, time.monotonic() + min(error.retry_after_s, 5.0))

    def record_corrupt(self, relay: range_get.Relay, reason: str) -> None:
        """Records that a relay delivered bytes that are provably not the published ones, and suspends the relay."""
        with self._lock:
            relay.num_lies += 1
            relay.success = 0.0
            relay.reason = reason
            relay.suspended_s = time.monotonic() + relay.corruption_pauses.next_s()

    def stats(self) -> dict[str, Any]:
        """Returns the measurements of each relay, the fields `STATS`, by the relay's URL."""
        with self._lock:
            return {relay.url: {name: getattr(relay, name) for name in STATS} for relay in self.relays}

    def urls(self) -> str:
        """Returns the URLs of all relays as one text, for error messages."""
        return ", ".join(relay.url for relay in self.relays)

    def reasons(self) -> str:
        """Returns the last failure of each relay as one text, for error messages."""
        return "; ".join(f"{relay.url}: {relay.reason or 'no reply'}" for relay in self.relays)
