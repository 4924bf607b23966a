"""What gpt-oss writes: messages, each on a channel and maybe to a tool, in OpenAI's harmony format.

    <|channel|>analysis<|message|>They want a sum.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

1. The prompt ends with `<|start|>assistant`, so that a completion begins inside the header of its first message.
2. A header names the channel ("analysis" is reasoning, "commentary" and "final" are said) and, before or behind it, the recipient.
3. A message ends with <|end|>, with <|call|> for a tool to answer, or with <|return|>.

Its structure is spelled by special tokens: they have to stand in the text that is read here (`Tokenizer.text_stream`).
"""

import dataclasses
import re

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
STRUCTURE = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_END = re.compile("|".join(map(re.escape, ENDS)))


@dataclasses.dataclass(frozen=True)
class Message:
    channel: str  # "" before the header is whole, and of what has none
    recipient: str  # of a call: "functions.NAME", or a tool that the model was trained with; "": the user
    body: str
    is_whole: bool  # False: more of it may follow
    text: str  # header and body as they are spelled


def split(text: str) -> list[Message]:
    """The messages of a completion. What is no harmony at all is one without a channel."""
    *before, last = text.split(START)
    return [*(_message(piece, True) for piece in before), _message(last, False)]


def _message(piece: str, is_followed: bool) -> Message:
    end = _END.search(piece)
    text = piece[: end.start()] if end else piece
    header, begun, body = text.partition(MESSAGE)
    channel = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
    recipient = re.search(r"\bto=([^\s<]+)", header)
    return Message(
        channel=channel[1] if begun and channel else "",
        recipient=recipient[1] if begun and recipient else "",
        body=body if begun or CHANNEL in text else text,
        is_whole=is_followed or end is not None,
        text=(piece[: end.end()] if end else piece).removeprefix("assistant"),
    )
