"""Opens listening sockets for HTTP servers, and returns their URLs and the networks of clients. Does not import jax."""

import contextlib
import errno
import functools
import ipaddress
import os
import pathlib
import socket
import stat
import tempfile
import time
import urllib.parse
from collections.abc import Iterator

from sharding.system import atomic_file
from sharding.system import files as files_lib

PRIVATE, GRACE_S = "intellax-socket-", 60.0  # a younger folder may not be locked yet


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


def listen_unix(path: str | os.PathLike) -> socket.socket:
    """Returns a unix socket that listens at `path`, for this user alone. Raises ValueError if it cannot.

    Replaces a socket that no process listens at, as a killed process leaves it.
    """
    path, sock = pathlib.Path(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and sock.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        sock.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(path))
        path.chmod(0o600)  # before `listen`: until then, connections are refused
        sock.listen(1024)
    except (OSError, ValueError) as error:  # the system's limit is 107 bytes on Linux, and 103 on macOS
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on unix socket {path}: {reason}; choose a new, short path") from error
    return sock


@contextlib.contextmanager
def private_path() -> Iterator[str]:
    """Yields a short path for a unix socket, in a new folder that only this user may enter, and that goes with the `with` block.

    The process holds a lock on the folder, which ends with it, however suddenly. The next call removes those of killed processes.
    """
    for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{PRIVATE}*"):
        with contextlib.suppress(OSError):  # of another user, in use, or with further files
            if folder.stat().st_mtime < time.time() - GRACE_S:
                with _locked(folder):
                    (folder / "sock").unlink(missing_ok=True)
                    folder.rmdir()
    with tempfile.TemporaryDirectory(prefix=PRIVATE) as name, _locked(name):
        yield f"{name}/sock"


def _locked(folder: str | os.PathLike) -> contextlib.AbstractContextManager[None]:
    return files_lib.locked(folder, files_lib.FOLDER | os.O_NOFOLLOW, wait=False)


def address(sock: socket.socket) -> str:
    """Returns the URL of a bound socket, such as http://127.0.0.1:8200, or unix:PATH."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns True for an address that only processes of this machine reach."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


@functools.lru_cache(2**12)
def network(host: str, bits: int = 64) -> str:
    """Returns the network of a client, to which limits apply: its IPv4 address, or the first `bits` of IPv6, by default those of a subscriber.

    Another text is returned unchanged.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Address(int(address) >> 128 - bits << 128 - bits))


def is_url(text: str) -> bool:
    """Returns True for a URL such as http://HOST:PORT."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # a port may be malformed
    except ValueError:
        return False


def announce(path: str, sock: socket.socket) -> None:
    """Writes the URL of a bound socket to the file `path`. The file appears complete: a waiting process may read it."""
    atomic_file.write(path, address(sock).encode())
