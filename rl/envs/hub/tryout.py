"""Plays episodes of an environment without a model's weights: as text for `python -m rl.envs try`, and before a run that needs them."""

import asyncio
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence

from models.text import tokenizer as tokenizer_lib
from rl.envs.catalog import catalog
from rl.envs.foreign import host as foreign_host
from rl.envs.foreign import process as process_lib
from rl.envs.host import host as host_lib
from rl.envs.interface import environment, scripted_model
from rl.envs.packages import package
from rl.envs.recording import session as session_lib
from rl.envs.scoring import scorer as scorer_lib

LIMITS = session_lib.Limits(max_tokens=256, max_model_len=2**15, max_calls=16, max_episode_tokens=2**12)
NOTICE_S, REHEARSAL_S = 3.0, 60.0  # the first comes within 10 s of the start of a run
_CALL = '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>'


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode that was played."""

    texts: list[str]  # of its branches, each with the prompts, special tokens included
    prompt: list[int]  # of the first call
    num_calls: int
    num_tokens: int  # of all branches
    result: host_lib.Played


def play(
    host: host_lib.Plays, tokenizer: tokenizer_lib.Tokenizer, tasks: Sequence[environment.Task]
) -> list[dict[str, Episode]]:
    """Plays each task with its answer in every message, if it has one, and with random words and calls of tools. Closes the host. Blocks."""

    async def run() -> list[dict[str, Episode]]:
        out = []
        try:
            for task in tasks:
                policies = {"its answer": scripted_model.always(task.answer)} if task.answer else {}
                policies["random words"] = scripted_model.random_words
                out.append({name: await _episode(host, tokenizer, task, one) for name, one in policies.items()})
            return out
        finally:
            await host.close()

    return asyncio.run(run())


def rehearse(
    config,
    tokenizer: tokenizer_lib.Tokenizer,
    on_line: Callable[[str], None],
    begun: process_lib.Beginning | None = None,
) -> None:
    """Loads each environment of a run. Plays a few episodes, or scores a few completions, of those that are not shipped or have rows.

    Blocks for up to `REHEARSAL_S` for each environment. `on_line` gets lines for people. `begun` is the result of `early.begin`. Raises
    ValueError if an environment cannot be loaded, an episode ends before it asks the model, or an empty completion cannot be scored: no
    worker could do better.
    """
    for entry in catalog.located(config).values():
        with entry.naming_fields():
            env = catalog.load(entry.name, seed=config.seed, **entry.options)
            kind = entry.name.partition(":")[0]
            is_ours = kind in catalog.ENVS and kind not in package.FRAMEWORKS
            if env.play is not None and not is_ours:
                _rehearse_episodes(env, entry, config, tokenizer, on_line, begun)
            elif env.score is not None and (env.num_tasks or not is_ours):
                _rehearse_scorer(env, entry, config, on_line)


def _rehearse_scorer(env: environment.Environment, entry, config, on_line: Callable[[str], None]) -> None:
    """Scores answers, an empty completion, and the prompts of the first rows, and warns of rows whose prompt earns the reward."""
    count, num_echoed = min(16, env.num_tasks or 1), 0
    limits = {"limit_s": scorer_lib.LIMIT_S, "max_failures": 1, "sandbox": config.trust.sandbox}
    scorer = scorer_lib.Scorer(entry.name, entry.options, config.seed, on_error=on_line, **limits)
    with contextlib.closing(scorer):
        for task in (env.make_task(index, "train") for index in range(count)):
            texts = [task.answer, "", *environment.echoes(task)]
            answer, _, *echoes = (one.scores["reward"] for one in scorer.score(task, texts))
            num_echoed += max(echoes) > 0 and max(echoes) >= answer
    if num_echoed and env.num_tasks:
        on_line(environment.echo_warning(entry.label, num_echoed, count))


def _rehearse_episodes(
    env,
    entry,
    config,
    tokenizer: tokenizer_lib.Tokenizer,
    on_line: Callable[[str], None],
    begun: process_lib.Beginning | None,
) -> None:
    own = {"limit_s": scorer_lib.LIMIT_S, "sandbox": config.trust.sandbox, "on_error": lambda line: None}
    length, begun_s = config.inference.max_model_len, time.monotonic()
    limits = session_lib.Limits(entry.max_tokens, length, min(entry.max_calls or LIMITS.max_calls, LIMITS.max_calls))

    async def run() -> None:
        host = foreign_host.of_environment(env, entry.name, entry.options, config.seed, tokenizer, begun=begun, **own)
        try:
            tasks = [env.make_task(0, "train"), env.make_task(1, "train"), env.make_task(0, "held_out")]
            plays = (_episode(host, tokenizer, task, scripted_model.random_words, limits) for task in tasks)
            played = await asyncio.gather(*plays)
            for task, found in zip(tasks, played, strict=True):
                if not found.num_calls:
                    long = f"it asked the model nothing; its prompt may exceed inference.max_model_len = {length}"
                    why = f"no {task.split} episode can begin: {found.result.error or long}"
                    remedy = "" if "; " in why else f"; correct {process_lib.shown(entry.options)}, or the environment"
                    raise ValueError(f"environment {entry.label}: {why}{remedy}")
                if found.result.error:
                    on_line(f"environment {entry.label}: an episode with random words failed: {found.result.error}")
            first, second, held_out = (found.prompt for found in played)
            if first == held_out:
                equal = "the first task of each split has the same prompt"
                on_line(f"environment {entry.label}: {equal}, so held-out scores may not show new tasks; replace them")
            elif first == second:  # of two prompts in all, one is held out
                equal = "the first two training tasks have the same prompt"
                on_line(f"environment {entry.label}: {equal}, so a run may learn one answer; give it other tasks")
        finally:
            await host.close()

    async def noted() -> None:
        work = asyncio.ensure_future(run())
        if not (await asyncio.wait([work], timeout=NOTICE_S))[0]:
            on_line(f"environment {entry.label}: loads, or plays its first episodes, for {NOTICE_S:.0f} s so far")
        await asyncio.wait_for(work, REHEARSAL_S)

    try:
        asyncio.run(noted())
        on_line(
            f"environment {entry.label}: loaded, and an episode of each split played, in {time.monotonic() - begun_s:.1f} s"
        )
    except TimeoutError:
        on_line(
            f"environment {entry.label}: no episode of each split ended in {REHEARSAL_S:.0f} s; the run goes on without this check"
        )


class _Session(session_lib.Session):
    """A session that knows the tools of the newest call."""

    tools: Sequence[Mapping] = ()

    async def ask(self, messages, *, tools=(), **options) -> session_lib.Answer:
        self.tools = tools
        return await super().ask(messages, tools=tools, **options)


async def _episode(
    host, tokenizer: tokenizer_lib.Tokenizer, task: environment.Task, policy, limits: session_lib.Limits = LIMITS
) -> Episode:
    def reply(call: session_lib.Call) -> str:
        message = policy((), session.tools, random.Random(f"{call.key}"))
        called = [one["function"] for one in message.get("tool_calls", ())]
        return message["content"] + "".join(_CALL % (json.dumps(one["name"]), one["arguments"]) for one in called)

    session = _Session(tokenizer, session_lib.scripted(tokenizer, reply), limits, seed=0, sample=0)
    result = await host.play(session, task.index, task.split)
    streams = [stream.tokens.tolist() for stream in session.streams]
    prompt = streams[0][: session.streams[0].turns[0].start] if session.num_calls else []
    texts = [tokenizer.decode(tokens, skip_special=False) for tokens in streams]
    return Episode(texts, prompt, session.num_calls, sum(map(len, streams)), result)
