"""Signs a server, relay, or validator in at the orchestrator of a run, by heartbeats from a thread. Imports no jax.

1. `GET /run` names the run and the session of its orchestrator, signed by the run's key.
2. Each heartbeat reports the state of this node; the signed reply names the newest policy and the interval.
3. An orchestrator that is away or was started again is asked for ever, with growing pauses: a node outlives its learner.
"""

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

from sharding.system import signed_message, sockets

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 2**20
MAX_PROBLEM = 200  # characters


class SignIn:
    """Heartbeats of one node, from `start` until `stop`.

    Args:
      orchestrator: its URL.
      private: key of this node.
      role: "server", "relay", or "validator".
      report: returns the fields of a heartbeat's report that are not empty: "url", "policy", "load", "problem" (rl/protocol/registry.py).
      run: the public key of the run in hex; "": that of the first reply.
      on_reply: called with each reply.
      on_notice: called with lines for people, when the orchestrator is lost or found again.

    Raises ValueError if `orchestrator` is not a URL.
    """

    def __init__(
        self,
        orchestrator: str,
        private: ed25519.Ed25519PrivateKey,
        role: str,
        report: Callable[[], dict[str, Any]],
        *,
        run: str = "",
        on_reply: Callable[[dict], None] = lambda reply: None,
        on_notice: Callable[[str], None] = lambda line: None,
    ):
        if not sockets.is_url(orchestrator):
            raise ValueError(f"--orchestrator {orchestrator!r} is not a URL; write http://HOST:PORT")
        self._url, self._private, self._role, self._report = orchestrator.rstrip("/"), private, role, report
        self._run, self._on_reply, self._on_notice, self._session = run, on_reply, on_notice, ""
        self._key, self._last_us = private.public_key().public_bytes_raw().hex(), 0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sign-in", daemon=True)

    def start(self) -> "SignIn":
        """Starts the thread."""
        self._thread.start()
        return self

    def __enter__(self) -> "SignIn":
        return self.start()

    def __exit__(self, *exc) -> None:
        self.stop()

    def stop(self) -> None:
        """Sends a last heartbeat, by which the node leaves, and ends the thread."""
        self._is_stopping.set()
        self._thread.join(2 * TIMEOUT_S)

    def _work(self) -> None:
        pause_s, problem = FIRST_PAUSE_S, ""
        while True:
            is_last = self._is_stopping.is_set()
            try:
                reply = self._beat(is_last)
                wait_s, pause_s = float(reply["interval_s"]), FIRST_PAUSE_S
                if problem:
                    self._on_notice(f"signed in at {self._url} again")
                problem = ""
                self._on_reply(reply)
            except (OSError, ValueError, KeyError, TypeError) as error:  # it is away, or no orchestrator
                if not problem:
                    self._on_notice(f"not signed in at {self._url}: {error}; it is asked again")
                self._session, problem = "", str(error) or type(error).__name__
                wait_s, pause_s = pause_s, min(2 * pause_s, MAX_PAUSE_S)
            if is_last:
                return
            self._is_stopping.wait(min(wait_s, MAX_PAUSE_S) * random.uniform(0.8, 1.0))

    def _beat(self, leaving: bool) -> dict:
        """Returns the reply to a heartbeat. Raises ValueError or OSError if it is refused, unsigned, or missing."""
        if not self._session:
            self._open_session()
        self._last_us = max(self._last_us + 2, int(time.time() * 1e6))
        fields = {"run": self._run, "session": self._session, "worker": self._key, "time_us": self._last_us}
        fields |= {"role": self._role, "report": self._whole_report(), "holding": [], "leaving": leaving, "work": ""}
        message = signed_message.sign(self._private, fields)
        reply = self._ask("/heartbeat", message)
        if not signed_message.is_signed(self._run, reply) or reply.get("request") != message["signature"]:
            raise ValueError(f"the reply is not signed by run {self._run}; correct --orchestrator or --run")
        if not 0 < float(reply["interval_s"]) < math.inf:
            raise ValueError(f"the reply has interval_s = {reply['interval_s']}")
        return reply

    def _whole_report(self) -> dict[str, Any]:
        found = {"url": "", "policy": None, "load": {}, "problem": ""} | self._report()
        problem = "".join(c if c.isprintable() else " " for c in found["problem"][:MAX_PROBLEM])
        return found | {"problem": problem}

    def _open_session(self) -> None:
        nonce = secrets.token_hex(16)
        body = self._ask(f"/run?nonce={nonce}")
        if self._run not in ("", body["id"]):
            raise ValueError(f"it serves run {body['id']}, and --run is {self._run}; correct one of them")
        if body["nonce"] != nonce or not signed_message.is_signed(body["id"], body):
            raise ValueError(f"the reply to GET /run is not signed by run {body['id']}; correct --orchestrator")
        self._run, self._session = body["id"], body["session"]

    def _ask(self, path: str, message: dict | None = None) -> dict:
        data = None if message is None else json.dumps(message).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                body = json.loads(response.read(MAX_REPLY_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(error.read(500).decode(errors="replace")) from error
        if not isinstance(body, dict):
            raise ValueError(f"it sent {str(body)[:80]!r}, which is not the reply of an orchestrator")
        return body
