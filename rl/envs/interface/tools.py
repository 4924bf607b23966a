'''Tools: Python functions that the model may call, with schemas from their signatures; or those of an MCP server.

    >>> def add(a: int, b: list[int] | None = None) -> int:
    ...     """Adds numbers.
    ...
    ...     Args:
    ...       a: the first one.
    ...       b: further ones.
    ...     """
    ...     return a + sum(b or [])
    >>> tool = of(add)
    >>> tool.description, tool.parameters["properties"]["a"], tool.parameters["required"]
    ('Adds numbers.', {'type': 'integer', 'description': 'the first one.'}, ['a'])

1. `results` runs the calls of one message at the same time, as far as they are coroutines, and returns a message for each, in order.
2. A call of an unknown tool, arguments that do not fit the schema, and an exception of the function are errors that the model reads;
   none ends the episode. So is a call past the limit of an episode.
3. A long result is shortened in its middle, always in the same way.
4. The model reads nothing that depends on the clock, since a validator's machine is another one. A call that exceeds its time ends the
   episode with an error. Only a tool of kind "recorded", which no validator repeats, then has an error that the model reads.

An environment may also offer the protocol "text", in which a message is one command: tiny models can learn that.

Left out: images in results, and values that JSON schemas cannot express.
'''

import asyncio
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rl.envs.interface import mcp_client

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_KINDS = ", ".join(kind.__name__ for kind in _TYPES)
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):[ \t]*$", re.MULTILINE)
_PARAMETER = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:[ \t]*(.*)$")
MAX_ERROR_CHARS = 500
PROTOCOLS = ("tools", "text")  # how a model uses tools: by tool calls of its chat template, or by texts


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    call: Callable[..., Any]  # (**arguments) -> result, which is shown as text; may be a coroutine function
    takes_state: bool = False  # `call` has a further keyword argument `state`, which the model does not see
    kind: str = "pure"  # as of an environment: whether a validator can repeat a call

    @property
    def schema(self) -> dict:
        """The tool in the form of OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of tool calls. `conversation` and `results` apply them."""

    max_calls: int | None = None  # in an episode; a further call gets an error
    max_chars: int = 8192  # of a result, the note about its missing middle included
    call_s: float | None = None  # seconds of the clock for a call of a coroutine; other functions run to their end


DEFAULT_LIMITS = Limits()


def of(function: Callable[..., Any]) -> Tool:
    """Returns the tool of a function with annotated parameters. Its docstring, in Google's style, describes it and its parameters.

    A parameter named `state` gets the state of the episode. Raises ValueError for parameters that JSON cannot express, and for a
    docstring that describes parameters which do not exist.
    """
    properties, required, hints = {}, [], typing.get_type_hints(function)
    description, about = _described(inspect.getdoc(function) or "")
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if name == "state":
            continue
        owner = f"tool {function.__name__}: parameter {name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{owner} is positional-only or variadic; use a plain named parameter")
        properties[name] = _schema(hints.get(name), owner)
        if name in about:
            properties[name]["description"] = about[name]
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            properties[name]["default"] = json.loads(json.dumps(parameter.default))
    if unknown := about.keys() - parameters.keys():
        raise ValueError(f"tool {function.__name__}: its docstring describes {min(unknown)!r}, not a parameter")
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(function.__name__, description, schema, function, "state" in parameters)


def from_mcp(server: str | Sequence[str], *, kind: str = "recorded", start_s: float = 30.0) -> tuple[Tool, ...]:
    """Connects to an MCP server and returns its tools. All episodes of the process share the connection.

    Args:
      server: the URL of a server, or the command of one that this process starts and talks to through pipes.
      kind: "replayed" for a server on this machine whose results are a function of a call's arguments alone; else "recorded".
      start_s: seconds for the connection.

    Raises ValueError without the package `mcp`, and for a server that cannot be reached.
    """
    connection = mcp_client.Connection(server, start_s)
    return tuple(
        Tool(listed.name, listed.description, listed.schema, connection.function(listed.name), kind=kind)
        for listed in connection.tools
    )


def check_protocol(protocol: str, turns: int) -> None:
    """Raises ValueError for an unknown protocol, or less than one turn."""
    if protocol not in PROTOCOLS or turns < 1:
        raise ValueError(
            f"protocol={protocol!r}, turns={turns}; choose one of {', '.join(PROTOCOLS)}, and at least 1 turn"
        )


def instruction(protocol: str, given: str | None, *, tools: str, text: str) -> str:
    """Returns the system prompt that is given, which may be empty; by default (None) the one for the protocol: `tools` or `text`."""
    if given is not None:
        return given
    return tools if protocol == "tools" else text


def step(protocol: str, number: int, text: str, name: str, arguments: Mapping, result: str) -> list[dict]:
    """Returns two messages of a demonstration: the call `number` of a tool, or the `text` of the same command, and its result."""
    if protocol == "text":
        return [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    answer = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, answer]


async def results(
    tools: Sequence[Tool],
    calls: Sequence[Mapping],
    state: Any = None,
    limits: Limits = DEFAULT_LIMITS,
    num_before: int = 0,
) -> list[dict]:
    """Runs the tool calls of an assistant message; returns one tool message for each, in order, also for those that fail.

    Coroutines run at the same time, so tools that change `state` should be plain functions. `num_before` is the number of calls that
    earlier messages of the episode had. Raises TimeoutError for a call that exceeds `limits.call_s`, unless its kind is "recorded".
    """
    found = {tool.name: tool for tool in tools}
    assert len(found) == len(tools), "two tools have one name"
    room = len(calls) if limits.max_calls is None else max(limits.max_calls - num_before, 0)
    over = f"error: the limit of {limits.max_calls} tool calls is reached"
    running = [_content(found, call, state, limits) for call in calls[:room]]
    contents = [*await asyncio.gather(*running), *[over] * len(calls[room:])]
    messages = []
    for call, content in zip(calls, contents, strict=True):
        # half a surrogate pair is not text
        shown = shorten(content, limits.max_chars).encode("utf-8", "replace").decode()
        name = call["function"]["name"]
        messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": shown})
    return messages


def shorten(text: str, max_chars: int) -> str:
    """Returns `text`, or its beginning and its end with a note in between, `max_chars` characters in all."""
    if len(text) <= max_chars:
        return text
    note = f"\n[... {len(text) - max_chars} characters or more are left out ...]\n"
    if (room := max_chars - len(note)) <= 0:
        return text[:max_chars]
    return text[: room - room // 2] + note + text[len(text) - room // 2 :]


async def _content(tools: Mapping[str, Tool], call: Mapping, state: Any, limits: Limits) -> str:
    """Returns the result of a call as text, or the text of an error."""
    name = call["function"]["name"]
    if (tool := tools.get(name)) is None:
        return f"error: tool {name!r} does not exist; call one of {', '.join(tools)}"[:MAX_ERROR_CHARS]
    try:
        arguments = call["function"]["arguments"] or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        if wrong := _mismatch(arguments, {"additionalProperties": False} | dict(tool.parameters), "arguments"):
            return f"error: {wrong}"[:MAX_ERROR_CHARS]
        result = tool.call(**arguments, **({"state": state} if tool.takes_state else {}))
    except Exception as error:  # a tool's own code may raise anything, and the model chose the arguments
        return _error(error)
    try:
        if isinstance(result, Awaitable):
            async with asyncio.timeout(limits.call_s) as clock:
                try:
                    result = await result
                except Exception as error:  # as above
                    if clock.expired():
                        raise TimeoutError from error
                    return _error(error)
        return result if isinstance(result, str) else json.dumps(result, sort_keys=True)
    except TimeoutError:
        if tool.kind != "recorded":
            raise TimeoutError(f"tool {name} took more than {limits.call_s} s, its limit") from None
        return f"error: no result came within {limits.call_s} s"
    except (TypeError, ValueError, RecursionError) as error:  # json.dumps
        return _error(error)


def _error(error: Exception) -> str:
    return f"error: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


def _described(text: str) -> tuple[str, dict[str, str]]:
    """Returns (description, {parameter: description}) of a docstring in Google's style."""
    begin, about = _SECTION.search(text), {}
    description = (text[: begin.start()] if begin else text).strip()
    while begin:
        end = _SECTION.search(text, begin.end())
        if begin[1] in ("Args", "Arguments", "Parameters"):
            indent, name = None, ""
            for line in text[begin.end() : end.start() if end else None].splitlines():
                found = _PARAMETER.match(line)
                if found and indent in (None, found[1]):
                    indent, name, about[found[2]] = found[1], found[2], found[3]
                elif name and line.strip():
                    about[name] = f"{about[name]} {line.strip()}".strip()
        begin = end
    return description, about


def _schema(hint: Any, owner: str) -> dict:
    """Returns the JSON schema of a type. One that may be None has "nullable", as chat templates know it from transformers."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _schema(arguments[0], owner)
    if origin in (typing.Union, types.UnionType):
        kinds = [_schema(argument, owner) for argument in arguments if argument is not types.NoneType]
        merged = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return merged | ({"nullable": True} if len(kinds) < len(arguments) else {})
    if origin is typing.Literal and len({type(value) for value in arguments} & {str, int, bool}) == 1:
        return {"type": _TYPES[type(arguments[0])], "enum": list(arguments)}
    if (name := _TYPES.get(origin or hint)) is None:
        raise ValueError(f"{owner} has the type {hint!r}; annotate it with one of {_KINDS}, a union, or a Literal")
    if origin is list and arguments:
        return {"type": name, "items": _schema(arguments[0], owner)}
    if origin is dict and arguments:
        if arguments[0] is not str:
            raise ValueError(f"{owner} has the type {hint!r}, but keys in JSON are texts; use dict[str, ...]")
        return {"type": name, "additionalProperties": _schema(arguments[1], owner)}
    return {"type": name}


def _mismatch(value: Any, schema: Mapping, owner: str) -> str:
    """Returns the reason for which a JSON value does not fit a schema, or "". Unknown keywords, as of MCP servers, are not checked."""
    if value is None and schema.get("nullable"):
        return ""
    if kinds := schema.get("anyOf"):
        fits = any(not _mismatch(value, kind, owner) for kind in kinds)
        return "" if fits else f"{owner}: this has none of the types allowed"
    allowed = schema.get("type", ())
    if allowed and not any(_is(value, name) for name in ([allowed] if isinstance(allowed, str) else allowed)):
        return f"{owner}: this must be of type {allowed}"
    if "enum" in schema and (type(value), value) not in [(type(choice), choice) for choice in schema["enum"]]:
        return f"{owner}: this must be one of {json.dumps(schema['enum'])}"
    parts = []
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        parts = [(item, schema["items"], f"{owner}[{number}]") for number, item in enumerate(value)]
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{owner}: {missing[0]!r} is missing"
        if others is False and (unknown := [name for name in value if name not in known]):
            return f"{owner}: {unknown[0]!r} is unknown; use {', '.join(known) or 'none'}"
        fallback = others if isinstance(others, Mapping) else {}
        parts = [(item, known.get(name, fallback), f"{owner}.{name}") for name, item in value.items()]
    return next(filter(None, (_mismatch(*part) for part in parts)), "")


def _is(value: Any, name: str) -> bool:
    if name == "null":
        return value is None
    kinds = tuple(kind for kind, known in _TYPES.items() if known == name) + ((int,) if name == "number" else ())
    return isinstance(value, kinds or object) and (not isinstance(value, bool) or name in ("boolean",))
