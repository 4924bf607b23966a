"""Sends many HTTP requests at a time, and reads replies of bounded size and time: a server may send bytes without end. Imports no jax."""

import asyncio
import re
import socket
from typing import Any

import aiohttp
import httpx
import httpx_aiohttp

# A connection is silent for as long as a completion takes: probes keep it open, and show that the other end is gone.
KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
_PROBES = "TCP_KEEPIDLE", "TCP_KEEPINTVL"  # where the system has them
KEEPALIVE += [(socket.IPPROTO_TCP, getattr(socket, name), 10) for name in _PROBES if hasattr(socket, name)]
# Without this, a body that the other end does not read is waited for without a limit.
if hasattr(socket, "TCP_USER_TIMEOUT"):
    KEEPALIVE.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000))

BODY_S = 60.0  # from the head of a reply to its end, where the caller names no limit


def make_client(**options: Any) -> httpx.AsyncClient:
    """Returns a client without a maximum of connections; `options` are those of httpx. Proxies of the environment apply."""
    context = httpx.create_ssl_context()  # takes 20 ms: one for both
    # Not as `transport`, which would ignore the proxies of the environment; nor as "all://", which would replace one.
    return httpx.AsyncClient(mounts={"all://*": _Transport(context)}, verify=context, **options)


async def fetch(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    max_bytes: int,
    limit_s: float | None = None,
    *,
    body_s: float | None = None,
    **options: Any,
) -> httpx.Response:
    """Returns the reply to a request, with a body of at most `max_bytes` that came within `limit_s`; `options` are those of httpx.

    Without `limit_s`, the body may take `body_s` seconds after the head (None: BODY_S). Raises httpx.RequestError for any
    other reply. Compressed replies are refused, because a few bytes may decompress to many.
    """
    headers = {"accept-encoding": "identity"} | options.pop("headers", {})
    body, most_s = bytearray(), limit_s or body_s or BODY_S
    try:
        async with asyncio.timeout(limit_s) as limit, http.stream(method, url, headers=headers, **options) as response:
            if limit_s is None:
                limit.reschedule(asyncio.get_running_loop().time() + most_s)
            if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
                raise httpx.DecodingError(f"the reply is compressed ({encoding[:20]!r}); send it as it is")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > max_bytes:
                    raise httpx.RequestError(f"the reply has more than {max_bytes} bytes, the maximum")
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no complete reply in {most_s:g} s") from error
    except UnicodeError as error:  # in the head, or in a cookie of an earlier reply
        raise httpx.RemoteProtocolError(str(error)) from error
    return httpx.Response(response.status_code, headers=response.headers, content=bytes(body), request=response.request)


async def get(url: str, max_bytes: int, limit_s: float, **options: Any) -> httpx.Response:
    """Returns the reply to one request, by a client of its own, as `fetch` does: whole within `limit_s`, however slowly its bytes come."""
    async with httpx.AsyncClient(timeout=limit_s) as http:
        return await fetch(http, "GET", url, max_bytes, limit_s, **options)


class _Transport(httpx_aiohttp.AiohttpTransport):
    """Sends requests by aiohttp: httpcore looks at all idle connections at each request (19 ms of CPU with 128 of them, not 0.9)."""

    def get_client(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, ssl=self.ssl_context, socket_factory=_make_socket)
        return aiohttp.ClientSession(connector=connector)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # aiohttp names its setting for TLS, "ssl:default"
            raise type(error)(re.sub(r" ssl:\w+", "", str(error))) from error
        except aiohttp.ClientError as error:  # not translated by httpx_aiohttp: a reply without HTTP
            raise httpx.RemoteProtocolError(str(error) or type(error).__name__) from error


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    for option in KEEPALIVE:
        made.setsockopt(*option)
    return made
