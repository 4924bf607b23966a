"""The OpenAI-style routes: whole and streamed replies are equal, and both are the text of their token IDs.

In process over ASGI. The model's weights are random; a scripted engine returns the texts that a test needs, token by token.
"""

import asyncio
import contextlib
import itertools
import json
import pathlib
import re
import time
from unittest import mock

import grpc
import httpx
import jax
import numpy as np
import pydantic
import pytest

from docs import catalog
from inference import chat as chat_lib
from inference import serve
from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import schemas
from models import transformer
from models.text import tokenizer as tokenizer_lib
from tests.support import engines, scripted_server, serving, tiny

MODEL = tiny.model()
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=640, prefill_batch=2, steps_per_call=4)
TOK = tokenizer_lib.byte_chatml()
WAIT_S = 300
HELLO = [{"role": "user", "content": "hello"}]
ADD = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": ADD}


@pytest.fixture(scope="module")
def server():
    params = jax.tree.map(jax.numpy.asarray, tiny.params(MODEL, 0))
    engine = scripted_server.Scripted(MODEL, CONFIG, TOK)
    engine.script = None
    with engines.server(engine, params) as server:
        engine.scheduler = server.scheduler
        yield server


@pytest.fixture(scope="module")
def ask(server):
    """ask(path, body) -> response, within a process."""
    ask = serving.asker(serve.make_app(server))
    return lambda path, body=None, method="POST": ask(method, path, json=body)


@pytest.fixture
def says(server):
    """says(text) makes `text` the next completion, markers and special tokens included."""

    def says(text):
        ids = TOK.encode(text, special=True)
        server.engine.script = lambda prompt: ids

    yield says
    server.engine.script = None


def chat(ask, status=200, messages=HELLO, **fields):
    response = ask("/v1/chat/completions", {"model": "policy", "messages": messages, "seed": 1} | fields)
    assert response.status_code == status, response.text
    return response.json()


def streamed(ask, path="/v1/chat/completions", **fields):
    """(chunks, the last usage or None) of a streamed answer."""
    body = {"model": "policy", "seed": 1, "stream": True} | fields
    if "prompt" not in body:
        body = {"messages": HELLO} | body
    response = ask(path, body)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    usage = chunks.pop()["usage"] if chunks[-1]["choices"] == [] else None
    return chunks, usage


def joined(chunks, index=0):
    """The message that the deltas of one choice put together."""
    message, reason, calls = {"content": ""}, None, []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None  # nothing comes after the end
            reason = choice["finish_reason"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    calls += value
                elif name != "role":
                    message[name] = message.get(name, "") + value
    return message, reason, calls


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_its_prompt_generated(ask, server):
    """Prompt ids as the template renders them, the ids and log-probabilities of the token route for the same seed."""
    reply = chat(ask, logprobs=True, top_logprobs=3, return_token_ids=True, max_tokens=9, n=2, top_k=-1)
    prompt = TOK.render(HELLO, add_generation_prompt=True).token_ids
    assert reply["object"] == "chat.completion" and reply["model"] == "policy"
    assert reply["prompt_token_ids"] == prompt and [c["index"] for c in reply["choices"]] == [0, 1]
    body = {"token_ids": prompt, "sampling_params": {"seed": 1, "max_tokens": 9, "n": 2}}
    plain = ask("/inference/v1/generate", body).json()
    for choice, other in zip(reply["choices"], plain["choices"], strict=True):
        assert choice["token_ids"] == other["token_ids"] and choice["finish_reason"] == other["finish_reason"]
        content = choice["logprobs"]["content"]
        assert [e["logprob"] for e in content] == [e["logprob"] for e in other["logprobs"]["content"]]
        for entry, id in zip(content, choice["token_ids"], strict=True):
            assert entry["bytes"] == list(TOK.token_bytes(id)) and len(entry["top_logprobs"]) == 3
            tops = [top["logprob"] for top in entry["top_logprobs"]]
            assert tops == sorted(tops, reverse=True) and tops[0] >= entry["logprob"]
        assert choice["message"]["content"] == TOK.decode(choice["token_ids"])
    num_new = sum(len(choice["token_ids"]) for choice in reply["choices"])
    usage = {"prompt_tokens": len(prompt), "completion_tokens": num_new, "total_tokens": len(prompt) + num_new}
    assert reply["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    again = chat(ask, return_token_ids=True, max_tokens=9, n=2, top_k=-1)
    assert again["usage"] == reply["usage"] | {"prompt_tokens_details": {"cached_tokens": len(prompt)}}
    assert plain["usage"] == again["usage"]


def test_a_stream_puts_together_the_whole_answer(ask):
    fields = dict(max_tokens=21, n=2, logprobs=True, return_token_ids=True)
    chat(ask, **fields)
    whole = chat(ask, **fields)  # whose prompt is kept by now, as that of the stream will be
    chunks, usage = streamed(ask, stream_options={"include_usage": True}, **fields)
    assert usage == whole["usage"] and chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    for index, choice in enumerate(whole["choices"]):
        message, reason, _ = joined(chunks, index)
        assert message["content"] == choice["message"]["content"] and reason == choice["finish_reason"]
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert pieces[0]["delta"]["role"] == "assistant"
        assert sum((c.get("token_ids", []) for c in pieces), []) == choice["token_ids"]
        entries = [entry for c in pieces if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
    assert len(chunks) >= 2 + 2 * 21 // 4  # it does stream
    assert streamed(ask, max_tokens=3)[1] is None  # usage only when asked for


REASONED = "<think>\nhmm, <b>\n</think>\n\nThe answer: é <tool"
CALLED = 'See:\n<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'
TWICE = CALLED + '\n<tool_call>{"name": "add", "arguments": "{}"}</tool_call>'
ODD = '<tool_call>{"name": "add", "parameters": {"a": "see </tool_call>\n{", "b": [NaN, 1e400], "c": "\\ud800"}}</tool_call>'
BROKEN = "x <tool_call>{'name'}</tool_call> <tool_call>{"


@pytest.mark.parametrize(
    ("text", "message", "calls"),
    [
        (REASONED, {"reasoning_content": "hmm, <b>", "content": "The answer: é <tool"}, []),
        (CALLED, {"content": "See:"}, [("add", {"a": [1, "é"]})]),
        (TWICE, {"content": "See:"}, [("add", {"a": [1, "é"]}), ("add", {})]),
        (ODD, {"content": ""}, [("add", {"a": "see </tool_call>\n{", "b": [None, None], "c": "\ud800"})]),
        (BROKEN, {"content": BROKEN}, []),
        ("<think>cut off", {"reasoning_content": "cut off", "content": ""}, []),
    ],
)
def test_reasoning_and_calls_whole_and_streamed(ask, says, text, message, calls):
    says(text + "<|im_end|>")
    choice = chat(ask, tools=[TOOL], ignore_eos=True, stop_token_ids=[258], max_tokens=200)["choices"][0]
    read = choice["message"]
    assert {name: read[name] for name in message} == message and ("reasoning_content" in read) == (len(message) == 2)
    made = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in read.get("tool_calls", [])]
    assert made == calls and choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert len({call["id"] for call in read.get("tool_calls", [])}) == len(calls)

    says(text + "<|im_end|>")
    chunks, _ = streamed(ask, tools=[TOOL], ignore_eos=True, stop_token_ids=[258], max_tokens=200)
    put, reason, parts = joined(chunks)
    assert put == message and reason == choice["finish_reason"]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parts] == calls
    assert [c["index"] for c in parts] == list(range(len(calls)))


def test_calls_are_text_without_tools(ask, says):
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        says(CALLED + "<|im_end|>")
        choice = chat(ask, max_tokens=200, stop_token_ids=[258], **fields)["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": CALLED} and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", ["wor", ["zzz", "o w"], "d<|"])
def test_a_stop_string_cuts_the_text_and_not_the_ids(ask, says, stop):
    """Whole and streamed; no streamed piece holds a beginning of the stop string that it would have to take back."""
    for stream in (False, True):
        says("hello world and more")
        fields = dict(max_tokens=20, stop=stop, ignore_eos=True, return_token_ids=True)
        stops = [stop] if isinstance(stop, str) else stop
        text = "hello world and more"
        ends = [text.index(s) for s in stops if s in text]
        if stream:
            chunks, _ = streamed(ask, **fields)
            message, reason, _ = joined(chunks)
            ids = sum((c.get("token_ids", []) for chunk in chunks for c in chunk["choices"]), [])
        else:
            choice = chat(ask, **fields)["choices"][0]
            message, reason, ids = choice["message"], choice["finish_reason"], choice["token_ids"]
        assert message["content"] == (text[: min(ends)] if ends else text)
        assert reason == ("stop" if ends else "length")
        assert TOK.decode(ids) == (text[: min(text.index(s) + len(s) for s in stops if s in text)] if ends else text)


def test_a_conversation_is_rendered_as_the_template_has_it(ask):
    """Parts, null contents, tool calls with arguments as text, tool results, and fields unknown to the template."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "1+0?"},
        {"role": "assistant", "content": None, "reasoning": "call", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1", "unheard": {"of": 1}},
    ]
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+0?"},
        {"role": "assistant", "content": "", "reasoning_content": "call", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    expected = TOK.render(plain, add_generation_prompt=True, tools=[TOOL]).token_ids
    got = ask("/tokenize", {"model": "policy", "messages": messages, "tools": [TOOL]}).json()
    assert got == {"count": len(expected), "max_model_len": 640, "tokens": expected}
    reply = chat(ask, messages=messages, tools=[TOOL], return_token_ids=True, max_tokens=2)
    assert reply["prompt_token_ids"] == expected
    bare = ask("/tokenize", {"messages": messages[:2], "add_generation_prompt": False}).json()["tokens"]
    assert bare == TOK.render(plain[:2]).token_ids
    assert ask("/detokenize", {"tokens": expected}).json()["prompt"] == TOK.decode(expected, skip_special=False)
    assert ask("/tokenize", {"prompt": "a<|im_end|>"}).json()["tokens"] == [97, 258]
    text = {"prompt": "a<|im_end|>", "parse_special": False, "max_tokens": 1, "return_token_ids": True}
    assert ask("/v1/completions", text).json()["choices"][0]["prompt_token_ids"] == list(b"a<|im_end|>")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages: Input should be a valid array"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role: Input should be 'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": "x" * 700}]}, "maximum context length is 640 tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "has no function.name"),
        ({"tool_choice": "required"}, "tool_choice 'required' cannot be enforced"),
        ({"response_format": {"type": "json_object"}}, 'response_format = {"type": "json_object"} is not supported'),
        ({"top_logprobs": 3}, "top_logprobs = 3 needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be in 0..20"),
        ({"n": 10**30}, "n must be in 1..1024"),  # before anything is made for each sample
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_rejected_fields(ask, fields, words, stream):
    """A stream that cannot begin is refused by its status, as any request."""
    assert words in chat(ask, 400, **fields, stream=stream)["error"]["message"]


def test_a_list_of_mistakes_is_one_mistake():
    """A body of 8 MiB must not become millions of errors."""
    wrong = {name: [1] * 9 for name in ("messages", "tools", "stop")}
    with pytest.raises(pydantic.ValidationError) as error:
        schemas.Chat.model_validate(wrong)
    assert error.value.error_count() == len(wrong) + 1  # `stop` is also not a string


@pytest.mark.parametrize("token", [-1, 2**40])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions/tokens"])
def test_a_prompt_of_unknown_ids_is_rejected_before_it_is_decoded(ask, path, token):
    name = "prompt" if path == "/v1/completions" else "tokens"
    reply = ask(path, {name: [token]})
    assert reply.status_code == 400, reply.text
    assert f"token id {token} is outside the vocabulary" in reply.json()["error"]["message"]


def test_an_unknown_route_and_a_wrong_method_get_json(ask):
    assert ask("/v1/nowhere").json()["error"]["message"].startswith("route POST /v1/nowhere does not exist")
    wrong = ask("/v1/models")
    assert (wrong.status_code, wrong.headers["allow"], wrong.json()["error"]["type"]) == (
        405,
        "GET",
        "method_not_allowed",
    )
    assert wrong.json()["error"]["message"] == "route /v1/models takes no POST; send GET"
    assert "both or neither of prompt and messages" in ask("/tokenize", {}).json()["error"]["message"]
    assert "outside the vocabulary" in ask("/detokenize", {"tokens": [10**6]}).json()["error"]["message"]


# ---- sampling fields -------------------------------------------------------------------------------------------------


def test_untempered_and_prompt_log_probabilities(ask, server):
    """Both against the learner's own forward pass of the same ids."""
    prompt = list(b"some prompt of more than sixteen tokens")
    fields = {"temperature": 0.5, "top_k": 3, "max_tokens": 12, "seed": 4, "ignore_eos": True}
    fields |= {"untempered_logprobs": True, "prompt_logprobs": 1, "logit_bias": {"65": 2.0}}
    reply = ask("/inference/v1/generate", {"token_ids": prompt, "sampling_params": fields}).json()
    choice = reply["choices"][0]
    ids = np.array([prompt + choice["token_ids"]], np.int32)
    params = server.scheduler._params
    hidden, _ = jax.jit(transformer.apply, static_argnums=1)(params, MODEL, ids)
    logits = np.asarray(transformer.logits(params, MODEL, hidden)[0], np.float64)

    def logp(logits, rows, ids):
        logits = logits[rows]
        return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[np.arange(len(ids)), ids]

    rows = np.arange(len(prompt) - 1, ids.shape[1] - 1)
    # float32 programs of other shapes than `apply`, over logits of order 10
    np.testing.assert_allclose(choice["untempered_logprobs"], logp(logits, rows, choice["token_ids"]), atol=2e-5)
    biased = logits.copy()
    biased[:, 65] += 2.0
    kept = np.where(biased >= np.sort(biased, axis=1)[:, -3:-2], biased / 0.5, -np.inf)
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(sampled, logp(kept, rows, choice["token_ids"]), atol=5e-5)  # twice the logits' error
    assert reply["prompt_logprobs"][0] is None and len(reply["prompt_logprobs"]) == len(prompt)
    scored = [entry[str(id)]["logprob"] for id, entry in zip(prompt[1:], reply["prompt_logprobs"][1:], strict=True)]
    np.testing.assert_allclose(scored, logp(logits, np.arange(len(prompt) - 1), prompt[1:]), atol=2e-5)


def test_completions(ask):
    """Text, ids, several of each; log-probabilities in the older form; a stream of one."""
    body = {"prompt": "hello", "seed": 3, "logprobs": 2, "return_token_ids": True}
    reply = ask("/v1/completions", body).json()
    (choice,) = reply["choices"]
    assert reply["object"] == "text_completion" and len(choice["token_ids"]) <= 16  # OpenAI's default
    assert choice["prompt_token_ids"] == list(b"hello") and choice["text"] == TOK.decode(choice["token_ids"])
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == len(choice["token_ids"])
    for top, spelled, logprob in zip(
        logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"], strict=True
    ):
        assert 2 <= len(top) <= 3 and top[spelled] == logprob  # the two likeliest, and the sampled one
    assert ask("/v1/completions", body | {"prompt": list(b"hello")}).json()["choices"] == reply["choices"]
    many = ask("/v1/completions", body | {"prompt": ["hello", "bye"], "n": 2}).json()["choices"]
    assert [c["index"] for c in many] == [0, 1, 2, 3] and many[0] == choice
    assert bytes(many[2]["prompt_token_ids"]) == b"bye"
    chunks, usage = streamed(ask, "/v1/completions", prompt="hello", seed=3, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert usage == reply["usage"] | {"prompt_tokens_details": {"cached_tokens": 5}}
    for body, words in (
        ({"prompt": []}, "0 entries"),
        ({"prompt": ["a", "b"], "stream": True}, "one prompt at a time"),
        ({"prompt": "a", "echo": True}, "echo = true is not supported"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[]]}, "token_ids is empty"),
    ):
        response = ask("/v1/completions", body)
        assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_logprobs_of_parts_of_characters(ask, server):
    """Each token has a key and value of its own, and points at its character; whole and streamed."""
    ids = [*"aé漢".encode(), 0xE3, *"b🙂".encode(), TOK.specials["<|im_start|>"], *b"c"]
    body = {"prompt": "hello", "logprobs": 5, "max_tokens": len(ids), "ignore_eos": True, "seed": 1}
    server.engine.script = lambda prompt: ids
    whole = ask("/v1/completions", body).json()["choices"][0]
    chunks, _ = streamed(ask, "/v1/completions", **body)
    server.engine.script = None
    found = whole["logprobs"]
    assert whole["text"] == "aé漢\ufffdb🙂c"
    assert found["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4, 5, 5, 5, 5, 6, 6]
    rows = zip(found["top_logprobs"], found["tokens"], found["token_logprobs"], strict=True)
    assert all(5 <= len(top) <= 6 and top[spelled] == logprob for top, spelled, logprob in rows)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert len(pieces) > 1 and all(sum((piece[name] or [] for piece in pieces), []) == found[name] for name in found)


# ---- control ---------------------------------------------------------------------------------------------------------


def test_pause_keeps_requests_and_resume_finishes_them(server):
    control = serving.asker(serve.make_control_app(server))

    def ask(path, method="POST"):
        return control(method, path)

    assert ask("/pause?mode=keep&clear_cache=true").json() == {"status": "paused"}
    health = ask("/health", method="GET").json()
    assert health["paused"] and health["waiting_for"] == "POST /resume, after a POST /pause"
    future = server.scheduler.submit(scheduler_lib.GenerateRequest(tuple(b"hi"), max_tokens=3))
    assert ask("/pause").json() == {"status": "paused"}  # again
    assert not future.done() and server.scheduler.num_pending == 1
    cancelled = server.scheduler.submit(scheduler_lib.GenerateRequest(tuple(b"ho"), max_tokens=3))
    cancelled.cancel()
    assert ask("/resume").json() == ask("/resume").json() == {"status": "resumed"}
    assert len(future.result(WAIT_S)[0].tokens) <= 3 and server.scheduler.num_pending == 0
    assert ask("/pause?mode=abort").status_code == 400 and not server.scheduler.is_paused
    server.scheduler.release().result(WAIT_S)
    health = ask("/health", method="GET").json()
    assert health["released"] and health["waiting_for"] == "the end of a train step on its devices"
    server.scheduler.reclaim().result(WAIT_S)
    assert not ask("/health", method="GET").json()["released"]


def test_metrics_have_the_names_that_controllers_read(ask):
    lines = ask("/metrics", method="GET").text.splitlines()
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    names = "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc"
    names += " cache_config_info num_preemptions_total prefix_cache_hits_total prefix_cache_queries_total"
    assert {f"vllm:{name}" for name in names.split()} <= values.keys()
    assert values["vllm:prefix_cache_hits_total"] > 0  # the same prompt was asked more than once above
    assert values["vllm:generation_tokens_total"] > 0 and values["vllm:num_requests_running"] == 0
    pattern = r'[a-z]+:[a-z0-9_]+\{(block_size="640",)?engine="0",(le="[0-9.+Inf]+",)?model_name="policy"(,[a-z_]+="\w+")*\} [0-9.e+-]+'
    assert all(line.startswith(("# TYPE ", "# HELP ")) or re.fullmatch(pattern, line) for line in lines)
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE "))
    assert kinds.keys() == {re.sub("_seconds_(bucket|sum|count)$", "_seconds", name) for name in values}
    assert values["vllm:e2e_request_latency_seconds_count"] > 0 and values["intellax:update_seconds_count"] == 0
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())
    assert {name.partition("{")[0] for name in kinds} == catalog.SCRAPES["server"].keys()
    assert values["vllm:time_to_first_token_seconds_count"] >= values["intellax:requests_total"]
    assert values["vllm:request_queue_time_seconds_count"] >= values["intellax:requests_total"]
    assert values["vllm:request_time_per_output_token_seconds_count"] >= values["intellax:samples_total"] > 0
    assert ask("/liveness", method="GET").json() == {"status": "ok"}


def test_an_api_key_guards_all_but_health(server):
    app = serve.make_app(server, api_key="secret")

    async def exchange():
        async with serving.client(app) as client:
            bare = [await client.get(path) for path in ("/health", "/liveness", "/v1/models", "/metrics")]
            wrong = await client.get("/v1/models", headers={"authorization": "Bearer secre"})
            right = await client.get("/v1/models", headers={"authorization": "Bearer secret"})
            return [response.status_code for response in (*bare, wrong, right)], wrong.json()

    codes, body = asyncio.run(exchange())
    assert codes == [200, 200, 401, 401, 401, 200] and body["error"]["type"] == "authentication_error"


# ---- streams that end early ------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_a_stream_frees_its_slots(server):
    body = json.dumps({"messages": HELLO, "stream": True, "n": 4, "ignore_eos": True, "max_tokens": 600}).encode()

    async def main():  # leaves after the start, four chunks without tokens, three pieces
        await serving.disconnect(serve.make_app(server), "/v1/chat/completions", body, after=8)
        for _ in range(1000):  # while the loop lives, whose end would free the slots, too
            if len(server.scheduler.slots.running) == server.scheduler.num_pending == 0:
                break
            await asyncio.sleep(0.01)
        return server.scheduler.stats["aborted"]

    before = server.scheduler.stats["aborted"]
    assert asyncio.run(main()) > before
    assert len(server.scheduler.slots.running) == server.scheduler.num_pending == 0


def test_an_event_loop_that_is_gone_frees_the_slots(server):
    """The listener's loop is closed while tokens are delivered."""

    def listener(index, completion):
        raise RuntimeError("Event loop is closed")

    future = server.scheduler.submit(scheduler_lib.GenerateRequest(tuple(b"hi"), max_tokens=600), listener)
    with pytest.raises(scheduler_lib.concurrent.futures.CancelledError):
        future.result(WAIT_S)
    assert server.scheduler.is_alive


# ---- the terminal chat -----------------------------------------------------------------------------------------------


def test_the_terminal_chat_keeps_the_conversation(ask, says, monkeypatch, capsys):
    """Three lines: an answer with reasoning, a refusal in the server's words, a new conversation."""
    sent = []

    def handler(request):
        body = json.loads(request.content)
        sent.append(body["messages"])
        says("<think>hm</think>yes é<|im_end|>")
        response = ask("/v1/chat/completions", body | {"max_tokens": 100})
        return httpx.Response(response.status_code, content=response.content, headers=response.headers)

    lines = iter(["hello", "x" * 700, "", "again"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    with httpx.Client(transport=httpx.MockTransport(handler), base_url="http://server") as http:
        chat_lib.talk(http, {}, "be brief")
    out, err = capsys.readouterr()
    assert out.count("hmyes é") == 2 and "a new conversation" in out and "maximum context length" in err
    opening = {"role": "system", "content": "be brief"}
    assert sent[0] == [opening, {"role": "user", "content": "hello"}]
    assert sent[1][2] == {"role": "assistant", "content": "yes é", "reasoning_content": "hm"}
    assert sent[2] == [opening, {"role": "user", "content": "again"}]


def test_a_terminal_chat_takes_folders_ids_and_urls(monkeypatch, tmp_path, capsys):
    """The server has another working directory: a folder needs its full path there; an ID and a URL stay as they are."""
    seen = []

    @contextlib.contextmanager
    def served(arguments):
        seen.append(arguments[1])
        yield "http://server"

    monkeypatch.setattr(chat_lib, "served", served)
    monkeypatch.setattr(chat_lib, "talk", lambda *_: None)
    monkeypatch.chdir(tmp_path.parent)
    for given in (tmp_path.name, "Owner/Name", "http://relay:1"):
        assert chat_lib.main(["--model", given]) == 0
    assert seen == [str(tmp_path.resolve()), "Owner/Name", "http://relay:1"]
    for url in ("http://127.0.0.1:9", "http://host:abc"):
        assert chat_lib.main(["--url", url]) == 1
        assert re.search(f"no reply from {url}: .*; start a server there", capsys.readouterr().err)
    monkeypatch.setattr(chat_lib, "talk", mock.Mock(side_effect=httpx.ReadError("gone")))
    assert chat_lib.main(["--model", "Owner/Name"]) == 1
    assert re.search("no reply from http://server: gone; its server ended", capsys.readouterr().err)


def test_a_terminal_chat_waits_as_long_as_its_server_loads(monkeypatch):
    """Each look at it takes an hour on this clock."""
    process, command = mock.MagicMock(), []

    def poll():
        if process.poll.call_count == 3:
            pathlib.Path(command[command.index("--address_file") + 1]).write_text("http://server")

    process.__enter__.return_value.poll = process.poll
    process.poll.side_effect = poll
    monkeypatch.setattr(chat_lib.subprocess, "Popen", lambda arguments, **_: command.extend(arguments) or process)
    hours = itertools.count(step=3600)
    monkeypatch.setattr(chat_lib, "time", mock.Mock(monotonic=lambda: next(hours)))
    with chat_lib.served([]) as url:
        assert url == "http://server"


# ---- JetStream's clients ---------------------------------------------------------------------------------------------


def test_jetstreams_grpc_service(server):
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    from inference.server import grpc_service

    port, running = grpc_service.start(server, "127.0.0.1", 0)
    request = jetstream_pb2.DecodeRequest
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=WAIT_S).is_live
            ids = request(token_content=request.TokenContent(token_ids=list(b"hello")), max_tokens=10)
            got = [sample for r in stub.Decode(ids, timeout=WAIT_S) for sample in r.stream_content.samples]
            new = [token for sample in got for token in sample.token_ids]
            assert len(new) <= 10 and not {256, 258} & set(new) and {sample.text for sample in got} <= {""}
            text = request(text_content=request.TextContent(text="hello"), max_tokens=10)
            got = [sample for r in stub.Decode(text, timeout=WAIT_S) for sample in r.stream_content.samples]
            new = [token for sample in got for token in sample.token_ids]
            assert "".join(sample.text for sample in got) == TOK.decode(new)
            for bad in (
                request(token_content=request.TokenContent(token_ids=[10**6]), max_tokens=1),
                request(token_content=request.TokenContent(token_ids=[1] * 700), max_tokens=1),
                request(text_content=request.TextContent(text="x")),
            ):
                with pytest.raises(grpc.RpcError) as error:
                    list(stub.Decode(bad, timeout=WAIT_S))
                assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            before = server.scheduler.stats["aborted"]
            deadline = time.monotonic() + WAIT_S
            while server.scheduler.stats["aborted"] == before:  # a sample may end before it is canceled
                assert time.monotonic() < deadline
                text = request(text_content=request.TextContent(text="x"), max_tokens=600)
                long = stub.Decode(text, timeout=WAIT_S)
                next(long)
                long.cancel()
                time.sleep(0.1)
        with pytest.raises(ValueError, match="cannot listen on 127.0.0.1:.* for gRPC"):
            grpc_service.start(server, "127.0.0.1", port)
    finally:
        running.stop(1).wait()
    assert server.scheduler.is_alive
