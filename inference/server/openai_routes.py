"""The OpenAI-style routes: chat, completions, tokenize, detokenize, models.

1. A chat's messages are rendered by the tokenizer's template (or its `tokens` are taken as they are).
2. The scheduler answers, all at once or, streamed, after each engine call.
3. Ids become text without what a stop string cut off; reasoning and tool calls are read out of it (models/text/parsers.py).

Streamed text is held back while it may still become a marker or the rest of a character, so that the pieces put together
are what the whole answer would have been. A tool call is sent whole, when it is complete.

Left out, and refused rather than ignored: penalties, JSON and grammar modes, forced tool choice, echo, images.
"""

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence

import fastapi
from fastapi import responses

from inference.scheduler import scheduler as scheduler_lib
from inference.server import generate_routes, inference_server, schemas, web
from models.text import parsers
from models.text import tokenizer as tokenizer_lib


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer, max_body_bytes: int) -> None:
    async def body_of(request: fastapi.Request) -> bytes:
        return await web.read_body(request, max_body_bytes)

    @app.post("/v1/chat/completions")
    async def chat(request: fastapi.Request):
        body = schemas.Chat.model_validate_json(await body_of(request))
        return await _answer_chat(server, request, body, render(server, body))

    @app.post("/v1/chat/completions/tokens")
    async def chat_tokens(request: fastapi.Request):
        body = schemas.ChatTokens.model_validate_json(await body_of(request))
        return await _answer_chat(server, request, body, body.tokens)

    @app.post("/v1/completions")
    async def completions(request: fastapi.Request):
        body = schemas.Completions.model_validate_json(await body_of(request))
        return await _answer_completions(server, request, body)

    @app.post("/tokenize")
    async def tokenize(request: fastapi.Request):
        body = schemas.Tokenize.model_validate_json(await body_of(request))
        if (body.prompt is None) == (body.messages is None):
            raise ValueError("send either prompt or messages")
        tokens = render(server, body) if body.prompt is None else _prompt_ids(server, body, body.prompt)
        return {"count": len(tokens), "max_model_len": server.max_model_len, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(request: fastapi.Request):
        body = schemas.Detokenize.model_validate_json(await body_of(request))
        _check_ids(body.tokens, server)
        return {"prompt": server.tokenizer.decode(body.tokens, skip_special=False)}

    @app.get("/v1/models")
    async def models():
        card = {
            "id": server.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "intellax",
            "max_model_len": server.max_model_len,
            "policy_version": server.scheduler.version,
            "quantization": server.store.quantization
            if server.store
            else "none",  # with any, near that version, not it
        }
        return {"object": "list", "data": [card]}


def render(server: inference_server.InferenceServer, body: schemas.Rendering | schemas.Tokenize) -> list[int]:
    """The prompt of a conversation. ValueError where it cannot be rendered."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    rendered = server.tokenizer.render(
        [_plain(message) for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=body.tools,
        variables=variables,
    )
    return rendered.token_ids


# ---- chat ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Reader:
    """How the answers of one chat request are read."""

    tokenizer: tokenizer_lib.Tokenizer
    tools: Sequence[dict] | None
    read_calls: bool
    in_reasoning: bool
    stops: tuple[str, ...]

    def read(self, text: str, *, final: bool) -> parsers.Parsed:
        return parsers.parse(
            _cut_at_stop(text, self.stops, final),
            self.tokenizer.call_format,
            tools=self.tools,
            read_calls=self.read_calls,
            in_reasoning=self.in_reasoning,
            final=final,
        )


async def _answer_chat(
    server: inference_server.InferenceServer, request: fastapi.Request, body: schemas.Chat, tokens: list[int]
):
    _check_chat(body)
    if body.max_completion_tokens is not None:
        body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
    asked = _asked(server, body, tokens, (body.top_logprobs or 0) if body.logprobs else 0)
    reader = _Reader(
        server.tokenizer,
        body.tools,
        bool(body.tools) and body.tool_choice != "none",
        server.tokenizer.opens_reasoning(tokens),
        asked.stop_texts,
    )
    head = _head("chat.completion", "chatcmpl", body.model or server.model_name)
    if body.stream:
        pieces = _Pieces(server.scheduler, asked)
        return _EventStream(_chat_chunks(pieces, head, body, asked, reader), pieces)
    completions = await web.until_gone(request, asyncio.wrap_future(server.scheduler.submit(asked)))
    choices = []
    for index, completion in enumerate(completions):
        parsed = reader.read(server.tokenizer.structured_text(completion.tokens), final=True)
        message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [_call(at, call) for at, call in enumerate(parsed.calls)]
        choice = {
            "index": index,
            "message": message,
            "finish_reason": _finish_reason(completion.finish_reason, parsed),
            "logprobs": _chat_logprobs(server.tokenizer, completion) if body.logprobs else None,
        }
        choices.append(choice | _ours(server, completion, body))
    sent = head | {"choices": choices, "usage": generate_routes.usage([(asked, completions)])}
    if body.return_token_ids:
        sent["prompt_token_ids"] = list(tokens)
    if asked.prompt_logprobs:
        scored = zip(tokens, completions[0].prompt_logprobs, strict=True)
        sent["prompt_logprobs"] = [None, *({str(t): {"logprob": x}} for t, x in list(scored)[1:])]
    return responses.JSONResponse(sent)


async def _chat_chunks(
    pieces: "_Pieces", head: dict, body: schemas.Chat, asked, reader: _Reader
) -> AsyncIterator[dict]:
    head = head | {"object": "chat.completion.chunk"}
    num = asked.num_samples
    streams = [reader.tokenizer.text_stream(structured=True) for _ in range(num)]
    texts, sent, num_calls = [""] * num, [parsers.Parsed(None, "", ())] * num, [0] * num
    for index in range(num):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
        prompt = {"prompt_token_ids": list(asked.tokens)} if body.return_token_ids and index == 0 else {}
        yield head | prompt | {"choices": [first]}
    async for index, piece in pieces:
        final = bool(piece.finish_reason)
        texts[index] += streams[index].push(piece.tokens, final=final)
        parsed = reader.read(texts[index], final=final)
        delta = {}
        reasoning = (parsed.reasoning or "")[len(sent[index].reasoning or "") :]
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content := parsed.content[len(sent[index].content) :]:
            delta["content"] = content
        if new := parsed.calls[num_calls[index] :]:
            delta["tool_calls"] = [
                {"index": at} | _call(at, call) for at, call in enumerate(new, start=num_calls[index])
            ]
            num_calls[index] = len(parsed.calls)
        sent[index] = parsed
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": _finish_reason(piece.finish_reason, parsed) if final else None,
            "logprobs": _chat_logprobs(reader.tokenizer, piece) if body.logprobs else None,
        }
        if body.return_token_ids:
            choice["token_ids"] = piece.tokens
        yield head | {"choices": [choice]}
    if body.stream_options and body.stream_options.include_usage:
        yield head | {"choices": [], "usage": generate_routes.usage([(asked, pieces.completions)])}


def _check_chat(body: schemas.Chat) -> None:
    if isinstance(body.tool_choice, dict) or body.tool_choice not in (None, "auto", "none"):
        raise ValueError(f'tool_choice {body.tool_choice!r} cannot be enforced; use "auto" or "none"')
    if body.response_format and body.response_format.get("type") != "text":
        raise ValueError(
            f"response_format {body.response_format.get('type')!r} is not supported; use {{'type': 'text'}}"
        )
    if body.top_logprobs and not body.logprobs:
        raise ValueError("top_logprobs needs logprobs = true")


def _plain(message: schemas.Message) -> dict:
    """The message as chat templates expect it: content a string, arguments of calls an object."""
    content = message.content
    if isinstance(content, list):
        if bad := [part.type for part in content if part.type != "text" or part.text is None]:
            raise ValueError(f"a message has a part of type {bad[0]!r}; this server reads text only")
        content = "".join(part.text for part in content)
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _plain_call(call: dict) -> dict:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs function.name, a string")
    arguments = function.get("arguments")
    try:
        loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        loaded = arguments
    return call | {"function": function | {"arguments": loaded if isinstance(loaded, dict) else arguments or {}}}


def _call(at: int, call: parsers.Call) -> dict:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _finish_reason(reason: str, parsed: parsers.Parsed) -> str:
    return "tool_calls" if parsed.calls and reason == "stop" else reason


def _chat_logprobs(tokenizer: tokenizer_lib.Tokenizer, completion) -> dict:
    def entry(token, logprob):
        spelled = tokenizer.token_bytes(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(spelled)}

    tops = completion.top or [[]] * len(completion.tokens)
    return {
        "content": [
            entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
            for token, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True)
        ]
    }


# ---- completions -----------------------------------------------------------------------------------------------------


async def _answer_completions(
    server: inference_server.InferenceServer, request: fastapi.Request, body: schemas.Completions
):
    if body.echo:
        raise ValueError("echo is not supported; put the prompt in front yourself, or ask for prompt_logprobs")
    prompts = body.prompt if isinstance(body.prompt, list) and not _is_ids(body.prompt) else [body.prompt]
    if not prompts or len(prompts) > 1024:
        raise ValueError(f"prompt has {len(prompts)} entries; it takes 1 to 1024")
    prompts = [_prompt_ids(server, body, p) if isinstance(p, str) else p for p in prompts]
    if body.max_tokens is None:
        body = body.model_copy(update={"max_tokens": 16})  # OpenAI's default, on this route only
    top = max(body.logprobs or 0, 0)
    asked = [_asked(server, body, tokens, top) for tokens in prompts]
    head = _head("text_completion", "cmpl", body.model or server.model_name)
    if body.stream:
        if len(asked) > 1:
            raise ValueError("stream takes one prompt at a time")
        pieces = _Pieces(server.scheduler, asked[0])
        return _EventStream(_completion_chunks(server, pieces, head, body, asked[0]), pieces)
    completions = await web.until_gone(request, _all(server.scheduler, asked))
    choices = []
    for one, done in zip(asked, completions, strict=True):
        for completion in done:
            text = server.tokenizer.decode(completion.tokens)
            choice = {
                "index": len(choices),
                "text": _cut_at_stop(text, one.stop_texts, True),
                "finish_reason": completion.finish_reason,
                "logprobs": _text_logprobs(server.tokenizer, completion) if body.logprobs is not None else None,
            }
            if body.return_token_ids:
                choice["prompt_token_ids"] = list(one.tokens)
            if one.prompt_logprobs:
                scored = zip(one.tokens, completion.prompt_logprobs, strict=True)
                choice["prompt_logprobs"] = [None, *({str(t): {"logprob": x}} for t, x in list(scored)[1:])]
            choices.append(choice | _ours(server, completion, body))
    usage = generate_routes.usage(list(zip(asked, completions, strict=True)))
    return responses.JSONResponse(head | {"choices": choices, "usage": usage})


async def _completion_chunks(server, pieces: "_Pieces", head: dict, body, asked) -> AsyncIterator[dict]:
    streams = [server.tokenizer.text_stream() for _ in range(asked.num_samples)]
    texts, sent = [""] * asked.num_samples, [0] * asked.num_samples
    async for index, piece in pieces:
        final = bool(piece.finish_reason)
        texts[index] += streams[index].push(piece.tokens, final=final)
        text = _cut_at_stop(texts[index], asked.stop_texts, final)
        choice = {
            "index": index,
            "text": text[sent[index] :],
            "finish_reason": piece.finish_reason or None,
            "logprobs": _text_logprobs(server.tokenizer, piece) if body.logprobs is not None else None,
        }
        if body.return_token_ids:
            choice["token_ids"] = piece.tokens
        sent[index] = len(text)
        yield head | {"choices": [choice]}
    if body.stream_options and body.stream_options.include_usage:
        yield head | {"choices": [], "usage": generate_routes.usage([(asked, pieces.completions)])}


async def _all(scheduler: scheduler_lib.Scheduler, asked: Sequence[scheduler_lib.GenerateRequest]):
    """Every request's completions; all are cancelled when one fails or we are."""
    futures = []
    try:
        for one in asked:
            futures.append(asyncio.wrap_future(scheduler.submit(one)))
        return await asyncio.gather(*futures)
    finally:
        for future in futures:
            future.cancel()


def _text_logprobs(tokenizer: tokenizer_lib.Tokenizer, completion) -> dict:
    spelled = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in completion.tokens]
    offsets = [0]
    for text in spelled:
        offsets.append(offsets[-1] + len(text))
    tops = [{tokenizer.token_bytes(t).decode("utf-8", "replace"): x for t, x in top} for top in completion.top]
    return {
        "tokens": spelled,
        "token_logprobs": completion.logprobs,
        "top_logprobs": tops or None,
        "text_offset": offsets[:-1],
    }


def _prompt_ids(
    server: inference_server.InferenceServer, body: schemas.Completions | schemas.Tokenize, text: str
) -> list[int]:
    if body.add_special_tokens is False:
        return server.tokenizer.encode(text)
    return server.tokenizer.prompt_ids(text)


def _is_ids(prompt: list) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


# ---- both ------------------------------------------------------------------------------------------------------------


def _head(kind: str, prefix: str, model: str) -> dict:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _asked(
    server: inference_server.InferenceServer, body: schemas.Sampling, tokens, top_logprobs: int
) -> scheduler_lib.GenerateRequest:
    """The request; experts are for who asks for them, or for token ids."""
    if body.return_routed_experts and body.stream:
        raise ValueError("return_routed_experts is not streamed; send stream = false")
    if body.return_routed_experts is None and (body.stream or not body.return_token_ids):
        body = body.model_copy(update={"return_routed_experts": False})
    return server.request(body, tokens, top_logprobs=top_logprobs)


def _ours(server: inference_server.InferenceServer, completion: scheduler_lib.Completion, body) -> dict:
    """What other clients ignore."""
    extra = {
        "policy_versions": generate_routes.policy_versions(completion),
        "prompt_policy_version": completion.prompt_version,
    }
    if body.return_token_ids:
        extra["token_ids"] = completion.tokens
    if completion.raw_logprobs:
        extra["untempered_logprobs"] = completion.raw_logprobs
    return extra | generate_routes.experts(server, completion, body.routed_experts_prompt_start or 0)


def _cut_at_stop(text: str, stops: Sequence[str], final: bool) -> str:
    """The text before the first stop string; while it grows, also less a tail that may become one."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    if not final:
        text = min((parsers.without_start_of(stop, text) for stop in stops), key=len, default=text)
    return text


def _check_ids(tokens: Sequence[int], server: inference_server.InferenceServer) -> None:
    if bad := [token for token in tokens if not 0 <= token < server.engine.model.vocab_size]:
        raise ValueError(f"token id {bad[0]} is outside the vocabulary of {server.engine.model.vocab_size} entries")


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What one engine call added to one sample; "" as finish_reason while it goes on."""

    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    finish_reason: str


class _Pieces:
    """The answer to one request as it grows: `async for index, piece in pieces`. Submits on creation."""

    def __init__(self, scheduler: scheduler_lib.Scheduler, asked: scheduler_lib.GenerateRequest):
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue = asyncio.Queue()
        self._num_sent = [0] * asked.num_samples
        self._future = scheduler.submit(asked, self._listen)
        self._future.add_done_callback(self._end)

    def __aiter__(self) -> "_Pieces":
        return self

    async def __anext__(self) -> tuple[int, _Piece]:
        item = await self._queue.get()
        if item is None:
            self._future.result()  # raises what ended it early
            raise StopAsyncIteration
        return item

    @property
    def completions(self) -> list[scheduler_lib.Completion]:
        return self._future.result()

    def cancel(self) -> None:
        self._future.cancel()

    def _listen(self, index: int, completion: scheduler_lib.Completion) -> None:
        """On the scheduler's thread."""
        start = self._num_sent[index]
        self._num_sent[index] = len(completion.tokens)
        piece = _Piece(
            completion.tokens[start:], completion.logprobs[start:], completion.top[start:], completion.finish_reason
        )
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

    def _end(self, future) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)


class _EventStream(responses.Response):
    """Server-sent events; a client that hangs up ends the request behind them."""

    def __init__(self, chunks: AsyncIterator[dict], pieces: _Pieces):
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks, self._pieces = chunks, pieces

    async def __call__(self, scope, receive, send) -> None:
        async def pump():
            async for chunk in self._chunks:
                await self._send(send, chunk)
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await web.until_gone(fastapi.Request(scope, receive), pump())
        except (scheduler_lib.Fault, scheduler_lib.Closed) as error:  # the status line is long gone
            await self._send(send, {"error": web.error_body(500, str(error), "engine_error")})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except web.Gone:
            pass
        finally:
            self._pieces.cancel()

    async def _send(self, send, chunk: dict) -> None:
        data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
