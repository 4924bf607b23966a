"""A model without weights for episodes: `ScriptedModel(policy)` asks a Python function for each message, and records the calls.

    >>> import asyncio
    >>> from rl.envs.interface import environment, episode, scripted_model
    >>> task = environment.Task("add", 0, "train", ({"role": "user", "content": "1 + 2 = ?"},), answer="3")
    >>> play = episode.conversation(score=lambda task, messages, state: {"reward": float(messages[-1]["content"] == task.answer)})
    >>> model = scripted_model.ScriptedModel(scripted_model.always(task.answer))
    >>> asyncio.run(play(task, model)), len(model.calls)
    ({'reward': 1.0}, 1)

A reply depends on the seed, the messages, the tools, and the number of the call alone, as that of a real model does: equal prompts get
equal replies, in any order of concurrent calls. A program whose scores differ between two runs is not deterministic.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence

from rl.envs.interface import environment, episode

Policy = Callable[[Sequence[Mapping], Sequence[Mapping], random.Random], dict]  # (messages, tools, rng) -> a message
WORDS = "yes no 0 1 42 the answer is stone [a] <guess>stone</guess> ``` \\boxed{7} #### é —".split()
MAX_DEPTH = 3  # of random arguments
_VALUES = {
    "integer": lambda rng: rng.randint(-2, 9),
    "number": lambda rng: rng.randint(-8, 8) / 4,
    "null": lambda rng: None,
    "boolean": lambda rng: rng.random() < 0.5,
    "string": lambda rng: " ".join(rng.choices(WORDS, k=rng.randint(0, 3))),
}


class ScriptedModel:
    """Implements `episode.Model` by a policy. `calls` has (messages, tools, reply) of each call, in the order of arrival.

    `max_calls` and `max_tokens` bound an episode as a run does: beyond them, `chat` raises BudgetSpent. A token is a word. With `pauses`, a
    reply takes as many turns of the event loop as this generator draws, below 4: concurrent episodes then interleave.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int = 0,
        *,
        max_calls: int = 64,
        max_tokens: int = 2**16,
        pauses: random.Random | None = None,
    ):
        self.calls: list[tuple[list[dict], list[dict], dict]] = []
        self._policy, self._seed, self._pauses = policy, seed, pauses
        self._max_calls, self._tokens_left = max_calls, max_tokens

    async def chat(
        self,
        messages: Sequence[Mapping],
        *,
        tools: Sequence[Mapping] = (),
        max_tokens: int | None = None,
        number: int = 0,
        trains: bool = True,
    ) -> episode.Reply:
        """Returns the policy's reply to `messages`. A reply longer than `max_tokens` words is cut, and loses its tool calls. `trains` has no effect."""
        given = json.dumps([list(messages), list(tools)])  # a copy, and an error for objects that no server takes
        if len(self.calls) >= self._max_calls or self._tokens_left <= 0:
            raise episode.BudgetSpent("the episode has no call or token left")
        rng = random.Random(environment.stable_hash(f"{self._seed}/{number}/{given}"))
        seen, schemas = json.loads(given)
        message = {"role": "assistant"} | self._policy(seen, schemas, rng)
        words, room = (message["content"] or "").split(" "), min(self._tokens_left, max_tokens or self._tokens_left)
        is_cut = len(words) > room
        if is_cut:
            message = {"role": "assistant", "content": " ".join(words[:room])}
        self._tokens_left -= (num_tokens := min(len(words), room))
        self.calls.append((*json.loads(given), message))
        for _ in range(self._pauses.randrange(4) if self._pauses else 0):
            await asyncio.sleep(0)
        num_prompt_tokens = sum(len(str(one["content"]).split()) for one in messages)
        return episode.Reply(message, "length" if is_cut else "stop", num_prompt_tokens, num_tokens)


def always(text: str) -> Policy:
    """Returns the policy that answers every call with `text`."""
    return lambda messages, tools, rng: {"content": text}


def in_order(*replies: str | dict) -> Policy:
    """Returns the policy that answers the first call with the first reply, and so on; the last one stays.

    A reply is a text, an assistant message, or {"tool": name, "arguments": {...}}. The number of assistant messages in a conversation
    chooses the reply.
    """

    def policy(messages, tools, rng) -> dict:
        reply = replies[min(sum(one["role"] == "assistant" for one in messages), len(replies) - 1)]
        if isinstance(reply, str):
            return {"content": reply}
        if "tool" in reply:
            return {"content": ""} | call(reply["tool"], reply.get("arguments", {}), rng)
        return {"content": ""} | reply

    return policy


def random_words(messages: Sequence[Mapping], tools: Sequence[Mapping], rng: random.Random) -> dict:
    """A policy: calls a tool with arguments that fit its schema, or answers with words, some of them of the conversation."""
    if tools and rng.random() < 0.7:
        calls = [_random_call(rng.choice(tools)["function"], rng) for _ in range(rng.choice((1, 1, 2)))]
        return {"content": "", "tool_calls": [one for call in calls for one in call["tool_calls"]]}
    seen = [word for one in messages for word in str(one["content"]).split()[-40:]]
    words = [rng.choice(seen if seen and rng.random() < 0.5 else WORDS) for _ in range(rng.randint(0, 12))]
    return {"content": " ".join(words)}


def call(name: str, arguments: Mapping, rng: random.Random) -> dict:
    """Returns the part of an assistant message that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"call_{rng.getrandbits(32):08x}", "type": "function", "function": function}]}


def _random_call(function: Mapping, rng: random.Random) -> dict:
    schema = function.get("parameters") or {"type": "object"}
    chance = rng.random()  # of mistakes that models make
    arguments = {} if chance < 0.05 else {"unknown": 1} if chance < 0.1 else random_value(schema, rng)
    made = call(function["name"] if chance < 0.97 else "unknown", arguments, rng)
    if chance > 0.99:
        made["tool_calls"][0]["function"]["arguments"] = '{"cut": '
    return made


def random_value(schema: Mapping, rng: random.Random, depth: int = 0):
    """Returns a random value that fits a JSON schema. Only the kinds of schema that `tools.of` makes are understood; others count as strings."""
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        required, properties = schema.get("required", ()), schema.get("properties") or {}
        chosen = [name for name in properties if name in required or (depth < MAX_DEPTH and rng.random() < 0.5)]
        return {name: random_value(properties[name], rng, depth + 1) for name in chosen}
    if kind == "array":
        count = rng.randint(0, 3) if depth < MAX_DEPTH else 0
        return [random_value(schema.get("items") or {}, rng, depth + 1) for _ in range(count)]
    return _VALUES.get(kind, _VALUES["string"])(rng)
