"""The child process of a `Host` (rl/envs/host/host.py): runs the programs of many episodes in one event loop, and asks the parent for replies.

1. It loads the environment, runs one episode with a scripted model, because imports happen at first use, and enters the sandbox if the
   environment needs no processes.
2. Lines of JSON with the parent: {"run": id, ...} begins an episode, {"call": [id, n], ...} asks for a message, {"reply": [id, n], ...} has it,
   {"done": id, "scores": ...} or {"failed": id, "error": ...} ends the episode, {"cancel": id} drops it.
3. Before each step of an episode, its CPU time is limited, and its number is stored in a file that the parent reads if this process
   ends: so one episode is blamed, and not the others. A timer is the limit, because processes that the environment starts do not inherit
   it, as they do RLIMIT_CPU. `beat` lines show that the event loop turns.
"""

import asyncio
import collections.abc
import contextlib
import contextvars
import dataclasses
import functools
import json
import mmap
import os
import selectors
import signal
import struct
import sys
import time
from typing import Any

from rl.envs.interface import environment, episode, scripted_model
from rl.envs.sandbox import limits as limits_lib
from rl.envs.scoring import scorer
from rl.protocol import user_code
from sharding.system import limited_process

COMMAND = ("-m", "rl.envs.host.player")
BEAT_S = 0.5
MAX_MESSAGE_BYTES = 2**22  # of one call
MAX_GROWTH_BYTES = 2**31  # of address space, for all episodes
REHEARSAL_S, REHEARSED_CALLS = 30.0, 4
CURRENT = struct.Struct("<q")  # the number of the episode that runs; 0: none
_episode: contextvars.ContextVar["_Playing | None"] = contextvars.ContextVar("episode", default=None)


@dataclasses.dataclass(eq=False)
class _Playing:
    """An episode of this process."""

    number: int
    max_requests: int
    write: collections.abc.Callable[[dict], None]
    max_cpu_s: float = 0.0  # of a step
    begun_s: float | None = None  # CPU seconds of this process when the step that runs began
    times: limits_lib.Times = dataclasses.field(default_factory=limits_lib.Times)  # of code that the model wrote
    task: asyncio.Task | None = None
    num_requests: int = 0
    waiting: dict[int, asyncio.Future] = dataclasses.field(default_factory=dict)

    async def chat(self, messages, *, tools=(), max_tokens=None, number=0, trains=True) -> episode.Reply:
        """Implements `episode.Model.chat`."""
        self.num_requests += 1
        if self.num_requests > self.max_requests:
            raise episode.BudgetSpent(f"the episode has asked {self.max_requests} times already")
        call = {
            "messages": [*messages],
            "tools": [*tools],
            "max_tokens": max_tokens,
            "number": number,
            "trains": trains,
        }
        at = self.num_requests
        self.write({"call": [self.number, at], "overlaps": bool(self.waiting), **self.measured(), **call})
        self.waiting[at] = asyncio.get_running_loop().create_future()
        try:
            reply = await self.waiting[at]
        finally:
            del self.waiting[at]
        if "budget" in reply:
            raise episode.BudgetSpent(reply["budget"])
        if "invalid" in reply:
            raise ValueError(reply["invalid"])
        return episode.Reply(*(reply[field.name] for field in dataclasses.fields(episode.Reply)))

    def measured(self) -> dict:
        """Returns the fields of a message that show how slow the episode is, the step that runs included."""
        if self.begun_s is not None:
            self.max_cpu_s = max(self.max_cpu_s, time.process_time() - self.begun_s)
        return {"cpu_s": self.max_cpu_s, "slow_tool": self.times.is_slow}


class _Steps(collections.abc.Coroutine):
    """A coroutine of an episode, each step of which is limited and attributed."""

    def __init__(self, coroutine, playing: _Playing, current: mmap.mmap, limit_s: int):
        self._coroutine, self._playing, self._current, self._limit_s = coroutine, playing, current, limit_s

    def _step(self, step: functools.partial) -> Any:
        self._playing.begun_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)
        CURRENT.pack_into(self._current, 0, self._playing.number)
        try:
            return step()
        finally:
            CURRENT.pack_into(self._current, 0, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._playing.measured()
            self._playing.begun_s = None

    def send(self, value):
        """Runs the coroutine up to its next wait."""
        return self._step(functools.partial(self._coroutine.send, value))

    def throw(self, *error):
        """Raises an error in the coroutine."""
        return self._step(functools.partial(self._coroutine.throw, *error))

    def close(self):
        """Ends the coroutine."""
        self._coroutine.close()

    def __await__(self):
        raise AssertionError("a task runs this")


class _Player:
    """The event loop of this process and its episodes."""

    def __init__(self, env: environment.Environment, current: mmap.mmap, limit_s: int):
        self._env, self._current, self._limit_s = env, current, limit_s
        self._playing: dict[int, _Playing] = {}
        self._make_task = functools.lru_cache(1024)(env.make_task)

    def make(self, loop: asyncio.AbstractEventLoop, coroutine, **options) -> asyncio.Task:
        """Makes the task of a coroutine; those of an episode, and the tasks that these begin, run in `_Steps`."""
        if playing := _episode.get():
            coroutine = _Steps(coroutine, playing, self._current, self._limit_s)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def serve(self, ready: limited_process.Ready) -> int:
        """Answers the parent until it closes the pipe. Returns the exit status."""
        reader, writer = await asyncio.open_connection(sock=ready.pipe, limit=limited_process.MAX_REPLY_BYTES)
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        begun = asyncio.Event()

        def write(message: dict) -> None:
            text = json.dumps(message).encode()
            if len(text) > MAX_MESSAGE_BYTES:
                raise ValueError(f"the messages of a call have {len(text)} bytes of at most {MAX_MESSAGE_BYTES}")
            writer.write(text + b"\n")

        async def beat() -> None:
            await begun.wait()  # the parent reads one message, and then begins
            while True:
                write({"beat": ready.has_grown()})
                await asyncio.sleep(BEAT_S)

        async def read() -> None:
            while line := await reader.readline():
                begun.set()
                self._hear(json.loads(line), write)
            self._end(0)

        tasks = [asyncio.create_task(one()) for one in (beat, read)]
        for task in tasks:
            task.add_done_callback(lambda one: self._end(1) if not one.cancelled() and one.exception() else None)
        return await self._status

    def _end(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)

    def _hear(self, message: dict, write) -> None:
        if "run" in message:
            playing = _Playing(message["run"], message["max_requests"], write)
            self._playing[playing.number] = playing
            context = contextvars.copy_context()
            context.run(_episode.set, playing)
            playing.task = context.run(asyncio.get_running_loop().create_task, self._play(playing, message))
        elif "cancel" in message:
            if playing := self._playing.pop(message["cancel"], None):
                assert playing.task is not None
                playing.task.cancel()
        else:
            number, at = message["reply"]
            playing = self._playing.get(number)
            if playing and (waiting := playing.waiting.get(at)) and not waiting.done():
                waiting.set_result(message)

    async def _play(self, playing: _Playing, message: dict) -> None:
        assert self._env.play is not None
        try:
            task = self._make_task(message["index"], message["split"])
            with limits_lib.measured() as playing.times:
                scores, error = scorer.numbers(await self._env.play(task, playing)), ""
        except MemoryError:  # others may hold the memory, but this one asked for more
            CURRENT.pack_into(self._current, 0, playing.number)
            self._end(limited_process.OUT_OF_MEMORY)
            return
        except asyncio.CancelledError:
            return
        except Exception as raised:  # an environment's own code may raise anything
            scores, error = None, user_code.describe(raised)
        self._playing.pop(playing.number, None)
        outcome = (
            {"failed": playing.number, "error": error} if scores is None else {"done": playing.number, "scores": scores}
        )
        playing.write(outcome | playing.measured())


def main(config_json: str) -> int:
    """Runs the child process of a Host. Returns the exit status.

    `config_json` is an object with name, options, seed, limit_s, digest, current (a file descriptor), and the fields of `limited_process.enter`.
    """
    config, made, outcomes = json.loads(config_json), [], []
    current = mmap.mmap(config["current"], CURRENT.size)
    # The sandbox allows `poll`, and no new sockets: a loop has a pair.
    loop = asyncio.SelectorEventLoop(selectors.PollSelector())

    def load() -> None:
        made.append(scorer.load_in_child(config))
        if made[0].play is None:
            raise ValueError("it has no episodes of several calls (play)")

    def rehearse() -> None:
        model = scripted_model.ScriptedModel(scripted_model.always(""), max_calls=REHEARSED_CALLS)
        outcome = ""
        try:
            loop.run_until_complete(asyncio.wait_for(made[0].play(made[0].make_task(0, "train"), model), REHEARSAL_S))
        except Exception as error:  # foreign code may raise anything
            outcome = user_code.describe(error)
            if outcomes and outcomes[-1] != outcome:  # only in the sandbox
                raise
        outcomes.append(outcome)

    options = {"max_growth_bytes": MAX_GROWTH_BYTES, "describe": user_code.describe}
    ready = limited_process.enter(config, load, rehearse, **options)
    if ready is None:
        return 1
    limits_lib.set_factor(config["limit_s"] / scorer.LIMIT_S)
    player = _Player(made[0], current, config["limit_s"])
    loop.set_task_factory(player.make)
    status = loop.run_until_complete(player.serve(ready))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(status)  # without the episodes that run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
