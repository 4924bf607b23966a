"""Runs code of the model in a child of inside.py, which has taken its rights away. Standard library only, and loaded from its file.

Clock, random numbers, and hashes are the same in each run, as far as Python's modules reach, so that a replay repeats the output. Not
the same are the numbers of `id`, and the clocks and random numbers of the C library.
"""

import ast
import builtins
import functools
import io
import itertools
import json
import linecache
import os
import random
import socket
import sys
import threading
import time
import traceback
import types

EPOCH_S = 1767225600  # 2026-01-01
MAX_VALUE_BYTES = 2**20  # of a watched variable, as JSON


# Tries to exceed limits.
PROBE = """
import os, threading
def refused(attempt):
    try:
        attempt()
    except (OSError, RuntimeError, MemoryError):
        return True
stop = threading.Event()
def threads():
    for _ in range(40):
        threading.Thread(target=stop.wait, daemon=True).start()
checks = {
    "processes": os.fork,
    "threads": threads,
    "memory": lambda: bytearray(2**29),
    "files": lambda: open("/etc/passwd").close(),
    "writes": lambda: open("/usr/x", "w").close(),
    "network": lambda: __import__("socket").socket(),
}
print(" ".join(name for name, attempt in checks.items() if not refused(attempt)) or "held", flush=True)
os._exit(0)
"""


def repeat() -> None:
    """Makes clock and random numbers the same in each run, as far as Python's modules reach."""
    count, numbers, slept_s = itertools.count(1), random.Random(0), [0.0]
    localtime, gmtime, strftime, asctime = time.localtime, time.gmtime, time.strftime, time.asctime
    seed, randbytes = random.Random.seed, random.Random.randbytes

    def clock_s(base_s: float = 0.0) -> float:
        return base_s + slept_s[0] + next(count) * 1e-3

    def sleep(seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        slept_s[0] += seconds

    def urandom(size: int) -> bytes:
        return randbytes(numbers, size)

    def seeded(self, a=None, version=2):
        seed(self, numbers.getrandbits(64) if a is None else a, version)

    changes = {
        time: {
            "time": lambda: clock_s(EPOCH_S),
            "time_ns": lambda: int(clock_s(EPOCH_S) * 1e9),
            "perf_counter": clock_s,  # `monotonic` stays: an event loop waits by it
            "perf_counter_ns": lambda: int(clock_s() * 1e9),
            "process_time": clock_s,
            "process_time_ns": lambda: int(clock_s() * 1e9),
            "sleep": sleep,
            "localtime": lambda seconds=None: localtime(time.time() if seconds is None else seconds),
            "gmtime": lambda seconds=None: gmtime(time.time() if seconds is None else seconds),
            "strftime": lambda text, when=None: strftime(text, time.localtime() if when is None else when),
            "asctime": lambda when=None: asctime(time.localtime() if when is None else when),
            "ctime": lambda seconds=None: asctime(time.localtime(seconds)),
        },
        random.Random: {"seed": seeded},
        random: {"_urandom": urandom},
        os: {"urandom": urandom, "getpid": lambda: 2},
        builtins: {"exit": sys.exit, "quit": sys.exit},
    }
    for owner, names in changes.items():
        for name, value in names.items():
            setattr(owner, name, value)
    random.seed = random._inst.seed  # type: ignore[attr-defined]
    random.seed(0)


def run_program(request: dict, control: int) -> None:
    """Runs one program and ends this process with its status."""
    sys.stdin, sys.stdout, sys.stderr = _text_file(0, "rb"), _text_file(1, "wb"), _text_file(2, "wb")
    sys.argv = ["main.py", *request["argv"]]
    try:
        status = _run(request["code"], "main.py", _namespace("main.py"), False)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # such as output that cannot be written
        status = 1
    os._exit(status)


def run_session(request: dict, control: int) -> None:
    """Runs the commands of a session in one namespace, until the process is killed."""
    pipe, lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=control), threading.Lock()
    lines = pipe.makefile("rb")
    os.dup2(1, 2)
    out = sys.stdout = sys.stderr = _text_file(1, "wb")
    sys.stdin = _text_file(0, "rb")
    namespace = _namespace("session")

    def send(message: dict) -> None:
        pipe.sendall(json.dumps(message).encode() + b"\n")

    def call(name: str, *arguments):
        with lock:
            send({"call": name, "arguments": arguments})
            reply = json.loads(lines.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    for name in request["functions"]:
        namespace[name] = functools.partial(call, name)
    for number, line in enumerate(lines):
        message, status = json.loads(line), 0
        if "values" in message:
            namespace.update(message["values"])
        else:
            status = _run(message["code"], f"<command {number}>", namespace, True)
        out.flush()
        values = {name: _plain(namespace.get(name)) for name in request["watched"]}
        send({"done": True, "status": status, "values": values})


def _run(code: str, name: str, namespace: dict, shows: bool) -> int:
    """Runs code, and prints its traceback if it raises. Returns the exit status. With `shows`, prints the value of a last expression."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if shows and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)  # type: ignore[attr-defined]
            if value is not None:
                namespace["_"] = value
                print(repr(value))
        return 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF or int(shows)  # a command that exits is not a command that succeeds
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        try:
            text = "".join(_own_frames(traceback.TracebackException.from_exception(error)).format())
        except BaseException:  # the model may define exceptions, too
            text = f"{type(error).__name__}\n"
        sys.stderr.write(text)
        return 1


def _own_frames(report: traceback.TracebackException) -> traceback.TracebackException:
    """Removes the frames of the interpreter's files from a traceback: their paths and lines differ between machines."""
    own = [frame for frame in report.stack if not os.path.isabs(frame.filename) and "<frozen" not in frame.filename]
    report.stack = traceback.StackSummary.from_list(own)
    for other in (report.__cause__, report.__context__):
        if other is not None:
            _own_frames(other)
    return report


def _namespace(name: str) -> dict:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.append("")
    module.__dict__["__file__"] = name
    return module.__dict__


def _text_file(fd: int, mode: str) -> io.TextIOWrapper:
    errors = "surrogateescape" if mode == "rb" else "backslashreplace"
    return io.TextIOWrapper(open(fd, mode, closefd=False), encoding="utf-8", errors=errors)


def _plain(value):
    """Returns a value if JSON can express it in a line of a message, else None."""
    try:
        return value if len(json.dumps(value)) < MAX_VALUE_BYTES else None
    except (TypeError, ValueError, RecursionError):
        return None
