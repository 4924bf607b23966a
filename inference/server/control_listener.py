"""The socket of the control routes, apart from that of the data routes, and who may use it.

1. By default a unix socket in a new directory that only this user can enter. No other user reaches it, so it needs no token.
2. A path given by `--control` is a unix socket, too; its mode lets only this user connect.
3. HOST:PORT needs a token, also on 127.0.0.1, which every user of the machine reaches. The Host header is checked as well.
"""

import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import Collection, Iterator

from sharding.system import secret_file, sockets


@dataclasses.dataclass(frozen=True)
class ControlListener:
    """A bound control socket, the token that its clients must send (None: none), and their allowed Host names (None: any)."""

    sock: socket.socket = dataclasses.field(repr=False)
    token: str | None = dataclasses.field(repr=False)
    hosts: Collection[str] | None


@contextlib.contextmanager
def opened(control: str, token_file: str | None, hosts: Collection[str]) -> Iterator[ControlListener]:
    """Yields a listener at `control`: a path, HOST:PORT, or "" for a new unix socket; deletes a unix socket at the end.

    Args:
      control: where to listen.
      token_file: file of the token, created if it does not exist; None for no token.
      hosts: names of this machine that clients may use in the Host header, besides that of `control`.

    Raises ValueError if it cannot listen there, or if HOST:PORT has no host or no token.
    """
    host, colon, port = control.rpartition(":")
    is_unix = "/" in control or not colon  # a port alone would mean all addresses
    if not is_unix and not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        found = f"--control {control} has the port {port!r}, not one in 0..65535"
        raise ValueError(f"{found}; write HOST:PORT, or ./{control} for a path")
    if not (is_unix or host):
        raise ValueError(f"--control {control} names no host; write 127.0.0.1:{port}, or HOST:PORT for other machines")
    if not is_unix and token_file is None:
        found = f"--control {control} can be reached by other users and has no token"
        remedy = "add --control_token_file FILE (created if absent), or use a unix socket (--control PATH)"
        raise ValueError(f"{found}; {remedy}")
    token = None if token_file is None else secret_file.read_or_create(token_file)
    with contextlib.ExitStack() as stack:
        if is_unix:
            path = control or stack.enter_context(sockets.private_path())
            sock = stack.enter_context(contextlib.closing(sockets.listen_unix(path)))
            stack.callback(pathlib.Path(path).unlink, missing_ok=True)
        else:
            sock = stack.enter_context(contextlib.closing(sockets.listen(host.strip("[]"), int(port))))
        yield ControlListener(sock, token, None if is_unix else {host, *hosts})
