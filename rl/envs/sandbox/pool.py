"""A pool of sandboxes: programs and sessions start in a warm interpreter, a fork of a process that waits.

1. `Pool.run` runs one program. `Pool.session` opens a Python session, whose variables stay between its commands.
2. Each use has a fork and a folder of its own; both end with it. A cell serves the next use only if its folder could be emptied.
3. At most `num_running` programs of one event loop run at a time: the limit by the clock is for a machine that is not busier than that.
   A session that waits for its next command is stopped, and needs memory only.
4. A cell that ended by itself cost no program its result: it runs once more in another cell.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rl.envs.sandbox import backend as backend_lib
from rl.envs.sandbox import cell as cell_lib
from rl.envs.sandbox import limits as limits_lib

MAX_USES = 1000  # of one cell
MAX_IDLE = 8  # cells that are kept
Function = Callable[..., Awaitable[Any]]  # that a session may call; arguments and result are JSON
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,16}\b")


class Pool:
    """Sandboxes of one backend. Its coroutines may be used in any event loop, in one thread at a time.

    Args:
      limits: limits of each program, and of each command of a session.
      num_running: programs that run at a time; 0: two per core.
      backend: where cells come from; None: the first one that works here. Raises ValueError if there is none.
    """

    def __init__(
        self,
        limits: limits_lib.Limits = limits_lib.Limits(),  # noqa: B008  # frozen
        *,
        num_running: int = 0,
        backend: backend_lib.Backend | None = None,
    ):
        self.limits, self.backend = limits, backend or backend_lib.find()
        self._num_running = num_running or 2 * (os.cpu_count() or 1)
        self._idle: list[cell_lib.Cell] = []
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def run(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> limits_lib.Result:
        """Runs a Python program and returns its output and status. `files` are in its current folder, by relative name."""
        request = {"do": "run", "code": code, "stdin": stdin, "files": _checked(files)}
        for _ in range(2):
            async with self._turn():
                try:
                    cell = self._take()
                    reply = await self._exchange(cell, request)
                except cell_lib.CellEnded:
                    continue
                self._put_back(cell, reply)
                return _result(reply, self.limits)
        return _result({"stopped": "lost"}, self.limits)

    def session(
        self,
        *,
        values: Mapping[str, Any] | None = None,
        functions: Mapping[str, Function] | None = None,
        files: Mapping[str, str] | None = None,
        watched: Sequence[str] = (),
    ) -> "Session":
        """Returns a Python session, which starts at its first command.

        Args:
          values: variables that it begins with, as JSON.
          functions: by name; code of the session calls them like its own, and gets their results. An exception of one passes through
            `Session.execute`, except for ValueError, which the code gets as RuntimeError.
          files: in its current folder, by relative name.
          watched: variables whose values are in each result.
        """
        request = {"do": "open", "values": dict(values or {}), "files": _checked(files), "watched": [*watched]}
        return Session(self, request | {"functions": [*(functions or ())]}, dict(functions or {}))

    def close(self) -> None:
        """Ends all idle cells."""
        while self._idle:
            self._idle.pop().end()

    def _take(self) -> cell_lib.Cell:
        while self._idle and not self._idle[-1].is_alive:
            self._idle.pop().end()
        cell = self._idle.pop() if self._idle else self.backend.start(self.limits)
        cell.num_uses += 1
        return cell

    def _put_back(self, cell: cell_lib.Cell, reply: Mapping) -> None:
        is_usable = reply.get("clean") is True and cell.num_uses < MAX_USES and len(self._idle) < MAX_IDLE
        self._idle.append(cell) if is_usable and cell.is_alive else cell.end()

    def _turn(self) -> asyncio.Semaphore:
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._num_running))

    async def _exchange(self, cell: cell_lib.Cell, request: dict, answer: cell_lib.Answer | None = None) -> dict:
        limits = backend_lib.spell(self.limits)
        return await cell.exchange(request | {"limits": limits}, limits["clock_s"], answer)


class Session:
    """A Python session. `execute` runs a command, `close` ends it; a session that is not closed ends when it is deleted."""

    def __init__(self, pool: Pool, request: dict, functions: dict[str, Function]):
        self._pool, self._request, self._functions = pool, request, functions
        self._cell: cell_lib.Cell | None = None
        self._is_open = self._has_turn = False
        self._one_at_a_time = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """True if the next command finds the variables of earlier ones."""
        return self._is_open

    async def execute(self, code: str) -> limits_lib.Result:
        """Runs a command, with all variables of earlier ones, and prints the value of its last expression. Waits for commands before it.

        A command that is ended at a limit, or ends the process, ends the session: the next one begins with new variables. Files stay
        until `close`, unless the sandbox itself was lost.
        """
        async with self._one_at_a_time:
            self._turn = self._pool._turn()
            await self._turn.acquire()
            self._has_turn = True
            try:
                if not self._is_open and (failed := await self._open()):
                    return failed
                reply = await self._send({"do": "execute", "code": code})
            except cell_lib.CellEnded:
                self._cell, self._is_open = None, False
                return _result({"stopped": "lost"}, self._pool.limits)
            finally:
                self._give_turn()
            self._is_open = reply["is_alive"]
            return _result(reply, self._pool.limits, has_addresses=True)

    async def close(self) -> None:
        """Ends the session. A second call does nothing."""
        cell, self._cell, self._is_open = self._cell, None, False
        if cell is not None:
            with contextlib.suppress(cell_lib.CellEnded):
                self._pool._put_back(cell, await self._pool._exchange(cell, {"do": "close"}))

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def _open(self) -> limits_lib.Result | None:
        """Starts the process of the session. Returns the result of a start that fails, else None."""
        if self._cell is None:
            self._cell = self._pool._take()
        reply = await self._send(self._request)
        self._is_open = bool(reply.get("is_alive"))
        return None if self._is_open else _result(reply, self._pool.limits)

    async def _send(self, request: dict) -> dict:
        assert self._cell is not None
        return await self._pool._exchange(self._cell, request, self._answer)

    async def _answer(self, name: str, arguments: list) -> dict:
        """Calls a function for the code of the session. Other programs may run meanwhile, also those that the function waits for."""
        if name not in self._functions:
            return {"error": f"function {name!r} does not exist"}
        self._give_turn()
        try:
            found = {"result": await self._functions[name](*arguments)}
        except (ValueError, TypeError) as error:  # of the arguments, which the model chose
            found = {"error": str(error)}
        await self._turn.acquire()
        self._has_turn = True
        return found

    def _give_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turn.release()


@functools.cache
def shared(limits: limits_lib.Limits = limits_lib.Limits()) -> Pool:  # noqa: B008  # frozen
    """Returns the pool of this process with these limits. Raises ValueError if no sandbox works here."""
    return Pool(limits)


def _checked(files: Mapping[str, str] | None) -> dict[str, str]:
    for name in files or {}:
        parts = pathlib.PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ValueError(f"file name {name!r} leaves the folder of the sandbox; use a relative one without '..'")
    return dict(files or {})


def _result(reply: Mapping, limits: limits_lib.Limits, has_addresses: bool = False) -> limits_lib.Result:
    names = [field.name for field in dataclasses.fields(limits_lib.Result)]
    found = {"stdout": "", "stderr": "", "exit": None} | {name: reply[name] for name in names if name in reply}
    if has_addresses:  # they differ between runs
        found["stdout"] = _ADDRESS.sub("at 0x0", found["stdout"])
    result = limits_lib.Result(**found)
    limits_lib.note(result, limits)
    return result
