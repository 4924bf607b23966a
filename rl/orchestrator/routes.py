"""What workers reach of an orchestrator over HTTP: `GET /run`, `POST /lease`, `POST /submit`.

A file is decoded and its groups are looked up in one of two threads, which bounds the memory; addresses take turns there
(inference/server/fair_pool.py). What is still to be judged then was leased to its signer, so that it is no more than the batches in the making hold
anyway: it waits for its scorer, workers in turn, and keeps neither a thread nor a part of the body budget meanwhile. So what is
slow delays whoever sent it.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

import fastapi
from starlette import requests

from inference.rollouts import parquet
from inference.server import fair_pool, web
from rl.protocol import lease as lease_lib

NUM_DECODES = 2  # at a time: 0.8 GiB each at worst


def make_app(orchestrator, invited: Sequence[str]) -> fastapi.FastAPI:
    """`invited`: public keys of the workers that may lease; empty for anybody."""
    decoders = fair_pool.FairPool(NUM_DECODES, "decode")

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        decoders.close()

    app = fastapi.FastAPI(title="Intellax orchestrator", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(requests.ClientDisconnect, web.handle_disconnect)
    desk = lease_lib.Desk(invited)

    def take(body: bytes) -> dict:
        return orchestrator.submit(parquet.from_bytes(body))

    async def taken(request: fastapi.Request) -> dict[str, asyncio.Future]:
        async with web.open_body(request) as body:
            found = await asyncio.wrap_future(decoders.submit(web.client_network(request), take, body))
        # Shielded: a group whose judgement was cancelled with its request would be leased to nobody.
        return {key: asyncio.shield(asyncio.wrap_future(future)) for key, future in found.items()}

    @app.get("/run")
    async def run():
        return orchestrator.describe()

    @app.post("/lease")
    async def lease(request: fastapi.Request):
        worker, capacity = desk.read(await web.read_json(request))
        return {"groups": [dataclasses.asdict(group) for group in orchestrator.lease(worker, capacity)]}

    @app.post("/submit")
    async def submit(request: fastapi.Request):
        verdicts = {key: await future for key, future in (await taken(request)).items()}
        # Which groups are replayed is nobody's business.
        return {"verdicts": {key: v if v.startswith("refused") else "taken" for key, v in verdicts.items()}}

    @app.exception_handler(ValueError)
    async def refuse(request, error):
        return web.error(400, str(error), "invalid_request_error")

    return app
