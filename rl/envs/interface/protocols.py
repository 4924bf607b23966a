"""How a model uses the tools of an environment: by tool calls of its chat template, or by texts that tiny models can learn."""

import json
from collections.abc import Mapping

PROTOCOLS = ("tools", "text")


def check(protocol: str, turns: int) -> None:
    """Raises ValueError for an unknown protocol, or less than one turn."""
    if protocol not in PROTOCOLS or turns < 1:
        raise ValueError(
            f"protocol={protocol!r}, turns={turns}; choose one of {', '.join(PROTOCOLS)}, and at least 1 turn"
        )


def system(protocol: str, prompt: str | None, *, tools: str, text: str) -> tuple[dict, ...]:
    """Returns the system message `prompt`, or none if it is empty; by default (None) the one for the protocol: `tools` or `text`."""
    if prompt is None:
        prompt = tools if protocol == "tools" else text
    return ({"role": "system", "content": prompt},) * bool(prompt)


def step(protocol: str, number: int, text: str, name: str, arguments: Mapping, result: str) -> list[dict]:
    """Returns two messages of a demonstration: the call `number` of a tool, or the `text` of the same command, and its result."""
    if protocol == "text":
        return [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    answer = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, answer]
