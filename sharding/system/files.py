"""Locks files and folders, and hashes files. Does not import jax."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator

FOLDER = os.O_RDONLY | os.O_DIRECTORY


def lock(path: str | os.PathLike, flags: int = os.O_RDWR | os.O_CREAT, *, wait: bool = True) -> int:
    """Returns the descriptor of a file, created if it does not exist, or with the flags FOLDER of a folder. Closing it frees its lock.

    Blocks while another process has the lock; without `wait`, raises BlockingIOError. The kernel frees the lock of a dead process.
    """
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def locked(path: str | os.PathLike, flags: int = os.O_RDWR | os.O_CREAT, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock that `lock` takes, with the same arguments and errors, during the block."""
    descriptor = lock(path, flags, wait=wait)
    try:
        yield
    finally:
        os.close(descriptor)


def sha256(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file in hex, without all of it in memory. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
