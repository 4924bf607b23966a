"""Turns of the assistant in all chat templates of TRL, with the masks of transformers as the oracle."""

import dataclasses
import datetime
import json
import lzma
import pathlib
import re

import pytest

from models.text import turns
from tests.support import conversations

FIXTURE = pathlib.Path(__file__).parents[2] / "fixtures" / "chat_templates" / "templates.json.xz"
ORACLE = json.loads(lzma.open(FIXTURE).read())
BEGIN, END = "⟦", "⟧"
# TRL's blocks begin with these texts, which generation prompts end with, and go on after these tokens, which end a completion.
OPENINGS = {
    "deepseek": "<｜Assistant｜>|<｜tool▁outputs▁end｜>",
    "gptoss": r"<\|start\|>assistant",
    "muse": r"<\|start\|>assistant",
    "qwen2_5": "(?<=assistant⟦)\n",
    "qwen3_8": "<think>\n",
}
ENDS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "gemma": ["<end_of_turn>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "muse": ["<|eot|>"],
    "nemotron": ["<|im_end|>"],
    "phi3": ["<|end|>"],
    "qwen": ["<|im_end|>"],
}
SPECIAL = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")


def tokenizer_of(template):
    """Returns a tokenizer as of a base checkpoint: its end token is not one of the template's."""
    specials = ["<eos>", "<bos>", *dict.fromkeys(SPECIAL.findall(template))]
    found = conversations.byte_tokenizer(template, specials, ["<eos>"])
    named = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return dataclasses.replace(found, named=named, date=datetime.date.fromisoformat(ORACLE["date"]))


def marked(tokenizer, rendered):
    """Returns the text of a rendered conversation, with marks around the tokens of the assistant mask."""
    text, inside = b"", False
    for id, on in zip([*rendered.token_ids, None], [*rendered.assistant_mask, False], strict=True):
        text += (BEGIN if on else END).encode() * (on != inside)
        text, inside = text + (b"" if id is None else tokenizer.token_bytes(id)), on
    return text.decode()


@pytest.mark.parametrize("name", ORACLE["templates"])
def test_the_mask_is_that_of_transformers(name):
    """TRL's masks; those of templates without blocks from the prompt's end to the last token that would be sampled."""
    template, texts = ORACLE["templates"][name]["template"], ORACLE["templates"][name]["texts"]
    opening, ends = (next((v for k, v in table.items() if name.startswith(k)), "") for table in (OPENINGS, ENDS))
    tokenizer = tokenizer_of(template)
    has_blocks = re.search(r"{%-?\s*generation\b", template)
    last = "|".join(map(re.escape, [*ends, *(["<|end|>"] if name == "gptoss" else [])]))
    for (messages, tools), expected in zip(ORACLE["conversations"], texts, strict=True):
        tools = tools if "tools" in template else None  # refused by ours, and left out by transformers
        if expected is None:
            with pytest.raises(ValueError, match="chat template"):
                tokenizer.render(messages, tools=tools)
            continue
        if not has_blocks:
            expected = re.sub(f"{BEGIN}({opening})", f"\\1{BEGIN}", expected)
            expected = re.sub(f"({last})((?:(?!{last})[^{BEGIN}])*?){END}", f"\\1{END}\\2", expected)
        assert marked(tokenizer, tokenizer.render(messages, tools=tools)) == expected
    assert {tokenizer.model.id_to_token(id) for id in tokenizer.stop_ids} >= set(ends)


# In the manner of Mistral's: no text opens an answer, and a tool's result is in brackets.
BRACKETS = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{{ '</s>' if loop.last }}"
    "{% else %} {{ m.content }}{% for call in m.tool_calls or [] %}[CALL]{{ call.function.arguments | tojson }}{% endfor %}</s>"
    "{% endif %}{% endfor %}"
)
COLONS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def test_an_answer_that_nothing_opens_begins_after_the_message_before():
    names = ["<eos>", "<bos>", "</s>", "[INST]", "[/INST]", "[CALL]", "[RESULT]", "[/RESULT]"]
    tokenizer = conversations.byte_tokenizer(BRACKETS, names, ["<eos>"])
    user, result = {"role": "user", "content": "a [/INST] b"}, {"role": "tool", "content": "3"}
    messages = [user, conversations.CALL, result, result, conversations.REPLY, user]
    assert marked(tokenizer, tokenizer.render(messages)) == (
        '<bos>[INST] a [/INST] b [/INST]⟦ [CALL]{"a": 1, "note": "x"}</s>⟧[RESULT]3[/RESULT][RESULT]3[/RESULT]⟦ yes</s>⟧[INST] a [/INST] b [/INST]'
    )
    assert marked(tokenizer, tokenizer.render(messages[:3])).endswith("</s>⟧[RESULT]3[/RESULT]</s>")  # no answer
    assert tokenizer.stop_ids == tuple(tokenizer.specials[name] for name in ("<eos>", "</s>"))


def test_a_template_whose_turns_no_token_ends_has_no_mask():
    """A mask would run over the user's turns."""
    tokenizer = conversations.byte_tokenizer(COLONS, ["<eos>"], ["<eos>"])
    chat = [*conversations.OPENING, conversations.REPLY, conversations.OPENING[1]]
    assert not any(tokenizer.render(chat).assistant_mask) and tokenizer.stop_ids == tokenizer.eos_ids


def test_an_answer_that_a_tools_result_opens_may_be_unfinished():
    """Two results come before one answer. The second answer has no end yet, or nothing at all."""
    form = turns.Turns(header="<a>", result_end="<r>", ends=("<e>",))
    for text in ("<a>f()<e>1<r>2<r>3<e>", "<a>f()<e>1<r>3", "<a>f()<e>1<r>"):
        assert [text[begin:end] for begin, end in form.spans(text)] == ["f()<e>", text.rpartition("<r>")[2]]
    assert form.spans("<a>f()<e>1<r><e>") == [(3, 9)]  # a result that no answer follows
