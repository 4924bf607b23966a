"""Serves published weights over HTTP, as a relay: a process that mirrors them from other relays, a directory or a bucket.

The mirror (sharding/weights/relay/mirror.py) downloads and verifies objects, the store (sharding/weights/relay/store.py) keeps them. An object is
served as soon as it is verified, to other relays as well: objects flow down a tree of any depth before the manifest exists.
The manifest is served once all its objects are. If the upstreams are gone or the disk is full, complete versions are still served.

Served bytes are not hashed again: a hash per request would cost more than all other work of a relay. Clients hash all they
read: they download a damaged object from another relay, and count it against this one.

Routes: /versions (with `wait`), /head.jsonl, /v00000012/objects.jsonl (with `wait`), /v00000012/manifest.json, /v00000012/<object> (with
Range), /metrics (Prometheus), /health. A thread per connection: an idle client blocks no other, and sendfile moves bytes from
the page cache to the socket.
"""

import collections
import contextlib
import dataclasses
import errno
import http
import json
import os
import re
import socket
import threading
import time
import urllib.parse
from typing import Any

import prometheus_client

from sharding.system import sockets
from sharding.system.logs import role_metrics
from sharding.weights.download import range_get, source
from sharding.weights.format import head as head_lib
from sharding.weights.format import journal
from sharding.weights.relay import mirror as mirror_lib
from sharding.weights.relay import store as store_lib
from sharding.weights.relay import throttle

HEAD_BYTES = 8 << 10
HEAD_S = 10.0  # for the head of a request, from its first byte
IDLE_S = 60.0  # for a connection without a request, or whose client does not read the response
MAX_WAIT_S = 30.0
SLICE_BYTES = 256 << 10  # sent between two checks of the budgets, if there are any
MORE = getattr(socket, "MSG_MORE", 0)  # joins the head of a response with its body; only Linux has it


class Relay:
    """One relay: a store of verified objects, the mirror that fills it, and the HTTP server that answers GET and HEAD requests.

    The arguments are those of `python -m sharding.relay`. Without `directory`, the directory `upstream` is served in place: the
    origin next to the learner. `close` closes the listening `sock`. `options` are those of downloads from the upstreams.
    Raises ValueError if an argument is invalid, or if another relay writes to `directory`.
    """

    def __init__(
        self,
        upstream: list[str],
        directory: str | None,
        sock: socket.socket,
        *,
        keep: int = 5,
        max_bytes: int | None = None,
        trusted_key: str | None = None,
        limits: throttle.Limits | None = None,
        options: range_get.Options | None = None,
    ):
        self.url = sockets.address(sock)
        if keep < 1:
            raise ValueError(f"keep = {keep} must be at least 1; raise it")
        if self.url in upstream:
            raise ValueError(f"upstream {self.url} is this relay itself; give the URL of another one")
        floor = None if directory is None else os.path.join(directory, head_lib.NAME)  # in place it is the publisher's
        trusted = None if trusted_key is None else head_lib.HeadVerifier(trusted_key, floor)
        opened = source.open(upstream, trusted_key=trusted, options=options)
        is_directory = isinstance(opened, source.Directory)
        if directory is None and not is_directory:
            raise ValueError(f"upstream {upstream} is not a directory and cannot be served in place; give --dir")
        if directory is not None and is_directory and os.path.realpath(directory) == os.path.realpath(upstream[0]):
            raise ValueError(f"--dir {directory} is the upstream itself; leave --dir out to serve it in place")
        root = upstream[0] if directory is None else directory
        self.store = store_lib.Store(root, in_place=directory is None, max_bytes=max_bytes)
        self.mirror = mirror_lib.Mirror(self.store, opened, keep, trusted)
        self.counters = collections.Counter()
        self._metrics = role_metrics.RoleMetrics("relay", self._values)
        self._socket, self._throttle = sock, throttle.Throttle(limits or throttle.Limits())
        self._lock = threading.RLock()  # reentrant: a signal handler may call `stop` at any point
        self._open: set[socket.socket] = set()
        self._is_closing = False

    def run(self) -> None:
        """Accepts connections and answers each in a thread of its own. Blocks until `stop` or `close`."""
        while not self._is_closing:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._is_closing or error.errno == errno.EBADF:
                    return
                time.sleep(0.1)  # no file descriptor left: the next connection that ends frees one
                continue
            client = _Client(connection, address[0])
            refused = self._throttle.admit(client.address)
            if refused is None:
                try:
                    threading.Thread(target=self._serve, args=[client], daemon=True).start()
                except RuntimeError:  # the system has no thread left: as without a file descriptor
                    self._throttle.leave(client.address)
                    connection.close()
                    time.sleep(0.1)
            else:
                self._count(f"refused_{refused}")
                with contextlib.suppress(OSError), connection:
                    connection.settimeout(0.1)
                    client.answer(403 if refused == "address" else 503, b"refused\n")

    def close(self) -> None:
        """Ends the relay: all connections, the mirror's thread, and the lock on the directory. Blocks for at most 30 s."""
        self.stop()
        self.store.close()
        self.mirror.stop()

    def stop(self) -> None:
        """Stops accepting connections and ends the open ones, so that `run` returns. Does not block: for signal handlers, too."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def progress(self) -> tuple[dict[str, int], str]:
        """Returns ({name: count so far}, the thing that the mirror waits for)."""
        counts = {"versions": self.mirror.log.counters["versions"], "requests": self.counters["requests_200"]}
        return counts, "a newer version" if self.mirror.health()["upstream"] else "an upstream that answers"

    def report(self) -> dict[str, Any]:
        """Returns the content of a heartbeat (rl/protocol/registry.py)."""
        health, held = self.mirror.health(), self.store.complete()
        policy = {"epoch": max(0, health["epoch"]), "version": held[-1], "digest": ""} if held else None
        return {"url": self.url, "policy": policy, "problem": health["error"]}

    def _serve(self, client: "_Client") -> None:
        with self._lock:
            self._open.add(client.sock)
        try:
            client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received, client.keep_alive = b"", True
            while client.keep_alive and not self._is_closing:
                received = _receive(client.sock, received)
                if received is None:
                    return
                client.sock.settimeout(IDLE_S)
                if len(received) > HEAD_BYTES:
                    client.is_head = client.keep_alive = False
                    client.answer(400, b"the request's head is too long\n")
                    return
                head, _, received = received.partition(b"\r\n\r\n")
                self._count(f"requests_{self._reply(client, head)}")
        except OSError:
            self._count("broken_connections")  # the client closed the connection or does not read
        finally:
            client.sock.close()
            with self._lock:
                self._open.discard(client.sock)
            self._throttle.leave(client.address)

    def _reply(self, client: "_Client", head: bytes) -> int:
        """Answers the request with this `head` (request line and headers); returns the HTTP status."""
        lines = head.decode("latin-1").split("\r\n")
        match = re.fullmatch(r"([A-Z]+) (/[!-~]*) HTTP/1\.([01])", lines[0])
        fields = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        client.is_head = client.keep_alive = False
        if match is None or headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return client.answer(400, b"only GET and HEAD without a body are supported\n")
        method, target, minor = match.groups()
        wait_s = self._throttle.book_request(client.address)
        if method not in ("GET", "HEAD"):
            return client.answer(405, b"GET or HEAD\n", {"Allow": "GET, HEAD"})
        client.is_head = method == "HEAD"
        client.keep_alive = headers.get("connection", "keep-alive" if minor == "1" else "close").lower() == "keep-alive"
        if wait_s > 0:
            return client.answer(429, b"too many requests\n", {"Retry-After": str(int(wait_s) + 1)})
        return self._route(client, target, headers.get("range", ""))

    def _route(self, client: "_Client", target: str, range_: str) -> int:
        path, _, query = target.partition("?")
        options = dict(urllib.parse.parse_qsl(query))
        match = re.fullmatch(r"/(v[0-9]+)/(.+)", urllib.parse.unquote(path))
        number, name = (journal.parse_dirname(match[1]), match[2]) if match else (None, "")
        wait, body, headers = options.get("wait", ""), None, {}
        wait_s = min(float(wait), MAX_WAIT_S) if re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", wait) else 0.0
        if path == "/versions":
            listing = self.store.listing(options.get("tag", ""), wait_s)
            if listing["complete"] or not self.store.is_recovering:
                body = json.dumps(listing).encode()
        elif path == f"/{head_lib.NAME}":
            body = self.store.head
        elif path == "/":
            body = b"a relay of policy versions; its routes are /versions, /health, and /metrics\n"
        elif path == "/metrics":
            body = prometheus_client.generate_latest(self._metrics)  # pyright: ignore  # it only calls `collect`
        elif path == "/health":
            mirror = self.mirror.health()
            status = "failing" if mirror["since"] else "recovering" if self.store.is_recovering else "ok"
            lines = {"status": status, "complete": self.store.complete(), "waiting_for": self.progress()[1]}
            body = json.dumps(lines | mirror).encode()
        elif number is not None and name == "manifest.json":
            body = self.store.manifest(number)
        elif number is not None and name == "objects.jsonl":
            after = int(options["after"]) if re.fullmatch("[0-9]{1,9}", options.get("after", "")) else 0
            body, headers = self.store.entries(number, options.get("epoch", ""), after, wait_s) or (None, {})
        elif number is not None and (found := self.store.object(number, name)):
            with contextlib.suppress(FileNotFoundError):  # removed in this moment
                with open(found[0], "rb", buffering=0) as file:
                    # Else the file may be of a version that came in its place.
                    if self.store.object(number, name) == found:
                        return self._send(client, file, found[1], range_)
        if body is not None:
            return client.answer(200, body, headers)
        if self.store.is_recovering:
            return client.answer(503, b"still checking the files on disk\n", {"Retry-After": "1"})
        return client.answer(404, b"not here, or not yet\n")

    def _send(self, client: "_Client", file, entry: journal.Object, range_: str) -> int:
        """Sends the object `entry` from the open `file`, or a range of it, within the rate limits; returns the HTTP status."""
        start, stop, status = 0, entry.size, 200
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{entry.digest}"'}
        match = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", range_)
        if match is not None and match[0] != "bytes=-":
            status = 206
            if match[1]:
                start = int(match[1])
                stop = min(stop, int(match[2]) + 1) if match[2] else stop
            else:
                start = max(0, stop - int(match[2]))
            if start >= stop:
                return client.answer(416, b"", headers | {"Content-Range": f"bytes */{entry.size}"})
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{entry.size}"
        has_body = not client.is_head and start < stop
        client.sock.sendall(client.head(status, stop - start, headers), MORE if has_body else 0)
        step = SLICE_BYTES if self._throttle.is_limited else max(1, stop - start)
        while start < stop and has_body:
            count = min(step, stop - start)
            wait_s = self._throttle.book_bytes(client.address, count) if self._throttle.is_limited else 0.0
            if wait_s > 0:
                self._count("throttled_ms", round(1000 * wait_s))
                time.sleep(wait_s)
            sent = client.sock.sendfile(file, start, count)
            self._count("sent_bytes", sent)
            if sent != count:  # the client gets a broken connection
                raise OSError(f"file of {entry.path} is shorter than {entry.size} bytes")
            start += count
        return status

    def _values(self) -> role_metrics.Values:
        complete, relays = self.store.complete(), self.mirror.source.stats().get("relays", {})
        fields = ("success", "bytes_per_s", "num_failures", "num_lies")
        return {
            "complete_versions": len(complete),
            "newest_version": max(complete, default=-1),
            "disk_bytes": self.store.num_bytes,
            "connections": self._throttle.num_connections,
            "upstream_alive": int(self.mirror.is_upstream_alive),
            "served_total": dict(self.counters),
            "mirrored_total": dict(self.mirror.log.counters),
            **{f"upstream_{f.removeprefix('num_')}": {url: s[f] or 0 for url, s in relays.items()} for f in fields},
        }

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counters[name] += amount


@dataclasses.dataclass
class _Client:
    """One connection, and the properties of its current request that shape the response."""

    sock: socket.socket
    address: str
    is_head: bool = False
    keep_alive: bool = False

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> int:
        """Sends a response whose `body` is in memory; returns `status`, the HTTP status."""
        head = self.head(status, len(body), headers or {})
        self.sock.sendall(head if self.is_head else head + body)
        return status

    def head(self, status: int, length: int, headers: dict[str, str]) -> bytes:
        """Returns the status line and the headers of a response with a body of `length` bytes."""
        headers = headers | {"Content-Length": str(length)} | ({} if self.keep_alive else {"Connection": "close"})
        lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def _receive(sock: socket.socket, received: bytes) -> bytes | None:
    """Returns `received` and more bytes, with a whole request head or too many; None if the client closed the connection."""
    deadline_s = time.monotonic() + HEAD_S
    sock.settimeout(IDLE_S)
    while b"\r\n\r\n" not in received and len(received) <= HEAD_BYTES:
        if received:  # a request that has begun must end soon, even if it comes byte by byte
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        data = sock.recv(HEAD_BYTES)
        if not data:
            return None
        deadline_s = deadline_s if received else time.monotonic() + HEAD_S
        received += data
    return received
