"""Runs HTTP apps and servers for tests: within this process, in a thread, or as a child process."""

import asyncio
import contextlib
import pathlib
import subprocess
import sys
import threading
import time

import httpx

from inference.server import web
from sharding.system import sockets

ROOT = pathlib.Path(__file__).resolve().parents[2]
WAIT_S = 300  # to import, compile and answer, next to other work


def client(app) -> httpx.AsyncClient:
    """Returns a client whose requests go straight to an ASGI app; bodies are sent as JSON, also malformed ones."""
    headers = {"content-type": "application/json"}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://server", headers=headers, timeout=600
    )


def asker(app):
    """Returns ask(method, path, **options of httpx), which returns the app's response."""

    def ask(method, path, **options):
        async def exchange():
            async with client(app) as http:
                return await http.request(method, path, **options)

        return asyncio.run(asyncio.wait_for(exchange(), WAIT_S))

    return ask


async def disconnect(app, path, body: bytes, after: int) -> list[dict]:
    """Posts `body` straight to an app and disconnects once it has sent `after` messages. Returns all that it sent."""
    sent, left = [], asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if len(sent) == after:
            left.set()

    if not after:
        left.set()
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), WAIT_S)
    return sent


@contextlib.contextmanager
def in_thread(app, **limits):
    """Yields the URL of a server of `app` in a thread. `limits` are those of `web.server`."""
    server, sock = web.server(app, **limits), sockets.listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    yield sockets.address(sock)
    server.should_exit = True
    thread.join(WAIT_S)


@contextlib.contextmanager
def child(folder: pathlib.Path, module: str, *arguments):
    """Yields (process, URL) of `python -m module arguments`, once it accepts requests. Its output goes to FOLDER/output."""
    address, output = folder / "address", folder / "output"
    command = [sys.executable, "-m", module, *map(str, arguments), "--address_file", str(address)]
    with open(output, "w") as file:
        pipes = {"stdin": subprocess.PIPE, "stdout": file, "stderr": file}
        with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
            try:
                deadline = time.monotonic() + WAIT_S
                while not address.exists():
                    assert process.poll() is None and time.monotonic() < deadline, output.read_text()[-6000:]
                    time.sleep(0.05)
                yield process, address.read_text()
            finally:
                process.kill()
