"""Schemas are those of another library, errors are messages, results keep their order, and the clock decides nothing in silence."""

import asyncio
import collections
import doctest
import inspect
import json
import time
from typing import Annotated, Any, Literal, Optional

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.envs.interface import episode, tools


def call(name, arguments, id="1"):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def contents(functions, *calls, **options):
    given = [tools.of(function) for function in functions]
    return [message["content"] for message in asyncio.run(tools.results(given, calls, **options))]


def everything(
    a: int,
    b: str,
    c: list[list[float]],
    d: dict[str, list[int]],
    e: Literal["x", "y"],
    f: bool = False,
    g: Optional[int] = None,  # noqa: UP045 (both spellings are written)
    h: str | None = None,
    i: int | str = 3,
    j: Annotated[int, "a note"] = 2,
    k: list = [],  # noqa: B006
    l: Literal[1, 2] = 1,
    *,
    state: Any,
):
    """Does everything.

    More of it.

    Args:
      a: a number,
        continued here: with a colon.
      b (str): a text.
      g: maybe.

    Returns:
      a: not a parameter's line.
    """
    return json.dumps([a, b, c, d, e, f, g, h, i, j, k, l, state])


def plain(schema):
    """Rewrites pydantic's schema of a parameter in the form of `tools`: no titles, and "nullable"."""
    schema = {name: value for name, value in schema.items() if name not in ("title", "const")}
    if kinds := schema.get("anyOf"):
        some = [plain(kind) for kind in kinds if kind != {"type": "null"}]
        schema.pop("anyOf")
        schema |= some[0] if len(some) == 1 else {"anyOf": some}
        if len(some) < len(kinds):
            schema["nullable"] = True
    if schema.get("default", 0) is None:
        schema.pop("default")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            schema[name] = plain(schema[name])
    if schema.get("items") == {}:
        schema.pop("items")
    return schema


def test_documented_example_runs():
    assert doctest.testmod(tools) == doctest.TestResults(failed=0, attempted=3)


def test_schemas_are_pydantics():
    tool = tools.of(everything)
    fields = {
        name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(everything).parameters.items()
        if name != "state"
    }
    expected = pydantic.create_model("Arguments", **fields).model_json_schema()
    found = {name: dict(schema) for name, schema in tool.parameters["properties"].items()}
    described = {name: schema.pop("description") for name, schema in found.items() if "description" in schema}
    assert found == {name: plain(schema) for name, schema in expected["properties"].items()}
    assert tool.parameters["required"] == expected["required"]
    assert described == {"a": "a number, continued here: with a colon.", "b": "a text.", "g": "maybe."}
    assert tool.description == "Does everything.\n\nMore of it." and tool.takes_state


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(["x", "y", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2),
    max_leaves=5,
)
HINTS = (
    int,
    float,
    str,
    bool,
    list[list[float]],
    dict[str, list[int]],
    Literal["x", "y"],
    int | None,
    list[bool] | str,
)


@pytest.mark.parametrize("hint", HINTS, ids=str)
@settings(max_examples=40)
@given(value=json_values)
def test_arguments_fit_where_pydantic_says_so(hint, value):
    def function(x):
        return "ran"

    function.__annotations__ = {"x": hint}
    try:
        pydantic.TypeAdapter(hint).validate_python(value, strict=True)
        fits = True
    except pydantic.ValidationError:
        fits = False
    # JSON schema counts no 1.0 among the integers here, as Python's json reads it as a float: pydantic agrees.
    assert (contents([function], call("function", {"x": value})) == ["ran"]) == fits


@pytest.mark.parametrize("hint", [set, tuple[int], dict[int, int], bytes, Literal[1, "x"], list[set], None, Any])
def test_types_that_json_cannot_express_are_refused(hint):
    def function(x):
        return x

    function.__annotations__ = {} if hint is None else {"x": hint}
    with pytest.raises(
        ValueError, match=r"tool function: parameter 'x' has the type .*; (annotate|but|use)|keys in JSON"
    ):
        tools.of(function)


def test_parameters_without_names_and_wrong_docstrings_are_refused():
    def several(*numbers: int):
        return numbers

    def renamed(x: int):
        """Does it.

        Args:
          y: the old name.
        """
        return x

    with pytest.raises(ValueError, match="'numbers' is positional-only or variadic"):
        tools.of(several)
    with pytest.raises(ValueError, match="describes 'y'"):
        tools.of(renamed)


def add(a: int, b: int = 1) -> int:
    if a == 7:
        raise RuntimeError("seven " * 200)
    return a + b


def odd(kind: str):
    return {"set": {1}, "nan": float("nan"), "surrogate": "\ud800", "none": None, "keys": {1: 2, "a": 3}}[kind]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (call("add", {"a": 1}), "2"),
        (call("add", ""), "error: arguments: 'a' is missing"),
        (call("add", {"a": 1, "c": 2}), "error: arguments: 'c' is unknown; use a, b"),
        (call("add", {"a": "1"}), "error: arguments.a: this must be of type integer"),
        (call("add", {"a": True}), "error: arguments.a: this must be of type integer"),
        (call("sub", {"a": 1}), "error: tool 'sub' does not exist; call one of add, odd"),
        (call("add", "[1]"), "error: arguments: this must be of type object"),
        (call("add", "{"), "error: JSONDecodeError: "),
        (call("add", "[" * 100000), "error: RecursionError: "),
        (call("add", {"a": 7}), "error: RuntimeError: seven seven"),
        (call("odd", {"kind": "set"}), "error: TypeError: "),
        (call("odd", {"kind": "keys"}), "error: TypeError: "),
        (call("odd", {"kind": "nan"}), "NaN"),
        (call("odd", {"kind": "none"}), "null"),
        (call("odd", {"kind": "surrogate"}), "?"),
        (call("odd", {"kind": "missing"}), "error: KeyError: 'missing'"),
    ],
)
def test_each_fault_is_a_message(asked, answer):
    (found,) = contents([add, odd], asked)
    assert found.startswith(answer) and len(found) <= tools.MAX_ERROR_CHARS
    found.encode()


def test_calls_of_one_message_run_together_and_answer_in_order():
    running, seen = 0, []

    async def wait(number: int) -> int:
        nonlocal running
        running += 1
        while running < 3:  # ends only if all three run at the same time
            await asyncio.sleep(0)
        await asyncio.sleep(0.01 * (3 - number))
        seen.append(number)
        return number

    calls = [call("wait", {"number": number}, id=f"c{number}") for number in range(3)]
    messages = asyncio.run(tools.results([tools.of(wait)], calls))
    assert seen == [2, 1, 0]
    assert [(m["tool_call_id"], m["content"]) for m in messages] == [("c0", "0"), ("c1", "1"), ("c2", "2")]


def test_plain_functions_see_the_state_in_order():
    def push(value: int, state: list):
        state.append(value)
        return list(state)

    found = contents(
        [push], *(call("push", {"value": n}) for n in (1, 2)), call("push", {"value": 1, "state": []}), state=[0]
    )
    assert found[:2] == ["[0, 1]", "[0, 1, 2]"] and "unknown" in found[2]


def test_time_out():
    async def sleeps() -> str:
        await asyncio.sleep(60)
        return ""

    async def raises() -> str:
        raise TimeoutError("of its own")

    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise KeyError("cleanup") from None
        return ""

    limits = tools.Limits(call_s=0.02)
    assert contents([raises], call("raises", {}), limits=limits) == ["error: TimeoutError: of its own"]
    for function in (sleeps, stubborn):
        tool = tools.of(function)
        with pytest.raises(TimeoutError, match="more than 0.02 s, its limit"):
            asyncio.run(tools.results([tool], [call(tool.name, {})], None, limits))
    recorded = tools.dataclasses.replace(tools.of(sleeps), kind="recorded")
    (message,) = asyncio.run(tools.results([recorded], [call("sleeps", {})], None, limits))
    assert message["content"] == "error: no result came within 0.02 s"


@given(text=st.text(max_size=300), size=st.integers(1, 120))
def test_long_results_keep_both_ends(text, size):
    found = tools.shorten(text, size)
    assert len(found) <= size and (found == text) == (len(text) <= size)
    if len(text) > size > 70:
        head, _, tail = found.partition("\n[... ")
        assert text.startswith(head) and text.endswith(tail.partition(" ...]\n")[2]) and len(found) == size


def test_an_episode_has_a_limit_of_calls():
    asked, closed = [], []

    class Model:
        async def chat(self, messages, *, tools=(), **_):
            asked.append(len(messages))
            calls = [call("add", {"a": n}, id=str(n)) for n in range(2)] if len(asked) < 4 else None
            message = {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}
            return episode.Reply(message, "stop", 1, 1)

    class Task:
        messages = ({"role": "user", "content": "?"},)

    class State:
        def close(self):
            closed.append(True)

    limits = tools.Limits(max_calls=3)

    def score(task, messages, state):
        return collections.Counter(m["content"] for m in messages if m["role"] == "tool")

    begin = lambda task: State()  # noqa: E731
    play = episode.conversation(score=score, tools=[tools.of(add)], limits=limits, initial_state=begin)
    begun = time.monotonic()
    assert asyncio.run(play(Task, Model())) == {"1": 2, "2": 1, "error: the limit of 3 tool calls is reached": 3}
    assert asked == [1, 4, 7, 10] and closed == [True] and time.monotonic() - begun < 5
    with pytest.raises(ValueError, match="several tools have the name 'add'"):
        episode.conversation(score=score, tools=[tools.of(add), tools.of(add)])
