"""One prompt and one seed give the same completion on all routes, with the seed, the proofs, and the server's signature."""

import asyncio
import base64
import json

import grpc
import jax
import numpy as np
import pytest

from inference import serve
from inference.engine import engine as engine_lib
from inference.proofs import toploc
from inference.rollouts import attestation
from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from inference.server import grpc_service
from models import transformer
from models.text import tokenizer as tokenizer_lib
from tests.support import engines, serving, tiny
from tests.support import proofs as proofs_lib

MODEL = tiny.model()
CONFIG = engine_lib.EngineConfig(num_slots=8, max_model_len=640, prefill_batch=2, steps_per_call=4)
TOK = tokenizer_lib.byte_chatml()
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = TOK.render(HELLO, add_generation_prompt=True).token_ids
CHAT, OTHER = {"messages": HELLO}, [{"role": "user", "content": "bye"}]
FIELDS = ("seed", "token_ids", "logprobs", "finish_reason", "policy_versions", "prompt_policy_version", "proofs", "server_signature")  # fmt: skip
RUN = "a" * 64


@pytest.fixture(scope="module")
def server():
    params = jax.tree.map(jax.numpy.asarray, tiny.params(MODEL, 0))
    engine = engine_lib.Engine(MODEL, CONFIG, TOK)
    with engines.server(engine, params, 3) as server:
        server.signer, server.run = rollout_lib.WorkerKey.generate(), RUN
        yield server


@pytest.fixture(scope="module")
def answers(server):
    """answers(sampling fields) -> {name of the route: (seed of the reply, its choices with FIELDS)}."""
    app = serve.make_app(server)

    async def ask_all(fields):
        openai = fields | {"return_token_ids": True, "logprobs": 1}
        chat = openai | {"logprobs": True}
        inner = {name: fields[name] for name in fields if name != "proofs"}
        top = {"proofs": True} if "proofs" in fields else {}
        bodies = {
            "generate": ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": inner} | top),
            "sampling_params": ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": fields}),
            "chat": ("/v1/chat/completions", chat | CHAT),
            "chat stream": ("/v1/chat/completions", chat | CHAT | {"stream": True}),
            "tokens": (
                "/v1/chat/completions/tokens",
                chat | {"tokens": PROMPT, "messages": OTHER},
            ),  # which are ignored
            "tokens stream": ("/v1/chat/completions/tokens", chat | {"tokens": PROMPT, "stream": True}),
            "completions": ("/v1/completions", openai | {"prompt": PROMPT}),
            "completions stream": ("/v1/completions", openai | {"prompt": PROMPT, "stream": True}),
        }
        async with serving.client(app) as http:
            replies = await asyncio.gather(*(http.post(path, json=body) for path, body in bodies.values()))
        assert {reply.status_code for reply in replies} == {200}, [reply.text for reply in replies]
        return {
            name: read_stream(reply.text) if "stream" in name else read(reply.json())
            for name, reply in zip(bodies, replies, strict=True)
        }

    return lambda **fields: asyncio.run(ask_all(fields))


def read(reply):
    return reply["seed"], [{name: shown(choice, name) for name in FIELDS} for choice in reply["choices"]]


def shown(choice, name):
    if name == "proofs":
        return choice.get(name, "")
    return logprobs_of(choice) if name == "logprobs" else choice.get(name)


def logprobs_of(choice):
    logprobs = choice["logprobs"] or {"content": []}
    return logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content", ())]


def read_stream(text):
    chunks = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
    assert len({chunk["seed"] for chunk in chunks}) == 1
    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined = choices.setdefault(choice["index"], {"token_ids": [], "logprobs": {"content": []}})
            assert not joined.get("finish_reason")
            joined["token_ids"] += choice.pop("token_ids", [])
            joined["logprobs"]["content"] += [{"logprob": x} for x in logprobs_of({"logprobs": choice.pop("logprobs")})]
            joined.update(choice)
    ordered = [{name: shown(choices[index], name) for name in FIELDS} for index in sorted(choices)]
    return chunks[0]["seed"], ordered


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}, {"n": 3, "top_k": 5}])
def test_all_routes_agree(answers, fields):
    found = answers(seed=2**32 - 1, max_tokens=40, proofs=True, **fields)
    seed, choices = found["generate"]
    assert seed == 2**32 - 1 and [choice["seed"] for choice in choices] == [2**32 - 1, 0, 1][: fields.get("n", 1)]
    assert all(len(choice["proofs"]) > 0 and len(choice["server_signature"]) == 128 for choice in choices)
    for name, answer in found.items():
        assert answer == found["generate"], name


def test_without_a_seed_the_drawn_one_is_returned(answers):
    drawn = answers(max_tokens=12)
    assert len({seed for seed, _ in drawn.values()}) == len(drawn)  # 8 of 2^32
    for name, (seed, [choice]) in drawn.items():
        assert not choice["proofs"] and choice["server_signature"] is None
        if name in ("generate", "chat stream"):
            assert answers(max_tokens=12, seed=seed)[name] == (seed, [choice])


def test_several_prompts_have_a_seed_each(server):
    ask = serving.asker(serve.make_app(server))
    body = {"prompt": ["hello", "bye"], "n": 2, "max_tokens": 8, "return_token_ids": True}
    choices = ask("POST", "/v1/completions", json=body).json()["choices"]
    for choice in choices:
        again = {"token_ids": choice["prompt_token_ids"], "sampling_params": {"seed": choice["seed"], "max_tokens": 8}}
        assert (
            ask("POST", "/inference/v1/generate", json=again).json()["choices"][0]["token_ids"] == choice["token_ids"]
        )


def test_a_chat_can_be_verified(answers, server):
    """The signature covers prompt, answer, and settings; the proofs are those of the learner's own hidden states."""
    _, [choice] = answers(seed=5, max_tokens=40, proofs=True)["chat stream"]
    versions = [version for version, count in choice["policy_versions"] for _ in range(count)]
    proofs = base64.b64decode(choice["proofs"])
    answer = completion_lib.Completion(
        choice["token_ids"],
        choice["logprobs"],
        versions,
        choice["prompt_policy_version"],
        choice["finish_reason"],
        proofs,
    )
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 40, "return_routed_experts": False, "run": RUN}
    message = attestation.message(PROMPT, answer, temperature=1.0, seed=5, settings=settings)
    signature = bytes.fromhex(choice["server_signature"])
    assert rollout_lib.signed(server.signer.worker, signature, message)
    other = attestation.message(PROMPT, answer, temperature=1.0, seed=6, settings=settings)
    assert not rollout_lib.signed(server.signer.worker, signature, other)
    ids = np.array([PROMPT + choice["token_ids"]], np.int32)
    hidden, _ = jax.jit(transformer.apply, static_argnums=1)(server.scheduler._params, MODEL, ids)
    own = np.asarray(hidden[0, len(PROMPT) - 1 : -1])
    assert len(proofs) == 258 * -(-len(own) // 32)
    for rows, is_own in ((own, True), (own[::-1], False)):
        assert all(result.accepted for result in proofs_lib.verify(rows, toploc.split(proofs, *rows.shape))) == is_own


def test_grpc_sends_the_seed(server):
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    port, running = grpc_service.start(server, "127.0.0.1", 0)
    request = jetstream_pb2.DecodeRequest
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            asked = request(token_content=request.TokenContent(token_ids=PROMPT), max_tokens=12)
            call = stub.Decode(asked, timeout=60)
            tokens = [token for reply in call for sample in reply.stream_content.samples for token in sample.token_ids]
            seed = int(dict(call.initial_metadata())["seed"])
    finally:
        running.stop(1).wait()
    ask = serving.asker(serve.make_app(server))
    again = {"token_ids": PROMPT, "sampling_params": {"seed": seed, "max_tokens": 12}}
    choice = ask("POST", "/inference/v1/generate", json=again).json()["choices"][0]
    assert [token for token in choice["token_ids"] if token not in TOK.stop_ids] == tokens


@pytest.mark.parametrize("where", ["top", "sampling_params"])
@pytest.mark.parametrize("pin", [{"policy_version": 0}, {"policy_version": 2}, {"policy_epoch": 0}])
def test_a_pin_of_the_first_version_is_a_pin(server, where, pin, monkeypatch):
    monkeypatch.setattr(server.scheduler, "epoch", 1)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    (body if where == "top" else body["sampling_params"]).update(pin)

    async def ask():
        async with serving.client(serve.make_app(server)) as http:
            return await http.post("/inference/v1/generate", json=body)

    reply = asyncio.run(ask())
    assert reply.status_code == 409, reply.text
    assert f"{[*pin.values()][0]} was requested, and this server has version 3 of epoch 1" in reply.text
