"""Programs and sessions: output, limits, fresh state for each use, repeatable results, and faults of the sandbox itself."""

import asyncio
import dataclasses
import doctest
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from rl.envs.sandbox import backend as backend_lib
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib


@pytest.fixture(scope="module", params=backend_lib.NAMES)
def backend(request):
    try:
        return backend_lib.find((request.param,))
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture
def pool(backend):
    pool = pool_lib.Pool(limits_lib.Limits(cpu_s=0.5), backend=backend)
    yield pool
    pool.close()


def in_session(pool, *commands, **options):
    async def run():
        async with pool.session(**options) as session:
            return [await session.execute(command) for command in commands]

    return asyncio.run(run())


def test_a_program_has_input_files_output_and_status(pool):
    code = """
import sys, helper
print(input()[::-1], sys.argv[1:], open("data/words.txt").read())
print("to standard error", file=sys.stderr)
with open("own", "w") as file:
    file.write("x")
print(open("own").read(), helper.NUMBER)
sys.exit(3)
"""
    files = {"data/words.txt": "größe", "helper.py": "NUMBER = 7"}
    result = asyncio.run(pool.run(code, stdin="hello\n", files=files))
    assert (result.stdout, result.stderr) == ("olleh [] größe\nx 7\n", "to standard error\n")
    assert (result.exit, result.stopped, result.truncated) == (3, "", False)


@pytest.mark.parametrize(
    "code, status, text",
    [
        ("1/0", 1, "ZeroDivisionError: division by zero\n"),
        ("def f(:", 1, "SyntaxError"),
        ("raise SystemExit('bad')", 1, "bad\n"),
        ("def f(): f()\nf()", 1, "RecursionError"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("x = '\\ud800'; print(x); raise ValueError(x)", 1, "ValueError: \\ud800"),
        ("\ud800", 1, "UnicodeEncodeError"),
        ("\0", 1, "null bytes"),
        ("x = [0] * 10**9", 1, "MemoryError"),
        ("import json; json.loads('{')", 1, "JSONDecodeError"),
    ],
)
def test_a_program_that_fails(pool, code, status, text):
    result = asyncio.run(pool.run(code))
    assert result.exit == status
    assert text in result.stderr
    assert sys.base_prefix not in result.stderr and "inside.py" not in result.stderr  # paths differ between machines


@pytest.mark.parametrize(
    "code, reason",
    [
        ("while True: pass", "time"),
        ("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()", "time"),
        ("import os\nfor fd in range(64):\n    try: os.close(fd)\n    except OSError: pass\nwhile True: pass", "time"),
        (
            "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile 1: 0",
            "time",
        ),
        ("print('x', flush=True)\nwhile True: print('y' * 1000)", "output"),
        ("import os\nwhile True: os.write(2, b'y' * 1000)", "output"),
    ],
)
def test_a_program_is_ended_at_a_limit(pool, code, reason):
    begun_s = time.monotonic()
    result = asyncio.run(pool.run(code))
    assert (result.stopped, result.exit) == (reason, None)
    assert result.stdout == result.stderr == ""  # its last part would depend on the machine
    assert result.cpu_s < 3 and time.monotonic() - begun_s < 60
    assert asyncio.run(pool.run("print(1)")).stdout == "1\n"


def test_a_program_that_waits_is_ended_by_the_clock(backend):
    pool = pool_lib.Pool(limits_lib.Limits(cpu_s=0.2), backend=backend)
    result = asyncio.run(pool.run("import select; select.select([], [], [], 1000)"))
    assert result.stopped == "time" and result.cpu_s < 0.2
    # the clock is not the real one
    assert asyncio.run(pool.run("import time; time.sleep(1000); print(1)")).stdout == "1\n"
    pool.close()


def test_long_output_keeps_both_ends(backend):
    pool = pool_lib.Pool(limits_lib.Limits(output_bytes=20), backend=backend)
    code = "import os\nfor n in range(100): os.write(1, b'%02d' % n)"  # in pieces
    assert asyncio.run(pool.run(code)).stdout == "0001020304\n[180 bytes left out]\n9596979899"
    for size in (1, 19, 20, 21, 100, 10**5, 10**6):
        text = "".join(str(n % 10) for n in range(size))
        expected = text if size <= 20 else f"{text[:10]}\n[{size - 20} bytes left out]\n{text[-10:]}"
        result = asyncio.run(pool.run("print(input(), end='')", stdin=text))
        assert (result.stdout, result.truncated) == (expected, size > 20)
    assert "\ufffd" in asyncio.run(pool.run("print('ß' * 11)")).stdout  # half a character
    pool.close()


def test_no_state_reaches_the_next_use(pool):
    leave = """
import builtins, json, os, random
open("left", "w").close()
for name in ("random.py", "json.py", "ctypes.py", "sandbox.py"):
    open(name, "w").write("raise SystemExit('poisoned')")
builtins.sorted = None
random.seed = None
os.makedirs("a/b/c")
os.chdir("a/b")
"""
    look = "import os, json, random, ctypes; random.seed(sorted([1])[0]); print(json.loads('1'), os.listdir('.'))"
    for _ in range(3):
        assert asyncio.run(pool.run(leave)).exit == 0
        assert asyncio.run(pool.run(look)).stdout == "1 []\n"
        results = in_session(pool, leave + "x = 1", "x")
        assert results[1].exit == 0
        assert [result.stdout for result in in_session(pool, look, "'x' in globals()")] == ["1 []\n", "False\n"]
    assert len(pool._idle) == 1  # all in the same cell


def test_a_folder_that_cannot_be_emptied_ends_the_cell(pool):
    code = "import os\nfor n in range(900):\n    os.mkdir('d')\n    os.chdir('d')\nprint(1)"
    asyncio.run(pool.run("pass"))
    (before,) = pool._idle
    assert asyncio.run(pool.run(code)).stdout == "1\n"
    assert asyncio.run(pool.run("import os; print(os.listdir('.'))")).stdout == "[]\n"
    assert before.is_alive or before not in pool._idle


# Each may differ between two runs, cells, or machines.
READS = """
time.monotonic() time.monotonic_ns() time.clock_gettime(1) time.clock_gettime_ns(0) time.thread_time() time.thread_time_ns()
time.perf_counter_ns() time.process_time_ns() time.time_ns() time.pthread_getcpuclockid(threading.get_ident()) os.times()
asyncio.run(nap()) sched.scheduler().timefunc() time.sleep(1),time.monotonic() datetime.datetime.now() time.strftime("%c")
uuid.uuid1() uuid.getnode() os.getrandom(8) secrets.token_hex() tempfile.mkdtemp() email.utils.make_msgid() random.Random().random()
os.stat("a").st_mtime os.stat("a") os.lstat("a") os.fstat(file.fileno()) posix.stat("a") os.path.getctime("a") pathlib.Path("a").stat()
[(e.name,e.inode(),e.stat())for(e)in(os.scandir("."))] os.listdir() [*os.walk(".")] glob.glob("*") os.stat(0) os.stat("/usr/lib")
[x[:3]for(x)in(os.fwalk("."))] resource.getrusage(0) resource.getrusage(1) os.getloadavg() os.getuid() os.geteuid() os.getgid() os.getegid()
os.getpid() os.getppid() posix.getpid() threading.get_native_id() threading.current_thread().native_id os.uname() platform.node()
socket.gethostname() os.cpu_count() os.sched_getaffinity(0) multiprocessing.cpu_count() os.sysconf("SC_AVPHYS_PAGES") os.sysconf(85)
logging.LogRecord("a",1,"p",1,"m",(),None).created os.path.samefile("a","b") os.nice(0) open("/dev/urandom","rb") open("/proc/uptime")
__import__("ssl") __import__("_uuid") os.getresuid() os.statvfs(".") os.getpgrp() queue.Queue().get(timeout=0.01)
threading.Event().wait(0.01),time.monotonic() select.select([],[],[],0.01),time.monotonic()
""".split()
READING = f"""
import os, posix, threading, time
file = open("a", "w")
for name in "cbd":
    open(name, "w").close()
async def nap():
    begun_s = asyncio.get_running_loop().time()
    await asyncio.sleep(0.5)
    return asyncio.get_running_loop().time() - begun_s
for read in {READS!r}:
    for name in "asyncio datetime email.utils glob logging multiprocessing pathlib platform queue random resource sched secrets select socket tempfile uuid".split():
        globals()[name.partition(".")[0]] = __import__(name)
    try:
        print(read, eval(read))
    except Exception as error:
        print(read, type(error).__name__)
"""


def test_what_a_program_reads_repeats(backend):
    limits, found = limits_lib.Limits(output_bytes=2**16), []
    for _ in range(2):  # in a fresh cell each, after other programs
        pool = pool_lib.Pool(limits, backend=backend)
        asyncio.run(pool.run("for n in range(len(found)): open(str(n), 'w')".replace("found", repr(found and "abc"))))
        found.append(asyncio.run(pool.run(READING)))
        pool.close()
        time.sleep(0.01)
    assert found[0].exit == 0 and found[0].cpu_s < 3, found[0].stderr
    lines = [one.stdout.splitlines() for one in found]
    # Landlock's folders have names
    lines = [[re.sub("/intellax-sandbox-\\w+", "", line) for line in one] for one in lines]
    assert lines[0] == lines[1] and len(lines[0]) == len(READS)
    text = found[0].stdout
    assert (
        'os.path.samefile("a","b") False' in text
        and "['a', 'b', 'c', 'd'" in text
        and "queue.Queue().get(timeout=0.01) Empty" in text
    )


@pytest.mark.parametrize(
    "call",
    [
        "os.kill(os.getpid(), 19)",
        "signal.raise_signal(19)",
        "os.kill(0, 19)",
        "signal.pthread_kill(threading.get_ident(), 19)",
    ],
)
def test_a_program_that_stops_itself_ends_at_once(pool, call):
    result = asyncio.run(pool.run(f"import os, signal, threading\ntry: {call}\nexcept OSError: raise SystemExit(-19)"))
    assert result.exit in (-19, 256 - 19) and result.stopped != "time"
    one, two, three = in_session(pool, "x = 1", "import signal; signal.raise_signal(19)", "'x' in globals()")
    assert (one.exit, two.exit, three.stdout) == (0, -19, "False\n")


def test_results_repeat(pool):
    code = """
import asyncio, datetime, os, random, secrets, time, uuid
async def wait():
    await asyncio.sleep(0)
    work = asyncio.get_running_loop().run_in_executor(None, sum, range(10**5))
    assert await asyncio.wait_for(work, 5) == 4999950000
asyncio.run(wait())
print(random.random(), random.Random().random(), secrets.token_hex(4), uuid.uuid4(), os.urandom(2))
print(datetime.date.today(), os.getpid(), {"a", "b", "c"}, hash("x"))
random.seed()
print(random.random(), random.SystemRandom().random(), time.ctime()[:10], object())
"""
    sessions = [in_session(pool, code)[0] for _ in range(2)]
    assert sessions[0].stdout == sessions[1].stdout and "<object object at 0x0>" in sessions[0].stdout
    fresh = pool_lib.Pool(pool.limits, backend=pool.backend)
    assert in_session(fresh, code)[0].stdout == sessions[0].stdout
    fresh.close()


def test_a_session_keeps_variables_and_shows_values(pool):
    results = in_session(
        pool,
        "def double(x):\n    return 2 * x",
        "double(context['n'])",
        "_ + 1; print('a'); None",
        "1/0",
        "import sys; print('b', file=sys.stderr); answer = {'ready': True, 'content': context['n']}; answer['content']",
        "sys.exit(4)",
        "open('data').read()",
        values={"context": {"n": 21}},
        files={"data": "kept"},
        watched=["answer", "missing"],
    )
    assert [result.stdout for result in results if result.exit == 0] == ["", "42\n", "a\n", "b\n21\n", "'kept'\n"]
    assert [line.strip() for line in results[3].stdout.splitlines()] == [  # margins differ between versions of Python
        "Traceback (most recent call last):",
        'File "<command 4>", line 1, in <module>',
        "1/0",
        "~^~",
        "ZeroDivisionError: division by zero",
    ]
    assert [result.exit for result in results] == [0, 0, 0, 1, 0, 4, 0]
    assert results[4].values == {"answer": {"ready": True, "content": 21}, "missing": None}


def test_commands_of_one_message_run_in_order(pool):
    async def run():
        async with pool.session() as session:
            return await asyncio.gather(*(session.execute(f"x = {n}; print(x)") for n in range(5)))

    assert [result.stdout for result in asyncio.run(run())] == [f"{n}\n" for n in range(5)]


def test_a_session_calls_functions_of_the_host(pool):
    asked = []

    async def llm_batch(prompts):
        asked.append(prompts)
        await asyncio.sleep(0.01)
        return [prompt.upper() for prompt in prompts]

    async def fail(*arguments):
        raise ValueError("no such tool")

    async def escape():
        raise KeyError("the episode ends")

    functions = {"llm_batch": llm_batch, "fail": fail}
    results = in_session(
        pool, "llm_batch(['a', 'b'] + [context])", "fail(1)", "llm_batch()", "len(llm_batch(['x'] * 1000))",
        values={"context": "c"}, functions=functions,
    )  # fmt: skip
    assert results[0].stdout == "['A', 'B', 'C']\n" and asked[0] == ["a", "b", "c"]
    assert results[1].stdout.endswith("RuntimeError: no such tool\n")
    assert "RuntimeError" in results[2].stdout and results[3].stdout == "1000\n"
    with pytest.raises(KeyError, match="the episode ends"):
        in_session(pool, "escape()", functions={"escape": escape})
    assert asyncio.run(pool.run("print(1)")).stdout == "1\n"


def test_the_time_of_functions_does_not_count(backend):
    async def wait():
        await asyncio.sleep(3)
        return 5

    pool = pool_lib.Pool(limits_lib.Limits(cpu_s=0.2), backend=backend)
    assert in_session(pool, "wait()", functions={"wait": wait})[0].stdout == "5\n"
    pool.close()


def test_sessions_that_wait_for_sessions_do_not_block_each_other(backend):
    pool = pool_lib.Pool(backend=backend, num_running=1)

    async def inner(text):
        async with pool.session() as session:
            return (await session.execute(f"{text!r} * 2")).stdout.strip()

    async def run():
        sessions = [pool.session(functions={"inner": inner}) for _ in range(3)]
        found = await asyncio.gather(*(session.execute("inner('a')") for session in sessions))
        await asyncio.gather(*(session.close() for session in sessions))
        return [result.stdout for result in found]

    assert asyncio.run(run()) == ["\"'aa'\"\n"] * 3
    pool.close()


def test_a_session_starts_anew_after_a_limit_or_an_exit(pool):
    results = in_session(
        pool,
        "x = 1",
        "while True: pass",
        "'x' in globals(), context",
        "import os; os._exit(3)",
        "context",
        values={"context": 7},
    )
    assert [result.stopped for result in results] == ["", "time", "", "", ""]
    assert results[2].stdout == "(False, 7)\n" and results[3].exit == 3 and results[4].stdout == "7\n"


def test_threads_of_a_session_rest_between_commands(pool):
    spin = """
import threading
count = 0
def spin():
    global count
    while True:
        count += 1
threading.Thread(target=spin, daemon=True).start()
"""

    async def run():
        async with pool.session() as session:
            await session.execute(spin)
            first = await session.execute("count")
            await asyncio.sleep(1.0)
            return first.cpu_s, (await session.execute("count")).cpu_s

    assert all(cpu_s < 0.5 for cpu_s in asyncio.run(run()))


@pytest.mark.parametrize(
    "message",
    [
        b"garbage\n",
        b'{"call": 1}\n',
        b"[" * 10**5 + b"\n",
        b'{"done": 1, "values": 5}\n',
        b"\n",
        b'{"call": "x", "arguments": {}}\n',
    ],
)
def test_forged_messages_cost_only_the_session(pool, message):
    code = f"import os\nos.write(3, {message!r})\nimport time\nwhile True: pass"
    (result,) = in_session(pool, code)
    assert result.stopped in ("output", "time", "lost") or result.exit == 0
    assert asyncio.run(pool.run("print(1)")).stdout == "1\n"


def test_many_programs_run_at_a_time(pool):
    async def run():
        return await asyncio.gather(*(pool.run("print(int(input()) ** 2)", stdin=str(n)) for n in range(40)))

    assert [int(result.stdout) for result in asyncio.run(run())] == [n * n for n in range(40)]
    assert len(pool._idle) <= 8


def test_a_canceled_program_ends_with_its_cell(pool):
    async def run():
        task = asyncio.create_task(pool.run("while True: pass"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert pool._idle == []
    assert asyncio.run(pool.run("print(1)")).stdout == "1\n"


def kill(cell):
    """Kills the process of inside.py, which is the child of `bwrap`, or runs without it."""
    process = cell._child.process
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]) if "bwrap" in process.args[0] else process.pid, signal.SIGKILL)


def test_a_lost_cell_costs_no_result(pool):
    asyncio.run(pool.run("pass"))
    (cell,) = pool._idle

    async def run():
        task = asyncio.create_task(pool.run("import select; select.select([], [], [], 1); print(1)"))
        await asyncio.sleep(0.2)
        kill(cell)
        return await task

    assert asyncio.run(run()).stdout == "1\n"
    (cell,) = pool._idle
    kill(cell)
    cell._child.process.wait()
    assert asyncio.run(pool.run("print(2)")).stdout == "2\n"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_files_stay_in_the_folder(pool, name):
    with pytest.raises(ValueError, match="leaves the folder"):
        asyncio.run(pool.run("pass", files={name: ""}))


def test_files_that_do_not_fit_end_the_use(pool):
    result = asyncio.run(pool.run("print(1)", files={"x": "y" * 2**25, "z": "y" * 2**25}))
    assert result.stopped == "files" or pool.backend.name == "landlock"
    assert asyncio.run(pool.run("import os; print(os.listdir('.'))")).stdout == "[]\n"


# Takes CPU seconds. No clock shows them.
SPEND = """
import signal
signal.signal(signal.SIGPROF, signal.default_int_handler)
signal.setitimer(signal.ITIMER_PROF, {})
try:
    while True: pass
except KeyboardInterrupt:
    print(1)
"""


def test_programs_near_the_limit_are_found(pool):
    async def is_slow(code):
        with limits_lib.measured() as times:
            await asyncio.gather(pool.run("pass"), asyncio.create_task(pool.run(code)))
        return times.is_slow

    assert not asyncio.run(is_slow("pass"))
    assert asyncio.run(is_slow("while True: pass"))
    assert asyncio.run(is_slow(SPEND.format(0.2)))
    assert doctest.testmod(limits_lib).failed == 0


def test_a_validator_gives_more_time(pool, monkeypatch):
    code = SPEND.format(0.7)
    assert asyncio.run(pool.run(code)).stopped == "time"
    monkeypatch.setattr(limits_lib, "_FACTOR", [1.0])
    limits_lib.set_factor(limits_lib.SPREAD)
    assert asyncio.run(pool.run(code)).stdout == "1\n"


@pytest.mark.parametrize("field, value", [("cpu_s", 0), ("memory_bytes", 2**20), ("tasks", 1), ("output_bytes", 0)])
def test_limits_that_are_too_small_are_refused(field, value):
    with pytest.raises(ValueError, match=f"limit {field} = {value} is below .*; raise it"):
        limits_lib.Limits(**{field: value})


def test_without_a_sandbox_nothing_runs(monkeypatch):
    monkeypatch.setattr(backend_lib, "_CANDIDATES", {"bubblewrap": lambda: [], "landlock": lambda: []})
    backend_lib.find.cache_clear()
    try:
        with pytest.raises(
            ValueError, match="no sandbox works here.*bubblewrap: not installed; landlock.*; install bubblewrap"
        ):
            pool_lib.Pool()
    finally:
        backend_lib.find.cache_clear()


def test_limits_that_do_not_hold_are_found(monkeypatch, backend):
    held = dataclasses.replace(backend)
    assert backend_lib._problem(held) == ""
    monkeypatch.setattr(backend_lib, "PROBE", limits_lib.Limits(memory_bytes=2**32, tasks=1000))
    assert "limits do not hold: 'threads memory" in backend_lib._problem(held)


def test_programs_end_with_their_host(backend):
    code = f"""
import asyncio, os, sys, threading
from rl.envs.sandbox import backend, limits, pool
pool = pool.Pool(limits.Limits(cpu_s=60), backend=backend.find(({backend.name!r},)))
async def main():
    task = asyncio.create_task(pool.run("while True: pass"))
    await asyncio.sleep(1)
    print(open(f"/proc/self/task/{{os.getpid()}}/children").read(), flush=True)
    await task
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        (child,) = map(int, host.stdout.readline().split())
        host.kill()
    deadline_s = time.monotonic() + 10
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline_s:
        # no process of this container waits for it
        if pathlib.Path(f"/proc/{child}/stat").read_text().split(") ")[1][0] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not os.path.exists(f"/proc/{child}")
