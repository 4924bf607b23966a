"""An HTTP server through which an environment in another process calls the model of its episode, in OpenAI's and vLLM's APIs.

1. `Endpoint.open` gives the `Session` of an episode a base URL, http://127.0.0.1:PORT/s/SECRET/v1, which any client of these APIs takes.
2. Requests become calls of the session: chat, chat with token IDs, completions, and vLLM's generate route. So everything about tokens is
   recorded here, and nothing that the environment claims about them is used.
3. A request with `n` is n calls with different numbers, and `seed` is the first number: equal requests get equal replies, and calls that
   should differ need another seed.
4. The model "policy" is trained. A model with any other name, such as a judge, is the same model, and is not trained on these calls.
5. Requests are strict. A field that the episode cannot honor gets status 400, such as a temperature that is not the run's.
6. A spent budget gets status 400 in the words by which clients recognize a prompt that is too long.
7. The environment never sees an error of the infrastructure: such a request gets no reply, and `Visit.fault` ends the episode.

Imports no jax.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import fastapi
import pydantic
import uvicorn
from fastapi import responses

from inference.server import schemas, web
from inference.swarm import sample as sample_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.interface import episode
from rl.envs.recording import session as session_lib
from sharding.system import sockets

POLICY = "policy"  # the name of the trained model
# Fields that a request may set. All others must have the value of the run, or else their default.
HONORED = {"model", "n", "seed", "max_tokens", "max_completion_tokens", "request_id"}
HONORED |= {"add_special_tokens", "parse_special"}
HONORED |= {"messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt"}
HONORED |= {"continue_final_message"}  # an episode continues a last message of the assistant in any case
HONORED |= {"prompt", "tokens", "token_ids", "sampling_params", "logprobs", "return_token_ids", "stream"}
HONORED |= {"stream_options", "stop_token_ids", "return_tokens_as_token_ids", "routed_experts_prompt_start"}
_CALL_ID = re.compile(r"call_[0-9a-f]{8}_(\d+)")


@dataclasses.dataclass(eq=False)
class Visit:
    """An episode that is open at an endpoint. `fault` gets the exception of a call that failed for another reason than its request."""

    base_url: str
    session: session_lib.Session
    fault: asyncio.Future
    calls: set[asyncio.Future] = dataclasses.field(default_factory=set)  # in progress
    num_requests: int = 0

    async def run(self, call: Awaitable) -> Any:
        """Returns the result of a call of the session. Raises BudgetSpent and InvalidMessages; after any other failure, it never returns."""
        task = asyncio.ensure_future(call)
        self.calls.add(task)
        try:
            return await task
        except (episode.BudgetSpent, session_lib.InvalidMessages):
            raise
        except Exception as error:  # a backend may raise anything
            if not self.fault.done():
                self.fault.set_exception(error)
            await asyncio.get_running_loop().create_future()  # the host ends the episode
        finally:
            self.calls.discard(task)


class Endpoint:
    """The HTTP server of all episodes of this process. Use it as `async with Endpoint(tokenizer) as endpoint`; `tokenizer` is the sessions'.

    `unix_path` is that of a unix socket with the same server, for a process that has a network of its own.
    """

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
        self._tokenizer, self._visits = tokenizer, {}
        app = fastapi.FastAPI(openapi_url=None)
        web.reply_errors(app, {_Closed: (410, "gone")})
        app.add_exception_handler(ValueError, _reply_invalid)
        app.add_exception_handler(episode.BudgetSpent, _reply_spent)
        app.get("/s/{name}/v1/models")(self._models)
        app.post("/s/{name}/v1/chat/completions")(self._chat)
        app.post("/s/{name}/v1/chat/completions/tokens")(self._chat_tokens)
        app.post("/s/{name}/v1/completions")(self._completions)
        app.post("/s/{name}/inference/v1/generate")(self._generate)
        app.post("/s/{name}/tokenize")(self._tokenize)
        # Idle connections stay open, because a client that sends to one that just closed sees an error.
        quiet = {"log_config": None, "log_level": "error", "access_log": False}  # else lines in the learner's console
        config = uvicorn.Config(app, http="h11", lifespan="off", timeout_keep_alive=86400, **quiet)
        config.access_log = False
        self._server = _Server(config)

    async def __aenter__(self) -> "Endpoint":
        self._stack = contextlib.ExitStack()
        self.unix_path = self._stack.enter_context(sockets.private_path())
        socket, unix = sockets.listen("127.0.0.1", 0), sockets.listen_unix(self.unix_path)
        self._url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[socket, unix]))
        return self

    async def __aexit__(self, *exc) -> None:
        for visit in self._visits.values():
            _cancel(visit)
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        self._stack.close()

    @contextlib.contextmanager
    def open(self, session: session_lib.Session) -> Iterator[Visit]:
        """Gives a session a base URL until the block ends, which cancels calls in progress."""
        name, fault = secrets.token_urlsafe(16), asyncio.get_running_loop().create_future()
        visit = self._visits[name] = Visit(f"{self._url}/s/{name}/v1", session, fault)
        try:
            yield visit
        finally:
            del self._visits[name]
            _cancel(visit)

    def _visit(self, name: str) -> Visit:
        if (visit := self._visits.get(name)) is None:
            raise _Closed("the episode of this URL has ended; take the base URL of a running one")
        visit.num_requests += 1
        return visit

    async def _models(self, name: str):
        card = {"id": POLICY, "object": "model", "created": 0, "owned_by": "intellax"}
        return {"object": "list", "data": [card | {"max_model_len": self._visit(name).session.limits.max_model_len}]}

    async def _chat(self, name: str, http: fastapi.Request):
        visit, body = self._visit(name), await web.read_schema(http, schemas.Chat)
        self._check(body, visit)
        session, messages = visit.session, [_plain_message(message) for message in body.messages]
        given = {"tools": body.tools or () if body.tool_choice != "none" else (), "variables": _variables(body)}
        options = given | {"max_tokens": _max_tokens(body), "trains": _trains(body)}
        ask = lambda number: session.ask(messages, number=number, **options)  # noqa: E731
        answers = await visit.run(_gather(ask, body.seed, body.n))
        return _chat_reply(self._tokenizer, body, [(one.message, one.prompt, one.sample) for one in answers])

    async def _chat_tokens(self, name: str, http: fastapi.Request):
        visit, body = self._visit(name), await web.read_schema(http, schemas.ChatTokens)
        self._check(body, visit)
        samples = await _complete(visit, body, body.tokens, _trains(body))
        tokenizer = self._tokenizer
        given = {"prompt_ids": body.tokens, "tools": body.tools, "read_calls": bool(body.tools)}
        answers = [(tokenizer.parse(sample.tokens, **given), body.tokens, sample) for sample in samples]
        return _chat_reply(tokenizer, body, answers)

    async def _completions(self, name: str, http: fastapi.Request):
        visit, body = self._visit(name), await web.read_schema(http, schemas.Completions)
        self._check(body, visit)
        tokenizer, prompt = self._tokenizer, body.prompt
        if isinstance(prompt, str):
            prompt = tokenizer.prompt_ids(prompt, **body.parsing())
        ids = [token for token in prompt if isinstance(token, int)]
        if not ids or len(ids) < len(prompt):
            raise ValueError("prompt is empty or a list of prompts; send one prompt per request")
        samples, choices = await _complete(visit, body, ids, _trains(body)), []
        for index, sample in enumerate(samples):
            choice: dict = {"index": index, "text": tokenizer.decode(sample.tokens)}
            choice |= {"finish_reason": sample.finish_reason, "logprobs": None}
            if body.logprobs is not None:
                spelled = [entry["token"] for entry in _entries(tokenizer, body, sample)]
                places = tokenizer.text_stream().offsets(sample.tokens)
                choice["logprobs"] = {"tokens": spelled, "token_logprobs": sample.logprobs, "top_logprobs": None}
                choice["logprobs"]["text_offset"] = places
            recorded = {"token_ids": sample.tokens, "prompt_token_ids": ids}
            choices.append(choice | (recorded if body.return_token_ids else {}))
        return _reply(body, "text_completion", choices, _usage(ids, samples))

    async def _generate(self, name: str, http: fastapi.Request):
        visit, body = self._visit(name), await web.read_schema(http, schemas.Generate)
        self._check(body, visit)
        self._check(body.sampling_params, visit)
        samples = await _complete(visit, body.sampling_params, body.token_ids, _trains(body))
        choices = []
        for index, sample in enumerate(samples):
            pairs = zip(sample.tokens, sample.logprobs, strict=True)
            content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
            choice = {"index": index, "token_ids": sample.tokens, "finish_reason": sample.finish_reason}
            choices.append(choice | {"logprobs": {"content": content}})
        usage = _usage(body.token_ids, samples)
        return {"request_id": body.request_id or _content_id(choices), "choices": choices, "usage": usage}

    async def _tokenize(self, name: str, http: fastapi.Request):
        visit, body = self._visit(name), await web.read_schema(http, schemas.Tokenize)
        tokenizer = self._tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise ValueError("the request has both or neither of prompt and messages; send one of them")
        if body.prompt is not None:
            ids = tokenizer.prompt_ids(body.prompt, **body.parsing())
        else:
            messages = [_plain_message(message) for message in body.messages or ()]
            options = {"add_generation_prompt": body.add_generation_prompt, "tools": body.tools}
            ids = tokenizer.render(messages, variables=_variables(body), **options).token_ids
        return {"count": len(ids), "max_model_len": visit.session.limits.max_model_len, "tokens": ids}

    def _check(self, body: Any, visit: Visit) -> None:
        """Raises ValueError for a field that this episode cannot honor."""
        fields = type(body).model_fields
        for name in sorted(body.model_fields_set & fields.keys() - HONORED):
            value, wanted = getattr(body, name), visit.session.sampling.get(name, fields[name].default)
            is_equal = value == wanted or (
                isinstance(value, float) and math.isclose(value, float(wanted or 0), rel_tol=1e-6)
            )
            if not is_equal and not (name == "top_k" and {value, wanted} == {-1, 0}):  # both: no limit
                remedy = f"leave it out, or send {wanted!r}"
                raise ValueError(f"{name} = {value!r} is not possible in this episode; {remedy}")
        stops = self._tokenizer.stop_ids
        if extra := [token for token in getattr(body, "stop_token_ids", ()) if token not in stops]:
            raise ValueError(f"stop_token_ids has {extra[0]}, which ends no completion of this model; leave it out")
        if (count := getattr(body, "n", 1)) < 1:
            raise ValueError(f"n = {count} is below 1; send 1 or more")
        if getattr(body, "tool_choice", "auto") not in ("auto", "none"):
            raise ValueError(f'tool_choice {body.tool_choice!r} cannot be enforced; use "auto" or "none"')
        if isinstance(body, schemas.Chat) and not (body.add_generation_prompt or body.continue_final_message):
            raise ValueError("add_generation_prompt = false leaves the model no turn; leave it out")
        if int(getattr(body, "logprobs", 0) or 0) > 1:
            raise ValueError(f"logprobs = {body.logprobs}, but alternatives are not recorded; send 1")


class _Closed(Exception):
    """Raised for a request to an episode that is not open."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process that this server is a part of."""
        yield


def _cancel(visit: Visit) -> None:
    for call in visit.calls:
        call.cancel()
    if visit.fault.done():
        visit.fault.exception()  # marks it as seen; the caller may have ended the episode for another reason


async def _reply_invalid(request: fastapi.Request, problem: Exception) -> responses.Response:
    message = schemas.describe(problem) if isinstance(problem, pydantic.ValidationError) else str(problem)
    return web.error(400, message, "invalid_request_error")


async def _reply_spent(request: fastapi.Request, problem: Exception) -> responses.Response:
    # Clients search for these words.
    message = f"{problem}; it exceeds this model's maximum context length (maximum context length is used up)"
    return web.error(400, message, "context_length_exceeded")


# ---- requests --------------------------------------------------------------------------------------------------------


def _plain_message(message: schemas.Message) -> dict:
    """Converts a request's message to the form in which the session knows its own: texts alone, arguments of calls as JSON text."""
    plain = schemas.plain_message(message)
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = _session_id(message.tool_call_id)
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _plain_call(call: Mapping) -> dict:
    function = schemas.called_function(call)
    arguments = function.get("arguments") or "{}"
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    plain = {"name": function["name"], "arguments": arguments}
    return {"id": _session_id(str(call.get("id", ""))), "type": "function", "function": plain}


def _session_id(call_id: str) -> str:
    """Returns the ID that the session gave a tool call. Those of replies differ between turns, as clients expect."""
    found = _CALL_ID.fullmatch(call_id)
    return f"call_{found[1]}" if found else call_id


def _variables(body: schemas.Template) -> dict | None:
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return (effort | body.chat_template_kwargs) or None


def _max_tokens(body: Any) -> int | None:
    found = getattr(body, "max_completion_tokens", None) or body.max_tokens
    if found is not None and found < 1:
        raise ValueError(f"max_tokens = {found} is below 1; raise it")
    return found


def _trains(body: Any) -> bool:
    return getattr(body, "model", None) in (None, POLICY)


async def _complete(visit: Visit, body: Any, prompt: list[int], trains: bool) -> list[sample_lib.Sample]:
    options = {"max_tokens": _max_tokens(body), "trains": trains}
    ask = lambda number: visit.session.complete_ids(prompt, number=number, **options)  # noqa: E731
    return await visit.run(_gather(ask, body.seed, body.n))


async def _gather(ask: Callable[[int], Awaitable[Any]], first: int | None, count: int) -> list[Any]:
    return [*await asyncio.gather(*(ask((first or 0) + index) for index in range(count)))]


# ---- replies ---------------------------------------------------------------------------------------------------------


def _chat_reply(tokenizer: tokenizer_lib.Tokenizer, body: schemas.Chat, answers: Sequence) -> responses.Response:
    """Returns the reply to a chat of (message, prompt, sample), one per choice."""
    (_, prompt, _), choices = answers[0], []
    place = _content_id(prompt)[:8]
    for index, (message, _, sample) in enumerate(answers):
        calls = [call | {"id": f"call_{place}_{at}"} for at, call in enumerate(message.get("tool_calls") or ())]
        reason = "tool_calls" if calls and sample.finish_reason == "stop" else sample.finish_reason
        shown = message | ({"tool_calls": calls} if calls else {})
        choice = {"index": index, "message": shown, "finish_reason": reason, "logprobs": None}
        if body.logprobs:
            choice["logprobs"] = {"content": _entries(tokenizer, body, sample)}
        choices.append(choice | ({"token_ids": sample.tokens} if body.return_token_ids else {}))
    usage = _usage(prompt, [sample for *_, sample in answers])
    recorded = {"prompt_token_ids": prompt} if body.return_token_ids else {}
    return _reply(body, "chat.completion", choices, usage, recorded)


def _entries(tokenizer: tokenizer_lib.Tokenizer, body: Any, sample: sample_lib.Sample) -> list[dict]:
    entries = []
    for token, logprob in zip(sample.tokens, sample.logprobs, strict=True):
        spelled = tokenizer.token_bytes(token)
        is_number = getattr(body, "return_tokens_as_token_ids", False)
        text = f"token_id:{token}" if is_number else tokenizer.spell(token)
        entries.append({"token": text, "logprob": logprob, "bytes": [*spelled], "top_logprobs": []})
    return entries


def _usage(prompt: Sequence[int], samples: Sequence[sample_lib.Sample]) -> dict:
    num_new = sum(len(sample.tokens) for sample in samples)
    return {"prompt_tokens": len(prompt), "completion_tokens": num_new, "total_tokens": len(prompt) + num_new}


def _content_id(content: Any) -> str:
    """Returns an ID that follows from content alone: a replay must get the same reply."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _reply(
    body: Any, kind: str, choices: list[dict], usage: dict, fields: Mapping[str, Any] | None = None
) -> responses.Response:
    """Returns a JSON reply, or a stream of events if the request asks for one."""
    name = getattr(body, "request_id", None) or f"cmpl-{_content_id([choices, usage])}"
    head: dict = {"id": name, "object": kind, "created": 0, "model": body.model or POLICY, **(fields or {})}
    if not body.stream:
        return responses.JSONResponse(head | {"choices": choices, "usage": usage})
    if kind == "chat.completion":
        head["object"] = "chat.completion.chunk"

    async def events() -> AsyncIterator[str]:
        for choice in choices:
            for piece in _pieces(choice):
                yield f"data: {json.dumps(head | {'choices': [{'index': choice['index']} | piece]})}\n\n"
        if body.stream_options.include_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    return responses.StreamingResponse(events(), media_type="text/event-stream")


def _pieces(choice: dict) -> Iterator[dict]:
    """Yields a choice as the pieces of a stream: the opening, each field of the message, and the end."""
    if "text" in choice:
        yield choice
        return
    message, open_end = choice["message"], {"finish_reason": None, "logprobs": None}
    yield {"delta": {"role": "assistant", "content": ""}} | open_end
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {"delta": {name: message[name]}} | open_end
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"delta": {"tool_calls": [{"index": index} | call]}} | open_end
    yield {name: value for name, value in choice.items() if name != "message"} | {"delta": {}}
