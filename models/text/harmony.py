"""Splits gpt-oss completions, which are in OpenAI's harmony format, into messages.

    <|channel|>analysis<|message|>They want a sum.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

1. The prompt ends with `<|start|>assistant`, so a completion begins inside the header of its first message.
2. A header names the channel: "analysis" is reasoning, "commentary" and "final" are for the user. The recipient of a tool
   call comes before or after it.
3. A message ends with <|end|>, a tool call with <|call|>, the last message with <|return|>.

The structure is made of special tokens, so the text must contain them (`Tokenizer.text_stream(structured=True)`).
"""

import dataclasses
import re

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
STRUCTURE = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_END = re.compile("|".join(map(re.escape, ENDS)))


@dataclasses.dataclass(frozen=True)
class Message:
    """One message in harmony, the output format of gpt-oss models; possibly unfinished."""

    channel: str  # "" if the header is unfinished or names none
    recipient: str  # of a tool call: "functions.NAME", or a tool that the model was trained with; "" for the user
    body: str
    is_complete: bool  # False if more of it may follow
    text: str  # header and body as they were spelled


def split(text: str) -> list[Message]:
    """Splits a completion in harmony format into its messages. Text in another format becomes one message without a channel."""
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
        is_complete=is_followed or end is not None,
        text=(piece[: end.end()] if end else piece).removeprefix("assistant"),
    )
