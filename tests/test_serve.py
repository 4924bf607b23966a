"""The rollout server: the wire contract of RL clients, refusals in the server's own words, and weights that change.

In process over ASGI, and once as the real process that `rl.train` starts.
"""

import asyncio
import base64
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import httpx
import jax
import numpy as np
import pytest

from inference import client as client_lib
from inference import engine as engine_lib
from inference import scheduler as scheduler_lib
from inference import serve
from models import transformer
from sharding import broadcast, rules
from tests import tiny

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = tiny.model()
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=48, prefill_batch=2, steps_per_call=4)
METADATA = {"model": dataclasses.asdict(MODEL), "tokenizer": "byte_chatml"}
PROMPT = list(b"hello")
START_S = 120  # to import, compile and answer, beside other work


def publish(root, version):
    rng = np.random.default_rng(version)

    def draw(spec):
        return (1 + rng.standard_normal(spec.shape) * MODEL.model_dim**-0.5).astype(np.float32) - (len(spec.shape) > 1)

    params = jax.tree.map(draw, transformer.specs(MODEL), is_leaf=rules.is_spec)
    broadcast.publish(params, version, str(root), metadata=METADATA)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    publish(root, 0)
    return root


@pytest.fixture(scope="module")
def server(weights):
    server = serve.start(str(weights), CONFIG)
    yield server
    server.scheduler.close()


@pytest.fixture(scope="module")
def ask(server):
    """ask(method, path, **kwargs of httpx) -> response, within a process."""
    transport = httpx.ASGITransport(app=serve.make_app(server))

    def ask(method, path, **kwargs):
        async def exchange():
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(exchange())

    return ask


@pytest.fixture(scope="module")
def generate(ask):
    def generate(body=None, **sampling):
        body = {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling} | (body or {})
        return ask(
            "POST", "/inference/v1/generate", content=json.dumps(body)
        )  # json.dumps writes NaN, as some clients do

    return generate


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status and error["type"] and set(error) == {"message", "type", "code", "param"}
    return error["message"]


# ---- the contract ----------------------------------------------------------------------------------------------------


def test_the_reply_is_what_rl_clients_check(generate, server):
    """The checks of verifiers' client: lengths, `token_id:<id>`, finite log-probabilities, the stop token included."""
    body = {"request_id": "abc", "cache_salt": "0", "priority": 3, "proofs": True, "unheard_of": {"x": [1]}}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 12, "seed": 7, "n": 3}
    extra = {"logprobs": 1, "skip_special_tokens": False, "routed_experts_prompt_start": 0, "stop": [], "what": None}
    response = generate(body, **sampling, stop_token_ids=[258, 256], **extra)
    assert response.status_code == 200
    reply = response.json()
    assert reply["request_id"] == "abc" and [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    num_new = 0
    for choice in reply["choices"]:
        tokens, content = choice["token_ids"], choice["logprobs"]["content"]
        assert 1 <= len(tokens) == len(content) <= 12 and all(type(token) is int for token in tokens)
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
        assert all(np.isfinite(entry["logprob"]) and entry["logprob"] != -9999.0 for entry in content)
        stopped = tokens[-1] in (258, 256)
        assert choice["finish_reason"] == ("stop" if stopped else "length") and (stopped or len(tokens) == 12)
        assert choice["policy_versions"] == [[server.scheduler.version, len(tokens)]]
        assert choice["prompt_policy_version"] == server.scheduler.version
        assert len(base64.b64decode(choice["proofs"], validate=True)) == 258
        num_new += len(tokens)
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": num_new, "total_tokens": 5 + num_new}
    # The same seed, the same answer; sample i is a request of its own with seed + i.
    assert generate(body, **sampling, stop_token_ids=[258, 256]).json() == reply
    alone = generate(body, **(sampling | {"n": 1, "seed": 8}), stop_token_ids=[258, 256]).json()["choices"][0]
    assert alone == reply["choices"][1] | {"index": 0}


def test_defaults(generate, server):
    """max_tokens: what is left of the context. Stop ids: the tokenizer's. A seed is drawn, and proofs are not made."""
    first, second = (generate({"sampling_params": {}}).json()["choices"][0] for _ in range(2))
    assert first["token_ids"] != second["token_ids"] and first["proofs"] == ""
    request = serve.parse_request({"token_ids": PROMPT}, server.engine)
    assert request.stop_ids == server.engine.tokenizer.stop_ids and request.max_tokens == 48 - 5
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (1.0, 0, 1.0, 0.0)
    assert request.num_samples == 1 and not request.proofs
    request = serve.parse_request({"token_ids": PROMPT, "sampling_params": {"seed": -1, "top_k": -1}}, server.engine)
    assert request.seed == 2**32 - 1 and request.top_k == 0


@pytest.mark.parametrize(
    ("body", "sampling", "message"),
    [
        ({"token_ids": None}, {}, "token_ids must be a list of integers"),
        ({"token_ids": "hello"}, {}, "token_ids must be a list"),
        ({"token_ids": [1, 2.0]}, {}, "token_ids must be a list"),
        ({"token_ids": [True]}, {}, "token_ids must be a list"),
        ({"token_ids": []}, {}, "token_ids is empty"),
        ({"token_ids": [272]}, {}, "token id 272 is outside the vocabulary of 272"),
        ({"token_ids": [-1]}, {}, "token id -1 is outside"),
        ({"token_ids": [10**30]}, {}, "is outside the vocabulary"),
        ({"token_ids": [1] * 48}, {}, "maximum context length is 48 tokens, but the prompt has 48"),
        ({"sampling_params": [1]}, {}, "sampling_params must be an object; got list"),
        ({}, {"temperature": float("nan")}, "temperature must be a finite number; got nan"),
        ({}, {"temperature": float("inf")}, "got inf"),
        ({}, {"temperature": 10**400}, "temperature must be a finite number"),
        ({}, {"temperature": "1"}, "temperature must be a finite number; got '1'"),
        ({}, {"temperature": -1}, "temperature must be 0, or in"),
        ({}, {"top_p": 1.5}, "top_p must be in \\(0, 1\\]; got 1.5"),
        ({}, {"top_k": 2**40}, "top_k must be in"),
        ({}, {"top_k": 1.0}, "top_k must be a finite integer; got 1.0"),
        ({}, {"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({}, {"max_tokens": True}, "max_tokens must be a finite integer; got True"),
        ({}, {"n": 0}, "n must be in 1..1024; got 0"),
        ({}, {"n": 10**9}, "n must be in 1..1024"),
        ({}, {"seed": 0.5}, "seed must be a finite integer"),
        ({}, {"stop_token_ids": "x"}, "stop_token_ids must be a list of integers"),
        ({}, {"stop_token_ids": [1.5]}, "stop_token_ids must be a list"),
        ({}, {"stop_token_ids": [2**40]}, "stop token id 1099511627776 is outside the vocabulary"),
        ({}, {"stop_token_ids": list(range(9))}, "9 stop token ids given; at most 8"),
    ],
)
def test_what_is_refused(generate, server, body, sampling, message):
    assert re.search(message, refused(generate(body, **sampling)))
    assert server.scheduler.is_alive


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "must be a JSON object; got list"),
        (b'{"token_ids": [' + b"9" * 5000 + b"]}", "digits"),
        (b"", "token_ids must be a list"),
    ],
)
def test_a_body_that_is_no_request(ask, content, message):
    assert message in refused(ask("POST", "/inference/v1/generate", content=content))


def test_a_body_that_never_ends_is_cut_off(ask, monkeypatch):
    monkeypatch.setattr(serve.web.read_body, "__defaults__", (1000,))
    assert "exceeds 1000 bytes" in refused(ask("POST", "/inference/v1/generate", content=b" " * 1001))


def test_a_full_queue_is_429(generate, server, monkeypatch):
    monkeypatch.setattr(server.scheduler, "_max_queue", 0)
    assert "0 requests are pending" in refused(generate(), 429)


def test_models_and_health(ask, server):
    cards = ask("GET", "/v1/models").json()
    assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == [serve.MODEL_NAME]
    assert cards["data"][0]["max_model_len"] == 48 and cards["data"][0]["policy_version"] == server.scheduler.version
    response = ask("GET", "/health")
    health = response.json()
    assert response.status_code == 200 and health["status"] == "ok"
    assert health["running"] == health["pending"] == 0 and health["stats"]["tokens"] > 0


def test_a_client_that_hangs_up_frees_its_slots(server):
    """Straight to the ASGI app: the body, then `http.disconnect`."""
    body = json.dumps({"token_ids": PROMPT, "sampling_params": {"n": 1000, "stop_token_ids": [271]}}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/inference/v1/generate", "headers": [], "query_string": b""}
    asyncio.run(serve.make_app(server)(scope, receive, send))
    assert sent[0]["status"] == 499
    deadline = time.monotonic() + START_S
    while (server.scheduler.num_running or server.scheduler.num_pending) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.scheduler.num_running == server.scheduler.num_pending == 0
    assert server.scheduler.stats["samples"] < 500  # of a thousand


def test_a_scheduler_that_stopped_is_503(weights, server):
    scheduler = scheduler_lib.Scheduler(server.engine, server.engine.load_params(), 0)
    scheduler.close()
    app = serve.make_app(serve.Server(str(weights), scheduler, server.engine, server.shardings))

    async def exchange():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
            generate = await client.post("/inference/v1/generate", json={"token_ids": PROMPT})
            update = await client.post("/update_weights", json={"version": 0, "weight_dir": str(weights)})
            return generate, update, await client.get("/health")

    generate, update, health = asyncio.run(exchange())
    assert "shutting down" in refused(generate, 503)
    assert update.json()["version"] == 0  # it is in force: nothing to do
    assert health.status_code == 503 and "stopped" in health.json()["status"]


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_update_weights(ask, generate, weights, server, tmp_path):
    """A newer version swaps in; one that is corrupt, absent or nonsense leaves the old one serving, and says why."""
    fixed = {"seed": 3, "max_tokens": 8, "stop_token_ids": [271]}

    def answer():
        return generate(**fixed).json()["choices"][0]

    def update(**body):
        return ask("POST", "/update_weights", json=body)

    assert update(version=None).json() == {"status": "ok", "version": 0}  # nothing newer
    before = answer()
    publish(weights, 1)
    assert answer() == before  # published is not yet served
    assert update(version=1).json() == {"status": "ok", "version": 1}
    after = answer()
    assert after["token_ids"] != before["token_ids"] and after["policy_versions"] == [[1, 8]]
    assert update(version=0).json()["version"] == 0 and answer() == before  # back, by name
    assert update().json()["version"] == 1

    publish(weights, 2)
    objects = [path for path in (weights / "v00000002").rglob("*") if path.is_file() and path.name != "manifest.json"]
    largest = max(objects, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    message = refused(update(version=2), 500)
    assert "v00000002" in message and message.endswith("the weights in force go on serving")
    assert "no version 9" in refused(update(version=9), 500)
    for body, text in (
        ({"version": -1}, "got -1"),
        ({"version": "1"}, "got '1'"),
        ({"version": True}, "got True"),
        ({"version": 0, "weight_dir": 5}, "weight_dir must be a path or null; got 5"),
    ):
        assert text in refused(update(**body))
    assert answer() == after and ask("GET", "/health").json()["policy_version"] == 1

    publish(tmp_path, 7)  # another root, by name
    assert update(weight_dir=str(tmp_path)).json()["version"] == 7
    assert answer()["policy_versions"] == [[7, 8]]


def test_an_update_under_requests(weights, server):
    """Requests that run while weights change are all answered, with versions that rise."""
    old = server.scheduler.version
    publish(weights, 100)

    async def both():
        transport = httpx.ASGITransport(app=serve.make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=START_S) as client:
            body = {"token_ids": PROMPT, "sampling_params": {"n": 40, "stop_token_ids": [271]}}
            requests = [asyncio.create_task(client.post("/inference/v1/generate", json=body)) for _ in range(2)]
            while not server.scheduler.num_running:
                await asyncio.sleep(0.001)
            update = await client.post("/update_weights", json={"version": 100})
            return update, [await request for request in requests]

    update, responses = asyncio.run(both())
    assert update.json()["version"] == 100
    choices = [choice for response in responses for choice in response.json()["choices"]]
    assert len(choices) == 80
    for choice in choices:
        versions = [version for version, _ in choice["policy_versions"]]
        assert versions == sorted(set(versions)) and set(versions) <= {old, 100}
        assert sum(count for _, count in choice["policy_versions"]) == len(choice["token_ids"])


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line_and_exit_code_1(weights, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--weights", str(weights), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert "choose another port" in error
    assert serve.main(["--weights", str(weights), "--port", "0", "--num_slots", "0"]) == 1
    assert capsys.readouterr().err == "error: inference.num_slots = 0 must be at least 1\n"


def test_the_process_answers_and_ends_with_its_parent(weights, tmp_path):
    address_file = tmp_path / "address"
    command = [sys.executable, "-m", "inference.serve", "--weights", str(weights), "--port", "0", "--exit_with_parent"]
    command += ["--address_file", str(address_file), "--num_slots", "2", "--max_model_len", "32"]
    command += ["--prefill_batch", "1", "--steps_per_call", "4"]
    newest = broadcast.latest(str(weights))
    if newest == 2:  # the corrupt one, had no test published after it
        publish(weights, 3)
        newest = 3
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            deadline = time.monotonic() + START_S
            while not address_file.exists():
                assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
                time.sleep(0.05)

            async def exchange():
                async with client_lib.Client([address_file.read_text()]) as client:
                    sampling = {"n": 2, "max_tokens": 5, "seed": 1, "stop_token_ids": [271]}
                    samples = await client.generate(PROMPT, sampling, proofs=True)
                    return samples, await client.health()

            samples, (health,) = asyncio.run(exchange())
            assert len(samples) == 2 and health["policy_version"] == newest
            for sample in samples:
                assert len(sample.tokens) == 5 or sample.tokens[-1] == 271
                assert set(sample.versions) == {newest} and len(sample.proofs) in (258, 2 + 2 * 32 * len(sample.tokens))
            process.stdin.close()
            assert process.wait(timeout=30) == 0
            assert f"serving policy version {newest} on http://127.0.0.1:" in process.stdout.read().decode()
        finally:
            process.kill()
