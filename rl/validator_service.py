"""The validator as a service: rollout files in, verdicts out, over the routes that INTELLECT-2's validators ask.

    python -m rl.validator serve --workdir=runs/quickstart --rollouts=DIR [--bands=bands.json] [--ledger=DB --key=FILE]

1. `POST /validate/<file>` {file_sha, address} names a Parquet file under --rollouts; `POST /validategroup/<file>`
   {file_shas, group_id, file_number, group_size} names the first of several that belong together (<name>-0.parquet,
   <name>-1.parquet, ...). The answer is the status as it stands; asking again changes nothing.
2. One thread judges, in the order of arrival. A file's groups must be whole; every rollout gets the cheap checks, and
   the replay unless its node earned a pass: a node of reputation r (rl/ledger.py) is replayed with probability
   max(MIN_RATE, 1 - r), decided by a secret it cannot foresee.
3. `GET /status/<file>` and `/statusgroup/<file>`: {status, input_flops, output_flops, failing_indices, reason, reasons}.
   status is pending, accept, reject, incomplete_group (a file of the group is not there yet, or was not named), crashed
   (the validator's own fault, weights that it cannot have among them, with a line in its log; hand it in again), or
   unknown. Indices are of rollouts, or of files where a group was asked.
4. With a ledger, only work that was submitted there is judged (else 400). Each file is settled for itself: accepted, or
   taken back (and its node slashed by --slash, and ejected where --eject). Its signer must be the node that submitted
   the work, its units the output FLOPs, within 1. Work that repeats other work is not paid, and no offence.

What an asker says costs nobody anything: a wrong hash is answered with 400, a wrong address with a refusal of that
answer alone, and a file that is named without the rest of its group, or beside a bad one, is judged as if it had not
been. Only bytes whose hash a node signed for in the ledger can cost that node something. A file is judged for good
once; the same bytes under another name or in another group have the status that they had.

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
import threading
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
MAX_STATUSES = 2**16  # of files, requests and names that are remembered
MAX_GROUP_FILES = 256
PARTIAL = "incomplete_group"  # of a rollout whose group is not all there: nobody's fault, and no verdict
RANKS = ("accept", "incomplete_group", "crashed", "reject")  # a file's status is the worst of its rollouts'


@dataclasses.dataclass(frozen=True)
class Status:
    """What is known of one request, or of one file of it."""

    status: str
    reason: str = ""
    failing_indices: tuple[int, ...] = ()
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)  # by index, of the culprits
    input_flops: int = 0
    output_flops: int = 0
    checked: bool = False  # replayed, not only looked over
    signers: tuple[str, ...] = ()

    @property
    def final(self) -> bool:
        """Whether other company would change nothing: it was accepted, or is at fault itself."""
        return self.status == "accept" or (self.status == "reject" and bool(self.reasons))


UNKNOWN = Status("unknown", "it was never handed in, or long ago")


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
        self._lock = threading.Lock()  # of the next two
        self._jobs: collections.OrderedDict[tuple[str, ...], concurrent.futures.Future] = collections.OrderedDict()
        self._latest: collections.OrderedDict[tuple[str, bool], tuple[str, ...] | Status] = collections.OrderedDict()
        self._files: collections.OrderedDict[str, Status] = collections.OrderedDict()  # final ones, by hash
        self._unsettled: set[str] = set()  # judged, and not yet in the ledger
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "validator")
        self.counts: collections.Counter = collections.Counter()

    def submit(self, name: str, shas: Sequence[str], address: str | None = None, *, group: bool = False) -> Status:
        """Queues the files once, whatever they are called, and gives their status; what crashed is queued again.

        ValueError where it names no possible file, another's hash, or with a ledger work that nobody submitted there.
        """
        if not 0 < len(shas) <= MAX_GROUP_FILES or not all(re.fullmatch("[0-9a-f]{64}", sha or "") for sha in shas):
            raise ValueError(f"file_sha must be a SHA-256 in lower-case hex, for 1 to {MAX_GROUP_FILES} files")
        if len(set(shas)) < len(shas):
            raise ValueError("file_shas names one file twice; name each file once")
        paths = [self._path(part) for part in (_members(name, len(shas)) if group else [name])]
        job = tuple(shas)
        if self._book is not None:
            works = self._book.refresh().works
            if unknown := [sha for sha in shas if sha not in works]:
                raise ValueError(f"file_sha {unknown[0]} is no work of this ledger; append its submit event first")
        missing = [path.name for path in paths if not path.is_file()]
        if missing and group:
            return self._point(name, group, Status("incomplete_group", f"file: {missing[0]} is not there yet"))
        if self._latest.get((name, group)) != job or self._is_open(job):
            _check_files(paths, shas)
            with self._lock:
                if self._is_open(job):
                    self._jobs[job] = self._thread.submit(self._answer, paths, job)
                    while len(self._jobs) > MAX_STATUSES:
                        self._jobs.popitem(last=False)
            self._point(name, group, job)
        status = self._status(job, group)
        if address is not None and status.signers and status.signers != (address,):
            return Status("reject", "signature: it is signed by another node than the one that hands it in")
        return status

    def status(self, name: str, *, group: bool = False) -> Status:
        """Of what was last asked under this name."""
        latest = self._latest.get((name, group), UNKNOWN)
        return latest if isinstance(latest, Status) else self._status(latest, group)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _point(self, name: str, group: bool, latest: tuple[str, ...] | Status):
        with self._lock:
            self._latest[name, group] = latest
            while len(self._latest) > MAX_STATUSES:
                self._latest.popitem(last=False)
        return latest

    def _is_open(self, job: tuple[str, ...]) -> bool:
        """Whether it must be queued: it never was, or a fault of ours kept it from a verdict."""
        future = self._jobs.get(job)
        return future is None or (
            future.done() and (future.exception() is not None or any(f.status == "crashed" for f in future.result()))
        )

    def _status(self, job: tuple[str, ...], group: bool) -> Status:
        future = self._jobs.get(job)
        if future is None:
            return UNKNOWN
        if not future.done():
            return Status("pending")
        if error := future.exception():
            return Status("crashed", f"the validator failed: {type(error).__name__}")
        files = [self._files.get(sha, file) for sha, file in zip(job, future.result(), strict=True)]
        return _combined(files) if group else files[0]

    # The judging thread only.

    def _answer(self, paths: list[pathlib.Path], shas: Sequence[str]) -> list[Status]:
        try:
            files = self._judge_files(paths, shas)
            self._files.update((sha, file) for sha, file in zip(shas, files, strict=True) if file.final)
            while len(self._files) > MAX_STATUSES:
                self._files.popitem(last=False)
            self._settle(shas, files)
        except BaseException as error:  # status() says "crashed"; the log says why
            print(f"validator: {paths[0].name}: {error!r}", file=sys.stderr, flush=True)
            self.counts["crashed"] += 1
            raise
        status = _combined(files)
        self.counts[status.status if status.status != "reject" else f"reject {status.reason.split(':')[0]}"] += 1
        return files

    def _judge_files(self, paths: list[pathlib.Path], shas: Sequence[str]) -> list[Status]:
        """One each, with indices of its rollouts. A file whose status is final keeps it in any company."""
        works = None if self._book is None else self._book.refresh().works
        files = [self._files.get(sha) for sha in shas]
        parts: dict[int, list[rollout_lib.Rollout]] = {}  # of the files that are to be judged together
        num_bytes = 0
        for number, (path, sha) in enumerate(zip(paths, shas, strict=True)):
            if files[number] is not None:
                continue
            data = _read(path, sha)
            self._unsettled.add(sha)
            try:
                part = rollout_lib.from_parquet(data)
                if not part:
                    raise ValueError(f"file: {path.name} holds no rollout")
            except ValueError as error:
                files[number] = Status("reject", str(error), (0,), {0: str(error)})
                continue
            num_bytes += sum(13 * len(rollout.tokens) + len(rollout.proofs) for rollout in part)
            if num_bytes > rollout_file.MAX_DECODED_BYTES:
                raise ValueError(f"more than {rollout_file.MAX_DECODED_BYTES} bytes of rollouts in one request")
            signers = tuple(sorted({rollout.worker for rollout in part}))
            if works is not None and signers != (works[sha].node,):
                reason = "signature: it is signed by another node than the one that submitted the work"
                files[number] = Status("reject", reason, tuple(range(len(part))), {0: reason}, signers=signers)
            else:
                parts[number] = part
        rollouts = [rollout for part in parts.values() for rollout in part]
        found, checked = self._judge_rollouts(rollouts, hashlib.sha256("".join(shas).encode()).digest())
        groups = _groups(rollouts)
        # A group falls with its worst member; while one is incomplete, nothing else of the request is decided.
        falls = {i: max(_rank(found[j]) for j in members) for members in groups for i in members}
        least = int(any(verdict.reason == PARTIAL for verdict in found))
        start = 0
        for number, part in parts.items():
            span = range(start, start + len(part))
            files[number] = self._status_of(part, [found[i] for i in span], [falls[i] for i in span], least, checked)
            if works is not None and files[number].status == "accept":
                files[number] = _with_units(files[number], works[shas[number]].units)
            start += len(part)
        owner = [number for number, part in parts.items() for _ in part]
        for members in groups:  # what is sound of files that are done; the rest may come again
            if not least and all(falls[i] == 0 and files[owner[i]].final for i in members):
                self._seen.remember([rollouts[i] for i in members])
        return files

    def _judge_rollouts(self, rollouts: list[rollout_lib.Rollout], lot: bytes) -> tuple[list[verdicts.Verdict], bool]:
        """A verdict each, and whether they were replayed."""
        newest = self._newest()
        found = [self._judge.judge_cheaply(rollout, newest) for rollout in rollouts]
        for i, rollout in enumerate(rollouts):
            if found[i].accepted:
                found[i] = verdicts.fresh(rollout, self._seen)
            elif found[i].reason == "versions" and newest < (version := int(rollout.versions.max())) < rollout.step:
                found[i] = verdicts.Verdict(
                    "weights", f"version {version} has not come here yet, the newest is {newest}"
                )
        groups = _groups(rollouts)
        for members in groups:
            whole = verdicts.complete([rollouts[i] for i in members], self._rules)
            if not whole.accepted and all(found[i].accepted for i in members):
                whole = verdicts.Verdict(PARTIAL, str(whole)) if whole.reason == "samples" else whole
                for i in members:
                    found[i] = whole
        if any(verdict.reason == PARTIAL for verdict in found):
            return found, False
        # Whole groups only: the others are lost already. Each by the repute of its own signer: a stranger's rollouts
        # must not pass behind one that borrows a good name and fails by its signature.
        passed = [i for members in groups if all(found[i].accepted for i in members) for i in members]
        checked = any(self._is_drawn(node, lot) for node in {rollouts[i].worker for i in passed})
        if checked:
            judged = self._judge.judge_replayed([rollouts[i] for i in passed])
            for i, verdict in zip(passed, judged, strict=True):
                found[i] = verdict
        places = set()
        for members in groups:
            if all(found[i].accepted for i in members):
                place = rollouts[members[0]].step, rollouts[members[0]].task.group
                if place in places:
                    for i in members:
                        found[i] = verdicts.Verdict("duplicate", "another node's group of this task came with it")
                places.add(place)
        return found, checked

    def _status_of(
        self,
        rollouts: list[rollout_lib.Rollout],
        found: list[verdicts.Verdict],
        falls: list[int],  # ranks, by rollout
        least: int,
        checked: bool,
    ) -> Status:
        """Of one file."""
        worst = max(least, *falls)
        own = [str(verdict).removeprefix(f"{PARTIAL}: ") for verdict in found if worst and _rank(verdict) == worst]
        flops = [flops_of(self._model, rollout) for rollout in rollouts]
        return Status(
            RANKS[worst],
            (own[0] if own else "group: it depends on another file of the request") if worst else "",
            tuple(i for i, rank in enumerate(falls) if rank),
            {i: str(verdict) for i, verdict in enumerate(found) if _rank(verdict) == len(RANKS) - 1},
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

    def _settle(self, shas: Sequence[str], files: list[Status]) -> None:
        """Writes what was decided on work that is pending: each file for itself, and a penalty once per node."""
        if self._book is None:
            return
        state = self._book.refresh()
        events, guilty = [], {}
        for sha, file in zip(shas, files, strict=True):
            work = state.works[sha]
            if work.status != "pending" or sha not in self._unsettled:
                continue
            if file.status == "accept":
                events.append(ledger.sign("accept", work.node, self._key, work=sha, checked=file.checked))
            elif file.status == "reject":
                line = _line(file)
                if work.units:
                    events.append(
                        ledger.sign("invalidate", work.node, self._key, work=sha, units=work.units, reason=line)
                    )
                # Honest nodes are told to do one task twice, too (a lease ran out, a batch was stale): not paid, no more.
                if any(not text.startswith("duplicate") for text in file.reasons.values()):
                    guilty.setdefault(work.node, line)
        for node, line in guilty.items():
            if self._slash:
                events.append(ledger.sign("slash", node, self._key, amount=self._slash, reason=line))
            if self._eject and not state.nodes[node].ejected:
                events.append(ledger.sign("eject", node, self._key, reason=line))
        if events:
            self._book.append(*events)
        self._unsettled.difference_update(shas)

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


def _shown(status: Status) -> dict:
    body = dataclasses.asdict(status)
    return body | {"reasons": {str(index): text for index, text in status.reasons.items()}}


def _groups(rollouts: Sequence[rollout_lib.Rollout]) -> list[list[int]]:
    """Indices of each group's members: one worker's, so that nobody spoils or completes the group of another."""
    groups = collections.defaultdict(list)
    for i, rollout in enumerate(rollouts):
        groups[rollout.step, rollout.task.group, rollout.worker].append(i)
    return list(groups.values())


def _rank(verdict: verdicts.Verdict) -> int:
    """Into RANKS. "weights" is our own fault: they could not be had here."""
    return {"ok": 0, PARTIAL: 1, "weights": 2}.get(verdict.reason, 3)


def _with_units(file: Status, units: int) -> Status:
    """Rejects a file whose units are not its output FLOPs."""
    if abs(units - file.output_flops) <= 1:
        return file
    reason = f"units: {units} were claimed, {file.output_flops} measured"
    return dataclasses.replace(file, status="reject", reason=reason, failing_indices=(0,), reasons={0: reason})


def _combined(files: Sequence[Status]) -> Status:
    """Of a request: indices are of files."""
    worst = max(files, key=lambda file: (RANKS.index(file.status), bool(file.reasons)))
    return Status(
        worst.status,
        worst.reason,
        tuple(i for i, file in enumerate(files) if file.status != "accept"),
        {i: file.reason for i, file in enumerate(files) if file.reasons},
        sum(file.input_flops for file in files),
        sum(file.output_flops for file in files),
        any(file.checked for file in files),
        tuple(sorted({signer for file in files for signer in file.signers})),
    )


def _line(status: Status) -> str:
    """The reason as the ledger takes it."""
    return "".join(c if c.isprintable() else "?" for c in status.reason)[:1024] or "rejected"


def _check_files(paths: Sequence[pathlib.Path], shas: Sequence[str]) -> None:
    """ValueError where they are not those that were named, or too large together. Takes no memory."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"file: {path.name} is not there")
    rollout_file.check_size(sum(path.stat().st_size for path in paths))
    for path, sha in zip(paths, shas, strict=True):
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha:
                raise ValueError(f"file: the SHA-256 of {path.name} is another")


def _read(path: pathlib.Path, sha: str) -> bytes:
    """The file's bytes. ValueError where they are others by now."""
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
