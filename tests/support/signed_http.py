"""Requests to an orchestrator over HTTP, signed as `python -m rl.worker` signs them."""

import hashlib
import json

import httpx

from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease


def session(http: httpx.Client) -> lease.Session:
    """Returns the session of the orchestrator at the client's base URL."""
    reply = http.get("/run", params={"nonce": "00"}).json()
    assert lease.is_signed(reply["id"], reply) and reply["nonce"] == "00"
    return lease.Session(reply["id"], reply["session"])


def lease_body(key: rollout_lib.WorkerKey, at: lease.Session, capacity: int = 1, **fields) -> dict:
    """Returns the body of a lease request; `fields` are those of lease.request."""
    return lease.request(key, at, **{"capacity": capacity, "returned": [], "work": ""} | fields)


def submission(key: rollout_lib.WorkerKey, at: lease.Session, body: bytes, **changes) -> dict:
    """Returns httpx's arguments for a submission of `body`; `changes` replace fields of its header after it was signed."""
    message = lease.request(key, at, digest=hashlib.sha256(body).hexdigest()) | changes
    return {"content": body, "headers": {lease.HEADER: json.dumps(message)}}
