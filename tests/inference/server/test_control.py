"""The control plane under attack: a real server with a key, a token and signed weights, and an attacker who has the API key.

Each attack that worked when control and data shared a listener is here, with the one that comes next.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import types

import grpc
import httpx
import jax
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference import serve
from inference.engine import weights as weights_lib
from inference.server import guard, inference_server, web
from models import hf, transformer
from sharding.system import sockets
from sharding.weights import broadcast
from sharding.weights.download import source
from tests.support import proxy, serving, tiny

MODEL = tiny.model()
API_KEY, TOKEN = "a-worker-has-this", "only-the-operator-has-this"
GENERATE = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
KEY, OTHER_KEY = (ed25519.Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2))


def publish(root, version, key=KEY, seed=None):
    options = broadcast.PublishOptions(key=key)
    metadata = {"model": dataclasses.asdict(MODEL), "tokenizer": "byte_chatml"}
    broadcast.publish(
        tiny.params(MODEL, version if seed is None else seed), version, str(root), options, metadata=metadata
    )
    return str(root)


@dataclasses.dataclass
class Server:
    """The process, its folder of weights, and its addresses."""

    pid: int
    folder: str
    data: str
    control: str
    grpc: str

    def post(self, path, body=None, *, headers=None, url=None, **options):
        """Posts JSON to the control listener, as the operator does."""
        headers = {"authorization": f"Bearer {TOKEN}"} | (headers or {})
        if body is not None:
            options = {"content": json.dumps(body)} | options
            headers = {"content-type": "application/json"} | headers
        headers = {name: value for name, value in headers.items() if value is not None}
        return httpx.post((url or self.control) + path, headers=headers, timeout=60, **options)

    def cpu_s(self):
        """Returns the CPU time of the process, in whole seconds: a time by the clock is not that of the server alone."""
        *_, minutes, seconds = re.split(
            "[-:]", subprocess.check_output(["ps", "-o", "time=", "-p", str(self.pid)], text=True)
        )
        return 60 * int(minutes) + float(seconds)

    def update(self, **body):
        return self.post("/update_weights", body)

    def health(self):
        return httpx.get(f"{self.data}/health", timeout=60).json()


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server on versions 0 and 1 of a signed broadcast; `allowed` may hold further weights."""
    folder = tmp_path_factory.mktemp("control")
    publish(folder / "weights", 0)
    shutil.copytree(folder / "weights", folder / "allowed" / "old")
    publish(folder / "weights", 1)
    command = ["inference.serve", "--weights", folder / "weights", "--weights_key", proxy.public(KEY)]
    command += ["--api_key_file", write(folder / "api_key", API_KEY), "--port", 0, "--grpc_port", 0]
    command += ["--control", "127.0.0.1:0", "--control_token_file", write(folder / "token", TOKEN)]
    command += ["--control_hosts", "box.example", "--weights_allow", folder / "allowed", "http://127.0.0.1:80/weights"]
    command += ["--num_slots", 2, "--prefill_batch", 1, "--max_model_len", 32, "--steps_per_call", 4]
    with serving.child(folder, *command) as (process, data):
        found = re.search(r"control routes on (\S+)\n.*Decode on (\S+)\n", (folder / "output").read_text())
        yield Server(process.pid, str(folder), data, *found.groups())
        assert process.poll() is None


def refusal(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


# ---- who may change a server -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/update_weights", "/pause", "/resume", "/load_lora_adapter"])
@pytest.mark.parametrize("token", [API_KEY, TOKEN])
def test_the_data_listener_has_no_control_routes(server, path, token):
    """Neither a worker's key nor the operator's token helps there, and the reply names the right listener."""
    reply = server.post(path, {}, url=server.data, headers={"authorization": f"Bearer {token}"})
    if token == API_KEY:
        assert "on the control listener, which --control sets" in refusal(reply, 404)
    else:
        assert "API key is missing or wrong" in refusal(reply, 401)
    assert not server.health()["paused"] and server.health()["policy_version"] == 1


@pytest.mark.parametrize(
    "target", ["//pause", "/./pause", "/%70ause", "/pause/", "/x/../pause", "http://{host}/pause", "/v1/../pause?"]
)
def test_no_spelling_of_a_control_route_works_on_the_data_listener(server, target):
    host = server.data.removeprefix("http://")
    head = f"POST {target.format(host=host)} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {API_KEY}\r\n"
    assert exchange(server.data, f"{head}connection: close\r\n\r\n".encode()).startswith(b"HTTP/1.1 404 ")
    assert not server.health()["paused"]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"authorization": None}, 401, "the control token is missing or wrong"),
        ({"authorization": f"Bearer {API_KEY}"}, 401, "missing or wrong"),
        ({"authorization": f"Bearer {TOKEN[:-1]}"}, 401, "missing or wrong"),
        ({"authorization": f"Bearer {TOKEN}!"}, 401, "missing or wrong"),
        ({"authorization": f"Basic {TOKEN}"}, 401, "missing or wrong"),
        ({"authorization": "Bearer \xff"}, 401, "missing or wrong"),
        ({"content-type": "text/plain"}, 415, "Content-Type is not application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "Content-Type is not application/json"),
        ({"content-type": None}, 415, "Content-Type is not application/json"),
        ({"content-type": "text/plain; a=application/json"}, 415, "Content-Type is not application/json"),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200, ""),
        ({"origin": "http://evil.example"}, 403, "browser pages"),
        ({"origin": "null"}, 403, "browser pages"),
        ({"host": "evil.example"}, 403, "Host header"),
        ({"host": "127.0.0.1.evil.example:80"}, 403, "Host header"),
        ({"host": "[::1"}, 403, "Host header"),
        ({"host": "evil.example@localhost"}, 403, "Host header"),
        ({"host": "localhost/evil.example"}, 403, "Host header"),
        ({"host": "[::1]:80"}, 200, ""),
        ({"host": "LocalHost:9"}, 200, ""),
        ({"host": "box.example"}, 200, ""),
    ],
)
def test_a_control_request_that_a_browser_page_or_a_worker_can_send(server, change, status, words):
    change = {name: value if value is None else value.encode("latin-1") for name, value in change.items()}
    reply = server.post("/update_weights", {"version": 1}, headers=change)
    assert reply.status_code == status and words in reply.text, reply.text


@pytest.mark.parametrize("sent", [{"origin": "http://evil.example"}, {"content-type": "text/plain"}, iter(())])
def test_a_form_without_a_body_or_a_type_pauses_nothing(server, sent):
    options = {"headers": sent} if isinstance(sent, dict) else {"content": sent}  # in chunks
    assert server.post("/pause", **options).status_code in (403, 415)
    assert not server.health()["paused"]


def test_the_operator_pauses_as_prime_rl_does(server):
    """No body and no content type; the parameters are in the query."""
    assert server.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert server.health()["paused"]
    assert server.post("/resume").json() == {"status": "resumed"} and not server.health()["paused"]
    assert httpx.get(f"{server.control}/v1/models", headers={"authorization": f"Bearer {TOKEN}"}).json()["data"]
    assert (
        httpx.get(f"{server.control}/metrics").status_code == 401 and httpx.get(f"{server.control}/health").is_success
    )


def test_a_page_without_a_key_cannot_post_to_a_local_server(server):
    """The data listener of a server without a key refuses text/plain, and Origin, which every page sends."""
    calls = []

    async def app(scope, receive, send):
        calls.append(scope["path"])
        await web.error(200, "", "")(scope, receive, send)

    def ask(*headers, method="POST"):
        return serving.asker(guard.Guard(app))(method, "/", headers=[*headers], content=b"{}").status_code

    json_type, text = ("content-type", "application/json"), ("content-type", "text/plain")
    assert ask(text) == ask(json_type, text) == ask(text, json_type) == 415
    assert ask(("origin", "http://evil.example")) == 403 and not calls
    assert ask() == ask(method="GET") == 200  # a proxy that adds TLS may hand on any Host header
    reply = server.post(
        "/inference/v1/generate", GENERATE, url=server.data, headers={"authorization": f"Bearer {API_KEY}"}
    )
    assert reply.status_code == 200
    page = {"authorization": f"Bearer {API_KEY}", "origin": "http://chat.example"}  # a page that was given the key
    assert server.post("/inference/v1/generate", GENERATE, url=server.data, headers=page).status_code == 200


def exchange(url, sent: bytes) -> bytes:
    """Returns all bytes that a server replies until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(sent)
        return b"".join(iter(lambda: sock.recv(2**16), b""))


@pytest.mark.parametrize("listener", ["data", "control"])
def test_a_request_with_two_lengths_smuggles_nothing(server, listener):
    """The first is refused and its connection closed, so that the hidden second one is never read."""
    key = {"data": API_KEY, "control": TOKEN}[listener]
    hidden = f"POST /pause HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    body = f"content-length: {len(hidden) + 5}\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"
    replies = exchange(getattr(server, listener), (head + body).encode())
    assert replies.startswith(b"HTTP/1.1 400 ") and b"Content-Length and Transfer-Encoding" in replies
    assert replies.count(b"HTTP/1.1 ") == 1 and not server.health()["paused"]
    for fold in ("POST /pause HTTP/1.1\r\n content-length: 9\r\nhost: localhost", f"{head}content-length: 0\r\n 9"):
        assert exchange(getattr(server, listener), f"{fold}\r\n\r\n".encode()).startswith(b"HTTP/1.1 400 ")


def test_an_upgrade_does_not_slip_past_the_guard(server):
    head = "GET /pause HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, close\r\nupgrade: websocket\r\n"
    head += "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    assert exchange(server.control, head.encode()).startswith(b"HTTP/1.1 401 ")
    assert not server.health()["paused"]


def test_jetstreams_decode_needs_the_api_key(server):
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    request = jetstream_pb2.DecodeRequest(token_content={"token_ids": [1, 2]}, max_tokens=2)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=60).is_live
        for metadata in (
            (),
            (("authorization", f"Bearer {TOKEN}"),),
            (("authorization", API_KEY),),
            (("authorization-bin", b"\xff"),),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Decode(request, metadata=metadata, timeout=60))
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert list(stub.Decode(request, metadata=[("authorization", f"Bearer {API_KEY}")], timeout=60))


# ---- which weights it takes ------------------------------------------------------------------------------------------


def test_a_signed_server_takes_no_folder_and_no_stamped_number(server):
    allowed = f"{server.folder}/allowed"
    zeros = jax.tree.map(np.zeros_like, tiny.params(MODEL, 0))
    hf.save(f"{allowed}/model", MODEL, zeros)
    assert "has no signature" in refusal(server.update(weight_dir=f"{allowed}/model", version=77), 400)
    unsigned, foreign = publish(f"{allowed}/unsigned", 5, None), publish(f"{allowed}/foreign", 5, OTHER_KEY)
    for root in (unsigned, foreign):
        assert "sign" in refusal(server.update(weight_dir=root), 500)
    mirror = shutil.copytree(f"{server.folder}/weights", f"{allowed}/mirror")
    assert "no version 77" in refusal(server.update(weight_dir=mirror, version=77), 500)
    message = refusal(server.update(weight_dir=f"{mirror}/v00000001", version=77), 400)
    assert "weight_dir is version 1, not 77" in message
    os.rename(f"{mirror}/v00000001", f"{mirror}/v00000077")
    assert "version 77 is not in the signed head" in refusal(server.update(weight_dir=f"{mirror}/v00000077"), 500)
    assert server.health()["policy_version"] == 1


def test_an_older_version_needs_the_operators_word(server):
    assert "version 0 is older than version 1, which is in use" in refusal(server.update(version=0), 400)
    assert "rollback" in refusal(server.update(version=0, rollback="yes"), 400)
    assert "version 1 is of epoch 0, not 7" in refusal(
        server.update(weight_dir=f"{server.folder}/weights", version=1, epoch=7), 400
    )
    old = f"{server.folder}/allowed/old"  # signed, as a relay has it that conceals version 1
    assert "older than epoch 0, version 1" in refusal(server.update(weight_dir=old), 500)
    twin = publish(f"{server.folder}/allowed/twin", 1, seed=9)  # signed by the same key, too
    assert "two manifests of version 1 of epoch 0" in refusal(server.update(weight_dir=twin), 500)
    hidden = f"{server.folder}/weights/v00000001"
    os.rename(hidden, f"{server.folder}/hidden")  # a root that conceals its newest version
    try:
        assert server.update().json()["version"] == 1
    finally:
        os.rename(f"{server.folder}/hidden", hidden)
    assert server.update(version=0, rollback=True).json()["version"] == 0
    assert server.update(version=1).json()["version"] == 1


def test_without_a_key_numbers_alone_decide(tmp_path, monkeypatch):
    """A resumed run names the epoch of its versions, which no signature confirms to a server without --weights_key."""
    monkeypatch.setattr(weights_lib, "RELAY_LAG_S", 0.1)
    scheduler = types.SimpleNamespace(
        version=1, update=lambda _, version, epoch: types.SimpleNamespace(result=lambda: version)
    )
    store = types.SimpleNamespace(load_shardings=None, lora=None, plain_specs=transformer.specs(MODEL))
    weights = source.open(publish(tmp_path, 2))
    server = inference_server.InferenceServer(weights, scheduler, types.SimpleNamespace(model=MODEL), store)
    assert server.update(2, epoch=7) == server.have.version == 2
    manifest = (tmp_path / "v00000002" / "manifest.json").read_bytes()
    assert server.policy_digest == hashlib.sha256(manifest).hexdigest()
    with pytest.raises(
        TimeoutError, match="version 2 under .* is of epoch 0, manifest .*, not of epoch any, manifest aaaa"
    ):
        server.update(2, digest="a" * 64)
    with pytest.raises(TimeoutError, match="not of epoch 7"):  # the digest proves which manifest is meant
        server.update(2, epoch=7, digest=server.policy_digest)
    assert server.update(2, epoch=0, digest=server.policy_digest) == scheduler.version  # it is in use
    read = broadcast.read_manifest

    def publish_again(seed):
        broadcast.remove(tmp_path, 3)
        publish(tmp_path, 3, seed=seed)

    monkeypatch.setattr(broadcast, "read_manifest", lambda *a, **options: (read(*a, **options), publish_again(9))[0])
    manifest = pathlib.Path(publish(tmp_path, 3), "v00000003", "manifest.json").read_bytes()
    with pytest.raises(FileNotFoundError, match="version 3 .* is of epoch"):
        server.update(3, digest=hashlib.sha256(manifest).hexdigest())
    monkeypatch.setattr(broadcast, "read_manifest", read)
    assert server.update(3) == 3
    publish_again(10)
    with pytest.raises(ValueError, match="version 3 has other weights than version 3"):
        server.update(3)


def test_no_request_leaves_the_server_for_an_address_that_is_not_allowed(server):
    """The allowed prefix is http://127.0.0.1:80/weights; a listener counts the connections to another port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        port = listener.getsockname()[1]
        at = f"127.0.0.1:{port}"
        for url in (
            f"http://{at}/weights",
            f"http://127.0.0.1:80@{at}/weights",
            f"HTTP://{at}/weights",
            f"http://{at}/#http://127.0.0.1:80/weights",
            f"http://127.0.0.1:80/weights/../..//{at}",
            f"http://127.0.0.1:80/weights/%2e%2e/%2e%2e//{at}",
            f"http://127.0.0.1:80\\@{at}/weights",
            f"s3://bucket/weights?endpoint=http://{at}",
            f"file://{server.folder}/weights",
        ):
            assert re.search("not one of|not a plain URL", refusal(server.update(weight_dir=url), 400))
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize(
    "path",
    ["", "\0", "x" * 5000, *"/etc/passwd ../../.. {0} {0}/allowed/../token {0}/allowed-too {0}/allowed/out ~".split()],
)
def test_a_path_that_is_not_allowed_says_nothing_about_files(server, path):
    """The message is the same whether the path exists or not."""
    with contextlib.suppress(FileExistsError):
        os.symlink(server.folder, f"{server.folder}/allowed/out")
    message = refusal(server.update(weight_dir=path.format(server.folder)), 400)
    assert "is not one of this server's sources" in message or "is not a path" in message


def test_an_allow_list_compares_whole_parts():
    sources = "/srv/a http://host:1/w http://user:secret@host/w gs://bucket".split()
    for good in "/srv/a /srv/a/b http://host:1/w http://host:1/w/ http://host:1/w/x gs://bucket/x".split():
        assert inference_server.checked_source(good, sources) == good
    for bad in "/srv/ab /srv http://host:1/ http://host:1/ww http://host:10/w http://host/w gs://bucket-2/x".split():
        with pytest.raises(ValueError, match="not one of this server's sources"):
            inference_server.checked_source(bad, sources)


# ---- the listener, its token, and who has it -------------------------------------------------------------------------


def test_a_listener_without_a_token_is_a_private_socket(tmp_path, monkeypatch, capsys):
    with guard.control_listener("", None, ()) as listener:
        path = sockets.address(listener.sock).removeprefix("unix:")
        modes = [stat.S_IMODE(os.stat(name).st_mode) for name in (path, os.path.dirname(path))]
        assert modes == [0o600, 0o700] and listener.token is None and listener.hosts is None
        with pytest.raises(ValueError, match="Address already in use; choose a new, short path"):
            sockets.listen_unix(path)
    assert not os.path.exists(os.path.dirname(path))
    monkeypatch.chdir(tmp_path)
    with guard.control_listener("8200", None, ()) as listener:  # a path: nothing listens on all addresses
        assert sockets.address(listener.sock) == "unix:8200"
    assert not os.path.exists("8200")
    for control, hosts in ((str(tmp_path / "socket"), None), ("localhost:0", {"localhost", "box"})):
        with guard.control_listener(control, str(tmp_path / "t"), ["box"]) as listener:
            assert (listener.token, listener.hosts) == ((tmp_path / "t").read_text().strip(), hosts)
    for control in ("127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "localhost:0"):
        assert serve.main(["--model", "nowhere", "--port", "0", "--control", control]) == 1
        assert "has no token; add --control_token_file FILE" in capsys.readouterr().err
    assert serve.main(["--model", "nowhere", "--control", ":8101", "--control_token_file", str(tmp_path / "t")]) == 1
    assert "--control :8101 names no host; write 127.0.0.1:8101" in capsys.readouterr().err
    with pytest.raises(ValueError, match="AF_UNIX path too long; choose a new, short path"):
        sockets.listen_unix(tmp_path / ("x" * 120))


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_a_logit_bias_of_500000_entries_is_refused_by_its_length(server):
    bias = dict.fromkeys(map(str, range(500_000)), "x")
    body = GENERATE | {"sampling_params": {"logit_bias": bias}}
    begun_s = server.cpu_s()
    reply = server.post("/inference/v1/generate", body, url=server.data, headers={"authorization": f"Bearer {API_KEY}"})
    assert "500000 logit_bias entries given; at most 300" in refusal(reply, 400)
    assert server.cpu_s() - begun_s < 5  # 8 s of pydantic's errors before
