"""Converts text and chat messages to token IDs and back, with `tokenizers` and `jinja2` alone.

1. `byte_chatml()` is the embedded tokenizer: IDs 0..255 are bytes, then come ChatML's special tokens, then markers.
2. `Tokenizer.render` runs the chat template. Special tokens in a caller's strings are escaped (special_tokens.py), so the
   text of a message cannot open or close a turn.
3. `{% generation %}` blocks give the assistant mask. In a template without them (Qwen3's own), turns.py finds where the
   assistant's turns begin and end. Its stop tokens end completions, in addition to those of the checkpoint.
4. `Tokenizer.bridge` appends messages to sampled IDs without rendering the turn again, so a conversation trains on exactly
   the IDs that it consisted of.

Left out: transformers (126 MB); SentencePiece tokenizers, whose IDs depend on where a text is split (rejected by `load`).
"""

import codecs
import dataclasses
import datetime
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from models import hub
from models.text import chat_template as chat_template_lib
from models.text import parsers, special_tokens, tokenizer_files, turns

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MAX_NAMES = 2**27  # sum of the squares of the lengths of added tokens, all of whose beginnings are kept
# Names of a message's reasoning, of which templates read one.
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A chat conversation rendered to token IDs; `Tokenizer.render` returns it."""

    token_ids: list[int]
    # True for tokens that the assistant would sample, its stop token included. Not for use after a generation prompt.
    assistant_mask: list[bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A Hugging Face tokenizer with its chat template: encodes, decodes, and renders conversations.

    The field `model` never encodes text as a special token; methods insert the IDs of `specials` ({text: ID}) themselves.
    """

    model: tokenizers.Tokenizer
    specials: dict[str, int]
    chat_template: str | None
    pad_id: int
    eos_id: int
    eos_ids: tuple[int, ...]  # those that end a completion by the checkpoint's own files, eos_id first
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)  # {name, such as "bos_token": token's text}
    tool_template: str | None = None  # replaces `chat_template` when there are tools
    date: datetime.date | None = None  # returned by the template's clock; None for the present time
    origin: str = "byte_chatml"  # name or folder, for messages
    variables: Mapping = dataclasses.field(default_factory=dict)  # of the chat template, unless a call sets them

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: the largest token ID plus 1."""
        return max(self.model.get_vocab(with_added_tokens=True).values()) + 1  # IDs may have gaps

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Returns the token IDs of `text`. The names of special tokens in it are encoded as plain text, unless `special` is True.

        Raises ValueError for a string that UTF-8 cannot encode.
        """
        if special:
            return self._encode_rendered(text, escape="")
        _check_unicode(text)
        return self.model.encode(text, add_special_tokens=False).ids

    def prompt_ids(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Returns the token IDs of a plain-text prompt, as transformers does.

        Args:
          text: the prompt. Raises ValueError for a string that UTF-8 cannot encode.
          add_special_tokens: add the tokens that begin or end a sequence (such as Llama's first token). Unlike transformers, those
            that the text begins with are not doubled.
          parse_special: names of special tokens in the text become these tokens. False: they are text.
        """
        _check_unicode(text)
        model = self._parsing_model if parse_special else self.model
        ids = model.encode(text, add_special_tokens=add_special_tokens).ids
        if not (add_special_tokens and ids and ids[0] in self.special_ids):
            return ids
        plain = model.encode(text, add_special_tokens=False).ids
        added = next((at for at in range(len(ids)) if ids[at : at + len(plain)] == plain), 0)
        return ids[added:] if plain[:added] == ids[:added] else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Returns the text of the token IDs. Invalid UTF-8 becomes U+FFFD; IDs past the vocabulary (padding of the model) are skipped."""
        return self.model.decode(list(ids), skip_special_tokens=skip_special)

    def text_stream(self, *, structured: bool = False) -> "TextStream":
        """Returns a decoder for token IDs that arrive in pieces. `structured` keeps the special tokens that `parsers.parse` needs."""
        return TextStream(self, self._unstructured_ids if structured else self.special_ids)

    def structured_text(self, ids: Sequence[int]) -> str:
        """Decodes a completion for `parsers.parse`: the text keeps only the special tokens that structure messages."""
        return self.decode([id for id in ids if id not in self._unstructured_ids], skip_special=False)

    def token_bytes(self, id: int) -> bytes:
        """Returns the UTF-8 bytes of the token `id`, special tokens included; empty for an ID past the vocabulary."""
        return self._bytes_by_id.get(id, b"")

    def spell(self, id: int) -> str:
        """Returns a text for the token `id` that no other token has: its own text if possible.

        It is bytes:\\xe3\\x81 for a part of a character, as in OpenAI's API, and token_id:N if a token of a lower ID has the same bytes.
        """
        spelled = self.token_bytes(id)
        if self._first_by_bytes.get(spelled) != id:
            return f"token_id:{id}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def render(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping] | None = None,
        variables: Mapping | None = None,
        continues: bool = True,
    ) -> Rendered:
        """Renders a conversation to token IDs.

        Args:
          messages: in the form of OpenAI's API; at least one.
          add_generation_prompt: append the opening of the assistant's next turn.
          continues: with `add_generation_prompt`, leave a last message of the assistant open instead, to be continued (a prefill).
          tools: functions that the model may call, in the form of OpenAI's API.
          variables: further variables for the template, such as `enable_thinking`; they precede those of the tokenizer.

        Raises ValueError if the template rejects the messages, or the tokenizer has no template.
        """
        if not messages:
            raise ValueError("messages is empty; pass at least one {'role': ..., 'content': ...}")
        inputs, unused = self._template_inputs(messages, tools, variables)
        if add_generation_prompt and continues and messages[-1].get("role") == "assistant":
            text = self._open_last(inputs, next(unused))
        else:
            [text] = self._render_texts(inputs, {"add_generation_prompt": add_generation_prompt})
        template = self._template_text(tools)
        if chat_template_lib.Generation.TAG.search(template):
            blocks = re.split(f"[{inputs['generation_opener']}{inputs['generation_closer']}]", text)
        else:
            spans = self._turns[template].spans(text)
            cuts = [0, *itertools.chain(*spans), len(text)]
            blocks = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
        ids, mask = [], []
        for index, block in enumerate(blocks):
            ids += self._encode_rendered(block, inputs["escape"])
            mask += [index % 2 == 1] * (len(ids) - len(mask))  # every second block is the assistant's
        return Rendered(ids, mask)

    def scored_text(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
        """Returns the text of a completion that an environment without tools scores: as the model wrote it, calls included.

        Only the reasoning of a model whose chat template has any is removed. Returns "" if the prompt opened a reasoning block (as QwQ's
        prompts do) that the completion does not close.
        """
        return self.parse(completion_ids, prompt_ids=prompt_ids, read_calls=False)["content"]

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Returns True if a completion of this prompt begins inside a reasoning block, which the prompt's end or a prefill opened."""
        found = self._turns.get(self.chat_template or "")
        begin = next((at for at in range(len(prompt_ids), 0, -1) if prompt_ids[at - 1] in self.stop_ids), 0)
        text = self.decode(prompt_ids[begin:], skip_special=False)
        _, has_header, turn = text.rpartition(found.header) if found and found.header else ("", "", "")
        _, opened, inside = turn.rpartition(parsers.THINK)
        return text.rstrip().endswith(parsers.THINK) or bool(has_header and opened and parsers.END_THINK not in inside)

    @functools.cached_property
    def reasons(self) -> bool:
        """True for a model that reasons: its chat templates have reasoning blocks, or the format has a channel for it."""
        templates = f"{self.chat_template}{self.tool_template}"
        return self.call_format == "harmony" or parsers.THINK in templates or parsers.END_THINK in templates

    def parse(
        self,
        ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[Mapping] | None = None,
        read_calls: bool = True,
    ) -> dict:
        """Parses a completion of a prompt, up to its first stop token, into an assistant message in the form of OpenAI's API.

        Malformed text raises nothing: a tool call that cannot be parsed stays in the content, and an unclosed reasoning
        block, of the completion or of the prompt's end, is all reasoning. `tools` and `read_calls` are those of `parsers.parse`.
        """
        ids = list(ids)
        end = next((at for at, id in enumerate(ids) if id in self.stop_ids), len(ids))
        text = self.structured_text(ids[:end])
        inside = self.opens_reasoning(prompt_ids)
        if not (inside or self.reasons or read_calls):
            return {"role": "assistant", "content": text}
        given = {"tools": tools, "read_calls": read_calls, "in_reasoning": inside or None}
        return parsers.parse(text, self.call_format, **given).message(lambda index: f"call_{index}")

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Mapping],
        *,
        tools: Sequence[Mapping] | None = None,
        variables: Mapping | None = None,
    ) -> list[int] | None:
        """Returns the IDs of the next turn's prompt: this turn's IDs unchanged, then `messages` and the generation prompt.

        `messages` are the user or tool turns after the completion. A completion without a stop token is closed as the
        template closes a turn. Returns None if the IDs cannot be continued: the completion ended with another stop token
        than the template's, or the template does not separate the turns. Render the whole conversation in that case.
        """
        inputs, unused = self._template_inputs(messages, tools, variables)
        mark = next(unused)  # in place of the completion
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
        change = {"messages": turn + inputs["messages"], "add_generation_prompt": True}
        [text] = self._render_texts(inputs, change)
        marked, _, tail = text.rpartition(mark)
        tail = re.sub(f"[{inputs['generation_opener']}{inputs['generation_closer']}]", "", tail)
        if not marked or self._escaper.special.match(tail) is None:
            return None
        tail_ids = self._encode_rendered(tail, inputs["escape"])
        completion_ids = list(completion_ids)
        if completion_ids and completion_ids[-1] in self.stop_ids:
            if completion_ids[-1] != tail_ids[0]:
                return None
            tail_ids = tail_ids[1:]
        return [*prompt_ids, *completion_ids, *tail_ids]

    def save(self, directory: str | os.PathLike) -> None:
        """Writes a folder that `load` and transformers' AutoTokenizer can read. An existing generation_config.json is kept."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.named,
            "eos_token": self.model.id_to_token(self.eos_id),
            "pad_token": self.model.id_to_token(self.pad_id),
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2**31 - 1,
        }
        templates = {"default": self.chat_template, "tool_use": self.tool_template}
        named = [{"name": name, "template": text} for name, text in templates.items() if text is not None]
        if named:
            config["chat_template"] = named if self.tool_template is not None else self.chat_template
        generation = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
        self.model.save(str(directory / "tokenizer.json"))
        _write_json(directory / "tokenizer_config.json", config)
        if not (directory / "generation_config.json").exists():  # the checkpoint's own may have more fields
            _write_json(directory / "generation_config.json", generation)

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The IDs that end a completion: the checkpoint's own, eos_id first, and those with which its chat templates end an answer."""
        names = [name for found in self._turns.values() for name in (found.stop, found.call_stop) if name]
        return tuple(dict.fromkeys([*self.eos_ids, *(id for name in names for id in self.encode(name, special=True))]))

    def reads(self, variable: str) -> bool:
        """Returns True if a chat template contains the name of a variable, and it is not one that each rendering sets itself."""
        if variable in ("messages", "tools", "add_generation_prompt"):
            return False
        text = f"{self.chat_template}\n{self.tool_template}"
        return re.search(rf"\b{re.escape(variable)}\b", text) is not None

    def closing_ids(self, message: Mapping, *, tools: Sequence[Mapping] | None = None) -> list[int]:
        """Returns the IDs with which the assistant ends `message`, for a conversation that the template leaves open; [] if unknown."""
        found = self._turns[self._template_text(tools)]
        name = found.call_stop if message.get("tool_calls") else found.stop
        return self.encode(name, special=True)

    @functools.cached_property
    def call_format(self) -> str:
        """The tool call format of the chat template: one of `parsers.FORMATS`."""
        return parsers.detect_format(self.tool_template or self.chat_template or "")

    def _template_inputs(self, messages, tools, variables) -> tuple[dict, Iterator[str]]:
        """Returns (the template's variables, with the caller's strings escaped; an iterator of private-use characters not in them)."""
        variables = {**self.variables, **(variables or {})}
        given = [[_with_reasoning(message) for message in messages], list(tools) if tools else None, variables]
        template = self._template_text(tools)
        try:
            text = json.dumps(given, ensure_ascii=False) + template
            unused = (char for char in map(chr, range(0xE000, 0xF900)) if char not in text)
            escape = next(unused)
            messages, tools, variables = self._escaper.escape(given, escape)
            own = {"generation_opener": next(unused), "generation_closer": next(unused)}
        except RecursionError:
            raise ValueError("messages, tools, or variables are nested too deeply; flatten them") from None
        except TypeError as error:  # tables have dates and bytes
            raise ValueError(f"messages or tools: {error}; make the value a string, or leave it out") from None
        except StopIteration:
            raise ValueError(
                "the messages have all private-use characters of Unicode, and one must be free; remove some"
            ) from None
        own |= {"escape": escape, "messages": messages, "tools": tools}
        return dict(self.named) | variables | own, unused

    def _open_last(self, inputs: dict, mark: str) -> str:
        """Returns the rendered conversation up to the end of the text of its last message."""
        *before, last = inputs["messages"]
        if last.get("tool_calls"):
            raise ValueError("the last message is the assistant's and has tool calls; add their results, or remove it")
        names = ["content"] if last.get("content") else [name for name in REASONING if last.get(name)] or ["content"]
        marked = last | {name: (last.get(name) or "") + mark for name in names}
        closed, text = self._render_texts(inputs, {}, {"messages": [*before, marked]})
        text, found, _ = text.rpartition(mark)
        if not found:
            raise ValueError("the chat template drops the last message, the assistant's; end with a user's message")
        return text if closed.startswith(text) else text.rstrip()  # the template removes white space at its end

    def _render_texts(self, inputs: dict, *changes: dict) -> list[str]:
        now, text = self.date or datetime.datetime.now(), self._template_text(inputs["tools"])
        return chat_template_lib.render(text, inputs, changes, now=now, origin=self.origin)

    def _encode_rendered(self, text: str, escape: str) -> list[int]:
        ids = []
        for piece in self._escaper.special.split(text):  # a special token of the template, or text without any
            if piece in self.specials:
                ids.append(self.specials[piece])
                continue
            for part in self._escaper.unescape(piece, escape):
                ids += self.encode(part)
        return ids

    @functools.cached_property
    def _bytes_by_id(self) -> dict[int, bytes]:
        byte_of = {char: byte for byte, char in enumerate(_byte_chars())}
        added = self.model.get_added_tokens_decoder()
        return {
            id: text.encode() if id in added else bytes(byte_of[char] for char in text if char in byte_of)
            for text, id in self.model.get_vocab(with_added_tokens=True).items()
        }

    @functools.cached_property
    def _first_by_bytes(self) -> dict[bytes, int]:
        return {spelled: id for id, spelled in sorted(self._bytes_by_id.items(), reverse=True)}

    @functools.cached_property
    def _parsing_model(self) -> tokenizers.Tokenizer:
        """A copy of `model` that encodes the names of special tokens as these tokens."""
        model = tokenizers.Tokenizer.from_str(self.model.to_str())
        model.encode_special_tokens = False
        known = {token.content for token in model.get_added_tokens_decoder().values()}
        model.add_special_tokens([name for name in self.specials if name not in known])
        return model

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The IDs of special tokens, which `decode` skips by default."""
        return frozenset(id for id, token in self.model.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def _unstructured_ids(self) -> frozenset[int]:
        """The IDs of special tokens other than those that structure messages in the template's format."""
        names = parsers.STRUCTURE if self.call_format == "harmony" else ()
        return self.special_ids - {self.specials[name] for name in names if name in self.specials}

    @functools.cached_property
    def _escaper(self) -> special_tokens.Escaper:
        ordinary = [token.content for token in self.model.get_added_tokens_decoder().values() if not token.special]
        return special_tokens.Escaper(self.specials, ordinary)

    @functools.cached_property
    def _turns(self) -> dict[str, turns.Turns]:
        """Where each of the chat templates begins and ends the assistant's turns."""
        token, own = self._escaper.token, [name for name, id in self.specials.items() if id in self.eos_ids]
        inputs = {**self.named, **self.variables, "tools": None, "generation_opener": "", "generation_closer": ""}
        now = self.date or datetime.datetime.now()

        def find(template: str) -> turns.Turns:
            def render(messages, is_prompt: bool) -> str | None:
                change = {"messages": messages, "add_generation_prompt": is_prompt}
                try:
                    return chat_template_lib.render(template, inputs, [change], now=now, origin=self.origin)[0]
                except ValueError:  # the template may require other turns
                    return None

            return turns.find(render, token, own)

        return {text: find(text) for text in (self.chat_template, self.tool_template) if text is not None}

    def _template_text(self, tools) -> str:
        text = self.tool_template if tools and self.tool_template is not None else self.chat_template
        file = "chat_template.jinja next to its tokenizer.json"
        if text is None:
            raise ValueError(f"this tokenizer has no chat template; put a {file}, or use the tokenizer byte_chatml")
        if tools and "tools" not in text:
            reason = "this tokenizer's chat template does not render tools, so the model would not see them"
            raise ValueError(f"{reason}; remove the tools, or put another {file}")
        return text


class TextStream:
    """Decodes token IDs that arrive a few at a time. The texts joined equal `decode` of all IDs except the `skipped` ones."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]):
        self._tokenizer, self._skipped = tokenizer, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # of the text so far, for `offsets`

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Adds token IDs and returns the new text. An incomplete UTF-8 character waits for the next call, unless `final`."""
        skipped, token_bytes = self._skipped, self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(token_bytes(id) for id in ids if id not in skipped), final)

    def offsets(self, ids: Sequence[int]) -> list[int]:
        """Adds token IDs. Returns the place in the text of all IDs where each of them begins; inside a character, that of the character."""
        found = []
        for id in ids:
            pending, _ = self._decoder.getstate()
            text = self.push([id])
            is_whole = (pending + self._tokenizer.token_bytes(id)).startswith("\ufffd".encode())
            is_broken = pending and text.startswith("\ufffd") and not is_whole  # it did not continue the character
            found.append(self._length + bool(is_broken))
            self._length += len(text)
        return found


def byte_chatml() -> Tokenizer:
    """Returns the built-in tokenizer: 256 bytes, 3 special tokens, 6 markers. It encodes any text without loss."""
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    model = tokenizers.Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[], cache_capacity=0))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # Not special, so that `decode` keeps them and a completion can be parsed.
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in MARKERS])
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _create(model, named, chat_template_lib.CHATML, None, [256])


def load(name_or_dir: str | os.PathLike, *, date: str | None = None, variables: Mapping | None = None) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder, GGUF file, or hub ID; the name "byte_chatml" returns the built-in tokenizer.

    `date` (YYYY-MM-DD) is shown to chat templates instead of today's, and they get `variables`. Raises ValueError or FileNotFoundError, naming the
    file, if the folder's tokenizer is unusable.
    """
    try:
        day = None if date is None else datetime.date.fromisoformat(date)
    except ValueError:
        raise ValueError(f"the tokenizer's date {date!r} is not a date; write it as YYYY-MM-DD") from None
    found = byte_chatml() if name_or_dir == "byte_chatml" else _create(*tokenizer_files.read(name_or_dir))
    return dataclasses.replace(found, date=day, origin=str(name_or_dir), variables=dict(variables or {}))


def located(name_or_dir: str) -> str:
    """Returns the name by which any process of this machine finds the same tokenizer: the absolute path of a folder or file, or a hub ID with its commit."""
    if name_or_dir != "byte_chatml" and pathlib.Path(name_or_dir).exists():
        return str(pathlib.Path(name_or_dir).absolute())
    return hub.pinned(name_or_dir)


def _create(model: tokenizers.Tokenizer, named: dict[str, str], template, tool_template, eos_ids) -> Tokenizer:
    """Builds a Tokenizer from the results of `tokenizer_files.read`. Raises ValueError if `model` or a special token is unusable."""
    layout = json.loads(model.to_str())
    encoder = json.dumps([layout["pre_tokenizer"], layout["normalizer"]])
    remedy = "use a model with a byte-level tokenizer (Qwen, Llama 3, GLM, DeepSeek)"
    if "Metaspace" in encoder or "Prepend" in encoder:
        raise ValueError(
            f"tokenizer.json is a SentencePiece tokenizer, whose IDs depend on where a text is split; {remedy}"
        )
    if "ByteLevel" not in json.dumps(layout["decoder"]):
        raise ValueError(f"tokenizer.json has no byte-level decoder, which decoding token by token needs; {remedy}")
    if "Replace" in json.dumps([layout["normalizer"], layout["decoder"]]):
        raise ValueError(f"tokenizer.json replaces text, of which a few letters may become gigabytes; {remedy}")
    model.encode_special_tokens = True
    model.no_padding()
    model.no_truncation()
    specials = {token.content: id for id, token in model.get_added_tokens_decoder().items() if token.special}
    for key, name in named.items():
        if key not in ("eos_token", "pad_token") and key not in f"{template}{tool_template}":
            continue  # unused
        id = model.token_to_id(name)
        if id is None:
            raise ValueError(
                f"tokenizer_config.json has {key} {name!r}, which tokenizer.json lacks; download both again"
            )
        specials.setdefault(name, id)
    added = {*specials, *(token.content for token in model.get_added_tokens_decoder().values())}
    if "" in added or sum(len(name) ** 2 for name in added) > MAX_NAMES:
        lengths = sorted(map(len, added))
        found = f"{len(added)} special and added tokens of {lengths[0]} to {lengths[-1]} letters"
        raise ValueError(f"the tokenizer has {found}: some are empty, or too long; download it again")
    eos_id = specials[named["eos_token"]]
    pad_id = specials[named.get("pad_token", named["eos_token"])]
    eos_ids = tuple(dict.fromkeys([eos_id, *eos_ids]))
    return Tokenizer(model, specials, template, pad_id, eos_id, eos_ids, named, tool_template)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may contain half a surrogate pair
        raise ValueError(f"the text {text!r} is not valid Unicode; remove its lone surrogates") from error


def _with_reasoning(message: Mapping) -> Mapping:
    """Returns the message with its reasoning under the two names that chat templates read, as transformers does; gpt-oss reads `thinking`."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _byte_chars() -> list[str]:
    """Returns the printable character for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
