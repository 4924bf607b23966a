"""Finds the program in a message of the model."""

import re

_BLOCK = re.compile(r"^```[ \t]*(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
MAX_CHARS = 2**16  # of a program


def last(text: str) -> str | None:
    """Returns the last block of Python, or without a language, in a message; None if it has none, or one of more than MAX_CHARS."""
    found = [code for language, code in _BLOCK.findall(text) if language.lower() in ("", "python", "py", "python3")]
    return found[-1] if found and len(found[-1]) <= MAX_CHARS else None


def of(code: str) -> str:
    """Returns a message with a program."""
    return f"```python\n{code.strip()}\n```"
