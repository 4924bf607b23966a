"""The routes of whoever runs the server: weights, pause, health, metrics. Names and shapes as prime-rl calls them.

/pause stops stepping between two engine calls and keeps every sequence with its keys; /resume goes on. Neither is needed
for an update, which also falls between two calls.
"""

import asyncio

import fastapi
from fastapi import responses

from inference.server import inference_server, schemas, web


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer) -> None:
    scheduler = server.scheduler

    @app.post("/update_weights")
    async def update_weights(request: fastapi.Request):
        body = schemas.UpdateWeights.model_validate_json(await web.read_body(request) or b"{}")
        version = await asyncio.to_thread(server.update, body.version, body.weight_dir)
        return {"status": "ok", "version": version}

    @app.post("/pause")
    async def pause(mode: str = "keep", clear_cache: bool = False):
        if mode != "keep":
            raise ValueError(f"mode {mode!r} is not supported; use keep, and abort requests by hanging up")
        await asyncio.wrap_future(scheduler.pause(clear_prefixes=clear_cache))
        return {"status": "paused"}

    @app.post("/resume")
    async def resume():
        await asyncio.wrap_future(scheduler.resume())
        return {"status": "resumed"}

    @app.get("/health")
    async def health():
        alive = scheduler.is_alive
        body = {
            "status": "ok" if alive else "the scheduler stopped; see the server's log",
            "policy_version": scheduler.version,
            "paused": scheduler.is_paused,
            "running": scheduler.num_running,
            "pending": scheduler.num_pending,
            "stats": dict(scheduler.stats),
        }
        return responses.JSONResponse(body, status_code=200 if alive else 503)

    @app.get("/liveness")
    async def liveness():
        alive = scheduler.is_alive
        return responses.JSONResponse({"status": "ok" if alive else "dead"}, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def metrics():
        return responses.PlainTextResponse(exposition(server), media_type="text/plain; version=0.0.4")


def exposition(server: inference_server.InferenceServer) -> str:
    """Prometheus' text format: the names that prime-rl's concurrency controller reads, then ours."""
    scheduler, config = server.scheduler, server.engine.config
    stats, running = dict(scheduler.stats), scheduler.num_running
    waiting = max(scheduler.num_pending - scheduler.num_running_requests, 0)
    label = f'engine="0",model_name="{server.model_name}"'
    blocks, block = config.num_slots, config.max_model_len
    rows = [
        ("vllm:num_requests_running", "gauge", label, scheduler.num_running_requests),
        ("vllm:num_requests_waiting", "gauge", label, waiting),
        ("vllm:num_requests_waiting_by_reason", "gauge", label + ',reason="capacity"', waiting),
        ("vllm:kv_cache_usage_perc", "gauge", label, scheduler.cache_usage()),
        ("vllm:cache_config_info", "gauge", label + f',num_gpu_blocks="{blocks}",block_size="{block}"', 1),
        ("vllm:num_preemptions_total", "counter", label, 0),  # a sequence keeps its slot to its end
        ("vllm:prefix_cache_queries_total", "counter", label, stats["prefix_queries"]),
        ("vllm:prefix_cache_hits_total", "counter", label, stats["prefix_hits"]),
        ("vllm:prompt_tokens_total", "counter", label, stats["prefix_queries"]),
        ("vllm:generation_tokens_total", "counter", label, stats["tokens"]),
        ("intellax:policy_version", "gauge", label, scheduler.version),
        ("intellax:slots_running", "gauge", label, running),
        ("intellax:prefix_cache_bytes", "gauge", label, scheduler.prefix_bytes),
    ]
    counted = {"prefix_queries", "prefix_hits", "tokens"}
    rows += [
        (f"intellax:{name}_total", "counter", label, value) for name, value in stats.items() if name not in counted
    ]
    lines = []
    for name, kind, labels, value in rows:
        lines += [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value}"]
    return "\n".join(lines) + "\n"
