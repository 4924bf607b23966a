"""Takes rights away from this process, for good, before it runs foreign code. Linux only; needs no privileges.

1. Landlock (Linux 5.13) limits files: the process reads the interpreter, the system's libraries, and the folders of packages that it
   has imported, and nothing else. It writes no file, so no temporary directory can fill up. /proc is not readable.
2. seccomp limits system calls to those of computation: no new sockets, processes, or programs, no signals to other processes, no
   limit raised. Threads are allowed, and sockets that are open already.
3. Standard output and error go to /dev/null, core dumps are off, and other processes of the user cannot attach.

`enter_with_folder` is for code of the model (rl/envs/sandbox): it may also write files in one folder, and keeps its standard output.

A process loads the files of the foreign code with all its rights and then calls `enter`. bubblewrap would have to know these files in
advance (docs/decisions/kept.md). Does not import jax.
"""

import ctypes
import errno
import functools
import os
import resource
import struct
import sys
from collections.abc import Iterable, Mapping

MODES = ("auto", "require", "off")
_VARIABLES = {"PATH", "HOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
_PREFIXES = ("LC_", "PYTHON", "HF_H", "HF_DATASETS_")  # not HF_TOKEN

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on all architectures
_WRITE, _READ_FOLDER = 1 << 1, 1 << 3
_READ = 1 << 2 | _READ_FOLDER
_CHANGE = (
    _READ | _WRITE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8
)  # remove folders and files, and make them; no links, devices, or sockets
_TRUNCATE = 1 << 14  # from version 3 on
_TSYNC = 1 << 3  # from version 8 on, all threads are restricted
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # bits of rights on files; 16 in later versions
_NO_NEW_PRIVS, _DUMPABLE = 38, 4  # of prctl

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of classic BPF
_NUMBER, _ARCH, _ARG0, _ARG1, _ARG2, _ARG2_HIGH = 0, 4, 16, 24, 32, 36  # offsets in struct seccomp_data
_CLONE_THREAD, _NONE = 0x10000, -1
_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the order of the two columns below; -1: it has no such call
# fmt: off
_CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "sched_yield": (24, 124),
    "mremap": (25, 216), "mincore": (27, 232), "madvise": (28, 233), "dup": (32, 23), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, -1), "setitimer": (38, 103), "getpid": (39, 172), "sendto": (44, 206),
    "recvfrom": (45, 207), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17),
    "gettimeofday": (96, 169), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132),
    "gettid": (186, 178), "futex": (202, 98), "sched_getaffinity": (204, 123), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "openat": (257, 56), "newfstatat": (262, 79),
    "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "getrandom": (318, 278), "membarrier": (324, 283), "statx": (332, 291),
    "rseq": (334, 293), "faccessat2": (439, 439), "getcpu": (309, 168),
    "open": (2, -1), "stat": (4, -1), "lstat": (6, -1), "poll": (7, -1), "access": (21, -1), "select": (23, -1),
    "readlink": (89, -1), "time": (201, -1),
}
_FOLDER_CALLS = {  # of a process with a folder of its own: files in it, and an event loop of asyncio
    "mkdir": (83, -1), "mkdirat": (258, 34), "unlink": (87, -1), "unlinkat": (263, 35), "rmdir": (84, -1), "rename": (82, -1),
    "renameat": (264, 38), "renameat2": (316, 276), "ftruncate": (77, 46), "chdir": (80, 49), "socketpair": (53, 199),
    "shutdown": (48, 210), "pipe2": (293, 59), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1),
    "epoll_pwait": (281, 22), "dup2": (33, -1), "dup3": (292, 24),
}
_IOCTL, _FCNTL, _CLONE, _KILL_CALL, _TGKILL, _PRLIMIT, _CLONE3, _SECCOMP = (
    (16, 29), (72, 25), (56, 220), (62, 129), (234, 131), (302, 261), (435, 435), (317, 277)
)
# fmt: on
_COMMANDS = (  # of calls with many: the harmless ones
    *((_IOCTL, number) for number in (0x5401, 0x5421, 0x5450, 0x5451)),  # not TIOCSTI, which types into a terminal
    *((_FCNTL, number) for number in (0, 1, 2, 3, 4, 1030)),  # not F_SETOWN, which sends signals
)


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_, _layout_ = 1, "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def missing() -> list[str]:
    """Returns the rights that `enter` cannot take away on this machine, each with the reason."""
    out = []
    if _landlock_version() < 1:
        needs = "it needs Linux 5.13 or newer, with landlock in lsm="
        out.append(f"files stay readable and writable (no Landlock: {needs})")
    if not _has_seccomp():
        out.append("network and processes stay reachable (no seccomp: it needs Linux 4.14 or newer on x86-64 or ARM64)")
    return out


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that a process with foreign code may see: no keys, tokens, or addresses of proxies.

    It computes in one thread, because threads that exist before `enter` may keep rights.
    """
    kept = {name: text for name, text in variables.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    return kept | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def enter() -> list[str]:
    """Takes the rights away and returns those that stay, each with the reason. Call it once, when everything is loaded."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for standard in (1, 2):
        os.dup2(devnull, standard)
    os.close(devnull)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return _enter([*_readable()], "")


def enter_with_folder(folder: str, readable: Iterable[str]) -> list[str]:
    """Takes the rights away, except those to read `readable` and to write files in `folder`. Returns the rights that stay, as `enter` does."""
    return _enter([*readable], folder)


def _enter(readable: list[str], folder: str) -> list[str]:
    lacks = missing()
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        if sys.platform == "linux":
            _call("prctl", _DUMPABLE, 0, 0, 0, 0)
            _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        if (version := _landlock_version()) >= 1:
            _restrict_files(version, readable, folder)
            if threads > 1 and version < 8:
                place = f"for {threads - 1} threads that ran before (Linux 7.0 includes them)"
                lacks.append(f"files stay reachable {place}")
        if _has_seccomp():
            _restrict_calls(_CALLS | _FOLDER_CALLS if folder else _CALLS)
    except OSError as error:  # such as a container that forbids it
        lacks.append(f"some rights stay ({error})")
    return lacks


def _landlock_version() -> int:
    return _libc().syscall(_CREATE_RULESET, None, 0, 1) if sys.platform == "linux" else 0


def _has_seccomp() -> bool:
    if sys.platform != "linux" or os.uname().machine not in _ARCHS:
        return False
    number = _SECCOMP[[*_ARCHS].index(os.uname().machine)]
    return _libc().syscall(number, 2, 0, ctypes.byref(ctypes.c_uint32(_KILL))) == 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _readable() -> Iterable[str]:
    yield from (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64")
    yield from (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    for name, module in list(sys.modules.items()):
        if "." not in name:  # the folders of packages: their parent may be a checkout with a run's keys in it
            yield from getattr(module, "__path__", ())


def _restrict_files(version: int, readable: Iterable[str], folder: str) -> None:
    handled = (1 << _RIGHTS.get(version, 16)) - 1
    # TCP ports from version 4, abstract sockets and signals from version 6 on.
    ruleset = _Ruleset(handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _call("syscall", _CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    rights = {**dict.fromkeys(readable, _READ), os.devnull: _READ | _WRITE}
    if folder:
        rights[folder] = _CHANGE | (_TRUNCATE if version >= 3 else 0)
    for path, allowed in rights.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # no such folder, or not for this user
            continue
        if not os.path.isdir(path):
            allowed &= ~_READ_FOLDER
        _call("syscall", _ADD_RULE, rules, 1, ctypes.byref(_PathBeneath(allowed, place)), 0)
        os.close(place)
    _call("syscall", _RESTRICT_SELF, rules, _TSYNC if version >= 8 else 0)
    os.close(rules)


def _restrict_calls(calls: Mapping[str, tuple[int, int]]) -> None:
    column = [*_ARCHS].index(os.uname().machine)
    step = lambda code, value=0, yes=0, no=0: struct.pack("=HBBI", code, yes, no, value & 0xFFFFFFFF)  # noqa: E731

    def rule(call: tuple[int, int], *checks: tuple[int, int, int], result: int = _ALLOW) -> bytes:
        """Returns instructions that end with `result` if the call has this number and all checks (offset, test, value) hold."""
        checks = ((_NUMBER, _EQUAL, call[column]), *checks)
        left = range(2 * len(checks) - 1, 0, -2)  # instructions to jump over if one does not hold
        pairs = [step(_LOAD, at) + step(test, value, 0, no) for (at, test, value), no in zip(checks, left, strict=True)]
        return b"".join(pairs) + step(_RETURN, result)

    program = step(_LOAD, _ARCH) + step(_EQUAL, list(_ARCHS.values())[column], 1) + step(_RETURN, _KILL)
    program += step(_LOAD, _NUMBER)
    for call in calls.values():
        if call[column] != _NONE:
            program += step(_EQUAL, call[column], 0, 1) + step(_RETURN, _ALLOW)
    program += b"".join(rule(call, (_ARG1, _EQUAL, command)) for call, command in _COMMANDS)
    program += rule(_CLONE, (_ARG0, _ANY_BIT, _CLONE_THREAD))
    program += rule(_KILL_CALL, (_ARG0, _EQUAL, os.getpid())) + rule(_TGKILL, (_ARG0, _EQUAL, os.getpid()))
    # prlimit64(0, RLIMIT_CPU, ...) sets the limit of the next completion; with a null pointer, any limit can be read.
    program += rule(_PRLIMIT, (_ARG0, _EQUAL, 0), (_ARG1, _EQUAL, resource.RLIMIT_CPU))
    program += rule(_PRLIMIT, (_ARG0, _EQUAL, 0), (_ARG2, _EQUAL, 0), (_ARG2_HIGH, _EQUAL, 0))
    program += rule(_CLONE3, result=_ERRNO | errno.ENOSYS)  # its flags are in memory; libc uses clone instead
    program += step(_RETURN, _ERRNO | errno.EPERM)
    filters = _Program(len(program) // 8, program)
    if _call("syscall", _SECCOMP[column], 1, 1, ctypes.byref(filters)):  # for all threads
        raise OSError(errno.EBUSY, "a thread has system call filters of its own")


def _call(name: str, *args) -> int:
    """Returns the result of a function of the C library, whose whole numbers are passed as long. Raises OSError if it fails."""
    result = getattr(_libc(), name)(*(ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name} {args[0]}: {os.strerror(code)}")
    return result
