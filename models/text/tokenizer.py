"""Text to token ids and back, and chat messages to token ids and back, with `tokenizers` and `jinja2` alone.

1. `byte_chatml()` builds the embedded tokenizer in memory: id == byte value for 0..255, then ChatML's specials, then
   markers for reasoning and tools. `load` reads it, or the folder of any Hugging Face checkpoint; `save` writes one.
2. `Tokenizer.render` runs the chat template over messages whose text cannot close or open a turn (models/text/special_tokens.py): every
   special token spelled inside a caller's string is broken with a private-use character before the template sees it; the
   rendered text is cut at the specials that remain, which only the template can have written; the breaks are
   removed and what lies between is encoded as plain text.
3. The same private-use trick marks `{% generation %}` blocks, so the assistant mask falls out of the same cut. In a template
   without such blocks (Qwen3's own) an answer begins where the template has opened the assistant's turn, and ends with the next
   stop token; the text is cut at both, as it is when an answer is sampled.
4. `Tokenizer.parse` reads sampled ids back into an assistant message: reasoning, content, tool calls (parsers.py).
5. `Tokenizer.bridge` appends new messages to the ids of a turn as they were sampled: nothing is rendered again, so a
   conversation trains on exactly the ids that it was made of.

Left out: transformers (126 MB for what 300 lines do); SentencePiece-style tokenizers, whose result depends on where a
text is cut (refused by `load`).
"""

import codecs
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import jinja2
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from models.text import chat_template as chat_template_lib
from models.text import harmony, parsers, special_tokens, tokenizer_files

BYTE_CHATML = "byte_chatml"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclasses.dataclass(frozen=True)
class Rendered:
    token_ids: list[int]
    assistant_mask: list[bool]  # True where the assistant would produce the token: its text and the closing special


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """`model` never makes a special id out of text; `specials` (text -> id) are put in by the methods below."""

    model: tokenizers.Tokenizer
    specials: dict[str, int]
    chat_template: str | None
    pad_id: int
    eos_id: int
    stop_ids: tuple[int, ...]  # eos_id first
    named: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # of tokenizer_folder.NAMES; templates write `{{ bos_token }}`
    tool_template: str | None = None  # instead of `chat_template` where there are tools
    date: datetime.date | None = None  # the day that a template is told; None: today's

    @property
    def vocab_size(self) -> int:
        return max(self.model.get_vocab(with_added_tokens=True).values()) + 1  # ids may have holes

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`; the spelling of a special token is plain text unless `special`."""
        if not special:
            try:
                return self.model.encode(text, add_special_tokens=False).ids
            except TypeError as error:  # JSON may carry half a surrogate pair, which no UTF-8 spells
                raise ValueError(f"{text!r} is not text; send a string without lone surrogates") from error
        ids = []
        for piece in self._breaks.cut.split(text):
            ids += [self.specials[piece]] if piece in self.specials else self.encode(piece)
        return ids

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a prompt that is plain text: with what the tokenizer puts around a sequence (Llama's and Gemma's first token)."""
        self.encode(text)  # refuses what is no text
        return self.model.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids past the vocabulary (padded rows) nothing."""
        return self.model.decode(list(ids), skip_special_tokens=skip_special)

    def text_stream(self, *, structured: bool = False) -> "TextStream":
        """Text of ids that come a few at a time; `structured`: with what `parsers.parse` needs to see of an answer."""
        return TextStream(self, self._unstructured_ids if structured else self.special_ids)

    def structured_text(self, ids: Sequence[int]) -> str:
        """Text of a whole answer for `parsers.parse`: without specials, but for those that its format is made of."""
        if self._unstructured_ids == self.special_ids:
            return self.decode(ids)
        return self.decode([id for id in ids if id not in self._unstructured_ids], skip_special=False)

    def token_bytes(self, id: int) -> bytes:
        """What one id spells, specials included; nothing for an id past the vocabulary."""
        return self._spelled.get(id, b"")

    def render(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping] | None = None,
        variables: Mapping | None = None,
    ) -> Rendered:
        """Ids of a conversation; `variables` are more names for the template (`enable_thinking`, ...).

        Raises ValueError where the template refuses the messages.
        """
        if not messages:
            raise ValueError("there are no messages to render; pass at least one {'role': ..., 'content': ...}")
        inputs, unused = self._template_inputs(messages, tools, variables)
        breaker = inputs["breaker"]
        if chat_template_lib.Generation.TAG.search(self._template_text(tools)) is None:
            text = self._render_marked(inputs, add_generation_prompt, next(unused))
        else:
            text = self._render_text(inputs, add_generation_prompt)
        ids, generated, mask = [], False, []
        for block in re.split(f"([{inputs['generation_opener']}{inputs['generation_closer']}])", text):
            if block in (inputs["generation_opener"], inputs["generation_closer"]):
                generated = block == inputs["generation_opener"]
                continue
            ids += self._encode_rendered(block, breaker)
            mask += [generated] * (len(ids) - len(mask))
        return Rendered(ids, mask)

    def scored_text(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
        """What is scored of a completion: its content. Reasoning that the prompt opened (QwQ's does) and that never ends is none."""
        inside = True if self.opens_reasoning(prompt_ids) else None
        return self.parse(completion_ids, in_reasoning=inside)["content"]

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a completion begins inside a block of reasoning."""
        return self.decode(prompt_ids[-16:]).rstrip().endswith(parsers.THINK)

    def parse(
        self, ids: Sequence[int], *, tools: Sequence[Mapping] | None = None, in_reasoning: bool | None = None
    ) -> dict:
        """The assistant message that a completion spells, up to the first stop id.

        What is malformed is no error: a tool call that cannot be read stays in the content as text, and reasoning that
        was cut off before its end is all reasoning. `tools` tell strings from numbers where the format does not;
        `in_reasoning` says whether the prompt opened a block of reasoning, if that is known.
        """
        ids = list(ids)
        end = next((at for at, id in enumerate(ids) if id in self.stop_ids), len(ids))
        text = self.structured_text(ids[:end])
        parsed = parsers.parse(text, self.call_format, tools=tools, in_reasoning=in_reasoning)
        message = {"role": "assistant"}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        message["content"] = parsed.content
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(parsed.calls)
            ]
        return message

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Mapping],
        *,
        tools: Sequence[Mapping] | None = None,
        variables: Mapping | None = None,
    ) -> list[int] | None:
        """Ids of the next turn's prompt: those of this turn as they are, then `messages` and the generation prompt.

        `messages` are what came after the completion (user or tool turns). A completion that was cut off is closed as
        the template closes a turn. None where the ids cannot simply go on: the completion ended with a stop id that
        does not open what follows, or the template joins the two texts; then render the whole conversation.
        """
        inputs, unused = self._template_inputs(messages, tools, variables)
        mark = next(unused)  # stands for the completion
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
        text = self._render_text(inputs | {"messages": turn + inputs["messages"]}, True)
        marked, _, tail = text.rpartition(mark)
        tail = re.sub(f"[{inputs['generation_opener']}{inputs['generation_closer']}]", "", tail)
        if not marked or self._breaks.cut.match(tail) is None:
            return None
        tail_ids = self._encode_rendered(tail, inputs["breaker"])
        completion_ids = list(completion_ids)
        if completion_ids and completion_ids[-1] in self.stop_ids:
            if completion_ids[-1] != tail_ids[0]:
                return None
            tail_ids = tail_ids[1:]
        return [*prompt_ids, *completion_ids, *tail_ids]

    def save(self, directory: str | os.PathLike) -> None:
        """Writes a folder that `load` and transformers' AutoTokenizer read."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        names = {id: name for name, id in self.specials.items()}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.named,
            "eos_token": names[self.eos_id],
            "pad_token": names[self.pad_id],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2**31 - 1,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        if self.tool_template is not None:
            both = {"default": self.chat_template, "tool_use": self.tool_template}
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in both.items() if text is not None
            ]
        generation = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
        self.model.save(str(directory / "tokenizer.json"))
        _write_json(directory / "tokenizer_config.json", config)
        if not (directory / "generation_config.json").exists():  # the checkpoint's own may say more
            _write_json(directory / "generation_config.json", generation)

    @functools.cached_property
    def call_format(self) -> str:
        """How this template spells tool calls: one of `parsers.FORMATS`."""
        return parsers.detect_format(self.tool_template or self.chat_template or "")

    def _template_inputs(self, messages, tools, variables) -> tuple[dict, Iterator[str]]:
        """The template's variables, with what the caller wrote made harmless, and private-use characters still unused."""
        variables = dict(variables or {})
        inputs = json.dumps([list(messages), tools, variables], ensure_ascii=False) + self._template_text(tools)
        unused = (char for char in map(chr, range(0xE000, 0xF900)) if char not in inputs)
        breaker = next(unused)
        made = (
            dict(self.named)
            | self._breaks.broken(variables, breaker)
            | {
                "breaker": breaker,
                "messages": self._breaks.broken(list(messages), breaker),
                "tools": self._breaks.broken(list(tools), breaker) if tools else None,
                "generation_opener": next(unused),
                "generation_closer": next(unused),
                "strftime_now": self._now().strftime,
            }
        )
        return made, unused

    def _now(self) -> datetime.datetime:
        return datetime.datetime.combine(self.date, datetime.time()) if self.date else datetime.datetime.now()

    def _render_text(self, inputs: Mapping, add_generation_prompt: bool) -> str:
        inputs = dict(inputs) | {"add_generation_prompt": add_generation_prompt}
        try:
            return chat_template_lib.compiled(self._template_text(inputs["tools"])).render(inputs)
        except (
            jinja2.TemplateError,
            TypeError,
            RecursionError,
        ) as error:  # a field that the template needs is not there
            raise ValueError(f"the chat template cannot render the messages: {error}") from error

    def _render_marked(self, inputs: Mapping, add_generation_prompt: bool, mark: str) -> str:
        """The rendered text of a template without generation blocks, the answers in it marked as such blocks are."""
        bare, prompted = (self._render_text(inputs, on) for on in (False, True))
        prompt = prompted[len(os.path.commonprefix([bare, prompted])) :]
        header = self._header(inputs, prompt, mark)
        first, *answers = bare.split(header) if header else [bare]
        text = first
        for answer in answers:
            stop = self._stop.search(answer)
            end = stop.end() if stop else len(answer)
            text += header + inputs["generation_opener"] + answer[:end] + inputs["generation_closer"] + answer[end:]
        if not add_generation_prompt:
            return text
        return text + prompt if prompted == bare + prompt else prompted

    def _header(self, inputs: Mapping, prompt: str, mark: str) -> str:
        """What opens every turn of the assistant: the generation prompt, as far as it comes before past answers too.

        Some prompts open a block of reasoning that past turns do not have (QwQ's), some past turns have one that prompts have
        not (Qwen3's last).
        """
        user = {"role": "user", "content": "-"}
        turns = [user, {"role": "assistant", "content": mark}, user]
        try:
            before, last, past = (self._render_text(inputs | {"messages": turns[:n]}, False) for n in (1, 2, 3))
        except ValueError:  # a template may want other turns first
            return prompt
        openings = [text.partition(mark)[0].removeprefix(before) for text in (last, past)]
        if not all(mark in text and text.startswith(before) for text in (last, past)):
            return prompt
        header = os.path.commonprefix([prompt, *openings])
        return header if header in (prompt, *openings) else header[: header.rfind("\n") + 1]

    def _encode_rendered(self, text: str, breaker: str) -> list[int]:
        ids = []
        for piece in self._breaks.cut.split(text):  # a piece is a special of the template's, or text without any
            if piece in self.specials:
                ids.append(self.specials[piece])
                continue
            for part in self._breaks.mended(piece, breaker):
                ids += self.encode(part)
        return ids

    @functools.cached_property
    def _spelled(self) -> dict[int, bytes]:
        byte_of = {char: byte for byte, char in enumerate(_byte_chars())}
        added = self.model.get_added_tokens_decoder()
        return {
            id: text.encode() if id in added else bytes(byte_of[char] for char in text if char in byte_of)
            for text, id in self.model.get_vocab(with_added_tokens=True).items()
        }

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(id for id, token in self.model.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def _unstructured_ids(self) -> frozenset[int]:
        """Of the specials that an answer's format is not made of."""
        names = harmony.STRUCTURE if self.call_format == "harmony" else ()
        return self.special_ids - {self.specials[name] for name in names if name in self.specials}

    @functools.cached_property
    def _breaks(self) -> special_tokens.Breaks:
        ordinary = [token.content for token in self.model.get_added_tokens_decoder().values() if not token.special]
        return special_tokens.Breaks.of(self.specials, ordinary)

    @functools.cached_property
    def _stop(self) -> re.Pattern:
        """What ends an answer in a rendered text; harmony's past answers end with what is no stop token."""
        names = {id: name for name, id in self.specials.items()}
        ends = [names[id] for id in self.stop_ids if id in names]
        ends += harmony.ENDS if self.call_format == "harmony" else ()
        return re.compile("|".join(map(re.escape, ends)))

    def _template_text(self, tools) -> str:
        text = self.tool_template if tools and self.tool_template is not None else self.chat_template
        if text is None:
            raise ValueError(
                "this tokenizer has no chat template, as base models often do not; put a chat_template.jinja beside "
                "its tokenizer.json, or render with byte_chatml"
            )
        if tools and "tools" not in text:
            raise ValueError(
                "this tokenizer's chat template knows no tools, so that the model would not see them; leave them out, or "
                "put a chat_template.jinja that renders them beside its tokenizer.json"
            )
        return text


class TextStream:
    """`push` gives the text that new ids complete: the pieces together are `decode` of all ids but the `skipped`."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]):
        self._tokenizer, self._skipped = tokenizer, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """A character whose bytes are not all there waits for them; `final` says that no more will come."""
        skipped, spelled = self._skipped, self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(spelled(id) for id in ids if id not in skipped), final)


def byte_chatml() -> Tokenizer:
    """The embedded tokenizer: 256 bytes, 3 specials, 6 markers; lossless on any text, and nothing to download."""
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    model = tokenizers.Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[], cache_capacity=0))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # Not special, so that they survive skip_special and a completion can be read back with its structure.
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in MARKERS])
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _wrap(model, chat_template_lib.CHATML, named=named, more_stops=[256])


def load(name_or_dir: str | os.PathLike, *, date: str | None = None) -> Tokenizer:
    """`byte_chatml`, or the tokenizer of a Hugging Face folder or hub id. `date`: for its templates, instead of today's."""
    try:
        day = None if date is None else datetime.date.fromisoformat(date)
    except ValueError:
        raise ValueError(f"the tokenizer's date {date!r} is no day; write it as YYYY-MM-DD") from None
    if name_or_dir == BYTE_CHATML:
        found = byte_chatml()
    else:
        folder = tokenizer_files.read(name_or_dir)
        found = _wrap(
            folder.model,
            folder.template,
            named=folder.named,
            more_stops=folder.stops,
            tool_template=folder.tool_template,
        )
    return dataclasses.replace(found, date=day)


def _wrap(
    model: tokenizers.Tokenizer,
    template: str | None,
    *,
    named: dict[str, str],
    more_stops: Sequence[int],
    tool_template: str | None = None,
) -> Tokenizer:
    layout = json.loads(model.to_str())
    if any(kind in json.dumps([layout["pre_tokenizer"], layout["normalizer"]]) for kind in ("Metaspace", "Prepend")):
        raise ValueError(
            "tokenizer.json is of the SentencePiece kind, which encodes a text otherwise when it is cut at its "
            "specials; use a model with a byte-level tokenizer (Qwen, Llama 3, GLM, DeepSeek)"
        )
    if "ByteLevel" not in json.dumps(layout["decoder"]):
        raise ValueError(
            "tokenizer.json has no byte-level decoder, so that text cannot be put together token by token; use a model "
            "with a byte-level tokenizer (Qwen, Llama 3, GLM, DeepSeek)"
        )
    model.encode_special_tokens = True
    model.no_padding()
    model.no_truncation()
    specials = {token.content: id for id, token in model.get_added_tokens_decoder().items() if token.special}
    for key, name in list(named.items()):
        is_used = key in ("eos_token", "pad_token") or key in f"{template}{tool_template}"
        if not is_used:
            continue
        if model.token_to_id(name) is None:
            raise ValueError(f"tokenizer_config.json names {name!r} its {key}, which tokenizer.json does not hold")
        specials.setdefault(name, model.token_to_id(name))
    eos_id = specials[named["eos_token"]]
    return Tokenizer(
        model,
        specials,
        template,
        pad_id=specials[named.get("pad_token", named["eos_token"])],
        eos_id=eos_id,
        stop_ids=tuple(dict.fromkeys([eos_id, *more_stops])),
        named=named,
        tool_template=tool_template,
    )


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
