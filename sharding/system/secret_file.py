"""Reads and creates files with a secret: API keys and control tokens, which a command line would show to every user by `ps`.

A file holds one line of printable ASCII characters. Does not import jax.
"""

import contextlib
import os
import re
import secrets
import stat

from sharding.system import atomic_file

MIN_CHARACTERS = 16  # of a secret that a command may generate


def read(path: str | os.PathLike) -> str:
    """Returns the secret in a file. Raises ValueError if the file is missing, has no valid secret, or is open to other users."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            mode, text = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(4096).strip()
    except OSError as error:
        found = f"cannot read the secret in {path}: {error.strerror}"
        raise ValueError(f"{found}; name a file that you may read") from error
    if mode & 0o007:
        raise ValueError(f"{path} has mode {mode:04o}, so any user may use its secret; run chmod 600 {path}")
    return check(text, f"{path} contains")


def choose(value: str | None, path: str | None, variable: str) -> str | None:
    """Returns the secret in the file `path`, else `value`, else that in an environment variable, else None."""
    if value and path:
        raise ValueError(f"both a secret and the file {path} with one are given; remove the secret")
    if path:
        return read(path)
    value = value or os.environ.get(variable)
    return check(value, f"the option or ${variable} contains") if value else None


def check(text: str, found: str) -> str:
    """Returns `text` if it can be sent as a bearer token. Raises ValueError, which begins with `found`, if it cannot."""
    if not re.fullmatch(r"[!-~]+", text):  # never the text: an error may end up in a log
        raise ValueError(f"{found} no secret (printable ASCII characters without spaces); write one, or remove it")
    return text


def read_or_create(path: str | os.PathLike) -> str:
    """Returns the secret in a file; generates a random one, in a file for the owner alone, if the file does not exist.

    Raises ValueError if the file cannot be created, has fewer than `MIN_CHARACTERS`, or is not one that `read` accepts.
    """
    try:
        with contextlib.suppress(FileExistsError):  # never replaces a secret
            atomic_file.write(path, secrets.token_urlsafe(32).encode() + b"\n", secret=True)
    except OSError as error:
        text = f"cannot create the secret {path}: {error.strerror}"
        raise ValueError(f"{text}; name a file that you may write") from error
    if len(secret := read(path)) < MIN_CHARACTERS:
        text = f"the secret in {path} has {len(secret)} characters, not {MIN_CHARACTERS} or more"
        raise ValueError(f"{text}; remove the file")
    return secret
