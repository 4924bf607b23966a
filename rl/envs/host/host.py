"""Runs the programs of an environment in child processes with limits, many episodes at a time, and gives them a model.

1. `Host.play` sends an episode to the child (rl/envs/host/player.py), which asks for messages. A `Session` of the parent answers: in a worker
   from inference servers, in a validator from a tape. So the child has no network, and knows nothing of tokens.
2. A step of an episode has `limit_s` CPU seconds, and a turn CLOCK_FACTOR times that by the clock, or more with tools. A child that ends, or whose event loop
   does not turn, has left the number of the episode that ran. All its episodes run again, from their recorded calls.
3. That one runs alone. If it ends its child again, or waits for too long again, it gets `FAILED` scores, as does a program that raises.
   A worker and a validator give it the same scores.
4. A child whose memory has grown takes no more episodes, and ends after its last one.
5. The child of an environment of kind "pure" runs in the sandbox of sharding/system/sandbox.py. Others may start processes, such as a
   sandbox for the model's code.

Imports no jax.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import mmap
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any, Protocol

from rl.envs.host import player
from rl.envs.interface import episode
from rl.envs.recording import session as session_lib
from rl.envs.scoring import scorer
from sharding.system import cli, limited_process

FAILED = {"reward": 0.0, "error": 1.0}  # scores of an episode whose program raised, or exceeded its limits
MAX_DEATHS = 3  # of children with an episode that is not blamed, until it runs alone
MAX_ALONE = 2  # children for episodes that run alone, at the same time
REQUESTS_PER_CALL, MORE_REQUESTS = 4, 64  # an episode may ask so often for a message, recorded ones included
TOOL_PATIENCE = 10  # times as long may a turn take by the clock if it may run processes, which have limits of their own
EXIT_S = 2.0  # for a process that closed its pipe to end
MALFORMED = "its process sent a malformed message"  # foreign code may have taken it over
CROWD = 16  # episodes of a child, for each of which a turn may take once more the time by the clock


@dataclasses.dataclass(frozen=True)
class Played:
    """The result of an episode. If not `in_time`, it exceeded its limits or ended its child process, and `scores` are FAILED."""

    scores: dict[str, float]
    cpu_s: float  # of its slowest step
    error: str = ""  # why it got FAILED
    in_time: bool = True


class Plays(Protocol):
    """A host of episodes: `Host`, or the one of rl/envs/foreign."""

    async def play(self, session: session_lib.Session, index: int, split: str) -> Played:
        """Plays the episode of a task and returns its result. Raises the errors of `Host.play`."""
        ...

    async def close(self) -> None:
        """Ends the processes of the environment."""
        ...


class _Died(Exception):
    """Raised for the episodes of a child that ended. `current` is the number of the one that ran, 0 if none did."""

    def __init__(self, current: int, reason: str):
        super().__init__(reason)
        self.current = current


class _Hung(Exception):
    """Raised for an episode that neither asks nor ends for too long."""


class Host:
    """Runs episodes of one environment. All methods run in one event loop.

    Args:
      name, options, seed, sandbox, on_error, digest: as for `rl.envs.scoring.scorer.Scorer`.
      kind: the kind of the environment, one of `environment.KINDS`.
      limit_s: CPU seconds for one step of an episode. Programs of the model have limits in proportion (rl/envs/sandbox/limits.py).
    """

    def __init__(
        self,
        name: str,
        options: dict,
        seed: int,
        *,
        kind: str,
        limit_s: int,
        sandbox: str = "auto",
        on_error: scorer.Log = cli.note,
        digest: str = "",
    ):
        self.limit_s, self._errors, self._name = limit_s, scorer.FirstErrors(on_error), name
        self._patience = 1 if kind == "pure" else TOOL_PATIENCE
        title, config = f"the host of environment {name}", scorer.config_of_child(name, options, seed, limit_s, digest)
        # An environment of kind "recorded" may need keys and proxies in its environment variables.
        rights = {"sandbox_mode": "off" if kind == "recorded" else sandbox, "may_start_processes": kind != "pure"}
        self._make = functools.partial(_Child, config, title=title, remedy=scorer.REMEDY, **rights)
        self._shared: _Child | None = None
        self._children: set[_Child] = set()
        self._lock, self._alone = asyncio.Lock(), asyncio.Semaphore(MAX_ALONE)

    async def play(self, session: session_lib.Session, index: int, split: str) -> Played:
        """Plays the episode of a task and returns its result.

        Raises the errors of the session's backend, NotOnTape, and ValueError if the environment itself is broken.
        """
        deaths, is_suspect = 0, False
        while True:
            session.restart()
            async with self._child(alone=is_suspect) as child:
                try:
                    found = await child.play(session, index, split, self._wall_s(child))
                    return found if not found.error else self._failed(found, found.error)
                except (_Died, _Hung) as error:
                    deaths += 1
                    if is_suspect:
                        return self._failed(Played(dict(FAILED), float(self.limit_s), in_time=False), str(error))
                    is_blamed = isinstance(error, _Hung) or error.current == child.number_of(session)
                    is_suspect = is_blamed or deaths >= MAX_DEATHS

    @property
    def process_ids(self) -> list[int]:
        """The process IDs of the children that run."""
        return [child.process_id for child in self._children if child.process_id]

    async def close(self) -> None:
        """Ends all child processes."""
        for child in [*self._children]:
            await child.close()

    def _wall_s(self, child: "_Child") -> float:
        return scorer.CLOCK_FACTOR * self.limit_s * self._patience * (1 + child.num_episodes / CROWD)

    def _failed(self, found: Played, error: str) -> Played:
        self._errors.report(f"environment {self._name} failed in an episode", error)
        return dataclasses.replace(found, error=error)

    @contextlib.asynccontextmanager
    async def _child(self, *, alone: bool) -> AsyncIterator["_Child"]:
        """Yields a running child: a fresh one for an episode `alone`, else the one that all others share."""
        if alone:
            async with self._alone:
                child = await self._started()
                try:
                    yield child
                finally:
                    await child.close()
                    self._children.discard(child)
            return
        async with self._lock:
            if self._shared is None or self._shared.is_over:
                self._children = {one for one in self._children if not one.is_closed}
                self._shared = await self._started()
            child = self._shared
        yield child

    async def _started(self) -> "_Child":
        child = self._make()
        self._children.add(child)
        await child.start(scorer.CLOCK_FACTOR * self.limit_s)
        return child


class _Child:
    """A child process and its episodes."""

    def __init__(self, config: dict, **options):
        file = tempfile.TemporaryFile()  # closed with the child
        file.truncate(player.CURRENT.size)
        self._current, self._file = mmap.mmap(file.fileno(), player.CURRENT.size), file
        config = config | {"current": file.fileno()}
        fds = [file.fileno()]
        self._process = limited_process.LimitedProcess(player.COMMAND, config, pass_fds=fds, **options)
        self._inboxes: dict[int, asyncio.Queue[dict | Exception]] = {}
        self._sessions: weakref.WeakKeyDictionary[session_lib.Session, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._death: _Died | None = None
        self._has_grown = self.is_closed = False
        self._heard_s = time.monotonic()
        self._tasks: list[asyncio.Task] = []

    @property
    def process_id(self) -> int:
        """The ID of the process, 0 if it does not run."""
        return self._process.process.pid if self._process.process else 0

    @property
    def num_episodes(self) -> int:
        """The number of episodes that run here."""
        return len(self._inboxes)

    @property
    def is_over(self) -> bool:
        """True if no more episodes should begin here."""
        return self._death is not None or self._has_grown or self.is_closed

    def number_of(self, session: session_lib.Session) -> int:
        """Returns the number of a session's last episode here."""
        return self._sessions.get(session, -1)

    async def start(self, silent_s: float) -> None:
        """Starts the process. It counts as dead if its event loop does not turn for `silent_s`."""
        pipe = await asyncio.to_thread(self._process.start)
        pipe.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=pipe, limit=limited_process.MAX_REPLY_BYTES)
        self._heard_s = time.monotonic()
        self._tasks = [asyncio.create_task(one) for one in (self._read(), self._watch(silent_s))]
        self._write({"cancel": 0})  # of none: the child begins

    async def play(self, session: session_lib.Session, index: int, split: str, wall_s: float) -> Played:
        """Plays one episode here. Raises _Died, _Hung, and the errors of the session's backend."""
        number, inbox = next(self._numbers), asyncio.Queue()
        self._inboxes[number], self._sessions[session] = inbox, number
        calls: set[asyncio.Task] = set()
        is_over = False
        most = REQUESTS_PER_CALL * session.limits.max_calls + MORE_REQUESTS
        try:
            self._write({"run": number, "index": index, "split": split, "max_requests": most})
            while True:
                message = await self._next(inbox, calls, wall_s)
                if "call" in message:
                    calls.add(task := asyncio.create_task(self._answer(session, message, inbox)))
                    task.add_done_callback(calls.discard)
                    continue
                is_over = True
                if (played := _read_played(message)) is None:
                    raise self._killed(number, MALFORMED)
                session.cpu_s = max(session.cpu_s, played.cpu_s)
                session.has_slow_tool |= bool(message.get("slow_tool"))
                return played
        finally:
            del self._inboxes[number]
            for task in calls:
                task.cancel()
            if not is_over and self._death is None:
                self._write({"cancel": number})

    async def _next(self, inbox: asyncio.Queue, calls: set[asyncio.Task], wall_s: float) -> dict:
        """Returns the next message of an episode, which has `wall_s` for it while it waits for no call."""
        while True:
            if self._death:
                raise self._death
            try:
                found = await asyncio.wait_for(inbox.get(), wall_s)
            except TimeoutError:
                if not calls:
                    raise _Hung(f"it takes too much time: it neither asks nor ends for {wall_s:.0f} s") from None
                continue
            if isinstance(found, Exception):
                raise found
            return found

    async def _answer(self, session: session_lib.Session, message: dict, inbox: asyncio.Queue) -> None:
        """Answers a call of an episode. Other errors than those of the call itself end the episode."""
        reply: dict = {"reply": message["call"]}
        session.overlapped |= bool(message.get("overlaps"))
        if (call := _read_call(message)) is None:
            self._killed(message["call"][0], MALFORMED)
            return
        session.cpu_s = max(session.cpu_s, float(message["cpu_s"]))
        session.has_slow_tool |= bool(message.get("slow_tool"))
        try:
            reply |= dataclasses.asdict(await session.chat(**call))
        except episode.BudgetSpent as error:
            reply["budget"] = str(error)
        except session_lib.InvalidMessages as error:
            reply["invalid"] = str(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of the backend; `play` raises it
            inbox.put_nowait(error)
            return
        self._write(reply)

    def _write(self, message: dict) -> None:
        if self._death is None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        reason = MALFORMED
        try:
            while line := await self._reader.readline():
                self._heard_s = time.monotonic()
                message = json.loads(line)
                if "beat" in message:
                    self._has_grown |= bool(message["beat"])
                    if self._has_grown and not self._inboxes:
                        break
                    continue
                number = message["call"][0] if "call" in message else message.get("done", message.get("failed"))
                if inbox := self._inboxes.get(number):
                    inbox.put_nowait(message)
            reason = "its process ended"
            if process := self._process.process:
                with contextlib.suppress(subprocess.TimeoutExpired):  # its status has the reason
                    await asyncio.to_thread(process.wait, EXIT_S)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OSError):
            pass
        self._killed(0, reason)

    async def _watch(self, silent_s: float) -> None:
        while time.monotonic() - self._heard_s < silent_s:
            await asyncio.sleep(player.BEAT_S)
        self._killed(0, f"it takes too much time: its process is silent for {silent_s:.0f} s")

    def _killed(self, number: int, reason: str) -> _Died:
        """Ends the process, and its episodes with `_Died`, which is returned; `number` is the one to blame, 0 if the process knows it."""
        if self._death is None:
            (current,) = player.CURRENT.unpack_from(self._current)
            if self._tasks:
                self._writer.transport.abort()
            self._process.end()
            if self._process.status in (-signal.SIGPROF, -signal.SIGXCPU):
                reason = "it takes too much time: its process exceeded its CPU time"
            elif self._process.status == limited_process.OUT_OF_MEMORY:
                reason = "it takes too much memory"
            self._death = _Died(number or current, reason)
            for inbox in self._inboxes.values():
                inbox.put_nowait(self._death)
        return self._death

    async def close(self) -> None:
        """Ends the process."""
        self._killed(0, "the host is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.is_closed = True
        self._current.close()
        self._file.close()


def _read_call(message: dict) -> dict | None:
    """Returns the arguments of `Session.chat` in a message of a child, None if they are malformed."""
    kinds = {"messages": list, "tools": list, "max_tokens": int | None, "number": int, "trains": bool}
    call: dict[str, Any] = {name: message.get(name) for name in kinds}
    is_valid = all(isinstance(call[name], kind) for name, kind in kinds.items())
    is_valid = is_valid and all(isinstance(one, dict) for one in [*call["messages"], *call["tools"]])
    is_valid = is_valid and isinstance(message.get("cpu_s"), float)
    return call if is_valid and 0 <= call["number"] < 2**32 and (call["max_tokens"] or 1) > 0 else None


def _read_played(message: dict) -> Played | None:
    """Returns the result of an episode in a message of a child, None if it is malformed."""
    try:
        error = str(message.get("error", ""))
        scores = dict(FAILED) if error else scorer.numbers(message["scores"])
        return Played(scores, float(message["cpu_s"]), error)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
