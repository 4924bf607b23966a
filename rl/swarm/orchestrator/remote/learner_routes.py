"""The control routes of an orchestrator process, for its learner: POST /learner/CALL with a JSON object, for each call of `Host`.

A reply is JSON, or bytes for rows and evaluations; status 202 asks the learner to repeat the call. The routes have a listener and a
token of their own (inference/server/guard.py), which no worker has.
"""

import asyncio
import functools
import json
from collections.abc import Callable
from concurrent import futures
from typing import Any

import fastapi
from fastapi import responses

from inference.server import guard, web
from rl.protocol import timeline
from rl.swarm.orchestrator.remote import host as host_lib

MAX_BYTES = 2**28  # of a call: the state in a checkpoint


def make_app(host: host_lib.Host, worker_url: Callable[[], str], *, token: str | None, hosts) -> fastapi.FastAPI:
    """Returns the app of the control routes; `worker_url()` is the address that workers use. Clients send `token`, unless it is None."""
    app = fastapi.FastAPI(title="Intellax orchestrator control", docs_url=None, redoc_url=None)
    pool = futures.ThreadPoolExecutor(host_lib.MAX_EVALUATIONS + 16, "learner-route")  # each evaluation blocks one

    def attach(learner: str, **fields: Any) -> dict:
        host.attach(learner, **fields)
        return {"url": worker_url()}

    calls = {name: getattr(host, name) for name in ("head", "batch", "rows", "evaluate", "end")}
    calls |= {
        "attach": attach,
        "check": lambda learner, fields: host.check(fields) is None,
        "publish": lambda learner, policy: host.publish(learner, timeline.Policy.from_json(policy)),
        "state": lambda learner, step: host.of(learner).state(step),
        "waiting_for": lambda learner: host.of(learner).waiting_for(),
    }

    @app.post("/learner/{name}")
    async def call(name: str, request: fastapi.Request):
        body = await web.read_json(request, MAX_BYTES)
        run = functools.partial(asyncio.get_running_loop().run_in_executor, pool)
        if name not in calls:
            raise ValueError(f"the call {name[:40]!r} is unknown; run the orchestrator from the learner's release")
        try:
            found = await run(functools.partial(calls[name], **body))
        except TypeError as error:
            text = f"the fields of {name} are {sorted(body)} ({error})"
            raise ValueError(f"{text}; run the orchestrator from the learner's release") from error
        if isinstance(found, bytes):
            return responses.Response(found)
        status, reply = 200, {"result": found}
        if name in ("batch", "rows", "evaluate") and found is None:
            status, reply = 202, {"waiting_for": await run(calls["waiting_for"], body["learner"])}
        return responses.Response(json.dumps(reply), status, media_type="application/json")  # metrics may be NaN

    refused = 400, "invalid_request_error"  # also by the error that ends the run
    web.reply_errors(app, {host_lib.AnotherLearner: (410, "another_learner"), ValueError: refused, OSError: refused})
    app.add_middleware(guard.Guard, key=token, key_name="control token", hosts=hosts)
    return app
