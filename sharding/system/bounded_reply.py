"""Reads HTTP replies of bounded size and time: another party's server may send bytes without end. Imports no jax."""

import asyncio
from typing import Any

import httpx


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

    With `body_s`, the limit is instead this time from the head of the reply.
    Raises httpx.RequestError for another reply. Compressed ones are refused: a few bytes of them may become many.
    """
    headers = {"accept-encoding": "identity"} | options.pop("headers", {})
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s) as limit, http.stream(method, url, headers=headers, **options) as response:
            if body_s is not None:
                limit.reschedule(asyncio.get_running_loop().time() + body_s)
            if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
                raise httpx.DecodingError(f"the reply is compressed ({encoding[:20]!r}); send it as it is")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > max_bytes:
                    raise httpx.RequestError(f"the reply has more than {max_bytes} bytes, the maximum")
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no complete reply in {limit_s if body_s is None else body_s:g} s") from error
    return httpx.Response(response.status_code, headers=response.headers, content=bytes(body), request=response.request)
