"""The gate of an orchestrator: which requests it answers, by the network that sends them and the key that signed them.

1. A network may send so many requests per second. Those of invited workers do not count, and those of known ones little.
2. A request is signed in this session (rl/protocol/lease.py), by a worker that the policy of the run admits, or by another node that the
   run named.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection

import fastapi

from inference.server import web
from rl.protocol import lease as lease_lib

RATE, BURST = 100.0, 200.0  # requests per second of a network, and how many may come together
MAX_NETWORKS = 2**16  # whose rate is known


class Admission:
    """Decides which keys may lease, by the rule of the run for strangers (`trust.admission`).

    `invited` are public keys; `stake(worker)` is a key's stake; a proof of work includes the key of the `run`. `policy` is the rule with its
    numbers, as workers read it. An empty rule means "invited" if `topology.workers` names keys, else "open".
    """

    def __init__(self, config, run: str, invited: Collection[str], stake: Callable[[str], int]):
        self._run, self._invited, self._stake, trust = run, frozenset(invited), stake, config.trust
        self.kind = trust.admission or ("invited" if config.topology.workers else "open")
        self.policy = {"kind": self.kind, "min_stake": trust.min_stake, "work_bits": trust.work_bits}

    def admit(self, worker: str, request: dict) -> None:
        """Raises ValueError if the policy of the run does not let this key take part.

        Judged are requests with the field "work", which are leases and heartbeats; all others pass. The proof of work in this field is
        checked only under the policy "work".
        """
        if worker in self._invited or self.kind == "open" or "work" not in request:
            return
        if self.kind == "invited":
            raise ValueError(f"worker {worker[:16]} is not in topology.workers; ask the operator of the run to add it")
        least, num_bits = self.policy["min_stake"], self.policy["work_bits"]
        if self.kind == "stake" and (stake := self._stake(worker)) < least:
            raise ValueError(f"worker {worker[:16]} has a stake of {stake}, and this run asks for {least}; stake more")
        if self.kind == "work" and not lease_lib.is_work(self._run, worker, request["work"], num_bits):
            found = f"worker {worker[:16]} sent {request['work']!r}, which is not a proof of work of {num_bits} bits"
            raise ValueError(f"{found} for this run; compute one for the run and the key")


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
        """Takes back the cost `count` of a request that `take` counted against a network, because a known worker sent it."""
        if network in self._buckets:
            left, since_s = self._buckets[network]
            self._buckets[network] = min(BURST, left + count), since_s


@dataclasses.dataclass
class Gate:
    """Admits requests that are signed in this session by a key that may take part, at a limited rate for each network."""

    session: lease_lib.Session
    admission: Admission
    is_invited: Callable[[str], bool]  # True for a worker that config or launcher named
    # True for an invited worker, one with a record, and another node that the run named
    is_known: Callable[[str], bool]
    may_sign_in: Callable[[str, str], bool]  # (key, role) -> True for a server, relay, or validator that the run named

    def __post_init__(self) -> None:
        self._rate, self._known_rate = RequestRate(), RequestRate()
        self._verifier = lease_lib.RequestVerifier(self.session, admit=self._admit, is_known=self.is_known)

    def limit_rate(self, request: fastapi.Request, count: float = 1.0) -> str:
        """Counts a request against its client's network, and returns the network. Raises HTTPException 429 if the network sent too many.

        The request costs as much as `count` small ones.
        """
        network = web.client_network(request)
        if not self._rate.take(network, time.monotonic(), count):
            message = f"your network sent more than {RATE:.0f} requests per second; send fewer"
            raise fastapi.HTTPException(429, web.error_body(429, message, "overloaded"), {"retry-after": "1"})
        return network

    def verify(self, message: dict, kind: str, network: str, count: float = 1.0) -> str:
        """Returns the public key of the node that signed the request `message` of a `kind`. Raises ValueError, as `RequestVerifier.verify` does.

        The request's cost, `count`, is given back to the `network` if the node is invited, or known and below a limit of its own.
        """
        node = self._verifier.verify(message, kind)
        # Such as many workers on one machine. A record is cheap, so strangers that have one have limits of their own.
        if self.is_invited(node) or (self.is_known(node) and self._known_rate.take(node, time.monotonic(), count)):
            self._rate.give_back(network, count)
        return node

    def _admit(self, key: str, message: dict) -> None:
        if key == self.session.run:
            return  # the operator
        if message.get("role", "worker") == "worker":
            self.admission.admit(key, message)
        elif not self.may_sign_in(key, message["role"]):
            found = f"{message['role']} {key[:16]} is not in topology.server_keys"
            raise ValueError(f"{found}; ask the operator of the run to add it")
