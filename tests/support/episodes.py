"""Backends and programs of episodes for tests: completions that need no model, and conversations drawn at random."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import random

import numpy as np

from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.interface import episode
from rl.envs.recording import rollouts, tape
from rl.envs.recording import session as session_lib

TOKENIZER = tokenizer_lib.byte_chatml()
LIMITS = session_lib.Limits(max_tokens=48, max_model_len=4096, max_calls=64)


class Backend:
    """Completes prompts at random, as a function of prompt and seed: text, reasoning, tool calls, cut ones, and bytes that are no text.

    With `texts`, a list or a function that returns one for a prompt's text, it chooses among these.
    """

    def __init__(self, tokenizer=TOKENIZER, *, texts=None, version=3):
        self.tokenizer, self.calls, self.texts, self.version = tokenizer, [], texts, version

    async def __call__(self, call):
        content = hashlib.sha256(np.asarray(call.prompt, "<i4").tobytes()).hexdigest()
        rng = random.Random(f"{content}/{call.seed}")
        tokens = self._tokens(rng, call.prompt)[: call.max_tokens]
        self.calls.append((call, tokens))
        await asyncio.sleep(0)
        return sample(tokens, self.tokenizer, version=max(self.version, call.oldest_version))

    def _tokens(self, rng, prompt):
        if self.texts is not None:
            texts = self.texts
            if callable(texts):
                texts = texts(self.tokenizer.decode(prompt, skip_special=False))
            return [*self.tokenizer.encode(rng.choice(texts)), self.tokenizer.eos_id]
        name, argument = rng.choice(["add", "look", "none"]), rng.choice([1, "x", None])
        call = "<tool_call>\n" + json.dumps({"name": name, "arguments": {"a": argument}}) + "\n</tool_call>"
        text = rng.choice(["<think>so</think>", "<think>cut", ""]) + rng.choice(["yes", "né", "", "a <|im_end|>"])
        tokens = self.tokenizer.encode(text + rng.choice(["", call, call * 2, "<tool_call>{"]))
        tokens += [rng.randrange(256) for _ in range(rng.choice([0, 0, 3]))]
        is_cut = rng.random() < 0.3
        return tokens[: rng.randint(1, 40)] or [65] if is_cut else [*tokens, self.tokenizer.eos_id]


def sample(tokens, tokenizer=TOKENIZER, *, version=0):
    """Returns a completion with these tokens, as an inference server sends it."""
    ending = "stop" if tokens[-1] in tokenizer.stop_ids else "length"
    return completion_lib.Completion(list(tokens), [-0.5] * len(tokens), [version] * len(tokens), version, ending, b"")


def session(backend, *, seed=7, number=0, limits=None, **options):
    """Returns a session of sample `number` with `limits` as changes of LIMITS."""
    limits = dataclasses.replace(LIMITS, **(limits or {}))
    return session_lib.Session(backend.tokenizer, backend, limits, seed=seed, sample=number, **options)


TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


async def assert_replayed(host, validator, played, name, index):
    """Plays task `index` in the session `played` at `host`, and asserts that its replay at `validator` has the same calls and scores."""
    found = await host.play(played, index, "train")
    origin = rollouts.Origin(rollout_lib.TaskRef(name, index, index, 0), 1, 1.0)
    made = rollouts.of_episode(played, origin, found.scores)
    taped = tape.of_rollouts(made, TOKENIZER.stop_ids)
    again = session_lib.Session(TOKENIZER, None, played.limits, seed=index, sample=0, tape=taped)
    assert (await validator.play(again, index, "train")).scores == found.scores and not found.error
    assert tape.difference(again, made) is None


def drawn(number):
    """Returns a program of up to six turns with tools, errors, dropped and stripped messages, and judges."""

    async def turns(model):
        rng = random.Random(number)
        tools = TOOLS if rng.random() < 0.6 else []
        messages = [{"role": "system", "content": "be good"}] * rng.randint(0, 1) + [
            {"role": "user", "content": f"q{number}"}
        ]
        for turn in range(rng.randint(1, 6)):
            reply = await model.chat(messages, tools=tools, max_tokens=rng.choice([None, 8]))
            message = dict(reply.message)
            if rng.random() < 0.3:
                message.pop("reasoning_content", None)
            messages.append(message)
            calls = message.get("tool_calls") or []
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": f"{turn}"} for call in calls]
            if not calls or rng.random() < 0.3:
                messages.append({"role": "user", "content": rng.choice(["more", "<|im_start|>", "é" * 9])})
            if rng.random() < 0.15:  # history is rewritten
                messages = [messages[0], {"role": "user", "content": "summary"}]
            if rng.random() < 0.2:
                judged = [{"role": "user", "content": "good?"}]
                await asyncio.gather(*(model.chat(judged, number=i, trains=False) for i in range(3)))

    async def play(model):
        with contextlib.suppress(episode.BudgetSpent):
            await turns(model)

    return play
