"""The rollout files that a validation service reads: named by clients, identified by their SHA-256.

A name is resolved under the root directory only. Size and hash are checked before a file is queued and again as it is read, since
it may have changed. Each refusal is a ValueError.
"""

import hashlib
import pathlib
import re
from collections.abc import Sequence

from inference.rollouts import parquet_footer
from sharding.system import files as files_lib


def locate(root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of rollout file `name` under `root`, where the file may not exist. Raises ValueError for any other name."""
    parts = pathlib.PurePosixPath(name).parts
    clean = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,199}", part) for part in parts)
    if not parts or not clean or not name.endswith(".parquet"):
        raise ValueError(f"{name[:200]!r} is not a name of a rollout file; give a relative path to a .parquet file")
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):  # a symbolic link
        raise ValueError(f"{name[:200]!r} is outside the rollout directory; give a file in it")
    return path


def group_names(name: str, count: int) -> list[str]:
    """Returns the `count` file names <stem>-0.parquet, <stem>-1.parquet, ..., given one of them. Raises ValueError for other names."""
    match = re.fullmatch(r"(.*-)[0-9]+(\.parquet)", name)
    if not match:
        raise ValueError(f"{name[:200]!r} is not a name of a group's file; rename it to end in -<index>.parquet")
    return [f"{match[1]}{index}{match[2]}" for index in range(count)]


def check(paths: Sequence[pathlib.Path], shas: Sequence[str]) -> None:
    """Raises ValueError unless all files exist with these SHA-256 hashes and a total size in bounds. Never reads a whole file into memory."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"file: {path.name} does not exist in the rollout directory; upload it first")
    parquet_footer.check_size(sum(path.stat().st_size for path in paths))
    for path, sha in zip(paths, shas, strict=True):
        _check_hash(path, files_lib.sha256(path), sha)


def read(path: pathlib.Path, sha: str) -> bytes:
    """Returns the bytes of a rollout file. Raises ValueError if the file is too large or does not have the SHA-256 `sha`."""
    parquet_footer.check_size(path.stat().st_size)
    data = path.read_bytes()
    _check_hash(path, hashlib.sha256(data).hexdigest(), sha)
    return data


def _check_hash(path: pathlib.Path, found: str, sha: str) -> None:
    if found != sha:
        raise ValueError(f"file: {path.name} does not have the SHA-256 {sha}; give the hash of the file")
