"""The endpoint gives a client of OpenAI's or vLLM's API the calls of a session: the oracle is the same program on the session itself."""

import asyncio
import contextlib
import json

import httpx
import numpy as np
import pytest

from inference.rollouts import completion as completion_lib
from rl.envs.interface import episode
from rl.envs.recording import endpoint as endpoint_lib
from tests.support import episodes

USER = {"role": "user", "content": "go"}
TOOLS = episodes.TOOLS
SAMPLING = {"temperature": 0.7, "top_k": 0, "top_p": 0.9}


class Model:
    """Implements `episode.Model` by a client of the endpoint, with the requests of OpenAI's clients."""

    def __init__(self, http, url, *, stream=False):
        self.http, self.url, self.stream = http, url, stream

    async def chat(self, messages, *, tools=(), max_tokens=None, number=0, trains=True):
        body = {"model": "policy" if trains else "judge", "messages": list(messages), "seed": number or None}
        body |= {"tools": list(tools) or None, "max_completion_tokens": max_tokens, "temperature": 0.7, "n": 1}
        reply = await self.http.post(f"{self.url}/chat/completions", json=body | {"stream": self.stream})
        if reply.status_code == 400 and "maximum context length" in reply.text:
            raise episode.BudgetSpent(reply.text)
        assert reply.status_code == 200, reply.text
        choice = joined(reply.text)[0] if self.stream else reply.json()["choices"][0]
        ending = choice["finish_reason"].replace("tool_calls", "stop")
        return episode.Reply(choice["message"], ending, 0, 0)


def joined(text):
    """Returns the choices that the events of a stream add up to."""
    *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    found = {}
    for event in map(json.loads, events):
        for one in event["choices"]:
            choice = found.setdefault(one["index"], {"index": one["index"], "message": {"content": ""}})
            for name, value in one["delta"].items():
                value = [dict(list(call.items())[1:]) for call in value] if name == "tool_calls" else value
                choice["message"][name] = (
                    value if name == "role" else choice["message"].get(name, type(value)()) + value
                )
            choice |= {name: value for name, value in one.items() if name != "delta"}
    return [found[index] for index in sorted(found)]


def made(backend, **options):
    return episodes.session(backend, sampling=SAMPLING, **options)


def client():
    return httpx.AsyncClient(timeout=30, verify=False)  # loading certificates takes 0.3 s


@contextlib.asynccontextmanager
async def opened(session):
    async with endpoint_lib.Endpoint(episodes.TOKENIZER) as endpoint, client() as http:
        with endpoint.open(session) as visit:
            yield visit, http


def streams(session):
    """Returns the streams of a session in the order of their content: concurrent requests may arrive in any order."""
    return sorted(
        (
            stream.seed,
            stream.trains,
            stream.number,
            stream.tokens.tolist(),
            [(t.start, t.end, t.max_tokens) for t in stream.turns],
        )
        for stream in session.streams
    )


def ask(path, body, *, session=None):
    """Sends one request to a new session, and returns (the reply, the session)."""
    session = session or made(episodes.Backend())

    async def run():
        async with opened(session) as (visit, http):
            url = visit.base_url if path.startswith("/chat") or path == "/completions" else visit.base_url[:-3]
            return await http.post(url + path, json=body)

    return asyncio.run(run()), session


@pytest.mark.parametrize("stream", [False, True])
def test_programs_leave_the_same_streams_as_on_the_session(stream):
    """Twenty programs run at a time, and are kept apart."""

    async def run():
        async with endpoint_lib.Endpoint(episodes.TOKENIZER) as endpoint, client() as http:

            async def play(number):
                direct, remote = (made(episodes.Backend(), number=number) for _ in range(2))
                await episodes.drawn(number)(direct)
                with endpoint.open(remote) as visit:
                    await episodes.drawn(number)(Model(http, visit.base_url, stream=stream))
                assert streams(remote) == streams(direct)
                return max(len(stream.turns) for stream in remote.streams)

            return await asyncio.gather(*map(play, range(20)))

    assert max(asyncio.run(run())) > 1


def test_tool_calls_have_different_ids_in_each_turn_and_still_continue_the_stream():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    session = made(episodes.Backend(texts=[call]))

    async def run():
        async with opened(session) as (visit, http):
            messages, seen = [USER], []
            for _ in range(3):
                reply = await Model(http, visit.base_url).chat(messages, tools=TOOLS)
                [call] = reply.message["tool_calls"]
                seen.append(call["id"])
                messages += [reply.message, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
            return seen

    assert len(set(asyncio.run(run()))) == 3
    assert [len(stream.turns) for stream in session.streams] == [3]


def test_numbers_of_one_request_are_calls_with_these_numbers():
    body = {"messages": [USER], "n": 3, "seed": 5, "logprobs": True, "return_token_ids": True}
    reply, session = ask("/chat/completions", body)
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [stream.number for stream in session.streams] == [5, 6, 7]
    for choice, stream in zip(choices, session.streams, strict=True):
        [turn] = stream.turns
        assert choice["token_ids"] == turn.sample.tokens
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == turn.sample.logprobs
        assert reply.json()["prompt_token_ids"] == stream.tokens[: turn.start].tolist()
        spelled = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert spelled == b"".join(map(episodes.TOKENIZER.token_bytes, turn.sample.tokens))


def test_token_routes_extend_the_stream_of_a_chat_exactly():
    session = made(episodes.Backend())

    async def run():
        async with opened(session) as (visit, http):
            root = visit.base_url.removesuffix("/v1")
            params = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "logprobs": 1, "skip_special_tokens": False}
            params |= {"stop_token_ids": [episodes.TOKENIZER.eos_id], "max_tokens": 9}
            prompt = (await http.post(f"{root}/tokenize", json={"messages": [USER]})).json()["tokens"]
            assert prompt == episodes.TOKENIZER.render([USER], add_generation_prompt=True).token_ids
            for _ in range(2):
                body = {"model": "policy", "token_ids": prompt, "sampling_params": params, "cache_salt": "1"}
                reply = (await http.post(f"{root}/inference/v1/generate", json=body)).json()
                [choice] = reply["choices"]
                assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
                    f"token_id:{token}" for token in choice["token_ids"]
                ]
                prompt = prompt + choice["token_ids"] + [10]
            body = {"tokens": prompt, "messages": [USER], "return_token_ids": True, "temperature": 0.7}
            reply = (await http.post(f"{visit.base_url}/chat/completions/tokens", json=body)).json()
            assert reply["prompt_token_ids"] == prompt
            prompt = prompt + reply["choices"][0]["token_ids"] + [10]
            body = {"prompt": prompt, "logprobs": 1, "return_token_ids": True, "max_tokens": 5}
            reply = (await http.post(f"{visit.base_url}/completions", json=body)).json()["choices"][0]
            assert reply["prompt_token_ids"] == prompt
            assert reply["text"] == episodes.TOKENIZER.decode(reply["token_ids"])
            return prompt + reply["token_ids"]

    tokens = asyncio.run(run())
    [stream] = session.streams
    assert stream.tokens.tolist() == tokens
    assert [turn.max_tokens for turn in stream.turns] == [9, 9, 48, 5]


def test_a_model_of_another_name_is_not_trained():
    _, session = ask("/chat/completions", {"messages": [USER], "model": "gpt-4.1-nano"})
    assert [stream.trains for stream in session.streams] == [False]
    reply, session = ask("/chat/completions", {"messages": [USER], "model": "policy"})
    assert [stream.trains for stream in session.streams] == [True]
    assert reply.json()["model"] == "policy"


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1.0},
        {"top_p": 1.0},
        {"top_k": 5},
        {"min_p": 0.1},
        {"stop": ["x"]},
        {"logit_bias": {"1": 2.0}},
        {"ignore_eos": True},
        {"stop_token_ids": [65]},
        {"top_logprobs": 2, "logprobs": True},
        {"frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required", "tools": TOOLS},
        {"n": 0},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        {"messages": []},
        {"messages": "hello"},
        {"add_generation_prompt": False},
        {"seed": "1"},
    ],
)
def test_a_field_that_the_episode_cannot_honor_is_refused(change):
    reply, session = ask("/chat/completions", {"messages": [USER]} | change)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]
    assert not session.streams


def test_each_of_the_two_limits_of_tokens_is_checked_under_its_name():
    """The newer field counts if both are sent; 0 is not taken for a field that is left out."""
    for name, other in (
        ("max_completion_tokens", {}),
        ("max_completion_tokens", {"max_tokens": 4}),
        ("max_tokens", {}),
    ):
        reply, session = ask("/chat/completions", {"messages": [USER], name: 0} | other)
        assert reply.status_code == 400 and not session.streams
        assert reply.json()["error"]["message"] == f"{name} = 0 is below 1; raise it"


def test_values_of_the_run_may_be_repeated():
    body = {"messages": [USER], "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "stop": [], "user": "x"}
    assert ask("/chat/completions", body)[0].status_code == 200


@pytest.mark.parametrize("limits", [{"max_calls": 1}, {"max_episode_tokens": 1}, {"max_model_len": 20}])
def test_a_spent_budget_is_a_prompt_that_is_too_long(limits):
    session = made(episodes.Backend(), limits=limits)

    async def run():
        async with opened(session) as (visit, http):
            for content in "ab":
                body = {"messages": [{"role": "user", "content": content * 20}], "model": "policy"}
                reply = await http.post(f"{visit.base_url}/chat/completions", json=body)
            assert not visit.fault.done()
            return reply

    reply = asyncio.run(run())
    assert reply.status_code == 400
    assert "maximum context length is" in reply.json()["error"]["message"]


def test_a_failed_backend_is_a_fault_and_never_a_reply():
    async def fail(call):
        raise ConnectionError("no server")

    fail.tokenizer = episodes.TOKENIZER
    session = made(fail)

    async def run():
        async with opened(session) as (visit, http):
            sent = asyncio.ensure_future(http.post(f"{visit.base_url}/chat/completions", json={"messages": [USER]}))
            done, _ = await asyncio.wait([sent, visit.fault], return_when=asyncio.FIRST_COMPLETED)
            assert done == {visit.fault}
            assert isinstance(visit.fault.exception(), ConnectionError)
            await asyncio.sleep(0.05)
            assert not sent.done()
            sent.cancel()

    asyncio.run(run())


def test_closing_cancels_calls_and_the_url_is_gone():
    begun, ended = [], []

    async def wait(call):
        begun.append(call)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(call)

    wait.tokenizer = episodes.TOKENIZER
    session = made(wait)

    async def run():
        async with endpoint_lib.Endpoint(episodes.TOKENIZER) as endpoint, client() as http:
            with endpoint.open(session) as visit:
                url = f"{visit.base_url}/chat/completions"
                sent = asyncio.ensure_future(http.post(url, json={"messages": [USER]}))
                while not begun:
                    await asyncio.sleep(0.01)
            with contextlib.suppress(httpx.HTTPError):
                await asyncio.wait_for(sent, 5)
            reply = await http.post(url, json={"messages": [USER]})
            other = await http.get(visit.base_url.replace("/s/", "/s/x") + "/models")
            return reply.status_code, other.status_code

    assert asyncio.run(run()) == (410, 410)
    assert ended == begun


def test_replies_are_functions_of_content():
    """A replay must show the environment the same bytes: no clock, no random IDs."""
    body = {"messages": [USER], "tools": TOOLS, "logprobs": True}
    first, second = (ask("/chat/completions", body)[0].content for _ in range(2))
    assert first == second


def test_usage_and_models():
    body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    reply, session = ask("/chat/completions", body)
    usage = json.loads(reply.text.split("\n\n")[-3].removeprefix("data: "))
    [turn] = session.streams[0].turns
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == turn.end - turn.start
    assert usage["usage"]["prompt_tokens"] == turn.start

    async def run():
        async with opened(session) as (visit, http):
            return (await http.get(f"{visit.base_url}/models")).json()["data"]

    [card] = asyncio.run(run())
    assert (card["id"], card["max_model_len"]) == ("policy", episodes.LIMITS.max_model_len)


def test_samples_are_those_of_the_backend():
    """The logprobs and versions that train are the server's; the environment cannot change them."""
    session = made(episodes.Backend(version=9))
    ask("/chat/completions", {"messages": [USER]}, session=session)
    [turn] = session.streams[0].turns
    assert isinstance(turn.sample, completion_lib.Completion)
    assert np.array(turn.sample.versions).tolist() == [9] * len(turn.sample.tokens)
