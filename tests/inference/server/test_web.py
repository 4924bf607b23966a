"""The budgets of a server: how much one client can use of them, and that other clients are served meanwhile.

A real server of a few routes, and raw clients on several loopback addresses, each of which counts as another network.
"""

import asyncio
import contextlib
import json
import random
import signal
import socket
import threading
import time
from unittest import mock

import fastapi
import httpx
import pytest
import uvicorn

from inference.server import web
from sharding.system import sockets
from tests.support import serving

BUDGET, BODY, WAIT_S = 2**20, 2**18, 30
PARTS = 16  # of a body, as it is sent


def test_sigterm_before_the_first_request_ends_the_server():
    """The address may be announced before uvicorn has its own handler."""
    server, before = web.server(fastapi.FastAPI()), signal.getsignal(signal.SIGTERM)
    serve = server.run
    server.run = lambda **options: (signal.raise_signal(signal.SIGTERM), serve(**options))
    try:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            web.run(server, sock)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def running(monkeypatch):
    """(URL, the budget, an event that lets /held reply)."""
    app, gate = fastapi.FastAPI(), threading.Event()

    @app.post("/read")
    async def read(request: fastapi.Request):
        return {"bytes": len(await web.read_body(request))}

    @app.post("/held")
    async def held(request: fastapi.Request):
        async with web.open_body(request) as body:
            await asyncio.to_thread(gate.wait, WAIT_S)
            return {"bytes": len(body)}

    @app.post("/json")
    async def small(request: fastapi.Request):
        return await web.read_json(request, 100)

    @app.exception_handler(ValueError)
    async def refuse(request, error):
        return web.error(400, str(error), "invalid_request_error")

    with serving.in_thread(app, max_bodies_bytes=BUDGET) as url:
        yield url, app.state.body_budget, gate
        gate.set()


def client(url, address):
    return httpx.AsyncClient(base_url=url, transport=httpx.AsyncHTTPTransport(local_address=address), timeout=WAIT_S)


def connect(url):
    return asyncio.open_connection(*url.removeprefix("http://").split(":"))


async def body(size, until):
    """Yields a body in parts; the last one when `until` is set."""
    for part in range(PARTS):
        if part == PARTS - 1:
            await until.wait()
        yield bytes(size // PARTS)
        await asyncio.sleep(0.001)


async def filled(budget, held):
    while sum(budget.used.values()) < held:
        await asyncio.sleep(0.001)


def refusals(budget):
    """A list that gets an item for each request that the budget refuses."""
    take, refused = budget.take, []
    budget.take = lambda *of: take(*of) or refused.append(of)
    return refused


async def settled(budget, refused, count, size):
    """Returns once each of `count` requests is refused, or has sent its `body` of `size` bytes but for the last part."""
    while sum(budget.used.values()) != (count - len(refused)) * (size - size // PARTS):
        await asyncio.sleep(0.001)


def all_given_back(budget):
    return budget.free == BUDGET and not budget.used


@pytest.fixture
def run(running):
    """run(main) awaits main(url, budget, gate), after which the server must have its whole budget back."""

    def run(main):
        asyncio.run(main(*running))
        assert all_given_back(running[1])

    return run


def test_one_address_takes_half_and_another_is_served(run):
    async def main(url, budget, gate):
        until, refused = asyncio.Event(), refusals(budget)
        async with client(url, "127.0.0.1") as greedy, client(url, "127.0.0.2") as other:
            tasks = [asyncio.create_task(greedy.post("/read", content=body(BODY, until))) for _ in range(8)]
            await settled(budget, refused, 8, BODY)
            assert BODY // 2 < budget.used["127.0.0.1"] <= BUDGET // 2
            assert (await other.post("/read", content=bytes(BODY))).json() == {"bytes": BODY}
            until.set()
            answers = await asyncio.gather(*tasks)
            refused = [answer for answer in answers if answer.status_code == 503]
            assert len(refused) in (6, 7) and {a.status_code for a in answers} == {200, 503}
            assert all(r.headers["retry-after"] == str(web.RETRY_S) for r in refused)
            error = refused[0].json()["error"]
            assert "request bodies from your network use" in error["message"] and error["type"] == "overloaded"
            assert (await greedy.post("/read", content=bytes(BODY))).status_code == 200

    run(main)


def test_an_address_is_that_of_the_connection(run):
    """A header cannot name another address, by which one client could get any number of shares."""

    async def main(url, budget, gate):
        async with client(url, "127.0.0.1") as http:
            sent = [http.post("/held", content=bytes(9), headers={"x-forwarded-for": f"10.0.0.{i}"}) for i in range(3)]
            held = asyncio.gather(*sent)
            await asyncio.wait_for(filled(budget, 27), WAIT_S)
            assert dict(budget.used) == {"127.0.0.1": 27}
            gate.set()
            await held

    run(main)


@pytest.mark.parametrize(
    ("host", "party"),
    [
        ("10.0.0.9", "10.0.0.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::"),
        ("2001:db8:1:3::1", "2001:db8:1:3::"),
        ("fe80::1%eth0", "fe80::"),
        ("::ffff:10.0.0.9", "10.0.0.9"),
        ("", ""),
    ],
)
def test_a_network_of_ipv6_is_one_address(host, party):
    assert sockets.network(host) == party


def test_the_connections_of_an_ipv6_site_count_together():
    """Attack: each of its 65,536 networks had the few connections that are cut for no other."""
    counted = []

    class Connections:
        def open(self, network, transport):
            return counted.append(network)

    config = uvicorn.Config(app := fastapi.FastAPI())
    app.state.connections = Connections()
    config.load()
    for number in range(3):
        transport = mock.Mock()
        transport.get_extra_info = {"peername": (f"2001:db8:1:{number}::1", 1)}.get
        web._Protocol(config, uvicorn.server.ServerState(), {}, _loop=mock.Mock()).connection_made(transport)
        transport.abort.assert_called_once()
    assert counted == ["2001:db8:1::"] * 3


def test_a_body_counts_until_its_block_ends(run):
    async def main(url, budget, gate):
        async with client(url, "127.0.0.1") as http:
            held = [asyncio.create_task(http.post("/held", content=bytes(BODY))) for _ in range(2)]
            await asyncio.wait_for(filled(budget, 2 * BODY), WAIT_S)
            assert (await http.post("/read", content=bytes(BODY))).status_code == 503
            gate.set()
            assert [(await task).json() for task in held] == [{"bytes": BODY}] * 2
            assert (await http.post("/read", content=bytes(BODY))).status_code == 200

    run(main)


def test_disconnects_and_long_bodies_free_the_budget(run):
    rng = random.Random(0)

    async def leave(url):
        _, writer = await connect(url)
        writer.write(f"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: {BODY}\r\n\r\n".encode())
        writer.write(bytes(rng.randrange(BODY)))
        await writer.drain()
        writer.close()

    async def main(url, budget, gate):
        await asyncio.gather(*(leave(url) for _ in range(30)))
        async with client(url, "127.0.0.1") as http:
            for _ in range(50):
                if all_given_back(budget):
                    break
                await asyncio.sleep(0.1)
            message = (await http.post("/json", content=b"[" * 101)).json()["error"]["message"]
            assert message.startswith("the request body exc")
            assert (await http.post("/json", content=json.dumps({"a": 1}))).json() == {"a": 1}

    run(main)


def test_a_pause_in_a_body_is_408_on_any_server(run, monkeypatch):
    monkeypatch.setattr(web, "BODY_PAUSE_S", 0.2)

    async def main(url, budget, gate):
        reader, writer = await connect(url)
        writer.write(b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), WAIT_S)
        writer.close()
        assert head == b"HTTP/1.1 408 Request Timeout\r\n"

    run(main)


def test_a_client_that_sends_no_head_or_reads_no_reply_is_closed(monkeypatch):
    """Both waits count from the last head or the last byte read; a reply in work, or a slow reader, is left alone."""
    monkeypatch.setattr(web, "HEAD_S", 0.5)
    monkeypatch.setattr(web, "WRITE_PAUSE_S", 0.5)
    app, size = fastapi.FastAPI(), 2**24  # more than the buffers of two sockets hold

    @app.get("/slow")
    async def slow():
        await asyncio.sleep(1.0)
        return {}

    @app.get("/long")
    async def long():
        return fastapi.Response(bytes(size))

    async def ended_after(url, *parts, read_every_s=None):
        """Returns (seconds until the server closed, bytes read) of a client that sends `parts` with pauses."""
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"), limit=2**20)
        num_bytes, begun_s = 0, time.monotonic()
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.2)
        if read_every_s is None:
            while app.state.connections.used:
                await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(2**20):
                num_bytes += len(chunk)
                await asyncio.sleep(read_every_s or 0)
        writer.close()
        return time.monotonic() - begun_s, num_bytes

    async def main(url):
        silent = ([], [b"GET /slow HTTP/1.1\r\n"], [b"G", b"E", b"T", b" ", b"/"])
        ended = asyncio.gather(*(ended_after(url, *parts) for parts in silent))
        for passed_s, num_bytes in await asyncio.wait_for(ended, WAIT_S):
            assert passed_s >= 0.5 and not num_bytes
        get = "GET /{} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        _, num_bytes = await asyncio.wait_for(ended_after(url, get.format("slow").encode()), WAIT_S)
        assert num_bytes > 0
        _, num_bytes = await asyncio.wait_for(ended_after(url, get.format("long").encode()), WAIT_S)
        assert num_bytes < size
        _, num_bytes = await asyncio.wait_for(ended_after(url, get.format("long").encode(), read_every_s=0.1), WAIT_S)
        assert num_bytes > size

    with serving.in_thread(app) as url:
        asyncio.run(main(url))


def test_an_address_leaves_connections_to_others():
    """Connections past the limit are closed, another client is served, and closed connections can be replaced."""

    def answers(source):
        """A connection from there, and whether the server lets it ask."""
        opened = socket.create_connection((host, int(port)), WAIT_S, source_address=(source, 0))
        with contextlib.suppress(ConnectionError):
            opened.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
            return opened, opened.recv(100).startswith(b"HTTP/1.1 200")
        return opened, False

    with serving.in_thread(fastapi.FastAPI(), max_connections=20) as url:
        host, port = url.removeprefix("http://").split(":")
        greedy = [answers("127.0.0.2") for _ in range(14)]
        assert [served for _, served in greedy] == [True] * 10 + [False] * 4
        other, served = answers("127.0.0.3")
        assert served
        for opened, _ in greedy[:5]:
            opened.close()
        deadline = time.monotonic() + WAIT_S
        while not (again := answers("127.0.0.2"))[1]:
            assert time.monotonic() < deadline
        for opened in (other, again[0], *(opened for opened, _ in greedy[5:])):
            opened.close()


def test_many_addresses_that_hold_all_connections_keep_no_other_out():
    """Attack: 16 addresses had as many connections as they could get, and no worker of another one got any."""
    connections, ended = web.Connections(1000), []

    class Transport:
        def __init__(self, network):
            self.network = network

        def abort(self):
            ended.append((self.network, self))

    def connect(network):
        transport = Transport(network)
        return connections.open(network, transport) and transport

    for number in range(16):
        while connect(f"evil{number}"):
            pass
    assert connections.used["evil0"] > 100 and connections.free < 8
    ended.clear()
    few = web.FEW_CONNECTIONS
    opened = [connect("honest") for _ in range(few)]
    assert all(opened) and not connect("honest") and 0 < len(ended) <= few
    assert {network for network, _ in ended} <= {"evil0", "evil1"}  # the largest
    for network, transport in ended:
        connections.close(network, transport)  # when its end is noticed
    assert connections.free + connections.used.total() == 1000
    for transport in opened:
        connections.close("honest", transport)
    assert "honest" not in connections.used and "honest" not in connections._opened


def test_a_trickle_is_408_and_what_is_fast_enough_is_read(run, monkeypatch):
    """A body of single bytes is rejected; one at the minimum rate is read, however long it takes."""
    monkeypatch.setattr(web, "BODY_GRACE_S", 0.5)
    monkeypatch.setattr(web, "MIN_BODY_RATE", 10_000)

    async def send(url, chunk, pause_s, count):
        """(Seconds, the answer) of a body that is sent in such parts."""
        begun = asyncio.get_running_loop().time()
        reader, writer = await connect(url)
        writer.write(f"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: {count * len(chunk)}\r\n\r\n".encode())
        answer = asyncio.create_task(reader.read(2000))
        for _ in range(count):
            if answer.done():
                break
            writer.write(chunk)
            await asyncio.sleep(pause_s)
        text = (await asyncio.wait_for(answer, WAIT_S)).decode()
        writer.close()
        return asyncio.get_running_loop().time() - begun, text

    async def main(url, budget, gate):
        slow, fast = await asyncio.gather(send(url, b"x", 0.02, 10_000), send(url, bytes(1000), 0.04, 40))
        assert 0.4 < slow[0] < 5 and slow[1].startswith("HTTP/1.1 408 Request Timeout")
        assert "bytes of the request body came in" in slow[1] and "at least 10000 bytes per second" in slow[1]
        assert fast[0] > 1.5 and fast[1].startswith("HTTP/1.1 200") and '{"bytes":40000}' in fast[1]

    run(main)


def test_a_network_uses_at_most_as_much_as_it_leaves_free():
    budget = web.Budget(10)
    assert not budget.take("a", 6) and budget.take("a", 5) and not budget.take("a", 1)
    assert budget.take("b", 2) and not budget.take("b", 1) and budget.take("c", 1)
    assert (budget.free, dict(budget.used)) == (2, {"a": 5, "b": 2, "c": 1})
