"""The few things every HTTP service here shares: a server, a body read with limits, errors in OpenAI's shape.

What a client may do, and what it may not cost:
1. A connection that sends no whole request head within 30 s, or takes no bytes of its answer for 60 s, is cut. An address may
   hold as many connections as it leaves free of those that the process can have open; the next one is cut at once.
2. A body is read up to a limit of bytes. A pause of 30 s in it ends the request (408), and so does one that comes at less than
   32 KiB/s beyond its first 30 s: 64 MiB take 35 minutes at most, and a few bytes hold a part of the budget for 30 s.
3. All bodies of a server together have a budget. An address may hold as many bytes as it leaves free: one takes at most
   half, n together n / (n + 1), and who comes new finds room. Beyond it a client gets 503 and is asked to come again.
   The address is the connection's, whatever a header says: who comes by a proxy shares its part. An IPv6 network of
   64 bits is one address, since one host has all of them.
4. A client that hangs up while it waits ends what it waited for (`until_gone`).
"""

import asyncio
import collections
import contextlib
import hmac
import ipaddress
import json
import os
import resource
import threading
import time
from collections.abc import Awaitable

import fastapi
import uvicorn
from fastapi import responses
from starlette import requests
from starlette import types as asgi
from uvicorn.protocols.http import h11_impl

MAX_BODY_BYTES = 64 * 2**20
MAX_JSON_BYTES = 2**16
MAX_BODIES_BYTES = 512 * 2**20  # of a server, all connections together
MAX_FILES = 2**16  # open ones that are asked for
RETRY_S = 2
HEAD_S, BODY_PAUSE_S, WRITE_PAUSE_S = 30.0, 30.0, 60.0
BODY_GRACE_S, MIN_BODY_RATE = 30.0, 2**15  # bytes per second, beyond the first seconds


class Gone(Exception):
    """The client hung up; nobody reads the answer."""


class TooSlow(Exception):
    """The client stopped sending in the middle of its body, or sends it too slowly."""


class Full(Exception):
    """The budget of bodies is taken."""


def server(
    app: fastapi.FastAPI,
    *,
    drain_s: int = 5,
    max_bodies_bytes: int = MAX_BODIES_BYTES,
    max_connections: int | None = None,
) -> uvicorn.Server:
    """A quiet uvicorn server; call `.run(sockets=[sock])`, stop it by `should_exit = True` or SIGTERM.

    It then takes no more connections, and gives the requests it has `drain_s` to end. `max_connections`: by default three
    quarters of the files that the process may have open.
    """
    app.add_exception_handler(requests.ClientDisconnect, handle_disconnect)
    app.add_exception_handler(TooSlow, _too_slow)
    app.add_exception_handler(Full, _full)
    # log_config: uvicorn's default resets all of logging, and with it absl's handler, which then closes standard error
    config = uvicorn.Config(
        _Budgeted(app, Budget(max_bodies_bytes), Budget(max_connections or _most_files() * 3 // 4)),
        http=_Protocol,
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,  # uvicorn's default lets a client behind a local proxy choose its address
        timeout_keep_alive=30,
        timeout_graceful_shutdown=drain_s,
    )
    return uvicorn.Server(config)


async def read_body(request: fastapi.Request, max_bytes: int = MAX_BODY_BYTES, *, keep: bool = False) -> bytes:
    """The whole body; ValueError as soon as it exceeds `max_bytes`, before the rest is read; Full, TooSlow.

    It counts against the server's budget while it is read, with `keep` until the request is answered: for a route that
    keeps the bytes and waits.
    """
    part: _Part | None = request.scope.get(_Budgeted.KEY)
    chunks, size = [], 0
    stream, begun_s = aiter(request.stream()), time.monotonic()
    try:
        while True:
            # When what has come so far is too little; a client that sends more moves it on.
            left_s = begun_s + BODY_GRACE_S + size / MIN_BODY_RATE - time.monotonic()
            try:
                async with asyncio.timeout(min(BODY_PAUSE_S, left_s)):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return b"".join(chunks)
            except TimeoutError as error:
                if not size or left_s > BODY_PAUSE_S:
                    raise TooSlow(
                        f"no byte of the request body came for {BODY_PAUSE_S:.0f} s; send it without a pause"
                    ) from error
                raise TooSlow(
                    f"{size} bytes of the request body came in {time.monotonic() - begun_s:.0f} s; send at least {MIN_BODY_RATE} bytes "
                    f"per second beyond the first {BODY_GRACE_S:.0f} s"
                ) from error
            size += len(chunk)
            if size > max_bytes:
                raise ValueError(f"the request body exceeds {max_bytes} bytes, the most that is taken")
            if part is not None:
                part.take(len(chunk))
            chunks.append(chunk)
    finally:
        if part is not None and not keep:
            part.give_back()


def release_body(request: fastapi.Request) -> None:
    """What `read_body` held is let go before the request is answered."""
    part: _Part | None = request.scope.get(_Budgeted.KEY)
    if part is not None:
        part.give_back()


async def read_json(request: fastapi.Request, max_bytes: int = MAX_JSON_BYTES) -> dict:
    raw = await read_body(request, max_bytes)
    try:
        body = json.loads(raw or b"{}")
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the request body must be a JSON object; got {type(body).__name__}")
    return body


class Budget:
    """What one server holds of something, by the address it is for: bytes of bodies, connections. Used from its event loop alone."""

    def __init__(self, size: int):
        self.free = size
        self.held: collections.Counter[str] = collections.Counter()

    def take(self, address: str, amount: int) -> bool:
        """False where the address would then hold more than it leaves free."""
        if self.held[address] + amount > self.free - amount:
            return False
        self.free -= amount
        self.held[address] += amount
        return True

    def give_back(self, address: str, amount: int) -> None:
        self.free += amount
        self.held[address] -= amount
        if not self.held[address]:
            del self.held[address]


async def until_gone(request: fastapi.Request, work: Awaitable):
    """The result of `work`; cancels it and raises Gone when the client hangs up first."""
    work = asyncio.ensure_future(work)
    gone = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Gone
        return work.result()
    finally:
        gone.cancel()
        work.cancel()  # no effect on a finished one


async def disconnected(request: fastapi.Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def handle_disconnect(request: fastapi.Request, error: Exception) -> responses.Response:
    """Exception handler: the client went away while it was sending; nobody reads the answer, and it is no error of ours."""
    return responses.Response(status_code=499)


async def _too_slow(request: fastapi.Request, problem: TooSlow) -> responses.Response:
    return error(408, str(problem), "timeout")


async def _full(request: fastapi.Request, problem: Full) -> responses.Response:
    return error(503, f"{problem}; try again in {RETRY_S} s", "overloaded", {"retry-after": str(RETRY_S)})


def error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> responses.JSONResponse:
    return responses.JSONResponse({"error": error_body(status, message, kind)}, status_code=status, headers=headers)


def error_body(status: int, message: str, kind: str) -> dict:
    return {"message": message, "type": kind, "code": status, "param": None}


class RequireKey:
    """ASGI middleware: 401 without `Authorization: Bearer <key>`, but on the routes that say whether we live."""

    OPEN = ("/health", "/liveness")

    def __init__(self, app: asgi.ASGIApp, key: str):
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = error(401, "no valid API key; send Authorization: Bearer <key>", "authentication_error")
                return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


class _Part:
    """What one request holds of a budget."""

    def __init__(self, budget: Budget, address: str):
        self._budget, self._address, self._held = budget, address, 0

    def take(self, num_bytes: int) -> None:
        if not self._budget.take(self._address, num_bytes):
            held, free = self._budget.held[self._address], self._budget.free
            raise Full(f"request bodies of your address take {held} bytes, and {free} are free")
        self._held += num_bytes

    def give_back(self) -> None:
        self._budget.give_back(self._address, self._held)
        self._held = 0


class _Budgeted:
    """ASGI middleware: each request has a part of one budget, which ends with it."""

    KEY = "intellax.body"

    def __init__(self, app: asgi.ASGIApp, budget: Budget, connections: Budget):
        self._app, self._budget, self.connections = app, budget, connections

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        part = _Part(self._budget, _party(scope))
        try:
            await self._app(scope | {self.KEY: part}, receive, send)
        finally:
            part.give_back()


def client_network(request: fastapi.Request) -> str:
    """Who shares what a server has to give with the client of this request."""
    return _party(request.scope)


def _party(scope: asgi.Scope) -> str:
    return _network((scope.get("client") or ("",))[0])


def _network(host: str) -> str:
    """An IPv4 address alone, an IPv6 one with its network."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Address(int(address) >> 64 << 64))


def stop_at_eof(stop) -> None:
    """Calls `stop` once standard input closes: a parent that holds the other end took us along, however it died."""

    def wait():
        while os.read(0, 4096):
            pass
        stop()
        time.sleep(5)
        os._exit(0)  # a request that does not end must not keep an orphan alive

    threading.Thread(target=wait, name="stop-at-eof", daemon=True).start()


def _most_files() -> int:
    """Files that this process may have open, once it has asked for as many as it may: the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class _Protocol(h11_impl.H11Protocol):
    """uvicorn's HTTP/1.1, with a limit on how long a connection may be of no use."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _held_by: str | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        network = _network((self.client or ("",))[0])
        if self.config.app.connections.take(network, 1):
            self._held_by = network
            self._expect_head()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("_head_timer")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("_head_timer")
        self._stop("_write_timer")
        if self._held_by is not None:
            self.config.app.connections.give_back(self._held_by, 1)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._write_timer = self._write_timer or self.loop.call_later(WRITE_PAUSE_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop("_write_timer")
        super().resume_writing()

    def _expect_head(self) -> None:
        self._head_timer = self._head_timer or self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop(self, name: str) -> None:
        with contextlib.suppress(AttributeError):
            getattr(self, name).cancel()
        setattr(self, name, None)
