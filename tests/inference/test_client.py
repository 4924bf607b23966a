"""The client of several servers: the choice of a server, retries, and malformed replies."""

import asyncio
import base64
import collections
import json
import re
import tempfile

import fastapi
import httpx
import pytest

from inference import client as client_lib
from inference.rollouts import attestation
from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from inference.server import web
from inference.swarm import reply as reply_lib
from inference.swarm import server_choice
from sharding.system import sockets
from tests.support import clock, serving

A, B = "http://a:1", "http://b:2"


def scores(*values):
    return {"content": [{"logprob": value} for value in values]}


def choice(**changes):
    tokens = [5, 6, 258]
    good = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": -0.5} for token in tokens]},
        "policy_versions": [[3, 1], [4, 2]],
        "prompt_policy_version": 2,
        "proofs": base64.b64encode(b"proof").decode(),
    }
    return {key: value for key, value in (good | changes).items() if value is not ...}


FOUR = {"token_ids": [5] * 4, "policy_versions": [[3, 4]], "logprobs": scores(-1, -1, -1, -1)}


def run(handler, use, urls=(A, B), give_up_s=60.0, keys=None, of=""):
    """`use(client)`, of run `of`, in virtual time, against servers that `handler(request)` speaks for; returns (result or exception, client)."""

    async def main():
        async with client_lib.Client(urls, give_up_s=give_up_s, keys=keys, run=of) as client:
            await client._http.aclose()
            transport = httpx.MockTransport(handler)  # asked for health after 5 s only
            client._http = httpx.AsyncClient(transport=transport, timeout=client._http.timeout)
            try:
                return await use(client), client
            except (ValueError, RuntimeError) as error:
                return error, client
            finally:
                client.passed_s = asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(main(), 10_000))  # a loop without end fails its test


def generate(client):
    return client.generate((1, 2), {"max_tokens": 3, "temperature": 0.7}, proofs=True)


def test_a_sample_as_it_was_sent():
    seen = []

    def handler(request):
        seen.append((str(request.url), json.loads(request.content)))
        return httpx.Response(200, json={"choices": [choice()]})

    (sample,), client = run(handler, generate, urls=(A + "/",))
    assert sample == completion_lib.Completion([5, 6, 258], [-0.5] * 3, [3, 4, 4], 2, "stop", b"proof")
    sampling = {"max_tokens": 3, "temperature": 0.7}
    body = {"token_ids": [1, 2], "sampling_params": sampling, "proofs": True}
    assert seen == [(f"{A}/inference/v1/generate", body)] and client.num_retries == 0


@pytest.mark.parametrize(
    ("pins", "bad"),
    [
        ({"policy_epoch": 7}, {"policy_epoch": 6}),
        ({"policy_epoch": 7}, {}),  # of a release before epochs
        ({"oldest_version": 3}, {"policy_epoch": 7}),  # its prompt is of version 2
    ],
)
def test_samples_of_another_epoch_or_an_older_version_are_sought_elsewhere(pins, bad):
    """An honest worker was refused for the samples of a server that lagged."""

    def handler(request):
        assert json.loads(request.content).get("policy_epoch", 7) == 7
        good = {"choices": [choice(prompt_policy_version=3)], "policy_epoch": 7}
        reply = {"choices": [choice()]} | bad if request.url.host == "a" else good
        return httpx.Response(200, json=reply)

    samples, client = run(handler, lambda client: client.generate((1, 2), {"max_tokens": 3}, **pins))
    assert (samples[0].prompt_version, samples[0].epoch, client.num_retries) == (3, 7, 1)


@pytest.mark.parametrize(
    "change", [{"server_signature": ...}, {"server_signature": "zz"}, {"proofs": ""}, {}, "another run"]
)
def test_a_sample_that_its_server_did_not_sign_is_sought_elsewhere(change):
    key, sampling = rollout_lib.WorkerKey.generate(), {"max_tokens": 3, "temperature": 0.7, "seed": 2**32 - 1, "n": 2}
    answer = completion_lib.Completion([5, 6, 258], [-0.5] * 3, [3, 4, 4], 2, "stop", b"proof", epoch=7)
    settings = sampling | {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "return_routed_experts": False}

    def sign(run, seed):
        asked = {"temperature": 0.7, "seed": seed, "settings": settings | {"run": run}}
        return key.private.sign(attestation.message([1, 2], answer, **asked)).hex()

    signed = [sign("run", seed) for seed in (2**32 - 1, 0)]
    if change == "another run":  # with the same seeds
        change = {"server_signature": sign("another", 2**32 - 1)}

    def handler(request):
        changes = [change, {}] if request.url.host == "a" else [{}, {}]
        choices = [choice(**{"server_signature": one} | other) for one, other in zip(signed, changes, strict=True)]
        return httpx.Response(200, json={"choices": choices, "policy_epoch": 7})

    def ask(client):
        return client.generate((1, 2), sampling, proofs=True)

    samples, client = run(handler, ask, keys={A: key.worker, B: key.worker}, of="run")
    assert [sample.server_signature.hex() for sample in samples] == signed and client.num_retries == bool(change)
    error, _ = run(handler, ask, urls=(A,), keys={A: rollout_lib.WorkerKey.generate().worker}, give_up_s=-1.0)
    assert isinstance(error, client_lib.Unavailable)


def test_a_reply_of_too_many_bytes_is_sought_elsewhere(monkeypatch):
    """Attack: a reply without end filled the memory of the worker."""
    reply = json.dumps({"choices": [choice()]}).encode()
    monkeypatch.setattr(reply_lib, "MAX_OTHER_BYTES", len(reply) - 5 * reply_lib.TOKEN_BYTES)
    handler = lambda request: httpx.Response(200, content=reply + b" " * (request.url.host == "a"))  # noqa: E731
    assert run(handler, generate)[1].num_retries == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("has_key", [True, False])
def test_a_liar_that_names_the_url_of_another_server_takes_no_samples_from_it(order, has_key):
    """Attack: samples of the honest server were compared with the liar's key."""
    liar, honest = (rollout_lib.WorkerKey.generate() for _ in range(2))
    answer = completion_lib.Completion([5, 6, 258], [-0.5] * 3, [3, 4, 4], 2, "stop", b"proof", epoch=0)
    settings = {"run": "", "max_tokens": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "return_routed_experts": False}
    message = attestation.message([1, 2], answer, temperature=0.7, seed=0, settings=settings)
    signature = honest.private.sign(message).hex() if has_key else ...
    told = [{"url": A, "key": honest.worker if has_key else "", "limit": 9}, {"url": A, "key": liar.worker, "limit": 1}]

    def ask(client):
        client.servers.tell([told[number] for number in order])
        return generate(client)

    reply = {"choices": [choice(server_signature=signature)]}
    (sample,), client = run(lambda request: httpx.Response(200, json=reply), ask, urls=())
    assert sample.server == (honest.worker if has_key else "") and client.num_retries == 0
    assert client.servers._servers[A].limit == 9


@pytest.mark.parametrize(("has_b", "versions"), [(True, [[3, 3]]), (False, [[3, 3]]), (True, [[3, 2], [4, 1]])])
def test_a_pinned_version_is_sought_on_every_server(has_b, versions):
    def handler(request):
        assert json.loads(request.content)["policy_version"] == 3
        if request.url.host == "a" or not has_b:
            return httpx.Response(409, json={"error": {"message": "this server has 4"}})
        return httpx.Response(200, json={"choices": [choice(policy_versions=versions, prompt_policy_version=3)]})

    def use(client):
        return client.generate((1, 2), {"max_tokens": 3}, policy_version=3)

    result, client = run(handler, use)
    if has_b and versions == [[3, 3]]:
        assert result[0].versions == [3, 3, 3] and client.num_retries == 1
    else:
        assert isinstance(result, client_lib.VersionGone) and str(result) == "this server has 4"
        lie = "server sent policy versions [4]; 3 was requested"  # B ignores the field
        assert client.servers.problems() == (f"{B}: MalformedReply: {lie}" if has_b else "")


@pytest.mark.parametrize("failure", [429, 500, 503, "refused", "timeout"])
def test_a_failure_is_tried_on_another_server_and_counted(failure):
    def handler(request):
        if request.url.host == "b":
            return httpx.Response(200, json={"choices": [choice()]})
        if failure == "refused":
            raise httpx.ConnectError("refused")
        if failure == "timeout":
            raise httpx.ReadTimeout("slow")
        return httpx.Response(failure, json={"error": {"message": "busy"}})

    samples, client = run(handler, generate)
    assert len(samples) == 1 and client.num_retries == 1 and client.passed_s == 0  # no pause while a server is untried
    assert {server.in_flight for server in client.servers._servers.values()} == {0} and not client._watches


def test_a_server_that_recovers_is_used_again_and_the_last_reason_is_reported(monkeypatch):
    monkeypatch.setattr(server_choice, "FIRST_PAUSE_S", 0.01)
    calls = collections.Counter()

    def handler(request):
        calls[request.url.host] += 1
        return httpx.Response(503) if sum(calls.values()) < 9 else httpx.Response(200, json={"choices": [choice()]})

    samples, client = run(handler, generate)
    assert len(samples) == 1 and client.num_retries == 8 and set(calls.values()) == {4, 5}

    error, client = run(lambda request: httpx.Response(503), generate, give_up_s=-1.0)
    assert isinstance(error, client_lib.Unavailable) and "the last error is from http://a:1: HTTP 503" in str(error)
    assert client.num_retries == 1


HANGS = {  # problem of the server, and the time it costs
    "silent": ("silent for", 35),
    "stalled": ("made no token for", 310),
    "flaky": ("made no token for", 315),
    "drip": ("no complete reply", 600),
    "long": ("", 500),
    "released": ("", 500),  # the learner's own, during a long train step
}


@pytest.mark.parametrize("fault", HANGS)
def test_a_server_that_hangs_costs_a_bounded_time(fault):
    """D10: a hung server held its requests for 600 s. One that is slow keeps its request, however long the head of its reply takes."""
    num_asked = collections.Counter()

    async def drip():
        while not await asyncio.sleep(0.5):
            yield b" "

    async def handler(request):
        num_asked[request.url.path, request.url.host] += 1
        if request.url.path == "/health":
            if fault == "silent":
                raise httpx.ReadTimeout("")
            number = num_asked["/health", "a"]
            if fault == "flaky" and number % 2:
                return httpx.Response(503)
            tokens = 7 if fault in ("stalled", "flaky", "released") else number
            return httpx.Response(200, json={"released": fault == "released", "stats": {"tokens": tokens}})
        assert request.extensions["timeout"] == {"connect": 10.0, "read": None, "write": None, "pool": None}
        if request.url.host == "a":
            if fault == "drip":
                return httpx.Response(200, content=drip())
            await asyncio.sleep(500)
        return httpx.Response(200, json={"choices": [choice()]})

    samples, client = run(handler, lambda client: client.generate((1, 2), {"max_tokens": 9000}))
    problem, passed_s = HANGS[fault]
    assert len(samples) == 1 and num_asked["/inference/v1/generate", "b"] == bool(HANGS[fault][0])
    assert problem in client.servers.problems() and bool(problem) == bool(client.servers.problems())
    assert client.passed_s == pytest.approx(passed_s)


@pytest.mark.parametrize(
    ("asked", "health", "first_s"),
    [
        ({"max_tokens": 12, "n": 8}, {}, 1.2),
        ({"max_tokens": 15_000, "n": 16}, {}, 1500),
        ({"max_tokens": 60_000, "n": 16}, {}, 1800),
        (
            {"max_tokens": 15_000, "n": 16},
            {"load": {"running": 32, "waiting": 16}},
            180,
        ),  # 48 samples of 15,000 tokens, 4,000 per second
        ({"max_tokens": 15_000, "n": 16}, {"load": {"running": 10**400, "waiting": 0}}, 1500),
        ({"max_tokens": 15_000, "n": 16}, {"load": {"running": "2", "waiting": None}}, 1500),
        ({"max_tokens": 15_000, "n": 16}, {"load": {"running": 9999, "waiting": 0}}, 1500),  # a liar's
    ],
)
def test_a_server_that_keeps_the_first_request_of_a_client_loses_it(asked, health, first_s):
    """Attack: it makes tokens for others, and a new client waited 2,430 s for any reply of its server."""

    async def handler(request):
        if request.url.path == "/health":
            tokens = 4000 * asyncio.get_running_loop().time()
            return httpx.Response(200, json=health | {"stats": {"tokens": tokens}})
        if request.url.host == "a":
            await asyncio.sleep(9000)
        return httpx.Response(200, json={"choices": [choice()] * asked["n"]})

    samples, client = run(handler, lambda client: client.generate((1, 2), asked))
    assert len(samples) == asked["n"] and "keeps a request" in client.servers.problems()
    assert 0 <= client.passed_s - (client_lib.SILENT_S + first_s) <= client_lib.HEALTH_S


def test_a_kept_request_is_late_once_others_were_answered():
    """A client that began with two requests waited for the first of them as if no other had been answered."""
    num_asked = collections.Counter()

    async def handler(request):
        if request.url.path == "/health":
            return httpx.Response(200, json={"stats": {"tokens": asyncio.get_running_loop().time()}})
        num_asked[request.url.host] += 1
        await asyncio.sleep(9000 if (request.url.host, num_asked["a"]) == ("a", 1) else 2)
        return httpx.Response(200, json={"choices": [choice()]})

    async def use(client):
        kept = asyncio.ensure_future(client.generate((1, 2), {"max_tokens": 15_000}))
        await asyncio.sleep(0)  # it begins
        for _ in range(40):
            await client.generate((1, 2), {"max_tokens": 15_000})
        return await kept

    assert run(handler, use)[1].passed_s < 110


def test_a_server_that_replies_at_the_last_moment_does_not_make_its_client_wait_for_ever():
    """Attack: each such reply nearly doubled the time that the next one may take."""
    patience = lambda client: client._patience(A, {"max_tokens": 15_000})  # noqa: E731
    clients, waits = [], []

    async def handler(request):
        if request.url.path == "/health":
            return httpx.Response(200, json={"stats": {"tokens": asyncio.get_running_loop().time()}})
        await asyncio.sleep(patience(clients[0]) - 10)
        return httpx.Response(200, json={"choices": [choice()]})

    async def use(client):
        clients.append(client)
        for _ in range(2):
            await client.generate((1, 2), {"max_tokens": 15_000})
            waits.append(patience(client))

    run(handler, use, urls=(A,))
    assert max(waits) <= client_lib.SILENT_S + client_lib.MAX_S


def test_a_server_that_replies_with_others_is_not_blamed():
    """The first of six servers was blamed when the reply of another one was read first."""

    async def handler(request):
        if request.url.path == "/health":
            return httpx.Response(200, json={"stats": {"tokens": asyncio.get_running_loop().time()}})
        await asyncio.sleep(500 - asyncio.get_running_loop().time())  # all in one moment
        is_well = request.url.host < "e"
        return httpx.Response(200 if is_well else 503, json={"choices": [choice()], "error": {"message": "busy"}})

    urls = [f"http://{name}:1" for name in "abcdef"]
    samples, client = run(handler, generate, urls=urls)
    assert len(samples) == 1 and client.passed_s == 500 and client.num_retries == 2
    assert client.servers.problems() == "http://e:1: HTTP 503: busy; http://f:1: HTTP 503: busy"


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_rejected_request_is_tried_on_all_servers_and_raised_with_their_message(status):
    """D4: a server with other sizes, or a malicious one, ended every worker."""
    body = {"error": {"message": "token id 999 is outside the vocabulary of 272 entries"}}
    error, client = run(lambda request: httpx.Response(status, json=body), generate)
    assert isinstance(error, ValueError) and client.num_retries == 2 and client.servers.problems() == ""
    assert str(error) == f"{A}/inference/v1/generate rejected the request: {body['error']['message']}"
    error, _ = run(lambda request: httpx.Response(status, text="<html>what?" + "x" * 5000), generate)
    assert isinstance(error, ValueError) and "<html>what?" in str(error) and len(str(error)) < 600

    def handler(request):
        good = httpx.Response(200, json={"choices": [choice()]})
        return good if request.url.host == "b" else httpx.Response(status, json=body)

    samples, client = run(handler, generate)
    assert len(samples) == 1 and "http://a:1: " in client.servers.problems() and "999" in client.servers.problems()


def test_a_server_that_lags_is_not_asked_for_a_newer_version():
    hosts = []

    def handler(request):
        hosts.append(request.url.host)
        version = 3 if request.url.host == "a" else 4
        good = choice(policy_versions=[[version, 3]], prompt_policy_version=version)
        return httpx.Response(200, json={"choices": [good]})

    async def use(client):
        client.servers.tell([{"url": A, "version": 4}, {"url": B, "version": 4}])
        return [await client.generate((1, 2), {"max_tokens": 3}, oldest_version=4) for _ in range(3)]

    results, _ = run(handler, use)
    assert hosts == ["a", "b", "b", "b"] and all(sample.versions == [4] * 3 for (sample,) in results)


def test_versions_of_reused_keys_are_those_that_were_allowed_and_are_signed():
    sampling = {"oldest_prefix_version": 1}

    def read(runs, sampling=sampling, **pins):
        changes = {"prefix_policy_versions": runs, "policy_versions": [[3, 3]], "prompt_policy_version": 3}
        response = httpx.Response(200, json={"choices": [choice(**changes)]})
        return reply_lib.read(response, {"token_ids": [1] * 10, "sampling_params": sampling} | pins, (), "")[0]

    sample = read([[4, 1], [8, 2]])
    assert sample.prefix_versions == ((4, 1), (8, 2)) and read([]).prefix_versions == read([], {}).prefix_versions == ()
    settings = dict.fromkeys(attestation.SETTINGS, 1)
    messages = {
        attestation.message([1] * 10, one, temperature=1.0, seed=0, settings=settings)
        for one in (sample, read([[4, 1]]), read([]))
    }
    assert len(messages) == 3
    backwards, too_many = [[8, 1], [4, 2]], [[4, 1]] * 10**5
    wrong = [[[4, 0]], [[4, 3]], [[4, 2], [8, 1]], backwards, [[10, 1]], [[0, 1]], [["4", 1]], [[4, 1, 1]], 5, too_many]
    for runs in wrong:
        with pytest.raises(reply_lib.MalformedReply):
            read(runs)
    with pytest.raises(reply_lib.MalformedReply, match="not requested"):
        read([[4, 1]], {})
    assert read([], policy_version=3).prefix_versions == ()
    with pytest.raises(reply_lib.MalformedReply, match=r"policy versions \[1\]; 3 was requested"):
        read([[4, 1]], policy_version=3)  # its worker would be refused for it


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"choices": [choice(token_ids=[5, 6, 7], policy_versions=[[3, 2]])]}, "3 tokens, 3 logprobs and 2 versions"),
        ({"choices": [choice(logprobs={"content": []})]}, "3 tokens, 0 logprobs and 3 versions"),
        ({"choices": [choice(policy_versions=[[3, 2 * 10**9]])]}, "are for more"),
        ({"choices": [choice(policy_versions=[[3, -1], [3, 4]])]}, "not an integer in"),
        ({"choices": [choice(policy_versions=[["3", 3]])]}, "not an integer in"),
        ({"choices": [choice(policy_versions=[3, 3, 3])]}, "malformed reply"),
        ({"choices": [choice(prompt_policy_version=None)]}, "not an integer in"),
        ({"choices": [choice(prompt_policy_version=2**31)]}, "not an integer in"),
        ({"choices": [choice(token_ids=["5", "6", "7"])]}, "not an integer in"),
        ({"choices": [choice(token_ids=[5, 6, -7])]}, "not an integer in"),
        ({"choices": [choice(token_ids=[], policy_versions=[], logprobs={"content": []})]}, "an empty completion"),
        ({"choices": [choice(logprobs=scores(-1, float("nan"), -1))]}, "not finite"),
        ({"choices": [choice(logprobs=scores(-1, -float("inf"), -1))]}, "not finite"),
        ({"choices": [choice(logprobs=scores(-1, -1e39, -1))]}, "not finite"),  # in float32
        ({"choices": [choice(**FOUR)]}, "4 tokens; at most 3 were"),
        ({"choices": [choice(finish_reason="tool_calls")]}, "the finish_reason 'tool_calls'"),
        ({"choices": [choice(finish_reason=["stop"])]}, "the finish_reason"),
        ({"choices": [choice(policy_versions=[[3, 1, 2]])]}, "too many values"),
        ({"choices": [choice(logprobs=scores("-1", "-1", "-1"))]}, "malformed reply"),
        ({"choices": [choice(logprobs=scores(*[-(10**400)] * 3))]}, "malformed reply"),
        ({"choices": [choice(logprobs=None)]}, "malformed reply"),
        ({"choices": [choice(proofs="a-b_")]}, "base64|Non-base64"),
        ({"choices": [choice(proofs=5)]}, "malformed reply"),
        ({"choices": ["no object"]}, "malformed reply"),
        ({"choices": 5}, "malformed reply"),
        ({"choices": []}, "0 samples; 1 were requested"),
        ({"choices": [choice(), choice()]}, "2 samples; 1 were requested"),
        ({}, "malformed reply: KeyError: 'choices'"),
        ([], "malformed reply"),
        (b"not json", "Expecting value"),
        (b"\xff\xfe\xff", "decode|JSON|value"),
        (b"[" * 100_000, "malformed reply: RecursionError|Expecting value"),
        *(({"choices": [choice(**{key: ...})]}, f"KeyError: '{key}'") for key in list(choice())[1:]),
    ],
)
def test_a_malformed_reply_is_a_failed_server(reply, message):
    content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()

    def handler(request):
        return httpx.Response(200, content=content if request.url.host == "a" else json.dumps({"choices": [choice()]}))

    samples, client = run(handler, generate)
    assert len(samples) == 1 and client.num_retries == 1 and client.passed_s == 0  # the other one answered
    error, _ = run(handler, generate, urls=(A,), give_up_s=-1.0)
    assert isinstance(error, client_lib.Unavailable) and re.search(message, str(error)), error


@pytest.mark.parametrize("url", [A, "http://\0", "http://h\ud800"])
def test_no_url_and_no_error_of_a_server_ends_its_client(url):
    """Attack: an error in 100,000 brackets, or a URL that is none, ended the worker."""

    def handler(request):
        if request.url.host == "b":
            return httpx.Response(200, json={"choices": [choice()]})
        return httpx.Response(400, content=b"[" * 100_000)

    samples, client = run(handler, generate, urls=(url, B))
    assert len(samples) == 1 and client.num_retries == 1 and url in client.servers.problems()


def test_every_server_updates_its_weights(monkeypatch):
    """Over TCP and over a unix socket; the token is the control plane's, never the API key."""
    monkeypatch.setenv("INTELLAX_API_KEY", "worker")
    seen, app = [], fastapi.FastAPI()

    @app.post("/update_weights")
    async def update(request: fastapi.Request):
        seen.append((await request.json(), request.headers["authorization"], request.client is None))
        if request.client is None and seen[-1][0]["version"] == 4:
            return web.error(500, "v00000004/manifest.json: corrupt", "weights_error")

    with tempfile.TemporaryDirectory() as folder, serving.in_thread(app) as url:
        sock = sockets.listen_unix(f"{folder}/c")
        with web.in_thread(web.server(app), sock):
            body = {"version": 3, "epoch": 1, "digest": "d", "rollback": True}
            for address in (f"{url}/", unix := sockets.address(sock)):
                asyncio.run(client_lib.update_weights(address, token="t", **body))
            assert seen == [(body, "Bearer t", False), (body, "Bearer t", True)]
            with pytest.raises(ValueError, match="/update_weights rejected the request: v00000004.* corrupt"):
                asyncio.run(client_lib.update_weights(unix, 4, token="t"))


def test_a_client_of_the_data_listener_has_no_way_to_the_control_routes(monkeypatch):
    monkeypatch.delenv("INTELLAX_API_KEY", raising=False)
    client = client_lib.Client([A])
    assert "authorization" not in client._http.headers and not hasattr(client, "update_weights")


@pytest.mark.parametrize(
    ("given", "environment", "sent"), [("k", None, "Bearer k"), (None, "e", "Bearer e"), (None, None, None)]
)
def test_the_api_key_is_sent(monkeypatch, given, environment, sent):
    if environment is None:
        monkeypatch.delenv("INTELLAX_API_KEY", raising=False)
    else:
        monkeypatch.setenv("INTELLAX_API_KEY", environment)
    assert client_lib.Client([A], api_key=given)._http.headers.get("authorization") == sent
