"""Samples the tasks of an environment from an OpenAI endpoint, scores them as a worker does, and appends each to a file. Imports no jax.

1. A task has as many samples as are asked for; those that the file has already are not made again. So a run that was killed continues.
   Each row has the fields of its request. A file with rows of another model or of other options is refused.
2. Completions are scored in child processes with limits (rl/envs/scoring, rl/envs/host), as in a run.
3. Tasks and seeds are those of a run's evaluation, so that the samples of other models are comparable with its own.
"""

import asyncio
import collections
import contextlib
import dataclasses
import os
import pathlib
from collections.abc import AsyncIterator, Callable, Sequence

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


@dataclasses.dataclass(frozen=True)
class Source:
    """The tasks of one environment: those with `indices` in a split. `numbers` are the positions by which a run seeds them."""

    name: str  # as config.env.name
    options: dict
    seed: int
    split: str
    indices: Sequence[int]
    numbers: Sequence[int]
    label: str = ""  # in rows; "": the name
    max_calls: int = MAX_CALLS
    max_episode_tokens: int = 0


def run(
    sources: Sequence[Source],
    make_endpoint: Callable[[], endpoint_lib.Endpoint],
    num_samples: int,
    path: str | os.PathLike,
    *,
    sandbox: str = "auto",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict]:
    """Blocks until each task has `num_samples` rows in the file `path`; returns the rows of these tasks and samples.

    Rows of other tasks stay in the file. Raises ValueError for an environment that cannot be loaded or scored, for a file with
    samples of other requests, and the errors of `Endpoint.chat`.
    """
    return asyncio.run(_run(sources, make_endpoint, num_samples, pathlib.Path(path), sandbox, on_progress))


async def _run(sources, make_endpoint, num_samples, path, sandbox, on_progress) -> list[dict]:
    log = samples.Log(path)
    rows = {(row["task"], row["sample"]): row for row in log.rows}
    free = asyncio.Semaphore(MAX_IN_FLIGHT)
    with contextlib.closing(log):
        async with make_endpoint() as endpoint, contextlib.AsyncExitStack() as stack:
            asked = endpoint.asked | {"max_calls": max(source.max_calls for source in sources)}
            if other := [row for row in log.rows if row.get("request") != asked]:
                found = f"{path} has samples of {other[0].get('request', 'a run')}, and not of {asked}"
                raise ValueError(f"{found}; give another --out, or the options of its first start")
            names, wanted = set(), []
            for source in sources:
                play = await stack.enter_async_context(_open(source, endpoint, sandbox))
                label = samples.source(source.name, source.options, source.seed, _digest(source))
                for index, number in zip(source.indices, source.numbers, strict=True):
                    names.add(name := samples.task_name(label, source.split, index))
                    seed = noise_seed.sampling_seed(source.seed, source.split, 0, number)
                    missing = [one for one in range(num_samples) if (name, one) not in rows]
                    wanted += [(name, one, play, source, index, (seed + one) % 2**32) for one in missing]
            total, counts = len(wanted), collections.Counter()

            async def complete(name, sample, play, source, index, seed) -> None:
                async with free:
                    own = await play(index, seed)
                row = {"task": name, "env": source.label or source.name, "sample": sample, "request": asked} | own
                await asyncio.to_thread(log.append, [row])
                rows[name, sample] = row
                counts["done"] += 1
                on_progress(counts["done"], total)

            try:
                async with asyncio.TaskGroup() as tasks:
                    for one in wanted:
                        tasks.create_task(complete(*one))
            except* (ValueError, OSError) as errors:
                raise _first(errors) from None
    return [row for (name, sample), row in sorted(rows.items()) if sample < num_samples and name in names]


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def _digest(source: Source) -> str:
    return catalog.digest(*catalog.locate(source.name, source.options))


@contextlib.asynccontextmanager
async def _open(source: Source, endpoint: endpoint_lib.Endpoint, sandbox: str) -> AsyncIterator[Callable]:
    """Yields a coroutine function from (task index, seed) to the fields of a row that depend on the sample."""
    name, options = catalog.locate(source.name, source.options)
    env = catalog.load(name, seed=source.seed, **options)
    if env.foreign is not None:
        text = "runs in an interpreter of its own, which needs the token IDs of a run's server"
        raise ValueError(f"environment {source.name} {text}; score it with rl.evaluate --config")
    limits = session_lib.Limits(endpoint.max_tokens, 2**31, source.max_calls, source.max_episode_tokens)
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
