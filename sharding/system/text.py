"""The forms of short texts: hex digits, printable characters, and the known name that a wrong one is most similar to. Does not import jax."""

import difflib
import re
from collections.abc import Iterable
from typing import TypeGuard

HEX_64 = "^[0-9a-f]{64}$"  # a public key or a digest, as the pattern of a pydantic field


def is_hex(value: object, digits: int = 64) -> TypeGuard[str]:
    """Returns True for a text of exactly `digits` lowercase hex digits: 64 for a public key or a digest."""
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def printable(text: str, instead: str = "?") -> str:
    """Returns a text of any origin with `instead` for each character that is not printable, such as a line end."""
    return "".join(c if c.isprintable() else instead for c in text)


def hint(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean X?)" with the name in `known` that is most similar to `name`, or "" if none is.

    Of dotted names, the last parts are compared, first in the section of `name` and then anywhere; "lr" is similar to
    "learning_rate". Sections with equally similar names are all given.
    """
    section, _, own = name.rpartition(".")
    by_part: dict[str, list[str]] = {}
    for other in known:
        by_part.setdefault(other.rpartition(".")[2], []).append(other)
    here = {part: [f"{section}.{part}"] for part in by_part if f"{section}.{part}" in by_part[part]}
    for pool in (here, by_part):
        initials = [part for part in pool if "".join(word[:1] for word in part.split("_")) == own]
        for part in ([own] if own in pool else initials or difflib.get_close_matches(own, pool, 1))[:1]:
            return f" (did you mean {' or '.join(pool[part])}?)"
    return ""
