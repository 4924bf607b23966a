"""A file that appears whole under its name, or not at all. Imports no jax.

The bytes go beside it under a dotted name that ends in `.tmp`, which is then renamed. A process that is killed leaves that file behind:
whoever owns the directory deletes what matches `LEFTOVERS` when it starts.
"""

import os
import pathlib
import secrets

LEFTOVERS = ".*.tmp"


def write(path: str | os.PathLike, *parts: bytes | bytearray | memoryview, durable: bool = False) -> None:
    """Writes `parts` as the file `path`, in place of what was there; after an OSError that is still there.

    `durable` syncs before the rename, or a loss of power may leave the name with no content.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:  # a full disk may take a part, and say so only at the next write
                    view = view[file.write(view) :]
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
