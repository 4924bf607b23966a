"""The routes of OpenAI's API: chat and completions; and vLLM's tokenize and detokenize.

A chat's messages are rendered by the tokenizer's chat template, or its `tokens` are used unchanged. replies.py has the form of replies.

`seed`, and `proofs` with the server's signature if requested, are those of generate_routes.py; in a stream, a choice has them in its last
event, and `seed` in all.

Left out, and rejected: forced tool choice, images, and the unsupported fields of schemas.py.
"""

import asyncio
import collections
import dataclasses
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence

import fastapi
from fastapi import responses

from inference.rollouts import completion as completion_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import generate_routes, inference_server, replies, schemas, web


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer, max_body_bytes: int) -> None:
    """Adds the OpenAI-compatible routes (chat, completions, tokenize) to an app."""

    @app.post("/v1/chat/completions")
    async def chat(http: fastapi.Request):
        body = await web.read_schema(http, schemas.Chat, max_body_bytes)
        return await _complete_chat(server, http, body, _render(server, body))

    @app.post("/v1/chat/completions/tokens")
    async def chat_tokens(http: fastapi.Request):
        body = await web.read_schema(http, schemas.ChatTokens, max_body_bytes)
        return await _complete_chat(server, http, body, body.tokens)

    @app.post("/v1/completions")
    async def completions(http: fastapi.Request):
        body = await web.read_schema(http, schemas.Completions, max_body_bytes)
        return await _complete_text(server, http, body)

    @app.post("/tokenize")
    async def tokenize(http: fastapi.Request):
        body = await web.read_schema(http, schemas.Tokenize, max_body_bytes)
        server.adapter_of(body.model)
        if (prompt := body.given_prompt()) is None:
            tokens = _render(server, body)
        else:
            tokens = server.engine.tokenizer.prompt_ids(prompt, **body.parsing())
        return {"count": len(tokens), "max_model_len": server.engine.config.max_model_len, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(http: fastapi.Request):
        body = await web.read_schema(http, schemas.Detokenize, max_body_bytes)
        server.adapter_of(body.model)
        vocab_size = server.engine.model.vocab_size
        if bad := [token for token in body.tokens if not 0 <= token < vocab_size]:
            raise ValueError(f"token ID {bad[0]} is outside the vocabulary; send 0 to {vocab_size - 1}")
        return {"prompt": server.engine.tokenizer.decode(body.tokens, skip_special=False)}


async def _complete_chat(server, http: fastapi.Request, body: schemas.Chat, tokens: list[int]) -> responses.Response:
    body.check_tool_choice()
    if body.top_logprobs and not body.logprobs:
        raise ValueError(f"top_logprobs = {body.top_logprobs} needs logprobs; send logprobs = true, too")
    if body.max_completion_tokens is not None:
        body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
    return await _reply(server, http, body, [tokens], body.top_logprobs, replies.ChatFormat)


async def _complete_text(server, http: fastapi.Request, body: schemas.Completions) -> responses.Response:
    is_list = isinstance(body.prompt, list) and not (body.prompt and isinstance(body.prompt[0], int))
    prompts: Sequence = body.prompt if is_list else [body.prompt]
    if not 1 <= len(prompts) <= 1024:
        raise ValueError(f"prompt has {len(prompts)} entries; send 1 to 1024")
    if body.stream and len(prompts) > 1:
        raise ValueError(f"prompt has {len(prompts)} entries and stream = true; send one prompt at a time")
    if body.max_tokens is None:
        body = body.model_copy(update={"max_tokens": 16})  # OpenAI's default, on this route only
    prompt_ids = functools.partial(server.engine.tokenizer.prompt_ids, **body.parsing())
    tokens: list = [prompt_ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return await _reply(server, http, body, tokens, max(body.logprobs or 0, 0), replies.TextFormat)


def _render(server: inference_server.InferenceServer, body: schemas.Chat | schemas.Tokenize) -> list[int]:
    """Returns the prompt's token IDs of a conversation. Raises ValueError if the chat template rejects its messages."""
    rendered = server.engine.tokenizer.render(
        [_template_message(message) for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt or body.continue_final_message,
        tools=body.tools,
        variables=body.variables(),
        continues=body.continue_final_message,
    )
    return rendered.token_ids


def _template_message(message: schemas.Message) -> dict:
    """Converts a request's message to the form of chat templates: content is a string, arguments of tool calls are objects."""
    plain = schemas.plain_message(message)
    for name, remedy in (("function_call", "tool_calls"), ("audio", "content as text")):
        if getattr(message, name, None):
            raise ValueError(f"a message has {name}, which is not supported; send {remedy}")
    if message.tool_calls:
        plain["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return (message.model_extra or {}) | plain


def _template_call(call: dict) -> dict:
    function = schemas.called_function(call)
    arguments = function.get("arguments")
    try:
        loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        loaded = arguments
    return call | {"function": function | {"arguments": loaded if isinstance(loaded, dict) else arguments or {}}}


async def _reply(
    server,
    http: fastapi.Request,
    body,
    prompts: Sequence[list[int]],
    top_logprobs: int,
    format_type: type[replies.TextFormat],
) -> responses.Response:
    """Completes the prompts and returns a JSON reply, or a stream of events for the only prompt.

    Routed experts are included by default only in unstreamed replies with token IDs.
    """
    for name in ("return_routed_experts", "prompt_logprobs"):
        if body.stream and (value := getattr(body, name)) is not None and value is not False:
            raise ValueError(f"{name} = {value} is not supported in a stream; leave it out, or send stream = false")
    if body.return_routed_experts is None and (body.stream or not body.return_token_ids):
        body = body.model_copy(update={"return_routed_experts": False})
    options = {"top_logprobs": top_logprobs, "adapter": server.adapter_of(body.model)}
    requests = [server.make_request(body, tokens, **options) for tokens in prompts]
    head = {
        "id": f"{format_type.prefix}-{body.request_id or uuid.uuid4().hex}",
        "object": format_type.chunk_kind if body.stream else format_type.kind,
        "created": int(time.time()),
        "model": body.model or server.model_name,
        "seed": requests[0].seed,
    }
    if body.stream:
        return _EventStream(server, format_type(server.engine.tokenizer, body, requests[0]), head)
    answered = await web.run_until_disconnect(http, _complete(server.scheduler, requests))
    choices, prompt_fields = [], {}
    for request, completions in zip(requests, answered, strict=True):
        formatter = format_type(server.engine.tokenizer, body, request)
        for index, completion in enumerate(completions):
            prompt_fields = generate_routes.prompt_logprobs(request, completion)
            choice = {"index": len(choices)} | formatter.choice(index, completion)
            choice |= generate_routes.extra_fields(server, request, completion, index, body.routed_experts_prompt_start)
            if body.return_token_ids:
                prompt_fields["prompt_token_ids"] = list(request.tokens)
                choice["token_ids"] = completion.tokens
            choices.append(choice if format_type.is_chat else choice | prompt_fields)
    usage = replies.usage(list(zip(requests, answered, strict=True)))
    body_fields = {"policy_epoch": answered[0][0].epoch} | (prompt_fields if format_type.is_chat else {})
    return responses.JSONResponse(head | {"choices": choices, "usage": usage} | body_fields)


async def _complete(scheduler: scheduler_lib.Scheduler, requests: Sequence) -> list[list[completion_lib.Completion]]:
    """Runs requests; returns the list of completions of each. If one request fails or the caller is cancelled, cancels all."""
    futures = []
    try:
        for request in requests:
            futures.append(asyncio.wrap_future(scheduler.submit(request)))
        return await asyncio.gather(*futures)
    finally:
        for future in futures:
            future.cancel()


class _EventStream(responses.StreamingResponse):
    """A streamed HTTP reply: server-sent events with the pieces of one request's completions.

    Creating the reply submits the request to the scheduler, so a rejection still gets an error status. The request is
    cancelled when the client disconnects, also before the first event.
    """

    def __init__(self, server: inference_server.InferenceServer, formatter: replies.TextFormat, head: dict):
        # (sample index, piece, completion so far); None at the end
        self._server, self._loop, self._pieces = server, asyncio.get_running_loop(), asyncio.Queue()
        self._num_sent = collections.Counter()  # by sample index
        self._future = server.scheduler.submit(formatter.request, self._listen)
        self._future.add_done_callback(lambda _: self._put(None))
        super().__init__(
            self._events(formatter, head), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def __call__(self, scope, receive, send) -> None:
        """Sends the events until they end or the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._future.cancel()

    def _listen(self, index: int, completion: completion_lib.Completion) -> None:
        """Queues the new tokens of sample `index` for sending. The scheduler calls it in its own thread after each decode."""
        start, self._num_sent[index] = self._num_sent[index], len(completion.tokens)
        lists = {name: getattr(completion, name)[start:] for name in ("tokens", "logprobs", "top")}
        self._put((index, dataclasses.replace(completion, **lists), completion))

    def _put(self, item: tuple[int, completion_lib.Completion, completion_lib.Completion] | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, item)

    async def _events(self, formatter: replies.TextFormat, head: dict) -> AsyncIterator[str]:
        request, body = formatter.request, formatter.body
        for index in range(request.num_samples if formatter.opening else 0):
            prompt = {"prompt_token_ids": list(request.tokens)} if body.return_token_ids and index == 0 else {}
            opening = {"index": index, "seed": request.seed_of(index)} | (formatter.opening or {})
            yield replies.event(head | prompt | {"choices": [opening]})
        while (item := await self._pieces.get()) is not None:
            index, piece, completion = item
            fields: dict = {"token_ids": piece.tokens} if body.return_token_ids else {}
            if piece.finish_reason:
                fields |= generate_routes.extra_fields(self._server, request, completion, index, 0)
            yield replies.event(head | {"choices": [{"index": index} | formatter.delta(index, piece) | fields]})
        try:
            completions = self._future.result()
        except (scheduler_lib.Fault, scheduler_lib.Closed) as error:  # the status was sent before
            yield replies.event({"error": web.error_body(500, str(error), "engine_error")})
            return
        if body.stream_options.include_usage:
            yield replies.event(head | {"choices": [], "usage": replies.usage([(request, completions)])})
        yield "data: [DONE]\n\n"
