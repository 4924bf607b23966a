"""One GET from one relay: a range into a given buffer, or a small answer. It can be cut off from any thread, at any time."""

import bisect
import collections
import dataclasses
import http.client
import itertools
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from sharding.format import digests, journal

SLICE_BYTES = 256 << 10  # what one call may write into the buffer before it looks whether it was cut off
HEDGE_FLOOR_S = 0.3  # no range is doubled earlier: a second request costs the relays as much as the first
HEDGE_UNMEASURED_S = 1.0


@dataclasses.dataclass(frozen=True)
class Options:
    """How long to wait and how wide to fetch; only relays use all of it."""

    patience_s: float = 60.0  # a read fails after this, plus the object's size at MIN_BYTES_PER_S
    connect_s: float = 5.0
    stall_s: float = 10.0  # silence on an open connection
    range_bytes: int = 8 << 20
    parallel: int = 16  # requests in flight, over all objects
    seed: int | None = None  # of the relay choice


class Target:
    """Writable bytes in one or several pieces, addressed as one: where an object is received."""

    @classmethod
    def of(cls, entry: journal.Object, views: Sequence[memoryview]) -> "Target":
        """For a read of `entry`; ValueError where that is no object, or the views are not of its size."""
        target = cls(views)
        if not journal.is_object_path(entry.path):
            raise ValueError(f"object path {entry.path!r} is no path of plain segments")
        if len(target) != entry.size:
            raise ValueError(f"{entry.path} has {entry.size} bytes: pass views of as many together, not {len(target)}")
        return target

    def __init__(self, views: Sequence[memoryview]):
        self._views = [memoryview(view).cast("B") for view in views if len(view)]
        self._starts = list(itertools.accumulate(map(len, self._views), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def at(self, start: int, most: int) -> memoryview:
        """From `start`, as far as one piece goes, at most `most` bytes."""
        i = bisect.bisect_right(self._starts, start) - 1
        offset = start - self._starts[i]
        return self._views[i][offset : offset + most]

    def put(self, start: int, data: memoryview) -> None:
        while data:
            view = self.at(start, len(data))
            view[:] = data[: len(view)]
            start, data = start + len(view), data[len(view) :]

    def copy(self) -> bytes:
        return b"".join(self._views)

    def digest(self) -> str:
        return digests.of(*self._views)


class Failed(Exception):
    """A request that brought nothing, or not all; never seen outside."""

    retry_after_s = 0.0


class Missing(Failed):
    """404: this relay does not have it, or not yet."""


class Relay:
    """What is known of one relay, and its idle connections."""

    def __init__(self, url: str, options: Options):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"relay {url!r} is no URL such as http://host:port")
        self.url, self.options = url.rstrip("/"), options
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect: Callable = lambda: kind(parts.hostname, parts.port, timeout=options.connect_s)
        self.prefix = parts.path.rstrip("/")
        self.listing, self.tag, self.is_alive, self.reason = journal.Listing(), "", False, ""
        self.cursors: dict[int, tuple[str, int]] = {}  # version -> epoch of the relay's journal, entries read
        self.success, self.bytes_per_s = 1.0, None
        self.num_bytes = self.num_requests = self.num_failures = self.num_lies = self.failures_in_a_row = 0
        self.suspended_s = 0.0
        self.lacking_s: dict[int, float] = {}
        self._idle: collections.deque = collections.deque()
        self.is_closed = False

    def ready_s(self, version: int) -> float:
        return max(self.suspended_s, self.lacking_s.get(version, 0.0))

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """(A connection, whether it was used before and may have been closed by the relay since.)"""
        try:
            return self._idle.pop(), True
        except IndexError:
            return self._connect(), False

    def give(self, connection: http.client.HTTPConnection) -> None:
        self._idle.append(connection)
        if self.is_closed:
            self.close()

    def close(self) -> None:
        self.is_closed = True
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return


class Get:
    """One GET: a range into `target`, or a small answer of at most `limit` bytes. Can be cut off from any thread."""

    def __init__(
        self,
        relay: Relay,
        name: str,
        *,
        start=0,
        stop=0,
        total=0,
        target=None,
        origin=0,
        twin=None,
        limit=0,
        extra_s=0.0,
    ):
        self.relay, self.name = relay, name
        self.start, self.stop, self.total, self.target, self.limit = start, stop, total, target, limit
        self._origin = origin  # where in the target the byte `start` belongs
        self.twin, self.is_hedge = twin, twin is not None
        self.received = 0
        self.begun_s = self.ended_s = None
        self._extra_s = extra_s
        self._aborted = False
        self._writing = threading.Lock()
        self._socket: socket.socket | None = None

    @property
    def seconds(self) -> float:
        return 0.0 if self.begun_s is None else (self.ended_s or time.monotonic()) - self.begun_s

    def run(self) -> tuple[bytes, Any]:
        """(Body, headers); the body is empty for a range, which is in `target` then. Raises `Failed` only."""
        self.begun_s = time.monotonic()
        try:
            if self._aborted or self.relay.is_closed:
                raise Failed("cut off")
            return self._try()
        finally:
            self.ended_s = time.monotonic()

    def abort(self) -> None:
        """No byte is written to `target` after this returns."""
        self._aborted = True
        sock = self._socket
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already
        with self._writing:
            pass

    def is_straggling(self, relays: list[Relay]) -> bool:
        """Whether another relay would most likely deliver the rest before this one does."""
        if self.begun_s is None:
            return False
        rates = [r.bytes_per_s for r in relays if r is not self.relay and r.bytes_per_s]
        elapsed_s, size = self.seconds, self.stop - self.start
        if not rates:
            return elapsed_s > HEDGE_UNMEASURED_S and self.received / elapsed_s * 10 < size
        expected_s = 0.1 + size / max(rates)
        if elapsed_s < max(HEDGE_FLOOR_S, 2 * expected_s):
            return False
        left = size - self.received
        return left * elapsed_s > 2 * self.received * (0.1 + left / max(rates))

    def _try(self) -> tuple[bytes, Any]:
        while True:
            connection, used = self.relay.take()
            try:
                return self._exchange(connection)
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                if self._aborted:
                    raise Failed("cut off") from error
                if used and not self.received:
                    continue  # most likely closed while idle; each turn takes one such connection away
                raise Failed(f"{type(error).__name__}: {error}") from error
            except Failed:
                connection.close()
                raise
            finally:
                self._socket = None

    def _exchange(self, connection: http.client.HTTPConnection) -> tuple[bytes, Any]:
        options = self.relay.options
        if connection.sock is None:
            connection.connect()
        self._socket = connection.sock
        self._socket.settimeout(options.stall_s + self._extra_s)
        if self._aborted:
            raise Failed("cut off")
        headers = {"Range": f"bytes={self.start}-{self.stop - 1}"} if self.target is not None else {}
        connection.request("GET", self.relay.prefix + self.name, headers=headers)
        with connection.getresponse() as response:  # it may own the socket: then `connection.close` would not close it
            if response.status not in (200, 206):
                self._refused(response)
            body = self._body(response) if self.target is None else self._receive(response)
            reusable = not response.will_close
        if reusable and not self._aborted:
            self.relay.give(connection)
        else:
            connection.close()
        return body, response.headers

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        body = bytearray()
        while chunk := response.read1(1 << 16):
            body += chunk
            if len(body) > self.limit:
                raise Failed(f"answered {self.name} with more than {self.limit} bytes")
        if response.length:
            raise Failed(f"closed {response.length} bytes before the end of {self.name}")
        return bytes(body)

    def _receive(self, response: http.client.HTTPResponse) -> bytes:
        self._check_range(response)
        size = self.stop - self.start
        while self.received < size:
            with self._writing:
                if self._aborted:
                    raise Failed("cut off")
                most = min(SLICE_BYTES, size - self.received)
                n = response.readinto(self.target.at(self._origin + self.received, most))
                self.received += n
            if n == 0:
                raise Failed(f"closed after {self.received} of {size} bytes of {self.name}")
        return b""

    def _check_range(self, response: http.client.HTTPResponse) -> None:
        size = self.stop - self.start
        expected = f"bytes {self.start}-{self.stop - 1}/{self.total}"
        got = response.headers.get("Content-Range")
        if response.status == 206 and got != expected:
            raise Failed(f"answered {got!r} where {expected!r} of {self.name} was asked for")
        if response.status == 200 and size != self.total:
            raise Failed("ignores Range: serve it with a server that does not")
        if response.length != size:
            raise Failed(f"has {response.length} bytes where {size} of {self.name} were asked for")

    def _refused(self, response: http.client.HTTPResponse) -> None:
        words = response.read1(200).decode(errors="replace").strip()
        error = (Missing if response.status == 404 else Failed)(f"HTTP {response.status} {words}")
        after = response.headers.get("Retry-After", "")
        if response.status in (429, 503) and after.isdigit():
            error.retry_after_s = float(after[:4])
        raise error
