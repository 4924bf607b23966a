"""The sources that a server may load weights from: those it was started with, and the prefixes in `--weights_allow`.

A path is compared with links resolved, a URL part by part, before anything is opened or requested. So a control request cannot
make the server read another file, or send a request to another host.
"""

import contextlib
import pathlib
import re
from collections.abc import Iterable


class WeightSources:
    """An allow-list of directories and URLs, each with everything below it."""

    def __init__(self, prefixes: Iterable[str]):
        """Creates the allow-list. A URL that is not plain, such as one with a password, allows nothing below it."""
        self._prefixes = []
        for prefix in prefixes:
            with contextlib.suppress(ValueError):
                self._prefixes.append(_parts(prefix))

    def check(self, source: str) -> str:
        """Returns `source`, with links resolved if it is a path. Raises ValueError if no prefix allows it."""
        parts = _parts(source)
        if not any(parts[: len(prefix)] == prefix for prefix in self._prefixes):
            raise ValueError(
                f"weight_dir {source!r} is not one of this server's sources; send one of those, or start the server with "
                "--weights_allow and a prefix of it"
            )
        return source if "://" in source else str(pathlib.Path(*parts))


def _parts(source: str) -> tuple[str, ...]:
    """Returns the parts of a URL (scheme and host, then the path's) or of a resolved path. Raises ValueError if it has none."""
    if "://" not in source:
        try:
            return pathlib.Path(source).resolve().parts
        except (OSError, RuntimeError, ValueError) as error:  # a NUL, or links in a ring
            raise ValueError(f"weight_dir {source[:200]!r} is not a path: {error}; send a path or a URL") from error
    scheme, _, rest = source.partition("://")
    parts = rest.rstrip("/").split("/")
    if not re.fullmatch(r"[A-Za-z0-9.:\[\]_-]*", parts[0]) or not all(
        re.fullmatch(r"[\w.=,+~-]+", p) for p in parts[1:]
    ):
        raise ValueError(
            f"weight_dir {source[:200]!r} is not a plain URL; send SCHEME://HOST/PATH without user, query or escapes"
        )
    if {".", ".."} & set(parts):
        raise ValueError(f"weight_dir {source[:200]!r} has . or .. in its path; send the path itself")
    return (f"{scheme}://{parts[0]}".lower(), *parts[1:])
