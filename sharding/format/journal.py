"""File names of a version, entries of its journal, and the errors that every reader raises.

A version is a directory such as `v00000012`. It contains object files, `objects.jsonl` (the journal: one line per finished
object, written during publishing), and, written last, `manifest.json` (`sharding/format/manifest.py`). The parsers here
accept hostile bytes: an error names the offending value.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from sharding.format import digests

MAX_MANIFEST_BYTES = 64 << 20
MAX_JOURNAL_BYTES = 64 << 20
MAX_OBJECT_BYTES = 512 << 20  # ours have a few MB; hostile input must not make a reader allocate more


@dataclasses.dataclass(frozen=True)
class Object:
    """One stored file of a version: `path` below the version's directory, `size` in bytes, `digest` in hex."""

    path: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Listing:
    """The versions of a source, ascending: `complete` ones have a manifest, `partial` ones are still being published."""

    complete: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()


class CorruptSource(ValueError):
    """Raised when a manifest or an object is not the one that was published, from any place that has it."""


class Unavailable(OSError):
    """Raised when no relay delivered in the allowed time. The message lists the last reply of each relay."""


def dirname(version: int) -> str:
    """Returns the directory name of a version, as in "v00000012"."""
    return f"v{version:08d}"


def parse_dirname(name: str) -> int | None:
    """Returns the version that a directory name stands for, or None for any other name."""
    return int(name[1:]) if re.fullmatch(r"v([0-9]{8}|[1-9][0-9]{8,15})", name) else None


def is_object_path(path: Any) -> bool:
    """Returns True for a relative path of plain segments. Dot files, manifest.json and objects.jsonl are not objects."""
    if not isinstance(path, str) or len(path) > 1000 or path in ("manifest.json", "objects.jsonl"):
        return False
    return all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", segment) for segment in path.split("/"))


def parse_object(value: Any) -> Object:
    """Parses one entry of a journal or a manifest. Raises CorruptSource naming the field that is wrong."""
    if not isinstance(value, dict) or set(value) != {"path", "size", "digest"}:
        raise CorruptSource(
            f"object entry {str(value)[:200]} does not have exactly the fields path, size, digest: another release may have "
            "published it"
        )
    entry = Object(**value)
    if not is_object_path(entry.path):
        raise CorruptSource(f"object path {str(entry.path)[:200]!r} is not a relative path of plain segments")
    if type(entry.size) is not int or not 0 <= entry.size <= MAX_OBJECT_BYTES:
        raise CorruptSource(f"object {entry.path!r} has size {entry.size!r}, not 0..{MAX_OBJECT_BYTES}")
    if not digests.is_digest(entry.digest):
        raise CorruptSource(
            f"object {entry.path!r} has digest {str(entry.digest)[:80]!r}, not {digests.HEX_DIGITS} hex digits"
        )
    return entry


def parse_journal(data: bytes) -> tuple[list[Object], int]:
    """Returns (entries, number of bytes parsed). An unfinished last line is left for the next call."""
    end = data.rfind(b"\n") + 1
    try:
        return [parse_object(json.loads(line)) for line in data[:end].splitlines()], end
    except CorruptSource:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptSource(f"a line of the journal is not JSON: {error}") from error


def no_version(version: int, where: Any, known: Sequence[int]) -> FileNotFoundError:
    """Returns the error for a version that a source does not have; `known` are the versions that it has."""
    return FileNotFoundError(f"no version {version} under {where}; it has {list(known)}: pull one of these")
