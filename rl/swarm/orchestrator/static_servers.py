"""Servers that config names by URL, and that sign in nowhere: a task for each polls its health, and sends it new policies.

A failed call is repeated, for each server alone: the registry shows its error, and no server ends a run.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import httpx

from inference import client as client_lib
from rl.protocol import registry
from sharding.system import bounded_reply, retries, sign_in

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0  # after a failed update
HEALTH_S = 10.0  # for the reply to a request for health
NUMERICS_S = 2.0  # the same, while a verdict waits


@dataclasses.dataclass(frozen=True)
class StaticServer:
    """A server that signs in nowhere: its URL for workers, and the address and token of its control listener."""

    url: str
    control: str
    token: str | None = dataclasses.field(default=None, repr=False)
    key: str = ""  # public, by which it signs samples; "": it signs none


async def follow(server: StaticServer, nodes) -> None:
    """Beats for a static server in `nodes` (rl/swarm/orchestrator/nodes.py), and updates its weights, until it is cancelled."""
    report = registry.Report(url=server.url)
    nodes.beat(server.url, "server", report, nodes.clock())
    update, requested, pause, retry_s = None, None, retries.Backoff(FIRST_PAUSE_S, MAX_PAUSE_S), 0.0
    async with httpx.AsyncClient(timeout=HEALTH_S) as http:
        while True:
            if update and update.done():
                report = dataclasses.replace(report, problem=_problem(update))
                if not report.problem:
                    pause.reset()
                retry_s, update = time.monotonic() + pause.next_s(), None
            try:
                report = await _poll(http, server.url, report.problem)
                nodes.beat(server.url, "server", report, nodes.clock())
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
                nodes.fault(server.url, f"no health: {str(error) or type(error).__name__}")
            announced, newest = nodes.announced, nodes.target(server.url)
            is_due = newest != requested or time.monotonic() >= retry_s
            if newest and report.policy != newest and update is None and is_due:
                requested = newest
                pins = {"token": server.token, "epoch": newest.epoch, "digest": newest.digest}
                update = asyncio.ensure_future(client_lib.update_weights(server.control, newest.version, **pins))
            news = asyncio.ensure_future(announced.wait())
            try:
                waits = [news, update] if update else [news]
                await asyncio.wait(waits, timeout=nodes.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()


async def numerics(urls: Sequence[str]) -> list[str]:
    """Returns a line for people on the data types of each server, by its own account."""

    async def ask(http: httpx.AsyncClient, url: str) -> str:
        try:
            sent = "GET", f"{url}/health", client_lib.MAX_HEALTH_BYTES, NUMERICS_S
            return f"server {url} computes in {(await bounded_reply.fetch(http, *sent)).json()['numerics']}"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError, KeyError, TypeError):
            return f"server {url} does not report its data types"

    async with httpx.AsyncClient(timeout=NUMERICS_S) as http:
        return await asyncio.gather(*(ask(http, url) for url in urls))


def _problem(update: asyncio.Future) -> str:
    """Returns the error of an update of weights, or ""."""
    try:
        update.result()
        return ""
    except (ValueError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        return sign_in.one_line(f"weights not updated: {str(error) or type(error).__name__}")


async def _poll(http: httpx.AsyncClient, url: str, problem: str) -> registry.Report:
    """Returns the report of the server at `url`, read from its health, with `problem` added. Raises ValueError or httpx.HTTPError without a valid reply."""
    response = await bounded_reply.fetch(http, "GET", f"{url}/health", client_lib.MAX_HEALTH_BYTES, HEALTH_S)
    if response.status_code != 200:
        raise ValueError(client_lib.error_message(response))
    body = response.json()
    try:
        policy = {name: body[f"policy_{name}"] for name in ("epoch", "version", "digest")}
        return registry.Report.from_json({"url": url, "policy": policy, "load": body["load"], "problem": problem})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"GET {url}/health returned {str(body)[:100]}, which is not that of a server") from error
