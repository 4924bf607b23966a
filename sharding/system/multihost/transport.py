"""Sends and receives messages over a TCP connection between two hosts: a JSON header, then raw bytes."""

import dataclasses
import json
import socket
import struct
import threading
from collections.abc import Sequence

MAX_HEADER_BYTES = 1 << 26
MAX_HELLO_BYTES = 1 << 16  # from a peer that has not proved anything yet
LOST_S = 60  # without an answer from the peer's TCP; less would end a host that copies for long and reads nothing
HEAD = struct.Struct(">IQ")  # sizes of a message's JSON and of its bytes


class RemoteHostError(OSError):
    """Raised when this host fails only because another host did. The other host's own error is the one reported."""


class Connection:
    """A TCP connection to another host. Several threads may call `send`; one thread may call `receive`."""

    def __init__(self, sock: socket.socket):
        self._sock, self._lock = sock, threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {"TCP_KEEPIDLE": LOST_S // 4, "TCP_KEEPINTVL": LOST_S // 4, "TCP_KEEPCNT": 3}
        for name, value in (options | {"TCP_USER_TIMEOUT": 1000 * LOST_S}).items():
            if hasattr(socket, name):  # Linux has all four
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def own_address(self) -> str:
        """The IP address of this end of the connection."""
        return self._sock.getsockname()[0].removeprefix("::ffff:")  # of IPv4 on a socket for both

    def send(self, header: dict, buffers: Sequence = ()) -> None:
        """Sends a JSON header and raw `buffers`; blocks until the kernel has them. Raises RemoteHostError on a broken connection."""
        text = json.dumps(header).encode()
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        try:
            with self._lock:
                self._sock.sendall(HEAD.pack(len(text), sum(view.nbytes for view in views)) + text)
                for view in views:
                    self._sock.sendall(view)
        except OSError as error:
            raise RemoteHostError(f"a message to another host failed: {error}") from error

    def receive(self, timeout_s: float | None = None) -> tuple[dict, bytearray]:
        """Returns the next message: its JSON and its bytes. Blocks until it is complete.

        With a timeout, which is for peers that have not proved anything yet, only a short message without bytes is
        accepted. Raises EOFError if the peer closed the connection, OSError or ValueError if the message is malformed.
        """
        self._sock.settimeout(timeout_s)
        text_bytes, body_bytes = HEAD.unpack(self._read(HEAD.size))
        most = MAX_HEADER_BYTES if timeout_s is None else MAX_HELLO_BYTES
        if text_bytes > most or (timeout_s is not None and body_bytes):
            limits = f"at most {most} bytes of JSON" + (" and no data" if timeout_s is not None else "")
            claim = f"a message's header claims {text_bytes} bytes of JSON and {body_bytes} of data"
            raise OSError(f"{claim}, {limits} are allowed; another service may use this port")
        return json.loads(self._read(text_bytes)), self._read(body_bytes)

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            received = self._sock.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
        return data


@dataclasses.dataclass
class Peers:
    """The connections and names of a run's hosts, by index; the rendezvous fills them. Others connect to host 0 only."""

    index: int  # of this host
    count: int
    connections: dict[int, Connection] = dataclasses.field(default_factory=dict)
    names: dict[int, str] = dataclasses.field(default_factory=dict)

    def end(self, host: int, message: str, code: int) -> dict:
        """Returns the message that makes a host print its "line" and exit with `code`; `host` is the one that had the error."""
        line = f"error: host {host} of {self.count} ({self.names.get(host, 'unknown')}): {message}"
        return {"kind": "end", "host": host, "line": line, "code": code}


def listen(port: int) -> socket.socket:
    """Returns a socket listening on `port` for IPv4 and, if available, IPv6. Raises ValueError if the port cannot be used."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        remedy = "set coordinator to a port that is free and whose next port is free as well"
        raise ValueError(f"port {port} of host 0 cannot be used: {error}; {remedy}") from None
