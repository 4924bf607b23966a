"""Attempts to escape from the sandbox: none works. Most have a control, which shows that the same code works without a sandbox.

Each attempt prints ESCAPED if it works. Names in capital letters are replaced by places of the host that the test prepares.
"""

import asyncio
import os
import socket
import subprocess
import sys
import textwrap

import pytest

from rl.envs.sandbox import backend as backend_lib
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib

SYSCALL = "import ctypes; call = ctypes.CDLL(None, use_errno=True).syscall\n"
ROOT, NONE = "as root", "none"  # controls that need root, or are not harmless

# {name: (code, control)}; the control is "" for one that runs everywhere.
ATTEMPTS = {
    "tcp": ("import socket; socket.create_connection(('127.0.0.1', PORT), 5); print('ESCAPED')", ""),
    "udp": ("import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT)); print('ESCAPED')", ""),
    "listen": ("import socket; socket.create_server(('127.0.0.1', 0)); print('ESCAPED')", ""),
    "unix_socket": ("import socket; socket.socket(1).connect('FOLDER/socket'); print('ESCAPED')", ""),
    "abstract_socket": ("import socket; socket.socket(1).connect('\\0ABSTRACT'); print('ESCAPED')", ""),
    "netlink": ("import socket; socket.socket(16, 3, 0).bind((0, 0)); print('ESCAPED')", ""),
    "raw_syscall_socket": (SYSCALL + "print('ESCAPED' if call(41, 2, 1, 0) >= 0 else 'held')", ""),
    "io_uring": (
        SYSCALL + "print('ESCAPED' if call(425, 8, ctypes.create_string_buffer(256)) >= 0 else 'held')",
        NONE,  # many systems turn it off
    ),
    "read_secret": ("print(open('FOLDER/secret').read())", ""),
    "read_passwd": ("print('ESCAPED' if 'root' in open('/etc/passwd').read() else '')", ""),
    "list_host": ("import os; print('ESCAPED' if 'secret' in os.listdir('FOLDER') else '')", ""),
    "stat_host": ("import os; os.stat('FOLDER/secret'); os.listdir('/'); print('ESCAPED')", ""),
    "symlink": ("import os; os.symlink('FOLDER/secret', 'a'); print(open('a').read())", ""),
    "hard_link": ("import os; os.link('FOLDER/secret', 'FOLDER/b'); print(open('FOLDER/b').read())", ""),
    "dot_dot": ("import os; print(open('../' * 20 + 'FOLDER/secret').read())", ""),
    "write_host": ("open('FOLDER/new', 'w').close(); print('ESCAPED')", ""),
    "write_devices": ("open('/dev/shm/NAME', 'w').close(); print('ESCAPED')", NONE),
    "write_interpreter": ("import json; open(json.__file__, 'r+').close(); print('ESCAPED')", NONE),
    "delete_host": ("import os; os.unlink('FOLDER/victim'); print('ESCAPED')", ""),
    "environment_of_host": ("print('ESCAPED' if b'=' in open('/proc/PID/environ', 'rb').read() else '')", ""),
    "proc_root": ("print(open('/proc/self/root/FOLDER/secret').read())", ""),
    "proc_fd": ("import os; print('ESCAPED' if os.listdir('/proc/self/fd') else '')", ""),
    "sys_files": ("import os; print('ESCAPED' if os.listdir('/sys') else '')", ""),
    "chroot": ("import os; os.chroot('.'); print('ESCAPED')", ROOT),
    "mount": (SYSCALL + "print('ESCAPED' if call(165, b'x', b'/tmp', b'tmpfs', 0, 0) == 0 else '')", NONE),
    "mount_api": (SYSCALL + "print('ESCAPED' if call(430, b'tmpfs', 0) >= 0 else '')", NONE),
    "user_namespace": (SYSCALL + "print('ESCAPED' if call(272, 0x10000000) == 0 else '')", NONE),
    "network_namespace": (SYSCALL + "print('ESCAPED' if call(272, 0x40000000) == 0 else '')", NONE),
    "device": ("import os, stat; os.mknod('FOLDER/disk', 0o600 | stat.S_IFBLK, 0x700); print('ESCAPED')", NONE),
    "memory_device": ("open('/dev/mem', 'rb').close(); print('ESCAPED')", NONE),
    "terminal_input": ("import fcntl; fcntl.ioctl(0, 0x5412, b'x'); print('ESCAPED')", NONE),
    "fork": ("import os\nif os.fork() == 0:\n    os._exit(0)\nprint('ESCAPED')", ""),
    "spawn": ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(\"ESCAPED\", flush=True)'])", ""),
    "exec": ("import os; os.execv('/bin/echo', ['echo', 'ESCAPED'])", ""),
    "exec_from_memory": ("import os; os.memfd_create('x'); print('ESCAPED')", ""),
    "shell": ("import os; os.system('echo ESCAPED')", ""),
    "thread_bomb": (
        """
        import threading
        threading.stack_size(2**16)
        stop = threading.Event()
        for _ in range(200):
            threading.Thread(target=stop.wait, daemon=True).start()
        print("ESCAPED")
        """,
        "",
    ),
    "memory_bomb": ("x = bytearray(2**29); print('ESCAPED')", ""),
    "memory_in_pieces": ("x = [bytearray(2**22) for _ in range(128)]; print('ESCAPED')", ""),
    "memory_map": ("import mmap; mmap.mmap(-1, 2**31); print('ESCAPED')", ""),
    "large_file": ("open('FOLDER/../large' if CONTROL else 'large', 'wb').truncate(2**30); print('ESCAPED')", ""),
    "large_files": (
        """
        import os
        for number in range(100):
            open(f"x{number}", "wb").write(os.urandom(2**20))
        print("ESCAPED")
        """,
        NONE,
    ),
    "many_files": (
        """
        import os
        os.makedirs("many")
        for number in range(60000):
            open(f"many/{number}", "w").close()
        print("ESCAPED")
        """,
        NONE,
    ),
    "signal_to_host": ("import os; os.kill(PID, 0); print('ESCAPED')", ""),
    "signal_to_all": ("import os; os.kill(-1, 0); print('ESCAPED')", ROOT),
    "signal_to_parent": ("import os; os.kill(os.getppid(), 0); print('ESCAPED')", ""),
    "signal_to_group": ("import os; os.killpg(0, 0); print('ESCAPED')", ""),
    "signal_by_file": ("import os, signal; os.pidfd_open(os.getppid()); print('ESCAPED')", ""),
    "trace": (SYSCALL + "print('ESCAPED' if call(101, 0, 0, 0, 0) == 0 else '')", ""),
    "memory_of_parent": (
        SYSCALL
        + """
import os
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
own = ctypes.create_string_buffer(8)
text = ctypes.create_string_buffer(b"12345678")
here, there = Part(ctypes.addressof(own), 8), Part(ctypes.addressof(text), 8)
pid = call(39)
print("ESCAPED" if call(310, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 8 else "")
""",
        "",
    ),
    "become_root": (
        "import os\nwas = os.getuid()\nos.setresuid(0, 0, 0)\nprint('ESCAPED' if was or CONTROL else '')",
        ROOT,
    ),
    "change_user": ("import os; os.setresuid(12345, 12345, 12345); print('ESCAPED')", ROOT),
    "capabilities": (
        SYSCALL + "print('ESCAPED' if call(126, b'\\x22\\x05\\x08\\x20' + bytes(4), bytes(24)) == 0 else '')",
        "",
    ),
    "raise_limit": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('ESCAPED')", ROOT),
    "core_dump": ("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print('ESCAPED')", ""),
    "priority": ("import os; os.nice(1); os.sched_setaffinity(0, {0}); print('ESCAPED')", ""),
    "inherited_files": (
        """
        import os
        for fd in range(3, 256):
            try:
                if b"ESCAPED" in os.pread(fd, 100, 0):
                    print("ESCAPED")
            except OSError:
                pass
        """,
        "",
    ),
    "environment": ("import os; print('ESCAPED' if 'ESCAPED' in os.environ.values() else '')", ""),
    "keyring": (SYSCALL + "print('ESCAPED' if call(248, b'user', b'x', b'y', 1, -2) >= 0 else '')", NONE),
    "bpf": (SYSCALL + "print('ESCAPED' if call(321, 0, bytes(128), 128) >= 0 else '')", NONE),
    "performance_events": (SYSCALL + "print('ESCAPED' if call(298, bytes(128), 0, -1, -1, 0) >= 0 else '')", NONE),
    "userfaultfd": (SYSCALL + "print('ESCAPED' if call(323, 1) >= 0 else '')", NONE),
    "kernel_log": (SYSCALL + "print('ESCAPED' if call(103, 10, 0, 0) >= 0 else '')", NONE),
    "shared_memory": (SYSCALL + "print('ESCAPED' if call(31, call(29, 0, 4096, 0o1600), 0, 0) == 0 else '')", ""),
    "message_queue": (SYSCALL + "print('ESCAPED' if call(71, call(68, 0, 0o1600), 0, 0) == 0 else '')", ""),
    "other_system_call_table": (SYSCALL + "print('ESCAPED' if call(0x40000000 | 39) >= 0 else '')", NONE),
    "file_handle": (SYSCALL + "print('ESCAPED' if call(304, 0, bytes(64), 0) >= 0 else '')", NONE),
    "clock": ("import time; time.clock_settime(0, time.clock_gettime(0)); print('ESCAPED')", NONE),
    "host_name": ("import socket; socket.sethostname('x'); print('ESCAPED')", NONE),
    "lock_interpreter": ("import fcntl, json; fcntl.flock(open(json.__file__), 2); print('ESCAPED')", ""),
}
CONTROLS = [name for name, (_, control) in ATTEMPTS.items() if control == "" or control == ROOT and os.geteuid() == 0]


@pytest.fixture(scope="module", params=backend_lib.NAMES)
def pool(request):
    try:
        backend = backend_lib.find((request.param,))
    except ValueError as error:
        pytest.skip(str(error))
    pool = pool_lib.Pool(limits_lib.Limits(cpu_s=2, memory_bytes=2**28), backend=backend)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Returns {name in capital letters: place on the host}."""
    folder = tmp_path_factory.mktemp("host")
    for name in ("secret", "victim"):
        (folder / name).write_text("ESCAPED")
    abstract = f"intellax-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(1) as unix, socket.socket(1) as nameless:
        with open(folder / "secret") as secret, pytest.MonkeyPatch.context() as patch:
            unix.bind(str(folder / "socket"))
            nameless.bind("\0" + abstract)
            for listener in (unix, nameless):
                listener.listen(64)
            os.set_inheritable(secret.fileno(), True)
            patch.setenv("INTELLAX_SECRET", "ESCAPED")
            yield {
                "PORT": str(tcp.getsockname()[1]),
                "ABSTRACT": abstract,
                "FOLDER": str(folder),
                "NAME": folder.name,
                "PID": str(os.getpid()),
                "FD": str(secret.fileno()),
            }


def spelled(name, host, is_control):
    code = textwrap.dedent(ATTEMPTS[name][0]).replace("CONTROL", str(is_control))
    for place, value in host.items():
        code = code.replace(place, value)
    return code


def test_there_are_40_attempts_and_most_have_controls():
    assert len(ATTEMPTS) >= 40
    assert sum(control != NONE for _, control in ATTEMPTS.values()) >= 40


@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_escape(name, pool, host):
    result = asyncio.run(pool.run(spelled(name, host, False)))
    assert "ESCAPED" not in result.stdout, result
    assert result.stopped in ("", "files"), result
    assert asyncio.run(pool.run("print('alive')")).stdout == "alive\n"


@pytest.mark.slow  # half a second each
@pytest.mark.parametrize("name", CONTROLS)
def test_the_attempt_works_without_a_sandbox(name, host, tmp_path):
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the numbers of system calls are those of Linux on x86-64")
    victim = os.path.join(host["FOLDER"], "victim")
    code = spelled(name, host, True)
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        pass_fds=[int(host["FD"])],
        start_new_session=True,
    )
    assert "ESCAPED" in done.stdout, (done.stdout, done.stderr)
    for name in ("b", "new"):
        if os.path.exists(os.path.join(host["FOLDER"], name)):
            os.unlink(os.path.join(host["FOLDER"], name))
    with open(victim, "w") as file:
        file.write("ESCAPED")
