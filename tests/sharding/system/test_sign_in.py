"""A refused sign-in is reported in plain words, and one at another program is an error that it survives."""

import concurrent.futures
import socket

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.system import sign_in


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "key ab is not in topology.server_keys"}}', "key ab is not in topology.server_keys"),
        (b"<html>", "status 404, which is not the reply of an orchestrator; check the URL"),
        (b'{"error": "x"}', "status 404, which is not the reply of an orchestrator; check the URL"),
    ],
)
def test_a_refused_sign_in_is_told_in_plain_words(body, message):
    assert sign_in._refusal(404, body) == message


NO_HTTP = (b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 " + b"a" * 70_000, b"HTTP/1.1 200 x\r\n\r\n" + b"[" * 500_000)


@pytest.mark.parametrize("reply", [*NO_HTTP, b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\nno"], ids=range(4))
def test_a_reply_of_another_program_is_an_error_that_sign_ins_survive(reply):
    with socket.create_server(("127.0.0.1", 0)) as listener, concurrent.futures.ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        asked = pool.submit(sign_in.Orchestrator(url, ed25519.Ed25519PrivateKey.generate()).ask, "/nodes")
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(reply)
        assert isinstance(asked.exception(10), OSError | ValueError)
