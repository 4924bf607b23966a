"""File names of a version, entries of its journal, and the errors that every reader raises.

A version is a directory such as `v00000012`. It contains object files, `objects.jsonl` (the journal: one line per finished
object, written during publishing), and, written last, `manifest.json` (`sharding/weights/format/manifest.py`). The parsers here
accept hostile bytes: an error names the offending value.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

import pydantic

from sharding.weights.format import digests

MAX_MANIFEST_BYTES = 64 << 20
MAX_JOURNAL_BYTES = 64 << 20
MAX_PAGE_LINES, MAX_PAGE_BYTES = 4096, 8 << 20  # of a journal, in one reply of a relay
MAX_OBJECT_BYTES = 512 << 20  # ours have a few MB; hostile input must not make a reader allocate more


def is_object_path(path: Any) -> bool:
    """Returns True for a valid object path: relative, of letters, digits, `_`, `-`, `.`; not a dot file, manifest or journal."""
    if not isinstance(path, str) or len(path) > 1000 or path in ("manifest.json", "objects.jsonl"):
        return False
    return all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", segment) for segment in path.split("/"))


def check_path(path: str) -> str:
    """Returns `path` unchanged. Raises ValueError unless it may be the path of a version's stored file."""
    if not is_object_path(path):
        raise ValueError(
            f"object path {path[:200]!r} is not a relative path of letters, digits, '_', '-' and '.' (no reserved name)"
        )
    return path


@dataclasses.dataclass(frozen=True)
class Object:
    """One stored file of a published version: `path` below the version's directory, `size` in bytes, `digest` in hex."""

    __pydantic_config__ = pydantic.ConfigDict(revalidate_instances="always")

    path: Annotated[str, pydantic.AfterValidator(check_path)]
    size: Annotated[int, pydantic.Field(ge=0, le=MAX_OBJECT_BYTES)]
    digest: digests.Digest


_OBJECT = pydantic.TypeAdapter(Object)


@dataclasses.dataclass(frozen=True)
class Listing:
    """The version numbers that a source has, ascending: `complete` ones, and `partial` ones that are still being published.

    `head` has the bytes of the signed head, which may be newer than both; None if there is none.
    """

    complete: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    head: bytes | None = dataclasses.field(default=None, repr=False)


class CorruptSource(ValueError):
    """Raised when a manifest, journal or object of a version is malformed, or is not the one that was published."""


class Unavailable(OSError):
    """Raised when no relay or bucket delivered, or the source was closed. The message lists the last failure of each relay."""


def dirname(version: int) -> str:
    """Returns the name of the directory of version number `version`, such as "v00000012"."""
    return f"v{version:08d}"


def parse_dirname(name: str) -> int | None:
    """Returns the version number in a directory name such as "v00000012", or None for any other name."""
    return int(name[1:]) if re.fullmatch(r"v([0-9]{8}|[1-9][0-9]{8,15})", name) else None


def parse_journal(data: bytes) -> tuple[list[Object], int]:
    """Parses the whole lines of an objects.jsonl. Returns (objects, number of bytes parsed). Raises CorruptSource."""
    end = data.rfind(b"\n") + 1
    try:
        lines = map(json.loads, data[:end].splitlines())
        return [_OBJECT.validate_python(Object(**line), strict=True) for line in lines], end
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: too many fields, or too few
        raise malformed("a line of the journal (objects.jsonl)", error) from error


def malformed(what: str, error: Exception) -> CorruptSource:
    """Returns the error for untrusted JSON, called `what`: the first mistake that pydantic or the parser found, and a remedy."""
    text = f"{type(error).__name__}: {str(error)[:200]}"
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "it"
        text = f"{field} is {str(first['input'])[:200]!r}: {first['msg'].removeprefix('Value error, ')}"
    return CorruptSource(f"{what} is malformed: {text}; read it from another relay, or publish the version again")


def require(condition: bool, message: str) -> None:
    """Raises CorruptSource with `message` unless `condition` is true."""
    if not condition:
        raise CorruptSource(message)


def no_version(version: int, where: Any, known: Sequence[int]) -> FileNotFoundError:
    """Returns the error for a missing version. `where` names the source, and `known` are the versions that it has."""
    text = f"{list(known)}" if len(known) <= 8 else f"{len(known)} versions, the newest {list(known[-8:])}"
    return FileNotFoundError(f"no version {version} under {where}; it has {text}; pull one of these")
