"""Plays episodes of an environment of another framework: its process asks the recording endpoint, which asks the episode's session.

1. A worker's session asks an inference server, and a validator's answers from the tape: the environment runs in the same way for both.
2. An episode that raises, ends its process, exceeds its CPU time, or waits for too long gets FAILED scores, as in rl/envs/host.
3. If the process that loaded the environment ends, its episodes run again, from their recorded calls.

Imports no jax.
"""

import asyncio
import dataclasses
import math
import numbers
import signal
from typing import Any

from models.text import tokenizer as tokenizer_lib
from rl.envs.foreign import isolation
from rl.envs.foreign import process as process_lib
from rl.envs.host import host as host_lib
from rl.envs.interface import environment
from rl.envs.packages import package as package_lib
from rl.envs.recording import endpoint as endpoint_lib
from rl.envs.recording import session as session_lib
from rl.envs.scoring import scorer as scorer_lib
from sharding.system import cli

MAX_EPISODES = 64  # at the same time; each is a process; others wait
MAX_DEATHS = 3  # of the process that loaded the environment, in one episode
IDLE_S = 300.0  # an episode fails that makes no request to the model for so long; it may take twice the time
ABORTS = (-signal.SIGXCPU, -signal.SIGKILL)  # statuses of limits


def of_environment(
    env: environment.Environment,
    name: str,
    options: dict,
    seed: int,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    limit_s: int,
    sandbox: str,
    digest: str = "",
    on_error: scorer_lib.Log = cli.note,
    begun: process_lib.Beginning | None = None,
) -> "host_lib.Plays":
    """Returns the host of an environment's episodes: a `ForeignHost` for an environment of another framework, else a `Host`.

    `limit_s` is the CPU seconds of one step, as for `host.Host`. `name` and `options` are located (`catalog.locate`). `begun` is for a
    `ForeignHost`. Raises ValueError for an environment of another framework that cannot be isolated if `sandbox` is "require".
    """
    if env.foreign is None:
        own = {"limit_s": limit_s, "sandbox": sandbox, "digest": digest, "on_error": on_error}
        return host_lib.Host(name, options, seed, kind=env.kind, **own)
    limit_s = limit_s * process_lib.CPU_S // scorer_lib.LIMIT_S
    return ForeignHost(env.foreign, tokenizer, limit_s=limit_s, sandbox=sandbox, on_error=on_error, begun=begun)


class ForeignHost:
    """Plays episodes of one environment, many at the same time. All methods run in one event loop.

    Args:
      foreign: the environment's field `foreign`.
      tokenizer: the tokenizer of the sessions.
      limit_s: CPU seconds of an episode.
      sandbox: isolate the process (isolation.py), one of `sharding.system.sandbox.MODES`.
      on_error: called with a line of text for the first episode of each kind that fails.
      begun: a process that may load this environment already. The host takes it if it was begun with the same arguments.
    """

    def __init__(
        self,
        foreign: package_lib.Foreign,
        tokenizer: tokenizer_lib.Tokenizer,
        *,
        limit_s: int = process_lib.CPU_S,
        sandbox: str = "auto",
        on_error: scorer_lib.Log = cli.note,
        begun: process_lib.Beginning | None = None,
    ):
        self._foreign, self._name, self._limit_s = foreign, foreign.package.name, limit_s
        self._is_isolated = isolation.is_possible(foreign.package, sandbox, on_error)
        self._begun = begun if begun and begun.is_for(foreign, limit_s, self._is_isolated) else None
        self._endpoint = endpoint_lib.Endpoint(tokenizer, self._begun.unix_path if self._begun else "")
        self._process: process_lib.ForeignProcess | None = None
        self._places, self._lock = asyncio.Semaphore(MAX_EPISODES), asyncio.Lock()
        self._errors = scorer_lib.FirstErrors(on_error)

    async def play(self, session: session_lib.Session, index: int, split: str) -> host_lib.Played:
        """Plays the episode of a task and returns its result: the scores are "reward", and the framework's metrics.

        Raises the errors of the session's backend, NotOnTape, and `process.Broken` if the environment cannot be loaded.
        """
        async with self._lock:
            if self._process is None:
                await self._endpoint.__aenter__()
                child = self._begun.take() if self._begun else None
                path = self._endpoint.unix_path if self._is_isolated else ""
                self._process = process_lib.ForeignProcess(
                    self._foreign, limit_s=self._limit_s, unix_path=path, child=child
                )
                self._begun = None
            process = self._process
        async with self._places:
            for death in range(MAX_DEATHS):
                session.restart()
                try:
                    found = await self._play(process, session, index, split)
                    # As a fraction of the limit, like the seconds of a step in rl/envs/host.
                    session.cpu_s = max(session.cpu_s, found.cpu_s / process_lib.CPU_S * scorer_lib.LIMIT_S)
                    return found
                except process_lib.Died:
                    if death == MAX_DEATHS - 1:
                        raise
            raise AssertionError("unreachable")

    async def close(self) -> None:
        """Ends the process and the endpoint."""
        if self._process is not None:
            await self._process.close()
            await self._endpoint.__aexit__(None, None, None)
            self._process = None

    async def _play(
        self, process: process_lib.ForeignProcess, session: session_lib.Session, index: int, split: str
    ) -> host_lib.Played:
        await process.start()
        with self._endpoint.open(session) as visit:
            run = asyncio.ensure_future(process.run(index, split, visit.base_url))
            try:
                is_idle = await self._wait(run, visit)
            finally:
                if not run.done():
                    run.cancel()  # ends its process
            if visit.fault.done():
                visit.fault.result()  # raises
            if is_idle:
                reason = f"it takes too much time: it makes no request to the model for {IDLE_S:g} s"
                found = host_lib.Played(dict(host_lib.FAILED), float(self._limit_s), reason, in_time=False)
            else:
                found = _played(run.result(), self._limit_s)
            if "error" in found.scores:
                if remedy := process_lib.remedy_of_episode(found.error):
                    found = dataclasses.replace(found, error=f"{found.error}; {remedy}")
                self._errors.report(
                    f"environment {self._name} failed in an episode of {split} task {index}", found.error
                )
            return found

    async def _wait(self, run: asyncio.Future, visit: endpoint_lib.Visit) -> bool:
        """Waits for the end of an episode. Returns True if it makes no requests any more."""
        before = -1
        while not run.done() and not visit.fault.done():
            await asyncio.wait([run, visit.fault], timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            if not run.done() and not visit.fault.done() and not visit.calls and visit.num_requests == before:
                return True
            before = visit.num_requests
        return False


def _played(reply: dict, limit_s: int) -> host_lib.Played:
    """Returns the result in the reply of a process, which is data from foreign code."""
    spent_s = float(reply["cpu_s"]) if _is_number(reply.get("cpu_s")) else 0.0
    if "done" not in reply:
        in_time = reply.get("status") not in ABORTS
        spent_s = spent_s if in_time else float(limit_s)
        return host_lib.Played(dict(host_lib.FAILED), spent_s, str(reply.get("failed")), in_time)
    done = reply["done"]
    if not isinstance(done, dict):
        return host_lib.Played(dict(host_lib.FAILED), spent_s, "ValueError: the reply is not an object")
    metrics = done.get("metrics")
    named = metrics.items() if isinstance(metrics, dict) else ()
    kept = {name: value for name, value in named if _is_number(value) and name not in host_lib.FAILED}
    kept = dict(sorted(kept.items())[: scorer_lib.MAX_NUMBERS - 1])
    try:
        found = scorer_lib.numbers({"reward": done.get("reward"), **kept})
    except (TypeError, ValueError, OverflowError) as error:
        return host_lib.Played(dict(host_lib.FAILED), spent_s, f"{type(error).__name__}: {error}")
    problem = done.get("error")
    return host_lib.Played(found | ({"error": 1.0} if problem else {}), spent_s, str(problem or "")[:500])


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
