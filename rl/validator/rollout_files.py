"""The rollout files that a validation service reads: found by a name from outside, told apart by their SHA-256.

A name leads to a file under the root, whatever it says; a file is hashed and its size looked at before it is read, and
again as it is read, since it may be another by then. Each refusal is a ValueError.
"""

import hashlib
import pathlib
import re
from collections.abc import Sequence

from inference.rollouts import parquet_footer


def locate(root: pathlib.Path, name: str) -> pathlib.Path:
    """Under the root, whatever the name says."""
    parts = pathlib.PurePosixPath(name).parts
    clean = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,199}", part) for part in parts)
    if not parts or not clean or not name.endswith(".parquet"):
        raise ValueError(f"{name[:200]!r} is no name of a rollout file; give a relative path to a .parquet")
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):  # a link that leads out
        raise ValueError(f"{name[:200]!r} lies outside the directory of rollouts")
    return path


def members(name: str, count: int) -> list[str]:
    """<stem>-0.parquet, <stem>-1.parquet, ... of a name that ends in a number, as group files do."""
    match = re.fullmatch(r"(.*-)[0-9]+(\.parquet)", name)
    if not match:
        raise ValueError(f"{name[:200]!r} is no name of a group's file; it must end in -<index>.parquet")
    return [f"{match[1]}{index}{match[2]}" for index in range(count)]


def check(paths: Sequence[pathlib.Path], shas: Sequence[str]) -> None:
    """ValueError where they are not those that were named, or too large together. Takes no memory."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"file: {path.name} is not there")
    parquet_footer.check_size(sum(path.stat().st_size for path in paths))
    for path, sha in zip(paths, shas, strict=True):
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha:
                raise ValueError(f"file: the SHA-256 of {path.name} is another")


def read(path: pathlib.Path, sha: str) -> bytes:
    """The file's bytes. ValueError where they are others by now."""
    parquet_footer.check_size(path.stat().st_size)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha:
        raise ValueError(f"file: the SHA-256 of {path.name} is another")
    return data
