"""The routes that change a server: weights, pause, adapters. Only the control listener has them. Names and formats are those of prime-rl and vLLM.

/pause stops between two engine calls and keeps every sequence with its cache; /resume continues. An update of the weights
needs neither, because it also happens between two calls.
/v1/load_lora_adapter and /v1/unload_lora_adapter are off unless the server was started with --allow_adapter_loading: a folder is read.
"""

import asyncio
import functools

import fastapi
from fastapi import responses

from inference.server import inference_server, schemas, web


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer) -> None:
    """Adds the routes for weight updates and pausing to an app, and if the server allows it those for adapters."""
    scheduler = server.scheduler
    if server.allows_adapters:
        _add_adapters(app, server)

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


def _add_adapters(app: fastapi.FastAPI, server: inference_server.InferenceServer) -> None:
    adapters, between_calls = server.engine.adapters, server.scheduler.between_calls
    assert adapters is not None

    @app.post("/v1/load_lora_adapter")
    async def load(request: fastapi.Request):
        body = await web.read_schema(request, schemas.LoadAdapter, web.MAX_JSON_BYTES)
        name, folder = body.lora_name, body.lora_path
        if name == server.model_name:
            raise ValueError(f"lora_name {name!r} is the name of the model itself; choose another")
        read = await asyncio.to_thread(adapters.read, name, folder)
        await asyncio.wrap_future(between_calls(functools.partial(adapters.load, name, folder, read)))
        return responses.PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: fastapi.Request):
        name = (await web.read_schema(request, schemas.UnloadAdapter, web.MAX_JSON_BYTES)).lora_name
        try:
            await asyncio.wrap_future(between_calls(functools.partial(adapters.unload, name)))
        except KeyError:
            found = f"The lora adapter '{name}' cannot be found"
            return web.error(404, f"{found}; GET /v1/models lists those that can.", "NotFoundError")
        return responses.PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
