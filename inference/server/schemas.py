"""The request bodies of all routes, as pydantic models: wrong types and fields that a route cannot honor are rejected by name.

`null` means "not given" everywhere, as in OpenAI's clients: the field gets its default. Numbers must be finite and of their
own type: a string is not a number, and true is not an integer.

A field is in one of four classes. No other field changes a reply, so none is ignored:
1. Fields of a schema are honored.
2. Unsupported fields of other servers' APIs (OpenAI, vLLM, SGLang) are accepted with a neutral value, which asks for no more than
   this server does.
3. Harmless fields are accepted with any value, because they change neither tokens nor text; each has its reason.
4. All others are rejected with the nearest known name.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pydantic
import pydantic_core

from inference.engine import request

FAIL_FAST = pydantic.Field(fail_fast=True)  # stops at the first mistake in a list of a million


class Neutral(NamedTuple):
    """The values of an unsupported field that ask for nothing more than this server does, and the remedy for other values."""

    values: tuple
    remedy: str = ""  # "": leave it out, or send the first value


def _fields(names: str, *values: Any, remedy: str = "") -> dict[str, Neutral]:
    """Returns the rule of unsupported fields that have the same neutral values and remedy."""
    return dict.fromkeys(names.split(), Neutral(values, remedy))


_CHECK_YOURSELF = "leave it out, and check the format of the reply yourself"
_NO_IMAGES = "leave it out: this server takes and returns text alone"
_DECODE = "leave it out, and decode token_ids, which have the stop string"
SAMPLING_UNSUPPORTED: Mapping[str, Neutral] = {
    # of another distribution than the one that a replay would sample from, another prompt, other weights, or another reply
    **_fields("frequency_penalty presence_penalty", 0),
    **_fields("repetition_penalty length_penalty", 1),
    **_fields("use_beam_search watermarking return_hidden_states return_cached_tokens_details flat_logprobs", False),
    **_fields("logits_processors", []),
    **_fields("custom_params session_params extra_args vllm_xargs kv_transfer_params ec_transfer_params", {}),
    **_fields("custom_logit_processor repetition_detection truncation_side lora_path"),
    **_fields("best_of", 1, remedy="leave it out, send n, and choose the best yourself"),
    **_fields("bad_words", [], remedy="leave it out, or send a logit_bias of -100 for words of one token"),
    **_fields("thinking_token_budget", -1, remedy="leave it out, or send max_tokens"),
    **_fields("stop_regex", [], remedy="leave it out, or send stop strings"),
    **_fields("structured_outputs", {}, remedy=_CHECK_YOURSELF),
    **_fields("guided_json guided_regex guided_choice guided_grammar guided_json_object", remedy=_CHECK_YOURSELF),
    **_fields("guided_decoding_backend guided_whitespace_pattern structural_tag", remedy=_CHECK_YOURSELF),
    **_fields("json_schema regex ebnf", remedy=_CHECK_YOURSELF),
    **_fields("truncate_prompt_tokens", remedy="leave it out, and shorten the prompt yourself"),
    **_fields("include_stop_str_in_output no_stop_trim", False, remedy=_DECODE),
    **_fields("logprob_token_ids", [], remedy="leave it out, or request the likeliest tokens"),
    **_fields("routed_experts_start_len", 0, remedy="send routed_experts_prompt_start"),
    **_fields("rid", remedy="send request_id"),
}
_IMAGES = _fields("mm_processor_kwargs media_io_kwargs", {}, [], remedy=_NO_IMAGES)
_WITH_IDS = "leave it out, and decode {} (return_token_ids = true)"
OPENAI_UNSUPPORTED = {
    **SAMPLING_UNSUPPORTED,
    **_IMAGES,
    **_fields("response_format", {"type": "text"}, {}, remedy=_CHECK_YOURSELF),
    **_fields("echo", False, remedy="leave it out; prepend the prompt yourself, or request prompt_logprobs"),
    **_fields("skip_special_tokens", True, remedy=_WITH_IDS.format("token_ids")),
    **_fields("return_prompt_text", False, remedy=_WITH_IDS.format("prompt_token_ids")),
    **_fields("return_token_offsets", False),
}
CHAT_UNSUPPORTED = {
    **OPENAI_UNSUPPORTED,
    **_fields("parallel_tool_calls", True, remedy="leave it out, and take the first tool call"),
    **_fields("functions", [], remedy="send tools"),
    **_fields("function_call", "auto", "none", remedy="send tools and tool_choice"),
    **_fields("modalities", ["text"], remedy=_NO_IMAGES),
    **_fields("audio", {}, [], remedy=_NO_IMAGES),
    **_fields("web_search_options moderation"),
    **_fields("verbosity", remedy="leave it out, or send it in chat_template_kwargs if the chat template has it"),
    **_fields("reasoning", remedy="send reasoning_effort"),
    **_fields("include_reasoning", True, remedy="leave it out, and drop reasoning_content from the reply"),
    **_fields("separate_reasoning stream_reasoning", True),
}
TEMPLATE_UNSUPPORTED = {
    **_IMAGES,
    **_fields("documents", [], remedy="send them in chat_template_kwargs if the chat template has them"),
    **_fields("chat_template", remedy="leave it out, or render the prompt yourself and send its token IDs"),
}
GENERATE_UNSUPPORTED = {
    **_fields("stream", False, remedy="leave it out, or use /v1/completions"),
    **_fields("stream_options kv_transfer_params", {}),
    **_fields("features content_parts", {}, [], remedy=_NO_IMAGES),
}

_SCHEDULING = "the order of requests changes no token"
_CACHING = "cached keys and values are of one policy version, and change no bit"
_RECORDS = "it is for the caller's records"
SAMPLING_HARMLESS = {
    **dict.fromkeys(("cache_salt", "extra_key", "skip_reading_prefix_cache"), _CACHING),
    "priority": _SCHEDULING,
    "detokenize": "the route decides whether a reply has text",
    "spaces_between_special_tokens": "texts have no special tokens",
    "session_id": _RECORDS,
    "stream_interval": "the joined pieces of a stream are the same",
}
OPENAI_HARMLESS = SAMPLING_HARMLESS | {
    **dict.fromkeys(("user", "metadata", "safety_identifier", "custom_labels"), _RECORDS),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), _CACHING),
    "store": "this server stores no reply",
    "service_tier": _SCHEDULING,
    "prediction": "a predicted reply may save time, and changes no token",
    "return_mm_kwargs": "replies have no images",
}


def _check_size(biases: Any) -> Any:
    """Checks the size of a logit bias before its entries, since pydantic collects a mistake per entry of a dict."""
    if isinstance(biases, dict) and len(biases) > request.MAX_BIAS:
        found = f"{len(biases)} logit_bias entries given"
        raise ValueError(f"{found}; at most {request.MAX_BIAS} are allowed, so leave some out")
    return biases


Ids = Annotated[list[int], FAIL_FAST]
Texts = Annotated[list[str], FAIL_FAST]
Objects = Annotated[list[dict[str, Any]], FAIL_FAST]


class Body(pydantic.BaseModel):
    """The base class of all schemas of request bodies. A subclass names the foreign fields that it accepts."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, Neutral]] = {}
    harmless: ClassVar[Mapping[str, str]] = {}  # with the reason of each

    @pydantic.model_validator(mode="before")
    @classmethod
    def read_fields(cls, values: Any) -> Any:
        """Removes fields that are null, so that they get their defaults, and rejects those that this route cannot honor."""
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        for name, value in given.items() if cls.model_config.get("extra") == "ignore" else ():
            if name not in cls.model_fields and name not in cls.harmless and (reason := cls._refusal(name, value)):
                raise pydantic_core.PydanticCustomError("foreign_field", "{reason}", {"reason": reason})
        return given

    @classmethod
    def _refusal(cls, name: str, value: Any) -> str | None:
        """Returns the reason why a field outside the schema is rejected; None if its value asks for nothing."""
        if name not in cls.unsupported:
            known = [*cls.model_fields, *cls.unsupported, *cls.harmless]
            near = difflib.get_close_matches(name[:64], known, 1)
            remedy = f"if you mean {near[0]}, send that" if near else "leave it out"
            return f"{_shown(name, 64)} is not a field of this route; {remedy}"
        neutral = cls.unsupported[name]
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral.values):
            return None
        default = " or send ".join(("leave it out", *map(json.dumps, neutral.values[:1])))
        return f"{name} = {_shown(json.dumps(value, default=repr))} is not supported; {neutral.remedy or default}"


class Sampling(Body):
    """Request fields for sampling, which all generating routes accept."""

    unsupported = SAMPLING_UNSUPPORTED
    harmless = SAMPLING_HARMLESS

    n: int = 1
    max_tokens: int | None = None  # None: the rest of the context
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: random
    stop: str | Texts = []
    stop_token_ids: Ids = []  # in addition to the tokenizer's
    ignore_eos: bool = False  # True: without the tokenizer's
    logit_bias: Annotated[dict[str, float], pydantic.BeforeValidator(_check_size)] = {}
    min_tokens: Annotated[int, pydantic.Field(ge=0)] = 0  # before it, no stop token is sampled
    allowed_token_ids: Annotated[list[int], FAIL_FAST, pydantic.Field(min_length=1)] | None = None  # None: all
    prompt_logprobs: Annotated[int, pydantic.Field(ge=0, le=1)] | None = None  # 0 or 1: of each prompt token itself
    untempered_logprobs: bool = False  # also log-probabilities at temperature 1, without filters
    return_routed_experts: bool | None = None  # None: if the server records them
    routed_experts_prompt_start: Annotated[int, pydantic.Field(ge=0)] = 0  # tokens before it are left out
    return_kept_tokens: bool = False  # true adds the tokens that the filters left to sample from
    proofs: bool = False  # true adds TOPLOC proofs to the reply
    policy_version: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None  # the only one that may generate
    policy_epoch: Annotated[int, pydantic.Field(ge=0, lt=2**48)] | None = None  # of every version that may generate
    # The next turn of a conversation may reuse keys of this version or a newer one; None: only of the version in use.
    oldest_prefix_version: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None


class SamplingParams(Sampling):
    """The field `sampling_params` in a request to vLLM's generate route."""

    unsupported = {n: x for n, x in SAMPLING_UNSUPPORTED.items() if n != "include_stop_str_in_output"}
    harmless = SAMPLING_HARMLESS | {
        "skip_special_tokens": "the reply has no text",
        "include_stop_str_in_output": "the reply has no text; token_ids have the stop string",
        "output_kind": "replies are whole",
        "return_token_ids": "the reply always has them",
    }

    logprobs: int | None = None  # up to 1: of the sampled tokens alone; more: also of so many alternatives


class Generate(Body):
    """The body of POST /inference/v1/generate."""

    unsupported = GENERATE_UNSUPPORTED
    harmless = {
        "cache_salt": _CACHING,
        "priority": _SCHEDULING,
        "return_token_ids": "the reply always has them",
    }

    token_ids: Ids
    sampling_params: SamplingParams = SamplingParams()
    model: str | None = None
    request_id: str | None = None
    proofs: bool = False  # these three as in `Sampling`, for either place
    policy_version: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None
    policy_epoch: Annotated[int, pydantic.Field(ge=0, lt=2**48)] | None = None


class Part(Body):
    """One typed part of a chat message's content. Only texts are accepted, so fields of other types are checked with the type."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Message(Body):
    """One message of a chat conversation. The chat template gets further fields as they are."""

    model_config = pydantic.ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], FAIL_FAST] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    name: str | None = None


Messages = Annotated[list[Message], FAIL_FAST]


def plain_message(message: Message) -> dict:
    """Returns role, content as one text, and reasoning of a message. Raises ValueError for a part that is not text."""
    content = message.content
    if isinstance(content, list):
        if bad := [part.type for part in content if part.type != "text" or part.text is None]:
            raise ValueError(f"a message has a part of type {bad[0]!r}; send text parts only")
        content = "".join(part.text or "" for part in content)
    plain: dict = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        plain["reasoning_content"] = reasoning
    return plain


def called_function(call: Mapping) -> dict:
    """Returns the field `function` of a tool call in a message. Raises ValueError if it has no name."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call of a message has no function.name; send it as a string")
    return function


class StreamOptions(Body):
    """Options of a streamed reply."""

    unsupported = _fields("continuous_usage_stats", False)
    harmless = {"include_obfuscation": "padding of the events changes no text"}

    include_usage: bool = False


class Template(Body):
    """Request fields that the chat template receives in addition to the messages."""

    tools: Objects | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    def variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template that the request sets."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs


class TextPrompt(Body):
    """Request fields for a prompt that is a text."""

    add_special_tokens: bool = True  # to the text, such as Llama's first token, unless it begins with that
    parse_special: bool = True  # names of special tokens in the text become these tokens; false: they are text

    def parsing(self) -> dict[str, bool]:
        """Returns the options of `Tokenizer.prompt_ids`."""
        return {"add_special_tokens": self.add_special_tokens, "parse_special": self.parse_special}


class OpenAI(Sampling):
    """Request fields that both of OpenAI's completion routes (chat and text) accept."""

    unsupported = OPENAI_UNSUPPORTED
    harmless = OPENAI_HARMLESS

    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # true: tokens of logprobs are written `token_id:<id>`


class Chat(OpenAI, Template):
    """The body of POST /v1/chat/completions."""

    unsupported = CHAT_UNSUPPORTED | TEMPLATE_UNSUPPORTED | _fields("add_special_tokens", False)

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tool_choice: str | dict[str, Any] = "auto"

    def check_tool_choice(self) -> None:
        """Raises ValueError if `tool_choice` names a tool, or requires one."""
        if self.tool_choice not in ("auto", "none"):
            raise ValueError(f'tool_choice {self.tool_choice!r} cannot be enforced; use "auto" or "none"')


class ChatTokens(Chat):
    """The body of POST /v1/chat/completions/tokens: the prompt is `tokens`, and the messages are ignored."""

    tokens: Ids
    messages: Messages = []


class Completions(OpenAI, TextPrompt):
    """The body of POST /v1/completions."""

    unsupported = {
        **OPENAI_UNSUPPORTED,
        **_fields("suffix", ""),
        **_fields("prompt_embeds", remedy="send the prompt as text or token IDs"),
    }

    prompt: str | Ids | Texts | Annotated[list[Ids], FAIL_FAST]
    logprobs: int | None = None


class Tokenize(Template, TextPrompt):
    """The body of POST /tokenize: messages or a prompt."""

    unsupported = TEMPLATE_UNSUPPORTED | _fields("return_token_strs", False)

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None

    def given_prompt(self) -> str | None:
        """Returns the prompt; None if the request has messages instead. Raises ValueError if it has both or neither."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("the request has both or neither of prompt and messages; send one of them")
        return self.prompt


class Detokenize(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Ids


class UpdateWeights(Body):
    """The body of POST /update_weights: a version of the broadcast, the newest if null, or a folder of weights."""

    version: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None
    weight_dir: str | None = None
    epoch: Annotated[int, pydantic.Field(ge=0)] | None = None  # that the version must be of; null: any
    digest: Annotated[str, pydantic.Field(pattern="^([0-9a-f]{64})?$")] = ""  # SHA-256 of its manifest; "": any
    rollback: bool = False  # true allows an older version than the one in use


class UnloadAdapter(Body):
    """The body of POST /v1/unload_lora_adapter."""

    unsupported = _fields("lora_int_id", remedy="send lora_name alone")

    lora_name: Annotated[str, pydantic.Field(min_length=1)]


class LoadAdapter(UnloadAdapter):
    """The body of POST /v1/load_lora_adapter: a name for requests, and a folder that PEFT wrote."""

    unsupported = _fields("load_inplace", False, remedy="unload the adapter first")

    lora_path: Annotated[str, pydantic.Field(min_length=1)]


def describe(error: pydantic.ValidationError) -> str:
    """Returns the first mistake in a request body as one line: the field, the rule, the value."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return f"the request body is not JSON: {first['msg']}"
    # For a union, the path contains names of types, which a client does not know.
    path = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())
    if first["type"] == "foreign_field":
        return f"{path}.{first['msg']}" if path else first["msg"]
    if first["type"] == "missing":
        return f"{path} is missing; add it to the request body"
    return f"{path or 'the request body'}: {first['msg']}; got {_shown(repr(first['input']))}"


def _shown(text: str, size: int = 80) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."
