"""Writes files that appear complete under their name, or not at all, and reads JSON files. Does not import jax.

The bytes go to a dotted name ending in `.tmp` in the same directory, which is then renamed. A killed process leaves that file:
the owner of a directory deletes the files that match `LEFTOVERS` when it starts.
"""

import json
import os
import pathlib
import secrets
from typing import TypeVar

LEFTOVERS = ".*.tmp"
Kind = TypeVar("Kind", dict, list)


def write(path: str | os.PathLike, *parts: bytes | bytearray | memoryview, durable: bool = False) -> None:
    """Writes the concatenated `parts` as the file `path`. If it raises OSError, an existing file is unchanged.

    With `durable`, the content is on disk before the rename. Without it, a power loss can leave an empty file.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:  # a disk that fills up may take a few bytes first and raise only at the next write
                    view = view[file.write(view) :]
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: pathlib.Path, kind: type[Kind]) -> Kind:
    """Returns the dict or list in a JSON file, or an empty one if the file does not exist. Raises ValueError for other contents."""
    try:
        value = json.loads(path.read_bytes()) if path.exists() else kind()
    except ValueError as error:
        raise ValueError(f"{path}: {error}; it must be JSON; correct or remove it") from error
    if not isinstance(value, kind):
        raise ValueError(f"{path} contains a {type(value).__name__}, not a {kind.__name__}; correct or remove it")
    return value
