"""An abused server: it replies with the right status and message, leaks nothing, and keeps serving.

One real process. INTELLAX_ABUSE_S sets how long it is abused (20; a release runs 600).
"""

import asyncio
import dataclasses
import json
import os
import pathlib
import random
import socket
import struct
import tempfile
import time

import httpx
import pytest

from sharding.weights import broadcast
from tests.support import serving, tiny

pytestmark = pytest.mark.slow
MODEL = tiny.model()
ABUSE_S = float(os.environ.get("INTELLAX_ABUSE_S", "20"))
MAX_QUEUE = 300
PROMPT = list(b"hello")


def publish(root, model=MODEL, version=0):
    metadata = {"model": dataclasses.asdict(MODEL), "tokenizer": "byte_chatml"}
    broadcast.publish(tiny.params(model, 0), version, str(root), metadata=metadata)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(process, host, port, client of the control listener, folder with weights of another shape)."""
    folder = tmp_path_factory.mktemp("abuse")
    publish(folder / "weights")
    publish(folder / "other", dataclasses.replace(MODEL, ffn_dim=72), version=1)
    command = [
        "inference.serve",
        "--weights",
        folder / "weights",
        "--port",
        0,
        "--num_slots",
        8,
        "--max_model_len",
        256,
    ]
    command += ["--prefill_batch", 4, "--max_queue", MAX_QUEUE, "--prefill_chunk", 64, "--prefix_cache_mib", 4]
    command += ["--weights_allow", folder, "/nowhere"]
    with (
        tempfile.TemporaryDirectory() as private,
        serving.child(folder, *command, "--control", f"{private}/control") as (process, url),
    ):
        host, port = url.removeprefix("http://").split(":")
        with httpx.Client(transport=httpx.HTTPTransport(uds=f"{private}/control"), base_url="http://c") as control:
            yield process, host, int(port), control, folder / "other"


def resident_bytes(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def request_bytes(path, body, length=None):
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body) if length is None else length}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


JSON = {"content-type": "application/json"}
GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
LONG = json.dumps({"token_ids": PROMPT, "sampling_params": {"n": 8, "ignore_eos": True}}).encode()
HELLO = [{"role": "user", "content": "x"}]
STREAM = json.dumps({"messages": HELLO, "stream": True, "ignore_eos": True, "n": 4}).encode()


async def refusals(client, rng, control, other):
    """Each gets status 400 and a message that names the mistake."""
    huge = rng.choice([10**30, -1, -(10**30), 2**63, float("nan"), float("inf"), "1", None, [], {}, True, 1e400])
    field = rng.choice("temperature top_k top_p min_p n max_tokens seed stop_token_ids logit_bias".split())
    bodies = [
        rng.randbytes(rng.randrange(200)),
        b"[" * rng.randrange(1, 100_000),
        b'{"token_ids": [' + b"1," * 100_000,
        json.dumps({"token_ids": [rng.choice([272, -1, 10**20])]}).encode(),
        json.dumps({"token_ids": [1] * rng.randrange(256, 5000)}).encode(),
        json.dumps({"token_ids": "x" * rng.randrange(10)}).encode(),
    ]
    for body in bodies:
        response = await client.post(GENERATE, content=body)
        assert response.status_code == 400 and response.json()["error"]["message"], body[:100]
    response = await client.post(GENERATE, content=json.dumps({"token_ids": PROMPT, "sampling_params": {field: huge}}))
    assert response.status_code in (200, 400, 429), (field, huge, response.text)
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 5000}]})
    assert response.status_code == 400 and "maximum context length" in response.text
    response = control.post("/update_weights", json={"weight_dir": str(other)})
    assert response.status_code == 400 and "publish weights of that model" in response.text
    response = control.post("/update_weights", json={"weight_dir": "/nowhere", "version": None})
    assert response.status_code == 500 and "keep serving" in response.text
    assert (await client.get("/" + "x" * rng.randrange(100))).status_code == 404


def hang_up(sock, rng):
    """Closes a socket, in order or by reset."""
    if rng.random() < 0.5:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def disconnects(host, port, rng, half_open):
    """A client that disconnects at every stage; some stay connected and send nothing."""
    whole = request_bytes(GENERATE, LONG)
    stages = [b"", b"POS", whole[:40], whole[:-10], request_bytes(GENERATE, b"{", 10**6), whole]
    for sent in (*stages, request_bytes(CHAT, STREAM)):
        sock = socket.create_connection((host, port), timeout=30)
        sock.sendall(sent)
        time.sleep(rng.random() * 0.05)
        if len(half_open) < 200 and rng.random() < 0.2:
            half_open.append(sock)
        else:
            hang_up(sock, rng)
    slow = socket.create_connection((host, port), timeout=30)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    slow.sendall(request_bytes(CHAT, STREAM))
    slow.recv(10)  # and no more
    half_open.append(slow)


async def flood(host, port, count):
    """More concurrent requests than the queue takes: each gets a reply, with a sample or with 429; returns how many with 429.

    By bare sockets: httpx's pool takes time quadratic in the number of requests.
    """
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    sent = request_bytes(GENERATE, json.dumps(body).encode()).replace(b"host: x", b"host: x\r\nconnection: close")
    room = asyncio.Semaphore(700)

    async def one():
        async with room:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            return answer

    answers = await asyncio.gather(*(one() for _ in range(count)))
    codes = [int(answer[9:12]) for answer in answers]
    assert set(codes) <= {200, 429} and 200 in codes, set(codes)
    assert all(b"retry-after" in answer for answer in answers if answer[9:12] == b"429")
    return codes.count(429)


async def settled(client):
    deadline = time.monotonic() + 120
    while True:
        health = (await client.get("/health")).json()
        if health["running"] == health["pending"] == 0:
            return health
        assert time.monotonic() < deadline, health
        await asyncio.sleep(0.2)


def test_abuse(server):
    process, host, port, control, other = server
    rng, half_open = random.Random(0), []

    async def main():
        timeout = httpx.Timeout(300, pool=None)
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=timeout, headers=JSON) as client:
            sampling = {"seed": 1, "max_tokens": 20, "ignore_eos": True}
            normal = {"token_ids": PROMPT, "sampling_params": sampling}
            before = (await client.post(GENERATE, json=normal)).json()["choices"]
            num_refused = await flood(host, port, 2000)  # once, because the allocator keeps some memory
            await settled(client)
            memory, deadline, rounds = resident_bytes(process.pid), time.monotonic() + ABUSE_S, 0
            while time.monotonic() < deadline:
                await refusals(client, rng, control, other)
                await asyncio.to_thread(disconnects, host, port, rng, half_open)
                while len(half_open) > 150:
                    hang_up(half_open.pop(0), rng)
                rounds += 1
            num_refused += await flood(host, port, 10_000)
            assert num_refused > 0
            for sock in half_open:
                sock.close()
            health = await settled(client)
            after = (await client.post(GENERATE, json=normal)).json()["choices"]
            assert after == before and health["stats"]["faults"] == 0
            grown = resident_bytes(process.pid) - memory
            print(f"{rounds} rounds, {num_refused} refused by 429, memory grew by {grown / 2**20:.1f} MiB, {health}")
            # 64 MiB: memory that malloc keeps of 800 connections and their bodies; a leak of one request's kilobytes per
            # request would be several times that within ten minutes
            assert grown < 64 * 2**20
        await asyncio.sleep(1)
        return open_files(process.pid)

    files = asyncio.run(main())
    assert files < 200, f"{files} files are open after every client has left"
    assert process.poll() is None
