"""Episodes of the shipped environments are equal to their replays: no honest one is refused."""

import asyncio

import pytest

from rl import envs
from rl.envs.host import host as host_lib
from tests.support import episodes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wordle", "search", "folding", "user_sim"])
def test_a_replay_has_the_same_calls_and_scores(name):
    """Replies are drawn at random, with tool calls of any kind, cut ones, and bytes that are no text."""
    env, (located, options) = envs.load(name, seed=0), envs.locate(name, {})

    async def one(host, index):
        played = episodes.session(episodes.Backend(), seed=index, limits={"max_model_len": 16_000})
        await episodes.assert_replayed(host, host, played, name, index)

    async def run():
        host = host_lib.Host(located, options, 0, kind=env.kind, limit_s=1)
        try:
            await asyncio.gather(*(one(host, index) for index in range(130)))
        finally:
            await host.close()

    asyncio.run(run())
