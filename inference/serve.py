"""The rollout server: prompts in, tokens, log-probabilities, versions and proofs out, over HTTP (and JetStream's gRPC).

    python -m inference.serve --weights runs/quickstart/weights --port 8100
    python -m inference.serve --model path/to/a/hugging_face_folder --mesh tensor=4,data=-1

1. Loads the weights (service.py): the newest version of a broadcast, waiting for the first, or a Hugging Face folder; on one
   device, or over a `--mesh` of all devices of this host (a server is one process on one host).
2. Compiles, then listens. Requests go to the scheduler and come back as futures; a client that hangs up frees its slots.
3. `POST /update_weights` (or `--watch`) pulls a newer version, verified, while the old one serves, and swaps it in between
   two steps. A failed pull leaves the old weights serving.
4. SIGTERM: no more connections; the requests in flight get `--drain_s` to end; exit code 0.

Routes, by file: generate_routes (/inference/v1/generate), openai_routes (/v1/chat/completions[/tokens], /v1/completions,
/tokenize, /detokenize, /v1/models), control_routes (/update_weights, /pause, /resume, /health, /liveness, /metrics).
"""

import argparse
import contextlib
import gc
import os
import pathlib
import signal
import sys
import threading
import time

import fastapi
import pydantic
from fastapi import responses
from starlette import requests

from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import admin_routes, generate_routes, inference_server, openai_routes, schemas, web
from sharding import broadcast
from sharding import mesh as mesh_lib
from sharding.system import cli, sockets

MAX_BODY_BYTES = 8 * 2**20  # half a million token ids; parsed, a body takes about twenty times its size


def make_app(server: inference_server.InferenceServer, *, api_key: str | None = None) -> fastapi.FastAPI:
    app = fastapi.FastAPI(title="Intellax rollout server", docs_url=None, redoc_url=None, openapi_url=None)
    generate_routes.add(app, server, MAX_BODY_BYTES)
    openai_routes.add(app, server, MAX_BODY_BYTES)
    admin_routes.add(app, server)
    if api_key:
        app.add_middleware(web.RequireKey, key=api_key)
    app.add_exception_handler(requests.ClientDisconnect, web.handle_disconnect)

    @app.exception_handler(ValueError)
    @app.exception_handler(fastapi.exceptions.RequestValidationError)  # of the query string
    async def refuse(request, error):
        message = schemas.mistake(error) if isinstance(error, pydantic.ValidationError) else str(error)
        return web.error(400, message, "invalid_request_error")

    @app.exception_handler(broadcast.CorruptBroadcast)
    @app.exception_handler(OSError)
    async def unreadable(request, error):
        return web.error(500, f"{error}; the weights in force go on serving", "weights_error")

    @app.exception_handler(scheduler_lib.Overloaded)
    async def overloaded(request, error):
        return web.error(429, str(error), "overloaded", {"retry-after": "1"})

    @app.exception_handler(scheduler_lib.Closed)
    async def closed(request, error):
        return web.error(503, str(error), "shutting_down", {"retry-after": "5"})

    @app.exception_handler(scheduler_lib.Fault)
    async def fault(request, error):
        return web.error(500, str(error), "engine_error")

    @app.exception_handler(web.TooSlow)
    async def too_slow(request, error):
        return web.error(408, str(error), "timeout")

    @app.exception_handler(web.Gone)
    async def gone(request, error):
        return responses.Response(status_code=499)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def no_route(request, error):
        return web.error(error.status_code, f"there is no {request.method} {request.url.path} here", "not_found")

    return app


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m inference.serve", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--weights", nargs="+", help="the weight broadcast: a directory, a bucket URL, or the URLs of relays"
    )
    source.add_argument("--model", help="a Hugging Face folder (config.json, safetensors, tokenizer.json) or hub id")
    parser.add_argument("--weights_key", help="hex of the public key that must have signed the weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free port")
    parser.add_argument("--grpc_port", type=int, help="also serve JetStream's Decode there; 0 takes a free port")
    parser.add_argument("--address_file", help="written with the URL once the server answers")
    parser.add_argument("--served_model_name", default="policy", help="the id in /v1/models")
    parser.add_argument("--api_key", help="asked of every client (default: $INTELLAX_API_KEY, or none)")
    parser.add_argument("--num_slots", type=int, default=64)
    parser.add_argument("--max_model_len", type=int, default=1024)
    parser.add_argument("--prefill_batch", type=int, default=16)
    parser.add_argument("--prefill_chunk", type=int, default=512, help="longer prompts are prefilled in chunks")
    parser.add_argument("--steps_per_call", type=int, default=8)
    parser.add_argument("--max_queue", type=int, default=4096, help="pending requests; beyond it a client gets 429")
    parser.add_argument("--prefix_cache_mib", type=int, default=256, help="keys of prompts kept for reuse; 0: none")
    parser.add_argument(
        "--mesh", default="", help="axes over this host's devices: tensor=4,expert=2,data=-1; none: one device"
    )
    parser.add_argument(
        "--quantize", default="none", help="int8: large matrices at half the memory; then near the policy, not it"
    )
    parser.add_argument(
        "--warm_up", action="store_true", help="compile for prompts of every length before the first request is taken"
    )
    parser.add_argument("--routed_experts", action="store_true", help="record each token's experts, for router replay")
    parser.add_argument("--watch", type=float, default=0.0, metavar="SECONDS", help="poll for newer weights")
    parser.add_argument("--drain_s", type=int, default=30, help="what requests in flight get on SIGTERM")
    parser.add_argument("--exit_with_parent", action="store_true", help="stop when standard input closes")
    args = parser.parse_args(argv)
    options = {"max_queue": args.max_queue, "prefix_cache_bytes": args.prefix_cache_mib * 2**20}
    options |= {"say": lambda line: print(line, file=sys.stderr, flush=True)}
    try:
        _check(args)
        options |= {"mesh": mesh_lib.parse(args.mesh), "quantize": args.quantize, "every_length": args.warm_up}
        config = engine_lib.EngineConfig(
            args.num_slots,
            args.max_model_len,
            args.prefill_batch,
            args.steps_per_call,
            args.prefill_chunk,
            args.routed_experts,
        )
        sock = sockets.listen(args.host, args.port)
        if args.weights:
            server = inference_server.start(args.weights, config, key=args.weights_key, **options)
        else:
            server = inference_server.start_model(args.model, config, **options)
        server.model_name = args.served_model_name
        grpc_server = None
        if args.grpc_port is not None:
            from inference.server import grpc_service  # JetStream's protocol buffers: only who asks pays for them

            grpc_server = grpc_service.start(server, args.host, args.grpc_port)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    app = make_app(server, api_key=args.api_key or os.environ.get("INTELLAX_API_KEY"))
    uvicorn_server = web.server(app, drain_s=args.drain_s)
    if args.exit_with_parent:
        web.stop_at_eof(lambda: setattr(uvicorn_server, "should_exit", True))
    if args.watch:
        threading.Thread(target=_watch, args=(server, args.watch), daemon=True).start()
    print(f"serving policy version {server.scheduler.version} on {sockets.address(sock)}", flush=True)
    if grpc_server is not None:
        print(f"serving JetStream's Decode on {args.host}:{grpc_server.port}", flush=True)
    if 0 < server.engine.model.max_positions < args.max_model_len:
        print(
            f"note: --max_model_len {args.max_model_len} exceeds the {server.engine.model.max_positions} positions that the model "
            f"was trained for",
            file=sys.stderr,
            flush=True,
        )
    if args.address_file:
        sockets.announce(args.address_file, sock)
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again once it has shut down; by then it has done its work
        signal.signal(signal.SIGTERM, lambda *_: None)
    # What is here stays: looking it over again and again would stop all requests for 0.2 s each time.
    gc.collect()
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn_server.run(sockets=[sock])
    if grpc_server is not None:
        grpc_server.stop(args.drain_s)
    server.close()
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("max_queue", 1), ("prefix_cache_mib", 0), ("watch", 0), ("drain_s", 0), ("max_model_len", 2)):
        if not getattr(args, name) >= least:
            raise ValueError(f"--{name} = {getattr(args, name)} must be at least {least}")
    if args.grpc_port is not None and not 0 <= args.grpc_port <= 65535:
        raise ValueError(f"--grpc_port = {args.grpc_port} must be in 0..65535")
    if args.address_file and not pathlib.Path(args.address_file).parent.is_dir():
        raise ValueError(f"--address_file {args.address_file} lies in no directory; make it first")
    if args.model and (args.weights_key or args.watch):
        name = "weights_key" if args.weights_key else "watch"
        raise ValueError(f"--{name} is of a broadcast, and --model is a folder; leave it out, or serve --weights")


def _watch(server: inference_server.InferenceServer, period_s: float) -> None:
    while True:
        time.sleep(period_s)
        try:
            server.update(None)
        except (ValueError, OSError) as error:
            print(f"weights not updated: {error}; version {server.scheduler.version} goes on serving", file=sys.stderr)
        except scheduler_lib.Closed:
            return


if __name__ == "__main__":
    sys.exit(main())
