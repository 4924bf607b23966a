"""One sandbox: a process of inside.py in it, which runs one program or session at a time.

`exchange` is a coroutine of any event loop. A cell that does not answer in time, or whose coroutine is canceled, ends.
"""

import asyncio
import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from typing import IO, Any

from sharding.system import limited_process

GRACE_S = 30.0  # beyond the limits of a program, and for the start
MAX_REPLY_BYTES = 2**26
Answer = Callable[[str, list], Awaitable[Any]]  # (function, arguments) -> result of a function of the parent


class CellEnded(Exception):
    """Raised by `Cell.exchange` if the process has ended or does not answer."""


class Cell:
    """A sandbox with its process.

    Args:
      command: starts inside.py in the sandbox; its last argument is the config.
      config: the config of inside.py; "folder" is added here if the sandbox has no mounts.
    """

    def __init__(self, command: Sequence[str], config: dict):
        folder = "" if config["has_mounts"] else tempfile.mkdtemp(prefix="intellax-sandbox-")
        if folder:
            config = config | {"folder": folder}
            os.chown(folder, config["uid"] or -1, -1)
        variables = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
        self._errors = tempfile.TemporaryFile()
        try:
            self._child = limited_process.JsonProcess(
                [*command, json.dumps(config)],
                folder="/",
                variables=variables,
                output=self._errors,
                grace_s=0.5,
                clean=functools.partial(_clean, self._errors, folder),
            )
        except OSError as error:
            raise CellEnded(str(error)) from None
        self._child.pipe.setblocking(False)
        self._buffer = bytearray()
        self._is_ready, self.num_uses = False, 0

    async def exchange(self, request: dict, timeout_s: float, answer: Answer | None = None) -> dict:
        """Sends a request and returns the reply. Raises CellEnded.

        `answer` is called for each function of the parent that the session calls; its time does not count. Its exceptions pass through.
        """
        try:
            await self.ready()
            await self._send(request, timeout_s)
            while True:
                reply = await self._receive(timeout_s)
                if "call" not in reply:
                    return reply
                if answer is None:
                    raise CellEnded("its session calls functions that it does not have")
                await self._send(await answer(reply["call"], reply["arguments"]), timeout_s)
        except BaseException:
            self.end()
            raise

    async def ready(self) -> list[str]:
        """Waits for the start. Returns the limits that do not hold, each with the reason. Raises CellEnded."""
        if self._is_ready:
            return []
        try:
            reply = await self._receive(GRACE_S)
        except BaseException:
            self.end()
            raise
        self._is_ready = True
        return reply["lacks"]

    def end(self) -> None:
        """Ends the process and all programs in it. A second call does nothing."""
        self._child.end()

    @property
    def is_alive(self) -> bool:
        """True while its process runs."""
        return self._child.is_alive

    async def _send(self, message: dict, timeout_s: float) -> None:
        line = json.dumps(message).encode() + b"\n"
        with _as_ended():
            sent = asyncio.get_running_loop().sock_sendall(self._child.pipe, line)
            await asyncio.wait_for(sent, timeout_s + GRACE_S)

    async def _receive(self, timeout_s: float) -> dict:
        with _as_ended():
            async with asyncio.timeout(timeout_s + GRACE_S):
                while (end := self._buffer.find(b"\n")) < 0:
                    data = await asyncio.get_running_loop().sock_recv(self._child.pipe, 2**18)
                    self._buffer += data
                    if not data or len(self._buffer) > MAX_REPLY_BYTES:
                        text = os.pread(self._errors.fileno(), 2000, 0).decode(errors="replace").strip()
                        raise CellEnded(" | ".join(text.splitlines()[-3:]) or "its process ended")
            line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
            return json.loads(line)


@contextlib.contextmanager
def _as_ended():
    try:
        yield
    except (OSError, TimeoutError, ValueError, RecursionError) as error:
        raise CellEnded(f"{type(error).__name__}: {error}") from None


def _clean(errors: IO[bytes], folder: str) -> None:
    errors.close()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
