"""A request for work, signed: nobody takes groups under another worker's name. Imports no jax.

1. The worker signs (its key, how many groups, the time) with the key that will sign its rollouts.
2. The orchestrator refuses a key that is not invited, a signature that does not fit, a clock that is too far off, and
   a request that is not newer than the last one of that worker: a copied request buys nothing.
"""

import time

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference.rollouts import rollout as rollout_lib

MAX_CLOCK_SKEW_S = 300.0
MAX_CAPACITY = 4096
_last_s = 0.0  # what `steady_time` said last


def steady_time() -> float:
    """Unix time that never runs back: a clock set back a little must not make the next request look like a copy.

    Not the monotonic clock: that one stands still while a laptop sleeps, and the worker would be late for ever.
    """
    global _last_s
    _last_s = max(_last_s + 2e-6, time.time())  # two: float64 holds the date to 0.24 us, one could round to the same us
    return _last_s


def request(key: rollout_lib.WorkerKey, capacity: int, *, clock=steady_time) -> dict:
    """The JSON body of `POST /lease`."""
    time_us = int(clock() * 1e6)
    signature = key.private.sign(_text(key.worker, capacity, time_us)).hex()
    return {"worker": key.worker, "capacity": capacity, "time_us": time_us, "signature": signature}


class Desk:
    """Checks requests; remembers the last one of each worker for as long as a copy of it could pass.

    Args:
      invited: public keys (hex) that may ask; empty for anybody.
    """

    def __init__(self, invited=(), *, clock=time.time):
        self._invited, self._clock = frozenset(invited), clock
        self._last_us: dict[str, int] = {}
        self._prune_at = 1024

    def read(self, body: dict) -> tuple[str, int]:
        """(worker, capacity) of a body; ValueError says what is wrong with it."""
        worker, capacity, time_us, signature = (body.get(x) for x in ("worker", "capacity", "time_us", "signature"))
        if not isinstance(worker, str) or type(capacity) is not int or not 0 < capacity <= MAX_CAPACITY:
            raise ValueError(f"a lease needs worker (a hex public key) and capacity (an integer in 1..{MAX_CAPACITY})")
        if type(time_us) is not int or not 0 <= time_us < 2**63 or not isinstance(signature, str):
            raise ValueError(
                "a lease needs time_us (an integer in 0..2^63 - 1) and signature (hex), made by the worker's key"
            )
        if self._invited and worker not in self._invited:
            raise ValueError(f"worker {worker[:16]} is not in topology.workers; ask whoever runs the orchestrator")
        now_us = int(self._clock() * 1e6)
        if abs(time_us - now_us) > MAX_CLOCK_SKEW_S * 1e6:
            raise ValueError(
                f"the lease is dated {(time_us - now_us) / 1e6:+.0f} s off our clock, at most {MAX_CLOCK_SKEW_S:.0f} s "
                "are allowed; set the worker's clock"
            )
        if not _signed(worker, capacity, time_us, signature):
            raise ValueError("the lease is not signed by the key it names")
        if time_us <= self._last_us.get(worker, 0):
            raise ValueError("the lease is not newer than the worker's last one: it is a copy")
        self._last_us[worker] = time_us
        if len(self._last_us) > self._prune_at:
            oldest_us = now_us - MAX_CLOCK_SKEW_S * 1e6  # a copy of anything older is refused by its date
            self._last_us = {name: last for name, last in self._last_us.items() if last >= oldest_us}
            self._prune_at = 2 * len(self._last_us) + 1024
        return worker, capacity


def _text(worker: str, capacity: int, time_us: int) -> bytes:
    return f"intellax/lease/{worker}/{capacity}/{time_us}".encode()


def _signed(worker: str, capacity: int, time_us: int, signature: str) -> bool:
    try:
        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(worker))
        public.verify(bytes.fromhex(signature), _text(worker, capacity, time_us))
    except (ValueError, exceptions.InvalidSignature):
        return False
    return True
