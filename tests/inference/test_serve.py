"""The inference server: the wire contract of RL clients, error messages, and weights that change.

In process over ASGI, and once as the real process that `rl.train` starts.
"""

import asyncio
import base64
import collections
import dataclasses
import functools
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import jax
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from configs import quickstart
from inference import serve
from inference.engine import compiled_steps, kv_cache
from inference.engine import engine as engine_lib
from inference.engine import weights as weights_lib
from inference.options import server_options
from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server, schemas, startup, web
from models import hf, transformer
from models.text import tokenizer as tokenizer_lib
from rl.experiment import experiment
from sharding.mesh import rules
from sharding.weights import broadcast
from sharding.weights.broadcast import head_writer, placement
from sharding.weights.download import source as source_lib
from sharding.weights.format import head, roots
from tests.support import proxy, serving, tiny, tiny_run

MODEL = tiny.model()
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=48, prefill_batch=2, steps_per_call=4)
METADATA = {"model": dataclasses.asdict(MODEL), "tokenizer": "byte_chatml"}
PROMPT = list(b"hello")


def publish(root, version, options=None):
    options = options or broadcast.PublishOptions()
    broadcast.publish(tiny.params(MODEL, version), version, str(root), options, metadata=METADATA)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    publish(root, 0)
    return root


@pytest.fixture(scope="module")
def server(weights):
    server = startup.prepare(str(weights), CONFIG).run()
    server.sources = [str(weights.parent)]
    yield server
    server.close()


@pytest.fixture(scope="module")
def ask(server):
    return serving.asker(serve.make_app(server))


@pytest.fixture(scope="module")
def control(server):
    return serving.asker(serve.make_control_app(server))


@pytest.fixture(scope="module")
def generate(ask):
    def generate(body=None, **sampling):
        body = {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling} | (body or {})
        return ask("POST", "/inference/v1/generate", content=json.dumps(body))  # which writes NaN, as some clients do

    return generate


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status and error["type"] and set(error) == {"message", "type", "code", "param"}
    return error["message"]


# ---- the contract ----------------------------------------------------------------------------------------------------


def test_the_reply_is_what_rl_clients_check(generate, server):
    """The checks of verifiers' client: lengths, `token_id:<id>`, finite log-probabilities, the stop token included."""
    body = {"request_id": "abc", "cache_salt": "0", "priority": 3, "proofs": True, "unheard_of": None}
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
    usage = {"prompt_tokens": 5, "completion_tokens": num_new, "total_tokens": 5 + num_new}
    assert reply["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    # The same seed, the same answer; sample i is a request of its own with seed + i.
    again = generate(body, **sampling, stop_token_ids=[258, 256]).json()
    assert again["choices"] == reply["choices"]
    assert again["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 5}}
    assert reply["seed"] == 7 and [choice["seed"] for choice in reply["choices"]] == [7, 8, 9]
    alone = generate(body, **(sampling | {"n": 1, "seed": 8}), stop_token_ids=[258, 256]).json()["choices"][0]
    assert alone == reply["choices"][1] | {"index": 0}


def test_defaults(generate, server):
    """max_tokens: the rest of the context. Stop ids: the tokenizer's. A seed is drawn, and proofs are not made."""
    first, second = (generate({"sampling_params": {}}).json()["choices"][0] for _ in range(2))
    assert first["token_ids"] != second["token_ids"] and first["proofs"] == ""
    request = server.make_request(schemas.SamplingParams(), PROMPT)
    assert request.stop_ids == server.engine.tokenizer.stop_ids and request.max_tokens == 48 - 5
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (1.0, 0, 1.0, 0.0)
    assert request.num_samples == 1 and not request.proofs
    request = server.make_request(schemas.SamplingParams(seed=-1, top_k=-1), PROMPT)
    assert request.seed == 2**32 - 1 and request.top_k == 0
    request = server.make_request(schemas.SamplingParams(ignore_eos=True, stop_token_ids=[7, 7], stop="x"), PROMPT)
    assert request.stop_ids == (7,) and request.stop_texts == ("x",)
    request = server.make_request(schemas.SamplingParams(stop_token_ids=[7]), PROMPT)
    assert request.stop_ids == (7, *server.engine.tokenizer.stop_ids)  # given in addition to the model's own


@pytest.mark.parametrize(
    ("body", "sampling", "message"),
    [
        ({"token_ids": None}, {}, "token_ids is missing; add it"),
        ({"token_ids": "hello"}, {}, "token_ids: Input should be a valid array"),
        ({"token_ids": [1, 2.0]}, {}, "token_ids.1: Input should be a valid integer; got 2.0"),
        ({"token_ids": []}, {}, "token_ids is empty"),
        ({"token_ids": [272]}, {}, "token id 272 is outside the vocabulary of 272"),
        ({"token_ids": [-1]}, {}, "token id -1 is outside"),
        ({"token_ids": [10**30]}, {}, "is outside the vocabulary"),
        ({"token_ids": [1] * 48}, {}, "maximum context length is 48 tokens, but the prompt has 48"),
        ({"sampling_params": [1]}, {}, "sampling_params: Input should be an object; got"),
        ({"proofs": "yes"}, {}, "proofs: Input should be a valid boolean"),
        ({}, {"temperature": float("nan")}, "temperature: Input should be a finite number; got nan"),
        ({}, {"temperature": 10**400}, "temperature"),
        ({}, {"temperature": "1"}, "temperature: Input should be a valid number; got '1'"),
        ({}, {"temperature": -1}, "temperature must be 0, or in"),
        ({}, {"top_p": 1.5}, "top_p must be in \\(0, 1\\]; got 1.5"),
        ({}, {"top_k": 2**40}, "top_k must be in"),
        ({}, {"top_k": 1.0}, "top_k: Input should be a valid integer; got 1.0"),
        ({}, {"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({}, {"max_tokens": True}, "max_tokens: Input should be a valid integer; got True"),
        ({}, {"n": 0}, "n must be in 1..1024; got 0"),
        ({}, {"seed": 0.5}, "seed: Input should be a valid integer"),
        ({}, {"stop_token_ids": "x"}, "stop_token_ids: Input should be a valid array"),
        ({}, {"stop_token_ids": [1.5]}, "stop_token_ids.0: Input should be a valid integer"),
        ({}, {"stop_token_ids": [2**40]}, "stop token id 1099511627776 is outside the vocabulary"),
        ({}, {"stop_token_ids": list(range(65))}, "67 stop token ids given; at most 64"),
        ({}, {"stop": ["a", ""]}, "a stop string is empty"),
        ({}, {"stop": [5]}, "stop"),
        ({}, {"logit_bias": {"x": 1}}, "logit_bias has the key 'x'"),
        ({}, {"logit_bias": {"300": 1}}, "logit_bias token id 300 is outside the vocabulary"),
        ({}, {"logit_bias": {"3": 101}}, "a logit_bias must be in -100..100; got 101"),
        ({}, {"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
        ({}, {"repetition_penalty": 1.1}, "repetition_penalty = 1.1 is not supported"),
    ],
)
def test_rejected_fields(generate, server, body, sampling, message):
    assert re.search(message, refused(generate(body, **sampling)))
    assert server.scheduler.is_alive


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "the request body: Input should be an object"),
        (b'{"token_ids": [' + b"9" * 5000 + b"]}", "is not JSON"),
        (b"", "is not JSON"),
        (b"{}", "token_ids is missing; add it"),
    ],
)
def test_a_body_that_is_no_request(ask, content, message):
    assert message in refused(ask("POST", "/inference/v1/generate", content=content))


def test_a_body_that_never_ends_is_cut_off(ask, control):
    size = serve.MAX_BODY_BYTES
    assert f"exceeds {size} bytes" in refused(ask("POST", "/inference/v1/generate", content=b" " * (size + 1)))
    assert "exceeds 65536 bytes" in refused(control("POST", "/update_weights", content=b" " * (web.MAX_JSON_BYTES + 1)))


def test_a_full_queue_is_429(generate, server, monkeypatch):
    monkeypatch.setattr(server.scheduler, "_max_queue", 0)
    assert "0 requests are pending" in refused(generate(), 429)


def test_models_and_health(ask, server):
    cards = ask("GET", "/v1/models").json()
    assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == [server.model_name]
    assert cards["data"][0]["max_model_len"] == 48 and cards["data"][0]["policy_version"] == server.scheduler.version
    assert ask("GET", f"/v1/models/{server.model_name}").json() == cards["data"][0]
    wrong = ask("GET", "/v1/models/owner/other")
    assert wrong.json()["error"]["type"] == "NotFoundError"
    assert refused(wrong, 404) == "The model `owner/other` does not exist. Please choose one of 'policy'."
    response = ask("GET", "/health")
    health = response.json()
    assert response.status_code == 200 and health["status"] == "ok"
    assert health["running"] == health["pending"] == 0 and health["stats"]["tokens"] > 0


def test_a_client_that_hangs_up_frees_its_slots(server):
    body = json.dumps({"token_ids": PROMPT, "sampling_params": {"n": 1000, "ignore_eos": True}}).encode()
    sent = asyncio.run(serving.disconnect(serve.make_app(server), "/inference/v1/generate", body, after=0))
    assert sent[0]["status"] == 499
    proxy.wait_until(lambda: len(server.scheduler.slots.running) == server.scheduler.num_pending == 0, serving.WAIT_S)
    assert server.scheduler.stats["samples"] < 500  # of a thousand


def test_a_scheduler_that_stopped_is_503(weights, server):
    scheduler = scheduler_lib.Scheduler(server.engine, broadcast.pull(str(weights), 0).params, 0)
    scheduler.close()
    stopped = inference_server.InferenceServer(str(weights), scheduler, server.engine, server.store)
    stopped.have = broadcast.pull(str(weights), 0)
    ask, control = serving.asker(serve.make_app(stopped)), serving.asker(serve.make_control_app(stopped))
    generate = ask("POST", "/inference/v1/generate", json={"token_ids": PROMPT})
    update, health = control("POST", "/update_weights", json={"version": 0}), ask("GET", "/health")
    assert "shutting down" in refused(generate, 503)
    assert update.json()["version"] == 0  # it is in force: nothing to do
    assert health.status_code == 503 and "stopped" in health.json()["status"]


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_update_weights(control, generate, weights, tmp_path):
    """A newer version swaps in; a corrupt, absent or malformed one leaves the old one serving, and the reply has the reason."""
    fixed = {"seed": 3, "max_tokens": 8, "ignore_eos": True}

    def answer():
        return generate(**fixed).json()["choices"][0]

    def update(**body):
        return control("POST", "/update_weights", json=body)

    assert update(version=None).json() == {"status": "ok", "version": 0}  # nothing newer
    before = answer()
    publish(weights, 1)
    assert answer() == before  # published is not yet served
    assert update(version=1).json() == {"status": "ok", "version": 1}
    after = answer()
    assert after["token_ids"] != before["token_ids"] and after["policy_versions"] == [[1, 8]]
    assert "version 0 is older than version 1, which is in use" in refused(update(version=0))
    assert update(version=0, rollback=True).json()["version"] == 0 and answer() == before
    assert update().json()["version"] == 1

    publish(weights, 2)
    objects = [path for path in (weights / "v00000002").rglob("*") if path.is_file() and path.name != "manifest.json"]
    largest = max(objects, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    message = refused(update(version=2), 500)
    assert "v00000002" in message and message.endswith("the weights in use keep serving")
    assert "no version 9" in refused(update(version=9), 500)
    for body, text in (
        ({"version": -1}, "got -1"),
        ({"version": "1"}, "got '1'"),
        ({"version": True}, "got True"),
        ({"version": 0, "weight_dir": 5}, "weight_dir: Input should be a valid string; got 5"),
    ):
        assert text in refused(update(**body))
    assert answer() == after and control("GET", "/health").json()["policy_version"] == 1

    publish(tmp_path, 7)  # another root, by name
    assert update(weight_dir=str(tmp_path)).json()["version"] == 7
    assert answer()["policy_versions"] == [[7, 8]]
    assert update().json()["version"] == 7  # the server's own broadcast has older ones only
    assert "is older than version 7" in refused(update(version=1))
    assert update(version=1, rollback=True).json()["version"] == 1 and answer() == after
    folder = tmp_path / "model"
    hf.save(folder, MODEL, jax.jit(transformer.init, static_argnums=1)(jax.random.key(9), MODEL))
    assert "version 1 has other weights than version 1" in refused(update(weight_dir=str(folder), version=1))
    assert update(weight_dir=str(folder)).json()["version"] == 2 and answer() != after
    assert update(version=1, rollback=True).json()["version"] == 1 and answer() == after


def test_a_server_that_expects_its_model_compiles_before_the_weights_exist(tmp_path, monkeypatch):
    """It serves the model of the published metadata, also where it expected another one."""
    sizes, counts = (
        dataclasses.replace(CONFIG, num_slots=1, max_model_len=32, prefill_batch=3),
        [compiled_steps.generate._cache_size()],
    )
    prefilled = [compiled_steps.prefill._cache_size()]

    def appear(source, version, *, timeout_s, key=None):
        if not timeout_s and len(counts) == 1:
            raise TimeoutError
        if timeout_s:
            counts.append(compiled_steps.generate._cache_size())
            prefilled.append(compiled_steps.prefill._cache_size())
        if len(counts) == 2:
            publish(tmp_path, version)
        return version

    monkeypatch.setattr(broadcast, "wait_for", appear)
    for model in (METADATA["model"], METADATA["model"] | {"num_layers": 1}):
        server = startup.prepare(str(tmp_path), sizes, expected=METADATA | {"model": model}).run()
        server.close()
        assert server.engine.model == MODEL and server.scheduler.version == 0
        counts.append(compiled_steps.generate._cache_size())
    first, *later = counts
    assert [count - first for count in later] == [1, 1, 2, 2]
    assert prefilled[1] - prefilled[0] == len(sizes.buckets)  # every length, until a version exists
    with pytest.raises(ValueError, match="no model and tokenizer; give"):
        startup.prepare(str(tmp_path), sizes, expected={"model": METADATA["model"]})


def test_a_resumed_run_continues_on_a_server_that_has_its_later_versions(tmp_path, monkeypatch):
    """A version of a newer epoch is newer than a higher number; the old version of its number is not taken for it."""
    key = ed25519.Ed25519PrivateKey.generate()
    options = broadcast.PublishOptions(key=key)

    def run(first, versions):
        with broadcast.Publisher(str(tmp_path / "run"), options) as publisher:
            publisher.forget(first)
            return [publisher.publish(tiny.params(MODEL, seed), v, metadata=METADATA) for v, seed in versions.items()]

    written = run(0, {0: 0, 1: 1, 2: 2, 3: 3})
    server = startup.prepare(str(tmp_path / "run"), CONFIG, key=key.public_key().public_bytes_raw().hex()).run()
    try:
        assert server.update(None) == server.scheduler.version == 3
        assert server.scheduler.epoch == server.have.epoch == written[0].epoch > 0
        shutil.copytree(tmp_path / "run", tmp_path / "late")  # as a slow relay still has it
        (again,) = run(2, {2: 9})
        assert again.epoch > written[0].epoch and server.update(None) == 2  # as --watch asks
        assert server.have.digest == again.digest != written[2].digest
        server.weights = source_lib.open(str(tmp_path / "late"), trusted_key=server.key)
        monkeypatch.setattr(weights_lib, "RELAY_LAG_S", 0.1)
        with pytest.raises(TimeoutError, match="older than epoch"):
            server.update(3, epoch=written[0].epoch)
        assert server.scheduler.version == 2
    finally:
        server.close()
    # The next process: its floor is a file.
    floor = tmp_path / "floor.jsonl"
    head.HeadVerifier(server.key, floor).accept((tmp_path / "run" / "head.jsonl").read_bytes())
    monkeypatch.setattr(startup, "START_S", 0.1)
    monkeypatch.setattr(startup, "NOTICE_S", 0.1)
    with pytest.raises(TimeoutError, match="older than epoch"):
        startup.prepare(str(tmp_path / "late"), CONFIG, key=head.HeadVerifier(server.key, floor)).run()


def test_a_server_goes_on_with_the_honest_epoch_once_the_root_file_revokes_a_stolen_key(tmp_path, monkeypatch):
    stolen, honest, offline = (ed25519.Ed25519PrivateKey.generate() for _ in range(3))
    file, reader, public = (
        tmp_path / "root.json",
        tmp_path / "reader.json",
        lambda key: key.public_key().public_bytes_raw().hex(),
    )
    first = roots.amend(b"", [offline], root=[public(offline)], online=[public(stolen)], expires_s=time.time() + 1e6)

    def publish_as(key, folder, versions):
        options = broadcast.PublishOptions(key=key, root_file=str(file))
        with broadcast.Publisher(str(tmp_path / folder), options) as publisher:
            publisher.forget(versions[0])
            return [publisher.publish(tiny.params(MODEL, v + len(folder)), v, metadata=METADATA) for v in versions]

    for path in (file, reader):
        path.write_bytes(first)
    publish_as(stolen, "run", [0, 1])
    shutil.copytree(tmp_path / "run", tmp_path / "thief")
    server = startup.prepare(str(tmp_path / "run"), CONFIG, key=head.HeadVerifier(reader)).run()
    try:
        update = functools.partial(serving.asker(serve.make_control_app(server)), "POST", "/update_weights")
        with monkeypatch.context() as patch:  # an epoch of the year 5138
            patch.setattr(head_writer.time, "time_ns", lambda: 10**20)
            (forged,) = publish_as(stolen, "thief", [2])
        server.weights = source_lib.open(str(tmp_path / "thief"), trusted_key=server.key)
        assert update(json={}).json()["version"] == 2 and server.have.epoch == forged.epoch
        file.write_bytes(roots.amend(first, [offline], online=[public(honest)], expires_s=time.time() + 1e6))
        (written,) = publish_as(honest, "run", [2])
        server.weights = source_lib.open(str(tmp_path / "run"), trusted_key=server.key)
        assert written.epoch < forged.epoch
        assert update(json={}).json()["version"] == 2 and server.have.digest == written.digest != forged.digest
        assert "is older than version 2" in refused(update(json={"version": 1}))  # of the new key's own order
        assert update(json={}).json()["version"] == 2
    finally:
        server.close()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line_and_exit_code_1(weights, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--weights", str(weights), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert "choose another port" in error
    assert serve.main(["--weights", str(weights), "--port", "0", "--num_slots", "0"]) == 1
    assert capsys.readouterr().err == "error: inference.num_slots = 0 must be at least 1; set it higher\n"


def test_an_update_that_cannot_be_leaves_the_old_weights(control, generate, server, tmp_path):
    """Nothing published, another model's tensors, a folder of one version."""
    in_force, fixed = server.scheduler.version, {"seed": 3, "max_tokens": 4, "ignore_eos": True}
    before = generate(**fixed).json()["choices"]

    def update(**body):
        return control("POST", "/update_weights", json=body)

    assert "no published version under" in refused(update(weight_dir=str(tmp_path / "nowhere")), 500)
    assert "no published version under" in refused(update(weight_dir=str(tmp_path)), 500)
    other = dataclasses.replace(MODEL, ffn_dim=72)
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), transformer.specs(other), is_leaf=rules.is_spec)
    broadcast.publish(params, 5, str(tmp_path), metadata=METADATA)
    message = refused(update(weight_dir=str(tmp_path)))
    assert "['layers']['000']['mlp']['down'] as float32[72, 32]" in message and "needs float32[64, 32]" in message
    del params["final_norm"]
    broadcast.publish(params, 6, str(tmp_path), metadata=METADATA)
    assert update(weight_dir=str(tmp_path)).status_code in (400, 500)
    params = tiny.params(MODEL, 7)
    params["final_norm"] = np.full_like(params["final_norm"], np.nan)
    broadcast.publish(params, 7, str(tmp_path / "diverged"), metadata=METADATA)
    assert "have NaN or infinity in ['final_norm']" in refused(update(weight_dir=str(tmp_path / "diverged")))
    assert server.scheduler.version == in_force and generate(**fixed).json()["choices"] == before
    publish(tmp_path / "good", 1000)
    own = str(tmp_path / "good" / "v00001000")  # one version's own folder, as prime-rl names it
    assert update(weight_dir=own).json() == {"status": "ok", "version": 1000}


def swaps_under_load(server, root, *, num_requests, num_swaps):
    """Requests in flight while versions change; each token's log-probability is that of the version stamped on it."""
    prompts = [[int(t) for t in np.random.default_rng(i).integers(0, 256, 4 + i % 9)] for i in range(num_requests)]
    start = server.scheduler.version
    first = start + 1000
    replaced = jax.tree.map(np.array, server.scheduler._params)  # a swap deletes them
    for version in range(first, first + num_swaps):
        publish(root, version, broadcast.PublishOptions(keep=num_swaps))

    async def main():
        data, control = serving.client(serve.make_app(server)), serving.client(serve.make_control_app(server))
        async with data as client, control:
            swapped = asyncio.Event()

            async def ask(i):
                """Repeats requests until all versions have been in use: the time of a swap is unknown."""
                choices = []
                for turn in itertools.count():
                    sampling = {"n": 2, "seed": i + turn * num_requests, "ignore_eos": True}
                    body = {"token_ids": prompts[i], "sampling_params": sampling}
                    response = await client.post("/inference/v1/generate", json=body)
                    assert response.status_code == 200, response.text
                    choices += response.json()["choices"]
                    if swapped.is_set():
                        return choices

            tasks = [asyncio.create_task(ask(i)) for i in range(num_requests)]
            for version in range(first, first + num_swaps):
                generated = server.scheduler.stats["tokens"]
                while server.scheduler.stats["tokens"] < generated + 40:
                    for task in filter(asyncio.Task.done, tasks):
                        task.result()  # raises its error: no task is done before the last swap
                    await asyncio.sleep(0.001)
                body = {"version": version, "weight_dir": str(root)}
                response = await control.post("/update_weights", json=body)
                assert response.json().get("version") == version, response.text
            swapped.set()
            return [await task for task in tasks]

    results = asyncio.run(main())
    used, mixed = collections.Counter(), 0
    trees = {v: broadcast.pull(str(root), v).params for v in range(first, first + num_swaps)}
    replay = _Replay(trees | {start: replaced})
    for prompt, choices in zip(prompts, results, strict=True):
        # Those that saw the most versions: to score all, token by token, takes longer than to roll them out.
        for choice in sorted(choices, key=lambda choice: -len(choice["policy_versions"]))[:2]:
            versions = [v for v, count in choice["policy_versions"] for _ in range(count)]
            assert versions == sorted(versions) and len(versions) == len(choice["token_ids"])
            used.update(versions)
            mixed += len(set(versions)) > 1
            expected = replay(prompt, choice["token_ids"], choice["prompt_policy_version"], versions)
            got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            # float32 programs of other shapes, log-probabilities of order 10, keys of up to every version
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert mixed > num_requests // 4 and len(used) > num_swaps // 2, (mixed, used)


class _Replay:
    """Each token by the weights stamped on it, over the keys as they were written: one token at a time, no engine."""

    def __init__(self, trees):
        self._trees, self._step = trees, jax.jit(self._run)

    def __call__(self, prompt, tokens, prompt_version, versions):
        cache = kv_cache.create(MODEL, 1, CONFIG.max_model_len)
        sequence, logps = [*prompt, *tokens], []
        # The last prompt token is run again by the first decode step, hence by the first token's version.
        writers = [prompt_version] * (len(prompt) - 1) + list(versions)
        for at, writer in enumerate(writers):
            logits_V, cache = self._step(self._trees[writer], np.array([[sequence[at]]], np.int32), np.int32(at), cache)
            if at >= len(prompt) - 1:
                logp_V = np.asarray(logits_V, np.float64)
                logps.append(logp_V[sequence[at + 1]] - np.log(np.exp(logp_V - logp_V.max()).sum()) - logp_V.max())
        return logps

    def _run(self, params, token_11, at, cache):
        attend = kv_cache.attend_at(at[None])
        hidden, cache, _ = transformer.extend(params, MODEL, token_11, at[None, None], cache, attend)
        return transformer.logits(params, MODEL, hidden)[0, 0], cache


def test_log_probabilities_are_of_the_version_stamped_on_them(server, tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "FILE_BYTES", 0)  # so the new weights wait in a file, as those of a large model
    swaps_under_load(server, tmp_path, num_requests=8, num_swaps=3)


@pytest.mark.slow
def test_twenty_swaps_under_sixty_four_requests(server, tmp_path):
    swaps_under_load(server, tmp_path, num_requests=64, num_swaps=20)


@pytest.mark.slow
def test_swaps_on_a_mesh(tmp_path):
    """Weights of a broadcast, pulled straight into their places on eight devices, while requests run there."""
    publish(tmp_path / "own", 0)
    mesh = {"tensor": 2, "data": -1}
    meshed = startup.prepare(str(tmp_path / "own"), CONFIG, mesh=mesh).run()
    meshed.sources = [str(tmp_path)]
    try:
        down = meshed.have.params["layers"]["000"]["mlp"]["down"]
        assert down.sharding.shard_shape(down.shape) == (MODEL.ffn_dim // 2, MODEL.model_dim)
        assert len(down.sharding.device_set) == 8
        swaps_under_load(meshed, tmp_path / "later", num_requests=12, num_swaps=4)
    finally:
        meshed.close()


def test_sigterm_lets_requests_end(weights, tmp_path):
    """A request in flight is answered, new ones are not taken, and the exit code is 0."""
    publish(tmp_path / "weights", 0)
    sizes = ["--num_slots", 2, "--max_model_len", 600, "--prefill_batch", 1, "--steps_per_call", 4]
    command = ["inference.serve", "--weights", tmp_path / "weights", "--port", 0, "--api_key", "k", *sizes]
    with serving.child(tmp_path, *command) as (process, url):

        async def exchange():
            key = {"authorization": "Bearer k"}
            async with httpx.AsyncClient(base_url=url, headers=key, timeout=serving.WAIT_S) as client:
                body = {"token_ids": PROMPT, "sampling_params": {"n": 3, "ignore_eos": True}}
                running = asyncio.create_task(client.post("/inference/v1/generate", json=body))
                while not (await client.get("/health")).json()["running"]:
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                return await running

        response = asyncio.run(exchange())
        assert response.status_code == 200
        assert [len(choice["token_ids"]) for choice in response.json()["choices"]] == [595] * 3
        assert process.wait(timeout=60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_hugging_face_folder_is_served_and_updated(tmp_path, monkeypatch):
    """--model: the same tokens as the parameters it was written from; an update from another folder is the next version."""
    folders = [tmp_path / name for name in ("first", "second")]
    trees = [jax.jit(transformer.init, static_argnums=1)(jax.random.key(seed), MODEL) for seed in range(2)]
    for folder, params in zip(folders, trees, strict=True):
        hf.save(folder, MODEL, params)
        tokenizer_lib.byte_chatml().save(folder)
    server = startup.prepare_model(str(folders[0]), CONFIG, dtype="float32").run()
    server.sources = list(map(str, folders))
    trees = [server.store.load(tree) for tree in trees]
    plain = scheduler_lib.Scheduler(server.engine, trees[0], 0)
    request = server.make_request(schemas.SamplingParams(max_tokens=8, seed=1, ignore_eos=True), PROMPT)
    try:
        assert server.scheduler.submit(request).result(serving.WAIT_S) == plain.submit(request).result(serving.WAIT_S)
        monkeypatch.setattr(weights_lib, "_is_finite", lambda leaf: pytest.fail("a second copy is on the device"))
        assert server.update(None, str(folders[1])) == 1
        plain.update(trees[1], 1).result(serving.WAIT_S)
        assert server.scheduler.submit(request).result(serving.WAIT_S) == plain.submit(request).result(serving.WAIT_S)
        with pytest.raises(ValueError, match="send a weight_dir"):
            server.update(None)
    finally:
        server.close()
        plain.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max_queue", "0"], "--max_queue = 0 is too small; choose 1 or more"),
        (["--max_model_len", "1"], "--max_model_len = 1 is too small; choose 2 or more"),
        (["--watch", "nan"], "--watch = nan is too small; choose 0 or more"),
        (["--profile", "x"], "--profile and --profile_steps belong together; give both, or neither"),
        (["--dtype", "float16"], "--dtype float16 is unknown; choose auto, float32 or bfloat16"),
        (["--grpc_port", "99999"], "--grpc_port = 99999 is not a port; choose 0 to 65535"),
        (["--weights_key", "ab"], "--weights_key applies to a broadcast"),
        (["--weights_floor", "f"], "--weights_floor f keeps signed heads; add --weights_key"),
        (["--api_key", "k", "--api_key_file", "f"], "both a secret and the file f with one are given"),
        (["--api_key_file", "/nowhere/f"], "cannot read the secret in /nowhere/f: No such file or directory"),
        (["--control", "/nowhere/control.sock"], "cannot listen on unix socket /nowhere/control.sock: No such file"),
    ],
)
def test_a_mistake_is_reported_before_weights_are_loaded(arguments, words, capsys):
    assert serve.main(["--model", "nowhere", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_a_server_takes_the_sizes_that_its_run_published_unless_they_are_given():
    """The printed command let it take its own: completions that ended at a smaller max_model_len barred honest workers."""
    published = experiment.resolve(quickstart.get_config()).broadcast_metadata["engine"]
    command = ["--weights", "http://relay", "--weights_key", "00"]
    assert dataclasses.asdict(serve._engine_config(server_options.parse(command, ""), published)) == published
    changed = serve._engine_config(
        server_options.parse([*command, "--num_slots", "3", "--routed_experts"], ""), published
    )
    assert (changed.num_slots, changed.routed_experts) == (3, True)
    assert changed.max_model_len == published["max_model_len"] == 64 != server_options.SIZES["max_model_len"]
    odd = {"num_slots": "9", "max_model_len": True, "unknown": 5, "routed_experts": True}
    found = serve._engine_config(server_options.parse([*command, "--no-routed_experts"], ""), odd)
    assert dataclasses.asdict(found) == server_options.SIZES


@pytest.mark.slow
def test_a_server_that_waits_for_weights_ends_with_its_parent(tmp_path):
    """A run starts it before its warm-up, which may take hours."""
    command = [sys.executable, "-m", "inference.serve", "--weights", str(tmp_path), "--port", "0", "--exit_with_parent"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tiny_run.ROOT, text=True, **pipes) as process:
        assert "waiting for weights" in process.stderr.readline()
        process.stdin.close()
        assert process.wait(60) == 130 and "Traceback" not in process.stderr.read()
