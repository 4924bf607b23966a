"""The rollout server: token ids in, token ids, log-probabilities, versions and proofs out, over HTTP.

    python -m inference.serve --weights runs/quickstart/weights --port 8100

1. Waits for the first published version under `--weights`; its manifest names the model and the tokenizer.
2. Compiles, then listens. Requests go to the scheduler and come back as futures; a client that hangs up frees its slots.
3. `POST /update_weights` (or `--watch`) pulls a newer version, verified, while the old one serves, and swaps it in between
   two steps. A failed pull leaves the old weights serving.

Routes: POST /inference/v1/generate, POST /update_weights, GET /v1/models, GET /health. The first is the contract that
vLLM-based RL clients use, with fields of our own that they ignore: `policy_versions`, `prompt_policy_version`, `proofs`.
"""

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
import uuid

import fastapi
import jax
from fastapi import responses
from starlette import requests

from inference import engine as engine_lib
from inference import scheduler as scheduler_lib
from inference import web
from models import config as config_lib
from models import tokenizer as tokenizer_lib
from models import transformer
from sharding import broadcast, mesh, rules

MODEL_NAME = "policy"
MAX_FLOAT = sys.float_info.max  # JSON integers have any size, and float() raises beyond this


@dataclasses.dataclass
class Server:
    """A running engine and where its weights come from."""

    weights: str
    scheduler: scheduler_lib.Scheduler
    engine: engine_lib.Engine
    shardings: transformer.Params
    update_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def update(self, version: int | None, source: str | None = None) -> int:
        """Pulls `version` (the newest when None) and swaps it in; returns the version in force. Blocks."""
        with self.update_lock:
            source = source or self.weights
            version = broadcast.latest(source) if version is None else version
            if version is None or (version == self.scheduler.version and source == self.weights):
                return self.scheduler.version
            pulled = broadcast.pull(source, version, shardings=self.shardings)
            return self.scheduler.update(pulled.params, pulled.version).result()


def start(weights: str, config: engine_lib.EngineConfig, *, timeout_s: float = 600.0) -> Server:
    """Loads the newest weights under `weights` (waiting for the first), compiles, and starts the scheduler."""
    broadcast.wait_for(weights, 0, timeout_s=timeout_s)
    version = broadcast.latest(weights)
    metadata = broadcast.read_manifest(weights, version).metadata
    model = config_lib.ModelConfig(**metadata["model"])
    device_mesh = mesh.create({}, devices=jax.local_devices()[:1])
    shardings = rules.shardings(transformer.specs(model), device_mesh)
    pulled = broadcast.pull(weights, version, shardings=shardings)
    engine = engine_lib.Engine(model, config, tokenizer_lib.load(metadata["tokenizer"]), pulled.params)
    scheduler = scheduler_lib.Scheduler(engine, pulled.params, pulled.version)
    warm = scheduler_lib.GenerateRequest(tokens=(0,) * min(8, config.max_model_len - 1), max_tokens=1, proofs=True)
    scheduler.submit(warm).result()
    return Server(weights, scheduler, engine, shardings)


def make_app(server: Server) -> fastapi.FastAPI:
    app = fastapi.FastAPI(title="Intellax rollout server", docs_url=None, redoc_url=None)
    scheduler = server.scheduler
    app.add_exception_handler(requests.ClientDisconnect, web.hung_up)

    @app.post("/inference/v1/generate")
    async def generate(request: fastapi.Request):
        body = await web.read_json(request)
        future = asyncio.wrap_future(scheduler.submit(parse_request(body, server.engine)))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise _Gone
            return responses.JSONResponse(_reply(body, future.result()))
        finally:
            gone.cancel()
            future.cancel()  # frees the slots of a client that hung up; no effect on a finished request

    @app.post("/update_weights")
    async def update_weights(request: fastapi.Request):
        body = await web.read_json(request)
        version, source = body.get("version"), body.get("weight_dir")
        if version is not None and (type(version) is not int or version < 0):
            raise ValueError(f"version must be a non-negative integer or null; got {version!r}")
        if source is not None and not isinstance(source, str):
            raise ValueError(f"weight_dir must be a path or null; got {source!r}")
        return {"status": "ok", "version": await asyncio.to_thread(server.update, version, source)}

    @app.get("/v1/models")
    async def models():
        card = {
            "id": MODEL_NAME,
            "object": "model",
            "created": 0,
            "owned_by": "intellax",
            "max_model_len": server.engine.config.max_model_len,
            "policy_version": scheduler.version,
        }
        return {"object": "list", "data": [card]}

    @app.get("/health")
    async def health():
        alive = scheduler.is_alive
        body = {
            "status": "ok" if alive else "the scheduler stopped; see the server's log",
            "policy_version": scheduler.version,
            "running": scheduler.num_running,
            "pending": scheduler.num_pending,
            "stats": dict(scheduler.stats),
        }
        return responses.JSONResponse(body, status_code=200 if alive else 503)

    @app.exception_handler(ValueError)
    async def refuse(request, error):
        return web.error(400, str(error), "invalid_request_error")

    @app.exception_handler(broadcast.CorruptBroadcast)
    @app.exception_handler(OSError)
    async def unreadable(request, error):
        return web.error(500, f"{error}; the weights in force go on serving", "weights_error")

    @app.exception_handler(scheduler_lib.Overloaded)
    async def overloaded(request, error):
        return web.error(429, str(error), "overloaded")

    @app.exception_handler(scheduler_lib.Closed)
    async def closed(request, error):
        return web.error(503, str(error), "shutting_down")

    @app.exception_handler(_Gone)
    async def gone(request, error):
        return responses.Response(status_code=499)

    return app


def parse_request(body: dict, engine: engine_lib.Engine) -> scheduler_lib.GenerateRequest:
    """Reads the wire form; unknown keys are ignored as clients expect, wrong types are a ValueError."""
    sampling = body.get("sampling_params", {})
    if not isinstance(sampling, dict):
        raise ValueError(f"sampling_params must be an object; got {type(sampling).__name__}")
    tokens = body.get("token_ids")
    if not isinstance(tokens, list) or any(type(t) is not int for t in tokens):
        raise ValueError("token_ids must be a list of integers")
    capacity = engine.config.max_model_len
    max_tokens = _number(sampling, "max_tokens", int, None)
    stop_ids = sampling.get("stop_token_ids") or list(engine.tokenizer.stop_ids)
    if not isinstance(stop_ids, list) or any(type(t) is not int for t in stop_ids):
        raise ValueError("stop_token_ids must be a list of integers")
    top_k = _number(sampling, "top_k", int, 0)
    seed = _number(sampling, "seed", int, None)
    return scheduler_lib.GenerateRequest(
        tokens=tokens,
        num_samples=_number(sampling, "n", int, 1),
        max_tokens=max(capacity - len(tokens), 1) if max_tokens is None else max_tokens,
        temperature=_number(sampling, "temperature", float, 1.0),
        top_k=0 if top_k == -1 else top_k,
        top_p=_number(sampling, "top_p", float, 1.0),
        min_p=_number(sampling, "min_p", float, 0.0),
        seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed % 2**32,
        stop_ids=tuple(stop_ids),
        proofs=bool(body.get("proofs", False)),
    )


def _reply(body: dict, completions: list[scheduler_lib.Completion]) -> dict:
    num_prompt, num_new = len(body["token_ids"]), sum(len(c.tokens) for c in completions)
    return {
        "request_id": body.get("request_id") or f"gen-{uuid.uuid4().hex}",
        "choices": [
            {
                "index": index,
                "token_ids": c.tokens,
                "finish_reason": c.finish_reason,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob}
                        for token, logprob in zip(c.tokens, c.logprobs, strict=True)
                    ]
                },
                "policy_versions": [[v, len(list(run))] for v, run in itertools.groupby(c.versions)],
                "prompt_policy_version": c.prompt_version,
                "proofs": base64.b64encode(c.proofs).decode(),
            }
            for index, c in enumerate(completions)
        ],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }


def _number(source: dict, name: str, kind: type, default):
    value = source.get(name)
    if value is None:
        return default
    if type(value) not in ((int,) if kind is int else (int, float)) or (kind is float and not abs(value) <= MAX_FLOAT):
        raise ValueError(f"{name} must be a finite {'integer' if kind is int else 'number'}; got {value!r}")
    return kind(value)


class _Gone(Exception):
    """The client hung up."""


async def _disconnected(request: fastapi.Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m inference.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--weights", required=True, help="root of the weight broadcast (a directory)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free port")
    parser.add_argument("--address_file", help="written with the URL once the server answers")
    parser.add_argument("--num_slots", type=int, default=64)
    parser.add_argument("--max_model_len", type=int, default=1024)
    parser.add_argument("--prefill_batch", type=int, default=16)
    parser.add_argument("--steps_per_call", type=int, default=8)
    parser.add_argument("--watch", type=float, default=0.0, metavar="SECONDS", help="poll for newer weights")
    parser.add_argument("--exit_with_parent", action="store_true", help="stop when standard input closes")
    args = parser.parse_args(argv)
    try:
        config = engine_lib.EngineConfig(args.num_slots, args.max_model_len, args.prefill_batch, args.steps_per_call)
        sock = web.listen(args.host, args.port)
        server = start(args.weights, config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    uvicorn_server = web.server(make_app(server))
    if args.exit_with_parent:
        web.stop_at_eof(lambda: setattr(uvicorn_server, "should_exit", True))
    if args.watch:
        threading.Thread(target=_watch, args=(server, args.watch), daemon=True).start()
    print(f"serving policy version {server.scheduler.version} on {web.address(sock)}", flush=True)
    if args.address_file:
        _write_atomic(args.address_file, web.address(sock))
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn_server.run(sockets=[sock])
    server.scheduler.close()
    return 0


def _watch(server: Server, period_s: float) -> None:
    while True:
        time.sleep(period_s)
        try:
            server.update(None)
        except (ValueError, OSError) as error:
            print(f"weights not updated: {error}; version {server.scheduler.version} goes on serving", file=sys.stderr)


def _write_atomic(path: str, text: str) -> None:
    with open(f"{path}.tmp", "w") as file:
        file.write(text)
    os.replace(f"{path}.tmp", path)


if __name__ == "__main__":
    sys.exit(main())
