"""A rollout worker: leases groups, runs environments against inference servers, scores, signs, submits. Imports no jax.

    python -m rl.worker --orchestrator http://host:port --run KEY

1. `GET /run` returns environment, tokenizer, and servers, signed by the run's key; `POST /lease` returns groups (tasks with
   prescribed seeds), signed as well. All requests are signed for this run and this process of the orchestrator.
2. The environment makes the prompt from the task index and scores each completion: a group is one request of G samples. Of an environment
   with episodes of several calls, G episodes run at the same time, and each call is a request (rl/envs/host/group.py).
3. The rollouts are signed with this worker's key. Finished groups are submitted together as Parquet, when the previous
   submission has been answered. Rejections are printed with their reasons.
4. Meanwhile heartbeats renew the leases, and their replies name the servers that serve now. Without work, one request waits for it.
5. A group that no server completes is given back, and the others go on. SIGTERM or Ctrl-C: groups in progress are given back, finished ones
   are submitted; exit code 0. So it ends when the run does.

The worker survives a restart of the orchestrator or a server: it repeats requests for up to `--give_up_s` seconds. Without
`--run`, it works for the first run that answers, and sends $INTELLAX_API_KEY to no server.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence

from inference import client as client_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import metrics_routes, web
from models import hub
from models.text import tokenizer as tokenizer_lib
from rl import envs
from rl.envs.foreign import host as foreign_host
from rl.envs.host import group as group_lib
from rl.envs.recording import session as session_lib
from rl.envs.scoring import scorer as scorer_lib
from rl.protocol import lease, registry, signed_session, user_code
from sharding.system import bounded_reply, cli, retries, sign_in, signed_message, sockets
from sharding.system import sandbox as sandbox_lib
from sharding.system import text as text_lib
from sharding.system.logs import role_metrics

MAX_JOINED_BYTES = web.MAX_BODY_BYTES // 2  # of groups in one submission, before compression
VOID_PAUSE_S, MAX_FAILURE_PAUSE_S = 0.5, 30.0  # after a group that no server can generate any more
MAX_POLL_S = 490.0  # a fifth more is less than lease.MAX_WAIT_S
POLL_S = 50.0  # that a request waits for work; many proxies close a connection after 60
FIRST_PAUSE_S, MAX_PAUSE_S = 0.01, 1.0
SERVERS_S = 300.0  # without a server that completes a group, until it is given back
EPISODES = ("rollouts", "errors", "turns")  # counted by environment
DRAIN_S, LEAVE_S = 20.0, 5.0  # after SIGTERM: for finished groups, and for the last heartbeat


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker for one run: `work` does the work, the other members show it to /metrics and /health, from any thread."""

    orchestrator: str  # its URL
    key: rollout_lib.WorkerKey
    trusted: str | None = None  # the public key (hex) of the run to work for; None: of the first that answers
    _: dataclasses.KW_ONLY
    concurrency: int  # groups at the same time
    give_up_s: float  # seconds without the orchestrator, or without a server that completes a group
    sandbox: str = "auto"  # of scorers
    code: Sequence[str] = ()  # folders in which the run's own environment and its data may be
    servers: Sequence[str] = ()  # URLs of inference servers to use instead of those of the run

    def __post_init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()  # groups, by their fate
        self.num_tokens = 0  # sampled
        self.episodes: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in EPISODES}
        self.metrics = role_metrics.RoleMetrics("worker", self._values, ("group", "submit"))
        self.lines: collections.deque[str] = collections.deque(maxlen=8)  # errors to report with the next heartbeats
        self._groups: _Groups | None = None  # of the session now
        self._connection: signed_session.Connection | None = None

    def report(self, line: str) -> None:
        """Prints an error of an environment, and sends it to the orchestrator soon. Any thread may call it."""
        cli.note(line)
        self.lines.append(line)
        if self._groups:
            self._groups.wake()

    async def work(self, stopping: asyncio.Event | None = None) -> None:
        """Leases, generates, and submits groups; returns when the run ends.

        After `stopping` is set, delivers finished groups for at most `DRAIN_S` seconds, hands back the others, and returns. Raises
        ConnectionError after `give_up_s` seconds without the orchestrator, and ValueError if it rejects a request or is not signed by
        the expected run.
        """
        stopping = stopping or asyncio.Event()
        working, stop = asyncio.ensure_future(self._work(stopping)), asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait((working, stop), return_when=asyncio.FIRST_COMPLETED)
            is_heard = self._connection and not self._connection.problem  # else no submission would be answered
            if not working.done() and self._groups and is_heard:
                await asyncio.wait((working,), timeout=DRAIN_S)
            if working.done():
                working.result()
        finally:
            for task in (working, stop):
                task.cancel()
            await asyncio.gather(working, stop, return_exceptions=True)

    def waiting_for(self) -> str:
        """Returns why this worker waits, as a line for people, or "" if it generates."""
        if self._connection and self._connection.problem:
            return self._connection.problem
        return self._groups.waiting_for() if self._groups else "the orchestrator's description of the run"

    def health(self) -> dict[str, str]:
        """Returns the body of /health."""
        return {"waiting_for": self.waiting_for()}

    def progress(self) -> tuple[dict[str, float], str]:
        """Returns ({name: count so far}, the thing that this worker waits for or "")."""
        counts = {f"groups {fate}": self.counts[fate] for fate in ("submitted", "refused") if self.counts[fate]}
        return {"groups leased": self.counts["leased"], **counts, "tokens": self.num_tokens}, self.waiting_for()

    def _values(self) -> role_metrics.Values:
        running, finished = self._groups.load() if self._groups else (0, 0)
        groups = {"running": running, "finished": finished}
        found = {"groups": groups, "groups_total": dict(self.counts), "tokens_total": self.num_tokens}
        return found | {f"environment_{name}_total": dict(of) for name, of in self.episodes.items()}

    def add(self, rollouts: Sequence[rollout_lib.Rollout]) -> None:
        """Counts the rollouts of a finished group."""
        self.counts["generated"] += 1
        self.num_tokens += sum(int(rollout.sampled_mask.sum()) for rollout in rollouts)
        for rollout in rollouts:
            name, is_first = rollout.task.env, rollout.branch == 0  # others repeat its scores
            self.episodes["rollouts"][name] += is_first
            self.episodes["errors"][name] += is_first and rollout.rewards.get("error", 0.0) > 0
            self.episodes["turns"][name] += len(rollout.spans)

    async def _work(self, stopping: asyncio.Event) -> None:
        trusted, runs, described, proof, begun_us = self.trusted, {}, None, "", int(time.time() * 1e6)
        async with bounded_reply.make_client(base_url=self.orchestrator, timeout=60) as http:
            self._connection = signed_session.Connection(http, self.give_up_s)
            while True:  # a pass per process of the orchestrator
                session, description = await self._connection.open_session(trusted)
                if trusted is None:
                    trusted = session.run
                    cli.note(f"working for run {trusted}, the first that answered; --run {trusted} accepts no other")
                where = str(description.get("tokenizer"))
                if not self.trusted and hub.is_url(where):  # it may be any bucket, of any size
                    found = f"the run's tokenizer is {where[:200]!r}, to be downloaded with your credentials"
                    raise ValueError(f"{found}; add --run {session.run} if you trust it")
                lasting = {name: value for name, value in description.items() if name not in signed_session.CHANGING}
                if lasting != described:  # else the environments and their scorers stay
                    for run in runs.values():
                        await run.close()
                    runs, described = read_runs(description, self.sandbox, self.code, self.report), lasting
                    run = next(iter(runs.values()))
                    proof = await signed_session.find_work(self.key, session.run, run.work_bits)
                signed = signed_session.SignedSession(
                    connection=self._connection,
                    key=self.key,
                    session=session,
                    work=proof,
                    begun_us=begun_us,
                    env_digest=_digest(description),
                )
                client = client_lib.Client(
                    self.servers or run.servers,
                    give_up_s=min(self.give_up_s, SERVERS_S),
                    api_key=None if self.trusted else "",
                    keys=run.server_keys,
                    run=session.run,
                )
                try:
                    async with client:
                        self._groups = _Groups(self, signed, client, runs)
                        return await self._groups.work(stopping)
                except* lease.StaleSession as error:  # its leases are void
                    self._groups = None
                    cli.note(f"a new session of the orchestrator: {error.exceptions[0]}")
                    await asyncio.sleep(random.uniform(0.5, 2.0))  # others heard of it at the same moment


class _Groups:
    """The groups of a worker in one session of the orchestrator, from their lease until their submission is answered."""

    def __init__(
        self,
        worker: Worker,
        signed: signed_session.SignedSession,
        client: client_lib.Client,
        runs: Mapping[str, group_lib.Run],
    ):
        self._worker, self._signed, self._client, self._runs = worker, signed, client, runs
        self._ended = asyncio.Event()
        self._own_server = registry.OWN_SERVER if worker.servers else ""
        self._running: dict[lease.Key, asyncio.Task] = {}
        self._held: set[lease.Key] = set()  # leased, and neither answered nor given back
        self._finished: asyncio.Queue[tuple[lease.Key, list[rollout_lib.Rollout]]] = asyncio.Queue()
        self._failure_pause, self._problem = retries.Backoff(2 * VOID_PAUSE_S, MAX_FAILURE_PAUSE_S), ""
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()

    def wake(self) -> None:
        """Makes the next heartbeat immediate. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._news.set)

    def load(self) -> tuple[int, int]:
        """Returns (number of groups in progress, number of finished ones that wait to be submitted)."""
        return len(self._running), self._finished.qsize()

    def waiting_for(self) -> str:
        """Returns why no group makes progress, as a line for people, or ""."""
        if not self._running:
            return "" if self._held else "a group from the orchestrator"
        return f"an inference server: {outage}" if (outage := self._client.servers.outage()) else ""

    async def work(self, stopping: asyncio.Event) -> None:
        """Works until the run ends, or until `stopping`: then gives back groups in progress, and submits finished ones."""
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(loop) for loop in (self._lease(tasks), self._beat(), self._submit())]
            ends = [tasks.create_task(event.wait()) for event in (self._ended, stopping)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in (loops[0], *self._running.values()):
                task.cancel()
            if not self._ended.is_set():
                await self._finished.join()
            for task in (*loops, *ends):  # a beat after the last one would sign this worker in again
                task.cancel()
            if not self._ended.is_set():  # else the orchestrator knows, and may be gone
                with contextlib.suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(LEAVE_S):
                        await self._signed.beat(registry.Report(), [], leaving=True)
        cli.note("the run ended" if self._ended.is_set() else "stopped; groups in progress were given back")

    async def _lease(self, tasks: asyncio.TaskGroup) -> None:
        pause, least_s = retries.Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, growth=1.5), POLL_S
        while True:
            if len(self._running) >= self._worker.concurrency:
                await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            wait_s, begun_s = min(max(POLL_S, least_s), MAX_POLL_S) * random.uniform(0.8, 1.2), time.monotonic()
            capacity, holding = self._worker.concurrency - len(self._running), [*map(list, self._held)]
            reply = await self._signed.lease(capacity, wait_s=wait_s, holding=holding)
            self._hear(reply)
            least_s = float(reply.get("wait_s", 0.0))
            for group in reply["groups"]:
                key = group.key
                if key not in self._held:  # else its lease ran out, and it is still in progress
                    self._held.add(key)
                    self._worker.counts["leased"] += 1
                    self._running[key] = task = tasks.create_task(self._complete(group))
                    task.add_done_callback(functools.partial(self._forget, key))
            if reply["groups"] or time.monotonic() - begun_s >= 1.0:
                pause.reset()
            await asyncio.sleep(pause.next_s())  # a reply without either came too early

    def _forget(self, key: lease.Key, task: asyncio.Task) -> None:
        if self._running.get(key) is task:  # else the group was given back, and leased again before the task ended
            del self._running[key]

    async def _beat(self) -> None:
        interval_s, is_first, before, sent_s = FIRST_PAUSE_S, True, self._worker.num_tokens, time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s * random.uniform(0.8, 1.2)):
                    await self._news.wait()
            self._news.clear()
            if not (self._held or is_first or self._worker.lines):
                continue  # the request that waits for work shows that this worker is there
            running, finished = self.load()
            tokens_per_s = (self._worker.num_tokens - before) / (time.monotonic() - sent_s)
            before, sent_s = self._worker.num_tokens, time.monotonic()
            load = registry.Load(running=running, waiting=finished, tokens_per_s=0.0 if is_first else tokens_per_s)
            line = self._worker.lines.popleft() if self._worker.lines else ""
            problem = sign_in.one_line(line or self._client.servers.problems() or self._problem)
            report = registry.Report(self._own_server, load=load, problem=problem)
            reply = await self._signed.beat(report, [*map(list, self._held)])
            self._hear(reply)
            for key in self._running.keys() & set(map(tuple, reply["void"])):
                self._worker.counts["void"] += 1
                self._running[key].cancel()
                self._held.discard(key)
            interval_s, is_first = float(reply["interval_s"]), False
            if self._worker.lines:
                self._news.set()

    def _hear(self, reply: dict) -> None:
        if reply.get("ended"):
            self._ended.set()
        if "servers" in reply and not self._own_server:
            self._client.servers.tell(reply["servers"])

    async def _complete(self, group: lease.Lease) -> None:
        """Generates a group and queues it for submission, or gives it back."""
        try:
            with self._worker.metrics.seconds["group"].time():
                run = self._runs[group.env]
                rollouts = await group_lib.roll_out(self._client, run, self._worker.key, group)
            self._failure_pause.reset()
            self._problem = ""
            self._worker.add(rollouts)
            return self._finished.put_nowait((group.key, rollouts))
        except client_lib.VersionGone as error:  # a newer one replaced it, which this group may not use
            pause_s, problem = VOID_PAUSE_S, ""  # the next one may have the same fate
            if self._own_server:  # only its owner can make it follow the run
                self._note_problem(group, problem := str(error))
        except (ValueError, OSError, client_lib.Unavailable) as error:
            is_of_env = isinstance(error, ValueError) and not str(error).startswith(registry.OF_ENVIRONMENT)
            problem = f"{registry.OF_ENVIRONMENT}{run.env.name}: {error}" if is_of_env else str(error)
            self._note_problem(group, problem)
            pause_s = self._failure_pause.next_s()
        self._held.discard(group.key)
        self._worker.counts["returned"] += 1
        await self._signed.lease(0, [list(group.key)], problem=sign_in.one_line(problem))
        await asyncio.sleep(pause_s)

    def _note_problem(self, group: lease.Lease, problem: str) -> None:
        if problem != self._problem:
            cli.note(f"group {'/'.join(map(str, group.key))} is given back: {problem}")
            self._worker.lines.append(problem)
            self._news.set()
        self._problem = problem

    async def _submit(self) -> None:
        """Submits finished groups without end, several in one file up to a size, because the cost of a file is mostly fixed."""
        left = None  # a finished group that did not fit
        while True:
            key, rollouts = left or await self._finished.get()
            keys, num_bytes, left = [key], _num_bytes(rollouts), None
            while not left and not self._finished.empty():
                left = self._finished.get_nowait()
                if (num_bytes := num_bytes + _num_bytes(left[1])) <= MAX_JOINED_BYTES:
                    keys, rollouts, left = [*keys, left[0]], rollouts + left[1], None
            body = parquet.to_bytes(rollouts)
            if len(body) > web.MAX_BODY_BYTES:
                found = f"group {rollouts[0].task.group} of step {rollouts[0].step} has {len(body)} bytes, more than the {web.MAX_BODY_BYTES} that a submission may have"
                raise ValueError(f"{found}; lower sampling.max_tokens or rl.samples_per_prompt")
            with self._worker.metrics.seconds["submit"].time():
                verdicts = await self._signed.submit(body)
            refused = [f"{name} {verdict}" for name, verdict in verdicts.items() if verdict.startswith("refused")]
            self._worker.counts.update(submitted=len(verdicts), refused=len(refused))
            for line in refused:
                cli.note(line)
            self._held.difference_update(keys)
            for _ in keys:
                self._finished.task_done()


def _num_bytes(rollouts: Sequence[rollout_lib.Rollout]) -> int:
    """Returns the size of a group before compression, with 1 KiB per rollout for the small fields."""
    return sum(rollout_lib.num_bytes(rollout) + 1024 for rollout in rollouts)


def _digest(description: dict) -> str:
    """Returns the digest of all environments of a run that `read_runs` has read, which are those here; "" if it names none."""
    return str(description["env"].get("digest", ""))


def read_runs(
    body: dict, sandbox: str, code: user_code.Folders, on_error: scorer_lib.Log = cli.note
) -> dict[str, group_lib.Run]:
    """Loads a run as `_read_run` does, with each of its environments by `Lease.env`, {"": the only one} in most runs."""
    if not body.get("envs"):
        return {"": _read_run(body, sandbox, code, on_error)}
    found = {}
    try:
        for key, own in body["envs"].items():
            sampling = body["sampling"] | {"max_tokens": own["max_tokens"]}
            found[str(key)] = body | {"env": own | {"seed": body["env"]["seed"]}, "sampling": sampling}
    except (KeyError, TypeError, AttributeError) as error:
        raise signed_message.not_an_orchestrator(body) from error
    runs = {key: _read_run(own, sandbox, code, on_error) for key, own in found.items()}
    return {key: dataclasses.replace(run, env=dataclasses.replace(run.env, name=key)) for key, run in runs.items()}


def _read_run(body: dict, sandbox: str, code: user_code.Folders, on_error: scorer_lib.Log) -> group_lib.Run:
    """Loads the run that a reply to `GET /run` describes. It names environments of this release, or ones in the folders `code` (None: anywhere).

    Raises ValueError for another reply, and for an environment whose code or data differ from those of the run.
    """
    try:
        name, seed, options = (body["env"][field] for field in ("name", "seed", "options"))
        expected = str(body["env"].get("digest", ""))
        tokenizer, date = body["tokenizer"], body["tokenizer_date"]
        variables = dict(body.get("chat_template_kwargs", {}))
        servers, sampling = list(body["servers"]), dict(body["sampling"])
        router_replay, admission = bool(body.get("router_replay")), dict(body.get("admission", {}))
        work_bits = int(admission["work_bits"]) if admission.get("kind") == "work" else 0
        keys = {str(url): str(key) for url, key in dict(body.get("server_keys", {})).items()}
        numbers = [
            body.get("max_model_len", 0),
            *(body["env"].get(name, 0) for name in ("max_calls", "max_episode_tokens")),
        ]
        limits, thinking = [*map(int, numbers)], str(body["env"].get("thinking", "keep"))
    except (KeyError, TypeError, ValueError) as error:
        raise signed_message.not_an_orchestrator(body) from error
    found, located = envs.locate(name, options, code)
    if expected:
        envs.check_digest(name, envs.digest(found, located), expected)
    env = dataclasses.replace(envs.load(found, seed=seed, **located), name=name)
    own = {"limit_s": scorer_lib.LIMIT_S, "sandbox": sandbox, "digest": expected, "on_error": on_error}
    loaded = tokenizer_lib.load(tokenizer, date=date, variables=variables)
    scorer = player = None
    if env.play is not None:
        host = foreign_host.of_environment(env, found, located, seed, loaded, **own)
        player = group_lib.Player(host, loaded, session_lib.Limits(sampling["max_tokens"], *limits), thinking)
    else:
        scorer = scorer_lib.Scorer(found, located, seed, **own)
    return group_lib.Run(
        env=env,
        scorer=scorer,
        player=player,
        env_seed=seed,
        tokenizer=loaded,
        servers=servers,
        server_keys=keys,
        sampling=sampling,
        router_replay=router_replay,
        work_bits=work_bits,
        env_digest=expected,
        vine=body.get("vine"),
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command `python -m rl.worker`; returns its exit code."""
    parser = cli.Parser(prog="python -m rl.worker", description=__doc__)
    add = parser.add_argument
    add("--orchestrator", required=True, help="URL of the run's orchestrator; - reads it from standard input")
    add("--run", help="public key (hex) of the run to work for; any other is refused (default: the first that answers)")
    add("--key", help="file of this worker's signing key; generated if absent (default: a new key per process)")
    add("--concurrency", type=int, default=64, help="groups to work on at the same time")
    helps = "seconds to wait for an unreachable orchestrator, such as one that restores a large model"
    add("--give_up_s", type=float, default=1800.0, help=helps)
    add("--server", nargs="+", default=[], metavar="URL", help="own inference servers, instead of those of the run")
    helps = "scorers run without files and network: auto (as far as this machine can), require, or off"
    add("--sandbox", choices=sandbox_lib.MODES, default="auto", help=helps)
    add("--code", **cli.FOLDERS, help=envs.CODE_HELP)
    add("--metrics", metavar="[HOST:]PORT", help="serve /metrics and /health there")
    add("--exit_with_parent", action="store_true", help="stop when standard input closes")
    args = parser.parse_args(argv)
    try:
        if args.orchestrator == "-":
            args.orchestrator = sys.stdin.readline().strip()
            if not args.orchestrator:
                return 0  # the parent ended before it had an orchestrator
        if args.exit_with_parent:
            cli.stop_at_eof(lambda: os._exit(0))  # nothing to save: groups that were not submitted are requeued
        for option, url in [("orchestrator", args.orchestrator), *(("server", url) for url in args.server)]:
            if not sockets.is_url(url):
                raise ValueError(f"--{option} {url!r} is not a URL; write http://HOST:PORT")
        if args.run and not text_lib.is_hex(args.run):
            raise ValueError(f"--run {args.run!r} is not a public key; write the 64 hex digits that the run prints")
        if args.concurrency < 1:
            raise ValueError(f"--concurrency = {args.concurrency} must be at least 1; raise it")
        if not args.give_up_s >= 0:
            raise ValueError(f"--give_up_s = {args.give_up_s:g} must be at least 0; raise it")
        key = rollout_lib.WorkerKey.load_or_create(args.key) if args.key else rollout_lib.WorkerKey.generate()
        options = {name: getattr(args, name) for name in ("concurrency", "give_up_s", "sandbox", "code")}
        worker = Worker(args.orchestrator, key, args.run, servers=args.server, **options)
        with contextlib.ExitStack() as stack:
            if args.metrics:
                serving = metrics_routes.serving(args.metrics, worker.health, worker.metrics)
                stack.enter_context(serving)
            print(f"worker {key.worker}, for the orchestrator at {args.orchestrator}", flush=True)
            stack.enter_context(cli.status_line(worker.progress))
            asyncio.run(cli.run_until_signal(worker.work))
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
