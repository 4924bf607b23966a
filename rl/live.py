"""The page of a run while it goes on, at the address of `topology.metrics`: GET /run and GET /rollouts. Both are read-only.

1. /run is report.html with the newest data and the table of nodes. A script of four lines, named by its hash in the page's policy, fetches the
   page again and replaces its content: nothing else may run, load, or connect.
2. /rollouts shows the rollouts of a batch: tokens colored by their log-probability, rewards with their parts, workers, and versions.
3. Where the listener or the address in the browser is not of this machine, both need `?token=`, which is in WORKDIR/page.token.

Text of models and strangers is hostile; it is escaped as in the report.
"""

import base64
import hashlib
import hmac
import ipaddress
import itertools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fastapi
import markupsafe
from fastapi import responses

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl import report
from sharding.system import secret_file, sockets

CACHE_S, MAX_GROUPS = 2.0, 16
MAX_SHARE = (
    0.05  # of the time, for rendering: it takes the learner's Python lock, for 1.4 s with 74 metrics of 10,000 steps
)
SCRIPT = """setInterval(async()=>{try{const reply=await fetch(location.href);if(!reply.ok)return;
const page=new DOMParser().parseFromString(await reply.text(),"text/html");
document.title=page.title;const main=page.querySelector("main");
if(main&&!document.querySelector("details[open]"))document.querySelector("main").replaceWith(main)}catch{}},5000)"""
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{HASH}'; connect-src 'self'"
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
# A token's color: the first limit that is at least its log-probability, from unlikely to certain.
LIMITS = (-4.0, -2.0, -0.7, -0.1)


def add(
    app: fastapi.FastAPI,
    workdir: pathlib.Path,
    host: str,
    nodes: Callable[[], list[dict[str, Any]]],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Adds both routes to an app that listens at `host`; returns the path of the first, with the token that it needs."""
    token = "" if sockets.is_loopback(host) else secret_file.read_or_create(workdir / "page.token")
    lock, cached = threading.Lock(), ["", 0.0]

    def reply(request: fastapi.Request, render: Callable[[], str]) -> responses.HTMLResponse:
        is_local = not token and _is_of_this_machine(request.url.hostname or "")
        known = token or (secret_file.read_or_create(workdir / "page.token") if not is_local else "")
        if not is_local and not hmac.compare_digest(request.query_params.get("token", "").encode(), known.encode()):
            text = "add ?token= to the address, with the text of WORKDIR/page.token"
            return responses.HTMLResponse(text, 403, HEADERS | {"content-security-policy": "default-src 'none'"})
        with lock:  # one page at a time: a large one takes a second
            return responses.HTMLResponse(render(), headers=HEADERS | {"content-security-policy": POLICY})

    @app.get("/run")
    def run(request: fastapi.Request):
        def render() -> str:
            if (begun_s := time.monotonic()) >= cached[1]:
                cached[0] = report.render(workdir, nodes=nodes(), script=SCRIPT, policy=POLICY)
                now_s = time.monotonic()
                cached[1] = now_s + max(CACHE_S, (now_s - begun_s) / MAX_SHARE)
            return cached[0]

        return reply(request, render)

    @app.get("/rollouts")
    def rollouts(request: fastapi.Request, step: int = -1, first: int = 0):
        return reply(
            request, lambda: rollouts_page(workdir, step, first, decode, request.query_params.get("token", ""))
        )

    return f"/run{f'?token={token}' if token else ''}"


def _is_of_this_machine(name: str) -> bool:
    """Returns True for a host in the browser's address that no stranger's DNS can have made."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def rollouts_page(
    workdir: pathlib.Path, step: int, first: int, decode: Callable[[Sequence[int]], str], token: str = ""
) -> str:
    """Returns the page of the rollouts of a batch, MAX_GROUPS groups from number `first` on; of the newest batch if there is no such step."""
    folders = {int(path.name[5:]): path for path in (workdir / "rollouts").glob("step_*[0-9]")}
    step = step if step in folders else max(folders, default=0)
    found = [one for file in sorted(folders[step].glob("*.parquet")) for one in parquet.read(file)] if folders else []
    found.sort(key=lambda one: (one.task.group, one.sample, one.branch))
    groups = [list(of) for _, of in itertools.groupby(found, key=lambda one: one.task.group)]
    shown = [
        {
            "name": f"{group[0].task.env}, task {group[0].task.index}, group {group[0].task.group}",
            "prompt": decode(group[0].tokens[: group[0].prompt_length].tolist()),
            "rollouts": [{"rollout": one, "text": markupsafe.Markup("").join(colored(one, decode))} for one in group],
        }
        for group in groups[max(first, 0) :][:MAX_GROUPS]
    ]
    places = {"older": (step - 1, 0), "newer": (step + 1, 0)}
    links = {name: place for name, place in places.items() if place[0] in folders}
    if first + MAX_GROUPS < len(groups):
        links["more groups"] = (step, first + MAX_GROUPS)
    return report.template("rollouts.html").render(
        step=step, groups=shown, links=links, token=token, policy=POLICY, style=report.style()
    )


def colored(rollout: rollout_lib.Rollout, decode: Callable[[Sequence[int]], str]) -> Iterator[markupsafe.Markup]:
    """Yields the completion in pieces of tokens with one color, escaped: "t" for tokens of the environment, else "p0" (unlikely) to "p4"."""
    start = rollout.prompt_length
    rows = zip(
        rollout.tokens[start:].tolist(),
        rollout.logprobs[start:].tolist(),
        rollout.sampled_mask[start:].tolist(),
        strict=True,
    )
    color = lambda row: f"p{sum(row[1] > limit for limit in LIMITS)}" if row[2] else "t"  # noqa: E731
    for name, of in itertools.groupby(rows, key=color):
        pieces = [*of]
        least = min(row[1] for row in pieces)
        text = report.text(decode([row[0] for row in pieces]))
        yield markupsafe.Markup('<span class="{}" title="{} tokens, log-probability from {:.2f}">{}</span>').format(
            name, len(pieces), least, text
        )
