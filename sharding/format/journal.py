"""What every reader of a version agrees on: names of files, entries of a journal, errors.

A version is a directory `v00000012`: object files, `objects.jsonl` (one line per finished object, while it is published) and,
last, `manifest.json` (`sharding/format/manifest.py`). Everything here reads hostile bytes: each rule names the value that breaks it.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from sharding.format import digests

MAX_MANIFEST_BYTES = 64 << 20
MAX_JOURNAL_BYTES = 64 << 20
MAX_OBJECT_BYTES = 512 << 20  # ours are a few MB; a stranger must not make a reader allocate


@dataclasses.dataclass(frozen=True)
class Object:
    """One file of a version: `path` relative to the version's directory, `size` in bytes, `digest` in hex (`sharding/format/digests.py`)."""

    path: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Listing:
    """The versions a source holds, ascending: `complete` with their manifest, `partial` still being published."""

    complete: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()


class CorruptSource(ValueError):
    """A manifest or an object that is not what its publisher wrote, wherever it was asked for."""


class Unavailable(OSError):
    """No relay delivered in the allowed time; the message has each relay's last answer."""


def dirname(version: int) -> str:
    return f"v{version:08d}"


def parse_dirname(name: str) -> int | None:
    return int(name[1:]) if re.fullmatch(r"v([0-9]{8}|[1-9][0-9]{8,15})", name) else None


def is_object_path(path: Any) -> bool:
    """True for plain segments; names that a version directory keeps for itself, and dot files, are no objects."""
    if not isinstance(path, str) or len(path) > 1000 or path in ("manifest.json", "objects.jsonl"):
        return False
    return all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", segment) for segment in path.split("/"))


def parse_object(value: Any) -> Object:
    """An entry of a journal or a manifest; ValueError names what is wrong with it."""
    if not isinstance(value, dict) or set(value) != {"path", "size", "digest"}:
        raise CorruptSource(
            f"object entry {str(value)[:200]} has not exactly the fields path, size, digest: was another release its publisher?"
        )
    entry = Object(**value)
    if not is_object_path(entry.path):
        raise CorruptSource(f"object path {str(entry.path)[:200]!r} is no path of plain segments")
    if type(entry.size) is not int or not 0 <= entry.size <= MAX_OBJECT_BYTES:
        raise CorruptSource(f"object {entry.path!r} has size {entry.size!r}, not 0..{MAX_OBJECT_BYTES}")
    if not digests.is_digest(entry.digest):
        raise CorruptSource(
            f"object {entry.path!r} has digest {str(entry.digest)[:80]!r}, not {digests.HEX_DIGITS} hex digits"
        )
    return entry


def parse_journal(data: bytes) -> tuple[list[Object], int]:
    """The entries of whole lines and the bytes they take: a line without its end is still being written."""
    end = data.rfind(b"\n") + 1
    try:
        return [parse_object(json.loads(line)) for line in data[:end].splitlines()], end
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptSource(f"journal line is no JSON: {error}") from error


def no_version(version: int, where: Any, known: Sequence[int]) -> FileNotFoundError:
    return FileNotFoundError(f"no version {version} under {where}; it holds {list(known)}")
