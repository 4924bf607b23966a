"""Short conversations, and byte-level tokenizers with a given chat template, for tests of templates and parsers."""

import json
import pathlib

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from models.text import tokenizer as tokenizer_lib

OPENING = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé?"}]
REPLY = {"role": "assistant", "content": "yes"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "note": "x"}}}],
}
# In the manner of Qwen3's own: no generation tags.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content is string %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RESULTS = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]


def template(family):
    """Returns the text of a chat template in the manner of a model family's own."""
    return (pathlib.Path(__file__).parent / "templates" / f"{family}.jinja").read_text("utf-8")


def family_tokenizer(family, specials, stops):
    """Returns a tokenizer with the template of a family."""
    return byte_tokenizer(template(family), specials, stops)


def byte_tokenizer(text, specials, stops):
    """Returns a tokenizer with the chat template `text`. Its IDs are bytes, then `specials`; `stops` end a completion."""
    vocab = {char: byte for byte, char in enumerate(tokenizer_lib._byte_chars())}
    model = tokenizers.Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(specials)
    named = {"eos_token": stops[0], "pad_token": specials[0]}
    stop_ids = [model.token_to_id(stop) for stop in stops]
    return tokenizer_lib._create(model, named, text, None, stop_ids)


def base_folder(path):
    """Writes a folder with a base model's tokenizer: its end token is not that of its template's turns. Returns the path."""
    tokenizer_lib.byte_chatml().save(path)
    (path / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    (path / "generation_config.json").write_text('{"eos_token_id": 256}')
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    return path


def calls_of(parsed):
    """Returns [(name, arguments)] of parsed tool calls."""
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]
