"""The rollout worker end to end: against an orchestrator and an inference server that this file plays, over real sockets.

The played server answers each prompt with the right text for even seeds and with a wrong one for odd seeds.
"""

import asyncio
import base64
import collections
import concurrent.futures
import functools
import hashlib
import itertools
import json
import pathlib
import re
import signal
import stat
import subprocess
import sys
import threading
import time

import fastapi
import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference import client as client_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import web
from models.text import tokenizer as tokenizer_lib
from rl import envs, worker
from rl.protocol import lease, signed_session
from sharding.system import signed_message, sockets
from tests.support import proxy, tiny

pytestmark = pytest.mark.usefixtures("shared_scorers")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZER = tokenizer_lib.byte_chatml()
OPTIONS = {"min_length": 3, "max_length": 6, "reward": "exact"}
ENV = envs.load("reverse_text", seed=4, **OPTIONS)
WAIT_S = 60
GROUP = lease.Lease(3, 7, "train", 12345, seed=2**32 - 2, num_samples=4, temperature=0.8, min_version=1).to_json()
RUN, OTHER_RUN = (rollout_lib.WorkerKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2))
SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12}


class Played:
    """Both services in one app, on a free port: requests are kept, replies can be changed."""

    def __init__(self, groups):
        self.groups, self.leases, self.requests, self.submitted = collections.deque(groups), [], [], []
        self.failures = collections.deque()  # (path, status, body) answered once instead
        self.submission = threading.Event()
        self.session, self.described = lease.Session.open(RUN.worker), {}
        self.forged_run, self.forged_lease, self.forged_submit = {}, {}, {}
        self.api_keys, self.beats, self.servers, self.ended, self.void = [], [], [], False, []
        self.change = lambda choice: choice
        app = fastapi.FastAPI()

        @app.middleware("http")
        async def fail(request, call_next):
            if self.failures and self.failures[0][0] == request.url.path:
                _, status, body = self.failures.popleft()
                return fastapi.responses.JSONResponse(body, status_code=status)
            return await call_next(request)

        @app.get("/run")
        async def run(nonce: str):
            env = {"name": "reverse_text", "options": OPTIONS, "seed": 4}
            tokenizer = {"tokenizer": "byte_chatml", "tokenizer_date": "2026-01-01"}
            run = tokenizer | {"env": env, "servers": [self.url], "sampling": SAMPLING, "step": 2} | self.described
            reply = {"id": RUN.worker, "session": self.session.id, "nonce": nonce, "run": run}
            return signed_message.sign(RUN.private, reply) | self.forged_run

        @app.post("/lease")
        async def lease_groups(request: fastapi.Request):
            body = await request.json()
            if body["session"] != self.session.id:
                return fastapi.responses.JSONResponse(refusal("not this session"), status_code=409)
            self.leases.append(body)
            groups = [self.groups.popleft() for _ in range(min(body["capacity"], len(self.groups)))]
            reply = {"groups": groups, "request": body["signature"], "ended": self.ended}
            return (
                signed_message.sign(RUN.private, reply | ({"servers": self.servers} if self.servers else {}))
                | self.forged_lease
            )

        @app.post("/heartbeat")
        async def heartbeat(request: fastapi.Request):
            self.beats.append(body := await request.json())
            void = [key for key in body["holding"] if key in self.void]
            reply = {"interval_s": 0.1, "void": void, "ended": self.ended, "request": body["signature"]}
            return signed_message.sign(RUN.private, reply | {"servers": self.servers or [{"url": self.url}]})

        @app.get("/health")
        async def health():
            return {"policy_version": 0, "policy_epoch": 0, "policy_digest": "", "load": {"running": 0, "waiting": 0}}

        @app.post("/submit")
        async def submit(request: fastapi.Request):
            body, header = await request.body(), json.loads(request.headers[lease.HEADER])
            assert signed_message.is_signed(header["worker"], header) and header["session"] == self.session.id
            assert hashlib.sha256(body).hexdigest() == header["digest"]
            self.submitted += parquet.from_bytes(body)
            self.submission.set()
            verdicts = {"train/3/7": "refused: temperature: expected 1.0", "train/3/8": "accepted"}
            reply = {"verdicts": verdicts, "request": header["signature"]}
            return signed_message.sign(RUN.private, reply) | self.forged_submit

        @app.post("/inference/v1/generate")
        async def generate(request: fastapi.Request):
            body = await request.json()
            self.requests.append(body)
            self.api_keys.append(request.headers.get("authorization"))
            seed, n = body["sampling_params"]["seed"], body["sampling_params"]["n"]
            prompt = TOKENIZER.decode(body["token_ids"])
            answer = prompt.rpartition("Reverse: ")[2][: prompt.rpartition("Reverse: ")[2].index("\n")][::-1]
            good = [choice((seed + i) % 2**32, answer) for i in range(n)]
            return {"choices": await asyncio.to_thread(lambda: [*map(self.change, good)])}

        self.sock = sockets.listen("127.0.0.1", 0)
        self.url = sockets.address(self.sock)
        self.server = web.server(app)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.sock]}, daemon=True)
        self.thread.start()

    def close(self):
        self.server.should_exit = True
        self.thread.join()


def choice(seed, answer):
    tokens = [*TOKENIZER.encode(answer if seed % 2 == 0 else "no"), TOKENIZER.eos_id]
    return {
        "token_ids": tokens,
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": 5e-7} for token in tokens]},
        "policy_versions": [[1, 1], [2, len(tokens) - 1]],
        "prompt_policy_version": 1,
        "proofs": base64.b64encode(bytes([seed % 256])).decode(),
    }


@pytest.fixture
def play():
    played = []

    def play(*groups):
        played.append(Played(groups))
        return played[-1]

    yield play
    for each in played:
        each.close()


def work_until(played: Played | str, done, *, concurrency=4, key=None, give_up_s=0.0, run=RUN.worker, servers=()):
    """Runs the worker until `done()`; raises the first error of the worker."""

    async def main():
        url, own = getattr(played, "url", played), key or rollout_lib.WorkerKey.generate()
        task = asyncio.create_task(
            worker.Worker(url, own, run, concurrency=concurrency, give_up_s=give_up_s, servers=servers).work()
        )
        deadline = time.monotonic() + WAIT_S
        while not done() and not task.done():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        if task.done():
            await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_a_group_from_lease_to_submission(play, capsys):
    played, key, printed = play(GROUP), rollout_lib.WorkerKey.generate(), []

    def done():  # the refusal is printed when the reply is in, a moment after the submission was
        printed.append(capsys.readouterr().err)
        return any(printed)

    work_until(played, done, key=key)
    verifier = lease.RequestVerifier(played.session)
    assert verifier.verify(played.leases[0], "lease") == key.worker and played.leases[0]["capacity"] == 4
    for again in played.leases[1:5]:  # each is newer and signed
        verifier.verify(again, "lease")

    (request,) = played.requests  # one for the group
    task = ENV.make_task(GROUP["index"], "train")
    prompt = TOKENIZER.render(task.messages, add_generation_prompt=True).token_ids
    assert request["token_ids"] == prompt and request["proofs"] is True
    assert "policy_version" not in request
    of_group = {"n": 4, "temperature": 0.8, "seed": 2**32 - 2, "return_routed_experts": False}
    assert request["sampling_params"] == SAMPLING | of_group

    assert [r.sample for r in played.submitted] == [0, 1, 2, 3]
    for i, r in enumerate(played.submitted):
        completion = [*TOKENIZER.encode(task.answer if i % 2 == 0 else "no"), TOKENIZER.eos_id]
        assert r.tokens.tolist() == prompt + completion and rollout_lib.signature_ok(r) and r.worker == key.worker
        assert r.sampled_mask.tolist() == [False] * len(prompt) + [True] * len(completion)
        assert not r.logprobs.any()  # 5e-7, a hair above 0, is rounded down to 0, the largest log-probability
        assert r.versions.tolist() == [1] * len(prompt) + [1] + [2] * (len(completion) - 1)
        assert (r.seed, r.temperature, r.step, r.finish_reason) == ((2**32 - 2 + i) % 2**32, 0.8, 3, "stop")
        assert r.task == rollout_lib.TaskRef("reverse_text", GROUP["index"], 7, 4)
        assert r.reward == r.rewards["reward"] == 1.0 - i % 2 and r.proofs == bytes([r.seed % 256])
    error = "".join(printed) + capsys.readouterr().err
    assert error == "train/3/7 refused: temperature: expected 1.0\n"


def test_groups_in_flight_are_bounded_and_all_are_done(play):
    groups = [GROUP | {"group": g, "index": g, "num_samples": 2} for g in range(9)]
    played = play(*groups)
    work_until(played, lambda: len(played.submitted) == 18, concurrency=2)
    assert {lease["capacity"] for lease in played.leases} <= {1, 2}
    assert sorted({r.task.group for r in played.submitted}) == list(range(9))


def test_held_out_groups_need_no_proofs(play):
    played = play(GROUP | {"split": "held_out", "index": 1, "temperature": 0.0})
    work_until(played, played.submission.is_set)
    assert played.requests[0]["proofs"] is False and played.requests[0]["sampling_params"]["temperature"] == 0.0
    task = ENV.make_task(1, "held_out")
    assert played.requests[0]["token_ids"] == TOKENIZER.render(task.messages, add_generation_prompt=True).token_ids


@pytest.mark.parametrize("is_own", [False, True])
def test_a_group_whose_pinned_version_is_gone_is_given_back(play, is_own, capsys):
    played = play(GROUP | {"version": 1, "group": 3}, GROUP | {"version": 1})
    played.change = lambda choice: choice | {"policy_versions": [[1, len(choice["token_ids"])]]}
    played.failures.append(("/inference/v1/generate", 409, refusal("this server has version 2")))
    options = {"concurrency": 1, "servers": [played.url] if is_own else ()}
    work_until(played, lambda: played.submission.is_set() and played.leases[-1]["time_us"] > 0, **options)
    assert ("group train/3/3 is given back: " in capsys.readouterr().err) == is_own
    assert [request["policy_version"] for request in played.requests] == [1]  # the other did not come through
    assert [lease["returned"] for lease in played.leases if lease["returned"]] == [[["train", 3, 3]]]
    assert {r.task.group for r in played.submitted} == {7}


# ---- sessions and keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forged", "words"),
    [
        (dict(forged_run={"run": {"servers": ["http://evil"]}}), "GET /run is not signed by run"),
        (dict(forged_run={"nonce": "0"}), "GET /run is not signed by run"),  # an old reply
        (dict(forged_run={"id": OTHER_RUN.worker}), f"serves run {OTHER_RUN.worker}, and --run is"),
        (dict(forged_run={"id": 5}), "serves run 5, and --run is"),
        (dict(forged_run={"run": []}), "which is not the reply of an orchestrator"),
        (dict(forged_lease={"groups": [GROUP | {"seed": 1}]}), "the reply is not signed by run"),
        (dict(forged_lease={"request": "00" * 64}), "the reply is not signed by run"),
        (dict(forged_submit={"verdicts": {"train/3/7": "taken"}}), "the reply is not signed by run"),
    ],
)
def test_replies_that_the_trusted_run_did_not_sign_are_refused(play, capsys, forged, words):
    """Attack: a party on the way sends a worker to other servers or tasks, or answers with an older reply."""
    played = play(GROUP)
    vars(played).update(forged)
    assert run_main(played.url) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert bool(played.requests) == bool(played.submitted) == ("forged_submit" in forged)


def test_a_run_that_changes_its_key_loses_a_worker_that_trusted_the_first(play, capsys):
    played = play(GROUP)

    def impostor(choice):
        played.session, played.forged_run = lease.Session(OTHER_RUN.worker, "0" * 32), {"id": OTHER_RUN.worker}
        return choice

    played.change = impostor
    with pytest.raises(ValueError, match=f"serves run {OTHER_RUN.worker}, and --run is {RUN.worker}"):
        work_until(played, lambda: False, run=None)
    assert f"working for run {RUN.worker}, the first that answered" in capsys.readouterr().err


@pytest.mark.parametrize("run", [RUN.worker, None])
def test_the_api_key_goes_only_to_servers_of_a_run_that_the_user_named(play, monkeypatch, run):
    monkeypatch.setenv("INTELLAX_API_KEY", "secret")
    played = play(GROUP)
    work_until(played, played.submission.is_set, run=run)
    assert played.api_keys == (["Bearer secret"] if run else [None])


def test_a_tokenizer_in_a_bucket_is_downloaded_only_for_a_run_that_the_user_named(play, monkeypatch):
    """Attack: any run could have a worker download a bucket of any size, with the worker's credentials."""
    monkeypatch.setattr(worker, "read_runs", lambda body, *_: pytest.fail("it was read"))
    played = play(GROUP)
    played.described = {"tokenizer": "s3://bucket/run"}
    with pytest.raises(ValueError, match=f"'s3://bucket/run', .* credentials; add --run {RUN.worker}"):
        work_until(played, lambda: False, run=None)
    with pytest.raises(pytest.fail.Exception, match="it was read"):
        work_until(played, lambda: False)


def test_a_proof_of_work_is_computed_once(play, monkeypatch, capsys):
    """The sessions of one worker, of which an orchestrator that starts again begins another, share the proof for a run and number of bits."""
    hashed, is_work, counts = [], lease.is_work, []
    monkeypatch.setattr(lease, "is_work", lambda *args: hashed.append(args) or is_work(*args))
    played, key = play(GROUP), rollout_lib.WorkerKey.generate()
    played.described = {"admission": {"kind": "work", "min_stake": 1, "work_bits": 10}}

    def done():
        if len(played.submitted) == 4 and not counts:
            counts.append(len(hashed))
            played.session = lease.Session.open(RUN.worker)
            played.groups.append(GROUP)
        return len(played.submitted) == 8

    work_until(played, done, key=key)
    (work,) = {body["work"] for body in played.leases}
    assert is_work(RUN.worker, key.worker, work, 10) and counts == [len(hashed)]
    assert "a new session of the orchestrator: " in capsys.readouterr().err


def test_a_signal_ends_the_search_for_a_proof_of_work(play):
    played = play()
    played.described = {"admission": {"kind": "work", "min_stake": 1, "work_bits": 40}}
    command = [sys.executable, "-m", "rl.worker", "--orchestrator", played.url, "--run", RUN.worker]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "2^40 hashes" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_a_heartbeat_reports_the_speed_since_the_one_before_and_the_last_is_short(monkeypatch):
    monkeypatch.setattr(worker, "LEAVE_S", 0.05)
    speeds, stopping, mine = [], asyncio.Event(), worker.Worker("", RUN, concurrency=1, give_up_s=0.0)

    class Signed:
        async def lease(self, capacity, wait_s, holding):
            await asyncio.sleep(WAIT_S)

        async def beat(self, report, holding, leaving=False):
            speeds.append(report.load.tokens_per_s)
            len(speeds) == 2 and stopping.set()
            await asyncio.sleep(WAIT_S * leaving)
            return {"interval_s": 0.01, "void": []}

    async def main():
        groups = worker._Groups(mine, Signed(), client_lib.Client([]), None)
        working = asyncio.create_task(groups.work(stopping))
        await asyncio.sleep(0.5)
        mine.num_tokens += 100
        groups._held.add(("train", 3, 7))
        await asyncio.wait_for(working, 10)

    asyncio.run(main())
    assert speeds[0] == 0 and 0 < speeds[1] < 250  # and not 100 tokens in one interval


# ---- a swarm -------------------------------------------------------------------------------------------------


def test_heartbeats_hold_the_leases_and_name_servers_that_join(play, monkeypatch):
    """D3: a lease that ran out was leased again to the same worker, and both answers were handed in. D9: servers were read once."""
    other, played = play(), play(GROUP)
    release = threading.Event()
    played.change = other.change = lambda choice: release.wait(WAIT_S) and choice
    played.servers = [{"url": played.url}]

    def done():
        if len([beat for beat in played.beats if beat["holding"]]) >= 3 and played.servers[0]["url"] == played.url:
            played.servers = [{"url": other.url}]
            played.groups += [GROUP, GROUP | {"group": 9}]  # the first expired, and is leased again
        if any(beat["report"]["load"]["running"] == 2 for beat in played.beats):  # both are under way
            release.set()
        return len(played.submitted) == 8

    try:
        work_until(played, done)
    finally:
        release.set()
    for requests in (played.beats, played.leases):
        assert [["train", 3, 7]] in [request["holding"] for request in requests]
    assert sorted({(r.task.group, r.sample) for r in played.submitted}) == [(g, i) for g in (7, 9) for i in range(4)]
    assert len(played.requests) == 1 and len(other.requests) == 1
    assert {beat["report"]["load"]["running"] for beat in played.beats} >= {1, 2}


def test_a_void_group_is_dropped_and_makes_room(play):
    played = play(GROUP, GROUP | {"group": 8})
    played.change, played.void = lambda choice: time.sleep(0.2) or choice, [["train", 3, 7]]
    work_until(played, lambda: {r.task.group for r in played.submitted} == {8}, concurrency=1)
    assert not [one["returned"] for one in played.leases if one["returned"]]


def test_a_dead_server_is_not_asked_for_each_group(play):
    """D10: with the first of two servers dead, 20 requests made 20 failed connections."""
    played = play(*(GROUP | {"group": g} for g in range(20)))
    with proxy.Proxy("http://127.0.0.1:9", lambda rng: "refuse") as dead:
        accepted = []
        dead.fault = lambda rng: accepted.append(1) or "refuse"
        played.servers = played.described["servers"] = [{"url": dead.url}, {"url": played.url}]
        played.described["servers"] = [dead.url, played.url]
        work_until(played, lambda: len(played.submitted) == 80, concurrency=1, give_up_s=WAIT_S)
    assert 0 < len(accepted) < 8


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (None, signal.SIGINT))]
)
def test_it_ends_with_the_run_or_on_a_signal(play, number):
    """D9: 300 s after the end of a run, a worker ended with an error, and SIGTERM lost its leases and finished groups."""
    played = play(GROUP, GROUP | {"group": 8})
    callers, release = [], threading.Event()

    def change(choice):
        callers.append(threading.get_ident())
        is_first_group = callers[-1] == callers[0] and callers.count(callers[0]) <= GROUP["num_samples"]
        return choice if is_first_group or release.wait(WAIT_S) else None  # the second one is still in progress

    played.change = change
    command = [sys.executable, "-m", "rl.worker", "--orchestrator", played.url, "--run", RUN.worker]
    with subprocess.Popen([*command, "--concurrency", "2"], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert played.submission.wait(WAIT_S)
        if number:
            process.send_signal(number)
        else:
            played.ended = True
        code = process.wait(WAIT_S)
        release.set()
        error = process.stderr.read()
    assert code == 0
    assert error.splitlines()[-1] == ("stopped; groups in progress were given back" if number else "the run ended")
    assert played.beats[-1]["leaving"] is bool(number)  # no listener is left after the end
    assert len({r.task.group for r in played.submitted}) == 1


def test_own_servers_are_used_instead_of_those_of_the_run(play):
    own, played = play(), play(GROUP)
    work_until(played, played.submission.is_set, servers=[own.url])
    assert len(own.requests) == 1 and not played.requests


# ---- errors -------------------------------------------------------------------------------------------------


def run_main(url, *arguments):
    return worker.main(["--orchestrator", url, "--give_up_s", "0", "--run", RUN.worker, *arguments])


def refusal(message):
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "param": None}}


@pytest.mark.parametrize("name", ["lease groups", "lease temperature", "heartbeat void", "heartbeat url"])
def test_a_reply_of_another_release_ends_it_with_one_line(play, capsys, monkeypatch, name):
    kind, field, sign = *name.split(), signed_message.sign

    def without(value):
        if isinstance(value, list):
            return [*map(without, value)]
        return {k: without(v) for k, v in value.items() if k != field} if isinstance(value, dict) else value

    change = lambda reply: without(reply) if "request" in reply else reply  # noqa: E731
    monkeypatch.setattr(signed_message, "sign", lambda private, reply: sign(private, change(reply)))
    assert run_main(play(GROUP).url) == 1
    found = f"error: the reply of the orchestrator to a {kind} request has {field} = None"
    remedy = "which this worker cannot read; use the release of the orchestrator"
    assert capsys.readouterr().err.splitlines()[-1] == f"{found}, {remedy}"


def test_a_worker_names_what_it_waits_for_since_when_and_for_how_long(capsys, monkeypatch):
    """The line had aiohttp's "ssl:default", and neither a time nor, in the status line, an end."""
    monkeypatch.setattr(signed_session, "NOTICE_S", 0.0)
    mine = worker.Worker("http://127.0.0.1:1", RUN, concurrency=1, give_up_s=1.0)
    with pytest.raises(ConnectionError, match="no reply from the orchestrator"):
        asyncio.run(mine.work())
    place = re.escape("the orchestrator at http://127.0.0.1:1")
    waits = (
        rf"{place}, since \d\d:\d\d:\d\d, for up to 1 s: Cannot connect to host 127.0.0.1:1 \[Connect call failed .*\]"
    )
    assert re.fullmatch(waits, mine.waiting_for())
    assert re.fullmatch(rf"waiting for {waits}; check the URL, and that the run is on\n", capsys.readouterr().err)


def test_metrics_show_its_groups_and_health_why_it_waits(play):
    played = play(GROUP, GROUP | {"group": 8})
    with sockets.listen("127.0.0.1", 0) as sock:
        address = f"http://127.0.0.1:{sock.getsockname()[1]}"
    played.failures += [("/run", 503, {})] * 2
    with concurrent.futures.ThreadPoolExecutor() as pool:
        options = ("--metrics", address.rpartition(":")[2], "--give_up_s", "60")
        running, said = pool.submit(run_main, played.url, *options), set()

        def is_idle():
            try:
                said.add(httpx.get(f"{address}/health").json()["waiting_for"])
            except httpx.TransportError:
                return running.done()
            return len(played.submitted) == 8 and "a group from the orchestrator" in said

        proxy.wait_until(is_idle, WAIT_S)
        lines = httpx.get(f"{address}/metrics").text.splitlines()
        played.ended = True
        assert running.result(WAIT_S) == 0
    assert any(line.startswith(f"the orchestrator at {played.url}") for line in said)
    assert all(40 <= one["wait_s"] <= 60 for one in played.leases if one["capacity"])  # D7: it asked ten times a second
    counts = {'groups_total{name="generated"} 2.0', 'groups_total{name="leased"} 2.0', 'groups{name="running"} 0.0'}
    counts |= {
        'environment_rollouts_total{name="reverse_text"} 8.0',
        'environment_turns_total{name="reverse_text"} 8.0',
    }
    counts |= {
        'environment_errors_total{name="reverse_text"} 0.0',
        "group_seconds_count 2.0",
        f"tokens_total {sum(r.sampled_mask.sum() for r in played.submitted):.1f}",
    }
    assert {f"intellax_worker_{line}" for line in counts} <= {*lines}, lines


@pytest.mark.parametrize("path", ["/run", "/lease", "/submit", "/heartbeat"])
def test_an_orchestrator_that_refuses_ends_it_with_its_words(play, capsys, path):
    played = play(GROUP)
    played.failures.append((path, 400, refusal("rollout file, row 3: seed")))
    assert run_main(played.url) == 1
    assert capsys.readouterr().err == f"error: the orchestrator rejected {path}: rollout file, row 3: seed\n"


def test_an_orchestrator_that_fails_is_asked_again(play):
    played = play(GROUP)
    played.failures += [(path, 503, {}) for path in ("/run", "/lease", "/submit")]
    work_until(played, played.submission.is_set, give_up_s=WAIT_S)
    assert len(played.submitted) == 4 and not played.failures


def test_a_reply_of_too_many_bytes_is_an_error(play, capsys, monkeypatch):
    monkeypatch.setattr(worker.signed_session.sign_in, "MAX_REPLY_BYTES", 100)
    assert run_main(play(GROUP).url) == 1
    assert "the reply has more than 100 bytes, the maximum; check the URL" in capsys.readouterr().err


def test_a_request_that_another_overtook_is_signed_again():
    """Two requests to lease at the same moment ended the worker: the later one may arrive first."""
    sent, replay = [], {"error": web.error_body(400, "rejected as a replay", "replayed")}

    def answer(request):
        sent.append(json.loads(request.content)["n"])
        return httpx.Response(400, json=replay) if len(sent) < 3 else httpx.Response(200, json={"ok": True})

    async def ask():
        async with httpx.AsyncClient(base_url="http://orchestrator", transport=httpx.MockTransport(answer)) as http:
            count = itertools.count()
            connection = worker.signed_session.Connection(http, 1.0)
            return await connection.exchange("/lease", lambda: {"json": {"n": next(count)}})

    assert asyncio.run(ask()) == {"ok": True} and sent == [0, 1, 2]


@pytest.mark.parametrize("text", ["<html>sign in</html>", '{"groups": [', "[" * 10**5])
def test_a_reply_that_is_not_json_is_asked_for_again(text):
    """The sign-in page of a network, or a reply that was cut, ended the worker with "Expecting value: line 1 column 1"."""

    async def ask(texts, give_up_s):
        replies = iter([httpx.Response(200, text=one) for one in texts])
        transport = httpx.MockTransport(lambda request: next(replies))
        async with httpx.AsyncClient(base_url="http://orchestrator", transport=transport) as http:
            return await worker.signed_session.Connection(http, give_up_s).exchange("/run")

    assert asyncio.run(ask([text, '{"ok": true}'], WAIT_S)) == {"ok": True}
    with pytest.raises(ConnectionError, match="/run is answered with text that is not JSON, as by another program: "):
        asyncio.run(ask([text], -1.0))


def test_the_pauses_between_attempts_grow_and_keep_to_those_of_the_reply(monkeypatch):
    """Each worker asked a busy orchestrator twice a second, at the same moments as others."""
    slept, asked = [], [*["soon"] * 12, "40", "9" * 400, "-1"]

    async def sleep(seconds):
        slept.append(seconds)

    async def ask():
        replies = iter(
            [*(httpx.Response(429, headers={"retry-after": one}) for one in asked), httpx.Response(200, json={})]
        )
        transport = httpx.MockTransport(lambda request: next(replies))
        async with httpx.AsyncClient(base_url="http://orchestrator", transport=transport) as http:
            return await worker.signed_session.Connection(http, 1800.0).exchange("/run")

    monkeypatch.setattr(worker.signed_session.asyncio, "sleep", sleep)
    assert asyncio.run(ask()) == {} and len(set(slept)) == len(asked)
    assert slept[0] >= 0.5 and 40 <= slept[12] <= 60 and 1800 <= slept[13] <= 2700 and 20 <= slept[14] <= 30
    assert all(pause <= min(30, 0.75 + 0.75 * sum(slept[:n])) for n, pause in enumerate(slept[:12]))


def test_a_server_that_only_sends_nonsense_costs_its_groups_alone(play, capsys):
    """D4: the worker ended. tests/inference/test_client.py has all kinds of nonsense."""
    played = play(GROUP, GROUP | {"group": 8})
    played.change = lambda choice: choice | {"logprobs": {"content": []}} if played.groups else choice
    work_until(played, played.submission.is_set, concurrency=1)
    assert {r.task.group for r in played.submitted} == {8}
    error = capsys.readouterr().err
    assert error.startswith("group train/3/7 is given back: ") and "tokens, 0 logprobs" in error
    assert [one["returned"] for one in played.leases if one["returned"]] == [[["train", 3, 7]]]


def test_submissions_are_cut_before_they_are_too_large(monkeypatch, capsys):
    bodies = []

    async def main(groups):
        async def take(request):
            bodies.append([r.task.group for r in parquet.from_bytes(await request.aread())])
            sent = json.loads(request.headers[lease.HEADER])
            reply = {"verdicts": {}, "request": sent["signature"]}
            return httpx.Response(200, json=signed_message.sign(RUN.private, reply))

        async with httpx.AsyncClient(transport=httpx.MockTransport(take), base_url="http://o") as http:
            signed = worker.signed_session.SignedSession(
                worker.signed_session.Connection(http, 0.0), RUN, lease.Session.open(RUN.worker), ""
            )
            held = worker._Groups(worker.Worker("", RUN, concurrency=1, give_up_s=0.0), signed, None, None)
            for number, group in enumerate(groups):
                held._finished.put_nowait((("train", 3, number), group))
                held._held.add(("train", 3, number))
            total = sum(map(len, groups))
            task = asyncio.create_task(held._submit())
            while (sum(map(len, bodies)) < total or held._held) and not task.done():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                task.result()

    groups = [[made_up(number)] * 2 for number in range(7)]
    size = sum(rollout_lib.num_bytes(rollout) + 1024 for rollout in groups[0])
    assert len(parquet.to_bytes(groups[0] * 50)) < 50 * size  # proofs are as good as random
    monkeypatch.setattr(worker, "MAX_JOINED_BYTES", 3 * size)
    asyncio.run(main(groups))
    assert bodies == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5], [6, 6]]
    monkeypatch.setattr(worker, "MAX_JOINED_BYTES", 0)  # a group is never cut
    bodies.clear()
    asyncio.run(main(groups[:2]))
    assert bodies == [[0, 0], [1, 1]]
    bodies.clear()
    monkeypatch.setattr(worker.web, "MAX_BODY_BYTES", 1000)
    with pytest.raises(
        ValueError, match="group 0 of step 3 has .* bytes, more than the 1000 that a submission may have; lower"
    ):
        asyncio.run(main(groups[:1]))


def made_up(number):
    tokens = np.random.default_rng(number).integers(0, 2**31 - 1, 500).astype(np.int32)
    return tiny.rollout(
        np.arange(500) > 0,
        tokens=tokens,
        logprobs=-np.arange(500).astype(np.float32),
        versions=tokens,
        task=rollout_lib.TaskRef("e", 0, number, 0),
        step=3,
        finish_reason="stop",
        proofs=np.random.default_rng(number).bytes(258 * 16),
    )


# ---- the process -----------------------------------------------------------------------------------------------------


def test_the_key_is_made_once_and_read_again(play, tmp_path, capsys):
    path = tmp_path / "keys" / "worker.pem"
    workers = []
    for _ in range(2):
        played = play(GROUP)
        played.failures.append(("/submit", 400, refusal("enough")))
        assert run_main(played.url, "--key", str(path)) == 1
        workers.append(played.leases[0]["worker"])
    assert workers[0] == workers[1] == rollout_lib.WorkerKey.load(path).worker
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    anonymous = play(GROUP)
    anonymous.failures.append(("/submit", 400, refusal("enough")))
    assert run_main(anonymous.url) == 1 and anonymous.leases[0]["worker"] != workers[0]

    capsys.readouterr()
    path.write_text("no key")
    assert run_main(anonymous.url, "--key", str(path)) == 1
    assert "is not an unencrypted PEM private key" in capsys.readouterr().err


def test_the_process_works_without_jax_and_ends_with_its_parent(play):
    """`python -m rl.worker`, in an interpreter in which an import of jax is an error. It gets the URL when there is one."""
    played = play(GROUP)
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from rl import worker\n"
        "sys.exit(worker.main(['--orchestrator', '-', '--exit_with_parent']))"
    )
    start = functools.partial(subprocess.Popen, [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE)
    with start() as process:
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
    with start() as process:
        try:
            process.stdin.write(f"{played.url}\n".encode())
            process.stdin.flush()
            assert played.submission.wait(WAIT_S) and process.poll() is None
            process.stdin.close()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
    assert len(played.submitted) == 4


# ---- code of the user ------------------------------------------------------------------------------------------------


def test_other_code_than_that_of_the_run_is_refused_before_it_works(play, tmp_path, capsys):
    """It works on the same digest, under the name that the run has for the environment."""
    (tmp_path / "own_reverse.py").write_text(
        "from rl.envs.native.reverse_text import build as shipped\n\n\ndef build(**options):\n    return shipped(**options)\n"
    )
    file = f"{tmp_path}/own_reverse.py:build"
    env = {
        "name": "/home/owner/own_reverse.py:build",
        "options": OPTIONS,
        "seed": 4,
        "digest": envs.digest(file, OPTIONS),
    }
    played = play(GROUP)
    played.described = {"env": env}
    assert (
        run_main(played.url) == 1
        and "for this process; give the folder that has it with --code" in capsys.readouterr().err
    )
    played.failures.append(("/submit", 400, refusal("enough")))
    assert run_main(played.url, "--code", str(tmp_path)) == 1 and "enough" in capsys.readouterr().err
    assert played.requests and played.leases[-1]["env_digest"] == env["digest"]

    played = play(GROUP)
    played.described = {"env": env}
    with open(tmp_path / "own_reverse.py", "a") as own:
        own.write("# changed\n")
    assert run_main(played.url, "--code", str(tmp_path)) == 1
    error = capsys.readouterr().err
    assert f"environment {env['name']} has other code or data here" in error and error.count("\n") == 1
    assert not played.leases and not played.requests


def test_folders_of_repeated_options_add_up(monkeypatch, tmp_path, capsys):
    """`--code a --code b`, as rl.train takes it, gave a worker only b."""
    found, command = [], ["--orchestrator", "http://a", "--code", "a", "b", "--code=c"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        worker.main(command)
    assert "error: argument --code: a is not a folder; correct it" in capsys.readouterr().err
    [(tmp_path / name).mkdir() for name in "abc"]

    def make(*args, code, **options):
        found.extend(code)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "Worker", make)
    assert worker.main(command) == 130
    assert found == ["a", "b", "c"]
