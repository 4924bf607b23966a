"""Replies of another party's server: without end, compressed, or a byte at a time."""

import asyncio
import gzip
import socket

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


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\x16\x03\x01\x02\x00",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 2OO OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nbodybo",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 \xff\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + bytes([97]) * 2**20 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nbody\r\n",
    ],
)
def test_a_malformed_reply_is_one_kind_of_error(reply):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, bounded_reply.make_client() as http:
            port = server.sockets[0].getsockname()[1]
            await bounded_reply.fetch(http, "GET", f"http://127.0.0.1:{port}/health", 2**21)

    with pytest.raises(httpx.RequestError):
        asyncio.run(asyncio.wait_for(ask(), 30))


def test_a_client_keeps_more_than_a_hundred_connections_alive(monkeypatch):
    made, make = [], bounded_reply._make_socket
    monkeypatch.setattr(bounded_reply, "_make_socket", lambda address: made.append(make(address)) or made[-1])
    waiting, num_requests = asyncio.Event(), 150

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if len(made) == num_requests:
            waiting.set()
        await waiting.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        writer.close()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=num_requests)
        async with server, bounded_reply.make_client() as http:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await asyncio.gather(*(bounded_reply.fetch(http, "GET", url, 10) for _ in range(num_requests)))
            # Else a router forgets a connection that waits for a long completion, or its other end is gone, and it waits for ever.
            assert all(one.getsockopt(*option) == value for one in made for *option, value in bounded_reply.KEEPALIVE)
            await asyncio.gather(*(bounded_reply.fetch(http, "GET", url, 10) for _ in range(num_requests)))

    asyncio.run(asyncio.wait_for(ask(), 30))
    assert len(made) == num_requests  # the second requests used the connections of the first


@pytest.mark.parametrize("is_upload", [False, True])
def test_neither_a_malformed_rest_nor_a_body_that_is_not_read_is_waited_for(monkeypatch, is_upload):
    if is_upload and not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no limit for it")
    options = [(*name, 500 if value == 60_000 else value) for *name, value in bounded_reply.KEEPALIVE]
    monkeypatch.setattr(bounded_reply, "KEEPALIVE", options)
    monkeypatch.setattr(bounded_reply, "BODY_S", 0.5)
    is_over = asyncio.Event()

    async def body():
        for _ in range(64 * is_upload):
            yield bytes(2**20)

    async def serve(reader, writer):
        if is_upload:
            writer.transport.pause_reading()
        else:
            await reader.readuntil(b"\r\n\r\n")
            for part in (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n", b"zz\r\nbody\r\n"):
                writer.write(part)
                await asyncio.sleep(0.1)
        await is_over.wait()
        writer.close()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, bounded_reply.make_client(timeout=60) as http:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                await bounded_reply.fetch(http, "POST", url, 10, content=body())
            finally:
                is_over.set()

    with pytest.raises(httpx.RequestError):
        asyncio.run(asyncio.wait_for(ask(), 20))
