"""A socket to serve HTTP on, and its URL: shared by relays, rollout servers, the orchestrator and the validator. Imports no jax."""

import errno
import socket

from sharding.system import atomic_file


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. ValueError when the port is taken."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or error
        is_elsewhere = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        remedy = "give an address of this machine" if is_elsewhere else "choose another port, or 0 for a free one"
        raise ValueError(f"cannot listen on {host}:{port}: {reason}; {remedy}") from error
    return sock


def address(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(path: str, sock: socket.socket) -> None:
    """Writes the address into a file that appears whole: who waits for it may read it at once."""
    atomic_file.write(path, address(sock).encode())
