"""Requests to an orchestrator over HTTP, signed as `python -m rl.worker` signs them."""

import hashlib
import json
import time

import httpx

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease
from sharding.system import signed_message


def session(http: httpx.Client) -> lease.Session:
    """Returns the session of the orchestrator at the client's base URL."""
    reply = http.get("/run", params={"nonce": "00"}).json()
    assert signed_message.is_signed(reply["id"], reply) and reply["nonce"] == "00"
    return lease.Session(reply["id"], reply["session"])


def lease_body(key: rollout_lib.WorkerKey, at: lease.Session, capacity: int = 1, **fields) -> dict:
    """Returns the body of a lease request; `fields` are those of lease.request."""
    return lease.request(key, at, **{"capacity": capacity, "returned": [], "work": ""} | fields)


def submission(key: rollout_lib.WorkerKey, at: lease.Session, body: bytes, **changes) -> dict:
    """Returns httpx's arguments for a submission of `body`; `changes` replace fields of its header after it was signed."""
    message = lease.request(key, at, digest=hashlib.sha256(body).hexdigest()) | changes
    return {"content": body, "headers": {lease.HEADER: json.dumps(message)}}


class Worker:
    """Leases and submits under any key at the orchestrator with this URL."""

    def __init__(self, url: str):
        self.http = httpx.Client(base_url=url, timeout=120)
        self.session = session(self.http)

    def post(self, path, make_request):
        """Returns the reply to a request, which is made and sent again if it comes too soon for the limit of a network."""
        while (reply := self.http.post(path, **make_request())).status_code == 429:
            time.sleep(0.1)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def lease(self, key, capacity=1) -> list[lease.Lease]:
        """Returns the groups that `key` got."""
        reply = self.post("/lease", lambda: {"json": lease_body(key, self.session, capacity)})
        assert signed_message.is_signed(self.session.run, reply), reply
        return [lease.Lease.from_json(group) for group in reply["groups"]]

    def submit(self, key, rollouts) -> list[str]:
        """Returns the verdicts on rollouts that `key` hands in."""
        body = parquet.to_bytes(rollouts)
        reply = self.post("/submit", lambda: submission(key, self.session, body))
        return list(reply["verdicts"].values())
