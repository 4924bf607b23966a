"""The request bodies of all routes, as pydantic models: wrong types are rejected by name, unknown keys are ignored.

`null` means "not given" everywhere, as in OpenAI's clients: the field gets its default. Numbers must be finite and of their
own type: a string is not a number, and true is not an integer.
"""

from typing import Annotated, Any, Literal

import pydantic

from inference.engine import request

FAIL_FAST = pydantic.Field(fail_fast=True)  # stops at the first mistake in a list of a million


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
    """The base class of all schemas of request bodies."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, values: Any) -> Any:
        """Removes fields that are null from a request body, so that they get their defaults."""
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class Sampling(Body):
    """Request fields for sampling, which all generating routes accept."""

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
    prompt_logprobs: int | None = None
    untempered_logprobs: bool = False  # also log-probabilities at temperature 1, without filters
    return_routed_experts: bool | None = None  # None: if the server records them
    routed_experts_prompt_start: Annotated[int, pydantic.Field(ge=0)] = 0  # tokens before it are left out
    frequency_penalty: float = 0
    presence_penalty: float = 0
    repetition_penalty: float = 1


class SamplingParams(Sampling):
    """The field `sampling_params` in a request to vLLM's generate route."""

    logprobs: int | None = None


class Generate(Body):
    """The body of POST /inference/v1/generate."""

    token_ids: Ids
    sampling_params: SamplingParams = SamplingParams()
    request_id: str | None = None
    proofs: bool = False  # true adds TOPLOC proofs to the reply
    policy_version: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None  # the only one that may generate
    policy_epoch: Annotated[int, pydantic.Field(ge=0, lt=2**48)] | None = None  # of every version that may generate


class Part(Body):
    """One typed part of a chat message's content, such as a text."""

    type: str
    text: str | None = None


class Message(Body):
    """One message of a chat conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], FAIL_FAST] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    name: str | None = None


Messages = Annotated[list[Message], FAIL_FAST]


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: bool = False


class Template(Body):
    """Request fields that the chat template receives in addition to the messages."""

    tools: Objects | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


class OpenAI(Sampling):
    """Request fields that both of OpenAI's completion routes (chat and text) accept."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


class Chat(OpenAI, Template):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tool_choice: str | dict[str, Any] = "auto"
    response_format: dict[str, Any] = {"type": "text"}


class ChatTokens(Chat):
    """The body of POST /v1/chat/completions/tokens: the prompt is `tokens`, and the messages are ignored."""

    tokens: Ids
    messages: Messages = []


class Completions(OpenAI):
    """The body of POST /v1/completions."""

    prompt: str | Ids | Texts | Annotated[list[Ids], FAIL_FAST]
    add_special_tokens: bool = True  # to a text prompt, such as Llama's first token
    logprobs: int | None = None
    echo: bool = False


class Tokenize(Template):
    """The body of POST /tokenize: messages or a prompt."""

    prompt: str | None = None
    add_special_tokens: bool = True  # as in Completions
    messages: Messages | None = None


class Detokenize(Body):
    """The body of POST /detokenize."""

    tokens: Ids


class UpdateWeights(Body):
    """The body of POST /update_weights: a version of the broadcast, the newest if null, or a folder of weights."""

    version: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None
    weight_dir: str | None = None
    epoch: Annotated[int, pydantic.Field(ge=0)] | None = None  # that the version must be of; null: any
    digest: Annotated[str, pydantic.Field(pattern="^([0-9a-f]{64})?$")] = ""  # SHA-256 of its manifest; "": any
    rollback: bool = False  # true allows an older version than the one in use


def describe(error: pydantic.ValidationError) -> str:
    """Returns the first mistake in a request body as one line: the field, the rule, the value."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return f"the request body is not JSON: {first['msg']}"
    # For a union, the path contains names of types, which a client does not know.
    path = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())
    if first["type"] == "missing":
        return f"{path} is missing; add it to the request body"
    value = repr(first["input"])
    return f"{path or 'the request body'}: {first['msg']}; got {value if len(value) <= 80 else value[:77] + '...'}"
