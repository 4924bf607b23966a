"""Refuses requests before any route sees them: a wrong key, or a browser page of another site.

A page in the operator's browser can send requests to a server on the same machine or network (CSRF), also under a name of its
own that resolves to that address (DNS rebinding). Two rules stop both. A body must be declared as JSON, which a page may send to
another site only with that site's consent. And `Origin`, which browsers add to every POST, is refused.
"""

import hmac
import ipaddress
import re
from collections.abc import Collection

from fastapi import responses
from starlette import types as asgi

from inference.server import web

OPEN = ("/health", "/liveness")  # no key needed


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
            message = "the Host header is no IP address, localhost, or name given by --control_hosts; use one of these"
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
