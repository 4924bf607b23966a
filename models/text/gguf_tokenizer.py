"""Builds the tokenizer of a GGUF file from its metadata.

1. Tokens and merges make a byte-level BPE model. `tokenizer.ggml.pre` names the rule that splits text before the merges.
2. Control tokens become special tokens, and user-defined ones added tokens, as in the checkpoint that was converted.
3. The flags for the tokens that begin and end a sequence, the chat templates, and the stop tokens are entries of their own.

Left out: SentencePiece (`tokenizer.ggml.model` = "llama"), whose IDs depend on where a text is split; models/text/tokenizer.py
refuses it in folders, too.
"""

import os
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as tokenizer_models

from sharding.weights.format import gguf_header

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4  # in token_type
NAMED = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
STOPS = ("eos", "eot", "eom")  # end of a text, a turn, and a message


class Split(NamedTuple):
    """The rule by which a text is split before merges: a pattern ("" for GPT-2's), digits one by one, and other settings of the model."""

    pattern: str = ""
    digits: bool = False
    is_composed: bool = False  # Unicode's form NFC, as in Qwen's tokenizers
    ignores_merges: bool = False  # for a text that is a token


WORDS, REST = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
CASED += r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
QWEN = Split(WORDS + r"\p{N}" + REST, is_composed=True)
SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "llama-bpe": Split(WORDS + r"\p{N}{1,3}" + REST, ignores_merges=True),
    "qwen2": QWEN,
    "deepseek-r1-qwen": QWEN,
    "tekken": Split(CASED + REST.replace(r"[\r\n]*", r"[\r\n/]*", 1), ignores_merges=True),
}


def read(path: str | os.PathLike) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None, str | None, list[int]]:
    """Reads the tokenizer of a GGUF file. Returns the same as `tokenizer_files.read`. Raises ValueError, naming the entry, if it is unusable."""
    metadata = gguf_header.read(path).metadata
    try:
        tokens = _entry(metadata, "tokens", list)
        split = _split(metadata)
        found = {name: _id(metadata, name, len(tokens)) for name in (*NAMED.values(), "eot", "eom")}
        ids = {name: id for name, id in found.items() if id is not None}
        if "eos" not in ids:
            raise ValueError(f"{PREFIX}eos_token_id is missing, the token that ends a turn")
        ends = [tokens[ids[name]] for name in ("bos", "eos") if name in ids]
        if bad := [text for text in ends if text.startswith("$") or ":" in text]:
            raise ValueError(
                f"{PREFIX}tokens has {bad[0]!r:.80}, but a token that begins or ends a text must not contain $ or :"
            )
        model = _model(tokens, _entry(metadata, "merges", list), split)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; use another GGUF file, or the Hugging Face folder that it was made from"
        ) from None
    kinds = metadata.get(PREFIX + "token_type")
    if isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        for kind, add in ((CONTROL, model.add_special_tokens), (USER_DEFINED, model.add_tokens)):
            names = (token for token, its in zip(tokens, kinds, strict=True) if its == kind)
            add([tokenizers.AddedToken(name, normalized=False, special=kind == CONTROL) for name in names])
    _add_ends(model, metadata, {name: tokens[id] for name, id in ids.items()})
    named = {name: tokens[ids[short]] for name, short in NAMED.items() if short in ids}
    templates = [metadata.get(name) for name in ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")]
    default, tool = (text if isinstance(text, str) else None for text in templates)
    return model, named, default, tool, [ids[name] for name in STOPS if name in ids]


def _entry(metadata: dict[str, Any], name: str, kind: type) -> Any:
    value = metadata.get(PREFIX + name)
    if value is None:
        raise ValueError(f"{PREFIX}{name} is missing: it has no tokenizer")
    if not isinstance(value, kind):
        raise ValueError(f"{PREFIX}{name} is of type {type(value).__name__}, not {kind.__name__}")
    return value


def _split(metadata: dict[str, Any]) -> Split:
    model, rule = _entry(metadata, "model", str), metadata.get(PREFIX + "pre")
    if model != "gpt2":
        raise ValueError(f"{PREFIX}model {model!r} is not supported, only 'gpt2', a byte-level BPE")
    if not isinstance(rule, str) or rule not in SPLITS:
        raise ValueError(f"{PREFIX}pre {rule!r} is not supported, only {', '.join(SPLITS)}")
    return SPLITS[rule]


def _id(metadata: dict[str, Any], name: str, vocab_size: int) -> int | None:
    id = metadata.get(f"{PREFIX}{name}_token_id")
    if id is not None and (type(id) is not int or not 0 <= id < vocab_size):
        raise ValueError(f"{PREFIX}{name}_token_id {id} is not one of {vocab_size} tokens")
    return id


def _model(tokens: list[str], merges: list[str], split: Split) -> tokenizers.Tokenizer:
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError(f"{PREFIX}tokens has duplicates: only {len(vocab)} of {len(tokens)} differ")
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    for first, second in pairs:
        if not (first in vocab and second in vocab and first + second in vocab):
            raise ValueError(
                f"{PREFIX}merges joins {first!r} and {second!r}, but these or the joined text are not in tokens"
            )
    model = tokenizers.Tokenizer(tokenizer_models.BPE(vocab, pairs, ignore_merges=split.ignores_merges))
    if split.is_composed:
        model.normalizer = normalizers.NFC()
    steps: list = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern)]
    if split.pattern:
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(split.pattern), "isolated"))
    if split.digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    model.pre_tokenizer = pre_tokenizers.Sequence(steps)
    model.decoder = decoders.ByteLevel()
    return model


def _add_ends(model: tokenizers.Tokenizer, metadata: dict[str, Any], texts: dict[str, str]) -> None:
    """Makes `model` begin and end a plain text with the tokens that the metadata asks for."""
    added = {name for name in texts if metadata.get(f"{PREFIX}add_{name}_token") is True}
    first, last = ([texts[name]] if name in added else [] for name in ("bos", "eos"))
    if first or last:
        known = [(text, model.token_to_id(text)) for text in {*first, *last}]
        model.post_processor = processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=known)
