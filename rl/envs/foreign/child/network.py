"""Gives an episode a network and processes of its own. The endpoint of its model answers in it, and nothing else. Imports nothing of ours."""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import threading

NEW_MOUNTS, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x10000000, 0x20000000, 0x40000000  # of unshare
DIE_WITH_PARENT = 1  # of prctl
CAPABILITIES = 0x20080522  # version of capset
READ_ONLY = 1 | 2 | 4 | 32 | 4096  # of mount: and without setuid and devices, as before; a bind mount that exists
NO_PROGRAMS = 2 | 4 | 8  # of mount: nor setuid, nor devices
SET_FLAGS, UP = 0x8914, 1  # of ioctl


def enter(port: int, path: str, frozen: list[str]) -> None:
    """Continues in a child process that has its own network, sees no other process, and has no capabilities.

    The caller exits with the child's status. Connections to 127.0.0.1 at `port` go to the unix socket `path`. The folders `frozen`
    become read-only. Call it in a process with one thread. Raises OSError if the system refuses.
    """
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_NETWORK | NEW_MOUNTS | NEW_PROCESSES):
        raise OSError(ctypes.get_errno(), "no network of its own")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    for folder in frozen:
        if libc.mount(None, folder.encode(), None, READ_ONLY, None):
            raise OSError(ctypes.get_errno(), f"{folder} stays writable")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
    listener = socket.create_server(("127.0.0.1", port), backlog=256)
    _fork()
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    _fork()  # the first process of a space has no default actions of signals, such as that of its CPU limit
    # A container may refuse a new view of processes. None is better than one of all processes.
    if libc.mount(b"proc", b"/proc", b"proc", NO_PROGRAMS, None) and libc.mount(
        b"none", b"/proc", b"tmpfs", NO_PROGRAMS, None
    ):
        raise OSError(ctypes.get_errno(), "/proc stays visible")
    if libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "its capabilities stay")
    threading.Thread(target=_forward, args=[listener, path], daemon=True).start()


def _fork() -> None:
    """Returns in a child process. The parent waits for its end, and ends with its status: 128 + n after signal n."""
    if child := os.fork():
        ended, status = 0, 0
        while ended != child:  # the first process of a space inherits those whose parents end
            ended, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def _forward(listener: socket.socket, path: str) -> None:
    while True:
        near, far = listener.accept()[0], socket.socket(socket.AF_UNIX)
        try:
            far.connect(path)
        except OSError:  # the episode is over
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
