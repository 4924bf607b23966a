"""Tools of a real MCP server, in a process of its own and over HTTP: schemas, results, errors, and the end of the server."""

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest

from rl.envs.interface import mcp_client, tools
from tests.rl.envs.interface.test_tools import call

pytest.importorskip("mcp", reason='mcp is an optional dependency: pip install -e ".[mcp]"')

SERVER = """
import asyncio, os, sys
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
server = MCPServer("test")

@server.tool()
def add(a: int, b: list[int] = []) -> str:
    "Adds numbers."
    return str(a + sum(b))

@server.tool()
async def fail(text: str) -> str:
    raise ToolError(text)

@server.tool()
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return str(os.getpid())

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture(scope="module")
def listed(script):
    return tools.from_mcp([sys.executable, script], kind="replayed")


def run(listed, *calls, limits=tools.DEFAULT_LIMITS):
    return [m["content"] for m in asyncio.run(tools.results(listed, calls, None, limits))]


def test_tools_of_a_server_are_listed(listed):
    assert [(tool.name, tool.kind) for tool in listed] == [
        ("add", "replayed"),
        ("fail", "replayed"),
        ("wait", "replayed"),
    ]
    assert listed[0].description == "Adds numbers."
    assert listed[0].parameters["properties"]["b"]["items"] == {"type": "integer"}
    assert listed[0].schema["function"]["parameters"]["required"] == ["a"]


def test_results_and_errors(listed):
    asked = [call("add", {"a": 1, "b": [2, 3]}), call("fail", {"text": "no"}), call("add", {"a": "x"}), call("add", {})]
    first, *errors = run(listed, *asked)
    assert first == "6" and all(error.startswith("error: ") for error in errors) and "no" in errors[0]
    assert run(listed, *asked) == [first, *errors]  # another event loop


def test_calls_run_together_and_time_out(listed):
    begun = time.monotonic()
    found = run(listed, *(call("wait", {"seconds": 1.0}, id=str(n)) for n in range(8)))
    assert len({*found}) == 1 and time.monotonic() - begun < 8
    with pytest.raises(TimeoutError):
        run(listed, call("wait", {"seconds": 60}), limits=tools.Limits(call_s=0.05))
    assert run(listed, call("add", {"a": 1})) == ["1"]  # the connection lives on


def test_a_closed_connection_ends_its_server(script):
    connection = mcp_client.Connection([sys.executable, script], 30.0)
    pid = int(asyncio.run(connection.function("wait")(seconds=0.0)))
    connection.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_http(script):
    port = _free_port()
    server = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                found = tools.from_mcp(f"http://127.0.0.1:{port}/mcp")
                break
            except ValueError:
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.2)
        assert found[0].kind == "recorded"
        assert run(found, call("add", {"a": 1, "b": [1]})) == ["2"]
        slow = call("wait", {"seconds": 60})
        assert run(found, slow, limits=tools.Limits(call_s=0.05)) == ["error: no result came within 0.05 s"]
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("server", [["/nowhere/server"], [sys.executable, "-c", "exit(3)"], "http://127.0.0.1:9/mcp"])
def test_a_server_that_cannot_be_reached_is_one_line(server):
    with pytest.raises(ValueError, match=r"MCP server .* cannot be used: .*; correct its URL or command"):
        tools.from_mcp(server, start_s=10.0)


def test_mcp_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)  # as if it was not installed
    with pytest.raises(ValueError, match=r"need the package mcp.*run pip install -e \"\.\[mcp\]"):
        tools.from_mcp(["server"])


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
