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
from fastapi import responses

from inference.engine import request as request_lib
from inference.rollouts import completion as completion_lib
from inference.server import replies, schemas, web
from models.text import tokenizer as tokenizer_lib
from rl.envs.interface import episode
from rl.envs.recording import session as session_lib
from sharding.system import sockets

POLICY = "policy"  # the name of the trained model
MAX_CONNECTIONS = 2**20  # of the programs of all episodes, which share one address
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

    `unix_path` is that of a unix socket with the same server, for a process that has a network of its own; by default in a new folder.
    """

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer, unix_path: str = ""):
        self._tokenizer, self.unix_path, self._visits = tokenizer, unix_path, {}
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
        self._server = web.server(app, keep_alive_s=86400, max_connections=MAX_CONNECTIONS, takes_signals=False)

    async def __aenter__(self) -> "Endpoint":
        self._stack = contextlib.ExitStack()
        self.unix_path = self.unix_path or self._stack.enter_context(sockets.private_path())
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
        tools = body.tools or () if body.tool_choice != "none" else ()
        max_tokens, trains, variables = _max_tokens(body), _trains(body), body.variables()

        def ask(number: int):
            return session.ask(
                messages, tools=tools, variables=variables, number=number, max_tokens=max_tokens, trains=trains
            )

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
        samples, request = await _complete(visit, body, ids, _trains(body)), request_lib.GenerateRequest(ids)
        formatter = replies.TextFormat(tokenizer, body, request)
        recorded = {"prompt_token_ids": ids} if body.return_token_ids else {}
        choices = []
        for index, sample in enumerate(samples):
            own = {"token_ids": sample.tokens} if body.return_token_ids else {}
            choices.append({"index": index} | formatter.choice(index, sample) | own | recorded)
        return _reply(body, formatter, choices, replies.usage([(request, samples)]))

    async def _generate(self, name: str, http: fastapi.Request):
        visit, body = self._visit(name), await web.read_schema(http, schemas.Generate)
        self._check(body, visit)
        self._check(body.sampling_params, visit)
        samples = await _complete(visit, body.sampling_params, body.token_ids, _trains(body))
        choices = [replies.token_choice(index, sample) for index, sample in enumerate(samples)]
        usage = replies.usage([(request_lib.GenerateRequest(body.token_ids), samples)])
        return {"request_id": body.request_id or _content_id(choices), "choices": choices, "usage": usage}

    async def _tokenize(self, name: str, http: fastapi.Request):
        visit, body = self._visit(name), await web.read_schema(http, schemas.Tokenize)
        tokenizer = self._tokenizer
        if (prompt := body.given_prompt()) is not None:
            ids = tokenizer.prompt_ids(prompt, **body.parsing())
        else:
            messages = [_plain_message(message) for message in body.messages or ()]
            options = {"add_generation_prompt": body.add_generation_prompt, "tools": body.tools}
            ids = tokenizer.render(messages, variables=body.variables(), **options).token_ids
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
        if isinstance(body, schemas.Chat):
            body.check_tool_choice()
            if not (body.add_generation_prompt or body.continue_final_message):
                raise ValueError("add_generation_prompt = false leaves the model no turn; leave it out")
        if int(getattr(body, "logprobs", 0) or 0) > 1:
            raise ValueError(f"logprobs = {body.logprobs} asks for alternative tokens, which are not recorded; send 1")


class _Closed(Exception):
    """Raised for a request to an episode that is not open."""


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


def _max_tokens(body: Any) -> int | None:
    """Returns the most tokens that a request asks for: the first of the two fields that it sends, or None."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (found := getattr(body, name, None)) is not None:
            if found < 1:
                raise ValueError(f"{name} = {found} is below 1; raise it")
            return found
    return None


def _trains(body: Any) -> bool:
    return getattr(body, "model", None) in (None, POLICY)


async def _complete(visit: Visit, body: Any, prompt: list[int], trains: bool) -> list[completion_lib.Completion]:
    max_tokens = _max_tokens(body)

    def ask(number: int):
        return visit.session.complete_ids(prompt, number=number, max_tokens=max_tokens, trains=trains)

    return await visit.run(_gather(ask, body.seed, body.n))


async def _gather(ask: Callable[[int], Awaitable[Any]], first: int | None, count: int) -> list[Any]:
    return [*await asyncio.gather(*(ask((first or 0) + index) for index in range(count)))]


# ---- replies ---------------------------------------------------------------------------------------------------------


def _chat_reply(tokenizer: tokenizer_lib.Tokenizer, body: schemas.Chat, answers: Sequence) -> responses.Response:
    """Returns the reply to a chat of (message, prompt, sample), one per choice."""
    (_, prompt, _), choices = answers[0], []
    request, place = request_lib.GenerateRequest(prompt), _content_id(prompt)[:8]
    formatter = replies.ChatFormat(tokenizer, body, request)
    for index, (message, _, sample) in enumerate(answers):
        calls = [call | {"id": f"call_{place}_{at}"} for at, call in enumerate(message.get("tool_calls") or ())]
        shown = message | ({"tool_calls": calls} if calls else {})
        own = {"token_ids": sample.tokens} if body.return_token_ids else {}
        ending = formatter.ending(index, sample, has_calls=bool(calls))
        choices.append({"index": index, "message": shown} | ending | own)
    recorded = {"prompt_token_ids": prompt} if body.return_token_ids else {}
    usage = replies.usage([(request, [sample for *_, sample in answers])])
    return _reply(body, formatter, choices, usage, recorded)


def _content_id(content: Any) -> str:
    """Returns an ID that follows from content alone: a replay must get the same reply."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _reply(
    body: Any,
    formatter: replies.TextFormat,
    choices: list[dict],
    usage: dict,
    fields: Mapping[str, Any] | None = None,
) -> responses.Response:
    """Returns a JSON reply, or a stream of events if the request asks for one."""
    name = getattr(body, "request_id", None) or f"cmpl-{_content_id([choices, usage])}"
    kind = formatter.chunk_kind if body.stream else formatter.kind
    head: dict = {"id": name, "object": kind, "created": 0, "model": body.model or POLICY, **(fields or {})}
    if not body.stream:
        return responses.JSONResponse(head | {"choices": choices, "usage": usage})

    async def events() -> AsyncIterator[str]:
        for choice in choices:
            for piece in _pieces(choice):
                yield replies.event(head | {"choices": [piece]})
        if body.stream_options.include_usage:
            yield replies.event(head | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    return responses.StreamingResponse(events(), media_type="text/event-stream")


def _pieces(choice: dict) -> list[dict]:
    """Returns a choice as the pieces of a stream. A message has two: the opening, and all of it."""
    if "message" not in choice:
        return [choice]
    message, rest = choice["message"], {name: value for name, value in choice.items() if name != "message"}
    delta = {name: message[name] for name in ("reasoning_content", "content") if message.get(name)}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": at} | call for at, call in enumerate(calls)]
    return [{"index": choice["index"], **(replies.ChatFormat.opening or {})}, rest | {"delta": delta}]
