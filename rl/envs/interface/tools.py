"""Tools: Python functions that the model may call, with schemas from their signatures.

`results` runs the calls of one message and returns a message for each. A call of an unknown tool, arguments that do not fit, and an
exception of the function are errors that the model reads; none ends the episode.
"""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
MAX_ERROR_CHARS = 500


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    call: Callable[..., Any]  # (**arguments) -> result, which is shown as text; may be a coroutine function
    takes_state: bool = False  # `call` has a further keyword argument `state`, which the model does not see

    @property
    def schema(self) -> dict:
        """The tool in the form of OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def of(function: Callable[..., Any]) -> Tool:
    """Returns the tool of a function with annotated parameters. Its docstring is the description.

    A parameter named `state` gets the state of the episode. Raises ValueError for parameters that JSON cannot express.
    """
    properties, required, hints = {}, [], typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if name == "state":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {function.__name__}: parameter {name!r} has no name for the model; use plain ones")
        properties[name] = _type(hints.get(name), f"tool {function.__name__}: parameter {name!r}")
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(function.__name__, inspect.getdoc(function) or "", schema, function, "state" in parameters)


def _type(hint: Any, owner: str) -> dict:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType) and types.NoneType in arguments and len(arguments) == 2:
        return _type(next(argument for argument in arguments if argument is not types.NoneType), owner)
    if origin is typing.Literal:
        return {"type": _TYPES[type(arguments[0])], "enum": list(arguments)}
    if (name := _TYPES.get(origin or hint)) is None:
        kinds = ", ".join(kind.__name__ for kind in _TYPES)
        raise ValueError(f"{owner} has the type {hint!r}; annotate it with one of {kinds}, or a Literal")
    return {"type": name, "items": _type(arguments[0], owner)} if origin is list and arguments else {"type": name}


async def results(tools: Sequence[Tool], calls: Sequence[Mapping], state: Any = None) -> list[dict]:
    """Runs tool calls of an assistant message in order; returns one tool message for each, also for those that fail."""
    return [await _result(tools, call, state) for call in calls]


async def _result(tools: Sequence[Tool], call: Mapping, state: Any) -> dict:
    name = call["function"]["name"]
    message = {"role": "tool", "tool_call_id": call.get("id", ""), "name": name}
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        names = ", ".join(tool.name for tool in tools)
        return message | {"content": f"error: there is no tool {name!r}; call one of {names}"}
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are not an object")
        given = arguments | ({"state": state} if found.takes_state else {})
        inspect.signature(found.call).bind(**given)
        result = found.call(**given)
        if isinstance(result, Awaitable):
            result = await result
    except Exception as error:  # a tool's own code may raise anything, and the model chose the arguments
        return message | {"content": f"error: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
    return message | {"content": result if isinstance(result, str) else json.dumps(result, sort_keys=True)}
