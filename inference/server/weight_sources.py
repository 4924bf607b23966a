"""The sources that a server may load weights from: those it was started with, and the prefixes in `--weights_allow`.

Checked before anything is opened or requested, so a control request cannot make the server read another file, or send a request to
another host.
"""

import pathlib
import re
from collections.abc import Iterable

# SCHEME://HOST/PATH without user, query, escapes, and parts . and .., which could lead elsewhere than they seem to.
_PLAIN_URL = re.compile(r"[a-z0-9+.-]+://[\w.:\[\]-]*(/(?!\.\.?(/|$))[\w.=,+~-]+)*/?", re.ASCII)


def check(source: str, prefixes: Iterable[str]) -> str:
    """Returns `source`, with links resolved if it is a path. Raises ValueError if it is neither one of `prefixes` nor below one."""
    found = _resolve(source) if "://" not in source else source
    if "://" in source and not _PLAIN_URL.fullmatch(source):
        text = f"weight_dir {source[:200]!r} is not a plain URL"
        raise ValueError(f"{text}; send SCHEME://HOST/PATH without user, query or escapes")
    roots = (prefix if "://" in prefix else _resolve(prefix) for prefix in prefixes)
    if not any(f"{found.rstrip('/')}/".startswith(f"{root.rstrip('/')}/") for root in roots):
        text = f"weight_dir {source[:200]!r} is not one of this server's sources"
        raise ValueError(f"{text}; send one of those, or start the server with --weights_allow and a prefix of it")
    return found


def _resolve(path: str) -> str:
    try:
        return str(pathlib.Path(path).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a NUL, or links in a ring
        raise ValueError(f"weight_dir {path[:200]!r} is not a path: {error}; send a path or a URL") from error
