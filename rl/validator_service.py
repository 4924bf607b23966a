"""The validator as a service: rollout files in, verdicts out, over the routes that INTELLECT-2's validators ask.

    python -m rl.validator serve --workdir=runs/quickstart --rollouts=DIR [--bands=bands.json] [--ledger=DB --key=FILE]

1. `POST /validate/<file>` {file_sha, address} names a Parquet file under --rollouts; `POST /validategroup/<file>`
   {file_shas, group_id, file_number, group_size} names the first of several that belong together (<name>-0.parquet,
   <name>-1.parquet, ...). The answer is the status as it stands; asking again changes nothing.
2. One thread judges, in the order of arrival. A file's groups must be whole; every rollout gets the cheap checks, and
   the replay unless its node earned a pass: a node of reputation r (rl/ledger.py) is replayed with probability
   max(MIN_RATE, 1 - r), decided by a secret it cannot foresee.
3. `GET /status/<file>` and `/statusgroup/<file>`: {status, input_flops, output_flops, failing_indices, reason, reasons}.
   status is pending, accept, reject, incomplete_group (a file of the group is not there yet), crashed (the validator's
   own fault, with a traceback in its log), or unknown. Indices are of rollouts, or of files where a group was asked.
4. With a ledger, work that was submitted there is accepted, or taken back (and the node slashed by --slash, and ejected
   where --eject). Units must be the output FLOPs, within 1, and the signer the node that submitted the work.

What an asker says costs nobody anything: a wrong hash is answered with 400, a wrong address with a refusal of that
answer alone. Only bytes whose hash a node signed for in the ledger can cost that node something.

Group-aware: advantages compare the members of a group, so a group falls with its worst member and `failing_indices`
names all of it; `reasons` tells the culprits from the others. `GET /health` counts verdicts by reason.
"""

import argparse
import asyncio
import collections
import concurrent.futures
import dataclasses
import hashlib
import hmac
import pathlib
import re
import sys
from collections.abc import Sequence

import fastapi
from starlette import requests

from inference import rollout as rollout_lib
from inference import rollout_file, toploc, web
from models import config as config_lib
from rl import calibrate, ledger, validator, verdicts
from rl import experiment as experiment_lib
from sharding import broadcast, listening

MIN_RATE = 0.05  # of replay, for a node of the best reputation
MAX_STATUSES = 2**16  # files remembered
MAX_GROUP_FILES = 256


@dataclasses.dataclass(frozen=True)
class Status:
    """What is known of one request."""

    status: str
    reason: str = ""
    failing_indices: tuple[int, ...] = ()
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)  # by index, of the culprits
    input_flops: int = 0
    output_flops: int = 0
    checked: bool = False  # replayed, not only looked over
    signers: tuple[str, ...] = ()


class Service:
    """Judges files under `root`; `submit` and `status` from any thread.

    Args:
      judge: with rules; its weights are those of the broadcast whose newest version `newest` tells.
      book: a ledger kept by `key`, or None.
    """

    def __init__(
        self,
        judge: validator.Validator,
        rules: verdicts.Rules,
        model: config_lib.ModelConfig,
        root: pathlib.Path,
        newest,
        *,
        secret: bytes,
        book: ledger.Ledger | None = None,
        key: rollout_lib.WorkerKey | None = None,
        slash: int = 0,
        eject: bool = False,
    ):
        self._judge, self._rules, self._model, self._root, self._newest = judge, rules, model, root, newest
        self._secret, self._book, self._key, self._slash, self._eject = secret, book, key, slash, eject
        self._seen = verdicts.Seen(keep_steps=rules.max_lag + 8)
        self._jobs: collections.OrderedDict[tuple, concurrent.futures.Future] = collections.OrderedDict()
        self._latest: dict[str, tuple] = {}  # job by name
        self._incomplete: dict[str, Status] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "validator")
        self.counts: collections.Counter = collections.Counter()

    def submit(self, name: str, shas: Sequence[str], address: str | None = None, *, group: bool = False) -> Status:
        """Queues a request once and gives its status. ValueError for one that names no possible file, or another's hash."""
        if not 0 < len(shas) <= MAX_GROUP_FILES or not all(re.fullmatch("[0-9a-f]{64}", sha or "") for sha in shas):
            raise ValueError(f"file_sha must be a SHA-256 in lower-case hex, for 1 to {MAX_GROUP_FILES} files")
        paths = [self._path(part) for part in (_members(name, len(shas)) if group else [name])]
        job = (name, tuple(shas), group)
        if job not in self._jobs:
            missing = [path.name for path in paths if not path.is_file()]
            if missing and group:
                self._incomplete[name] = Status("incomplete_group", f"file: {missing[0]} is not there yet")
                while len(self._incomplete) > MAX_STATUSES:
                    del self._incomplete[next(iter(self._incomplete))]
                return self._incomplete[name]
            for path, sha in zip(paths, shas, strict=True):
                _read(path, sha)
            self._jobs[job] = self._thread.submit(self._answer, paths, shas, group)
            self._latest[name] = job
            while len(self._jobs) > MAX_STATUSES:
                old, _ = self._jobs.popitem(last=False)
                if self._latest.get(old[0]) == old:
                    del self._latest[old[0]]
        status = self._status(job)
        if address is not None and status.signers and status.signers != (address,):
            return Status("reject", "signature: it is signed by another node than the one that hands it in")
        return status

    def status(self, name: str) -> Status:
        if name not in self._latest:
            return self._incomplete.get(name, Status("unknown", "it was never handed in, or long ago"))
        return self._status(self._latest[name])

    def _status(self, job: tuple) -> Status:
        future = self._jobs[job]
        if not future.done():
            return Status("pending")
        if error := future.exception():
            return Status("crashed", f"the validator failed: {type(error).__name__}")
        return future.result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # The judging thread only.

    def _answer(self, paths: list[pathlib.Path], shas: Sequence[str], group: bool) -> Status:
        try:
            status = self._judge_files(paths, shas, group)
        except BaseException as error:  # status() says "crashed"; the log says why
            print(f"validator: {paths[0].name}: {error!r}", file=sys.stderr, flush=True)
            self.counts["crashed"] += 1
            raise
        self.counts[status.status if status.status != "reject" else f"reject {status.reason.split(':')[0]}"] += 1
        return status

    def _judge_files(self, paths: list[pathlib.Path], shas: Sequence[str], group: bool) -> Status:
        rollouts: list[rollout_lib.Rollout] = []
        owner: list[int] = []  # of each rollout, its file
        for number, (path, sha) in enumerate(zip(paths, shas, strict=True)):
            data = _read(path, sha)
            try:
                part = rollout_lib.from_parquet(data)
                if not part:
                    raise ValueError(f"file: {path.name} holds no rollout")
            except ValueError as error:
                index = number if group else 0
                return self._settle(Status("reject", str(error), (index,), {index: str(error)}), shas)
            rollouts += part
            owner += [number] * len(part)
        status = self._judge_rollouts(rollouts, hashlib.sha256("".join(shas).encode()).digest())
        if group:  # indices of files
            files = {owner[i]: text for i, text in reversed(status.reasons.items())}
            failing = tuple(sorted({owner[i] for i in status.failing_indices}))
            status = dataclasses.replace(status, failing_indices=failing, reasons=files)
        return self._settle(status, shas)

    def _judge_rollouts(self, rollouts: list[rollout_lib.Rollout], lot: bytes) -> Status:
        found = [self._judge.judge_cheaply(rollout, self._newest()) for rollout in rollouts]
        for i, rollout in enumerate(rollouts):
            if found[i].accepted:
                found[i] = verdicts.fresh(rollout, self._seen)
        groups: dict[tuple, list[int]] = collections.defaultdict(list)
        for i, rollout in enumerate(rollouts):
            groups[rollout.step, rollout.task.group].append(i)
        for members in groups.values():
            whole = verdicts.complete([rollouts[i] for i in members], self._rules)
            if not whole.accepted and all(found[i].accepted for i in members):
                for i in members:
                    found[i] = whole
        # Whole groups only: the others are lost already. Each by the repute of its own signer: a stranger's rollouts
        # must not pass behind one that borrows a good name and fails by its signature.
        passed = [i for members in groups.values() if all(found[i].accepted for i in members) for i in members]
        checked = any(self._is_drawn(node, lot) for node in {rollouts[i].worker for i in passed})
        if checked:
            judged = self._judge.judge_replayed([rollouts[i] for i in passed])
            for i, verdict in zip(passed, judged, strict=True):
                found[i] = verdict
        culprits = {i: str(verdict) for i, verdict in enumerate(found) if not verdict.accepted}
        failing = {i for members in groups.values() if any(j in culprits for j in members) for i in members}
        self._seen.remember([rollout for i, rollout in enumerate(rollouts) if i not in failing])
        flops = [flops_of(self._model, rollout) for rollout in rollouts]
        return Status(
            "reject" if failing else "accept",
            culprits[min(culprits)] if culprits else "",
            tuple(sorted(failing)),
            culprits,
            sum(prompt for prompt, _ in flops),
            sum(output for _, output in flops),
            checked,
            tuple(sorted({rollout.worker for rollout in rollouts})),
        )

    def _is_drawn(self, node: str, lot: bytes) -> bool:
        if self._book is None:
            return True
        rate = max(MIN_RATE, 1 - self._book.refresh().reputation(node))
        number = int.from_bytes(hmac.new(self._secret, lot, hashlib.sha256).digest()[:8], "big")
        return number < rate * 2**64

    def _settle(self, status: Status, shas: Sequence[str]) -> Status:
        """Writes the verdict on work that the ledger knows; claimed units must be what was measured."""
        if self._book is None:
            return status
        state = self._book.refresh()
        known = [sha for sha in shas if sha in state.works and state.works[sha].status == "pending"]
        claimed = sum(state.works[sha].units for sha in known)
        reason = ""
        if {state.works[sha].node for sha in known} - set(status.signers):
            reason = "signature: it is signed by another node than the one that submitted the work"
        elif len(known) == len(shas) and abs(claimed - status.output_flops) > len(shas):
            reason = f"units: {claimed} were claimed, {status.output_flops} measured"
        if status.status == "accept" and reason:
            indices = tuple(range(len(shas)))
            status = dataclasses.replace(
                status, status="reject", reason=reason, failing_indices=indices, reasons=dict.fromkeys(indices, reason)
            )
        events = []
        for sha in known:
            work = state.works[sha]
            if status.status == "accept":
                events.append(ledger.sign("accept", work.node, self._key, work=sha, checked=status.checked))
            elif status.status == "reject" and work.units:
                events.append(
                    ledger.sign("invalidate", work.node, self._key, work=sha, units=work.units, reason=_line(status))
                )
        if status.status == "reject":
            for node in {state.works[sha].node for sha in known}:
                if self._slash:
                    events.append(ledger.sign("slash", node, self._key, amount=self._slash, reason=_line(status)))
                if self._eject and not state.nodes[node].ejected:
                    events.append(ledger.sign("eject", node, self._key, reason=_line(status)))
        if events:
            self._book.append(*events)
        return status

    def _path(self, name: str) -> pathlib.Path:
        """Under the root, whatever the name says."""
        parts = pathlib.PurePosixPath(name).parts
        clean = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,199}", part) for part in parts)
        if not parts or not clean or not name.endswith(".parquet"):
            raise ValueError(f"{name[:200]!r} is no name of a rollout file; give a relative path to a .parquet")
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root.resolve()):  # a link that leads out
            raise ValueError(f"{name[:200]!r} lies outside the directory of rollouts")
        return path


def flops_of(model: config_lib.ModelConfig, rollout: rollout_lib.Rollout) -> tuple[int, int]:
    """(prompt, output) FLOPs of the matrix products: 2 per weight in use and token, 4 H C per position attended to.

    The head counts where a token was sampled, as INTELLECT-2 counts only what a worker is asked for.
    """
    D, C, H, K, L = model.model_dim, model.head_dim, model.num_heads, model.num_kv_heads, model.num_layers
    dense = 3 * D * model.ffn_dim
    moe = 3 * D * model.expert_ffn_dim * model.experts_per_token + D * model.num_experts
    num_dense = L if not model.num_experts else model.first_dense_layers
    per_token = 2 * (L * (2 * D * H * C + 2 * D * K * C) + num_dense * dense + (L - num_dense) * moe)

    def span(start: int, end: int) -> int:  # tokens at positions start .. end - 1
        attended = (end * (end + 1) - start * (start + 1)) // 2
        return (end - start) * per_token + 4 * L * H * C * attended

    num_prompt, num_tokens = verdicts.prompt_length(rollout), len(rollout.tokens)
    head = 2 * D * model.vocab_size * int(rollout.sampled_mask.sum())
    return span(0, num_prompt), span(num_prompt, num_tokens) + head


def make_app(service: Service) -> fastapi.FastAPI:
    app = fastapi.FastAPI(title="Intellax validator", docs_url=None, redoc_url=None)
    app.add_exception_handler(requests.ClientDisconnect, web.hung_up)

    @app.post("/validate/{file:path}")
    async def validate(file: str, request: fastapi.Request):
        body = await web.read_json(request)
        sha, address = body.get("file_sha"), body.get("address")
        if not isinstance(sha, str) or not isinstance(address, str | None):
            raise ValueError("validate needs file_sha (a string) and takes address (a hex public key)")
        return _shown(await asyncio.to_thread(service.submit, file, [sha], address))

    @app.post("/validategroup/{file:path}")
    async def validate_group(file: str, request: fastapi.Request):
        body = await web.read_json(request)
        shas, address = body.get("file_shas"), body.get("address")
        if not isinstance(shas, list) or not all(isinstance(sha, str) for sha in shas):
            raise ValueError("validategroup needs file_shas, a list of strings")
        if body.get("group_size", len(shas)) != len(shas):
            raise ValueError(f"group_size is {body['group_size']}, but {len(shas)} hashes were given")
        if not isinstance(address, str | None):
            raise ValueError("address must be a hex public key")
        return _shown(await asyncio.to_thread(service.submit, file, shas, address, group=True))

    @app.get("/status/{file:path}")
    @app.get("/statusgroup/{file:path}")
    async def status(file: str):
        return _shown(service.status(file))

    @app.get("/health")
    async def health():
        return {"status": "ok", "verdicts": dict(service.counts)}

    @app.exception_handler(ValueError)
    async def refuse(request, error):
        return web.error(400, str(error), "invalid_request_error")

    return app


def _shown(status: Status) -> dict:
    body = dataclasses.asdict(status)
    return body | {"reasons": {str(index): text for index, text in status.reasons.items()}}


def _line(status: Status) -> str:
    """The reason as the ledger takes it."""
    return "".join(c if c.isprintable() else "?" for c in status.reason)[:1024] or "rejected"


def _read(path: pathlib.Path, sha: str) -> bytes:
    """The file's bytes. ValueError where they are not those that were named."""
    if not path.is_file():
        raise ValueError(f"file: {path.name} is not there")
    rollout_file.check_size(path.stat().st_size)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha:
        raise ValueError(f"file: the SHA-256 of {path.name} is another")
    return data


def _members(name: str, count: int) -> list[str]:
    """<stem>-0.parquet, <stem>-1.parquet, ... of a name that ends in a number, as group files do."""
    match = re.fullmatch(r"(.*-)[0-9]+(\.parquet)", name)
    if not match:
        raise ValueError(f"{name[:200]!r} is no name of a group's file; it must end in -<index>.parquet")
    return [f"{match[1]}{index}{match[2]}" for index in range(count)]


def serve(args: argparse.Namespace) -> int:
    exp = calibrate.load_experiment(args.workdir)
    config, weights = exp.raw, pathlib.Path(args.weights or pathlib.Path(args.workdir) / "weights")
    if not pathlib.Path(args.rollouts).is_dir():
        raise ValueError(f"--rollouts {args.rollouts} is no directory")
    if args.bands:
        tolerance, bands = validator.load_bands(args.bands)
    else:
        trust = config.trust
        proofs = toploc.THRESHOLDS[args.thresholds]
        tolerance = validator.Tolerance(trust.margin, trust.max_wrong_tokens, trust.logprob_tolerance, proofs)
        bands = None
    book = key = None
    if args.ledger:
        if not args.key:
            raise ValueError("--ledger needs --key, the key that keeps it")
        key = rollout_lib.WorkerKey.load(args.key)
        book = ledger.Ledger(args.ledger, key)
    rules = validator.rules_of(config, exp.tokenizer)
    judge = validator.Validator(
        exp.model,
        validator.published(weights, keep=config.rl.max_lag + 2),
        calibrate.filters_of(config),
        tolerance,
        max_model_len=config.inference.max_model_len,
        rules=rules,
        bands=bands,
    )
    service = Service(
        judge,
        rules,
        exp.model,
        pathlib.Path(args.rollouts),
        lambda: -1 if (latest := broadcast.latest(str(weights))) is None else latest,
        secret=experiment_lib.secret(pathlib.Path(args.workdir), config.seed),
        book=book,
        key=key,
        slash=args.slash,
        eject=args.eject,
    )
    sock = listening.listen(args.host, args.port)
    print(f"validating files under {args.rollouts} on {listening.address(sock)}", flush=True)
    if args.address_file:
        pathlib.Path(args.address_file).write_text(listening.address(sock))
    web.server(make_app(service)).run(sockets=[sock])
    service.close()
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", required=True, help="of the run: its config says what is prescribed")
    parser.add_argument("--rollouts", required=True, help="directory of the files that are judged")
    parser.add_argument("--weights", help="root of the weight broadcast (default: <workdir>/weights)")
    parser.add_argument(
        "--bands", help="JSON of calibrate (default: the limits of the config, nothing summed per node)"
    )
    parser.add_argument("--thresholds", choices=sorted(toploc.THRESHOLDS), default="deployed", help="without --bands")
    parser.add_argument("--ledger", help="ledger to write verdicts to")
    parser.add_argument("--key", help="file of the key that keeps the ledger")
    parser.add_argument("--slash", type=int, default=0, help="stake taken at a rejection")
    parser.add_argument("--eject", action="store_true", help="eject the node at a rejection")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8300, help="0 takes a free port")
    parser.add_argument("--address_file", help="written with the URL once it answers")
