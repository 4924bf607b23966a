"""Asks the orchestrator of a run by signed requests, and signs servers, relays, and validators in by heartbeats. Imports no jax.

1. `GET /run` names the run and the session of its orchestrator, signed by the run's key.
2. Each heartbeat reports the state of this node; the signed reply names the newest policy and the interval.
3. An orchestrator that is away or was started again is asked forever, with growing pauses: a node outlives its learner.
"""

import contextlib
import dataclasses
import http.client
import json
import math
import random
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.system import cli, retries, signed_message, sockets
from sharding.system import text as text_lib

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 2**24  # a row of 10,000 nodes takes 400 bytes
MAX_PROBLEM = 500  # characters
MAX_REFUSAL = 2000  # bytes
REPEAT_S = 60.0  # between two notices of the same problem
_FAILURES = (OSError, ValueError, OverflowError, KeyError, TypeError)  # of a heartbeat
ENDED = "the run ended; this node waits in case it goes on, until Ctrl-C"


class Orchestrator:
    """A client that signs its requests to an orchestrator. `run` is the run's public key in hex; "": the run that signs the first reply."""

    def __init__(self, url: str, private: ed25519.Ed25519PrivateKey, run: str = "", *, timeout_s: float = TIMEOUT_S):
        self.url, self._private, self.run, self._session = url.rstrip("/"), private, run, ""
        self._timeout_s = timeout_s

    def ask(self, path: str, **fields: Any) -> dict:
        """Returns the reply to a signed request. Raises ValueError or OSError if it is refused, unsigned, or missing."""
        try:
            if not self._session:
                nonce = secrets.token_hex(16)
                reply = self._post(f"/run?nonce={nonce}")
                self.run, self._session, _ = signed_message.open_session(reply, nonce, self.run)
            message = signed_message.request(self._private, self.run, self._session, **fields)
            reply = self._post(path, message)
            signed_message.check_reply(self.run, reply, message)
            return reply
        except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:  # away, or started again
            self._session = ""
            if isinstance(error, OSError | ValueError):
                raise
            raise OSError(f"its reply is not JSON over HTTP: {str(error)[:80]!r}") from error

    def _post(self, path: str, message: dict | None = None) -> dict:
        data = None if message is None else json.dumps(message).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                body = json.loads(response.read(MAX_REPLY_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(_refusal(error.code, error.read(MAX_REFUSAL))) from error
        except urllib.error.URLError as error:
            raise OSError(str(error.reason)) from error
        if not isinstance(body, dict):
            raise ValueError(f"it sent {str(body)[:80]!r}, which is not the reply of an orchestrator")
        return body


@dataclasses.dataclass
class SignIn:
    """Heartbeats of one node during a `with` block. Raises ValueError if `orchestrator` is not a URL."""

    orchestrator: str  # its URL
    private: ed25519.Ed25519PrivateKey  # of this node
    role: str  # "server", "relay", or "validator"
    report: Callable[[], dict[str, Any]]  # returns the fields of a report that are not empty (rl/protocol/registry.py)
    _: dataclasses.KW_ONLY
    run: str = ""  # its public key in hex; "": that of the first reply
    on_reply: Callable[[dict], None] = lambda reply: None
    on_notice: Callable[[str], None] = cli.note  # for people: the orchestrator is lost, or found again

    def __post_init__(self) -> None:
        if not sockets.is_url(self.orchestrator):
            raise ValueError(f"--orchestrator {self.orchestrator!r} is not a URL; write http://HOST:PORT")
        self._orchestrator = Orchestrator(self.orchestrator, self.private, self.run)
        self._is_stopping, self._is_due = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="sign-in", daemon=True)

    def __enter__(self) -> "SignIn":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        """Sends a last heartbeat, by which the node leaves. The thread ends after its request, which may wait for news."""
        self._is_stopping.set()
        self._is_due.set()
        self._leave()

    def beat_now(self) -> None:
        """Sends the next heartbeat without delay: this node changed."""
        self._is_due.set()

    def _leave(self) -> None:
        with contextlib.suppress(*_FAILURES):
            self._beat(leaving=True)

    def _beat(self, *, leaving: bool = False) -> dict:
        report = {"url": "", "policy": None, "load": {}, "problem": ""} | self.report()
        report["problem"] = one_line(report["problem"])
        fields = {"role": self.role, "report": report, "holding": [], "leaving": leaving, "work": ""}
        return self._orchestrator.ask("/heartbeat", **fields)

    def _work(self) -> None:
        problem, url, noticed_s = "", self._orchestrator.url, 0.0
        pauses = retries.Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while not self._is_stopping.is_set():
            self._is_due.clear()
            begun_s = time.monotonic()
            try:
                reply = self._beat()
                if self._is_stopping.is_set():
                    break
                self.run = self._orchestrator.run
                wait_s = float(reply["interval_s"])
                pauses.reset()
                if not 0 < wait_s < math.inf:
                    raise ValueError(f"the reply has interval_s = {wait_s}")
                wait_s -= time.monotonic() - begun_s  # a reply to a server may wait for news
                news = ENDED if reply.get("ended") else ""
                if problem != news:
                    self.on_notice(news or f"signed in at {url}")
                problem = news
                self.on_reply(reply)
            except _FAILURES as error:  # it is away, or no orchestrator
                before, problem = problem, ENDED if problem == ENDED else str(error) or type(error).__name__
                is_due = problem != before or begun_s - noticed_s > REPEAT_S
                if is_due and problem != ENDED and not self._is_stopping.is_set():
                    noticed_s = begun_s
                    self.on_notice(f"not signed in at {url}: {problem}; it is asked again until it replies")
                wait_s = pauses.next_s()
            self._is_due.wait(max(0.0, min(wait_s, MAX_PAUSE_S)) * random.uniform(0.8, 1.0))
        self._leave()  # again: a heartbeat of this loop may have come after that of `__exit__`


def _refusal(status: int, body: bytes) -> str:
    """Returns the message of an error reply: that of an orchestrator, or the status if another program replied."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}, which is not the reply of an orchestrator; check the URL"


def one_line(problem: str) -> str:
    """Returns an error as a report may have it: short, with its remedy, which is at the end, and without control characters."""
    if len(problem) > MAX_PROBLEM:
        problem = f"{problem[:250]} ... {problem[5 + 250 - MAX_PROBLEM :]}"
    return text_lib.printable(problem, " ")
