"""Connects to a server of the Model Context Protocol (MCP), whose tools rl/envs/interface/tools.py offers to the model.

1. `Connection` starts a thread with an event loop of its own, which holds the connection until the process ends. So an environment
   connects when it is built, and episodes on any event loop use the connection.
2. `Connection.function(name)` is a coroutine function that calls one tool and returns its text.

The package `mcp` is an optional dependency. Left out: resources, prompts, and requests of a server to its client.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

CLOSE_S = 5.0  # for the server's end, after which its process is killed


@dataclasses.dataclass(frozen=True)
class Listed:
    """A tool as its server lists it."""

    name: str
    description: str
    schema: dict  # JSON schema of its arguments


class ToolError(Exception):
    """Raised by a tool of a server with the text of its error."""


class Connection:
    """A connection to an MCP server, and its `tools`. Thread-safe.

    Args:
      server: the URL of a server (streamable HTTP), or the command of one that this process starts and talks to through pipes.
      start_s: seconds for the connection.

    Raises ValueError without the package `mcp`, and for a server that cannot be reached.
    """

    def __init__(self, server: str | Sequence[str], start_s: float):
        try:
            import mcp
        except ImportError as error:
            reason = f"tools of an MCP server need the package mcp, an optional dependency ({error})"
            raise ValueError(f'{reason}; run pip install -e ".[mcp]" in the checkout') from error
        self._client: Any = None
        target = server if isinstance(server, str) else mcp.StdioServerParameters(command=server[0], args=[*server[1:]])
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        started: concurrent.futures.Future[tuple[Listed, ...]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(mcp.Client(target), started), daemon=True)
        self._thread.start()
        try:
            self.tools = started.result(start_s)
        except Exception as error:  # transports raise errors of many libraries, in groups
            self.close()
            reason = next(iter(getattr(error, "exceptions", ())), error)
            raise ValueError(
                f"MCP server {server!r} cannot be used: {type(reason).__name__}: {reason}; correct its URL or command"
            ) from error
        atexit.register(self.close)

    def function(self, name: str) -> Callable[..., Awaitable[str]]:
        """Returns a coroutine function that calls a tool with keyword arguments, and returns its text. It raises ToolError."""

        async def call(**arguments) -> str:
            running = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, arguments), self._loop)
            result = await asyncio.wrap_future(running)
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
            if result.is_error:
                raise ToolError(text)
            return text

        return call

    def close(self) -> None:
        """Ends the connection, and the server if this process started it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(CLOSE_S)

    def _run(self, client: Any, started: concurrent.futures.Future) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._hold(client, started))
            except Exception as error:  # as above
                if not started.done():
                    started.set_exception(error)

    async def _hold(self, client: Any, started: concurrent.futures.Future) -> None:
        async with client as self._client:
            listed, cursor = [], None
            while True:
                page = await self._client.list_tools(cursor=cursor)
                listed += [Listed(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
                if not (cursor := page.next_cursor):
                    break
            started.set_result(tuple(listed))
            await self._end.wait()
