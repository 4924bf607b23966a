"""The fields of requests: each one of request_fields.json is sent to each of its routes.

An honored field changes the reply. A neutral value and a harmless field leave it as it is. Any other field gets a 400 with its
name and a remedy: no field is ignored.
"""

import asyncio
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from inference import serve
from inference.engine import engine as engine_lib
from inference.server import schemas
from models.text import tokenizer as tokenizer_lib
from tests.support import engines, serving, tiny

TABLE = json.loads((pathlib.Path(__file__).parent / "request_fields.json").read_text())["fields"]
MODEL = tiny.model()
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=640, prefill_batch=2, steps_per_call=4)
HELLO = [{"role": "user", "content": "hello"}]
PLAIN = {"seed": 1, "max_tokens": 12}
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
# Route of the table: (path, body without the field, schema)
ROUTES = {
    "c": (CHAT, PLAIN | {"messages": HELLO}, schemas.Chat),
    "t": (f"{CHAT}/tokens", PLAIN | {"messages": HELLO, "tokens": list(b"hello")}, schemas.ChatTokens),
    "p": (TEXT, PLAIN | {"prompt": "hello"}, schemas.Completions),
    "s": (GENERATE, {"token_ids": list(b"hello"), "sampling_params": PLAIN}, schemas.SamplingParams),
    "g": (GENERATE, {"token_ids": list(b"hello"), "sampling_params": PLAIN}, schemas.Generate),
    "k": ("/tokenize", {"messages": HELLO}, schemas.Tokenize),
}


@pytest.fixture(scope="module")
def server():
    params = jax.tree.map(jax.numpy.asarray, tiny.params(MODEL, 0))
    engine = engine_lib.Engine(MODEL, CONFIG, tokenizer_lib.byte_chatml())
    with engines.server(engine, params) as server:
        yield server


@pytest.fixture(scope="module")
def ask(server):
    ask = serving.asker(serve.make_app(server))
    return lambda path, body: ask("POST", path, json=body)


def with_fields(route, fields):
    """The path and the body of a request to a route of the table."""
    path, body, _ = ROUTES[route]
    if route == "s":
        return path, body | {"sampling_params": body["sampling_params"] | fields}
    return path, body | fields


@pytest.fixture(scope="module")
def send(server):
    """send(route, list of fields) sends a request with each, all together, and returns the responses."""
    app = serve.make_app(server)

    async def exchange(route, variants):
        async with serving.client(app) as http:
            posts = (http.post(path, json=body) for path, body in (with_fields(route, fields) for fields in variants))
            return await asyncio.gather(*posts)

    return lambda route, variants: asyncio.run(exchange(route, variants))


def told(response):
    """A reply without the time, a drawn ID, and the hits of the prefix cache; the text of a stream."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        return response.text
    reply = response.json()
    reply.get("usage", {}).pop("prompt_tokens_details", None)
    drawn = () if re.fullmatch("(.*-)?abc", reply.get("id", reply.get("request_id", ""))) else ("id", "request_id")
    return {name: value for name, value in reply.items() if name not in ("created", *drawn)}


@pytest.mark.parametrize("route", ROUTES)
def test_each_field_is_honored_neutral_harmless_or_refused(send, route):
    rows = [row for row in TABLE if route in row[1] and (row[0], route, row[2]) != ("honored", "k", "prompt")]
    nulls = {name: None for _, _, name, *_ in rows if name not in ROUTES[route][1] | PLAIN}
    answered = [row for row in rows if row[0] != "refused"]
    responses = send(route, [nulls, {}, *({name: value} for _, _, name, value, *_ in answered)])
    empty, plain, *replies = (told(response) for response in responses)
    assert empty == plain
    for (kind, _, name, _, *more), reply in zip(answered, replies, strict=True):
        assert (reply != plain) == (kind == "honored" and not more), name
    refused = [(name, more[0] if kind == "neutral" else value) for kind, _, name, value, *more in rows]
    refused = [pair for pair, row in zip(refused, rows, strict=True) if row[0] in ("refused", "neutral")]
    for (name, _), response in zip(refused, send(route, [dict([pair]) for pair in refused]), strict=True):
        assert response.status_code == 400, (name, response.text)
        where, _, remedy = response.json()["error"]["message"].partition("; ")
        assert name in where and remedy.split()[0] in ("leave", "send", "if"), response.text


def test_the_table_is_the_schema():
    for route, (*_, schema) in ROUTES.items():
        rows = {kind: set() for kind in ("honored", "neutral", "refused", "harmless")}
        for kind, routes, name, *_ in TABLE:
            if route in routes:
                rows[kind].add(name)
        assert rows["honored"] == schema.model_fields.keys(), route
        assert rows["harmless"] == schema.harmless.keys() and all(schema.harmless.values()), route
        assert rows["neutral"] == {name for name, neutral in schema.unsupported.items() if neutral.values}, route
        assert {name for name, neutral in schema.unsupported.items() if not neutral.values} <= rows["refused"], route
        assert not schema.unsupported.keys() & (schema.model_fields.keys() | schema.harmless.keys()), route


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": HELLO, "max_token": 5}, "max_token is not a field of this route; if you mean max_tokens, send that"),
        (CHAT, {"messages": HELLO, "zzz": 5}, "zzz is not a field of this route; leave it out"),
        (CHAT, {"messages": HELLO, "min_tokens": -1}, "min_tokens: Input should be greater than or equal to 0; got -1"),
        (TEXT, {"prompt": "a", "bad_words": ["x"]}, 'bad_words = ["x"] is not supported; leave it out, or send a logit_bias'),
        (TEXT, {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported; leave it out or send 0"),
        (TEXT, {"prompt": "a", "frequency_penalty": False}, "frequency_penalty = false is not supported"),
        (TEXT, {"prompt": "a", "prompt_logprobs": 5}, "prompt_logprobs: Input should be less than or equal to 1; got 5"),
        (TEXT, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids: "),
        (TEXT, {"prompt": "a", "allowed_token_ids": [272]}, "allowed token id 272 is outside the vocabulary"),
        (TEXT, {"prompt": "a", "min_tokens": 20}, "min_tokens must be in 0..max_tokens; got 20"),
        (TEXT, {"prompt": "a", "min_tokens": 2, "stop": "x"}, "min_tokens = 2 does not delay stop strings"),
        (TEXT, {"prompt": "a", "min_tokens": 2, "stop_token_ids": list(range(9))}, "at most 8 can be delayed"),
        (TEXT, {"prompt": "a", "min_tokens": 2, "allowed_token_ids": [256]}, "allowed_token_ids are stop tokens alone"),
        (TEXT, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs = 1 is not supported in a stream"),
        (CHAT, {"messages": HELLO, "stream": True, "prompt_logprobs": 0}, "prompt_logprobs = 0 is not supported in a stream"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"top_kk": 1}}, "sampling_params.top_kk is not a field of this route; if you mean top_k,"),
        (GENERATE, {"token_ids": [1], "x" * 99: 1}, "x" * 61 + "... is not a field of this route; leave it out"),
        (CHAT, {"messages": HELLO, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats = true is not"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}, "a message has function_call"),
    ],
)  # fmt: skip
def test_refusals_have_field_rule_and_remedy(ask, path, body, message):
    response = ask(path, body)
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("change", [{"logit_bias": {"65": 1.0}}, {"allowed_token_ids": [65]}, {"min_tokens": 2}])
def test_a_distribution_that_no_replay_knows_gets_no_proofs(ask, change):
    for route in "ctps":
        path, body = with_fields(route, change | {"proofs": True})
        error = ask(path, body).json()["error"]["message"]
        assert error.startswith(f"proofs = true, but {next(iter(change))} changes the sampling distribution")


def test_another_model_is_404(ask):
    for path, body, _ in ROUTES.values():
        response = ask(path, body | {"model": "gpt-6"})
        assert response.status_code == 404 and response.json()["error"]["type"] == "NotFoundError"
        assert response.json()["error"]["message"].startswith("The model `gpt-6` does not exist. ")
    assert ask("/detokenize", {"tokens": [1], "model": "gpt-6"}).status_code == 404


def test_min_tokens_delays_stop_tokens(ask):
    """Half of the vocabulary's mass is on the stop token. Later tokens may be it."""
    lengths = []
    for seed in range(12):
        fields = {"seed": seed, "stop_token_ids": [66], "logit_bias": {"66": 100.0}, "max_tokens": 9}
        body = {"token_ids": list(b"hello"), "sampling_params": fields | {"min_tokens": seed % 5}}
        tokens = ask(GENERATE, body).json()["choices"][0]["token_ids"]
        assert len(tokens) == seed % 5 + 1 and tokens.index(66) == seed % 5
        lengths.append(len(tokens))
    assert max(lengths) == 5


def test_allowed_tokens_are_sampled_from_their_own_distribution(ask, server):
    """Log-probabilities are those of the softmax over the allowed tokens, also with a bias on some of them."""
    allowed, bias = [65, 70, 90, 200], {"70": 1.5, "33": 100.0}
    fields = {"allowed_token_ids": allowed, "max_tokens": 10, "logprobs": 4, "untempered_logprobs": True, "seed": 3}
    body = {"token_ids": list(b"hello"), "sampling_params": fields}
    free = ask(GENERATE, body | {"sampling_params": fields | {"allowed_token_ids": None, "logprobs": 20}}).json()
    for change in ({}, {"logit_bias": bias}):
        choice = ask(GENERATE, body | {"sampling_params": fields | change}).json()["choices"][0]
        assert set(choice["token_ids"]) <= set(allowed)
        for entry in choice["logprobs"]["content"]:
            tops = {int(top["token"].removeprefix("token_id:")): top["logprob"] for top in entry["top_logprobs"]}
            assert set(tops) == set(allowed) and entry["logprob"] in tops.values()
            assert np.exp(list(tops.values())).sum() == pytest.approx(1, abs=1e-5)  # float32
    # The first position has the same logits: differences of log-probabilities are those of the free distribution, plus the bias.
    first = ask(GENERATE, body).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    biased = ask(GENERATE, body | {"sampling_params": fields | {"logit_bias": bias}}).json()
    after = {top["token"]: top["logprob"] for top in biased["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    before = {top["token"]: top["logprob"] for top in first}
    shift = {token: after[token] - before[token] for token in before}
    assert shift["token_id:70"] - shift["token_id:65"] == pytest.approx(1.5, abs=1e-4)
    assert shift["token_id:90"] == pytest.approx(shift["token_id:65"], abs=1e-4)
    assert free["choices"][0]["token_ids"] != choice["token_ids"]


def test_messages_reach_the_template_with_all_their_fields(ask, server, monkeypatch):
    """Replies of other servers, sent back: nulls, empty lists, and fields of the model's own template."""
    seen = []
    render = type(server.engine.tokenizer).render
    monkeypatch.setattr(
        type(server.engine.tokenizer),
        "render",
        lambda self, messages, **o: seen.append(messages) or render(self, messages, **o),
    )
    reply = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "thinking": "hm"}
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part]}, reply, HELLO[0]]
    assert ask(CHAT, PLAIN | {"messages": messages}).status_code == 200
    assert seen[0][0]["content"] == "hello" and seen[0][1]["thinking"] == "hm" and "refusal" not in seen[0][1]
