"""The routed experts of each token, as a client that replays them gets them.

The oracle is `transformer.apply` over prompt and completion, a program of other shapes; how its routers choose is
checked against a definition in tests/models/test_moe.py.
"""

import base64
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import serve
from inference.engine import engine as engine_lib
from inference.engine import weights
from inference.scheduler import scheduler as scheduler_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from tests.support import engines, serving, stacking, tiny

MODEL = tiny.model(num_layers=3, num_experts=5, experts_per_token=2, expert_ffn_dim=16, dense_layers=(1,))
CONFIG = engine_lib.EngineConfig(4, 96, 2, 5, prefill_chunk=16, routed_experts=True)
TOKENIZER = tokenizer_lib.byte_chatml()
Request = functools.partial(scheduler_lib.GenerateRequest, routed_experts=True)
WAIT_S = 300
HELLO = list(b"hello")


@functools.cache
def params():
    return jax.tree.map(jnp.asarray, tiny.params(MODEL, 1))


@pytest.fixture(scope="module")
def server():
    engine = engine_lib.Engine(MODEL, CONFIG, TOKENIZER)
    with engines.server(engine, params()) as server:
        yield server


@pytest.fixture
def ask(server):
    ask = serving.asker(serve.make_app(server))
    return lambda path, body: ask("POST", path, json=body)


@functools.cache
def oracle(tokens):
    """[T, L, X] of all tokens but the last."""
    padded_1T = np.zeros((1, CONFIG.max_model_len), np.int32)
    padded_1T[0, : len(tokens)] = tokens
    _, routing = jax.jit(transformer.apply, static_argnums=1)(params(), MODEL, padded_1T)
    return np.moveaxis(np.asarray(routing.experts)[:, 0], 0, 1)[: len(tokens) - 1]


def check(prompt, completion):
    """Compares sets: two experts of nearly the same score may change places between programs."""
    expected, got = oracle((*prompt, *completion.tokens)), completion.experts[:, [0, 2]]
    assert got.dtype == np.uint8 and got.shape == expected.shape == (len(prompt) + len(completion.tokens) - 1, 2, 2)
    np.testing.assert_array_equal(np.sort(got, axis=-1), np.sort(expected, axis=-1))


@pytest.mark.slow
def test_experts_are_those_of_the_whole_sequence(server):
    """A batched prompt, one in chunks, its continuation on kept chunks, and the same prompt again."""
    submit = server.scheduler.submit
    short, long = tuple(b"hi there"), tuple(range(50))
    first = submit(Request(short, num_samples=3, max_tokens=23, seed=1)), submit(Request(long, max_tokens=13, seed=2))
    (*few,), (one,) = (future.result(WAIT_S) for future in first)
    for completion in few:
        check(short, completion)
    check(long, one)
    longer = (*long, *one.tokens, 7)
    before = server.scheduler.stats["prefix_hits"]
    (two,) = submit(Request(longer, max_tokens=6, seed=3)).result(WAIT_S)
    assert server.scheduler.stats["prefix_hits"] == before + 48 and two.num_cached == 48
    check(longer, two)
    (again,) = submit(Request(long, max_tokens=13, seed=2)).result(WAIT_S)
    assert again.num_cached == 50
    np.testing.assert_array_equal(again.experts, one.experts)
    (alone,) = submit(Request((5,), max_tokens=1, seed=3)).result(WAIT_S)  # one token: run by decode only
    check((5,), alone)
    (silent,) = submit(Request(short, max_tokens=2, routed_experts=False)).result(WAIT_S)
    assert silent.experts is None


def test_kept_chunks_bring_their_own_experts_only(server):
    """The prompt that they were kept from goes on otherwise."""
    begin = tuple(range(100, 116))
    for rest in ((3, 4, 5), (6, 7)):
        (completion,) = server.scheduler.submit(Request(begin + rest, max_tokens=3, seed=5)).result(WAIT_S)
        check(begin + rest, completion)
    assert completion.num_cached == 16


def test_a_stop_string_cuts_the_experts_with_the_tokens(server):
    text = TOKENIZER.decode(server.scheduler.submit(Request((9, 9), max_tokens=30, seed=8)).result(WAIT_S)[0].tokens)
    (cut,) = server.scheduler.submit(Request((9, 9), max_tokens=30, seed=8, stop_texts=(text[3],))).result(WAIT_S)
    assert cut.finish_reason == "stop" and len(cut.tokens) < 30
    check((9, 9), cut)


def decoded(field):
    return np.frombuffer(base64.b64decode(field["data"]), field["dtype"]).reshape(field["shape"])


def test_the_field_of_the_reply(ask, server):
    """Every layer has its place, `start` leaves out rows of an earlier turn, and the key comes where clients search it."""
    body = {"token_ids": HELLO, "sampling_params": {"max_tokens": 7, "seed": 4, "ignore_eos": True}}
    response = ask("/inference/v1/generate", body)
    assert b'"routed_experts":{"data":"' in response.content
    choice = response.json()["choices"][0]
    field = choice["routed_experts"]
    assert field["shape"] == [11, 3, 2] and field["start"] == 0 and field["dtype"] == "uint8"
    expected = oracle((*HELLO, *choice["token_ids"]))
    np.testing.assert_array_equal(np.sort(decoded(field)[:, [0, 2]]), np.sort(expected))
    assert (decoded(field)[:, 1] == 0).all()
    turn = HELLO + choice["token_ids"] + [3]
    known = len(HELLO) + 7 - 1  # rows that the first turn gave
    body = {"token_ids": turn, "sampling_params": {"max_tokens": 3, "routed_experts_prompt_start": known}}
    later = ask("/inference/v1/generate", body).json()["choices"][0]
    assert later["routed_experts"]["start"] == known
    both = np.concatenate([decoded(field), decoded(later["routed_experts"])])
    expected = oracle((*turn, *later["token_ids"]))
    np.testing.assert_array_equal(np.sort(both[:, [0, 2]]), np.sort(expected))


def test_which_replies_have_the_field(ask):
    """The token route has it by default; the text routes if the request wants it or token ids."""
    sampling = {"max_tokens": 2, "seed": 1}
    plain = ask("/inference/v1/generate", {"token_ids": HELLO, "sampling_params": sampling})
    refused = {"token_ids": HELLO, "sampling_params": sampling | {"return_routed_experts": False}}
    assert "routed_experts" in plain.json()["choices"][0]
    assert "routed_experts" not in ask("/inference/v1/generate", refused).json()["choices"][0]
    chat = {"messages": [{"role": "user", "content": "x"}]} | sampling
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "hello"} | sampling)):
        assert "routed_experts" not in ask(path, body).json()["choices"][0]
        for asking in ({"return_routed_experts": True}, {"return_token_ids": True}):
            choice = ask(path, body | asking).json()["choices"][0]
            assert len(choice["routed_experts"]["data"]) > 0
        response = ask(path, body | {"return_routed_experts": True, "stream": True})
        assert response.status_code == 400 and "not supported in a stream" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("start", "words"), [(5, "= 5 is not below the prompt's 5 tokens"), (-1, "greater than or equal to 0")]
)
def test_a_start_that_cannot_be(ask, start, words):
    sampling = {"routed_experts_prompt_start": start}
    response = ask("/inference/v1/generate", {"token_ids": HELLO, "sampling_params": sampling})
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_a_server_that_records_no_experts_rejects_requests_for_them():
    engine = engine_lib.Engine(MODEL, dataclasses.replace(CONFIG, routed_experts=False), TOKENIZER)
    scheduler = scheduler_lib.Scheduler(engine, params(), 0)
    with pytest.raises(ValueError, match="Start it with --routed_experts"):
        scheduler.submit(Request(HELLO))
    scheduler.close()
    with pytest.raises(ValueError, match="experts cannot be recorded: the model has none"):
        engine_lib.Engine(tiny.model(), CONFIG, TOKENIZER)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_experts_on_a_mesh_and_in_stacked_layers(server, scan_layers):
    model = dataclasses.replace(MODEL, num_experts=5, scan_layers=scan_layers)
    mesh = mesh_lib.create({"tensor": 2, "data": 4})
    tree = stacking.stack(params(), model) if scan_layers else params()
    placed = jax.device_put(tree, weights.Store(model, mesh).shardings)
    requests = [Request(prompt, max_tokens=12, seed=6) for prompt in (tuple(HELLO), tuple(range(50)))]
    made = engine_lib.Engine(model, CONFIG, TOKENIZER, mesh)
    for request, (completion,) in zip(requests, engines.complete(made, placed, requests), strict=True):
        check(request.tokens, completion)
