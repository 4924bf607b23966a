"""Which of several relays is asked next, from what became of the requests before.

A relay is drawn with probability proportional to success rate x bandwidth, as SHARDCAST does. Both are exponential moving
averages; the success rate heals a little whenever another relay is used, and no weight is 0, so one that recovered is
found again. Beyond that: a failure suspends a relay for a moment that doubles, a 404 says that it lacks a version for
now, and a lie takes its success to 0 and suspends it for longer each time.
"""

import random
import threading
import time
from collections.abc import Collection
from typing import Any

from sharding.download import range_get

EMA = 0.3  # weight of the newest observation
HEALING = 0.01  # what a relay's success rate regains whenever another one is used
EXPLORE = 0.02  # least weight, relative to the best: one request in fifty finds out that a relay recovered
RATE_SAMPLE_BYTES = 64 << 10  # smaller answers measure the latency, not the bandwidth


class Choice:
    """The relays and what is known of them. Thread-safe."""

    def __init__(self, relays: list[range_get.Relay], seed: int | None):
        self.relays = relays
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def choose(
        self, version: int, avoid: Collection[range_get.Relay] = (), *, wait: bool = True
    ) -> range_get.Relay | None:
        """One that is not in `avoid`. If all are suspended or lack the version: after a sleep the one that is free first.

        None where `avoid` has all, and with `wait=False` also instead of sleeping.
        """
        allowed = [r for r in self.relays if r not in avoid]
        with self._lock:
            now_s = time.monotonic()
            ready = [r for r in allowed if r.ready_s(version) <= now_s]
            if ready:
                known = [r.bytes_per_s for r in ready if r.bytes_per_s is not None]
                fastest = max(known, default=1.0)  # who was never measured counts as the fastest, and so is measured
                weights = [r.success * (fastest if r.bytes_per_s is None else r.bytes_per_s) for r in ready]
                floor = max(EXPLORE * max(weights), 1e-9)
                return self._random.choices(ready, [max(w, floor) for w in weights])[0]
        if not allowed or not wait:
            return None
        relay = min(allowed, key=lambda r: r.ready_s(version))
        time.sleep(min(1.0, max(0.0, relay.ready_s(version) - time.monotonic())))
        return relay

    def observe(self, relay: range_get.Relay, succeeded: bool | None, num_bytes: int, seconds: float) -> None:
        """Moves the averages; `succeeded` None: it was cut off, which tells its speed only."""
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
                relay.failures_in_a_row = 0
            else:
                relay.num_failures += 1
                relay.failures_in_a_row += 1
                relay.suspended_s = time.monotonic() + min(0.05 * 2 ** min(relay.failures_in_a_row, 10), 5.0)

    def failed(
        self,
        relay: range_get.Relay,
        error: range_get.Failed,
        num_bytes: int,
        seconds: float,
        version: int | None = None,
    ) -> None:
        """A request that did not bring what it was for; `version` is what a 404 was about."""
        relay.reason = str(error)
        if isinstance(error, range_get.Missing):
            if version is not None:
                relay.lacking_s[version] = time.monotonic() + 0.3  # it may be on its way there
            return
        self.observe(relay, False, num_bytes, seconds)
        if error.retry_after_s:
            with self._lock:
                relay.suspended_s = max(relay.suspended_s, time.monotonic() + min(error.retry_after_s, 5.0))

    def convict(self, relay: range_get.Relay, reason: str) -> None:
        """It delivered what is provably not what was published: a lie, or a wire that flips bits."""
        with self._lock:
            relay.num_lies += 1
            relay.success = 0.0
            relay.reason = reason
            relay.suspended_s = time.monotonic() + min(0.5 * 2 ** min(relay.num_lies, 10), 60.0)

    def stats(self) -> dict[str, Any]:
        fields = (
            "success",
            "bytes_per_s",
            "num_bytes",
            "num_requests",
            "num_failures",
            "num_lies",
            "is_alive",
            "reason",
        )
        with self._lock:
            return {relay.url: {name: getattr(relay, name) for name in fields} for relay in self.relays}

    def urls(self) -> str:
        return ", ".join(relay.url for relay in self.relays)

    def reasons(self) -> str:
        return "; ".join(f"{relay.url}: {relay.reason or 'no answer'}" for relay in self.relays)
