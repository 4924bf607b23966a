"""Makes the rollouts of a leased group: completes its prompt, or plays its episodes at the same time, against inference servers. Imports no jax."""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from inference import client as client_lib
from inference.rollouts import completion as completion_lib
from inference.rollouts import kept_sets
from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.host import host as host_lib
from rl.envs.interface import environment
from rl.envs.recording import rollouts as rollouts_lib
from rl.envs.recording import session as session_lib
from rl.envs.scoring import scorer as scorer_lib
from rl.learning.algorithms import continuations
from rl.protocol import lease, noise_seed

MAX_RUNS = 2  # of an episode that makes other calls when it runs again
# (call, count) -> completions of the call with the seeds call.seed to call.seed + count - 1
Generate = Callable[[session_lib.Call, int], Awaitable[list[completion_lib.Completion]]]


@dataclasses.dataclass(frozen=True)
class Player:
    """Everything that the episodes of a run share."""

    host: host_lib.Plays
    tokenizer: tokenizer_lib.Tokenizer
    limits: session_lib.Limits
    thinking: str = "keep"

    async def play(
        self, generate: Generate, group: lease.Lease, task: rollout_lib.TaskRef, env_digest: str
    ) -> list[rollout_lib.Rollout]:
        """Plays all episodes of a group, and returns their unsigned rollouts.

        Equal first prompts are one request, so that a server reads them once. Raises the errors of `generate`, and ValueError for an
        environment that is broken or not deterministic.
        """
        opening = _Opening(generate, group.seed, group.num_samples)
        origin = rollouts_lib.Origin(task, group.step, group.temperature, env_digest)
        try:
            async with asyncio.TaskGroup() as tasks:
                numbers = range(group.num_samples)
                found = [tasks.create_task(self._episode(opening, group, origin, number)) for number in numbers]
        except* Exception as errors:  # the first one ends the group
            raise errors.exceptions[0] from None
        finally:
            await opening.close()
        return [rollout for one in found for rollout in one.result()]

    async def _episode(
        self, opening: "_Opening", group: lease.Lease, origin: rollouts_lib.Origin, number: int
    ) -> list[rollout_lib.Rollout]:
        async def backend(call: session_lib.Call) -> completion_lib.Completion:
            return await opening.sample(call, number)

        options = {"seed": group.seed, "sample": number, "thinking": self.thinking}
        options["sampling"] = {"temperature": group.temperature}
        for _ in range(MAX_RUNS):
            session = session_lib.Session(self.tokenizer, backend, self.limits, **options)
            played = await self.host.play(session, group.index, group.split)
            if played.error and not session.streams:
                name = origin.task.env
                raise ValueError(f"an episode of environment {name} failed before it asked the model: {played.error}")
            if not session.unused():
                return rollouts_lib.of_episode(session, origin, played.scores)
        raise ValueError(
            f"an episode of environment {origin.task.env} made other calls when it ran again; its program must be a function of the task and "
            "the replies"
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """A run with one of its environments, as the orchestrator described it: scorer, tokenizer, servers, and settings."""

    env: environment.Environment
    scorer: scorer_lib.Scorer | None  # None with `player`, or where no scores are needed
    env_seed: int
    tokenizer: tokenizer_lib.Tokenizer
    servers: list[str]
    sampling: dict
    router_replay: bool = False  # rollouts must name the experts that ran
    work_bits: int = 0  # of the proof of work that the run asks of an unknown key; 0: none
    server_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by URL, of servers that sign samples
    env_digest: str = ""  # of the environment here, which is that of the run; "": the run has named none
    player: Player | None = None  # of an environment with episodes of several calls
    vine: Mapping[str, Any] | None = None  # options of rl/learning/algorithms/continuations.py; None: none

    @functools.cached_property
    def task(self) -> Callable[[int, str], tuple[environment.Task, list[int]]]:
        """A function (index, split) -> (task, token IDs of its prompt)."""
        return environment.prompts(self.env, self.tokenizer)

    async def close(self) -> None:
        """Ends the processes of the environment."""
        if self.scorer:
            await asyncio.to_thread(self.scorer.close)
        if self.player:
            await self.player.host.close()


async def roll_out(
    client: client_lib.Client, run: Run, key: rollout_lib.WorkerKey, group: lease.Lease
) -> list[rollout_lib.Rollout]:
    """Generates and scores the rollouts of a group as leased, and signs them. Raises the errors of `Client.generate`."""
    trains = group.split == "train"
    sampling = run.sampling | {"n": group.num_samples, "temperature": group.temperature, "seed": group.seed}
    sampling["return_routed_experts"] = run.router_replay and trains
    if trains and kept_sets.width(run.sampling, 1):
        sampling["return_kept_tokens"] = True
    if run.player and trains:
        sampling["oldest_prefix_version"] = group.min_version
    complete = functools.partial(
        client.generate,
        proofs=trains,
        sticky="/".join(map(str, group.key)),
        policy_version=group.version,
        policy_epoch=group.epoch,
        oldest_version=group.min_version,
    )
    if run.player:
        rollouts = await _play(run.player, complete, sampling, run, group)
        return await asyncio.to_thread(rollout_lib.sign_all, rollouts, key)
    task, prompt = run.task(group.index, group.split)
    samples = await complete(prompt, sampling)
    # In a thread: a slow scorer must not stop other groups.
    rollouts = await asyncio.to_thread(make_rollouts, run, group, task, prompt, samples)
    if run.vine and run.scorer and trains:
        scorer = run.scorer

        def score(texts: Sequence[str]) -> list[Mapping[str, float]]:
            return [one.scores for one in scorer.score(task, texts)]

        rollouts = await continuations.sample(
            generate=complete,
            score=score,
            tokenizer=run.tokenizer,
            roots=rollouts,
            sampling=sampling,
            group_seed=group.seed,
            options=run.vine,
        )
    return rollout_lib.sign_all(rollouts, key)


def make_rollouts(
    run: Run, group: lease.Lease, task: environment.Task, prompt: list[int], samples: list[completion_lib.Completion]
) -> list[rollout_lib.Rollout]:
    """Scores the samples of one group and returns them as unsigned rollouts; blocks while the scorer runs."""
    texts = [run.tokenizer.scored_text(prompt, sample.tokens) for sample in samples]
    scored = run.scorer.score(task, texts) if run.scorer else [scorer_lib.Scored({"reward": 0.0}, 0.0)] * len(texts)
    made = []
    for index, (sample, one) in enumerate(zip(samples, scored, strict=True)):
        tokens = np.array([*prompt, *sample.tokens], np.int32)
        rollout = rollout_lib.Rollout(
            **completion_lib.of_calls(tokens, [(len(prompt), len(tokens), sample)]),
            temperature=group.temperature,
            seed=(group.seed + index) % 2**32,
            task=_task(run, group),
            sample=index,
            step=group.step,
            reward=one.scores["reward"],
            rewards=one.scores,
            worker="",
            signature=b"",
        )
        made.append(rollout)
    return made


async def _play(
    player: Player, complete: Callable, sampling: dict, run: Run, group: lease.Lease
) -> list[rollout_lib.Rollout]:
    """Plays the episodes of a group; `complete` generates for its lease. Returns their unsigned rollouts."""

    async def generate(call: session_lib.Call, count: int) -> list[completion_lib.Completion]:
        asked = sampling | {"n": count, "seed": call.seed, "max_tokens": call.max_tokens}
        oldest, epoch = max(group.min_version, call.oldest_version), max(group.epoch, call.epoch)
        return await complete(call.prompt, asked, oldest_version=oldest, policy_epoch=epoch)

    return await player.play(generate, group, _task(run, group), run.env_digest)


def _task(run: Run, group: lease.Lease) -> rollout_lib.TaskRef:
    return rollout_lib.TaskRef(run.env.name, group.index, group.group, run.env_seed)


class _Opening:
    """Completes the calls of a group's episodes. The first one that begins an episode asks for the completions of all that begin equally."""

    def __init__(self, generate: Generate, seed: int, count: int):
        self._generate, self._seed, self._count = generate, seed, count
        self._begun: set[int] = set()  # numbers of episodes
        self._requests: dict[tuple[int, ...], asyncio.Future[list[completion_lib.Completion]]] = {}

    async def sample(self, call: session_lib.Call, number: int) -> completion_lib.Completion:
        """Returns the completion of a call of an episode."""
        is_first = number not in self._begun and call.seed == noise_seed.stream_seed(self._seed, number, 0, ())
        self._begun.add(number)
        if not is_first:
            return (await self._generate(call, 1))[0]
        key = (call.max_tokens, *call.prompt)
        if key not in self._requests:
            shared = dataclasses.replace(call, seed=self._seed)
            self._requests[key] = asyncio.ensure_future(self._generate(shared, self._count))
        return (await asyncio.shield(self._requests[key]))[number]

    async def close(self) -> None:
        """Ends requests in progress."""
        for request in self._requests.values():
            request.cancel()
        await asyncio.gather(*self._requests.values(), return_exceptions=True)
