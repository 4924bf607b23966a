"""Samples the tasks of an environment from an OpenAI endpoint, scores them as a worker does, and appends each to a file. Imports no jax.

1. A task has as many samples as are asked for; those that the file has already are not made again. So a run that was killed continues.
   Each row has the fields of its request. A file with rows of another model or of other options is refused.
2. Completions are scored in child processes with limits (rl/envs/scoring, rl/envs/host), as in a run.
3. Tasks and seeds are those of a run's evaluation, so that the samples of other models are comparable with its own.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from rl.envs.catalog import catalog
from rl.envs.host import host as host_lib
from rl.envs.interface import environment
from rl.envs.recording import session as session_lib
from rl.envs.scoring import scorer as scorer_lib
from rl.evaluation import endpoint as endpoint_lib
from rl.evaluation import samples
from rl.protocol import noise_seed

MAX_IN_FLIGHT = 256  # tasks; the endpoint bounds the requests
MAX_CALLS = 64  # of an episode, as config.env.max_calls has it by default
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Source:
    """The first `num_tasks` tasks of a split of one environment."""

    name: str  # as config.env.name
    options: dict
    seed: int
    split: str
    num_tasks: int
    max_calls: int = MAX_CALLS


def run(
    source: Source,
    endpoint: endpoint_lib.Endpoint,
    num_samples: int,
    path: str | os.PathLike,
    *,
    sandbox: str,
    on_progress: Callable[[int, int], None],
) -> list[dict]:
    """Blocks until each task has `num_samples` rows in the file `path`; returns the rows of these tasks and samples.

    Rows of other tasks stay in the file. `sandbox` is one of `sharding.system.sandbox.MODES`. `on_progress(samples made, samples to
    make)` is called after each. Raises ValueError for an environment that cannot be loaded or scored, for a file with samples of other
    requests, and the errors of `Endpoint.chat`.
    """
    return asyncio.run(_run(source, endpoint, num_samples, pathlib.Path(path), sandbox, on_progress))


async def _run(source, endpoint, num_samples, path, sandbox, on_progress) -> list[dict]:
    log = samples.Log(path)
    rows = {(row["task"], row["sample"]): row for row in log.rows}
    asked = endpoint.asked | {"max_calls": source.max_calls}
    with contextlib.closing(log):
        if other := [row for row in log.rows if row.get("request") != asked]:
            found = f"{path} has samples of {other[0].get('request', 'a run')}, and not of {asked}"
            raise ValueError(f"{found}; give another --out, or the options of its first start")
        async with endpoint, _open(source, endpoint, sandbox) as play:
            digest = catalog.digest(*catalog.locate(source.name, source.options))
            label = samples.source(source.name, source.options, source.seed, digest)
            names = [samples.task_name(label, source.split, index) for index in range(source.num_tasks)]
            places = ((name, sample) for name in names for sample in range(num_samples))
            missing = [place for place in places if place not in rows]
            indices, num_done = {name: index for index, name in enumerate(names)}, 0

            async def complete(place: tuple[str, int]) -> None:
                nonlocal num_done
                name, sample = place
                seed = noise_seed.sampling_seed(source.seed, source.split, 0, indices[name])
                own = await play(indices[name], (seed + sample) % 2**32)
                row = {"task": name, "env": source.name, "sample": sample, "request": asked} | own
                await asyncio.to_thread(log.append, [row])
                rows[name, sample] = row
                num_done += 1
                on_progress(num_done, len(missing))

            await for_each(missing, complete, MAX_IN_FLIGHT)
    return [row for (name, sample), row in sorted(rows.items()) if sample < num_samples and name in indices]


async def for_each(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], at_once: int) -> None:
    """Awaits `work` for all items, `at_once` of them at the same time. The first error ends the others and is raised."""
    free = asyncio.Semaphore(at_once)

    async def one(item: Item) -> None:
        async with free:
            await work(item)

    try:
        async with asyncio.TaskGroup() as tasks:
            for item in items:
                tasks.create_task(one(item))
    except* Exception as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


@contextlib.asynccontextmanager
async def _open(source: Source, endpoint: endpoint_lib.Endpoint, sandbox: str) -> AsyncIterator[Callable]:
    """Yields a coroutine function from (task index, seed) to the fields of a row that depend on the sample."""
    name, options = catalog.locate(source.name, source.options)
    env = catalog.load(name, seed=source.seed, **options)
    if env.foreign is not None:
        text = "runs in an interpreter of its own, which needs the token IDs of a run's server"
        raise ValueError(f"environment {source.name} {text}; score it with rl.evaluate --config")
    limits = session_lib.Limits(endpoint.max_tokens, 2**31, source.max_calls)
    rest = {"limit_s": scorer_lib.LIMIT_S, "sandbox": sandbox}
    scorer = None if env.play else scorer_lib.Scorer(name, options, source.seed, **rest)
    host = host_lib.Host(name, options, source.seed, kind=env.kind, **rest) if env.play else None

    async def play(index: int, seed: int) -> dict:
        task = env.make_task(index, source.split)
        model = endpoint_lib.Episode(endpoint, seed, limits)
        if scorer:
            reply = await model.chat(task.messages)
            (scored,) = await asyncio.to_thread(scorer.score, task, [reply.text])
            scores = scored.scores
        else:
            assert host is not None
            scores = (await host.play(model, index, source.split)).scores  # pyright: ignore[reportArgumentType]
        last = model.replies[-1:] or [None]
        return {
            "key": environment.content_key(task.messages),
            "reward": scores["reward"],
            "rewards": scores,
            "finish_reason": last[0].finish_reason if last[0] else "stop",
            "num_tokens": sum(reply.num_tokens for reply in model.replies),
            "prompt": task.messages[-1]["content"],
            "completion": last[0].text if last[0] else "",
        }

    try:
        yield play
    finally:
        if scorer:
            await asyncio.to_thread(scorer.close)
        if host:
            await host.close()
