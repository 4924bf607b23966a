"""`python -m rl.validator serve`: the service's routes over HTTP, and what it is started with.

`POST /validate/<file>`, `POST /validategroup/<file>`, `GET /status/<file>`, `GET /statusgroup/<file>`, `GET /health`:
rl/validator/service.py says what they mean.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib

import fastapi

from inference.proofs import toploc
from inference.rollouts import rollout as rollout_lib
from inference.server import web
from rl.experiment import workdir as run_directory
from rl.ledger import ledger
from rl.validator import calibrate
from rl.validator import service as validator_service
from rl.validator import state as validator_state
from rl.validator import status as validator_status
from rl.verification import evidence_log, verifier
from rl.verification import rules as rules_lib
from sharding import broadcast
from sharding.system import sockets

MAX_REQUEST_BYTES = 2**15  # 256 hashes take 17 KiB


def make_app(service: validator_service.Service) -> fastapi.FastAPI:
    app = fastapi.FastAPI(title="Intellax validator", docs_url=None, redoc_url=None)

    @app.post("/validate/{file:path}")
    async def validate(file: str, request: fastapi.Request):
        body = await web.read_json(request, MAX_REQUEST_BYTES)
        sha, address = body.get("file_sha"), body.get("address")
        if not isinstance(sha, str) or not isinstance(address, str | None):
            raise ValueError("validate needs file_sha (a string) and takes address (a hex public key)")
        return _shown(await asyncio.to_thread(service.submit, file, [sha], address))

    @app.post("/validategroup/{file:path}")
    async def validate_group(file: str, request: fastapi.Request):
        body = await web.read_json(request, MAX_REQUEST_BYTES)
        shas, address = body.get("file_shas"), body.get("address")
        if not isinstance(shas, list) or not all(isinstance(sha, str) for sha in shas):
            raise ValueError("validategroup needs file_shas, a list of strings")
        if body.get("group_size", len(shas)) != len(shas):
            raise ValueError(f"group_size is {body['group_size']}, but {len(shas)} hashes were given")
        if not isinstance(address, str | None):
            raise ValueError("address must be a hex public key")
        return _shown(await asyncio.to_thread(service.submit, file, shas, address, group=True))

    @app.get("/status/{file:path}")
    async def status(file: str):
        return _shown(service.status(file))

    @app.get("/statusgroup/{file:path}")
    async def status_group(file: str):
        return _shown(service.status(file, group=True))

    @app.get("/health")
    async def health():
        return {"status": "ok", "verdicts": dict(service.counts)}

    @app.exception_handler(ValueError)
    async def refuse(request, error):
        return web.error(400, str(error), "invalid_request_error")

    return app


def _shown(status: validator_status.Status) -> dict:
    body = dataclasses.asdict(status)
    del body["tasks"]  # for the ledger alone
    return body | {"reasons": {str(index): text for index, text in status.reasons.items()}}


def serve(args: argparse.Namespace) -> int:
    exp = calibrate.load_experiment(args.workdir)
    config, weights = exp.config, pathlib.Path(args.weights or pathlib.Path(args.workdir) / "weights")
    if not pathlib.Path(args.rollouts).is_dir():
        raise ValueError(f"--rollouts {args.rollouts} is no directory")
    if args.slash < 0:
        raise ValueError(f"--slash = {args.slash} must be at least 0: it is taken from a node's stake")
    if args.bands:
        tolerance, bands = verifier.load_bands(args.bands)
    else:
        tolerance, bands = rules_lib.Tolerance.of(config.trust, toploc.THRESHOLDS[args.thresholds]), None
    book = key = None
    if args.ledger:
        if not args.key:
            raise ValueError("--ledger needs --key, the key that keeps it")
        key = rollout_lib.WorkerKey.load(args.key)
        book = ledger.Ledger(args.ledger, key)
    validator = verifier.Validator(
        exp.model,
        verifier.published(weights, keep=config.rl.max_lag + 2),
        dataclasses.replace(verifier.rules_of(config, exp.tokenizer), tolerance=tolerance),
        evidence_log.EvidenceLog(bands),
    )
    workdir = pathlib.Path(args.workdir)
    secret = run_directory.secret(workdir, config.seed)
    state = validator_state.State(
        args.state or workdir / "validator.db",
        validator_state.identity(secret, None if book is None else book.state.keeper),
        keep_steps=config.rl.max_lag + 8,
    )
    service = validator_service.Service(
        validator,
        exp.model,
        pathlib.Path(args.rollouts),
        lambda: -1 if (latest := broadcast.latest(str(weights))) is None else latest,
        secret=secret,
        state=state,
        book=book,
        key=key,
        slash=args.slash,
        eject=args.eject,
    )
    sock = sockets.listen(args.host, args.port)
    print(f"validating files under {args.rollouts} on {sockets.address(sock)}", flush=True)
    if args.address_file:
        sockets.announce(args.address_file, sock)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has shut down
            web.server(make_app(service)).run(sockets=[sock])
    finally:
        service.close()  # or the process judges all that is queued before it ends
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", required=True, help="of the run: its config says what is prescribed")
    parser.add_argument("--rollouts", required=True, help="directory of the files that are judged")
    parser.add_argument("--weights", help="root of the weight broadcast (default: <workdir>/weights)")
    parser.add_argument(
        "--bands", help="JSON of calibrate (default: the limits of the config, nothing summed per node)"
    )
    parser.add_argument("--thresholds", choices=sorted(toploc.THRESHOLDS), default="deployed", help="without --bands")
    parser.add_argument(
        "--state", help="file of what was decided, for the next start (default: <workdir>/validator.db)"
    )
    parser.add_argument("--ledger", help="ledger to write verdicts to")
    parser.add_argument("--key", help="file of the key that keeps the ledger")
    parser.add_argument("--slash", type=int, default=0, help="stake taken at a rejection")
    parser.add_argument("--eject", action="store_true", help="eject the node at a rejection")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8300, help="0 takes a free port")
    parser.add_argument("--address_file", help="written with the URL once it answers")
