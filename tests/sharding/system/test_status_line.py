"""Status lines show rates, and a wait once; errors of sign-ins are in plain words."""

import time

import pytest

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
