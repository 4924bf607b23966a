"""The inference server: prompts in; tokens, log-probabilities, versions and proofs out; over HTTP and JetStream's gRPC.

    python -m inference.serve --weights runs/quickstart/weights --port 8100
    python -m inference.serve --model path/to/a/hugging_face_folder --mesh tensor=4,data=-1

1. Loads the newest version of a broadcast, once there is one, or a Hugging Face folder, onto one device or a `--mesh` of all
   devices of this host. Compiles, then listens.
2. `POST /update_weights` (or `--watch`) pulls and verifies a newer version while the old one serves, and swaps it in between
   two engine calls. After a failed pull, the old weights keep serving.
3. SIGTERM: accepts no more connections; running requests get `--drain_s` seconds; exit code 0.

Routes, by file in inference/server/: generate_routes (/inference/v1/generate), openai_routes (/v1/chat/completions[/tokens],
/v1/completions, /tokenize, /detokenize, /v1/models), admin_routes (/update_weights, /pause, /resume, /health, /liveness,
/metrics).
"""

import argparse
import dataclasses
import functools
import gc
import os
import pathlib
import socket
import sys
import threading
import time

import fastapi
import pydantic
from starlette import requests

from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import admin_routes, generate_routes, inference_server, openai_routes, schemas, web
from sharding import broadcast
from sharding import mesh as mesh_lib
from sharding.system import cli, sockets

MAX_BODY_BYTES = 8 * 2**20  # half a million token IDs; parsed, a body takes about twenty times its size
# {exception: (status, type of OpenAI's error object, headers)}
ERRORS = {
    ValueError: (400, "invalid_request_error", None),
    fastapi.exceptions.RequestValidationError: (400, "invalid_request_error", None),  # of the query string
    broadcast.CorruptSource: (500, "weights_error", None),
    OSError: (500, "weights_error", None),
    scheduler_lib.Overloaded: (429, "overloaded", {"retry-after": "1"}),
    scheduler_lib.Closed: (503, "shutting_down", {"retry-after": "5"}),
    scheduler_lib.Fault: (500, "engine_error", None),
}


def make_app(server: inference_server.InferenceServer, *, api_key: str | None = None) -> fastapi.FastAPI:
    """Returns the HTTP app of an inference server with all its routes. Clients must send `api_key`; None requires no key."""
    app = fastapi.FastAPI(title="Intellax inference server", docs_url=None, redoc_url=None, openapi_url=None)
    generate_routes.add(app, server, MAX_BODY_BYTES)
    openai_routes.add(app, server, MAX_BODY_BYTES)
    admin_routes.add(app, server)
    if api_key:
        app.add_middleware(web.RequireKey, key=api_key)
    app.add_exception_handler(requests.ClientDisconnect, web.handle_disconnect)
    for kind in ERRORS:
        app.add_exception_handler(kind, functools.partial(_reply_error, *ERRORS[kind]))
    for status in (404, 405):
        app.add_exception_handler(status, functools.partial(_reply_no_route, status))
    return app


async def _reply_error(status: int, kind: str, headers: dict | None, request: fastapi.Request, error: Exception):
    message = schemas.describe(error) if isinstance(error, pydantic.ValidationError) else str(error)
    if kind == "weights_error":
        message += "; the weights in use keep serving"
    return web.error(status, message, kind, headers)


async def _reply_no_route(status: int, request: fastapi.Request, error: Exception):
    message = f"route {request.method} {request.url.path} does not exist; see inference/serve.py for all routes"
    return web.error(status, message, "not_found")


def main(argv: list[str] | None = None) -> int:
    """Runs the inference server's command until SIGTERM or Ctrl-C. Returns the exit code."""
    args = _parse(argv)
    try:
        _check(args)
        sock, server = _start(args)
        grpc_server, grpc_port = None, 0
        if args.grpc_port is not None:
            from inference.server import grpc_service  # imports JetStream's protocol buffers, only when used

            grpc_port, grpc_server = grpc_service.start(server, args.host, args.grpc_port)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    app = make_app(server, api_key=args.api_key or os.environ.get("INTELLAX_API_KEY"))
    uvicorn_server = web.server(app, drain_s=args.drain_s)
    if args.exit_with_parent:
        cli.stop_at_eof(lambda: setattr(uvicorn_server, "should_exit", True))
    if args.watch:
        threading.Thread(target=_watch, args=(server, args.watch), daemon=True).start()
    print(f"serving policy version {server.scheduler.version} on {sockets.address(sock)}", flush=True)
    if grpc_server is not None:
        print(f"serving JetStream's Decode on {args.host}:{grpc_port}", flush=True)
    if 0 < (trained := server.engine.model.max_positions) < args.max_model_len:
        note = f"--max_model_len {args.max_model_len} exceeds the {trained} positions that the model was trained for"
        inference_server.log(f"note: {note}")
    if args.address_file:
        sockets.announce(args.address_file, sock)
    # Existing objects are permanent. Without this, each full collection would stop all requests for 0.2 s.
    gc.collect()
    gc.freeze()
    web.run(uvicorn_server, sock)
    if grpc_server is not None:
        grpc_server.stop(args.drain_s).wait()
    server.close()
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(prog="python -m inference.serve", description=__doc__)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--weights", nargs="+", help="the weight broadcast: a directory, a bucket URL, or the URLs of relays")
    add("--model", help="a Hugging Face folder (config.json, safetensors, tokenizer.json) or hub ID")
    add = parser.add_argument
    add("--weights_key", help="hex of the public key that must have signed the weights")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8100, help="0 takes a free port")
    add("--grpc_port", type=int, help="port of JetStream's gRPC service; 0 takes a free one (default: none)")
    add("--address_file", help="file to write the URL to once the server answers")
    add("--served_model_name", default="policy", help="the model's ID in /v1/models")
    add("--api_key", help="key required of every client (default: $INTELLAX_API_KEY, or none)")
    add("--num_slots", type=int, default=64)
    add("--max_model_len", type=int, default=1024)
    add("--prefill_batch", type=int, default=16)
    add("--prefill_chunk", type=int, default=512, help="longer prompts are prefilled in chunks")
    add("--steps_per_call", type=int, default=8)
    add("--max_queue", type=int, default=4096, help="maximum of pending requests; further ones get status 429")
    add("--prefix_cache_mib", type=int, default=256, help="memory for the prefix cache; 0 disables it")
    add("--mesh", default="", help="mesh axes over this host's devices, such as tensor=4,data=-1 (default: one device)")
    add("--quantize", default="none", help="int8 halves the memory of large matrices, and changes the policy slightly")
    add("--warm_up", action="store_true", help="compile for prompts of every length before listening")
    add("--routed_experts", action="store_true", help="record each token's experts, for router replay")
    add("--watch", type=float, default=0.0, metavar="SECONDS", help="poll for newer weights at this interval")
    add("--drain_s", type=int, default=30, help="seconds that running requests get on SIGTERM")
    add("--exit_with_parent", action="store_true", help="stop when standard input closes")
    return parser.parse_args(argv)


def _check(args: argparse.Namespace) -> None:
    for name, least in (("max_queue", 1), ("prefix_cache_mib", 0), ("watch", 0), ("drain_s", 0), ("max_model_len", 2)):
        if not getattr(args, name) >= least:
            raise ValueError(f"--{name} = {getattr(args, name)} is too small; choose {least} or more")
    if args.grpc_port is not None and not 0 <= args.grpc_port <= 65535:
        raise ValueError(f"--grpc_port = {args.grpc_port} is not a port; choose 0 to 65535")
    if args.address_file and not pathlib.Path(args.address_file).parent.is_dir():
        raise ValueError(f"--address_file {args.address_file} is in a directory that does not exist; create that first")
    if args.model and (args.weights_key or args.watch):
        name = "weights_key" if args.weights_key else "watch"
        raise ValueError(f"--{name} applies to a broadcast, and --model is a folder; leave it out, or serve --weights")


def _start(args: argparse.Namespace) -> tuple[socket.socket, inference_server.InferenceServer]:
    fields = dataclasses.fields(engine_lib.EngineConfig)
    config = engine_lib.EngineConfig(**{field.name: getattr(args, field.name) for field in fields})
    options = {
        "max_queue": args.max_queue,
        "prefix_cache_bytes": args.prefix_cache_mib * 2**20,
        "mesh": mesh_lib.parse(args.mesh),
        "quantize": args.quantize,
        "every_length": args.warm_up,
    }
    sock = sockets.listen(args.host, args.port)
    if args.weights:
        server = inference_server.start(args.weights, config, key=args.weights_key, **options)
    else:
        server = inference_server.start_model(args.model, config, **options)
    server.model_name = args.served_model_name
    return sock, server


def _watch(server: inference_server.InferenceServer, period_s: float) -> None:
    while True:
        time.sleep(period_s)
        try:
            server.update(None)
        except (ValueError, OSError) as error:
            inference_server.log(f"weights not updated: {error}; version {server.scheduler.version} keeps serving")
        except scheduler_lib.Closed:
            return


if __name__ == "__main__":
    sys.exit(main())
