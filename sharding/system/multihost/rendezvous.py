"""Connects the hosts of a run to host 0.

1. Host 0 listens one port above JAX's coordinator and sends a nonce to each connection.
2. Another host answers with its index, its settings, and an HMAC of the nonce under a key in the working directory. The HMAC
   proves that it belongs to this run and sees the same disk.
3. Host 0 checks these. It returns when all hosts are connected, or raises ValueError with the missing host or the mismatch.
"""

import hmac
import pathlib
import secrets
import socket
import time

import jax

from sharding.system import atomic_file
from sharding.system.multihost import transport

KEY_S = 20.0  # a network disk may show a new file late


def accept_all(peers: transport.Peers, address: tuple[str, int], workdir: pathlib.Path, timeout_s: float) -> None:
    """Returns when all other hosts are connected to this one, host 0. `address` is that of JAX's coordinator.

    Raises ValueError if one is missing after `timeout_s`, or if settings differ; `peers` then has those connected so far.
    """
    key, deadline_s = make_key(workdir), time.monotonic() + timeout_s
    transport.listen(address[1]).close()  # JAX kills the process if its own port is taken
    with transport.listen(_port_after(address[1])) as listener:
        while missing := sorted(set(range(1, peers.count)) - peers.connections.keys()):
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                connection = transport.Connection(listener.accept()[0])
                nonce = secrets.token_hex(16)
                connection.send({"nonce": nonce, "name": peers.names[0]})
                hello = connection.receive(timeout_s=KEY_S + 10)[0]
            except TimeoutError:
                if time.monotonic() > deadline_s:
                    found = f"host(s) {', '.join(map(str, missing))} did not connect within {timeout_s:.0f} s"
                    remedy = f"start the same command on every host, or correct num_processes = {peers.count}"
                    raise ValueError(f"{found}; {remedy}") from None
                continue
            except (OSError, EOFError, ValueError):  # not a host of any run: a port scanner, a browser
                continue
            if isinstance(hello, dict):
                _admit(peers, workdir, connection, hello, _proof(key, nonce))


def connect(peers: transport.Peers, address: tuple[str, int], workdir: pathlib.Path, timeout_s: float) -> None:
    """Connects this host to host 0 and proves its membership. Raises ValueError if host 0 does not answer in `timeout_s`."""
    host, port = address[0], _port_after(address[1])
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            connection = transport.Connection(socket.create_connection((host, port), timeout=5))
            greeting = connection.receive(timeout_s=5)[0]
            nonce, peers.names[0] = str(greeting["nonce"]), str(greeting["name"])[:80]
            break
        except (OSError, EOFError, ValueError, LookupError, TypeError) as error:  # not up yet, or another service
            if time.monotonic() > deadline_s:
                found = f"host 0 did not answer at {host}:{port} within {timeout_s:.0f} s ({error})"
                raise ValueError(f"{found}; start the same command there, or correct coordinator") from None
            time.sleep(0.2)
    peers.connections[0] = connection
    proof = _proof(_wait_for_key(workdir), nonce)
    hello = {"index": peers.index, "count": peers.count, "jax": jax.__version__, "proof": proof}
    connection.send(hello | {"name": peers.names[peers.index]})


def _admit(peers: transport.Peers, workdir: pathlib.Path, peer: transport.Connection, hello: dict, proof: str) -> None:
    index, name = hello.get("index"), str(hello.get("name"))[:80]
    host = f"host {index} ({name})"
    if isinstance(index, int):
        peers.connections.setdefault(index, peer)  # even if rejected: it has to receive the error
    if not hmac.compare_digest(str(hello.get("proof")).encode(), proof.encode()):
        remedy = "give a --workdir that all hosts share, or for one in a bucket, INTELLAX_BUCKET_CACHE"
        raise ValueError(f"{host} does not see the key of this run in {workdir}; {remedy}")
    for field, setting, expected in (("count", "num_processes", peers.count), ("jax", "jax", jax.__version__)):
        if hello.get(field) != expected:
            found = f"{host} has {setting} = {hello.get(field)}, host 0 has {expected}"
            raise ValueError(f"{found}; make them the same on all hosts")
    if not isinstance(index, int) or not 0 < index < peers.count or peers.connections[index] is not peer:
        text = f"{host} was started twice; give each host a different process_id"
        peer.send(peers.end(0, text, 1))
        raise ValueError(text)
    peers.names[index] = name


def make_key(workdir: pathlib.Path) -> bytes:
    """Returns the secret key of the run in `workdir`, made if it does not exist. Raises ValueError if `workdir` is a file."""
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"workdir {workdir} is a file; give a directory")
    workdir.mkdir(parents=True, exist_ok=True)
    return atomic_file.secret_key(workdir / ".hosts")


def _wait_for_key(workdir: pathlib.Path) -> bytes:
    """Returns the key that host 0 made; empty if it does not appear within KEY_S."""
    file, deadline_s = workdir / ".hosts", time.monotonic() + KEY_S
    while not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return atomic_file.secret_key(file) if file.exists() else b""


def _proof(key: bytes, nonce: str) -> str:
    return hmac.digest(key, nonce.encode(), "sha256").hex()


def _port_after(port: int) -> int:
    """Returns the port on which host 0 listens if JAX's coordinator has `port`: the next, or for 65535 the one before."""
    return port + 1 if port < 65535 else port - 1
