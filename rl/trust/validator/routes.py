"""The HTTP routes of a validator, and the command `python -m rl.validator serve`.

Rollout files are checked by rl/trust/validator/service.py (with --rollouts), groups for a run's orchestrator by rl/trust/validator/judge.py.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import threading

import fastapi
import prometheus_client

from inference.rollouts import rollout as rollout_lib
from inference.server import metrics_routes, web
from rl import envs
from rl.experiment import workdir as run_directory
from rl.protocol import lease, task_schedule
from rl.protocol.ledger import ledger as ledger_lib
from rl.trust.validator import calibrate
from rl.trust.validator import judge as judge_lib
from rl.trust.validator import service as validator_service
from rl.trust.validator import state as validator_state
from rl.trust.validator import status as validator_status
from rl.trust.verification import evidence_log, run_bands, verifier
from sharding.system import cli, sign_in, signed_message, sockets
from sharding.system import text as text_lib
from sharding.system.logs import role_metrics
from sharding.weights import broadcast, bucket

MAX_REQUEST_BYTES = 2**15  # 256 hashes take 17 KiB
REPORT_S = 30.0  # between two lines about verdicts


def make_app(judge: judge_lib.Judge, service: validator_service.Service | None = None) -> fastapi.FastAPI:
    """Returns the HTTP application of a validator. A request that raises ValueError gets status 400 with the message."""
    app = fastapi.FastAPI(title="Intellax validator", docs_url=None, redoc_url=None)

    def verdicts() -> dict[str, int]:
        counts = [collections.Counter(dict(one.counts)) for one in (judge, service) if one]  # other threads count
        return dict(sum(counts, collections.Counter()))

    def health() -> dict:
        is_busy = judge.is_busy or (service is not None and service.is_busy)
        return {"verdicts": verdicts(), "waiting_for": "" if is_busy else "requests"}

    metrics = role_metrics.RoleMetrics("validator", lambda: {"verdicts_total": verdicts()}, ["verdict"])
    metrics_routes.add(app, metrics, health)
    _add_verdicts(app, judge, metrics.seconds["verdict"])
    if service:
        _add_files(app, service)
    web.reply_errors(app, {ValueError: (400, "invalid_request_error")})
    return app


def _add_verdicts(app: fastapi.FastAPI, judge: judge_lib.Judge, seconds: prometheus_client.Histogram) -> None:
    @app.post("/verdicts")
    async def verdicts(request: fastapi.Request):
        message = judge.verify(request.headers.get(lease.HEADER, ""))  # before the body
        body = await web.read_body(request)
        with seconds.time():
            found = await asyncio.to_thread(judge.judge, body, message["rollouts"])
        # Signed over the request, so that no third party can answer with earlier verdicts.
        reply = {"verdicts": [dataclasses.asdict(verdict) for verdict in found], "request": message["signature"]}
        return signed_message.sign(judge.key.private, reply)


def _add_files(app: fastapi.FastAPI, service: validator_service.Service) -> None:
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


def _reply(status: validator_status.Status) -> dict:
    body = dataclasses.asdict(status)
    del body["tasks"]  # for the ledger alone
    return body


def serve(args: argparse.Namespace) -> int:
    """Runs the validator over HTTP until it is interrupted; returns the exit code. Raises ValueError for a wrong option."""
    if bucket.is_url(args.workdir):
        found = f"--workdir {args.workdir} is in a bucket, and a validator writes its state to it"
        raise ValueError(f"{found}; copy the run's config.json to a folder here, and add --run, --weights, --rollouts")
    experiment, workdir = calibrate.load_experiment(args.workdir, args.code), pathlib.Path(args.workdir)
    config, weights = experiment.config, args.weights or str(workdir / "weights")
    if args.rollouts and not pathlib.Path(args.rollouts).is_dir():
        raise ValueError(f"--rollouts {args.rollouts} is not a directory; create it, or give another")
    if args.rollouts and config.rl.curriculum:
        found = f"--rollouts {args.rollouts} has files of any worker, and rl.curriculum = {config.rl.curriculum!r} draws tasks by results"
        raise ValueError(f"{found}, which only the orchestrator knows; leave --rollouts out")
    if args.slash < 0:
        raise ValueError(f"--slash {args.slash} is negative; give the stake to take for an offense, or 0")
    if args.ledger and not args.key:
        raise ValueError(f"--ledger {args.ledger} needs the key that keeps the ledger; give its file with --key")
    run = args.run or run_directory.public_key(workdir)
    if not text_lib.is_hex(run):
        raise ValueError(
            f"the run's public key is {run!r}; give 64 hex digits with --run, or a --workdir with weights.key"
        )
    with contextlib.ExitStack() as stack:
        trusted = run_directory.root_file(workdir) or run
        pull = verifier.published(weights, keep=config.rl.max_lag + 2, key=trusted)
        rules = verifier.rules_of(config, experiment.tokenizer, stack=stack, run=run, code=args.code)
        keep_steps = task_schedule.num_open_steps(config) + 7

        note = functools.partial(print, flush=True)
        # Those of the run's own servers and workers, if it is on this machine.
        keys = sorted((workdir / "keys").glob("[sw]*.key")) if config.topology.mode != "remote" else ()
        own = [rollout_lib.WorkerKey.load(file).worker for file in keys]
        bands = run_bands.RunBands.of(config, workdir, own=own, file=args.bands or "", on_note=note)
        evidence = evidence_log.EvidenceLog.of(
            config, bands.bands, own=own, convicts=bands.convicts, on_flagged=lambda node, line: note(line)
        )
        checker = verifier.Verifier(experiment.model, pull, rules, evidence, bands)
        key = own_key(args.key or run_directory.worker_key_file(workdir, "validator"))
        ledger = stack.enter_context(ledger_lib.Ledger(args.ledger, key)) if args.ledger else None
        identity = f"run {run[:16]}, {f'the ledger of {ledger.state.keeper[:16]}' if ledger else 'no ledger'}"
        state = validator_state.State(args.state or workdir / f"validator-{key.worker[:16]}.db", identity)
        stack.callback(state.close)
        judge = judge_lib.Judge(checker, key, run, state=state, keep_steps=keep_steps)
        service = None
        if args.rollouts:
            service = validator_service.Service(
                judge,
                pathlib.Path(args.rollouts),
                lambda: -1 if (latest := broadcast.latest(weights, key=trusted)) is None else latest,
                secret=run_directory.secret(workdir, config.seed),
                min_rate=config.trust.min_rate,
                ledger=ledger,
                slash=args.slash,
                eject=args.eject,
            )
            stack.callback(service.close)  # first, or the process decides all queued requests before it ends
        sock = sockets.listen(args.host, args.port)
        if service:
            print(f"validating files under {args.rollouts} on {sockets.address(sock)}", flush=True)
        print(f"validating groups of run {run} for trust.validators = {sockets.address(sock)}#{key.worker}", flush=True)
        if args.address_file:
            sockets.announce(args.address_file, sock)
        ended = threading.Event()
        stack.callback(ended.set)
        threading.Thread(target=_report, args=(judge, ended), name="report", daemon=True).start()
        if args.orchestrator:
            where = {"url": sockets.address(sock)}
            node = sign_in.SignIn(args.orchestrator, key.private, "validator", lambda: where, run=run)
            stack.enter_context(node)
        server = web.server(make_app(judge, service))
        if args.exit_with_parent:
            cli.stop_at_eof(lambda: setattr(server, "should_exit", True))
        web.run(server, sock)
    return 0


def _report(judge: judge_lib.Judge, ended: threading.Event) -> None:
    """Prints a line every REPORT_S in which verdicts were given, and one when they stop, until `ended`."""
    before = last = 0
    while not ended.wait(REPORT_S):
        counts = dict(judge.counts)
        num, num_ours = sum(counts.values()), sum(counts.get(reason, 0) for reason in judge_lib.OUR_FAULT)
        if num != before or before != last:
            rejected = f"{num - counts.get('ok', 0) - num_ours} rejected, {num_ours} without weights"
            waiting = "a replay" if judge.is_busy else "groups of the run"
            rate = f"{(num - before) / REPORT_S:.1f} groups/s"
            print(f"verdicts: {num} ({rejected}), {rate}, waiting for {waiting}", flush=True)
        before, last = num, before


def show_key(args: argparse.Namespace) -> int:
    """Prints the public key of a validator, which a run needs in its config; makes the key if it does not exist. Returns 0."""
    print(own_key(args.key).worker)
    return 0


def own_key(path: str | os.PathLike) -> rollout_lib.WorkerKey:
    """Returns the key pair in a file, which is made if it does not exist. Raises ValueError if its folder does not exist."""
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"--key {path}: the folder {path.parent} does not exist; create it, or name another file")
    if not path.exists():
        rollout_lib.WorkerKey.generate().save(path)
        print(f"made a new key: {path}", file=sys.stderr, flush=True)
    return rollout_lib.WorkerKey.load(path, "validator key")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command `serve` to its parser."""
    add = parser.add_argument
    add("--workdir", required=True, help="working directory of the run whose config has the rules")
    add("--run", help="public key of the run (default: that of <workdir>/weights.key)")
    add("--rollouts", help="directory of files to check (default: only groups are checked, for an orchestrator)")
    add("--weights", help="root of the weight broadcast (default: <workdir>/weights)")
    add("--bands", help="JSON file of calibrate (default: trust.bands of the run)")
    add("--state", help="file of decisions and evidence, for the next start (default: <workdir>/validator-<key>.db)")
    add("--ledger", help="ledger file to write verdicts to")
    add("--key", help="file of this validator's key, made if absent (default: <workdir>/keys/validator.key)")
    add("--slash", type=int, default=0, help="stake to take for an offense")
    add("--eject", action="store_true", help="eject a worker for an offense")
    add("--orchestrator", metavar="URL", help="sign in at this orchestrator, to be on its table of nodes")
    add("--code", **cli.FOLDERS, help=envs.CODE_HELP)
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8300, help="port to listen on; 0 takes a free one")
    add("--address_file", help="file to write the URL to, once the service listens")
    add("--exit_with_parent", action="store_true", help="stop when standard input closes")
