"""The routes of OpenAI's API: chat and completions; and vLLM's tokenize and detokenize.

A chat's messages are rendered by the tokenizer's chat template, or its `tokens` are used unchanged. IDs become text up to a
stop string. Reasoning and tool calls are parsed out of it (models/text/parsers.py).

Streamed text is held back while it may become a marker or a whole character, so the pieces joined equal the text of a reply
without streaming. A tool call is sent when it is complete.

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
from collections.abc import AsyncIterator, Callable, Sequence

import fastapi
from fastapi import responses

from inference.engine import request as request_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import generate_routes, inference_server, schemas, web
from models.text import parsers
from models.text import tokenizer as tokenizer_lib


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
        if (body.prompt is None) == (body.messages is None):
            raise ValueError("the request has both or neither of prompt and messages; send one of them")
        if body.prompt is None:
            tokens = _render(server, body)
        else:
            tokens = server.engine.tokenizer.prompt_ids(body.prompt, **body.parsing())
        return {"count": len(tokens), "max_model_len": server.engine.config.max_model_len, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(http: fastapi.Request):
        body = await web.read_schema(http, schemas.Detokenize, max_body_bytes)
        server.adapter_of(body.model)
        vocab_size = server.engine.model.vocab_size
        if bad := [token for token in body.tokens if not 0 <= token < vocab_size]:
            raise ValueError(f"token ID {bad[0]} is outside the vocabulary; send 0 to {vocab_size - 1}")
        return {"prompt": server.engine.tokenizer.decode(body.tokens, skip_special=False)}


# ---- requests --------------------------------------------------------------------------------------------------------


async def _complete_chat(server, http: fastapi.Request, body: schemas.Chat, tokens: list[int]) -> responses.Response:
    if body.tool_choice not in ("auto", "none"):
        raise ValueError(f'tool_choice {body.tool_choice!r} cannot be enforced; use "auto" or "none"')
    if body.top_logprobs and not body.logprobs:
        raise ValueError(f"top_logprobs = {body.top_logprobs} needs logprobs; send logprobs = true, too")
    if body.max_completion_tokens is not None:
        body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
    return await _reply(server, http, body, [tokens], body.top_logprobs, _ChatFormat)


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
    return await _reply(server, http, body, tokens, max(body.logprobs or 0, 0), _TextFormat)


def _render(server: inference_server.InferenceServer, body: schemas.Chat | schemas.Tokenize) -> list[int]:
    """Returns the prompt's token IDs of a conversation. Raises ValueError if the chat template rejects its messages."""
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    rendered = server.engine.tokenizer.render(
        [_template_message(message) for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt or body.continue_final_message,
        tools=body.tools,
        variables=variables,
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


# ---- replies ---------------------------------------------------------------------------------------------------------


class _TextFormat:
    """Formats the completions of one request as OpenAI's `choices`, whole or, in a stream, by pieces (Completions of the new tokens)."""

    is_chat, prefix, kind, chunk_kind = False, "cmpl", "text_completion", "text_completion"
    opening: dict | None = None

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer, body, request: request_lib.GenerateRequest):
        self._tokenizer, self.body, self.request = tokenizer, body, request
        self._in_reasoning = tokenizer.opens_reasoning(request.tokens)
        # By sample index; filled by a stream alone.
        self._streams = collections.defaultdict(lambda: tokenizer.text_stream(structured=self.is_chat))
        self._texts = collections.defaultdict(str)
        self._places = collections.defaultdict(tokenizer.text_stream)  # by sample index; for offsets
        self._sent = collections.defaultdict(lambda: parsers.Parsed(None, "", ()))

    def choice(self, index: int, completion: request_lib.Completion) -> dict:
        parsed = self._parse(self._tokenizer.decode(completion.tokens), True)
        return {"text": parsed.content} | self._end(index, completion, parsed)

    def delta(self, index: int, piece: request_lib.Completion) -> dict:
        before, parsed = self._grow(index, piece)
        return {"text": parsed.content[len(before.content) :]} | self._end(index, piece, parsed)

    def _grow(self, index: int, piece: request_lib.Completion) -> tuple[parsers.Parsed, parsers.Parsed]:
        """Appends a streamed piece to sample `index`. Returns the sample's parsed text (before, after) the piece."""
        final = bool(piece.finish_reason)
        self._texts[index] += self._streams[index].push(piece.tokens, final=final)
        before, self._sent[index] = self._sent[index], self._parse(self._texts[index], final)
        return before, self._sent[index]

    def _parse(self, text: str, final: bool) -> parsers.Parsed:
        return parsers.Parsed(None, _cut_at_stop(text, self.request.stop_texts, final), ())

    def _end(self, index: int, piece: request_lib.Completion, parsed: parsers.Parsed) -> dict:
        reason = "tool_calls" if parsed.calls and piece.finish_reason == "stop" else piece.finish_reason
        has_logprobs = self.body.logprobs is not None and self.body.logprobs is not False
        return {"finish_reason": reason or None, "logprobs": self._logprobs(index, piece) if has_logprobs else None}

    def _logprobs(self, index: int, piece: request_lib.Completion) -> dict:
        tokens = [self._spell(token) for token in piece.tokens]
        # It may not be one of the likeliest.
        own = [{token: x} for token, x in zip(tokens, piece.logprobs, strict=True)]
        tops = [{self._spell(token): x for token, x in top} for top in piece.top]
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            "top_logprobs": [top | one for top, one in zip(tops, own, strict=True)] if tops else None,
            "text_offset": self._places[index].offsets(piece.tokens),
        }

    def _spell(self, token: int) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokenizer.spell(token)


class _ChatFormat(_TextFormat):
    is_chat, prefix, kind, chunk_kind = True, "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}

    def choice(self, index: int, completion: request_lib.Completion) -> dict:
        parsed = self._parse(self._tokenizer.structured_text(completion.tokens), True)
        return {"message": parsed.message(_call_id)} | self._end(index, completion, parsed)

    def delta(self, index: int, piece: request_lib.Completion) -> dict:
        before, parsed = self._grow(index, piece)
        new_calls = list(enumerate(parsed.calls))[len(before.calls) :]
        delta = {
            "reasoning_content": (parsed.reasoning or "")[len(before.reasoning or "") :],
            "content": parsed.content[len(before.content) :],
            "tool_calls": [{"index": at} | call.field(_call_id(at)) for at, call in new_calls],
        }
        return {"delta": {name: new for name, new in delta.items() if new}} | self._end(index, piece, parsed)

    def _parse(self, text: str, final: bool) -> parsers.Parsed:
        return parsers.parse(
            _cut_at_stop(text, self.request.stop_texts, final),
            self._tokenizer.call_format,
            tools=self.body.tools,
            read_calls=bool(self.body.tools) and self.body.tool_choice != "none",
            in_reasoning=self._in_reasoning,
            final=final,
        )

    def _logprobs(self, index: int, piece: request_lib.Completion) -> dict:
        def entry(token: int, logprob: float) -> dict:
            spelled = self._tokenizer.token_bytes(token)
            return {"token": self._spell(token), "logprob": logprob, "bytes": list(spelled)}

        tops = piece.top or [[]] * len(piece.tokens)
        rows = zip(piece.tokens, piece.logprobs, tops, strict=True)
        content = [entry(token, x) | {"top_logprobs": [entry(*pair) for pair in top]} for token, x, top in rows]
        return {"content": content}


async def _reply(
    server, http: fastapi.Request, body, prompts: Sequence[list[int]], top_logprobs: int, format_type: type[_TextFormat]
) -> responses.Response:
    """Completes the prompts and returns a JSON reply, or a stream of events for the only prompt.

    Routed experts are included by default only in unstreamed replies with token IDs.
    """
    for name in ("return_routed_experts", "prompt_logprobs"):
        if body.stream and (value := getattr(body, name)) is not None and value is not False:
            raise ValueError(f"{name} = {value} is not supported in a stream; send stream = false")
    if body.return_routed_experts is None and (body.stream or not body.return_token_ids):
        body = body.model_copy(update={"return_routed_experts": False})
    options = {"top_logprobs": top_logprobs, "adapter": server.adapter_of(body.model)}
    requests = [server.request(body, tokens, **options) for tokens in prompts]
    make_format = functools.partial(format_type, server.engine.tokenizer, body)  # called for accepted requests
    head = {
        "id": f"{format_type.prefix}-{body.request_id or uuid.uuid4().hex}",
        "object": format_type.chunk_kind if body.stream else format_type.kind,
        "created": int(time.time()),
        "model": body.model or server.model_name,
        "seed": requests[0].seed,
    }
    if body.stream:
        return _EventStream(server, requests[0], make_format, head)
    answered = await web.run_until_disconnect(http, _complete(server.scheduler, requests))
    choices, prompt_fields = [], {}
    for request, completions in zip(requests, answered, strict=True):
        formatter = make_format(request)
        for index, completion in enumerate(completions):
            prompt_fields = generate_routes.prompt_logprobs(request, completion)
            choice = {"index": len(choices)} | formatter.choice(index, completion)
            choice |= generate_routes.extra_fields(server, request, completion, index, body.routed_experts_prompt_start)
            if body.return_token_ids:
                prompt_fields["prompt_token_ids"] = list(request.tokens)
                choice["token_ids"] = completion.tokens
            choices.append(choice if format_type.is_chat else choice | prompt_fields)
    usage = generate_routes.usage(list(zip(requests, answered, strict=True)))
    body_fields = {"policy_epoch": answered[0][0].epoch} | (prompt_fields if format_type.is_chat else {})
    return responses.JSONResponse(head | {"choices": choices, "usage": usage} | body_fields)


async def _complete(scheduler: scheduler_lib.Scheduler, requests: Sequence) -> list[list[request_lib.Completion]]:
    """Runs requests; returns the list of completions of each. If one request fails or the caller is cancelled, cancels all."""
    futures = []
    try:
        for request in requests:
            futures.append(asyncio.wrap_future(scheduler.submit(request)))
        return await asyncio.gather(*futures)
    finally:
        for future in futures:
            future.cancel()


def _call_id(_index: int) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _cut_at_stop(text: str, stops: Sequence[str], final: bool) -> str:
    """Returns the text before the first stop string. Unless `final`, also drops an end that could grow into a stop string."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    return text if final else parsers.without_partial(text, stops)


class _EventStream(responses.StreamingResponse):
    """A streamed HTTP reply: server-sent events with the pieces of one request's completions.

    Creating the reply submits the request to the scheduler, so a rejection still gets an error status. The request is
    cancelled when the client disconnects, also before the first event.
    """

    def __init__(
        self,
        server: inference_server.InferenceServer,
        request: request_lib.GenerateRequest,
        make_format: Callable[[request_lib.GenerateRequest], _TextFormat],
        head: dict,
    ):
        # (sample index, piece, completion so far); None at the end
        self._server, self._loop, self._pieces = server, asyncio.get_running_loop(), asyncio.Queue()
        self._num_sent = collections.Counter()  # by sample index
        self._future = server.scheduler.submit(request, self._listen)
        self._future.add_done_callback(lambda _: self._put(None))
        events = self._events(make_format(request), head)
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def __call__(self, scope, receive, send) -> None:
        """Sends the events until they end or the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._future.cancel()

    def _listen(self, index: int, completion: request_lib.Completion) -> None:
        """Queues the new tokens of sample `index` for sending. The scheduler calls it in its own thread after each decode."""
        start, self._num_sent[index] = self._num_sent[index], len(completion.tokens)
        lists = {name: getattr(completion, name)[start:] for name in ("tokens", "logprobs", "top")}
        self._put((index, dataclasses.replace(completion, **lists), completion))

    def _put(self, item: tuple[int, request_lib.Completion, request_lib.Completion] | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, item)

    async def _events(self, formatter: _TextFormat, head: dict) -> AsyncIterator[str]:
        request, body = formatter.request, formatter.body
        for index in range(request.num_samples if formatter.opening else 0):
            prompt = {"prompt_token_ids": list(request.tokens)} if body.return_token_ids and index == 0 else {}
            opening = {"index": index, "seed": generate_routes.seed(request, index)} | (formatter.opening or {})
            yield _event(head | prompt | {"choices": [opening]})
        while (item := await self._pieces.get()) is not None:
            index, piece, completion = item
            fields: dict = {"token_ids": piece.tokens} if body.return_token_ids else {}
            if piece.finish_reason:
                fields |= generate_routes.extra_fields(self._server, request, completion, index, 0)
            yield _event(head | {"choices": [{"index": index} | formatter.delta(index, piece) | fields]})
        try:
            completions = self._future.result()
        except (scheduler_lib.Fault, scheduler_lib.Closed) as error:  # the status was sent before
            yield _event({"error": web.error_body(500, str(error), "engine_error")})
            return
        if body.stream_options.include_usage:
            yield _event(head | {"choices": [], "usage": generate_routes.usage([(request, completions)])})
        yield "data: [DONE]\n\n"


def _event(chunk: dict) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"
