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
RESULTS = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]


def template(family):
    """Returns the text of a chat template in the manner of a model family's own."""
    return (pathlib.Path(__file__).parent / "templates" / f"{family}.jinja").read_text("utf-8")


def byte_tokenizer(family, specials, stops):
    """Returns a tokenizer with the template of a family. Its IDs are bytes, then `specials`; `stops` end a completion."""
    vocab = {char: byte for byte, char in enumerate(tokenizer_lib._byte_chars())}
    model = tokenizers.Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(specials)
    named = {"eos_token": stops[0], "pad_token": specials[0]}
    stop_ids = [model.token_to_id(stop) for stop in stops]
    return tokenizer_lib._create(model, named, template(family), None, stop_ids)


def calls_of(parsed):
    """Returns [(name, arguments)] of parsed tool calls."""
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]
