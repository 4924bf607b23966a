"""Parsing completions in three tool-call formats (harmony has its own file), whole and growing; and templates of three families.

The templates in tests/support/templates have the structure of the families' own (where turns open and close, how calls and results are spelled),
written for these tests.
"""

import codecs
import dataclasses
import itertools
import json
import random
import re

import pytest

from models.text import parsers
from models.text import tokenizer as tokenizer_lib
from tests.support.conversations import CALL, OPENING, REPLY, RESULTS, calls_of, family_tokenizer

ADD = {"a": 1, "note": "<é>\n"}
PROPERTIES = {"a": {"type": "integer"}, "zip": {"type": "string"}}
ADDER = {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": ADDER}]
CHATML_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "<é>\\n"}}\n</tool_call>'
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>note</arg_key>\n<arg_value><é>\n</arg_value>\n</tool_call>"
)
TEXT_CALL = '<tool_call>\n{"name": "f", "arguments": {"text": "see </tool_call> and <tool_call>,\n \\"{here}\\""}}\n</tool_call>'
GLM_TEXT_CALL = "<tool_call>f<arg_key>text</arg_key><arg_value>see </tool_call>, <tool_call></arg_value></tool_call>"
SEEN = 'see </tool_call> and <tool_call>,\n "{here}"'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1, "note": "<é>\\n"}}'


# ---- whole texts -----------------------------------------------------------------------------------------------------


def hermes(*calls):
    return "<tool_call>" + "\n".join(calls) + "</tool_call>"


def assert_never_taken_back(text, call_format, **options):
    """Each result for a text that grows begins with those for its beginnings."""
    states = [parsers.parse(text[:n], call_format, tools=TOOLS, final=False, **options) for n in range(len(text) + 1)]
    states.append(parsers.parse(text, call_format, tools=TOOLS, **options))
    for before, after in itertools.pairwise(states):
        assert (after.reasoning or "").startswith(before.reasoning or ""), text
        assert after.content.startswith(before.content), text
        assert after.calls[: len(before.calls)] == before.calls, text


@pytest.mark.parametrize(
    ("call_format", "text", "content", "calls"),
    [
        ("chatml", f"Now:\n{CHATML_CALL}\n{CHATML_CALL}", "Now:", [("add", ADD)] * 2),
        ("chatml", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("chatml", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 2}"}</tool_call>', "", [("f", {"x": 2})]),
        ("chatml", f"Now:\n{TEXT_CALL}{CHATML_CALL}", "Now:", [("f", {"text": SEEN}), ("add", ADD)]),
        ("chatml", f"As <tool_call>: {CHATML_CALL}", "As <tool_call>: ", [("add", ADD)]),
        ("chatml", f"As <tool_call>{{x}}</tool_call>\n{CHATML_CALL}", "As <tool_call>{x}</tool_call>", [("add", ADD)]),
        ("chatml", hermes('{"parameters": {"x": 2}, "name": "f"}'), "", [("f", {"x": 2})]),
        ("chatml", hermes('{"name": "f", "arguments": null, "parameters": {"x": 2}}'), "", [("f", {"x": 2})]),
        ("chatml", hermes('{"name": "f", "arguments": null}'), "", [("f", {})]),
        ("chatml", hermes('{"name": "f", "arguments": ""}'), "", [("f", {})]),
        ("chatml", hermes('{"name": "f", "arguments": "null"}'), "", [("f", {})]),
        ("chatml", hermes('{"name": "f", "arguments": {"x": "a\n\tb\x01"}}'), "", [("f", {"x": "a\n\tb\x01"})]),
        ("chatml", hermes('{"name": "f", "arguments": "{\\"x\\": [NaN]}"}'), "", [("f", {"x": [None]})]),
        ("chatml", hermes('{"name": "f", "arguments": {"x": [-Infinity, -1e400]}}'), "", [("f", {"x": [None, None]})]),
        (
            "chatml",
            hermes('{"name": "f", "arguments": {"x": 12345678901234567890}}'),
            "",
            [("f", {"x": 12345678901234567890})],
        ),
        ("chatml", hermes('{"name": "f", "arguments": {"x": "\\ud83d"}}'), "", [("f", {"x": "\ud83d"})]),
        ("chatml", hermes('{"function": {"name": "f", "arguments": {}}, "type": "function"}'), "", [("f", {})]),
        ("chatml", hermes('{"name": "f"}', ' {"name": "g"}\n'), "", [("f", {}), ("g", {})]),
        ("chatml", hermes('[{"name": "f"}, {"name": "g"}]'), "", [("f", {}), ("g", {})]),
        (
            "glm",
            f"{GLM_TEXT_CALL} and{GLM_CALL}",
            " and",
            [("f", {"text": "see </tool_call>, <tool_call>"}), ("add", ADD)],
        ),
        ("glm", f"Now:\n{GLM_CALL}\n{GLM_CALL}", "Now:", [("add", ADD)] * 2),
        ("glm", "<tool_call>f</tool_call>", "", [("f", {})]),
        ("llama", LLAMA_CALL, "", [("add", ADD)]),
        ("llama", f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", "", [("add", ADD)] * 2),
        ("llama", '{"name": "f", "parameters": null}', "", [("f", {})]),
        ("llama", '{"name": "f", "parameters": {"x": "a\nb", "y": NaN}}', "", [("f", {"x": "a\nb", "y": None})]),
        ("llama", f"{LLAMA_CALL}\n", "", [("add", ADD)]),
        ("llama", LLAMA_CALL.replace("parameters", "arguments"), "", [("add", ADD)]),
    ],
)
def test_calls(call_format, text, content, calls):
    parsed = parsers.parse(text, call_format)
    assert (parsed.reasoning, parsed.content, calls_of(parsed)) == (None, content, calls)
    for call in parsed.calls:  # as a strict client reads it
        call.arguments.encode()
        json.loads(call.arguments, parse_constant=pytest.fail)
    assert parsers.parse(text, call_format, read_calls=False).content == text
    assert_never_taken_back(text, call_format, in_reasoning=False)


def test_glm_values_follow_the_schema():
    text = (
        "<tool_call>add<arg_key>zip</arg_key><arg_value>0123</arg_value><arg_key>a</arg_key><arg_value>5</arg_value>"
        "<arg_key>list</arg_key><arg_value>[1, null]</arg_value><arg_key>n</arg_key><arg_value>null</arg_value>"
        "<arg_key>free</arg_key><arg_value>two words</arg_value></tool_call>"
    )
    ((_, arguments),) = calls_of(parsers.parse(text, "glm", tools=TOOLS))
    assert arguments == {"zip": "0123", "a": 5, "list": [1, None], "n": None, "free": "two words"}


DEEP = "[" * 20_000
MALFORMED = [
    ("chatml", f"<tool_call>{DEEP}</tool_call>"),
    ("chatml", "<tool_call>{'name': 'f'}</tool_call>"),
    ("chatml", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("chatml", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("chatml", '<tool_call>{"name": "f"}'),
    ("chatml", '<tool_call>{"name": "f"} or so</tool_call>'),
    ("chatml", '<tool_call>{"name": "f"}{"x": 1}</tool_call>'),
    ("chatml", '<tool_call>{"name": "\\udc00"}</tool_call>'),
    ("chatml", f'<tool_call>{{"name": "f", "arguments": {{"x": {"1" * 5000}}}}}</tool_call>'),
    ("chatml", "<tool_call>[]</tool_call>"),
    ("chatml", "</tool_call><tool_call>"),
    ("glm", "<tool_call></tool_call>"),
    ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
    ("glm", '<tool_call>{"name": "f"}</tool_call>'),
    # Hours, if the end of the text were looked for from each mark.
    pytest.param("glm", f"<tool_call>f{'<arg_key>' * 10**6}</tool_call>", id="keys"),
    pytest.param("glm", f"<tool_call>f<arg_key>{'</arg_key><arg_value>' * 10**6}</tool_call>", id="values"),
    pytest.param("llama", f"{LLAMA_CALL * 10**5}x", id="calls", marks=pytest.mark.slow),
    pytest.param("chatml", '<tool_call>{"a": ["' * 10**5 + "</tool_call>", id="openings"),
    pytest.param(
        "glm",
        "<tool_call>f<arg_key>a</arg_key><arg_value></tool_call>" * 10**4,
        id="open values",
        marks=pytest.mark.slow,
    ),
    pytest.param("glm", "<tool_call>" * 10**5, id="opening marks"),
    ("llama", '{"name": "f"}'),
    ("llama", LLAMA_CALL + " and more"),
    ("llama", LLAMA_CALL[:-1]),
    ("llama", '{"a": 1}'),
    ("llama", "{" + DEEP),
]


@pytest.mark.parametrize(("call_format", "text"), MALFORMED)
def test_malformed_calls_stay_in_the_content(call_format, text):
    assert parsers.parse(text, call_format, tools=TOOLS) == parsers.Parsed(None, text, ())


@pytest.mark.parametrize("tools", [[], [{}], [{"function": 5}], [{"function": {"name": 1}}], ["x"], [{"name": "add"}]])
def test_malformed_tools_are_ignored(tools):
    assert calls_of(parsers.parse(GLM_CALL, "glm", tools=tools)) == [("add", ADD)]


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", None, "hm", "yes"),
        ("\n<think>hm</think>\nyes", False, "hm", "yes"),
        ("<think></think>\nyes", False, "", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("hm\n</think>\n\nyes", None, "hm", "yes"),
        ("hm\n</think>\n\nyes", False, None, "hm\n</think>\n\nyes"),
        ("cut off", True, "cut off", ""),
        ("cut off", None, None, "cut off"),
        ("<think>cut off", None, "cut off", ""),
        ("yes <think>", None, None, "yes <think>"),
    ],
)
def test_reasoning(text, in_reasoning, reasoning, content):
    parsed = parsers.parse(text, "chatml", in_reasoning=in_reasoning)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    if in_reasoning is None and not text.startswith("<think>"):  # nothing in a growing text opened a block
        assert parsers.parse(text, "chatml", final=False) == parsers.Parsed(None, text, ())


# ---- growing texts ---------------------------------------------------------------------------------------------------


def pieces(rng):
    """A text of fragments that the parsers look for, whole, cut and mixed."""
    parts = [
        CHATML_CALL,
        TEXT_CALL,
        GLM_CALL,
        GLM_TEXT_CALL,
        LLAMA_CALL,
        "<think>",
        "</think>",
        "\n",
        parsers.OPEN,
        parsers.CLOSE,
        "<|python_tag|>",
    ]
    parts += ["hé", " ", "{", "}", "<", "x;", "<arg_key>"]
    parts += ["<|channel|>final<|message|>", "<|channel|>analysis<|message|>", " to=functions.add", *parsers.STRUCTURE]
    text = ""
    for _ in range(rng.randrange(8)):
        part = rng.choice(parts)
        text += part[: rng.randrange(len(part) + 1)] if rng.random() < 0.3 else part
    return text


@pytest.mark.parametrize(
    ("text", "kept"),
    [("a<", "a"), ("a<b", "a"), ("a<b>", "a<b>"), ("a<bc", "a"), ("<x", "<x"), ("a<<bc", "a<"), ("", "")],
)
def test_a_tail_that_may_become_a_marker_is_removed(text, kept):
    assert parsers.without_partial(text, ["<b>", "<bcd"]) == kept and parsers.without_partial(text, []) == text


@pytest.mark.parametrize("call_format", parsers.FORMATS)
def test_streamed_text_is_never_taken_back(call_format):
    rng = random.Random(call_format)
    for _ in range(400):
        text, inside, read = pieces(rng), rng.random() < 0.3, rng.random() < 0.8
        assert_never_taken_back(text, call_format, in_reasoning=inside, read_calls=read)


# ---- render, parse, bridge -------------------------------------------------------------------------------------------

FAMILIES = {
    "chatml": tokenizer_lib.byte_chatml(),
    "glm": family_tokenizer(
        "glm",
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "llama": family_tokenizer(
        "llama",
        ["<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
        + ["<|python_tag|>"],
        ["<|end_of_text|>"],  # as of a base checkpoint: the template alone has the others
    ),
}
MORE = [{"role": "user", "content": "and <|im_end|> <|eot_id|> <|user|> now?"}]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_in_the_template(name):
    assert FAMILIES[name].call_format == name


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("turn", "after"), [(REPLY, MORE), (CALL, RESULTS), (CALL, RESULTS + MORE)])
def test_a_bridge_is_the_rendering_when_the_completion_was_canonical(name, turn, after):
    tok = FAMILIES[name]
    prompt = tok.render(OPENING, add_generation_prompt=True).token_ids
    whole = tok.render([*OPENING, turn, *after], add_generation_prompt=True).token_ids
    assert whole[: len(prompt)] == prompt
    end = next(at for at in range(len(prompt), len(whole)) if whole[at] in tok.stop_ids)
    completion = whole[len(prompt) : end + 1]
    assert tok.bridge(prompt, completion, after) == whole
    assert tok.bridge(prompt, completion[:-1], after) == whole  # cut off by length: the turn is closed for it
    parsed = tok.parse([*completion, *tok.encode("after the end")], tools=TOOLS)
    assert parsed["content"] == turn["content"]
    made = [json.loads(call["function"]["arguments"]) for call in parsed.get("tool_calls", [])]
    assert made == [call["function"]["arguments"] for call in turn.get("tool_calls", [])]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bridge_keeps_sampled_ids_whatever_they_are(name):
    tok, rng = FAMILIES[name], random.Random(name)
    first_stop = tok.render([*OPENING, REPLY, *MORE], add_generation_prompt=True).token_ids
    prompt = tok.render(OPENING, add_generation_prompt=True).token_ids
    closing = next(id for id in first_stop[len(prompt) :] if id in tok.stop_ids)
    num_none = 0
    for _ in range(200):
        sampled = [rng.randrange(tok.vocab_size) for _ in range(rng.randrange(12))]
        sampled += rng.choice([[], [closing], [rng.choice(tok.stop_ids)]])
        bridged = tok.bridge(prompt, sampled, MORE)
        if bridged is None:  # another stop id than the one that the template closes a turn with
            assert sampled[-1] in tok.stop_ids and sampled[-1] != closing
            num_none += 1
            continue
        assert bridged[: len(prompt) + len(sampled)] == prompt + sampled
        tail = bridged[len(prompt) + len(sampled) :]
        assert tok.decode(tail).count("now?") == 1
        own = [id for id in tail if id in tok.special_ids]  # no text of the user's opened or closed a turn
        base = tok.bridge(prompt, sampled, [{"role": "user", "content": "plain"}])
        assert own == [id for id in base[len(prompt) + len(sampled) :] if id in tok.special_ids]
    assert 0 < num_none < 100


def test_a_bridge_that_cannot_be_is_none():
    tok = FAMILIES["chatml"]
    joined = dataclasses.replace(tok, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert joined.bridge([1], [2], MORE) is None  # nothing parts the turns: text would be cut in the middle
    silent = dataclasses.replace(tok, chat_template="{{ messages[0].content }}<|im_end|>")
    assert silent.bridge([1], [2], MORE) is None  # the completion is not rendered at all
    with pytest.raises(ValueError, match="cannot render|rejects"):
        tok.bridge([1], [2], [{"role": "wizard", "content": "x"}])


def character_starts(data):
    """Returns True for each byte at which a character begins, or a part of one that becomes U+FFFD."""
    starts = [byte & 0xC0 != 0x80 for byte in data]

    def note(error):
        starts[error.start : error.end] = [True] + [False] * (error.end - error.start - 1)
        return "\ufffd", error.end

    codecs.register_error("note", note)
    data.decode("utf-8", "note")
    return starts


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_stream_is_decode_in_pieces(name):
    tok, rng = FAMILIES[name], random.Random(name)
    for _ in range(300):
        text = "".join(rng.choice("aé漢🙂 \n") for _ in range(rng.randrange(8))).encode()
        ids = [*text] if rng.random() < 0.5 else [rng.randrange(tok.vocab_size + 5) for _ in range(12)]
        stream, at, put = tok.text_stream(), 0, ""
        while at < len(ids):
            size = rng.randrange(1, 4)
            put += stream.push(ids[at : at + size])
            at += size
        text = tok.decode(ids)
        assert put + stream.push([], final=True) == text
        spelled = [b"" if id in tok.special_ids else tok.token_bytes(id) for id in ids]
        starts = character_starts(b"".join(spelled))
        if re.search(b"\xed[\xa0-\xbf]", b"".join(spelled)):  # half a surrogate pair, which Python's decoder keeps open
            continue
        for n, offset in enumerate(tok.text_stream().offsets(ids)):
            assert not spelled[n] or offset == sum(starts[: sum(map(len, spelled[:n])) + 1]) - 1
