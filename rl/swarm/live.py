"""The page of a run while it goes on, at the address of `topology.metrics`: GET /run and GET /rollouts. Both are read-only.

1. /run is report.html with the newest data and the table of nodes. A script of four lines, named by its hash in the page's policy, fetches the
   page again and replaces its content: nothing else may run, load, or connect.
2. /rollouts shows the rollouts of a batch (rl/experiment/reporting/rollouts_page.py), with tokens colored by `?color=`. A large noise is a token which the noise
   can hardly have drawn. It is called claimed on the page: a verdict holds no numbers of its replay.
3. Where the listener or the address in the browser is not of this machine, both need `?token=`, which is in WORKDIR/page.token.

Text of models and strangers is hostile; it is escaped as in the report.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import pathlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import fastapi
import numpy as np
from fastapi import responses

from inference.rollouts import rollout as rollout_lib
from inference.server import guard
from rl.experiment import report
from rl.experiment.reporting import metrics, page, rollouts_page
from rl.learning.batch import credit as credit_lib
from rl.protocol.ledger import environments
from rl.trust.verification import checks
from sharding.system import secret_file, sockets

CACHE_S, MAX_WAITING = 2.0, 64
MAX_SHARE = 0.01  # of the time, for rendering, which takes the learner's Python lock
SCRIPT = """setInterval(async()=>{try{const reply=await fetch(location.href);if(!reply.ok)return;
const page=new DOMParser().parseFromString(await reply.text(),"text/html");
document.title=page.title;const main=page.querySelector("main");
if(main&&!document.querySelector("details[open]"))document.querySelector("main").replaceWith(main)}catch{}},5000)"""
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{HASH}'; connect-src 'self'"
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
Color = Literal["logprob", "noise", "advantage"]
Number = Annotated[int, fastapi.Query(ge=-1, lt=2**63)]


def add(
    app: fastapi.FastAPI,
    workdir: pathlib.Path,
    host: str,
    nodes: Callable[[], list[dict[str, Any]]],
    decode: Callable[[Sequence[int]], str],
    credit: credit_lib.Credit,
    answer: Callable[[rollout_lib.TaskRef], str] = lambda task: "",
    doing: Callable[[], str] = lambda: "",
) -> str:
    """Adds both routes to an app that listens at `host`; returns the path of the first, with the token that it needs.

    `nodes` returns the rows of the table of nodes, `answer` the expected answer of a task, and `doing` a line on the present work of
    the run; "" for none. `decode` converts token IDs to text, and `credit` computes the advantages that the pages show.
    """
    source = rollouts_page.Source(decode, answer, credit.by_token, noise)
    token = "" if sockets.is_loopback(host) else secret_file.read_or_create(workdir / "page.token")
    lock, cached, waiting = asyncio.Lock(), ["", 0.0], set()
    reader, ledger = metrics.Reader(workdir / "metrics.jsonl"), environments.Reader(workdir / "ledger.db")

    async def reply(request: fastapi.Request, render: Callable[[], str], old: str = "") -> responses.HTMLResponse:
        """Returns the page; `old` if another is being drawn. Requests wait here, and not in threads, of which /health needs one."""
        is_local = not token and _is_of_this_machine(guard.host_name(request.headers.get("host", "")))
        known = token or (secret_file.read_or_create(workdir / "page.token") if not is_local else "")
        if not is_local and not hmac.compare_digest(request.query_params.get("token", "").encode(), known.encode()):
            text = "add ?token= to the address, with the text of WORKDIR/page.token"
            return responses.HTMLResponse(text, 403, HEADERS | {"content-security-policy": "default-src 'none'"})
        status, headers = 200, HEADERS | {"content-security-policy": POLICY}
        if lock.locked() and old:
            return responses.HTMLResponse(old, headers=headers)
        if len(waiting) >= MAX_WAITING:
            return responses.HTMLResponse("too many pages are waiting; try again", 503, headers | {"retry-after": "5"})
        waiting.add(request)
        try:
            async with lock:  # one page at a time: a large one takes a second
                text = await asyncio.to_thread(render)
        except (ValueError, OSError, sqlite3.Error) as error:  # of a malformed file, or one that was deleted meanwhile
            status, text = 500, page.text(str(error))
        finally:
            waiting.discard(request)
        return responses.HTMLResponse(text, status, headers)

    @app.get("/run")
    async def run(request: fastapi.Request):
        def render() -> str:
            if (begun_s := time.monotonic()) >= cached[1]:
                cached[0] = report.render(
                    workdir,
                    reader.records(),
                    ledger.reputations(),
                    nodes=nodes(),
                    doing=doing(),
                    script=SCRIPT,
                    policy=POLICY,
                )
                now_s = time.monotonic()
                cached[1] = now_s + max(CACHE_S, (now_s - begun_s) / MAX_SHARE)
            return cached[0]

        return await reply(request, render, cached[0])

    @app.exception_handler(fastapi.exceptions.RequestValidationError)
    async def refuse(request: fastapi.Request, error: fastapi.exceptions.RequestValidationError):
        (*_, name), value, rule = (error.errors()[0][key] for key in ("loc", "input", "msg"))
        text = f"{name} = {str(value)[:60]!r}: {rule}; correct it in the address, or leave it out"
        return responses.HTMLResponse(page.text(text), 400, HEADERS | {"content-security-policy": POLICY})

    @app.get("/rollouts")
    async def rollouts(request: fastapi.Request, step: Number = -1, first: Number = 0, color: Color = "logprob"):
        given = request.query_params.get("token", "")
        return await reply(
            request, lambda: rollouts_page.of_step(workdir, source, step, first, color, token=given, policy=POLICY)
        )

    return f"/run{f'?token={token}' if token else ''}"


def _is_of_this_machine(name: str) -> bool:
    """Returns True for a host in the browser's address that no stranger's DNS can have made."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def noise(rollout: rollout_lib.Rollout) -> np.ndarray:
    """Returns the negative noise of each token, [T]: 0 where none was sampled, and for greedy rollouts."""
    noise_T = np.zeros(len(rollout.tokens))
    if rollout.temperature and rollout.sampled_mask.any():
        noise_T[rollout.sampled_mask] = -checks.exponential_noise([rollout])[0]
    return noise_T
