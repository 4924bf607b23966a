"""Episodes of the shipped environments are equal to their replays: no honest one is refused."""

import asyncio

import pytest

from rl import envs
from rl.envs.host import host as host_lib
from tests.support import episodes

PROGRAMS = (
    "print(1)|import random, time\nprint(random.random(), time.time(), object())|"
    "x = globals().get('x', 0) + 1\nx|1 / 0|print('y' * 10**5)|"
    "found = llm_batch(['sub: a', 'sub: b', 'sub: a'])\nprint(found)|"
    "done(len(context)) if 'done' in globals() else f|"
    "def update(params, grads, state, step): return [p - 2 * g for p, g in zip(params, grads)]\ndef f(xs): return sum(xs)"
).split("|")
WRITTEN = [f"```python\n{code}\n```" for code in PROGRAMS] + ["Answer: 3", "run_tests", "read shop/words.py"]
CASES = {  # {environment: (its options, texts of the model)}; None: at random, with tool calls of any kind, cut ones, and bytes that are no text
    **dict.fromkeys(("wordle", "search", "folding", "user_sim"), ({}, None)),
    "code": ({}, WRITTEN),
    "python_tool": ({"protocol": "text", "turns": 4}, WRITTEN),
    "rlm": ({"lines": 8, "words": 8, "turns": 4}, WRITTEN),
    "speedrun": ({}, WRITTEN),
    "swe_toy": ({"protocol": "text", "turns": 3}, WRITTEN),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_replay_has_the_same_calls_and_scores(name):
    """Also at a validator, which gives programs more time."""
    (options, texts), limits = CASES[name], {"max_model_len": 16_000}
    kind = envs.load(name, **options).kind

    async def one(host, validator, index):
        own = limits | ({"max_tokens": 400} if texts else {})
        played = episodes.session(episodes.Backend(texts=texts), seed=index, limits=own)
        await episodes.assert_replayed(host, validator, played, name, index)

    async def run():
        hosts = [host_lib.Host(name, options, 0, kind=kind, limit_s=limit_s) for limit_s in (1, 5)]
        try:
            await asyncio.gather(*(one(*hosts, index) for index in range(24 if texts else 130)))
        finally:
            for host in hosts:
                await host.close()

    asyncio.run(run())
