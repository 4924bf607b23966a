"""The session of a worker with an orchestrator over HTTP: signed requests, which are repeated until it replies. Imports no jax."""

import asyncio
import dataclasses
import hashlib
import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from inference import client as client_lib
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease, registry
from sharding.system import bounded_reply, cli, retries, sign_in, signed_message

FIRST_PAUSE_S, MAX_PAUSE_S, GROWTH = 0.5, 20.0, 1.5  # between attempts; each is up to half as long again
NOTICE_S = 5.0  # of an unreachable orchestrator, until a notice is printed
OVERTAKEN_S = 5.0  # for which a request is signed again that a later one has overtaken
NUMBER = (int, float)
CHANGING = ("step", "policy", "servers", "server_keys")  # fields of a run's description that change while it is on


class Connection:
    """The connection to an orchestrator. `problem` is the reason why it does not reply now, or ""."""

    def __init__(self, http: httpx.AsyncClient, give_up_s: float):
        self._http, self._give_up_s, self.problem = http, give_up_s, ""

    async def open_session(self, trusted: str | None) -> tuple[lease.Session, dict]:
        """Fetches /run; returns the session and the description of the run. Raises ValueError if another run than `trusted` answers."""
        nonce = secrets.token_hex(16)
        reply = await self.exchange(f"/run?nonce={nonce}")
        run, session, described = signed_message.open_session(reply, nonce, trusted or "")
        return lease.Session(run, session), described

    async def exchange(self, path: str, make_body: Callable[[], dict] = dict) -> dict:
        """Sends a GET request, or a POST request with a body, until the orchestrator replies; returns the JSON of the reply.

        `make_body` returns the arguments of httpx for the body of each attempt. Raises ValueError if the orchestrator rejects the
        request, StaleSession if it was restarted, and ConnectionError if it does not reply for `give_up_s` seconds.
        """
        begun, is_noticed = time.monotonic(), False
        since = time.strftime("%H:%M:%S")
        pause = retries.Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, GROWTH)  # so an outage costs at most as long again
        while True:
            try:
                body = make_body()
                method = "POST" if body else "GET"
                response = await bounded_reply.fetch(self._http, method, path, sign_in.MAX_REPLY_BYTES, **body)
                if response.status_code == 409:
                    raise lease.StaleSession(client_lib.error_message(response))
                if response.status_code == 400 and _is_replay(response) and time.monotonic() - begun < OVERTAKEN_S:
                    await asyncio.sleep(0.02)  # another request of this worker overtook it
                    continue
                if response.status_code == 400:
                    refused = f"the orchestrator rejected {path.partition('?')[0]}"
                    raise ValueError(f"{refused}: {client_lib.error_message(response)}")
                response.raise_for_status()
                reply = _json(response)
                self.problem = ""
                return reply
            except httpx.HTTPError as error:
                waited, reason = time.monotonic() - begun, _reason(error)
                waits = f"since {since}, for up to {self._give_up_s:g} s"
                self.problem = f"the orchestrator at {self._http.base_url}, {waits}: {reason}"
                if waited > self._give_up_s:
                    found = f"no reply from the orchestrator at {self._http.base_url} for {waited:.0f} s: {reason}"
                    raise ConnectionError(f"{found}; check the URL, and that the run is on") from error
                if waited > NOTICE_S and not is_noticed:
                    is_noticed = True
                    cli.note(f"waiting for {self.problem}; check the URL, and that the run is on")
                least_s = min(_retry_after_s(error), self._give_up_s)
                await asyncio.sleep(max(pause.next_s(), least_s) * random.uniform(1.0, 1.5))


@dataclasses.dataclass(frozen=True)
class SignedSession:
    """Signed requests of one worker to one session of an orchestrator. Replies are signed by the run.

    `begun_us` is the start of this process: leases of an earlier one of the same key are taken back.
    """

    connection: Connection
    key: rollout_lib.WorkerKey
    session: lease.Session
    work: str
    begun_us: int = 0
    env_digest: str = ""  # of this worker's environment, if the run has named one

    async def lease(self, capacity: int, returned: Sequence = (), wait_s: float = 0.0, **optional) -> dict:
        """Returns the reply with the leased `groups` (`lease.Lease`), after up to `wait_s` if there are none. Raises the errors of `exchange`.

        `holding` lists the keys of all groups that this worker holds. The orchestrator takes any other lease of the worker back,
        because the reply that granted it was lost. `problem` is the reason for `returned`.
        """
        fields = {"capacity": capacity, "returned": [*returned], "wait_s": wait_s, "begun_us": self.begun_us}
        fields |= {"env_digest": self.env_digest} if self.env_digest else {}
        reply = await self._ask_json("/lease", **fields, **optional)
        _check_form("lease", [reply], groups=list)
        return reply | {"groups": [lease.Lease.from_json(one) for one in reply["groups"]]}

    async def beat(self, report: registry.Report, holding: list, *, leaving: bool = False) -> dict[str, Any]:
        """Returns the reply to a heartbeat, which renews the leases of the groups in `holding`. Raises the errors of `exchange`."""
        fields = {"role": "worker", "report": dataclasses.asdict(report), "holding": holding, "leaving": leaving}
        reply = await self._ask_json("/heartbeat", **fields)
        _check_form("heartbeat", [reply], interval_s=NUMBER, void=list)
        return reply

    async def submit(self, body: bytes) -> dict[str, str]:
        """Submits a file of rollouts; returns the verdict per group. Raises the errors of `exchange`."""
        reply = await self._ask(
            "/submit",
            lambda sent: {"content": body, "headers": {lease.HEADER: json.dumps(sent)}},
            digest=hashlib.sha256(body).hexdigest(),
        )
        _check_form("submit", [reply], verdicts=dict)
        return reply["verdicts"]

    async def _ask_json(self, path: str, **fields) -> dict[str, Any]:
        timeout = httpx.Timeout(60.0, read=60.0 + fields.get("wait_s", 0.0))
        reply = await self._ask(path, lambda sent: {"json": sent, "timeout": timeout}, work=self.work, **fields)
        _check_form(path[1:], reply.get("servers", []), url=str)
        return reply

    async def _ask(self, path: str, body_of: Callable[[dict], dict], **fields) -> dict[str, Any]:
        """Returns the reply, signed by the run, to a request with these fields, which is signed anew for each attempt."""
        sent = {}

        def make_body() -> dict:
            sent.update(lease.request(self.key, self.session, **fields))
            return body_of(sent)

        reply = await self.connection.exchange(path, make_body)
        signed_message.check_reply(self.session.run, reply, sent)
        return reply


async def find_work(key: rollout_lib.WorkerKey, run: str, num_bits: int) -> str:
    """Returns the proof of work of a key for a run, "" for 0 bits. It may take days; a cancellation ends it."""
    if num_bits:
        cli.note(f"a proof of work of this key takes about 2^{num_bits} hashes")
    is_over = threading.Event()
    try:  # in a thread: signals are heard meanwhile
        return await asyncio.to_thread(lease.find_work, run, key.worker, num_bits, is_over.is_set)
    finally:
        is_over.set()


def _check_form(kind: str, found: Any, **fields: Any) -> None:
    """Raises ValueError if an object of a list lacks a field, or has it in another form than an orchestrator of this release sends."""
    for one in found if isinstance(found, list) else [found]:
        for name, form in fields.items():
            value = one.get(name) if isinstance(one, dict) else None
            if not isinstance(value, form):
                raise lease.unreadable(kind, name, value)


def _reason(error: httpx.HTTPError) -> str:
    """Returns an error in one line: httpx adds a second one with a link to a page about the status."""
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (404, 405, 501):
        return f"{error.request.url.path} is answered with {error.response.status_code}, as by another program"
    return str(error).partition("\n")[0] or type(error).__name__


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError) as error:  # of a proxy or a sign-in page in between, or damaged on the way
        found = f"{response.url.path} is answered with text that is not JSON, as by another program"
        raise httpx.DecodingError(f"{found}: {response.text[:80]!r}", request=response.request) from error


def _retry_after_s(error: httpx.HTTPError) -> float:
    after = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    return float(after) if after.isascii() and after.isdigit() else 0.0


def _is_replay(response: httpx.Response) -> bool:
    try:
        return response.json()["error"]["type"] == "replayed"
    except (ValueError, KeyError, TypeError):
        return False
