"""An upstream that lies: a real HTTP server with a relay's routes, which breaks its word in a chosen or drawn way.

`Behavior` has its answers on each route; `draw` composes one from a seed. The truth comes from the directory `root`,
so a liar may also be right most of the time, serve another run, or an older head.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import random
import re
import socket
import struct
import threading

import blake3

FIRST_PHANTOM = 10**9
JUNK_BYTES = 100_000  # of an object that was never published
# Ways to send a response: the first are whole and false, the others never end or break.
FALSE = ("missing", "junk", "html", "short", "longer", "corrupt", "redirect", "headers", "reset", "error")
SLOW = ("hang", "drip", "drip headers")
FAULTS = (*FALSE, *SLOW)
MANIFESTS = ("missing", "junk", "hang", "drip", "redirect", "headers", "reset", "bomb")


@dataclasses.dataclass(frozen=True)
class Behavior:
    """The answers of a liar. `phantoms` and `partials` are listed and do not exist; the others name a way to answer, or "honest"."""

    phantoms: int = 0
    partials: int = 0
    phantom_manifest: str = "missing"  # of MANIFESTS
    journal: str = (
        "missing"  # "missing", "trickle" (a junk object every 0.1 s), "flood" (1,000 at a time), or of FAULTS
    )
    listing: str = "honest"  # or of FAULTS, or "flap": another tag each time, which wakes whoever waits
    manifest: str = "honest"  # of versions that exist
    objects: str = "honest"
    head: str = "honest"
    rate: float = 1.0  # how often a route's fault is used

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in vars(self).items() if v not in (0, "honest", "missing"))


def draw(rng: random.Random) -> Behavior:
    """Returns a behavior with up to all kinds of lies at the same time."""

    def some(faults, chance=0.35):
        return rng.choice(faults) if rng.random() < chance else "honest"

    return Behavior(
        phantoms=rng.choice((0, 0, 1, 3, 9, 64, 1000, 4000, 10_000)),
        partials=rng.choice((0, 0, 1, 5, 100)),
        phantom_manifest=rng.choice(MANIFESTS),
        journal=rng.choice(("missing", "trickle", "flood", *FAULTS)),
        listing=some((*FAULTS, "flap", "flap", "flap")),
        manifest=some(FAULTS),
        objects=some(FAULTS, 0.6),
        head=some(FAULTS),
        rate=rng.choice((0.1, 0.5, 1.0, 1.0)),
    )


class LyingUpstream:
    """A running liar at `url`; a context manager. `num_requests` counts requests by route, `num_bytes` sent bodies."""

    def __init__(self, root, behavior: Behavior, seed: int = 0):
        self.root, self.behavior = pathlib.Path(root), behavior
        self.num_requests: dict[str, int] = dict.fromkeys(("listing", "manifest", "journal", "objects", "head"), 0)
        self.num_bytes = 0
        self._rng, self._junk = random.Random(seed), itertools.count()
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection):
        self._open.add(connection)
        with contextlib.suppress(OSError), connection:
            received = b""
            while not self._closed.is_set():
                while b"\r\n\r\n" not in received:
                    data = connection.recv(65536)
                    if not data:
                        return
                    received += data
                head, _, received = received.partition(b"\r\n\r\n")
                target = head.split(b" ")[1].decode()
                match = re.search(rb"(?i)\r\nrange: bytes=([0-9]+)-([0-9]+)", head)
                if not self._answer(connection, target, match and (int(match[1]), int(match[2]) + 1)):
                    return
        self._open.discard(connection)

    def _answer(self, connection, target, range_) -> bool:
        """Answers one request. Returns True if the connection can go on."""
        path, _, query = target.partition("?")
        route, fault, body, fields = self._route(path.strip("/"), query)
        self.num_requests[route] += 1
        if fault not in ("honest", "missing") and self._rng.random() > self.behavior.rate:
            fault = "honest"
        status, total = 200 if body is not None else 404, len(body or b"")
        if body is not None and range_:
            body = body[slice(*range_)]
            status, fields = 206, {**fields, "Content-Range": f"bytes {range_[0]}-{range_[1] - 1}/{total}"}
        return self._send(connection, fault, status, body or b"", fields)

    def _route(self, path, query):
        behavior, fields = self.behavior, {}
        version, _, name = path.partition("/")
        number = int(version[1:]) if re.fullmatch("v[0-9]+", version) else -1
        if path == "versions":
            wait = re.search(r"wait=([0-9.]+)", query)
            if wait and "tag=t" in query and behavior.listing != "flap":
                self._closed.wait(min(float(wait[1]), 0.2))
            return "listing", behavior.listing, self._listing(), fields
        if path == "head.jsonl":
            return "head", behavior.head, self._file(path), fields
        if name == "manifest.json":
            if number < FIRST_PHANTOM:
                return "manifest", behavior.manifest, self._file(path), fields
            fault = behavior.phantom_manifest
            bodies = {"missing": None, "bomb": bomb(number)}
            return "manifest", "honest" if fault in bodies else fault, bodies.get(fault, b"{}"), fields
        if name == "objects.jsonl":
            return "journal", *self._journal(path)
        if name.startswith("junk/"):
            return "objects", "honest", _junk(name.removeprefix("junk/")), fields
        return "objects", behavior.objects, self._file(path), fields

    def _listing(self) -> bytes:
        complete, partial = [], []
        for directory in self.root.glob("v*"):
            (complete if (directory / "manifest.json").exists() else partial).append(int(directory.name[1:]))
        complete += range(FIRST_PHANTOM, FIRST_PHANTOM + self.behavior.phantoms)
        partial += range(2 * FIRST_PHANTOM, 2 * FIRST_PHANTOM + self.behavior.partials)
        tag = str(self._rng.random()) if self.behavior.listing == "flap" else "t"
        fields = {"complete": complete, "partial": partial, "tag": tag}
        head = self._file("head.jsonl")
        if head is not None and self.behavior.head == "honest":
            fields["head"] = head.decode()
        return json.dumps(fields).encode()

    def _journal(self, path):
        kind = self.behavior.journal
        if kind not in ("trickle", "flood"):
            return kind, None if kind == "missing" else b"{}", {}
        if kind == "trickle":
            self._closed.wait(0.1)
        lines = []
        for i in itertools.islice(self._junk, 1 if kind == "trickle" else 1000):
            data = _junk(f"{i}")
            lines.append({"path": f"junk/{i}", "size": len(data), "digest": blake3.blake3(data).hexdigest()})
        body = "".join(json.dumps(line) + "\n" for line in lines).encode()
        return "honest", body, {"X-Epoch": "e", "X-Next": "1"}

    def _file(self, path) -> bytes | None:
        with contextlib.suppress(OSError, ValueError):
            return (self.root / path).read_bytes()
        return None

    def _send(self, connection, fault, status, body, fields) -> bool:
        length = len(body)
        if fault == "missing":
            status, body, length = 404, b"", 0
        elif fault == "error":
            status, body, length = 500, b"", 0
        elif fault == "junk":
            body = self._rng.randbytes(len(body))
        elif fault == "html":
            body = b"<html>sign in</html>"
            length = len(body)
        elif fault == "corrupt" and body:
            body = bytearray(body)
            body[self._rng.randrange(len(body))] ^= 1
        elif fault == "longer":
            body, length = body + b"x" * 1000, length + 1000
        elif fault == "redirect":
            status, body, length, fields = 302, b"", 0, {"Location": f"{self.url}/versions"}
        elif fault == "headers":
            fields = {f"X-{i}": "x" * 900 for i in range(600)}
        elif fault == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        elif fault == "hang":
            self._closed.wait(600)
            return False
        lines = [f"HTTP/1.1 {status} Whatever", *(f"{k}: {v}" for k, v in fields.items()), f"Content-Length: {length}"]
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        self.num_bytes += len(body)
        if fault == "short":
            connection.sendall(head + body[: len(body) // 2])
            return False
        if fault == "drip headers":
            return self._drip(connection, head + body)
        connection.sendall(head)
        if fault == "drip":
            return self._drip(connection, body)
        connection.sendall(body)
        return True

    def _drip(self, connection, data) -> bool:
        for i in range(len(data)):
            connection.sendall(data[i : i + 1])
            if self._closed.wait(0.05):
                return False
        return True


def bomb(version: int) -> bytes:
    """587 bytes: a manifest of one tensor without chunks, whose grid has 2**48 rows of none."""
    from sharding.weights.format import digests, journal
    from sharding.weights.format import manifest as manifest_lib

    tensor = manifest_lib.Tensor("t", (1 << 48, 0), "uint8", (1, 1), ())
    data = manifest_lib.zarr_json(tensor)
    objects = (journal.Object("tensors/t/zarr.json", len(data), digests.of(data)),)
    body = manifest_lib.Manifest(
        version=version,
        base=None,
        delta_of=None,
        encodings=("zarr3",),
        digest_before=None,
        digest_after=manifest_lib.digest((tensor,)),
        tensors=(tensor,),
        objects=objects,
        containers={},
        metadata={},
    )
    fields = manifest_lib._to_json(body) | {"public_key": None}  # `encode` refuses it
    del fields["signature"]
    fields["own_digest"] = digests.of(manifest_lib.canonical(fields))
    return manifest_lib.canonical(fields | {"signature": None})


def _junk(name: str) -> bytes:
    return random.Random(int(hashlib.sha256(name.encode()).hexdigest(), 16)).randbytes(JUNK_BYTES)
