"""Replies of another party's server: without end, compressed, or a byte at a time."""

import asyncio
import gzip

import httpx
import pytest

from sharding.system import bounded_reply


@pytest.mark.parametrize(
    ("chunk", "headers", "words"),
    [
        (bytes(2**16), {}, "the reply has more than 1048576 bytes, the maximum"),
        (gzip.compress(bytes(2**20)), {"content-encoding": "gzip"}, "compressed .'gzip'.; send it as it is"),
        (b"x", {}, "no complete reply in 0.5 s"),
    ],
)
def test_a_reply_without_end_is_given_up(chunk, headers, words):
    async def body():
        while not await asyncio.sleep(0.001):
            yield chunk

    async def ask():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, content=body()))
        async with httpx.AsyncClient(transport=transport) as http:
            await bounded_reply.fetch(http, "GET", "http://a/health", 2**20, 0.5)

    with pytest.raises(httpx.RequestError, match=words):
        asyncio.run(asyncio.wait_for(ask(), 30))
