"""TCP links on this machine that can be broken: small proxies between the processes of a swarm.

A link forwards connections to a port. `condition` holds all bytes back (a partition, without an error), delays them, or limits their
rate; `reset` ends all connections with a reset. All links run in the event loop of one thread.
"""

import asyncio
import contextlib
import dataclasses
import math
import socket
import struct
import threading

from sharding.system import sockets

CHUNK = 2**16
POLL_S = 0.05  # between two looks at a link that holds bytes back


@dataclasses.dataclass(frozen=True)
class Condition:
    """The condition of a link."""

    is_held: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = math.inf


OPEN = Condition()


class Link:
    """A proxy to `port` of this machine. `ends` are the names of the nodes that it connects; `url` is its address."""

    def __init__(self, ends: frozenset[str], port: int):
        self.ends, self.port, self.condition = ends, port, OPEN
        self.sock = sockets.listen("127.0.0.1", 0)
        self.url = sockets.address(self.sock)
        self._writers: set[asyncio.StreamWriter] = set()
        self._free_s = 0.0  # when the bytes before are through

    async def serve(self) -> None:
        """Forwards connections until it is cancelled."""
        async with await asyncio.start_server(self._connect, sock=self.sock) as server:
            await server.serve_forever()

    def reset(self) -> None:
        """Ends all connections with a reset. Call it in the event loop."""
        for writer in self._writers:
            with contextlib.suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = {writer}
        self._writers |= writers
        try:
            await self._open()
            there, back = await asyncio.open_connection("127.0.0.1", self.port)
            writers.add(back)
            self._writers |= writers
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except OSError:  # one side is gone, so the other goes as well
            pass
        finally:
            self._writers -= writers
            for one in writers:
                one.transport.abort()

    async def _open(self) -> None:
        while self.condition.is_held:
            await asyncio.sleep(POLL_S)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(int(min(CHUNK, max(1, self.condition.bytes_per_s / 10)))):
            await self._open()
            self._free_s = max(self._free_s, loop.time()) + len(data) / self.condition.bytes_per_s
            await asyncio.sleep(max(0.0, self._free_s - loop.time()) + self.condition.delay_s)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


class Links(contextlib.AbstractContextManager):
    """The links of a swarm, served by a thread during a `with` block."""

    def __init__(self):
        self._links: list[Link] = []
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def add(self, ends: frozenset[str], port: int) -> str:
        """Adds a link to `port` between these nodes; returns its URL."""
        self._links.append(link := Link(ends, port))
        asyncio.run_coroutine_threadsafe(link.serve(), self._loop)
        return link.url

    def set(self, node: str, condition: Condition) -> None:
        """Sets the condition of all links of a node."""
        for link in self._of(node):
            link.condition = condition

    def reset(self, node: str) -> None:
        """Ends all connections of a node with a reset."""
        for link in self._of(node):
            self._loop.call_soon_threadsafe(link.reset)

    def _of(self, node: str) -> list[Link]:
        return [link for link in self._links if node in link.ends]

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it cancels all tasks at the end
            runner.run(self._ended.wait())

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
