"""Episodes of the shipped environments are equal to their replays: no honest one is refused."""

import asyncio
import dataclasses

import pytest

from inference.rollouts import rollout as rollout_lib
from rl import envs
from rl.envs.host import host as host_lib
from rl.envs.recording import rollouts, session, tape
from tests.support import episodes

LIMITS = dataclasses.replace(episodes.LIMITS, max_model_len=16_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wordle", "search", "folding", "user_sim"])
def test_a_replay_has_the_same_calls_and_scores(name):
    """Replies are drawn at random, with tool calls of any kind, cut ones, and bytes that are no text."""
    env, (located, options) = envs.load(name, seed=0), envs.locate(name, {})

    async def one(host, index):
        played = episodes.session(episodes.Backend(), seed=index, limits={"max_model_len": LIMITS.max_model_len})
        found = await host.play(played, index, "train")
        origin = rollouts.Origin(rollout_lib.TaskRef(name, index, index, 0), 1, 1.0)
        made = rollouts.of_episode(played, origin, found.scores)
        taped = tape.of_rollouts(made, episodes.TOKENIZER.stop_ids)
        again = session.Session(episodes.TOKENIZER, None, LIMITS, seed=index, sample=0, tape=taped)
        assert (await host.play(again, index, "train")).scores == found.scores and not found.error
        assert tape.difference(again, made) is None

    async def run():
        host = host_lib.Host(located, options, 0, kind=env.kind, limit_s=1)
        try:
            await asyncio.gather(*(one(host, index) for index in range(130)))
        finally:
            await host.close()

    asyncio.run(run())
