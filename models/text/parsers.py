"""Reading an assistant's text: reasoning, content and tool calls, in the formats of four families.

1. `detect_format` finds from a chat template how the model was taught to spell a call:
   chatml   Qwen, Hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>
   glm      GLM-4.5        <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>
   llama    Llama 3        the whole answer is {"name": ..., "parameters": {...}}, several parted by ";"
   harmony  gpt-oss        messages on channels, calls among them (models/text/harmony.py)
2. `parse` reads a finished text. What is malformed is no error: it stays in the content.
3. `parse(..., final=False)` reads a text that still grows, and gives only what no continuation can change: what it gave
   for a text is the beginning of what it gives for any longer one. A server streams the difference.

Reasoning stands between <think> and </think>, but for harmony's; a prompt may have opened it, then the text begins inside.
Left out: grammars that force a call to be well formed; the arguments of a call while it is being written.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

from models.text import harmony

FORMATS = ("chatml", "glm", "llama", "harmony")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON of an object


@dataclasses.dataclass(frozen=True)
class Parsed:
    reasoning: str | None  # None: the text has no reasoning
    content: str
    calls: tuple[Call, ...]


def detect_format(template: str) -> str:
    """One of FORMATS; chatml where the template knows of no tools."""
    if harmony.CHANNEL in template:
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
    """Reads an assistant's text without its stop token.

    Args:
      call_format: one of FORMATS.
      tools: as OpenAI's API has them; their schemas tell GLM's strings from its numbers.
      read_calls: False leaves calls in the content, for a request without tools.
      in_reasoning: whether the prompt ended with an opened <think>; None: unknown, then </think> alone tells it in
        the end. Say which where a growing text is read.
      final: False if the text may go on.
    """
    if call_format == "harmony":
        return _read_harmony(text, read_calls, final)
    reasoning, rest = _split_reasoning(text, in_reasoning, final)
    if rest is None:
        return Parsed(reasoning, "", ())
    if not read_calls:
        return Parsed(reasoning, rest, ())
    if call_format == "llama":
        content, calls = _split_llama(rest, final)
    else:
        schemas = _schemas(tools)
        read = _read_chatml if call_format == "chatml" else lambda inside: _read_glm(inside, schemas)
        content, calls = _split_marked(rest, read, final)
    return Parsed(reasoning, content, tuple(calls))


def _split_reasoning(text: str, in_reasoning: bool | None, final: bool) -> tuple[str | None, str | None]:
    """(reasoning, the text after it); None for the second while that has not begun."""
    stripped = text.lstrip()
    if not final and len(stripped) < len(THINK) and THINK.startswith(stripped):
        return None, None  # may become <think>
    if not in_reasoning and not stripped.startswith(THINK):
        # The end alone, in a finished text, is of a block that the prompt opened without our being told.
        if not (in_reasoning is None and final and END_THINK in text):
            return None, text
    before, end, after = text.partition(END_THINK)
    reasoning = before.lstrip().removeprefix(THINK)
    reasoning = reasoning.lstrip("\n")
    if end:
        after = after.lstrip("\n")
        return reasoning.rstrip("\n"), after if after or final else None
    if final:
        return reasoning.rstrip("\n"), ""
    return without_start_of(END_THINK, reasoning).rstrip("\n"), None


def _split_marked(text: str, read, final: bool) -> tuple[str, list[Call]]:
    """Takes the calls between markers out of the text."""
    content, calls, at = [], [], 0
    while True:
        start = text.find(OPEN, at)
        end = text.find(CLOSE, start) if start >= 0 else -1
        if end < 0:
            break
        call = read(text[start + len(OPEN) : end])
        stop = end + len(CLOSE)
        if call is None:
            content.append(text[at:stop])
        else:
            calls.append(call)
            content.append(text[at:start].removesuffix("\n"))
        at = stop
    rest = text[at:]
    if not final:
        rest = rest[: start - at] if start >= 0 else without_start_of(OPEN, rest)
        rest = rest.removesuffix("\n")  # a call that follows would swallow it
    content.append(rest)
    return "".join(content), calls


def _read_chatml(inside: str) -> Call | None:
    return _read_json_call(_load(inside), ("arguments",))


def _read_glm(inside: str, schemas: Mapping[str, Mapping]) -> Call | None:
    name = re.split(r"\n|<arg_key>", inside.strip(), maxsplit=1)[0].strip()
    rest = inside.strip()[len(name) :]
    if not name or "<" in name or "{" in name or _GLM_PAIR.sub("", rest).strip():
        return None
    properties = schemas.get(name, {})
    arguments = {}
    for key, value in _GLM_PAIR.findall(rest):
        key, schema = key.strip(), properties.get(key.strip())
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        loaded = None if is_text else _load(value)
        arguments[key] = value if is_text or (loaded is None and value.strip() != "null") else loaded
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _split_llama(text: str, final: bool) -> tuple[str, list[Call]]:
    """The whole text is calls, or none of it is."""
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    if not final:
        may_be_call = body.startswith("{") or not body or PYTHON_TAG.startswith(text.strip())
        return ("" if may_be_call else text), []
    calls, at, decoder = [], 0, json.JSONDecoder()
    while at < len(body):
        try:
            value, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return text, []
        call = _read_json_call(value, ("parameters", "arguments"))
        if call is None:
            return text, []
        calls.append(call)
        at = end + len(re.match(r"[\s;]*", body[end:])[0])
    return ("" if calls else text), calls


def _read_harmony(text: str, read_calls: bool, final: bool) -> Parsed:
    """Messages of one kind are parted by a line."""
    reasoning, said, calls = [], [], []
    for message in harmony.split(text):
        is_whole = message.is_whole or final
        body = message.body if is_whole else _without_start_of_any(harmony.STRUCTURE, message.body)
        if message.recipient:
            call = _read_harmony_call(message) if is_whole and read_calls else None
            calls += [call] if call else []
            said += [message.text] if is_whole and call is None else []
        elif message.channel == "analysis":
            reasoning.append(body)
        elif message.channel or is_whole:  # else a header may follow
            said.append(body)
    thought = "\n".join(filter(None, reasoning)) if reasoning else None
    return Parsed(thought, "\n".join(filter(None, said)), tuple(calls))


def _read_harmony_call(message: harmony.Message) -> Call | None:
    arguments = _load(message.body)
    if not isinstance(arguments, dict):
        return None
    return Call(message.recipient.removeprefix("functions."), json.dumps(arguments, ensure_ascii=False))


def _without_start_of_any(markers: Sequence[str], text: str) -> str:
    return min((without_start_of(marker, text) for marker in markers), key=len)


def _read_json_call(value, names: tuple[str, ...]) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[name] for name in names if name in value), {} if names == ("arguments",) else None)
    if isinstance(arguments, str):
        arguments = _load(arguments)  # an object spelled as a string
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _schemas(tools: Sequence[Mapping] | None) -> dict[str, Mapping]:
    """Function name -> its parameters' schemas; whatever is not as it should be is left out."""
    schemas = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping) and isinstance(function.get("name"), str):
            schemas[function["name"]] = properties
    return schemas


def _load(text: str):
    """The JSON value, or None: a model may write anything here, ten thousand brackets included."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def without_start_of(marker: str, text: str) -> str:
    """`text` less a tail that may become `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return text[:-size]
    return text
