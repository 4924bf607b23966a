"""Reads the code blocks of Markdown pages, so that tests run them as they are."""

import re


def blocks(text: str, part: str | None = None) -> list[tuple[str, str]]:
    """The (language, code) of the blocks of a page, or of its section `part`."""
    if part is not None:
        (text,) = re.findall(rf"^## {part}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def files(text: str) -> dict[str, str]:
    """The code of the blocks with a title, by that name."""
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL))
