"""The session of a worker with an orchestrator over HTTP: signed requests, which are repeated until it replies. Imports no jax."""

import asyncio
import dataclasses
import hashlib
import json
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

from inference import client as client_lib
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease, registry

NOTICE_S = 5.0  # of an unreachable orchestrator, until a notice is printed
OVERTAKEN_S = 5.0  # for which a request is signed again that a later one has overtaken
CHANGING = ("step", "policy", "servers", "server_keys")  # fields of a run's description that change while it is on


@dataclasses.dataclass(frozen=True)
class SignedSession:
    """Signed requests of one worker to one session of an orchestrator. Replies to `lease` and `beat` are signed by the run."""

    http: httpx.AsyncClient
    key: rollout_lib.WorkerKey
    session: lease.Session
    work: str
    give_up_s: float
    begun_us: int = 0  # the start of this process: leases of an earlier one of the same key are taken back

    async def lease(self, capacity: int, returned: list | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """Returns the reply with the leased `groups`, after up to `wait_s` if there are none. Raises the errors of `exchange`."""
        fields = {"capacity": capacity, "returned": returned or [], "wait_s": wait_s, "begun_us": self.begun_us}
        return await self._ask("/lease", **fields)

    async def beat(self, report: registry.Report, holding: list, *, leaving: bool = False) -> dict[str, Any]:
        """Returns the reply to a heartbeat, which renews the leases of the groups in `holding`. Raises the errors of `exchange`."""
        fields = {"role": "worker", "report": report.to_json(), "holding": holding, "leaving": leaving}
        return await self._ask("/heartbeat", **fields)

    async def submit(self, body: bytes) -> dict[str, str]:
        """Submits a file of rollouts; returns the verdict per group."""
        digest = hashlib.sha256(body).hexdigest()

        def make_body():
            header = json.dumps(lease.request(self.key, self.session, digest=digest))
            return {"content": body, "headers": {lease.HEADER: header}}

        return (await exchange(self.http, "/submit", self.give_up_s, make_body))["verdicts"]

    async def _ask(self, path: str, **fields) -> dict[str, Any]:
        sent, timeout = {}, httpx.Timeout(60.0, read=60.0 + fields.get("wait_s", 0.0))

        def make_body():
            sent.update(lease.request(self.key, self.session, work=self.work, **fields))
            return {"json": sent, "timeout": timeout}

        reply = await exchange(self.http, path, self.give_up_s, make_body)
        if not lease.is_signed(self.session.run, reply) or reply.get("request") != sent["signature"]:
            raise ValueError(f"the reply to {path} is not signed by run {self.session.run}; correct --orchestrator")
        return reply


async def open_session(http: httpx.AsyncClient, trusted: str | None, give_up_s: float) -> tuple[lease.Session, dict]:
    """Fetches /run; returns the session and the description of the run. Raises ValueError if another run than `trusted` answers."""
    nonce = secrets.token_hex(16)
    body = await exchange(http, f"/run?nonce={nonce}", give_up_s)
    try:
        session, description = lease.Session(body["id"], body["session"]), {**body["run"]}
        is_valid = body["nonce"] == nonce and lease.is_signed(session.run, body)
    except (KeyError, TypeError) as error:
        raise not_an_orchestrator(body) from error
    if trusted not in (None, session.run):
        raise ValueError(f"{http.base_url} serves run {session.run}, and --run is {trusted}; correct one of them")
    if not is_valid:
        raise ValueError(
            f"the reply to GET /run is not signed by run {session.run} for this request; correct --orchestrator"
        )
    return session, description


def not_an_orchestrator(body: object) -> ValueError:
    """Returns the error about a reply to GET /run of another kind of server."""
    found = f"GET /run returned {str(body)[:200]}, which is not the reply of an orchestrator"
    return ValueError(f"{found}; correct --orchestrator")


async def exchange(http: httpx.AsyncClient, path: str, give_up_s: float, make_body: Callable[[], dict] = dict) -> dict:
    """Sends a GET request, or a POST request with a body, until the orchestrator replies; returns the JSON of the reply.

    `make_body` returns the arguments of httpx for the body of each attempt. Raises ValueError if the orchestrator rejects the
    request, StaleSession if it was restarted, and ConnectionError if it does not reply for `give_up_s` seconds.
    """
    begun, is_noticed = time.monotonic(), False
    while True:
        try:
            body = make_body()
            response = await http.request("POST" if body else "GET", path, **body)
            if response.status_code == 409:
                raise lease.StaleSession(client_lib.error_message(response))
            if response.status_code == 400 and _is_replay(response) and time.monotonic() - begun < OVERTAKEN_S:
                await asyncio.sleep(0.02)  # another request of this worker overtook it
                continue
            if response.status_code == 400:
                raise ValueError(
                    f"the orchestrator rejected {path.partition('?')[0]}: {client_lib.error_message(response)}"
                )
            response.raise_for_status()
            return response.json()
        except httpx.HTTPError as error:
            waited, reason = time.monotonic() - begun, str(error) or type(error).__name__
            if waited > give_up_s:
                raise ConnectionError(
                    f"no reply from the orchestrator at {http.base_url} for {waited:.0f} s: {reason}; check that it runs"
                ) from error
            if waited > NOTICE_S and not is_noticed:
                is_noticed = True
                note(f"waiting for the orchestrator at {http.base_url}: {reason}")
            await asyncio.sleep(0.5)


def _is_replay(response: httpx.Response) -> bool:
    try:
        return response.json()["error"]["type"] == "replayed"
    except (ValueError, KeyError, TypeError):
        return False


def note(line: str) -> None:
    """Prints a line for people."""
    print(line, file=sys.stderr, flush=True)
