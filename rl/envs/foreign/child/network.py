"""Gives the process of an episode a network of its own, in which the endpoint of its model answers, and nothing else. Imports nothing of ours."""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading

NEW_MOUNTS, NEW_USER, NEW_NETWORK = 0x20000, 0x10000000, 0x40000000  # of unshare
READ_ONLY = 1 | 2 | 4 | 32 | 4096  # of mount: and without setuid and devices, as before; a bind mount that exists
SET_FLAGS, UP = 0x8914, 1  # of ioctl


def enter(port: int, path: str, frozen: list[str]) -> None:
    """Leaves the machine's network; connections to 127.0.0.1 at `port` go to the unix socket `path`. The folders `frozen` become read-only.

    Call it in a process with one thread. Raises OSError if the system refuses.
    """
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_NETWORK | NEW_MOUNTS):
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
    threading.Thread(target=_forward, args=[listener, path], daemon=True).start()


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
