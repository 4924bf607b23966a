"""The HTTP server of every process here: uvicorn with limits per client, and errors in OpenAI's format.

1. A connection is closed if it sends no complete request head within 30 s, or reads nothing of a reply for 60 s. A network
   may have as many connections as it leaves free of those that the process can open; further ones are closed immediately.
   16 networks can fill all. So one with few connections takes the place of another's last: it must not be kept out.
2. A request body is read up to a maximum size. A pause of 30 s ends the request with status 408, and so does a rate below
   32 KiB/s after the first 30 s. So 64 MiB take 35 minutes at most.
3. All bodies of a server share a budget of bytes. A network may use as many bytes as it leaves free: one network at most half,
   a second a quarter, so that 13 fill all but 64 KiB, as 16 do all connections. Beyond that, a client gets 503 and `retry-after`.
4. A request with two lengths is refused, because a proxy in front may read the other one.
5. A request whose client disconnects is cancelled (`run_until_disconnect`).

A network is an IPv4 address, or 64 bits of an IPv6 address, because one host has all of those. It is that of the connection:
headers could name any, so clients of one proxy share its part.
"""

import asyncio
import collections
import contextlib
import functools
import itertools
import json
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from typing import TypeVar

import fastapi
import pydantic
import uvicorn
from fastapi import responses
from starlette import requests
from starlette import types as asgi
from uvicorn.protocols.http import h11_impl

from sharding.system import sockets

MAX_BODY_BYTES = 64 * 2**20
MAX_JSON_BYTES = 2**16
MAX_BODIES_BYTES = 512 * 2**20  # of all connections together
MAX_FILES = 2**16  # open files that the process requests from the system
FEW_CONNECTIONS = 4  # of a network, which it gets at the cost of larger ones: a worker has two
SITE_BITS = 48  # of IPv6, whose connections count together: a site has 65,536 networks of 64 bits
MAX_LOOKS = 64  # at large networks, for the largest
RETRY_S = 2
HEAD_S, BODY_PAUSE_S, WRITE_PAUSE_S = 30.0, 30.0, 60.0
BODY_GRACE_S, MIN_BODY_RATE = 30.0, 2**15  # bytes per second, after the first seconds

Schema = TypeVar("Schema", bound=pydantic.BaseModel)
Result = TypeVar("Result")


def server(
    app: fastapi.FastAPI,
    *,
    drain_s: int = 5,
    max_bodies_bytes: int = MAX_BODIES_BYTES,
    max_connections: int = 0,
    keep_alive_s: int = 30,
    takes_signals: bool = True,
) -> uvicorn.Server:
    """Returns a uvicorn server of `app` without log output, for `run`, `in_thread`, or the event loop of the caller (`serve`).

    Setting `should_exit = True` stops it, and so does SIGTERM in `run`: it accepts no more connections, and running requests get
    `drain_s` seconds. If `max_connections` is 0, it is three quarters of the files that the process may open. A connection without a
    request stays open for `keep_alive_s`. `takes_signals` = False leaves signals to a process of which the server is a part.
    """
    app.add_exception_handler(requests.ClientDisconnect, handle_disconnect)
    app.add_exception_handler(fastapi.HTTPException, _reply_error)
    app.state.body_budget = Budget(max_bodies_bytes)
    app.state.connections = Connections(max_connections or _max_files() * 3 // 4)
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_config=None,  # uvicorn's default resets all logging, and absl's handler then closes standard error
        log_level="error",
        access_log=False,
        proxy_headers=False,  # uvicorn's default lets a client of a local proxy choose its address
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=drain_s,
        lifespan="auto" if takes_signals else "off",  # a forced exit does not end its task
    )
    return uvicorn.Server(config) if takes_signals else _PartOfProcess(config)


class _PartOfProcess(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(server: uvicorn.Server, sock: socket.socket) -> None:
    """Serves on a listening socket until SIGTERM, Ctrl-C or `should_exit`, then returns, so that the caller can clean up."""
    if threading.current_thread() is threading.main_thread():
        # uvicorn replaces this handler during its own run, and raises the signal again afterwards, which would end the process.
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[sock])


@contextlib.contextmanager
def in_thread(server: uvicorn.Server, sock: socket.socket) -> Iterator[None]:
    """Serves on a listening socket in a thread until the `with` block ends."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.asynccontextmanager
async def open_body(request: fastapi.Request, max_bytes: int = MAX_BODY_BYTES) -> AsyncIterator[bytes]:
    """Yields a request's whole body. Its bytes count against the server's memory limit for bodies until the `with` block ends.

    Raises ValueError if the body exceeds `max_bytes`, and HTTPException if it arrives too slowly or the limit is used up.
    """
    budget = getattr(request.app.state, "body_budget", None) or Budget(MAX_BODIES_BYTES)
    network, chunks, size = client_network(request), [], 0
    stream, begun_s = aiter(request.stream()), time.monotonic()
    try:
        while True:
            # Time until the bytes so far are too few. More bytes extend it.
            left_s = begun_s + BODY_GRACE_S + size / MIN_BODY_RATE - time.monotonic()
            try:
                async with asyncio.timeout(min(BODY_PAUSE_S, left_s)):
                    if not (chunk := await anext(stream, b"")):  # starlette ends a body with an empty chunk
                        break
            except TimeoutError as error:
                message = f"no byte of the request body came for {BODY_PAUSE_S:.0f} s; send it without a pause"
                if size and left_s <= BODY_PAUSE_S:
                    rate = f"{MIN_BODY_RATE} bytes per second after the first {BODY_GRACE_S:.0f} s"
                    passed_s = time.monotonic() - begun_s
                    message = f"{size} bytes of the request body came in {passed_s:.0f} s; send at least {rate}"
                raise fastapi.HTTPException(408, error_body(408, message, "timeout")) from error
            if size + len(chunk) > max_bytes:
                raise ValueError(f"the request body exceeds {max_bytes} bytes, the maximum; send a smaller one")
            if not budget.take(network, len(chunk)):
                usage = f"request bodies from your network use {budget.used[network]} bytes, and {budget.free} are free"
                body = error_body(503, f"{usage}; try again in {RETRY_S} s", "overloaded")
                raise fastapi.HTTPException(503, body, {"retry-after": str(RETRY_S)})
            size += len(chunk)
            chunks.append(chunk)
        yield b"".join(chunks)
    finally:
        budget.give_back(network, size)


async def read_body(request: fastapi.Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Returns a request's whole body, counted against the memory limit only while read. Raises the errors of `open_body`."""
    async with open_body(request, max_bytes) as body:
        return body


async def read_json(request: fastapi.Request, max_bytes: int = MAX_JSON_BYTES) -> dict:
    """Returns the JSON object in a request's body, {} if the body is empty. Raises ValueError for other bodies."""
    raw = await read_body(request, max_bytes)
    try:
        body = json.loads(raw or b"{}")
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the request body is not JSON ({error}); send a JSON object") from error
    if not isinstance(body, dict):
        raise ValueError(f"the request body is a JSON {type(body).__name__}; send a JSON object")
    return body


async def read_schema(request: fastapi.Request, schema: type[Schema], max_bytes: int = MAX_BODY_BYTES) -> Schema:
    """Returns a request's JSON body as an instance of a pydantic model. Raises ValueError for other bodies."""
    return schema.model_validate_json(await read_body(request, max_bytes))


class Budget:
    """One limited resource of the server, such as connections, shared fairly by client networks. For use in the event loop only."""

    def __init__(self, size: int):
        self.free = size
        self.used: collections.Counter[str] = collections.Counter()

    def take(self, network: str, amount: int) -> bool:
        """Takes `amount` of the resource for a network. Returns False, taking nothing, if the network would then use more than is left free after it."""
        if self.used[network] + amount > self.free - amount:
            return False
        self.free -= amount
        self.used[network] += amount
        return True

    def give_back(self, network: str, amount: int) -> None:
        """Returns `amount` of the resource, which `take` gave to a network."""
        self.free += amount
        self.used[network] -= amount
        if not self.used[network]:
            del self.used[network]


class Connections(Budget):
    """The open connections of a server. A network with fewer than `FEW_CONNECTIONS` gets one more at the cost of a larger one."""

    def __init__(self, size: int):
        super().__init__(size)
        # by network, the last at the end
        self._opened: dict[str, dict[asyncio.Transport, None]] = collections.defaultdict(dict)
        self._large: dict[str, None] = {}  # networks with more than FEW_CONNECTIONS

    def open(self, network: str, transport: asyncio.Transport) -> bool:
        """Adds a connection, if necessary after closing one of a larger network. Returns False if its network may not have one more."""
        if not self.take(network, 1):
            if self.used[network] >= FEW_CONNECTIONS or not self._large:
                return False
            largest = max(itertools.islice(self._large, MAX_LOOKS), key=self.used.__getitem__)
            last = next(reversed(self._opened[largest]))
            self.close(largest, last)
            last.abort()
            self.free -= 1
            self.used[network] += 1
        self._opened[network][transport] = None
        if self.used[network] > FEW_CONNECTIONS:
            self._large[network] = None
        return True

    def close(self, network: str, transport: asyncio.Transport) -> None:
        """Removes a connection, unless that was done before."""
        if transport not in self._opened.get(network, ()):
            return
        del self._opened[network][transport]
        if not self._opened[network]:
            del self._opened[network]
        self.give_back(network, 1)
        if self.used[network] <= FEW_CONNECTIONS:
            self._large.pop(network, None)


async def run_until_disconnect(request: fastapi.Request, work: Awaitable[Result]) -> Result:
    """Awaits `work` and returns its result. If the client disconnects first, cancels `work` and raises ClientDisconnect."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise requests.ClientDisconnect
        return task.result()
    finally:
        disconnect.cancel()
        task.cancel()  # has no effect on a finished one


async def _wait_for_disconnect(request: fastapi.Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def handle_disconnect(request: fastapi.Request, error: Exception) -> responses.Response:
    """Handles ClientDisconnect by an error reply that no client reads, so that the server logs no error."""
    return responses.Response(status_code=499)


async def _reply_error(request: fastapi.Request, problem: Exception) -> responses.Response:
    assert isinstance(problem, fastapi.HTTPException)
    return responses.JSONResponse({"error": problem.detail}, problem.status_code, problem.headers)


def reply_errors(app: fastapi.FastAPI, kinds: Mapping[type[Exception], tuple[int, str]]) -> None:
    """Makes errors of these kinds replies with their text, and the status and type that `kinds` has."""

    async def reply(status: int, kind: str, request: fastapi.Request, problem: Exception):
        return error(status, str(problem) or type(problem).__name__, kind)

    for kind, rule in kinds.items():
        app.add_exception_handler(kind, functools.partial(reply, *rule))


def error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> responses.JSONResponse:
    """Returns an HTTP error reply with a body in OpenAI's format."""
    return responses.JSONResponse({"error": error_body(status, message, kind)}, status_code=status, headers=headers)


def error_body(status: int, message: str, kind: str) -> dict:
    """Returns the inner object of an error body in OpenAI's format."""
    return {"message": message, "type": kind, "code": status, "param": None}


def client_network(request: fastapi.Request) -> str:
    """Returns the network of a request's client, to which all limits apply: its IPv4 address, or its /64 of IPv6."""
    return sockets.network((request.scope.get("client") or ("",))[0])


def _max_files() -> int:
    """Raises this process's soft limit of open files (usually 1024) and returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def _refuse_two_lengths(app: asgi.ASGIApp, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
    """Replies 400 to a request with Content-Length and Transfer-Encoding: a proxy may read the other one, and so another request."""
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope.get("headers", ())}:
        message = "the request has Content-Length and Transfer-Encoding; send one of them"
        app = error(400, message, "invalid_request_error", {"connection": "close"})
    await app(scope, receive, send)


class _Protocol(h11_impl.H11Protocol):
    """uvicorn's HTTP/1.1 protocol with limits on idle connections and on connections per network."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _counted_for: str | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.app = functools.partial(_refuse_two_lengths, self.app)
        network = sockets.network((self.client or ("",))[0], SITE_BITS)
        if self._connections().open(network, self.transport):
            self._counted_for = network
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
        if self._counted_for is not None:
            self._connections().close(self._counted_for, self.transport)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        if self._write_timer is None:
            self._expect_read()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop("_write_timer")
        super().resume_writing()

    def _connections(self) -> Connections:
        assert isinstance(self.config.app, fastapi.FastAPI)
        return self.config.app.state.connections

    def _expect_head(self) -> None:
        self._head_timer = self._head_timer or self.loop.call_later(HEAD_S, self.transport.abort)

    def _expect_read(self) -> None:
        """Closes the connection if the client reads nothing for WRITE_PAUSE_S: if the buffer of unsent bytes does not shrink.

        `resume_writing` does not show it, since it comes only after nearly all bytes are sent.
        """
        unsent = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() < unsent:
                self._expect_read()
            else:
                self.transport.abort()

        self._write_timer = self.loop.call_later(WRITE_PAUSE_S, check)

    def _stop(self, name: str) -> None:
        with contextlib.suppress(AttributeError):
            getattr(self, name).cancel()
        setattr(self, name, None)
