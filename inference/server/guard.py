"""Decides who may use a listener: its address, its key, and the requests that are refused before any route sees them.

1. `control_listener` opens that of the routes which change a process, apart from that of the data routes. By default it is a unix
   socket in a new directory that only this user can enter, so it needs no token. A given path is a unix socket, too; its mode lets
   only this user connect. HOST:PORT needs a token, also on 127.0.0.1, which every user of the machine reaches.
2. `Guard` refuses requests with a wrong key, and those of a browser page of another site.

A page in the operator's browser can send requests to a server on the same machine or network (CSRF), also under a name of its
own that resolves to that address (DNS rebinding). Two rules stop both. A body must be declared as JSON, which a page may send to
another site only with that site's consent. And `Origin`, which browsers add to every POST, is refused.
"""

import contextlib
import dataclasses
import hmac
import ipaddress
import pathlib
import re
import socket
from collections.abc import Collection, Iterator

from fastapi import responses
from starlette import types as asgi

from inference.server import web
from sharding.system import secret_file, sockets

OPEN = ("/health", "/liveness")  # no key needed


@dataclasses.dataclass(frozen=True)
class ControlListener:
    """A bound control socket, the token that its clients must send (None: none), and their allowed Host names (None: any)."""

    sock: socket.socket = dataclasses.field(repr=False)
    token: str | None = dataclasses.field(repr=False)
    hosts: Collection[str] | None


@contextlib.contextmanager
def control_listener(control: str, token_file: str | None, hosts: Collection[str]) -> Iterator[ControlListener]:
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


class Guard:
    """ASGI middleware that passes a request on to the app, or replies with the reason of its refusal."""

    def __init__(
        self,
        app: asgi.ASGIApp,
        *,
        key: str | None = None,
        key_name: str = "API key",
        allow_origin: bool = False,
        hosts: Collection[str] | None = None,
    ):
        """Wraps `app`.

        Args:
          app: the app to protect.
          key: clients must send `Authorization: Bearer <key>`, except for health checks; None requires no key.
          key_name: name of the key in replies.
          allow_origin: accept requests of browser pages.
          hosts: names that clients may use in the Host header besides IP addresses and localhost; None accepts any.
        """
        self._app, self._expected = app, f"Bearer {key}".encode() if key else None
        self._key_name, self._allow_origin = key_name, allow_origin
        self._hosts = None if hosts is None else {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Handles one request."""
        reply = self._refuse(scope) if scope["type"] == "http" else None
        await (reply or self._app)(scope, receive, send)

    def _refuse(self, scope: asgi.Scope) -> responses.Response | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._hosts is not None and not self._is_known(headers.get(b"host", b"").decode("latin-1")):
            message = (
                "the Host header is not an IP address, localhost, or a name given by --control_hosts; use one of these"
            )
            return web.error(403, message, "forbidden")
        if b"origin" in headers and not self._allow_origin:
            message = "requests of browser pages (with an Origin header) are refused; send them from a program"
            return web.error(403, message, "forbidden")
        if self._expected and scope["path"] not in OPEN:
            if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
                message = f"the {self._key_name} is missing or wrong; send the header Authorization: Bearer <{self._key_name}>"
                return web.error(401, message, "authentication_error")
        if scope["method"] == "POST":
            has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0")
            given = [value for name, value in scope["headers"] if name == b"content-type"]
            kinds = {value.partition(b";")[0].strip().lower() for value in given}
            if kinds != {b"application/json"} and (kinds or has_body):
                message = "the request's Content-Type is not application/json; send that header and a JSON body"
                return web.error(415, message, "invalid_request_error")
        return None

    def _is_known(self, host: str) -> bool:
        name = host_name(host)
        try:
            return name in (self._hosts or ()) or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def host_name(host: str) -> str:
    """Returns the name or address in a Host header, in small letters; "" for a malformed one.

    Starlette's `request.url` has our own address for a header that it does not know, such as a name with an underscore.
    """
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d+)?", host)
    return found[1].strip("[]").lower() if found else ""
