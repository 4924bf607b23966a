"""The trained tokens of a conversation, and the files that conversations are read from."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from models.text import tokenizer as tokenizer_lib
from rl.learning.batch import conversations
from tests.support import conversations as templates

CHATML = tokenizer_lib.load("byte_chatml")
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "tool", "content": "four"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks."},
]


def trained_text(tree):
    """The runs of trained tokens, as text with specials."""
    (branch,) = tree.branches
    runs, last = [], -2
    for column in np.flatnonzero(branch.loss_mask):
        if column != last + 1:
            runs.append([])
        runs[-1].append(int(branch.tokens[column]))
        last = column
    return [CHATML.decode(run, skip_special=False) for run in runs]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("assistant",), ["4<|im_end|>", "It is 4.<|im_end|>"]),
        (("tool",), ["<|im_start|>user\n<tool_response>\nfour\n</tool_response><|im_end|>\n"]),
        (
            ("assistant", "user"),
            [
                "<|im_start|>user\n2 + 2?<|im_end|>\n",
                "4<|im_end|>",
                "It is 4.<|im_end|>",
                "<|im_start|>user\nThanks.<|im_end|>\n",
            ],
        ),
    ],
)
def test_the_loss_lies_on_the_messages_of_the_roles(roles, expected):
    """Several turns: every one of an assistant, its closing token included and its header not; others as a whole."""
    tree = conversations.tree(CHATML, TURNS, roles=roles, max_length=200)
    assert trained_text(tree) == expected
    (branch,) = tree.branches
    assert branch.loss_mask[-1] == 1 and len(tree.prompt) == 0  # nothing after the last trained token
    assert branch.tokens.tolist() == CHATML.render(TURNS).token_ids[: len(branch.tokens)]
    np.testing.assert_array_equal(branch.advantage, branch.loss_mask)
    assert branch.temperature == 1.0  # another one would divide the logits that are trained


def test_the_first_token_never_trains():
    (branch,) = conversations.tree(CHATML, TURNS, roles=("system", "user"), max_length=200).branches
    assert branch.loss_mask[0] == 0 and branch.loss_mask[1] == 1


def test_conversations_that_cannot_train_are_refused():
    with pytest.raises(ValueError, match="nor a prompt with its completion, only 'question', 'answer'; write"):
        conversations.parse({"question": "x", "answer": "y"})
    with pytest.raises(ValueError, match="messages of user, none of roles .'assistant'"):
        conversations.tree(CHATML, [{"role": "user", "content": "x"}], max_length=99)
    with pytest.raises(ValueError, match="has [0-9]+ tokens, more than inference.max_model_len = 20"):
        conversations.tree(CHATML, TURNS, max_length=20)
    (branch,) = conversations.tree(CHATML, TURNS, max_length=200).branches
    conversations.tree(CHATML, TURNS, max_length=len(branch.tokens))
    with pytest.raises(ValueError, match=f"has {len(branch.tokens)} tokens, more than"):
        conversations.tree(CHATML, TURNS, max_length=len(branch.tokens) - 1)


class Rewriting:
    """A template that spells a message otherwise once it is not the last, as those do that drop old reasoning."""

    def render(self, messages, tools=None):
        ids = [7] + [len(m["content"]) + (50 if i < len(messages) - 1 else 0) for i, m in enumerate(messages)]
        return tokenizer_lib.Rendered(ids, [False] * len(ids))


def test_a_template_that_rewrites_is_refused_for_other_roles():
    with pytest.raises(ValueError, match="renders message 1 differently when other messages follow"):
        conversations.tree(Rewriting(), TURNS, roles=("system",), max_length=99)


def test_tools_are_rendered(monkeypatch):
    seen = []

    class Recording:
        def render(self, messages, tools=None):
            seen.append(tools)
            return CHATML.render(messages)

    conversations.tree(Recording(), TURNS, tools=[{"name": "add"}], roles=("assistant", "tool"), max_length=200)
    assert len(seen) > 1 and all(tools == [{"name": "add"}] for tools in seen)


# ---- files -----------------------------------------------------------------------------------------------------------


def conversation(text):
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n", encoding="utf-8")
    return str(path)


def test_messages_as_other_tools_write_them(tmp_path):
    """OpenAI's: arguments as a string, nulls next to a call, parts of text; a call without `function`; and a separator of lines inside a text."""
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one\u2028two"}, {"type": "text", "text": "\x85"}]},
        {"role": "assistant", "content": None, "name": None, "tool_calls": [call, call["function"]]},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n", encoding="utf-8")
    ((user, assistant),) = (record["messages"] for record in conversations.read(str(path)))
    assert user["content"] == "one\u2028two\x85" and assistant["content"] == ""
    function = {"name": "add", "arguments": {"a": 1}}
    assert assistant["tool_calls"] == [call | {"function": function}, function] and "name" not in assistant
    for missing in ("absent.jsonl", "empty.jsonl"):
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(ValueError, match="(does not exist|has no rows)"):
            conversations.read(str(tmp_path / missing))


SHOTS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}, TURNS[1]]


@pytest.mark.parametrize(
    ("prompt", "completion", "roles", "expected"),
    [
        ("2 + 2?", "4", ("assistant",), ["4<|im_end|>"]),
        (SHOTS, [TURNS[2]], ("assistant",), ["4<|im_end|>"]),
        (SHOTS, "4", ("assistant", "user"), ["4<|im_end|>"]),
        (SHOTS, TURNS[2:5], ("assistant",), ["4<|im_end|>", "It is 4.<|im_end|>"]),
        ([TURNS[0], SHOTS[0]], TURNS[2:], ("assistant",), ["4<|im_end|>", "It is 4.<|im_end|>"]),
    ],
)
def test_the_completion_of_a_pair_trains_alone(tmp_path, prompt, completion, roles, expected):
    """TRL's form: texts, or lists of messages, whose answers in the prompt are examples that do not train."""
    row = {"prompt": prompt, "completion": completion, "messages": None, "source": "x"}
    (pair,) = conversations.read(write(tmp_path / "c.jsonl", [row]))
    tree = conversations.tree(CHATML, **pair, roles=roles, max_length=200)
    assert trained_text(tree) == expected
    for name, value in (("completion", None), ("completion", ""), ("prompt", []), ("prompt", 5), ("completion", {})):
        with pytest.raises(ValueError, match=f"conversation 1: the row's {name} is .*; make it a text, or a list"):
            conversations.read(write(tmp_path / "d.jsonl", [row | {name: value}]))[0]


def test_rows_in_sharegpts_form_are_read(tmp_path):
    turns = [
        ("system", "Be brief."),
        ("human", "2 + 2?"),
        ("gpt", "4"),
        ("tool", "four"),
        ("gpt", "It is 4."),
        ("human", "Thanks."),
    ]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns], "id": 5}
    assert conversations.read(write(tmp_path / "c.jsonl", [row]))[0]["messages"] == TURNS
    for wrong in ([{"value": "x"}], [], ["x"], [{"from": [5], "value": "x"}]):
        with pytest.raises(ValueError, match="conversation 1: (a message has no role|the row has no messages)"):
            conversations.read(write(tmp_path / "d.jsonl", [{"conversations": wrong}]))[0]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_fields_that_a_table_adds_do_not_train(tmp_path, suffix):
    """Each object of a column has the fields of all, with nulls; a null in JSON was written by its author."""
    cities = [{"city": "Oslo", "at": {"day": 1}}, {"place": "Rome"}]
    calls = [[{"function": {"name": "find", "arguments": arguments}}] for arguments in cities]
    tools = [[{"name": "f", "parameters": {"a": 1}}], [{"name": "g", "parameters": {"b": [2]}}]]
    ask = {"role": "user", "content": "Where?"}
    rows = [
        {"messages": [ask, {"role": "assistant", "content": None, "tool_calls": call}], "tools": tool}
        for call, tool in zip(calls, tools, strict=True)
    ]
    table, path = pa.Table.from_pylist(rows), tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write(table)
    assert table["messages"][0].as_py()[1]["tool_calls"][0]["function"]["arguments"]["place"] is None
    found = list(conversations.read(str(path)))
    assert [row["messages"][1]["tool_calls"] for row in found] == calls and [row["tools"] for row in found] == tools
    rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"day": None}
    (first, _) = conversations.read(write(tmp_path / "x.jsonl", rows))
    assert first["messages"][1]["tool_calls"] == rows[0]["messages"][1]["tool_calls"]


def test_a_template_in_which_no_answer_can_be_found_is_told_apart():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    plain = dataclasses.replace(CHATML, chat_template=template)
    with pytest.raises(ValueError, match="does not mark where an answer begins.*generation"):
        conversations.tree(plain, TURNS, max_length=200)


def test_conversations_are_read(tmp_path):
    good = write(tmp_path / "good.jsonl", [conversation("ab"), conversation("é") | {"tools": [{"name": "f"}]}])
    first, second = conversations.read(good)
    assert first == conversation("ab") | {"tools": None} and second["tools"] == [{"name": "f"}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not a JSON object"),
        ("[1]", "write {field: value}"),
        ({"messages": []}, "no messages"),
        ({"content": "x"}, "a message has no role"),
        (conversation("a") | {"tools": "f"}, "tools is not a list"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "a part of type 'image_url', and only text is supported; remove it",
        ),
        ({"role": "user", "content": {"text": "x"}}, "make it a string, or a list of text parts"),
        ({"role": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "make them a JSON object"),
        pytest.param(
            {"role": "x", "tool_calls": [{"name": "f", "arguments": "[" * 10**5}]},
            "make them a JSON object",
            id="nested",
        ),
        ({"role": "x", "tool_calls": [{"function": {}}]}, "a tool call has no name; set function.name"),
        ({"role": "x", "tool_calls": {}}, "tool_calls is not a list"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, words):
    if isinstance(line, dict):  # a message, unless it is a whole record
        line = json.dumps(line if "messages" in line else {"messages": [line]})
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps(conversation("ok")) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"(line|conversation) 2.*{words}"):
        list(conversations.read(str(path)))


# ---- chat templates of checkpoints -----------------------------------------------------------------------------------


def test_a_base_checkpoint_trains_on_answers_alone(tmp_path):
    """Its end token, <|endoftext|>, closes no turn of its template, which has no generation blocks: as in Qwen2.5's folders."""
    folder = templates.base_folder(tmp_path)
    base = tokenizer_lib.load(folder)
    assert base.eos_ids == (256,) and base.stop_ids == (256, 258)
    assert trained_text(conversations.tree(base, TURNS, max_length=200)) == ["4<|im_end|>", "It is 4.<|im_end|>"]
    base.save(tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"] == [256, 258]


def test_a_last_answer_that_the_template_leaves_open_is_closed():
    """GLM-4.5's next turn ends an answer. Its folders list these tokens; one of a base model may not."""
    names = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    glm = templates.family_tokenizer("glm", names, ["<|endoftext|>"])
    names = ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    llama = templates.family_tokenizer("llama", names, names[:1])
    llama_base = templates.family_tokenizer("llama", ["<|end_of_text|>", *names], ["<|end_of_text|>"])
    for tokenizer, turn, closing in (
        (glm, templates.REPLY, ["<|user|>"]),
        (glm, templates.CALL, ["<|observation|>"]),
        (llama, templates.REPLY, []),  # its template closes each answer
        (llama_base, templates.REPLY, []),  # with another token than its own last one
    ):
        messages = [*templates.OPENING, turn]
        (branch,) = conversations.tree(tokenizer, messages, max_length=200).branches
        rendered = tokenizer.render(messages).token_ids
        assert branch.tokens.tolist() == rendered + [tokenizer.specials[name] for name in closing]
        assert branch.loss_mask[-1] == 1
