"""One HTTP GET from one relay: a byte range into a given buffer, or a small reply, and the threads that run such requests.

Any thread may abort a request at any time.
"""

import bisect
import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import itertools
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from sharding.system import retries
from sharding.system import text as text_lib
from sharding.weights.format import journal

SLICE_BYTES = 256 << 10  # written to the buffer between two checks for an abort
HEDGE_FLOOR_S = 0.3  # no range is hedged earlier: a second request costs the relays as much as the first
HEDGE_UNMEASURED_S = 1.0
COUNTERS = ("num_bytes", "num_objects", "num_bad_objects", "num_resumed", "num_hedges", "num_hedges_won")


@dataclasses.dataclass(frozen=True)
class Options:
    """The timeouts and concurrency of downloads from relays. Directories and buckets ignore all of these options."""

    patience_s: float = 60.0  # a read fails after this, plus the time for its size at relays.MIN_BYTES_PER_S
    connect_s: float = 5.0
    stall_s: float = 10.0  # silence on an open connection
    range_bytes: int = 8 << 20  # an object is requested in ranges of this size
    parallel: int = 16  # requests in flight, over all objects
    seed: int | None = None  # of the relay selection


class Target:
    """The memory that receives a downloaded object: one or more writable buffers, addressed as one byte string.

    Raises ValueError unless the buffers `views` fit the object `entry`, if given.
    """

    def __init__(self, views: Sequence[memoryview], entry: journal.Object | None = None):
        self.views = [memoryview(view).cast("B") for view in views if len(view)]
        self._starts = list(itertools.accumulate(map(len, self.views), initial=0))
        if entry is not None and len(self) != entry.size:
            text = f"object {entry.path} has {entry.size} bytes, the views {len(self)}; pass views of that size"
            raise ValueError(text)
        if entry is not None:
            journal.check_path(entry.path)

    def __len__(self) -> int:
        return self._starts[-1]

    def view(self, start: int, limit: int) -> memoryview:
        """Returns a writable view of up to `limit` bytes from byte `start`; fewer if its buffer ends before."""
        i = bisect.bisect_right(self._starts, start) - 1
        offset = start - self._starts[i]
        return self.views[i][offset : offset + limit]

    def put(self, start: int, data: memoryview) -> None:
        """Copies `data` into the buffers, from byte `start` of the joined buffers on."""
        while data:
            view = self.view(start, len(data))
            view[:] = data[: len(view)]
            start, data = start + len(view), data[len(view) :]


ABORTED = "this client aborted its request: the bytes came from another relay, or are no longer needed"


class Failed(Exception):
    """Raised by a request to a relay that did not deliver all bytes. Callers inside sharding/weights/download retry or report it."""

    retry_after_s = 0.0


class Missing(Failed):
    """Raised by a request that a relay answered with 404, or with the digest of another file: it does not have the file, or not yet."""


class TooLong(Failed):
    """Raised by a request whose answer is longer than allowed: another file, such as one that was published again."""


class Relay:
    """One relay (a server of published weights) as a client sees it: measured speed and failures, and idle connections."""

    def __init__(self, url: str, options: Options):
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise ValueError(f"relay {url!r} is not a URL such as http://host:port; correct the URL")
        self.url, self.options = url.rstrip("/"), options
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect = functools.partial(kind, host, parts.port, timeout=options.connect_s)
        self.prefix = parts.path.rstrip("/")
        self.claims: tuple[tuple[int, ...], tuple[int, ...], bytes | None] = (), (), None  # complete, partial, head
        self.tag, self.is_alive, self.reason = "", False, ""
        self.refused: journal.CorruptSource | None = None  # the error of its head
        # time.monotonic() since when its newest version is older than the accepted head's, and the error
        self.stale: tuple[float, str] | None = None
        self.cursors: dict[int, tuple[str, int]] = {}  # version -> epoch of the relay's journal, entries read
        self.success = 1.0
        self.bytes_per_s: float | None = None
        self.num_bytes = self.num_requests = self.num_failures = self.num_lies = 0
        self.failure_pauses, self.corruption_pauses = retries.Backoff(0.1, 5.0), retries.Backoff(1.0, 60.0)
        self.suspended_s = 0.0  # until when no request is sent to it
        self.lacking_s: dict[int, float] = {}  # version -> until when it is assumed not to have it
        self._idle: list[http.client.HTTPConnection] = []
        self.is_closed = False

    def ready_s(self, version: int) -> float:
        """Returns the monotonic clock time from which this relay may be sent requests for `version` again."""
        return max(self.suspended_s, self.lacking_s.get(version, 0.0))

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """Returns (connection to this relay, True if the connection was used before, so the relay may have closed it)."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            return self._idle.pop(), True
        return self._connect(), False

    def give(self, connection: http.client.HTTPConnection) -> None:
        """Stores an idle connection for the next request to this relay, or closes it if the relay object is closed."""
        self._idle.append(connection)
        if self.is_closed:
            self.close()

    def close(self) -> None:
        """Closes the idle connections to this relay, and later those given back. Requests that begin later raise Failed."""
        self.is_closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


@dataclasses.dataclass(eq=False)
class Get:
    """One HTTP GET of `path` from `relay`: bytes [start, stop) of `total` into `target`, or a reply of at most `limit` bytes.

    Byte `start` is written to `origin` of `target`. Without a `target`, `run` returns the reply. `rival` is the other
    request for the same bytes if one of the two hedges the other. `extra_s` is added to the time that the relay may be silent.
    `digest` is that of the object in `target`: a relay whose ETag names another one may have a version that a resumed run published.
    """

    relay: Relay
    path: str
    start: int = 0
    stop: int = 0
    total: int = 0
    target: Target | None = None
    origin: int = 0
    rival: "Get | None" = None
    limit: int = 0
    extra_s: float = 0.0
    digest: str = ""

    def __post_init__(self):
        self.is_hedge, self.received = self.rival is not None, 0
        self._begun_s: float | None = None
        self._ended_s: float | None = None
        self._aborted = False
        self._writing = threading.Lock()
        self._socket: socket.socket | None = None

    @property
    def seconds(self) -> float:
        """The seconds that this request has run so far, or in total if it has ended; 0 before it begins."""
        return 0.0 if self._begun_s is None else (self._ended_s or time.monotonic()) - self._begun_s

    def run(self) -> tuple[bytes, Any]:
        """Runs this request. Returns (body, headers); the body is empty if `target` received it. Blocks. Raises Failed."""
        self._begun_s = time.monotonic()
        try:
            while True:
                if self._aborted or self.relay.is_closed:
                    raise Failed(ABORTED)
                connection, used = self.relay.take()
                try:
                    return self._exchange(connection)
                except (Failed, OSError, http.client.HTTPException, ValueError) as error:
                    connection.close()
                    if isinstance(error, Failed):
                        raise
                    if self._aborted:
                        raise Failed(ABORTED) from error
                    if not used or self.received:
                        raise Failed(f"the request failed: {type(error).__name__}: {error}") from error
                    # The relay probably closed this idle connection; each turn uses up one of these.
        finally:
            self._socket, self._ended_s = None, time.monotonic()

    def abort(self) -> None:
        """Aborts this request, whose `run` raises Failed. No byte is written to `target` after `abort` returns."""
        self._aborted = True
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):  # closed already
                sock.shutdown(socket.SHUT_RDWR)
        with self._writing:
            pass

    def is_straggling(self, relays: list[Relay]) -> bool:
        """Returns True if this request is slow: another of `relays` would probably deliver the rest in half of the time."""
        others = [r for r in relays if r is not self.relay]
        rates = [r.bytes_per_s for r in others if r.bytes_per_s]
        elapsed_s, size = self.seconds, self.stop - self.start
        is_slow = elapsed_s > HEDGE_UNMEASURED_S and self.received / elapsed_s * 10 < size
        if is_slow and len(rates) < max(1, len(others)):
            return True  # the measured ones may be those that drip
        if not rates:
            return False
        expected_s = 0.1 + size / max(rates)
        if elapsed_s < max(HEDGE_FLOOR_S, 2 * expected_s):
            return False
        left = size - self.received
        return left * elapsed_s > 2 * self.received * (0.1 + left / max(rates))

    def _exchange(self, connection: http.client.HTTPConnection) -> tuple[bytes, Any]:
        if connection.sock is None:
            connection.connect()
        self._socket = connection.sock
        assert self._socket is not None
        self._socket.settimeout(self.relay.options.stall_s + self.extra_s)
        if self._aborted:
            raise Failed(ABORTED)
        headers = {"Range": f"bytes={self.start}-{self.stop - 1}"} if self.target is not None else {}
        connection.request("GET", self.relay.prefix + self.path, headers=headers)
        with connection.getresponse() as response:  # it may own the socket: then `connection.close` would not close it
            etag = response.headers.get("ETag", "").strip('"')
            if self.digest and text_lib.is_hex(etag) and etag != self.digest:  # others are of no relay of ours
                raise Missing(f"the relay has another {self.path}, with digest {etag}, not {self.digest}")
            if response.status not in (200, 206):
                raise _refusal(response)
            body = self._read_body(response) if self.target is None else self._receive(response, self.target)
            reusable = not response.will_close
        if reusable and not self._aborted:
            self.relay.give(connection)
        else:
            connection.close()
        return body, response.headers

    def _read_body(self, response: http.client.HTTPResponse) -> bytes:
        body = bytearray()
        while data := response.read1(1 << 16):
            body += data
            if len(body) > self.limit:
                raise TooLong(f"the relay sent more than {self.limit} bytes for {self.path}")
        if response.length:
            raise Failed(f"the relay closed the connection {response.length} bytes before the end of {self.path}")
        return bytes(body)

    def _receive(self, response: http.client.HTTPResponse, target: Target) -> bytes:
        size = self.stop - self.start
        expected = f"bytes {self.start}-{self.stop - 1}/{self.total}"
        got = response.headers.get("Content-Range")
        if response.status == 206 and got != expected:
            raise Failed(f"the relay sent range {got!r} of {self.path}, not {expected!r}")
        if response.status == 200 and size != self.total:
            raise Failed(f"the relay ignores the Range header for {self.path}; use a relay that supports it")
        if response.length != size:
            raise Failed(f"the relay sends {response.length} bytes of {self.path}, not the {size} that were requested")
        while self.received < size:
            with self._writing:
                if self._aborted:
                    raise Failed(ABORTED)
                limit = min(SLICE_BYTES, size - self.received)
                n = response.readinto(target.view(self.origin + self.received, limit))
                self.received += n
            if n == 0:
                raise Failed(f"the relay closed the connection after {self.received} of {size} bytes of {self.path}")
        return b""


def _refusal(response: http.client.HTTPResponse) -> Failed:
    text = response.read1(200).decode(errors="replace").strip()
    error = (Missing if response.status == 404 else Failed)(f"HTTP {response.status} {text}")
    after = response.headers.get("Retry-After", "")
    if response.status in (429, 503) and after.isdigit():
        error.retry_after_s = float(after[:4])
    return error


class RequestPool:
    """Threads that run requests to relays, and counters of their results. Thread-safe."""

    def __init__(self, parallel: int, num_relays: int):
        # Separate threads: hedges must not queue after requests that hang, nor small replies after ranges.
        sizes = {"range": parallel, "hedge": parallel, "small": 4 * num_relays + 4}
        self._threads = {name: concurrent.futures.ThreadPoolExecutor(n, f"weights-{name}") for name, n in sizes.items()}
        self._lock = threading.Lock()
        self._counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.is_closed = False

    def submit(self, get: Get, handler: Callable[[Get], Any] = Get.run) -> concurrent.futures.Future:
        """Runs `handler(get)` in a thread and returns its future. Raises Unavailable after `close`."""
        kind = "small" if get.target is None else "hedge" if get.is_hedge else "range"
        try:
            return self._threads[kind].submit(handler, get)
        except RuntimeError as error:  # it was shut down
            raise journal.Unavailable(f"the source was closed before {get.path} was read; open it again") from error

    def count(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to the counter `name`, one of `COUNTERS`."""
        with self._lock:
            self._counters[name] += amount

    def counters(self) -> dict[str, int]:
        """Returns the value of each counter by name."""
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        """Makes `submit` raise from now on, without blocking. The threads end when the running requests have ended."""
        self.is_closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False)
