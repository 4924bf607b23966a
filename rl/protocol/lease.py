"""Signed lease requests: a worker can only lease groups under its own key. Imports no jax.

The worker signs its key, the number of groups, and the time, with the key that will sign its rollouts. The orchestrator rejects
requests that are not newer than the worker's previous one, so that a copied request is useless.
"""

import re
import time

from inference.rollouts import rollout as rollout_lib

MAX_CLOCK_SKEW_S = 300.0
MAX_CAPACITY = 4096
_last_s = 0.0  # returned last by `steady_time`


def steady_time() -> float:
    """Returns the Unix time in seconds, but always later than in the previous call, even if the clock was set back.

    The monotonic clock is not used: it stops while a laptop sleeps, and the worker's requests would be too old forever.
    """
    global _last_s
    _last_s = max(_last_s + 2e-6, time.time())  # two: float64 resolves 0.24 us, so one could round to the same us
    return _last_s


def request(key: rollout_lib.WorkerKey, capacity: int, *, clock=steady_time) -> dict:
    """Returns the signed JSON body of a `POST /lease` request for up to `capacity` groups."""
    time_us = int(clock() * 1e6)
    signature = key.private.sign(_text(key.worker, capacity, time_us)).hex()
    return {"worker": key.worker, "capacity": capacity, "time_us": time_us, "signature": signature}


class LeaseVerifier:
    """Verifies signed lease requests. Each request of a worker must be newer than the one before, so that copies are rejected.

    `invited` are the public keys (hex) of the workers that may lease groups; if it is empty, any worker may.
    """

    def __init__(self, invited=(), *, clock=time.time):
        self._invited, self._clock = frozenset(invited), clock
        self._last_us: dict[str, int] = {}
        self._prune_at = 1024

    def verify(self, body: dict) -> tuple[str, int]:
        """Returns (worker's public key, number of groups requested) of a request body. Raises ValueError to reject it."""
        worker, capacity, time_us, signature = (body.get(x) for x in ("worker", "capacity", "time_us", "signature"))
        if not isinstance(worker, str) or type(capacity) is not int or not 0 < capacity <= MAX_CAPACITY:
            found = f"worker {worker!r:.80} and capacity {capacity!r:.80}"
            raise ValueError(f"lease request has {found}; send a hex public key and an integer in 1..{MAX_CAPACITY}")
        if type(time_us) is not int or not 0 <= time_us < 2**63:
            raise ValueError(f"lease request has time_us {time_us!r:.80}; send an integer in 0..2^63 - 1")
        if not isinstance(signature, str) or not re.fullmatch("([0-9a-fA-F]{2})*", signature):
            raise ValueError(f"lease request has signature {signature!r:.80}; send an ed25519 signature in hex")
        if self._invited and worker not in self._invited:
            raise ValueError(f"worker {worker[:16]} is not in topology.workers; ask the operator of the run to add it")
        now_us = int(self._clock() * 1e6)
        if abs(time_us - now_us) > MAX_CLOCK_SKEW_S * 1e6:
            found = f"{(time_us - now_us) / 1e6:+.0f} s off our clock, at most {MAX_CLOCK_SKEW_S:.0f} s are allowed"
            raise ValueError(f"lease request is dated {found}; set the worker's clock")
        if not rollout_lib.signed(worker, bytes.fromhex(signature), _text(worker, capacity, time_us)):
            raise ValueError(f"lease request is not signed by the key it names, {worker[:16]}; sign it with that key")
        if time_us <= self._last_us.get(worker, 0):
            found = "its time_us is not later than this worker's previous request"
            raise ValueError(f"lease request rejected as a replay: {found}; sign a new one with the current time")
        self._last_us[worker] = time_us
        if len(self._last_us) > self._prune_at:
            oldest_us = now_us - MAX_CLOCK_SKEW_S * 1e6  # a copy of anything older is rejected by its date
            self._last_us = {name: last for name, last in self._last_us.items() if last >= oldest_us}
            self._prune_at = 2 * len(self._last_us) + 1024
        return worker, capacity


def _text(worker: str, capacity: int, time_us: int) -> bytes:
    return f"intellax/lease/{worker}/{capacity}/{time_us}".encode()
