"""The few things every HTTP service here shares: a bound socket, a body read with limits, errors in OpenAI's shape."""

import json
import os
import socket
import threading
import time

import fastapi
import uvicorn
from fastapi import responses

MAX_BODY_BYTES = 64 * 2**20


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. ValueError when the port is taken."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {host}:{port}: {reason}; choose another port, or 0 for a free one"
        ) from error
    return sock


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{host}:{port}"


def server(app: fastapi.FastAPI) -> uvicorn.Server:
    """A quiet uvicorn server; call `.run(sockets=[sock])`, stop it by `should_exit = True`."""
    # log_config: uvicorn's default resets all of logging, and with it absl's handler, which then closes standard error
    config = uvicorn.Config(app, log_config=None, log_level="error", access_log=False, timeout_graceful_shutdown=5)
    return uvicorn.Server(config)


async def read_body(request: fastapi.Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body; ValueError as soon as it exceeds `max_bytes`, before the rest is read."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise ValueError(f"the request body exceeds {max_bytes} bytes, the most that is taken")
        chunks.append(chunk)
    return b"".join(chunks)


async def read_json(request: fastapi.Request) -> dict:
    raw = await read_body(request)
    try:
        body = json.loads(raw or b"{}")
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the request body must be a JSON object; got {type(body).__name__}")
    return body


async def hung_up(request: fastapi.Request, error: Exception) -> responses.Response:
    """Exception handler: the client went away while it was sending; nobody reads the answer, and it is no error of ours."""
    return responses.Response(status_code=499)


def error(status: int, message: str, kind: str) -> responses.JSONResponse:
    body = {"message": message, "type": kind, "code": status, "param": None}
    return responses.JSONResponse({"error": body}, status_code=status)


def stop_at_eof(stop) -> None:
    """Calls `stop` once standard input closes: a parent that holds the other end took us along, however it died."""

    def wait():
        while os.read(0, 4096):
            pass
        stop()
        time.sleep(5)
        os._exit(0)  # a request that does not end must not keep an orphan alive

    threading.Thread(target=wait, name="stop-at-eof", daemon=True).start()
