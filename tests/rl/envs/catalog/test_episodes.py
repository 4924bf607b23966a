"""Native environments with episodes: the same tasks in every process, equal replays, gold at the top, junk at the floor, no leaks."""

import asyncio
import functools
import hashlib
import json
import os
import random
import subprocess
import sys

import pytest

from models.text import tokenizer as tokenizer_lib
from rl import envs
from rl.envs.interface import scripted_model
from rl.learning.batch import conversations

# {case: (name, options, reward of gold, highest reward of junk)}
CASES = {
    "wordle": ("wordle", {}, 2.2, 0.2 + 1e-9),
    "wordle, small": ("wordle", {"letters": 3, "words": 50, "guesses": 4, "system_prompt": ""}, 2.2, 0.2 + 1e-9),
    "search": ("search", {}, 1.0, 0.0),
    "search, text": ("search", {"protocol": "text", "distractors": False, "results": 1, "system_prompt": ""}, 1.0, 0.0),
    "user_sim": ("user_sim", {}, 1.0, 0.0),
    "user_sim, model": ("user_sim", {"user": "model"}, 1.0, 0.0),
    "code": ("code", {"tests": 3}, 1.0, 0.0),
    "python_tool": ("python_tool", {}, 1.0, 0.0),
    "python_tool, text": ("python_tool", {"protocol": "text", "system_prompt": "", "turns": 3}, 1.0, 0.0),
    "swe_toy": ("swe_toy", {"protocol": "text", "turns": 4}, 1.0, 0.0),
    "rlm": ("rlm", {"lines": 40, "turns": 2}, 1.0, 0.0),
    "rlm, small": ("rlm", {"kind": "needle", "lines": 8, "words": 8, "system_prompt": "", "turns": 2}, 1.0, 0.0),
    "speedrun": ("speedrun", {}, 1.0, 0.0),
    "folding": ("folding", {"pages": 2, "entries": 3, "system_prompt": ""}, 1.0, 0.0),
}
JUNK = ("", "zzz", "\x00", "[" * 500, "9" * 5000, "<guess>[]</guess>", "\ud800", "answer: ", "```\n```", "{}" * 100)
DIGEST = """
from tests.rl.envs.catalog import test_episodes
print(*map(test_episodes.digest, test_episodes.CASES))
"""


@functools.cache
def load(case):
    name, options, *_ = CASES[case]
    return envs.load(name, **options)


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def play(env, task, policy, seed=0):
    """Returns (scores, calls) of an episode with a policy instead of a model."""
    model = scripted_model.ScriptedModel(policy, seed)
    return asyncio.run(env.play(task, model)), model.calls


def one_message(task, rng, is_decoy):
    """The demonstration of an environment that defines none, as rl/sft.py makes it."""
    return {"messages": [*task.messages, {"role": "assistant", "content": task.decoy if is_decoy else task.answer}]}


def digest(case):
    """Returns a hash of tasks, demonstrations, and episodes of a random policy."""
    env, found = load(case), []
    for index, split in ((0, "train"), (1, "train"), (5, "held_out")):
        task = env.make_task(index, split)
        demonstrate = env.demonstrate or (lambda task, rng, is_decoy: {})
        shown = [demonstrate(task, random.Random(3), is_decoy) for is_decoy in (False, True)]
        found.append([task.messages, task.answer, shown, play(env, task, scripted_model.random_words, index)])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def test_another_process_plays_the_same_episodes():
    variables = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    printed = subprocess.check_output([sys.executable, "-c", DIGEST], env=variables, text=True)
    assert printed.split() == [*map(digest, CASES)]


def test_gold_gets_the_reward_and_junk_the_floor(case):
    env, (_, _, best, floor) = load(case), CASES[case]
    for index, split in ((0, "train"), (1, "train"), (2, "held_out")):
        task = env.make_task(index, split)
        scores, calls = play(env, task, scripted_model.always(task.answer))
        assert scores["reward"] == pytest.approx(best) and all(isinstance(x, float) for x in scores.values())
        for junk in JUNK:
            found, _ = play(env, task, scripted_model.always(junk))
            assert 0.0 <= found["reward"] <= floor and found.keys() == scores.keys(), junk


def test_no_call_shows_the_answer_before_it_is_found(case):
    env = load(case)
    for index in range(5):
        task = env.make_task(index, "train")
        _, calls = play(env, task, scripted_model.always("zzz"))
        shown = json.dumps([messages for messages, *_ in calls])
        assert task.answer not in shown


def test_random_episodes_repeat(case):
    env = load(case)
    for index in range(4):
        task = env.make_task(index, "train")
        first, again = (play(env, task, scripted_model.random_words, index) for _ in range(2))
        assert first == again
        assert task == load(case).make_task(index, "train")  # an episode leaves the task as it was


def test_demonstrations_are_episodes(case):
    """The warm-up imitates exactly the messages that an episode has, on tokens of the embedded tokenizer."""
    env, tokenizer, solved = load(case), tokenizer_lib.byte_chatml(), {False: 0.0, True: 0.0}
    if not (env.demonstrate or env.make_task(0, "train").decoy):
        pytest.skip("this variant has no demonstrations")
    demonstrate = env.demonstrate or one_message
    for index in range(12):
        for is_decoy in (False, True):
            task, said = env.make_task(index, "train"), {}
            for seed in range(8):  # of folding, each shows one branch
                messages = demonstrate(task, random.Random(seed if "folding" in case else index), is_decoy)["messages"]
                said |= {json.dumps(messages[:at]): m for at, m in enumerate(messages) if m["role"] == "assistant"}
            shown = demonstrate(task, random.Random(index), is_decoy)
            scores, calls = play(env, task, lambda messages, tools, rng: said[json.dumps(messages)])  # noqa: B023
            assert shown["messages"] in [[*messages, reply] for messages, _, reply in calls]
            assert calls[-1][1] == shown.get("tools", [])
            solved[is_decoy] += scores["reward"]
            conversations.tree(tokenizer, **conversations.parse(shown), max_length=8192)
    assert solved[False] > solved[True]


def test_splits_share_no_prompt(case):
    env = load(case)
    train, held_out = (
        {json.dumps(env.make_task(i, split).messages) for i in range(40)} for split in ("train", "held_out")
    )
    assert not train & held_out and len(train) > 30
