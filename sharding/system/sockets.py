"""Opens listening sockets for HTTP servers and returns their URLs. Does not import jax."""

import errno
import socket

from sharding.system import atomic_file


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on `host` and `port`; port 0 takes a free one. Raises ValueError if it cannot."""
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
    """Returns the URL of a bound socket, such as http://127.0.0.1:8200."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(path: str, sock: socket.socket) -> None:
    """Writes the URL of a bound socket to the file `path`. The file appears complete: a waiting process may read it."""
    atomic_file.write(path, address(sock).encode())
