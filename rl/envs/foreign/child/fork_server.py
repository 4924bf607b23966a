"""Runs episodes of a foreign environment: loads it once, and forks a process for each episode. Imports nothing of ours.

    PYTHONHASHSEED=0 /path/to/venv/bin/python fork_server.py CONFIG

1. The configuration names an adapter, which is a file of this folder, and a function or package for it. `random` and NumPy are seeded
   before the environment is loaded: a published one drew its tasks from the global generator.
2. A request on standard input, a socket, is a line of JSON: {"run": {"id", "index", "split", "base_url"}}, or {"stop": ID}.
3. An episode runs in the main thread of a fork, in an empty folder, with the global generators seeded by its task, and with a network and
   processes of its own if the configuration has the unix socket of the model's endpoint. So episodes share no state, and one that hangs,
   ends its process, or replies too much is lost alone.
4. The reply is {"id", "cpu_s", "done": {"reward", "metrics", "stop", "error"}} or {"id", "cpu_s", "failed": reason}. The seconds are those
   of the fork and of the processes that it has waited for.

An adapter has `load(target, options)`, `tasks(env)`, an iterator of (text, task) of which the first `MAX_TASKS` are used, and `run(env, task, base_url)`. A task is held out if the hash of its text is 0 modulo 16, as in our own environments.
"""

import contextlib
import ctypes
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import resource
import runpy
import selectors
import shutil
import signal
import socket
import sys
import traceback
import urllib.parse
import warnings

UNSET_URL = "http://127.0.0.1:9/v1"  # of OpenAI clients that an environment makes before its first episode
HELD_OUT_ONE_IN = 16
MAX_FIRST, MAX_LOOKED = 16, 256
MAX_TASKS = 2**20  # of both splits; a run shuffles all, so that one without end would be drawn forever
NETWORK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "network.py")
MAX_ERROR = 500
FEW_PASSES = (100_000, 50, 1000)  # thresholds of the collector; cycles of short life are still freed
MAX_SHOWN = 300  # characters of options in an error
MAX_REPLY_BYTES = 2**21  # the parent reads lines of twice as many
DIE_WITH_PARENT = 1  # of prctl
_NOISE = re.compile(r"For further information visit \S+|\*{9,}")  # in errors of pydantic and NLTK


def main() -> int:
    """Serves the socket of the parent until it closes. Returns the exit status."""
    sys.path.pop(0)  # this folder, which must not hide a package
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    channel, config = socket.socket(fileno=os.dup(0)), json.loads(sys.argv[1])
    with open(os.devnull, "rb") as empty:  # the environment's code has an empty standard input, and not the socket
        os.dup2(empty.fileno(), 0)
    sys.path += config["paths"]
    os.environ.update(OPENAI_BASE_URL=UNSET_URL, OPENAI_API_KEY="intellax")
    try:
        server = _Server(channel, config)
    except BaseException as error:  # foreign code may raise anything, also SystemExit
        with contextlib.suppress(OSError):  # the parent has ended
            _send(channel, {"failed": _describe(error)})
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(1)  # the parent waits, and the end of an interpreter with a large framework takes more than a second
    try:
        _send(channel, {"ready": True})
    except OSError:  # the parent has ended
        return 1
    server.serve()
    return 0


class _Server:
    def __init__(self, channel: socket.socket, config: dict):
        self._channel, self._config = channel, config
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy")  # so that it can be seeded before the environment is loaded
        _seed(f"{config['seed']}")
        # The import of verifiers 0.4 takes 4.9 s of CPU time with the usual passes of the collector, and 4.5 s with few of them.
        usual = gc.get_threshold()
        gc.set_threshold(*FEW_PASSES)
        self._adapter = runpy.run_path(config["adapter"])
        self._env = self._adapter["load"](config["target"], config["options"])
        self._tasks = _Tasks(self._adapter["tasks"](self._env), config["options"])
        self._tasks.find("train", 0)  # an environment without tasks fails here
        openai = sys.modules.get("openai")
        kinds = tuple(getattr(openai, name) for name in ("OpenAI", "AsyncOpenAI")) if openai else ()
        # Not by `isinstance`, which asks lazy modules for their class, so that they are imported: 2 s for a large framework.
        clients = [one for one in gc.get_objects() if issubclass(type(one), kinds)] if kinds else []
        self._clients = [client for client in clients if str(client.base_url).startswith(UNSET_URL)]
        self._episodes: dict[int, tuple[int, object, bytearray]] = {}  # pipe -> (process, ID, reply so far)
        gc.set_threshold(*usual)
        gc.collect()
        gc.freeze()  # or each fork would copy the memory that its collector visits

    def serve(self) -> None:
        """Answers requests until the parent closes its end, and then ends all episodes."""
        selector, buffer = selectors.DefaultSelector(), bytearray()
        selector.register(self._channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not self._channel:
                    if self._read_episode(key.fd):
                        selector.unregister(key.fd)
                        self._end_episode(key.fd)
                    continue
                try:
                    chunk = self._channel.recv(2**16)
                except ConnectionResetError:  # the parent has ended, and has not read all
                    chunk = b""
                if not chunk:
                    for pid, *_ in self._episodes.values():
                        _kill(pid)
                    return
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    if "run" in request:
                        self._begin_episode(selector, request["run"])
                    for pid, one, _ in self._episodes.values():
                        if one == request.get("stop"):
                            _kill(pid)

    def _begin_episode(self, selector, request: dict) -> None:
        try:
            task = self._tasks.find(request["split"], request["index"])
        except Exception as error:
            return _send(self._channel, {"id": request["id"], "failed": _describe(error)})
        read, write = os.pipe()
        if not (pid := os.fork()):
            selector.close()
            self._channel.close()  # of the server alone: with it an episode could answer for others, or end them
            for pipe in (read, *self._episodes):
                os.close(pipe)
            self._play(write, task, request)
        os.close(write)
        selector.register(read, selectors.EVENT_READ)
        self._episodes[read] = pid, request["id"], bytearray()

    def _read_episode(self, pipe: int) -> bool:
        """Reads from an episode. Returns True at its end, or if its reply is too long."""
        chunk, reply = os.read(pipe, 2**16), self._episodes[pipe][2]
        reply.extend(chunk)
        return not chunk or len(reply) > MAX_REPLY_BYTES

    def _end_episode(self, pipe: int) -> None:
        pid, one, reply = self._episodes.pop(pipe)
        os.close(pipe)
        _kill(pid)  # and processes that it left
        _, status, used = os.wait4(pid, 0)
        status = os.waitstatus_to_exitcode(status)
        shutil.rmtree(str(pid), ignore_errors=True)
        status = status if status <= 128 else 128 - status  # of network.py, after a signal
        if len(reply) > MAX_REPLY_BYTES:
            found = {"failed": f"its reply has more than {MAX_REPLY_BYTES} bytes"}
        else:
            found = _parsed(reply) or {"failed": f"its process ended with status {status}", "status": status}
        _send(self._channel, found | {"id": one, "cpu_s": used.ru_utime + used.ru_stime})

    def _play(self, pipe: int, task, request: dict) -> None:
        """Plays an episode in a fork, and ends this process."""
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CPU, (self._config["limit_s"], resource.RLIM_INFINITY))
            os.mkdir(str(os.getpid()))
            os.chdir(str(os.getpid()))
            if path := self._config["unix_path"]:
                port = urllib.parse.urlsplit(request["base_url"]).port
                runpy.run_path(NETWORK)["enter"](port, path, self._config["frozen"])
            os.environ["OPENAI_BASE_URL"] = request["base_url"]
            for client in self._clients:
                client.base_url = request["base_url"]
            _seed(f"{self._config['seed']}/{request['split']}/{request['index']}")
            arguments = self._env, task, request["base_url"]
            text = json.dumps({"done": self._adapter["run"](*arguments)})
        except BaseException as error:  # foreign code may raise anything
            text = json.dumps({"failed": _describe(error) + _place(error)})
        with open(pipe, "w", encoding="utf-8") as file:
            file.write(text)
        os._exit(0)


class _Tasks:
    """The tasks of both splits, drawn from an iterator as far as they are needed.

    The hash of a prompt decides its split. If the first MAX_FIRST prompts are equal, it includes the task's number. If none of all, or of
    the first MAX_LOOKED, is held out, that with the least hash is.
    """

    def __init__(self, drawn, options: dict):
        self._options = options
        drawn = itertools.islice(drawn, MAX_TASKS)
        first = [*itertools.islice(drawn, MAX_FIRST)]
        self._are_equal = len(first) > 1 and len({text for text, _ in first}) == 1
        numbered, looked, self._least = enumerate(itertools.chain(first, drawn)), [], None
        for number, (text, task) in itertools.islice(numbered, MAX_LOOKED):
            looked.append((number, (text, task)))
            if self._hash(number, text) % HELD_OUT_ONE_IN == 0:
                break
        else:
            hashes = {self._hash(number, text) for number, (text, _) in looked}
            self._least = min(hashes) if len(hashes) > 1 else None
        self._drawn, self._splits = itertools.chain(looked, numbered), {"train": [], "held_out": []}
        self._is_over = False

    def _hash(self, number: int, text: str) -> int:
        text = f"{text}/{number}" if self._are_equal else text
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def find(self, split: str, index: int):
        """Returns a task. After the last one comes the first one."""
        found = self._splits[split]
        while len(found) <= index and not self._is_over:
            try:
                number, (text, task) = next(self._drawn)
            except StopIteration:
                self._is_over = True
                break
            found_hash = self._hash(number, text)
            is_held_out = found_hash % HELD_OUT_ONE_IN == 0 or found_hash == self._least
            self._splits["held_out" if is_held_out else "train"].append(task)
        if not found:
            options = f"{self._options}"
            options = options if len(options) <= MAX_SHOWN else f"{options[:MAX_SHOWN]} ..."
            rule = f"with env.options = {options}; let the environment make more tasks"
            raise ValueError(f"no task is in the split {split!r} {rule}")
        return found[index % len(found)]


def _seed(text: str) -> None:
    random.seed(text)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little"))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # before it has become the leader of a group


def _send(channel: socket.socket, message: dict) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _parsed(reply: bytearray) -> dict | None:
    """Returns the JSON object that an episode wrote, or None for other bytes."""
    try:
        found = json.loads(bytes(reply))
        return found if isinstance(found, dict) and len(json.dumps(found)) <= MAX_REPLY_BYTES else None
    except (ValueError, RecursionError):
        return None


def _describe(error: BaseException) -> str:
    text = _NOISE.sub("", f"{type(error).__name__}: {error}")
    text = " ".join(text.split())
    return "".join(char for char in text if char.isprintable())[:MAX_ERROR]


def _place(error: BaseException) -> str:
    """Returns the file and line of an error, those of the environment's own code if it has any."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    libraries = (sys.prefix, sys.base_prefix, "<frozen", os.path.dirname(__file__))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""


if __name__ == "__main__":
    sys.exit(main())
