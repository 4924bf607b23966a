"""The episodes of a group: equal first prompts are one request, and every completion has the seed of its own episode."""

import asyncio

import pytest

from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from rl.envs.host import group as group_lib
from rl.envs.host import host as host_lib
from rl.protocol import lease
from tests.support import episodes

GROUP = lease.Lease(1, 0, "train", 0, seed=2**32 - 2, num_samples=4, temperature=1.0, min_version=0)
TASK = rollout_lib.TaskRef("played", 0, 0, 0)


class Host:
    """Plays an episode of two turns; `prompts` has the first prompt of each sample. The first `changing` episodes begin again with another."""

    def __init__(self, prompts, changing=0):
        self.prompts, self.changing = prompts, changing

    async def play(self, session, index, split):
        if not self.prompts:
            return host_lib.Played(dict(host_lib.FAILED), 0.0, "HarnessError: uv is missing")
        if self.changing:
            self.changing -= 1
            await session.chat([{"role": "user", "content": "other"}])
            session.restart()
        messages = [{"role": "user", "content": self.prompts[session.sample]}]
        reply = await session.chat(messages)
        await session.chat([*messages, reply.message, {"role": "user", "content": "go on"}])
        return host_lib.Played({"reward": 1.0}, 0.0)


def play(prompts, *, failing=(), changing=0):
    """Returns (the rollouts of a group, the calls as (prompt, seed, count))."""
    calls = []

    async def generate(call, count):
        calls.append((episodes.TOKENIZER.decode(call.prompt), call.seed, count))
        await asyncio.sleep(0.01)
        if any(text in calls[-1][0] for text in failing):
            raise ConnectionError("no server")
        seeds = [(call.seed + number) % 2**32 for number in range(count)]
        tokens = [[*episodes.TOKENIZER.encode(f"seed {seed}"), episodes.TOKENIZER.eos_id] for seed in seeds]
        return [completion_lib.Completion(one, [0.0] * len(one), [0] * len(one), 0, "stop", b"") for one in tokens]

    player = group_lib.Player(Host(prompts, changing), episodes.TOKENIZER, episodes.LIMITS)
    return asyncio.run(player.play(generate, GROUP, TASK, "")), calls


def test_equal_first_prompts_are_one_request_with_the_seeds_of_all_episodes():
    rollouts, calls = play(["guess"] * 4)
    assert [(seed, count) for _, seed, count in calls if count > 1] == [(2**32 - 2, 4)]
    assert sorted(seed for _, seed, count in calls if count == 1) == [0, 1, 2**32 - 2, 2**32 - 1]  # second turns
    for number, rollout in enumerate(rollouts):
        seed = (2**32 - 2 + number) % 2**32
        assert rollout.seed == seed
        assert episodes.TOKENIZER.decode(rollout.tokens).count(f"seed {seed}") == 2


def test_an_episode_that_begins_otherwise_asks_for_itself():
    rollouts, calls = play(["guess", "guess", "other", "guess"])
    assert [count for text, _, count in calls if "go on" not in text] == [4, 4]
    assert "seed 0" in episodes.TOKENIZER.decode(rollouts[2].tokens)


@pytest.mark.parametrize("failing", ["guess", "go on"])
def test_an_error_of_the_servers_ends_the_group(failing):
    with pytest.raises(ConnectionError, match="no server"):
        play(["guess"] * 4, failing=[failing])


def test_the_reason_of_an_episode_without_a_call_is_shown():
    with pytest.raises(ValueError, match="failed before it asked the model: HarnessError: uv is missing"):
        play([])


def test_an_episode_that_makes_other_calls_when_it_begins_again_has_one_more_attempt():
    rollouts, _ = play(["guess"] * 4, changing=4)
    assert [(rollout.sample, rollout.num_branches) for rollout in rollouts] == [(number, 1) for number in range(4)]
    assert not any("other" in episodes.TOKENIZER.decode(rollout.tokens) for rollout in rollouts)
    with pytest.raises(ValueError, match="made other calls when it ran again"):
        play(["guess"] * 4, changing=8)
