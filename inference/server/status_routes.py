"""The routes that show a server's state and change nothing: model, health, metrics. Both listeners have them.

Names and formats are those of OpenAI (/v1/models) and prime-rl, whose administrator polls /health and /v1/models, too.
"""

from collections.abc import Iterator

import fastapi
import jax
from fastapi import responses
from prometheus_client import core, registry

from inference.engine import paged_cache
from inference.server import inference_server, metrics_routes
from sharding.system.logs import role_metrics


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer) -> None:
    """Adds the routes for the served model, health and metrics to an app."""
    scheduler = server.scheduler

    def cards() -> list[dict]:
        card = {
            "id": server.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "intellax",
            "max_model_len": server.engine.config.max_model_len,
            "policy_version": server.scheduler.version,
            "quantization": server.store.quantization,
            "page_dtype": server.engine.config.page_dtype or server.engine.model.dtype,
        }
        adapters = server.engine.adapters
        folders = dict(adapters.folders) if adapters else {}
        return [card, *(card | {"id": name, "root": folder, "parent": card["id"]} for name, folder in folders.items())]

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": cards()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str):
        known = {card["id"]: card for card in cards()}
        if name not in known:
            listed = ", ".join(map(repr, known))
            raise inference_server.UnknownModel(
                f"The model `{name[:64]}` does not exist. Please choose one of {listed}."
            )
        return known[name]

    @app.get("/health")
    async def health():
        alive = scheduler.is_alive
        body = {
            "status": "ok" if alive else "the scheduler stopped; see the server's log",
            "policy_version": scheduler.version,
            "policy_epoch": scheduler.epoch,
            "policy_digest": server.policy_digest,
            "paused": scheduler.is_paused,
            "released": scheduler.is_released,
            "running": len(scheduler.slots.running),
            "pending": scheduler.num_pending,
            "load": server.load(),
            "waiting_for": waiting_for(server),
            "stats": dict(scheduler.stats),
            "numerics": numerics(server),
        }
        return responses.JSONResponse(body, status_code=200 if alive else 503)

    @app.get("/liveness")
    async def liveness():
        alive = scheduler.is_alive
        return responses.JSONResponse({"status": "ok" if alive else "dead"}, status_code=200 if alive else 503)

    metrics_routes.add(app, _Collector(server))


def numerics(server: inference_server.InferenceServer) -> str:
    """Returns the causes of a server's rounding, as a line for people: data types, device, and version of jax."""
    types = [server.engine.model.dtype, server.store.quantization, server.engine.config.page_dtype]
    return f"{' '.join(filter(None, types))} on {jax.devices()[0].device_kind}, jax {jax.__version__}"


def waiting_for(server: inference_server.InferenceServer) -> str:
    """Returns why an idle server waits, as a line for people, or "" if it generates."""
    if server.scheduler.is_paused:
        return "POST /resume, after a POST /pause"
    if server.scheduler.is_released:
        return "the end of a train step on its devices"
    loading = "; an update loads other weights" if server.update_lock.locked() else ""
    return f"requests{loading}" if not server.scheduler.num_pending else ""


class _Collector(registry.Collector):
    """Collects the server's metrics for Prometheus. Those named vllm: are read by prime-rl's concurrency controller."""

    def __init__(self, server: inference_server.InferenceServer):
        self._server = server

    def collect(self) -> Iterator[core.Metric]:
        """Yields the current value of each metric."""
        scheduler, config = self._server.scheduler, self._server.engine.config
        stats = dict(scheduler.stats)
        waiting = max(scheduler.num_pending - len(scheduler.slots.groups), 0)
        sizes = (config.num_pages, paged_cache.PAGE) if config.num_pages else (config.num_slots, config.max_model_len)
        cache = dict(zip(("num_gpu_blocks", "block_size"), map(str, sizes), strict=True))
        names = "prefix_queries", "prefix_hits", "tokens", "num_preemptions"
        queries, hits, tokens, preemptions = (stats.pop(name) for name in names)
        yield self._metric("vllm:num_requests_running", len(scheduler.slots.groups))
        yield self._metric("vllm:num_requests_waiting", waiting)
        yield self._metric("vllm:num_requests_waiting_by_reason", waiting, reason="capacity")
        yield self._metric("vllm:kv_cache_usage_perc", scheduler.slots.usage())
        yield self._metric("vllm:cache_config_info", 1, **cache)
        yield self._metric("vllm:num_preemptions_total", preemptions)
        yield self._metric("vllm:prefix_cache_queries_total", queries)
        yield self._metric("vllm:prefix_cache_hits_total", hits)
        yield self._metric("vllm:prompt_tokens_total", queries)
        yield self._metric("vllm:generation_tokens_total", tokens)
        yield self._metric("intellax:policy_version", scheduler.version)
        yield self._metric("intellax:policy_epoch", scheduler.epoch)
        yield self._metric("intellax:slots_running", len(scheduler.slots.running))
        yield self._metric("intellax:prefix_cache_bytes", scheduler.prefixes.num_bytes)
        for name, value in stats.items():
            yield self._metric(f"intellax:{name}_total", value)
        yield from role_metrics.labeled((self._server.update_s, *scheduler.seconds.values()), self._labels())

    def _labels(self) -> dict[str, str]:
        return {"engine": "0", "model_name": self._server.model_name}

    def _metric(self, name: str, value: float, **labels: str) -> core.Metric:
        family = name.removesuffix("_total")
        metric = core.Metric(family, name, "gauge" if family == name else "counter")
        metric.add_sample(name, self._labels() | labels, value)
        return metric
