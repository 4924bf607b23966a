"""Writes files that appear complete under their name, or not at all. Does not import jax.

The bytes go to a dotted name ending in `.tmp` in the same directory, which is then renamed. A killed process leaves that file:
the owner of a directory deletes the files that match `LEFTOVERS` when it starts.
"""

import os
import pathlib
import secrets

LEFTOVERS = ".*.tmp"


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
