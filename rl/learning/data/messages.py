"""Reads messages of data sets in the form of OpenAI's API, and returns them as chat templates expect them.

1. Content may be a text, null, or text parts; it becomes a text.
2. Arguments of tool calls may be JSON; they become an object.
3. All other fields stay: `tool_calls`, `reasoning_content`, `name`, `tool_call_id`, and those of one template alone. Tables fill absent
   fields with nulls, which are left out.
"""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from rl.learning.data import sources


def parse(messages: object) -> list[dict]:
    """Returns the messages of a conversation. Raises ValueError if they have another format."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"the messages are {str(messages)[:80]!r}; write [{{'role': ..., 'content': ...}}]")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError("a message has no role; add one, such as 'user' or 'assistant'")
    return [_plain(message) for message in messages]


def filler(path: str) -> Callable[[Any], Any]:
    """Returns a function that removes the null fields with which a table (.parquet, .arrow) fills absent fields of a row."""
    kinds = {file.suffix for file in sources.files(pathlib.Path(path)).values()}
    return _without_nulls if kinds & {".parquet", ".arrow"} else lambda row: row


def _without_nulls(value: Any) -> Any:
    """Returns a value of a table without the nulls of its objects: a column has every field that any of its objects has."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _plain(message: Mapping) -> dict:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"a message has a part of type {kind!r}, and only text is supported; remove it")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise ValueError(
            f"a message's content is {json.dumps(content)[:60]}; make it a string, or a list of text parts"
        )
    plain = {name: value for name, value in message.items() if value is not None}
    plain |= {"content": content or ""}
    if calls is None:
        return plain
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError("tool_calls is not a list of objects; write [{'function': {'name': ..., 'arguments': {...}}}]")
    return plain | {"tool_calls": [_plain_call(call) for call in calls]}


def _plain_call(call: Mapping) -> dict:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no name; set function.name to a string")
    arguments = function.get("arguments", {})
    try:
        loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        loaded = None
    if not isinstance(loaded, dict):
        raise ValueError(f"arguments of a call of {function['name']} are {arguments!r:.80}; make them a JSON object")
    function = function | {"arguments": loaded}
    return dict(call) | {"function": function} if "function" in call else function
