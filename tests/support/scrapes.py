"""Reads /metrics: of a registry, and of an app without a server."""

import asyncio

import httpx
from prometheus_client import parser


def names(text: str) -> set[str]:
    """The names of all metrics in Prometheus's text, counters with _total."""
    found = parser.text_string_to_metric_families(text)
    return {f"{one.name}_total" if one.type == "counter" else one.name for one in found}


def get(app, path: str) -> str:
    """The body of a GET of an app."""

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http:
            return (await http.get(path)).text

    return asyncio.run(ask())
