"""A rollout worker: leases groups, runs environments against inference servers, scores, signs, submits. Imports no jax.

    python -m rl.worker --orchestrator http://host:port --run KEY

1. `GET /run` returns environment, tokenizer, and servers, signed by the run's key; `POST /lease` returns groups (tasks with
   prescribed seeds), signed as well. All requests are signed for this run and this process of the orchestrator.
2. Each group is one request of G samples. The environment makes the prompt from the task index and scores each completion.
3. The rollouts are signed with this worker's key. Finished groups are submitted together as Parquet, when the previous
   submission has been answered. Rejections are printed with their reasons.

The worker survives a restart of the orchestrator or a server: it repeats requests for up to `--give_up_s` seconds. Without
`--run`, it works for the first run that answers, and sends $INTELLAX_API_KEY to no server.
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping

import httpx
import numpy as np

from inference import client as client_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import web
from models.text import tokenizer as tokenizer_lib
from rl import envs
from rl.envs import environment
from rl.envs import scorer as scorer_lib
from rl.protocol import lease
from sharding.system import cli
from sharding.system import sandbox as sandbox_lib

MAX_JOINED_BYTES = web.MAX_BODY_BYTES // 2  # of groups in one submission, before compression
VOID_PAUSE_S = 0.5  # after a group that no server can generate any more
NOTICE_S = 5.0  # of an unreachable orchestrator, until a notice is printed


@dataclasses.dataclass(frozen=True)
class Run:
    """The run that a worker works for, as the orchestrator described it: environment, scorer, tokenizer, and settings."""

    env: environment.Environment
    scorer: scorer_lib.Scorer
    env_seed: int
    tokenizer: tokenizer_lib.Tokenizer
    servers: list[str]
    sampling: dict
    router_replay: bool = False  # rollouts must name the experts that ran
    work_bits: int = 0  # of the proof of work that the run asks of an unknown key; 0: none
    server_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by URL, of servers that sign samples


async def work(
    orchestrator: str,
    key: rollout_lib.WorkerKey,
    trusted: str | None = None,
    *,
    concurrency: int,
    give_up_s: float,
    sandbox: str = "auto",
) -> None:
    """Leases, generates, and submits up to `concurrency` groups at the same time, until an error; never returns.

    `trusted` is the public key (hex) of the run to work for, None: of the first that answers. Raises ConnectionError after `give_up_s` seconds without the orchestrator, and ValueError if it rejects a request or is not
    signed by the expected run.
    """
    has_trust, run, described = trusted is not None, None, None
    async with httpx.AsyncClient(base_url=orchestrator, timeout=60) as http:
        while True:  # a pass per process of the orchestrator
            session, description = await _open_session(http, trusted, give_up_s)
            if trusted is None:
                trusted = session.run
                _note(f"working for run {trusted}, the first that answered; --run {trusted} accepts no other")
            if run is None or description != described:  # else the environment and its scorer stay
                if run is not None:
                    await asyncio.to_thread(run.scorer.close)
                run, described = _read_run(description, sandbox), description
            if run.work_bits:
                _note(f"a proof of work of this key takes about 2^{run.work_bits} hashes")
            proof = lease.find_work(session.run, key.worker, run.work_bits)  # blocks: nothing else can be done yet
            signed = Signed(http, key, session, proof, give_up_s)
            api_key = None if has_trust else ""
            try:
                options = {"give_up_s": give_up_s, "api_key": api_key, "keys": run.server_keys}
                async with client_lib.Client(run.servers, **options) as client:
                    await _work_in_session(signed, client, run, concurrency)
            except* lease.StaleSession as error:  # its leases are void
                _note(f"a new session of the orchestrator: {error.exceptions[0]}")
                await asyncio.sleep(0.5)


@dataclasses.dataclass(frozen=True)
class Signed:
    """Signed requests of one worker to one session of an orchestrator."""

    http: httpx.AsyncClient
    key: rollout_lib.WorkerKey
    session: lease.Session
    work: str
    give_up_s: float

    async def lease(self, capacity: int, returned: list) -> list[dict]:
        """Returns the groups that the orchestrator leases. Raises ValueError if the reply is not signed by the run."""
        sent = {}

        def make_body():
            sent.update(lease.request(self.key, self.session, capacity=capacity, returned=returned, work=self.work))
            return {"json": sent}

        reply = await _exchange(self.http, "/lease", self.give_up_s, make_body)
        if not lease.is_signed(self.session.run, reply) or reply.get("request") != sent["signature"]:
            raise ValueError(f"the reply to /lease is not signed by run {self.session.run}; correct --orchestrator")
        return reply["groups"]

    async def submit(self, body: bytes) -> dict[str, str]:
        """Submits a file of rollouts; returns the verdict per group."""
        digest = hashlib.sha256(body).hexdigest()

        def make_body():
            header = json.dumps(lease.request(self.key, self.session, digest=digest))
            return {"content": body, "headers": {lease.HEADER: header}}

        return (await _exchange(self.http, "/submit", self.give_up_s, make_body))["verdicts"]


async def _open_session(http: httpx.AsyncClient, trusted: str | None, give_up_s: float) -> tuple[lease.Session, dict]:
    """Fetches /run; returns the session and the description of the run. Raises ValueError if another run than `trusted` answers."""
    nonce = secrets.token_hex(16)
    body = await _exchange(http, f"/run?nonce={nonce}", give_up_s)
    try:
        session, description = lease.Session(body["id"], body["session"]), body["run"]
        description = {
            name: value for name, value in description.items() if name not in ("step", "policy")
        }  # they change
        is_valid = body["nonce"] == nonce and lease.is_signed(session.run, body)
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_an_orchestrator(body) from error
    if trusted not in (None, session.run):
        raise ValueError(f"{http.base_url} serves run {session.run}, and --run is {trusted}; correct one of them")
    if not is_valid:
        raise ValueError(
            f"the reply to GET /run is not signed by run {session.run} for this request; correct --orchestrator"
        )
    return session, description


async def _work_in_session(signed: Signed, client: client_lib.Client, run: Run, concurrency: int) -> None:
    """Leases, generates, and submits groups in one session of the orchestrator. Never returns; raises the errors of the requests."""
    async with asyncio.TaskGroup() as tasks:
        finished: asyncio.Queue[list[rollout_lib.Rollout]] = asyncio.Queue()
        tasks.create_task(_submit(signed, finished))
        running: set[asyncio.Task] = set()
        returned: list[list] = []  # keys of groups whose policy version is gone
        pause_s = 0.01
        while True:
            sent, returned[:] = returned[: lease.MAX_RETURNED], returned[lease.MAX_RETURNED :]
            groups = await signed.lease(concurrency - len(running), sent)
            for group in groups:
                task = tasks.create_task(_roll_out(client, run, signed.key, group, finished, returned))
                running.add(task)
                task.add_done_callback(running.discard)
            if len(running) == concurrency:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            pause_s = 0.01 if groups else min(pause_s * 1.5, 0.1)  # idle: poll less often
            await asyncio.sleep(pause_s)


def make_rollouts(
    run: Run, group: dict, task: environment.Task, prompt: list[int], samples: list[client_lib.Sample]
) -> list[rollout_lib.Rollout]:
    """Scores the samples of one group and returns them as unsigned rollouts; blocks while the scorer runs."""
    P = len(prompt)
    scored = run.scorer.score(task, [run.tokenizer.scored_text(prompt, sample.tokens) for sample in samples])
    return [
        rollout_lib.Rollout(
            tokens=np.array([*prompt, *sample.tokens], np.int32),
            sampled_mask=np.array([False] * P + [True] * len(sample.tokens)),
            logprobs=np.array([0.0] * P + [min(x, 0.0) for x in sample.logprobs], np.float32),
            versions=np.array([sample.prompt_version] * P + sample.versions, np.int32),
            temperature=group["temperature"],
            seed=(group["seed"] + index) % 2**32,
            task=rollout_lib.TaskRef(run.env.name, group["index"], group["group"], run.env_seed),
            sample=index,
            step=group["step"],
            reward=one.scores["reward"],
            rewards=one.scores,
            finish_reason=sample.finish_reason,
            proofs=sample.proofs,
            worker="",
            signature=b"",
            routed_experts=sample.experts,
            epoch=sample.epoch,
            server=sample.server,
            server_signature=sample.server_signature,
        )
        for index, (sample, one) in enumerate(zip(samples, scored, strict=True))
    ]


async def _roll_out(
    client: client_lib.Client, run: Run, key, group: dict, finished: asyncio.Queue, returned: list[list]
) -> None:
    task = run.env.make_task(group["index"], group["split"])
    prompt = run.tokenizer.render(task.messages, add_generation_prompt=True).token_ids
    trains = group["split"] == "train"
    sampling = run.sampling | {"n": group["num_samples"], "temperature": group["temperature"], "seed": group["seed"]}
    sampling["return_routed_experts"] = run.router_replay and trains
    try:
        pins = {"policy_version": group["version"], "policy_epoch": group.get("epoch", -1)}
        samples = await client.generate(prompt, sampling, proofs=trains, oldest_version=group["min_version"], **pins)
    except client_lib.VersionGone:  # a newer one replaced it, which this group may not use
        returned.append([group["split"], group["step"], group["group"]])
        await asyncio.sleep(VOID_PAUSE_S)  # the next one may have the same fate
        return
    # In a thread: a slow scorer must not stop other groups.
    rollouts = await asyncio.to_thread(make_rollouts, run, group, task, prompt, samples)
    await finished.put([rollout_lib.sign(rollout, key) for rollout in rollouts])


async def _submit(signed: Signed, finished: asyncio.Queue) -> None:
    """Submits finished groups for ever, several in one file up to a size, because the cost of a file is mostly fixed."""
    rollouts, left = [], []  # `left`: a finished group that did not fit
    while True:
        rollouts, left = left or await finished.get(), []
        while not left and not finished.empty():
            left = finished.get_nowait()
            # The size before compression, with 1 KiB per rollout for the small fields.
            if sum(rollout_lib.num_bytes(rollout) + 1024 for rollout in rollouts + left) <= MAX_JOINED_BYTES:
                rollouts, left = rollouts + left, []
        body = parquet.to_bytes(rollouts)
        if len(body) > web.MAX_BODY_BYTES:
            found = f"group {rollouts[0].task.group} of step {rollouts[0].step} has {len(body)} bytes, more than the {web.MAX_BODY_BYTES}"
            raise ValueError(f"{found} of a submission; lower sampling.max_tokens or rl.samples_per_prompt")
        for name, verdict in (await signed.submit(body)).items():
            if verdict.startswith("refused"):
                _note(f"{name} {verdict}")


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read_run(body: dict, sandbox: str) -> Run:
    """Loads the run that a reply to `GET /run` describes; it can name environments, but no code of its own. Raises ValueError if the reply is not from an orchestrator."""
    try:
        name, seed, options = (body["env"][field] for field in ("name", "seed", "options"))
        tokenizer, date = body["tokenizer"], body["tokenizer_date"]
        servers, sampling = list(body["servers"]), dict(body["sampling"])
        router_replay, admission = bool(body.get("router_replay")), dict(body.get("admission", {}))
        work_bits = int(admission["work_bits"]) if admission.get("kind") == "work" else 0
        keys = {str(url): str(key) for url, key in dict(body.get("server_keys", {})).items()}
    except (KeyError, TypeError, ValueError) as error:
        raise _not_an_orchestrator(body) from error
    env = envs.load(name, seed=seed, **options)
    scorer = scorer_lib.Scorer(name, options, seed, limit_s=scorer_lib.LIMIT_S, sandbox=sandbox)
    loaded = tokenizer_lib.load(tokenizer, date=date)
    return Run(env, scorer, seed, loaded, servers, sampling, router_replay, work_bits, keys)


def _not_an_orchestrator(body) -> ValueError:
    found = f"GET /run returned {str(body)[:200]}, which is not the reply of an orchestrator"
    return ValueError(f"{found}; correct --orchestrator")


async def _exchange(http: httpx.AsyncClient, path: str, give_up_s: float, make_body: Callable[[], dict] = dict) -> dict:
    """Sends a GET request, or a POST request with a body, until the orchestrator replies; returns the JSON of the reply.

    `make_body` returns the arguments of httpx for the body of each attempt. Raises ValueError if the orchestrator rejects the
    request, StaleSession if it was restarted, and ConnectionError if it does not reply for `give_up_s` seconds.
    """
    begun, is_noticed = time.monotonic(), False
    while True:
        try:
            body = make_body()
            response = await http.request("POST" if body else "GET", path, **body)
            if response.status_code == 409:
                raise lease.StaleSession(client_lib.error_message(response))
            if response.status_code == 400:
                raise ValueError(
                    f"the orchestrator rejected {path.partition('?')[0]}: {client_lib.error_message(response)}"
                )
            response.raise_for_status()
            return response.json()
        except httpx.HTTPError as error:
            waited = time.monotonic() - begun
            if waited > give_up_s:
                raise ConnectionError(
                    f"no reply from the orchestrator at {http.base_url} for {waited:.0f} s: {error}; check that it runs"
                ) from error
            if waited > NOTICE_S and not is_noticed:
                is_noticed = True
                _note(f"waiting for the orchestrator at {http.base_url}: {error}")
            await asyncio.sleep(0.5)


def main(argv: list[str] | None = None) -> int:
    """Runs the command `python -m rl.worker`; returns its exit code."""
    parser = cli.Parser(prog="python -m rl.worker", description=__doc__)
    add = parser.add_argument
    add("--orchestrator", required=True, help="URL of the run's orchestrator")
    add("--run", help="public key (hex) of the run to work for; any other is refused (default: the first that answers)")
    add("--key", help="file of this worker's signing key; generated if absent (default: a new key per process)")
    add("--concurrency", type=int, default=64, help="groups to work on at the same time")
    add("--give_up_s", type=float, default=300.0, help="seconds to wait for an unreachable orchestrator")
    helps = "scorers run without files and network: auto (as far as this machine can), require, or off"
    add("--sandbox", choices=sandbox_lib.MODES, default="auto", help=helps)
    add("--exit_with_parent", action="store_true", help="stop when standard input closes")
    args = parser.parse_args(argv)
    if args.exit_with_parent:
        cli.stop_at_eof(lambda: os._exit(0))  # nothing to save: groups that were not submitted are requeued
    try:
        if not args.orchestrator.startswith(("http://", "https://")):
            raise ValueError(f"--orchestrator {args.orchestrator!r} is not a URL; write http://HOST:PORT")
        if args.run and not re.fullmatch("[0-9a-f]{64}", args.run):
            raise ValueError(f"--run {args.run!r} is not a public key; write the 64 hex digits that the run prints")
        if args.concurrency < 1:
            raise ValueError(f"--concurrency = {args.concurrency} must be at least 1; raise it")
        if args.key and not pathlib.Path(args.key).exists():
            rollout_lib.WorkerKey.generate().save(args.key)
        key = rollout_lib.WorkerKey.load(args.key) if args.key else rollout_lib.WorkerKey.generate()
        options = {"concurrency": args.concurrency, "give_up_s": args.give_up_s, "sandbox": args.sandbox}
        asyncio.run(work(args.orchestrator, key, args.run, **options))
    except (ValueError, OSError, ExceptionGroup) as error:
        while isinstance(error, ExceptionGroup):  # of concurrent tasks; the first is the cause
            if error.split((ValueError, OSError, client_lib.Unavailable))[1]:
                raise
            error = error.exceptions[0]
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
