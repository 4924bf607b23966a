"""The page of a run while it goes on, at the address of `topology.metrics`: GET /run and GET /rollouts. Both are read-only.

1. /run is report.html with the newest data and the table of nodes. A script of four lines, named by its hash in the page's policy, fetches the
   page again and replaces its content: nothing else may run, load, or connect.
2. /rollouts shows the rollouts of a batch: tokens colored by `?color=`, rewards with their parts, advantages, proofs, and verdicts. The colors
   are those of log-probabilities, of advantages, or of noise: the sampling noise and the claimed log-probability give each token a number that is
   exponentially distributed for an honest worker, so that a large one is a token which the noise can hardly have drawn. It is called claimed on the
   page: a verdict holds no numbers of its replay.
3. Where the listener or the address in the browser is not of this machine, both need `?token=`, which is in WORKDIR/page.token.

Text of models and strangers is hostile; it is escaped as in the report.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import itertools
import pathlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import fastapi
import markupsafe
import numpy as np
from fastapi import responses

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import guard
from rl import report
from rl.batch import credit as credit_lib
from rl.ledger import environments, run_history
from rl.reporting import metrics
from rl.verification import checks
from sharding.system import secret_file, sockets

CACHE_S, MAX_GROUPS, MAX_WAITING = 2.0, 16, 64
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
# A token's color is the class and the first limit that is at least its value. The noise is negative: -7 has a probability of 0.1 %.
COLORS: dict[str, tuple[str, tuple[float, ...]]] = {
    "logprob": ("p", (-4.0, -2.0, -0.7, -0.1)),
    "noise": ("p", (-7.0, -5.0, -3.0, -1.5)),
    "advantage": ("a", (-1.0, -1e-9, 1e-9, 1.0)),
}


def add(
    app: fastapi.FastAPI,
    workdir: pathlib.Path,
    host: str,
    nodes: Callable[[], list[dict[str, Any]]],
    decode: Callable[[Sequence[int]], str],
    credit: credit_lib.Credit,
) -> str:
    """Adds both routes to an app that listens at `host`; returns the path of the first, with the token that it needs."""
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
            status, text = 500, report.text(str(error))
        finally:
            waiting.discard(request)
        return responses.HTMLResponse(text, status, headers)

    @app.get("/run")
    async def run(request: fastapi.Request):
        def render() -> str:
            if (begun_s := time.monotonic()) >= cached[1]:
                cached[0] = report.render(
                    workdir, reader.records(), ledger.reputations(), nodes=nodes(), script=SCRIPT, policy=POLICY
                )
                now_s = time.monotonic()
                cached[1] = now_s + max(CACHE_S, (now_s - begun_s) / MAX_SHARE)
            return cached[0]

        return await reply(request, render, cached[0])

    @app.exception_handler(fastapi.exceptions.RequestValidationError)
    async def refuse(request: fastapi.Request, error: fastapi.exceptions.RequestValidationError):
        (*_, name), value, rule = (error.errors()[0][key] for key in ("loc", "input", "msg"))
        text = f"{name} = {str(value)[:60]!r}: {rule}; correct it in the address, or leave it out"
        return responses.HTMLResponse(report.text(text), 400, HEADERS | {"content-security-policy": POLICY})

    @app.get("/rollouts")
    async def rollouts(request: fastapi.Request, step: Number = -1, first: Number = 0, color: Color = "logprob"):
        given = request.query_params.get("token", "")
        return await reply(request, lambda: rollouts_page(workdir, step, first, decode, credit, color, given))

    return f"/run{f'?token={token}' if token else ''}"


def _is_of_this_machine(name: str) -> bool:
    """Returns True for a host in the browser's address that no stranger's DNS can have made."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def rollouts_page(
    workdir: pathlib.Path,
    step: int,
    first: int,
    decode: Callable[[Sequence[int]], str],
    credit: credit_lib.Credit,
    color: str = "logprob",
    token: str = "",
) -> str:
    """Returns the page of the rollouts of a batch, MAX_GROUPS groups from number `first` on; of the newest batch if there is no such step."""
    folders = {int(path.name[5:]): path for path in (workdir / "rollouts").glob("step_*") if path.name[5:].isdecimal()}
    step = step if step in folders else max(folders, default=0)
    found = [one for file in sorted(folders[step].glob("*.parquet")) for one in parquet.read(file)] if folders else []
    found.sort(key=lambda one: (one.task.group, one.sample, one.branch))
    groups = [list(of) for _, of in itertools.groupby(found, key=lambda one: one.task.group)]
    advantages = {id(rollout): advantage_T for rollout, advantage_T in credit.by_token(groups)}
    verdicts = _verdicts(workdir, step)

    def row(one: rollout_lib.Rollout) -> dict[str, Any]:
        advantage_T = advantages.get(id(one), np.zeros(len(one.tokens), np.float32))
        values_T = {"logprob": one.logprobs, "noise": _noise(one), "advantage": advantage_T}[color]
        turns = [float(advantage_T[start]) for start, _ in one.spans]
        pieces = markupsafe.Markup("").join(colored(one, decode, color, values_T))
        return {"rollout": one, "text": pieces, "advantages": turns if len({*turns}) > 1 else turns[:1]}

    shown = [
        {
            "name": f"{group[0].task.env}, task {group[0].task.index}, group {group[0].task.group}",
            "prompt": decode(group[0].tokens[: group[0].prompt_length].tolist()),
            "rollouts": [*map(row, group)],
            "verdicts": verdicts.get(group[0].task.group, []),
        }
        for group in groups[max(first, 0) :][:MAX_GROUPS]
    ]
    places = {"older": (step - 1, 0, color), "newer": (step + 1, 0, color)}
    links = {name: place for name, place in places.items() if place[0] in folders}
    if first + MAX_GROUPS < len(groups):
        links["more groups"] = (step, first + MAX_GROUPS, color)
    links |= {f"color: {name}": (step, first, name) for name in COLORS if name != color}
    return report.template("rollouts.html").render(
        step=step, groups=shown, links=links, color=color, token=token, policy=POLICY, style=report.style()
    )


def _verdicts(workdir: pathlib.Path, step: int) -> dict[int, list[dict[str, Any]]]:
    """Returns the verdicts on the groups of a step; {} if the ledger is elsewhere, or locked."""
    try:
        return run_history.verdicts(workdir / "ledger.db", step)
    except (FileNotFoundError, ValueError, sqlite3.Error):
        return {}


def _noise(rollout: rollout_lib.Rollout) -> np.ndarray:
    """Returns the negative noise of each token, [T]: 0 where none was sampled, and for greedy rollouts."""
    noise_T = np.zeros(len(rollout.tokens))
    if rollout.temperature and rollout.sampled_mask.any():
        noise_T[rollout.sampled_mask] = -checks.exponential_noise([rollout])[0]
    return noise_T


def colored(
    rollout: rollout_lib.Rollout, decode: Callable[[Sequence[int]], str], color: str, values_T: np.ndarray
) -> Iterator[markupsafe.Markup]:
    """Yields the completion in pieces of tokens with one color, escaped: "t" for tokens of the environment, else by `COLORS`."""
    start, (kind, limits) = rollout.prompt_length, COLORS[color]
    unit = f"claimed {color}" if color == "noise" else color
    rows = zip(
        rollout.tokens[start:].tolist(), values_T[start:].tolist(), rollout.sampled_mask[start:].tolist(), strict=True
    )
    name_of = lambda row: f"{kind}{sum(row[1] > limit for limit in limits)}" if row[2] else "t"  # noqa: E731
    for name, of in itertools.groupby(rows, key=name_of):
        pieces = [*of]
        least = min(row[1] for row in pieces)
        text = report.text(decode([row[0] for row in pieces]))
        yield markupsafe.Markup('<span class="{}" title="{} tokens, {} from {:.2f}">{}</span>').format(
            name, len(pieces), unit, least, text
        )
