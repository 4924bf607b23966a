"""GET /metrics and /health of any role's process, in an app that exists or on a port of their own."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import fastapi
import prometheus_client
from fastapi import responses
from prometheus_client import registry

from inference.server import web
from sharding.system import sockets


def add(app: fastapi.FastAPI, metrics: registry.Collector, health: Callable[[], dict] | None = None) -> None:
    """Adds the route GET /metrics to an app, and GET /health if `health` returns its reply."""

    @app.get("/metrics")
    async def scrape():
        text = prometheus_client.generate_latest(metrics)  # pyright: ignore  # it only calls `collect`
        return responses.PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    if health:

        @app.get("/health")
        def state():  # in a thread, as `health` may ask another process
            return {"status": "ok"} | health()


@contextlib.contextmanager
def serving(
    address: str,
    health: Callable[[], dict],
    *roles: registry.Collector,
    add_more: Callable[[fastapi.FastAPI], None] = lambda app: None,
) -> Iterator[str]:
    """Serves both routes for the metrics of `roles` at [HOST:]PORT in a thread, until the `with` block ends; yields the URL.

    `add_more` adds further routes to the app.
    """
    app = fastapi.FastAPI(title="Intellax metrics", docs_url=None, redoc_url=None)
    metrics = prometheus_client.CollectorRegistry()
    for role in roles:
        metrics.register(role)
    add(app, metrics, health)
    add_more(app)
    sock = listen(address)
    with web.in_thread(web.server(app), sock):
        yield sockets.address(sock)


def listen(address: str) -> socket.socket:
    """Returns a socket that listens at [HOST:]PORT, by default of this machine alone. Raises ValueError for any other text."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"the address of metrics is {address!r}; give PORT, or HOST:PORT")
    return sockets.listen(host or "127.0.0.1", int(port))
