"""A rollout worker: leases groups, runs environments against inference servers, scores, signs, submits. Imports no jax.

    python -m rl.worker --orchestrator http://host:port

1. `GET /run` returns environment, tokenizer, and servers; `POST /lease` returns groups (tasks with prescribed seeds).
2. Each group is one request of G samples. The environment makes the prompt from the task index and scores each completion.
3. The rollouts are signed with this worker's key. Finished groups are submitted together as Parquet, when the previous
   submission has been answered. Rejections are printed with their reasons.

The worker survives a restart of the orchestrator or a server: it repeats requests for up to `--give_up_s` seconds.
"""

import asyncio
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable

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

MAX_JOINED_BYTES = web.MAX_BODY_BYTES // 2  # of groups in one submission, before compression
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


async def work(orchestrator: str, key: rollout_lib.WorkerKey, *, concurrency: int, give_up_s: float) -> None:
    """Leases, generates, and submits up to `concurrency` groups at the same time, until an error; never returns.

    Raises ConnectionError after `give_up_s` seconds without the orchestrator, and ValueError if it rejects a request.
    """
    async with httpx.AsyncClient(base_url=orchestrator, timeout=60) as http:
        run = _read_run(await _exchange(http, "/run", give_up_s))
        async with client_lib.Client(run.servers, give_up_s=give_up_s) as client, asyncio.TaskGroup() as tasks:
            finished: asyncio.Queue[list[rollout_lib.Rollout]] = asyncio.Queue()
            tasks.create_task(_submit(http, finished, give_up_s))
            running: set[asyncio.Task] = set()
            pause_s = 0.01
            while True:
                capacity = concurrency - len(running)
                reply = await _exchange(http, "/lease", give_up_s, lambda n=capacity: {"json": lease.request(key, n)})
                for group in reply["groups"]:
                    task = tasks.create_task(_roll_out(client, run, key, group, finished))
                    running.add(task)
                    task.add_done_callback(running.discard)
                if len(running) == concurrency:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                pause_s = 0.01 if reply["groups"] else min(pause_s * 1.5, 0.1)  # idle: poll less often
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
        )
        for index, (sample, one) in enumerate(zip(samples, scored, strict=True))
    ]


async def _roll_out(client: client_lib.Client, run: Run, key, group: dict, finished: asyncio.Queue) -> None:
    task = run.env.make_task(group["index"], group["split"])
    prompt = run.tokenizer.render(task.messages, add_generation_prompt=True).token_ids
    trains = group["split"] == "train"
    sampling = run.sampling | {"n": group["num_samples"], "temperature": group["temperature"], "seed": group["seed"]}
    sampling["return_routed_experts"] = run.router_replay and trains
    samples = await client.generate(prompt, sampling, proofs=trains)
    # In a thread: a slow scorer must not stop other groups.
    rollouts = await asyncio.to_thread(make_rollouts, run, group, task, prompt, samples)
    await finished.put([rollout_lib.sign(rollout, key) for rollout in rollouts])


async def _submit(http: httpx.AsyncClient, finished: asyncio.Queue, give_up_s: float) -> None:
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
        reply = await _exchange(http, "/submit", give_up_s, lambda body=body: {"content": body})
        for name, verdict in reply["verdicts"].items():
            if verdict.startswith("refused"):
                print(f"{name} {verdict}", file=sys.stderr, flush=True)


def _read_run(body: dict) -> Run:
    """Loads the run that a reply to `GET /run` describes. Raises ValueError if the reply is not from an orchestrator."""
    try:
        name, seed, options = (body["env"][field] for field in ("name", "seed", "options"))
        tokenizer, date = body["tokenizer"], body["tokenizer_date"]
        servers, sampling = list(body["servers"]), dict(body["sampling"])
        router_replay = bool(body.get("router_replay"))
    except (KeyError, TypeError, ValueError) as error:
        found = f"GET /run returned {str(body)[:200]}, which is not the reply of an orchestrator"
        raise ValueError(f"{found}; correct --orchestrator") from error
    env = envs.load(name, seed=seed, **options)
    scorer = scorer_lib.Scorer(name, options, seed, limit_s=scorer_lib.LIMIT_S)
    return Run(env, scorer, seed, tokenizer_lib.load(tokenizer, date=date), servers, sampling, router_replay)


async def _exchange(http: httpx.AsyncClient, path: str, give_up_s: float, make_body: Callable[[], dict] = dict) -> dict:
    """Sends a GET request, or a POST request with a body, until the orchestrator replies; returns the JSON of the reply.

    `make_body` returns the arguments of httpx for the body of each attempt. Raises ValueError if the orchestrator rejects the
    request, and ConnectionError if it does not reply for `give_up_s` seconds.
    """
    begun, is_noticed = time.monotonic(), False
    while True:
        try:
            body = make_body()
            response = await http.request("POST" if body else "GET", path, **body)
            if response.status_code == 400:
                raise ValueError(f"the orchestrator rejected {path}: {client_lib.error_message(response)}")
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
                print(f"waiting for the orchestrator at {http.base_url}: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(0.5)


def main(argv: list[str] | None = None) -> int:
    """Runs the command `python -m rl.worker`; returns its exit code."""
    parser = cli.Parser(prog="python -m rl.worker", description=__doc__)
    add = parser.add_argument
    add("--orchestrator", required=True, help="URL of the run's orchestrator")
    add("--key", help="file of this worker's signing key; generated if absent (default: a new key per process)")
    add("--concurrency", type=int, default=64, help="groups to work on at the same time")
    add("--give_up_s", type=float, default=300.0, help="seconds to wait for an unreachable orchestrator")
    add("--exit_with_parent", action="store_true", help="stop when standard input closes")
    args = parser.parse_args(argv)
    if args.exit_with_parent:
        cli.stop_at_eof(lambda: os._exit(0))  # nothing to save: groups that were not submitted are requeued
    try:
        if not args.orchestrator.startswith(("http://", "https://")):
            raise ValueError(f"--orchestrator {args.orchestrator!r} is not a URL; write http://HOST:PORT")
        if args.concurrency < 1:
            raise ValueError(f"--concurrency = {args.concurrency} must be at least 1; raise it")
        if args.key and not pathlib.Path(args.key).exists():
            rollout_lib.WorkerKey.generate().save(args.key)
        key = rollout_lib.WorkerKey.load(args.key) if args.key else rollout_lib.WorkerKey.generate()
        asyncio.run(work(args.orchestrator, key, concurrency=args.concurrency, give_up_s=args.give_up_s))
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
