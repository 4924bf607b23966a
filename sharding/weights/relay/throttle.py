"""Limits the clients of a relay: an allow list, and budgets of bytes, requests and connections per client address.

A budget is a virtual clock: sending n bytes at rate r moves it n / r seconds ahead, and a sender sleeps until the clock is at
most `BURST_S` ahead of time. Addresses are those of the sockets: a relay after a reverse proxy has one client, and needs the
proxy's own limits. IPv6 clients are counted by their /64, which is assigned to one subscriber.
"""

import dataclasses
import ipaddress
import math
import threading
import time
from collections.abc import Callable, Sequence

from sharding.system import sockets

BURST_S = 0.25  # bytes of a quarter second are sent immediately: small objects need no sleep
BURST_REQUESTS = 10


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a relay. None is unlimited; `allow` lists networks such as "10.0.0.0/8", and allows all if empty."""

    client_bytes_per_s: float | None = None
    total_bytes_per_s: float | None = None
    client_requests_per_s: float | None = None
    max_connections: int = 1024  # a thread each: 1024 blocked threads use about 60 MB
    max_connections_per_client: int = 256
    allow: Sequence[str] = ()

    def __post_init__(self):
        for name in ("client_bytes_per_s", "total_bytes_per_s", "client_requests_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} = {value} must be a positive number; leave it out for no limit")
        for name in ("max_connections", "max_connections_per_client"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1; raise it")
        for network in self.allow:
            _network(network)


class Throttle:
    """Applies the `limits` of a relay to its clients. Thread-safe. `clock` returns monotonic seconds."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic):
        self.limits = limits
        self.is_limited = limits.client_bytes_per_s is not None or limits.total_bytes_per_s is not None
        self.num_connections = 0
        self._allow = [_network(network) for network in limits.allow]
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._total = _Budget(limits.total_bytes_per_s)

    def admit(self, address: str) -> str | None:
        """Counts a connection from `address` until `leave`; returns None, or the exceeded limit if it is rejected."""
        parsed, key = ipaddress.ip_address(sockets.network(address, 128)), sockets.network(address)
        if self._allow and not any(parsed.version == n.version and parsed in n for n in self._allow):
            return "address"
        with self._lock:
            if self.num_connections >= self.limits.max_connections:
                return "connections"
            if key not in self._clients:
                # Other clients are forgotten now, so that the table has those of the last moments, not of all time.
                now_s = self._clock()
                self._clients = {k: c for k, c in self._clients.items() if c.num_connections or c.debt_until_s >= now_s}
                rates = self.limits.client_bytes_per_s, self.limits.client_requests_per_s
                self._clients[key] = _Client(_Budget(rates[0]), _Budget(rates[1]))
            free = self.limits.max_connections - self.num_connections  # else four clients could take all
            if self._clients[key].num_connections >= min(free, self.limits.max_connections_per_client):
                return "client_connections"
            self._clients[key].num_connections += 1
            self.num_connections += 1
            return None

    def leave(self, address: str) -> None:
        """Ends a connection that `admit` counted for the client at `address`."""
        with self._lock:
            self._clients[sockets.network(address)].num_connections -= 1
            self.num_connections -= 1

    def book_request(self, address: str) -> float:
        """Counts a request and returns 0; above the client's rate, returns the seconds until it may be repeated."""
        with self._lock:
            budget = self._clients[sockets.network(address)].requests
            most_s = max(BURST_REQUESTS / budget.rate, BURST_S)
            return max(0.0, budget.book(1, self._clock(), most_s) - most_s)

    def book_bytes(self, address: str, num_bytes: int) -> float:
        """Counts `num_bytes` to the client at `address`; returns the seconds to sleep before sending them."""
        with self._lock:
            now_s = self._clock()
            budgets = self._clients[sockets.network(address)].bytes, self._total
            return max(0.0, *(budget.book(num_bytes, now_s) - BURST_S for budget in budgets))


class _Budget:
    """The budget of one rate limit: a virtual clock, at which all booked amounts are used up. `rate` None is unlimited."""

    def __init__(self, rate: float | None):
        self.rate = rate or math.inf
        self.clock_s = -math.inf

    def book(self, amount: float, now_s: float, most_s: float = math.inf) -> float:
        """Returns the seconds that the clock is ahead with `amount`, which is booked unless they exceed `most_s`."""
        ahead_s = max(self.clock_s - now_s, 0.0) + amount / self.rate
        if ahead_s <= most_s:
            self.clock_s = now_s + ahead_s
        return ahead_s


@dataclasses.dataclass
class _Client:
    bytes: _Budget
    requests: _Budget
    num_connections: int = 0

    @property
    def debt_until_s(self) -> float:
        return max(self.bytes.clock_s, self.requests.clock_s)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        found = f"allow entry {text!r} is not an address or network ({error})"
        raise ValueError(f"{found}; write it as 10.0.0.0/8, for example") from error
