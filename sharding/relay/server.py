"""A verifying mirror of published weights: python -m sharding.relay --upstream URL_OR_DIR... --dir D --port P

1. What a killed relay left in `--dir` is hashed again, newest version first, and served as it is found good.
2. The mirror (`sharding/relay/mirror.py`) asks its upstreams for news, fetches, verifies and stores (`sharding/relay/store.py`).
3. An object is served as soon as it is verified, also to other relays: objects flow down a tree of any depth before the
   manifest exists. The manifest is served when all its objects are.
4. Upstream gone, disk full, a version that is refused: what is complete goes on being served.

With a directory as upstream and no `--dir`, the relay serves that directory in place: the origin beside the learner.

What is served is not hashed again, neither per request nor by a patrol over the disk. Whoever reads hashes anyway, since it
trusts no relay: an object that rotted here is refused there, fetched from another relay, and counted against this one, and the
next start drops it. A hash per request would cost more than all else that a relay does, and only spare honest relays that.

Routes: /versions (with `wait`), /v00000012/objects.jsonl (with `wait`), /v00000012/manifest.json, /v00000012/<object> (with
Range), /metrics (Prometheus), /health. A thread per connection: an idle client blocks nobody, bytes go from the page cache
to the socket by sendfile, and a cold read from disk holds up no other client. A file that is not in the list of verified
objects cannot be named.
"""

import collections
import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
import urllib.parse

from sharding.download import range_get, source
from sharding.format import journal
from sharding.relay import mirror as mirror_lib
from sharding.relay import store as store_lib
from sharding.relay import throttle
from sharding.system import sockets

HEAD_BYTES = 8 << 10
HEAD_S = 10.0  # for the head of a request, from its first byte
IDLE_S = 60.0  # a connection without a request, or without anybody reading the answer
MAX_WAIT_S = 30.0
SLICE_BYTES = 256 << 10  # what is sent between two looks at the budgets, where there are any
STATUS = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    416: "Range Not Satisfiable",
    429: "Too Many Requests",
    503: "Service Unavailable",
}


class Server:
    """Answers GET and HEAD from a store, a thread per connection."""

    def __init__(self, store: store_lib.Store, mirror: mirror_lib.Mirror, sock: socket.socket, limits: throttle.Limits):
        self.counters = collections.Counter()
        self._store, self._mirror, self._socket = store, mirror, sock
        self._throttle = throttle.Throttle(limits)
        self._lock = threading.RLock()  # a signal may call `close` in the midst of anything
        self._open: set[socket.socket] = set()
        self._is_closing = False

    def run(self) -> None:
        """Accepts until `close`."""
        while not self._is_closing:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._is_closing or error.errno == errno.EBADF:
                    return
                time.sleep(0.1)  # out of file descriptors: a connection that ends gives one back
                continue
            refused = self._throttle.admit(address[0])
            if refused is None:
                threading.Thread(target=self._converse, args=(connection, address[0]), daemon=True).start()
            else:
                self._count(f"refused_{refused}")
                with contextlib.suppress(OSError), connection:
                    connection.settimeout(0.1)
                    _answer(connection, 403 if refused == "address" else 503, b"refused\n", close=True)

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _converse(self, connection: socket.socket, address: str) -> None:
        with self._lock:
            self._open.add(connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = b""
            while not self._is_closing:
                connection.settimeout(IDLE_S)
                begun_s = time.monotonic()
                while b"\r\n\r\n" not in received:
                    if received:  # a request that has begun must end soon, at however many bytes at a time
                        connection.settimeout(max(0.001, HEAD_S - (time.monotonic() - begun_s)))
                    data = connection.recv(HEAD_BYTES)
                    if not received:
                        begun_s = time.monotonic()
                    if not data:
                        return
                    received += data
                    if len(received) > HEAD_BYTES:
                        _answer(connection, 400, b"the request's head is too long\n", close=True)
                        return
                connection.settimeout(IDLE_S)
                head, _, received = received.partition(b"\r\n\r\n")
                if not self._reply(connection, address, head):
                    return
        except OSError:
            self._count("broken_connections")  # the client went away, or reads nothing: its business
        finally:
            connection.close()
            with self._lock:
                self._open.discard(connection)
            self._throttle.leave(address)

    def _reply(self, connection: socket.socket, address: str, head: bytes) -> bool:
        """Answers one request; whether the connection can take another."""
        lines = head.decode("latin-1").split("\r\n")
        match = re.fullmatch(r"([A-Z]+) (/[!-~]*) HTTP/1\.([01])", lines[0])
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        if match is None or headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            self._count("requests_400")
            _answer(connection, 400, b"only GET and HEAD without a body are understood\n", close=True)
            return False
        method, target, minor = match.groups()
        keep = headers.get("connection", "keep-alive" if minor == "1" else "close").lower() == "keep-alive"
        wait_s = self._throttle.request(address)
        if method not in ("GET", "HEAD"):
            status = _answer(connection, 405, b"GET or HEAD\n", {"Allow": "GET, HEAD"}, close=True)
            keep = False
        elif wait_s > 0:
            after = {"Retry-After": str(int(wait_s) + 1)}
            status = _answer(connection, 429, b"too many requests\n", after, close=not keep)
        else:
            status = self._route(connection, address, target, headers.get("range", ""), method == "HEAD", not keep)
        self._count(f"requests_{status}")
        return keep

    def _route(self, connection, address: str, target: str, range_: str, is_head: bool, close: bool) -> int:
        path, _, query = target.partition("?")
        wants = dict(urllib.parse.parse_qsl(query))
        number, name = None, ""
        match = re.fullmatch(r"/(v[0-9]+)/(.+)", urllib.parse.unquote(path))
        if match is not None:
            number, name = journal.parse_dirname(match[1]), match[2]
        body, headers = None, {}
        if path == "/versions":
            listing = self._store.listing(wants.get("tag", ""), _seconds(wants.get("wait", "")))
            if listing["complete"] or not self._store.is_recovering:
                body = json.dumps(listing).encode()
        elif path == "/metrics":
            body = self._metrics().encode()
        elif path == "/health":
            body = json.dumps(self._health()).encode()
        elif number is not None and name == "manifest.json":
            body = self._store.manifest(number)
        elif number is not None and name == "objects.jsonl":
            after = int(wants["after"]) if re.fullmatch("[0-9]{1,9}", wants.get("after", "")) else 0
            found = self._store.entries(number, wants.get("epoch", ""), after, _seconds(wants.get("wait", "")))
            if found is not None:
                body, headers = found
        elif number is not None:
            found = self._store.object(number, name)
            if found is not None:
                with contextlib.suppress(FileNotFoundError):  # removed in this moment
                    with open(found[0], "rb", buffering=0) as file:
                        return self._send(connection, address, file, found[1], range_, is_head, close)
        if body is not None:
            return _answer(connection, 200, body, headers, is_head=is_head, close=close)
        if self._store.is_recovering:
            return _answer(connection, 503, b"still checking what is on disk\n", {"Retry-After": "1"}, close=close)
        return _answer(connection, 404, b"not here, or not yet\n", close=close)

    def _send(
        self, connection, address: str, file, entry: journal.Object, range_: str, is_head: bool, close: bool
    ) -> int:
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
                headers["Content-Range"] = f"bytes */{entry.size}"
                return _answer(connection, 416, b"", headers, close=close)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{entry.size}"
        connection.sendall(
            _head(status, stop - start, headers, close), 0 if is_head or start == stop else socket.MSG_MORE
        )
        step = SLICE_BYTES if self._throttle.is_limited else max(1, stop - start)
        while start < stop and not is_head:
            count = min(step, stop - start)
            if self._throttle.is_limited:
                wait_s = self._throttle.wait_s(address, count)
                if wait_s > 0:
                    self._count("throttled_ms", round(1000 * wait_s))
                    time.sleep(wait_s)
            sent = connection.sendfile(file, start, count)
            self._count("sent_bytes", sent)
            if sent != count:
                raise OSError(f"{entry.path} is shorter than {entry.size} bytes")  # the client sees a broken connection
            start += count
        return status

    def _health(self) -> dict:
        with self._store.lock:
            complete = sorted(n for n, v in self._store.versions.items() if v.manifest is not None)
        status = "recovering" if self._store.is_recovering else "ok"
        return {
            "status": status,
            "complete": complete,
            "upstream": self._mirror.is_upstream_alive,
            "error": self._mirror.last_error,
        }

    def _metrics(self) -> str:
        listing = self._store.listing()
        with self._lock:
            served = dict(self.counters)
        rows = [
            ("complete_versions", "gauge", {"": len(listing["complete"])}),
            ("newest_version", "gauge", {"": max(listing["complete"], default=-1)}),
            ("disk_bytes", "gauge", {"": self._store.num_bytes}),
            ("connections", "gauge", {"": self._throttle.num_connections}),
            ("upstream_alive", "gauge", {"": int(self._mirror.is_upstream_alive)}),
            ("served_total", "counter", {f'{{what="{k}"}}': v for k, v in sorted(served.items())}),
            ("mirrored_total", "counter", {f'{{what="{k}"}}': v for k, v in sorted(self._mirror.counters.items())}),
        ]
        stats = self._mirror.upstream.stats()
        for field in ("success", "bytes_per_s", "num_failures", "num_lies"):
            values = {f'{{url="{_escape(url)}"}}': r[field] or 0 for url, r in stats.get("relays", {}).items()}
            rows.append((f"upstream_{field.removeprefix('num_')}", "gauge", values))
        text = ""
        for name, kind, values in rows:
            text += f"# TYPE intellax_relay_{name} {kind}\n"
            text += "".join(f"intellax_relay_{name}{labels} {value}\n" for labels, value in values.items())
        return text

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counters[name] += amount


def _answer(
    connection, status: int, body: bytes, headers: dict | None = None, *, is_head: bool = False, close: bool
) -> int:
    head = _head(status, len(body), headers or {}, close)
    connection.sendall(head if is_head else head + body)
    return status


def _head(status: int, length: int, headers: dict, close: bool) -> bytes:
    fields = {**headers, "Content-Length": length, **({"Connection": "close"} if close else {})}
    lines = [f"HTTP/1.1 {status} {STATUS[status]}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def _seconds(text: str) -> float:
    return min(float(text), MAX_WAIT_S) if re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) else 0.0


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Relay:
    """Store, mirror and server of one process, or of one test."""

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
            raise ValueError(f"keep={keep} would hold nothing: pass 1 or more")
        if self.url in upstream:
            raise ValueError(f"upstream {self.url} is this relay itself: name the one above it")
        opened = source.open(upstream, trusted_key=trusted_key, options=options)
        if directory is None:
            if not isinstance(opened, source.Directory):
                raise ValueError(f"upstream {upstream} is no directory, which alone can be served in place: pass --dir")
            directory, in_place = upstream[0], True
        else:
            in_place = False
            if isinstance(opened, source.Directory) and os.path.realpath(directory) == os.path.realpath(upstream[0]):
                raise ValueError(f"--dir {directory} is the upstream itself: leave --dir out to serve it in place")
        self.store = store_lib.Store(directory, in_place=in_place, max_bytes=max_bytes)
        self.mirror = mirror_lib.Mirror(self.store, opened, keep=keep, trusted_key=trusted_key)
        self.server = Server(self.store, self.mirror, sock, limits or throttle.Limits())

    def run(self) -> None:
        """Mirrors and serves until `close`."""
        self.mirror.start()
        self.server.run()

    def close(self) -> None:
        self.server.close()
        self.store.close()
        self.mirror.stop()
