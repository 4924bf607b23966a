"""Parses an assistant's text into reasoning, content, and tool calls, in the formats of four model families.

1. `detect_format` finds from a chat template how the model was taught to write a tool call:
   chatml   Qwen, Hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>
   glm      GLM-4.5        <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>
   llama    Llama 3        the whole completion is {"name": ..., "parameters": {...}}, several separated by ";"
   harmony  gpt-oss        messages on channels, some of which are calls:
            <|channel|>analysis<|message|>They want a sum.<|end|>
            <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
2. `parse` parses a finished text. Malformed parts raise nothing: they stay in the content. JSON is read by a scanner, so a marker in a
   string ends no call. Models break it in two ways that are accepted: raw line breaks in strings, and NaN or 1e400, which become null.
3. `parse(..., final=False)` parses a text that still grows, and returns only those parts that no continuation can change.
   Each result begins with the results of all shorter texts, so a server can stream the difference.

Reasoning is between <think> and </think>, except in harmony. A prompt may end with <think>; the text then begins inside.

In harmony, a completion begins inside the header of its first message, since the prompt ends with `<|start|>assistant`. A header names the
channel: "analysis" is reasoning, "commentary" and "final" are for the user. The recipient of a tool call comes before or after it. The
structure is made of special tokens, so the text must contain them (`Tokenizer.text_stream(structured=True)`).

Left out: grammars that force well-formed calls; the arguments of a call before it is complete.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FORMATS = ("chatml", "glm", "llama", "harmony")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
# Of harmony.
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
STRUCTURE = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_END = re.compile("|".join(map(re.escape, ENDS)))
ARGUMENTS = ("arguments", "parameters")  # names of a call's arguments
# Atomic: a hostile text of many opening marks takes no square of its length.
_GLM_PAIR = re.compile(r"\s*<arg_key>(?>(.*?)</arg_key>)\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_SEPARATORS = re.compile(r"[\s;]*")
_SURROGATE = re.compile("[\ud800-\udfff]")  # UTF-8 has no form of it


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


_JSON = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=lambda _: None)
_SHORT = 2**12  # characters of most calls
_LONGEST_TOKEN = 12  # characters in which the scanner may still go on: -Infinity, \uXXXX


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One tool call in an assistant's text: a function's name and its arguments."""

    name: str
    arguments: str  # JSON of an object

    def field(self, id: str) -> dict:
        """Returns the call as an entry of a message's field `tool_calls`, in the form of OpenAI's API."""
        return {"id": id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclasses.dataclass(frozen=True)
class Parsed:
    """An assistant's text, parsed into reasoning, content and tool calls."""

    reasoning: str | None  # None if the text has no reasoning
    content: str
    calls: tuple[ToolCall, ...]

    def message(self, call_id: Callable[[int], str]) -> dict:
        """Returns the assistant's message in the form of OpenAI's API. `call_id(index)` names each of its tool calls."""
        message: dict = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.field(call_id(index)) for index, call in enumerate(self.calls)]
        return message


def detect_format(template: str) -> str:
    """Returns the tool call format of a chat template, one of FORMATS; "chatml" if the template mentions no tools."""
    if CHANNEL in template:
        return "harmony"
    if "<arg_key>" in template:
        return "glm"
    if OPEN not in template and ('"parameters"' in template or PYTHON_TAG in template):
        return "llama"
    return "chatml"


def parse(
    text: str,
    call_format: str,
    *,
    tools: Sequence[Mapping] | None = None,
    read_calls: bool = True,
    in_reasoning: bool | None = None,
    final: bool = True,
) -> Parsed:
    """Parses an assistant's text, which must not contain the stop token.

    Args:
      text: the completion, decoded.
      call_format: one of FORMATS.
      tools: in the form of OpenAI's API; GLM's format needs their schemas to distinguish strings from numbers.
      read_calls: False leaves calls in the content, for a request without tools.
      in_reasoning: True if the prompt ended with <think>. None if unknown: a </think> without <think> then decides, but
        only in a finished text, so pass True or False with `final=False`.
      final: False if the text may grow.
    """
    if call_format == "harmony":
        return _read_harmony(text, read_calls, final)
    reasoning, rest = _split_reasoning(text, in_reasoning, final)
    if not rest or not read_calls:
        return Parsed(reasoning, rest or "", ())
    if call_format == "llama":
        content, calls = _split_llama(rest, final)
    else:
        read = _read_chatml if call_format == "chatml" else functools.partial(_read_glm, schemas=_schemas(tools))
        content, calls = _split_marked(rest, read, final)
    return Parsed(reasoning, content, tuple(calls))


def _split_reasoning(text: str, in_reasoning: bool | None, final: bool) -> tuple[str | None, str | None]:
    """Returns (reasoning or None, the text after the reasoning). The text is None while the reasoning has not ended."""
    stripped = text.lstrip()
    if not final and len(stripped) < len(THINK) and THINK.startswith(stripped):
        return None, None  # may become <think>
    before, end, after = text.partition(END_THINK)
    # A lone one closes a block of the prompt.
    closes_prompt = in_reasoning is None and final and end and THINK not in before
    if not (in_reasoning or closes_prompt or stripped.startswith(THINK)):
        return None, text
    reasoning = before.lstrip().removeprefix(THINK).lstrip("\n")
    if not end and not final:
        return without_partial(reasoning, (END_THINK,)).rstrip("\n"), None
    after = after.lstrip("\n")
    return reasoning.rstrip("\n"), after if after or final else None


def _split_marked(
    text: str, read: Callable[[str, int], tuple[list[ToolCall], int]], final: bool
) -> tuple[str, list[ToolCall]]:
    """Returns (content, tool calls). `read(text, begin)` reads the calls after a marker.

    It returns (calls, end of the closing marker), or no calls for text that stays content, with an end of -1 if more text may complete it.
    """
    content, calls, at, searched = [], [], 0, 0
    # Else each of many opening marks would be searched to the end.
    last = text.rfind(CLOSE) if final else len(text)
    while 0 <= (start := text.find(OPEN, searched)) < last:
        searched = start + len(OPEN)
        found, end = read(text, searched)
        if end < 0 and not final:
            break
        if found:
            content.append(text[at:start].removesuffix("\n"))
            calls += found
            at = searched = end
    rest = text[at:]
    if not final:
        rest = text[at:start] if start >= 0 else without_partial(rest, (OPEN,))
        rest = rest.removesuffix("\n")  # a call that follows would remove it
    return "".join([*content, rest]), calls


def _read_chatml(text: str, begin: int) -> tuple[list[ToolCall], int]:
    """Reads one object after another, or a list of them, up to the closing marker."""
    calls, end = _read_objects(text[begin : begin + _SHORT])  # an error costs the length of its text
    if end < 0 and begin + _SHORT < len(text):
        calls, end = _read_objects(text[begin:])
    return calls, end if end < 0 else begin + end


def _read_objects(text: str) -> tuple[list[ToolCall], int]:
    calls, at = [], 0
    while True:
        at = _SEPARATORS.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess] matches any text
        if text.startswith(CLOSE, at):
            return calls, at + len(CLOSE)
        if CLOSE.startswith(text[at:]):
            return [], -1
        try:
            value, at = _JSON.raw_decode(text, at)
        except json.JSONDecodeError as error:
            is_growing = error.msg.startswith("Unterminated string") or error.pos > len(text) - _LONGEST_TOKEN
            return [], -1 if is_growing else 0
        except (ValueError, RecursionError):  # an integer of 5,000 digits, or 20,000 brackets
            return [], 0
        found = [_called(one) for one in (value if isinstance(value, list) else [value])]
        if not all(found):
            return [], 0
        calls += found


def _read_glm(text: str, begin: int, schemas: Mapping[str, Mapping]) -> tuple[list[ToolCall], int]:
    """Reads a call up to the closing marker, which no value contains: one that is open there ends later."""
    end = text.find(CLOSE, begin)
    while end >= 0 and text.rfind("<arg_value>", begin, end) > text.rfind("</arg_value>", begin, end):
        closed = text.find("</arg_value>", end)
        end = text.find(CLOSE, closed) if closed >= 0 else -1
    call = _glm_call(text[begin:end], schemas) if end >= 0 else None
    return ([call], end + len(CLOSE)) if call else ([], end)


def _glm_call(inside: str, schemas: Mapping[str, Mapping]) -> ToolCall | None:
    name = re.split(r"\n|<arg_key>", inside.strip(), maxsplit=1)[0].strip()
    rest, pairs, at = inside.strip()[len(name) :], [], 0
    while pair := _GLM_PAIR.match(rest, at):
        pairs.append(pair.groups())
        at = pair.end()
    if not name or "<" in name or "{" in name or rest[at:].strip():
        return None
    properties = schemas.get(name, {})
    arguments = {}
    for key, value in pairs:
        key, schema = key.strip(), properties.get(key.strip())
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        loaded = None if is_text else _load(value)
        arguments[key] = value if is_text or (loaded is None and value.strip() != "null") else loaded
    return _tool_call(name, arguments)


def _split_llama(text: str, final: bool) -> tuple[str, list[ToolCall]]:
    """Returns (content, tool calls) in Llama's format, one of them empty: either the whole text is calls, or all is content."""
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    if not final:
        may_be_call = body.startswith("{") or not body or PYTHON_TAG.startswith(text.strip())
        return ("" if may_be_call else text), []
    calls, at = [], 0
    while at < len(body):
        try:
            value, end = _JSON.raw_decode(body, at)
        except (ValueError, RecursionError):
            return text, []
        is_call = isinstance(value, dict) and value.keys() & set(ARGUMENTS)  # else any object with a name would be one
        if not (is_call and (call := _called(value))):
            return text, []
        calls.append(call)
        at = next(_SEPARATORS.finditer(body, end)).end()
    return ("" if calls else text), calls


def _read_harmony(text: str, read_calls: bool, final: bool) -> Parsed:
    """Parses text in harmony format; joins messages of one kind (reasoning or content) with newlines."""
    reasoning, content, calls = [], [], []
    for message in split_harmony(text):
        is_complete = message.is_complete or final
        body = message.body if is_complete else without_partial(message.body, STRUCTURE)
        if message.recipient:
            name = message.recipient.removeprefix("functions.")
            call = _tool_call(name, message.body) if is_complete and read_calls else None
            calls += [call] if call else []
            content += [message.text] if is_complete and call is None else []
        elif message.channel == "analysis":
            reasoning.append(body)
        elif message.channel or is_complete:  # else a header may follow
            content.append(body)
    thought = "\n".join(filter(None, reasoning)) if reasoning else None
    return Parsed(thought, "\n".join(filter(None, content)), tuple(calls))


@dataclasses.dataclass(frozen=True)
class HarmonyMessage:
    """One message in harmony, the output format of gpt-oss models; possibly unfinished."""

    channel: str  # "" if the header is unfinished or names none
    recipient: str  # of a tool call: "functions.NAME", or a tool that the model was trained with; "" for the user
    body: str
    is_complete: bool  # False if more of it may follow
    text: str  # header and body as they were spelled


def split_harmony(text: str) -> list[HarmonyMessage]:
    """Splits a completion in harmony format into its messages. Text in another format becomes one message without a channel."""
    *before, last = text.split(START)
    return [*(_harmony_message(piece, True) for piece in before), _harmony_message(last, False)]


def _harmony_message(piece: str, is_followed: bool) -> HarmonyMessage:
    end = _END.search(piece)
    text = piece[: end.start()] if end else piece
    header, begun, body = text.partition(MESSAGE)
    channel = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
    recipient = re.search(r"\bto=([^\s<]+)", header)
    return HarmonyMessage(
        channel=channel[1] if begun and channel else "",
        recipient=recipient[1] if begun and recipient else "",
        body=body if begun or CHANNEL in text else text,
        is_complete=is_followed or end is not None,
        text=(piece[: end.end()] if end else piece).removeprefix("assistant"),
    )


def _called(value: Any) -> ToolCall | None:
    """Returns the tool call that a JSON value describes, in Hermes' or Llama's form or in that of OpenAI's API; None if it is not one."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    return _tool_call(value.get("name"), next((value[n] for n in ARGUMENTS if value.get(n) is not None), {}))


def _tool_call(name: Any, arguments: Any) -> ToolCall | None:
    """Returns the tool call, or None unless `name` is a string and `arguments` is an object or the JSON text of an object."""
    if isinstance(arguments, str):
        arguments = {} if arguments.strip() in ("", "null") else _load(arguments)
    if not isinstance(name, str) or _SURROGATE.search(name) or not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, json.dumps(arguments) if _SURROGATE.search(text) else text)


def _schemas(tools: Sequence[Mapping] | None) -> dict[str, Mapping]:
    """Returns {function name: {parameter: its JSON schema}}, skipping malformed tools."""
    schemas = {}
    for tool in tools or ():
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            function = tool.get("function", tool)
            schemas[function["name"]] = dict(function["parameters"]["properties"])
    return schemas


def _load(text: str) -> Any:
    """Returns the JSON value of a text, or None for text that is not JSON or is nested too deeply."""
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None


def without_partial(text: str, markers: Sequence[str]) -> str:
    """Returns `text` without the longest end that could grow into one of `markers` when more text follows."""
    for size in range(min(max(map(len, markers), default=1) - 1, len(text)), 0, -1):
        if any(len(marker) > size and marker.startswith(text[-size:]) for marker in markers):
            return text[:-size]
    return text
