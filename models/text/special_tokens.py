"""Keeps a caller's text from spelling special tokens, whichever chat template it goes through.

1. `Escaper.escape` puts a private-use character, the escape, into every special token that a caller's string spells or could
   begin. Each special token that `Escaper.special` finds in the rendered text is therefore the template's own.
2. `Escaper.unescape` removes the escapes from the text between special tokens, which is then encoded as plain text.

Control tokens separate turns but are not marked as special in some checkpoints (DeepSeek's <｜User｜>), and `tokenizers`
makes them out of any text. One that a caller spells is returned in two pieces, to be encoded separately.

A template that computes other text from a caller's strings (lower case, replacements) could spell a special token itself;
no known template does.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

# A name such as <|user|>. Markers such as <think> are text to be read.
CONTROL = re.compile(r"<([|｜]).+\1>", re.DOTALL)


class Escaper:
    """Escapes control tokens of one tokenizer in users' text, so that they are encoded as plain text.

    Control tokens are `specials`, and the added tokens in `ordinary` with names such as <|user|>. The pattern `special`
    matches any of `specials`, as a group; `token` any control token.
    """

    def __init__(self, specials: Collection[str], ordinary: Iterable[str]):
        controls = [name for name in ordinary if name not in specials and CONTROL.fullmatch(name)]
        names = [*specials, *controls]
        self.special, self._control, self.token = _any_of(specials), _any_of(controls), _any_of(names)
        self._prefixes = tuple({name[:size] for name in names for size in range(1, len(name))})

    def escape(self, value: Any, escape: str) -> Any:
        """Returns a copy of nested strings, lists and mappings with the character `escape` in each control token of a string.

        A string that ends with the beginning of a control token gets `escape` appended, because a template may join strings:
        "<|im_" and "end|>".
        """
        if isinstance(value, str):
            value = self.token.sub(lambda match: match[0][0] + escape + match[0][1:], value)
            return value + escape if value.endswith(self._prefixes) else value
        if isinstance(value, Mapping):
            return {self.escape(k, escape): self.escape(v, escape) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape(item, escape) for item in value]
        return value

    def unescape(self, text: str, escape: str) -> list[str]:
        """Removes `escape` from a text. Returns the pieces to encode separately: one, or several that together spell a control token."""
        whole = text.replace(escape, "")
        if len(self._control.findall(whole)) == len(self._control.findall(text)):
            return [whole]
        return text.split(escape)


def _any_of(names: Iterable[str]) -> re.Pattern:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"(?!)")
