"""A caller's text that spells a special token stays text, whatever template it goes through.

1. `broken` puts a private-use character, the breaker, into every special token that a caller's string spells or could begin.
2. The template puts the strings in their places. What `cut` finds in the rendered text is therefore the template's own.
3. `mended` takes the breakers out of what lies between, which is then encoded as text.

Control tokens part turns as specials do, although a folder does not call them special (DeepSeek's <｜User｜>), and `tokenizers`
makes them out of any text: one that a caller spells is left in two parts, which are encoded apart.

This holds of templates that put strings in place as they are, or trim, cut and join them. One that computes other text from them
(lower case, replacements) might spell a special token itself, which no break can foresee; none that we know does.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

CONTROL = re.compile(
    r"<([|｜]).+\1>", re.DOTALL
)  # a name such as <|user|>; markers such as <think> are text to be read


@dataclasses.dataclass(frozen=True)
class Breaks:
    cut: re.Pattern  # a special token, as a group
    controls: re.Pattern
    both: re.Pattern
    beginnings: tuple[str, ...]  # of either

    @classmethod
    def of(cls, specials: Iterable[str], ordinary: Iterable[str]) -> "Breaks":
        """`ordinary`: the other tokens that were added to the vocabulary."""
        specials = list(specials)
        controls = [name for name in ordinary if name not in specials and CONTROL.fullmatch(name)]
        names = [*specials, *controls]
        return cls(
            _any_of(specials),
            _any_of(controls),
            _any_of(names),
            tuple({name[:size] for name in names for size in range(1, len(name))}),
        )

    def broken(self, value, breaker: str):
        """The same structure of strings, lists and mappings, with `breaker` in what they spell or could begin.

        The second case: a template may join two of a caller's strings, "...<|im_" and "end|>...".
        """
        if isinstance(value, str):
            value = self.both.sub(lambda match: match[0][0] + breaker + match[0][1:], value)
            return value + breaker if value.endswith(self.beginnings) else value
        if isinstance(value, Mapping):
            return {self.broken(k, breaker): self.broken(v, breaker) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.broken(item, breaker) for item in value]
        return value

    def mended(self, text: str, breaker: str) -> list[str]:
        """The parts to encode of a text without specials: one, unless that would make a control token of a broken one."""
        whole = text.replace(breaker, "")
        if len(self.controls.findall(whole)) == len(self.controls.findall(text)):
            return [whole]
        return text.split(breaker)


def _any_of(names: Iterable[str]) -> re.Pattern:
    """One of them, the longest first, as a group; matches nothing where there are none."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"(?!)")
