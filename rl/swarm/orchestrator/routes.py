"""The HTTP routes of an orchestrator: GET /run; POST /lease, /heartbeat, /submit, /nodes, with signed requests (rl/protocol/lease.py).

A lease request may wait until there is work (rl/swarm/orchestrator/gate/lease_waiters.py). Heartbeats of all roles get the newest policy;
workers also get the servers that they may use. The holder of the run's key gets the table of all nodes.

Two threads decode submissions, which bounds the memory; networks take turns there. A group that is then queued for its checks was
leased to its signer. So queued groups take no more memory than the open batches, and slow submissions delay only their sender.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Collection
from concurrent.futures import Future

import fastapi
from fastapi import responses

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import fair_pool, web
from rl.protocol import lease as lease_lib
from rl.protocol import registry
from rl.swarm.orchestrator import submissions
from rl.swarm.orchestrator.gate import gate as gate_lib
from rl.swarm.orchestrator.gate import lease_waiters
from sharding.system import signed_message

MAX_LEASE_BYTES = 8192  # of a request's JSON; 64 returned groups take 3 KB. A longer one counts as several
MAX_HEARTBEAT_BYTES = 2**18  # 4096 held groups take 150 KB
MAX_NONCE = 64  # characters
MAX_POLLS_PER_S = 20.0  # of all workers without work: each costs 2 ms
NUM_DECODES = 2  # at the same time: 0.8 GiB each at worst


def make_app(orchestrator, key: rollout_lib.WorkerKey) -> fastapi.FastAPI:
    """Returns the web app that serves an `Orchestrator` in a new session. Its replies are signed by the run's `key`."""
    decoders = fair_pool.FairPool(NUM_DECODES, "decode")
    session = lease_lib.Session.open(key.worker)
    gate = gate_lib.Gate(
        session=session,
        admission=orchestrator.admission,
        is_invited=orchestrator.is_invited,
        is_known=orchestrator.nodes.is_kept,
        may_sign_in=orchestrator.nodes.may_sign_in,
    )
    waiters = lease_waiters.LeaseWaiters(orchestrator.leases.has_work)

    def replied(message: dict, fields: dict) -> responses.JSONResponse:
        """Returns a reply that is signed over the request `message`, so that no third party can send it to another node.

        As a response: FastAPI would look at each value of a dict before it encodes them, in a third of the time of a poll.
        """
        return responses.JSONResponse(signed_message.sign(key.private, fields | {"request": message["signature"]}))

    @contextlib.asynccontextmanager
    async def lifespan(app):
        swarm = asyncio.create_task(_run_swarm(orchestrator, waiters))
        yield
        swarm.cancel()
        decoders.close()

    app = fastapi.FastAPI(title="Intellax orchestrator", docs_url=None, redoc_url=None, lifespan=lifespan)
    web.reply_errors(
        app,
        {
            lease_lib.StaleSession: (409, "stale_session"),
            lease_lib.Replayed: (400, "replayed"),
            ValueError: (400, "invalid_request_error"),
            OSError: (503, "server_error"),  # of the ledger: the run, which got the same error, is about to end with it
        },
    )

    @app.get("/run")
    async def run(request: fastapi.Request, nonce: str = ""):
        gate.limit_rate(request)
        if len(nonce) > MAX_NONCE:
            raise ValueError(f"nonce has {len(nonce)} characters; send at most {MAX_NONCE}")
        bound = {"id": session.run, "session": session.id, "nonce": nonce}
        return signed_message.sign(key.private, bound | {"run": orchestrator.describe()})

    async def lease(request: fastapi.Request):
        count = 1 + _num_bytes(request, MAX_HEARTBEAT_BYTES) // MAX_LEASE_BYTES
        network = gate.limit_rate(request, count)
        message = await web.read_json(request, MAX_HEARTBEAT_BYTES)
        worker = gate.verify(message, "lease", network, count)
        name, digest = orchestrator.environment
        if (found := message.get("env_digest", digest)) != digest:
            differs = f"your environment {name} has the digest {found[:16]}, and that of the run {digest[:16]}"
            raise ValueError(f"{differs}; get the run's release, code, and data")
        returned, holding = ([tuple(key) for key in message.get(name, ())] for name in ("returned", "holding"))
        begun = {"begun_us": message.get("begun_us", 0), "problem": message.get("problem", "")}
        attempt = functools.partial(orchestrator.leases.lease, worker, message["capacity"], network, **begun)
        groups = attempt(returned, holding=holding if "holding" in message else None)
        if message["capacity"] and (wait_s := message.get("wait_s", 0)) and not groups:
            gone = asyncio.ensure_future(request.receive())  # the body was read: the next message is a disconnect
            try:
                is_known = orchestrator.is_known(worker)
                groups = await waiters.wait(worker, attempt, wait_s, network, is_known=is_known, gone=gone)
            finally:
                gone.cancel()
        if orchestrator.is_ended:
            orchestrator.nodes.leave(worker, "worker")
        wait_s = len(waiters) / MAX_POLLS_PER_S  # at least, until the next request
        reply = {"groups": [group.to_json() for group in groups], "wait_s": wait_s}
        return replied(message, reply | _news(orchestrator, worker if groups else None))

    async def heartbeat(request: fastapi.Request):
        count = 1 + _num_bytes(request, MAX_HEARTBEAT_BYTES) / MAX_LEASE_BYTES  # 4096 keys take 15 ms
        network = gate.limit_rate(request, count)
        message = await web.read_json(request, MAX_HEARTBEAT_BYTES)
        node, role = gate.verify(message, "heartbeat", network, count), message["role"]
        report = registry.Report.from_json(message["report"])
        holding = [tuple(key) for key in message["holding"]]
        void = orchestrator.leases.beat(node, role, report, holding, leaving=message["leaving"])
        if message["leaving"]:
            waiters.leave(node)  # its request may outlive its process, at a proxy
        elif role == "server":
            await orchestrator.nodes.await_news(node, report, lambda: orchestrator.is_ended or orchestrator.is_closing)
        reply = {"interval_s": orchestrator.nodes.interval_s(role), "void": void}
        reply |= _news(orchestrator, node if role == "worker" else None)
        if role == "server" and (policy := orchestrator.nodes.target(node)):
            reply["policy"] = policy.to_json()
        return replied(message, reply)

    @app.post("/nodes")
    async def nodes(request: fastapi.Request):
        network = gate.limit_rate(request)
        message = await web.read_json(request, MAX_LEASE_BYTES)
        if (signer := gate.verify(message, "nodes", network)) != session.run:
            found = f"nodes are shown to the operator of the run, not to {signer[:16]}"
            raise ValueError(f"{found}; sign with the run's key")
        return replied(message, {"nodes": orchestrator.table(), "waiting_for": orchestrator.waiting_for()})

    async def submit(request: fastapi.Request):
        network = gate.limit_rate(request)
        message = lease_lib.read_header(request.headers.get(lease_lib.HEADER, ""))
        worker = gate.verify(message, "submit", network)
        async with web.open_body(request) as body:
            if not orchestrator.leases.holds_groups(worker):  # a key costs nothing, and decoding takes seconds at worst
                return replied(message, {"verdicts": {"every group": f"refused: {submissions.NOT_LEASED}"}})
            work = decoders.submit(network, _decode_and_submit, orchestrator, body, message["digest"], worker)
            futures = await asyncio.wrap_future(work)
        del body
        await asyncio.shield(asyncio.wrap_future(_last(futures.values())))
        if any(future.cancelled() for future in futures.values()):  # the server is closing
            raise asyncio.CancelledError
        verdicts = {key: future.result() for key, future in futures.items()}
        # Workers must not learn which groups are replayed.
        taken = {key: found if found.startswith("refused") else "taken" for key, found in verdicts.items()}
        return replied(message, {"verdicts": taken})

    # Not by `app.post`: FastAPI would look for parameters in each request, which takes a fifth of the time of a poll.
    for path, endpoint in {"/lease": lease, "/heartbeat": heartbeat, "/submit": submit}.items():
        app.add_route(path, endpoint, ["POST"])
    return app


async def _run_swarm(orchestrator, waiters: lease_waiters.LeaseWaiters) -> None:
    """Runs all that the orchestrator does by itself, until it is cancelled. An error ends the run."""
    seen_s = 0.0

    def tick(now_s: float) -> None:
        nonlocal seen_s
        orchestrator.leases.tick(now_s)
        if now_s - seen_s > orchestrator.nodes.interval_s("worker"):
            seen_s = now_s
            for worker in waiters.workers():
                with contextlib.suppress(ValueError):  # it has left, and signed in in another role
                    orchestrator.nodes.seen([worker], now_s)
        waiters.wake()
        if orchestrator.is_ended or orchestrator.is_closing:
            waiters.close()

    try:
        await orchestrator.nodes.run(orchestrator.leases.lacks_worker, tick)
    except asyncio.CancelledError:
        raise
    except BaseExceptionGroup as errors:  # of one task; no other code reads the result of this one
        orchestrator.fail(errors.exceptions[0])
    except BaseException as error:
        orchestrator.fail(error)
    finally:
        waiters.close()  # or the web server waits for them


def _news(orchestrator, worker: str | None) -> dict:
    """Returns the newest policy, and the servers for a worker."""
    newest = orchestrator.nodes.newest
    news = {"policy": newest.to_json() if newest else None, "ended": orchestrator.is_ended}
    return news | ({"servers": orchestrator.leases.servers(worker)} if worker else {})


def _num_bytes(request: fastapi.Request, most: int) -> int:
    """Returns the size of a request's body by its head, which the HTTP server enforces; `most` if the head gives none."""
    text = request.headers.get("content-length", "")
    return min(int(text), most) if text.isdecimal() else most


def _decode_and_submit(orchestrator, body: bytes, digest: str, worker: str) -> dict:
    if hashlib.sha256(body).hexdigest() != digest:
        raise ValueError(f"the body of the submission does not have the SHA-256 {digest}; sign the body that is sent")
    rows = parquet.decode(body, **orchestrator.submission_limits)
    # Rollouts name no run: those that a worker signed in another one must not be submitted in its name here.
    if others := {rollout.worker for rollout in rows.rollouts} - {worker}:
        found = f"rollouts are of worker {min(others)[:16]!r}, and the request of {worker[:16]}"
        raise ValueError(f"{found}; submit your own")
    return orchestrator.submit(rows)


def _last(pending: Collection[Future]) -> Future[None]:
    """Returns a future that is set when all of these are done: one wake-up of the event loop, and not one for each group."""
    done, count = Future(), itertools.count(1)
    for future in pending:
        future.add_done_callback(lambda _: done.set_result(None) if next(count) == len(pending) else None)
    if not pending:
        done.set_result(None)
    return done
