"""Chooses a server for each request of a client: by load, by prefix, and never one that just failed. Imports no jax.

1. The load of a server is the number of requests of this client in flight, plus those of others that its last report had.
2. Among servers of about the same load, a key of the request (`sticky`) decides: requests of one episode find its prefix in the
   cache of their server, and clients that know nothing of each other spread evenly.
3. A server that fails is left alone for a while, for twice as long each time (a circuit breaker). Then one request tries it.

Pure: without a clock or I/O.
"""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

FIRST_PAUSE_S, MAX_PAUSE_S, BUSY_S = 0.25, 30.0, 1.0
SLACK = 1.25  # servers with up to this times the least load, and one request more, count as equal


@dataclasses.dataclass
class _Server:
    keys: frozenset[str] = frozenset()  # public; "" if one of those who name this URL has none
    limit: int = 0  # of requests of this client at the same time; 0: none
    version: float = math.inf  # of the policy that it has at least; infinity: unknown
    load_of_others: float = 0.0
    in_flight: int = 0
    num_failures: int = 0  # in a row
    free_s: float = -math.inf  # not used before
    problem: str = ""
    is_listed: bool = True  # by the newest list


class ServerChoice:
    """The servers of a client by URL, and the choice among them."""

    def __init__(self, urls: Sequence[str] = (), keys: Mapping[str, str] | None = None):
        """Starts with the servers at `urls`; `keys` has the public keys of some."""
        self._servers = {url.rstrip("/"): _Server() for url in urls}
        for url, key in (keys or {}).items():
            if server := self._servers.get(url.rstrip("/")):
                server.keys = frozenset({key})

    def tell(self, servers: Sequence[Mapping]) -> None:
        """Replaces the servers by those of a list: each has "url", maybe "key", "limit", "version", and "load" of all clients.

        Several entries may name one URL, and any of their keys may then sign its samples. Otherwise a forged entry could take the place
        of an honest server.
        """
        known, self._servers = self._servers, {}
        for listed in servers:
            url = str(listed["url"]).rstrip("/")
            key, limit, is_first = str(listed.get("key", "")), int(listed.get("limit", 0)), url not in self._servers
            server = self._servers[url] = known.pop(url, _Server()) if is_first else self._servers[url]
            if key or not is_first:
                server.keys = frozenset({key}) if is_first else (server.keys or frozenset({""})) | {key}
            server.limit, server.is_listed = limit if is_first else max(server.limit, limit), True
            if "version" in listed:
                known_version = -1 if math.isinf(server.version) else server.version
                server.version = max(known_version, int(listed["version"]))
            server.load_of_others = max(0.0, float(listed.get("load", 0)) - server.in_flight)
        for url, server in known.items():
            if server.in_flight:  # forgotten when its last request ends
                server.is_listed, self._servers[url] = False, server

    def urls(self) -> list[str]:
        """Returns the URLs of the servers in the newest list."""
        return [url for url, server in self._servers.items() if server.is_listed]

    def keys(self, url: str) -> frozenset[str]:
        """Returns the public keys that may sign the samples of a server: none if it signs none, and "" if it need not."""
        return self._servers[url].keys if url in self._servers else frozenset()

    def choose(
        self,
        now_s: float,
        *,
        num_samples: int = 1,
        sticky: str = "",
        min_version: int = 0,
        tried: Mapping[str, int] | None = None,
        avoid: Collection[str] = (),
    ) -> str | None:
        """Returns the URL of a server for a request of `num_samples`; None if each fails, is busy, is in `avoid`, or has a version below `min_version`.

        Chosen are the servers that the request tried least often (`tried` counts by URL), and of these the ones with nearly the least
        load. Equal `sticky` keys get the same one of them where possible; without a key it is the first.
        """
        times = collections.Counter(tried or {})
        found = {
            url: (times[url], server.in_flight + server.load_of_others)
            for url, server in self._servers.items()
            if server.is_listed
            and url not in avoid
            and server.version >= min_version
            and now_s >= server.free_s
            and not (server.num_failures and server.in_flight)  # its one probe
            and not (server.limit and server.in_flight and server.in_flight + num_samples > server.limit)
        }
        if not found:
            return None
        least_tried, least_load = min(found.values())
        most_load = least_load * SLACK + 1
        equal = [url for url, (num_tried, load) in found.items() if num_tried == least_tried and load <= most_load]
        return max(equal, key=lambda url: hashlib.sha256(f"{sticky}\0{url}".encode()).digest()) if sticky else equal[0]

    def begin(self, url: str, num_samples: int = 1) -> None:
        """Records that a request of `num_samples` is sent to a server."""
        self._servers[url].in_flight += num_samples

    def end(
        self, url: str, now_s: float, num_samples: int = 1, *, problem: str | None = "", is_busy: bool = False
    ) -> None:
        """Records the end of a request: a reply, a `problem` of the server (None: cancelled by us), or a server that `is_busy`."""
        server = self._servers[url]
        server.in_flight -= num_samples
        if not server.in_flight and not server.is_listed:
            del self._servers[url]
        if is_busy:
            server.free_s = max(server.free_s, now_s + BUSY_S)
        elif problem:
            self.fail(url, now_s, problem)
        elif problem is not None:
            server.num_failures, server.free_s, server.problem = 0, -math.inf, ""

    def fail(self, url: str, now_s: float, problem: str) -> None:
        """Leaves a server alone for a while. Requests that fail together count once."""
        if (server := self._servers.get(url)) is None:
            return
        if now_s >= server.free_s:
            server.free_s = now_s + min(FIRST_PAUSE_S * 2**server.num_failures, MAX_PAUSE_S)
            server.num_failures = min(server.num_failures + 1, 16)
        server.problem = problem

    def lags(self, url: str, version: int) -> None:
        """Records that a server has an older policy than expected: `version`."""
        if url in self._servers:
            self._servers[url].version = version

    def outage(self) -> str:
        """Returns a line with the error of each server if all fail, or if there is none; else ""."""
        problems = [server.problem for server in [*self._servers.values()] if server.is_listed]
        return "" if problems and not all(problems) else self.problems() or "none is named by the orchestrator"

    def problems(self) -> str:
        """Returns a line on the servers that fail, "" if none does."""
        return "; ".join(f"{url}: {server.problem}" for url, server in [*self._servers.items()] if server.problem)
