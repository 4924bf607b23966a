"""The HTTP routes of an orchestrator: `GET /run`, `POST /lease`, `POST /submit`.

Two threads decode submissions, which bounds the memory; networks take turns there. A group that is then queued for its checks was
leased to its signer. So queued groups take no more memory than the open batches, and slow submissions delay only their sender.
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

NUM_DECODES = 2  # at the same time: 0.8 GiB each at worst


def make_app(orchestrator, invited: Sequence[str]) -> fastapi.FastAPI:
    """Returns the web app that serves an `Orchestrator`; only public keys in `invited` may lease (if empty, all keys)."""
    decoders = fair_pool.FairPool(NUM_DECODES, "decode")
    verifier = lease_lib.LeaseVerifier(invited)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        decoders.close()

    app = fastapi.FastAPI(title="Intellax orchestrator", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(requests.ClientDisconnect, web.handle_disconnect)

    def decode_and_submit(body: bytes) -> dict:
        return orchestrator.submit(parquet.from_bytes(body))

    @app.get("/run")
    async def run():
        return orchestrator.describe()

    @app.post("/lease")
    async def lease(request: fastapi.Request):
        worker, capacity = verifier.verify(await web.read_json(request))
        return {"groups": [dataclasses.asdict(group) for group in orchestrator.lease(worker, capacity)]}

    @app.post("/submit")
    async def submit(request: fastapi.Request):
        async with web.open_body(request) as body:
            futures = await asyncio.wrap_future(decoders.submit(web.client_network(request), decode_and_submit, body))
        del body
        # Shielded: a group whose checks were cancelled with its request would never be requeued.
        pending = {key: asyncio.shield(asyncio.wrap_future(future)) for key, future in futures.items()}
        verdicts = {key: await future for key, future in pending.items()}
        # Workers must not learn which groups are replayed.
        return {"verdicts": {key: v if v.startswith("refused") else "taken" for key, v in verdicts.items()}}

    @app.exception_handler(ValueError)
    async def reject(request, error):
        return web.error(400, str(error), "invalid_request_error")

    return app
