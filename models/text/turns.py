"""Finds where a chat template begins and ends the assistant's turns, from its renderings of a few short conversations.

1. The messages of these conversations are private-use characters, so all other text in a rendering is the template's own.
2. An answer begins after the text that opens past turns and generation prompts alike. A template that opens no turn after a
   tool's result (Gemma 4, DeepSeek), or none at all (Mistral), begins it after the token that closes the message before.
3. An answer ends with the last token that closes it both in past turns and at the end of the conversation (<|im_end|>).
   Where the two differ, it ends with the first token of either: gpt-oss writes <|end|> and <|return|>, and in GLM-4.5 the next
   turn's <|user|> ends an answer, and <|observation|> a tool call.
4. That token is a stop: the assistant samples it, and no more. Only after <|end|>, which past turns alone have, it may go on.

So neither depends on the tokenizer's end token, which in base checkpoints is often another than the template's.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence

QUESTION, ANSWER, NEXT, LAST = "\uf8fc\uf8fd\uf8fe\uf8ff"  # the contents of messages


@dataclasses.dataclass(frozen=True)
class Turns:
    """The texts that begin and end an assistant's turns under one chat template. Fields are empty if its renderings do not show them."""

    header: str = ""  # the text after which an answer begins
    result_end: str = ""  # the end of a tool's result, if an answer after it has no header
    ends: tuple[str, ...] = ()  # tokens that end an answer
    pauses: tuple[str, ...] = ()  # those of them after which the assistant may go on
    stop: str = ""  # the token that the assistant samples at the end of an answer ...
    call_stop: str = ""  # ... and at the end of a message with tool calls

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Returns (begin, end) of each text in a rendered conversation that the assistant would sample.

        A turn without an end is the conversation's last.
        """
        found: list[tuple[int, int]] = []
        if not (self.header and self.ends):
            return found
        opening, closing = _any_of(filter(None, (self.header, self.result_end))), _any_of(self.ends)
        opened = opening.search(text)
        while opened:
            begin, end = opened.end(), closing.search(text, opened.end())
            while end and end[0] in self.pauses and text.startswith(self.header, end.end()):
                end = closing.search(text, end.end())
            at = end.end() if end else len(text)
            if opened[0] != self.header:  # several results may come before the answer, or none after them
                begin = [opened, *opening.finditer(text, begin, end.start() if end else at)][-1].end()
            if opened[0] == self.header or not end or end.start() > begin:
                found.append((begin, at))
            opened = opening.search(text, at)
        return found


def find(render: Callable[[Sequence[dict], bool], str | None], token: re.Pattern, stops: Iterable[str]) -> Turns:
    """Finds the turns of a chat template.

    Args:
      render: renders messages, with or without a generation prompt; returns None if the template rejects them.
      token: matches a special token.
      stops: tokens that end a completion with any template.
    """
    user, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    bare, prompted = render([user], False), render([user], True)
    if bare is None or prompted is None:
        return Turns()
    last, past = render([user, answer], False), render([user, answer, user | {"content": NEXT}], False)
    header = _header(bare, prompted, [text for text in (last, past) if text], token)
    last_tokens, past_tokens = _tokens(token, last, ANSWER), _tokens(token, past, ANSWER, NEXT)
    if not header or (past and not past_tokens):  # else a mask could run on over the user's turn
        return Turns()
    ends, stop = _ends(last_tokens, past_tokens)

    function = {"name": "f", "arguments": {"x": ANSWER}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    asked = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": NEXT}
    called, returned = render(asked, False), render([*asked, result, answer | {"content": LAST}], False)
    last_tokens, past_tokens = _tokens(token, called, ANSWER), _tokens(token, returned, ANSWER, NEXT)
    call_ends, call_stop = [], next((name for name in last_tokens or past_tokens if name in ends), "")
    if not call_stop:
        call_ends, call_stop = _ends(last_tokens, past_tokens)
    opening = _between(returned, NEXT, LAST)
    names = [] if header in opening else [*token.finditer(opening)]
    result_end = opening[names[0].start() : names[-1].end()] if names else ""

    found = [*filter(None, [stop, call_stop, *stops])]
    ends = [*dict.fromkeys([*ends, *call_ends, *found])]
    return Turns(
        header, result_end, tuple(ends), tuple(name for name in ends if name not in found), stop, call_stop or stop
    )


def _header(bare: str, prompted: str, answered: Sequence[str], token: re.Pattern) -> str:
    """Returns the text that opens every assistant turn, with a token in it if possible: the common start of generation prompt and past turns.

    QwQ's generation prompt opens a reasoning block that past turns lack; Qwen3's last turn has a reasoning block that its
    generation prompt lacks.
    """
    before = _common([bare, prompted], token)
    texts = [text.partition(ANSWER)[0] for text in answered if ANSWER in text and text.startswith(before)]
    openings = [text.removeprefix(before) for text in (prompted, *texts)]
    header = _common(openings, token)
    if header not in openings:
        header = header[: max([header.rfind("\n") + 1, *(found.end() for found in token.finditer(header))])]
    closings = [*token.finditer(_between(before, QUESTION, ""))]
    if token.search(header) or not closings:
        return header
    return closings[-1].string[closings[-1].start() :] + header


def _ends(last: Sequence[str], past: Sequence[str]) -> tuple[list[str], str]:
    """Returns (the tokens that end an answer, the one that is sampled), of the tokens after a last and after a past answer."""
    pairs = zip(last, past, strict=False)
    if shared := [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]:
        return shared[-1:], shared[-1]
    return [*last[:1], *past[:1]], [*last, *past, ""][0]


def _common(texts: Sequence[str], token: re.Pattern) -> str:
    """Returns the common start of the texts, without a part of a token at its end."""
    size = len(os.path.commonprefix(texts))
    cut = [found.start() for text in texts for found in token.finditer(text) if found.start() < size < found.end()]
    return texts[0][: min([size, *cut])]


def _tokens(token: re.Pattern, text: str | None, *marks: str) -> list[str]:
    return [found[0] for found in token.finditer(_between(text, marks[0], "".join(marks[1:])))]


def _between(text: str | None, first: str, second: str) -> str:
    """Returns the text between the last `first` and the next `second`, or the end if `second` is ""; "" if one is missing."""
    _, mark, rest = (text or "").rpartition(first)
    inside, closed, _ = rest.partition(second) if second else (rest, "", "")
    return inside if mark and (closed or not second) else ""


def _any_of(texts: Iterable[str]) -> re.Pattern:
    return re.compile("|".join(map(re.escape, texts)))
