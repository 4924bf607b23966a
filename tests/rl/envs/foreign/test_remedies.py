"""Errors of foreign code, and the remedy for each."""

import pytest

from rl.envs.foreign import remedies


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("ModuleNotFoundError: No module named 'textarena'", "--requirement"),
        ("ConnectionError: Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)", "network"),
        ("MissingKeyError: Missing required API key: EXA_API_KEY", "--variable"),
        ("KeyError: 'JUDGE_API_KEY'", "--variable"),
        ("ValueError: gym is unknown", "env.options"),
    ],
)
def test_the_remedy_of_a_loader(error, remedy):
    assert remedy in remedies.of_load(error)


def test_an_episode_that_wants_a_service_is_told_that_it_is_isolated():
    assert "--kind recorded" in remedies.of_episode("ConnectError: All connection attempts failed")
    assert not remedies.of_episode("KeyError: 'answer'")
