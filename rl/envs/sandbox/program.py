"""Runs code of the model in a child of inside.py, which has taken its rights away. Standard library only, and loaded from its file.

Clocks, random numbers, hashes, the metadata and order of files, users, and the machine are the same in each run, as far as Python's
modules reach, so that a replay repeats the output. Not the same are numbers that follow from addresses (`id`, `hash` of a plain object,
`threading.get_ident`), counts of memory, and all that a program gets from the C library by ctypes.
"""

import ast
import builtins
import functools
import importlib
import io
import itertools
import json
import linecache
import os
import posix
import random
import resource
import selectors
import socket
import stat
import sys
import threading
import time
import traceback
import types
import uuid

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
    """Makes all that a program reads from its surroundings the same in each run, as far as Python's modules reach."""
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

    def clock_gettime(clock: int) -> float:
        is_of_day = clock in (time.CLOCK_REALTIME, time.CLOCK_TAI, 5)  # 5: CLOCK_REALTIME_COARSE
        return clock_s(EPOCH_S if is_of_day else 0.0)

    clocks = {"time": lambda: clock_s(EPOCH_S), "clock_gettime": clock_gettime}
    clocks |= dict.fromkeys(("perf_counter", "process_time", "monotonic", "thread_time"), clock_s)
    changes = {
        time: {
            **clocks,
            **{f"{name}_ns": functools.partial(_nanoseconds, clock) for name, clock in clocks.items()},
            "pthread_getcpuclockid": lambda thread: time.CLOCK_THREAD_CPUTIME_ID,
            "sleep": sleep,
            "localtime": lambda seconds=None: localtime(time.time() if seconds is None else seconds),
            "gmtime": lambda seconds=None: gmtime(time.time() if seconds is None else seconds),
            "strftime": lambda text, when=None: strftime(text, time.localtime() if when is None else when),
            "asctime": lambda when=None: asctime(time.localtime() if when is None else when),
            "ctime": lambda seconds=None: asctime(time.localtime(seconds)),
        },
        random.Random: {"seed": seeded},
        random: {"_urandom": urandom},
        os: {"urandom": urandom, "getrandom": lambda size, flags=0: urandom(size), **_machine(clock_s), **_files()},
        resource: {"getrusage": lambda who: resource.struct_rusage((clock_s(), *[0] * 15))},
        socket: {"gethostname": lambda: "sandbox"},
        uuid: {"_generate_time_safe": None},
        builtins: {"exit": sys.exit, "quit": sys.exit},
    }
    importlib._bootstrap_external._os = types.SimpleNamespace(**vars(posix))  # type: ignore[attr-defined]  # compares times
    for owner, names in changes.items():
        for name, value in names.items():
            for module in (owner, posix) if owner is os and hasattr(posix, name) else (owner,):
                setattr(module, name, value)
    _let_waits_pass(slept_s)
    random.seed = random._inst.seed  # type: ignore[attr-defined]
    random.seed(0)


def _nanoseconds(clock, *arguments) -> int:
    return int(clock(*arguments) * 1e9)


def _machine(clock_s) -> dict:
    """Returns functions of `os` that describe the process, its user, and the machine, by name."""
    sysconf, own = os.sysconf, {"SC_PHYS_PAGES": 2**17, "SC_AVPHYS_PAGES": 2**16}
    own |= dict.fromkeys(("SC_NPROCESSORS_ONLN", "SC_NPROCESSORS_CONF"), 1)
    own |= {os.sysconf_names[name]: value for name, value in own.items()}
    numbers: dict[int, int] = {}
    threading.get_native_id = lambda: numbers.setdefault(threading.get_ident(), len(numbers) + 2)
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]
    uname = os.uname_result(("Linux", "sandbox", "6.0", "#1", os.uname().machine))
    return {
        **dict.fromkeys(("getuid", "geteuid", "getgid", "getegid"), lambda: 1000),
        **dict.fromkeys(("cpu_count", "process_cpu_count"), lambda: 1),
        "getpid": lambda: 2,
        "getppid": lambda: 1,
        "getloadavg": lambda: (0.0, 0.0, 0.0),
        "times": lambda: os.times_result((clock_s(), 0.0, 0.0, 0.0, clock_s())),
        "uname": lambda: uname,
        "sched_getaffinity": lambda pid: {0},
        "sysconf": lambda name: own[name] if name in own else sysconf(name),
    }


def _files() -> dict:
    """Returns functions of `os` that describe files, by name: with fixed times and users, and names in their order."""
    numbers: dict[tuple, int] = {}
    listdir, scandir = os.listdir, os.scandir

    def fixed(found: os.stat_result) -> os.stat_result:
        inode = numbers.setdefault((found.st_dev, found.st_ino), len(numbers) + 2)
        size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
        own = (found.st_mode, inode, 1, found.st_nlink, 1000, 1000, size)
        times = (*[EPOCH_S] * 3, *[float(EPOCH_S)] * 3, *[EPOCH_S * 10**9] * 3)
        return os.stat_result((*own, *times, 4096, -(-size // 512), 0))

    class Entry:
        def __init__(self, entry):
            self._entry, self.name, self.path = entry, entry.name, entry.path

        def __getattr__(self, name):
            return getattr(self._entry, name)

        def __fspath__(self):
            return self.path

        def stat(self, *, follow_symlinks=True):
            return fixed(self._entry.stat(follow_symlinks=follow_symlinks))

        def inode(self):
            return self.stat(follow_symlinks=False).st_ino

    class Entries:
        def __init__(self, path="."):
            with scandir(path) as entries:
                self._entries = iter(sorted(map(Entry, entries), key=lambda entry: entry.name))

        def __iter__(self):
            return self

        def __next__(self):
            return next(self._entries)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.close()

        def close(self):
            self._entries = iter(())

    found = {"listdir": lambda path=".": sorted(listdir(path)), "scandir": Entries}
    for name in ("stat", "lstat", "fstat"):
        found[name] = functools.partial(lambda real, *args, **options: fixed(real(*args, **options)), getattr(os, name))
    return found


def _let_waits_pass(slept_s: list[float]) -> None:
    """Makes the clock move by the time of a wait that ends without its event. An event loop without threads does not wait at all."""

    def selecting(real):
        def select(self, timeout=None):
            if timeout is None or timeout <= 0:
                return real(self, timeout)
            ready = real(self, 0 if threading.active_count() == 1 else timeout)
            slept_s[0] += 0 if ready else timeout
            return ready

        return select

    for kind in (selectors.SelectSelector, selectors.PollSelector, selectors.EpollSelector):
        kind.select = selecting(kind.select)
    wait = threading.Condition.wait

    def wait_and_count(self, timeout=None):
        is_notified = wait(self, timeout)
        slept_s[0] += 0.0 if is_notified or timeout is None else max(timeout, 0.0)
        return is_notified

    threading.Condition.wait = wait_and_count


def run_program(request: dict, control: int) -> None:
    """Runs one program and ends this process with its status."""
    sys.stdin, sys.stdout, sys.stderr = _text_file(0, "rb"), _text_file(1, "wb"), _text_file(2, "wb")
    sys.argv = ["main.py"]
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
