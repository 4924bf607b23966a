"""The HTTP routes of the validation service (see rl/validator/service.py), and the command `python -m rl.validator serve`."""

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
from rl.ledger import ledger as ledger_lib
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
    """Returns the HTTP application of a validation service. A request that raises ValueError gets status 400 with the message."""
    app = fastapi.FastAPI(title="Intellax validator", docs_url=None, redoc_url=None)

    @app.post("/validate/{file:path}")
    async def validate(file: str, request: fastapi.Request):
        body = await web.read_json(request, MAX_REQUEST_BYTES)
        return await submit(file, [body.get("file_sha")], body.get("address"), group=False)

    @app.post("/validategroup/{file:path}")
    async def validate_group(file: str, request: fastapi.Request):
        body = await web.read_json(request, MAX_REQUEST_BYTES)
        shas = body.get("file_shas")
        if not isinstance(shas, list):
            raise ValueError("validategroup needs file_shas; give a list with the SHA-256 of every file")
        if body.get("group_size", len(shas)) != len(shas):
            raise ValueError(f"group_size is {body['group_size']}, but file_shas has {len(shas)}; name every file once")
        return await submit(file, shas, body.get("address"), group=True)

    async def submit(file: str, shas: list, address, *, group: bool) -> dict:
        if not isinstance(address, str | None):
            raise ValueError("address must be a string; give the worker's public key in hex, or leave it out")
        return _reply(await asyncio.to_thread(service.submit, file, shas, address, group=group))

    @app.get("/status/{file:path}")
    async def status(file: str):
        return _reply(service.status(file))

    @app.get("/statusgroup/{file:path}")
    async def status_group(file: str):
        return _reply(service.status(file, group=True))

    @app.get("/health")
    async def health():
        return {"status": "ok", "verdicts": dict(service.counts)}

    @app.exception_handler(ValueError)
    async def refuse(request, error):
        return web.error(400, str(error), "invalid_request_error")

    return app


def _reply(status: validator_status.Status) -> dict:
    body = dataclasses.asdict(status)
    del body["tasks"]  # for the ledger alone
    return body


def serve(args: argparse.Namespace) -> int:
    """Runs the validation service over HTTP until it is interrupted; returns the exit code. Raises ValueError for a wrong option."""
    experiment, workdir = calibrate.load_experiment(args.workdir), pathlib.Path(args.workdir)
    config, weights = experiment.config, args.weights or str(workdir / "weights")
    if not pathlib.Path(args.rollouts).is_dir():
        raise ValueError(f"--rollouts {args.rollouts} is not a directory; create it, or give another")
    if args.slash < 0:
        raise ValueError(f"--slash {args.slash} is negative; give the stake to take for an offense, or 0")
    if args.ledger and not args.key:
        raise ValueError(f"--ledger {args.ledger} needs the key that keeps the ledger; give its file with --key")
    if args.bands:
        tolerance, bands = verifier.load_bands(args.bands)
    else:
        tolerance, bands = rules_lib.Tolerance.of(config.trust, toploc.THRESHOLDS[args.thresholds]), None
    stack = contextlib.ExitStack()
    validator = verifier.Validator(
        experiment.model,
        verifier.published(weights, keep=config.rl.max_lag + 2, key=run_directory.public_key(workdir)),
        dataclasses.replace(verifier.rules_of(config, experiment.tokenizer, stack=stack), tolerance=tolerance),
        evidence_log.EvidenceLog(bands),
    )
    secret = run_directory.secret(workdir, config.seed)
    with stack:
        ledger = None
        if args.ledger:
            ledger = stack.enter_context(ledger_lib.Ledger(args.ledger, rollout_lib.WorkerKey.load(args.key)))
        state = validator_state.State(
            args.state or workdir / "validator.db",
            validator_state.identity(secret, None if ledger is None else ledger.state.keeper),
            keep_steps=config.rl.max_lag + 8,
        )
        service = validator_service.Service(
            validator,
            pathlib.Path(args.rollouts),
            lambda: -1 if (latest := broadcast.latest(weights)) is None else latest,
            secret=secret,
            state=state,
            ledger=ledger,
            slash=args.slash,
            eject=args.eject,
        )
        stack.callback(service.close)  # first, or the process decides all queued requests before it ends
        sock = sockets.listen(args.host, args.port)
        print(f"validating files under {args.rollouts} on {sockets.address(sock)}", flush=True)
        if args.address_file:
            sockets.announce(args.address_file, sock)
        web.run(web.server(make_app(service)), sock)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command `serve` to its parser."""
    add = parser.add_argument
    add("--workdir", required=True, help="working directory of the run whose config has the rules")
    add("--rollouts", required=True, help="directory of the files to check")
    add("--weights", help="root of the weight broadcast (default: <workdir>/weights)")
    add("--bands", help="JSON file of calibrate (default: the limits of the config, no sequential tests of replays)")
    add("--thresholds", choices=sorted(toploc.THRESHOLDS), default="paper", help="limits on proofs without --bands")
    add("--state", help="file of decisions, for the next start (default: <workdir>/validator.db)")
    add("--ledger", help="ledger file to write verdicts to")
    add("--key", help="file of the key that keeps the ledger")
    add("--slash", type=int, default=0, help="stake to take for an offense")
    add("--eject", action="store_true", help="eject a worker for an offense")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8300, help="port to listen on; 0 takes a free one")
    add("--address_file", help="file to write the URL to, once the service listens")
