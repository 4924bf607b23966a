"""Status lines show rates, and a wait once; errors of sign-ins are in plain words."""

import socket
import threading
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.system import sign_in, status_line


def test_lines_have_rates_and_a_wait_is_told_rarely(capsys):
    counts = {"groups": 0}
    with status_line.printed(lambda: (dict(counts), "a group" if counts["groups"] else ""), 0.05):
        time.sleep(0.3)
        counts["groups"] = 5000
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "groups 0 (0.0/s)" and 3 <= len(lines) <= 8
    assert lines[-1] == "groups 5,000 (0.0/s); waiting for a group"
    assert status_line.line({"tokens": 30.0}, {"tokens": 10.0}, 2.0, "") == "tokens 30 (10.0/s)"


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


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 " + b"a" * 70_000,
        b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 500_000,
    ],
    ids="banner long chunk deep".split(),
)
def test_a_reply_of_another_program_ends_no_sign_in(monkeypatch, reply):
    monkeypatch.setattr(sign_in, "FIRST_PAUSE_S", 0.01)
    said, asked = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while len(asked) < 3:
                connection, _ = listener.accept()
                with connection:
                    asked.append(connection.recv(65536))
                    connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        node = sign_in.SignIn(url, ed25519.Ed25519PrivateKey.generate(), "relay", dict, on_notice=said.append).start()
        thread.join(10)
        assert len(asked) == 3 and "not signed in" in said[0]
    node.stop()
