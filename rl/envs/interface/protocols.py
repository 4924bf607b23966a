"""How a model uses the tools of an environment: by tool calls of its chat template, or by texts that tiny models can learn."""

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
