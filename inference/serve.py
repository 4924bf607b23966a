"""The inference server: prompts in; tokens, log-probabilities, versions and proofs out; over HTTP and JetStream's gRPC.

    python -m inference.serve --weights runs/quickstart/weights --port 8100
    python -m inference.serve --model path/to/a/hugging_face_folder --mesh tensor=4,data=-1
    python -m inference.serve --model path/to/the/base --adapter sums=path/to/an/adapter

1. Loads the newest version of a broadcast, once there is one, or a Hugging Face folder, onto one device or a `--mesh` of all
   devices of this host, or of several (`--coordinator`; docs/operations.md). Compiles, before there is a version if its metadata is `--expected`, then listens.
2. `POST /update_weights` on the control listener (or `--watch`, or a heartbeat's reply) pulls and verifies a newer version while the old one serves,
   and swaps it in between two engine calls. After a failed pull, the old weights keep serving.
3. SIGTERM: accepts no more connections; running requests get `--drain_s` seconds; exit code 0.

Two listeners, because who may generate may not replace the policy:
- data (`--host`, `--port`, and `--grpc_port`): generate_routes (/inference/v1/generate), openai_routes
  (/v1/chat/completions[/tokens], /v1/completions, /tokenize, /detokenize), status_routes (/v1/models, /v1/models/NAME, /health, /liveness,
  /metrics). `--api_key_file` names the key that clients must send.
- control (`--control`): control_routes (/update_weights, /pause, /resume; with `--allow_adapter_loading` /v1/load_lora_adapter and
  /v1/unload_lora_adapter), and status_routes. By default a unix socket that
  only this user can open, printed at the start: `curl --unix-socket PATH -X POST http://control/pause`. For another machine:
  `--control HOST:PORT --control_token_file FILE`. prime-rl: `client.admin_base_url`, and the token in `client.api_key_var`.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from inference.options import server_options

    server_options.refuse(__doc__)

import argparse
import contextlib
import functools
import gc
import math
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection

import fastapi
import pydantic
import uvicorn
from starlette import requests

from inference.engine import engine as engine_lib
from inference.options import server_options
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import (
    control_routes,
    generate_routes,
    guard,
    inference_server,
    openai_routes,
    schemas,
    startup,
    status_routes,
    web,
)
from inference.swarm import membership
from models import hub
from sharding.mesh import host_memory, programs
from sharding.mesh import mesh as mesh_lib
from sharding.system import atomic_file, cli, secret_file, sockets
from sharding.system.multihost import failure
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import broadcast, bucket
from sharding.weights.format import head

# Settings in which the hosts of a server agree.
SHARED = ("weights", "model", "adapter", "weights_key", "mesh", "quantize", "dtype", *server_options.SIZES)
JOIN_S = 300.0  # how long hosts wait for each other at the start
MAX_BODY_BYTES = 8 * 2**20  # half a million token IDs; parsed, a body takes about twenty times its size
# {exception: (status, type of OpenAI's error object, headers)}
ERRORS = {
    ValueError: (400, "invalid_request_error", None),
    inference_server.UnknownModel: (404, "NotFoundError", None),  # vLLM's name
    fastapi.exceptions.RequestValidationError: (400, "invalid_request_error", None),  # of the query string
    broadcast.CorruptSource: (500, "weights_error", None),
    OSError: (500, "weights_error", None),
    scheduler_lib.VersionGone: (409, "version_gone", None),
    scheduler_lib.Overloaded: (429, "overloaded", {"retry-after": "1"}),
    scheduler_lib.Closed: (503, "shutting_down", {"retry-after": "5"}),
    scheduler_lib.Fault: (500, "engine_error", None),
}


def make_app(server: inference_server.InferenceServer, *, api_key: str | None = None) -> fastapi.FastAPI:
    """Returns the app of an inference server's data routes. Clients must send `api_key`; None requires no key.

    With a key, requests from browser pages are accepted, because only a page that has the key can send it. Any Host header is accepted:
    proxies that add TLS pass it on, and a page whose name was rebound to this address is refused by its Origin header.
    """
    app = _app(server)
    generate_routes.add(app, server, MAX_BODY_BYTES)
    openai_routes.add(app, server, MAX_BODY_BYTES)
    app.add_middleware(guard.Guard, key=api_key, allow_origin=api_key is not None)
    return app


def make_control_app(
    server: inference_server.InferenceServer, *, token: str | None = None, hosts: Collection[str] | None = None
) -> fastapi.FastAPI:
    """Returns the app of an inference server's control routes. Clients must send `token` and, unless None, a Host of `hosts`."""
    app = _app(server)
    control_routes.add(app, server)
    app.add_middleware(guard.Guard, key=token, key_name="control token", hosts=hosts)
    return app


def _app(server: inference_server.InferenceServer) -> fastapi.FastAPI:
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    status_routes.add(app, server)
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
    place = "control routes are on the control listener, which --control sets and the server prints at its start"
    path, method = request.url.path, request.method
    if status == 405:
        allowed = getattr(error, "headers", None) or {}
        message = f"route {path} takes no {method}; send {allowed.get('Allow', 'another method')}"
        return web.error(status, message, "method_not_allowed", allowed)
    message = f"route {method} {path} does not exist on this listener; {place}; see inference/serve.py"
    return web.error(status, message, "not_found")


def main(argv: list[str] | None = None) -> int:
    """Runs the inference server's command until SIGTERM or Ctrl-C. Returns the exit code."""
    host_memory.limit_arenas()
    args, hosts = server_options.parse(argv, __doc__), hosts_lib.ALONE
    with contextlib.ExitStack() as stack:
        try:
            server_options.check(args)
            if args.exit_with_parent:
                cli.stop_at_eof(lambda: os.kill(os.getpid(), signal.SIGINT))
            programs.enable_cache()
            hosts = stack.enter_context(_joined(args))
            if not hosts.is_first:
                follower = _prepare(args, hosts).follower()
                with hosts.terminable():
                    follower.run()
                return 0
            api_key = secret_file.choose(args.api_key, args.api_key_file, "INTELLAX_API_KEY")
            listener = guard.control_listener(args.control, args.control_token_file, args.control_hosts)
            control = stack.enter_context(listener)
            signer = rollout_lib.WorkerKey.load_or_create(args.key) if args.key else None
            sock = stack.enter_context(contextlib.closing(sockets.listen(args.host, args.port)))
            server = _start(args, hosts)
            server.signer, server.run = signer, args.run
            profile = stack.enter_context(programs.Profiler(pathlib.Path(args.profile), args.profile_steps))
            server.on_version = lambda version: profile.advance(version + 1)  # it generates for the next step
            server.on_version(server.scheduler.version)
            if hosts.count > 1:
                stack.enter_context(hosts.terminable())  # until the server is closed
            stack.callback(server.close)
            grpc_port = _start_grpc(args, server, api_key, stack)
        except (ValueError, OSError, KeyboardInterrupt) as error:
            if hosts.count > 1:
                raise  # to `hosts`, which ends all of them
            if isinstance(error, KeyboardInterrupt):  # while it waits for weights, or compiles
                return 130
            print(f"error: {error}", file=sys.stderr)
            return 1
        uvicorn_server = web.server(make_app(server, api_key=api_key), drain_s=args.drain_s)
        control_app = make_control_app(server, token=control.token, hosts=control.hosts)
        stack.enter_context(web.in_thread(web.server(control_app), control.sock))
        if signer:
            print(f"samples are signed by {signer.worker}", flush=True)
        if signer and args.orchestrator:
            url = args.url or sockets.address(sock)
            stack.enter_context(membership.sign_in_server(args.orchestrator, server, url))
        if args.watch:
            threading.Thread(target=_watch, args=(server, args.watch), daemon=True).start()
        print(f"serving policy version {server.scheduler.version} on {sockets.address(sock)}", flush=True)
        print(programs.summary(), flush=True)
        print(f"control routes on {sockets.address(control.sock)}", flush=True)
        if grpc_port:
            print(f"serving JetStream's Decode on {args.host}:{grpc_port}", flush=True)
        if 0 < (trained := server.engine.model.max_positions) < (length := server.engine.config.max_model_len):
            found = f"--max_model_len {length} exceeds the {trained} positions"
            cli.note(f"note: {found} that the model was trained for")
        if args.api_key:
            cli.note("note: --api_key shows the key to every user of this machine (ps); use --api_key_file")
        if args.address_file:
            sockets.announce(args.address_file, sock)
        # Existing objects are permanent. Without this, each full collection would stop all requests for 0.2 s.
        gc.collect()
        gc.freeze()
        with cli.status_line(lambda: _progress(server)):
            _run(uvicorn_server, sock, hosts)
    return 0


def _run(uvicorn_server: uvicorn.Server, sock: socket.socket, hosts: hosts_lib.Hosts) -> None:
    """Serves until SIGTERM, on any of the hosts, or Ctrl-C. Then running requests get their time."""
    if hosts.count == 1:
        web.run(uvicorn_server, sock)
        return
    with web.in_thread(uvicorn_server, sock):  # `hosts` handles signals
        while not hosts.is_terminating:
            time.sleep(0.1)


def _progress(server: inference_server.InferenceServer) -> tuple[dict[str, float], str]:
    stats = server.scheduler.stats
    counts = {name.replace("_", " "): stats[name] for name in ("requests", "tokens", "weight_updates")}
    return counts, status_routes.waiting_for(server)


def _start_grpc(
    args: argparse.Namespace, server: inference_server.InferenceServer, api_key: str | None, stack: contextlib.ExitStack
) -> int:
    """Starts the gRPC service until `stack` closes, if --grpc_port is given. Returns its port, or 0."""
    if args.grpc_port is None:
        return 0
    from inference.server import grpc_service  # imports JetStream's protocol buffers, only when used

    port, grpc_server = grpc_service.start(server, args.host, args.grpc_port, api_key=api_key)
    stack.callback(lambda: grpc_server.stop(args.drain_s).wait())
    return port


def _joined(args: argparse.Namespace) -> contextlib.AbstractContextManager[hosts_lib.Hosts]:
    """Returns a context manager that connects the hosts which run this command together, if --coordinator is given."""
    if bool(args.coordinator) != bool(args.workdir) or (args.num_processes and not args.coordinator):
        found = f"--coordinator {args.coordinator!r} and --workdir {args.workdir!r} connect a server's hosts together"
        raise ValueError(f"{found}; give both, the latter a directory that all of them share, or neither")
    if not args.coordinator:
        return contextlib.nullcontext(hosts_lib.ALONE)
    place = {"coordinator": args.coordinator, "num_processes": args.num_processes, "process_id": args.process_id}
    return hosts_lib.joined(**place, timeout_s=JOIN_S, workdir=pathlib.Path(args.workdir), explain=_explain)


def _explain(error: BaseException) -> tuple[str, int, int]:
    """Returns (message, exit code, priority) of an error of one host, which ends all (sharding/system/multihost/failure.py)."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130, failure.INTERRUPTED
    if isinstance(error, (ValueError, OSError)):
        return str(error), 1, failure.MISTAKE
    return f"{type(error).__name__}: {error}".splitlines()[0], 1, failure.BUG


def _start(args: argparse.Namespace, hosts: hosts_lib.Hosts) -> inference_server.InferenceServer:
    options = {"max_queue": args.max_queue, "prefix_cache_bytes": args.prefix_cache_mib * 2**20}
    server = _prepare(args, hosts).run(every_length=args.warm_up, **options)
    server.model_name, server.sources = args.served_model_name, [*server.sources, *args.weights_allow]
    server.allows_adapters = args.allow_adapter_loading
    return server


def _prepare(args: argparse.Namespace, hosts: hosts_lib.Hosts) -> startup.Prepared:
    """Loads the weights. All hosts call it. Raises ValueError if the settings of this host are not those of the first."""
    for name, expected in hosts.broadcast({name: getattr(args, name) for name in SHARED}).items():
        if (own := getattr(args, name)) != expected:
            raise ValueError(f"--{name} is {own} here and {expected} on host 0; give all hosts the same")
    make_config = functools.partial(_engine_config, args)
    make_config({})  # refuses wrong sizes before weights are loaded
    options = {"mesh": mesh_lib.parse(args.mesh), "quantize": args.quantize, "hosts": hosts}
    options["chat_template_kwargs"] = args.chat_template_kwargs
    args.weights = _sources(args)
    if not args.weights:
        num = args.max_adapters or (4 if args.allow_adapter_loading else 0)
        options |= {"adapters": _adapters(args), "max_adapters": num, "max_adapter_rank": args.max_adapter_rank}
        return startup.prepare_model(args.model, make_config({}), dtype=args.dtype, **options)
    key = head.HeadVerifier(args.weights_key, args.weights_floor) if args.weights_floor else args.weights_key
    wait_s = math.inf if args.exit_with_parent else None  # a parent knows how long to wait
    options["expected"] = args.expected and atomic_file.read_json(pathlib.Path(args.expected), dict)
    return startup.prepare(args.weights, make_config, key=key, wait_s=wait_s, **options)


def _adapters(args: argparse.Namespace) -> dict[str, str]:
    """Returns the folders of --adapter by name. Raises ValueError for one without a name, or with one that is taken."""
    found = {}
    for text in args.adapter:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or name in found or name == args.served_model_name:
            rule = "NAME=FOLDER with a name of its own"
            raise ValueError(f"--adapter {text} is not {rule}; write for example --adapter sums=path/to/folder")
        found[name] = folder
    return found


def _sources(args: argparse.Namespace) -> list[str]:
    """Returns the sources of weights. A run's working directory stands for its published versions, one in a bucket for those of its newest state."""
    found = []
    for source in args.weights or []:
        is_url = hub.is_url(source)
        run = bucket.fetched(source, ["weights/*"], is_optional=True) if is_url else pathlib.Path(source)
        if args.watch and is_url and (run / "weights").is_dir():
            text = f"--watch sees no later state of {source}, the working directory of a run"
            raise ValueError(f"{text}; leave it out, or give --weights relays or published weights")
        found.append(str(run / "weights") if server_options.is_run(run) else source)
    return found


def _engine_config(args: argparse.Namespace, published: dict) -> engine_lib.EngineConfig:
    """Returns the sizes of the engine: those of the command line, else those that were published with the weights, else `server_options.SIZES`."""
    right = {name: value for name, value in published.items() if type(value) is type(server_options.SIZES.get(name))}
    given = {name: value for name in server_options.SIZES if (value := getattr(args, name)) is not None}
    return engine_lib.EngineConfig(**(server_options.SIZES | right | given))


def _watch(server: inference_server.InferenceServer, period_s: float) -> None:
    while True:
        time.sleep(period_s)
        try:
            server.update(None)
        except (ValueError, OSError) as error:
            cli.note(f"weights not updated: {error}; version {server.scheduler.version} keeps serving")
        except scheduler_lib.Closed:
            return


if __name__ == "__main__":
    sys.exit(main())
