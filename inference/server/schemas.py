"""What clients may send, as pydantic models: wrong types are refused by name, unknown keys are ignored.

`null` stands for "not given" everywhere, as OpenAI's clients have it. Numbers must be finite and of their own type: a
string is no number, true is no integer. What a field means is in inference/server/inference_server.py, which turns these into requests.
"""

from typing import Annotated, Any, Literal

import pydantic


class _FailFast(pydantic.FailFast):
    """One mistake in a list of a million ids is enough; hashable, as a member of a union has to be."""

    __hash__ = object.__hash__


Ids = Annotated[list[int], _FailFast()]


class Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Sampling(Body):
    """Fields that every generating route shares."""

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    untempered_logprobs: bool | None = None  # ours
    return_routed_experts: bool | None = None  # null: where the server records them
    routed_experts_prompt_start: Annotated[int, pydantic.Field(ge=0)] | None = None  # tokens whose experts are known
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None


class SamplingParams(Sampling):
    """vLLM's sampling_params."""

    logprobs: int | None = None


class Generate(Body):
    """POST /inference/v1/generate."""

    token_ids: Ids
    sampling_params: SamplingParams = SamplingParams()
    request_id: str | None = None
    proofs: bool | None = None  # ours


class Part(Body):
    type: str
    text: str | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(Body):
    include_usage: bool | None = None


class Rendering(Body):
    """How messages become a prompt."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class Chat(Sampling, Rendering):
    """POST /v1/chat/completions."""

    model: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatTokens(Chat):
    """POST /v1/chat/completions/tokens: the prompt is `tokens`; the messages only say what they spell."""

    tokens: Ids
    messages: list[Message] = []


class Completions(Sampling):
    """POST /v1/completions."""

    prompt: str | Ids | list[str] | list[Ids]
    add_special_tokens: bool | None = None  # to a prompt of text, such as Llama's first token; null: yes
    model: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class Tokenize(Body):
    """POST /tokenize: messages or a prompt."""

    prompt: str | None = None
    add_special_tokens: bool | None = None  # as in Completions
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class Detokenize(Body):
    """POST /detokenize."""

    tokens: Ids


class UpdateWeights(Body):
    """POST /update_weights: a version of the broadcast, the newest (null), or a folder of weights."""

    version: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None
    weight_dir: str | None = None


def mistake(error: pydantic.ValidationError) -> str:
    """The first mistake in one line: where, what is wanted, what came."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return f"the request body is not JSON: {first['msg']}"
    # Of a union pydantic names the member it tried; the name of a type in the path helps nobody.
    path = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())
    if first["type"] == "missing":
        return f"{path} is missing"
    came = repr(first["input"])
    return f"{path or 'the request body'}: {first['msg']}; got {came if len(came) <= 80 else came[:77] + '...'}"
