"""Plays episodes of an environment without a model's weights, and returns them as text, for `python -m rl.envs try`."""

import asyncio
import dataclasses
import json
import random
from collections.abc import Mapping, Sequence

from inference.swarm import sample as sample_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.host import host as host_lib
from rl.envs.interface import environment, scripted_model
from rl.envs.recording import session as session_lib

LIMITS = session_lib.Limits(max_tokens=256, max_model_len=2**15, max_calls=16, max_episode_tokens=2**12)
_CALL = '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>'


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode that was played."""

    texts: list[str]  # of its branches, each with the prompts, special tokens included
    num_calls: int
    num_tokens: int  # of all branches
    result: host_lib.Played


def play(
    host: host_lib.Plays,
    tokenizer: tokenizer_lib.Tokenizer,
    tasks: Sequence[environment.Task],
) -> list[dict[str, Episode]]:
    """Plays each task with its answer in every message, if it has one, and with random words and calls of tools. Closes the host. Blocks."""

    async def run() -> list[dict[str, Episode]]:
        out = []
        try:
            for task in tasks:
                policies = {"its answer": scripted_model.always(task.answer)} if task.answer else {}
                policies["random words"] = scripted_model.random_words
                played = [await _episode(host, tokenizer, task, policy) for policy in policies.values()]
                out.append(dict(zip(policies, played, strict=True)))
            return out
        finally:
            await host.close()

    return asyncio.run(run())


class _Session(session_lib.Session):
    """A session that knows the tools of the newest call."""

    tools: Sequence[Mapping] = ()

    async def ask(self, messages, *, tools=(), **options) -> session_lib.Answer:
        self.tools = tools
        return await super().ask(messages, tools=tools, **options)


async def _episode(host, tokenizer: tokenizer_lib.Tokenizer, task: environment.Task, policy) -> Episode:
    async def backend(call: session_lib.Call) -> sample_lib.Sample:
        message = policy((), session.tools, random.Random(f"{call.key}"))
        called = [one["function"] for one in message.get("tool_calls", ())]
        text = message["content"] + "".join(_CALL % (json.dumps(one["name"]), one["arguments"]) for one in called)
        tokens = [*tokenizer.encode(text), tokenizer.eos_id][: call.max_tokens]
        ending = "stop" if tokens[-1] in tokenizer.stop_ids else "length"
        return sample_lib.Sample(tokens, [0.0] * len(tokens), [0] * len(tokens), 0, ending, b"")

    session = _Session(tokenizer, backend, LIMITS, seed=0, sample=0)
    result = await host.play(session, task.index, task.split)
    streams = [stream.tokens.tolist() for stream in session.streams]
    texts = [tokenizer.decode(tokens, skip_special=False) for tokens in streams]
    return Episode(texts, session.num_calls, sum(map(len, streams)), result)
