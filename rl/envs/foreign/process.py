"""Runs episodes of a foreign environment in a process of its own interpreter, and exchanges lines of JSON with it.

1. The first episode starts the process (child/fork_server.py), which loads the environment, unless a `Beginning` did so before. The
   surroundings are the same everywhere: the hash seed, time zone, locale, an empty folder, and few variables, none of them a key or the
   address of a proxy.
2. Episodes run at the same time, each in a fork of that process. `run` waits for one, and ends it if it is cancelled.
3. If the process ends, its episodes fail, and the next one starts it again.
4. With the path of a unix socket of the model's endpoint, the process and its episodes are isolated (isolation.py).
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from rl.envs.foreign import isolation
from rl.envs.packages import package as package_lib
from sharding.system import limited_process, sandbox, sockets

START_S = 300.0  # an import of a large framework on a busy machine takes 30 s
END_S = 5.0  # for its end once its socket is closed
MAX_REPLY_BYTES = 2**22
MAX_SHOWN = 300  # characters of options in an error
CPU_S = 60  # of an episode

SURROUNDINGS = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
SURROUNDINGS |= {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}

# words in the text of an error that show the need
_PACKAGE = re.compile("ModuleNotFoundError|ImportError")
_KEY = re.compile(r"(?i)api[ _]?key|missing ?key|credential|unauthorized|\b[A-Z0-9]+_(KEY|TOKEN)\b")
_NETWORK = re.compile(
    r"(?i)connect(ion)?[ _]?(error|timeout|refused|attempts)|couldn't reach|unreachable|name resolution|"
    "not resolve|max retries|urlerror|proxyerror|localentrynotfound|offline ?mode"
)
_DATA = re.compile(
    r"(?i)nltk[._ ]|resource \S+ not found|(file|directory)NotFoundError|no such file|\.download\(|can't find model"
)
_FETCHED = (
    "it needs data that is not on this machine, and fetches none in a run: connect this machine and download it once "
    "(for NLTK: python -m nltk.downloader NAME), or name a copy in env.options"
)
# The first need that an error of a loader shows, with the remedy.
_OF_LOAD = {
    _DATA: _FETCHED,
    _PACKAGE: "install the package that it imports (python -m rl.envs install NAME --requirement ...)",
    _NETWORK: "it fetches data from the network, which does not answer here: connect this machine, fill Hugging Face's cache, "
    "or name a data set of this machine in env.options",
    re.compile(r"env\.options"): "",  # it has its own
    _KEY: "it needs a key of a service: install it with --variable NAME=VALUE, and with --kind recorded if episodes use it",
}


class Broken(ValueError):
    """Raised if an environment cannot be loaded."""


class Died(Broken):
    """Raised for the running episodes when the process ends after it has loaded the environment. The next episode starts the process again."""


class Beginning:
    """The process of a foreign environment that loads it before its host exists: a learner imports JAX in the meantime.

    The first `foreign_host.ForeignHost` with the same arguments takes `child`. `close` ends a process that none has taken.
    """

    def __init__(self, foreign: package_lib.Foreign, *, is_isolated: bool, limit_s: int = CPU_S):
        self._key = _key(foreign, limit_s, is_isolated)
        self._stack = contextlib.ExitStack()
        self.unix_path = self._stack.enter_context(sockets.private_path()) if is_isolated else ""
        self.child: limited_process.JsonProcess | None = spawn(foreign, limit_s, self.unix_path)

    def is_for(self, foreign: package_lib.Foreign, limit_s: int, is_isolated: bool) -> bool:
        """Returns True if a host with these arguments may take the process."""
        return self.child is not None and self._key == _key(foreign, limit_s, is_isolated)

    def take(self) -> limited_process.JsonProcess:
        """Returns the process, which the caller ends from now on."""
        assert self.child is not None
        taken, self.child = self.child, None
        return taken

    def close(self) -> None:
        """Kills the process, if no host has taken it, and removes the folder of the socket. A second call does nothing."""
        if self.child is not None:
            child = self.take()
            child.process.kill()  # it plays no episodes that must end first
            child.end()
        self._stack.close()


def _key(foreign: package_lib.Foreign, limit_s: int, is_isolated: bool) -> tuple:
    # A frozen config has tuples in place of lists.
    return foreign.package, json.dumps(dict(foreign.options), sort_keys=True), foreign.seed, limit_s, is_isolated


def spawn(foreign: package_lib.Foreign, limit_s: int, unix_path: str) -> limited_process.JsonProcess:
    """Starts the process of an environment, which loads it and then reads requests. Does not wait for it.

    Args:
      foreign: the environment, the keyword arguments of its loader, and a seed. Together with the task, it seeds Python's global random
        generators at the start of each episode.
      limit_s: CPU seconds of an episode.
      unix_path: socket of the endpoint of the model, if the process is isolated; else "".
    """
    package = foreign.package
    folder = tempfile.TemporaryDirectory(prefix="intellax-env-")
    adapter = package_lib.ADAPTERS / f"{package.adapter}.py"
    config = {"adapter": str(adapter), "target": package.target, "options": dict(foreign.options)}
    config |= {"seed": foreign.seed, "limit_s": limit_s, "paths": [*package.paths]}
    config |= {"unix_path": unix_path, "frozen": isolation.caches(os.environ) if unix_path else []}
    command = [
        *(isolation.command(package, foreign.options, folder.name, unix_path) if unix_path else ()),
        package.python,
        "-s",
        str(package_lib.ADAPTERS / "fork_server.py"),
        json.dumps(config),
    ]
    return limited_process.JsonProcess(
        command, folder=folder.name, variables=_variables(package), grace_s=END_S, clean=folder.cleanup
    )


def _variables(package: package_lib.Package) -> dict[str, str]:
    kept = {name: text for name, text in sandbox.environment(os.environ).items() if not name.startswith("PYTHON")}
    kept.pop("VIRTUAL_ENV", None)
    folder = str(pathlib.Path(package.python).parent)
    path = os.pathsep.join([folder, kept.get("PATH", os.defpath)])
    return kept | SURROUNDINGS | {"PATH": path} | dict(package.variables)


class ForeignProcess:
    """The process of one foreign environment. All methods run in one event loop.

    Args:
      foreign, limit_s, unix_path: those of `spawn`.
      child: a process that `spawn` started with these arguments, if there is one.
    """

    def __init__(
        self,
        foreign: package_lib.Foreign,
        *,
        limit_s: int,
        unix_path: str = "",
        child: limited_process.JsonProcess | None = None,
    ):
        self._foreign, self._limit_s, self._unix_path, self._child = foreign, limit_s, unix_path, child
        self._numbers, self._waiting = itertools.count(), {}
        self._starting: asyncio.Task | None = None

    async def run(self, index: int, split: str, base_url: str) -> dict:
        """Plays an episode of a task with the model at `base_url`. Calls `start` first.

        Returns {"done": {"reward", "metrics", "stop", "error"}} or {"failed": reason}. Raises Broken if the environment cannot be loaded.
        """
        await self.start()
        number = next(self._numbers)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "index": index, "split": split, "base_url": base_url}
        self._send({"run": request})
        try:
            return await reply
        finally:
            if not reply.done() or reply.cancelled():
                self._send({"stop": number})
            self._waiting.pop(number, None)

    async def start(self) -> None:
        """Starts the process, unless it runs, and waits until the environment is loaded. Raises Broken if it cannot be."""
        if self._starting is None or self._starting.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._starting = asyncio.ensure_future(self._serve(self._ready))
        await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Ends the process and its episodes."""
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Broken):
                await self._starting
        self._starting = None

    async def _serve(self, ready: asyncio.Future) -> None:
        """Runs the process until it ends or this is cancelled."""
        child, self._child = self._child or spawn(self._foreign, self._limit_s, self._unix_path), None
        reader, self._writer = await asyncio.open_connection(sock=child.pipe, limit=MAX_REPLY_BYTES)
        try:
            async with asyncio.timeout(START_S) as limit:
                while line := await reader.readline():
                    message = json.loads(line)
                    limit.reschedule(None)
                    self._hear(message, ready)
        except (TimeoutError, OSError, ValueError, RecursionError):
            pass
        finally:
            self._writer.transport.abort()  # ends the episodes
            ending = asyncio.ensure_future(asyncio.to_thread(child.end))
            try:
                await asyncio.shield(ending)
            finally:  # `close` may cancel this while the process ends by itself
                await ending
            kind = Died if ready.done() else Broken
            name, status = self._foreign.package.name, child.process.returncode
            problem = kind(f"environment {name} ended its process, with status {status}")
            for waiting in [ready, *self._waiting.values()]:
                if not waiting.done():
                    waiting.set_exception(problem)
            ready.exception()  # marks it as seen

    def _hear(self, message: dict, ready: asyncio.Future) -> None:
        if "id" in message:
            waiting = self._waiting.get(message["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result({name: value for name, value in message.items() if name != "id"})
        elif "ready" in message:
            ready.set_result(None)
        else:
            failed = str(message.get("failed"))
            parts = filter(None, (failed, remedy_of_load(failed, self._foreign.options)))
            reason = f"environment {self._foreign.package.name} cannot be loaded: {'; '.join(parts)}"
            ready.set_exception(Broken(reason))

    def _send(self, message: dict) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")


def shown(options: Mapping[str, Any]) -> str:
    """Returns the assignment of an environment's options, without the end of a long one: an error of its code may not name the value."""
    text = f"env.options = {dict(options)}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def remedy_of_load(error: str, options: Mapping[str, Any]) -> str:
    """Returns the remedy for an error of an environment's loader, which had these options."""
    other = f"correct {shown(options)}, or install its requirements (python -m rl.envs install)"
    return next((remedy for need, remedy in _OF_LOAD.items() if need.search(error)), other)


def remedy_of_episode(error: str) -> str:
    """Returns the remedy for an error in an episode, or "" if it shows no need of data, the network, or a key."""
    if _DATA.search(error):
        return _FETCHED
    if _NETWORK.search(error) or _KEY.search(error):
        return (
            "an isolated episode reaches its model and nothing else: if the environment needs a service, install it with --kind recorded "
            "(and --variable NAME=VALUE for a key); strangers cannot run it then"
        )
    return ""
