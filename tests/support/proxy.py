"""Shared by the tests of sources and relays: versions written by hand, relays in threads, and a faulty proxy.

The versions are written from the contract (a directory, a journal, a manifest last), not by `publish`; their bytes are random.
"""

import contextlib
import json
import os
import random
import select
import socket
import struct
import threading
import time

import blake3
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.system import atomic_file, sockets
from sharding.weights.download import source as source_lib
from sharding.weights.format import head as head_lib
from sharding.weights.format import journal
from sharding.weights.format import manifest as manifest_lib
from sharding.weights.relay import server as relay_lib

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


def public(key) -> str:
    return key.public_key().public_bytes_raw().hex()


def contents(seed, sizes=(5, 6, 300, 70_000, 200_001)) -> dict[str, bytes]:
    """Objects by path, in the order of publishing, of a snapshot: one chunk of bytes (and its checksum) per tensor."""
    rng = random.Random(seed)
    objects = {}
    for i, size in enumerate(sizes):
        objects[f"tensors/t{i}/zarr.json"] = manifest_lib.zarr_json(_tensor(f"t{i}", size, ""))
        objects[f"tensors/t{i}/c.0"] = rng.randbytes(size)
    return objects


def deltas(seed, sizes=(0, 1, 300, 70_000)) -> dict[str, bytes]:
    """Objects of a version that needs a base: files of patches."""
    rng = random.Random(seed)
    return {f"deltas/d{i}": rng.randbytes(size) for i, size in enumerate(sizes)}


def entry(path, data) -> dict:
    return {"path": path, "size": len(data), "digest": blake3.blake3(data).hexdigest()}


def manifest(version, objects, /, *, base=None, key=KEY) -> bytes:
    if base is None:
        paths = [path for path in objects if path.endswith("/c.0")]
        tensors = tuple(_tensor(p.split("/")[1], len(objects[p]), entry(p, objects[p])["digest"]) for p in paths)
    else:  # one tensor of a chunk per object, each patched by all of it
        n = len(objects)
        patches = tuple((i, 0, len(data)) for i, data in enumerate(objects.values()))
        tensors = (manifest_lib.Tensor("t", (n,), "uint8", (1,), ("0" * 64,) * n, patches),)
    body = manifest_lib.Manifest(
        version=version,
        base=base,
        delta_of=base,
        encodings=("zarr3",) if base is None else ("xor",),
        digest_before=None if base is None else "0" * 64,
        digest_after=manifest_lib.digest(tensors),
        tensors=tensors,
        objects=tuple(journal.Object(**entry(path, data)) for path, data in objects.items()),
        containers={},
        metadata={"of": "a test"},
    )
    return manifest_lib.encode(body, key)


def _tensor(name, size, digest):
    return manifest_lib.Tensor(name, (size - 4,), "uint8", (size - 4,), (digest,))


def begin(root, version, objects) -> None:
    """Objects and their journal lines; no manifest yet."""
    directory = root / f"v{version:08d}"
    directory.mkdir(parents=True, exist_ok=True)
    for path, data in objects.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
        with open(directory / "objects.jsonl", "a") as file:
            file.write(json.dumps(entry(path, data)) + "\n")


def publish(root, version, objects, /, **fields) -> None:
    begin(root, version, objects)
    directory = root / f"v{version:08d}"
    (directory / "tmp").write_bytes(manifest(version, objects, **fields))
    os.rename(directory / "tmp", directory / "manifest.json")


def sign(root, *, epoch=0, writing=None, key=KEY, serial=None, expires_s=None, epochs=None) -> bytes:
    """Writes the signed head of the complete versions under `root`; `epochs` maps their numbers to epochs other than `epoch`."""
    now_s, entries = time.time(), []
    for path in root.glob("v*/manifest.json"):
        number = int(path.parent.name[1:])
        entries.append(head_lib.Entry.of(path.read_bytes(), (epochs or {}).get(number, epoch), number))
    serial = int(now_s * 1000) if serial is None else serial
    until_s = now_s + 3600 if expires_s is None else expires_s
    data = head_lib.sign(key, entries, serial=serial, epoch=epoch, expires_s=until_s, writing=writing)
    atomic_file.write(root / head_lib.NAME, data)
    return data


def read_all(source, version, objects) -> dict[str, bytes]:
    listed = json.loads(source.manifest(version)[0])["objects"]
    assert [o["path"] for o in listed] == list(objects)
    return {o["path"]: source_lib.read(source, version, journal.Object(**o)) for o in listed}


def wait_until(condition, timeout_s=60.0, what=""):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def running(upstream, directory=None, *, port=0, holding=None, **options):
    """Yields a relay that runs in threads of this process, once it holds the complete versions `holding`, and no others."""
    relay = relay_lib.Relay(
        [str(u) for u in ([upstream] if not isinstance(upstream, list) else upstream)],
        None if directory is None else str(directory),
        sockets.listen("127.0.0.1", port),
        **options,
    )
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    try:
        if holding:
            wait_until(holds(relay, *holding))
        yield relay
    finally:
        relay.close()
        thread.join(10)


def holds(relay, *versions):
    return lambda: relay.store.listing()["complete"] == sorted(versions)


class Proxy:
    """A TCP proxy to `target` (a URL). `fault(rng, body)` is called per connection and changes the server's bytes.

    Faults: None (all passes), "refuse" (reset immediately), ("reset", n) after n bytes, ("close", n) cleanly after n bytes,
    ("flip", n) one bit in byte n, ("rate", bytes_per_s), ("delay", s) of each read, "stall" (silence after the request).
    """

    def __init__(self, target, fault=lambda rng: None, seed=0):
        host, port = target.removeprefix("http://").split(":")
        self.target = (host, int(port))
        self.fault = fault
        self._rng = random.Random(seed)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def heal(self):
        """No faults from now on; connections with one are broken."""
        self.fault = lambda rng: None
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self):
        """Breaks all connections and refuses new ones, as if the process died."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in list(self._open):
            _reset(connection)

    def _accept(self):
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client):
        kind = self.fault(self._rng)
        kind, argument = kind if isinstance(kind, tuple) else (kind, None)
        self._open.add(client)
        try:
            if kind == "refuse":
                return _reset(client)
            with socket.create_connection(self.target, timeout=5) as server:
                self._open.add(server)
                self._pump(client, server, kind, argument)
                self._open.discard(server)
        except (OSError, ValueError):  # `close` closes sockets in another thread: select refuses those
            _reset(client)
        finally:
            client.close()
            self._open.discard(client)

    def _pump(self, client, server, kind, argument):
        passed = 0
        while not self._closed:
            ready, _, _ = select.select([client, server], [], [], 0.5)
            if client in ready:
                data = client.recv(65536)
                if not data:
                    return
                server.sendall(data)
            if server in ready:
                if kind == "stall":
                    server.recv(1)
                    while not self._closed and not select.select([client], [], [], 0.1)[0]:
                        pass
                    return
                data = bytearray(server.recv(int(max(1, argument * 0.05)) if kind == "rate" else 65536))
                if not data:
                    return
                if kind == "flip" and passed <= argument < passed + len(data):
                    data[argument - passed] ^= 1 << (argument % 8)
                if kind in ("reset", "close") and passed + len(data) > argument:
                    client.sendall(data[: argument - passed])
                    return _reset(client) if kind == "reset" else None
                if kind == "delay":
                    time.sleep(argument)
                client.sendall(data)
                passed += len(data)
                if kind == "rate":
                    time.sleep(len(data) / argument)


def _reset(connection):
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
