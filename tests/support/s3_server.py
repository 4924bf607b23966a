"""A real S3 server in a process of its own (moto), with one bucket."""

import contextlib
import subprocess
import sys
import urllib.request

from sharding.system import sockets
from tests.support import proxy

BUCKET = "runs"


@contextlib.contextmanager
def running():
    """Yields the URL of the server."""
    with contextlib.closing(sockets.listen("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        proxy.wait_until(lambda: _made(url), 60.0, "moto")
        yield url
    finally:
        server.kill()
        server.wait()


def environment(url) -> dict[str, str]:
    """The variables by which clients find the server."""
    return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


def use(monkeypatch, url) -> None:
    for name, value in environment(url).items():
        monkeypatch.setenv(name, value)


def _made(url) -> bool:
    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request")
    with contextlib.suppress(OSError), urllib.request.urlopen(request):
        return True
    return False
