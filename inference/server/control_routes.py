"""The routes that change a server: weights, pause. Only the control listener has them. Names and formats are those of prime-rl.

/pause stops between two engine calls and keeps every sequence with its cache; /resume continues. An update of the weights
needs neither, because it also happens between two calls.
"""

import asyncio

import fastapi

from inference.server import inference_server, schemas, web


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer) -> None:
    """Adds the routes for weight updates and pausing to an app."""
    scheduler = server.scheduler

    @app.post("/update_weights")
    async def update_weights(request: fastapi.Request):
        body = schemas.UpdateWeights.model_validate_json(await web.read_body(request, web.MAX_JSON_BYTES) or b"{}")
        options = {"epoch": body.epoch, "digest": body.digest, "rollback": body.rollback}
        version = await asyncio.to_thread(server.update, body.version, body.weight_dir, **options)
        return {"status": "ok", "version": version}

    @app.post("/pause")
    async def pause(mode: str = "keep", clear_cache: bool = False):
        if mode != "keep":
            raise ValueError(f"mode {mode!r} is not supported; use keep, and disconnect to abort a request")
        await asyncio.wrap_future(scheduler.pause(clear_prefixes=clear_cache))
        return {"status": "paused"}

    @app.post("/resume")
    async def resume():
        await asyncio.wrap_future(scheduler.resume())
        return {"status": "resumed"}
