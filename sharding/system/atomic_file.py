"""Writes files that appear complete under their name, or not at all, and reads JSON files. Does not import jax.

The bytes go to a dotted name ending in `.tmp` in the same directory, which is then renamed. A killed process leaves that file:
the owner of a directory deletes the files that match `LEFTOVERS` when it starts.
"""

import contextlib
import json
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import TypeVar

LEFTOVERS = ".*.tmp"
Kind = TypeVar("Kind", dict, list)


def write(
    path: str | os.PathLike, *parts: bytes | bytearray | memoryview, durable: bool = False, secret: bool = False
) -> None:
    """Writes the concatenated `parts` as the file `path`. If it raises OSError, an existing file is unchanged.

    With `durable`, the content is on disk before the rename. Without it, a power loss can leave an empty file. `secret` is for
    keys: durable, readable by the owner only, and FileExistsError if `path` exists.
    """
    with replacing(path, exclusive=secret) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(temporary, flags, 0o600 if secret else 0o666), "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:  # a disk that fills up may take a few bytes first and raise only at the next write
                    view = view[file.write(view) :]
            if durable or secret:
                os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: str | os.PathLike, *, exclusive: bool = False) -> Iterator[pathlib.Path]:
    """Yields a new name in the directory of `path`; the file that the block writes there becomes `path` when the block ends.

    With `exclusive`, raises FileExistsError if `path` exists by then, and the new name is on disk.
    """
    path = pathlib.Path(path)
    with staged(path) as temporary:
        yield temporary
        if exclusive:
            os.link(temporary, path)
            sync_directory(path.parent)
        else:
            os.replace(temporary, path)


@contextlib.contextmanager
def staged(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new name in the directory of `path`, for the block to write to and to rename; deletes it if the block did not."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: str | os.PathLike) -> None:
    """Waits until the names in a directory are on disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def secret_key(path: pathlib.Path) -> bytes:
    """Returns the random key of 32 bytes in the file `path`, generated if it does not exist. Raises ValueError for a file of another size."""
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # another process was faster
            write(path, os.urandom(32), secret=True)
    key = path.read_bytes()
    if len(key) != 32:
        found = f"key file {path} has {len(key)} bytes, but the key has 32"
        raise ValueError(f"{found}; put the file back from a backup, or use another directory")
    return key


def read_json(path: pathlib.Path, kind: type[Kind]) -> Kind:
    """Returns the dict or list in a JSON file, or an empty one if the file does not exist. Raises ValueError for other contents."""
    try:
        value = json.loads(path.read_bytes()) if path.exists() else kind()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; it must be JSON; correct or remove it") from error
    if not isinstance(value, kind):
        raise ValueError(f"{path} contains a {type(value).__name__}, not a {kind.__name__}; correct or remove it")
    return value
